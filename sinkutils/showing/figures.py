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
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sinkutils.paths import FIGURES, RENDERED

COMMITTED = "SINKUTILS_COMMITTED_FIGURES"  # set in the kernels of `run --in-place`

EPSILON = 0.3
SINK_LABEL = r"$\mathrm{Sink}_1^{\epsilon}$ (%), $\epsilon = 0.3$"
STAR_LABEL = r"$\mathrm{Sink}_*^{\epsilon}$ (%)"
# One colour a quantity, one for the base, one for what the paper prints; in grey they stay apart with their marks.
BASE_COLOR, FIRST_COLOR, STAR_COLOR, PAPER_COLOR = "#0173b2", "#de8f05", "#029e73", "#666666"
OTHER_COLORS = ("#d55e00", "#cc78bc", "#029e73", "#ca9161", "#56b4e9", "#949494", "#8c2d6b", "#b8a800")
LIGHT = "rocket_r"  # of maps: little is light, much is dark, what is hidden white
MARKS = "os^Dv<>pXP"
DASHES = ("--", ":", "-.", (0, (6, 1)), (0, (1, 3)), (0, (3, 1, 1, 1, 1, 1)))  # the base alone has a solid line


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


def save(figure: Figure | None, name: str) -> Path | None:
    """Save a figure as PNG and SVG, the same bytes for the same picture; nothing where there is none. Returns the PNG.

    They go to figures/ only where `run --in-place` makes what is committed, else to rendered/figures, which git
    ignores: a lesson leaves the checkout as it was.
    """
    if figure is None:
        return None
    folder = FIGURES if os.environ.get(COMMITTED) else RENDERED / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "sinkutils"}):
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return folder / f"{name}.png"


def show(figure: Figure | None, caption: str, alt: str, name: str = "") -> None:
    """Show a figure with its caption below it and a text for those who cannot see it; saved under `name`, if any.

    caption: its first sentence says what there is to see; **words** between stars are bold. In a page it is one HTML
    figure, which JupyterLab, a converted notebook and the book show alike; as text, the two sentences. Where there is
    no figure (nothing recorded yet) one line says so.
    """
    if figure is None:
        print("Nothing to draw: none of these runs is recorded yet.")
        return
    png: Any = save(figure, name) if name else io.BytesIO()
    if not name:
        figure.savefig(png, format="png", metadata={"Software": None})
    plt.close(figure)
    picture = png.read_bytes() if name else png.getvalue()
    width, data = round(90 * figure.get_figwidth()), base64.b64encode(picture).decode()
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
    dashes: dict[str, Any] = {name: "-" if name == base or len(shown) == 1 else DASHES[index % len(DASHES)]
                              for index, name in enumerate(shown)}  # fmt: skip
    size = (max(6.0, 4.0 * len(keys)), 3.0 + 0.12 * len(shown))
    figure, axes = plt.subplots(1, len(keys), figsize=size, squeeze=False)
    for axis, (key, label) in zip(axes[0], keys.items(), strict=True):
        for name, frames in shown.items():
            lines = [frame.set_index("step")[key].astype(float) for frame in frames if key in frame]
            for line in lines if len(lines) > 1 else ():
                axis.plot(line.index, line, color=colors[name], linewidth=0.6, alpha=0.5)
            if lines:
                mean = pd.concat(lines, axis=1).mean(axis=1)
                axis.plot(mean.index, mean, color=colors[name], linestyle=dashes[name], linewidth=1.8)
        axis.set(xlabel=xlabel, ylabel=label)
        if "loss" not in key:
            axis.set_ylim(min(-0.02 * axis.get_ylim()[1], -0.1), None)  # from zero, and a line at zero is seen
    handles = [Line2D([], [], color=colors[name], linestyle=dashes[name],
                      label=f"{name}, {len(frames)} seed{'s' * (len(frames) > 1)}")
               for name, frames in shown.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", fontsize="small", ncols=1 if len(handles) < 3 else 2)
    return figure


def attention_map(weights: Any, title: str = "", tokens: Sequence[str] | None = None) -> Figure:
    """One head's attention map (T, T): queries down, keys across, on a square-root scale so that small weights show.

    Positions count from 1; keys that a query cannot see stay white. tokens: the text, beside the queries and keys.
    With one more column than rows, the first is k*.
    """
    values = np.array(weights, dtype=float)
    rows, columns = values.shape
    values[np.triu_indices(rows, 1 + columns - rows, columns)] = np.nan
    side = 4.6 if tokens is None else max(4.6, 0.2 * rows + 1.6)
    figure, axis = plt.subplots(figsize=(side + 0.6, side))
    first = 0.5 - (columns - rows)
    image = axis.imshow(values, cmap=LIGHT, norm=mpl.colors.PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest",
                        extent=(first, rows + 0.5, rows + 0.5, 0.5))  # fmt: skip
    figure.colorbar(image, ax=axis, label=r"$A_{i,k}$", shrink=0.8)
    axis.set(xlabel="key $k$", ylabel="query $i$", title=title)
    if tokens is not None:
        axis.set_xticks(range(1, rows + 1), tokens, rotation=90, fontsize="x-small")
        axis.set_yticks(range(1, rows + 1), tokens, fontsize="x-small")
    elif columns > rows:
        ticks = [0, *range(1, rows + 1, max(1, rows // 4))]
        axis.set_xticks(ticks, ["$k^*$", *map(str, ticks[1:])])
    axis.grid(False)
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


QK_PANELS = {
    "map": (r"$A_{i,j}$", LIGHT),
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


def alpha_heatmaps(alphas: Mapping[str, Any], title: str = "", symbol: str = r"$\alpha_1^{l,h}$") -> Figure | None:
    """Importance scores by block and head of several models side by side, one scale (Figs. 19 to 24, 27).

    alphas: (layers, heads) by the model's name.
    """
    if not alphas:
        return None
    arrays = {name: np.asarray(alpha, dtype=float) for name, alpha in alphas.items()}
    widths = [max(2.4, 0.12 * values.shape[1]) for values in arrays.values()]
    height = max(2.6, *(0.12 * len(values) for values in arrays.values()))
    figure, axes = plt.subplots(1, len(arrays), figsize=(sum(widths) + 1.2, height), squeeze=False, width_ratios=widths)
    for axis, (name, values) in zip(axes[0], arrays.items(), strict=True):
        image = axis.imshow(values, cmap=LIGHT, vmin=0, vmax=1, aspect="auto", interpolation="nearest",
                            extent=(0.5, values.shape[1] + 0.5, len(values) + 0.5, 0.5))  # fmt: skip
        axis.set(title=name, xlabel="head $h$")
        for numbered in (axis.xaxis, axis.yaxis):
            numbered.set_major_locator(mpl.ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(False)
    axes[0, 0].set_ylabel("block $l$")
    figure.colorbar(image, ax=axes[0], label=symbol)
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


def sink_by_position(table: pd.DataFrame, title: str = "", ylabel: str = "") -> Figure | None:
    """Sink_k by position k, a row a run or a text (Table 10 right, Fig. 5 middle); rows without values stay white."""
    if table.isna().all(axis=None):  # also of a table without columns
        return None
    size = (0.55 * table.shape[1] + 3.0, (0.42 if len(table) < 15 else 0.2) * len(table) + 1.3)
    figure, axis = plt.subplots(figsize=size)
    few = len(table) < 15
    sns.heatmap(table.astype(float), vmin=0, vmax=100, cmap=LIGHT, ax=axis, annot=few, fmt=".0f", linewidths=0.5,
                cbar_kws={"label": r"$\mathrm{Sink}_k^\epsilon$ (%)"}, yticklabels=few)  # fmt: skip
    axis.set(xlabel="position $k$", ylabel=ylabel, title=title)
    axis.tick_params(axis="y", rotation=0)
    axis.grid(False)
    for row in np.flatnonzero(table.isna().all(axis=1)):
        axis.text(table.shape[1] / 2, row + 0.5, "not run yet", ha="center", va="center", color=PAPER_COLOR)
    return figure
