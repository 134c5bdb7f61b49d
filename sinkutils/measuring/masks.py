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

    def __init__(self, asked: dict[str, Any]) -> None:
        self.window: int = asked["local_size"]
        device = torch.device(asked.get("device", "cpu"))
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)  # of whichever sequence and head

        def seen(rows: Tensor, columns: Tensor) -> Tensor:
            mask = asked["mask_function"](zero, zero, rows[None, None, :, None], columns[None, None, None])
            return mask.expand(1, 1, len(rows), len(columns))[0, 0]

        super().__init__(seen, asked["q_length"], device)

    @property
    def chunked(self) -> bool:
        """Whether the query after the first window does not see the key before it."""
        before, after = self.positions[self.window - 1 : self.window], self.positions[self.window : self.window + 1]
        return self.window > 1 and not bool(self.seen(after, before).all())


def mask(**asked: Any) -> Tensor | None:
    """transformers' mask; where it hides what is outside a window, `by_position` finds it as positions.

    From `LONG` positions on that is all there is: its elements are nan then, so that nothing can read them unseen.
    """
    if "q_length" not in asked:
        raise ImportError("measuring models of others needs transformers 5.4 or later: pip install -U transformers")
    length, padding = asked["q_length"], asked.get("attention_mask")
    plain = asked.get("allow_is_causal_skip", True) and not asked.get("use_vmap") and asked["kv_length"] == length
    offset = asked.get("q_offset") or asked.get("kv_offset")
    padded = padding is not None and not bool(padding.all())
    if asked.get("local_size") is None or length < asked["local_size"] or not plain or offset or padded:
        return sdpa_mask(**asked)
    window = WindowMask(asked)
    if length < LONG:
        whole = sdpa_mask(**asked)
    else:
        whole = torch.full((), torch.nan, device=window.positions.device).expand(asked["batch_size"], 1, length, length)
    whole.by_position = window  # type: ignore[union-attr]
    return whole


def by_position(mask: Tensor | None, name: str) -> Tensor | PositionMask | None:
    """A mask as what it was made from, if that is a window. Raises ValueError for one of nan that a model has cut."""
    window: PositionMask | None = getattr(mask, "by_position", None)
    if window is None and mask is not None and mask.shape[-1] >= LONG and bool(mask[..., -1, -1].isnan().any()):
        raise ValueError(f"{name} changes the masks of its windows, which are made for at most {LONG - 1} positions")
    return mask if window is None else window


def window_of(mask: Tensor) -> int | None:
    """The window of a mask (.., T, T) that a model has made from the one it was given and one of its own (Doge)."""

    def seen(part: Tensor) -> Tensor:
        part = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        return part.flatten(0, -3).any(dim=0)

    width = int(seen(mask[..., -1:, :]).sum())
    if width == mask.shape[-1]:
        return None
    whole = seen(mask)
    return width if torch.equal(whole, torch.ones_like(whole).tril().triu(1 - width)) else None


def rows_to_compare(seen: Tensor, count: int) -> Tensor:
    """Up to so many queries, evenly among those that see any of the keys in question, first and last included.

    seen (.., T, K) booleans: who sees these keys; returns positions (R,), sorted, the very last one among them.
    """
    rows = seen.reshape(-1, *seen.shape[-2:])[0].any(dim=-1).nonzero()[:, 0]
    chosen = rows[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]
    return torch.cat([chosen, chosen.new_tensor([seen.shape[-2] - 1])]).unique()
