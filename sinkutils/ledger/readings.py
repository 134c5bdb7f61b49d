"""The records of a preset as the numbers that the ledger judges, read once and kept until a record changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pandas as pd

from sinkutils import paths
from sinkutils.ledger.quantities import Numbers, as_judged, of_run
from sinkutils.ledger.statistics import Estimate, Prior, fit_prior, moderated
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import SUMS
from sinkutils.study.store import Folder, Runs

LEAST_SEEDS = {"desk": 2}  # seeds of an experiment without which nothing is judged, where not 3: a night per run
FRESH = {"laptop": 3}  # the first seed that came after the claims of ours were seen; elsewhere all came after


Seeds = dict[int, Numbers | None]  # what each run of an experiment holds; None for one whose training failed


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
        first = FRESH.get(self.preset, 0)
        runs = {name: {seed: seeds[seed] for seed in seeds if seed >= first} for name, seeds in self.runs.items()}
        return Readings(self.preset, runs, self.least, self)

    def seeds(self, name: str) -> Seeds:
        """The runs of an experiment by seed."""
        return self.runs.get(label(name, self.preset), {})

    def values(self, name: str, quantity: str) -> dict[int, float]:
        """A quantity of an experiment by seed, of the runs that trained and hold it."""
        return {seed: run[quantity] for seed, run in self.seeds(name).items() if run and quantity in run}

    def level(self, name: str, quantity: str) -> Estimate:
        """The mean of a quantity over an experiment's seeds, at least two."""
        sample = [*self.values(name, quantity).values()]
        variance, freedom = moderated(sample, _prior(self.whole or self, quantity))
        return Estimate(float(np.mean(sample)), math.sqrt(variance / len(sample)), freedom, len(sample))

    def difference(self, name: str, other: str, quantity: str) -> Estimate:
        """One experiment's quantity less another's, over the seeds that both have, at least two.

        Its variance is the sum of the two settings' moderated ones, its freedom Welch's. What a seed has in common, a
        fifth of the variance at most, is given away: the differences' own variances could not be moderated, since they
        all share the base's seeds and so are not independent.
        """
        these, those = self.values(name, quantity), self.values(other, quantity)
        paired = [these[seed] - those[seed] for seed in these if seed in those]
        prior = _prior(self.whole or self, quantity)
        (a, freedom_a), (b, freedom_b) = (moderated([*values.values()], prior) for values in (these, those))
        freedom = freedom_a + freedom_b
        if a + b > 0:
            freedom = (a + b) ** 2 / (a**2 / freedom_a + b**2 / freedom_b)
        return Estimate(float(np.mean(paired)), math.sqrt((a + b) / len(paired)), freedom, len(paired))

    def base(self) -> Estimate:
        """The level of the base's excess over all its seeds, the measure of all others."""
        return (self.whole or self).level("base", "excess")


@lru_cache(maxsize=256)
def _prior(ours: Readings, quantity: str) -> Prior:
    """The common variance of all experiments. Readings are told apart by identity, so none gets another's."""
    return fit_prior([[*ours.values(name, quantity).values()] for name in ours.runs])


@cache
def label(name: str, preset: str) -> str:
    """The name under which an experiment runs at a preset: of "base" its base, of equal runs the first; else ""."""
    try:
        return resolve(name, preset)
    except ValueError:  # not of this preset
        return ""


def readings(preset: str = "laptop", folder: Folder = None) -> Readings:
    """The records of a preset. Raises ValueError for an unknown preset."""
    store = Runs(folder)
    sums = sorted((store.folder / find_preset(preset).name).glob(f"*/*/{SUMS}"))
    return _readings(preset, store, tuple((path, path.stat().st_mtime_ns) for path in sums))


@lru_cache(maxsize=4)
def _readings(preset: str, store: Runs, state: tuple) -> Readings:
    runs: dict = {}
    for record in store.entries(preset):
        if record.status not in ("done", "failed"):
            continue
        curve = record.arrays.get("curve")
        numbers = of_run(record.config, record.metrics, None if curve is None else curve.numpy())
        runs.setdefault(record.experiment, {})[record.seed] = numbers
    if store.folder == paths.RUNS:  # what was measured on the weights that some records keep (benchmarks/trials.py)
        for row in pd.read_csv(paths.LEDGER / "trials.csv").itertuples():
            numbers = runs.get(row.experiment, {}).get(row.seed)
            if row.preset == preset and numbers is not None:
                numbers |= as_judged({row.quantity: row.value})
    return Readings(preset, runs, LEAST_SEEDS.get(preset, 3))


@lru_cache(maxsize=1)
def real_models() -> dict[tuple[str, str], tuple[float, float]]:
    """What finished language models say (benchmarks/real_models.py), by model and question.

    A number as the two ends of its interval, which are one where there is none.
    """
    table = pd.read_csv(paths.LEDGER / "real_models.csv")
    return {(row.model, row.question): (row.low, row.high) for row in table.itertuples()}
