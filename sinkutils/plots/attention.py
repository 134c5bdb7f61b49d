"""Attention maps with the tokens along their edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS

SHADES = "magma_r"  # of all maps: little is light, much is dark; even steps, so that it also reads in grey


def attention_map(
    weights: Any, tokens: Sequence[str] | None = None, sink: int | None = 1, ax: Axes | None = None
) -> Axes:
    """Draw A_ij, queries down and keys across, on a square-root scale from 0 to 1, so that small weights show.

    weights: (T, T), or (T, T + 1) where the first key is k*. Keys that a query cannot see (after itself) stay white.
    tokens: the T names for the edges. sink: the column to frame, counted from 1; None frames none.
    """
    squares = np.array(weights, dtype=float)
    length, columns = squares.shape
    stars = ["k*"] * (columns - length)
    require(columns in (length, length + 1), f"weights must have the shape (T, T) or (T, T + 1), got {squares.shape}")
    squares[~np.tri(length, columns, len(stars), dtype=bool)] = np.nan
    ax = ax or plt.gca()
    ax.imshow(squares, cmap=SHADES, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=min(8.0, 190 / columns))
    if tokens is None:
        ax.set(xlabel="key", ylabel="query")
    else:
        ax.set_yticks(range(length), tokens, parse_math=False)  # a token may hold dollars
        ax.set_xticks(range(columns), [*stars, *tokens], rotation=90, parse_math=False)
        ax.xaxis.tick_top()
    if sink is not None:
        first_query = max(0, sink - 1 - len(stars))
        color = COLORS["star"] if stars and sink == 1 else COLORS["first"]
        edge = (sink - 1.5, first_query - 0.5)
        ax.add_patch(Rectangle(edge, 1, length - first_query, fill=False, edgecolor=color, linewidth=1.8))
    return ax


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
