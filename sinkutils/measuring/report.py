"""The sink metric of Section 3.2 as a report answers it: alpha_k, Sink_k^eps, excess, and the l2-norms beside them.

alpha_k = mean over i = k..T of A_ik          Sink_k^eps = mean over sequences, layers, heads of [alpha_k > eps]
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
BY_POSITION = (
    "embedding_norms", "hidden_norms", "before_norm_norms", "query_norms", "key_norms", "value_norms", "hidden_peaks",
)  # fmt: skip


class NotFinite(ValueError):
    """The model computed nan or infinite attention, so that no number of it means anything."""


@dataclass
class Kept:
    """What was kept of one chosen (layer, head), for figures; zeros beyond the end of a shorter sequence."""

    map: Tensor  # A_ij, (samples, T, T)
    queries: Tensor | None = None  # after rotary, (samples, T, D); None where only weights are shown
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
    key_norms: Tensor | None = None  # (layers, positions): after rotary, mean over samples and heads
    value_norms: Tensor | None = None
    query_norms: Tensor | None = None
    embedding_norms: Tensor | None = None  # (positions,): h^0
    before_norm_norms: Tensor | None = None  # (blocks, positions): post-norm blocks before their last norm (Eq. 3)
    hidden_peaks: Tensor | None = None  # (blocks, positions): largest |element| of h^l over the sequence's median one
    first_elements: Tensor | None = None  # (blocks, d): |h_1^l| by dimension over that median
    star: Tensor | None = None  # (samples, layers, heads): share of k*, x* or a learned sink logit
    renormalised: Tensor | None = None  # alpha of the rows divided by their sum, where a sink logit takes a part
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # by (layer, head)
    bos: bool | None = None  # whether each sequence starts with a BOS; None: not known
    skipped: int = 0  # sequences shorter than the largest target
    name: str = ""
    path: str = ""  # how alpha was computed
    windows: tuple[int | None, ...] = ()  # by attention layer, if any has one: keys that a query sees; None: all
    chunked: bool = False  # windows that do not slide: position k is in the window of its own chunk only (Llama 4)

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
        """alpha_1 of uniform causal attention: H_T / T, 0.074 at T = 64. A mean over unequal lengths."""
        return float(np.mean([uniform_alpha(int(length)) for length in self.lengths]))

    def sink(self, k: int | str = 1, eps: float = 0.3) -> float:
        """Sink_k^eps in percent: the indicator for each sequence, layer and head, then the mean.

        At any eps in (0, 1). Raises ValueError for another, and for a key that was not measured.
        """
        return 100 * float(self._active(k, eps).mean())

    def sink_star(self, eps: float = 0.3) -> float:
        """Sink_*^eps in percent, for models with a key bias, a sink token or a learned sink logit."""
        return self.sink("star", eps)

    def excess(self, k: int | str = 1) -> float:
        """Mean over samples, layers and heads of (alpha_k - u) / (1 - u), u the alpha_k of uniform causal attention.

        For k = 1, u = H_T / T; in a layer with a window w each query spreads over min(i, w) keys. For "star" each of
        i keys and the star. 0 is uniform attention, 1 all attention on k; 0 also where there is no other key (T = 1).
        The u of a model with a prefix is that without: uniform attention over its mask lies a little below 0.
        """
        return float(self._excess(k).mean())

    def _excess(self, k: int | str) -> Tensor:
        """The excess of each sample, layer and head, (samples, layers, heads)."""
        uniform = self._by_layer(uniform_alpha, k).double()[..., None]
        return ((self.of(k) - uniform) / (1 - uniform)).masked_fill(uniform == 1, 0)

    def visible_alpha(self, k: int = 1) -> Tensor:
        """alpha_k as a mean over the queries that can see key k, i < k + w in a window w: (samples, layers, heads).

        It is alpha_k itself in layers without a window, and not capped there as alpha_k is at `caps(k)`.
        """
        return self.of(k) / self._by_layer(seeing, k)[..., None]

    def caps(self, k: int = 1) -> list[float]:
        """The most that alpha_k can be in each attention layer, mean over samples: min(1, w / (T - k + 1))."""
        return self._by_layer(seeing, k).mean(dim=0).tolist()

    def _by_layer(self, of: Callable, k: int | str) -> Tensor:
        """A number that hangs on T and the window, such as `uniform_alpha`, (samples, layers)."""
        windows = self.windows or (None,) * len(self.layers)
        values = [[of(int(length), k, window, self.chunked) for window in windows] for length in self.lengths]
        return torch.tensor(values, device="cpu")

    def interval(self, k: int | str = 1, eps: float = 0.3) -> tuple[float, float]:
        """A 95 % bootstrap interval of Sink_k^eps over sequences, in percent; k may be "star"."""
        each = self._active(k, eps).flatten(1).mean(dim=1).numpy()
        drawn = np.random.default_rng(0).choice(each, (DRAWS, len(each)))
        low, high = np.quantile(100 * drawn.mean(axis=1), [0.025, 0.975])
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """A summary for JSON: Sink at every target and many eps with intervals, alpha, norms."""
        levels = sorted({*self.epsilons, *CURVE_EPSILONS})
        plain = ("name", "path", "bos", "samples", "skipped", "floor", "targets", "epsilons", "layers")
        result: dict = {"T": self.length} | {name: getattr(self, name) for name in plain}
        if int(self.lengths.min()) < self.length:
            result["lengths"] = self.lengths.tolist()
        result["excess"] = {k: self.excess(k) for k in self._shares}
        result["interval"] = {k: {eps: self.interval(k, eps) for eps in self.epsilons} for k in self._shares}
        result["sink"] = {k: {eps: self.sink(k, eps) for eps in levels} for k in self.targets}
        if self.star is not None:
            result["sink_star"] = {eps: self.sink_star(eps) for eps in levels}
        if any(self.windows):
            result |= {"windows": self.windows, "chunked": self.chunked}
            result["visible_alpha"] = {k: self.visible_alpha(k).mean(dim=0) for k in self.targets}
        shares = {"alpha": self.alpha, "alpha_star": self.star, "alpha_renormalised": self.renormalised}
        found = {name: share.mean(dim=0) for name, share in shares.items() if share is not None}
        found |= {name: getattr(self, name) for name in BY_POSITION if getattr(self, name) is not None}
        return _plain(result | found)

    def summary(self) -> dict[str, float]:
        """The numbers that tell one model from another, as scalars; what was not measured is left out.

        sink_1 in percent at the first eps; block_1 and later_blocks, the mean excess of alpha_1 in the first attention
        layer and in the later ones; element, the largest element of h_1 over the median of |h|, with the block
        (from 1) after which and the dimension (from 0) in which it stands; value_ratio, the least over layers of
        ||v_1|| over the others' mean.
        """
        by_layer = self._excess(1).mean(dim=(0, 2))
        numbers = {"sink_1": self.sink(1, self.epsilons[0]), "block_1": float(by_layer[0])}
        if len(by_layer) > 1:
            numbers["later_blocks"] = float(by_layer[1:].mean())
        if self.first_elements is not None:
            block, dimension = divmod(int(self.first_elements.argmax()), self.first_elements.shape[1])
            largest = float(self.first_elements.max())
            numbers |= {"element": largest, "element_block": block + 1, "element_dimension": dimension}
        if self.value_norms is not None and self.length > 1:
            numbers["value_ratio"] = min(norm_ratio(self.value_norms))
        return numbers

    def __str__(self) -> str:
        import pandas as pd  # which training does without

        bos = {True: "yes", False: "no", None: "unknown"}[self.bos]
        length = "..".join(map(str, sorted({int(self.lengths.min()), self.length})))
        lines = [
            f"{self.name or 'model'}: T = {length}, n = {self.samples}, BOS first: {bos}, {len(self.layers)} attention "
            f"layers x {self.alpha.shape[-1]} heads, uniform attention: alpha_1 = {self.floor:.3f}"
        ]
        if self.skipped:
            lines.append(f"skipped {self.skipped} sequences: shorter than the largest target, {max(self.targets)}")
        rows = {}
        for key, share in self._shares.items():
            rows["*" if key == "star" else key] = row = {"mean alpha": f"{share.mean():.4f}"}
            for eps in self.epsilons:
                low, high = self.interval(key, eps)
                row[f"Sink eps={eps:g} [95 % over texts]"] = f"{self.sink(key, eps):.2f} % [{low:6.2f}, {high:6.2f}]"
        lines.append(pd.DataFrame(rows).T.rename_axis(columns="key").to_string())
        for k in self.targets:
            if (cap := min(self.caps(k))) < 1:
                lines.append(
                    f"in layers with a window alpha_{k} is at most {cap:.3f}: see caps({k}), visible_alpha({k})"
                )
        return "\n".join(lines)

    @property
    def _shares(self) -> dict[int | str, Tensor]:
        """alpha_k by target, and alpha_*, (samples, layers, heads) each."""
        shares: dict = dict(zip(self.targets, self.alpha.unbind(1), strict=True))
        return shares if self.star is None else shares | {"star": self.star}

    def of(self, k: int | str) -> Tensor:
        """alpha_k, or alpha_* where k is "star": (samples, layers, heads). Raises ValueError if it was not measured."""
        shares = self._shares
        require(
            k in shares,
            f"alpha_{k} was not measured, only {[*shares]}: measure(targets=..), and star only of a key bias k*, "
            "a sink token x* or a learned sink logit",
        )
        return shares[k]

    def _active(self, k: int | str, eps: float) -> Tensor:
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
    return round(value, DIGITS) if isinstance(value, float) else value


def seeing(length: int, k: int, window: int | None, chunked: bool) -> float:
    """The share of the queries k..T that see key k, through a window or within its chunk."""
    if window is None:
        return 1.0
    until = window - (k - 1) % window if chunked else window
    return min(1.0, until / (length - k + 1))


@lru_cache(maxsize=4096)
def uniform_alpha(length: int, k: int | str = 1, window: int | None = None, chunked: bool = False) -> float:
    """alpha_k of uniform causal attention, the mean over i = k..T of 1/i: the floor of the metric.

    With a window w query i spreads over min(i, w) keys, the last ones. "star" is one key more, which all queries see.
    """
    star = k == "star"
    queries = np.arange(1 if star else int(k), length + 1)
    keys = queries  # that each query sees
    if window is not None:
        keys = (queries - 1) % window + 1 if chunked else np.minimum(queries, window)
    return float(np.mean(1 / (keys + 1) if star else (queries - keys < int(k)) / keys))


def norm_ratio(norms: Any) -> list[float]:
    """The norm at the first position over the mean of the others (Figs. 7, 8), for each row of norms (rows, positions).

    The last block's states are about the next token, and their norms another matter. Raises ValueError for T = 1.
    """
    rows = np.asarray(norms, dtype=float)
    require(rows.shape[1] > 1, "a norm ratio needs at least two positions")
    return (rows[:, 0] / rows[:, 1:].mean(axis=1)).tolist()


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """Raise ValueError unless every eps lies strictly between 0 and 1."""
    values = numbers("epsilons", epsilons)
    require(
        len(values) > 0 and all(0 < eps < 1 for eps in values),
        f"eps must be in (0, 1), at least one; got {values}",
    )
    return values


def check_targets(targets: Sequence[int], length: int) -> tuple[int, ...]:
    """Raise ValueError unless targets are positions 1..T; they count from 1, as in the paper."""
    values = numbers("targets", targets)
    require(
        len(values) > 0 and all(k in range(1, length + 1) for k in values),
        f"targets are positions of the ids, which count from 1 to {length}, at least one; got {values}",
    )
    return tuple(int(k) for k in values)
