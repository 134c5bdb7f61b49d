"""The attention algebra at speed: `attend` equals `attention.attend` in values and gradients.

Beside its inputs, T queries of d_h dimensions, a form takes O(T d_h) memory, blocks O(T) for each query at work:

- "fused": softmax, causal or with a prefix, any bias of Table 4
- "linear": kernels (f linear, Section 7.4), by chunks, in O(T d_h^2) time; the others take O(T^2 d_h)
- "flex": all other f >= 0, on CUDA. exp(lse) overflows where the row sum itself does.
- "blocks": everything else, by blocks of queries, computed again in the backward pass; O(T w d_h) for a window w
- "dense": one block, O(T^2) and the fastest up to `DENSE_LENGTH` tokens of all but the fused kernel
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sinkutils.model import attention, flash
from sinkutils.model.attention import AttentionSpec, Extras, divide, features, halves, prepend

# What was made for an output is made again in the backward pass, not kept.
made_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

DENSE_LENGTH = {"cpu": 512, "cuda": 128}  # by device: tokens up to which one dense block serves
BLOCK = 64  # queries at work in the blockwise form: with as many head dimensions, a block's map is the size of q
ROWS = 128  # at least so many, over all sequences and heads, so that small products do not cost more than their sums
CHUNK = 64  # tokens a chunk of linear attention
FORM: str | None = None  # tests set this to take a form wherever it can serve


class Block(NamedTuple):
    """Queries start, .., stop - 1 of a sequence under an operation."""

    spec: AttentionSpec
    distance_bias: Tensor | None
    start: int
    stop: int
    length: int  # of the sequence

    @property
    def keys(self) -> tuple[int, int]:
        """The range of the sequence's own keys that contains all that these queries see."""
        window = self.spec.window
        low = 0 if window is None else max(0, self.start - window + 1)
        return low, min(self.length, max(self.stop, self.spec.prefix))

    def queries(self, q: Tensor) -> Tensor:
        """These of a sequence's: (B, H, T, D) -> (B, H, R, D)."""
        return q[:, :, self.start : self.stop]


def split(spec: AttentionSpec, distance_bias: Tensor | None, length: int, rows: int) -> Iterator[Block]:
    """The queries of a sequence, `rows` at a time."""
    for start in range(0, length, rows):
        yield Block(spec, distance_bias, start, min(start + rows, length), length)


def choose_form(
    spec: AttentionSpec, device: str, dtype: torch.dtype, length: int, head_dim: int, position_term: bool = False
) -> str:
    """Which form serves an operation on a type of device; whether "flex" is right there, `attend` asks `flash`."""
    plain = not position_term and (spec.window is None or spec.window >= length)
    softmax, linear = plain and spec.is_softmax, plain and _is_linear(spec)
    can = {"dense": True, "blocks": True, "fused": softmax, "linear": linear, "flex": flash.flexible(spec)}
    if FORM is not None and can[FORM]:
        return FORM
    short = length <= DENSE_LENGTH.get(device, BLOCK)
    if softmax and not (short and _slow_kernel(device, dtype)):
        return "fused"
    if short:
        return "dense"
    if linear:
        return "linear"
    return "flex" if flash.flex_fits(device, dtype, head_dim, spec) else "blocks"


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """The output of `attention.attend`, (B, H, T, D), for the same arguments, without its weights.

    Differentiable in every tensor and in what `mlp` holds. Raises ValueError as `attention.attend` does.
    """
    given = Extras(**extras)
    attention.check_inputs(q, k, v, spec, given)
    length = q.shape[2]
    if given.mix is not None:
        parts, plain = halves(q, spec)
        first, second = (attend(part, k, v, plain, distance_bias=given.distance_bias) for part in parts)
        return first - given.mix.to(second.dtype) * second
    if spec.sink_logit == "zero":
        given = given._replace(sink_logit=q.new_zeros(q.shape[1]))
    form = choose_form(spec, q.device.type, q.dtype, length, q.shape[-1], given.distance_bias is not None)
    if form == "flex" and FORM != "flex" and not flash.flex_trusted(spec, q.device, q.dtype, q.shape[-1]):
        form = "blocks"
    long = q.device.type == "cpu" and length > DENSE_LENGTH.get("cpu", BLOCK)
    whole = form == "flex" or (form == "fused" and not spec.has_star and spec.prefix == 1)
    out = (_by_head if long and not whole else _compute)(q, k, v, spec, given, form)
    if spec.normalizer == "length":
        count = torch.arange(1, length + 1, device=q.device).clamp(max=spec.window, min=min(spec.prefix, length))
        out = out / (count[:, None] + spec.has_star).to(out.dtype)  # every query sees k*
    if spec.scale != 1:
        out = out * spec.scale
    if given.value_bias is not None and spec.bias == "v":
        out = out + given.value_bias[:, None]
    return out


def check_kernels(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare the kernel that an operation would take on a device with dense rows, before `attend` is compiled.

    Without it a compiled `attend` takes blocks of queries, as a graph cannot look at numbers.
    """
    if flash.flex_fits(device.type, dtype, head_dim, spec):
        flash.flex_trusted(spec, device, dtype, head_dim)


def _by_head(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, given: Extras, form: str) -> Tensor:
    """`_compute` a head at a time, so that what it holds beside inputs, output and gradients is that of one head."""
    by_head = {name: x for name, x in given._asdict().items() if isinstance(x, Tensor) and len(x) > 1}
    # Blocks are made again one by one already; a third time only where they would keep copies of the keys.
    again = torch.is_grad_enabled() and (spec.has_star or _is_linear(spec) or spec.is_softmax)
    outs = []
    for head, inputs in enumerate(zip(*(x.split(1, dim=1) for x in (q, k, v)), strict=True)):
        own: dict[str, Any] = {name: x[head : head + 1] for name, x in by_head.items()}
        arguments = (*inputs, spec, given._replace(**own), form)
        outs.append(made_again(_compute, *arguments) if again else _compute(*arguments))
    return torch.cat(outs, dim=1)


def _compute(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, given: Extras, form: str) -> Tensor:
    """`attend` without alpha and value bias, by a form that can serve it."""
    distance_bias, key_bias, value_bias, mlp, sink_logit, _ = given
    length, star = q.shape[2], 0
    if sink_logit is not None:  # a key in one more dimension
        q, k, key = _with_sink(q, k, sink_logit)
        plain = replace(spec, sink_logit="none", bias="k")
        return _compute(q, k, F.pad(v, (0, 1)), plain, Extras(distance_bias, key), form)[..., :-1]
    if key_bias is not None:  # k* and v* become the first of S = 1 + T keys
        star = 1
        k = prepend(key_bias, k)
        v = prepend(torch.zeros_like(key_bias) if value_bias is None else value_bias, v)
    q, k = features(q, spec, mlp), features(k, spec, mlp)
    if form == "fused":
        return _softmax(q, k, v, spec, star)
    if form == "linear":
        return _linear(q, k, v, spec, star)
    if form == "dense":
        return _block(q, k, v, Block(spec, distance_bias, 0, length, length))
    if form == "flex":
        return flash.flex(q, k, v, spec, distance_bias, star)
    return _blocks(q, k, v, spec, distance_bias)


@torch.no_grad()
def log_mass(q: Tensor, k: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """log of sum_j |f(s_ij)| over the keys that query i sees, k* among them: (B, H, T), float32 or float64.

    What the sink metric needs (Section 3.2): A_ik, or its proxy of Section 7.4, is |f(s_ik)| exp(-log_mass_i).
    -inf where a row has no mass. The sink logit adds its exp. Of differential attention, whose map has signs: log of
    sum_j |A_1 - lambda A_2|.
    """
    given = Extras(**extras)
    bias = "k" if spec.has_key_bias else "none"
    needs = AttentionSpec(bias=bias, sink_logit=spec.sink_logit, differential=spec.differential)
    attention.check_inputs(q, k, k, needs, given)
    distance_bias, key_bias, _, mlp, sink_logit, mix = given
    if mix is not None:
        return _differential_mass(q, k, spec, distance_bias, mix)
    if spec.sink_logit != "none":
        mass = log_mass(q, k, replace(spec, sink_logit="none"), distance_bias=distance_bias)
        return torch.logaddexp(mass, (mass.new_zeros(q.shape[1]) if sink_logit is None else sink_logit)[:, None])
    length, star = q.shape[2], 0
    if key_bias is not None:
        star, k = 1, prepend(key_bias, k)
    q, k = features(q, spec, mlp), features(k, spec, mlp)
    with torch.autocast(q.device.type, enabled=False):
        if not q.is_cuda:  # only CUDA's kernels add up half precision products in float32 at full speed
            q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        fused = spec.similarity == "exp" and distance_bias is None and (spec.window is None or spec.window >= length)
        kinds = ("causal", "full") if spec.prefix > 1 else ("causal",)
        if fused and all(flash.trusted("fused", kind, q.device, q.dtype, q.shape[-1]) for kind in kinds):
            mass = _lse(F.pad(q, (0, 0, star, 0)), k, causal=True)[:, :, star:]
            if spec.prefix > 1:
                first = _lse(q[:, :, : spec.prefix], k[:, :, : star + spec.prefix], causal=False)
                mass = torch.cat([first, mass[:, :, spec.prefix :]], dim=2)
            return mass
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        log = spec.f.mass or spec.f.log
        blocks = [
            log(_logits(block.queries(q), _seen_keys(k, block), block)).logsumexp(dim=-1)
            for block in split(spec, distance_bias, length, BLOCK)
        ]
        return torch.cat(blocks, dim=-1)


def _differential_mass(q: Tensor, k: Tensor, spec: AttentionSpec, distance_bias: Tensor | None, mix: Tensor) -> Tensor:
    """log of the row sums of |A_1 - lambda A_2|, a block of queries at a time: (B, H, T)."""
    parts, plain = halves(q, spec)
    masses = []
    with torch.autocast(q.device.type, enabled=False):
        k, even, odd = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, *parts))
        for block in split(plain, distance_bias, q.shape[2], BLOCK):
            seen = _seen_keys(k, block)
            first, second = (_logits(block.queries(x), seen, block).softmax(dim=-1) for x in (even, odd))
            masses.append((first - mix * second).abs().sum(dim=-1).log())
    return torch.cat(masses, dim=-1)


def _lse(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The log-sum-exp (B, H, T) of a kernel that `flash.trusted` has found; it wants values, any will do."""
    result = flash.fused(q, k, k, causal=causal)
    assert result is not None
    return result[1]


def _is_linear(spec: AttentionSpec) -> bool:
    return spec.similarity == "linear" and spec.normalizer != "p_norm"


def _slow_kernel(device: str, dtype: torch.dtype) -> bool:
    """In half precision a CPU's fused kernel takes four times as long as the dense form at T = 64, twice at 512."""
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16)


def _with_sink(q: Tensor, k: Tensor, sink_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with one more dimension, 1 in q and 0 in k, and logits as before; the key whose logit is sink_logit."""
    wider = q.shape[-1] + 1
    q = q * (wider / (wider - 1)) ** 0.5
    key = F.pad((sink_logit * wider**0.5)[:, None], (wider - 1, 0)).to(q.dtype)  # (H, D + 1)
    return F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1)), key


def _softmax(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, star: int) -> Tensor:
    """Eq. 4 by the fused kernel. k* before the keys is matched by a query whose output is dropped, so that the
    kernel's causal mask still fits; a prefix shows its keys to the first p queries in a second call.
    """
    out = F.scaled_dot_product_attention(F.pad(q, (0, 0, star, 0)), k, v, is_causal=True)[:, :, star:]
    if spec.prefix > 1:
        keys = star + spec.prefix
        first = F.scaled_dot_product_attention(q[:, :, : spec.prefix], k[:, :, :keys], v[:, :, :keys])
        out = torch.cat([first, out[:, :, spec.prefix :]], dim=2)
    return out


def _linear(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, star: int) -> Tensor:
    """Linear attention: within a chunk by its small map, from the chunks before by sum_j phi(k_j) v_j^T.

    A column of ones beside v gives the row sums that a normaliser needs; by length divides `attend`.
    """
    q = q * q.shape[-1] ** -0.5
    by_sum = spec.normalizer not in ("none", "length")
    if by_sum:
        v = F.pad(v, (0, 1), value=1.0)
    state = k[:, :, :star].mT @ v[:, :, :star]  # (B, H, D, E), zero without k*
    k, v = k[:, :, star:], v[:, :, star:]
    length = q.shape[2]
    tail = -length % CHUNK  # zero keys add nothing
    qs, ks, vs = (F.pad(x, (0, 0, 0, tail)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # (B, H, N, CHUNK, .)
    sums = ks.mT @ vs  # (B, H, N, D, E)
    wide = torch.promote_types(sums.dtype, torch.float32)
    before = (sums.cumsum(dim=2, dtype=wide) - sums).to(sums.dtype) + state[:, :, None]
    out = ((qs @ ks.mT).tril() @ vs + qs @ before).flatten(2, 3)[:, :, :length]
    if spec.prefix > 1:
        p = spec.prefix
        first = q[:, :, :p] @ (state + k[:, :, :p].mT @ v[:, :, :p])
        out = torch.cat([first, out[:, :, p:]], dim=2)
    if not by_sum:
        return out
    out, total = out[..., :-1], out[..., -1:]
    return divide(out, total.abs().clamp(min=1) if spec.normalizer == "max_abs_sum" else total)


def _blocks(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None) -> Tensor:
    """`_block` for BLOCK queries at a time; the backward pass computes each again instead of keeping its map."""
    blocks = split(spec, distance_bias, q.shape[2], max(BLOCK, ROWS // max(1, q.shape[0] * q.shape[1])))
    compute = partial(made_again, _block) if torch.is_grad_enabled() else _block
    return torch.cat([compute(block.queries(q), k, v, block) for block in blocks], dim=2)


def _block(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
    """The output of a block's queries, (B, H, R, D), against the S keys and values of the sequence."""
    wide, spec = torch.promote_types(q.dtype, torch.float32), block.spec
    if block.distance_bias is not None and q.dtype != wide:  # bfloat16 has no odd distances beyond 256
        with torch.autocast(q.device.type, enabled=False):
            return _block(q.to(wide), k.to(wide), v.to(wide), block).to(v.dtype)
    k, v = _seen_keys(k, block), _seen_keys(v, block)
    if spec.is_softmax and not _slow_kernel(q.device.type, q.dtype):
        return F.scaled_dot_product_attention(q, k, v, _bias(q, k, block)[0][None])
    logits = _logits(q, k, block)
    if spec.is_softmax and block.distance_bias is None:
        return logits.softmax(dim=-1) @ v
    if spec.similarity == "exp" and spec.normalizer in ("sum", "p_norm"):
        # A position term of -inf can hide a whole row: as in `attention.normalise`, its output is zero.
        peak = logits.amax(dim=-1, keepdim=True).detach()
        logits = logits - peak.masked_fill(~peak.isfinite(), 0)
    if spec.similarity == "softpick":
        shown = ~_bias(q, k, block._replace(distance_bias=None))[1]
        return attention.normalise(logits, shown, replace(spec, scale=1.0)).to(v.dtype) @ v
    sim = spec.f.value(logits)
    return divide(sim @ v, None if spec.normalizer == "length" else attention.normalizer(sim, spec))


def _seen_keys(x: Tensor, block: Block) -> Tensor:
    """What the queries of a block may see of keys or values (B, H, S, D); k*, if any, stays in front."""
    low, high = block.keys
    star = x.shape[2] - block.length
    if low == 0 or star == 0:
        return x[:, :, low : star + high]
    return torch.cat([x[:, :, :star], x[:, :, star + low : star + high]], dim=2)


def _logits(q: Tensor, k: Tensor, block: Block) -> Tensor:
    """s_ij (B, H, R, S) of a block's queries and the keys of `_seen_keys`; f of a hidden one is zero."""
    batch, heads, _, head_dim = q.shape
    bias, hidden = _bias(q, k, block)
    bias = bias.expand(batch, heads, -1, -1).flatten(0, 1)
    logits = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=head_dim**-0.5)
    logits = logits.unflatten(0, (batch, heads))
    return logits.masked_fill(hidden, 0) if block.spec.hidden_is_zero else logits


def _bias(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """What is added to a block's logits, (1 or H, R, S): g, and -inf (0 where f(0) = 0) at the keys `hidden` (R, S)."""
    spec, distance_bias, start, stop, _ = block
    low, high = block.keys
    star = k.shape[2] - (high - low)
    rows, columns = (torch.arange(*bounds, device=q.device) for bounds in ((start, stop), (low, high)))
    hidden = F.pad(~attention.visible(rows, columns, spec), (star, 0))  # every query sees k*
    bias = q.new_zeros(1, stop - start, k.shape[2])
    if distance_bias is not None:
        # g(i - j) is constant along diagonals: windows on one line of it, whose backward is a sum, not a scatter.
        line = distance_bias[:, torch.arange(start - high + 1, stop - low, device=q.device).clamp(min=0)]
        bias = F.pad(line.to(q.dtype).unfold(-1, high - low, 1).flip(-1), (star, 0))
    return bias if spec.hidden_is_zero else bias.masked_fill(hidden, -torch.inf), hidden
