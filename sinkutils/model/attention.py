"""The attention algebra of Section 7 and Appendix C, dense and in the order of the formulas, and
the position terms of Appendix A.

    s_ij = <phi(q_i), phi(k_j)> / sqrt(d_h) + g(i - j)      Section 7.4, Eqs. 29, 43
    A_ij = alpha * f(s_ij) / Z_i
    out_i = sum_j A_ij v_j

phi is the kernel, g the position term, f the similarity, alpha the scale, Z the normaliser. A bias
(Table 4) is one more key and value that every query sees, or a vector added to the output. A sink
logit is one more key without value. `fast` is tested against this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils import checks
from sinkutils.checks import choice, real, require

Map = Callable[[Tensor], Tensor]


def elu_plus_one(s: Tensor) -> Tensor:
    """e^s below 0, 1 + s above. PyTorch's elu is e^s - 1, to which adding 1 gives 0 for s = -17."""
    return torch.where(s < 0, s.clamp(max=0).exp(), s + 1)


# f of Section 7.4, elementwise
SIMILARITIES: dict[str, Map] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "elu": elu_plus_one,
    "linear": lambda s: s,  # the one that can be negative
    "relu": torch.relu,
}
# log f without overflow, of every f that is positive
LOGARITHMS = {
    "exp": lambda s: s,
    # beyond its threshold softplus(x) is x, which is wrong by e^-x: nothing in float64 from 40 on
    "sigmoid": lambda s: -F.softplus(-s, threshold=40),
    "elu": lambda s: torch.where(s < 0, s, torch.log1p(s.clamp(min=0))),
}
# phi of Section 7.4, on queries and keys; "mlp" is learned. In float64, as the product of two small
# phi, e^-60 e^-60 say, is 0 in float32, and a row of such products has no sum.
KERNELS: dict[str, Map] = {"identity": lambda x: x, "elu": lambda x: elu_plus_one(x.double())}
OPERATION_CHOICES = {
    # Zuhri et al. (2025): relu(e^s - 1) over the sum of |e^s - 1|, see `normalise`
    "similarity": (*SIMILARITIES, "softpick"),
    "kernel": (*KERNELS, "mlp"),
    "normalizer": ("sum", "none", "max_abs_sum", "p_norm", "length"),
    "bias": ("none", "kv", "k", "v"),
    "fixed_value": ("zero", "first", "uniform"),
    "sink_logit": ("none", "zero", "learned"),
}
# Others rotate q and k (rotary) or are added to the embeddings (absolute, learnable). `relative`
# adds the number of T5's bucket itself, which grows with distance, as the authors' code does;
# `relative_learned` is T5's, one learned bias a bucket and head. Eq. 6 prints a third thing: see
# `relative_buckets`.
ADDED_TO_LOGITS = ("relative", "relative_learned", "alibi")
POSITIONS = ("rotary", "nope", "absolute", "learnable", *ADDED_TO_LOGITS)

NUM_BUCKETS = 32  # B of Eq. 6
MAX_DISTANCE = 128  # D of Eq. 6

# What means nothing alone: a field, and the values that another field must have beside it
NEEDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("p", "normalizer", ("p_norm",)),
    ("kernel", "similarity", ("linear",)),
    ("logit_bias", "similarity", ("sigmoid",)),
    ("window", "prefix", (1,)),
    ("bias_shared", "bias", ("kv", "k", "v")),
    ("bias_dims", "bias", ("kv", "k")),
    ("fixed_value", "bias", ("k",)),
)


@dataclass(frozen=True)
class AttentionSpec:
    """One attention operation as a value. The defaults are causal softmax attention (Eq. 4).

    Raises `ValueError`, naming the allowed values, for a combination that has no meaning.
    """

    similarity: str = "exp"  # f: exp, sigmoid, elu (plus one), linear, relu, softpick
    # phi on q and k: identity, elu (plus one), mlp (shared by q, k and heads)
    kernel: str = "identity"
    # Z: sum of f, none (1), max_abs_sum: max(|sum f|, 1), p_norm: (sum f^p)^(1/p), length
    normalizer: str = "sum"
    p: float = 1.0  # the p of p_norm (Eq. 43)
    scale: float = 1.0  # alpha (Eq. 29): the weights sum to it
    bias: str = "none"  # Table 4: kv (k*, v*), k (k*, fixed v*), v (v* added to the output)
    bias_shared: bool = False  # one bias for all heads of a block (Table 12 right)
    # d_a: learnable dimensions of k*, the others are zero (Table 13)
    bias_dims: int | None = None
    # v* of K biases (Table 5): zero, first m[1,0,..,0], uniform m[1,..,1]/sqrt(d_h)
    fixed_value: str = "zero"
    fixed_value_norm: float = 1.0  # m
    window: int | None = None  # w: each query sees itself and the w - 1 before it (Section 6)
    prefix: int = 1  # p: every query also sees the first p keys (Section 6)
    logit_bias: float = 0.0  # b of f(s + b) for sigmoid: -log C (Ramapuram et al. 2024)
    # one more logit without key and value: zero (softmax plus one), learned (a head's own)
    sink_logit: str = "none"
    # A = A_1 - lambda A_2 of the even and the odd dimensions of q and k (Ye et al. 2024)
    differential: bool = False

    def __post_init__(self) -> None:
        for name, allowed in OPERATION_CHOICES.items():
            choice(name, getattr(self, name), allowed)
        real("p", self.p, "positive and finite", more=True)
        real("scale", self.scale, "positive and finite", more=True)
        checks.fields(self, logit_bias=-torch.inf)
        for name, other, values in NEEDS:
            value = getattr(self, name)
            default = getattr(AttentionSpec, name)
            if value != default and getattr(self, other) not in values:
                wanted = " or ".join(map(repr, values))
                raise ValueError(f"{name}={value!r} needs {other} to be {wanted}")
        has_sink_logit = self.sink_logit != "none"
        if has_sink_logit and self.differential:
            raise ValueError("sink_logit and differential cannot be combined")
        plain = self.is_softmax and self.bias == "none"
        if (has_sink_logit or self.differential) and not plain:
            raise ValueError(
                "sink_logit and differential each need a plain softmax: similarity='exp', "
                "normalizer='sum', bias='none'"
            )
        if self.signed and self.normalizer not in ("none", "max_abs_sum"):
            raise ValueError(
                "similarity='linear' can be negative with this kernel and its sum zero: "
                "normalizer must be 'none' or 'max_abs_sum'"
            )
        if self.similarity == "softpick" and self.normalizer != "sum":
            raise ValueError("similarity='softpick' needs normalizer='sum'")
        if self.bias == "v" and self.similarity == "linear":
            raise ValueError("bias='v' needs rows of weights, which similarity='linear' has not")

    @property
    def is_softmax(self) -> bool:
        """Whether the weights are a softmax, up to their scale."""
        return self.similarity == "exp" and self.normalizer == "sum"

    @property
    def has_key_bias(self) -> bool:
        """Whether a key k* stands before the sequence's own keys: its weight is Sink_*."""
        return self.bias in ("k", "kv")

    @property
    def has_star(self) -> bool:
        """Whether column 0 of the weights is no key of the sequence: k*, or a sink logit."""
        return self.has_key_bias or self.sink_logit != "none"

    def f(self, logits: Tensor) -> Tensor:
        """The similarity of logits, with its logit bias."""
        return SIMILARITIES[self.similarity](logits + self.logit_bias)

    @property
    def hidden_is_zero(self) -> bool:
        """Whether a hidden key gets the logit 0, where f is 0, in place of -inf."""
        return self.similarity in ("linear", "relu", "softpick")

    @property
    def signed(self) -> bool:
        """Whether similarities can be negative, so that the sink metric needs proxy scores."""
        return self.similarity == "linear" and self.kernel in ("identity", "mlp")


SOFTMAX = AttentionSpec()


class Extras(NamedTuple):
    """What an operation takes beside q, k and v, by the names of `attend`'s keyword arguments."""

    distance_bias: Tensor | None = None  # (1 or H, >= T): g of Appendix A by distance i - j
    key_bias: Tensor | None = None  # (H, D): k* of bias 'k' and 'kv'
    # (H, D): v* of bias 'v' and 'kv', and of a fixed value that is not zero
    value_bias: Tensor | None = None
    mlp: Map | None = None  # the kernel of kernel='mlp', (..., D) -> (..., D)
    sink_logit: Tensor | None = None  # (H,), of sink_logit='learned'
    mix: Tensor | None = None  # lambda of differential attention, a scalar


def visible(row: Tensor, column: Tensor, spec: AttentionSpec) -> Tensor:
    """The mask M of Eq. 4: whether the query at `row` sees the key at `column`, elementwise.

    Positions of the sequence, from 0. A query sees the keys up to its own, or the last w of them.
    Without a window it sees the first p keys of all, too (Section 6).
    """
    causal = row >= column
    if spec.window is None:
        return causal | (column < spec.prefix)
    return causal & (row - column < spec.window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = SOFTMAX, **extras: Any
) -> tuple[Tensor, Tensor]:
    """Attention as the formulas at the top of this module read: the oracle, O(T^2) memory.

    q, k, v: (B, H, T, D), after rotary. extras: those of `Extras` that the operation needs.
    Returns out (B, H, T, D) and weights (B, H, T, S) in the dtype of v. S is T, or 1 + T where
    column 0 is k* or takes the sink logit. A row that sees nothing, or whose sum is zero, has zero
    weights. Raises ValueError on wrong shapes.
    """
    learned = Extras(**extras)
    check_inputs(q, k, v, spec, learned)
    if learned.mix is not None:
        # Ye et al. 2024: A = A_1 - lambda A_2, on the values that both maps share. A position term
        # is of both maps; a bias or a sink logit has none of the two.
        softmax = replace(spec, differential=False)
        even, odd = halves(q)
        out, weights = attend(even, k, v, softmax, distance_bias=learned.distance_bias)
        out_2, weights_2 = attend(odd, k, v, softmax, distance_bias=learned.distance_bias)
        mix = learned.mix.to(v.dtype)
        return out - mix * out_2, weights - mix * weights_2
    q, k, v = prepared(q, k, v, spec, learned)
    out, weights = _out_and_weights(q, k, v, spec, learned.distance_bias)
    return finished(out, spec, learned), weights


def _out_and_weights(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and weights of queries and keys after phi, k* in front of the keys if there is one.

    In float32 at least, whatever the inputs: a logit of 100 has no fractions in bfloat16.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q = q.to(wide)
        k = k.to(wide)
        added, hidden = added_to_logits(q, k, spec, distance_bias)
        products = q @ k.mT * q.shape[-1] ** -0.5  # <q_i, k_j> / sqrt(D), (B, H, T, S)
        logits = products + added  # s_ij
        weights = normalise(logits, ~hidden, spec)
        out = weights @ v.to(weights.dtype)
    return out.to(v.dtype), weights.to(v.dtype)


def prepared(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys after the kernel phi, as the authors do after rotary; k* and v* in front.

    There are then S = 1 + T keys. A v* that is not given is zero. A sink logit is a k* in one more
    dimension, in which queries are 1 and the sequence's own keys and values are 0.
    """
    star = extras.key_bias
    value = extras.value_bias
    if spec.sink_logit != "none":
        sink = extras.sink_logit
        if sink is None:
            sink = q.new_zeros(q.shape[1])
        D = q.shape[-1]
        q = q * ((D + 1) / D) ** 0.5  # logits are divided by sqrt(D + 1), and stay the same
        last = sink * (D + 1) ** 0.5  # k* in the new dimension, (H,)
        star = F.pad(last[:, None], (D, 0)).to(q.dtype)  # (H, D + 1)
        q = F.pad(q, (0, 1), value=1.0)
        k = F.pad(k, (0, 1))
        v = F.pad(v, (0, 1))
    if star is not None:
        k = prepend(star, k)
        v = prepend(value, v)
    # After k* went in front: a kernel is taken of it as well.
    phi = extras.mlp or KERNELS[spec.kernel]
    return phi(q), phi(k), v


def finished(out: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
    """The output without the dimension that `prepared` adds for a sink logit, and with a V bias."""
    if spec.sink_logit != "none":
        out = out[..., :-1]
    if spec.bias == "v":
        out = out + extras.value_bias[:, None]  # type: ignore[index]
    return out


def added_to_logits(
    q: Tensor, k: Tensor, spec: AttentionSpec, distance_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What is added to the logits, (1 or H, T, S), and which keys are hidden, (T, S).

    Added is g, and -inf at hidden keys, or 0 where f(0) = 0.
    """
    length = q.shape[2]
    star = k.shape[2] - length  # 1 where there is k*
    positions = torch.arange(length, device=q.device)
    seen = visible(positions[:, None], positions, spec)
    hidden = F.pad(~seen, (star, 0))  # every query sees k*
    added = q.new_zeros(1, length, k.shape[2])
    if distance_bias is not None:
        # g(i - j) is constant along diagonals, so its rows are windows on one line of it. Their
        # backward is a sum, not a scatter.
        distances = torch.arange(1 - length, length, device=q.device)
        # Keys after the query, which are hidden, may have any number: that of distance 0.
        line = distance_bias[:, distances.clamp(min=0)]  # (1 or H, 2 T - 1)
        rows = line.unfold(-1, length, 1).flip(-1)  # (1 or H, T, T)
        added = added + F.pad(rows, (star, 0))  # k* has no position
    if not spec.hidden_is_zero:
        added = added.masked_fill(hidden, -torch.inf)
    return added, hidden


def prepend(bias: Tensor | None, x: Tensor) -> Tensor:
    """bias (H, D), or zero, in front of x (B, H, T, D): (B, H, 1 + T, D)."""
    if bias is None:
        return F.pad(x, (0, 0, 1, 0))
    first = bias.to(x.dtype)[:, None].expand(len(x), -1, -1, -1)  # (B, H, 1, D)
    return torch.cat([first, x], dim=2)


def halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of the two maps of differential attention, of the even and of the odd dimensions.

    A query without its odd (even) dimensions ignores those of the keys; sqrt 2 makes up for their
    number in 1/sqrt(D).
    """
    odd = torch.arange(q.shape[-1], device=q.device) % 2 == 1  # (D,)
    longer = q * 2**0.5
    return longer.masked_fill(odd, 0), longer.masked_fill(~odd, 0)


def normalise(logits: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """A_ij = alpha f(s_ij) / Z_i (Eqs. 29, 43) over the keys that `seen` allows; 0 elsewhere.

    logits (..., R, S); seen (R, S) boolean.
    """
    hidden = 0 if spec.hidden_is_zero else -torch.inf
    logits = logits.masked_fill(~seen, hidden)
    if spec.similarity == "softpick":  # relu(e^s - 1) / sum |e^s - 1|, both divided by e^peak
        peak = logits.amax(-1, keepdim=True).clamp(min=0).detach()
        one = (-peak).exp()  # the 1 of e^s - 1, divided too
        sim = (logits - peak).exp() - one
        sim = sim.masked_fill(~seen, 0)
        total = sim.abs().sum(-1, keepdim=True)
        return spec.scale * divide(sim.relu(), total)
    sim, unit = in_range(logits, spec)
    return spec.scale * divide(sim, normalizer(sim, seen, spec, unit))


def in_range(logits: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """f(s_ij) over a number of its row, which cancels in A_ij; and 1 over it, for max_abs_sum.

    logits (..., R, S) are -inf, or 0 where f(0) = 0, at hidden keys. As they are, sigmoid(-100) and
    its powers are nothing in float32, and e^100 is too much. An operation without a sum keeps
    f(s_ij) itself, and overflows where that does.
    """
    if spec.normalizer in ("none", "length"):
        return spec.f(logits), None
    if spec.similarity not in LOGARITHMS:
        sim = spec.f(logits)
        if spec.normalizer == "p_norm":
            peak = sim.amax(-1, keepdim=True).detach()
            sim = divide(sim, peak)
        return sim, sim.new_ones(())
    # f / max f as exp(log f - max log f), so that neither overflows.
    logs = LOGARITHMS[spec.similarity](logits + spec.logit_bias)
    peak = logs.amax(-1, keepdim=True).detach()
    peak = peak.masked_fill(~peak.isfinite(), 0)  # a row that sees nothing
    if spec.normalizer == "max_abs_sum":  # where the sum is below 1 it is not what divides
        peak = peak.clamp(min=0)
    return (logs - peak).exp(), (-peak).exp()


def normalizer(
    sim: Tensor, seen: Tensor, spec: AttentionSpec, unit: Tensor | None
) -> Tensor | None:
    """Z_i (Section 7.4, Eq. 43) from what `in_range` returns: (..., R, 1), or None for Z = 1."""
    if spec.normalizer == "none":
        return None
    if spec.normalizer == "length":
        return seen.sum(-1, keepdim=True).to(sim.dtype)
    if spec.normalizer == "p_norm":
        # x^p has an infinite gradient at 0 for p < 1: a hidden key, whose x is 0, is kept out.
        total = _power(sim, spec.p).sum(-1, keepdim=True)
        return _power(total, 1 / spec.p)
    total = sim.sum(-1, keepdim=True)
    if spec.normalizer == "max_abs_sum":  # max(|sum f|, 1), Table 15; `unit`: 1 in the row's scale
        return total.abs().clamp(min=unit)
    return total


def _power(x: Tensor, p: float) -> Tensor:
    """x^p of x >= 0, with no gradient where x is 0."""
    positive = x > 0
    base = torch.where(positive, x, 1)  # whose power has a finite gradient everywhere
    return base.pow(p).masked_fill(~positive, 0)


def divide(sim: Tensor, total: Tensor | None) -> Tensor:
    """sim / total, 0 where the total is 0, without a nan in the gradient; None stands for 1."""
    if total is None:
        return sim
    empty = total == 0
    share = sim / total.masked_fill(empty, 1)
    return share.masked_fill(empty, 0)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras) -> None:
    """Raise ValueError, naming the argument and the shape it should have, if inputs do not fit."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    require(
        q.shape == k.shape == v.shape and q.ndim == 4 and q.shape[2] >= 1,
        f"q, k and v must have one shape (B, H, T, D) with T at least 1, got {shapes}",
    )
    _, heads, length, head_dim = q.shape
    if spec.differential and head_dim % 2 > 0:
        raise ValueError("differential attention needs an even head dimension (D of q)")
    if (spec.kernel == "mlp") != (extras.mlp is not None):
        raise ValueError("mlp is the callable of kernel='mlp', and of no other")
    has_value = spec.bias in ("kv", "v") or spec.fixed_value != "zero"
    sizes = {
        "key_bias": (heads, head_dim) if spec.has_key_bias else None,
        "value_bias": (heads, head_dim) if has_value else None,
        "sink_logit": (heads,) if spec.sink_logit == "learned" else None,
        "mix": () if spec.differential else None,
    }
    for name, size in sizes.items():
        x = getattr(extras, name)
        shape = None if x is None else tuple(x.shape)
        if shape != size:
            raise ValueError(
                f"the operation takes {name} of shape {size} (None: leave it out), got {shape}"
            )
    if extras.distance_bias is not None:
        shape = tuple(extras.distance_bias.shape)
        require(
            len(shape) == 2 and shape[0] in (1, heads) and shape[1] >= length,
            f"distance_bias must have shape (1 or {heads}, at least {length}), got {shape}",
        )


# ---- positions (Appendix A): added to h or to the logits, or rotating q and k


def absolute_embedding(length: int, hidden_size: int) -> Tensor:
    """Sinusoidal p_t of Eq. 5 for t = 1..length: (length, hidden_size), sin and cos interleaved."""
    cos, sin = rotary_tables(length + 1, hidden_size)  # of the same angles, from 0
    interleaved = torch.stack([sin, cos], dim=-1).flatten(1)
    return interleaved[1:, :hidden_size]


def relative_buckets(length: int) -> Tensor:
    """T5's bucket of distances 0..length-1, (length,) int64.

    Exact up to B/2, logarithmic up to D, then B - 1. Not quite g of Eq. 6: T5, and the authors'
    code with it, takes the floor of the scaled logarithm; Eq. 6 prints the floor before the factor
    B/2, which puts all distances from B/2 to D - 1 in one bucket.
    """
    distance = torch.arange(length)
    exact = NUM_BUCKETS // 2
    farther = distance.clamp(min=1).double() / exact
    ratio = torch.log(farther) / math.log(MAX_DISTANCE / exact)
    coarse = exact + (ratio * (NUM_BUCKETS - exact)).long()  # the floor
    coarse = coarse.clamp(max=NUM_BUCKETS - 1)
    return torch.where(distance < exact, distance, coarse)


def alibi_slopes(num_heads: int) -> Tensor:
    """m of Eq. 7 for heads 1..H: 2^(-h 2^(3 - log2 H)), shape (H,)."""
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
    """R_{Theta, m} x (Eq. 8) on (..., T, D) with tables (T, D / 2).

    The pairs are (i, i + D/2), as in LLaMA's released code: Eq. 9 with the columns of W_Q and W_K
    permuted.
    """
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    return torch.cat([turned, other], dim=-1)
