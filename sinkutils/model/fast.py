"""Fast attention: the same output and gradients as `attention.attend`, without its weights.

The output is computed in one of two forms (`choose_form`):

- "sdpa" is PyTorch's fused kernel, with O(T d_h) memory. It serves causal softmax, also with a
  prefix and with any bias of Table 4.
- "dense" is for everything else. It computes the matrix of logits, with O(T^2) memory.

The calls of a causal softmax, from the decoder down: `attention_output` checks the shapes and puts
a k* in front of the keys (`attention.prepared`), and `_sdpa` calls the kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.model import attention
from sinkutils.model.attention import Extras, divide
from sinkutils.model.config import AttentionSpec

# In half precision on a CPU, the dense form is faster than the fused kernel up to this many tokens.
# The kernel takes four times as long at T = 64 and twice as long at T = 512.
DENSE_LENGTH = 512


def choose_form(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, length: int, position_term: bool
) -> str:
    """The form in which an operation is computed, "sdpa" or "dense"."""
    whole = spec.window is None or spec.window >= length
    quick = length > DENSE_LENGTH or not slow_kernel(device.type, dtype)
    plain = spec.is_softmax and whole and not position_term
    return "sdpa" if plain and quick else "dense"


def slow_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernel is the slower form on short sequences: on a CPU in bf16 or fp16."""
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16)


def attention_output(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """The output of `attention.attend`, (B, H, T, D), for the same arguments, without its weights.

    The decoder calls this function; the measurements need the weights and call `attend`. The
    output is differentiable in every tensor and in the parameters of `mlp`. Raises ValueError as
    `attention.attend` does.
    """
    learned = Extras(**extras)
    attention.check_inputs(q, k, v, spec, learned)
    distance_bias = learned.distance_bias
    if learned.mix is not None:  # A_1 - lambda A_2, as in `attend`
        softmax = replace(spec, differential=False)
        even, odd = attention.halves(q)
        first = attention_output(even, k, v, softmax, distance_bias=distance_bias)
        second = attention_output(odd, k, v, softmax, distance_bias=distance_bias)
        return first - learned.mix.to(v.dtype) * second
    q, k, v = attention.prepared(q, k, v, spec, learned)
    position_term = distance_bias is not None
    form = choose_form(spec, q.device, q.dtype, q.shape[2], position_term)
    wide = torch.promote_types(q.dtype, torch.float32)
    is_wide = q.dtype == wide and v.dtype == wide
    if form == "sdpa":
        out = _sdpa(q, k, v, spec)
    elif needs_width(spec, position_term) and not is_wide:
        with torch.autocast(q.device.type, enabled=False):
            out = _few_passes(q.to(wide), k.to(wide), v.to(wide), spec, distance_bias)
        out = out.to(v.dtype)
    else:
        out = _few_passes(q, k, v, spec, distance_bias)
    if spec.scale != 1:
        out = out * spec.scale
    return attention.finished(out, spec, learned)


def needs_width(spec: AttentionSpec, position_term: bool) -> bool:
    """Whether the dense form must compute in float32 at least, even for bfloat16 inputs."""
    # bfloat16 cannot hold an odd distance above 256, and rounds the logarithm of a similarity too
    # coarsely. The queries and keys of kernel='elu' are in float64 already.
    divided = spec.normalizer not in ("none", "length")
    by_logarithm = spec.similarity in ("sigmoid", "elu") and divided
    return position_term or by_logarithm or spec.kernel == "elu"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Eq. 4 by the fused kernel, for queries (B, H, T, D) and S = T or 1 + T keys and values."""
    # If k* stands before the keys, there is one key more than queries. A zero query is put in front
    # so that the kernel's causal mask fits, and its output is dropped.
    star = k.shape[2] - q.shape[2]
    padded = F.pad(q, (0, 0, star, 0))
    out = F.scaled_dot_product_attention(padded, k, v, is_causal=True)
    out = out[:, :, star:]  # (B, H, T, D)
    p = spec.prefix
    if p == 1:
        return out
    # The first p queries see the whole prefix. A second call without a mask computes them.
    keys = k[:, :, : star + p]
    values = v[:, :, : star + p]
    first = F.scaled_dot_product_attention(q[:, :, :p], keys, values)
    return torch.cat([first, out[:, :, p:]], dim=2)


def _few_passes(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None
) -> Tensor:
    """The dense form, with few passes over the logits. The caller multiplies by the scale alpha.

    q: (B, H, T, D). k, v: (B, H, S, D), with k* and v* in front if there are any. phi has been
    applied to q and k.
    """
    bias, hidden = attention.added_to_logits(q, k, spec, distance_bias)
    if spec.is_softmax and not slow_kernel(q.device.type, q.dtype):
        return F.scaled_dot_product_attention(q, k, v, bias[None])
    # The matrix product adds the bias to the logits in the same pass.
    B, H, T, D = q.shape
    bias = bias.expand(B, H, -1, -1).flatten(0, 1)  # (B H, T, S)
    queries = q.flatten(0, 1)
    keys = k.flatten(0, 1)
    logits = torch.baddbmm(bias, queries, keys.mT, alpha=D**-0.5)
    logits = logits.view(B, H, T, -1)  # s_ij, (B, H, T, S)
    if spec.is_softmax:
        return logits.softmax(dim=-1) @ v
    if spec.hidden_is_zero:
        logits = logits.masked_fill(hidden, 0)
    if spec.similarity == "softpick":
        scaled = attention.normalise(logits, ~hidden, spec)
        weights = scaled / spec.scale  # the caller multiplies by the scale
        return weights.to(v.dtype) @ v
    # Dividing the output, (B, H, T, D), is cheaper than dividing the weights, (B, H, T, S).
    similarity, unit = attention.in_range(logits, spec)
    total = attention.normalizer(similarity, ~hidden, spec, unit)
    return divide(similarity @ v, total)
