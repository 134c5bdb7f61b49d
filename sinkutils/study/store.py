"""The folders of runs and their records.

This is the only module that decides which record belongs to a run, and whether a record is complete
and up to date.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from sinkutils import paths
from sinkutils.checks import integer, require
from sinkutils.paths import replace_file, standing
from sinkutils.study import grid
from sinkutils.study.config import (
    RECIPE,
    FinetuneConfig,
    Identity,
    Json,
    RunConfig,
    check_name,
    config_dict,
    public_name,
)
from sinkutils.study.grid import by_name, plan, presets, resolve
from sinkutils.study.record import (
    FILES,
    STRAY,
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
from sinkutils.study.tables import Entry, Of, entries_of

if TYPE_CHECKING:
    from sinkutils.study.corpus import Corpus

# How long to try for a lock. One try is not enough: the last owner may just be removing the file.
LOCK_SECONDS = 0.2
# All files that the folder of an unfinished run may have; those of paths.replace_file are deleted.
UNFINISHED = ("checkpoint.pt", "lock", "owner")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run on one text, with its record, its lock and its checkpoint.

    corpus: the `Corpus.identity` of the text. None means any text with the name in the config.
    folder: where the record is, or will be.
    """

    config: RunConfig
    corpus: Identity | None
    folder: Path

    @property
    def name(self) -> str:
        return short_name(self.folder)

    @property
    def partial(self) -> Path:
        """The folder of the lock and, while the run is unfinished, of its checkpoint.

        It lies beside the folder of the record.
        """
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def checkpoint(self) -> Path:
        return self.partial / "checkpoint.pt"

    def record(self, weights: bool = False) -> Record | None:
        """The record of exactly this config and text.

        Returns None if it is missing, damaged or stale, or if `weights` is set and it has none.
        """
        record = _read(self.folder)
        if record is None or not is_of(record, self.config, self.corpus):
            return None
        return record if record.weights or not weights else None

    def check_free(self) -> None:
        """Check that a record may be written here.

        Raises FileExistsError if the folder exists and is not simply one with a record's files.
        """
        if not os.path.lexists(self.folder):
            return
        plain = self.folder.is_dir() and not self.folder.is_symlink()
        if not plain or not (FILES | STRAY).issuperset(os.listdir(self.folder)):
            raise FileExistsError(
                f"{self.folder} is a link, a file or a folder with files that no record has, "
                "and is not replaced: move it away, or give --runs another folder"
            )

    def locked(self) -> bool:
        """Whether another process is training this run now."""
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
        """A context manager that locks the run for this process.

        If a process dies, the kernel releases its lock. If it died while it wrote a record, that is
        cleaned up here first. The checkpoint is deleted at the end, unless there was an error.

        Raises `RunLocked` if another process has the lock, and OSError if the file system has no
        locks.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.partial / "lock", timeout=LOCK_SECONDS, poll_interval=0.02)
            try:
                lock.acquire()
            except (Timeout, FileNotFoundError) as error:
                # FileNotFoundError means that the last owner is just removing the folder.
                raise RunLocked(f"{self.name} is being trained by another process") from error
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot lock a file below {self.folder.parent} ({error.strerror}): give --runs "
                "another folder, or one on another disk",
            ) from error
        with lock:
            try:
                self._own()
                finish_replacement(self.folder)
                for half in self.partial.glob(".*.tmp"):  # of a process that died while it wrote
                    half.unlink()
                yield
                self.checkpoint.unlink(missing_ok=True)
            finally:
                self._own(ended=True)
                if not self.checkpoint.exists():
                    with contextlib.suppress(OSError):
                        remove(self.partial, UNFINISHED)

    def _own(self, ended: bool = False) -> None:
        """Write beside the lock who has it. At the end, delete that.

        Not all file systems that machines share share locks too. So a warning says if a process on
        another machine has, or may have, trained this run at the same time.
        """
        file = self.partial / "owner"
        mine = f"{socket.gethostname()} {os.getpid()}"
        other = ""
        with contextlib.suppress(OSError):
            other = file.read_text(encoding="utf-8", errors="replace")
        host = other.partition(" ")[0]
        if host and host != socket.gethostname():
            warnings.warn(
                f"{self.name}: a process on {host} began this run and has not ended it: if it "
                "still runs, these machines share no locks, and each trains the whole run; the "
                "record is whole whichever ends last",
                stacklevel=5,
            )
        if not ended:
            replace_file(file, mine.encode())
        elif other == mine:
            file.unlink(missing_ok=True)  # the other machine may just have taken the folder away


@dataclass(frozen=True)
class Runs:
    """All records below a folder, as <preset>/<experiment>/<seed>. None means data/runs."""

    root: Folder = None

    @property
    def folder(self) -> Path:
        return Path(self.root or paths.RUNS)

    def of(self, run: RunConfig, corpus: Identity | None = None) -> RunFolder:
        """The folder of a run on a text.

        corpus: the `Corpus.identity` of the text. None means any text with the name in the config.

        A run on another text than the config's has a folder of its own, so that it never replaces a
        record of the study. The same holds if the text has the right name but another hash, as with
        another version of Python, and the study has a record already.
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
        # Only characters that every file system accepts, and enough of the hash to tell two texts
        # apart.
        slug = re.sub(r"[^A-Za-z0-9]+", "-", corpus["name"])[:80]
        digest = corpus["sha256"][:8]
        apart = f"{run.preset}@{slug}-{digest}"
        target = record_folder(apart, run.experiment, run.seed, self.folder)
        return RunFolder(run, corpus, target)

    def missing(
        self,
        preset: str,
        seeds: Sequence[int] | None = None,
        corpus: Identity | None = None,
        only: Sequence[str] | None = None,
        **variant: Any,
    ) -> list[RunConfig]:
        """The runs of `grid.plan` that have no record on that corpus, in the same order."""
        runs = plan(preset, seeds, only, **variant)
        return [run for run in runs if self.of(run, corpus).record() is None]

    def entries(self, preset: str, of: Of | None = None) -> list[Entry]:
        """Every record of a preset, sorted by experiment and seed, with a value of each.

        preset: the name of a preset, or that of the folder for another text, such as
        "laptop@path-mine-0123abcd".
        of: gives the value of a record that is intact (`tables.entries_of`).

        The status of a record is done, failed (the training failed), stale or corrupt. A corrupt
        record has no config and no value, and causes a warning.
        """
        check_name("preset", preset)
        if not (self.folder / preset).is_dir():
            grid.find_preset(preset.partition("@")[0])  # its error lists the presets
        if not self.folder.is_dir():
            warnings.warn(
                f"there are no records in {self.folder}: give --runs, or train some", stacklevel=3
            )
        entries = []
        for entry in entries_of(self.folder / preset, of):
            if entry.status == "corrupt":
                warnings.warn(str(entry.reason), stacklevel=2)
            elif reason := _stale(entry.config, preset, entry.experiment, entry.seed):
                entry = entry._replace(status="stale", reason=reason)
            entries.append(entry)
        return entries


def record(name: str, preset: str = "laptop", seed: int = 0, folder: Folder = None) -> Record:
    """One record, by its experiment ("base" for the preset's base) or by a name of your own.

    Its `status` says whether it is up to date, as in `runs`. folder: the folder of the records, by
    default data/runs. Raises FileNotFoundError if there is no such record, and `CorruptRecord` if
    it is damaged.
    """
    base = preset.partition("@")[0]
    if base in presets() and (name == "base" or name in by_name()):
        name = resolve(name, base)
    check_name("preset", preset)
    check_name("experiment", name)
    seed = integer("seed", seed, least=0)
    target = record_folder(preset, name, seed, folder)
    target = standing(target)
    if not os.path.lexists(target):
        advice = f"python -m sinkutils train {name} --preset {base} --seed {seed}"
        raise FileNotFoundError(
            f"there is no record {short_name(target)} in {Runs(folder).folder}: {advice}"
        )
    record = open_record(target)
    reason = _stale(record.config, preset, name, seed)
    if reason:  # nothing but its config is checked now
        return replace(record, stale=reason)
    record.check_contents()
    return record


def _stale(config: Json, preset: str, experiment: str, seed: int) -> str:
    """Why a record with this config is stale in the folder of a preset and an experiment, or "".

    An experiment of the study has one config at a preset. A variant of one's own, or an experiment
    at a preset of one's own, may have any.
    """
    # The folder of a preset, or for another text such as "laptop@path-mine-0123abcd".
    base, apart, _ = preset.partition("@")
    wanted: Json = {"preset": base, "experiment": experiment, "seed": seed, "recipe": RECIPE}
    if base in presets() and experiment in by_name():
        try:
            wanted = grid.contents(experiment, base, seed)
        except ValueError as error:  # the preset has no such experiment
            return str(error)
        if not apart:
            wanted = wanted | {"corpus": {"name": wanted["data"]["corpus"]}}
    fields = sorted(_different(wanted, config))
    if not fields:
        return ""
    if config["recipe"] > RECIPE:
        return "a later version of this package made it: update the package"
    return (
        f"the run of that name has changed since, in {', '.join(fields)}: train it again (a variant "
        "of your own needs a name of its own)"
    )


def _different(wanted: Json, config: Json, path: str = "") -> Iterator[str]:
    """The dotted paths of the fields of `wanted` that a config does not have or has otherwise."""
    for name, value in wanted.items():
        other = config.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _different(value, other, f"{path}{name}.")
        elif value != other:
            yield f"{path}{name}"


def is_of(record: Record, run: RunConfig, corpus: Identity | None = None) -> bool:
    """Whether a record has exactly this config and corpus.

    corpus: None means any text with the name in the config.
    """
    # A record's config is that of its run, with the corpus as one more entry.
    values = dict(record.config)
    text = values.pop("corpus")
    if corpus is None:
        corpus = {"name": public_name(run.data.corpus), "sha256": text["sha256"]}
    return text == corpus and values == config_dict(run)


def _read(folder: Path) -> Record | None:
    """The record in a folder, or None. A damaged one counts as missing, and causes a warning."""
    try:
        return read_record(folder) if folder.exists() else None
    except CorruptRecord as error:
        warnings.warn(f"{error}; it counts as missing", stacklevel=4)
        return None


# ---- what a training asks before its first step


def claim(
    config: RunConfig, runs: Folder, corpus: Corpus | str | None, weights: bool
) -> tuple[RunFolder, Corpus | None, Record | None]:
    """The folder of a run, its text, and the record that it has already, if there is one.

    The arguments are those of `train`. With a record of the config's own text, that text is not
    opened, and None stands for it. A warning says if a run is trained on another text than its own.
    """
    from sinkutils.study.corpus import Corpus, load_corpus

    store = Runs(runs)
    own = store.of(config)
    if corpus is None:
        done = own.record(weights)
        if done is not None:
            return own, None, done
    text = corpus
    vocabulary = config.model.vocab_size
    if not isinstance(text, Corpus):
        text = load_corpus(text or config.data.corpus, vocabulary)
    what = f"corpus {text.name!r} with {text.vocab_size} tokens"
    require(
        text.vocab_size <= vocabulary,
        f"{what} is too large for a model of {vocabulary}: "
        "raise vocab_size or load the corpus with fewer",
    )
    place = store.of(config, text.identity)
    if place.folder != own.folder or text.vocab_size != vocabulary:
        warnings.warn(
            f"training on {what} in place of {public_name(config.data.corpus)!r} "
            f"with {vocabulary}, its own text: the record is {place.name}",
            stacklevel=3,
        )
    return place, text, place.record(weights)


def before(config: FinetuneConfig) -> RunConfig:
    """The run that a fine-tuning starts from."""
    return grid.config(config.start, config.preset, config.seed)


def start_of(config: FinetuneConfig, store: Runs, text: Corpus) -> Record | None:
    """The record that a fine-tuning starts from, or None if this run has yet to be trained.

    If there is no record on this text, one on the config's own text is taken.
    """
    run = before(config)
    record = store.of(run, text.identity).record() or store.of(run).record()
    if record is not None and record.status == "done" and record.weights is None:
        return None
    return record
