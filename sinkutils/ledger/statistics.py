"""Levels and paired differences over seeds, with 95 % intervals from moderated variances (Smyth
2004).

Three seeds say little about their own spread, and settings do not all scatter alike, so neither a
setting's own variance nor one pooled over all will do. Each setting's variance is shrunk towards a
common one, as much as the variances of all settings tell: with d0 degrees of freedom for the common
s0^2 and d for its own s^2,

    s~^2 = (d0 s0^2 + d s^2) / (d0 + d),    t with d0 + d degrees of freedom.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np
from scipy.special import digamma, polygamma, stdtr, stdtrit

LEAST_SETTINGS = 5  # with fewer, a setting's own variance is all there is
SURE = 1e6  # degrees of freedom of the common variance where settings scatter alike

# d0, s0^2, and the most degrees of freedom that an estimate can have.
Prior = tuple[float, float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error: a level, or a paired difference; of a ratio, of
    its logarithm.
    """

    mean: float
    error: float
    freedom: float  # degrees of freedom of its t interval
    seeds: int

    def reach(self, quantile: float) -> float:
        """How far an interval reaches to each side; quantile: 0.975 of one of 95 %."""
        return float(stdtrit(self.freedom, quantile)) * self.error

    @property
    def low(self) -> float:
        """Where the 95 % interval begins."""
        return self.mean - self.reach(0.975)

    @property
    def high(self) -> float:
        """Where it ends."""
        return self.mean + self.reach(0.975)

    @property
    def p(self) -> float:
        """The two-sided p-value of zero."""
        if self.error == 0:
            return float(self.mean == 0)
        t = abs(self.mean) / self.error
        return float(2 * stdtr(self.freedom, -t))


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def moderated(values: Sequence[float], prior: Prior) -> tuple[float, float]:
    """The moderated variance of at least two values, and its degrees of freedom."""
    d = len(values) - 1  # degrees of freedom of this setting's own variance
    d0, s0_squared, most = prior
    s_squared = float(np.var(values, ddof=1))
    variance = (d0 * s0_squared + d * s_squared) / (d0 + d)
    freedom = min(d0 + d, most)  # all settings together have no more
    return variance, max(d, freedom)


def welch(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """The degrees of freedom of a sum, from its parts' variances and their degrees (Welch)."""
    total = sum(variances)
    if total == 0:
        return sum(freedoms)
    squares = 0.0
    for variance, freedom in zip(variances, freedoms, strict=True):
        squares += variance**2 / freedom
    return total**2 / squares


def agreement(first: Sequence[str], second: Sequence[str]) -> tuple[float, float, float]:
    """How far two lists of verdicts agree: their share, the share by chance, and Cohen's kappa.

    By chance two verdicts are alike as often as the lists' frequencies say; kappa is what lies
    beyond, as a share of what could: (share - chance) / (1 - chance).
    """
    n = len(first)
    share = sum(map(eq, first, second)) / n
    counts = Counter(first)
    others = Counter(second)
    chance = 0.0
    for verdict in counts:
        chance += counts[verdict] / n * others[verdict] / n
    if chance >= 1:  # both lists say one thing throughout
        return share, chance, math.nan
    return share, chance, (share - chance) / (1 - chance)


def fit_prior(samples: Sequence[Sequence[float]]) -> Prior:
    """The settings' common variance, by the moments of log variances (Smyth 2004, Section 6.2).

    samples: the values of each setting. A log variance scatters by trigamma(d / 2) through its few
    seeds; what it scatters beyond is that of the true variances, trigamma(d0 / 2).
    """
    several = [sample for sample in samples if len(sample) > 1]
    s_squared = np.array([np.var(sample, ddof=1) for sample in several])
    d = np.array([len(sample) - 1.0 for sample in several])
    together = float(d.sum())
    positive = s_squared[s_squared > 0]
    if len(s_squared) < LEAST_SETTINGS or len(positive) == 0:
        return 0.0, 0.0, together
    # A variance of exactly nothing would have no logarithm.
    logs = np.log(np.maximum(s_squared, 1e-5 * np.median(positive)))  # log s^2
    # E log s^2 = log sigma^2 + digamma(d/2) - log(d/2).
    centred = logs - digamma(d / 2) + np.log(d / 2)
    # What log s^2 scatters, less what it would if all settings had one variance.
    scatter = np.var(centred, ddof=1)
    by_few_seeds = polygamma(1, d / 2).mean()
    beyond = float(scatter - by_few_seeds)
    if beyond <= 0:
        return SURE, float(np.exp(centred.mean())), together
    d0 = 2 * inverse_trigamma(beyond)
    # The mean of log s^2, as an estimate of log s0^2: corrected for d0 as above for d.
    log_s0_squared = centred.mean() + digamma(d0 / 2) - math.log(d0 / 2)
    return d0, float(np.exp(log_s0_squared)), together


def inverse_trigamma(x: float) -> float:
    """The y > 0 with trigamma(y) = x, by Newton's method on 1 / trigamma, nearly a line."""
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(polygamma(1, y))
        slope = float(polygamma(2, y))
        y += value * (1 - value / x) / slope
    return y
