"""What a run leaves behind: one small folder, written whole or not at all, and checked when it is read.

data/runs/<preset>/<experiment>/<seed>/   or, on another text than the preset's, <preset>@<corpus>-<hash>/..
    config.json       everything that determines the run, the recipe version, and the corpus by name and hash
    metrics.json      the curve and the final values, or status "failed" and the reason
    alpha.safetensors alpha along the curve and, at the end, by text
    provenance.json   code hash, device, versions, time: never part of a comparison
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
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import safetensors
import tokenizers
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from sinkutils import paths
from sinkutils.checks import require
from sinkutils.data.corpus import public_name
from sinkutils.study.schema import check_arrays, check_record

if TYPE_CHECKING:
    from sinkutils.study.config import RunConfig

RECIPE = 2  # raised by hand when a change to the trainer or the model changes the numbers of its runs
CHECKPOINT_SECONDS = 20.0  # how often an unfinished run saves its state
LOCK_SECONDS = 0.2  # a lock whose file its last owner has just removed is free at the second try
SUMS = "SHA256SUMS"
WEIGHTS = "model.safetensors"
OLD = ".old.tmp"  # how the folder ends of a record that another one is about to replace
PARTS = ("config", "metrics", "provenance")  # the JSON files
ADVICE = "delete the folder and train the run again"
# The modules whose text decides a run's numbers.
TRAINING_MODULES = (
    *("model/attention", "model/config", "model/decoder", "model/fast", "model/flash", "model/positions"),
    *("data/packing", "data/corpus", "data/embedded", "data/external", "data/tokenizer", "data/cache", "data/probes"),
    *("data/instructions", "measuring/report", "measuring/tally", "measuring/measure", "study/config"),
    *("training/run", "training/optimizers", "training/trainer", "training/checkpoints", "training/group"),
    *("training/finetune", "training/products", "measuring/destinations", "measuring/gradients"),
)
# The modules whose text decides the ledger's verdicts: claims, rules and what they read.
LEDGER_MODULES = tuple(
    f"ledger/{name}"
    for name in ("claims", "conclusions", "effects", "later", "open_models", "proofs", "results", "rules", "trials")
)


class CorruptRecord(RuntimeError):
    """A file of a record or a checkpoint is missing, truncated or changed; the message names it."""


class RunLocked(RuntimeError):
    """Another process is training this run."""


@dataclass(frozen=True)
class Record:
    """One finished run, as read from its folder."""

    folder: Path
    config: dict[str, Any]
    metrics: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def status(self) -> str:
        """ "done" or "failed"."""
        return self.metrics["status"]

    @property
    def arrays(self) -> dict[str, Tensor]:
        """alpha along the curve and, at the end, by text (`training.run.arrays`); empty where there is none."""
        path = self.folder / "alpha.safetensors"
        return load_tensors(path.read_bytes()) if path.exists() else {}

    @property
    def weights(self) -> Path | None:
        """The weights' file where they were kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None


def record_folder(preset: str, experiment: str, seed: int, runs: Path | str | None = None) -> Path:
    """Where the record of one run of the study lives."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def short_name(target: Path) -> str:
    """How messages call a record: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


def partial_folder(target: Path) -> Path:
    """Where an unfinished run keeps its checkpoint and its lock, beside the record it will become."""
    return target.with_name(target.name + ".partial")


@contextlib.contextmanager
def run_lock(target: Path) -> Iterator[None]:
    """Hold the run of `target` for this process; raises `RunLocked` if another one has it.

    The kernel drops the lock with the process that held it. What a killed one left of a record that it was writing is
    removed, or put in its place where that is empty and what is left is whole: killed while one replaced the other.
    """
    partial = partial_folder(target)
    with _locked(partial / "lock", short_name(target)):
        lefts = target.parent.glob(f".{target.name}-*.tmp")
        for left in sorted(lefts, key=lambda left: left.name.endswith(OLD)):  # of two whole ones the new one first
            if not target.exists() and _is_whole(left):
                os.replace(left, target)
            shutil.rmtree(left, ignore_errors=True)
        yield
        if target.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether a folder is a record that can be read."""
    try:
        read_record(folder)
    except CorruptRecord:
        return False
    return True


def _locked(path: Path, name: str) -> contextlib.AbstractContextManager:
    for _attempt in range(100):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # its last owner is removing the folder
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return FileLock(path, timeout=LOCK_SECONDS, poll_interval=0.02).acquire()
            except Timeout as error:
                raise RunLocked(f"{name} is being trained by another process") from error
    raise OSError(f"could not make the lock of {name}, {path}: is its folder one?")


def as_json(value: Any, indent: int | None = 1) -> str:
    """One spelling for one value: sorted keys, so that equal configs have equal hashes."""
    return json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"


def config_dict(config: RunConfig) -> dict[str, Any]:
    """What config.json holds beside the corpus that the run was made on: the config and the recipe version."""
    values = {**dataclasses.asdict(config), "recipe": RECIPE}
    names = {"corpus": config.data.corpus, "validation": config.data.validation}
    values["data"] |= {key: name and public_name(name) for key, name in names.items()}
    if not config.data.unscored:  # came after the first records, whose hashes stay
        del values["data"]["unscored"]
    if "instructions" in values:  # of a fine-tuning
        values["instructions"] = public_name(values["instructions"])
    return json.loads(as_json(values))


def config_hash(config: RunConfig) -> str:
    """SHA-256 of `config_dict`: of what determines a run, apart from its text."""
    return _sha256(as_json(config_dict(config)).encode())


def write_record(
    target: Path,
    config: RunConfig,
    metrics: dict[str, Any],
    provenance: dict[str, Any],
    weights: dict[str, Tensor] | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    corpus: dict[str, str] | None = None,
    arrays: dict[str, Tensor] | None = None,
) -> Record:
    """Write a record whole or not at all; one that was there is replaced only once the new one is on disk.

    Raises OSError with advice when the disk is full.

    corpus: `Corpus.identity` of the text; None: the config's own, of unknown hash. arrays: those of `training.run`.
    """
    values = config_dict(config)
    values["corpus"] = corpus or {"name": values["data"]["corpus"], "sha256": ""}
    files = {
        "config.json": as_json(values).encode(),
        "metrics.json": as_json(metrics, indent=None).encode(),  # on one line: the largest file, a third smaller
        "provenance.json": as_json({**provenance, **versions()}).encode(),
    }
    if arrays:
        files["alpha.safetensors"] = _packed(arrays)
    if weights is not None:
        files[WEIGHTS] = _packed(weights)
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_str().encode()
    sums = "".join(f"{_sha256(data)}  {name}\n" for name, data in files.items())
    files[SUMS] = f"{sums}{_sha256(sums.encode())}  {SUMS}\n".encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    new, old = (Path(tempfile.mkdtemp(suffix, f".{target.name}-", target.parent)) for suffix in (".tmp", OLD))
    try:
        for name, data in files.items():
            _write_synced(new / name, data)
        new.chmod(0o755)
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        _sync_folder(target.parent)
    except OSError as error:
        if (old / SUMS).exists():
            os.replace(old, target)
        raise _not_saved(f"record {short_name(target)}", error) from error
    finally:
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)
    return read_record(target)


def read_record(target: Path) -> Record:
    """Read a record, each file against its digest, and all of it against `schema`. Raises `CorruptRecord`."""
    try:
        files = _verified(target)
        parts = [json.loads((target / f"{part}.json").read_text("utf-8")) for part in PARTS]
        check_record(*parts)
        for file in files:
            _check_format(target / file)
        record = Record(target, *parts)
        check_arrays(record.arrays, len(record.metrics["curve"]))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"record {short_name(target)}: {error or type(error).__name__}: {ADVICE}") from error
    return record


def history(metrics: Mapping[str, Any]) -> list[dict[str, float]]:
    """Every step of a fine-tuning's metrics.json: step, train_loss, gradient_norm (Figure 30); none of pre-training."""
    points = [point for point in metrics["curve"] if "gradient_norms" in point]
    pairs = [pair for point in points for pair in zip(point["losses"], point["gradient_norms"], strict=True)]
    return [{"step": step, "train_loss": loss, "gradient_norm": norm} for step, (loss, norm) in enumerate(pairs, 1)]


def _verified(target: Path) -> list[str]:
    """The names of a record's files, each as it was written; its weights may have been deleted."""
    try:
        lines = (target / SUMS).read_bytes().decode().splitlines(keepends=True)
        body, (own, own_name) = "".join(lines[:-1]), lines[-1].split()
        digests = {file: digest for digest, file in map(str.split, lines[:-1])}
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{SUMS} is missing or unreadable") from error
    whole = own_name == SUMS and lines[-1].endswith("\n") and _sha256(body.encode()) == own
    require(whole, f"{SUMS} is damaged")
    for file in dict.fromkeys((*(f"{part}.json" for part in PARTS), *digests)):
        path = target / file
        if file == WEIGHTS and not path.exists():  # left out to save space: a record without weights
            del digests[file]
            continue
        require(path.is_file() and Path(file).name == file, f"{file} is missing")
        require(_sha256(path.read_bytes()) == digests.get(file), f"{file} is truncated or changed")
    return list(digests)


def _check_format(path: Path) -> None:
    """Raise ValueError unless a file of weights or a tokenizer is one, by its header."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.name == "tokenizer.json":
            tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path.name} cannot be read ({error})") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
    """Write tensors and a JSON value to one file, atomically: a failure leaves what was there before.

    Raises OSError with advice when the disk is full.
    """
    data = _packed(tensors, {"extra": as_json(extra)})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        _write_synced(temporary, data, hashlib.sha256(data).digest())  # not joined: it may be large
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_saved(path.name, error) from error
    _sync_folder(path.parent)


def _not_saved(what: str, error: OSError) -> OSError:
    advice = "free some space and run the same command again; what was saved before is intact"
    return OSError(error.errno, f"could not save {what} ({error.strerror}): {advice}")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote. Raises `CorruptRecord` if a single byte of it has changed."""
    blob = path.read_bytes()
    data, digest = blob[:-32], blob[-32:]
    if len(blob) < 40 or hashlib.sha256(data).digest() != digest:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is truncated or changed")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load_tensors(data), json.loads(header["__metadata__"]["extra"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is not a checkpoint") from error


def ledger_sha256() -> str:
    """The hash of the ledger, which each record keeps: the rules that judge it stood before it (`ledger.frozen`)."""
    return _hash_of(LEDGER_MODULES)


def _hash_of(modules: tuple[str, ...]) -> str:
    return _sha256(b"".join((paths.PACKAGE / f"{module}.py").read_bytes() for module in modules))


def versions() -> dict[str, Any]:
    """What ran: package versions, a hash of the training code, and that of the ledger as it stood then."""
    return {
        "code_sha256": _hash_of(TRAINING_MODULES),
        "ledger": ledger_sha256(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        **{module.__name__: module.__version__ for module in (torch, numpy, tokenizers, safetensors)},
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _packed(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return dump_tensors({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, metadata)


def _write_synced(path: Path, *parts: bytes) -> None:
    with open(path, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
