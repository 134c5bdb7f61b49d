"""A forest plot: differences with their intervals."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkutils.checks import require
from sinkutils.plots.theme import COLORS


def forest(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw paired differences, one per row, the first on top: a dot at `mean` and a line from `low` to `high`.

    A dot is filled where its interval leaves out zero. The frame's index names the rows.
    Raises ValueError for an empty frame.
    """
    require(len(frame) > 0, "there is nothing to draw: the frame has no rows")
    ax = ax or plt.gca()
    color = COLORS["other"]
    heights = np.arange(len(frame))
    ax.axvline(0, color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    ax.hlines(heights, frame["low"], frame["high"], color=color, linewidth=1.6)
    clear = (frame["low"] > 0) | (frame["high"] < 0)
    faces = [color if leaves_out_zero else "white" for leaves_out_zero in clear]
    ax.scatter(frame["mean"], heights, s=36, facecolors=faces, edgecolors=color, linewidths=1.5, zorder=3)
    ax.set_yticks(heights, [str(name) for name in frame.index])
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(False, axis="y")
    return ax
