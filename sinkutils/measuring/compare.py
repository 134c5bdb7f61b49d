"""Comparing two models on the same inputs: the difference in their attention to one token."""

from __future__ import annotations

import warnings

import numpy as np
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
    require(
        first.length == second.length,
        f"the reports are of {first.length} tokens and {second.length}",
    )
    require(min(first.samples, second.samples) > 1, "an interval needs at least two samples")
    before = _alpha(first, k, by)
    after = _alpha(second, k, by)
    require(
        by == "model" or first.layers == second.layers,
        f"the models have attention in different blocks: they cannot be compared by {by}",
    )
    require(
        before.shape[2] == after.shape[2],
        f"the models have different numbers of heads: they cannot be compared by {by}",
    )
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
    table = pd.DataFrame(index=index)
    table["mean"] = mean.ravel()
    table["low"] = interval.low.ravel()
    table["high"] = interval.high.ravel()
    table["n"] = min(first.samples, second.samples)
    return table if by == "head" else table.droplevel("head")


def _alpha(report: Report, k: int, by: str) -> np.ndarray:
    """alpha_k of each text in float64, (samples, layers or 1, heads or 1)."""
    alpha = report.of(k).double().numpy()
    averaged: np.ndarray = alpha.mean(AVERAGED[by], keepdims=True)
    return averaged
