"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output.

These ops are private: one can change or be missing, and one backend's log-sum-exp is in base 2
(pytorch #181645). Who uses a kernel compares its first numbers with exact rows
(`measuring.fused.proves_right`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 512  # queries a call where there is a mask, so that no mask of T x T is made


class PositionMask:
    """A mask that is a function of positions, made for a block of queries at a time: no T x T."""

    def __init__(
        self, seen: Callable[[Tensor, Tensor], Tensor], length: int, device: torch.device
    ) -> None:
        self.seen = seen  # 0-based positions (R,) and (S,) -> booleans (R, S)
        self.positions = torch.arange(length, device=device)


def kernel_for(device: str, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    """Which of PyTorch's kernels `fused` calls, by name. Raises RuntimeError where none fits."""
    if device == "cpu":
        return "_scaled_dot_product_flash_attention_for_cpu"
    if device != "cuda" or dtype == torch.float64:
        raise RuntimeError(f"there is no fused kernel for {dtype} on {device}")
    if dtype in (torch.float16, torch.bfloat16) and head_dim <= 256 and not masked:
        return "_scaled_dot_product_flash_attention"
    return "_scaled_dot_product_efficient_attention"


def fused(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and natural log-sum-exp (B, H, T) of softmax attention.

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen;
    None is causal. scale: of the logits, 1/sqrt(D) unless given. Raises RuntimeError if no kernel
    fits, and what a missing op raises.
    """
    causal = mask is None
    name = kernel_for(q.device.type, q.dtype, q.shape[-1], not causal)
    op = getattr(torch.ops.aten, name)
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    if q.device.type == "cpu":
        # Called by its private name the op takes the last dimension for contiguous, and is wrong
        # where it is not.
        q, k, v = map(_last_contiguous, (q, k, v))
        out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif name == "_scaled_dot_product_flash_attention":
        out, lse, *_ = op(q, k, v, 0.0, causal, scale=scale)
    else:
        if mask is not None:  # the kernel wants rows that start at multiples of 16 elements
            keys = mask.shape[-1]
            padded = F.pad(mask.to(q.dtype), (0, -keys % 16))
            mask = padded[..., :keys].expand(*q.shape[:3], k.shape[2])
        out, lse, *_ = op(q, k, v, mask, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # some pad their rows


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def fused_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: PositionMask | Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`fused` under a mask, `ROWS` queries at a time.

    A mask that is a tensor broadcasts to (B, H, T, S). Of one that is a function of positions only
    the keys that these queries see are read.
    """
    outs, masses = [], []
    for start in range(0, q.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        if isinstance(mask, PositionMask):
            seen = mask.seen(mask.positions[rows], mask.positions)
            columns = seen.any(dim=0).nonzero()[:, 0]
            keys = slice(columns[0], columns[-1] + 1)
            seen = seen[:, keys]
        else:
            seen = mask[..., rows, :]
            keys = slice(None)
        out, lse = fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=seen, scale=scale)
        outs.append(out)
        masses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(masses, dim=2)
