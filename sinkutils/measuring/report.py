"""The sink metric of Section 3.2, and the `Report` that holds the numbers of a measurement.

    alpha_k     mean over the queries i = k..T of A_ik: the attention that key k gets
    Sink_k^eps  mean over sequences, layers and heads of the indicator [alpha_k > eps]

The report also has the excess over uniform attention and the l2-norms of states, keys and values.
This module imports no PyTorch, so that a table of records is made without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkutils.checks import Refused, numbers, require

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

CURVE_EPSILONS = tuple(round(0.05 * step, 2) for step in range(1, 20))
DRAWS = 2000  # resamples of the bootstrap
DIGITS = 5  # decimal places of the numbers in `to_dict`
# `to_dict` copies these attributes of a report; those of BY_POSITION have a value per position.
CONDITIONS = "name path bos samples skipped floor targets epsilons layers".split()
NORMS = "embedding_norms hidden_norms before_norm_norms key_norms value_norms".split()
BY_POSITION = [*NORMS, "hidden_peaks"]
# Number formats of a cache, with one scale for a tensor: the largest number, and the spacing next
# to zero. fp8 is e4m3; fp4 is e2m1, the elements of NVFP4.
FORMATS = {"int8": (127, 1.0), "fp8": (448, 2**-9), "int4": (7, 1.0), "fp4": (6, 0.5)}
FLOAT16 = 65504.0  # the largest number of float16


# --- uniform attention, by which attention is measured


def seeing_share(length: int, k: int | str, window: int | None) -> float:
    """The share of the queries k..T that see key k through a window. All queries see "star"."""
    if window is None or k == "star":
        return 1.0
    queries = length - int(k) + 1
    return min(1.0, window / queries)


@lru_cache(maxsize=4096)
def uniform_alpha(
    length: int, k: int | str = 1, window: int | None = None, own_keys: int = 0
) -> float:
    """alpha_k of uniform causal attention: the mean over i = k..T of 1/i. The floor of the metric.

    window: the number w of keys that a query sees at most. Query i then spreads over its last
        min(i, w) keys.
    own_keys: how many keys of its own, such as k*, the model adds. All queries see them, and "star"
        is one of them.
    """
    first = 1 if k == "star" else int(k)
    queries = np.arange(first, length + 1)
    keys = queries  # the number of text keys that each query sees: query i sees i keys
    if window is not None:
        keys = np.minimum(queries, window)
    if k == "star":
        shares = 1 / (keys + max(1, own_keys))
    else:
        sees = queries - keys < first  # key k is inside the query's window
        shares = sees / (keys + own_keys)
    return float(shares.mean())


def excess(alpha: Any, uniform: Any) -> Any:
    """(alpha - u) / (1 - u), where u is the alpha of uniform attention.

    It is 0 if each query spreads evenly over the keys that it sees, or sees only one, and 1 if all
    attention is on key k. alpha, uniform: numbers, arrays or tensors.
    """
    alone = uniform == 1  # alpha is then 1 as well; adding 1 below gives 0 / 1 instead of 0 / 0
    return (alpha - uniform) / (1 - uniform + alone)


def norm_ratio(norms: Any) -> list[float]:
    """For each row, the norm at the first position over the mean norm at the others (Figs. 7, 8).

    norms: (rows, positions); a row is a layer or a block. The ratio is NaN where all other norms
    are zero, as behind a closed gate. For hidden states the last block is a special case: its
    output predicts the next token, and its norms mean something else.
    Raises ValueError for T = 1.
    """
    rows = np.asarray(norms, dtype=float)
    require(rows.shape[1] > 1, "a norm ratio needs at least two positions")
    others = rows[:, 1:].mean(axis=1)
    ratios = rows[:, 0] / np.where(others > 0, others, np.nan)
    return ratios.tolist()  # type: ignore[no-any-return]


# --- the report


class NotFinite(Refused):
    """The model computed nan or infinite numbers, so that a report would mean nothing."""


@dataclass
class Kept:
    """The attention map, queries and keys of one head.

    Shorter sequences are padded with zeros up to the longest.
    """

    map: Tensor  # A_ij, (samples, T, T)
    # After rotary, (samples, T, D). None for a model whose modules show their weights alone.
    queries: Tensor | None = None
    keys: Tensor | None = None


@dataclass
class Report:
    """The result of `measure`. All tensors are float32 on the CPU.

    Positions k count from 1, layers from 0. "star" stands for a key that no text token owns: a key
    bias k*, a sink token x* or a learned sink logit. T is the length of a sequence, and "positions"
    stands for the length of the longest one.
    """

    alpha: Tensor  # (samples, targets, layers, heads)
    targets: tuple[int, ...]
    epsilons: tuple[float, ...]
    lengths: Tensor  # (samples,): T of each sequence, without padding
    layers: tuple[int, ...]  # the attention layers' indices among the model's blocks
    # l2-norms, mean over samples (and over heads). None where they were not measured.
    hidden_norms: Tensor | None = None  # (blocks, positions): h^l, l = 1..L, before the final norm
    key_norms: Tensor | None = None  # (layers, positions): after rotary
    value_norms: Tensor | None = None  # (layers, positions)
    embedding_norms: Tensor | None = None  # (positions,): h^0
    # (blocks, positions): in post-norm blocks, the sum before the block's last norm (Eq. 3)
    before_norm_norms: Tensor | None = None
    # (blocks, positions): the largest |element| of h^l, divided by the sequence's median |element|
    hidden_peaks: Tensor | None = None
    first_elements: Tensor | None = None  # (blocks, d): each |element| of h_1^l, over that median
    star: Tensor | None = None  # (samples, layers, heads): alpha_*, the attention to "star"
    # (samples, layers, heads): entropy of a row of attention in nats, mean over queries; the star's
    # share is one of its weights. None where it was not asked for.
    entropy: Tensor | None = None
    # (part, layer) -> (2, heads), for `peaks`; (part, layer) -> (formats,), for `forecast`
    maxima: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    lost: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    sink_logits: dict[int, float] = field(default_factory=dict)  # layer -> mean learned sink logit
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # (layer, head) -> its map
    bos: bool | None = None  # whether each sequence starts with a BOS; None: unknown
    skipped: int = 0  # the number of sequences shorter than the largest target
    name: str = ""
    # How alpha was computed, in words: "fused", "exact", "eager weights", "dense". "fused in 23 of 24
    # layers": in one, no kernel could compute it or proved right, and whole rows were computed.
    path: str = ""
    # For each attention layer, how many keys a query sees; None: all. Empty: no layer has a window.
    windows: tuple[int | None, ...] = ()
    # Of texts packed in a row, whether they saw each other, in words. Empty: each row is one text.
    packed: str = ""
    digest: str = ""  # a hash of the token ids: equal for reports of the same texts

    @property
    def length(self) -> int:
        """T, the length of the longest sequence."""
        return int(self.lengths.max())

    @property
    def samples(self) -> int:
        """The number of sequences that were measured."""
        return self.alpha.shape[0]

    @property
    def floor(self) -> float:
        """alpha_1 of uniform causal attention, mean over the sequences.

        For length T it is H_T / T, where H_T = 1 + 1/2 + .. + 1/T. It is 0.074 at T = 64.
        """
        return float(np.mean([uniform_alpha(length) for length in self.lengths.tolist()]))

    def sink(self, k: int | str = 1, eps: float = 0.3) -> float:
        """Sink_k^eps in percent: the share of (sequence, layer, head) with alpha_k > eps.

        k: a target, or "star". eps: any threshold in (0, 1).
        Raises ValueError for another eps, and for a k that was not measured.
        """
        return 100 * float(self._is_sink(k, eps).mean())

    def sink_star(self, eps: float = 0.3) -> float:
        """Sink_*^eps in percent, for a key bias, a sink token or a learned sink logit."""
        return self.sink("star", eps)

    def excess(self, k: int | str = 1) -> float:
        """The mean of (alpha_k - u) / (1 - u) over samples, layers and heads.

        u is the alpha_k of uniform causal attention. So the excess is 0 for uniform attention and 1
        if all attention is on k. If there is no other key (T = 1), it is 0.

        In uniform attention, query i spreads over the i keys that it sees: for k = 1, u = H_T / T.
        In a layer with a window of w keys it spreads over min(i, w) keys, and for "star" over the
        star as well. For k = 1, 2, .. u ignores a star and the prefix of a prefix LM. There, uniform
        attention over all that a query sees has an excess a little below 0. Where there is a star,
        `str` prints how far.
        """
        return float(self._excess(k).mean())

    def _excess(self, k: int | str) -> Tensor:
        """The excess of each sample, layer and head, (samples, layers, heads)."""
        uniform = self._by_layer(uniform_alpha, k).double()  # (samples, layers)
        return excess(self.of(k), uniform[..., None])  # type: ignore[no-any-return]

    def excess_by_layer(self) -> list[float]:
        """The excess of alpha_1 in each attention layer, mean over samples and heads."""
        return self._excess(1).mean(dim=(0, 2)).tolist()

    def visible_alpha(self, k: int | str = 1) -> Tensor:
        """The mean of A_ik over only those queries that see key k, (samples, layers, heads).

        In a layer with a window of w keys these are the queries k..k + w - 1. There alpha_k itself,
        a mean over all queries k..T, cannot exceed `caps(k)`; this mean can. In a layer without a
        window the two are the same.
        """
        seeing = self._by_layer(seeing_share, k)  # (samples, layers)
        return self.of(k) / seeing[..., None]

    def caps(self, k: int | str = 1) -> list[float]:
        """The largest possible alpha_k in each attention layer, mean over samples.

        In a layer with a window of w keys it is min(1, w / (T - k + 1)). In other layers, and for
        "star", it is 1. Raises ValueError for a k that was not measured.
        """
        return self._by_layer(seeing_share, k).mean(dim=0).tolist()

    def _by_layer(self, function: Callable[..., float], k: int | str) -> Tensor:
        """The value of function(T, k, window) for each sample and layer, (samples, layers)."""
        self.of(k)  # raises ValueError for a k that was not measured
        windows = self.windows or (None,) * len(self.layers)
        rows = [[function(T, k, window) for window in windows] for T in self.lengths.tolist()]
        return self.alpha.new_tensor(rows)

    def interval(self, k: int | str = 1, eps: float = 0.3) -> tuple[float, float]:
        """A 95 % interval of Sink_k^eps over sequences, in percent; k may be "star".

        It is a bootstrap over sequences. Where all of them have 0 %, or all 100 %, a bootstrap would
        say that there is no doubt; then it is the interval of Clopper and Pearson for a share of
        the sequences. One sequence says nothing of others: (0, 100).
        """
        by_text = self._is_sink(k, eps).mean(dim=(1, 2)).numpy()  # (samples,)
        count = len(by_text)
        if count == 1:
            return 0.0, 100.0
        doubt = 100 * (1 - 0.025 ** (1 / count))
        if by_text.max() == 0:
            return 0.0, doubt
        if by_text.min() == 1:
            return 100 - doubt, 100.0
        # Texts are resampled, not heads: those of one model are no independent sample.
        drawn = np.random.default_rng(0).choice(by_text, (DRAWS, count))
        low, high = np.quantile(100 * drawn.mean(axis=1), [0.025, 0.975])
        return float(low), float(high)

    def to_dict(self, levels: Sequence[float] = CURVE_EPSILONS) -> dict[str, Any]:
        """The numbers of the report as a dict for JSON. They are means over the samples.

        The dict holds Sink_k^eps of every target at many eps, intervals, excess, alpha and norms.
        levels: the eps at which Sink is computed, beside the report's own.
        """
        levels = sorted({*self.epsilons, *levels})
        result: dict[str, Any] = {name: getattr(self, name) for name in CONDITIONS}
        result["T"] = self.length
        if int(self.lengths.min()) < self.length:
            result["lengths"] = self.lengths.tolist()
        # Each of these is a dict by target, {"1": .., "star": ..}.
        keys, own = [*self._shares], self.epsilons
        result["excess"] = {k: self.excess(k) for k in keys}
        result["interval"] = {k: {eps: self.interval(k, eps) for eps in own} for k in keys}
        result["sink"] = {k: {eps: self.sink(k, eps) for eps in levels} for k in keys}
        result["alpha"] = self.alpha.mean(dim=0)
        if self.star is not None:
            result["alpha_star"] = self.star.mean(dim=0)
            result["sink_star"] = result["sink"].pop("star")
        if self.windows:
            result["windows"] = self.windows
            result["visible_alpha"] = {k: self.visible_alpha(k).mean(dim=0) for k in self.targets}
        measured = {name: getattr(self, name) for name in BY_POSITION}
        result |= {name: value for name, value in measured.items() if value is not None}
        # Tensors and tuples become lists, keys text, and floats are rounded.
        text = json.dumps(result, default=lambda x: x.tolist())
        rounded: dict[str, Any] = json.loads(text, parse_float=lambda x: round(float(x), DIGITS))
        return rounded

    def summary(self) -> dict[str, float]:
        """The few numbers by which models are compared. Those that were not measured are left out.

        sink_1: Sink_1 in percent, at the first eps.
        block_1, later_blocks: the mean excess of alpha_1, in the first attention layer and in all
            later ones.
        element: the largest |element| of h_1 in any block, divided by the median |element| of h.
        element_block, element_dimension: after which block (from 1) it was found, and in which
            dimension (from 0).
        value_ratio: ||v_1|| divided by the mean norm of the other values, in the layer where this
            ratio is smallest.
        entropy: the mean entropy of a row of attention, in nats.
        star: the mean attention to a key of its own, or to a learned sink logit; sink_logit: the
            mean of learned sink logits.
        excess_full, excess_window: the mean excess in layers with and without a window, and
        element_full, element_window, element_linear: the element after these blocks, and after
            blocks without softmax attention, if the model has more than one kind.
        """
        first, *later = self.excess_by_layer()
        numbers = {"sink_1": self.sink(eps=self.epsilons[0]), "block_1": first}
        if later:
            numbers["later_blocks"] = float(np.mean(later))
        if self.first_elements is not None:
            place = int(self.first_elements.argmax())  # in the flattened (blocks, d)
            block, dimension = divmod(place, self.first_elements.shape[1])
            numbers["element"] = float(self.first_elements.max())
            numbers |= {"element_block": block + 1, "element_dimension": dimension}
        if self.value_norms is not None and self.length > 1:
            numbers["value_ratio"] = float(np.nanmin(norm_ratio(self.value_norms)))
        if self.entropy is not None:
            numbers["entropy"] = float(self.entropy.mean())
        if self.star is not None:
            numbers["star"] = float(self.star.mean())
        if self.sink_logits:
            numbers["sink_logit"] = float(np.mean([*self.sink_logits.values()]))
        return numbers | self._by_kind()

    def _by_kind(self) -> dict[str, float]:
        """Excess and element by kind of layer, if a model has several kinds, for `summary`."""
        elements = self.first_elements  # (blocks, d)
        blocks = range(0 if elements is None else len(elements))
        kinds = dict.fromkeys(blocks, "linear")
        windows = self.windows or (None,) * len(self.layers)
        for block, window in zip(self.layers, windows, strict=True):
            kinds[block] = "full" if window is None else "window"
        excess = dict(zip(self.layers, self.excess_by_layer(), strict=True))
        numbers: dict[str, float] = {}
        names = sorted({*kinds.values()})
        for kind in names if len(names) > 1 else ():
            of_kind = [block for block, name in kinds.items() if name == kind]
            if kind != "linear":
                numbers[f"excess_{kind}"] = float(np.mean([excess[block] for block in of_kind]))
            if elements is not None:
                numbers[f"element_{kind}"] = float(elements[of_kind].max())
        return numbers

    @property
    def peaks(self) -> pd.DataFrame:
        """The largest |element| of states, keys and values, over all texts, in absolute numbers.

        Columns: part (h, k or v), block (from 1), head (key heads from 1; 0 for h, which has none),
        first (at the first token) and others (at all others). Empty if norms were not measured.
        """
        import pandas as pd

        rows = []
        for (part, layer), values in sorted(self.maxima.items()):
            for head, (first, others) in enumerate(values.T.tolist()):
                # A state belongs to a block and not to a head.
                rows.append((part, layer + 1, 0 if part == "h" else head + 1, first, others))
        return pd.DataFrame(rows, columns=["part", "block", "head", "first", "others"])

    @property
    def forecast(self) -> pd.DataFrame:
        """What a cache with one scale for a layer's keys, or values, would leave of them.

        Columns: part (k or v), block (from 1), format (int8, fp8, int4, fp4), zero: which share of
        the other tokens' elements, in percent, it would round to zero; lost_bits: log2 of the first
        token's largest element over the others', or 0 if that is larger: by so many bits an integer
        format is coarser for the others than without the first token. Empty without norms.
        """
        import pandas as pd

        rows = []
        for (part, layer), shares in sorted(self.lost.items()):
            first, others = self.maxima[part, layer].amax(dim=1).clamp(min=1e-30).tolist()
            lost_bits = max(0.0, math.log2(first / others))
            for name, share in zip(FORMATS, shares.tolist(), strict=True):
                rows.append((part, layer + 1, name, 100 * share, lost_bits))
        return pd.DataFrame(rows, columns=["part", "block", "format", "zero", "lost_bits"])

    def _forecast_line(self) -> str:
        """The forecast in one line."""
        largest = self.peaks.groupby("part")[["first", "others"]].max().max(axis=1)
        over = [part for part, value in largest.items() if value > FLOAT16]
        sizes = ", ".join(f"{part} {value:.3g}" for part, value in largest.items())
        forecast = self.forecast
        zero = forecast[forecast.format == "int4"].groupby("part").zero.mean()
        return (
            f"float16: {', '.join(over) + ' overflow' if over else 'fits'} (largest: {sizes}); "
            f"one 4-bit scale a layer would round {zero['k']:.0f} % of the other tokens' keys to "
            f"zero and {zero['v']:.0f} % of their values"
        )

    def __str__(self) -> str:
        import pandas as pd  # imported here, because training does not need it

        bos = {True: "yes", False: "no", None: "unknown"}[self.bos]
        shortest = int(self.lengths.min())
        length = f"{shortest}..{self.length}" if shortest < self.length else f"{self.length}"
        layers, heads = self.alpha.shape[-2:]
        lines = [
            f"{self.name or 'model'}: T = {length}, n = {self.samples}, BOS first: {bos}, "
            f"{layers} attention layers x {heads} heads, "
            f"uniform attention: alpha_1 = {self.floor:.3f}"
        ]
        if self.skipped:
            short = f"shorter than the largest target, {max(self.targets)}"
            lines.append(f"skipped {self.skipped} sequences: {short}")
        if self.packed:
            lines.append(f"texts packed in a row: {self.packed}")
        table = pd.DataFrame()
        for k, alpha in self._shares.items():
            key = "*" if k == "star" else k
            table.loc[key, "mean alpha"] = f"{alpha.mean():.4f}"
            for eps in self.epsilons:
                low, high = self.interval(k, eps)
                interval = f"[{low:6.2f}, {high:6.2f}]" if self.samples > 1 else "[n = 1]"
                column = f"Sink eps={eps:g} [95 % over texts]"
                table.loc[key, column] = f"{self.sink(k, eps):.2f} % {interval}"
        lines.append(str(table.rename_axis(columns="key").to_string()))
        if len(self.targets) > 1:
            most = max(self.targets, key=self.excess)
            of = "all" if len(self.targets) == self.length else "those measured"
            lines.append(
                f"most attention: position {most}, of {of} "
                f"(excess {self.excess(most):.3f}, mean over texts, layers and heads)"
            )
        if self.star is not None:
            even = uniform_alpha(self.length, 1, None, own_keys=1)
            of_even = excess(even, uniform_alpha(self.length))
            lines.append(f"the excess ignores the key *: even attention to all has {of_even:.3f}")
        for k in self.targets:
            cap = min(self.caps(k))
            if cap < 1:
                lines.append(
                    f"in layers with a window alpha_{k} is at most {cap:.3f}: "
                    f"see caps({k}), visible_alpha({k})"
                )
        if self.lost:
            lines.append(self._forecast_line())
        return "\n".join(lines)

    @property
    def _shares(self) -> dict[int | str, Tensor]:
        """Target -> alpha_k; if measured, "star" -> alpha_*. Each is (samples, layers, heads)."""
        shares: dict[int | str, Tensor] = dict(zip(self.targets, self.alpha.unbind(1), strict=True))
        if self.star is not None:
            shares["star"] = self.star
        return shares

    def of(self, k: int | str) -> Tensor:
        """alpha_k of every sample, layer and head; alpha_* if k is "star".

        Its shape is (samples, layers, heads). Raises ValueError if it was not measured.
        """
        shares = self._shares
        require(
            k in shares,
            f"alpha_{k} was not measured, only {[*shares]}: measure(targets=..), and star only of "
            "a key bias k*, a sink token x* or a learned sink logit",
        )
        return shares[k]

    def _is_sink(self, k: int | str, eps: float) -> Tensor:
        """The indicator [alpha_k > eps], 0 or 1, (samples, layers, heads)."""
        check_epsilons((eps,))
        return (self.of(k) > eps).double()


def check_bos(bos: Any) -> None:
    """Raise ValueError unless it is known or unknown whether a BOS stands first."""
    require(bos in (True, False, None), f"bos must be True, False or None (unknown), got {bos!r}")


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """The thresholds without duplicates.

    Raises ValueError unless all lie strictly between 0 and 1.
    """
    values = numbers("epsilons", epsilons)
    inside = len(values) > 0 and all(0 < eps < 1 for eps in values)
    require(inside, f"eps must be in (0, 1), at least one; got {values}")
    return tuple(dict.fromkeys(values))


def check_targets(targets: Sequence[int], length: int) -> tuple[int, ...]:
    """The targets without duplicates. They count from 1, as in the paper.

    Raises ValueError unless all are positions in 1..T, where T is `length`.
    """
    values = numbers("targets", targets)
    known = len(values) > 0 and all(k in range(1, length + 1) for k in values)
    wanted = f"targets are positions of the ids, which count from 1 to {length}"
    require(known, f"{wanted}: got {values}")
    return tuple(dict.fromkeys(map(int, values)))
