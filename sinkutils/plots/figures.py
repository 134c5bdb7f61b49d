"""Two figures that several notebooks share: one dot per head over its block, and attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS

# The colour map of all attention maps: dark means much attention. Its lightness changes evenly, so
# that a map can also be read in grey.
SHADES = "magma_r"
EPSILON = 0.3  # the metric's threshold


def heads_by_block(heads: Any, layers: Sequence[int] | None = None, ax: Axes | None = None) -> Axes:
    """Draw each head as a dot over its block, at the height of its mean attention.

    The dashed line is the metric's threshold. The heads of a block stand side by side in their
    order.
    heads: alpha_1, (layers, heads), as an array or tensor.
    layers: the indices of the blocks, from 0, if some blocks have no attention; None: 0, 1, 2, ..
    """
    alpha = np.asarray(heads, dtype=float)
    require(alpha.ndim == 2, f"alpha must have the shape (layers, heads), got {alpha.shape}")
    if layers is None:
        layers = range(len(alpha))
    blocks = 1 + np.array(layers)
    # The dots of block b lie around x = b, in the middle 70 % of its width: (layers, heads)
    count = alpha.shape[1]
    sideways = (np.arange(count) + 0.5) / count - 0.5  # from -0.5 to 0.5
    across = blocks[:, None] + 0.7 * sideways
    ax = ax or plt.gca()
    ax.scatter(across, alpha, s=16, alpha=0.75, linewidths=0, color=COLORS["first"])
    ax.axhline(EPSILON, color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    ax.set(xlabel="block", ylabel=r"$\alpha_1$", ylim=(-0.02, 1.02))
    ax.set_xlim(blocks.min() - 0.6, blocks.max() + 0.6)  # no tick at a block 0
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return ax


def attention_map(weights: Any, tokens: Sequence[str] | None, ax: Axes) -> Axes:
    """Draw an attention map A_ij, with a row per query and a column per key.

    The colours are on a square-root scale, so that small weights can be seen. The first key is
    framed. Keys after the query are left white.
    weights: (T, T), from 0 to 1. tokens: T labels for both axes; None: the positions.
    """
    squares = np.asarray(weights, dtype=float).copy()  # a copy, because we write into it
    length = len(squares)
    square = squares.shape == (length, length)
    require(square, f"weights must have the shape (T, T), got {squares.shape}")
    squares[np.triu_indices(length, 1)] = np.nan  # keys after the query are not drawn
    square_root = PowerNorm(0.5, vmin=0, vmax=1)
    ax.imshow(squares, cmap=SHADES, norm=square_root, interpolation="nearest")
    frame = Rectangle((-0.5, -0.5), 1, length, fill=False, edgecolor=COLORS["first"], linewidth=1.8)
    ax.add_patch(frame)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=min(8.0, 190 / length))
    ticks = range(length)
    names = tokens or [str(tick + 1) for tick in ticks]
    ax.set_yticks(ticks, names, parse_math=False)  # a token may hold dollars
    ax.set_xticks(ticks, names, rotation=90, parse_math=False)
    ax.xaxis.tick_top()
    return ax


def token_label(token: int, tokenizer: Any = None) -> str:
    """A token's text as a label of at most eight characters; without a tokenizer, its id.

    Line breaks, tabs and blanks are shown by visible characters.
    """
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False)
    text = text.replace("\n", "↵").replace("\t", "→")
    printable = "".join(letter for letter in text if letter.isprintable())
    label = printable.strip() or "␣"
    return label if len(label) <= 8 else label[:7] + "…"
