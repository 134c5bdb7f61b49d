"""How a report comes about: what is asked for, the sums over batches, and what our own model shows while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import require
from sinkutils.measuring.report import Kept, Report
from sinkutils.model.attention import AttentionSpec, attend, divide
from sinkutils.model.decoder import TransformerLM


def mean_over_queries(shares: Tensor, columns: Tensor) -> Tensor:
    """alpha_k of the keys at `columns` (K,), 0-based, from A_ik (B, H, T, K): the mean over i = k..T, (B, K, H)."""
    rows = torch.arange(shares.shape[2], device=shares.device)
    counted = (rows[:, None] >= columns).to(shares.dtype)  # (T, K)
    return ((shares * counted).sum(dim=2) / counted.sum(dim=0)).transpose(1, 2)


def lower_median(x: Tensor) -> Tensor:
    """torch.median of each row of x (rows, n); on a CPU numpy finds the same element eight times as fast."""
    if x.device.type != "cpu":
        return x.median(dim=1).values
    middle = (x.shape[1] - 1) // 2
    return torch.from_numpy(np.partition(x.numpy(), middle, axis=1)[:, middle])


@dataclass
class Tally:
    """A report in the making: what is asked for and, added a layer and a batch at a time, what came of it."""

    targets: tuple[int, ...]
    length: int  # positions of the longest sequence
    norms: bool = True
    mass: bool = False
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head) pairs of which `keep` is kept
    keep: tuple[str, ...] = ("map", "qk")

    def __post_init__(self) -> None:
        self.values: dict[str, dict[int, list[Tensor]]] = {}  # name -> layer -> a (B, ..) for each batch
        self.sums: dict[str, dict[int, Tensor]] = {}  # name -> layer -> (positions,), over samples
        self.kept: dict[tuple[int, int], dict[str, list[Tensor]]] = {}

    def heads_of(self, layer: int) -> list[int]:
        return [head for chosen, head in self.heads if chosen == layer]

    def columns(self, device: torch.device) -> Tensor:
        """The targets' 0-based positions, (K,)."""
        return torch.tensor(self.targets, device=device) - 1

    def add(self, name: str, layer: int, value: Tensor) -> None:
        """Add (B, ..) values of a layer."""
        self.values.setdefault(name, {}).setdefault(layer, []).append(value.float())

    def add_norms(self, name: str, layer: int, x: Tensor) -> None:
        """Add the l2-norms of x (B, H, T, D), mean over heads."""
        if self.norms:
            wide = torch.promote_types(x.dtype, torch.float32)
            norms = torch.linalg.vector_norm(x, dim=-1, dtype=wide).mean(dim=1)
            self._sum(f"{name}_norms", layer, self.padded(norms))

    def add_hidden(self, layer: int, hidden: Tensor) -> None:
        """Add a block's output (B, S, T, d), of S streams: its norms, and its largest element at each position over
        the median element of the sequence (magnitudes; Sun et al. 2024).
        """
        self.add_norms("hidden", layer, hidden)
        if self.norms:
            sizes = hidden.abs().float()
            usual = lower_median(sizes.flatten(1)).clamp(min=1e-30)
            self._sum("hidden_peaks", layer, self.padded(sizes.amax(dim=(1, 3)) / usual[:, None]))
            self._sum("first_elements", layer, sizes[:, :, 0].amax(dim=1) / usual[:, None])  # (B, d)

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add rows (B, n) of a layer to the sum over samples."""
        layers = self.sums.setdefault(name, {})
        layers[layer] = layers.get(layer, 0) + rows.sum(dim=0).float()

    def padded(self, values: Tensor) -> Tensor:
        """Values by position (.., T) with zeros up to the longest sequence."""
        return F.pad(values, (0, self.length - values.shape[-1]))

    def add_map(self, layer: int, head: int, name: str, value: Tensor) -> None:
        """Keep (B, T, T) of one head for figures; shorter sequences are padded with zeros."""
        missing = self.length - value.shape[-1]
        square = F.pad(value.float(), (0, missing, 0, missing))
        self.kept.setdefault((layer, head), {}).setdefault(name, []).append(square.cpu())

    def add_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the norms of q (B, H, T, D), k and v (of H heads or fewer), and of the chosen heads cos(q_i, k_j) and
        ||q_i|| ||k_j|| (Fig. 2 bottom).
        """
        for name, x in (("query", q), ("key", k), ("value", v)):
            self.add_norms(name, layer, x)
        for head in self.heads_of(layer) if "qk" in self.keep else ():
            queries, keys = q[:, head].float(), k[:, head // (q.shape[1] // k.shape[1])].float()
            self.add_map(layer, head, "cosine", F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).mT)
            self.add_map(layer, head, "norm_product", queries.norm(dim=-1)[:, :, None] * keys.norm(dim=-1)[:, None])

    def add_weights(self, layer: int, chunks: Iterable[Tensor], sink: bool = False) -> None:
        """Add what is asked for of a layer's attention weights, given in chunks of rows (B, H, R, T).

        sink: what a row lacks to one is a learned sink logit's.
        """
        heads = self.heads_of(layer) if "map" in self.keep else []
        sums: dict[str, Tensor] = {}
        maps: list[Tensor] = []
        done = 0
        for weights in chunks:
            device, length = weights.device, weights.shape[-1]
            rows = torch.arange(done, done + weights.shape[2], device=device)[:, None]
            done += len(rows)
            wide = torch.promote_types(weights.dtype, torch.float32)
            columns = self.columns(device)
            # Of a key k the rows i >= k count; those before see it through a prefix only.
            parts = {"alpha": weights[..., columns].to(wide) * (rows >= columns)}
            if sink:
                rest = weights.to(wide).sum(dim=-1, keepdim=True)
                parts["renormalised"] = parts["alpha"] / rest
                parts["star"] = 1 - rest
            if self.mass:
                parts["mass"] = weights * (rows >= torch.arange(length, device=device))
            for name, part in parts.items():
                sums[name] = sums.get(name, 0) + part.sum(dim=2, dtype=wide)
            maps.append(weights[:, heads])
        for name, total in sums.items():
            if name == "star":
                self.add(name, layer, total[..., 0] / length)
            elif name == "mass":
                self.add(name, layer, self.padded(total / torch.arange(length, 0, -1, device=device)))
            else:
                self.add(name, layer, (total / (length - columns)).transpose(1, 2))
        for head, whole in zip(heads, torch.cat(maps, dim=2).unbind(1), strict=True):
            self.add_map(layer, head, "map", whole)

    def report(self, order: Tensor, lengths: Tensor, epsilons: tuple[float, ...]) -> Report:
        """The report on samples of these lengths; `order` (samples,) says where each stands in that of the batches."""
        alphas = self.values["alpha"]
        heads = {batches[0].shape[-1] for batches in alphas.values()}
        if len(heads) > 1:
            raise ValueError(f"layers have different numbers of heads ({sorted(heads)}), which a report cannot hold")
        if "star" in self.values:  # a layer without a sink logit leaves nothing to it
            for layer, alpha in alphas.items():
                self.values.get("renormalised", {}).setdefault(layer, alpha)
                self.values["star"].setdefault(layer, [torch.zeros_like(batch[:, 0]) for batch in alpha])
        fields: dict[str, Any] = {}
        for name, by_layer in self.values.items():
            values = [torch.cat(batches).cpu()[order] for _, batches in sorted(by_layer.items())]
            fields[name] = torch.stack(values, dim=2 if name in ("alpha", "renormalised") else 1)
        has_position = lengths[:, None] > torch.arange(self.length, device="cpu")  # (samples, positions)
        counts = has_position.sum(dim=0)
        for name, sums in self.sums.items():
            samples = len(order) if name == "first_elements" else counts
            fields[name] = torch.stack([total.cpu() / samples for _, total in sorted(sums.items())])
        if self.norms:
            fields["embedding_norms"] = fields["embedding_norms"][0]
        fields["kept"] = {
            pair: Kept(**{name: torch.cat(batches)[order] for name, batches in maps.items()})
            for pair, maps in self.kept.items()
        }
        layers = tuple(sorted(alphas))
        return Report(fields.pop("alpha"), self.targets, epsilons, lengths, layers, **fields)


def refuse_heads(pairs: list[tuple[int, int]], has: str) -> None:
    """Raise ValueError where there are (layer, head) pairs that a model does not have; `has` says what it has."""
    require(not pairs, f"heads names (layer, head) pairs that the model does not have: {pairs}; {has}")


class OwnModel:
    """Adds to a tally what a `TransformerLM` shows while it runs (an `Observer`): one map at a time."""

    path, chunked = "dense", False

    def __init__(self, model: TransformerLM, tally: Tally) -> None:
        self.model, self.tally = model, tally
        self.first = int(model.config.sink_token)  # 1 where x* stands at position 0
        self.vocabulary, layers, heads = model.config.vocab_size, model.config.num_layers, model.config.num_heads
        wrong = [pair for pair in tally.heads if pair[0] >= layers or pair[1] >= heads]
        refuse_heads(wrong, f"it has {layers} layers of {heads} heads, counted from 0")
        self.windows = dict.fromkeys(range(layers), model.config.attention.window)

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T)."""
        self.model.hidden(ids.to(self.model.embed.weight.device), self)

    def embedding(self, hidden: Tensor) -> None:
        self.tally.add_norms("embedding", 0, hidden[:, None, self.first :])

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict[str, Any]
    ) -> None:
        tally, first = self.tally, self.first
        tally.add_qkv(layer, q[:, :, first:], k[:, :, first:], v[:, :, first:])
        shares = attention_shares(q, k, v, spec, extras)[:, :, first:]  # what x* sees of itself says nothing
        length = shares.shape[2]
        tally.add_weights(layer, [shares[..., -length:]])
        if first or spec.has_star:
            tally.add("star", layer, shares[..., -length - 1].mean(dim=-1))

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, hidden[:, None, self.first :])
        if before_norm is not hidden:
            self.tally.add_norms("before_norm", layer, before_norm[:, None, self.first :])


def attention_shares(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict[str, Any]) -> Tensor:
    """What alpha is the mean of, (B, H, T, S), in float64: |A_ij| over its row sum, which is A_ij of a softmax.

    Where weights do not sum to one these are the proxy scores of Section 7.4. The arguments are those of `attend`.
    Softpick's weights, whose rows sum to less than one, are taken as they are.
    """
    wide: dict[str, Any] = {name: x.double() for name, x in extras.items() if name != "mlp"}
    if "mlp" in extras:  # a learned kernel keeps the model's precision
        wide["mlp"] = lambda x: extras["mlp"](x.to(q.dtype)).double()
    # In float64 exp of a logit does not overflow below 709.
    weights = attend(q.double(), k.double(), v.double(), spec, **wide)[1].abs()
    if spec.similarity == "softpick":
        return weights / spec.scale
    return divide(weights, weights.sum(dim=-1, keepdim=True))
