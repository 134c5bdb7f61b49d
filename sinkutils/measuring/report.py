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

from sinkutils.checks import choice, integer, numbers, require

CURVE_EPSILONS = tuple(round(0.05 * step, 2) for step in range(1, 20))
NORMS = ("embedding_norms", "hidden_norms", "before_norm_norms", "query_norms", "key_norms", "value_norms")
BY_POSITION = (*NORMS, "hidden_peaks")


class NotFinite(ValueError):
    """The model computed nan or infinite attention, so that no number of it means anything."""


@dataclass
class Kept:
    """What was kept of one chosen (layer, head), for figures: each (samples, T, T), or None."""

    map: Tensor | None = None  # A_ij
    cosine: Tensor | None = None  # cos(q_i, k_j), Fig. 2 bottom
    norm_product: Tensor | None = None  # ||q_i|| ||k_j||


@dataclass
class Report:
    """What `measure` returns; tensors are float32 on the CPU. `RecordedReport` answers the same from a summary.

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
    mass: Tensor | None = None  # (samples, layers, heads, positions): alpha of every key
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # by (layer, head)
    bos: bool | None = None  # whether each sequence starts with a BOS; None: not known
    skipped: int = 0
    skipped_why: str = ""
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
        return ((self._of(k) - uniform) / (1 - uniform)).masked_fill(uniform == 1, 0)

    def visible_alpha(self, k: int = 1) -> Tensor:
        """alpha_k as a mean over the queries that can see key k, i < k + w in a window w: (samples, layers, heads).

        It is alpha_k itself in layers without a window, and not capped there as alpha_k is at `caps(k)`.
        """
        return self._of(k) / self._by_layer(seeing, k)[..., None]

    def caps(self, k: int = 1) -> list[float]:
        """The most that alpha_k can be in each attention layer, mean over samples: min(1, w / (T - k + 1))."""
        return self._by_layer(seeing, k).mean(dim=0).tolist()

    def _by_layer(self, of: Callable[..., float], k: int | str) -> Tensor:
        """A number that hangs on T and the window, such as `uniform_alpha`, (samples, layers)."""
        windows = self.windows or (None,) * len(self.layers)
        values = [[of(int(length), k, window, self.chunked) for window in windows] for length in self.lengths]
        return torch.tensor(values, device="cpu")

    def norm_ratio(self, name: str = "hidden_norms", k: int = 1, last: bool = False) -> list[float]:
        """The norm at position k over the mean of the others', by block (Figs. 7, 8); of q, k, v by attention layer.

        last: also of the last block's output, whose norms reflect the next token's prediction; q, k and v have none.
        Raises ValueError where these norms were not measured or there are no others (T = 1).
        """
        choice("name", name, NORMS)
        norms = getattr(self, name)
        require(norms is not None, f"this report has no {name}: measure(norms=True); some families show none")
        left_out = name in ("hidden_norms", "before_norm_norms") and not last and len(norms) > 1
        return norm_ratio(np.atleast_2d(norms)[: -1 if left_out else None], k)

    def curve(self, k: int | str = 1, epsilons: Sequence[float] = CURVE_EPSILONS) -> np.ndarray:
        """Sink_k^eps in percent at each eps (Fig. 3)."""
        return np.array([self.sink(k, eps) for eps in epsilons])

    def interval(
        self, k: int | str = 1, eps: float = 0.3, level: float = 0.95, draws: int = 2000, seed: int = 0
    ) -> tuple[float, float]:
        """A bootstrap interval of Sink_k^eps over sequences, in percent; k may be "star"."""
        require(0 < level < 1, f"level must be in (0, 1), got {level}")
        integer("draws", draws, least=1)
        each = self._active(k, eps).flatten(1).mean(dim=1).numpy()
        picks = np.random.default_rng(seed).integers(0, len(each), size=(draws, len(each)))
        low, high = np.quantile(100 * each[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def to_dict(self, digits: int = 5) -> dict[str, Any]:
        """A JSON-able summary, which `from_dict` reads: Sink at every target and eps with intervals, alpha, norms."""
        curve = sorted({*self.epsilons, *CURVE_EPSILONS})
        sink = {f"{k}": {f"{eps}": round(self.sink(k, eps), digits) for eps in curve} for k in self._keys}
        result: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "bos": self.bos,
            "T": self.length,
            "samples": self.samples,
            "skipped": self.skipped,
            "skipped_why": self.skipped_why,
            "floor": round(self.floor, digits),
            "targets": list(self.targets),
            "epsilons": list(self.epsilons),
            "layers": list(self.layers),
            "excess": {f"{k}": round(self.excess(k), digits) for k in self._keys},
            "interval": {
                f"{k}": {f"{eps}": [round(x, digits) for x in self.interval(k, eps)] for eps in self.epsilons}
                for k in self._keys
            },
        }
        if int(self.lengths.min()) < self.length:
            result["lengths"] = self.lengths.tolist()
        if self.star is not None:
            result["sink_star"] = sink.pop("star")
        result["sink"] = sink

        def rounded(values: Tensor) -> list:
            return np.round(values.double().numpy(), digits).tolist()

        if any(self.windows):
            result |= {"windows": list(self.windows), "chunked": self.chunked}
            result["visible_alpha"] = {f"{k}": rounded(self.visible_alpha(k).mean(dim=0)) for k in self.targets}
        shares = {"alpha": self.alpha, "alpha_star": self.star, "alpha_renormalised": self.renormalised}
        means = {name: share.mean(dim=0) for name, share in shares.items() if share is not None}
        means |= {name: rows for name in BY_POSITION if (rows := getattr(self, name)) is not None}
        return result | {name: rounded(values) for name, values in means.items()}

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
            numbers["value_ratio"] = min(self.norm_ratio("value_norms"))
        return numbers

    @staticmethod
    def from_dict(summary: dict[str, Any], alpha: Tensor | None = None, star: Tensor | None = None) -> Report:
        """The report of a `to_dict` summary, with the same answers: a RecordedReport, whose alpha is the mean over
        samples.

        alpha (samples, targets, layers, heads) of the first targets, and star (samples, layers, heads), where alpha by
        text was kept beside the summary: then Sink is known at any eps, as of a live report.
        """
        same = ("bos", "skipped", "skipped_why", "name", "path", "chunked")
        fields: dict[str, Any] = {name: summary[name] for name in same if name in summary}
        for name in BY_POSITION:
            if name in summary:
                fields[name] = _tensor(summary[name])
        if alpha is not None:
            kind: type[Report] = Report
            fields["star"] = None if star is None else star.float()
        else:
            kind, fields["recorded"] = RecordedReport, summary
            for name in ("star", "renormalised"):
                if f"alpha_{name}" in summary:
                    fields[name] = _tensor(summary[f"alpha_{name}"])[None]
        alpha = _tensor(summary["alpha"])[None] if alpha is None else alpha.float()
        lengths = _tensor(summary.get("lengths", [summary["T"]] * len(alpha)))
        targets = tuple(summary["targets"])[: alpha.shape[1]]
        fields["windows"] = tuple(summary.get("windows", ()))
        return kind(alpha, targets, tuple(summary["epsilons"]), lengths, tuple(summary["layers"]), **fields)

    def __str__(self) -> str:
        bos = {True: "yes", False: "no", None: "unknown"}[self.bos]
        shortest = int(self.lengths.min())
        length = f"{self.length}" if shortest == self.length else f"{shortest}..{self.length}"
        heads = f"{len(self.layers)} attention layers x {self.alpha.shape[-1]} heads"
        about = f"T = {length}, n = {self.samples}, BOS first: {bos}, {heads}"
        lines = [f"{self.name or 'model'}: {about}, uniform attention: alpha_1 = {self.floor:.3f}"]
        if self.skipped:
            lines.append(f"skipped {self.skipped} sequences: {self.skipped_why}")
        columns = [f"Sink eps={eps:<4g} [95 % over texts]" for eps in self.epsilons]
        lines.append("  ".join(["key   mean alpha", *columns]))
        for key in self._keys:
            cells = [f"{'*' if key == 'star' else key:<5} {float(self._of(key).mean()):10.4f}"]
            for eps in self.epsilons:
                low, high = self.interval(key, eps)
                cells.append(f"{self.sink(key, eps):10.2f} % [{low:6.2f}, {high:6.2f}]")
            lines.append("  ".join(cells))
        return "\n".join(lines + self._about_windows())

    def _about_windows(self) -> list[str]:
        """Which layers see a window only, and what that does to alpha_k, where it does anything."""
        lines = []
        for width in sorted({w for w in self.windows if w is not None}):
            of_width = [index for index, w in enumerate(self.windows) if w == width]
            layers = ", ".join(str(self.layers[index]) for index in of_width)
            for k in self.targets:
                if (cap := self.caps(k)[of_width[0]]) < 1:
                    seen = f"{float(self.visible_alpha(k)[:, of_width].mean()):.4f}"
                    line = f"layers {layers} see {width} keys: alpha_{k} is at most {cap:.3f} there"
                    lines.append(f"{line}; over the queries that see the key its mean is {seen}")
        return lines

    @property
    def _keys(self) -> tuple[int | str, ...]:
        return self.targets if self.star is None else (*self.targets, "star")

    def _of(self, k: int | str) -> Tensor:
        """alpha_k or alpha_*, (samples, layers, heads)."""
        if k == "star":
            if self.star is None:
                raise ValueError("Sink_* needs a model with a key bias k*, a sink token x* or a learned sink logit")
            return self.star
        if k not in self.targets:
            raise ValueError(f"k must be one of the measured targets {self.targets}, got {k}: measure(targets=...)")
        return self.alpha[:, self.targets.index(int(k))]

    def _active(self, k: int | str, eps: float) -> Tensor:
        check_epsilons((eps,))
        return (self._of(k) > eps).double()


@dataclass
class RecordedReport(Report):
    """A report of which a summary was kept: alpha is the mean over samples, and Sink is known at the kept eps only."""

    recorded: dict[str, Any] = field(default_factory=dict)  # what `to_dict` returned

    @property
    def samples(self) -> int:
        return self.recorded["samples"]

    def sink(self, k: int | str = 1, eps: float = 0.3) -> float:
        """Sink_k^eps in percent. Raises ValueError for an eps that the summary does not have."""
        if k == "star":
            return self._at(self.recorded.get("sink_star", {}), k, eps)
        return self._at(self.recorded["sink"].get(f"{k}", {}), k, eps)

    def excess(self, k: int | str = 1) -> float:
        """As it was measured, where the summary has it, else of the mean alpha."""
        self._of(k)
        kept = self.recorded.get("excess", {})
        return float(kept[f"{k}"]) if f"{k}" in kept else super().excess(k)

    def visible_alpha(self, k: int = 1) -> Tensor:
        """As it was measured; alpha_k itself where there are no windows: (1, layers, heads)."""
        return _tensor(self.recorded["visible_alpha"][f"{k}"])[None] if any(self.windows) else self._of(k)

    def interval(
        self, k: int | str = 1, eps: float = 0.3, level: float = 0.95, draws: int = 2000, seed: int = 0
    ) -> tuple[float, float]:
        """As it was measured, at 95 %."""
        require(level == 0.95, f"a record without alpha by text has intervals of 95 % only, got level {level}")
        low, high = self._at(self.recorded["interval"].get(f"{k}", {}), k, eps)
        return low, high

    def to_dict(self, digits: int = 5) -> dict[str, Any]:
        """The summary."""
        return self.recorded

    def _at(self, values: dict[str, Any], k: int | str, eps: float) -> Any:
        self._of(k)
        check_epsilons((eps,))
        known = ", ".join(values) or "of which there is none for this key"
        require(f"{eps}" in values, f"eps must be one that the record has, {known}; got {eps}")
        return values[f"{eps}"]


def _tensor(values: Any) -> Tensor:
    """On the CPU, whatever the default device."""
    return torch.tensor(values, device="cpu")


def first_key(queries: np.ndarray, window: int | None, chunked: bool) -> np.ndarray:
    """The first position that each query sees (all count from 1), through a window or within its chunk."""
    if window is None:
        return np.ones_like(queries)
    return (queries - 1) // window * window + 1 if chunked else np.maximum(1, queries - window + 1)


def seeing(length: int, k: int, window: int | None, chunked: bool) -> float:
    """The share of the queries k..T that see key k."""
    return float((first_key(np.arange(k, length + 1), window, chunked) <= k).mean())


@lru_cache(maxsize=4096)
def uniform_alpha(length: int, k: int | str = 1, window: int | None = None, chunked: bool = False) -> float:
    """alpha_k of uniform causal attention, the mean over i = k..T of 1/i: the floor of the metric.

    With a window w query i spreads over min(i, w) keys, the last ones. "star" is one key more, which all queries see.
    """
    queries = np.arange(1 if k == "star" else int(k), length + 1)
    first = first_key(queries, window, chunked)
    keys = queries - first + 1
    return float(np.mean(1 / (keys + 1) if k == "star" else (first <= int(k)) / keys))


def norm_ratio(norms: Any, k: int = 1) -> list[float]:
    """The norm at position k over the mean of the others, for each row of norms (rows, positions).

    Raises ValueError for a k that is no position, or where there are no others (T = 1).
    """
    rows = np.asarray(norms, dtype=float)
    if rows.ndim != 2 or rows.shape[1] < 2 or not 1 <= k <= rows.shape[1]:
        raise ValueError(f"a norm ratio needs rows of at least two positions and k among them; got {rows.shape}, k={k}")
    others = np.delete(rows, k - 1, axis=1).mean(axis=1)
    return (rows[:, k - 1] / others).tolist()


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """Raise ValueError unless every eps lies strictly between 0 and 1."""
    values = numbers("epsilons", epsilons)
    good = len(values) > 0 and all(0 < eps < 1 for eps in values)
    require(good, f"eps must be in (0, 1), at least one; got {values}")
    return values


def check_targets(targets: Sequence[int], length: int) -> tuple[int, ...]:
    """Raise ValueError unless targets are positions 1..T; they count from 1, as in the paper."""
    values = numbers("targets", targets)
    good = len(values) > 0 and all(k.is_integer() and k >= 1 for k in values)
    require(good, f"targets are positions that count from 1, at least one; got {values}")
    require(max(values) <= length, f"target {max(values):g} is beyond the ids, which have {length} positions")
    return tuple(int(k) for k in values)
