"""The records of a preset as the numbers that the ledger judges.

They are read once and kept until a record changes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from sinkutils import paths
from sinkutils.ledger.quantities import Numbers, as_judged, of_run
from sinkutils.ledger.statistics import Estimate, Prior, fit_prior, moderated, welch
from sinkutils.study.config import Json
from sinkutils.study.grid import find_preset, resolve
from sinkutils.study.record import SUMS, Folder
from sinkutils.study.store import Runs

# Seeds of an experiment without which nothing is judged, where not 3: a night per run.
LEAST_SEEDS = {"desk": 2}
# The first seed that came after the claims of ours were seen; elsewhere all came after.
FRESH = {"laptop": 3}

# What each run of an experiment holds; None for one whose training failed.
Seeds = dict[int, Numbers | None]


@dataclass(frozen=True)
class Bar:
    """What an estimate is held against: a number or, if `of` is there, a share of a mean."""

    size: float
    of: tuple[str, str] | None = None  # an experiment and a quantity


ZERO = Bar(0.0)


@dataclass(frozen=True, eq=False)
class Readings:
    """What the ledger judges at a preset; it never changes.

    runs: by experiment and seed.
    """

    preset: str
    runs: Mapping[str, Seeds]
    least: int = 3  # seeds
    whole: Readings | None = None  # of a part, what it is a part of

    def fresh(self) -> Readings:
        """The part that came after the claims of ours."""
        first = FRESH.get(self.preset, 0)  # 0: all seeds
        fresh: dict[str, Seeds] = {}
        for name, seeds in self.runs.items():
            fresh[name] = {}
            for seed, run in seeds.items():
                if seed >= first:
                    fresh[name][seed] = run
        return Readings(self.preset, fresh, self.least, whole=self)

    def seeds(self, name: str) -> Seeds:
        """The runs of an experiment by seed."""
        return self.runs.get(label(name, self.preset), {})

    def values(self, name: str, quantity: str) -> dict[int, float]:
        """A quantity of an experiment by seed, of the runs that trained and hold it."""
        values = {}
        for seed, run in self.seeds(name).items():
            if run and quantity in run:
                values[seed] = run[quantity]
        return values

    def paired(self, names: Sequence[str], quantity: str) -> set[int]:
        """The seeds of which each of these experiments holds a quantity."""
        return set.intersection(*[set(self.values(name, quantity)) for name in names])

    def estimate(self, runs: Sequence[str], quantity: str, bar: Bar = ZERO) -> Estimate:
        """The mean of an experiment, less that of the second if there is one, less the bar.

        A difference is over the seeds that both have. What a seed has in common, a fifth of the
        variance at most, is given away: the differences' own variances could not be moderated,
        since they all share the base's seeds. A bar that is a share of a mean brings that mean's
        error along (Fieller: a ratio x / y is above c where x - c y is above zero). An experiment's
        variance is that of all its seeds, also where only fresh ones are judged.
        """
        whole = self.whole or self
        seeds = self.paired(runs, quantity)
        # The estimate is a weighted sum of values. The weight of each seed, by experiment and
        # quantity:
        weights: dict[tuple[str, str], Any] = defaultdict(Counter)
        for name, sign in zip(runs, (1, -1), strict=False):
            for seed in seeds:
                weights[name, quantity][seed] += sign / len(seeds)
        # The bar is subtracted: a number, or a share of a mean over seeds of its own.
        mean = 0.0
        if bar.of is None:
            mean -= bar.size
        else:
            measure = whole.values(*bar.of)
            for seed in measure:  # a seed of the difference may be among them
                weights[bar.of][seed] -= bar.size / len(measure)
        # The sum of weight * value, and of each setting's variance * weight^2.
        variances = []
        freedoms = []
        for (name, measured), by_seed in weights.items():
            values = whole.values(name, measured)
            prior = self.prior(measured)
            variance, freedom = moderated([*values.values()], prior)
            squares = 0.0
            for seed, weight in by_seed.items():
                mean += weight * values[seed]
                squares += weight**2
            variances.append(squares * variance)
            freedoms.append(freedom)
        error = math.sqrt(sum(variances))
        freedom = welch(variances, freedoms)
        return Estimate(mean, error, freedom, len(seeds))

    def prior(self, quantity: str) -> Prior:
        """The variance that all experiments have in common."""
        return _prior(self.whole or self, quantity)

    def base(self) -> Estimate:
        """The level of the base's excess over all its seeds, the measure of all others."""
        return (self.whole or self).estimate(("base",), "excess")


@lru_cache(maxsize=256)
def _prior(ours: Readings, quantity: str) -> Prior:
    # Readings are told apart by identity, so none gets another's.
    samples = []
    for name in ours.runs:
        values = ours.values(name, quantity)
        samples.append([*values.values()])
    return fit_prior(samples)


@cache
def label(name: str, preset: str) -> str:
    """The name under which an experiment runs at a preset, "" if it does not.

    Of "base" the preset's base, of equal runs the first.
    """
    try:
        return resolve(name, preset)
    except ValueError:  # not of this preset
        return ""


def readings(preset: str = "laptop", folder: Folder = None) -> Readings:
    """The records of a preset. Raises ValueError for an unknown preset."""
    find_preset(preset)
    store = Runs(folder)
    # What changes when a record does: they are read again then.
    state = []
    for path in sorted((store.folder / preset).glob(f"*/*/{SUMS}")):
        state.append((path, path.stat().st_mtime_ns))
    return _readings(preset, store, tuple(state))


@lru_cache(maxsize=4)
def _readings(preset: str, store: Runs, state: tuple[tuple[Path, int], ...]) -> Readings:
    runs: dict[str, Seeds] = {}
    for record in store.entries(preset):
        if record.status not in ("done", "failed"):
            continue
        curve = record.arrays.get("curve")
        alpha = None if curve is None else curve.numpy()
        metrics: Json = {**record.metrics}
        seeds = runs.setdefault(record.experiment, {})
        seeds[record.seed] = of_run(record.config, metrics, alpha)
    if store.folder == paths.RUNS:
        # What was measured on the weights that some records keep (benchmarks/trials.py).
        trials = pd.read_csv(paths.LEDGER / "trials.csv")
        for row in trials[trials.preset == preset].itertuples():
            numbers = runs.get(row.experiment, {}).get(row.seed)
            if numbers is not None:
                numbers |= as_judged({row.quantity: row.value})
    return Readings(preset, runs, LEAST_SEEDS.get(preset, 3))


@lru_cache(maxsize=1)
def real_models() -> dict[tuple[str, str], tuple[float, float]]:
    """What finished language models say (benchmarks/real_models.py), by model and question.

    A number as the two ends of its interval, which are one where there is none.
    """
    table = pd.read_csv(paths.LEDGER / "real_models.csv")
    intervals = {}
    for row in table.itertuples():
        intervals[row.model, row.question] = (row.low, row.high)
    return intervals
