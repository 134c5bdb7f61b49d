"""The figures: seaborn, one theme, colour-blind safe, with the paper's symbols on the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parent.parent / "figures"
SINK_LABEL = r"$\mathrm{Sink}_1^{\epsilon}$ (%), $\epsilon = 0.3$"
STAR_LABEL = r"$\mathrm{Sink}_*^{\epsilon}$ (%)"
PAPER_COLOR = "#666666"


def theme() -> None:
    """Set the one theme: call it once at the top of a notebook."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.9)
    mpl.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 90,
            "savefig.dpi": 110,
            "figure.constrained_layout.use": True,
            "svg.hashsalt": "sinkutils",  # the same picture gives the same file
            "axes.titlesize": "medium",
            "legend.frameon": False,
        }
    )


def save(figure: Figure, name: str) -> None:
    """Save a figure under figures/ as PNG and SVG, the same bytes for the same picture."""
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", metadata={"Software": None})
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


def dynamics(curve: Sequence[Mapping[str, float]], title: str = "", sink: str = "sink_1") -> Figure:
    """Train and validation loss and a sink metric along one run (Fig. 4 middle, Fig. 28)."""
    frame = pd.DataFrame(curve)
    figure, losses = plt.subplots()
    colors = sns.color_palette("colorblind")
    losses.plot(frame["step"], frame["train_loss"], color=colors[0], label="train loss")
    losses.plot(frame["step"], frame["valid_loss"], color=colors[0], linestyle="--", label="valid loss")
    losses.set(xlabel="optimisation step", ylabel="loss (nats a token)", title=title)
    sinks = losses.twinx()
    label = STAR_LABEL if sink == "sink_star" else SINK_LABEL
    sinks.plot(frame["step"], frame[sink], color=colors[1], label=label.split(" (")[0])
    sinks.set(ylabel=label, ylim=(0, max(5.0, 1.1 * frame[sink].max())))
    sinks.grid(False)
    sinks.yaxis.label.set_color(colors[1])
    handles = [*losses.get_legend_handles_labels()[0], *sinks.get_legend_handles_labels()[0]]
    losses.legend(handles=handles, loc="center right")
    return figure


def curves(runs: Mapping[str, Sequence[Mapping[str, float]]], keys: Sequence[str], labels: Sequence[str]) -> Figure:
    """Several runs' curves, a panel for each of `keys` (Fig. 4 right); runs are told apart by colour and dashes."""
    frame = pd.concat(
        [pd.DataFrame(curve)[["step", *keys]].assign(run=name) for name, curve in runs.items()], ignore_index=True
    )
    figure, axes = plt.subplots(1, len(keys), figsize=(4.6 * len(keys), 3.6), squeeze=False)
    for index, (axis, key, label) in enumerate(zip(axes[0], keys, labels, strict=True)):
        last = index == len(keys) - 1
        sns.lineplot(frame, x="step", y=key, hue="run", style="run", ax=axis, legend=last, palette="colorblind",
                     errorbar=None)  # fmt: skip
        axis.set(xlabel="optimisation step", ylabel=label)
        if last:
            sns.move_legend(axis, "center left", bbox_to_anchor=(1.0, 0.5), title=None)
    return figure


def paper_and_ours(table: pd.DataFrame, value: str = "sink_1", ylabel: str = SINK_LABEL, title: str = "") -> Figure:
    """Two panels, one scale each: what the paper reports and what our records say, row by row.

    `table` is `tables.paper_beside_ours`; bars of ours carry the range over seeds where there are several.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.4), sharex=True)
    rows = np.arange(len(table))
    ours = table[value].to_numpy(dtype=float)
    spread = np.abs(np.stack([ours - table[f"{value}_low"], table[f"{value}_high"] - ours]).astype(float))
    _bars(axes[0], rows, table[f"{value}_paper"].to_numpy(dtype=float), None, PAPER_COLOR)
    _bars(axes[1], rows, ours, spread, sns.color_palette("colorblind")[0])
    for axis, name in zip(axes, ("paper (60M)", "ours"), strict=True):
        axis.set(title=name, xticks=rows)
        axis.set_xticklabels(table["row"], rotation=30, ha="right")
        axis.grid(False, axis="x")
    axes[0].set_ylabel(ylabel)
    if title:
        figure.suptitle(title)
    return figure


def _bars(axis: Axes, rows: np.ndarray, values: np.ndarray, spread: np.ndarray | None, color: Any) -> None:
    axis.bar(
        rows, np.nan_to_num(values), yerr=None if spread is None else np.nan_to_num(spread), color=color, width=0.6
    )
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    axis.set_ylim(0, max(1.15 * top, 1.0))
    for row, value in zip(rows, values, strict=True):
        text = "no run" if np.isnan(value) else f"{value:.1f}"
        axis.annotate(text, (row, 0 if np.isnan(value) else value), ha="center", va="bottom", fontsize="x-small",
                      xytext=(0, 2), textcoords="offset points")  # fmt: skip


def attention_map(weights: Any, title: str = "", columns: Sequence[str] | None = None) -> Figure:
    """One head's attention map: queries down, keys across, on a square-root scale so that small weights show."""
    values = np.asarray(weights, dtype=float)
    figure, axis = plt.subplots(figsize=(4.6, 4.0))
    image = axis.imshow(values, cmap="rocket", norm=mpl.colors.PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    figure.colorbar(image, ax=axis, label=r"$A_{i,k}$")
    axis.set(xlabel="key $k$", ylabel="query $i$", title=title)
    if columns is not None:
        ticks = [index for index, name in enumerate(columns) if name]
        axis.set_xticks(ticks, [columns[index] for index in ticks])
    axis.grid(False)
    return figure


def alpha_heatmap(alpha: Any, title: str = "", symbol: str = r"$\alpha_1^{l,h}$") -> Figure:
    """Importance scores by block and head (Figs. 19 to 24, 27); alpha: (layers, heads)."""
    values = np.atleast_2d(np.asarray(alpha, dtype=float))
    figure, axis = plt.subplots(figsize=(max(3.6, 0.45 * values.shape[1] + 2), max(2.6, 0.3 * values.shape[0] + 1.2)))
    sns.heatmap(values, vmin=0, vmax=1, cmap="rocket", ax=axis, cbar_kws={"label": symbol}, linewidths=0.5,
                xticklabels=range(1, values.shape[1] + 1), yticklabels=range(1, values.shape[0] + 1))  # fmt: skip
    axis.set(xlabel="head $h$", ylabel="block $l$", title=title)
    return figure


def norms(reports: Mapping[str, Any], title: str = "") -> Figure:
    """The l2-norms of h, k, v: first token against the mean of the others, a block a point (Fig. 2 top)."""
    panels = (("hidden_norms", r"$\|h\|$"), ("key_norms", r"$\|k\|$"), ("value_norms", r"$\|v\|$"))
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.0))
    for axis, (key, label) in zip(axes, panels, strict=True):
        for index, (name, report) in enumerate(reports.items()):
            values = np.asarray(report[key] if isinstance(report, Mapping) else getattr(report, key), dtype=float)
            blocks, color = np.arange(1, len(values) + 1), sns.color_palette("colorblind")[index]
            prefix = f"{name}: " if len(reports) > 1 else ""
            axis.plot(blocks, values[:, 0], marker="o", color=color, label=f"{prefix}first token")
            axis.plot(blocks, values[:, 1:].mean(axis=1), marker="s", linestyle="--", color=color,
                      label=f"{prefix}mean of the others")  # fmt: skip
        axis.set(xlabel="block $l$", ylabel=label, ylim=(0, None))
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    axes[0].legend(fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def norm_ratios(ratios: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """The norm of h of the first token over the mean of the others, by block (Figs. 7, 8, 29): massive activations."""
    figure, axis = plt.subplots()
    for index, (name, values) in enumerate(ratios.items()):
        axis.plot(range(1, len(values) + 1), values, marker="os^Dv<>p"[index % 8], label=name,
                  color=sns.color_palette("colorblind")[index % 10])  # fmt: skip
    axis.axhline(1, color=PAPER_COLOR, linewidth=1, linestyle=":")
    axis.set(
        xlabel="block $l$", ylabel=r"$\|h_1^l\|\;/\;\mathrm{mean}_{t\neq 1}\|h_t^l\|$", title=title, ylim=(0, None)
    )
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
