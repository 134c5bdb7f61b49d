"""The records of a preset as the numbers that the ledger judges, read once and kept until a record changes."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from sinkutils import paths
from sinkutils.ledger.quantities import QUANTITIES, Numbers, failed, of_run
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import SUMS, Record
from sinkutils.study.store import Runs

LEAST_SEEDS = {"desk": 2}  # seeds of an experiment without which nothing is judged, where not 3: a night per run
FRESH = {"laptop": 3}  # the first seed that came after the claims of ours; elsewhere every seed did


@dataclass(frozen=True)
class Readings:
    """What the ledger judges at a preset.

    runs: by experiment and seed, the quantities that a run holds, ratios as their logarithms; None for a run whose
    training failed. least: the seeds of an experiment without which nothing is judged. Nothing here ever changes.
    """

    preset: str
    runs: Mapping[str, Mapping[int, Numbers | None]]
    least: int = 3

    @cached_property
    def base(self) -> str:
        """The name of the preset's base."""
        return label("base", self.preset)

    def seeds(self, name: str, fresh: bool = False) -> dict[int, Numbers | None]:
        """The runs of an experiment by seed; fresh: only of seeds that came after the claims of ours."""
        first = FRESH.get(self.preset, 0) if fresh else 0
        return {seed: run for seed, run in self.runs.get(label(name, self.preset), {}).items() if seed >= first}

    def values(self, name: str, quantity: str, fresh: bool = False) -> dict[int, float]:
        """A quantity of an experiment by seed, of the runs that trained and hold it."""
        runs = self.seeds(name, fresh)
        return {seed: run[quantity] for seed, run in runs.items() if run is not None and quantity in run}

    def differences(self, name: str, other: str, quantity: str, fresh: bool = False) -> dict[int, float]:
        """One experiment's quantity less another's, for each seed that both have."""
        these, those = self.values(name, quantity, fresh), self.values(other, quantity, fresh)
        return {seed: value - those[seed] for seed, value in these.items() if seed in those}

    def changes_of_the_base(self) -> list[str]:
        """The experiments with records that change the base in one thing."""
        return [name for name in self.runs if name != self.base and experiment(name).base]


@lru_cache(maxsize=4096)
def label(name: str, preset: str) -> str:
    """The name under which an experiment runs at a preset: of "base" its base, of equal runs the first."""
    try:
        return resolve(name, preset)
    except ValueError:  # not of this preset
        return name


def readings(preset: str = "laptop", folder: Path | str | None = None) -> Readings:
    """The records of a preset. Raises ValueError for an unknown preset."""
    store = Runs(folder)
    sums = sorted((store.folder / find_preset(preset).name).glob(f"*/*/{SUMS}"))
    state = tuple((path, path.stat().st_mtime_ns) for path in sums)
    return _readings(preset, store, state)


@lru_cache(maxsize=4)
def _readings(preset: str, store: Runs, state: tuple[tuple[Path, int], ...]) -> Readings:
    trials = _trials(preset) if store.folder == paths.RUNS else {}
    runs: dict[str, dict[int, Numbers | None]] = {}
    for name, seed, record in _on_one_text(store, preset):
        numbers = None
        if not failed(record.config, record.metrics):
            numbers = of_run(record.config, record.metrics, _curve(record)) | trials.get((name, seed), {})
            numbers = _known(_beside_untrained(numbers, record))
        runs.setdefault(name, {})[seed] = numbers
    return Readings(preset, runs, LEAST_SEEDS.get(preset, 3))


def _beside_untrained(numbers: Numbers, record: Record) -> Numbers:
    """Norms and elements over those of the same model before its first step, as the old rules have it."""
    import json

    from sinkutils.ledger.trials import untrained_peak, untrained_ratio

    if "hidden" not in numbers:
        return numbers
    model, length = json.dumps(record.config["model"], sort_keys=True), record.metrics["final"]["report"]["T"]
    divisors = {
        "hidden": max(1.0, untrained_ratio(model, length, "hidden_norms", (1,))),
        "hidden_prefix": max(1.0, untrained_ratio(model, length, "hidden_norms", (2, 3, 4, 5))),
        "element": untrained_peak(model, length),
    }
    if "before_norm" in numbers:
        divisors["before_norm"] = max(1.0, untrained_ratio(model, length, "before_norm_norms", (1,)))
    return numbers | {name: numbers[name] / by for name, by in divisors.items() if name in numbers}


def _known(numbers: Numbers) -> Numbers:
    """The numbers that are finite, ratios as their logarithms: a ratio of nothing is not held."""
    kept = {}
    for name, value in numbers.items():
        if QUANTITIES[name].log:
            value = math.log(value) if value > 0 else math.nan
        if math.isfinite(value):
            kept[name] = float(value)
    return kept


def _on_one_text(store: Runs, preset: str) -> Iterator[tuple[str, int, Record]]:
    """The records that are results, without those on another version of a text than most: seeds are paired on one."""
    found = []
    for entry in store.entries(preset):
        if entry.record is not None and entry.status in ("done", "failed"):
            found.append((entry.experiment, entry.seed, entry.record))
    counts = Counter(_text(record) for _, _, record in found)
    usual: dict[str, str] = {}
    for (corpus, text), _ in counts.most_common():
        usual.setdefault(corpus, text)
    for name, seed, record in found:
        corpus, text = _text(record)
        if usual[corpus] == text:
            yield name, seed, record


def _text(record: Record) -> tuple[str, str]:
    made_on = record.config["corpus"]
    return made_on["name"], made_on["sha256"]


def _curve(record: Record) -> np.ndarray | None:
    """alpha along the curve (evaluations, targets, blocks, heads), where the record keeps it."""
    from safetensors.numpy import load_file

    path = record.folder / "alpha.safetensors"
    return load_file(path).get("curve") if path.exists() else None


def _trials(preset: str) -> dict[tuple[str, int], Numbers]:
    """What was measured on the weights that some records keep, by experiment and seed (benchmarks/trials.py)."""
    trials: dict[tuple[str, int], Numbers] = {}
    with (paths.ROOT / "data" / "trials.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["preset"] == preset:
                run = (row["experiment"], int(row["seed"]))
                trials.setdefault(run, {})[row["quantity"]] = float(row["value"])
    return trials
