"""The folders of runs and their records: where they are, who trains them, and how one is written.

This is the only module that decides which record belongs to a run, and whether it is up to date.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from sinkutils import paths
from sinkutils.checks import integer
from sinkutils.paths import not_saved, replace_file, standing, sync_folder, write_synced
from sinkutils.study import grid
from sinkutils.study.config import (
    RECIPE,
    Identity,
    Json,
    RunConfig,
    check_name,
    config_dict,
    public_name,
)
from sinkutils.study.grid import by_name, plan, presets, resolve
from sinkutils.study.record import (
    ADVICE,
    ATTENTION,
    FILES,
    JSONS,
    LITTER,
    STRAY,
    SUMS,
    TOKENIZER,
    WEIGHTS,
    CorruptRecord,
    Folder,
    Record,
    RunLocked,
    read_record,
    record_folder,
    rounded,
    sha256,
    short_name,
    versions,
)
from sinkutils.study.tables import Entry, Of, entries_of

if TYPE_CHECKING:  # a list of records needs none of these
    from tokenizers import Tokenizer
    from torch import Tensor

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
        if corpus is None:
            return RunFolder(run, None, target)
        if corpus["name"] == public_name(run.data.corpus):
            record = RunFolder(run, None, target).record()
            if record is None or record.config["corpus"] == corpus:
                return RunFolder(run, corpus, target)
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
            if entry.status != "corrupt":
                reason = _stale(entry.config, preset, entry.experiment, entry.seed)
                entry = entry._replace(status="stale", reason=reason) if reason else entry
            entries.append(entry)
        entries = _without_copies(entries, preset)
        for entry in entries:
            if entry.status == "corrupt":
                warnings.warn(str(entry.reason), stacklevel=2)
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
    record = read_record(target)
    return replace(record, stale=_stale(record.config, preset, name, seed))


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


def _without_copies(entries: list[Entry], preset: str) -> list[Entry]:
    """The entries; corrupt are those of an experiment that share their metrics.json.

    No two seeds have the same curve, so that one of them holds the file of another.
    """
    times = Counter((x.experiment, x.digest) for x in entries if x.digest and x.status != "stale")
    checked = []
    for entry in entries:
        if times[entry.experiment, entry.digest] > 1 and entry.status != "stale":
            name = f"{preset}/{entry.experiment}/{entry.seed}"
            reason = f"record {name}: metrics.json is that of another seed as well: {ADVICE}"
            entry = entry._replace(status="corrupt", reason=reason, config={}, value=None)
        checked.append(entry)
    return checked


def is_of(record: Record, run: RunConfig, corpus: Identity | None = None) -> bool:
    """Whether a record has exactly this config and corpus.

    corpus: None means any text with the name in the config.
    """
    # A record's config is that of its run, with the corpus as one more entry.
    text = corpus or {"name": public_name(run.data.corpus)}
    return not any(_different(config_dict(run) | {"corpus": text}, record.config))


def _read(folder: Path) -> Record | None:
    """The record in a folder, or None. A damaged one counts as missing, and causes a warning."""
    try:
        return read_record(folder) if folder.exists() else None
    except CorruptRecord as error:
        warnings.warn(f"{error}; it counts as missing", stacklevel=4)
        return None


# ---- writing a record


def write_record(
    target: Path,
    config: RunConfig,
    metrics: Json,
    provenance: Json,
    weights: dict[str, Tensor] | None = None,
    tokenizer: Tokenizer | None = None,
    corpus: Identity | None = None,
    arrays: dict[str, Tensor] | None = None,
) -> Record:
    """Write a record as a whole or not at all.

    An old record stays in place until the new one is complete on disk.

    metrics: its numbers are rounded to five significant digits.
    corpus: `Corpus.identity` of the text. None means the corpus of the config, with unknown hash.
    arrays: the contents of alpha.safetensors.
    Raises OSError with advice if the disk is full.
    """
    from safetensors.torch import save

    # The contents of all files are made in memory before the first file is written.
    values = config_dict(config)
    values["corpus"] = corpus or {"name": values["data"]["corpus"], "sha256": ""}
    parts = (values, rounded(metrics), provenance | versions())
    files = {}
    for name, part in zip(JSONS, parts, strict=True):
        text = json.dumps(part, separators=(",", ":"), sort_keys=True, allow_nan=False)
        files[name] = text.encode()
    if arrays:
        files[ATTENTION] = save(arrays)
    if weights:
        files[WEIGHTS] = save(weights)
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer.to_str().encode()
    # The lines are those of `sha256sum`. The last one is the digest of the lines above it.
    sums = ""
    for name, data in files.items():
        sums += f"{sha256(data)}  {name}\n"
    own = sha256(sums.encode())
    files[SUMS] = f"{sums}{own}  {SUMS}\n".encode()
    new, old = _beside(target)
    try:
        finish_replacement(target)
        new.mkdir(parents=True)
        for name, data in files.items():
            write_synced(new / name, data)
        sync_folder(new)
        # The old record moves aside, then the new one takes its place. If the process dies between
        # the two renames, `finish_replacement` puts the old one back.
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        for folder in target.parents[:3]:  # up to the folder of all records: each may be new
            sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            finish_replacement(target)
        raise not_saved(f"record {short_name(target)}", error) from error
    _clear_away(old, target)  # the new record is in place, so that nothing can fail any more
    return read_record(target)


def _beside(target: Path) -> tuple[Path, Path]:
    """Two hidden folders beside a record: the new one while it is written, and the old one.

    Both exist only while a record is replaced.
    """
    return target.with_name(f".{target.name}.tmp"), target.with_name(f".{target.name}.old")


def finish_replacement(target: Path) -> None:
    """Clean up after a process that died while it wrote a record. The caller holds the run's lock.

    Either the old record or the new one is in place afterwards. A new record that was not yet in
    place is lost, but the run's checkpoint is still there.
    """
    new, old = _beside(target)
    if old.exists() and not target.exists():  # the process died between the two renames
        os.replace(old, target)
    _clear_away(new, target)
    _clear_away(old, target)


def _clear_away(old: Path, target: Path) -> None:
    """Delete an old record. If its folder has files of others, it gets a name that shows it."""
    with contextlib.suppress(OSError):
        remove(old, FILES)
        return
    aside = target.with_name(f"{target.name}.replaced")
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}-1")
    with contextlib.suppress(OSError):
        os.replace(old, aside)
        warnings.warn(
            f"record {short_name(target)} is replaced; its old folder had other files, and is now "
            f"{aside.name}",
            stacklevel=3,
        )


def remove(folder: Path, files: Collection[str]) -> None:
    """Delete a folder, if it exists, that has no other files than these. Of a link only the link.

    Raises OSError if it has others.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        for name in (*files, *LITTER):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
