"""What a run leaves behind: one small folder, written whole or not at all, and checked when it is
read.

data/runs/<preset>/<experiment>/<seed>/   or, on another text than the preset's,
<preset>@<corpus>-<hash>/..
    config.json        everything that determines the run, the recipe's number, and the corpus by
                       name and hash
    metrics.json       the curve and the final values, alpha of every head among them, or status
                       "failed" and the reason
    alpha.safetensors  alpha along the curve: (evaluations, targets and * if any, L, H), mean over
                       texts, float16
    provenance.json    device, precision, versions, time: never part of a comparison
    SHA256SUMS         a digest of every file above and of itself
    model.safetensors, tokenizer.json
                       only for the few runs that notebooks open, and what fine-tunings start from;
                       the weights may be deleted to save space, which makes it a record without
                       weights

The digests are of text with line ends as here, LF: a copy with those of Windows is the same record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from sinkutils import paths
from sinkutils.checks import first_line, require
from sinkutils.data.corpus import Identity
from sinkutils.data.tokenizer import open_tokenizer
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.paths import not_saved, sync_folder, write_synced
from sinkutils.study.config import Json, RunConfig, config_dict, from_dict, upgrade
from sinkutils.study.schema import Metrics

RULES = 4  # raised by hand when the rules change by which the ledger judges
CHECKPOINT_SECONDS = 20.0  # how often an unfinished run saves its state
SUMS = "SHA256SUMS"
ATTENTION = "alpha.safetensors"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
JSONS = ("config.json", "metrics.json", "provenance.json")
FILES = frozenset((*JSONS, ATTENTION, WEIGHTS, TOKENIZER, SUMS))  # all that a record may hold
Tensors = dict[str, Tensor]
Folder = Path | str | None  # of records; None: data/runs
ADVICE = "bring the folder back from where it came, or train the run again"


class CorruptRecord(RuntimeError):
    """A file of a record or a checkpoint is missing, truncated, changed or not of a run; the
    message names it.
    """


class RunLocked(RuntimeError):
    """Another process is training this run."""


@dataclass(frozen=True)
class Record:
    """One finished run, as read from its folder. Each file is checked when it is read.

    config: by today's fields (`upgrade`). digests: SHA-256 of each file by its name. problem: why
    it is no result of the study, as a status, "stale" or "corrupt", and a reason.
    """

    folder: Path
    config: Json
    digests: dict[str, str] = field(repr=False)
    problem: tuple[str, str] | None = None

    @property
    def experiment(self) -> str:
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        return int(self.folder.name)

    @property
    def status(self) -> str:
        """ "done" or "failed", which is training that failed; of `Runs.entries` also "stale" or
        "corrupt".
        """
        return self.problem[0] if self.problem else self.metrics["status"]

    @property
    def reason(self) -> str | None:
        """Why it is not done."""
        return self.problem[1] if self.problem else self.metrics["reason"]

    @cached_property
    def metrics(self) -> Metrics:
        """What metrics.json says."""
        metrics: Metrics = _read_json(self.folder, "metrics.json", self.digests)
        return metrics

    @cached_property
    def provenance(self) -> Json:
        """What provenance.json says."""
        provenance: Json = _read_json(self.folder, "provenance.json", self.digests)
        return provenance

    @property
    def arrays(self) -> Tensors:
        """What alpha.safetensors holds, "curve" above all; empty where there is none."""
        if ATTENTION not in self.digests:
            return {}
        with _explained(self.folder, ATTENTION):
            return load_tensors(_intact(self.folder, ATTENTION, self.digests))

    @property
    def weights(self) -> Path | None:
        """The weights' file where they were kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that was kept with the weights; `CorruptRecord` where there is none."""
        _intact(self.folder, TOKENIZER, self.digests)
        return open_tokenizer(self.folder / TOKENIZER)

    def load_weights(self) -> Tensors:
        """The trained weights by name.

        Raises `CorruptRecord` where their file is missing or has changed.
        """
        with _explained(self.folder, WEIGHTS):
            return load_tensors(_intact(self.folder, WEIGHTS, self.digests))

    def load_model(self) -> TransformerLM:
        """The trained model, on the CPU in float32.

        Raises `CorruptRecord` where its weights were not kept.
        """
        weights = self.load_weights()
        with _explained(self.folder, WEIGHTS):
            model = TransformerLM(from_dict(LMConfig, self.config["model"]))
            model.load_state_dict(weights)
        return model.eval()

    def check(self) -> None:
        """Hold that all but the weights is as it was written.

        Raises `CorruptRecord` for the first file that is not.
        """
        for name in self.digests:
            if name != WEIGHTS:
                _intact(self.folder, name, self.digests)


def record_folder(preset: str, experiment: str, seed: int, runs: Folder = None) -> Path:
    """Where the record of one run of the study lives."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def short_name(target: Path) -> str:
    """How messages call a record: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


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
    """Write a record whole or not at all; one that was there stays until the new one is on disk.

    metrics: numbers are rounded to five significant digits. corpus: `Corpus.identity` of the text;
    None: the config's own, of unknown hash. arrays: what alpha.safetensors holds. Raises OSError
    with advice when the disk is full.
    """
    # Every file in memory, before the first is written.
    values = config_dict(config)
    values["corpus"] = corpus or {"name": values["data"]["corpus"], "sha256": ""}
    parts = (values, rounded(metrics), provenance | versions())
    files = {}
    for name, part in zip(JSONS, parts, strict=True):
        text = json.dumps(part, separators=(",", ":"), sort_keys=True, allow_nan=False)
        files[name] = text.encode()
    if arrays:
        files[ATTENTION] = dump_tensors(arrays)
    if weights:
        files[WEIGHTS] = dump_tensors(weights)
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer.to_str().encode()
    # As `sha256sum` prints them, with a last line that is the digest of those above.
    sums = ""
    for name, data in files.items():
        sums += f"{_sha256(data)}  {name}\n"
    own = _sha256(sums.encode())
    files[SUMS] = f"{sums}{own}  {SUMS}\n".encode()
    new, old = _beside(target)
    try:
        finish_replacement(target)
        new.mkdir(parents=True)
        for name, data in files.items():
            write_synced(new / name, data)
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        sync_folder(target.parent)
        remove(old, FILES)
    except OSError as error:
        with contextlib.suppress(OSError):
            finish_replacement(target)
        raise not_saved(f"record {short_name(target)}", error) from error
    return open_record(target)


def _beside(target: Path) -> tuple[Path, Path]:
    """The hidden folders of a record's successor and of its predecessor, for a moment each."""
    new = target.with_name(f".{target.name}.tmp")
    old = target.with_name(f".{target.name}.old")
    return new, old


def finish_replacement(target: Path) -> None:
    """Clear up after a process that died while it wrote a record: the old one or the new one stays.

    For who holds the run's lock. Of a record that was not in place yet, the checkpoint is there.
    """
    new, old = _beside(target)
    if old.exists() and not target.exists():  # it died between two renames
        os.replace(old, target)
    remove(new, FILES)
    remove(old, FILES)


def remove(folder: Path, files: Collection[str]) -> None:
    """Delete a folder, if it is there, that holds nothing but some of these files.

    Raises OSError for one that holds others.
    """
    if folder.exists():
        for name in files:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def rounded(value: Any, digits: int = 5) -> Any:
    """What JSON makes of a value, with every float to so many significant digits."""

    def to_digits(written: str) -> float:
        return float(f"{float(written):.{digits}g}")

    return json.loads(json.dumps(value), parse_float=to_digits)


def versions() -> Json:
    """What ran, and the rules of the ledger that were known then."""
    known = {"rules": RULES, "python": platform.python_version(), "processor": platform.machine()}
    for module in (torch, numpy, tokenizers):
        known[module.__name__] = module.__version__
    if paths.CHECKOUT is not None:
        command = ["git", "-C", str(paths.CHECKOUT), "rev-parse", "--short=10", "HEAD"]
        with contextlib.suppress(OSError):  # no git here; in an archive of the code it says nothing
            git = subprocess.run(command, capture_output=True, text=True)
            known["commit"] = git.stdout.strip()
    return known


def read_record(target: Path) -> Record:
    """Read a record and check all of it but the weights.

    Raises `CorruptRecord`, which names the file.
    """
    record = open_record(target)
    record.check()
    return record


def open_record(target: Path) -> Record:
    """A record of which only the config is read, and the other files when they are asked for."""
    digests = _digests(target)
    config = _read_json(target, "config.json", digests)
    with _explained(target, "config.json"):
        config = upgrade(config)
    return Record(target, config, digests)


def _digests(target: Path) -> dict[str, str]:
    """What SHA256SUMS says: the digest of each file by its name."""
    try:
        text = _text((target / SUMS).read_bytes()).decode()
        *lines, own = text.splitlines(keepends=True)
        digest = _sha256("".join(lines).encode())
        require(own == f"{digest}  {SUMS}\n", "changed")
        digests = {}
        for line in lines:
            digest, name = line.split()
            digests[name] = digest
    except (OSError, ValueError) as error:
        raise CorruptRecord(
            f"record {short_name(target)}: {SUMS} is missing or damaged: {ADVICE}"
        ) from error
    with _explained(target, SUMS):
        complete = set(JSONS) <= digests.keys() <= FILES
        require(complete, f"it lists {', '.join(sorted(digests))}")
    return digests


def _read_json(target: Path, name: str, digests: dict[str, str]) -> Any:
    with _explained(target, name):
        return json.loads(_intact(target, name, digests), parse_constant=_no_number)


def _intact(target: Path, name: str, digests: dict[str, str]) -> bytes:
    """What a file of a record holds, if it is as it was written."""
    data = b""
    with contextlib.suppress(OSError):
        data = (target / name).read_bytes()
    if not name.endswith(".safetensors"):
        data = _text(data)
    if _sha256(data) != digests.get(name):
        raise CorruptRecord(
            f"record {short_name(target)}: {name} is missing, truncated or changed, or cannot be "
            f"read: {ADVICE}"
        )
    return data


@contextlib.contextmanager
def _explained(target: Path, name: str) -> Iterator[None]:
    """Make `CorruptRecord` of what Python raises about a file that is whole, yet no run's."""
    try:
        yield
    except CorruptRecord:
        raise
    except Exception as error:  # of whatever kind: nothing is known of such values
        reason = str(error) if isinstance(error, ValueError) else first_line(error)
        raise CorruptRecord(
            f"record {short_name(target)}: {name} is whole, and of no run that this version of the "
            "package knows: " + " ".join(reason.split())
        ) from error


def _text(data: bytes) -> bytes:
    """A text file with line ends as they were written, whatever a checkout or a zip tool made of
    them.

    Nothing is lost by it: inside the strings of JSON a line end is written as two letters.
    """
    return data.replace(b"\r\n", b"\n")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
