"""The attention operations of Section 7 and Appendix C, and the position terms of Appendix A.

The code follows these formulas step by step and keeps the whole attention matrix in memory:

    s_ij = <phi(q_i), phi(k_j)> / sqrt(d_h) + g(i - j)      Section 7.4, Eqs. 29, 43
    A_ij = alpha * f(s_ij) / Z_i
    out_i = sum_j A_ij v_j

phi is the kernel, g the position term, f the similarity, alpha the scale and Z the normaliser. A
bias (Table 4) is one more key and value that every query sees, or a vector that is added to the
output. A sink logit is one more key that has no value. `fast` computes the same output with less
memory, and the tests compare it with this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import Refused, choice, first_line, instance, real, require, short
from sinkutils.model.config import SIMILARITY_NAMES, SOFTMAX, AttentionSpec
from sinkutils.model.masks import check_start, one_key_per_query_head, seen_keys, shown, visible

__all__ = ["attend", "register"]

Map = Callable[[Tensor], Tensor]


def elu_plus_one(s: Tensor) -> Tensor:
    """e^s below 0 and 1 + s above. `F.elu(s) + 1` would round to 0 in float32 at s = -18."""
    return torch.where(s < 0, s.clamp(max=0).exp(), s + 1)


# f of Section 7.4, elementwise
SIMILARITIES: dict[str, Map] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "elu": elu_plus_one,
    "linear": lambda s: s,  # the only one that can be negative
    "relu": torch.relu,
}
# log f, without overflow, for every f that is positive
LOGARITHMS = {
    "exp": lambda s: s,
    # beyond its threshold, softplus(x) returns x: from 40 on, the error e^-x is below the rounding
    # of float64
    "sigmoid": lambda s: -F.softplus(-s, threshold=40),
    "elu": lambda s: torch.where(s < 0, s, torch.log1p(s.clamp(min=0))),
}
# phi of Section 7.4, applied to queries and keys; "mlp" is learned. It is computed in float64: the
# product of two small values, such as e^-60 e^-60, is 0 in float32, and a row of zeros has no sum
# to divide by. Apple GPUs have no float64.
KERNELS: dict[str, Map] = {
    "identity": lambda x: x,
    "elu": lambda x: elu_plus_one(x.float() if x.is_mps else x.double()),
}
NUM_BUCKETS = 32  # B of Eq. 6
MAX_DISTANCE = 128  # D of Eq. 6


class Extras(NamedTuple):
    """The inputs of an operation beside q, k and v; the names are keyword arguments of `attend`."""

    distance_bias: Tensor | None = None  # (1 or H, >= T): g of Appendix A for distances i - j
    key_bias: Tensor | None = None  # (H, D): k*, with bias='k' or 'kv'
    # (H, D): v*, with bias='v' or 'kv', or with a fixed value that is not zero
    value_bias: Tensor | None = None
    mlp: Map | None = None  # phi, (..., D) -> (..., D), with kernel='mlp'
    sink_logit: Tensor | None = None  # (H,), with sink_logit='learned'
    mix: Tensor | None = None  # lambda of differential attention, a scalar


def register(name: str, f: Map, log: Map | None = None) -> None:
    """Make a similarity f of your own one that `AttentionSpec(similarity=name)` may name.

    f: elementwise, and at least 0. A hidden key has the weight 0, whatever f is.
    log: the logarithm of f, if it can be computed where f itself vanishes or overflows in float32.
        A normalised operation is then exact there as well.

    Both are tried, against each other and in plain loops. The name holds in this process only:
    the command line and the workers of a sweep are other processes, and refuse it.

    Raises ValueError for a name that is taken, and if f or log is not what it must be.
    """
    require(isinstance(name, str) and name.isidentifier(), f"name must be one word, got {name!r}")
    require(name not in SIMILARITY_NAMES, f"there is a similarity {name!r} already")
    points = torch.linspace(-30, 30, 61, dtype=torch.float64)
    values = _tried("f", f, points)
    one_by_one = torch.cat([_tried("f", f, point[None]) for point in points])
    require(torch.allclose(values, one_by_one, 1e-9), f"f of {name!r} is not elementwise")
    require(bool((values >= 0).all()), f"f of {name!r} is negative")
    check_slopes("f", f, points + 0.3)  # beside the kinks of such as relu
    if log is not None:
        fits = torch.allclose(_tried("log", log, points).exp(), values, rtol=1e-9, atol=1e-300)
        require(fits, f"log of {name!r} is not the logarithm of f")
        _tried("log", log, torch.tensor([-200.0, 200.0]))
        check_slopes("log", log, points + 0.3)
        LOGARITHMS[name] = _with_hidden(log, -torch.inf)
    SIMILARITIES[name] = _with_hidden(f, 0.0)
    SIMILARITY_NAMES.append(name)


def _with_hidden(function: Map, value: float) -> Map:
    """The function with this value, and the gradient 0, where a logit is -inf: at hidden keys."""

    def whole(x: Tensor) -> Tensor:
        hidden = x == -torch.inf
        return function(x.masked_fill(hidden, 0)).masked_fill(hidden, value)

    return whole


def _tried(what: str, function: Map, x: Tensor) -> Tensor:
    """The values of a function of the user's, whose values and gradients must be finite numbers."""
    x = x.clone().requires_grad_()
    try:
        values = function(x)
        (slopes,) = torch.autograd.grad(values.sum(), x)
    except Exception as error:  # of any kind, since the function is the user's
        raise Refused(f"{what} cannot be computed with a gradient: {first_line(error)}") from error
    fits = values.shape == x.shape and values.dtype == x.dtype
    require(fits, f"{what} must return a tensor of the shape and dtype of its argument")
    wrong = x[~(values.isfinite() & slopes.isfinite())].tolist()
    require(not wrong, f"{what} or its gradient is not finite in {x.dtype} at {wrong[:3]}")
    return values.detach()


def check_slopes(what: str, function: Map, x: Tensor) -> None:
    """Refuse a function whose gradient is not its slope, as by a wrong backward pass of its own."""
    x = x.clone().requires_grad_()
    fits = torch.autograd.gradcheck(function, x, atol=1e-6, rtol=1e-3, raise_exception=False)
    require(fits, f"the gradient of {what} is not its slope")


def similarity(logits: Tensor, spec: AttentionSpec) -> Tensor:
    """The similarity f of the logits, to which the logit bias is added first."""
    return SIMILARITIES[spec.similarity](logits + spec.logit_bias)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = SOFTMAX,
    *,
    documents: Tensor | None = None,
    first_keys: int = 0,
    hidden: Tensor | None = None,
    start: int | None = None,
    logit_scale: float | None = None,
    return_lse: bool = False,
    lse_base: str = "e",
    **extras: Any,
) -> tuple[Tensor, ...]:
    """Attention by the formulas at the top of `model/attention.py`, with O(T S) memory.

    q: (B, H, T, D), after rotary. k: (B, G, S, D) and v: (B, G, S, E), where H is a multiple of G:
        the query heads 0..H/G-1 share the first key head, as in grouped-query attention.
    documents: (S,) or (B, S) integers, the document that each key belongs to, for packed texts. A
        query sees its own document alone, whose first keys are its prefix. Equal numbers have to
        stand together.
    first_keys: how many first keys a window never hides, of each document if there are several.
    hidden: (T, S) booleans, True where a query may not see a key that it would see otherwise.
    start: the 0-based position of the first query among the keys; None: S - T, so that the last
        query stands at the last key. With start >= S every key comes before every query, as in the
        first part of a context that is split.
    logit_scale: the factor of <q_i, k_j>; None: 1 / sqrt(D).
    return_lse: also return log sum_j exp(s_ij), with the sink logit or k* among the keys, for a
        softmax. lse_base: "e", or "2" for the logarithm to that base.
    extras: the fields of `Extras` that the operation needs.

    Returns out (B, H, T, E) and weights (B, H, T, S) in the dtype of v, and the log-sum-exp (B, H,
    T) in float32 or float64. If k* or a sink logit exists, the weights have 1 + S columns, of which
    it has the first. All weights of a query are zero, and its log-sum-exp is -inf, where it sees no
    key; the weights are also zero where the similarities sum to zero.
    Raises ValueError for wrong shapes, and for a log-sum-exp of what is no softmax.
    """
    instance("spec", spec, AttentionSpec)
    learned = Extras(**extras)
    k, v = one_key_per_query_head(q, k, v)
    start = check_start(q, k, start)
    check_extras(q, v, spec, learned, max(k.shape[2], start + q.shape[2]))
    seen = seen_keys(q, k, spec, start, first_keys, documents) & shown(hidden, q, k)
    choice("lse_base", lse_base, ("e", "2"))
    require(
        not return_lse or (spec.is_softmax and not spec.differential),
        "return_lse needs a softmax: similarity='exp', normalizer='sum', not differential",
    )
    if spec.sink_logit != "none" or logit_scale is not None:
        # A sink in float32, or a scale, must not be rounded beside queries in bfloat16.
        wide = torch.promote_types(q.dtype, torch.float32)
        q = q.to(wide)
        k = k.to(wide)
    if logit_scale is not None:
        real("logit_scale", logit_scale, "positive and finite", more=True)
        require(spec.kernel == "identity", "logit_scale needs kernel='identity'")
        q = q * (logit_scale * q.shape[-1] ** 0.5)  # the logits are divided by sqrt(D)
    if learned.mix is not None:
        # Ye et al. 2024: A = A_1 - lambda A_2. Both maps use the same values and the same position
        # term. A bias or a sink logit cannot occur here: `AttentionSpec` refuses them.
        g = learned.distance_bias
        out, weights, _ = _attend(halves(q)[0], k, v, spec, g, seen, start)
        out_2, weights_2, _ = _attend(halves(q)[1], k, v, spec, g, seen, start)
        mix = learned.mix.to(v.dtype)
        return out - mix * out_2, weights - mix * weights_2
    q, k, v = prepared(q, k, v, spec, learned)
    q, k = map(kernel(spec, learned), (q, k))
    out, weights, logits = _attend(q, k, v, spec, learned.distance_bias, seen, start)
    out = finished(out, spec, learned)
    if not return_lse:
        return out, weights
    blind = ~logits.isfinite().any(dim=-1)  # queries that see no key
    lse = logits.masked_fill(blind[..., None], 0).logsumexp(dim=-1)
    lse = lse.masked_fill(blind, -torch.inf)
    return out, weights, lse if lse_base == "e" else lse / math.log(2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    distance_bias: Tensor | None,
    seen: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and logits. phi has been applied, and k* is the first key if there is one.

    They are computed in float32 at least: bfloat16 rounds a logit near 100 to a multiple of 0.5.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q = q.to(wide)
        k = k.to(wide)
        added, hidden = added_to_logits(q, k, spec, distance_bias, seen, start)
        products = q @ k.mT * q.shape[-1] ** -0.5  # <q_i, k_j> / sqrt(D), (B, H, T, S)
        logits = products + added  # s_ij
        weights = normalise(logits, ~hidden, spec)
        out = weights @ v.to(weights.dtype)
    return out.to(v.dtype), weights.to(v.dtype), logits


def prepared(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of the operation before phi: k* and v* are put in front, if there are any.

    With a k* there are S = 1 + T keys. Its v* is zero unless the extras hold one. A sink logit
    becomes a k* by means of one more dimension: there the queries are 1, the sequence's own keys
    and values are 0, and k* holds the logit.
    """
    star = extras.key_bias
    value = extras.value_bias
    if spec.sink_logit != "none":
        sink = extras.sink_logit
        if sink is None:
            sink = q.new_zeros(q.shape[1])
        D = q.shape[-1]
        q = q * ((D + 1) / D) ** 0.5  # the logits, divided by sqrt(D + 1), keep their values
        last = sink * (D + 1) ** 0.5  # k* in the new dimension, (H,)
        star = F.pad(last[:, None], (D, 0)).to(q.dtype)  # (H, D + 1)
        q = F.pad(q, (0, 1), value=1.0)
        k = F.pad(k, (0, 1))
        v = F.pad(v, (0, 1))
    if star is not None:
        k = prepend(star, k)
        v = prepend(value, v)
    return q, k, v


def kernel(spec: AttentionSpec, extras: Extras) -> Map:
    """phi, for queries and keys. As in the authors' code it follows rotary, and it maps k* too."""
    return extras.mlp or KERNELS[spec.kernel]


def finished(out: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """Drop the dimension that `prepared` added for a sink logit, and add a V bias to the output."""
    if spec.sink_logit != "none":
        out = out[..., :-1]
    if spec.bias == "v":
        out = out + extras.value_bias[:, None]  # type: ignore[index]
    return out


def added_to_logits(
    q: Tensor,
    k: Tensor,
    spec: AttentionSpec,
    distance_bias: Tensor | None,
    seen: Tensor | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """The term that is added to the logits, (1 or H, T, S), and the hidden keys' mask, (T, S).

    The term is g, and -inf at hidden keys. Where f(0) = 0, the caller gives these the logit 0.
    seen, start: the keys that each query sees, without k*, and the position of the first query;
    None: as many keys as queries, and the mask of the spec.
    """
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)
    if seen is None:
        seen = visible(positions[:, None], positions, spec)
    keys = seen.shape[-1]
    star = k.shape[2] - keys  # 1 where there is k*
    hidden = F.pad(~seen, (star, 0))  # every query sees k*
    added = q.new_zeros(1, length, k.shape[2])
    if distance_bias is not None:
        # g(i - j) is constant along diagonals, so each row is a window of one line of values. The
        # backward pass of windows is a sum; that of an index would be a scatter.
        distances = torch.arange(start - keys + 1, start + length, device=q.device)
        # Keys after the query are hidden. Any value will do for them; they get that of distance 0.
        line = distance_bias[:, distances.clamp(min=0)]  # (1 or H, S + T - 1)
        rows = line.unfold(-1, keys, 1).flip(-1)  # (1 or H, T, S)
        added = added + F.pad(rows, (star, 0))  # k* has no position
    if not spec.hidden_is_zero:
        added = added.masked_fill(hidden, -torch.inf)
    return added, hidden


def prepend(bias: Tensor | None, x: Tensor) -> Tensor:
    """Put `bias` (H, D), or zeros if it is None, in front of x (B, H, T, D): (B, H, 1 + T, D)."""
    if bias is None:
        return F.pad(x, (0, 0, 1, 0))
    first = bias.to(x.dtype)[:, None].expand(len(x), -1, -1, -1)  # (B, H, 1, D)
    return torch.cat([first, x], dim=2)


def halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of differential attention's two maps: the even and the odd dimensions of q.

    The other dimensions are set to zero, so that those of the keys do not count. The factor sqrt(2)
    is needed because the logits are divided by sqrt(D), while a map has only D / 2 dimensions.
    """
    odd = torch.arange(q.shape[-1], device=q.device) % 2 == 1  # (D,)
    longer = q * 2**0.5
    return longer.masked_fill(odd, 0), longer.masked_fill(~odd, 0)


def normalise(logits: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """A_ij = alpha f(s_ij) / Z_i (Eqs. 29, 43) over the keys that `seen` allows, and 0 elsewhere.

    logits: (..., R, S). seen: (R, S), boolean.
    """
    hidden = 0 if spec.hidden_is_zero else -torch.inf
    logits = logits.masked_fill(~seen, hidden)
    if spec.similarity == "softpick":  # relu(e^s - 1) / sum |e^s - 1|, both divided by e^peak
        peak = logits.amax(-1, keepdim=True).clamp(min=0).detach()
        sim = exp_minus_one(logits, peak)  # 0 at hidden keys, whose logit is 0
        total = sim.abs().sum(-1, keepdim=True)
        return spec.scale * divide(sim.relu(), total)
    sim = in_range(logits, spec)
    return spec.scale * divide(sim, normalizer(sim, seen, spec))


def exp_minus_one(s: Tensor, peak: Tensor) -> Tensor:
    """(e^s - 1) / e^peak for s <= peak, without overflow, and exact where s is small."""
    rest = -torch.expm1(-s.abs())  # 1 - e^-|s|, of which e^s - 1 is e^s times above 0, -1 below
    return s.sign() * rest * (s.relu() - peak).exp()


def in_range(logits: Tensor, spec: AttentionSpec) -> Tensor:
    """f(s_ij), divided by one number per row; it cancels in A_ij.

    In float32 the powers of sigmoid(-100) vanish and e^100 overflows; after the division neither
    does. An operation that divides by no sum gets f(s_ij) itself, which may overflow.
    logits: (..., R, S), at hidden keys -inf, or 0 where f(0) = 0.
    """
    if spec.normalizer in ("none", "length"):
        return similarity(logits, spec)
    if spec.similarity not in LOGARITHMS:
        sim = similarity(logits, spec)
        if spec.normalizer == "p_norm":
            peak = sim.amax(-1, keepdim=True).detach()
            sim = divide(sim, peak)
        return sim
    # f / max f is computed as exp(log f - max log f), which cannot overflow.
    logs: Tensor = LOGARITHMS[spec.similarity](logits + spec.logit_bias)
    peak = logs.amax(-1, keepdim=True).detach()
    peak = peak.masked_fill(~peak.isfinite(), 0)  # in a row that sees no key
    if spec.normalizer == "max_abs_sum":  # Z_i is at least 1, so e^peak must be, too
        peak = peak.clamp(min=0)
    return (logs - peak).exp()


def normalizer(sim: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor | None:
    """Z_i (Section 7.4, Eq. 43) from the results of `in_range`: (..., R, 1), or None for Z = 1."""
    if spec.normalizer == "none":
        return None
    if spec.normalizer == "length":
        return seen.sum(-1, keepdim=True).to(sim.dtype)
    if spec.normalizer == "p_norm":
        # For p < 1, x^p has an infinite gradient at 0, where hidden keys are: `_power` avoids it.
        total = _power(sim, spec.p).sum(-1, keepdim=True)
        return _power(total, 1 / spec.p)
    total = sim.sum(-1, keepdim=True)
    if spec.normalizer == "max_abs_sum":  # max(|sum f|, 1), Table 15; if f was divided, the sum is
        return total.abs().clamp(min=1)  # at least 1
    return total


def _power(x: Tensor, p: float) -> Tensor:
    """x^p for x >= 0, with gradient 0 where x is 0."""
    positive = x > 0
    base = torch.where(positive, x, 1)  # the gradient of its power is finite everywhere
    return base.pow(p).masked_fill(~positive, 0)


def divide(sim: Tensor, total: Tensor | None) -> Tensor:
    """sim / total, and 0 where total is 0, without a NaN in the gradient. None stands for 1."""
    if total is None:
        return sim
    empty = total == 0
    share = sim / total.masked_fill(empty, 1)
    return share.masked_fill(empty, 0)


def check_extras(q: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras, length: int) -> None:
    """Refuse inputs that do not fit, by name. length: one more than the largest distance."""
    _, heads, _, head_dim = q.shape
    even = head_dim % 2 == 0 or not spec.differential
    require(even, "differential attention needs an even head dimension (D of q)")
    has_mlp = extras.mlp is not None
    require((spec.kernel == "mlp") == has_mlp, "mlp is the callable of kernel='mlp' alone")
    has_value = spec.bias in ("kv", "v") or spec.fixed_value != "zero"
    sizes = {
        "key_bias": (heads, head_dim) if spec.has_key_bias else None,
        "value_bias": (heads, v.shape[3]) if has_value else None,
        "sink_logit": (heads,) if spec.sink_logit == "learned" else None,
        "mix": () if spec.differential else None,
    }
    for name, size in sizes.items():
        x = getattr(extras, name)
        shape = None if x is None else tuple(getattr(x, "shape", [short(x)]))
        wanted = f"the operation takes {name} of shape {size} (None: leave it out)"
        require(shape == size, f"{wanted}, got {shape}")
    if extras.distance_bias is not None:
        shape = tuple(extras.distance_bias.shape)
        fits = len(shape) == 2 and shape[0] in (1, heads) and shape[1] >= length
        wanted = f"distance_bias must have shape (1 or {heads}, at least {length})"
        require(fits, f"{wanted}, got {shape}")


# ---- position terms (Appendix A): some are added to h or to the logits, one rotates q and k


def absolute_embedding(length: int, hidden_size: int) -> Tensor:
    """Sinusoidal p_t of Eq. 5 for t = 1..length: (length, hidden_size), sin and cos interleaved."""
    cos, sin = rotary_tables(length + 1, hidden_size)  # the angles are the same, but start at 0
    interleaved = torch.stack([sin, cos], dim=-1).flatten(1)
    return interleaved[1:, :hidden_size]


def relative_buckets(length: int) -> Tensor:
    """T5's buckets for the distances 0..length-1: (length,) int64.

    Below B/2 each distance is a bucket of its own; up to D the buckets widen logarithmically; from
    D on there is one bucket, B - 1. This is not quite g of Eq. 6: T5 and the authors' code take the
    floor of the scaled logarithm, whereas Eq. 6 prints the floor before the factor B/2, which would
    put all distances from B/2 to D - 1 in one bucket.
    """
    distance = torch.arange(length)
    exact = NUM_BUCKETS // 2
    farther = distance.clamp(min=1).double() / exact
    ratio = torch.log(farther) / math.log(MAX_DISTANCE / exact)
    coarse = exact + (ratio * (NUM_BUCKETS - exact)).long()  # the floor
    coarse = coarse.clamp(max=NUM_BUCKETS - 1)
    return torch.where(distance < exact, distance, coarse)


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes m of Eq. 7 for heads h = 1..H: 2^(-h 2^(3 - log2 H)), shape (H,)."""
    head = torch.arange(1, num_heads + 1).double()
    return torch.exp2(-head * 8 / num_heads).float()


def rotary_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of m omega_i (Eq. 9) for m = 0..length-1, each (length, head_dim / 2)."""
    dimension = torch.arange(0, head_dim, 2, dtype=torch.float64)
    omega = 10_000.0 ** (-dimension / head_dim)
    position = torch.arange(length, dtype=torch.float64)
    angle = position[:, None] * omega
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R_{Theta, m} x (Eq. 8) for x (..., T, D) and tables (T, D / 2).

    It rotates the dimensions i and i + D/2 together, as LLaMA's released code does. This equals
    Eq. 9 if the columns of W_Q and W_K are permuted.
    """
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    return torch.cat([turned, other], dim=-1)
