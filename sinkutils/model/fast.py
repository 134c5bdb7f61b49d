"""The attention algebra at speed: `attend` equals `attention.attend` in values and gradients.

Three forms (`choose_form`):

- "sdpa": PyTorch's fused kernel; softmax, causal or with a prefix, with any bias of Table 4. O(T d_h) memory
- "flex": FlexAttention on CUDA, for other positive f, windows and position terms. O(T d_h) memory beside its mask
- "dense": everything else, and whatever is short: the matrix of logits, O(T^2) memory
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.model import attention, flash
from sinkutils.model.attention import AttentionSpec, Extras, divide, features, halves, prepend

# Tokens up to which the dense form is faster than FlexAttention (cuda), and than the fused kernel in half precision
# (cpu), which takes four times as long at T = 64 and twice at 512.
DENSE_LENGTH = {"cpu": 512, "cuda": 128}


def choose_form(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, length: int, head_dim: int, position_term: bool
) -> str:
    """Which form serves an operation."""
    short = length <= DENSE_LENGTH.get(device.type, 0)
    whole = spec.window is None or spec.window >= length
    if spec.is_softmax and whole and not position_term:
        return "dense" if short and slow_kernel(device.type, dtype) else "sdpa"
    if not short and flash.flex_serves(spec, device, dtype, head_dim):
        return "flex"
    return "dense"


def slow_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernel is the slower one on short sequences: a CPU's in half precision."""
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """The output of `attention.attend`, (B, H, T, D), for the same arguments, without its weights.

    Differentiable in every tensor and in what `mlp` holds. Raises ValueError as `attention.attend` does.
    """
    given = Extras(**extras)
    attention.check_inputs(q, k, v, spec, given)
    if given.mix is not None:
        plain = replace(spec, differential=False)
        first, second = (attend(half, k, v, plain, distance_bias=given.distance_bias) for half in halves(q))
        return first - given.mix.to(second.dtype) * second
    if spec.sink_logit != "none":
        return _attend_with_sink(q, k, v, spec, given)
    length, head_dim = q.shape[2:]
    if given.key_bias is not None:  # k* and v* become the first of S = 1 + T keys
        k, v = prepend(given.key_bias, k), prepend(given.value_bias, v)
    q, k = features(q, spec, given.mlp), features(k, spec, given.mlp)
    form = choose_form(spec, q.device, q.dtype, length, head_dim, given.distance_bias is not None)
    if form == "sdpa":
        out = _sdpa(q, k, v, spec)
    elif form == "flex":
        out = flash.flex(q, k, v, spec, given.distance_bias)
    else:
        out = _dense(q, k, v, spec, given.distance_bias)
    if spec.scale != 1:
        out = out * spec.scale
    if spec.bias == "v":
        out = out + given.value_bias[:, None]  # type: ignore[index]
    return out


def _attend_with_sink(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, given: Extras) -> Tensor:
    """A sink logit as a key bias in one more dimension, in which queries are 1 and the sequence's own keys 0."""
    sink, wider = attention.sink_logits(q, given), q.shape[-1] + 1
    q = q * (wider / (wider - 1)) ** 0.5  # logits are divided by sqrt(D + 1), and stay what they were
    key = F.pad((sink * wider**0.5)[:, None], (wider - 1, 0)).to(q.dtype)  # (H, D + 1)
    q, k, v = F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1)), F.pad(v, (0, 1))
    plain = replace(spec, sink_logit="none", bias="k")
    return attend(q, k, v, plain, distance_bias=given.distance_bias, key_bias=key)[..., :-1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Eq. 4 by the fused kernel, on queries (B, H, T, D) and S = T or 1 + T keys and values."""
    # A query whose output is dropped stands before the others where k* stands before the keys, so that the kernel's
    # causal mask fits.
    star = k.shape[2] - q.shape[2]
    out = F.scaled_dot_product_attention(F.pad(q, (0, 0, star, 0)), k, v, is_causal=True)[:, :, star:]
    if spec.prefix == 1:
        return out
    # The first p queries see the whole prefix: a second call without a mask.
    p = spec.prefix
    first = F.scaled_dot_product_attention(q[:, :, :p], k[:, :, : star + p], v[:, :, : star + p])
    return torch.cat([first, out[:, :, p:]], dim=2)


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None) -> Tensor:
    """The formulas with few passes over the logits.

    q: (B, H, T, D), k and v: (B, H, S, D), all after phi, k* in front of the keys if there is one.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if distance_bias is not None and q.dtype != wide:  # bfloat16 has no odd distances beyond 256
        with torch.autocast(q.device.type, enabled=False):
            return _dense(q.to(wide), k.to(wide), v.to(wide), spec, distance_bias).to(v.dtype)
    bias, hidden = _added_to_logits(q, k, spec, distance_bias)
    if spec.is_softmax and not slow_kernel(q.device.type, q.dtype):
        return F.scaled_dot_product_attention(q, k, v, bias[None])
    batch, heads, _, head_dim = q.shape
    bias = bias.expand(batch, heads, -1, -1).flatten(0, 1)
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=head_dim**-0.5)
    logits = logits.unflatten(0, (batch, heads))  # s_ij, (B, H, T, S)
    if spec.is_softmax:
        return logits.softmax(dim=-1) @ v
    if spec.hidden_is_zero:
        logits = logits.masked_fill(hidden, 0)
    if spec.similarity == "softpick":
        return attention.normalise(logits, ~hidden, replace(spec, scale=1.0)).to(v.dtype) @ v
    if spec.similarity == "exp" and spec.normalizer == "p_norm":
        # A position term of -inf can hide a whole row: as in `attention.normalise`, its output is zero.
        peak = logits.amax(dim=-1, keepdim=True).detach()
        logits = logits - peak.masked_fill(~peak.isfinite(), 0)
    similarity = spec.f(logits)
    return divide(similarity @ v, attention.normalizer(similarity, ~hidden, spec))


def _added_to_logits(q: Tensor, k: Tensor, spec: AttentionSpec, distance_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """g, and -inf (0 where f(0) = 0) at hidden keys, (1 or H, T, S); and which keys are hidden, (T, S)."""
    length, star = q.shape[2], k.shape[2] - q.shape[2]
    positions = torch.arange(length, device=q.device)
    hidden = F.pad(~attention.visible(positions[:, None], positions, spec), (star, 0))  # every query sees k*
    bias = q.new_zeros(1, length, k.shape[2])
    if distance_bias is not None:
        # g(i - j) is constant along diagonals: windows on one line of it, whose backward is a sum, not a scatter.
        line = distance_bias[:, torch.arange(1 - length, length, device=q.device).clamp(min=0)]
        bias = F.pad(line.to(q.dtype).unfold(-1, length, 1).flip(-1), (star, 0))
    if not spec.hidden_is_zero:
        bias = bias.masked_fill(hidden, -torch.inf)
    return bias, hidden
