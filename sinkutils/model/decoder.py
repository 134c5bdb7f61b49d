"""The decoder of Eqs. 1-4, with every variant of Section 7 as a value of its configuration.

`forward(ids, observer)` shows q, k, v and h as they are computed: nothing needs hooks, and no attention map is kept. An
observer is any object with three methods; layers count from 0, and with a sink token the first position of every
tensor is x*, so that T is one more than the ids have:

    embedding(hidden)                            h^0, (B, T, d)
    attention(layer, q, k, v, spec, extras)      q, k (after rotary) and v, (B, H, T, D), and what `attend` gets
    block(layer, hidden, before_norm)            h^l and, for post-norm, the same before its last norm (else h^l again)
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.checks import require
from sinkutils.model import fast, positions
from sinkutils.model.attention import AttentionSpec
from sinkutils.model.config import FFNS, LMConfig

VALUE_VARIANCE = 2 / 5  # of an element of v at the start, where its input is normed
GATE_RANK = 16
# k*, v*, sink token, learned relative biases: N(0, 0.02^2), k* and v* as the authors' code
INIT_STD = {
    "sink": 0.02,
    "key_bias": 0.02,
    "value_bias": 0.02,
    "bucket_bias": 0.02,
    "sink_logit": 0.02,
    "mix": 0.1,
}


class RMSNorm(nn.RMSNorm):
    """LN of Section 3.1: h / RMS(h) * g, with g in the precision of h."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), eps=1e-5)


class DyT(nn.Module):
    """tanh(alpha h) * g in place of a norm (Zhu et al. 2025)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha.to(x.dtype) * x) * self.weight.to(x.dtype)


class GatedNorm(RMSNorm):
    """y * sigmoid(W_up silu(W_down y)) with y = RMSNorm(h) and a gate of rank 16 (Qiu et al. 2026)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.down = nn.Linear(size, GATE_RANK, bias=False)
        self.up = nn.Linear(GATE_RANK, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.up(F.silu(self.down(y))).sigmoid().to(y.dtype)


def norm_layer(config: LMConfig) -> nn.Module:
    return {"rms": RMSNorm, "dyt": DyT, "gated": GatedNorm}[config.normalization](
        config.hidden_size
    )


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 4) with the biases of Table 4 and the kernels of Section 7.4."""

    key_bias: Tensor
    value_bias: Tensor
    bucket_bias: Tensor
    sink_logit: Tensor
    mix: Tensor
    value_scale: Tensor

    def __init__(self, config: LMConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        spec, width, head_dim = config.attention, config.hidden_size, config.head_dim
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(head_dim if config.head_merge == "add" else width, width, bias=False)
        heads = config.num_heads
        rows = 1 if spec.bias_shared else heads
        learned = {
            "key_bias": spec.has_key_bias and (rows, spec.bias_dims or head_dim),
            "value_bias": spec.bias in ("kv", "v") and (rows, head_dim),
            "bucket_bias": config.position == "relative_learned" and (heads, positions.NUM_BUCKETS),
            "sink_logit": spec.sink_logit == "learned" and (heads, 1),
            "mix": spec.differential
            and (4, head_dim // 2),  # lambda_q1, lambda_k1, lambda_q2, lambda_k2
            "value_scale": config.value_scale and (heads,),  # log of c over what it starts as
        }
        for name, shape in learned.items():
            if shape:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        if spec.kernel == "mlp":
            first, second = (nn.Linear(head_dim, head_dim, bias=False) for _ in range(2))
            self.mlp = nn.Sequential(first, nn.ReLU(), second)
        if spec.differential:
            self.first_mix = 0.8 - 0.6 * math.exp(
                -0.3 * layer
            )  # lambda_init of Ye et al., layers from 0
            self.head_norm = RMSNorm(head_dim)
        if config.gate != "none":
            self.gate = nn.Linear(width, heads if config.gate == "head" else width, bias=False)
        if config.qk_norm:
            self.query_norm, self.key_norm = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, x: Tensor, tables: dict[str, Tensor], observer: Any = None) -> Tensor:
        """x: (B, T, d) -> (B, T, d). tables: `position_tables` for T."""
        config, spec = self.config, self.config.attention
        batch, length, _ = x.shape
        # Cut by head at once: the gradients of chunks, viewed by head, are put together one number at a time.
        qkv = self.qkv(x).view(batch, length, 3, config.num_heads, config.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D) each
        if config.value_scale:
            squared = (
                v.to(torch.promote_types(v.dtype, torch.float32)).square().sum(dim=-1, keepdim=True)
            )
            c = VALUE_VARIANCE * config.head_dim * self.value_scale.exp()[:, None, None]
            v = v * (squared / (squared + c)).to(v.dtype)
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if "cos" in tables:
            # The tables keep their precision, as bfloat16 would blur far positions; the products need not.
            q, k = (positions.rotate(x, tables["cos"], tables["sin"], v.dtype) for x in (q, k))
        extras = self.extras(tables, v.dtype)
        if observer is not None:
            observer.attention(self.layer, q, k, v, spec, extras)
        out = fast.attend(q, k, v, spec, **extras)
        if spec.differential:
            out = self.head_norm(out) * (1 - self.first_mix)
        if config.gate != "none":
            by_head = (
                self.gate(x).unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
            )  # (B, H, T, 1 or D)
            out = out * by_head.sigmoid()
        if config.head_merge == "add":
            return self.out(out.sum(dim=1))
        return self.out(out.transpose(1, 2).reshape(batch, length, -1))

    def extras(self, tables: dict[str, Tensor], dtype: torch.dtype) -> dict:
        """The keyword arguments of `attend` that this layer's parameters supply."""
        spec = self.config.attention
        shape = (self.config.num_heads, self.config.head_dim)
        extras: dict = {}
        if spec.has_key_bias:  # d_a of d_h dimensions learn (Table 13)
            extras["key_bias"] = (
                F.pad(self.key_bias, (0, shape[1] - self.key_bias.shape[1])).expand(shape).to(dtype)
            )
        if spec.bias in ("kv", "v"):
            extras["value_bias"] = self.value_bias.expand(shape).to(dtype)
        elif spec.fixed_value != "zero":
            value = fixed_value(spec, shape[1], self.qkv.weight.device)
            extras["value_bias"] = value.to(dtype).expand(shape)
        if spec.kernel == "mlp":
            extras["mlp"] = self.mlp
        if spec.sink_logit == "learned":
            extras["sink_logit"] = self.sink_logit[:, 0]
        if spec.differential:
            first, second = (self.mix[0::2] * self.mix[1::2]).sum(dim=-1).exp()
            extras["mix"] = first - second + self.first_mix
        if "distance_bias" in tables:
            extras["distance_bias"] = tables["distance_bias"].T
        if "buckets" in tables:  # its values keep their precision, as the tables do
            wide = torch.promote_types(dtype, torch.float32)
            extras["distance_bias"] = self.bucket_bias[:, tables["buckets"]].to(wide)
        return extras


def fixed_value(spec: AttentionSpec, head_dim: int, device: torch.device | None = None) -> Tensor:
    """v* = m v' with v' = [1, 0, .., 0], or m v'' with v'' = [1, .., 1] / sqrt(d_h) (Table 5): (head_dim,)."""
    if spec.fixed_value == "first":
        first = torch.zeros(head_dim, device=device)
        first[0].fill_(
            spec.fixed_value_norm
        )  # an assignment would copy from the host: see `GraphedStep`
        return first
    return torch.full((head_dim,), spec.fixed_value_norm / math.sqrt(head_dim), device=device)


class FeedForward(nn.Module):
    """The six FFNs of Table 11; gate and up projections are one matrix."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.activation, self.parts = FFNS[config.ffn], 1 + config.ffn.endswith("glu")
        self.up = nn.Linear(config.hidden_size, self.parts * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, *up = self.up(x).chunk(self.parts, dim=-1)
        hidden = self.activation(gate)
        return self.down(hidden * up[0] if up else hidden)


class Block(nn.Module):
    """One transformer block: pre-norm (Eq. 2), post-norm (Eq. 3) or sandwich norm."""

    def __init__(self, config: LMConfig, layer: int = 0) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.attention = Attention(config, layer)
        self.ffn = FeedForward(config)
        self.norm_1, self.norm_2 = norm_layer(config), norm_layer(config)
        inside = config.norm == "sandwich"
        self.after_1, self.after_2 = (
            norm_layer(config) if inside else nn.Identity() for _ in range(2)
        )

    def forward(self, h: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """h: (B, T, d) -> the block's output, and the same before a post-norm's last LN."""
        if self.post_norm:
            middle = self.norm_1(self.attention(h, *args) + h)
            before = self.ffn(middle) + middle
            return self.norm_2(before), before
        middle = self.after_1(self.attention(self.norm_1(h), *args)) + h
        h = self.after_2(self.ffn(self.norm_2(middle))) + middle
        return h, h


class TransformerLM(nn.Module):
    """An auto-regressive LM: token ids (B, T) -> logits (B, T, V). seed: of its initial values (`reset_parameters`)."""

    def __init__(self, config: LMConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = norm_layer(config)
        self.unembed = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.sink_token:
            self.sink = nn.Parameter(torch.empty(config.hidden_size))
        if config.normalization == "dyt":
            self.embedding_scale = nn.Parameter(torch.empty(1))
        length = config.context_length + config.sink_token
        if config.position == "learnable":
            self.position_embedding = nn.Parameter(torch.empty(length, config.hidden_size))
        # No buffers: they would go to half precision with the weights, and far positions would blur.
        self.tables = position_tables(config, length)
        self.reset_parameters(seed)

    def _apply(self, fn: Any, recurse: bool = True) -> TransformerLM:
        """What `to`, `cuda` and their like call: the tables move with the weights, and keep their precision."""
        super()._apply(fn, recurse)
        device = self.embed.weight.device
        if device.type != "meta":
            self.tables = {name: table.to(device) for name, table in self.tables.items()}
        return self

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Initialise as the authors' code is written (the paper says nothing of it).

        Embeddings, learned positions among them, and linears N(0, 2/5/fan_in); biases and x* N(0, 0.02^2); gains 1.
        After the paper: alpha of DyT 1 (its authors' for the narrowest language model they tried, Table 11) and its
        scale of the embeddings sqrt(d), lambda's vectors N(0, 0.1^2), and the c of V-scale the expected |v|^2.
        The output projection of SwiGLU, and of no other FFN (Table 11), has standard deviation 1/sqrt(fan_in)/L.

        What is drawn for a parameter depends on (seed, its name, its shape) alone, so that variants of a seed start
        from the same values wherever they share a parameter (its scale may differ, as said above).
        """
        for name, parameter in self.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if parameter.ndim == 1 and name != "sink":
                parameter.fill_(
                    {"embedding_scale": self.config.hidden_size**0.5, "value_scale": 0.0}.get(
                        kind, 1.0
                    )
                )
                continue
            fan_in = parameter.shape[-1]
            std = INIT_STD.get(kind, math.sqrt(2 / 5 / fan_in))
            if name.endswith("ffn.down.weight") and self.config.ffn == "swiglu":
                std = 1 / math.sqrt(fan_in) / self.config.num_layers
            parameter.copy_(std * standard_normal(seed, name, parameter))

    def forward(self, ids: Tensor, observer: Any = None, kept: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of token ids (B, T), 1 <= T <= context_length; kept, a mask (B, T): only these, (N, V).

        observer sees h, q, k, v on the way. Raises ValueError for ids of the wrong rank, dtype, range or length.
        """
        hidden = self.hidden(ids, observer)
        return self.unembed(hidden if kept is None else hidden[kept])

    def hidden(self, ids: Tensor, observer: Any = None) -> Tensor:
        """The normed output of the last block, (B, T, d): what the unembedding reads."""
        check_ids(ids, self.config)
        h = self.embed(ids)
        if self.config.normalization == "dyt":
            h = h * self.embedding_scale
        if self.config.sink_token:
            h = torch.cat([self.sink.expand(len(h), 1, -1).to(h.dtype), h], dim=1)
        length = h.shape[1]
        tables = {name: table[:length] for name, table in self.tables.items()}
        if self.config.position == "learnable":
            tables["added"] = self.position_embedding[:length]
        if "added" in tables:
            h = h + tables["added"].to(h.dtype)
        if observer is not None:
            observer.embedding(h)
        for layer, block in enumerate(self.blocks):
            h, before = block(h, tables, observer)
            if observer is not None:
                observer.block(layer, h, before)
        return self.norm(h[:, 1:] if self.config.sink_token else h)


def standard_normal(seed: int, name: str, like: Tensor) -> Tensor:
    """N(0, 1) in the shape of `like`, float32: a function of (seed, name, shape)."""
    if like.is_meta:
        return torch.empty_like(like)
    digest = hashlib.sha256(f"{seed}/{name}/{tuple(like.shape)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(like.shape, generator=generator)


def position_tables(config: LMConfig, length: int) -> dict[str, Tensor]:
    """The constant tables that a position embedding needs, by name; each has a row for a position, or a distance."""
    if config.position == "rotary":
        halves = (
            1 + config.attention.differential
        )  # whose even and odd dimensions turn as a head of half the size does
        tables = positions.rotary_tables(length, config.head_dim // halves)
        return {
            name: x.repeat_interleave(halves, -1)
            for name, x in zip(("cos", "sin"), tables, strict=True)
        }
    if config.position == "absolute":
        return {"added": positions.absolute_embedding(length, config.hidden_size)}
    if config.position == "relative_learned":
        return {"buckets": positions.relative_buckets(length)}
    if config.position == "relative":
        return {"distance_bias": positions.relative_buckets(length).float()[:, None]}
    if config.position == "alibi":
        return {
            "distance_bias": -torch.arange(length)[:, None]
            * positions.alibi_slopes(config.num_heads)
        }
    return {}


def check_ids(ids: Tensor, config: LMConfig) -> None:
    """Raise ValueError, naming ids and the allowed values, unless ids are (B, T) integers in range."""
    if torch.compiler.is_compiling():
        return
    shape, dtype = tuple(getattr(ids, "shape", ())), getattr(ids, "dtype", type(ids).__name__)
    require(
        len(shape) == 2 and dtype in (torch.int64, torch.int32),
        f"ids must be a tensor of shape (B, T), int64 or int32, got {shape}, {dtype}",
    )
    longest, last = config.context_length, config.vocab_size - 1
    require(
        shape[0] > 0 and 1 <= shape[1] <= longest,
        f"ids must have a row and 1 to {longest} positions (context_length), got {shape}",
    )
    # On a GPU a range check would wait, and of a stack (vmap) it cannot be made; the embedding itself refuses bad ids.
    if not (ids.is_cuda or torch._C._functorch.is_batchedtensor(ids)):
        low, high = ids.aminmax()
        require(
            bool(0 <= low and high <= last),
            f"ids must be in 0..{last} (vocab_size), got {low}..{high}",
        )
