"""Masks of transformers' models: a window's is made a block of queries at a time, by positions, not as T x T."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from sinkutils.model.flash import PositionMask

LONG = 4096  # positions from which a window's mask of T x T is not made


class WindowMask(PositionMask):
    """What transformers asked for as the mask of a window, or of chunks that do not slide (Llama 4)."""

    def __init__(self, asked: dict) -> None:
        self.window = asked["local_size"]
        device = torch.device(asked.get("device", "cpu"))
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)  # of whichever sequence and head

        def seen(rows, columns):
            mask = asked["mask_function"](zero, zero, rows[None, None, :, None], columns[None, None, None])
            return mask.expand(1, 1, len(rows), len(columns))[0, 0]

        super().__init__(seen, asked["q_length"], device)

    @property
    def chunked(self) -> bool:
        """Whether the query after the first window, if there is one, does not see the key before it."""
        before, after = self.positions[self.window - 1 : self.window + 1].split(1)
        return self.window > 1 and not bool(self.seen(after, before))


def mask(**asked: Any) -> Tensor | None:
    """transformers' mask; where it hides what is outside a window, `by_position` finds it as positions.

    From `LONG` positions on that is all there is: its elements are nan then, so that nothing can read them unseen.
    """
    if "q_length" not in asked:
        raise ImportError("measuring models of others needs transformers 5.4 or later: pip install -U transformers")
    length, window = asked["q_length"], asked.get("local_size")
    other = any(asked.get(name) for name in ("use_vmap", "q_offset", "kv_offset"))
    other = other or not asked.get("allow_is_causal_skip", True) or asked.get("attention_mask") is not None
    if other or window is None or length < window or asked["kv_length"] != length:
        return sdpa_mask(**asked)
    positions = WindowMask(asked)
    if length < LONG:
        whole = sdpa_mask(**asked)
    else:
        nan = torch.full((), torch.nan, device=positions.positions.device)
        whole = nan.expand(asked["batch_size"], 1, length, length)
    whole.by_position = positions  # type: ignore[union-attr]
    return whole


def by_position(mask: Tensor | None, name: str) -> Tensor | PositionMask | None:
    """A mask as what it was made from, if that is a window. Raises ValueError for one of nan that a model has cut."""
    window = getattr(mask, "by_position", None)
    if window is None and mask is not None and mask.shape[-1] >= LONG and bool(mask[..., -1, -1].isnan().any()):
        raise ValueError(f"{name} changes the masks of its windows, which are made for at most {LONG - 1} positions")
    return mask if window is None else window


def window_of(mask: Tensor) -> int | None:
    """The window of a mask (.., T, T), booleans or added to the logits, if that is what it is."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    width = int(seen[..., -1, :].flatten(0, -2).any(dim=0).sum())
    if width == mask.shape[-1]:
        return None
    whole = seen.flatten(0, -3).any(dim=0)
    return width if torch.equal(whole, torch.ones_like(whole).tril().triu(1 - width)) else None
