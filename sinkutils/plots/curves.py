"""Training curves: a line per seed, their mean thick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from sinkutils.checks import require


def training_curves(
    frame: pd.DataFrame,
    y: str,
    by: str = "experiment",
    labels: Mapping[Any, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw column `y` along training: one thin line per seed, and for each value of `by` the mean over its seeds thick.

    frame: a row per run and evaluation, such as `su.curves`. labels: what the legend calls the values of `by`; if
    given, only those are drawn, in this order. The mean ends where the first seed ends.
    Raises ValueError where nothing is left to draw.
    """
    if labels is None:
        labels = {value: str(value) for value in frame[by].unique()}
    rows = frame[frame[by].isin(list(labels))].dropna(subset=["step", y])
    require(len(rows) > 0, f"there is nothing to draw: no row of {', '.join(labels.values())} has a {y}")
    ax = ax or plt.gca()
    for value, label in labels.items():
        own = rows[rows[by] == value]
        if own.empty:
            continue
        seeds = own.pivot_table(index="step", columns="seed", values=y)
        count = seeds.shape[1]
        mean = seeds.dropna().mean(axis=1)
        words = f"{label}, {count} seed{'s' if count > 1 else ''}"
        (thick,) = ax.plot(mean.index, mean, linewidth=2.2, label=words)
        for name in seeds if count > 1 else ():
            line = seeds[name].dropna()
            ax.plot(line.index, line, linewidth=0.7, alpha=0.5, color=thick.get_color())
    ax.set(xlabel="step", ylabel=y)
    ax.legend()
    return ax
