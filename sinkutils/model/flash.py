"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output (flash attention).

A kernel is compared with dense rows before its first number is used (`trusted`): a private op can change, and one
backend's log-sum-exp is in base 2 (pytorch #181645).
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

from sinkutils.model.attention import LOGARITHMS, AttentionSpec, added_to_logits, visible

HAS_TRITON = importlib.util.find_spec("triton") is not None  # what compiles FlexAttention for CUDA
ROWS = 512  # queries a call where there is a mask, so that no mask of T x T is made
TRUST: dict[tuple, bool] = {}  # what `trusted` has found


class PositionMask:
    """A mask that is a function of positions, of which a block of queries is made at a time: no T x T."""

    def __init__(self, seen: Callable, length: int, device: torch.device) -> None:
        self.seen = seen  # 0-based positions (R,) and (S,) -> booleans (R, S)
        self.positions = torch.arange(length, device=device)


def kernel_for(device: str, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    """Which of PyTorch's kernels `fused` calls on a type of device, by name. Raises RuntimeError where none fits."""
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

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen; None is causal.
    scale: of the logits, 1/sqrt(D) unless given. Raises RuntimeError if no kernel fits, and what a missing op raises.
    """
    causal = mask is None
    name = kernel_for(q.device.type, q.dtype, q.shape[-1], not causal)
    op = getattr(torch.ops.aten, name)
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    if q.device.type == "cpu":
        # Called by its private name the op takes the last dimension for contiguous, and is wrong where it is not.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if name == "_scaled_dot_product_flash_attention":
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
    """`fused` under a mask, `ROWS` queries at a time and, where the mask is one of positions, the keys that they see.

    A mask that is a tensor broadcasts to (B, H, T, S).
    """
    parts = []
    for rows in torch.arange(q.shape[2], device=q.device).split(ROWS):
        if isinstance(mask, PositionMask):
            seen = mask.seen(rows, mask.positions)
            columns = seen.any(dim=0).nonzero()[:, 0]
            keys = slice(columns[0], columns[-1] + 1)
            seen = seen[:, keys]
        else:
            seen, keys = mask[..., rows, :], slice(None)
        parts.append(fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=seen, scale=scale))
    outs, masses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(masses, dim=2)


def trusted(
    kernel: str, kind: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    """Whether a kernel is there and gives the rows of a dense softmax under a kind of mask; compared once.

    kernel: "fused" or "flex". kind: "causal", "window", "prefix" (flex), or "mask", one that is added to the logits.
    A graph under compilation cannot look at numbers: it trusts what was compared before, so `flex_serves` is asked
    before a model is compiled.
    """
    key = (kernel, kind, device, dtype, head_dim)
    if key in TRUST or torch.compiler.is_compiling():
        return TRUST.get(key, False)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            got, expected = _side_by_side(*key)
    except (
        AttributeError,
        RuntimeError,
    ):  # not in this build, or not for this device, dtype or head dimension
        TRUST[key] = False
        return False
    tolerance = 1e-3 if dtype.itemsize >= 4 else 3e-2
    TRUST[key] = torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance)
    if not TRUST[key]:
        warnings.warn(
            f"the {kernel} kernel ({device.type}, {dtype}, {kind} attention) returned other row sums than the dense "
            "form, and is not used",
            stacklevel=3,
        )
    return TRUST[key]


def _side_by_side(
    kernel: str, kind: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in one tensor (B, H, T, D + 1), of the kernel and of dense rows in float64."""
    generator, length = (
        torch.Generator().manual_seed(0),
        531,
    )  # keys: more than a block of a kernel's, of no multiple
    q, k, v = (
        torch.randn(2, 2, length, head_dim, generator=generator).to(device, dtype) for _ in range(3)
    )
    spec = AttentionSpec(
        window=33 if kind == "window" else None, prefix=40 if kind in ("prefix", "mask") else 1
    )
    line = k[0, 0, :, :1].T.contiguous()  # a position term by distance, for those that take one
    added, _ = added_to_logits(q, k, spec, line if kernel == "flex" or kind == "mask" else None)
    if kernel == "flex":
        out, lse = _flex_pass(q, k, v, spec, line, power=1.0)
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
    """Whether an operation is a softmax over log f(s) for which FlexAttention is compiled and `trusted`."""
    compiled = device.type == "cuda" and HAS_TRITON and dtype != torch.float64 and head_dim >= 16
    if (
        not compiled
        or spec.similarity not in LOGARITHMS
        or spec.normalizer not in ("sum", "none", "p_norm")
    ):
        return False
    kind = "window" if spec.window is not None else "prefix" if spec.prefix > 1 else "causal"
    return trusted("flex", kind, device, dtype, head_dim)


def flex(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None
) -> Tensor:
    """Softmax over log f(s), which is f(s) / sum f(s), and its log-sum-exp, which exchanges that sum for Z.

    sum_j f(s_j) v_j = out exp(lse), which overflows where the sum of f does; the p-norm's log Z (Eqs. 43, 44) is a
    second pass's lse(p log f) / p. q: (B, H, T, D), k and v: (B, H, S, D), k* in front of the keys if there is one.
    """
    out, lse = _flex_pass(q, k, v, spec, distance_bias, power=1.0)
    if spec.normalizer == "sum":
        return out
    if spec.normalizer == "p_norm":
        _, lse_p = _flex_pass(q, k, v, spec, distance_bias, power=spec.p)
        lse = lse - (lse_p / spec.p).masked_fill(lse == -torch.inf, 0)
    return out * torch.exp(lse)[..., None].to(out.dtype)


def _flex_pass(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None, power: float
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and log-sum-exp (B, H, T) of the softmax over power times log f(s)."""
    length, star = q.shape[2], k.shape[2] - q.shape[2]

    def score(s, b, h, i, j):
        if distance_bias is not None:
            head = h if len(distance_bias) > 1 else torch.zeros_like(h)
            g = distance_bias[
                head, (i - j + star).clamp(0, length - 1)
            ]  # hidden keys are read as well
            s = s + torch.where(j >= star, g, 0)  # k* has no position
        return power * LOGARITHMS[spec.similarity](s + spec.logit_bias)

    # A graph under compilation makes its own mask (the cache is out of its reach, and it would warn of that) and
    # compiles the kernel with the rest; on a CPU the kernel is dense.
    inside = torch.compiler.is_compiling()
    make_mask: Callable = _block_mask.__wrapped__ if inside else _block_mask
    mask = make_mask(length, star, spec, q.device)
    function: Any = flex_attention
    if not inside and q.device.type != "cpu":
        function = _compiled_flex(spec)
    out, aux = function(q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@functools.cache
def _compiled_flex(spec: AttentionSpec) -> Callable:
    """FlexAttention compiled for one variant."""
    # One graph or an error, never a dense fallback; static, as a p that varied among calls would be a traced number.
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    # All variants count as recompilations of one function, of which PyTorch allows 8.
    return torch._dynamo.config.patch(recompile_limit=64)(compiled)


@functools.lru_cache(maxsize=16)
def _block_mask(length: int, star: int, spec: AttentionSpec, device: torch.device) -> BlockMask:
    """`attention.visible` for FlexAttention, with k* before the keys."""
    return create_block_mask(
        lambda b, h, i, j: visible(i, j - star, spec),
        None,
        None,
        length,
        star + length,
        device=device,
    )
