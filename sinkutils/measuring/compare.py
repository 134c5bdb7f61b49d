"""Two models on the same inputs: the difference of their
attention to one token, with an interval.
"""

from __future__ import annotations

import warnings

import pandas as pd
from scipy import stats

from sinkutils.checks import choice, instance, require
from sinkutils.measuring.report import Report

# The axes of alpha (samples, layers, heads) that are averaged.
BY: dict[str, tuple[int, ...]] = {"model": (1, 2), "block": (2,), "head": ()}


def compare(first: Report, second: Report, k: int = 1, by: str = "block") -> pd.DataFrame:
    """second - first in alpha_k: mean, low and high (95 % by Student's t), n samples.

    by: "model" (one row), "block" (one per block, counted from 1), or "head". The first two are
    means over heads. Differences are paired over the samples where both reports are of the same
    token ids. Else a warning says so, and the interval is Welch's for two independent samples: two
    tokenizers, for instance, cut one text into different windows.
    Raises ValueError where the reports are of another length, k was not measured, or blocks or
    heads do not correspond.
    """
    instance("first", first, Report)
    instance("second", second, Report)
    choice("by", by, BY)
    sizes = [f"{report.samples} samples of {report.length} tokens" for report in (first, second)]
    paired = first.digest == second.digest
    same = sizes[0] == sizes[1] if paired else first.length == second.length
    require(same, f"the reports are of {sizes[0]} and {sizes[1]}")
    require(min(first.samples, second.samples) > 1, "an interval needs at least two samples")
    before, after = (report.of(k).double().numpy() for report in (first, second))
    if BY[by]:
        before, after = (alpha.mean(axis=BY[by], keepdims=True) for alpha in (before, after))
    require(
        before.shape[1:] == after.shape[1:],
        f"the models have different numbers of blocks or heads: they cannot be compared by {by}",
    )
    if paired:
        interval = stats.ttest_1samp(after - before, 0).confidence_interval()
    else:
        warnings.warn("the reports are of different token ids: nothing is paired", stacklevel=2)
        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval()
    blocks, heads = (range(1, count + 1) for count in before.shape[1:])
    table = pd.DataFrame(
        {
            "mean": (after.mean(axis=0) - before.mean(axis=0)).ravel(),
            "low": interval.low.ravel(),
            "high": interval.high.ravel(),
            "n": min(len(before), len(after)),
        },
        index=pd.MultiIndex.from_product([blocks, heads], names=["block", "head"]),
    )
    return table if by == "head" else table.droplevel("head")
