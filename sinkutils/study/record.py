"""Records: the small folder of results that each finished run leaves.

A record is written as a whole or not at all, and it is checked when it is read. Its folder is
data/runs/<preset>/<experiment>/<seed>, or <preset>@<corpus>-<hash>/.. if the run was trained on
another text than the preset's. The folder holds these files:

    config.json        everything that determines the run, the number of the recipe, and the name
                       and hash of the corpus
    metrics.json       the curve and the final values, including alpha of every head; for a run that
                       failed, status "failed" and the reason
    alpha.safetensors  alpha along the curve, as float16 means over texts, of shape (evaluations,
                       targets, L, H); * is the last target if the model has one
    provenance.json    device, precision, versions and time, which no comparison uses
    SHA256SUMS         a digest of every file above, and of itself
    model.safetensors, tokenizer.json
                       only for the few runs that notebooks open or fine-tunings start from. The
                       weights may be deleted to save space: the record is then one without weights.

The digests are computed with LF as line ends, so that a copy with those of Windows is valid too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import stat
import subprocess
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkutils import paths
from sinkutils.checks import Refused, first_line, real, require
from sinkutils.paths import not_saved, sync_folder, write_synced
from sinkutils.study.config import (
    Identity,
    Json,
    RunConfig,
    check_config,
    config_dict,
    from_dict,
    upgrade,
)
from sinkutils.study.metrics import Metrics, check_metrics

if TYPE_CHECKING:  # a list of records needs none of these
    import numpy as np
    from tokenizers import Tokenizer
    from torch import Tensor

    from sinkutils.model.decoder import TransformerLM

RULES = 4  # is raised by hand when the rules by which the ledger judges change
CHECKPOINT_SECONDS = 20.0  # how often an unfinished run saves its state
SUMS = "SHA256SUMS"
ATTENTION = "alpha.safetensors"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
JSONS = ("config.json", "metrics.json", "provenance.json")
FILES = frozenset((*JSONS, ATTENTION, WEIGHTS, TOKENIZER, SUMS))  # all files that a record may have
# What systems and editors put into any folder. The first kind is deleted with the folder.
LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")
STRAY = frozenset((*LITTER, ".ipynb_checkpoints"))
LARGEST = 2**27  # the most bytes of a file other than the weights
Folder = Path | str | None  # a folder of records; None means data/runs
ADVICE = "bring the folder back from where it came, or train the run again"


class CorruptRecord(RuntimeError):
    """A file of a record or checkpoint is missing, truncated, changed or not that of a run.

    The message names the file.
    """


class RunLocked(RuntimeError):
    """Another process is training this run."""


@dataclass(frozen=True)
class Record:
    """The record of one finished run. Each file is checked when it is read.

    config: the run's config, with the fields that configs have today (`study.config.upgrade`).
    digests: the SHA-256 of each file, by its name.
    stale: why the run of its name has another config today, or "".
    """

    folder: Path
    config: Json
    digests: dict[str, str] = field(repr=False)
    stale: str = ""

    @property
    def experiment(self) -> str:
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        return seed_of(self.folder)

    @property
    def status(self) -> str:
        """The status: "done", or "failed" if the training failed, or "stale"."""
        return "stale" if self.stale else self.metrics["status"]

    @property
    def reason(self) -> str | None:
        """Why the status is not "done", or None."""
        return self.stale or self.metrics["reason"]

    @cached_property
    def metrics(self) -> Metrics:
        """The contents of metrics.json. Raises `CorruptRecord` if they are of no run."""
        metrics: Metrics = _read_json(self.folder, "metrics.json", self.digests)
        with _explained(self.folder, "metrics.json"):
            check_metrics(metrics, self.config["model"])
        return metrics

    @cached_property
    def provenance(self) -> Json:
        """The contents of provenance.json."""
        provenance: Json = _read_json(self.folder, "provenance.json", self.digests)
        with _explained(self.folder, "provenance.json"):
            real("wall_seconds", provenance.get("wall_seconds", 0.0), "a number of seconds")
        return provenance

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays in alpha.safetensors, mainly "curve". Empty if there is no such file."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.read_arrays().items()}

    def read_arrays(self) -> dict[str, np.ndarray]:
        """The same as arrays of NumPy, for which PyTorch is not needed."""
        if ATTENTION not in self.digests:
            return {}
        from safetensors.numpy import load

        with _explained(self.folder, ATTENTION):
            arrays: dict[str, np.ndarray] = load(_intact(self.folder, ATTENTION, self.digests))
            return arrays

    @property
    def weights(self) -> Path | None:
        """The file of the weights, or None if they were not kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was kept with the weights. Raises `CorruptRecord` if there is none."""
        from sinkutils.measuring.tokenizer import open_tokenizer

        _intact(self.folder, TOKENIZER, self.digests)
        return open_tokenizer(self.folder / TOKENIZER)

    def load_weights(self) -> dict[str, Tensor]:
        """The trained weights, by name.

        Raises `CorruptRecord` if their file is missing or has changed.
        """
        from safetensors.torch import load

        with _explained(self.folder, WEIGHTS):
            weights: dict[str, Tensor] = load(_intact(self.folder, WEIGHTS, self.digests))
            return weights

    def load_model(self) -> TransformerLM:
        """The trained model, on the CPU in float32.

        Raises `CorruptRecord` if its weights were not kept.
        """
        from sinkutils.model.config import LMConfig
        from sinkutils.model.decoder import TransformerLM

        weights = self.load_weights()
        with _explained(self.folder, WEIGHTS):
            model = TransformerLM(from_dict(LMConfig, self.config["model"]))
            model.load_state_dict(weights)
        return model.eval()

    def check_config(self) -> None:
        """Raise `CorruptRecord` unless the config is a possible one."""
        with _explained(self.folder, "config.json"):
            check_config(self.config)

    def check(self) -> None:
        """Check that all files but the weights are as they were written.

        Raises `CorruptRecord` for the first file that has changed.
        """
        for name in self.digests:
            if name != WEIGHTS:
                _intact(self.folder, name, self.digests)

    def check_contents(self) -> None:
        """The same, and check that what readers use is of a run.

        Raises `CorruptRecord` for the first file that has changed, or whose contents no run writes.
        """
        if TOKENIZER in self.digests:
            _intact(self.folder, TOKENIZER, self.digests)
        _ = self.metrics, self.provenance
        curve = self.read_arrays().get("curve")
        with _explained(self.folder, ATTENTION):
            maps = (self.config["model"]["num_layers"], self.config["model"]["num_heads"])
            fits = curve is None or (
                curve.ndim == 4
                and len(curve) == len(self.metrics["curve"])
                and curve.shape[2:] == maps
                and bool((abs(curve) < 2).all())  # also not true of NaN
            )
            require(fits, "its curve is no alpha of such a model")


def record_folder(preset: str, experiment: str, seed: int, runs: Folder = None) -> Path:
    """The folder for the record of one run of the study."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def seed_of(folder: Path) -> int:
    """The seed of a record's folder: "7", or ".7.old" while it is replaced (`_beside`)."""
    return int(folder.name.removeprefix(".").removesuffix(".old"))


def short_name(target: Path) -> str:
    """The name of a record in messages: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


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
        sums += f"{_sha256(data)}  {name}\n"
    own = _sha256(sums.encode())
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
    return open_record(target)


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
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = target.with_name(f"{target.name}.replaced-{number}")
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


def rounded(value: Any, digits: int = 5) -> Any:
    """A value as JSON would read it back, with floats rounded to so many significant digits."""

    def to_digits(written: str) -> float:
        return float(f"{float(written):.{digits}g}")

    return json.loads(json.dumps(value), parse_float=to_digits)


def versions() -> Json:
    """The versions of the software, and the number of the ledger's rules at that time."""
    known = {"rules": RULES, "python": platform.python_version(), "processor": platform.machine()}
    for name in ("torch", "numpy", "tokenizers"):
        known[name] = importlib.import_module(name).__version__
    if paths.CHECKOUT is not None:
        command = ["git", "-C", str(paths.CHECKOUT), "rev-parse", "--short=10", "HEAD"]
        # Without git there is an OSError. In an archive of the code, git prints nothing.
        with contextlib.suppress(OSError):
            git = subprocess.run(command, capture_output=True, text=True)
            known["commit"] = git.stdout.strip()
    return known


def read_record(target: Path) -> Record:
    """Open a record and check all its files but the weights.

    Raises `CorruptRecord`, which names the file.
    """
    record = open_record(target)
    record.check()
    return record


def open_record(target: Path, checked: bool = True) -> Record:
    """Open a record. Only its config is read now; the other files are read on first access.

    checked: whether the config is checked too.
    """
    digests = _digests(target)
    config = _read_json(target, "config.json", digests)
    with _explained(target, "config.json"):
        config = upgrade(config)
    record = Record(target, config, digests)
    if checked:
        record.check_config()
    return record


def _digests(target: Path) -> dict[str, str]:
    """The digest of each file by its name, as in SHA256SUMS."""
    try:
        text = _text(_contents(target / SUMS)).decode()
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
    """The contents of a file of a record. Raises `CorruptRecord` if the file has changed."""
    data = b""
    with contextlib.suppress(OSError):
        data = _contents(target / name)
    if not name.endswith(".safetensors"):
        data = _text(data)
    if _sha256(data) != digests.get(name):
        raise CorruptRecord(
            f"record {short_name(target)}: {name} is missing, truncated or changed, or cannot be "
            f"read: {ADVICE}"
        )
    return data


def _contents(path: Path) -> bytes:
    """The contents of a plain file. Raises OSError for a link, a pipe, a device or a huge file."""
    # The flags exist on some systems only. Without O_NONBLOCK, opening a pipe would wait.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    flags |= getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("no plain file")
        if status.st_size > LARGEST and path.name != WEIGHTS:
            raise OSError("too large")
        return file.read()


@contextlib.contextmanager
def _explained(target: Path, name: str) -> Iterator[None]:
    """Turn any error about the contents of an intact file into a `CorruptRecord`."""
    try:
        yield
    except CorruptRecord:
        raise
    except Exception as error:  # any kind, since the contents may be anything
        reason = str(error) if isinstance(error, ValueError) else first_line(error)
        raise CorruptRecord(
            f"record {short_name(target)}: {name} is whole, and of no run that this version of the "
            "package knows: " + " ".join(reason.split())
        ) from error


def _text(data: bytes) -> bytes:
    """The contents of a text file with LF as line ends, which a checkout may have changed to CRLF.

    This changes no value, because JSON writes a line end inside a string as the two letters \\n.
    """
    return data.replace(b"\r\n", b"\n")


def _no_number(text: str) -> None:
    raise Refused(f"{text} is no number")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
