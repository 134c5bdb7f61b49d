"""The sink metric of Section 3.2: alpha_k, Sink_k^eps, the excess, and the l2-norms beside them.

alpha_k = mean over i = k..T of A_ik
Sink_k^eps = mean over sequences, layers, heads of [alpha_k > eps]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils.checks import numbers, require

CURVE_EPSILONS = tuple(round(0.05 * step, 2) for step in range(1, 20))
DRAWS = 2000  # of the bootstrap
DIGITS = 5  # of the numbers in a summary
# The attributes of a report that `to_dict` copies, and those of them that have a value a position.
CONDITIONS = "name path bos samples skipped floor targets epsilons layers".split()
BY_POSITION = (
    "embedding_norms hidden_norms before_norm_norms key_norms value_norms hidden_peaks"
).split()


class NotFinite(ValueError):
    """The model computed nan or infinite attention, so that no number of it means anything."""


@dataclass
class Kept:
    """The map, queries and keys of one head; zeros beyond the end of a shorter sequence."""

    map: Tensor  # A_ij, (samples, T, T)
    queries: Tensor | None = None  # after rotary, (samples, T, D); None where a model shows weights
    keys: Tensor | None = None


@dataclass
class Report:
    """What `measure` returns; tensors are float32 on the CPU.

    Positions k count from 1, layers from 0. "star" stands for k*, x* or a learned sink logit.
    """

    alpha: Tensor  # (samples, targets, layers, heads)
    targets: tuple[int, ...]
    epsilons: tuple[float, ...]
    lengths: Tensor  # (samples,): T of each sequence, without padding
    layers: tuple[int, ...]  # the attention layers' indices among the model's blocks
    hidden_norms: Tensor | None = None  # (blocks, positions): h^l, l = 1..L, before the final norm
    # (layers, positions): after rotary, mean over samples and heads
    key_norms: Tensor | None = None
    value_norms: Tensor | None = None
    embedding_norms: Tensor | None = None  # (positions,): h^0
    # (blocks, positions): post-norm blocks before their last norm (Eq. 3)
    before_norm_norms: Tensor | None = None
    # (blocks, positions): largest |element| of h^l over the sequence's median one
    hidden_peaks: Tensor | None = None
    first_elements: Tensor | None = None  # (blocks, d): |h_1^l| by dimension over that median
    star: Tensor | None = None  # (samples, layers, heads): share of k*, x* or a learned sink logit
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # by (layer, head)
    bos: bool | None = None  # whether each sequence starts with a BOS; None: not known
    skipped: int = 0  # sequences shorter than the largest target
    name: str = ""
    path: str = ""  # how alpha was computed
    # By attention layer, if any has one: keys that a query sees; None: all
    windows: tuple[int | None, ...] = ()
    digest: str = ""  # of the token ids: whether two reports are of the same texts

    @property
    def length(self) -> int:
        """T, the length of the longest sequence."""
        return int(self.lengths.max())

    @property
    def samples(self) -> int:
        """How many sequences were measured."""
        return self.alpha.shape[0]

    @property
    def floor(self) -> float:
        """alpha_1 of uniform causal attention, H_T / T: 0.074 at T = 64. Mean over the lengths."""
        by_text = [uniform_alpha(length) for length in self.lengths.tolist()]
        return float(np.mean(by_text))

    def sink(self, k: int | str = 1, eps: float = 0.3) -> float:
        """Sink_k^eps in percent: the indicator for each sequence, layer and head, then the mean.

        At any eps in (0, 1). Raises ValueError for another, and for a key that was not measured.
        """
        return 100 * float(self._is_sink(k, eps).mean())

    def sink_star(self, eps: float = 0.3) -> float:
        """Sink_*^eps in percent, of a key bias, a sink token or a learned sink logit."""
        return self.sink("star", eps)

    def excess(self, k: int | str = 1) -> float:
        """Mean of (alpha_k - u) / (1 - u), u the alpha_k of uniform causal attention.

        The mean is over samples, layers and heads. For k = 1, u = H_T / T; in a layer with a window
        w query i spreads over min(i, w) keys.
        For "star" each of i keys and the star. 0 is uniform attention, 1 all attention on k; 0 also
        where there is no other key (T = 1). The u of a model with a prefix is that without: uniform
        attention over its mask lies a little below 0.
        """
        return float(self._excess(k).mean())

    def _excess(self, k: int | str) -> Tensor:
        """The excess of each sample, layer and head, (samples, layers, heads)."""
        uniform = self._by_layer(uniform_alpha, k).double()  # (samples, layers)
        above: Tensor = excess(self.of(k), uniform[..., None])
        return above

    def excess_by_layer(self) -> list[float]:
        """The mean excess of alpha_1 over samples and heads in each attention layer of `layers`."""
        by_head = self._excess(1)  # (samples, layers, heads)
        return by_head.mean(dim=(0, 2)).tolist()

    def visible_alpha(self, k: int | str = 1) -> Tensor:
        """alpha_k over the queries k..k + w - 1 that see key k, (samples, layers, heads).

        In layers without a window it is alpha_k itself. Where there is one, alpha_k is at most
        `caps(k)`, and this is not.
        """
        seeing = self._by_layer(seeing_share, k)  # (samples, layers)
        return self.of(k) / seeing[..., None]

    def caps(self, k: int | str = 1) -> list[float]:
        """The most that alpha_k can be in each attention layer, mean over samples:
        min(1, w / (T - k + 1)), and 1 for "star".

        Raises ValueError for a key that was not measured.
        """
        seeing = self._by_layer(seeing_share, k)
        return seeing.mean(dim=0).tolist()

    def _by_layer(self, function: Callable[..., float], k: int | str) -> Tensor:
        """function(T, k, window) of each sample and layer, (samples, layers)."""
        self.of(k)  # which refuses a key that was not measured
        windows = self.windows or (None,) * len(self.layers)
        # Samples differ in T, and layers in their window.
        rows = []
        for length in self.lengths.tolist():
            rows.append([function(length, k, window) for window in windows])
        return torch.tensor(rows, device="cpu")

    def interval(self, k: int | str = 1, eps: float = 0.3) -> tuple[float, float]:
        """A 95 % bootstrap interval of Sink_k^eps over sequences, in percent; k may be "star"."""
        is_sink = self._is_sink(k, eps)
        by_text = is_sink.mean(dim=(1, 2)).numpy()
        # Texts are drawn, and not heads: those of one model are no independent sample.
        rng = np.random.default_rng(0)
        drawn = rng.choice(by_text, (DRAWS, len(by_text)))
        means = 100 * drawn.mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(low), float(high)

    def to_dict(self, levels: Sequence[float] = CURVE_EPSILONS) -> dict[str, Any]:
        """A summary for JSON: Sink at every target and many eps with intervals, alpha, norms.

        levels: the eps of Sink beside the report's own.
        """
        levels = sorted({*self.epsilons, *levels})
        result: dict[str, Any] = {"T": self.length}
        for name in CONDITIONS:
            result[name] = getattr(self, name)
        if int(self.lengths.min()) < self.length:
            result["lengths"] = self.lengths.tolist()
        # By target, as text in JSON: {"1": .., "star": ..}
        for name in ("excess", "interval", "sink"):
            result[name] = {}
        for k in self._shares:
            result["excess"][k] = self.excess(k)
            result["interval"][k] = {eps: self.interval(k, eps) for eps in self.epsilons}
            result["sink"][k] = {eps: self.sink(k, eps) for eps in levels}
        result["alpha"] = self.alpha.mean(dim=0)
        if self.star is not None:
            result["alpha_star"] = self.star.mean(dim=0)
            result["sink_star"] = result["sink"].pop("star")
        if self.windows:
            result["windows"] = self.windows
            result["visible_alpha"] = {}
            for k in self.targets:
                result["visible_alpha"][k] = self.visible_alpha(k).mean(dim=0)
        for name in BY_POSITION:
            value = getattr(self, name)
            if value is not None:
                result[name] = value
        plain: dict[str, Any] = _plain(result)
        return plain

    def summary(self) -> dict[str, float]:
        """The numbers that tell one model from another; what was not measured is left out.

        sink_1 in percent at the first eps; block_1 and later_blocks, the mean excess of alpha_1 in
        the first attention layer and in the later ones; element, the largest element of h_1 over
        the median of |h|, with the block (from 1) after which and the dimension (from 0) in which
        it stands; value_ratio, the least over layers of ||v_1|| over the others' mean.
        """
        first, *later = self.excess_by_layer()
        numbers = {"sink_1": self.sink(eps=self.epsilons[0])}
        numbers["block_1"] = first
        if later:
            numbers["later_blocks"] = float(np.mean(later))
        if self.first_elements is not None:
            width = self.first_elements.shape[1]
            place = int(self.first_elements.argmax())  # in the flattened (blocks, d)
            block, dimension = divmod(place, width)
            numbers["element"] = float(self.first_elements.max())
            numbers["element_block"] = block + 1
            numbers["element_dimension"] = dimension
        if self.value_norms is not None and self.length > 1:
            ratios = norm_ratio(self.value_norms)
            numbers["value_ratio"] = float(np.nanmin(ratios))
        return numbers

    def __str__(self) -> str:
        import pandas as pd  # which training does without

        bos = {True: "yes", False: "no", None: "unknown"}[self.bos]
        length = str(self.length)
        shortest = int(self.lengths.min())
        if shortest < self.length:
            length = f"{shortest}..{length}"
        name = self.name or "model"
        layers, heads = self.alpha.shape[-2:]
        text = (
            f"{name}: T = {length}, n = {self.samples}, BOS first: {bos}, "
            f"{layers} attention layers x {heads} heads, "
            f"uniform attention: alpha_1 = {self.floor:.3f}\n"
        )
        if self.skipped:
            largest = max(self.targets)
            text += (
                f"skipped {self.skipped} sequences: shorter than the largest target, {largest}\n"
            )
        table = pd.DataFrame()
        for k, alpha in self._shares.items():
            key = "*" if k == "star" else k
            table.loc[key, "mean alpha"] = f"{alpha.mean():.4f}"
            for eps in self.epsilons:
                sink = self.sink(k, eps)
                low, high = self.interval(k, eps)
                column = f"Sink eps={eps:g} [95 % over texts]"
                table.loc[key, column] = f"{sink:.2f} % [{low:6.2f}, {high:6.2f}]"
        text += str(table.rename_axis(columns="key").to_string())
        for k in self.targets:
            cap = min(self.caps(k))
            if cap < 1:
                text += (
                    f"\nin layers with a window alpha_{k} is at most {cap:.3f}: "
                    f"see caps({k}), visible_alpha({k})"
                )
        return text

    @property
    def _shares(self) -> dict[int | str, Tensor]:
        """alpha_k by target, and alpha_*, (samples, layers, heads) each."""
        shares: dict[int | str, Tensor] = {}
        for index, k in enumerate(self.targets):
            shares[k] = self.alpha[:, index]
        if self.star is not None:
            shares["star"] = self.star
        return shares

    def of(self, k: int | str) -> Tensor:
        """alpha_k, or alpha_* where k is "star", (samples, layers, heads).

        Raises ValueError if it was not measured.
        """
        shares = self._shares
        if k not in shares:
            raise ValueError(
                f"alpha_{k} was not measured, only {[*shares]}: measure(targets=..), and star only "
                "of a key bias k*, a sink token x* or a learned sink logit"
            )
        return shares[k]

    def _is_sink(self, k: int | str, eps: float) -> Tensor:
        """[alpha_k > eps], 0 or 1, (samples, layers, heads)."""
        check_epsilons((eps,))
        return (self.of(k) > eps).double()


def _plain(value: Any) -> Any:
    """Tensors and tuples as lists, numbers with `DIGITS` digits, keys as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.double().tolist())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return round(value, DIGITS)
    return value


def seeing_share(length: int, k: int | str, window: int | None) -> float:
    """The share of the queries k..T that see key k, through a window; all see "star"."""
    if window is None or k == "star":
        return 1.0
    queries = length - int(k) + 1
    return min(1.0, window / queries)


@lru_cache(maxsize=4096)
def uniform_alpha(
    length: int,
    k: int | str = 1,
    window: int | None = None,
    own_keys: int = 0,
) -> float:
    """alpha_k of uniform causal attention, the mean over i = k..T of 1/i: the floor of the metric.

    With a window w query i spreads over min(i, w) keys, the last ones. own_keys: of the model,
    which all queries see beside them; "star" is one of these.
    """
    first = 1 if k == "star" else int(k)
    queries = np.arange(first, length + 1)
    keys = queries  # how many keys of the text each query sees
    if window is not None:
        keys = np.minimum(queries, window)
    if k == "star":
        shares = 1 / (keys + max(1, own_keys))
    else:
        sees = queries - keys < first  # k is not behind the query's window
        shares = sees / (keys + own_keys)
    return float(shares.mean())


def excess(alpha: Any, uniform: Any) -> Any:
    """(alpha - u) / (1 - u), of numbers, arrays or tensors; u is alpha of uniform attention.

    0 where each query spreads evenly over the keys that it sees, and where it sees one key alone;
    1 where all is on key k.
    """
    alone = uniform == 1  # then alpha is 1 as well: 0 / 1 and not 0 / 0
    return (alpha - uniform) / (1 - uniform + alone)


def norm_ratio(norms: Any) -> list[float]:
    """The first position's norm over the mean of the others' (Figs. 7, 8), of each row of norms.

    norms: (rows, positions). NaN where the others are all zero, as behind a gate that is shut.
    The last block's states are about the next token, and their norms another matter.
    Raises ValueError for T = 1.
    """
    rows = np.asarray(norms, dtype=float)
    require(rows.shape[1] > 1, "a norm ratio needs at least two positions")
    first = rows[:, 0]
    others = rows[:, 1:].mean(axis=1)
    others = np.where(others > 0, others, np.nan)
    ratios: list[float] = (first / others).tolist()
    return ratios


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """The thresholds, each once. Raises ValueError unless all lie strictly between 0 and 1."""
    values = numbers("epsilons", epsilons)
    require(
        len(values) > 0 and all(0 < eps < 1 for eps in values),
        f"eps must be in (0, 1), at least one; got {values}",
    )
    return tuple(dict.fromkeys(values))


def check_targets(targets: Sequence[int], length: int) -> tuple[int, ...]:
    """The targets, each once. Raises ValueError unless all are positions 1..T; they count from 1,
    as in the paper.
    """
    values = numbers("targets", targets)
    require(
        len(values) > 0 and all(k in range(1, length + 1) for k in values),
        f"targets are positions of the ids, which count from 1 to {length}: got {values}",
    )
    return tuple(dict.fromkeys(map(int, values)))
