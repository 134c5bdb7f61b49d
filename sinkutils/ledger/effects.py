"""The ledger's statistics: levels and paired differences over seeds, with their 95 % intervals.

A level is the mean of a quantity over an experiment's seeds, with the t interval of those seeds. An effect is the mean
of the paired differences of two experiments, seed by seed. Three seeds say little about their own spread, so the
variance of a paired difference is pooled over all experiments that change the base (least squares, a mean for each):
over the paper's own, and apart from them over those of later papers, which scatter more in some quantities. Not all
scatter alike within either; cards say where a setting's own seeds would not tell. All of them share the base's seeds,
so the part of it that a seed has in common (a second fit, with a mean for each seed too) counts with as many degrees of
freedom as there are seeds, less one, the rest with its own (Satterthwaite).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from sinkutils.ledger.results import QUANTITIES, Results, results
from sinkutils.study.experiments import AFTER_PAPER, EXPERIMENTS, experiment

LEVEL = 0.95


@dataclass(frozen=True)
class Effect:
    """A mean over seeds with its 95 % interval: a level, or the paired difference of two experiments."""

    mean: float
    low: float
    high: float
    seeds: int
    error: float  # the standard error
    freedom: float  # degrees of freedom of the t interval

    def __str__(self) -> str:
        return f"{self.mean:+.3f} (95 %: {self.low:+.3f} to {self.high:+.3f}, {self.seeds} seeds)"

    def p_above(self, margin: float = 0.0) -> float:
        """The one-sided p-value of "not above the margin"."""
        from scipy import stats

        if not self.error > 0:
            return float(self.mean <= margin)
        return float(stats.t.sf((self.mean - margin) / self.error, self.freedom))

    def p_below(self, margin: float = 0.0) -> float:
        """The one-sided p-value of "not below the margin"."""
        return replace(self, mean=-self.mean).p_above(-margin)


def _effect(mean: float, seeds: int, error: float, freedom: float) -> Effect:
    from scipy import stats

    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error if error > 0 else 0.0
    return Effect(mean, mean - half, mean + half, seeds, error, freedom)


def level(values: pd.Series, log: bool = False) -> Effect:
    """The mean of at least two seeds' values with their own t interval; geometric where log is true.

    With log, mean and interval are on the scale of the values, error and freedom on the log scale.
    """
    from scipy import stats

    numbers = np.log(values) if log else values
    estimate = _effect(float(numbers.mean()), len(numbers), float(stats.sem(numbers)), len(numbers) - 1)
    if not log:
        return estimate
    mean, low, high = np.exp([estimate.mean, estimate.low, estimate.high]).tolist()
    return replace(estimate, mean=mean, low=low, high=high)


def effect(
    name: str, reference: str, preset: str = "laptop", key: str = "excess_1", runs: Path | str | None = None
) -> Effect:
    """The mean over paired seeds of one experiment's quantity less the other's, with its 95 % interval.

    name, reference: experiments, "base" the preset's; key: of `results.QUANTITIES`, by default mean excess alpha_1. The
    variance is pooled over the experiments that change the base: the paper's own, or those of later papers where one of
    the two is theirs. Quantities that are ratios are compared as their logarithms.
    Raises ValueError for an unknown key or preset, and where the two share fewer than two seeds.
    """
    if key not in QUANTITIES:
        raise ValueError(f"key must be one of {', '.join(QUANTITIES)}; got {key!r}")
    estimate = paired(results(preset, runs), name, reference, key)
    if estimate is None:
        raise ValueError(f"{name} and {reference} share fewer than two seeds at preset {preset!r}: train more of them")
    return estimate


def paired(ours: Results, name: str, reference: str, key: str) -> Effect | None:
    """`effect` within results that are read; None where fewer than two seeds are shared."""
    differences = each_seed(ours, name, reference, key)
    if len(differences) < 2:
        return None
    later = any(experiment(label).section == AFTER_PAPER for label in map(ours.label, (name, reference)))
    pooled = None if ours.alone else _pooled(ours, key, later)
    variance, freedom = pooled or (float(differences.var()), float(len(differences) - 1))
    return _effect(float(differences.mean()), len(differences), (variance / len(differences)) ** 0.5, freedom)


def each_seed(ours: Results, name: str, reference: str, key: str) -> pd.Series:
    """The differences of the seeds that two experiments share; of a ratio's logarithms."""
    a, b = ours.values(name, key), ours.values(reference, key)
    if QUANTITIES[key].log:
        a, b = np.log(a), np.log(b)
    return (a - b).dropna()


def _pooled(ours: Results, key: str, later: bool = False) -> tuple[float, float] | None:
    """Variance and degrees of freedom of one paired difference from the base; None where there is nothing to pool.

    later: of variants of later papers, else of the paper's own.
    """
    from statsmodels.regression.linear_model import OLS

    kept = (key, f"pooled, {later=}")
    if kept in ours.cache:
        return ours.cache[kept]
    rows = [row for row in EXPERIMENTS if row.base and (row.section == AFTER_PAPER) == later]
    changed = {ours.label(row.name) for row in rows} - {ours.label("base")}
    by_name = {name: each_seed(ours, name, "base", key) for name in sorted(changed)}
    several = {name: values for name, values in by_name.items() if len(values) > 1}
    pooled = None
    if several:
        stacked = pd.concat(several)
        groups, seeds = (pd.get_dummies(stacked.index.get_level_values(i), dtype=float).to_numpy() for i in (0, 1))
        fit = OLS(stacked.to_numpy(), groups).fit()
        variance, freedom = float(fit.mse_resid), float(fit.df_resid)
        both = OLS(stacked.to_numpy(), np.hstack([groups, seeds[:, 1:]])).fit()
        if both.df_resid > 0 and both.mse_resid < variance:  # else seeds share nothing
            shared = variance - both.mse_resid
            counts = seeds.sum(axis=0)  # as many seeds as weigh equally, less one, are the shared part's freedom
            parts = shared**2 / (counts.sum() ** 2 / (counts**2).sum() - 1) + both.mse_resid**2 / both.df_resid
            freedom = float(variance**2 / parts)
        pooled = variance, freedom
    ours.cache[kept] = pooled
    return pooled
