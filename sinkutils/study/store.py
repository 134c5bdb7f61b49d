"""Which run is this, is there a record of it, is it whole and up to date? Answered here alone."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from sinkutils import paths
from sinkutils.checks import integer
from sinkutils.data.corpus import Identity, public_name
from sinkutils.study.config import RECIPE, RunConfig, check_name, config_dict
from sinkutils.study.grid import EXPERIMENTS, PRESETS, config, find_preset, plan, resolve
from sinkutils.study.record import (
    FILES,
    SUMS,
    CorruptRecord,
    Folder,
    Record,
    RunLocked,
    finish_replacement,
    open_record,
    read_record,
    record_folder,
    remove,
    short_name,
)

LOCK_SECONDS = 0.2  # a lock whose file its last owner has just removed is free at the second try
# All that the folder of an unfinished run may hold.
UNFINISHED = ("checkpoint.pt", "checkpoint.pt.tmp", "lock")


@dataclass(frozen=True)
class RunFolder:
    """One run on one text: where its record is or will be, its lock and its checkpoint.

    corpus: a `Corpus.identity`; None: any text of the config's name.
    """

    config: RunConfig
    corpus: Identity | None
    folder: Path

    @property
    def name(self) -> str:
        return short_name(self.folder)

    @property
    def partial(self) -> Path:
        """Where the unfinished run keeps its checkpoint and its lock, beside its record to be."""
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def checkpoint(self) -> Path:
        return self.partial / "checkpoint.pt"

    def record(self, weights: bool = False) -> Record | None:
        """The record of this very config and text.

        None where it is missing, damaged, stale, or lacks weights that are wanted.
        """
        record = _read(self.folder)
        if record is None or not is_of(record, self.config, self.corpus):
            return None
        return record if record.weights or not weights else None

    def check_free(self) -> None:
        """Hold that a record may be written here: nothing is here but files of a record."""
        if not os.path.lexists(self.folder):
            return
        plain = self.folder.is_dir() and not self.folder.is_symlink()
        if not plain or not FILES.issuperset(os.listdir(self.folder)):
            raise FileExistsError(
                f"{self.folder} is a link, a file or a folder with files that no record has, "
                "and is not replaced: move it away, or give --runs another folder"
            )

    def locked(self) -> bool:
        """Whether a process trains this run now."""
        lock = self.partial / "lock"
        if not lock.exists():
            return False
        try:
            with FileLock(lock, timeout=0):
                return False
        except Timeout:
            return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process.

        Raises `RunLocked` if another one has it, OSError where there are no locks.

        The kernel drops the lock with the process that held it. What such a process had still to do
        is done first. A checkpoint goes when this is left without an error.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.partial / "lock", timeout=LOCK_SECONDS, poll_interval=0.02)
            try:
                lock.acquire()
            except (Timeout, FileNotFoundError) as error:
                # Not there: its last owner is removing the folder.
                raise RunLocked(f"{self.name} is being trained by another process") from error
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot lock a file below {self.folder.parent} ({error.strerror}): give --runs "
                "another folder, or one on another disk",
            ) from error
        with lock:
            try:
                finish_replacement(self.folder)
                yield
                self.checkpoint.unlink(missing_ok=True)
            finally:
                if not self.checkpoint.exists():
                    with contextlib.suppress(OSError):
                        remove(self.partial, UNFINISHED)


@dataclass(frozen=True)
class Runs:
    """The records below a folder, <preset>/<experiment>/<seed>; None: data/runs."""

    root: Folder = None

    @property
    def folder(self) -> Path:
        return Path(self.root or paths.RUNS)

    def of(self, run: RunConfig, corpus: Identity | None = None) -> RunFolder:
        """Where a run on a text lives; `corpus` is a `Corpus.identity`, None any text of the
        config's name.

        On another text it stands apart, and so it does on a text of the preset's name but another
        hash (which another version of Python makes) where the study has a record on its own: that
        is never replaced.
        """
        target = record_folder(run.preset, run.experiment, run.seed, self.folder)
        study = RunFolder(run, corpus, target)
        if corpus is None:
            return study
        if corpus["name"] == public_name(run.data.corpus):
            record = _read(target)
            if record is None or not is_of(record, run):
                return study
            if record.config["corpus"] == corpus:
                return study
        # Characters that no file system minds, and enough of the hash to tell two texts apart.
        slug = re.sub(r"[^A-Za-z0-9]+", "-", corpus["name"])[:80]
        digest = corpus["sha256"][:8]
        apart = f"{run.preset}@{slug}-{digest}"
        target = record_folder(apart, run.experiment, run.seed, self.folder)
        return RunFolder(run, corpus, target)

    def named(self, name: str | Path) -> Path | None:
        """The folder of a record by itself or by its name, preset/experiment/seed; None for what is
        no record.
        """
        folder = Path(name)
        if not folder.is_dir():
            folder = self.folder / name
        # One of them may be lost: reading the record says so.
        names = (SUMS, "provenance.json")
        return folder if any((folder / name).exists() for name in names) else None

    def missing(
        self,
        preset: str,
        seeds: Sequence[int] | None = None,
        corpus: Identity | None = None,
        only: Sequence[str] | None = None,
    ) -> list[RunConfig]:
        """The runs of `grid.plan` without a record on that corpus, in its order."""
        missing = []
        for run in plan(preset, seeds, only):
            if self.of(run, corpus).record() is None:
                missing.append(run)
        return missing

    def entries(self, preset: str) -> Iterator[Record]:
        """Every record of a preset, by experiment and seed; of a corrupt one, which is empty, a
        warning is given.

        They are shared among callers: nothing is to be written into one.
        Their status is done, failed (training did), stale, or corrupt. preset: also one on another
        text, as its folder is named: "laptop@path-mine-0123abcd".
        """
        find_preset(preset.partition("@")[0])
        check_name("preset", preset)
        if not self.folder.is_dir():
            warnings.warn(
                f"there are no records in {self.folder}: give --runs, or train some", stacklevel=3
            )
        folders = (self.folder / preset).glob("*/*")
        for folder in sorted(folders, key=_by_seed):
            if not re.fullmatch("0|[1-9][0-9]*", folder.name):  # no seed, so no record
                continue
            record = _shared(folder, _stamp(folder))
            if record.status == "corrupt":
                warnings.warn(str(record.reason), stacklevel=2)
            yield record


def _by_seed(folder: Path) -> tuple[str, int, str]:
    # As numbers: 10 comes after 9.
    return folder.parent.name, len(folder.name), folder.name


def record(name: str, preset: str = "laptop", seed: int = 0, folder: Folder = None) -> Record:
    """One record: of an experiment ("base": the preset's base), or of a name of one's own.

    Its `status` says whether it is current, as in `runs`. folder: of the records; None: data/runs.
    Raises FileNotFoundError where there is none, `CorruptRecord` where it is damaged.
    """
    base = preset.partition("@")[0]
    if base in PRESETS and (name == "base" or name in EXPERIMENTS):
        name = resolve(name, base)
    check_name("preset", preset)
    check_name("experiment", name)
    seed = integer("seed", seed, least=0)
    target = record_folder(preset, name, seed, folder)
    if not os.path.lexists(target):
        advice = f"python -m sinkutils train {name} --preset {base} --seed {seed}"
        raise FileNotFoundError(
            f"there is no record {short_name(target)} in {Runs(folder).folder}: {advice}"
        )
    entry = _with_status(target)
    if entry.status == "corrupt":
        raise CorruptRecord(entry.reason)
    return entry


def _stamp(folder: Path) -> frozenset[tuple[str, int, int]]:
    """What changes when a file of a record does; empty where it cannot be looked at."""
    files = set()
    try:
        for file in os.scandir(folder):
            stat = file.stat()
            files.add((file.name, stat.st_mtime_ns, stat.st_size))
    except OSError:  # which reading it will say
        return frozenset()
    return frozenset(files)


@lru_cache(maxsize=4096)  # who shows a preset asks for its records many times
def _shared(folder: Path, stamp: frozenset[tuple[str, int, int]]) -> Record:
    """A record for readers who write nothing into it."""
    return _with_status(folder)


def _with_status(folder: Path) -> Record:
    """A record with its status of `Runs.entries`; of a stale one only the config is checked."""
    # The preset's folder, "laptop", or on another text "laptop@path-mine-0123abcd".
    base, apart, _ = folder.parts[-3].partition("@")
    try:
        record = open_record(folder)
        try:
            run = config(record.experiment, base, record.seed)
        except ValueError as error:  # no such experiment at this preset
            return replace(record, problem=("stale", str(error)))
        if not is_of(record, run, record.config["corpus"] if apart else None):
            reason = "the experiment or the recipe has changed since: train it again"
            if record.config["recipe"] > RECIPE:
                reason = "a later version of this package made it: update the package"
            return replace(record, problem=("stale", reason))
        record.check()
        return record
    except CorruptRecord as error:
        return Record(folder, {}, {}, ("corrupt", str(error)))


def is_of(record: Record, run: RunConfig, corpus: Identity | None = None) -> bool:
    """Whether a record is of this very config and corpus; None: of any of the config's name."""
    # A record's config is the run's, and the text beside it.
    values = dict(record.config)
    text = values.pop("corpus")
    if corpus is None:
        corpus = {"name": public_name(run.data.corpus), "sha256": text["sha256"]}
    return text == corpus and values == config_dict(run)


def _read(folder: Path) -> Record | None:
    """The record in a folder; of a damaged one a warning says that it counts as missing."""
    try:
        return read_record(folder) if folder.exists() else None
    except CorruptRecord as error:
        warnings.warn(f"{error}; it counts as missing", stacklevel=4)
        return None
