"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output.

A kernel is compared with dense rows before its first number is used (`trusted`): a private op can
change, and one backend's log-sum-exp is in base 2 (pytorch #181645).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.model.attention import AttentionSpec, added_to_logits

ROWS = 512  # queries a call where there is a mask, so that no mask of T x T is made
TRUST: dict[tuple[Any, ...], bool] = {}  # what `trusted` has found


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
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif name == "_scaled_dot_product_flash_attention":
        out, lse, *_ = op(q, k, v, 0.0, causal, scale=scale)
    else:
        if mask is not None:  # the kernel wants rows that start at multiples of 16 elements
            mask = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
            mask = mask.expand(*q.shape[:3], k.shape[2])
        out, lse, *_ = op(q, k, v, mask, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # some pad their rows


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
            seen, keys = mask[..., rows, :], slice(None)
        out, lse = fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=seen, scale=scale)
        outs.append(out)
        masses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(masses, dim=2)


def trusted(kind: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel is there and gives the rows of a dense softmax; compared once.

    kind of mask: "causal", "window", or "mask", one that is added to the logits. A graph under
    compilation cannot look at numbers: it trusts what was compared before.
    """
    key = (kind, device, dtype, head_dim)
    if key in TRUST or torch.compiler.is_compiling():
        return TRUST.get(key, False)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            rows, expected = _side_by_side(*key)
    except (AttributeError, RuntimeError):
        # It is not in this build, or not for this device, dtype or head dimension.
        TRUST[key] = False
        return False
    tolerance = 1e-3 if dtype.itemsize >= 4 else 3e-2
    TRUST[key] = torch.allclose(rows.double(), expected, rtol=tolerance, atol=tolerance)
    if not TRUST[key]:
        warnings.warn(
            f"the fused kernel ({device.type}, {dtype}, {kind} attention) returned other row sums "
            "than the dense form, and is not used",
            stacklevel=3,
        )
    return TRUST[key]


def _side_by_side(
    kind: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Tensor, Tensor]:
    """What the kernel returns, and dense rows in float64: out and log-sum-exp, (B, H, T, D + 1)."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 2, 531, head_dim)  # more keys than a block of a kernel's, and no multiple of it
    q, k, v = torch.randn(shape, generator=generator).to(device, dtype)
    spec, line = AttentionSpec(), None
    if kind == "window":
        spec = AttentionSpec(window=33)
    elif kind == "mask":  # with a position term by distance
        spec, line = AttentionSpec(prefix=40), k[0, 0, :, :1].T
    added, _ = added_to_logits(q, k, spec, line)
    out, lse = fused(q, k, v) if kind == "causal" else fused_rows(q, k, v, added[None])
    logits = q.double() @ k.double().mT * head_dim**-0.5 + added.double()
    dense = torch.cat([logits.softmax(-1) @ v.double(), logits.logsumexp(-1, keepdim=True)], dim=-1)
    return torch.cat([out, lse[..., None]], dim=-1), dense
