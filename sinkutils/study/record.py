"""What a run leaves behind: one small folder, written whole or not at all, and checked when it is read.

data/runs/<preset>/<experiment>/<seed>/   or, on another text than the preset's, <preset>@<corpus>-<hash>/..
    config.json       everything that determines the run, the recipe's number, and the corpus by name and hash
    metrics.json      the curve and the final values, or status "failed" and the reason
    alpha.safetensors alpha along the curve: (evaluations, targets and * if any, L, H), mean over texts, float16
    provenance.json   device, precision, versions, time: never part of a comparison
    SHA256SUMS        a digest of every file above and of itself
    model.safetensors, tokenizer.json   only for the few runs that notebooks open, and what fine-tunings start from;
                      the weights may be deleted to save space, which makes it a record without weights
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
from filelock import FileLock, Timeout
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from sinkutils import paths
from sinkutils.checks import require
from sinkutils.data.corpus import Identity, public_name
from sinkutils.study.config import Json, RunConfig

RECIPE = 2  # raised by hand when a change to the trainer or the model changes the numbers of its runs
RULES = 4  # raised by hand when the rules change by which the ledger judges
CHECKPOINT_SECONDS = 20.0  # how often an unfinished run saves its state
LOCK_SECONDS = 0.2  # a lock whose file its last owner has just removed is free at the second try
SUMS = "SHA256SUMS"
ALPHA = "alpha.safetensors"
WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]
Folder = Path | str | None  # of records; None: data/runs
ADVICE = "delete the folder and train the run again"


class CorruptRecord(RuntimeError):
    """A file of a record or a checkpoint is missing, truncated or changed; the message names it."""


class RunLocked(RuntimeError):
    """Another process is training this run."""


@dataclass(frozen=True)
class Record:
    """One finished run, as read from its folder. digests: SHA-256 of each file by its name."""

    folder: Path
    config: Json
    metrics: Json
    provenance: Json
    digests: dict[str, str] = field(repr=False)

    @property
    def experiment(self) -> str:
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        return int(self.folder.name)

    @property
    def status(self) -> str:
        """ "done" or "failed", which is training that failed; of `Runs.entries` also "stale" or "corrupt"."""
        return self.metrics["status"]

    @property
    def reason(self) -> str | None:
        """Why it is not done."""
        return self.metrics["reason"]

    @property
    def arrays(self) -> Tensors:
        """What alpha.safetensors holds, "curve" above all; empty where there is none."""
        return load_tensors(_intact(self.folder, ALPHA, self.digests)) if ALPHA in self.digests else {}

    @property
    def weights(self) -> Path | None:
        """The weights' file where they were kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None

    def load_weights(self) -> Tensors:
        """The trained weights by name. Raises `CorruptRecord` where their file is missing or has changed."""
        return load_tensors(_intact(self.folder, WEIGHTS, self.digests))


def record_folder(preset: str, experiment: str, seed: int, runs: Folder = None) -> Path:
    """Where the record of one run of the study lives."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def short_name(target: Path) -> str:
    """How messages call a record: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


def partial_folder(target: Path) -> Path:
    """Where an unfinished run keeps its checkpoint and its lock, beside the record it will become."""
    return target.with_name(target.name + ".partial")


def config_dict(config: RunConfig) -> Json:
    """What config.json holds beside the corpus that the run was made on: the config and the recipe's number.

    Texts have their public names: nothing of the machine.
    """
    values = json.loads(json.dumps({**dataclasses.asdict(config), "recipe": RECIPE}))
    for part, name in ((values["data"], "corpus"), (values["data"], "validation"), (values, "instructions")):
        if part.get(name):
            part[name] = public_name(part[name])
    return values


def config_hash(config: RunConfig) -> str:
    """SHA-256 of what determines a run, apart from its text; fine-tunings name their start by it.

    It goes by the fields that the first records had: `bos`, always False, and no `unscored` where it is empty.
    """
    values = config_dict(config)
    values["data"]["bos"] = False
    if not values["data"]["unscored"]:
        del values["data"]["unscored"]
    return _sha256((json.dumps(values, indent=1, sort_keys=True) + "\n").encode())


def write_record(
    target: Path,
    config: RunConfig,
    metrics: Json,
    provenance: Json,
    weights: Tensors | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    corpus: Identity | None = None,
    arrays: Tensors | None = None,
) -> Record:
    """Write a record whole or not at all; one that was there is replaced only once the new one is on disk.

    metrics: numbers are rounded to five significant digits. corpus: `Corpus.identity` of the text; None: the config's
    own, of unknown hash. arrays: what alpha.safetensors holds. Raises OSError with advice when the disk is full.
    """
    values = config_dict(config)
    values["corpus"] = corpus or {"name": values["data"]["corpus"], "sha256": ""}
    parts = {"config": values, "metrics": rounded(metrics), "provenance": provenance | versions()}
    files = {}
    for name, part in parts.items():
        files[f"{name}.json"] = json.dumps(part, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    for name, tensors in {ALPHA: arrays, WEIGHTS: weights}.items():
        if tensors:
            files[name] = dump_tensors(tensors)
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_str().encode()
    sums = "".join(f"{_sha256(data)}  {name}\n" for name, data in files.items())
    files[SUMS] = f"{sums}{_sha256(sums.encode())}  {SUMS}\n".encode()
    new = target.with_name(f".{target.name}.tmp")  # whoever holds the run's lock is its only writer
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        for name, data in files.items():
            write_synced(new / name, data)
        if target.exists():
            shutil.rmtree(target)
        os.replace(new, target)
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise not_saved(f"record {short_name(target)}", error) from error
    return read_record(target)


def rounded(value: Any) -> Any:
    """What JSON makes of a value, with every float to five significant digits."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def versions() -> Json:
    """What ran, and the rules of the ledger that were known then."""
    known = {"rules": RULES, "python": platform.python_version(), "processor": platform.machine()}
    known |= {module.__name__: module.__version__ for module in (torch, numpy, tokenizers)}
    if paths.CHECKOUT is not None:
        command = ["git", "-C", str(paths.CHECKOUT), "rev-parse", "--short=10", "HEAD"]
        with contextlib.suppress(OSError):  # no git here; in an archive of the code it says nothing
            known["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return known


def read_record(target: Path) -> Record:
    """Read a record, each file but the weights against its digest. Raises `CorruptRecord`, which names the file."""
    try:
        *lines, own = (target / SUMS).read_bytes().decode().splitlines(keepends=True)
        require(own == f"{_sha256(''.join(lines).encode())}  {SUMS}\n", "changed")
        digests = dict(line.split()[::-1] for line in lines)
    except (OSError, ValueError) as error:
        raise CorruptRecord(f"record {short_name(target)}: {SUMS} is missing or damaged: {ADVICE}") from error
    files = {name: _intact(target, name, digests) for name in digests if name != WEIGHTS}
    config, metrics, provenance = (json.loads(files[f"{part}.json"]) for part in ("config", "metrics", "provenance"))
    return Record(target, config, metrics, provenance, digests)


def _intact(target: Path, name: str, digests: dict[str, str]) -> bytes:
    path = target / name
    data = path.read_bytes() if path.is_file() else b""
    if _sha256(data) != digests.get(name):
        raise CorruptRecord(f"record {short_name(target)}: {name} is missing, truncated or changed: {ADVICE}")
    return data


@contextlib.contextmanager
def run_lock(target: Path) -> Iterator[None]:
    """Hold the run of `target` for this process; raises `RunLocked` if another one has it.

    The kernel drops the lock with the process that held it.
    """
    partial = partial_folder(target)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(partial / "lock", timeout=LOCK_SECONDS, poll_interval=0.02).acquire()
    except (Timeout, FileNotFoundError) as error:  # not there: its last owner is removing the folder
        raise RunLocked(f"{short_name(target)} is being trained by another process") from error
    with lock:
        yield
        if target.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_saved(what: str, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"could not save {what} ({error.strerror}): free some space and run the same command again; what was saved "
        "before is intact",
    )
