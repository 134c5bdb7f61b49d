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
    """What `measure` returns, or `from_dict` of a record; tensors are float32 on the CPU.

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
    recorded: dict[str, Any] | None = None  # the summary of a report whose alpha is known as a mean over samples only

    @property
    def length(self) -> int:
        """T, the length of the longest sequence."""
        return int(self.lengths.max())

    @property
    def samples(self) -> int:
        return self.alpha.shape[0] if self.recorded is None else self.recorded["samples"]

    @property
    def floor(self) -> float:
        """alpha_1 of uniform causal attention: H_T / T, 0.074 at T = 64. A mean over unequal lengths."""
        return float(np.mean([uniform_alpha(int(length)) for length in self.lengths]))

    def sink(self, k: int | str = 1, eps: float = 0.3) -> float:
        """Sink_k^eps in percent: the indicator for each sequence, layer and head, then the mean.

        At any eps in (0, 1); of a record without alpha by text, at those of its summary. Raises ValueError otherwise.
        """
        if self.recorded is not None:
            return self._recorded_at("sink_star" if k == "star" else "sink", k, eps)
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
        alpha = self._of(k)
        if self.recorded is not None and "excess" in self.recorded:
            return float(self.recorded["excess"][f"{k}"])
        uniform = self._by_layer(uniform_alpha, k).double()[..., None]
        return float(((alpha - uniform) / (1 - uniform)).masked_fill(uniform == 1, 0).mean())

    def visible_alpha(self, k: int = 1) -> Tensor:
        """alpha_k as a mean over the queries that can see key k, i < k + w in a window w: (samples, layers, heads).

        It is alpha_k itself in layers without a window, and not capped there as alpha_k is at `caps(k)`.
        """
        if self.recorded is not None:
            return torch.tensor(self.recorded["visible_alpha"][f"{k}"])[None] if any(self.windows) else self._of(k)
        return self._of(k) / self._by_layer(seeing, k)[..., None]

    def caps(self, k: int = 1) -> list[float]:
        """The most that alpha_k can be in each attention layer, mean over samples: min(1, w / (T - k + 1))."""
        return self._by_layer(seeing, k).mean(dim=0).tolist()

    def _by_layer(self, of: Callable[..., float], k: int | str) -> Tensor:
        """A number that hangs on T and the window, such as `uniform_alpha`, (samples, layers)."""
        windows = self.windows or (None,) * len(self.layers)
        values = [[of(int(length), k, window, self.chunked) for window in windows] for length in self.lengths]
        return torch.tensor(values)

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
        if self.recorded is not None:
            require(level == 0.95, f"a record without alpha by text has intervals of 95 % only, got level {level}")
            return tuple(self._recorded_at("interval", k, eps))
        each = self._active(k, eps).flatten(1).mean(dim=1).numpy()
        picks = np.random.default_rng(seed).integers(0, len(each), size=(draws, len(each)))
        low, high = np.quantile(100 * each[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def to_dict(self, digits: int = 5) -> dict[str, Any]:
        """A JSON-able summary, which `from_dict` reads: Sink at every target and eps with intervals, alpha, norms."""
        if self.recorded is not None:
            return self.recorded
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

    @classmethod
    def from_dict(cls, summary: dict[str, Any], alpha: Tensor | None = None, star: Tensor | None = None) -> Report:
        """The report of a `to_dict` summary, with the same answers; alpha in it is the mean over samples.

        alpha (samples, targets, layers, heads) of the first targets, and star (samples, layers, heads), where alpha by
        text was kept beside the summary: then Sink is known at any eps, as of a live report.
        """
        means: dict[str, Any] = {name: torch.tensor(summary[name]) for name in BY_POSITION if name in summary}
        for name in ("star", "renormalised"):
            if f"alpha_{name}" in summary:
                means[name] = torch.tensor(summary[f"alpha_{name}"])[None]
        by_text = alpha is not None
        alpha = alpha.float() if alpha is not None else torch.tensor(summary["alpha"])[None]
        if by_text:
            means.pop("renormalised", None)
            means |= {"star": star.float()} if star is not None else {}
        kept_as_is = ("bos", "skipped", "skipped_why", "name", "path", "chunked")
        means |= {name: summary[name] for name in kept_as_is if name in summary}
        return cls(
            alpha,
            tuple(summary["targets"])[: alpha.shape[1]],
            tuple(summary["epsilons"]),
            torch.tensor(summary["lengths"]) if "lengths" in summary else torch.full((len(alpha),), summary["T"]),
            tuple(summary["layers"]),
            windows=tuple(summary.get("windows", ())),
            recorded=None if by_text else summary,
            **means,
        )

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

    def _recorded_at(self, table: str, k: int | str, eps: float) -> Any:
        """What a record's summary says of Sink_k^eps or its interval."""
        assert self.recorded is not None
        self._of(k)
        check_epsilons((eps,))
        values = self.recorded[table] if table == "sink_star" else self.recorded[table].get(f"{k}", {})
        if f"{eps}" not in values:
            known = ", ".join(values) or "of which there is none for this key"
            raise ValueError(f"eps must be one that the record has, {known}; got {eps}")
        return values[f"{eps}"]

    def _active(self, k: int | str, eps: float) -> Tensor:
        check_epsilons((eps,))
        return (self._of(k) > eps).double()


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
