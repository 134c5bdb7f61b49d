"""Attention maps with the tokens along their edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS

SHADES = "magma_r"  # of all maps: little is light, much is dark; even steps, so that it also reads in grey


def attention_map(
    weights: Any, tokens: Sequence[str] | None = None, sink: int | None = 1, star: bool = False, ax: Axes | None = None
) -> Axes:
    """Draw A_ij, queries down and keys across, on a square-root scale from 0 to 1, so that small weights show.

    weights: (T, T), or (T, T + 1) with star=True: k* is the first column then. Keys that a query cannot see (after
    itself) stay white. tokens: the T names for the edges. sink: the key, counted from 1, whose column is framed; with
    star=True that of k* is framed instead.
    """
    squares = np.array(weights, dtype=float)
    extra = 1 if star else 0
    good = squares.ndim == 2 and squares.shape[1] == len(squares) + extra
    require(good, f"weights must have the shape (T, T), or (T, T + 1) with star=True; got {squares.shape}")
    length, columns = squares.shape
    require(tokens is None or len(tokens) == length, f"tokens must be {length} names, one per query")
    squares[~np.tri(length, columns, extra, dtype=bool)] = np.nan
    ax = ax or plt.gca()
    ax.imshow(squares, cmap=SHADES, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if tokens is None:
        ax.set(xlabel="key", ylabel="query")
    else:
        size = min(8.0, 190 / columns)
        ax.set_yticks(range(length), tokens, fontsize=size)
        ax.set_xticks(range(columns), [*(["k*"] * extra), *tokens], fontsize=size, rotation=90)
        ax.xaxis.tick_top()
    if sink or star:
        column = 0 if star else int(sink or 1) - 1
        top = 0 if star else column  # the first query that sees the key
        frame = Rectangle((column - 0.5, top - 0.5), 1, length - top, fill=False, linewidth=1.8)
        frame.set_edgecolor(COLORS["star"] if star else COLORS["first"])
        ax.add_patch(frame)
    return ax


def attention_maps(maps: Mapping[str, Any], tokens: Sequence[str] | None = None, sink: int | None = 1) -> Figure:
    """Draw several maps of one text side by side under their titles, on one colour scale.

    maps: by title, as of `attention_map`; one with a column more than rows has k* first.
    """
    require(len(maps) > 0, "there is nothing to draw: no maps were given")
    figure, axes = plt.subplots(1, len(maps), figsize=(3.6 * len(maps) + 0.6, 3.9), squeeze=False)
    for ax, (title, weights) in zip(axes[0], maps.items(), strict=True):
        shape = np.shape(weights)
        attention_map(weights, tokens, sink, star=shape[-1] == shape[0] + 1, ax=ax)
        ax.set_title(title)
    figure.colorbar(axes[0, 0].images[0], ax=axes[0], shrink=0.75, label="attention")
    return figure


def token_label(token: int, tokenizer: Any = None) -> str:
    """A token as it is written, its blanks made visible, at most eight letters; its id without a tokenizer."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False)
    text = text.replace("\n", "↵").replace("\t", "→")
    text = "".join(letter for letter in text if letter.isprintable()).strip()
    if not text:
        return "␣"
    return text if len(text) <= 8 else text[:7] + "…"
