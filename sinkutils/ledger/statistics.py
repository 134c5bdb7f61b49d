"""Means and differences over seeds, with 95 % intervals from moderated variances (Smyth 2004).

With three seeds, the variance of a setting is poorly known. One variance pooled over all settings
would not do either, since settings differ in how much they scatter. So each setting's variance s^2,
with d degrees of freedom, is shrunk towards a common variance s0^2 with d0 degrees of freedom,

    s~^2 = (d0 s0^2 + d s^2) / (d0 + d),    t with d0 + d degrees of freedom.

The variances of all settings together determine s0^2 and d0 (`fit_prior`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import eq

import numpy as np
from scipy.special import digamma, polygamma, stdtr, stdtrit

LEAST_SETTINGS = 5  # with fewer settings, each keeps its own variance
SURE = 1e6  # d0 if all settings scatter alike, so that only the common variance counts

# d0, s0^2, and the largest number of degrees of freedom that an estimate can have.
Prior = tuple[float, float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, or a difference of two means, with its standard error.

    For a ratio they are those of its logarithm.
    """

    mean: float
    error: float
    freedom: float  # the degrees of freedom of its t interval
    seeds: int  # the number of seeds

    def reach(self, quantile: float) -> float:
        """Half the length of an interval. quantile: 0.975 for the 95 % interval."""
        return float(stdtrit(self.freedom, quantile)) * self.error

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return self.mean - self.reach(0.975)

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval."""
        return self.mean + self.reach(0.975)

    @property
    def p(self) -> float:
        """The two-sided p-value of the hypothesis that the true mean is zero."""
        return 1.0 if self.mean == 0 else 2 * min(self.p_above, self.p_below)

    @property
    def p_above(self) -> float:
        """The one-sided p-value by which the true mean is shown to be above zero."""
        if self.error == 0:
            return float(self.mean <= 0)
        return float(stdtr(self.freedom, -self.mean / self.error))

    @property
    def p_below(self) -> float:
        """The one-sided p-value by which the true mean is shown to be below zero."""
        return replace(self, mean=-self.mean).p_above


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def moderated(values: Sequence[float] | np.ndarray, prior: Prior) -> tuple[float, float]:
    """The moderated variance of a setting with at least two values, and its degrees of freedom."""
    d = len(values) - 1  # the degrees of freedom of the setting's own variance
    d0, s0_squared, most = prior
    s_squared = float(np.var(values, ddof=1))
    variance = (d0 * s0_squared + d * s_squared) / (d0 + d)
    freedom = min(d0 + d, most)  # at most those of all settings together
    return variance, max(d, freedom)


def welch(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Welch's degrees of freedom for a sum, from the variances and freedoms of its parts."""
    total = sum(variances)
    if total == 0:
        return sum(freedoms)
    squares = 0.0
    for variance, freedom in zip(variances, freedoms, strict=True):
        squares += variance**2 / freedom
    return total**2 / squares


def agreement(first: Sequence[str], second: Sequence[str]) -> tuple[float, float, float]:
    """The agreement of two lists of verdicts: (share, chance, kappa).

    share: the share of equal verdicts. chance: the share that is expected if the two lists are
    independent and have the same frequencies. kappa: Cohen's (share - chance) / (1 - chance).
    """
    n = len(first)
    share = sum(map(eq, first, second)) / n
    counts = Counter(first)
    others = Counter(second)
    chance = 0.0
    for verdict in counts:
        chance += counts[verdict] / n * others[verdict] / n
    if chance >= 1:  # all verdicts of both lists are the same
        return share, chance, math.nan
    return share, chance, (share - chance) / (1 - chance)


def fit_prior(samples: Sequence[Sequence[float]]) -> Prior:
    """The common variance of all settings, from the moments of log s^2 (Smyth 2004, Section 6.2).

    samples: the values of each setting. Because a setting has few seeds, log s^2 scatters with
    variance trigamma(d / 2). Any further scatter is due to the true variances, and is set equal to
    trigamma(d0 / 2).
    """
    several = [sample for sample in samples if len(sample) > 1]
    s_squared = np.array([np.var(sample, ddof=1) for sample in several])
    d = np.array([len(sample) - 1.0 for sample in several])
    together = float(d.sum())
    positive = s_squared[s_squared > 0]
    if len(s_squared) < LEAST_SETTINGS or len(positive) == 0:
        return 0.0, 0.0, together
    # Small variances are raised, because a variance of exactly zero has no logarithm.
    logs = np.log(np.maximum(s_squared, 1e-5 * np.median(positive)))  # log s^2
    # E log s^2 = log sigma^2 + digamma(d/2) - log(d/2).
    centred = logs - digamma(d / 2) + np.log(d / 2)
    # The scatter of log s^2, minus that which it would have if all settings had one variance.
    scatter = np.var(centred, ddof=1)
    by_few_seeds = polygamma(1, d / 2).mean()
    beyond = float(scatter - by_few_seeds)
    if beyond <= 0:
        return SURE, float(np.exp(centred.mean())), together
    d0 = 2 * inverse_trigamma(beyond)
    # The estimate of log s0^2 is this mean, with the correction from above for d0 instead of d.
    log_s0_squared = centred.mean() + digamma(d0 / 2) - math.log(d0 / 2)
    return d0, float(np.exp(log_s0_squared)), together


def inverse_trigamma(x: float) -> float:
    """The y > 0 with trigamma(y) = x, by Newton's method on the nearly linear 1 / trigamma."""
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(polygamma(1, y))
        slope = float(polygamma(2, y))
        y += value * (1 - value / x) / slope
    return y
