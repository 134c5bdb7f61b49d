"""Which run is this, is there a record of it, is it whole and up to date? The one place that answers."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from sinkutils import paths
from sinkutils.data.corpus import Identity, public_name
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.study.grid import config, plan
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import RECIPE, SUMS, CorruptRecord, Folder, Record, config_dict, read_record, record_folder


@dataclass(frozen=True)
class Runs:
    """The records below a folder, <preset>/<experiment>/<seed>; None: data/runs."""

    root: Folder = None

    @property
    def folder(self) -> Path:
        return Path(self.root or paths.RUNS)

    def place(self, run: RunConfig, corpus: Identity | None = None) -> Path:
        """Where the record of a run on a text lives; `corpus` is a `Corpus.identity`, None the preset's own.

        On another text it stands apart, and so it does on a text of the preset's name but another hash (which another
        version of Python makes) where the study has a record on its own: that is never replaced.
        """
        study = record_folder(run.preset, run.experiment, run.seed, self.folder)
        if corpus is None:
            return study
        if corpus["name"] == public_name(run.data.corpus):
            record = _read(study, run)
            if record is None or record.config["corpus"] == corpus:
                return study
        slug = re.sub(r"[^A-Za-z0-9]+", "-", corpus["name"])
        return record_folder(f"{run.preset}@{slug}-{corpus['sha256'][:8]}", run.experiment, run.seed, self.folder)

    def get(self, run: RunConfig, corpus: Identity | None = None, weights: bool = False) -> Record | None:
        """The record of this very config and corpus (None: on any text of the config's name); None where it is
        missing, damaged, stale, or has no weights where they are wanted.
        """
        record = _read(self.place(run, corpus), run, corpus)
        return record if record is not None and (record.weights or not weights) else None

    def named(self, name: str | Path) -> Path | None:
        """The folder of a record by itself or by its name, preset/experiment/seed; None for what is no record."""
        folder = Path(name) if Path(name).is_dir() else self.folder / name
        return folder if (folder / SUMS).exists() else None

    def missing(
        self,
        preset: str,
        seeds: Sequence[int] | None = None,
        corpus: Identity | None = None,
        only: Sequence[str] | None = None,
    ) -> list[RunConfig]:
        """The runs of `grid.plan` without a record on that corpus, in its order."""
        return [run for run in plan(preset, seeds, only) if self.get(run, corpus) is None]

    def entries(self, preset: str) -> Iterator[Record]:
        """Every record of a preset, by experiment and seed; of a corrupt one, which is empty, a warning is given.

        Their status is done, failed (training did), stale, or corrupt. preset: also one on another text, as its folder
        is named: "laptop@path-mine-0123abcd".
        """
        find_preset(preset.partition("@")[0])
        folders = [path for path in (self.folder / preset).glob("*/*") if path.name.isdigit()]
        for folder in sorted(folders, key=lambda path: (path.parent.name, int(path.name))):
            state = frozenset((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in os.scandir(folder))
            record = _judged(folder, state)
            if record.status == "corrupt":
                warnings.warn(str(record.reason), stacklevel=2)
            yield record


@lru_cache(maxsize=4096)  # who shows a preset asks for its records many times
def _judged(folder: Path, state: frozenset) -> Record:
    """A record with its status of `Runs.entries`. state: what changes when a file of it does."""
    base, apart, _ = folder.parts[-3].partition("@")
    try:
        record = read_record(folder)
    except CorruptRecord as error:
        return Record(folder, {}, {"status": "corrupt", "reason": str(error)}, {}, {})
    reason = "the experiment or the recipe has changed since: train it again"
    try:
        if is_of(record, config(record.experiment, base, record.seed), record.config["corpus"] if apart else None):
            return record
    except ValueError as error:  # no such experiment at this preset
        reason = str(error)
    return replace(record, metrics=record.metrics | {"status": "stale", "reason": reason})


def is_of(record: Record, run: RunConfig, corpus: Identity | None = None) -> bool:
    """Whether a record is of this very config and corpus; of None asked for, of any corpus of the config's name.

    A field that came after the record counts with its default: what a new field adds, older runs did not have. One that
    has gone since, `bos`, was always False.
    """
    values = {name: value for name, value in record.config.items() if name not in ("corpus", "recipe")}
    values["data"] = {name: value for name, value in values["data"].items() if (name, value) != ("bos", False)}
    try:
        found = from_dict(type(run), values)
        same = found == run or config_dict(found) == config_dict(run)
    except (TypeError, ValueError):  # of another kind, or with a field that there is no more
        return False
    wanted = corpus or record.config["corpus"] | {"name": public_name(run.data.corpus)}
    return same and record.config["recipe"] == RECIPE and record.config["corpus"] == wanted


def _read(folder: Path, run: RunConfig, corpus: Identity | None = None) -> Record | None:
    try:
        record = read_record(folder) if folder.exists() else None
    except CorruptRecord as error:
        warnings.warn(f"{error}; it counts as missing", stacklevel=3)
        return None
    return record if record is not None and is_of(record, run, corpus) else None
