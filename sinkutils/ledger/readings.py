"""The records of a preset as numbers that the ledger judges.

The records are read once, and again only if one of them changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pandas as pd

from sinkutils import paths
from sinkutils.ledger.quantities import QUANTITIES, Numbers, as_judged, quantities
from sinkutils.ledger.statistics import LEAST_SETTINGS, Estimate, Prior, fit_prior, moderated, welch
from sinkutils.study.grid import by_name, find_preset, resolve
from sinkutils.study.record import Folder
from sinkutils.study.store import Runs
from sinkutils.study.tables import state_of

# The least number of seeds from which an experiment is judged, if it is not 3. A run of this preset
# takes a night.
LEAST_SEEDS = {"desk": 2}
# The preset whose first seeds were known when claims of ours were made.
FIRST_SEEN = "laptop"

# The quantities of an experiment's runs by seed, or None for a run whose training failed.
Seeds = dict[int, Numbers | None]


@dataclass(frozen=True)
class Bar:
    """The bar with which an estimate is compared: a number, or a share of a mean.

    size: the number, or the share if `of` is set. of: the experiment and the quantity of the mean.
    """

    size: float
    of: tuple[str, str] | None = None


ZERO = Bar(0.0)


@dataclass(frozen=True, eq=False)
class Readings:
    """The numbers that the ledger judges at a preset. They never change.

    runs: the quantities of each run, by experiment and seed.
    least: the least number of seeds from which an experiment is judged.
    whole: if these are only a part of the runs (`since`), the readings of all of them.
    """

    preset: str
    runs: Mapping[str, Seeds]
    least: int = 3
    whole: Readings | None = None

    def since(self, first: int) -> Readings:
        """The readings of the seeds from `first` on, at the preset whose first seeds were known.

        At other presets all seeds are fresh.
        """
        if not first or self.preset != FIRST_SEEN:
            return self
        fresh: dict[str, Seeds] = {}
        for name, seeds in self.runs.items():
            fresh[name] = {}
            for seed, run in seeds.items():
                if seed >= first:
                    fresh[name][seed] = run
        return Readings(self.preset, fresh, self.least, whole=self.whole or self)

    def seeds(self, name: str) -> Seeds:
        """The runs of an experiment by seed."""
        return self.runs.get(label(name, self.preset), {})

    def values(self, name: str, quantity: str) -> dict[int, float]:
        """A quantity of an experiment, by seed, for the runs that did not fail and have it."""
        values = {}
        for seed, run in self.seeds(name).items():
            if run and quantity in run:
                values[seed] = run[quantity]
        return values

    def paired(self, names: Sequence[str], quantity: str) -> set[int]:
        """The seeds for which each of these experiments has a quantity."""
        return set.intersection(*[set(self.values(name, quantity)) for name in names])

    def estimate(self, runs: Sequence[str], quantity: str, bar: Bar = ZERO) -> Estimate:
        """The mean of an experiment, minus that of a second one if there is one, minus the bar.

        A difference is taken over the seeds that both experiments have. Its variance is the sum of
        their two variances. It ignores what two runs with one seed have in common, which is at most
        a fifth of the variance. (The variances of the paired differences could not be moderated,
        because all differences share the seeds of the base.) If the bar is a share of a mean, the
        error of this mean is included. This is Fieller's method: a ratio x / y is above c where
        x - c y is above zero. The variance of an experiment comes from all its seeds, even if only
        fresh seeds are judged.
        """
        whole = self.whole or self
        seeds = self.paired(runs, quantity)
        # The estimate is a contrast: in each setting, a weight c for each value x of a seed. A run's
        # values have 1/n or -1/n, and those by which the bar is measured its share more.
        mean = 0.0 if bar.of else -bar.size
        variances = []
        freedoms = []
        settings = [(name, quantity) for name in runs]
        for setting in dict.fromkeys([*settings, bar.of or settings[0]]):
            values = whole.values(*setting)
            x = np.array([*values.values()])
            c = np.zeros(len(x))
            for measured, sign in zip(settings, (1, -1), strict=False):
                if measured == setting and seeds:
                    c += sign * np.array([seed in seeds for seed in values]) / len(seeds)
            if setting == bar.of:
                c -= bar.size / len(x)
            if c.any():
                variance, freedom = moderated(x, self.prior(setting[1]))
                mean += float(c @ x)
                variances.append(float(c @ c) * variance)
                freedoms.append(freedom)
        error = math.sqrt(sum(variances))
        return Estimate(mean, error, welch(variances, freedoms), len(seeds))

    def prior(self, quantity: str) -> Prior:
        """The variance of a quantity that all experiments have in common (`fit_prior`)."""
        return _prior(self.whole or self, quantity)


@lru_cache(maxsize=256)
def _prior(ours: Readings, quantity: str) -> Prior:
    # The cache compares readings by identity (eq=False), so that no two share an entry.
    def samples(measured: str) -> list[list[float]]:
        # A variant of one's own is no experiment of the study, and moves none of its verdicts.
        study = [name for name in ours.runs if name in by_name()]
        lists = [[*ours.values(name, measured).values()] for name in study]
        return [values for values in lists if len(values) > 1]

    if len(samples(quantity)) < LEAST_SETTINGS:
        quantity = QUANTITIES[quantity].like or quantity
    return fit_prior(samples(quantity))


@cache
def label(name: str, preset: str) -> str:
    """The name under which an experiment runs at a preset (`grid.resolve`), or "" if it does not.

    It differs from `name` for "base", and if the run coincides with that of another experiment. A
    variant of one's own has its own name.

    preset: the name of a preset, or that of the folder for another text.
    """
    if name != "base" and name not in by_name():
        return name
    try:
        return resolve(name, preset.partition("@")[0])
    except ValueError:  # the preset does not have this experiment
        return ""


def readings(preset: str = "laptop", folder: Folder = None) -> Readings:
    """The readings of a preset, or of the folder for another text, such as laptop@path-mine-01ab.

    Raises ValueError for an unknown preset.
    """
    find_preset(preset.partition("@")[0])
    store = Runs(folder)
    return _readings(preset, store, state_of(store.folder / preset))


@lru_cache(maxsize=4)
def _readings(preset: str, store: Runs, state: str) -> Readings:
    runs: dict[str, Seeds] = {}
    for entry in store.entries(preset, quantities):
        if entry.status in ("done", "failed"):
            runs.setdefault(entry.experiment, {})[entry.seed] = entry.value
    if store.folder == paths.RUNS:
        # Some quantities were measured on the weights that records keep (benchmarks/trials.py).
        trials = pd.read_csv(paths.LEDGER / "trials.csv")
        for row in trials[trials.preset == preset].itertuples():
            numbers = runs.get(row.experiment, {}).get(row.seed)
            if numbers is not None:
                numbers |= as_judged({row.quantity: row.value})
    return Readings(preset, runs, LEAST_SEEDS.get(preset.partition("@")[0], 3))


@lru_cache(maxsize=1)
def real_models() -> dict[tuple[str, str], tuple[float, float]]:
    """The numbers of pretrained language models (benchmarks/real_models.py), by model and question.

    Each is given by the two ends of its interval, which are equal if there is no interval.
    """
    table = pd.read_csv(paths.LEDGER / "real_models.csv")
    intervals = {}
    for row in table.itertuples():
        intervals[row.model, row.question] = (row.low, row.high)
    return intervals
