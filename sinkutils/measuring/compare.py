"""Two models on the same inputs: the paired difference of their attention to one token, with an interval."""

from __future__ import annotations

import numpy as np
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
    for report in (first, second):
        require(k in report.targets, f"alpha_{k} was not measured: measure with targets=({k},)")
    shapes = [tuple(report.alpha.shape) for report in (first, second)]
    alike = shapes[0][0] == shapes[1][0] and first.length == second.length
    require(
        alike,
        f"the reports are of {shapes[0][0]} samples of {first.length} tokens and {shapes[1][0]} of {second.length}",
    )
    require(shapes[0][0] > 1, "an interval needs at least two samples")
    alphas = [report.alpha[:, report.targets.index(k)].double().numpy() for report in (first, second)]
    if by == "model":
        return _rows(alphas[1].mean((1, 2)) - alphas[0].mean((1, 2)))
    require(alphas[0].shape[1] == alphas[1].shape[1], "the models have different numbers of blocks: compare by model")
    if by == "block":
        return _rows(alphas[1].mean(2) - alphas[0].mean(2)).rename_axis("block")
    require(alphas[0].shape == alphas[1].shape, "the models have different numbers of heads: compare by block")
    table = _rows((alphas[1] - alphas[0]).reshape(shapes[0][0], -1))
    blocks, heads = np.indices(alphas[0].shape[1:]).reshape(2, -1) + 1
    return table.set_index(pd.MultiIndex.from_arrays([blocks, heads], names=["block", "head"]))


def _rows(differences: np.ndarray) -> pd.DataFrame:
    """Mean and 95 % interval over the samples, the first axis; rows count from 1."""
    differences = differences.reshape(len(differences), -1)
    mean = differences.mean(axis=0)
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences, axis=0)
    table = pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half, "n": len(differences)})
    return table.set_index(pd.RangeIndex(1, len(table) + 1))
