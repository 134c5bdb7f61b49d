"""What several test modules share: random inputs, small models, dense oracles, made-up records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.config import LMConfig
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.grid import config
from sinkutils.study.record import Record, record_folder, write_record

CPU = torch.device("cpu")
END = {"step": 60, "sink_1": 0.0, "valid_loss": 3.0}  # the least that the end of a run may say
DONE = {"status": "done", "reason": None, "curve": [], "final": END}  # and metrics.json
SHAPE = {
    "vocab_size": 60,
    "context_length": 32,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
}


def name_of(spec: AttentionSpec) -> str:
    """What differs from softmax, as the name of a test."""
    default = AttentionSpec()
    return " ".join(f"{k}={v}" for k, v in vars(spec).items() if v != getattr(default, k)) or "softmax"


def draw(
    spec: AttentionSpec,
    length: int,
    position: str = "none",
    dtype: torch.dtype = torch.float64,
    *,
    shape: tuple[int, int, int] = (2, 2, 6),  # B, H, D
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the keyword arguments that the spec needs, every tensor of them with a gradient."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, dim = shape

    def leaf(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    inputs, extras = [leaf(batch, heads, length, dim) for _ in range(3)], {}
    if spec.has_key_bias:
        extras["key_bias"] = leaf(heads, dim)
    if spec.bias in ("kv", "v"):
        extras["value_bias"] = leaf(heads, dim)
    if position != "none":
        extras["distance_bias"] = leaf(1 if position == "shared" else heads, length + 2)
    if spec.sink_logit == "learned":
        extras["sink_logit"] = leaf(heads)
    if spec.differential:
        extras["mix"] = leaf()
    if spec.kernel == "mlp":
        first, second = leaf(dim, dim), leaf(dim, dim)
        inputs += [first, second]
        extras["mlp"] = lambda x: torch.tanh(x @ first) @ second / dim
    return inputs, extras


def own_model(gain: float = 2.0, **fields: Any) -> TransformerLM:
    """A small model of ours whose attention is far from uniform: its start times `gain`."""
    model = TransformerLM(LMConfig(**{**SHAPE, **fields}), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    return model


def tokens(samples: int = 3, length: int = 20, least: int = 0, vocabulary: int = 60) -> Tensor:
    return torch.randint(least, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))


def dense_shares(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict[str, Any]) -> Tensor:
    """What alpha is the mean of, (B, H, T, S): weights, or where they do not sum to one |f| over its row sum."""
    normalizer = "sum" if spec.similarity in ("exp", "softpick") else "none"
    weights = attend(q, k, v, replace(spec, normalizer=normalizer, p=1.0, scale=1.0), **extras)[1].abs()
    total = torch.ones(()) if spec.similarity == "softpick" else weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


class DenseMaps:
    """An observer that keeps what it is shown, and whole maps of it."""

    def __init__(self, model: TransformerLM, ids: Tensor) -> None:
        self.maps: list[Tensor] = []  # (B, H, T, S) by layer, x* or k* first
        self.hidden: list[Tensor] = []
        self.before: list[Tensor] = []
        with torch.no_grad():
            model(ids, self)
        self.length = ids.shape[1]
        self.star = int(model.config.attention.has_star or model.config.sink_token)

    def embedding(self, hidden: Tensor) -> None:
        self.first = hidden

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict) -> None:
        self.maps.append(dense_shares(q, k, v, spec, extras))

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.hidden.append(hidden)
        self.before.append(before_norm)

    def own(self, layer: int) -> Tensor:
        """The map of a layer without a star, (B, H, T, T)."""
        return self.maps[layer][:, :, -self.length :, self.star :]

    def alpha(self, targets: Sequence[int]) -> Tensor:
        """alpha of the targets by definition, (B, K, L, H)."""
        return alpha_by_definition([self.own(layer) for layer in range(len(self.maps))], targets)

    def star_share(self) -> Tensor:
        """The share of the star, (B, L, H)."""
        return torch.stack([m[:, :, -self.length :, 0].mean(-1) for m in self.maps], 1)


def alpha_by_definition(maps: Sequence[Tensor], targets: Sequence[int]) -> Tensor:
    """alpha_k = mean over i = k..T of A_ik of whole maps, each (B, H, T, T): (B, K, L, H)."""
    return torch.stack([torch.stack([m[:, :, k - 1 :, k - 1].mean(-1) for m in maps], 1) for k in targets], 1)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation, forward or backward, makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def made_up(runs: Path, name: str, seed: int = 0, preset: str = "smoke", kept: Any = None, **metrics: Any) -> Record:
    """A record of an experiment with these metrics, which nothing trained.

    kept: what else `write_record` keeps, by its name: weights, tokenizer, arrays.
    """
    run, folder = config(name, preset, seed), record_folder(preset, name, seed, runs)
    said = DONE | metrics | {"final": END | metrics.get("final", {})}
    return write_record(folder, run, said, {"wall_seconds": 1.0}, **(kept or {}))
