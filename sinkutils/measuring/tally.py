"""How a report comes about: what is asked for, the sums over
batches, and what our own model shows while it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import require
from sinkutils.measuring.refusals import why_not_finite
from sinkutils.measuring.report import Kept, NotFinite, Report
from sinkutils.model.attention import AttentionSpec, attend, divide
from sinkutils.model.decoder import TransformerLM

if TYPE_CHECKING:
    from sinkutils.measuring.hf import Capture


WITHOUT_FLOAT64 = ("mps",)  # devices; what needs it moves to the CPU


def mean_over_queries(shares: Tensor, columns: Tensor) -> Tensor:
    """alpha_k of the keys at `columns` (K,), 0-based, from
    A_ik (B, H, T, K): the mean over i = k..T, (B, K, H).
    """
    rows = torch.arange(shares.shape[2], device=shares.device)
    # Of a key k the rows i >= k count; those before see it through a prefix only.
    counted = (rows[:, None] >= columns).to(shares.dtype)  # (T, K)
    return ((shares * counted).sum(dim=2) / counted.sum(dim=0)).transpose(1, 2)


def lower_median(x: Tensor) -> Tensor:
    """torch.median of each row of x (rows, n); on a CPU numpy
    finds the same element eight times as fast.
    """
    if x.device.type != "cpu":
        return x.median(dim=1).values
    middle = (x.shape[1] - 1) // 2
    return torch.from_numpy(np.partition(x.numpy(), middle, axis=1)[:, middle])


@dataclass
class Tally:
    """A report in the making: what is asked for and, added a
    layer and a batch at a time, what came of it.
    """

    targets: tuple[int, ...]
    length: int  # positions of the longest sequence
    norms: bool = True
    heads: tuple = ()  # (layer, head) pairs of which maps, queries and keys are kept

    def __post_init__(self) -> None:
        # name -> layer -> a (B, ..) for each batch
        self.values: Any = defaultdict(lambda: defaultdict(list))
        self.sums: Any = defaultdict(dict)  # name -> layer -> (positions,) or (d,), over samples
        # (layer, head) -> name -> a (B, T, ..) for each batch
        self.kept: Any = defaultdict(lambda: defaultdict(list))

    def heads_of(self, layer: int, count: int) -> list[int]:
        """The chosen heads of a layer that has `count`."""
        return [head for chosen, head in self.heads if chosen == layer and 0 <= head < count]

    def columns(self, device: torch.device) -> Tensor:
        """The targets' 0-based positions, (K,)."""
        return torch.tensor(self.targets, device=device) - 1

    def add_norms(self, name: str, layer: int, x: Tensor) -> None:
        """Add the l2-norms of x (B, H, T, D), mean over heads."""
        if not self.norms:
            return
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=wide)  # (B, H, T)
        self._sum(f"{name}_norms", layer, self._padded(norms.mean(dim=1)))

    def add_hidden(self, layer: int, hidden: Tensor) -> None:
        """Add a block's output (B, S, T, d), of S streams: its norms, and its largest element at
        each position over the median element of the sequence (magnitudes; Sun et al. 2024).
        """
        self.add_norms("hidden", layer, hidden)
        if not self.norms:
            return
        sizes = hidden.abs().float()
        median = lower_median(sizes.flatten(1)).clamp(min=1e-30)[:, None]  # (B, 1)
        peaks = sizes.amax(dim=(1, 3)) / median  # (B, T)
        self._sum("hidden_peaks", layer, self._padded(peaks))
        first = sizes[:, :, 0].amax(dim=1) / median  # (B, d)
        self._sum("first_elements", layer, first)

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add rows (B, n) of a layer to the sum over samples."""
        self.sums[name][layer] = self.sums[name].get(layer, 0) + rows.sum(dim=0).float()

    def _padded(self, values: Tensor, axes: int = 1) -> Tensor:
        """Values by position, along the last axis or the last
        two, with zeros up to the longest sequence.
        """
        return F.pad(values, (0, self.length - values.shape[-1]) * axes)

    def add_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the norms of q (B, H, T, D), k and v (of H heads or
        fewer), and the chosen heads' queries and keys.
        """
        for name, x in (("query", q), ("key", k), ("value", v)):
            self.add_norms(name, layer, x)
        for head in self.heads_of(layer, q.shape[1]):
            group = q.shape[1] // k.shape[1]  # query heads that share a key
            for name, x in (("queries", q[:, head]), ("keys", k[:, head // group])):
                whole = self._padded(x.float().mT).mT  # (B, longest, D)
                self.kept[layer, head][name].append(whole.cpu())

    def add_weights(
        self, layer: int, chunks: Iterable[Tensor], star: bool = False, front: int = 0
    ) -> None:
        """Add what is asked for of a layer's attention weights.

        chunks: of rows, (B, H, R, front + T) each. star: what a row of the text's T keys lacks to
        one is a learned sink logit's, or that of the `front` keys.
        """
        shares, sums, maps = [], [], []
        heads: list[int] = []
        for chunk in chunks:
            weights = chunk[..., front:]
            heads = self.heads_of(layer, chunk.shape[1])
            maps.append(weights[:, heads])
            wide = torch.promote_types(chunk.dtype, torch.float32)
            shares.append(weights[..., self.columns(chunk.device)].to(wide))
            if star:
                sums.append(weights.sum(dim=-1, keepdim=True, dtype=wide))
        rest = torch.cat(sums, dim=2) if star else None
        self.add_shares(layer, torch.cat(shares, dim=2), rest)
        if heads:
            whole = torch.cat(maps, dim=2).float()  # (B, chosen heads, T, T)
            for head, one in zip(heads, whole.unbind(1), strict=True):
                self.kept[layer, head]["map"].append(self._padded(one, 2).cpu())

    def add_shares(self, layer: int, shares: Tensor, rest: Tensor | None = None) -> None:
        """Add alpha from the targets' A_ik (B, H, T, K); rest
        (B, H, T, 1): what the star leaves of a row.
        """
        columns = self.columns(shares.device)
        self.values["alpha"][layer].append(mean_over_queries(shares, columns).float())
        if rest is not None:
            renormalised = shares / rest.clamp(min=1e-30)
            self.values["renormalised"][layer].append(
                mean_over_queries(renormalised, columns).float()
            )
            self.add_star(layer, 1 - rest[..., 0])

    def add_star(self, layer: int, star: Tensor) -> None:
        """Add the share (B, H, T) of k*, x* or a learned sink logit."""
        self.values["star"][layer].append(star.mean(dim=-1).float())

    def refuse_heads(self) -> None:
        """Raise ValueError where (layer, head) pairs were asked
        for that the model, of which a batch ran, has not.
        """
        alphas = self.values["alpha"]
        missing = [pair for pair in self.heads if pair not in self.kept]
        count = next(iter(alphas.values()))[0].shape[-1]
        require(
            not missing,
            f"heads names (layer, head) pairs that the model does not have: {missing}; "
            f"its attention layers are {sorted(alphas)}, with heads 0..{count - 1}",
        )

    def report(
        self,
        source: OwnModel | Capture,
        order: Tensor,
        lengths: Tensor,
        epsilons: tuple[float, ...],
    ) -> Report:
        """What a source added, on samples of these lengths.

        order: (samples,), where each stands among those of all batches. Raises NotFinite, and
        ValueError for layers with different numbers of heads.
        """
        alphas = self.values["alpha"]
        self._complete_stars(alphas)
        heads = sorted({batches[0].shape[-1] for batches in alphas.values()})
        require(
            len(heads) == 1,
            f"layers have different numbers of heads ({heads}), which a report cannot hold",
        )
        fields: dict = {}
        for name, layers in self.values.items():
            rows = [torch.cat(batches).cpu()[order] for _, batches in sorted(layers.items())]
            fields[name] = torch.stack(rows, dim=-2)
        positions = torch.arange(self.length, device="cpu")
        counts = (lengths[:, None] > positions).sum(dim=0)  # samples that have each position
        for name, sums in self.sums.items():
            samples = len(order) if name == "first_elements" else counts
            means = [total.cpu() / samples for _, total in sorted(sums.items())]
            fields[name] = torch.stack(means)
        if self.norms:
            fields["embedding_norms"] = fields["embedding_norms"][0]
        for pair, parts in self.kept.items():
            whole = {name: torch.cat(batches)[order] for name, batches in parts.items()}
            fields.setdefault("kept", {})[pair] = Kept(**whole)
        layers = tuple(sorted(alphas))
        if any(source.windows.values()):
            fields["windows"] = tuple(source.windows.get(layer) for layer in layers)
        fields |= {"path": source.path, "chunked": source.chunked}
        report = Report(fields.pop("alpha"), self.targets, epsilons, lengths, layers, **fields)
        for numbers in (report.alpha, report.hidden_norms):
            if numbers is not None and not numbers.isfinite().all():
                reason = why_not_finite(source.model)
                raise NotFinite(f"attention or hidden states are not finite: {reason}")
        return report

    def _complete_stars(self, alphas: dict) -> None:
        """In a model whose layers have a sink logit, those without leave nothing to it."""
        stars = self.values.get("star", {})
        if not stars:
            return
        for layer in alphas.keys() - stars.keys():
            stars[layer] = [torch.zeros_like(batch[:, 0]) for batch in alphas[layer]]
            self.values["renormalised"][layer] = alphas[layer]


class OwnModel:
    """Adds to a tally what a `TransformerLM` shows while it
    runs (an `Observer`): one map at a time.
    """

    path, chunked = "dense", False
    tokens_a_batch = 2**27  # as many as one likes: no logits are computed

    def __init__(
        self, model: TransformerLM, tally: Tally, change: Callable[..., None] | None = None
    ) -> None:
        self.model, self.tally = model, tally
        self.change = change  # of surgery: change(layer, q, k, v) writes into the tensors
        self.first = int(model.config.sink_token)  # 1 where x* stands at position 0
        self.vocabulary = model.config.vocab_size
        self.windows = dict.fromkeys(range(model.config.num_layers), model.config.attention.window)

    def check(self, rows: Sequence[Tensor], run: bool = True) -> None:
        """Our own model is causal, and computes what it shows."""

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T)."""
        self.model.hidden(ids.to(self.model.embed.weight.device), self)

    def embedding(self, hidden: Tensor) -> None:
        self.tally.add_norms("embedding", 0, hidden[:, None, self.first :])

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict
    ) -> None:
        if self.change is not None:
            self.change(layer, q, k, v)
        tally, first = self.tally, self.first
        tally.add_qkv(layer, q[:, :, first:], k[:, :, first:], v[:, :, first:])
        # What x* sees of itself says nothing
        shares = attention_shares(q, k, v, spec, extras)[:, :, first:]
        length = shares.shape[2]
        tally.add_weights(layer, [shares[..., -length:]])
        if first or spec.has_star:
            tally.add_star(layer, shares[..., -length - 1])

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, hidden[:, None, self.first :])
        if before_norm is not hidden:
            self.tally.add_norms("before_norm", layer, before_norm[:, None, self.first :])


def attention_shares(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict) -> Tensor:
    """What alpha is the mean of, (B, H, T, S), in float64:
    |A_ij| over its row sum, which is A_ij of a softmax.

    Where weights do not sum to one these are the proxy scores of Section 7.4. The arguments are
    those of `attend`. Softpick's weights, whose rows sum to less than one, are taken as they are.
    """
    place = torch.device("cpu") if q.device.type in WITHOUT_FLOAT64 else q.device

    def widened(x: Tensor) -> Tensor:
        return x.to(place).double()

    wide: dict = {}
    for name, extra in extras.items():
        # A learned kernel keeps the model's precision.
        kernel = name == "mlp"
        wide[name] = (lambda x: widened(extras["mlp"](x.to(q)))) if kernel else widened(extra)
    # In float64 exp of a logit does not overflow below 709.
    weights = attend(widened(q), widened(k), widened(v), spec, **wide)[1].abs()
    if spec.similarity == "softpick":
        return weights / spec.scale
    return divide(weights, weights.sum(dim=-1, keepdim=True))
