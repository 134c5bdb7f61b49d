"""The records of a preset as the numbers that the ledger judges, read once and kept until a record changes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sinkutils import paths
from sinkutils.ledger import statistics
from sinkutils.ledger.quantities import Numbers, as_judged, failed, of_run
from sinkutils.ledger.statistics import Estimate
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import SUMS
from sinkutils.study.store import Runs

LEAST_SEEDS = {"desk": 2}  # seeds of an experiment without which nothing is judged, where not 3: a night per run
FRESH = {"laptop": 3}  # the first seed that came after the claims of ours were seen; elsewhere all came after


@dataclass(frozen=True, eq=False)
class Readings:
    """What the ledger judges at a preset; it never changes.

    runs: by experiment and seed, the quantities that a run holds; None for a run whose training failed. In all methods,
    fresh: only seeds that came after the claims of ours.
    """

    preset: str
    runs: Mapping[str, Mapping[int, Numbers | None]]
    least: int = 3  # seeds

    def seeds(self, name: str, fresh: bool = False) -> dict[int, Numbers | None]:
        """The runs of an experiment by seed."""
        first = FRESH.get(self.preset, 0) if fresh else 0
        runs = self.runs.get(label(name, self.preset), {})
        return {seed: run for seed, run in runs.items() if seed >= first}

    def values(self, name: str, quantity: str, fresh: bool = False) -> dict[int, float]:
        """A quantity of an experiment by seed, of the runs that trained and hold it."""
        runs = self.seeds(name, fresh)
        return {seed: run[quantity] for seed, run in runs.items() if run is not None and quantity in run}

    def level(self, name: str, quantity: str, fresh: bool = False) -> Estimate:
        """The mean of a quantity over an experiment's seeds."""
        return statistics.level(self.values(name, quantity, fresh), _prior(self, quantity))

    def difference(self, name: str, other: str, quantity: str, fresh: bool = False) -> Estimate:
        """One experiment's quantity less another's, over the seeds that both have."""
        these, those = self.values(name, quantity, fresh), self.values(other, quantity, fresh)
        return statistics.difference(these, those, _prior(self, quantity))


@lru_cache(maxsize=256)
def _prior(ours: Readings, quantity: str) -> statistics.Prior:
    """The common variance of all experiments. Readings are told apart by identity, so none gets another's."""
    return statistics.fit_prior([list(ours.values(name, quantity).values()) for name in ours.runs])


@lru_cache(maxsize=4096)
def label(name: str, preset: str) -> str:
    """The name under which an experiment runs at a preset: of "base" its base, of equal runs the first; else ""."""
    try:
        return resolve(name, preset)
    except ValueError:  # not of this preset
        return ""


def readings(preset: str = "laptop", folder: Path | str | None = None) -> Readings:
    """The records of a preset. Raises ValueError for an unknown preset."""
    store = Runs(folder)
    sums = sorted((store.folder / find_preset(preset).name).glob(f"*/*/{SUMS}"))
    return _readings(preset, store, tuple((path, path.stat().st_mtime_ns) for path in sums))


@lru_cache(maxsize=4)
def _readings(preset: str, store: Runs, state: tuple[tuple[Path, int], ...]) -> Readings:
    runs: dict[str, dict[int, Numbers | None]] = {}
    for entry in store.entries(preset):
        record = entry.record
        if record is None or entry.status not in ("done", "failed"):
            continue
        numbers = None
        if not failed(record.config, record.metrics):
            curve = record.arrays.get("curve")
            numbers = of_run(record.config, record.metrics, None if curve is None else curve.numpy())
        runs.setdefault(entry.experiment, {})[entry.seed] = numbers
    if store.folder == paths.RUNS:
        _add_trials(preset, runs)
    return Readings(preset, runs, LEAST_SEEDS.get(preset, 3))


def _add_trials(preset: str, runs: dict[str, dict[int, Numbers | None]]) -> None:
    """What was measured on the weights that some records keep (benchmarks/trials.py)."""
    for row in _table("trials.csv"):
        numbers = runs.get(row["experiment"], {}).get(int(row["seed"]))
        if row["preset"] == preset and numbers is not None:
            numbers |= as_judged({row["quantity"]: float(row["value"])})


@lru_cache(maxsize=1)
def real_models() -> dict[str, dict[str, tuple[float, float]]]:
    """What finished language models say (benchmarks/real_models.py), by model and question.

    A number as the two ends of its interval, which are one where there is none.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in _table("real_models.csv"):
        found.setdefault(row["model"], {})[row["question"]] = float(row["low"]), float(row["high"])
    return found


def _table(file: str) -> list[dict[str, str]]:
    with (paths.LEDGER / file).open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))
