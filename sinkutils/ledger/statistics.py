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
        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def moderated(values: Sequence[float], prior: Prior) -> tuple[float, float]:
    """The moderated variance of at least two values, and its degrees of freedom."""
    d = len(values) - 1  # degrees of freedom of this setting's own variance
    d0, s0_squared, most = prior
    s_squared = float(np.var(values, ddof=1))
    variance = (d0 * s0_squared + d * s_squared) / (d0 + d)
    return variance, max(d, min(d0 + d, most))


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
    share = float(np.mean(np.asarray(first) == np.asarray(second)))
    a, b = Counter(first), Counter(second)
    chance = 0.0
    for verdict in a:
        chance += a[verdict] / len(first) * b[verdict] / len(second)
    kappa = (share - chance) / (1 - chance) if chance < 1 else math.nan
    return share, chance, kappa


def fit_prior(samples: Sequence[Sequence[float]]) -> Prior:
    """The settings' common variance, by the moments of log variances (Smyth 2004, Section 6.2).

    samples: the values of each setting. A log variance scatters by trigamma(d / 2) through its few
    seeds; what it scatters beyond is that of the true variances, trigamma(d0 / 2).
    """
    several = [sample for sample in samples if len(sample) > 1]
    variances = np.array([np.var(sample, ddof=1) for sample in several])
    freedoms = np.array([len(sample) - 1.0 for sample in several])
    together = float(freedoms.sum())
    if len(variances) < LEAST_SETTINGS or not (variances > 0).any():
        return 0.0, 0.0, together
    # A variance of exactly nothing would have no logarithm.
    logs = np.log(np.maximum(variances, 1e-5 * np.median(variances[variances > 0])))
    # E log s^2 = log sigma^2 + digamma(d/2) - log(d/2).
    centred = logs - digamma(freedoms / 2) + np.log(freedoms / 2)
    beyond = float(np.var(centred, ddof=1) - polygamma(1, freedoms / 2).mean())
    if beyond <= 0:
        return SURE, float(np.exp(centred.mean())), together
    d0 = 2 * inverse_trigamma(beyond)
    s0_squared = np.exp(centred.mean() + digamma(d0 / 2) - math.log(d0 / 2))
    return d0, float(s0_squared), together


def inverse_trigamma(x: float) -> float:
    """The y > 0 with trigamma(y) = x, by Newton's method on 1 / trigamma, nearly a line."""
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(polygamma(1, y))
        y += value * (1 - value / x) / float(polygamma(2, y))
    return y
