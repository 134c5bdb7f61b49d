"""Attention maps with the tokens along their edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS

SHADES = "magma_r"  # of all maps: little is light, much is dark; even steps, so that it also reads in grey


def attention_map(weights: Any, tokens: Sequence[str] | None, ax: Axes) -> Axes:
    """Draw A_ij, queries down and keys across, on a square-root scale from 0 to 1, so that small weights show.

    weights: (T, T); keys that a query cannot see (after itself) stay white, and the first is framed. tokens: the T
    names for the edges; None: their positions.
    """
    squares = np.array(weights, dtype=float)
    length = len(squares)
    require(squares.shape == (length, length), f"weights must have the shape (T, T), got {squares.shape}")
    squares[np.triu_indices(length, 1)] = np.nan
    ax.imshow(squares, cmap=SHADES, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    ax.add_patch(Rectangle((-0.5, -0.5), 1, length, fill=False, edgecolor=COLORS["first"], linewidth=1.8))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=min(8.0, 190 / length))
    names = tokens or [str(position) for position in range(1, length + 1)]
    ax.set_yticks(range(length), names, parse_math=False)  # a token may hold dollars
    ax.set_xticks(range(length), names, rotation=90, parse_math=False)
    ax.xaxis.tick_top()
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
