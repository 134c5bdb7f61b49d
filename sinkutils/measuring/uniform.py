"""Uniform attention, by which attention is measured: its alpha, and the excess over it.

This module needs NumPy alone, so that a table of records is made without PyTorch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from sinkutils.checks import require


def seeing_share(length: int, k: int | str, window: int | None) -> float:
    """The share of the queries k..T that see key k through a window. All queries see "star"."""
    if window is None or k == "star":
        return 1.0
    queries = length - int(k) + 1
    return min(1.0, window / queries)


@lru_cache(maxsize=4096)
def uniform_alpha(
    length: int,
    k: int | str = 1,
    window: int | None = None,
    own_keys: int = 0,
) -> float:
    """alpha_k of uniform causal attention: the mean over i = k..T of 1/i. The floor of the metric.

    window: the number w of keys that a query sees at most. Query i then spreads over its last
        min(i, w) keys.
    own_keys: how many keys of its own, such as k*, the model adds. All queries see them, and "star"
        is one of them.
    """
    first = 1 if k == "star" else int(k)
    queries = np.arange(first, length + 1)
    keys = queries  # the number of text keys that each query sees: query i sees i keys
    if window is not None:
        keys = np.minimum(queries, window)
    if k == "star":
        shares = 1 / (keys + max(1, own_keys))
    else:
        sees = queries - keys < first  # key k is inside the query's window
        shares = sees / (keys + own_keys)
    return float(shares.mean())


def excess(alpha: Any, uniform: Any) -> Any:
    """(alpha - u) / (1 - u), where u is the alpha of uniform attention.

    It is 0 if each query spreads evenly over the keys that it sees, and 1 if all attention is on
    key k. It is also 0 if each query sees only one key. alpha, uniform: numbers, arrays or tensors.
    """
    alone = uniform == 1  # alpha is then 1 as well; adding 1 below gives 0 / 1 instead of 0 / 0
    return (alpha - uniform) / (1 - uniform + alone)


def norm_ratio(norms: Any) -> list[float]:
    """For each row, the norm at the first position over the mean norm at the others (Figs. 7, 8).

    norms: (rows, positions); a row is a layer or a block. The ratio is NaN where all other norms
    are zero, as behind a closed gate. For hidden states the last block is a special case: its
    output predicts the next token, and its norms mean something else.
    Raises ValueError for T = 1.
    """
    rows = np.asarray(norms, dtype=float)
    require(rows.shape[1] > 1, "a norm ratio needs at least two positions")
    first = rows[:, 0]
    others = rows[:, 1:].mean(axis=1)
    others = np.where(others > 0, others, np.nan)
    ratios: list[float] = (first / others).tolist()
    return ratios
