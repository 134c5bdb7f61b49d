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
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from sinkutils.model.attention import LOGARITHMS, AttentionSpec, attend, prepend, sees, visible

HAS_TRITON = importlib.util.find_spec("triton") is not None  # what compiles FlexAttention for CUDA
ROWS = 512  # queries a call where there is a mask, so that no mask of T x T is made
# kernel -> the kinds of mask that it is compared under. "mask" is an arbitrary one, such as a prefix beside padding,
# that is added to the logits.
KINDS = {"fused": ("causal", "window", "mask"), "flex": ("causal", "window", "prefix")}
TRUST: dict[tuple[str, str, torch.device, torch.dtype, int], bool] = {}  # what `trusted` has found


class PositionMask:
    """A mask that is a function of positions, of which a block of queries is made at a time: no T x T."""

    def __init__(
        self, seen: Callable[[Tensor, Tensor], Tensor], length: int, device: torch.device, rows: int = ROWS
    ) -> None:
        self.seen, self.rows = seen, rows  # seen: 0-based positions (R,) and (S,) -> booleans (R, S)
        self.positions = torch.arange(length, device=device)

    @functools.cached_property
    def blocks(self) -> list[tuple[slice, slice, Tensor]]:
        """For `rows` queries at a time: those, the range of keys that one of them sees, and who sees which (R, S)."""
        blocks = []
        for rows in self.positions.split(self.rows):
            seen = self.seen(rows, self.positions)
            keys = seen.any(dim=0).nonzero()[:, 0]
            low, high = int(keys[0]), int(keys[-1]) + 1
            blocks.append((slice(int(rows[0]), int(rows[-1]) + 1), slice(low, high), seen[:, low:high].clone()))
        return blocks


def kernel_for(device: str, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """Which of PyTorch's kernels `fused` calls on a type of device, by name; None where none fits."""
    if device == "cpu":
        return "_scaled_dot_product_flash_attention_for_cpu"
    if device != "cuda" or dtype == torch.float64:
        return None
    if dtype in (torch.float16, torch.bfloat16) and head_dim <= 256 and not masked:
        return "_scaled_dot_product_flash_attention"
    return "_scaled_dot_product_efficient_attention"


def fused(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor] | None:
    """Output (B, H, T, D) and natural log-sum-exp (B, H, T) of softmax attention, or None if no kernel fits.

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen; None is causal.
    scale: of the logits, 1/sqrt(D) unless given. Raises what a missing private op raises.
    """
    name = kernel_for(q.device.type, q.dtype, q.shape[-1], mask is not None)
    if name is None:
        return None
    causal = mask is None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    op = getattr(torch.ops.aten, name)
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
) -> tuple[Tensor, Tensor] | None:
    """`fused` under a mask, `ROWS` queries at a time and, where the mask knows their range, the keys that they see.

    A mask that is a tensor broadcasts to (B, H, T, S).
    """
    if isinstance(mask, PositionMask):
        blocks = mask.blocks
    else:
        starts = range(0, q.shape[2], ROWS)
        blocks = [(slice(i, i + ROWS), slice(None), mask[..., i : i + ROWS, :]) for i in starts]
    outs, masses = [], []
    for rows, keys, seen in blocks:
        result = fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=seen, scale=scale)
        if result is None:
            return None
        outs.append(result[0])
        masses.append(result[1])
    return torch.cat(outs, dim=2), torch.cat(masses, dim=2)


def trusted(kernel: str, kind: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a kernel is there and gives the row sums of dense rows under a kind of mask (`KINDS`); compared once.

    A graph under compilation cannot look at numbers: it trusts what was compared before, see `fast.check_kernels`.
    """
    key = (kernel, kind, device, dtype, head_dim)
    if key in TRUST or torch.compiler.is_compiling():
        return TRUST.get(key, False)
    generator = torch.Generator().manual_seed(0)
    # More keys than a kernel's block (512 on a CPU, less on CUDA), a multiple of nothing.
    q, k, v = (torch.randn(2, 2, 531, head_dim, generator=generator).to(device, dtype) for _ in range(3))
    probe = _flex_probe if kernel == "flex" else _fused_probe
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            got, expected = probe(q, k, v, kind)
    except (AttributeError, RuntimeError):  # not in this build, or not for this device, dtype or head dimension
        got = None
    if got is None:
        TRUST[key] = False
        return False
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2
    same = got.shape == expected.shape and torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance)
    if not same:
        what = f"the {kernel} kernel ({device.type}, {dtype}, {kind} attention) returned other row sums than the dense"
        warnings.warn(f"{what} form, and is not used", stacklevel=3)
    TRUST[key] = same
    return same


def _fused_probe(q: Tensor, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor | None, Tensor]:
    """Output and log-sum-exp side by side, of the kernel and of dense rows in float64."""
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)
    distance = positions[:, None] - positions
    bias = torch.zeros(length, length, device=q.device, dtype=q.dtype)
    if kind == "causal":
        result = fused(q, k, v)
        seen = distance >= 0
    elif kind == "window":
        spec = AttentionSpec(window=33)
        result = fused_rows(q, k, v, PositionMask(lambda i, j: visible(i, j, spec), length, q.device, rows=50))
        seen = visible(positions, positions, spec)
    else:  # a prefix of 40 that all see, padding before and after, and a term that grows with distance
        seen = ((distance >= 0) | (positions < 40)) & (positions > 2) & (positions < length - 5)
        seen |= distance == 0
        bias = -0.25 * distance.abs().to(q.dtype).sqrt()
        result = fused_rows(q, k, v, bias.masked_fill(~seen, -torch.inf)[None, None])
    logits = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()
    logits = logits.masked_fill(~seen, -torch.inf)
    dense = torch.cat([logits.softmax(-1) @ v.double(), logits.logsumexp(-1, keepdim=True)], dim=-1)
    if result is None:
        return None, dense
    out, lse = result
    return torch.cat([out.double(), lse[..., None].double()], dim=-1), dense


def _flex_probe(q: Tensor, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Un-normalised sigmoid attention, which hangs on the log-sum-exp, with k* and a position term."""
    window = 33 if kind == "window" else None
    prefix = 40 if kind == "prefix" else 1
    spec = AttentionSpec(similarity="sigmoid", normalizer="none", bias="k", window=window, prefix=prefix)
    star, line = q[0, :, 0], k[0, 0, :, :1].T.contiguous()
    dense, _ = attend(q.double(), k.double(), v.double(), spec, key_bias=star.double(), distance_bias=line.double())
    return flex(q, prepend(star, k), F.pad(v, (0, 0, 1, 0)), spec, line), dense


def flex_trusted(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlexAttention is `trusted` under the kind of mask that an operation has."""
    kind = "causal" if spec.prefix == 1 else "prefix"
    if spec.window is not None:
        kind = "window"
    return trusted("flex", kind, device, dtype, head_dim)


def flex_fits(device: str, dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> bool:
    """Whether FlexAttention's compiled kernel takes such queries, and the operation is a softmax over log f(s)."""
    compiled = device == "cuda" and HAS_TRITON and dtype != torch.float64 and head_dim >= 16
    return compiled and spec.similarity in LOGARITHMS and spec.sink_logit == "none"


def flex(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None) -> Tensor:
    """Softmax over log f(s), which is f(s) / sum f(s), and its log-sum-exp, which exchanges that sum for Z.

    sum_j f(s_j) v_j = out exp(lse), which overflows where the sum of f does; the p-norm's log Z (Eqs. 43, 44) is a
    second pass's lse(p log f) / p. q: (B, H, T, D), k and v: (B, H, S, D), k* in front of the keys if there is one.
    """
    out, lse = _flex_pass(q, k, v, spec, distance_bias, power=1.0)
    if spec.normalizer == "sum":
        return out
    if spec.normalizer == "max_abs_sum":
        log_z = lse.clamp(min=0)
    elif spec.normalizer == "p_norm":
        _, lse_p = _flex_pass(q, k, v, spec, distance_bias, power=spec.p)
        log_z = (lse_p / spec.p).masked_fill(lse == -torch.inf, 0)
    else:  # none, and length, which `fast.attend` divides by
        log_z = torch.zeros_like(lse)
    return out * torch.exp(lse - log_z).to(out.dtype)


def _flex_pass(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None, power: float
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and log-sum-exp (B, H, T, 1) of the softmax over power times log f(s)."""
    length, star = q.shape[2], k.shape[2] - q.shape[2]

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if distance_bias is not None:
            head = h if len(distance_bias) > 1 else torch.zeros_like(h)
            g = distance_bias[head, (i - j + star).clamp(0, length - 1)]  # hidden keys are read as well
            s = s + torch.where(j >= star, g, 0)  # k* has no position
        return power * spec.log_f(s)

    # A graph under compilation makes its own mask: the cache is out of its reach, and it would warn of that.
    block_mask = _block_mask.__wrapped__ if torch.compiler.is_compiling() else _block_mask
    mask = block_mask(length, star, spec, q.device)
    function = _compiled(flex_attention, spec, q.device)
    out, aux = function(q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse[..., None]


def _compiled(function: Callable[..., Any], spec: AttentionSpec, device: torch.device) -> Callable[..., Any]:
    """FlexAttention's functions are meant to be compiled; un-compiled, as on a CPU, they are dense."""
    if device.type == "cpu" or torch.compiler.is_compiling():
        return function
    return _compiled_for(function, spec)


@functools.cache
def _compiled_for(function: Callable[..., Any], spec: AttentionSpec) -> Callable[..., Any]:
    """Each variant has compiled code of its own: in common they would pass PyTorch's limit of recompilations."""
    # One graph or an error, never a dense fallback; static, as a p that varied among calls would be a traced number.
    limits: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 64}
    return torch.compile(function, fullgraph=True, dynamic=False, **limits)


@functools.lru_cache(maxsize=16)
def _block_mask(length: int, star: int, spec: AttentionSpec, device: torch.device) -> BlockMask:
    """`attention.visible` for FlexAttention, with k* before the keys."""
    make = _compiled(create_block_mask, spec, device)
    return make(lambda b, h, i, j: sees(i, j - star, spec), None, None, length, star + length, device=device)
