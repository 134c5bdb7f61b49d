"""The ledger's statistics: levels and paired differences over seeds, with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from sinkutils.ledger.readings import Readings, label
from sinkutils.study.experiments import AFTER_PAPER, experiment


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error: a level, or a paired difference; of a ratio, of its logarithm."""

    mean: float
    error: float
    freedom: float  # degrees of freedom of its t interval
    seeds: int

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        return float(stdtrit(self.freedom, 0.975)) * self.error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def p_above(self, bar: float = 0.0) -> float:
        """The one-sided p-value of "not above the bar"."""
        if self.error == 0:
            return float(self.mean <= bar)
        return float(stdtr(self.freedom, (bar - self.mean) / self.error))

    def p_below(self, bar: float = 0.0) -> float:
        """The one-sided p-value of "not below the bar"."""
        if self.error == 0:
            return float(self.mean >= bar)
        return float(stdtr(self.freedom, (self.mean - bar) / self.error))


def level(ours: Readings, name: str, quantity: str, fresh: bool = False) -> Estimate:
    """The mean of an experiment's seeds, of which there are at least two, with their own t interval."""
    values = list(ours.values(name, quantity, fresh).values())
    return Estimate(
        float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5), len(values) - 1, len(values)
    )


def difference(ours: Readings, name: str, other: str, quantity: str, fresh: bool = False) -> Estimate | None:
    """The mean paired difference, its variance pooled over all experiments that change the base."""
    values = list(ours.differences(name, other, quantity, fresh).values())
    if len(values) < 2:
        return None
    later = any(experiment(label(one, ours.preset)).section == AFTER_PAPER for one in (name, other))
    variance, freedom = _pooled(ours, quantity, later) or (float(np.var(values, ddof=1)), len(values) - 1)
    return Estimate(float(np.mean(values)), (variance / len(values)) ** 0.5, freedom, len(values))


def _pooled(ours: Readings, quantity: str, later: bool) -> tuple[float, float] | None:
    """Variance and degrees of freedom of one paired difference; the seeds' shared part has their freedom."""
    rows = []
    for group, name in enumerate(ours.changes_of_the_base()):
        values = ours.differences(name, "base", quantity)
        if (experiment(name).section == AFTER_PAPER) == later and len(values) > 1:
            rows += [(group, seed, value) for seed, value in values.items()]
    if not rows:
        return None
    names, seeds, values = (np.array(column) for column in zip(*rows, strict=True))
    groups = (names[:, None] == np.unique(names)).astype(float)
    by_seed = (seeds[:, None] == np.unique(seeds)).astype(float)
    variance, freedom = _residual(groups, values)
    within, rest = _residual(np.hstack([groups, by_seed[:, 1:]]), values)
    if rest > 0 and within < variance:
        counts = by_seed.sum(axis=0)
        weigh = counts.sum() ** 2 / (counts**2).sum() - 1
        freedom = variance**2 / ((variance - within) ** 2 / weigh + within**2 / rest)
    return variance, freedom


def _residual(design: np.ndarray, values: Sequence[float]) -> tuple[float, float]:
    solution = np.linalg.lstsq(design, values, rcond=None)[0]
    freedom = len(values) - np.linalg.matrix_rank(design)
    return float(((values - design @ solution) ** 2).sum() / max(freedom, 1)), float(freedom)
