"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output.

A kernel is compared with dense rows before its first number is used (`trusted`): a private op can
change, and one backend's log-sum-exp is in base 2 (pytorch #181645).
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from sinkutils.model.attention import LOGARITHMS, AttentionSpec, added_to_logits

HAS_TRITON = importlib.util.find_spec("triton") is not None  # what compiles FlexAttention for CUDA
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


def trusted(
    kernel: str, kind: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    """Whether a kernel is there and gives the rows of a dense softmax; compared once.

    kernel: "fused" or "flex". kind of mask: "causal", of "fused" also "window", or "mask", one that
    is added to the logits. A graph under compilation cannot look at numbers: it trusts what was
    compared before, so `flex_serves` is asked before a model is compiled.
    """
    key = (kernel, kind, device, dtype, head_dim)
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
            f"the {kernel} kernel ({device.type}, {dtype}, {kind} attention) returned other row "
            "sums than the dense form, and is not used",
            stacklevel=3,
        )
    return TRUST[key]


def _side_by_side(
    kernel: str, kind: str, device: torch.device, dtype: torch.dtype, head_dim: int
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
    if kernel == "flex":
        out, lse = _flex_pass(q, k, v, spec)
    elif kind == "causal":
        out, lse = fused(q, k, v)
    else:
        out, lse = fused_rows(q, k, v, added[None])
    logits = q.double() @ k.double().mT * head_dim**-0.5 + added.double()
    dense = torch.cat([logits.softmax(-1) @ v.double(), logits.logsumexp(-1, keepdim=True)], dim=-1)
    return torch.cat([out, lse[..., None]], dim=-1), dense


def flex_serves(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    """Whether an operation is a softmax over log f(s) of the causal keys, with a sum or without.

    And FlexAttention is compiled here, and `trusted`.
    """
    if spec.similarity not in LOGARITHMS or spec.normalizer not in ("sum", "none"):
        return False
    if spec.window is not None or spec.prefix > 1:
        return False
    compiled = device.type == "cuda" and HAS_TRITON and dtype != torch.float64 and head_dim >= 16
    return compiled and trusted("flex", "causal", device, dtype, head_dim)


def flex(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Softmax over log f(s), which is f(s) / sum f(s); without a sum, times that sum.

    sum_j f(s_j) v_j = out exp(lse), which overflows where the sum of f does.
    q: (B, H, T, D), k and v: (B, H, S, D), k* in front of the keys if there is one.
    """
    out, lse = _flex_pass(q, k, v, spec)
    return out if spec.normalizer == "sum" else out * lse.exp()[..., None].to(out.dtype)


def _flex_pass(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and log-sum-exp (B, H, T) of the softmax over log f(s)."""
    logarithm, logit_bias = LOGARITHMS[spec.similarity], spec.logit_bias

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        logs: Tensor = logarithm(s + logit_bias)
        return logs

    # A graph under compilation makes its own mask (the cache is out of its reach, and it would warn
    # of that) and compiles the kernel with the rest; on a CPU the kernel is dense.
    inside = torch.compiler.is_compiling()
    make_mask = _causal_mask.__wrapped__ if inside else _causal_mask
    mask = make_mask(q.shape[2], k.shape[2], q.device)
    function: Any = flex_attention
    if not inside and q.device.type != "cpu":
        function = _compiled_flex(spec)
    out, aux = function(q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@functools.cache
def _compiled_flex(spec: AttentionSpec) -> Any:
    """FlexAttention compiled for one variant: one graph or an error, never a dense fallback."""
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    # All variants count as recompilations of one function, of which PyTorch allows 8.
    return torch._dynamo.config.patch(recompile_limit=64)(compiled)


@functools.lru_cache(maxsize=16)
def _causal_mask(length: int, keys: int, device: torch.device) -> BlockMask:
    """Which key each query sees; k*, if there is one more key than queries, every one."""
    return create_block_mask(
        lambda b, h, i, j: j - (keys - length) <= i, None, None, length, keys, device=device
    )
