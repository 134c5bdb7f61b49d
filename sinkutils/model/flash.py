"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output (flash attention).

A kernel is compared once, for each device, dtype and head dimension, with dense rows before it is trusted: a private op
can change, and one backend's log-sum-exp is in base 2 (pytorch #181645).

- `fused`: the kernels behind scaled_dot_product_attention: softmax with any additive mask
- `flex`: FlexAttention, compiled for CUDA: any f >= 0, window, prefix and position term
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend

# One graph or an error, never a dense fallback; static, as a p that varied among calls would become a traced number.
FLEX_COMPILE: dict[str, Any] = {
    "fullgraph": True,
    "dynamic": False,
    "isolate_recompiles": True,
    "recompile_limit": 64,
}
HAS_TRITON = importlib.util.find_spec("triton") is not None  # what compiles FlexAttention for CUDA


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Output (B, H, T, D) and natural log-sum-exp (B, H, T) of softmax attention, or None if no kernel fits.

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen, in place of
    `causal`; on a CPU only. scale: of the logits, 1/sqrt(D) unless given. Raises what a missing private op raises.
    """
    ops = torch.ops.aten
    if q.device.type == "cpu":
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        # Called by its private name the op takes the last dimension for contiguous, and is wrong where it is not.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
    if q.device.type == "cuda" and mask is None:
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
            found = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        elif q.dtype == torch.float32:
            found = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        else:
            return None
        return found[0], found[1][..., : q.shape[2]]  # some pad their rows
    return None


@functools.cache
def fused_trusted(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `fused` has a kernel here whose causal log-sum-exp is that of dense rows; compared once."""
    q, k, v = _probe(device, dtype, head_dim)
    logits = q.double() @ k.double().mT * head_dim**-0.5
    dense = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf).logsumexp(dim=-1)
    try:
        found = fused(q, k, v)
    except (AttributeError, RuntimeError):  # not in this build, or not for this device, dtype or head dimension
        return False
    return found is not None and _agree(found[1], dense, f"the fused kernel ({device.type}, {dtype})")


def flex_serves(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether FlexAttention's compiled kernel takes these queries and returns the log-sum-exp that is meant."""
    if not (q.is_cuda and HAS_TRITON) or spec.similarity == "linear":
        return False
    if q.dtype == torch.float64 or q.shape[-1] < 16:
        return False
    # A graph under compilation cannot look at numbers; there the kernel is the same one.
    return torch.compiler.is_compiling() or _flex_trusted(q.device, q.dtype, q.shape[-1])


def flex(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None, star: int) -> Tensor:
    """Softmax over log f(s), which is f(s) / sum f(s), and its log-sum-exp, which exchanges that sum for Z.

    sum_j exp(s_j) v_j = out exp(lse) (Eqs. 43, 44); the p-norm's log Z is a second pass's lse(p log f) / p.
    """

    # A graph under compilation makes its own mask: the cache is out of its reach, and it would warn of that.
    block_mask = _block_mask.__wrapped__ if torch.compiler.is_compiling() else _block_mask

    def run(power: float) -> tuple[Tensor, Tensor]:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if distance_bias is not None:
                head = torch.zeros_like(h) if len(distance_bias) == 1 else h
                g = distance_bias[head, (i - j + star).clamp(0, q.shape[2] - 1)]  # hidden keys are read as well
                s = s + torch.where(j >= star, g, 0)
            return power * SIMILARITIES[spec.similarity].log(s)

        mask = block_mask(q.shape[2], star, spec, q.device)
        out, aux = _flex_kernel(flex_attention, spec, q.device)(
            q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse[..., None]

    out, lse = run(1.0)
    if spec.normalizer == "sum":
        return out
    log_z = {
        "none": lambda: torch.zeros_like(lse),
        "max_abs_sum": lambda: lse.clamp(min=0),
        "p_norm": lambda: (run(spec.p)[1] / spec.p).masked_fill(lse == -torch.inf, 0),
    }[spec.normalizer]()
    return out * torch.exp(lse - log_z).to(out.dtype)


def _flex_kernel(function: Callable[..., Any], spec: AttentionSpec, device: torch.device) -> Callable[..., Any]:
    """FlexAttention's functions are meant to be compiled; un-compiled, as on a CPU, they are dense."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function, spec)


@functools.cache
def _compiled(function: Callable[..., Any], spec: AttentionSpec) -> Callable[..., Any]:
    """Each variant has compiled code of its own: in common they would pass PyTorch's limit of recompilations."""
    return torch.compile(function, **FLEX_COMPILE)


@functools.lru_cache(maxsize=16)
def _block_mask(length: int, star: int, spec: AttentionSpec, device: torch.device) -> BlockMask:
    """`attention.visible` for FlexAttention, with k* before the keys."""
    window, shown = spec.window, star + (spec.prefix if spec.prefix > 1 else 0)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i - j + star
        near = distance >= 0
        if window is not None:
            near = near & (distance < window)
        return near | (j < shown)

    make = _flex_kernel(create_block_mask, spec, device)
    return make(seen, None, None, length, star + length, device=device)


@functools.cache
def _flex_trusted(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Compare un-normalised sigmoid attention, which hangs on the log-sum-exp, with dense rows, once."""
    q, k, v = _probe(device, dtype, head_dim)
    spec = AttentionSpec(similarity="sigmoid", normalizer="none")
    with torch.no_grad():
        dense = attend(q.double(), k.double(), v.double(), spec)[0]
        return _agree(flex(q, k, v, spec, None, 0), dense, f"FlexAttention ({device.type}, {dtype})")


def _probe(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """q, k, v of (2, 2, 130, D) to compare kernels on: more than a kernel's block, no multiple of anything."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 130, head_dim, generator=generator).to(device, dtype) for _ in range(3)]


def _agree(got: Tensor, dense: Tensor, what: str) -> bool:
    tolerance = 1e-3 if got.dtype in (torch.float32, torch.float64) else 3e-2
    if got.shape == dense.shape and torch.allclose(got.double(), dense, rtol=tolerance, atol=tolerance):
        return True
    warnings.warn(f"{what} returned other row sums than the dense form; using blocks of queries instead", stacklevel=2)
    return False
