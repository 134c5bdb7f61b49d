"""The attention algebra of Section 7 and Appendix C, dense and in the order of the formulas.

    s_ij = <phi(q_i), phi(k_j)> / sqrt(d_h) + g(i - j)      kernel phi, position term g (Section 7.4, Eqs. 29, 43)
    A_ij = alpha * f(s_ij) / Z_i                            similarity f, scale alpha, normaliser Z
    out_i = sum_j A_ij v_j

A bias (Table 4) is one more key and value that every query sees, or a vector added to the output; a sink logit one more
key without value. `fast` is tested against this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import choice, flag, is_count, real, require

Map = Callable[[Tensor], Tensor]

# f of Section 7.4, elementwise
SIMILARITIES: dict[str, Map] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "elu": lambda s: F.elu(s) + 1,
    "linear": lambda s: s,  # the one that can be negative
    "relu": torch.relu,
    # Zuhri et al. (2025): relu(e^s - 1) over the sum of |e^s - 1|, see `normalise`
    "softpick": lambda s: torch.expm1(s).relu(),
}
# log f without overflow, of every f that is positive: what FlexAttention takes in place of the logits
LOGARITHMS: dict[str, Map] = {
    "exp": lambda s: s,
    "sigmoid": lambda s: -F.softplus(-s),
    "elu": lambda s: torch.where(s < 0, s, torch.log1p(s.clamp(min=0))),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "similarity": tuple(SIMILARITIES),
    "kernel": ("identity", "elu", "mlp"),
    "normalizer": ("sum", "none", "max_abs_sum", "p_norm", "length"),
    "bias": ("none", "kv", "k", "v"),
    "fixed_value": ("zero", "first", "uniform"),
    "sink_logit": ("none", "zero", "learned"),
}


@dataclass(frozen=True)
class AttentionSpec:
    """One attention operation as a value. The defaults are causal softmax attention (Eq. 4).

    Raises `ValueError`, naming the allowed values, for a combination that has no meaning.
    """

    similarity: str = "exp"  # f: exp, sigmoid, elu (plus one), linear, relu, softpick
    kernel: str = "identity"  # phi on q and k: identity, elu (plus one), mlp (shared by q, k and heads)
    normalizer: str = "sum"  # Z: sum of f, none (1), max_abs_sum: max(|sum f|, 1), p_norm: (sum f^p)^(1/p), length
    p: float = 1.0  # the p of p_norm (Eq. 43)
    scale: float = 1.0  # alpha (Eq. 29): the weights sum to it
    bias: str = "none"  # Table 4: kv (k*, v*), k (k*, fixed v*), v (v* added to the output)
    bias_shared: bool = False  # one bias for all heads of a block (Table 12 right)
    bias_dims: int | None = None  # d_a: learnable dimensions of k*, the others are zero (Table 13)
    fixed_value: str = "zero"  # v* of K biases (Table 5): zero, first m[1,0,..,0], uniform m[1,..,1]/sqrt(d_h)
    fixed_value_norm: float = 1.0  # m
    window: int | None = None  # w: each query sees itself and the w - 1 before it (Section 6)
    prefix: int = 1  # p: every query also sees the first p keys (Section 6)
    logit_bias: float = 0.0  # b of f(s + b) for sigmoid: -log C (Ramapuram et al. 2024)
    sink_logit: str = "none"  # one more logit without key and value: zero (softmax plus one), learned (a head's own)
    differential: bool = False  # A = A_1 - lambda A_2 of the even and the odd dimensions of q and k (Ye et al. 2024)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            choice(name, getattr(self, name), allowed)
        flag("bias_shared", self.bias_shared)
        flag("differential", self.differential)
        real("p", self.p, "positive and finite")
        real("scale", self.scale, "positive and finite")
        real("logit_bias", self.logit_bias, "finite", low=-torch.inf)
        real("fixed_value_norm", self.fixed_value_norm, "finite and not negative", ends="low")
        for name in ("window", "bias_dims"):
            value = getattr(self, name)
            require(value is None or is_count(value), f"{name} must be None or an integer >= 1, got {value!r}")
        require(is_count(self.prefix), f"prefix must be an integer >= 1 (1 is plain causal), got {self.prefix!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        """Raise ValueError for an operation, a mask and biases that do not go together."""
        require(self.window is None or self.prefix == 1, "window and prefix cannot be combined: use one")
        require(self.p == 1 or self.normalizer == "p_norm", "p other than 1 needs normalizer='p_norm'")
        if self.kernel != "identity":
            require(self.similarity == "linear", f"kernel={self.kernel!r} needs similarity='linear'")
        if self.signed:
            negative = f"similarity='linear' with kernel={self.kernel!r} can be negative, so its sum can be zero"
            finite = self.normalizer in ("none", "max_abs_sum")
            require(finite, f"{negative}: normalizer must be 'none' or 'max_abs_sum'")
        if self.logit_bias != 0:
            require(self.similarity == "sigmoid", "logit_bias moves a sigmoid: similarity must be 'sigmoid'")
        if self.similarity == "softpick":
            require(self.normalizer == "sum", "softpick has its own Z: normalizer must be 'sum'")
        softmax = "similarity 'exp', normalizer 'sum'"
        if self.sink_logit != "none":
            require(self.is_softmax and self.bias == "none", f"sink_logit joins a softmax: {softmax}, and no bias")
        if self.differential:
            plain = self.is_softmax and self.bias == "none" and self.sink_logit == "none"
            require(plain, f"differential attention is of two softmax maps: {softmax}, no bias, no sink_logit")
        if self.similarity == "linear":
            require(self.bias != "v", "bias='v' needs rows of weights, which similarity='linear' has not")
        if self.bias_shared:
            require(self.bias != "none", "bias_shared needs a bias: 'k', 'kv' or 'v'")
        if self.bias_dims is not None:
            require(self.has_key_bias, "bias_dims describes a key bias: bias must be 'k' or 'kv'")
        if self.fixed_value != "zero":
            require(self.bias == "k", f"fixed_value={self.fixed_value!r} needs bias='k'")

    @property
    def is_softmax(self) -> bool:
        """Whether the weights are a softmax, up to their scale."""
        return self.similarity == "exp" and self.normalizer == "sum"

    @property
    def has_key_bias(self) -> bool:
        """Whether a key k* stands before the sequence's own keys (its weight is reported as Sink_*)."""
        return self.bias in ("k", "kv")

    @property
    def has_star(self) -> bool:
        """Whether column 0 of the weights is not a key of the sequence: k*, or what the sink logit takes."""
        return self.has_key_bias or self.sink_logit != "none"

    def f(self, logits: Tensor) -> Tensor:
        """The similarity of logits, with its logit bias."""
        return SIMILARITIES[self.similarity](self._shifted(logits))

    def log_f(self, logits: Tensor) -> Tensor:
        """log f of logits; KeyError where f can be zero (`LOGARITHMS`)."""
        return LOGARITHMS[self.similarity](self._shifted(logits))

    def _shifted(self, logits: Tensor) -> Tensor:
        return logits if self.logit_bias == 0 else logits + self.logit_bias

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
    """What an operation takes beside q, k and v, by the names of `attend`'s keyword arguments; each may be None."""

    distance_bias: Tensor | None = None  # (1 or H, >= T): g of Appendix A by distance i - j
    key_bias: Tensor | None = None  # (H, D): k* of bias 'k' and 'kv'
    value_bias: Tensor | None = None  # (H, D): v* of bias 'v' and 'kv', and of a fixed value that is not zero
    mlp: Map | None = None  # the kernel of kernel='mlp', (..., D) -> (..., D)
    sink_logit: Tensor | None = None  # (H,), of sink_logit='learned'
    mix: Tensor | None = None  # lambda of differential attention, a scalar


def visible(row: Tensor, column: Tensor, spec: AttentionSpec) -> Tensor:
    """The mask M of Eq. 4: whether the query at `row` sees the key at `column`, positions from 0; elementwise.

    Causal, within the window w, and the first p keys always (Section 6), as k* at position -1.
    """
    before = row >= column
    if spec.window is None:
        return before | (column < spec.prefix)
    return before & (row - column < spec.window) | (column < 0)


def features(x: Tensor, spec: AttentionSpec, mlp: Map | None) -> Tensor:
    """phi of Section 7.4 on queries or keys, (..., D) -> (..., D); applied after rotary, as the authors do."""
    if spec.kernel == "elu":
        return F.elu(x) + 1
    if spec.kernel == "mlp":
        if mlp is None:
            raise ValueError("kernel='mlp' needs the argument mlp: a callable from (..., D) to (..., D)")
        return mlp(x)
    return x


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = SOFTMAX, **extras: Any) -> tuple[Tensor, Tensor]:
    """Attention as the formulas at the top of this module read: the oracle, O(T^2) memory.

    q, k, v: (B, H, T, D), after rotary. extras: those of `Extras` that the operation needs.
    Returns out (B, H, T, D) and weights (B, H, T, S): S = T, or 1 + T where column 0 is k* or takes the sink logit.
    A row that sees nothing, or whose sum is zero, has zero weights. Raises ValueError on wrong shapes.
    """
    given = Extras(**extras)
    check_inputs(q, k, v, spec, given)
    if given.mix is not None:  # A = A_1 - lambda A_2, on the values that both maps share
        plain = replace(spec, differential=False)
        first, second = (attend(half, k, v, plain, distance_bias=given.distance_bias) for half in halves(q))
        return first[0] - given.mix.to(v.dtype) * second[0], first[1] - given.mix * second[1]
    positions = torch.arange(q.shape[2], device=q.device)
    seen = visible(positions[:, None], positions, spec)  # (T, T)
    scale = q.shape[-1] ** -0.5
    phi_q = features(q, spec, given.mlp)
    logits = phi_q @ features(k, spec, given.mlp).mT * scale  # s_ij
    if given.distance_bias is not None:
        distance = (positions[:, None] - positions).clamp(min=0)
        logits = logits + given.distance_bias[:, distance]  # g(i - j)
    if given.key_bias is not None:  # column 0 is k*, which has no position
        star = phi_q @ features(given.key_bias, spec, given.mlp)[:, :, None] * scale
        v = prepend(given.value_bias, v)
    elif spec.has_star:  # column 0 is the sink logit, which has no value
        star = sink_logits(q, given)[:, None, None].expand_as(logits[..., :1])
        v = prepend(None, v)
    if spec.has_star:
        logits = torch.cat([star.to(logits.dtype), logits], dim=-1)
        seen = F.pad(seen, (1, 0), value=True)
    weights = normalise(logits, seen, spec)
    out = weights.to(v.dtype) @ v  # a position term may be wider than v
    if spec.bias == "v":
        out = out + given.value_bias[:, None]  # type: ignore[index]
    return out, weights


def sink_logits(q: Tensor, given: Extras) -> Tensor:
    """The sink logit of each head, (H,): what is learned, or zero."""
    return q.new_zeros(q.shape[1]) if given.sink_logit is None else given.sink_logit


def prepend(bias: Tensor | None, x: Tensor) -> Tensor:
    """bias (H, D), or zero, in front of x (B, H, T, D): (B, H, 1 + T, D)."""
    if bias is None:
        return F.pad(x, (0, 0, 1, 0))
    return torch.cat([bias.to(x.dtype)[None, :, None].expand(len(x), -1, -1, -1), x], dim=2)


def halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of the two maps of differential attention, of the even and of the odd dimensions.

    A query without its odd (even) dimensions ignores those of the keys; sqrt 2 makes up for their number in 1/sqrt(D).
    """
    odd = torch.arange(q.shape[-1], device=q.device) % 2 == 1
    wider = q * 2**0.5
    return wider.masked_fill(odd, 0), wider.masked_fill(~odd, 0)


def normalise(logits: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """A_ij = alpha f(s_ij) / Z_i (Eqs. 29, 43) over the keys that `seen` allows; 0 elsewhere.

    logits (..., R, S); seen (R, S) boolean. The row maximum is taken out of exp before it can overflow: it
    cancels in `sum` and in `p_norm`.
    """
    if spec.similarity == "exp" and spec.normalizer in ("sum", "p_norm"):
        peak = logits.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).detach()
        logits = logits - peak.masked_fill(~peak.isfinite(), 0)
    if spec.similarity == "softpick":  # relu(e^s - 1) / sum |e^s - 1|, both divided by e^peak
        logits = logits.masked_fill(~seen, 0)
        peak = logits.amax(-1, keepdim=True).clamp(min=0).detach()
        sim = ((logits - peak).exp() - (-peak).exp()).masked_fill(~seen, 0)
        return spec.scale * divide(sim.relu(), sim.abs().sum(-1, keepdim=True))
    # Masked before f too: exp of a hidden logit could overflow, and its gradient would be nan.
    sim = spec.f(logits.masked_fill(~seen, 0)).masked_fill(~seen, 0)
    return spec.scale * divide(sim, normalizer(sim, seen, spec))


def normalizer(sim: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor | None:
    """Z_i of Section 7.4 and Eq. 43 from similarities (..., R, S), as (..., R, 1); None stands for Z = 1."""
    if spec.normalizer == "none":
        return None
    if spec.normalizer == "length":
        return seen.sum(-1, keepdim=True).to(sim.dtype)
    if spec.normalizer == "p_norm":
        # A similarity of exactly zero (a hidden key) has no gradient for p < 1: keep it out of the power.
        powers = torch.where(sim > 0, sim, 1).pow(spec.p).masked_fill(sim <= 0, 0)
        total = powers.sum(-1, keepdim=True)
        return torch.where(total > 0, total, 1).pow(1 / spec.p).masked_fill(total <= 0, 0)
    total = sim.sum(-1, keepdim=True)
    return total.abs().clamp(min=1) if spec.normalizer == "max_abs_sum" else total


def divide(sim: Tensor, total: Tensor | None) -> Tensor:
    """sim / total with 0 where the total is 0, without a nan in the gradient; total None stands for 1."""
    if total is None:
        return sim
    empty = total == 0
    return (sim / total.masked_fill(empty, 1)).masked_fill(empty, 0)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, given: Extras) -> None:
    """Raise ValueError, naming the argument and the shape it should have, when the inputs do not fit."""
    require(q.ndim == 4, f"q must have shape (B, H, T, D), got {tuple(q.shape)}")
    shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
    require(k.shape == v.shape == q.shape, f"k and v must have the shape of q, {tuple(q.shape)}; got {shapes}")
    _, heads, length, head_dim = q.shape
    require(length >= 1, f"q must have at least one position, got shape {tuple(q.shape)}")
    require(not spec.differential or head_dim % 2 == 0, "differential attention needs an even head dimension")
    has_value = spec.bias in ("kv", "v") or spec.fixed_value != "zero"
    _check_extra("key_bias", given.key_bias, spec.has_key_bias, (heads, head_dim))
    _check_extra("value_bias", given.value_bias, has_value, (heads, head_dim))
    _check_extra("sink_logit", given.sink_logit, spec.sink_logit == "learned", (heads,))
    _check_extra("mix", given.mix, spec.differential, ())
    table = given.distance_bias
    if table is not None:
        shape = tuple(table.shape)
        fits = len(shape) == 2 and shape[0] in (1, heads)
        require(fits, f"distance_bias must have shape (1 or {heads}, T), got {shape}")
        require(shape[1] >= length, f"distance_bias covers {shape[1]} distances, the sequence has {length}")


def _check_extra(name: str, x: Tensor | None, needed: bool, shape: tuple[int, ...]) -> None:
    """Raise ValueError where an argument is missing, has no place in the operation or has another shape."""
    if x is None:
        require(not needed, f"the operation needs the argument {name}")
    else:
        require(needed, f"the operation has no place for the argument {name}: leave it out")
        require(x.shape == shape, f"{name} must have shape {shape}, got {tuple(x.shape)}")
