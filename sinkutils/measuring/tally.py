"""How a report comes about: sums over batches, and what our own model shows while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.checks import instance, require
from sinkutils.measuring.report import Kept, NotFinite, Report
from sinkutils.model.attention import AttentionSpec, attend, divide
from sinkutils.model.decoder import TransformerLM

if TYPE_CHECKING:
    from sinkutils.measuring.hf import Capture


def mean_over_queries(shares: Tensor, columns: Tensor) -> Tensor:
    """alpha_k = mean over i = k..T of A_ik, (B, K, H), of shares A_ik (B, H, T, K).

    columns: (K,), the 0-based positions of the keys.
    """
    rows = torch.arange(shares.shape[2], device=shares.device)
    # Of a key k the rows i >= k count; those before see it through a prefix only.
    counted = (rows[:, None] >= columns).to(shares.dtype)  # (T, K)
    sums = (shares * counted).sum(dim=2)  # (B, H, K)
    alpha = sums / counted.sum(dim=0)
    return alpha.transpose(1, 2)


def lower_median(x: Tensor) -> Tensor:
    """torch.median of each row of x (rows, n); on a CPU numpy is eight times as fast."""
    if x.device.type != "cpu":
        return x.median(dim=1).values
    middle = (x.shape[1] - 1) // 2
    # In each row the middle element stands where sorting would put it.
    rows = np.partition(x.numpy(), middle, axis=1)
    return torch.from_numpy(rows[:, middle])


@dataclass
class Tally:
    """A report in the making: numbers are added a layer and a batch at a time."""

    targets: tuple[int, ...]
    length: int  # positions of the longest sequence
    norms: bool = True
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head), whose map, queries and keys are kept

    def __post_init__(self) -> None:
        # name -> layer, or (layer, head) that is kept -> a (B, ..) for each batch
        self.values: Any = defaultdict(lambda: defaultdict(list))
        self.sums: Any = defaultdict(dict)  # name -> layer -> (positions,) or (d,), over samples

    def heads_of(self, layer: int, count: int) -> list[int]:
        """The chosen heads of a layer that has `count`."""
        chosen = []
        for of_layer, head in self.heads:
            if of_layer == layer and 0 <= head < count:
                chosen.append(head)
        return chosen

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
        """Add a block's output (B, S, T, d), of S streams.

        Of it: its norms, and the magnitude of the largest element at each position over the median
        one of the sequence (Sun et al. 2024).
        """
        if not self.norms:
            return
        self.add_norms("hidden", layer, hidden)
        sizes = hidden.abs().float()  # (B, S, T, d)
        median = lower_median(sizes.flatten(1))[:, None]  # (B, 1)
        median = median.clamp(min=1e-30)  # it divides
        peaks = sizes.amax(dim=(1, 3)) / median  # (B, T)
        self._sum("hidden_peaks", layer, self._padded(peaks))
        first = sizes[:, :, 0].amax(dim=1) / median  # (B, d)
        self._sum("first_elements", layer, first)

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add rows (B, n) of a layer to the sum over samples."""
        sums = self.sums[name]
        sums[layer] = sums.get(layer, 0) + rows.sum(dim=0).float()

    def _padded(self, values: Tensor, axes: int = 1) -> Tensor:
        """Values by position, with zeros up to the longest sequence, along the last axes."""
        behind = self.length - values.shape[-1]
        return F.pad(values, (0, behind) * axes)

    def add_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add norms of k and v (B, H or fewer, T, D); keep q (B, H, T, D) and k of chosen heads."""
        self.add_norms("key", layer, k)
        self.add_norms("value", layer, v)
        # A key's head is found by its group, as in GQA H query heads share fewer keys.
        group = q.shape[1] // k.shape[1]  # query heads that share a key
        for head in self.heads_of(layer, q.shape[1]):
            self._keep("queries", layer, head, q[:, head])
            self._keep("keys", layer, head, k[:, head // group])

    def _keep(self, name: str, layer: int, head: int, x: Tensor) -> None:
        """Keep the queries or keys (B, T, D) of a head."""
        padded = self._padded(x.float().mT).mT  # (B, longest, D)
        self.values[name][layer, head].append(padded.cpu())

    def reduced(self, layer: int, weights: Tensor, star: bool = False) -> tuple[Tensor, ...]:
        """What is kept of a layer's attention weights (B, H, R, T) of R queries.

        The shares of the targets, (B, H, R, K), and the maps of the chosen heads, (B, chosen, R, T).
        star: also what each row lacks to one, (B, H, R), which is the share of a learned sink logit
        or of keys in front of the text.
        """
        wide = torch.promote_types(weights.dtype, torch.float32)
        shares = weights[..., self.columns(weights.device)].to(wide)
        chosen = self.heads_of(layer, weights.shape[1])
        maps = weights[:, chosen].float()
        if not star:
            return shares, maps
        return shares, maps, 1 - weights.sum(dim=-1, dtype=wide)

    def add_weights(self, layer: int, parts: Sequence[tuple[Tensor, ...]]) -> None:
        """Add a layer's attention, of which `reduced` gave the parts, for some queries each."""
        shares, maps, *star = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        self.add_shares(layer, shares)
        if star:
            self.add_star(layer, star[0])
        padded = self._padded(maps, axes=2)  # (B, chosen, T, T)
        for index, head in enumerate(self.heads_of(layer, shares.shape[1])):
            of_head = padded[:, index]  # (B, T, T)
            self.values["map"][layer, head].append(of_head.cpu())

    def add_shares(self, layer: int, shares: Tensor) -> None:
        """Add alpha from the targets' A_ik, (B, H, T, K)."""
        alpha = mean_over_queries(shares, self.columns(shares.device))
        self.values["alpha"][layer].append(alpha.float())

    def add_star(self, layer: int, star: Tensor) -> None:
        """Add the share (B, H, T) of k*, x* or a learned sink logit."""
        alpha = star.mean(dim=-1)  # over all queries: (B, H)
        self.values["star"][layer].append(alpha.float())

    def refuse_heads(self) -> None:
        """Raise ValueError for chosen (layer, head) pairs that did not run in the first batch."""
        alphas = self.values["alpha"]
        missing = [pair for pair in self.heads if pair not in self.values["map"]]
        first_layer = next(iter(alphas.values()))
        count = first_layer[0].shape[-1]  # of the first batch, (B, targets, heads)
        require(
            not missing,
            f"heads names (layer, head) pairs that the model does not have: {missing}; "
            f"its attention layers are {sorted(alphas)}, with heads 0..{count - 1}",
        )

    def report(
        self,
        source: OwnModel | Capture,
        places: Tensor,
        lengths: Tensor,
        epsilons: tuple[float, ...],
    ) -> Report:
        """The report of all that was added.

        source: what ran the model. places: (samples,), where each sample stands among those of all
        batches. lengths: (samples,). Raises NotFinite, and ValueError for layers with different
        numbers of heads.
        """
        values = self._in_order(places)
        alphas = values["alpha"]  # layer -> (samples, targets, heads)
        counts = sorted({alpha.shape[-1] for alpha in alphas.values()})
        require(
            len(counts) == 1,
            f"layers have different numbers of heads ({counts}), which a report cannot hold",
        )
        alpha = torch.stack(list(alphas.values()), dim=-2)  # (samples, targets, layers, heads)
        fields = self._means(lengths)
        fields["path"] = source.path
        if "star" in values:
            # Some models have sink logits in some layers only: in the others they take nothing.
            nothing = torch.zeros_like(alpha[:, 0, 0])  # (samples, heads)
            stars = [values["star"].get(layer, nothing) for layer in alphas]
            fields["star"] = torch.stack(stars, dim=1)
        if any(source.windows.values()):
            fields["windows"] = tuple(source.windows.get(layer) for layer in alphas)
        queries = values["queries"]  # empty, as the keys, where a model shows weights alone
        keys = values["keys"]
        kept = {}
        for pair, weights in values["map"].items():
            kept[pair] = Kept(weights, queries.get(pair), keys.get(pair))
        layers = tuple(alphas)
        report = Report(alpha, self.targets, epsilons, lengths, layers, kept=kept, **fields)
        for numbers in (report.alpha, report.hidden_norms):
            if numbers is not None and not numbers.isfinite().all():
                reason = why_not_finite(source.model)
                raise NotFinite(f"attention or hidden states are not finite: {reason}")
        return report

    def _in_order(self, places: Tensor) -> Any:
        """As `values`, but of all batches: (samples, ..), in the order of the ids."""
        values: Any = defaultdict(dict)
        for name, by_layer in self.values.items():
            for layer, batches in sorted(by_layer.items()):
                whole = torch.cat(batches).cpu()
                values[name][layer] = whole[places]
        return values

    def _means(self, lengths: Tensor) -> dict[str, Any]:
        """The means over samples of norms and elements, by their names in a report."""
        # Of sequences of unequal lengths, a mean is over those that have the position.
        positions = torch.arange(self.length, device="cpu")
        samples = (lengths[:, None] > positions).sum(dim=0)  # by position
        means: dict[str, Any] = {}
        for name, sums in self.sums.items():
            count = samples[:1] if name == "first_elements" else samples  # all have the first
            totals = [sums[layer].cpu() for layer in sorted(sums)]
            means[name] = torch.stack(totals) / count
        if self.norms:  # the embedding was added as layer 0
            means["embedding_norms"] = means["embedding_norms"][0]
        return means


def why_not_finite(model: nn.Module) -> str:
    """What is not finite in a model whose attention is not."""
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point():
            continue
        if not weight.isfinite().all():
            return f"the weights hold nan or infinite values ({name})"
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        return "every weight is finite and activations overflow float16: use bfloat16 or float32"
    return "every weight is finite, and activations are not: a layer overflows or divides by zero"


@dataclass
class Edit:
    """Of surgery: change(x) in place of the queries, keys or values of some layers."""

    part: str  # "q", "k" or "v"
    layers: Collection[int]
    change: Callable[[Tensor], Tensor]


def changed(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """change(x), of a copy. Raises ValueError for what cannot stand in the place of x."""
    result = change(x.clone())
    instance("what change returns", result, Tensor)
    require(
        result.shape == x.shape,
        f"change must return the shape {tuple(x.shape)}, got {tuple(result.shape)}",
    )
    return result.to(x)


class OwnModel:
    """Adds to a tally what a `TransformerLM` shows while it runs, a map at a time."""

    path = "dense"
    tokens_a_batch = 2**27  # as many as one likes: no logits are computed
    edit: Edit | None = None

    def __init__(self, model: TransformerLM, tally: Tally) -> None:
        self.model = model
        self.tally = tally
        self.blocks = model.blocks
        self.layers = {block.attention: layer for layer, block in enumerate(model.blocks)}
        self.device = model.embed.weight.device
        cfg = model.config
        self.first = int(cfg.sink_token)  # 1 where x* stands at position 0
        self.vocabulary = cfg.vocab_size
        self.windows = dict.fromkeys(range(cfg.num_layers), cfg.attention.window)

    def check(self, rows: Sequence[Tensor], run: bool = True) -> None:
        """Our own model is causal, and computes what it shows."""

    def here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A hook as it is: a model of ours is not shared by threads."""
        return function

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T)."""
        self.model.hidden(ids.to(self.device), self)

    def _text(self, hidden: Tensor) -> Tensor:
        """Hidden states without those of x*, as one stream, (B, 1, T, d)."""
        return hidden[:, None, self.first :]

    def embedding(self, hidden: Tensor) -> None:
        self.tally.add_norms("embedding", 0, self._text(hidden))

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        extras: Mapping[str, Any],
    ) -> None:
        if self.edit is not None and layer in self.edit.layers:
            part = {"q": q, "k": k, "v": v}[self.edit.part]
            part.copy_(changed(self.edit.change, part))  # the model goes on with what it shows
        tally = self.tally
        first = self.first
        of_text = [x[:, :, first:] for x in (q, k, v)]
        tally.add_qkv(layer, *of_text)
        # Not the row of x*, which sees itself alone.
        shares = attention_shares(q, k, v, spec, extras)[:, :, first:]
        # Columns are k* or x*, where there is one, and then the text's keys.
        length = shares.shape[2]
        tally.add_weights(layer, [tally.reduced(layer, shares[..., -length:])])
        if first or spec.has_star:
            tally.add_star(layer, shares[..., -length - 1])

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, self._text(hidden))
        if before_norm is not hidden:  # post-norm: Eq. 3 before its last norm
            self.tally.add_norms("before_norm", layer, self._text(before_norm))


def attention_shares(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Mapping[str, Any]
) -> Tensor:
    """What alpha is the mean of, (B, H, T, S), in float64: |A_ij| over its row sum.

    Of a softmax that is A_ij; where weights do not sum to one, the proxy score of Section 7.4. The
    rows of softpick sum to less than one, and are taken as they are. The arguments are those of
    `attend`.
    """
    # In float64 exp of a logit does not overflow below 709. An Apple GPU has no float64.
    device = torch.device("cpu") if q.device.type == "mps" else q.device

    def widened(x: Tensor) -> Tensor:
        return x.to(device).double()

    def learned_kernel(x: Tensor) -> Tensor:
        return widened(extras["mlp"](x.to(q)))  # it keeps the model's precision

    wide_extras: dict[str, Any] = {}
    for name, x in extras.items():
        wide_extras[name] = learned_kernel if name == "mlp" else widened(x)
    _, weights = attend(widened(q), widened(k), widened(v), spec, **wide_extras)
    weights = weights.abs()
    # What a row of softpick lacks to `scale` is on no key, and is not shared out among them.
    if spec.similarity == "softpick":
        return weights / spec.scale
    return divide(weights, weights.sum(dim=-1, keepdim=True))
