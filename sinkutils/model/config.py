"""The description of an attention operation and of a language model, as frozen dataclasses.

`attention` and `decoder` compute what they describe. This module needs no PyTorch, so that a list
of experiments is read in no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sinkutils import checks
from sinkutils.checks import Refused, choice, real, require

# The names of f, to which `attention.register` adds; `attention.SIMILARITIES` has the functions.
# softpick (Zuhri et al. 2025) is relu(e^s - 1) / sum |e^s - 1|, see `attention.normalise`.
SIMILARITY_NAMES = ["exp", "sigmoid", "elu", "linear", "relu", "softpick"]
# The other position terms rotate q and k (rotary) or are added to the embeddings (absolute,
# learnable). `relative` adds the number of T5's bucket itself, which grows with the distance, as
# the authors' code does. `relative_learned` is T5's own term: a learned bias for each bucket and
# head. Eq. 6 prints a third variant: see `relative_buckets`.
ADDED_TO_LOGITS = ("relative", "relative_learned", "alibi")

# Fields that have a meaning only beside another field: (field, other field, the other's values)
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
    """The description of an attention operation; the defaults are causal softmax (Eq. 4).

    Raises `ValueError`, which names the allowed values, for a combination that has no meaning.
    """

    similarity: str = "exp"  # f: exp, sigmoid, elu (plus one), linear, relu, softpick
    # phi, applied to q and k: elu is plus one, mlp is one for q, k and all heads
    kernel: Literal["identity", "elu", "mlp"] = "identity"
    # Z: sum of f, none (1), max_abs_sum: max(|sum f|, 1), p_norm: (sum f^p)^(1/p), length
    normalizer: Literal["sum", "none", "max_abs_sum", "p_norm", "length"] = "sum"
    p: float = 1.0  # the p of p_norm (Eq. 43)
    scale: float = 1.0  # alpha (Eq. 29), the sum of the weights of a row
    # Table 4: kv (k*, v*), k (k*, fixed v*), v (v* added to the output)
    bias: Literal["none", "kv", "k", "v"] = "none"
    bias_shared: bool = False  # one bias for all heads of a block (Table 12 right)
    # d_a: how many dimensions of k* are learned; the others are zero (Table 13)
    bias_dims: int | None = None
    # v* of bias='k' (Table 5): zero, first m[1,0,..,0], uniform m[1,..,1]/sqrt(d_h)
    fixed_value: Literal["zero", "first", "uniform"] = "zero"
    fixed_value_norm: float = 1.0  # m
    window: int | None = None  # w: each query sees itself and the w - 1 before it (Section 6)
    prefix: int = 1  # p: every query also sees the first p keys (Section 6)
    logit_bias: float = 0.0  # b in sigmoid(s + b); Ramapuram et al. (2024) use -log C
    # one more logit, which has no key and value: zero (softmax plus one), learned (one per head)
    sink_logit: Literal["none", "zero", "learned"] = "none"
    # A = A_1 - lambda A_2: two maps, from the even and the odd dimensions (Ye et al. 2024)
    differential: bool = False

    def __post_init__(self) -> None:
        choice("similarity", self.similarity, SIMILARITY_NAMES)
        real("p", self.p, "positive and finite", more=True)
        real("scale", self.scale, "positive and finite", more=True)
        checks.fields(self, logit_bias=-math.inf)
        for name, other, values in NEEDS:
            value = getattr(self, name)
            default = getattr(AttentionSpec, name)
            if value != default and getattr(self, other) not in values:
                wanted = " or ".join(map(repr, values))
                raise Refused(f"{name}={value!r} needs {other} to be {wanted}")
        has_sink_logit = self.sink_logit != "none"
        both = "sink_logit and differential"
        require(not (has_sink_logit and self.differential), f"{both} cannot be combined")
        plain = self.is_softmax and self.bias == "none"
        require(
            plain or not (has_sink_logit or self.differential),
            f"{both} each need a plain softmax: similarity='exp', normalizer='sum', bias='none'",
        )
        require(
            not self.signed or self.normalizer in ("none", "max_abs_sum"),
            "similarity='linear' can be negative with this kernel and its sum zero: normalizer "
            "must be 'none' or 'max_abs_sum'",
        )
        softpick = self.similarity == "softpick" and self.normalizer != "sum"
        require(not softpick, "similarity='softpick' needs normalizer='sum'")
        no_rows = self.bias == "v" and self.similarity == "linear"
        require(not no_rows, "bias='v' needs rows of weights, which similarity='linear' has not")

    @property
    def is_softmax(self) -> bool:
        """Whether the weights are a softmax, up to their scale."""
        return self.similarity == "exp" and self.normalizer == "sum"

    @property
    def has_key_bias(self) -> bool:
        """Whether a key k* stands before the sequence's own keys. Sink_* measures its weight."""
        return self.bias in ("k", "kv")

    @property
    def has_star(self) -> bool:
        """Whether column 0 of the weights belongs to k* or to a sink logit instead of a token."""
        return self.has_key_bias or self.sink_logit != "none"

    @property
    def hidden_is_zero(self) -> bool:
        """Whether a hidden key gets the logit 0, because f(0) = 0, instead of -inf."""
        return self.similarity in ("linear", "relu", "softpick")

    @property
    def signed(self) -> bool:
        """Whether similarities can be negative."""
        return self.similarity == "linear" and self.kernel in ("identity", "mlp")


SOFTMAX = AttentionSpec()


@dataclass(frozen=True)
class LMConfig:
    """The description of a language model.

    Raises ValueError, which names a field, for shapes that do not fit together.
    """

    vocab_size: int = 1024
    context_length: int = 64  # C, the longest sequence the model accepts
    num_layers: int = 4  # L
    num_heads: int = 4  # H
    hidden_size: int = 64  # d
    intermediate_size: int = 128  # width of the FFN
    position: Literal[  # Appendix A
        "rotary", "nope", "absolute", "learnable", "relative", "relative_learned", "alibi"
    ] = "rotary"
    # pre (Eq. 2), post (Eq. 3), or sandwich: as pre, with a norm of each sublayer's output as well
    norm: Literal["pre", "post", "sandwich"] = "pre"
    ffn: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = "swiglu"  # Table 11
    # add: heads are summed before W_O (Table 12 left)
    head_merge: Literal["concat", "add"] = "concat"
    sink_token: bool = False  # a learnable x* before every sequence (Table 4)
    attention: AttentionSpec = SOFTMAX
    # The variants below come from later papers (data/paper/after_paper.csv).
    # head, element: sigmoid(W x_i) multiplies each head's output, or its elements, before W_O;
    # shared: sigmoid(W x_i) multiplies the elements of all heads alike, D gates for H heads;
    # open: (1 + sigmoid(W x_i)) / 2 multiplies its elements, so that a gate never closes;
    # constant: sigmoid(b) multiplies its elements, the same for every token;
    # value: sigmoid(W x_j) multiplies the elements of value j, before attention
    gate: Literal["none", "head", "element", "shared", "open", "constant", "value"] = "none"
    qk_norm: bool = False  # RMSNorm of each head's q and k, before the rotation
    # v_j is multiplied by r / (r + c): r = |v_j|^2, and each head learns its c (Chen and Yao 2026)
    value_scale: bool = False
    # dyt: tanh(alpha h) * g replaces RMSNorm, and the embeddings have a learned scale;
    # gated: it is multiplied by a gate
    normalization: Literal["rms", "dyt", "gated"] = "rms"

    def __post_init__(self) -> None:
        checks.fields(self)
        spec = self.attention
        fits = self.hidden_size % self.num_heads == 0
        size = f"hidden_size={self.hidden_size}"
        require(fits, f"num_heads must divide {size}, got {self.num_heads}")
        # The number of equal parts into which the dimensions of a head are cut: rotary pairs the
        # two halves, and each half of a differential head has an attention map of its own.
        parts = (2 if self.position == "rotary" else 1) * (2 if spec.differential else 1)
        require(
            self.head_dim % parts == 0,
            f"the head dimension must be a multiple of {parts} with position={self.position!r}, "
            f"differential={spec.differential}; got {self.head_dim}",
        )
        # With k* as well, Sink_* would have two places. A window would hide x* from most queries,
        # and a prefix would count x* as its first token.
        other = spec.has_star or spec.window is not None or spec.prefix > 1
        require(
            not (self.sink_token and other),
            "sink_token cannot be combined with a bias of keys, a sink logit, a window or a prefix",
        )
        longest = f"prefix must be at most context_length={self.context_length}"
        require(spec.prefix <= self.context_length, f"{longest}, got {spec.prefix}")
        most = f"bias_dims (d_a) must be at most head_dim={self.head_dim}"
        require((spec.bias_dims or 0) <= self.head_dim, f"{most}, got {spec.bias_dims}")
        require(
            spec.prefix == 1 or self.position not in ADDED_TO_LOGITS,
            f"position={self.position!r} has no bias for keys after the query, as a prefix shows: "
            "use rotary, nope, absolute or learnable",
        )

    @property
    def head_dim(self) -> int:
        """d_h = d / H."""
        return self.hidden_size // self.num_heads
