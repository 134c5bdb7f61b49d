"""Comparing two models on the same inputs: the difference in their attention to one token."""

from __future__ import annotations

import warnings

import pandas as pd
from scipy import stats

from sinkutils.checks import choice, instance, require
from sinkutils.measuring.report import Report

AVERAGED = {"model": (1, 2), "block": (2,), "head": ()}  # axes of alpha, (samples, layers, heads)


def compare(first: Report, second: Report, k: int = 1, by: str = "block") -> pd.DataFrame:
    """The difference second - first in alpha_k, with a 95 % confidence interval (Student's t).

    Columns: mean, low, high, and the number n of samples.
    by: "model" gives one row, "block" one row per block (counted from 1), "head" one per head. The
        first two average over heads.

    If both reports are of the same token ids, the differences are paired by sample. Otherwise a
    warning says so, and the interval is Welch's for two independent samples. Two tokenizers, for
    instance, cut the same text into different windows.
    Raises ValueError if the reports have different lengths, if k was not measured, or if the two
    models' blocks or heads do not correspond.
    """
    instance("first", first, Report)
    instance("second", second, Report)
    choice("by", by, AVERAGED)
    lengths = f"the reports are of {first.length} tokens and {second.length}"
    require(first.length == second.length, lengths)
    require(min(first.samples, second.samples) > 1, "an interval needs at least two samples")
    # alpha_k of each text in float64, (samples, layers or 1, heads or 1)
    alphas = (report.of(k).double().numpy() for report in (first, second))
    before, after = (alpha.mean(AVERAGED[by], keepdims=True) for alpha in alphas)
    same = {
        "attention in different blocks": by == "model" or first.layers == second.layers,
        "different numbers of heads": before.shape[2] == after.shape[2],
    }
    for what, holds in same.items():
        require(holds, f"the models have {what}: they cannot be compared by {by}")
    # On the same text, the difference of two models varies less than alpha varies between texts. So
    # the paired interval is the narrower one.
    if first.digest and first.digest == second.digest:  # it is empty if the ids are not known
        interval = stats.ttest_1samp(after - before, 0).confidence_interval()
    else:
        warnings.warn("the reports are of different token ids: nothing is paired", stacklevel=2)
        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval()
    # mean, low and high: (layers or 1, heads or 1)
    mean = after.mean(axis=0) - before.mean(axis=0)
    blocks = [1] if by == "model" else [layer + 1 for layer in first.layers]
    heads = range(1, mean.shape[1] + 1)
    index = pd.MultiIndex.from_product([blocks, heads], names=["block", "head"])
    columns = {"mean": mean.ravel(), "low": interval.low.ravel(), "high": interval.high.ravel()}
    table = pd.DataFrame(columns | {"n": min(first.samples, second.samples)}, index=index)
    return table if by == "head" else table.droplevel("head")
