"""How a report comes about: what is asked for, the sums over batches, and what our own model shows while it runs.

A_ik needs no attention map: it is |f(s_ik)| exp(-log_mass_i), with log_mass_i the logarithm of the row's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import require
from sinkutils.measuring.report import Kept, Report
from sinkutils.model import fast
from sinkutils.model.attention import AttentionSpec, Extras, features, halves, visible
from sinkutils.model.decoder import TransformerLM

COLUMNS = 128  # keys at a time where all are looked at


def mean_over_queries(shares: Tensor, columns: Tensor, first: int = 0) -> Tensor:
    """alpha_k from A_ik of chosen keys: shares (B, H, T, K) -> (B, K, H), the mean over i = k..T.

    columns (K,) are the keys' 0-based positions. `first` is where the sequence starts (after x*).
    """
    rows = torch.arange(shares.shape[2], device=shares.device)
    counted = (rows[:, None] >= columns.clamp(min=first)).to(shares.dtype)  # (T, K)
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
        self.firsts: dict[int, Tensor] = {}  # layer -> (d,), |h_1| over the median element, over samples
        self.kept: dict[tuple[int, int], dict[str, list[Tensor]]] = {}

    def heads_of(self, layer: int) -> list[int]:
        return [head for chosen, head in self.heads if chosen == layer]

    def columns(self, device: torch.device) -> Tensor:
        """The targets' 0-based positions, (K,)."""
        return torch.tensor(self.targets, device=device) - 1

    def add(self, name: str, layer: int, value: Tensor) -> None:
        """Add (B, ..) values of a layer; mass, which is by position, is padded with zeros."""
        if name == "mass":
            value = F.pad(value, (0, self.length - value.shape[-1]))
        self.values.setdefault(name, {}).setdefault(layer, []).append(value.float())

    def add_norms(self, name: str, layer: int, x: Tensor) -> None:
        """Add the l2-norms of x (B, H, T, D), mean over heads."""
        if self.norms:
            wide = torch.promote_types(x.dtype, torch.float32)
            self._sum(f"{name}_norms", layer, torch.linalg.vector_norm(x, dim=-1, dtype=wide).mean(dim=1))

    def add_hidden(self, layer: int, hidden: Tensor) -> None:
        """Add a block's output (B, S, T, d), of S streams: its norms, and its largest element at each position over
        the median element of the sequence (magnitudes; Sun et al. 2024).
        """
        self.add_norms("hidden", layer, hidden)
        if self.norms:
            sizes = hidden.abs().float()
            usual = lower_median(sizes.flatten(1)).clamp(min=1e-30)
            self._sum("hidden_peaks", layer, sizes.amax(dim=(1, 3)) / usual[:, None])
            first = (sizes[:, :, 0].amax(dim=1) / usual[:, None]).sum(dim=0)  # (d,) of the first position
            self.firsts[layer] = self.firsts.get(layer, 0) + first

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add a number a position, (B, T), to the sum over samples."""
        total = rows.sum(dim=0).float()
        layers = self.sums.setdefault(name, {})
        layers[layer] = layers.get(layer, 0) + F.pad(total, (0, self.length - len(total)))

    def add_map(self, layer: int, head: int, name: str, value: Tensor) -> None:
        """Keep (B, T, T) of one head for figures; shorter sequences are padded with zeros."""
        missing = self.length - value.shape[-1]
        padded = F.pad(value.float(), (0, missing, 0, missing))
        self.kept.setdefault((layer, head), {}).setdefault(name, []).append(padded.cpu())

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

        sink: what a row lacks to one is a learned sink logit's. Weights of hidden keys are 0, so that sums run over
        i >= k.
        """
        heads = self.heads_of(layer) if "map" in self.keep else []
        sums: dict[str, Tensor] = {}
        maps: list[Tensor] = []
        for weights in chunks:
            columns, length = self.columns(weights.device), weights.shape[-1]
            parts = {"alpha": weights[..., columns].float()}
            if sink:
                rest = weights.float().sum(dim=-1, keepdim=True)
                parts |= {"renormalised": parts["alpha"] / rest, "star": 1 - rest}
            if self.mass:
                parts["mass"] = weights
            for name, rows in parts.items():
                sums[name] = sums.get(name, 0) + rows.sum(dim=2, dtype=torch.float32)
            maps.append(weights[:, heads])
        for name, total in sums.items():
            if name == "star":
                mean = total[..., 0] / length
            elif name == "mass":
                mean = total / torch.arange(length, 0, -1, device=total.device)
            else:
                mean = (total / (length - columns)).transpose(1, 2)
            self.add(name, layer, mean)
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
        counts = (lengths[:, None] > torch.arange(self.length, device="cpu")).sum(
            dim=0
        )  # sequences that have each position
        for name, sums in self.sums.items():
            fields[name] = torch.stack([total.cpu() / counts for _, total in sorted(sums.items())])
        if self.firsts:
            fields["first_elements"] = torch.stack([one.cpu() / len(order) for _, one in sorted(self.firsts.items())])
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
    """Adds to a tally what a `TransformerLM` shows while it runs (an `Observer`), without an attention map."""

    path, chunked = "log-mass", False

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
        own = slice(self.first, None)
        self.tally.add_qkv(layer, q[:, :, own], k[:, :, own], v[:, :, own])
        given = {name: extra for name, extra in extras.items() if name != "value_bias"}
        mass = fast.log_mass(q, k, spec, **given).float()[..., None]
        shares_of = partial(chosen_shares, q, k, spec, mass, given)
        columns = self.tally.columns(q.device) + self.first
        shares, star = shares_of(columns)
        self.tally.add("alpha", layer, mean_over_queries(shares, columns, self.first))
        if self.first:
            star = shares_of(columns.new_zeros(1))[0][..., 0]
        if star is not None:
            self.tally.add("star", layer, star[:, :, own].mean(dim=-1))  # x* seeing itself says nothing
        if self.tally.mass or self.tally.heads_of(layer):
            self._all_keys(layer, torch.arange(self.first, q.shape[2], device=q.device), shares_of)

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, hidden[:, None, self.first :])
        if before_norm is not hidden:
            self.tally.add_norms("before_norm", layer, before_norm[:, None, self.first :])

    def _all_keys(self, layer: int, positions: Tensor, shares_of: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        """alpha of every key, `COLUMNS` at a time, and the maps of the chosen heads."""
        heads = self.tally.heads_of(layer) if "map" in self.tally.keep else []
        masses: list[Tensor] = []
        maps: list[Tensor] = []
        for columns in positions.split(COLUMNS):
            shares = shares_of(columns)[0]
            masses.append(mean_over_queries(shares, columns, self.first))
            maps.append(shares[:, heads, self.first :])
        if self.tally.mass:
            self.tally.add("mass", layer, torch.cat(masses, dim=1).transpose(1, 2))
        for head, whole in zip(heads, torch.cat(maps, dim=-1).unbind(1), strict=True):
            self.tally.add_map(layer, head, "map", whole)


def chosen_shares(
    q: Tensor, k: Tensor, spec: AttentionSpec, mass: Tensor, extras: dict[str, Any], columns: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A_ik (proxy scores where weights do not sum to one) of the keys at `columns` (K,), 0-based.

    q, k: (B, H, T, D), after rotary; mass: (B, H, T, 1), of `fast.log_mass`. Returns shares (B, H, T, K), zero
    where key k is hidden from query i, and the share of k* or the sink logit, (B, H, T), or None without one.
    Of differential attention |A_1 - lambda A_2| over its row sum.
    """
    distance_bias, key_bias, _, mlp, sink_logit, mix = Extras(**extras)
    if mix is not None:
        parts, plain = halves(q, spec)
        masses = (fast.log_mass(part, k, plain, distance_bias=distance_bias).float()[..., None] for part in parts)
        first, second = (
            chosen_shares(part, k, plain, own, {"distance_bias": distance_bias}, columns)[0]
            for part, own in zip(parts, masses, strict=True)
        )
        return (first - mix * second).abs() * torch.exp(-mass), None
    # phi in the model's own precision, everything after it in float32.
    phi_q, phi_k = features(q, spec, mlp).float(), features(k[:, :, columns], spec, mlp).float()
    star = features(key_bias, spec, mlp).float() if key_bias is not None and spec.has_key_bias else None
    rows = torch.arange(q.shape[2], device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        logits = phi_q @ phi_k.mT * q.shape[-1] ** -0.5
        if distance_bias is not None:
            logits = logits + distance_bias[:, (rows[:, None] - columns).clamp(min=0)].float()
        shares = share(logits, mass, spec).masked_fill(~visible(rows, columns, spec), 0)
        if spec.sink_logit != "none":
            sink = q.new_zeros(q.shape[1]) if sink_logit is None else sink_logit
            return shares, torch.exp(sink[:, None].float() - mass[..., 0])
        if star is None:
            return shares, None
        return shares, share(phi_q @ star[:, :, None] * q.shape[-1] ** -0.5, mass, spec)[..., 0]


def share(logits: Tensor, mass: Tensor, spec: AttentionSpec) -> Tensor:
    """|f(s)| exp(-log_mass), in log space where f itself could overflow; 0 where a row has no mass."""
    return torch.exp(spec.f.log(logits) - mass.masked_fill(mass == -torch.inf, 0))
