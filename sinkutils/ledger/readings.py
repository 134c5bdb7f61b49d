"""The records of a preset as the numbers that the ledger judges, read once and kept until a record changes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from sinkutils import paths
from sinkutils.ledger.quantities import Numbers, as_judged, failed, of_run
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import SUMS, Record
from sinkutils.study.store import Runs

LEAST_SEEDS = {"desk": 2}  # seeds of an experiment without which nothing is judged, where not 3: a night per run
FRESH = {"laptop": 3}  # the first seed that came after the claims of ours were seen; elsewhere all came after


@dataclass(frozen=True)
class Readings:
    """What the ledger judges at a preset; it never changes.

    runs: by experiment and seed, the quantities that a run holds; None for a run whose training failed. priors: kept
    by `statistics`, for these runs alone: `dataclasses.replace` makes Readings with none.
    """

    preset: str
    runs: Mapping[str, Mapping[int, Numbers | None]]
    least: int = 3  # seeds
    priors: dict[str, tuple[float, float, float]] = field(default_factory=dict, init=False)

    def seeds(self, name: str, fresh: bool = False) -> dict[int, Numbers | None]:
        """The runs of an experiment by seed; fresh: only of seeds that came after the claims of ours."""
        first = FRESH.get(self.preset, 0) if fresh else 0
        runs = self.runs.get(label(name, self.preset), {})
        return {seed: run for seed, run in runs.items() if seed >= first}

    def values(self, name: str, quantity: str, fresh: bool = False) -> dict[int, float]:
        """A quantity of an experiment by seed, of the runs that trained and hold it."""
        runs = self.seeds(name, fresh)
        return {seed: run[quantity] for seed, run in runs.items() if run is not None and quantity in run}

    def differences(self, name: str, other: str, quantity: str, fresh: bool = False) -> list[float]:
        """One experiment's quantity less another's, for each seed that both have."""
        these, those = self.values(name, quantity, fresh), self.values(other, quantity, fresh)
        return [these[seed] - those[seed] for seed in these if seed in those]


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
    trials = _trials(preset) if store.folder == paths.RUNS else {}
    runs: dict[str, dict[int, Numbers | None]] = {}
    for entry in store.entries(preset):
        record = entry.record
        if record is None or entry.status not in ("done", "failed"):
            continue
        numbers = None
        if not failed(record.config, record.metrics):
            numbers = of_run(record.config, record.metrics, _curve(record))
            numbers |= trials.get((entry.experiment, entry.seed), {})
        runs.setdefault(entry.experiment, {})[entry.seed] = numbers
    return Readings(preset, runs, LEAST_SEEDS.get(preset, 3))


def _curve(record: Record) -> np.ndarray | None:
    """alpha along the curve (evaluations, targets, blocks, heads), where the record keeps it."""
    from safetensors.numpy import load_file

    path = record.folder / "alpha.safetensors"
    return load_file(path).get("curve") if path.exists() else None


def _trials(preset: str) -> dict[tuple[str, int], Numbers]:
    """What was measured on the weights that some records keep, by experiment and seed (benchmarks/trials.py)."""
    trials: dict[tuple[str, int], Numbers] = {}
    with (paths.LEDGER / "trials.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["preset"] == preset:
                run = row["experiment"], int(row["seed"])
                trials.setdefault(run, {}).update(as_judged({row["quantity"]: float(row["value"])}))
    return trials
