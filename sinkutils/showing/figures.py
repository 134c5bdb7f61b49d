"""The figures: seaborn, one theme, colour-blind safe, with the paper's symbols on the axes.

A figure of records is None where nothing of ours is recorded yet: there is nothing to draw, and `save` saves nothing.
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sinkutils.paths import FIGURES, RENDERED
from sinkutils.showing.names import Row

COMMITTED = "SINKUTILS_COMMITTED_FIGURES"  # set in the kernels of `run --in-place`

EPSILON = 0.3
SINK_LABEL = r"$\mathrm{Sink}_1^{\epsilon}$ (%), $\epsilon = 0.3$"
STAR_LABEL = r"$\mathrm{Sink}_*^{\epsilon}$ (%)"
# One colour a quantity, one for the base, one for what the paper prints; in grey they stay apart with their marks.
BASE_COLOR, FIRST_COLOR, STAR_COLOR, PAPER_COLOR = "#0173b2", "#de8f05", "#029e73", "#666666"
OTHER_COLORS = ("#d55e00", "#cc78bc", "#029e73", "#ca9161", "#56b4e9", "#949494", "#8c2d6b", "#b8a800")
MARKS = "os^Dv<>pXP"
SINKS = {"1": (r"$\alpha_1$", "sink_1", FIRST_COLOR, "o"), "star": (r"$\alpha_*$", "sink_star", STAR_COLOR, "^")}


def theme() -> None:
    """Set the one theme: call it once at the top of a notebook."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.9)
    mpl.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 90,
            "savefig.dpi": 110,
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "legend.frameon": False,
        }
    )


def save(figure: Figure | None, name: str) -> None:
    """Save a figure as PNG and SVG, the same bytes for the same picture; nothing where there is none.

    They go to figures/ only where `run --in-place` makes what is committed, else to rendered/figures, which git
    ignores: a lesson leaves the checkout as it was.
    """
    if figure is None:
        return
    folder = FIGURES if os.environ.get(COMMITTED) else RENDERED / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "sinkutils"}):
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def show(figure: Figure | None, caption: str, alt: str, name: str = "") -> None:
    """Show a figure with its caption below it and a text for those who cannot see it; saved under `name`, if any.

    caption: its first sentence says what there is to see; **words** between stars are bold. In a page it is one HTML
    figure, which JupyterLab, a converted notebook and the book show alike; as text, the two sentences. Where there is
    no figure (nothing recorded yet) one line says so.
    """
    if figure is None:
        print("Nothing to draw: none of these runs is recorded yet.")
        return
    if name:
        save(figure, name)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    plt.close(figure)
    width, data = round(90 * figure.get_figwidth()), base64.b64encode(png.getvalue()).decode()
    words = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(caption, quote=False))
    page = (f'<figure style="margin:0.5em 0"><img alt="{html.escape(alt)}" width="{width}" '
            f'style="max-width:100%;background:white" src="data:image/png;base64,{data}">'
            f'<figcaption style="max-width:{max(width, 560)}px">{words}</figcaption></figure>')  # fmt: skip
    text = f"[figure: {alt}]\n" + caption.replace("**", "")
    lines = "\n".join(textwrap.fill(part, 98) for part in text.split("\n"))
    display({"text/plain": lines, "text/html": page}, raw=True)


def colors_of(labels: Sequence[str], base: str | None = None, ordered: bool = False) -> dict[str, Any]:
    """A colour a label: the base's for `base`; steps of one quantity from light to dark, others well apart."""
    others = [label for label in labels if label != base]
    palette = sns.color_palette("flare", len(others)) if ordered else [
        OTHER_COLORS[index % len(OTHER_COLORS)] for index in range(len(others))
    ]  # fmt: skip
    return dict(zip(others, palette, strict=True)) | ({base: BASE_COLOR} if base is not None and base in labels else {})


def along_training(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    keys: Mapping[str, str],
    base: str | None = None,
    ordered: bool = False,
    xlabel: str = "optimisation step",
) -> Figure | None:
    """Curves along training, a panel for each of `keys` (its label), a colour and a dash a run: the mean over its
    seeds thick, each seed thin (Figs. 4 middle and right, 28, 30).

    runs: by label, the curve of each seed. A run without a key, such as sink_star without a key bias, has no line in
    its panel. base, ordered: as of `colors_of`.
    """
    shown = {label: [pd.DataFrame(curve) for curve in seeds if curve] for label, seeds in runs.items()}
    shown = {label: frames for label, frames in shown.items() if frames}
    if not shown:
        return None
    colors = colors_of(list(shown), base, ordered)
    figure, axes = plt.subplots(1, len(keys), figsize=(4.4 * len(keys) + 1.6, 3.4), squeeze=False)
    for axis, (key, label) in zip(axes[0], keys.items(), strict=True):
        for index, (name, frames) in enumerate(shown.items()):
            lines = [frame.set_index("step")[key].astype(float) for frame in frames if key in frame]
            dash = "-" if name == base else ("-", "--", "-.", ":")[index % 4]
            for line in lines if len(lines) > 1 else ():
                axis.plot(line.index, line, color=colors[name], linewidth=0.6, alpha=0.5)
            if lines:
                mean = pd.concat(lines, axis=1).mean(axis=1)
                axis.plot(mean.index, mean, color=colors[name], linestyle=dash, linewidth=1.8)
        axis.set(xlabel=xlabel, ylabel=label)
        if "loss" not in key:
            axis.set_ylim(min(-0.02 * axis.get_ylim()[1], -0.1), None)  # from zero, and a line at zero is seen
    handles = [Line2D([], [], color=colors[name], linestyle="-" if name == base else ("-", "--", "-.", ":")[index % 4],
                      label=f"{name}, {len(frames)} seed{'s' * (len(frames) > 1)}")
               for index, (name, frames) in enumerate(shown.items())]  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", fontsize="small")
    return figure


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
                shares.plot(row.paper.values[column], middle, "D", color=PAPER_COLOR, markerfacecolor="white")
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
        handles.append(
            Line2D([], [], linestyle="", marker="D", color=PAPER_COLOR, markerfacecolor="white", label="paper")
        )
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


SYMBOLS = {"sink_star": STAR_LABEL.split(" (")[0], "sink_1": SINK_LABEL.split(" (")[0]}


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


def curves(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
    keys: Sequence[str],
    labels: Sequence[str],
    xlabel: str = "optimisation step",
) -> Figure | None:
    """Several runs' curves, a panel for each of `keys` (Fig. 4 right); runs are told apart by colour and dashes.

    A run without a key, such as sink_star without a key bias, has no line in its panel.
    """
    frames = [
        pd.DataFrame(curve).reindex(columns=["step", *keys]).astype(float).assign(run=name)
        for name, curve in runs.items()
    ]
    if not frames:
        return None
    frame = pd.concat(frames, ignore_index=True)
    figure, axes = plt.subplots(1, len(keys), figsize=(4.6 * len(keys), 3.6), squeeze=False)
    for index, (axis, key, label) in enumerate(zip(axes[0], keys, labels, strict=True)):
        last = index == len(keys) - 1
        sns.lineplot(frame, x="step", y=key, hue="run", style="run", ax=axis, legend=last, palette="colorblind",
                     errorbar=None)  # fmt: skip
        axis.set(xlabel=xlabel, ylabel=label)
        if "loss" not in key:
            axis.set_ylim(-0.02 * axis.get_ylim()[1], None)  # from zero, and a line at zero is seen
        if last:
            sns.move_legend(axis, "center left", bbox_to_anchor=(1.0, 0.5), title=None)
    return figure


def paper_and_ours(
    table: pd.DataFrame, value: str | Sequence[str] = "sink_1", ylabel: str = SINK_LABEL, title: str = ""
) -> Figure | None:
    """Two panels, one scale each: what the paper reports and what our records say, row by row.

    `table` is `tables.paper_beside_ours`; bars of ours carry the range over seeds where there are several. value: one
    column, or several as bars side by side, such as ("sink_star", "sink_1").
    """
    if (table["ours"] == "not run").all():
        return None
    values = (value,) if isinstance(value, str) else tuple(value)
    width, colors = 0.6 if len(values) == 1 else 0.8 / len(values), sns.color_palette("colorblind")
    figure, axes = plt.subplots(1, 2, figsize=(9.0 if len(values) == 1 else 10.2, 3.4), sharex=True)
    several = False
    for index, name in enumerate(values):
        rows = np.arange(len(table)) + width * (index - (len(values) - 1) / 2)
        ours = table[name].to_numpy(dtype=float)
        spread = np.abs(np.stack([ours - table[f"{name}_low"], table[f"{name}_high"] - ours]).astype(float))
        several = several or bool((np.nan_to_num(spread) > 0).any())
        color = PAPER_COLOR if len(values) == 1 else colors[index]
        _bars(axes[0], rows, table[f"{name}_paper"].to_numpy(dtype=float), None, color, table["paper"], width)
        _bars(axes[1], rows, ours, spread, colors[index], table["ours"], width, SYMBOLS.get(name, name))
    headings = ("paper (60M)", "ours (lines: range over seeds)" if several else "ours")
    for axis, name in zip(axes, headings, strict=True):
        axis.set(title=name, xticks=range(len(table)))
        axis.set_xticklabels(table["row"], rotation=30, ha="right")
        axis.grid(False, axis="x")
    axes[0].set_ylabel(ylabel)
    if len(values) > 1:
        axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    if title:
        figure.suptitle(title)
    return figure


NO_VALUE = {"failed": "failed", "not run": "no run"}  # else a value that is not printed, or that a model does not have


def _bars(
    axis: Axes,
    rows: np.ndarray,
    values: np.ndarray,
    spread: np.ndarray | None,
    color: Any,
    states: Sequence[str],
    width: float,
    label: str = "",
) -> None:
    reach = np.nan_to_num(values) + (0 if spread is None else np.nan_to_num(spread[1]))
    error = None
    if spread is not None and (np.nan_to_num(spread) > 0).any():
        error = np.where((np.nan_to_num(spread) > 0).any(axis=0), spread, np.nan)  # a bar of one seed has no range
    axis.bar(rows, np.nan_to_num(values), yerr=error, color=color, width=width, capsize=3, label=label)
    axis.set_ylim(0, max(1.15 * reach.max(), 1.0, axis.get_ylim()[1]))
    for row, value, top, state in zip(rows, values, reach, states, strict=True):
        text = NO_VALUE.get(state, "–") if np.isnan(value) else f"{value:.1f}"
        upright = 90 if len(text) > 4 and width < 0.5 else 0  # "failed", "no run" would run into the next bar's
        axis.annotate(text, (row, top), ha="center", va="bottom", fontsize="x-small", xytext=(0, 2),
                      textcoords="offset points", rotation=upright)  # fmt: skip


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


def norm_ratios(ratios: Mapping[str, Sequence[float] | str], title: str = "") -> Figure | None:
    """The norm of h of the first token over the mean of the others, by block (Figs. 7, 8, 29): massive activations.

    A text in place of values, such as "failed" or "not run", stands in the legend.
    """
    if all(isinstance(values, str) for values in ratios.values()):
        return None
    figure, axis = plt.subplots()
    for index, (name, values) in enumerate(ratios.items()):
        color = sns.color_palette("colorblind")[index % 10]
        if isinstance(values, str):
            axis.plot([], [], " ", label=f"{name}: {values}")
        else:
            axis.plot(range(1, len(values) + 1), values, marker="os^Dv<>p"[index % 8], label=name, color=color)
    axis.axhline(1, color=PAPER_COLOR, linewidth=1, linestyle=":")
    axis.set(
        xlabel="block $l$", ylabel=r"$\|h_1^l\|\;/\;\mathrm{mean}_{t\neq 1}\|h_t^l\|$", title=title, ylim=(0, None)
    )
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


QK_PANELS = {
    "map": (r"$A_{i,j}$", "rocket"),
    "cosine": (r"$\cos(q_i, k_j)$", "vlag"),
    "norm_product": (r"$\|q_i\| \cdot \|k_j\|$", "mako"),
}


def qk_maps(kept: Mapping[str, Any], title: str = "", panels: Sequence[str] = tuple(QK_PANELS)) -> Figure | None:
    """A_ij, cos(q_i, k_j) and their norm product, a head a column, mean over the sequences (Figs. 2 bottom, 15 to 18).

    kept: `sinks.Kept` of each head by its label. panels: which of QK_PANELS are shown, a row each.
    """
    if not kept:
        return None
    size = (2.3 * len(kept) + 0.9, 2.1 * len(panels) + 0.6)
    figure, axes = plt.subplots(len(panels), len(kept), figsize=size, squeeze=False, sharex=True, sharey=True)
    for row, name in zip(axes, panels, strict=True):
        symbol, cmap = QK_PANELS[name]
        maps = np.stack([np.asarray(getattr(head, name), dtype=float).mean(axis=0) for head in kept.values()])
        maps[:, *np.triu_indices(maps.shape[-1], 1)] = np.nan  # hidden by the causal mask
        limits = {"map": (0, 1), "cosine": (-1, 1), "norm_product": (0, np.nanmax(maps))}[name]
        scale = mpl.colors.PowerNorm(0.5, *limits) if name == "map" else mpl.colors.Normalize(*limits)
        edges = (0.5, maps.shape[-1] + 0.5, maps.shape[-1] + 0.5, 0.5)  # positions count from 1
        for axis, values in zip(row, maps, strict=True):
            image = axis.imshow(values, cmap=cmap, norm=scale, interpolation="nearest", extent=edges)
            axis.grid(False)
        row[0].set_ylabel("query $i$")
        figure.colorbar(image, ax=row, label=symbol, shrink=0.9)
    for axis, label in zip(axes[0], kept, strict=True):
        axis.set_title(label, fontsize="small")
    for axis in axes[-1]:
        axis.set_xlabel("key $j$")
    if title:
        figure.suptitle(title)
    return figure


def alpha_heatmaps(alphas: Mapping[str, Any], title: str = "") -> Figure | None:
    """`alpha_heatmap` of several models side by side, one colour scale; alpha: (layers, heads)."""
    if not alphas:
        return None
    arrays = {name: np.asarray(alpha, dtype=float) for name, alpha in alphas.items()}
    widths = [max(2.4, 0.12 * values.shape[1]) for values in arrays.values()]
    height = max(2.6, *(0.12 * len(values) for values in arrays.values()))
    figure, axes = plt.subplots(1, len(arrays), figsize=(sum(widths) + 1.2, height), squeeze=False, width_ratios=widths)
    for axis, (name, values) in zip(axes[0], arrays.items(), strict=True):
        image = axis.imshow(values, cmap="rocket", vmin=0, vmax=1, aspect="auto", interpolation="nearest",
                            extent=(0.5, values.shape[1] + 0.5, len(values) + 0.5, 0.5))  # fmt: skip
        axis.set(title=name, xlabel="head $h$")
        for numbered in (axis.xaxis, axis.yaxis):
            numbered.set_major_locator(mpl.ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(False)
    axes[0, 0].set_ylabel("block $l$")
    figure.colorbar(image, ax=axes[0], label=r"$\alpha_1^{l,h}$")
    if title:
        figure.suptitle(title)
    return figure


def sink_by_length(table: pd.DataFrame, title: str = "") -> Figure:
    """Sink_1 against T, a line an eps (Fig. 3), from `properties.by_length`."""
    figure, axis = plt.subplots()
    colors = sns.color_palette("flare", table.shape[1] - 1)
    for color, (eps, values) in zip(colors, table.drop(columns="uniform").items(), strict=True):
        # Where uniform attention alone exceeds eps, every head would count.
        saturated = table["uniform"] > eps
        axis.plot(table.index, values, marker="o", color=color, label=rf"$\epsilon = {eps:g}$")
        axis.plot(table.index[saturated], values[saturated], "o", markerfacecolor="white", color=color)
    axis.set_xscale("log", base=2)
    axis.set_xticks(table.index, [str(length) for length in table.index])
    axis.set(xlabel="sequence length $T$", ylabel=SINK_LABEL.split(",")[0], title=title, ylim=(0, None))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def sink_by_domain(table: pd.DataFrame, title: str = "") -> Figure:
    """Sink_1 by domain, a panel an eps and a colour a model (Fig. 9), from `properties.by_domain`."""
    panels = table["eps"].unique()
    figure, axes = plt.subplots(1, len(panels), figsize=(9.6, 3.4), sharey=True, squeeze=False)
    for axis, eps in zip(axes[0], panels, strict=True):
        last = eps == panels[-1]
        sns.lineplot(table[table["eps"] == eps], x="domain", y="sink_1", hue="model", style="model", markers=True,
                     ax=axis, legend=last, palette="colorblind", errorbar=None)  # fmt: skip
        axis.set(title=rf"$\epsilon = {eps:g}$", xlabel="", ylabel=SINK_LABEL.split(",")[0], ylim=(0, None))
        axis.tick_params(axis="x", rotation=40)
        if last:
            sns.move_legend(axis, "center left", bbox_to_anchor=(1.0, 0.5), title=None)
    if title:
        figure.suptitle(title)
    return figure


def by_size(table: pd.DataFrame, values: Mapping[str, str], title: str = "") -> Figure:
    """Quantities of models against their size, a panel each and a colour a family (Figs. 4 left, 10).

    values: the label of each column to show. Filled marks are measured, empty ones the paper's printed values.
    """
    figure, axes = plt.subplots(1, len(values), figsize=(4.4 * len(values) + 1.6, 3.6), squeeze=False)
    families = list(dict.fromkeys(table["family"]))
    for axis, (column, label) in zip(axes[0], values.items(), strict=True):
        for index, family in enumerate(families):
            color, mark = sns.color_palette("colorblind")[index % 10], "os^Dv<>p"[index % 8]
            for source, face in (("paper", "white"), ("measured", color)):
                rows = table[(table["family"] == family) & (table["source"] == source)].dropna(subset=column)
                rows = rows.sort_values("parameters")
                axis.plot(rows["parameters"], rows[column], mark, linestyle="-" if source == "measured" else "",
                          color=color, markerfacecolor=face,
                          label=f"{family} ({source})" if len(rows) else None)  # fmt: skip
        axis.set(xscale="log", xlabel="parameters", ylabel=label, ylim=(0, 105))
        axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        axis.set_xlim(1e4, 2e11)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def repeated_attention(seen: Mapping[str, Any], title: str = "") -> Figure:
    """Attention to the first of t equal tokens (Propositions 1-4), and the biases g behind two of them.

    seen: `propositions.RepeatedTokens` by position embedding. Left, the largest A_t,1 over layers and heads; right,
    the exponent by distance of those with a bias, less its value at distance 0.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4))
    colors = dict(zip(seen, sns.color_palette("colorblind"), strict=False))
    for name, one in seen.items():
        first = np.asarray(one.weights[..., 0]).max(axis=(0, 1))
        axes[0].plot(range(1, len(first) + 1), first, color=colors[name], label=name)
        if name in ("relative", "alibi"):
            bias = np.asarray(one.logits[0, 0] - one.logits[0, 0, 0])
            axes[1].plot(range(len(bias)), bias, color=colors[name], label=name)
    if "rotary" in seen:
        bound = np.asarray(seen["rotary"].bound()).max(axis=(0, 1))
        axes[0].plot(range(1, len(bound) + 1), bound, color=PAPER_COLOR, linestyle=":", label="bound of Eq. 28")
    axes[0].set(xscale="log", yscale="log", xlabel="number of equal tokens $t$", ylabel=r"$\max_{l,h} A_{t,1}$",
                ylim=(1e-3, 1.5))  # fmt: skip
    axes[1].set(xlabel="distance $t - i$", ylabel=r"$g(t - i) - g(0)$")
    axes[1].set_yscale("symlog", linthresh=1)
    for axis in axes:
        axis.legend(fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def operation_weights(rows: Mapping[str, tuple[Any, Any]], labels: tuple[str, str], title: str = "") -> Figure:
    """One query's weights A_ij by key under several operations, a panel and a scale each (Section 7.4).

    rows: by operation, the weights (T,) before and after a change. labels: what the legend calls the two.
    """
    columns = 4
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.5 * columns, 1.9 * lines + 0.6), sharex=True, squeeze=False)
    colors = PAPER_COLOR, sns.color_palette("colorblind")[1]
    for axis, (name, pair) in zip(axes.flat, rows.items(), strict=False):
        for shift, values, color, label in zip((-0.2, 0.2), pair, colors, labels, strict=True):
            axis.bar(np.arange(1, len(values) + 1) + shift, np.asarray(values), 0.4, color=color, label=label)
        sums = " and ".join(f"{float(sum(values)):.2f}".replace("-", "\N{MINUS SIGN}") for values in pair)
        axis.set_title(f"{name}\nsums {sums}", fontsize="small")
        axis.axhline(0, color=PAPER_COLOR, linewidth=0.8)
        axis.grid(False, axis="x")
    for axis in axes[-1]:
        axis.set(xlabel="key $j$", xticks=range(1, 1 + max(len(pair[0]) for pair in rows.values())))
    for axis in axes[:, 0]:
        axis.set_ylabel("$A_{T,j}$")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    if title:
        figure.suptitle(title)
    return figure


def step_differences(runs: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """Differences of two runs' weights by step on a log scale, a panel an optimiser (Eqs. 32-42)."""
    figure, axes = plt.subplots(1, len(runs), figsize=(4.6 * len(runs), 3.6), sharey=True, squeeze=False)
    for axis, (name, lines) in zip(axes[0], runs.items(), strict=True):
        for index, (label, values) in enumerate(lines.items()):
            axis.plot(range(1, len(values) + 1), np.maximum(values, 1e-17), marker="os^Dv<>p"[index % 8], label=label,
                      markersize=4, color=sns.color_palette("colorblind")[index])  # fmt: skip
        axis.set(yscale="log", xlabel="optimisation step $s$", title=name, ylim=(1e-18, 10))
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
        axis.legend(fontsize="small", loc="center right")
    axes[0, 0].set_ylabel(r"$\max\,|\hat W_O^s - \alpha W_O^s|$")
    if title:
        figure.suptitle(title)
    return figure


def final_values(runs: Mapping[str, Any], xlabel: str, title: str = "") -> Figure | None:
    """Losses and Sink_1 at the end of several runs in their order (Figs. 5 right, 6 right); runs: `Record` or None.

    What is not run leaves a gap, which its label says.
    """
    if not any(runs.values()):
        return None
    finals = [run.metrics["final"] if run is not None and run.status == "done" else {} for run in runs.values()]
    rows, colors = np.arange(len(runs)), sns.color_palette("colorblind")
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.4))
    for key, label, color, line in (("train_loss", "train loss", colors[0], "-"),
                                    ("valid_loss", "valid loss", colors[0], "--")):  # fmt: skip
        axes[0].plot(rows, [final.get(key, np.nan) for final in finals], line, marker="o", color=color, label=label)
    axes[1].plot(rows, [final.get("sink_1", np.nan) for final in finals], marker="o", color=colors[1])
    axes[0].set_ylabel("loss (nats a token)")
    axes[0].legend()
    axes[1].set(ylabel=SINK_LABEL, ylim=(0, max(5.0, axes[1].get_ylim()[1])))
    names = [name if final else f"{name}\n({'no run' if run is None else 'failed'})"
             for (name, run), final in zip(runs.items(), finals, strict=True)]  # fmt: skip
    for axis in axes:
        axis.set_xlim(-0.4, len(runs) - 0.6)
        axis.set_xticks(rows, names, fontsize="small")
        axis.set_xlabel(xlabel)
    if title:
        figure.suptitle(title)
    return figure


def sink_by_position(table: pd.DataFrame, title: str = "", ylabel: str = "") -> Figure | None:
    """Sink_k by position k, a row a run or a text (Table 10 right, Fig. 5 middle); rows without values stay white."""
    if table.isna().all(axis=None):  # also of a table without columns
        return None
    size = (0.55 * table.shape[1] + 3.0, (0.42 if len(table) < 15 else 0.2) * len(table) + 1.3)
    figure, axis = plt.subplots(figsize=size)
    few = len(table) < 15
    sns.heatmap(table.astype(float), vmin=0, vmax=100, cmap="rocket", ax=axis, annot=few, fmt=".0f", linewidths=0.5,
                cbar_kws={"label": r"$\mathrm{Sink}_k^\epsilon$ (%)"}, yticklabels=few)  # fmt: skip
    axis.set(xlabel="position $k$", ylabel=ylabel, title=title)
    axis.tick_params(axis="y", rotation=0)
    return figure
