"""Masks of windows, made a block of queries at a time by positions, and not as T x T."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from sinkutils.measuring.families import shown
from sinkutils.model.flash import PositionMask

LONG = 4096  # positions from which a window's mask of T x T is not made


class WindowMask(PositionMask):
    """What transformers asked for as the mask of a window, or of chunks that do not slide."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.window = kwargs["local_size"]
        sees = kwargs["mask_function"]
        device = torch.device(kwargs.get("device", "cpu"))
        # transformers' rules take indices of sequence, head, query and key that broadcast.
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)  # any sequence and head

        def seen(rows: Tensor, columns: Tensor) -> Tensor:
            mask: Tensor = sees(zero, zero, rows[None, None, :, None], columns[None, None, None])
            return mask.expand(1, 1, len(rows), len(columns))[0, 0]

        super().__init__(seen, kwargs["q_length"], device)

    @property
    def chunked(self) -> bool:
        """Whether it does not slide (Llama 4): the query behind the first one sees no key of it."""
        before, after = torch.tensor_split(self.positions[self.window - 1 : self.window + 1], 2)
        return self.window > 1 and not bool(self.seen(after, before))


def mask(**kwargs: Any) -> Any:
    """transformers' mask. Of one that hides what is outside a window, `by_position` finds the rule.

    From `LONG` positions on that is all there is: the elements are nan then, so that nothing can
    read them unseen.
    """
    whole: Any
    if "q_length" not in kwargs:  # transformers 4
        positions = kwargs["cache_position"]
        kwargs |= {"q_length": len(positions), "device": positions.device}
    length, window = kwargs["q_length"], kwargs.get("local_size")
    # Without a cache, padding or a rule that takes one position at a time (vmap).
    by_rule = (
        window is not None
        and window <= length == kwargs["kv_length"]
        and kwargs.get("attention_mask") is None
        and not kwargs.get("use_vmap")
        and kwargs.get("allow_is_causal_skip", True)
    )
    # A model may look at a mask, or cut it. Below LONG it is all there; beyond, nobody has paid for
    # T x T elements, and whoever reads them gets nan.
    if by_rule and length >= LONG:
        nan = torch.full((), torch.nan, device=kwargs.get("device", "cpu"))
        whole = nan.expand(kwargs["batch_size"], 1, length, length)
    else:
        whole = sdpa_mask(**kwargs)
    if by_rule:
        whole.by_position = WindowMask(kwargs)
    return whole


def by_position(mask: Tensor | None, name: str) -> Tensor | PositionMask | None:
    """A mask as what it was made from, if that is a window.

    Raises ValueError for one of nan that a model has cut.
    """
    window: PositionMask | None = getattr(mask, "by_position", None)
    if window is not None:
        return window
    if mask is not None and mask.shape[-1] >= LONG and mask[..., -1, -1].isnan().any():
        raise ValueError(
            f"{name} changes the masks of its windows, which are made for at most {LONG - 1} "
            "positions"
        )
    return mask


def window_of(mask: Tensor) -> int | None:
    """The window of a mask (.., T, T), booleans or added to the logits, if that is what it is."""
    seen = shown(mask)
    length = mask.shape[-1]
    in_any = seen.reshape(-1, *seen.shape[-2:]).any(dim=0)  # text, of any head: (T, T)
    width = int(in_any[-1].sum())  # keys that the last query sees
    if width == length:
        return None
    band = torch.ones_like(in_any).tril().triu(1 - width)
    return width if torch.equal(in_any, band) else None
