"""The configuration of the decoder: every variant of Section 7 is a value of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from sinkutils.checks import instance, require
from sinkutils.model.attention import SOFTMAX, AttentionSpec, Map, check_fields
from sinkutils.model.positions import ADDED_TO_LOGITS, POSITIONS

# Table 11: name -> activation; those that end in "glu" are gated. The others keep the width, so have fewer parameters.
FFNS: dict[str, Map] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
    "reglu": F.relu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}
CHOICES = {
    "position": POSITIONS,
    "norm": ("pre", "post", "sandwich"),
    "ffn": tuple(FFNS),
    "head_merge": ("concat", "add"),
    "gate": ("none", "head", "element"),
    "normalization": ("rms", "dyt", "gated"),
}


@dataclass(frozen=True)
class LMConfig:
    """A language model as a value. Raises ValueError, naming the field, for shapes that do not fit."""

    vocab_size: int = 1024
    context_length: int = 64  # C, the longest sequence the model accepts
    num_layers: int = 4  # L
    num_heads: int = 4  # H
    hidden_size: int = 64  # d
    intermediate_size: int = 128  # width of the FFN
    position: str = "rotary"  # rotary, nope, absolute, learnable, relative, relative_learned, alibi
    norm: str = "pre"  # pre (Eq. 2), post (Eq. 3), or sandwich: pre, and each sublayer's output is normed too
    ffn: str = "swiglu"  # relu, gelu, swish, reglu, geglu, swiglu (Table 11)
    head_merge: str = "concat"  # concat, or add: heads are summed before W_O (Table 12 left)
    sink_token: bool = False  # a learnable x* before every sequence (Table 4)
    attention: AttentionSpec = SOFTMAX
    # After the paper (data/paper/after_paper.csv)
    gate: str = (
        "none"  # sigmoid(W x_i) times the output of each head, or of each element of it, before W_O
    )
    qk_norm: bool = False  # RMSNorm of each head's q and k, before the rotation
    value_scale: bool = (
        False  # v_j times r / (r + c), r = |v_j|^2, with a learned c a head (Chen and Yao 2026)
    )
    # rms, dyt: tanh(alpha h) * g in its place, and the embeddings times a learned scale, or gated: rms times a gate
    normalization: str = "rms"

    def __post_init__(self) -> None:
        check_fields(self, CHOICES)
        instance("attention", self.attention, AttentionSpec)
        width, heads, longest, spec = (
            self.hidden_size,
            self.num_heads,
            self.context_length,
            self.attention,
        )
        require(width % heads == 0, f"num_heads must divide hidden_size={width}, got {heads}")
        parts = 2 ** ((self.position == "rotary") + spec.differential)  # what each takes halves of
        without_meaning = {
            "sink_token and attention with a bias of keys or a sink logit are two places for Sink_*: choose one": (
                self.sink_token and spec.has_star
            ),
            f"the head dimension must be a multiple of {parts} with position={self.position!r}, "
            f"differential={spec.differential}; got {self.head_dim}": self.head_dim % parts > 0,
            f"prefix must be at most context_length={longest}, got {spec.prefix}": spec.prefix
            > longest,
            f"bias_dims (d_a) must be at most head_dim={self.head_dim}, got {spec.bias_dims}": (
                (spec.bias_dims or 1) > self.head_dim
            ),
            f"position={self.position!r} has no bias for keys after the query, as a prefix shows: use rotary, nope, "
            "absolute or learnable": spec.prefix > 1 and self.position in ADDED_TO_LOGITS,
        }
        for message, holds in without_meaning.items():
            require(not holds, message)

    @property
    def head_dim(self) -> int:
        """d_h = d / H."""
        return self.hidden_size // self.num_heads
