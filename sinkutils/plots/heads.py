"""Every head as a dot over its block."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS


def heads_by_block(
    heads: Any,
    y: str = "alpha_1",
    level: float | None = 0.3,
    color: str | None = None,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a dot per head at the height of its mean attention, block by block; a dashed line at `level`, the metric's
    epsilon.

    heads: a frame with columns block and y, such as `su.heads`, or alpha itself, (layers, heads), as an array or
    tensor. Dots of one block are spread sideways in the order in which they come.
    """
    if isinstance(heads, pd.DataFrame):
        rows = heads[["block", y]].dropna()
    else:
        alpha = np.asarray(heads, dtype=float)
        require(alpha.ndim == 2, f"alpha must have the shape (layers, heads), got {alpha.shape}")
        blocks = np.repeat(np.arange(1, len(alpha) + 1), alpha.shape[1])
        rows = pd.DataFrame({"block": blocks, y: alpha.ravel()})
    ax = ax or plt.gca()
    nth, count = rows.groupby("block").cumcount(), rows.groupby("block")["block"].transform("count")
    across = rows["block"] + 0.7 * ((nth + 0.5) / count - 0.5)
    ax.scatter(across, rows[y], s=16, alpha=0.75, linewidths=0, color=color or COLORS["first"], label=label)
    if level is not None:
        ax.axhline(level, color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    ax.set(xlabel="block", ylabel=r"$\alpha_1$" if y == "alpha_1" else y, ylim=(-0.02, 1.02))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return ax
