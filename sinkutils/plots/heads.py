"""Every head as a dot over its block."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS

EPSILON = 0.3


def heads_by_block(heads: Any, color: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw a dot per head at the height of its mean attention, block by block; a dashed line at the metric's epsilon.

    heads: alpha_1, (layers, heads), as an array or tensor. Dots of one block are spread sideways in their order.
    """
    alpha = np.asarray(heads, dtype=float)
    require(alpha.ndim == 2, f"alpha must have the shape (layers, heads), got {alpha.shape}")
    blocks, nth = np.indices(alpha.shape)
    across = blocks + 1 + 0.7 * ((nth + 0.5) / alpha.shape[1] - 0.5)
    ax = ax or plt.gca()
    ax.scatter(across, alpha, s=16, alpha=0.75, linewidths=0, color=color or COLORS["first"])
    ax.axhline(EPSILON, color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    ax.set(xlabel="block", ylabel=r"$\alpha_1$", ylim=(-0.02, 1.02))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return ax
