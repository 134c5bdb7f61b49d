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
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from sinkutils.paths import FIGURES, RENDERED
from sinkutils.showing.pages import WIDTH, bold, put

COMMITTED = "SINKUTILS_COMMITTED_FIGURES"  # set in the kernels of `run --in-place`

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
    sizes = {"figure.figsize": (7.0, 3.6), "figure.dpi": 90, "savefig.dpi": 144, "axes.titlesize": "medium"}
    layout = {"figure.constrained_layout.use": True, "legend.frameon": False}
    sns.set_theme(style="whitegrid", palette="colorblind", font_scale=0.9, rc=sizes | layout)


def save(figure: Figure | None, name: str) -> Path | None:
    """Save a figure as PNG and SVG, the same bytes for the same picture; nothing where there is none. Returns the PNG.

    They go to figures/ where `run --in-place` makes what is committed (the PNG: git ignores the SVG, which is as large
    again), else to rendered/figures, which git ignores.
    """
    if figure is None:
        return None
    folder = FIGURES if os.environ.get(COMMITTED) else RENDERED / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(png(figure))
    with mpl.rc_context({"svg.hashsalt": "sinkutils", "svg.fonttype": "none"}):  # text as text: a quarter of the size
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return folder / f"{name}.png"


def png(figure: Figure) -> bytes:
    """A figure as PNG in 256 colours of its own, a third of the bytes: all that lines and maps need."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    few = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(small, format="png", optimize=True)
    return small.getvalue()


def show(figure: Figure | None, caption: str, alt: str, name: str = "") -> None:
    """Show a figure with its caption below it and a text for those who cannot see it; saved under `name`, if any.

    caption: its first sentence says what there is to see; **words** between stars are bold. In a page it is one HTML
    figure, which JupyterLab and the book show alike; as text, the two sentences. No figure (no records): one line.
    """
    if figure is None:
        print("Nothing to draw: none of these runs is recorded and trained yet.")
        return
    saved = save(figure, name) if name else None
    picture = saved.read_bytes() if saved else png(figure)
    plt.close(figure)
    width, data = round(90 * figure.get_figwidth()), base64.b64encode(picture).decode()
    image = f'<img alt="{html.escape(alt)}" width="{width}" style="max-width:100%;background:white"'
    page = (
        f'<figure style="margin:0.5em 0">{image} src="data:image/png;base64,{data}">'
        f'<figcaption style="max-width:{max(width, 560)}px">{bold(caption)}</figcaption></figure>'
    )
    text = f"[figure: {alt}]\n{caption}".replace("**", "")
    put("\n".join(textwrap.fill(part, WIDTH) for part in text.split("\n")), page)


def colors_of(labels: Sequence[str], base: str | None = None, ordered: bool = False) -> dict[str, Any]:
    """A colour a label: the base's for `base`; steps of one quantity from light to dark, others well apart."""
    step = re.compile(r"(?<![A-Za-z])[\d=]")  # a setting: a number that is no part of a name
    steps = [label for label in labels if ordered and label != base and step.search(label)]
    colors: dict[str, Any] = dict(zip(steps, sns.color_palette("flare", len(steps)), strict=True))
    others = [label for label in labels if label != base and label not in colors]
    colors |= dict(zip(others, cycle(OTHER_COLORS[2:] if ordered else OTHER_COLORS), strict=False))
    return colors | {label: BASE_COLOR for label in labels if label == base}


def whole_numbers(*axes: Axis) -> None:
    """Ticks of blocks, heads and steps: no half ones."""
    for axis in axes:
        axis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, min_n_ticks=1))


def block_axis(*axes: Axes) -> None:
    """Blocks along the x axis."""
    for axis in axes:
        axis.set_xlabel("block $l$")
        whole_numbers(axis.xaxis)


def along_training(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    keys: Mapping[str, str],
    base: str | None = None,
    ordered: bool = False,
    xlabel: str = "optimisation step",
) -> Figure | None:
    """Curves along training, a panel for each of `keys` (its label), a colour and a dash a run: the mean over its
    seeds thick, each seed thin (Figs. 4 middle and right, 28, 30); no line where a run lacks a key.

    runs: by label, the curve of each seed. base, ordered: as of `colors_of`.
    """
    shown = {label: [pd.DataFrame(curve) for curve in seeds if curve] for label, seeds in runs.items()}
    shown = {label: frames for label, frames in shown.items() if frames}
    if not shown:
        return None
    colors = colors_of(list(shown), base, ordered)
    dashes: dict[str, Any] = dict(zip(shown, cycle(DASHES), strict=False))
    dashes |= {name: "-" for name in shown if name == base or len(shown) == 1}
    size = (max(6.0, 4.0 * len(keys)), 3.0 + 0.12 * len(shown))
    figure, axes = plt.subplots(1, len(keys), figsize=size, squeeze=False)
    for axis, (key, label) in zip(axes[0], keys.items(), strict=True):
        for name, frames in shown.items():
            lines = [frame.set_index("step")[key].astype(float) for frame in frames if key in frame]
            for line in lines if len(lines) > 1 else ():
                axis.plot(line, color=colors[name], linewidth=0.6, alpha=0.5)
            if lines:
                mean = pd.concat(lines, axis=1).mean(axis=1)
                axis.plot(mean, color=colors[name], linestyle=dashes[name], linewidth=1.8)
        axis.set(xlabel=xlabel, ylabel=label)
        if "loss" not in key:
            top = max(axis.get_ylim()[1], 5.0 if "sink" in key else 0.0)  # of percent, so that no sink at all looks it
            axis.set_ylim(min(-0.02 * top, -0.1), top)  # from zero, and a line at zero is seen
    handles = [Line2D([], [], color=colors[name], linestyle=dashes[name]) for name in shown]
    words = [f"{name}, {len(frames)} seed{'s' * (len(frames) > 1)}" for name, frames in shown.items()]
    figure.legend(handles, words, loc="outside lower center", fontsize="small", ncols=1 if len(words) < 3 else 2)
    return figure


def by_block(
    lines: Mapping[str, Sequence[Any] | str],
    ylabel: str,
    base: str | None = None,
    ordered: bool = False,
    level: float | None = None,
) -> Figure | None:
    """A quantity by block, a line a label (Figs. 7, 8, 29); level: where to draw a dotted line.

    lines: (blocks,), or (seeds, blocks), whose mean is thick and each seed thin; a text in their place, such as "not
    run yet", stands in the legend. base, ordered: as of `colors_of`.
    """
    if all(isinstance(values, str) for values in lines.values()):
        return None
    figure, axis = plt.subplots(figsize=(7.6, 3.4))
    colors = colors_of(list(lines), base, ordered)
    for mark, (label, values) in zip(cycle(MARKS), lines.items(), strict=False):
        if isinstance(values, str):
            axis.plot([], [], " ", label=f"{label}: {values}")
            continue
        seeds = np.atleast_2d(values)
        blocks = np.arange(1, seeds.shape[1] + 1)
        if len(seeds) > 1:
            axis.plot(blocks, seeds.T, color=colors[label], linewidth=0.6, alpha=0.5)
        axis.plot(blocks, seeds.mean(axis=0), marker=mark, label=label, color=colors[label])
    if level is not None:
        axis.axhline(level, color=PAPER_COLOR, linewidth=1, linestyle=":")
    axis.set(ylabel=ylabel, ylim=(0, None))
    block_axis(axis)
    figure.legend(loc="outside right center", fontsize="small")
    return figure


def draw_map(axis: Axes, values: Any, norm: Any = None, cmap: str = LIGHT, causal: bool = True, **options: Any) -> Any:
    """A matrix as squares, rows and columns counted from 1; causal: keys that a query cannot see stay white."""
    squares = np.array(values, dtype=float)
    rows, columns = squares.shape
    if causal:
        squares[np.triu_indices(rows, 1, columns)] = np.nan
    axis.grid(False)
    options |= {"norm": norm or mpl.colors.Normalize(0, 1), "extent": (0.5, columns + 0.5, rows + 0.5, 0.5)}
    return axis.imshow(squares, cmap=cmap, interpolation="nearest", **options)


def attention_map(weights: Any, window: int | None = None) -> Figure:
    """One head's attention map (T, T): queries down, keys across, on a square-root scale so that small weights show.

    window: the keys that a query sees; those before stay white.
    """
    figure, axis = plt.subplots(figsize=(5.2, 4.6))
    squares = np.array(weights, dtype=float)
    if window is not None:
        squares[np.tril_indices(len(squares), -window)] = np.nan
    image = draw_map(axis, squares, mpl.colors.PowerNorm(0.5, vmin=0, vmax=1))
    figure.colorbar(image, ax=axis, label="$A_{ij}$", shrink=0.8)
    axis.set(xlabel="key $j$", ylabel="query $i$")
    return figure


def alpha_heatmaps(alphas: Mapping[str, Any]) -> Figure | None:
    """alpha_1 (layers, heads) of several models side by side, by their names, on one scale (Figs. 19 to 24, 27)."""
    if not alphas:
        return None
    layers, heads = zip(*(np.shape(alpha) for alpha in alphas.values()), strict=True)
    widths = [max(2.4, 0.12 * number) for number in heads]
    size = (sum(widths) + 1.2, max(2.6, 0.12 * max(layers)))
    figure, axes = plt.subplots(1, len(alphas), figsize=size, squeeze=False, width_ratios=widths)
    for axis, (name, alpha) in zip(axes[0], alphas.items(), strict=True):
        image = draw_map(axis, alpha, causal=False, aspect="auto")
        axis.set(xlabel="head $h$")
        axis.set_title(textwrap.fill(name, 26), fontsize="small")
        whole_numbers(axis.xaxis, axis.yaxis)
    axes[0, 0].set_ylabel("block $l$")
    figure.colorbar(image, ax=axes[0], label=r"$\alpha_1^{l,h}$")
    return figure


def sink_by_position(table: pd.DataFrame, ylabel: str = "") -> Figure | None:
    """Sink_k by position k, a row a run or a text (Table 10 right, Fig. 5 middle); rows without values stay white."""
    if table.isna().all(axis=None):  # also of a table without columns
        return None
    few = len(table) < 15
    figure, axis = plt.subplots(figsize=(0.55 * table.shape[1] + 3.0, (0.42 if few else 0.2) * len(table) + 1.3))
    scale = {"vmin": 0, "vmax": 100, "cmap": LIGHT, "cbar_kws": {"label": r"$\mathrm{Sink}_k^\epsilon$ (%)"}}
    sns.heatmap(table.astype(float), ax=axis, annot=few, fmt=".0f", linewidths=0.5, yticklabels=few, **scale)
    axis.set(xlabel="position $k$", ylabel=ylabel)
    axis.tick_params(axis="y", rotation=0)
    axis.grid(False)
    for row in np.flatnonzero(table.isna().all(axis=1)):
        axis.text(table.shape[1] / 2, row + 0.5, "not run yet", ha="center", va="center", color=PAPER_COLOR)
    return figure
