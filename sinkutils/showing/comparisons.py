"""Figures that compare runs: heads by setting, norms by block, effects, thresholds, where attention goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sinkutils.showing.figures import BASE_COLOR, EPSILON, FIRST_COLOR, MARKS, PAPER_COLOR, STAR_COLOR, colors_of
from sinkutils.showing.names import Row

SINKS = {"1": (r"$\alpha_1$", "sink_1", FIRST_COLOR, "o"), "star": (r"$\alpha_*$", "sink_star", STAR_COLOR, "^")}
# Where attention goes, in words, and its colour: the sinks' own colours, then greys for the text.
DESTINATIONS = {"star": ("k*, x*", STAR_COLOR), "first": ("x₁", FIRST_COLOR), "self": ("the query itself", "#4d4d4d"),
                "previous": ("the token before", "#8c8c8c"), "line_break": ("line breaks", "#bdbdbd"),
                "rest": ("the rest", "#e6e6e6")}  # fmt: skip


def comparison(rows: Sequence[Row], what: Sequence[str] = ("1",), axis_label: str = "") -> Figure | None:
    """The picture of a comparison: a row each setting, a dot each head's alpha at the end, a line at epsilon.

    Left, each head's mean alpha_1 over the texts (what: "1") or alpha_* ("star"), the seeds a little below each other;
    right, the share of heads above epsilon, a small mark a seed and a large one their mean, a diamond what the paper
    prints. The base's row is shaded. What has no run of ours says so in its row.
    """
    if not any(row.trained for row in rows):
        return None
    figure, (heads, shares) = plt.subplots(
        1, 2, figsize=(9.2, 0.42 * len(rows) + 1.3), sharey=True, width_ratios=(1.7, 1)
    )
    for y, row in enumerate(rows):
        if row.base:
            for panel in (heads, shares):
                panel.axhspan(y - 0.5, y + 0.5, color=BASE_COLOR, alpha=0.12, linewidth=0)
        for index, key in enumerate(what):
            _, column, color, mark = SINKS[key]
            middle = y + 0.42 * (index - (len(what) - 1) / 2)
            _dots(heads, row, key, middle, 0.6 / len(what), color, mark)
            values = [value for run in row.trained.values() if (value := run.final.get(column)) is not None]
            shares.plot(values, [middle] * len(values), mark, color=color, markersize=4, alpha=0.5, markeredgewidth=0)
            if values:
                shares.plot(np.mean(values), middle, mark, color=color, markersize=8, markeredgecolor="black")
            if column in row.paper.values:
                shares.plot(row.paper.values[column], middle, "D", color=color, markerfacecolor="white")
        if row.state:
            heads.text(0.5, y, row.state, ha="center", va="center", fontsize="small", color=PAPER_COLOR)
    heads.axvline(EPSILON, color="black", linestyle="--", linewidth=1)
    heads.text(EPSILON, -0.55, r"$\epsilon$", ha="center", va="bottom", fontsize="small")
    symbols = " and ".join(SINKS[key][0] for key in what)
    heads.set(xlim=(-0.02, 1.02), xlabel=f"{symbols} of each head", ylabel=axis_label)
    heads.set_yticks(range(len(rows)), [row.label for row in rows])
    heads.set_ylim(len(rows) - 0.5, -0.5)
    shares.set(xlim=(-4, 104), xlabel=r"heads above $\epsilon = 0.3$ (%)")
    for panel in (heads, shares):
        panel.grid(False, axis="y")
    handles = [Line2D([], [], linestyle="", marker=SINKS[key][3], color=SINKS[key][2], markeredgecolor="black",
                      markersize=8, label=f"ours, {SINKS[key][0]}") for key in what]  # fmt: skip
    if any(row.paper.values for row in rows):
        paper = Line2D([], [], linestyle="", marker="D", color=PAPER_COLOR, markerfacecolor="white", label="paper")
        handles.append(paper)
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    return figure


def _dots(axis: Axes, row: Row, key: str, middle: float, height: float, color: str, mark: str) -> None:
    """Each head of each seed, the seeds below each other within `height`."""
    for index, run in enumerate(row.trained.values()):
        alpha = run.report.get("alpha_star") if key == "star" else run.report.get("alpha", [None])[0]
        if alpha is not None:
            values = np.ravel(alpha)
            y = middle + height * ((index + 0.5) / len(row.trained) - 0.5)
            axis.plot(values, np.full(len(values), y), mark, color=color, markersize=4, alpha=0.65, markeredgewidth=0)


def norm_ratios(
    ratios: Mapping[str, Sequence[float] | str], base: str | None = None, ordered: bool = False
) -> Figure | None:
    """The norm of h of the first token over the mean of the others, by block (Figs. 7, 8, 29): massive activations.

    A text in place of values, such as "failed" or "not run yet", stands in the legend. base, ordered: as of
    `colors_of`.
    """
    if all(isinstance(values, str) for values in ratios.values()):
        return None
    figure, axis = plt.subplots(figsize=(7.6, 3.4))
    colors = colors_of(list(ratios), base, ordered)
    for index, (name, values) in enumerate(ratios.items()):
        if isinstance(values, str):
            axis.plot([], [], " ", label=f"{name}: {values}")
        else:
            axis.plot(range(1, len(values) + 1), values, marker=MARKS[index % len(MARKS)], label=name,
                      color=colors[name])  # fmt: skip
    axis.axhline(1, color=PAPER_COLOR, linewidth=1, linestyle=":")
    axis.set(xlabel="block $l$", ylabel=r"$\|h_1^l\|\;/\;\mathrm{mean}_{t\neq 1}\|h_t^l\|$", ylim=(0, None))
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    figure.legend(loc="outside right center", fontsize="small")
    return figure


def effects(table: pd.DataFrame, xlabel: str, most: int = 10) -> Figure | None:
    """Differences from the base with their 95 % intervals, the `most` largest and smallest (columns of
    `seen.differences`); those whose interval leaves out 0 are filled.
    """
    if table.empty:
        return None
    table = table.sort_values("mean", ascending=False, ignore_index=True)
    gap = len(table) > 2 * most
    shown = pd.concat([table[:most], table[-most:]]) if gap else table
    figure, axis = plt.subplots(figsize=(7.6, 0.27 * len(shown) + 1.0))
    for y, row in enumerate(shown.itertuples()):
        away = row.low > 0 or row.high < 0
        axis.plot([row.low, row.high], [y, y], color=FIRST_COLOR if away else PAPER_COLOR, linewidth=2)
        axis.plot(row.mean, y, "o", color=FIRST_COLOR if away else PAPER_COLOR,
                  markerfacecolor=None if away else "white")  # fmt: skip
    axis.axvline(0, color=BASE_COLOR, linewidth=1.5)
    if gap:
        axis.axhline(most - 0.5, color=PAPER_COLOR, linestyle=":", linewidth=1)
    axis.set_yticks(range(len(shown)), shown["label"], fontsize="small")
    axis.set(ylim=(len(shown) - 0.5, -0.5), xlabel=xlabel)
    axis.grid(False, axis="y")
    return figure


def means_and_thresholds(table: pd.DataFrame) -> Figure | None:
    """Each experiment's mean alpha_1 against its Sink_1, a dot each: what a threshold shows of a mean.

    table: label, alpha, sink, base; experiments whose Sink_1 is under 1 % though alpha_1 is over twice that of even
    attention are named.
    """
    if table.empty:
        return None
    figure, axis = plt.subplots(figsize=(7.6, 3.6))
    hidden = table["hidden"]
    axis.plot(table["alpha"], table["sink"], "o", color=FIRST_COLOR, alpha=0.7, markeredgewidth=0)
    axis.plot(
        table.loc[table["base"], "alpha"], table.loc[table["base"], "sink"], "s", color=BASE_COLOR, label="the base"
    )
    axis.plot(table.loc[hidden, "alpha"], table.loc[hidden, "sink"], "o", markerfacecolor="none",
              markeredgecolor="black", markersize=10, label="under 1 %, though over twice even attention")  # fmt: skip
    axis.axvline(EPSILON, color="black", linestyle="--", linewidth=1)
    axis.set(xlabel=r"mean $\alpha_1$ over heads and texts", xlim=(0, None), ylim=(-3, 103),
             ylabel=r"$\mathrm{Sink}_1^{\epsilon}$ (%), $\epsilon = 0.3$")  # fmt: skip
    axis.legend(fontsize="small", loc="lower right")
    return figure


def destinations(shares: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """Where attention goes, a bar a run: its shares by kind of key, mean over queries 3 to T, heads and seeds."""
    if not shares:
        return None
    figure, axis = plt.subplots(figsize=(9.0, 0.36 * len(shares) + 1.2))
    left = np.zeros(len(shares))
    for kind, (words, color) in DESTINATIONS.items():
        width = np.array([row.get(kind, 0.0) for row in shares.values()])
        if not width.any():
            continue
        axis.barh(range(len(shares)), width, left=left, color=color, edgecolor="white", label=words)
        left += width
    axis.set_yticks(range(len(shares)), list(shares))
    axis.set(ylim=(len(shares) - 0.5, -0.5), xlim=(0, 1), xlabel="share of attention")
    axis.grid(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def operation_weights(rows: Mapping[str, tuple[Any, Any]], labels: tuple[str, str]) -> Figure:
    """One query's weights A_ij by key under several operations, a panel each on one scale (Section 7.4).

    rows: by operation, the weights (T,) before and after a change. labels: what the legend calls the two.
    """
    figure, axes = plt.subplots(1, len(rows), figsize=(2.6 * len(rows) + 1.4, 2.6), sharey=True, squeeze=False)
    for axis, (name, pair) in zip(axes[0], rows.items(), strict=True):
        for shift, values, color, label in zip((-0.2, 0.2), pair, (PAPER_COLOR, FIRST_COLOR), labels, strict=True):
            axis.bar(np.arange(1, len(values) + 1) + shift, np.asarray(values), 0.4, color=color, label=label)
        axis.set_title(f"{name}\nsums {' and '.join(f'{float(sum(values)):.2f}' for values in pair)}", fontsize="small")
        axis.set(xlabel="key $j$", xticks=range(1, 1 + len(pair[0])))
        axis.grid(False, axis="x")
    axes[0, 0].set_ylabel("$A_{T,j}$")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def step_differences(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Differences of two runs' weights by step on a log scale, a panel an optimiser (Eqs. 32-42)."""
    figure, axes = plt.subplots(1, len(runs), figsize=(4.6 * len(runs), 3.4), sharey=True, squeeze=False)
    for axis, (name, lines) in zip(axes[0], runs.items(), strict=True):
        colors = colors_of(list(lines), next(iter(lines)))
        for index, (label, values) in enumerate(lines.items()):
            axis.plot(range(1, len(values) + 1), np.maximum(values, 1e-17), marker=MARKS[index], label=label,
                      markersize=4, color=colors[label])  # fmt: skip
        axis.set(yscale="log", xlabel="optimisation step $s$", title=name, ylim=(1e-18, 10))
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
        axis.legend(fontsize="small", loc="center right")
    axes[0, 0].set_ylabel(r"$\max\,|\hat W_O^s - \alpha W_O^s|$")
    return figure
