"""The decoder of Eqs. 1-4. Every variant of Section 7 is a value of its configuration.

`forward(ids, observer)` passes h, q, k and v to an observer as soon as they are computed. So a
measurement needs no hooks, and no attention map is kept. An observer is an object with three
methods. Layers count from 0. With a sink token, x* is the first position of every tensor, so that
T is one more than the number of ids.

    embedding(hidden)                         h^0, (B, T, d)
    attention(layer, q, k, v, spec, extras)   the arguments of `attend`: q, k (after rotary) and v,
                                              each (B, H, T, D), the spec and the extras
    block(layer, hidden, before_norm)         h^l, and h^l before the last norm of a post-norm block
                                              (for other blocks, h^l again)

An observer may also change them in place, as surgery does with q, k and v. If its `attention`
returns a tensor (B, H, T, D), that is the output of the operation.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.checks import Refused, short
from sinkutils.model import attention, fast
from sinkutils.model.attention import Map
from sinkutils.model.config import AttentionSpec, LMConfig

GATE_RANK = 16  # of the gate of `GatedNorm`
VALUE_VARIANCE = 2 / 5  # the variance of an element of v before training, if its input is normed
Tables = dict[str, Tensor]  # the tables of a position term, by name: see `position_tables`

# Table 11. The FFNs that end in "glu" are gated. The others have the same width, and so fewer
# parameters.
FFNS: dict[str, Map] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
    "reglu": F.relu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}


class RMSNorm(nn.RMSNorm):
    """The LN of Section 3.1: h / RMS(h) * g. The gain g is cast to the precision of h."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.to(x.dtype)
        return F.rms_norm(x, gain.shape, gain, eps=1e-5)


class DyT(nn.Module):
    """DynamicTanh, tanh(alpha h) * g, which replaces a norm (Zhu et al. 2025)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        bounded = torch.tanh(self.alpha.to(x.dtype) * x)
        return bounded * self.weight.to(x.dtype)


class GatedNorm(RMSNorm):
    """y * sigmoid(W_up silu(W_down y)), where y = RMSNorm(h) and W_up W_down has rank 16.

    Qiu et al. (2026) proposed it.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.down = nn.Linear(size, GATE_RANK, bias=False)
        self.up = nn.Linear(GATE_RANK, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gate: Tensor = self.up(F.silu(self.down(y)))
        return y * gate.sigmoid().to(y.dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "dyt": DyT, "gated": GatedNorm}


def norm_layer(config: LMConfig) -> nn.Module:
    """A norm of the hidden states, of the kind that the config names."""
    return NORMS[config.normalization](config.hidden_size)


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 4) with the variants that `AttentionSpec` describes."""

    def __init__(self, config: LMConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        spec = config.attention
        heads = config.num_heads
        width = config.hidden_size
        head_dim = config.head_dim
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        merged = head_dim if config.head_merge == "add" else width
        self.out = nn.Linear(merged, width, bias=False)
        # `TransformerLM.reset_parameters` gives every parameter its initial value.
        rows = 1 if spec.bias_shared else heads
        if spec.has_key_bias:  # k*, of which d_a dimensions are learned (Table 13)
            self.key_bias = nn.Parameter(torch.empty(rows, spec.bias_dims or head_dim))
        if spec.bias in ("kv", "v"):  # v*
            self.value_bias = nn.Parameter(torch.empty(rows, head_dim))
        if config.position == "relative_learned":
            self.bucket_bias = nn.Parameter(torch.empty(heads, attention.NUM_BUCKETS))
        if spec.sink_logit == "learned":
            self.sink_logit = nn.Parameter(torch.empty(heads, 1))
        if spec.differential:  # lambda_q1, lambda_k1, lambda_q2, lambda_k2 of Ye et al.
            self.mix = nn.Parameter(torch.empty(4, head_dim // 2))
            self.first_mix = 0.8 - 0.6 * math.exp(-0.3 * layer)  # lambda_init, layers from 0
            self.head_norm = RMSNorm(head_dim)
        if config.value_scale:  # the log of c divided by its initial value
            self.value_scale = nn.Parameter(torch.empty(heads))
        if spec.kernel == "mlp":
            first = nn.Linear(head_dim, head_dim, bias=False)
            second = nn.Linear(head_dim, head_dim, bias=False)
            self.mlp = nn.Sequential(first, nn.ReLU(), second)
        if config.gate == "constant":
            self.gate_logit = nn.Parameter(torch.empty(heads, head_dim))
        elif config.gate != "none":
            gates = {"head": heads, "shared": head_dim}.get(config.gate, width)
            self.gate = nn.Linear(width, gates, bias=False)
        if config.qk_norm:
            self.query_norm = RMSNorm(head_dim)
            self.key_norm = RMSNorm(head_dim)

    def forward(self, x: Tensor, tables: Tables, observer: Any = None) -> Tensor:
        """x: (B, T, d) -> (B, T, d). tables: those of `position_tables`, T rows each."""
        config = self.config
        spec = self.config.attention
        B, T, _ = x.shape
        # One view cuts out the heads as well. Chunks that are viewed by head afterwards have a slow
        # backward pass, which puts their gradients together number by number.
        qkv = self.qkv(x).view(B, T, 3, config.num_heads, config.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D) each
        # Small values shrink: v_j r / (r + c).
        if config.value_scale:
            wide = v.to(torch.promote_types(v.dtype, torch.float32))
            squared = wide.square().sum(dim=-1, keepdim=True)  # |v|^2, (B, H, T, 1)
            expected = VALUE_VARIANCE * config.head_dim  # the mean of |v|^2 before training
            c = expected * self.value_scale.exp()[:, None, None]
            share = squared / (squared + c)
            v = v * share.to(v.dtype)
        if config.gate == "value":
            v = v * self.gates(x)
        # Queries and keys are normed, then rotated.
        if config.qk_norm:
            q = self.query_norm(q)
            k = self.key_norm(k)
        if "cos" in tables:
            # The tables stay in float32, because bfloat16 cannot tell far positions apart. The
            # rotated q and k may be rounded.
            cos, sin = tables["cos"], tables["sin"]
            q = attention.rotate(q, cos, sin).to(v.dtype)
            k = attention.rotate(k, cos, sin).to(v.dtype)
        # The attention operation.
        extras = self.extras(tables, v.dtype)
        out = None  # (B, H, T, D)
        if observer is not None:
            out = observer.attention(self.layer, q, k, v, spec, extras)
        if out is None:
            out = fast.attention_output(q, k, v, spec, **extras)
        # The heads' outputs are normed, gated and merged.
        if spec.differential:
            out = self.head_norm(out) * (1 - self.first_mix)
        if config.gate == "constant":
            out = out * self.gate_logit.sigmoid()[:, None].to(out.dtype)
        elif config.gate not in ("none", "value"):
            gate = self.gates(x)
            out = out * ((1 + gate) / 2 if config.gate == "open" else gate)
        if config.head_merge == "add":
            merged = out.sum(dim=1)  # (B, T, D)
        else:
            merged = out.transpose(1, 2).flatten(2)  # (B, T, H D)
        return self.out(merged)  # type: ignore[no-any-return]

    def gates(self, x: Tensor) -> Tensor:
        """sigmoid(W x) of each token, for the heads. x: (B, T, d) -> (B, H or 1, T, 1 or D)."""
        gated_heads = 1 if self.config.gate == "shared" else self.config.num_heads
        gate: Tensor = self.gate(x).unflatten(-1, (gated_heads, -1))  # (B, T, H or 1, 1 or D)
        return gate.transpose(1, 2).sigmoid()

    def extras(self, tables: Tables, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments of `attend` that this layer's parameters supply."""
        spec = self.config.attention
        heads = self.config.num_heads
        head_dim = self.config.head_dim
        extras: dict[str, Any] = {}
        if spec.has_key_bias:
            whole = F.pad(self.key_bias, (0, head_dim - self.key_bias.shape[1]))  # d_a to D
            extras["key_bias"] = whole.expand(heads, -1).to(dtype)
        if spec.bias in ("kv", "v"):
            extras["value_bias"] = self.value_bias.expand(heads, -1).to(dtype)
        elif spec.fixed_value != "zero":
            value = fixed_value(spec, head_dim, self.qkv.weight.device)
            extras["value_bias"] = value.to(dtype).expand(heads, -1)
        if spec.kernel == "mlp":
            extras["mlp"] = self.mlp
        if spec.sink_logit == "learned":
            extras["sink_logit"] = self.sink_logit[:, 0]
        if spec.differential:
            # lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
            products = self.mix[0::2] * self.mix[1::2]  # (2, D / 2)
            first, second = products.sum(dim=-1).exp()
            extras["mix"] = first - second + self.first_mix
        if "distance_bias" in tables:
            extras["distance_bias"] = tables["distance_bias"].T
        if "buckets" in tables:  # the biases stay in float32, as the tables do
            by_distance = self.bucket_bias[:, tables["buckets"]]  # (H, T)
            extras["distance_bias"] = by_distance.to(torch.promote_types(dtype, torch.float32))
        return extras


def fixed_value(spec: AttentionSpec, head_dim: int, device: torch.device | None = None) -> Tensor:
    """The fixed v* (Table 5): m [1, 0, .., 0] if "first", m [1, .., 1] / sqrt(d_h) if "uniform"."""
    if spec.fixed_value == "first":
        first = torch.zeros(head_dim, device=device)
        # `first[0] = ..` would copy the number from the host, which a CUDA graph cannot record.
        first[0].fill_(spec.fixed_value_norm)
        return first
    each = spec.fixed_value_norm / math.sqrt(head_dim)
    return torch.full((head_dim,), each, device=device)


class FeedForward(nn.Module):
    """The six FFNs of Table 11. The gate and up projections are one matrix."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size
        self.activation = FFNS[config.ffn]
        self.parts = 2 if config.ffn.endswith("glu") else 1
        self.up = nn.Linear(width, self.parts * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, *up = self.up(x).chunk(self.parts, dim=-1)  # each (B, T, inner); `up` may be empty
        hidden = self.activation(gate)
        if up:
            hidden = hidden * up[0]
        return self.down(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block: pre-norm (Eq. 2), post-norm (Eq. 3) or sandwich norm."""

    def __init__(self, config: LMConfig, layer: int = 0) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.attention = Attention(config, layer)
        self.ffn = FeedForward(config)
        self.norm_1 = norm_layer(config)
        self.norm_2 = norm_layer(config)
        self.after_1: nn.Module = nn.Identity()
        self.after_2: nn.Module = nn.Identity()
        if config.norm == "sandwich":
            self.after_1 = norm_layer(config)
            self.after_2 = norm_layer(config)

    def forward(self, h: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """h: (B, T, d) -> the block's output, and the same before the last LN of a post-norm block.

        args: the position tables and the observer, which `Attention.forward` takes after h.
        """
        if self.post_norm:  # Eq. 3: the second residual adds the normed `middle`
            middle = self.norm_1(self.attention(h, *args) + h)
            before = self.ffn(middle) + middle
            return self.norm_2(before), before
        # Eq. 2. `after_1` and `after_2` are the identity, except with sandwich norm.
        attended = self.attention(self.norm_1(h), *args)
        middle = self.after_1(attended) + h
        fed = self.ffn(self.norm_2(middle))
        h = self.after_2(fed) + middle
        return h, h


class TransformerLM(nn.Module):
    """An auto-regressive LM: token ids (B, T) -> logits (B, T, V).

    seed: determines the initial values of the parameters (`reset_parameters`).
    """

    def __init__(self, config: LMConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = norm_layer(config)
        self.unembed = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        length = config.context_length
        if config.sink_token:
            self.sink = nn.Parameter(torch.empty(config.hidden_size))
            length += 1
        if config.normalization == "dyt":
            self.embedding_scale = nn.Parameter(torch.empty(1))
        if config.position == "learnable":
            self.position_embedding = nn.Parameter(torch.empty(length, config.hidden_size))
        # The tables are no buffers, since `model.half()` would convert those with the weights, and
        # half precision cannot tell far positions apart.
        self.tables = position_tables(config, length)
        self.reset_parameters(seed)

    def _apply(self, fn: Any, recurse: bool = True) -> TransformerLM:
        """Move the tables too, in float32. PyTorch calls this in `to`, `cuda`, `half` and so on."""
        super()._apply(fn, recurse)
        device = self.embed.weight.device
        if device.type != "meta":
            self.tables = {name: table.to(device) for name, table in self.tables.items()}
        return self

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial values as the authors' code does; the paper does not describe them.

        Linear maps, embeddings and learned positions are N(0, 2/5/fan_in). Biases and x* are
        N(0, 0.02^2). Gains are 1. The output projection of SwiGLU, and of no other FFN of Table 11,
        has the standard deviation 1/sqrt(fan_in)/L.

        The variants of later papers: DyT's alpha is 1, as for the narrowest language model of its
        authors (their Table 11), and its scale of the embeddings is sqrt(d). The vectors of lambda
        are N(0, 0.1^2). The c of the value scale is the expected |v|^2.

        The random numbers of a parameter depend on the seed, its name and its shape only. So two
        variants with one seed share the draw of every parameter that both have; only its standard
        deviation may differ, as described above.
        """
        config = self.config
        for name, parameter in self.named_parameters():
            # The parameter's name determines the standard deviation.
            kind = name.rsplit(".", 1)[-1]
            fan_in = parameter.shape[-1]
            std = math.sqrt(2 / 5 / fan_in)
            if kind in (
                "sink",
                "key_bias",
                "value_bias",
                "bucket_bias",
                "sink_logit",
                "gate_logit",
            ):
                std = 0.02  # as the authors' code has it for k* and v*
            elif kind == "mix":
                std = 0.1
            elif name.endswith("ffn.down.weight") and config.ffn == "swiglu":
                std = 1 / math.sqrt(fan_in) / config.num_layers
            # A few parameters start at a fixed number. All others are drawn.
            if kind == "value_scale":  # the log of c divided by the expected |v|^2
                parameter.zero_()
            elif kind == "embedding_scale":
                parameter.fill_(config.hidden_size**0.5)
            elif parameter.ndim == 1 and kind != "sink":  # gains, and DyT's alpha
                parameter.fill_(1.0)
            else:
                parameter.copy_(std * standard_normal(seed, name, parameter))

    def forward(self, ids: Tensor, observer: Any = None, kept: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of token ids (B, T), 1 <= T <= context_length.

        observer: gets h, q, k and v as they are computed (see the top of `model/decoder.py`).
        kept: a mask (B, T). With it, only the logits of its N positions are computed, (N, V).
        Raises ValueError for ids of the wrong rank, dtype, range or length.
        """
        hidden = self.hidden(ids, observer)
        if kept is not None:
            hidden = hidden[kept]
        return self.unembed(hidden)  # type: ignore[no-any-return]

    def hidden(self, ids: Tensor, observer: Any = None) -> Tensor:
        """The normed output of the last block, (B, T, d), which the unembedding reads."""
        check_ids(ids, self.config)
        # h^0 is the embeddings, with x* in front if there is one, plus a position embedding if any.
        h = self.embed(ids)
        if self.config.normalization == "dyt":
            h = h * self.embedding_scale
        if self.config.sink_token:
            sink = self.sink.expand(len(h), 1, -1).to(h.dtype)
            h = torch.cat([sink, h], dim=1)
        length = h.shape[1]
        tables = {name: table[:length] for name, table in self.tables.items()}
        if self.config.position == "learnable":
            tables["added"] = self.position_embedding[:length]
        if "added" in tables:
            h = h + tables["added"].to(h.dtype)
        if observer is not None:
            observer.embedding(h)
        # Each block computes h^l.
        for layer, block in enumerate(self.blocks):
            h, before = block(h, tables, observer)
            if observer is not None:
                observer.block(layer, h, before)
        # x* predicts no token, so it is dropped.
        if self.config.sink_token:
            h = h[:, 1:]
        return self.norm(h)  # type: ignore[no-any-return]


def standard_normal(seed: int, name: str, like: Tensor) -> Tensor:
    """Draw N(0, 1) in the shape of `like`, float32; it depends on seed, name and shape only."""
    if like.is_meta:
        return torch.empty_like(like)
    key = f"{seed}/{name}/{tuple(like.shape)}"
    digest = hashlib.sha256(key.encode()).digest()
    # The shift keeps the seed below 2^63, which every generator accepts.
    number = int.from_bytes(digest[:8], "big") >> 1
    generator = torch.Generator().manual_seed(number)
    return torch.randn(like.shape, generator=generator)


def position_tables(config: LMConfig, length: int) -> Tables:
    """The constant tables that a position term needs. Rows are positions or distances."""
    if config.position == "rotary":
        # In a differential head, the even dimensions are rotated like a head of half the size, and
        # so are the odd ones.
        halves = 2 if config.attention.differential else 1
        tables = attention.rotary_tables(length, config.head_dim // halves)
        cos, sin = (table.repeat_interleave(halves, -1) for table in tables)
        return {"cos": cos, "sin": sin}
    if config.position == "absolute":
        return {"added": attention.absolute_embedding(length, config.hidden_size)}
    if config.position == "relative_learned":
        return {"buckets": attention.relative_buckets(length)}
    if config.position == "relative":
        buckets = attention.relative_buckets(length).float()
        return {"distance_bias": buckets[:, None]}  # (T, 1)
    if config.position == "alibi":
        slopes = attention.alibi_slopes(config.num_heads)
        return {"distance_bias": -torch.arange(length)[:, None] * slopes}  # (T, H)
    return {}


def check_ids(ids: Tensor, config: LMConfig) -> None:
    """Raise ValueError, which says what is allowed, unless ids are (B, T) integers in range."""
    if torch.compiler.is_compiling():
        return
    longest = config.context_length
    last = config.vocab_size - 1
    valid = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32)
    valid = valid and len(ids) > 0 and 1 <= ids.shape[1] <= longest
    # The range is not checked on a GPU, where the host would have to wait for the result, nor
    # inside vmap, where values cannot be read. There the embedding fails, on a GPU for good.
    if valid and not ids.is_cuda and not torch._C._functorch.is_batchedtensor(ids):
        low, high = ids.aminmax()
        valid = bool(low >= 0) and bool(high <= last)
    if not valid:
        shape = getattr(ids, "shape", short(ids))
        raise Refused(
            f"ids must be a tensor of shape (B, T), int64 or int32, with 1 to {longest} positions "
            f"and values in 0..{last}, got {shape}"
        )
