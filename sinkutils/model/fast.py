"""Fast attention: the same output and gradients as `attention.attend`, without its weights.

The output is computed in one of five forms (`choose_form`):

- "sdpa" is PyTorch's fused kernel, with O(T d_h) memory. It serves causal softmax, also with a
  prefix and with any bias of Table 4.
- "dense" computes the matrix of logits, with O(T^2) memory. It serves short sequences.
- "linear" serves the kernels of Section 7.4 on long ones. As their weights are plain products, sums
  over keys can be carried along the sequence, which takes O(T d_h^2) time.
- "parts" is a softmax with a wide window on a CPU, by the fused kernel for parts of the mask.
- "pieces" is for everything else on long sequences. It computes the logits of a few queries at a
  time, with O(T d_h) memory.

The calls of a causal softmax, from the decoder down: `attention_output` puts a k* in front of the
keys (`attention.prepared`), and `_sdpa` calls the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sinkutils.model import attention
from sinkutils.model.attention import Extras, divide
from sinkutils.model.config import AttentionSpec
from sinkutils.model.pieces import in_pieces, in_two_maps
from sinkutils.model.windows import in_parts

# Up to this many tokens the dense form serves. It is quick there, its memory does no harm, and in
# half precision on a CPU it is faster than the fused kernel, which takes four times as long at
# T = 64 and twice as long at T = 512.
DENSE_LENGTH = 512
LEAST_WINDOW = 128  # smaller ones are as quick in pieces
CHUNK = 64  # tokens between two sums of the linear form


def choose_form(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, length: int, position_term: bool
) -> str:
    """The form in which an operation is computed: "sdpa", "dense", "linear", "parts" or "pieces"."""
    whole = spec.window is None or spec.window >= length
    every = whole and not position_term
    short = length <= DENSE_LENGTH
    if spec.is_softmax and every and not (short and slow_kernel(device.type, dtype)):
        return "sdpa"
    if short:
        return "dense"
    wide = spec.window is not None and spec.window >= LEAST_WINDOW
    plain = spec.is_softmax and not (spec.has_star or position_term)
    if wide and plain and device.type == "cpu":
        return "parts"
    products = spec.similarity == "linear" and spec.normalizer != "p_norm"
    return "linear" if products and every and spec.prefix == 1 else "pieces"


def serves_two_maps(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    """Whether `in_two_maps` serves, which is quicker than the fused kernel twice.

    It is not on a GPU, nor in half precision, which that kernel makes use of.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    same = q.dtype == k.dtype == v.dtype == wide and extras.distance_bias is None
    return same and q.device.type == "cpu" and q.shape[2] > DENSE_LENGTH


def slow_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernel is the slower form on short sequences: on a CPU in bf16 or fp16."""
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16)


def attention_output(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """The output of `attention.attend`, (B, H, T, D), for the same arguments, without its weights.

    The decoder calls this function; the measurements need the weights and call `attend`, which
    also checks its arguments. The output is differentiable in every tensor and in the parameters
    of `mlp`.
    """
    learned = Extras(**extras)
    if learned.mix is not None and serves_two_maps(q, k, v, learned):
        out = in_two_maps(q, k, v, spec, learned.mix)
        return out * spec.scale if spec.scale != 1 else out
    if learned.mix is not None:  # A_1 - lambda A_2, as in `attend`
        even, odd = attention.halves(q)
        first = _output(even, k, v, spec, learned)
        second = _output(odd, k, v, spec, learned)
        return first - learned.mix.to(v.dtype) * second
    q, k, v = attention.prepared(q, k, v, spec, learned)
    return attention.finished(_output(q, k, v, spec, learned), spec, learned)


def _output(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """The output in the form that serves, for inputs with k* and v* in front if there are any."""
    g = extras.distance_bias
    form = choose_form(spec, q.device, q.dtype, q.shape[2], g is not None)
    if form == "linear":
        out = _linear(q, k, v, spec, extras)
    elif form == "sdpa":
        out = _sdpa(q, k, v, spec)
    elif form == "parts":
        assert spec.window is not None
        out = in_parts(q, k, v, spec.window)
    else:
        q, k = map(attention.kernel(spec, extras), (q, k))
        wide = torch.promote_types(q.dtype, torch.float32)
        is_wide = q.dtype == wide and v.dtype == wide
        if form == "pieces":
            out = in_pieces(q, k, v, spec, g)
        elif needs_width(spec, g is not None) and not is_wide:
            with torch.autocast(q.device.type, enabled=False):
                out = _few_passes(q.to(wide), k.to(wide), v.to(wide), spec, g)
            out = out.to(v.dtype)
        else:
            out = _few_passes(q, k, v, spec, g)
    if spec.scale != 1:
        out = out * spec.scale
    return out


def needs_width(spec: AttentionSpec, position_term: bool) -> bool:
    """Whether the dense form must compute in float32 at least, even for bfloat16 inputs."""
    # bfloat16 cannot hold an odd distance above 256, and rounds the logarithm of a similarity too
    # coarsely, as it does a small logit of softpick. The queries and keys of kernel='elu' are in
    # float64 already.
    divided = spec.normalizer not in ("none", "length")
    by_logarithm = spec.similarity in ("sigmoid", "elu") and divided
    return position_term or by_logarithm or spec.similarity == "softpick" or spec.kernel == "elu"


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
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D**-0.5)
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
    similarity = attention.in_range(logits, spec)
    total = attention.normalizer(similarity, ~hidden, spec)
    return divide(similarity @ v, total)


def _linear(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """The kernels of Section 7.4 without a mask but the causal one. q: (B, H, T, D)."""
    # The backward pass computes one head at a time once more, so that phi and the sums of the
    # others take no memory.
    heads = zip(*(x.split(1, dim=1) for x in (q, k, v)), strict=True)
    again: Any = {"use_reentrant": False, "preserve_rng_state": False}
    outs = [checkpoint(_linear_head, *head, spec, extras, **again) for head in heads]
    return torch.cat(outs, dim=1)


def _linear_head(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """sum_j <phi(q_i), phi(k_j)> v_j / sqrt(D) / Z_i for q (B, 1, T, D), with S keys and values.

    The queries of a chunk of C tokens read what lies before it from the sum of phi(k_j) v_j^T, a
    matrix (D, D + 1), and see the keys of their own chunk one by one.
    """
    queries, keys = map(attention.kernel(spec, extras), (q, k))
    wide = torch.promote_types(queries.dtype, torch.float32)
    length = q.shape[2]
    star = k.shape[2] - length
    padding = (0, 0, 0, -length % CHUNK)

    def chunked(x: Tensor) -> Tensor:  # (B, 1, T, D) -> (B, 1, T / C, C, D)
        return F.pad(x, padding).unflatten(2, (-1, CHUNK))  # type: ignore[no-any-return]

    with torch.autocast(q.device.type, enabled=False):
        queries = queries.to(wide) * queries.shape[-1] ** -0.5
        keys = keys.to(wide)
        values = F.pad(v.to(wide), (0, 1), value=1.0)  # the last column adds up to sum_j f
        of_star = keys[:, :, :star].mT @ values[:, :, :star]  # zeros without a k*
        queries, keys, values = map(chunked, (queries, keys[:, :, star:], values[:, :, star:]))
        sums = keys.mT @ values  # (B, 1, T / C, D, D + 1)
        up_to = sums[:, :, :-1].cumsum(dim=2)
        before = F.pad(up_to, (0, 0, 0, 0, 1, 0)) + of_star[:, :, None]
        own = (queries @ keys.mT).tril() @ values
        both = (queries @ before + own).flatten(2, 3)[:, :, :length]  # (B, 1, T, D + 1)
        out: Tensor = both[..., :-1]
        total = both[..., -1:]
        if spec.normalizer == "sum":
            out = divide(out, total)
        elif spec.normalizer == "max_abs_sum":
            out = out / total.abs().clamp(min=1)
        elif spec.normalizer == "length":
            seen = torch.arange(1, length + 1, device=q.device) + star
            out = out / seen[:, None]
    return out.to(v.dtype)
