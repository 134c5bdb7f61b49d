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
    """What was kept of one chosen (layer, head), for figures: each (samples, T, T), or None."""

    map: Tensor | None = None  # A_ij
    cosine: Tensor | None = None  # cos(q_i, k_j), Fig. 2 bottom
    norm_product: Tensor | None = None  # ||q_i|| ||k_j||


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

    def interval(self, k: int | str = 1, eps: float = 0.3) -> tuple[float, float]:
        """A 95 % bootstrap interval of Sink_k^eps over sequences, in percent; k may be "star"."""
        each = self._active(k, eps).flatten(1).mean(dim=1).numpy()
        picks = np.random.default_rng(0).integers(0, len(each), size=(DRAWS, len(each)))
        low, high = np.quantile(100 * each[picks].mean(axis=1), [0.025, 0.975])
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """A summary for JSON: Sink at every target and many eps with intervals, alpha, norms."""
        result: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "bos": self.bos,
            "T": self.length,
            "samples": self.samples,
            "skipped": self.skipped,
            "skipped_why": self.skipped_why,
            "floor": round(self.floor, DIGITS),
            "targets": list(self.targets),
            "epsilons": list(self.epsilons),
            "layers": list(self.layers),
            "excess": {},
            "interval": {},
        }
        if int(self.lengths.min()) < self.length:
            result["lengths"] = self.lengths.tolist()
        sink = {}
        for k in self._keys:
            key = str(k)
            result["excess"][key] = round(self.excess(k), DIGITS)
            sink[key] = {
                str(eps): round(self.sink(k, eps), DIGITS) for eps in sorted({*self.epsilons, *CURVE_EPSILONS})
            }
            intervals = {str(eps): self.interval(k, eps) for eps in self.epsilons}
            result["interval"][key] = {eps: [round(x, DIGITS) for x in both] for eps, both in intervals.items()}
        if self.star is not None:
            result["sink_star"] = sink.pop("star")
        result["sink"] = sink
        if any(self.windows):
            result |= {"windows": list(self.windows), "chunked": self.chunked}
            result["visible_alpha"] = {str(k): _rounded(self.visible_alpha(k).mean(dim=0)) for k in self.targets}
        shares = {"alpha": self.alpha, "alpha_star": self.star, "alpha_renormalised": self.renormalised}
        for name, share in shares.items():
            if share is not None:
                result[name] = _rounded(share.mean(dim=0))
        for name in BY_POSITION:
            if getattr(self, name) is not None:
                result[name] = _rounded(getattr(self, name))
        return result

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
                cap = self.caps(k)[of_width[0]]
                if cap < 1:
                    seen = float(self.visible_alpha(k)[:, of_width].mean())
                    line = f"layers {layers} see {width} keys: alpha_{k} is at most {cap:.3f} there"
                    lines.append(f"{line}; over the queries that see the key its mean is {seen:.4f}")
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


def _rounded(values: Tensor) -> list:
    return np.round(values.double().numpy(), DIGITS).tolist()


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
