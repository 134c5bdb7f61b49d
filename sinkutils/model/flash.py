"""PyTorch's kernels that return the log-sum-exp of each row of logits beside the output (flash attention).

A kernel is compared with dense rows before its first number is used (`trusted`): a private op can change, and one
backend's log-sum-exp is in base 2 (pytorch #181645).
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from sinkutils.model.attention import AttentionSpec, attend, prepend, sees, visible

# One graph or an error, never a dense fallback; static, as a p that varied among calls would become a traced number.
FLEX_COMPILE: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True, "recompile_limit": 64}
HAS_TRITON = importlib.util.find_spec("triton") is not None  # what compiles FlexAttention for CUDA
ROWS = 512  # queries a call where there is a mask, so that no mask of T x T is made
# kernel -> the kinds of mask that it is compared under. "full" has none; "mask" is an arbitrary one, such as a prefix
# beside padding, and adds to the logits.
KINDS = {"fused": ("causal", "full", "window", "mask"), "flex": ("causal", "window", "prefix")}
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
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor] | None:
    """Output (B, H, T, D) and natural log-sum-exp (B, H, T) of softmax attention, or None if no kernel fits.

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen, in place of
    `causal`. scale: of the logits, 1/sqrt(D) unless given. Raises what a missing private op raises.
    """
    name = kernel_for(q.device.type, q.dtype, q.shape[-1], mask is not None)
    if name is None:
        return None
    if mask is not None:
        causal = False
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    op = getattr(torch.ops.aten, name)
    if q.device.type == "cpu":
        # Called by its private name the op takes the last dimension for contiguous, and is wrong where it is not.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if name == "_scaled_dot_product_flash_attention":
        results = op(q, k, v, 0.0, causal, scale=scale)
    else:
        if mask is not None:  # the kernel wants rows that start at multiples of 16 elements
            mask = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
            mask = mask.expand(*q.shape[:3], k.shape[2])
        results = op(q, k, v, mask, True, 0.0, causal, scale=scale)
    return results[0], results[1][..., : q.shape[2]]  # some pad their rows


def fused_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: PositionMask | Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor] | None:
    """`fused` under a mask, `ROWS` queries at a time and, where the mask knows their range, the keys that they see.

    A mask that is a tensor broadcasts to (B, H, T, S).
    """
    blocks: Iterable[tuple[slice, slice, Tensor]]
    if isinstance(mask, PositionMask):
        blocks = mask.blocks
    else:
        starts = range(0, q.shape[2], ROWS)
        blocks = ((slice(i, i + ROWS), slice(None), mask[..., i : i + ROWS, :]) for i in starts)
    parts = [fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=part, scale=scale) for rows, keys, part in blocks]
    if any(pair is None for pair in parts):
        return None
    outs, masses = zip(*parts, strict=True)  # type: ignore[arg-type]
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
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            got, expected = (_flex_probe if kernel == "flex" else _fused_probe)(q, k, v, kind)
    except (AttributeError, RuntimeError):  # not in this build, or not for this device, dtype or head dimension
        got = None
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2
    TRUST[key] = (
        got is not None
        and got.shape == expected.shape
        and torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance)
    )
    if got is not None and not TRUST[key]:
        what = f"the {kernel} kernel ({device.type}, {dtype}, {kind} attention) returned other row sums than the dense"
        warnings.warn(f"{what} form; using blocks of queries instead", stacklevel=3)
    return TRUST[key]


def _fused_probe(q: Tensor, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor | None, Tensor]:
    """Output and log-sum-exp side by side, of the kernel and of dense rows."""
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)
    seen = visible(positions, positions, AttentionSpec(window=33 if kind == "window" else None))
    bias = torch.zeros(length, length, device=q.device, dtype=q.dtype)
    if kind == "full":
        seen = torch.ones_like(seen)
    if kind == "mask":  # a prefix of 40 that all see, padding before and after, and a term that grows with distance
        seen = (seen | (positions < 40)) & (positions > 2) & (positions < length - 5)
        seen |= positions == positions[:, None]
        bias = -0.25 * (positions[:, None] - positions).abs().to(q.dtype).sqrt()
    logits = (q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()).masked_fill(~seen, -torch.inf)
    if kind in ("causal", "full"):
        result = fused(q, k, v, causal=kind == "causal")
    elif kind == "window":
        mask = PositionMask(lambda i, j: visible(i, j, AttentionSpec(window=33)), length, q.device, rows=50)
        result = fused_rows(q, k, v, mask)
    else:
        result = fused_rows(q, k, v, bias.masked_fill(~seen, -torch.inf)[None, None])
    dense = torch.cat([logits.softmax(-1) @ v.double(), logits.logsumexp(-1, keepdim=True)], dim=-1)
    return None if result is None else torch.cat([result[0].double(), result[1][..., None].double()], dim=-1), dense


def _flex_probe(q: Tensor, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Un-normalised sigmoid attention, which hangs on the log-sum-exp, with k* and a position term."""
    window, prefix = 33 if kind == "window" else None, 40 if kind == "prefix" else 1
    spec = AttentionSpec(similarity="sigmoid", normalizer="none", bias="k", window=window, prefix=prefix)
    star, line = q[0, :, 0], k[0, 0, :, :1].T.contiguous()
    dense, _ = attend(q.double(), k.double(), v.double(), spec, key_bias=star.double(), distance_bias=line.double())
    return flex(q, prepend(star, k), F.pad(v, (0, 0, 1, 0)), spec, line, 1), dense


def flex_trusted(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlexAttention is `trusted` under the kind of mask that an operation has."""
    kind = "window" if spec.window is not None else "prefix" if spec.prefix > 1 else "causal"
    return trusted("flex", kind, device, dtype, head_dim)


def flexible(spec: AttentionSpec) -> bool:
    """Whether an operation is a softmax over log f(s) of queries and keys as they are."""
    return not spec.hidden_is_zero and spec.sink_logit == "none"


def flex_fits(device: str, dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> bool:
    """Whether FlexAttention's compiled kernel takes such queries."""
    return device == "cuda" and HAS_TRITON and flexible(spec) and dtype != torch.float64 and head_dim >= 16


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
            return power * spec.f.log(s)

        mask = block_mask(q.shape[2], star, spec, q.device)
        out, aux = _flex_kernel(flex_attention, spec, q.device)(
            q, k, v, score_mod=score, block_mask=mask, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse[..., None]

    out, lse = run(1.0)
    if spec.normalizer == "sum":
        return out
    log_z = torch.zeros_like(lse)  # of none, and of length, which `fast.attend` divides by
    if spec.normalizer == "max_abs_sum":
        log_z = lse.clamp(min=0)
    elif spec.normalizer == "p_norm":
        log_z = (run(spec.p)[1] / spec.p).masked_fill(lse == -torch.inf, 0)
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
    make = _flex_kernel(create_block_mask, spec, device)
    return make(lambda b, h, i, j: sees(i, j - star, spec), None, None, length, star + length, device=device)
