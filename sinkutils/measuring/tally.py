"""How a report comes about: what is asked for, the sums over batches, and what our own model shows while it runs.

A_ik needs no attention map: it is |f(s_ik)| exp(-log_mass_i), with log_mass_i the logarithm of the row's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
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


class Tally:
    """A report in the making: batches add values a sample and sums of norms, a layer at a time."""

    def __init__(self, length: int, norms: bool = True) -> None:
        self.length = length  # positions of the longest sequence
        self.norms = norms
        self.values: dict[str, dict[int, list[Tensor]]] = {}  # name -> layer -> a (B, ..) for each batch
        self.sums: dict[str, dict[int, Tensor]] = {}  # name -> layer -> (positions,)
        self.counts = torch.zeros(length)  # sequences that have each position
        self.kept: dict[tuple[int, int], dict[str, list[Tensor]]] = {}

    def add_batch(self, samples: int, length: int) -> None:
        """Note that a batch of equally long sequences was run."""
        self.counts[:length] += samples

    def add(self, name: str, layer: int, value: Tensor) -> None:
        """Add (B, ..) values of a layer."""
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

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add a number a position, (B, T), to the sum over samples."""
        total = rows.sum(dim=0).float()
        total = F.pad(total, (0, self.length - len(total)))
        layers = self.sums.setdefault(name, {})
        layers[layer] = layers[layer] + total if layer in layers else total

    def keep(self, layer: int, head: int, name: str, value: Tensor) -> None:
        """Keep (B, T, T) of one head for figures; shorter sequences are padded with zeros."""
        missing = self.length - value.shape[-1]
        padded = F.pad(value.float(), (0, missing, 0, missing))
        self.kept.setdefault((layer, head), {}).setdefault(name, []).append(padded.cpu())

    def report(self, order: Tensor, targets: tuple[int, ...], epsilons: tuple[float, ...], lengths: Tensor) -> Report:
        """The report; `order` (samples,) says where each sample stands in the order of the batches."""
        heads = {batches[0].shape[-1] for batches in self.values["alpha"].values()}
        if len(heads) > 1:
            raise ValueError(f"layers have different numbers of heads ({sorted(heads)}), which a report cannot hold")
        if "star" in self.values:  # a layer without a sink logit leaves nothing to it
            for layer, alpha in self.values["alpha"].items():
                self.values.get("renormalised", {}).setdefault(layer, alpha)
                self.values["star"].setdefault(layer, [torch.zeros_like(batch[:, 0]) for batch in alpha])
        stacked = {
            name: torch.stack([torch.cat(batches).cpu() for _, batches in sorted(layers.items())], dim=1)[order]
            for name, layers in self.values.items()
        }
        for name in ("alpha", "renormalised"):
            if name in stacked:
                stacked[name] = stacked[name].transpose(1, 2)  # (samples, layers, targets, heads) before
        mean = {
            name: torch.stack([total.cpu() / self.counts for _, total in sorted(layers.items())])
            for name, layers in self.sums.items()
        }
        if "embedding_norms" in mean:
            mean["embedding_norms"] = mean["embedding_norms"][0]
        heads_shown = {
            pair: Kept(**{name: torch.cat(batches)[order] for name, batches in values.items()})
            for pair, values in self.kept.items()
        }
        layers = tuple(sorted(self.values["alpha"]))
        more: dict[str, Any] = {**stacked, **mean, "kept": heads_shown}
        return Report(more.pop("alpha"), targets, epsilons, lengths, layers, **more)


@dataclass(frozen=True)
class Request:
    """What `measure` is asked for, checked."""

    targets: tuple[int, ...]
    norms: bool = True
    mass: bool = False
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head) pairs whose maps are kept
    keep: tuple[str, ...] = ("map", "qk")

    def heads_of(self, layer: int) -> list[int]:
        return [head for chosen, head in self.heads if chosen == layer]


def refuse_heads(pairs: list[tuple[int, int]], has: str) -> None:
    """Raise ValueError where there are (layer, head) pairs that a model does not have; `has` says what it has."""
    require(not pairs, f"heads names (layer, head) pairs that the model does not have: {pairs}; {has}")


def keep_products(tally: Tally, layer: int, head: int, q: Tensor, k: Tensor) -> None:
    """Keep cos(q_i, k_j) and ||q_i|| ||k_j|| of one head (Fig. 2 bottom); q, k: (B, T, D)."""
    q, k = q.float(), k.float()
    tally.keep(layer, head, "cosine", F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT)
    tally.keep(layer, head, "norm_product", q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None])


class OwnModelObserver:
    """Adds to a tally what `TransformerLM.forward` shows; no attention map is kept that was not asked for."""

    def __init__(self, tally: Tally, request: Request, first: int) -> None:
        self.tally, self.request = tally, request
        self.first = first  # 1 where x* stands at position 0

    def embedding(self, hidden: Tensor) -> None:
        self._norms("embedding", 0, hidden[:, None])

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict[str, Any]
    ) -> None:
        for name, x in (("query", q), ("key", k), ("value", v)):
            self._norms(name, layer, x)
        columns = torch.tensor(self.request.targets, device=q.device) - 1 + self.first
        given = {name: extra for name, extra in extras.items() if name != "value_bias"}
        mass = fast.log_mass(q, k, spec, **given).float()[..., None]
        shares, star = chosen_shares(q, k, columns, spec, mass, **given)
        self.tally.add("alpha", layer, mean_over_queries(shares, columns, self.first))
        if self.first:
            star = chosen_shares(q, k, columns.new_zeros(1), spec, mass, **given)[0][..., 0]
        if star is not None:
            # Only the sequence's own queries: x* seeing itself says nothing.
            self.tally.add("star", layer, star[:, :, self.first :].mean(dim=-1))
        if self.request.mass or self.request.heads_of(layer):
            self._all_keys(layer, q, k, spec, mass, given)

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, hidden[:, None, self.first :])
        if before_norm is not hidden:
            self._norms("before_norm", layer, before_norm[:, None])

    def _norms(self, name: str, layer: int, x: Tensor) -> None:
        self.tally.add_norms(name, layer, x[:, :, self.first :])

    def _all_keys(
        self, layer: int, q: Tensor, k: Tensor, spec: AttentionSpec, mass: Tensor, given: dict[str, Any]
    ) -> None:
        """alpha of every key, `COLUMNS` at a time, and the maps of the chosen heads."""
        positions = torch.arange(self.first, q.shape[2], device=q.device)
        masses: list[Tensor] = []
        maps: list[Tensor] = []
        for columns in positions.split(COLUMNS):
            shares = chosen_shares(q, k, columns, spec, mass, **given)[0]
            masses.append(mean_over_queries(shares, columns, self.first))
            maps.append(shares[:, self.request.heads_of(layer), self.first :])
        if self.request.mass:
            self.tally.add("mass", layer, torch.cat(masses, dim=1).transpose(1, 2))
        own = slice(self.first, None)
        for index, head in enumerate(self.request.heads_of(layer)):
            if "map" in self.request.keep:
                self.tally.keep(layer, head, "map", torch.cat([part[:, index] for part in maps], dim=-1))
            if "qk" in self.request.keep:
                keep_products(self.tally, layer, head, q[:, head, own], k[:, head, own])


def chosen_shares(
    q: Tensor, k: Tensor, columns: Tensor, spec: AttentionSpec, mass: Tensor, **extras: Any
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
            chosen_shares(part, k, columns, plain, mass, distance_bias=distance_bias)[0]
            for part, mass in zip(parts, masses, strict=True)
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


def run_own(model: TransformerLM, ids: Tensor, request: Request, tally: Tally) -> None:
    """Run one batch of ids (B, T) through our own model and add what the request asks for to the tally."""
    model.hidden(ids.to(model.embed.weight.device), OwnModelObserver(tally, request, int(model.config.sink_token)))


class Reduction:
    """Sums over queries of one layer's attention weights, given in chunks of rows."""

    def __init__(self, request: Request, tally: Tally, layer: int, length: int, sink: bool) -> None:
        self.request, self.tally, self.layer, self.length, self.sink = request, tally, layer, length, sink
        self.sums: dict[str, Tensor] = {}
        self.maps: list[Tensor] = []

    def take(self, weights: Tensor) -> None:
        """Add rows of weights, (B, H, R, T)."""
        columns = torch.tensor(self.request.targets, device=weights.device) - 1
        chosen = weights[..., columns].float()
        self._sum("alpha", chosen)
        if self.sink:
            rest = weights.float().sum(dim=-1, keepdim=True)  # what the learned sink logit left
            self._sum("renormalised", chosen / rest)
            self._sum("star", 1 - rest)
        if self.request.mass:
            self._sum("mass", weights)
        if self.request.heads_of(self.layer) and "map" in self.request.keep:
            self.maps.append(weights[:, self.request.heads_of(self.layer)])

    def _sum(self, name: str, rows: Tensor) -> None:
        total = rows.sum(dim=2, dtype=torch.float32)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def report(self) -> None:
        """Add to the tally alpha (B, K, H) and what else was asked for; weights of hidden keys are 0, so that sums run
        over i >= k.
        """
        device = self.sums["alpha"].device
        columns = torch.tensor(self.request.targets, device=device) - 1
        for name, total in self.sums.items():
            if name == "star":
                mean = total[..., 0] / self.length
            elif name == "mass":
                mean = total / torch.arange(self.length, 0, -1, device=device)
            else:
                mean = (total / (self.length - columns)).transpose(1, 2)
            self.tally.add(name, self.layer, mean)
        if self.maps:
            maps = torch.cat(self.maps, dim=2).unbind(1)
            for head, whole in zip(self.request.heads_of(self.layer), maps, strict=True):
                self.tally.keep(self.layer, head, "map", whole)
