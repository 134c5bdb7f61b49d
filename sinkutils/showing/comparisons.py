"""Figures that compare runs: heads by setting, effects, thresholds, where attention goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sinkutils.ledger.results import EPSILON
from sinkutils.showing.figures import BASE_COLOR, FIRST_COLOR, PAPER_COLOR, SINK_LABEL, STAR_COLOR
from sinkutils.showing.names import Row
from sinkutils.study.experiments import experiment

SINKS = {"1": (r"$\alpha_1$", "sink_1", FIRST_COLOR, "o"), "star": (r"$\alpha_*$", "sink_star", STAR_COLOR, "^")}
# Where attention goes, in words, and its colour: the sinks' own colours, then greys for the text.
DESTINATIONS = {
    "star": ("k*, x*, sink logit", STAR_COLOR),
    "first": ("x₁", FIRST_COLOR),
    "self": ("the query itself", "#4d4d4d"),
    "previous": ("the token before", "#8c8c8c"),
    "line_break": ("line breaks", "#bdbdbd"),
    "rest": ("the rest", "#e6e6e6"),
}


def comparison(rows: Sequence[Row], what: Sequence[str] = ("1",), axis_label: str = "") -> Figure | None:
    """The picture of a comparison: a row each setting, a dot each head's alpha at the end, a line at epsilon.

    Left, each head's mean alpha_1 over the texts (what: "1") or alpha_* ("star"), the seeds a little below each other;
    right, the share of heads above epsilon, a small mark a seed and a large one their mean, a diamond what the paper
    prints (a thin one: for its base with a fixed first token, as ours). The base's row is shaded. What has no run of
    ours says so in its row.
    """
    if not any(row.trained for row in rows):
        return None
    size = (9.2, 0.42 * len(rows) + 1.3)
    figure, (heads, shares) = plt.subplots(1, 2, figsize=size, sharey=True, width_ratios=(1.7, 1))
    for y, row in enumerate(rows):
        for panel in (heads, shares) if row.base else ():
            panel.axhspan(y - 0.5, y + 0.5, color=BASE_COLOR, alpha=0.12, linewidth=0)
        for index, key in enumerate(what):
            middle = y + 0.42 * (index - (len(what) - 1) / 2)
            _draw_heads(heads, row, key, middle, 0.6 / len(what))
            _draw_shares(shares, row, key, middle)
        if row.state:
            heads.text(0.5, y, row.state, ha="center", va="center", fontsize="small", color=PAPER_COLOR)
    heads.axvline(EPSILON, color="black", linestyle="--", linewidth=1)
    heads.text(EPSILON, -0.55, r"$\epsilon$", ha="center", va="bottom", fontsize="small")
    symbols = [SINKS[key][0] for key in what]
    heads.set(xlim=(-0.02, 1.02), xlabel=f"{' and '.join(symbols)} of each head")
    heads.set_ylabel(axis_label if len(rows) > 1 else "")  # beside a lone row there is no room, and nothing varies
    shares.set(xlim=(-4, 104), xlabel=r"heads above $\epsilon = 0.3$ (%)")
    _by_row([row.label for row in rows], heads, shares)
    legend: dict[str, dict[str, Any]] = {}
    for symbol, _, color, mark in (SINKS[key] for key in what):
        legend[f"ours, {symbol}"] = {"marker": mark, "color": color, "markersize": 8, "markeredgecolor": "black"}
    diamond = {"color": PAPER_COLOR, "markerfacecolor": "white"}
    if any(line.get_marker() == "D" for line in shares.lines):
        legend["paper"] = {"marker": "D"} | diamond
    if any(line.get_marker() == "d" for line in shares.lines):
        legend["paper, one fixed\nfirst token"] = {"marker": "d"} | diamond
    handles = [Line2D([], [], linestyle="", label=label, **look) for label, look in legend.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    return figure


def _by_row(labels: Sequence[str], *axes: Axes) -> None:
    """A row a label, from the top down."""
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    for axis in axes:
        axis.grid(False, axis="y")


def _draw_heads(axis: Axes, row: Row, key: str, middle: float, height: float) -> None:
    """Each head of each seed, the seeds below each other within `height`."""
    _, _, color, mark = SINKS[key]
    for index, run in enumerate(row.trained.values()):
        alpha = run.report.get("alpha_star") if key == "star" else run.report.get("alpha", [None])[0]
        if alpha is not None:
            values = np.ravel(alpha)
            y = middle + height * ((index + 0.5) / len(row.trained) - 0.5)
            axis.plot(values, np.full(len(values), y), mark, color=color, markersize=4, alpha=0.65, markeredgewidth=0)


def _draw_shares(axis: Axes, row: Row, key: str, middle: float) -> None:
    """Heads above epsilon: each seed, their mean, what the paper prints."""
    _, column, color, mark = SINKS[key]
    values, printed = row.final(column), row.paper.values.get(column)
    axis.plot(values, [middle] * len(values), mark, color=color, markersize=4, alpha=0.5, markeredgewidth=0)
    if values:
        axis.plot(np.mean(values), middle, mark, color=color, markersize=8, markeredgecolor="black")
    fixed = with_fixed_token(row) if key == "1" else None
    if printed is not None and printed != fixed:
        axis.plot(printed, middle, "D", color=color, markerfacecolor="white")
    if fixed is not None:
        axis.plot(fixed, middle, "d", color=color, markerfacecolor="white")
    if row.paper.note == "failed" and key == "1":
        x, align = (2, "left") if values and np.mean(values) > 50 else (102, "right")
        axis.text(x, middle, "paper: failed", ha=align, va="center", fontsize="small", color=PAPER_COLOR)


def with_fixed_token(row: Row) -> float | None:
    """Sink_1 of the paper's base with one fixed first token, where a row is our base and prints it or the paper's base
    that meets any token: not beside another model of the paper's that has our base's setting.
    """
    of_any, fixed = (experiment(name).paper.get("sink_1") for name in ("default", row.experiment or "default"))
    return fixed if row.base and fixed != of_any and row.paper.values.get("sink_1") in (of_any, fixed) else None


def effects(table: pd.DataFrame, xlabel: str, most: int = 10) -> Figure | None:
    """`seen.differences` with their 95 % intervals, the `most` largest and smallest; filled where that leaves out 0."""
    if table.empty:
        return None
    table = table.sort_values("mean", ascending=False, ignore_index=True)
    gap = len(table) > 2 * most
    shown = pd.concat([table[:most], table[-most:]]) if gap else table
    figure, axis = plt.subplots(figsize=(7.6, 0.27 * len(shown) + 1.0))
    for y, row in enumerate(shown.itertuples()):
        away = row.low > 0 or row.high < 0
        color = FIRST_COLOR if away else PAPER_COLOR
        axis.plot([row.low, row.high], [y, y], color=color, linewidth=2)
        axis.plot(row.mean, y, "o", color=color, markerfacecolor=None if away else "white")
        axis.plot(row.seeds, [y + 0.22] * len(row.seeds), ".", color=PAPER_COLOR, markersize=4)
    axis.axvline(0, color=BASE_COLOR, linewidth=1.5)
    if gap:
        axis.axhline(most - 0.5, color=PAPER_COLOR, linestyle=":", linewidth=1)
    axis.set_xlabel(xlabel)
    _by_row(shown["label"], axis)
    axis.tick_params(axis="y", labelsize="small")
    return figure


def means_and_thresholds(table: pd.DataFrame) -> Figure | None:
    """Each experiment's mean alpha_1 against its Sink_1, a dot each, the hidden ones of `tables` ringed."""
    if table.empty:
        return None
    figure, axis = plt.subplots(figsize=(7.6, 3.6))
    axis.plot(table["alpha"], table["sink"], "o", color=FIRST_COLOR, alpha=0.7, markeredgewidth=0)
    base, hidden = table[table["base"]], table[table["hidden"]]
    axis.plot(base["alpha"], base["sink"], "s", color=BASE_COLOR, label="the base")
    ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": "black", "markersize": 10}
    if len(hidden):
        axis.plot(hidden["alpha"], hidden["sink"], "o", label="under 1 %, though over twice even attention", **ring)
    axis.set(xlabel=r"mean $\alpha_1$ over heads and texts", xlim=(0, None), ylim=(-3, 103), ylabel=SINK_LABEL)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    return figure


def destinations(shares: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """Where attention goes, a bar a run: its shares by kind of key, mean over queries 3 to T, heads and seeds."""
    if not shares:
        return None
    figure, axis = plt.subplots(figsize=(9.0, 0.36 * len(shares) + 1.2))
    table = pd.DataFrame(shares).reindex(list(DESTINATIONS)).fillna(0.0)
    table = table[table.any(axis=1)].T
    words, colors = zip(*(DESTINATIONS[kind] for kind in table), strict=True)
    table = table.set_axis(words, axis=1)
    table.plot.barh(ax=axis, stacked=True, width=0.8, color=colors, edgecolor="white", legend=False)
    axis.set(xlim=(0, 1), xlabel="share of attention")
    _by_row(list(shares), axis)
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
