"""Records: the small folder of results that each finished run leaves.

A record is written as a whole or not at all, and it is checked when it is read. Its folder is
data/runs/<preset>/<experiment>/<seed>, or <preset>@<corpus>-<hash>/.. if the run was trained on
another text than the preset's. The folder holds these files:

    config.json        everything that determines the run, the number of the recipe, and the name
                       and hash of the corpus
    metrics.json       status ("done", or "failed" with a reason), the curve and the final values. A
                       point of the curve has its step, losses in nats per token, Sink_k and Sink_*
                       in percent, excess_1, and by block the largest element of h_1 (peak_1) and
                       the norm of v_1 (value_ratio_1), as ratios; in a fine-tuning also the loss
                       and gradient norm of each step. The final values are those of the last point,
                       with its report, destinations and gradients. They are empty if the run failed
                       before any evaluation.
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
import math
import os
import platform
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkutils import paths
from sinkutils.checks import Refused, first_line, real, require
from sinkutils.study.config import Json, from_dict, upgrade

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
BLOCKS = ("peak_1", "value_ratio_1")  # numbers of a point of the curve by block
STEPS = ("losses", "gradient_norms")  # and by step since the point before
NUMBERS = ("step", "valid_loss", "train_loss", "sink_", "excess_")  # how the others' names begin
NORMS = ("hidden_norms", "key_norms", "value_norms", "before_norm_norms", "hidden_peaks")
ADVICE = "bring the folder back from where it came, or train the run again"


class CorruptRecord(RuntimeError):
    """A file of a record or checkpoint is missing, truncated, changed or not that of a run.

    The message names the file.
    """


class RunLocked(RuntimeError):
    """Another process is training this run."""


@dataclass(frozen=True)
class Record:
    """The record of one finished run, which was checked when it was read, but for its weights.

    config: the run's config, with the fields that configs have today (`study.config.upgrade`).
    metrics, provenance: the contents of metrics.json and of provenance.json.
    alphas: the arrays of alpha.safetensors in NumPy. Empty if there is no such file.
    digests: the SHA-256 of each file, by its name.
    stale: why the run of its name has another config today, or "".
    """

    folder: Path
    config: Json
    metrics: Json = field(repr=False)
    provenance: Json = field(repr=False)
    alphas: dict[str, np.ndarray] = field(repr=False, compare=False)
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

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays in alpha.safetensors, mainly "curve". Empty if there is no such file."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.alphas.items()}

    def read_arrays(self) -> dict[str, np.ndarray]:
        """The same as arrays of NumPy, for which PyTorch is not needed."""
        return self.alphas

    def check(self) -> None:
        """Check once more that all files but the weights are as they were written.

        Raises `CorruptRecord` for the first that is not.
        """
        read_record(self.folder)

    @property
    def weights(self) -> Path | None:
        """The file of the weights, or None if they were not kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was kept with the weights. Raises `CorruptRecord` if there is none."""
        from sinkutils.measuring.texts import open_tokenizer

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
            layers = self.config["model"]["num_layers"]
            require(layers <= len(weights), f"they are not those of {layers} layers")
            # .float(), as PyTorch's default may have been set to another dtype
            model = TransformerLM(from_dict(LMConfig, self.config["model"])).float()
            model.load_state_dict(weights)
        return model.eval()


def record_folder(preset: str, experiment: str, seed: int, runs: Folder = None) -> Path:
    """The folder for the record of one run of the study."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def seed_of(folder: Path) -> int:
    """The seed of a record's folder: "7", or ".7.old" while it is replaced (`_beside`)."""
    return int(folder.name.removeprefix(".").removesuffix(".old"))


def short_name(target: Path) -> str:
    """The name of a record in messages: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


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
    """Read a record and check that all of it but the weights is as it was written, and of such a run.

    Raises `CorruptRecord`, which names the first file that is not.
    """
    from safetensors.numpy import load

    digests = _digests(target)
    if TOKENIZER in digests:
        _intact(target, TOKENIZER, digests)
    config, metrics, provenance = (_read_json(target, name, digests) for name in JSONS)
    with _explained(target, "config.json"):
        config = upgrade(config)
    with _explained(target, "metrics.json"):
        check_metrics(metrics, config["model"])
    with _explained(target, "provenance.json"):
        real("wall_seconds", provenance.get("wall_seconds", 0.0), "a number of seconds")
    alphas: dict[str, np.ndarray] = {}
    with _explained(target, ATTENTION):
        if ATTENTION in digests:
            alphas = load(_intact(target, ATTENTION, digests))
        if "curve" in alphas:
            _check_curve(alphas["curve"], metrics, config["model"])
    return Record(target, config, metrics, provenance, alphas, digests)


def _digests(target: Path) -> dict[str, str]:
    """The digest of each file by its name, as in SHA256SUMS."""
    try:
        text = _text(_contents(target / SUMS)).decode()
        *lines, own = text.splitlines(keepends=True)
        digest = sha256("".join(lines).encode())
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
    if sha256(data) != digests.get(name):
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


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- what metrics.json must hold


def check_metrics(metrics: Any, model: Json) -> None:
    """Raise ValueError unless metrics.json holds what its readers use, in the shapes of a model.

    model: the model's part of the config.
    """
    require(isinstance(metrics, dict), "it is no object")
    status = metrics.get("status")
    require(status in ("done", "failed"), f"its status is {status!r:.40}")
    reason = metrics.get("reason")
    require(reason is None or isinstance(reason, str), "its reason is no text")
    curve = metrics.get("curve")
    final = metrics.get("final")
    require(isinstance(curve, list), "its curve is no list")
    require(isinstance(final, dict), "its final is no object")
    ended = [final] if final or status == "done" else []
    _check_points([*curve, *ended], model["num_layers"])
    if "report" in final:
        _check_report(final["report"], model)
    gradients = final.get("gradients", {"input": []})
    require(isinstance(gradients, dict) and "input" in gradients, "its gradients are no object")
    _numbers("gradients", gradients["input"])


def _check_points(points: list[Any], blocks: int) -> None:
    """Evaluations: their steps, their losses, their sinks in percent, and numbers by block."""
    objects = all(isinstance(point, dict) for point in points)
    require(objects, "a point of its curve is no object")
    names = dict.fromkeys(name for point in points for name in point)
    for name in ("step", "valid_loss", "sink_1"):
        there = all(name in point for point in points)
        require(there, f"a point of its curve lacks {name}")
    for name in names:
        column = [point[name] for point in points if name in point]
        if name in BLOCKS or name in STEPS:
            lists = all(isinstance(value, list) for value in column)
            require(lists, f"{name} is no list")
            whole = name in STEPS or all(len(value) == blocks for value in column)
            require(whole, f"{name} is not of each block")
            column = list(chain.from_iterable(column))
        elif not name.startswith(NUMBERS):
            continue
        types = {*map(type, column)}
        require(types <= {int, float}, f"{name} holds what is no number")
        try:
            finite = all(map(math.isfinite, column))
        except OverflowError:  # an integer that is larger than any float
            finite = False
        require(finite, f"{name} holds what is not finite")
        if name == "step":
            require(types <= {int} and min(column) >= 0, "step is no count")
        low, high = (min(column), max(column)) if column else (0, 0)
        of_range = f"{name} is of {low:g} to {high:g}"
        require(not name.startswith("sink_") or 0 <= low <= high <= 100, f"{of_range}: no share")
        require(not name.startswith("excess_") or high <= 1, f"{of_range}: more than all attention")
        require(not name.endswith("loss") or low >= 0, f"{of_range}: no loss")


def _check_curve(curve: np.ndarray, metrics: Json, model: Json) -> None:
    """Alpha along the curve, which ends with that of the report."""
    fits = (
        curve.ndim == 4
        and curve.dtype.kind == "f"
        and len(curve) == len(metrics["curve"])
        and curve.shape[2:] == (model["num_layers"], model["num_heads"])
        and bool((abs(curve) < 2).all())  # also not true of NaN
    )
    require(fits, "its curve is no alpha of such a model")
    report = metrics["final"].get("report")
    if report:  # both hold alpha of x_1 at the end
        last = report["alpha"][report["targets"].index(1)]
        same = bool((abs(curve[-1, 0] - last) < 1e-3).all())
        require(same, "its curve ends with another alpha than metrics.json")


def _check_report(report: Any, model: Json) -> None:
    """The last report: its targets, alpha of every head, and norms by block and position."""
    require(isinstance(report, dict), "its report is no object")
    length = report.get("T")
    require(type(length) is int and length >= 1, f"its T is {length!r:.40}")
    blocks = model["num_layers"]
    targets = _numbers("targets", report.get("targets")).tolist()
    require(1 in targets, "its report is without token 1")
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["alpha"] = (len(targets), blocks, model["num_heads"])
    shapes["alpha_star"] = shapes["alpha"][1:]
    shapes |= dict.fromkeys(NORMS, (blocks, length))
    for name, shape in shapes.items():
        if not report.get(name) and name != "alpha":
            continue
        numbers = _numbers(name, report.get(name))
        require(numbers.shape == shape, f"{name} has the shape {numbers.shape}, not {shape}")
        require(numbers.min() >= 0, f"{name} is negative")
        require("alpha" not in name or numbers.max() <= 1.001, f"{name} is more than 1")


def _numbers(name: str, value: Any) -> np.ndarray:
    """The array of a nested list, all of whose elements must be finite numbers."""
    import numpy as np  # imported here, because a list of records needs no numbers

    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:  # lists of different lengths, or a huge number
        raise Refused(f"{name} is no array of numbers") from error
    fits = array.size == 0 or (array.dtype.kind in "if" and bool(np.isfinite(array).all()))
    require(fits, f"{name} holds what is no number: {value!r:.40}")
    return array
