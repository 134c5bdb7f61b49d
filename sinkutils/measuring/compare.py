"""Two models on the same inputs: the paired difference of their attention to one token, with an interval."""

from __future__ import annotations

import pandas as pd
from scipy import stats

from sinkutils.checks import choice, require
from sinkutils.measuring.report import Report


def compare(first: Report, second: Report, k: int = 1, by: str = "block") -> pd.DataFrame:
    """second - first in alpha_k, paired over the samples: mean, low and high (95 % by Student's t), n.

    by: "model" (one row), "block" (one per block, counted from 1), or "head". The first two are means over heads.
    Raises ValueError where the reports are not of the same number of samples of one length, k was not measured, or
    blocks or heads do not correspond. Whether both saw the same texts is the caller's to know: two tokenizers cut one
    text into different windows, and then nothing is paired.
    """
    choice("by", by, ("model", "block", "head"))
    alphas = [report.of(k).double().numpy() for report in (first, second)]  # (samples, layers, heads)
    one, other = (f"{report.samples} samples of {report.length} tokens" for report in (first, second))
    require(one == other, f"the reports are of {one} and {other}")
    require(first.samples > 1, "an interval needs at least two samples")
    if by != "head":
        alphas = [alpha.mean(axis=2 if by == "block" else (1, 2), keepdims=True) for alpha in alphas]
    before, after = alphas
    require(
        before.shape == after.shape,
        f"the models have different numbers of blocks or heads: they cannot be compared by {by}",
    )
    differences = after - before
    low, high = stats.ttest_1samp(differences, 0).confidence_interval()
    columns = {"mean": differences.mean(axis=0), "low": low, "high": high}
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()}).assign(n=len(differences))
    blocks, heads = (range(1, count + 1) for count in differences.shape[1:])
    table.index = pd.MultiIndex.from_product([blocks, heads], names=["block", "head"])
    return table if by == "head" else table.droplevel("head")
