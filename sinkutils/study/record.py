"""What a run leaves behind: one small folder, written whole or not at all, and checked when it is read.

data/runs/<preset>/<experiment>/<seed>/   or, on another text than the preset's, <preset>@<corpus>-<hash>/..
    config.json       everything that determines the run, the recipe's number, and the corpus by name and hash
    metrics.json      the curve and the final values, or status "failed" and the reason
    alpha.safetensors alpha along the curve: (evaluations, targets and * if any, L, H), mean over texts, float16
    provenance.json   device, precision, versions, time: never part of a comparison
    SHA256SUMS        a digest of every file above and of itself
    model.safetensors, tokenizer.json   only for the few runs that notebooks open, and what fine-tunings start from;
                      the weights may be deleted to save space, which makes it a record without weights

The digests are of text with line ends as here, LF: a copy with those of Windows is the same record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from sinkutils import paths
from sinkutils.checks import first_line, instance, integer, require
from sinkutils.data.corpus import Identity, public_name
from sinkutils.data.tokenizer import open_tokenizer
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, check_name, from_dict
from sinkutils.study.files import beside, not_saved, put_in_place, remove, set_aside, write_synced

if TYPE_CHECKING:
    from sinkutils.model.decoder import TransformerLM

RECIPE = 2  # raised by hand when a change to the trainer or the model changes the numbers of its runs
RULES = 4  # raised by hand when the rules change by which the ledger judges
CHECKPOINT_SECONDS = 20.0  # how often an unfinished run saves its state
SUMS = "SHA256SUMS"
ALPHA = "alpha.safetensors"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
JSONS = ("config.json", "metrics.json", "provenance.json")
FILES = frozenset((*JSONS, ALPHA, WEIGHTS, TOKENIZER, SUMS))  # all that a record may hold
Tensors = dict[str, Tensor]
Folder = Path | str | None  # of records; None: data/runs
ADVICE = "bring the folder back from where it came, or train the run again"


class CorruptRecord(RuntimeError):
    """A file of a record or a checkpoint is missing, truncated, changed or not of a run; the message names it."""


class RunLocked(RuntimeError):
    """Another process is training this run."""


class Point(TypedDict):
    """What one evaluation says. Sinks in percent, losses in nats a token."""

    step: int
    valid_loss: float
    train_loss: NotRequired[float]  # mean of the steps since the evaluation before; not at step 0
    sink_1: float
    sink_2: NotRequired[float]
    sink_3: NotRequired[float]
    sink_4: NotRequired[float]
    sink_star: NotRequired[float]  # of a key of the model's own
    excess_1: NotRequired[float]
    excess_star: NotRequired[float]
    peak_1: NotRequired[list[float]]  # by block: the largest element of h_1 over the median of all
    value_ratio_1: NotRequired[list[float]]  # by block: the norm of v_1 over the others' mean
    losses: NotRequired[list[float]]  # of a fine-tuning, of every step
    gradient_norms: NotRequired[list[float]]


class Final(Point):
    """The last evaluation, and what was measured once, at the end."""

    report: NotRequired[Json]  # `Report.to_dict` without what a record does not keep
    destinations: NotRequired[Json]
    gradients: NotRequired[Json]


class Metrics(TypedDict):
    """What metrics.json says. Of a run that failed before its first evaluation `final` is empty."""

    status: str  # done, or failed: training that did not converge
    reason: str | None
    curve: list[Point]
    final: Final


@dataclass(frozen=True)
class Record:
    """One finished run, as read from its folder. Each file is checked when it is read.

    config: by today's fields (`upgrade`). digests: SHA-256 of each file by its name. problem: why it is no result of
    the study, as a status, "stale" or "corrupt", and a reason.
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
        """ "done" or "failed", which is training that failed; of `Runs.entries` also "stale" or "corrupt"."""
        return self.problem[0] if self.problem else self.metrics["status"]

    @property
    def reason(self) -> str | None:
        """Why it is not done."""
        return self.problem[1] if self.problem else self.metrics["reason"]

    @cached_property
    def metrics(self) -> Metrics:
        metrics = self._json("metrics.json")
        with _explained(self.folder, "metrics.json"):
            check_metrics(metrics)
        return metrics

    @cached_property
    def provenance(self) -> Json:
        provenance = self._json("provenance.json")
        with _explained(self.folder, "provenance.json"):
            instance("it", provenance, dict)
        return provenance

    @property
    def arrays(self) -> Tensors:
        """What alpha.safetensors holds, "curve" above all; empty where there is none."""
        if ALPHA not in self.digests:
            return {}
        model = self.config["model"]
        with _explained(self.folder, ALPHA):
            arrays = load_tensors(_intact(self.folder, ALPHA, self.digests))
            for name, alpha in arrays.items():
                least, most = alpha.aminmax()  # nan if any is
                require(bool(least >= 0) and bool(most <= 1), f"{name} is not within 0 to 1")
            if "curve" in arrays:
                evaluations, *_, layers, heads = arrays["curve"].shape
                require(arrays["curve"].ndim == 4, "curve has not four dimensions")
                require(evaluations == len(self.metrics["curve"]), "curve is not as long as that of metrics.json")
                require((layers, heads) == (model["num_layers"], model["num_heads"]), "curve is of another model")
        return arrays

    @property
    def weights(self) -> Path | None:
        """The weights' file where they were kept."""
        path = self.folder / WEIGHTS
        return path if path.exists() else None

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that was kept with the weights. Raises `CorruptRecord` where there is none."""
        _intact(self.folder, TOKENIZER, self.digests)
        return open_tokenizer(self.folder / TOKENIZER)

    def load_weights(self) -> Tensors:
        """The trained weights by name. Raises `CorruptRecord` where their file is missing or has changed."""
        with _explained(self.folder, WEIGHTS):
            return load_tensors(_intact(self.folder, WEIGHTS, self.digests))

    def load_model(self) -> TransformerLM:
        """The trained model, on the CPU in float32. Raises `CorruptRecord` where its weights were not kept."""
        from sinkutils.model.config import LMConfig
        from sinkutils.model.decoder import TransformerLM  # which tables of records do without

        weights = self.load_weights()
        with _explained(self.folder, WEIGHTS):
            model = TransformerLM(from_dict(LMConfig, self.config["model"]))
            model.load_state_dict(weights)
        return model.eval()

    def check(self) -> None:
        """Read all but the weights. Raises `CorruptRecord` for a file that is not as it was written."""
        _ = self.metrics, self.provenance, self.arrays
        if TOKENIZER in self.digests:
            _intact(self.folder, TOKENIZER, self.digests)

    def _json(self, name: str) -> Any:
        with _explained(self.folder, name):
            return json.loads(_intact(self.folder, name, self.digests), parse_constant=_no_number)


def record_folder(preset: str, experiment: str, seed: int, runs: Folder = None) -> Path:
    """Where the record of one run of the study lives."""
    return Path(runs or paths.RUNS) / preset / experiment / str(seed)


def short_name(target: Path) -> str:
    """How messages call a record: preset/experiment/seed."""
    return "/".join(target.parts[-3:])


def config_dict(config: RunConfig) -> Json:
    """What config.json holds beside the corpus that the run was made on: the config and the recipe's number.

    Texts have their public names: nothing of the machine.
    """
    values = json.loads(json.dumps({**dataclasses.asdict(config), "recipe": RECIPE}))
    for part, name in ((values["data"], "corpus"), (values["data"], "validation"), (values, "instructions")):
        if part.get(name):
            part[name] = public_name(part[name])
    return values


DEFAULTS = {cls: config_dict(cls("any", "any")) for cls in (RunConfig, FinetuneConfig)}
for _defaults in DEFAULTS.values():  # what names a run has none
    for _name in ("experiment", "preset", "seed", "recipe"):
        del _defaults[_name]


def upgrade(config: Json) -> Json:
    """A record's config by today's fields: one that came later has its default, as older runs did not have it.

    A field that has gone since, `bos`, was always False.
    """
    whole = _filled(config, DEFAULTS[FinetuneConfig if "start" in config else RunConfig])
    if whole["data"].get("bos") is False:
        del whole["data"]["bos"]
    return whole


def _filled(values: Json, defaults: Json) -> Json:
    whole = defaults | values
    for name, default in defaults.items():
        if isinstance(default, dict):
            whole[name] = _filled(whole[name], default)
    return whole


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
    """Write a record whole or not at all; one that was there stays until the new one is on disk and was read.

    metrics: numbers are rounded to five significant digits. corpus: `Corpus.identity` of the text; None: the config's
    own, of unknown hash. arrays: what alpha.safetensors holds. Raises OSError with advice when the disk is full.
    """
    values = config_dict(config)
    values["corpus"] = corpus or {"name": values["data"]["corpus"], "sha256": ""}
    files = {}
    for name, part in zip(JSONS, (values, rounded(metrics), provenance | versions()), strict=True):
        files[name] = json.dumps(part, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    if arrays:
        files[ALPHA] = dump_tensors(arrays)
    if weights:
        files[WEIGHTS] = dump_tensors(weights)
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer.to_str().encode()
    sums = "".join(f"{_sha256(data)}  {name}\n" for name, data in files.items())
    files[SUMS] = f"{sums}{_sha256(sums.encode())}  {SUMS}\n".encode()
    new = beside(target, "tmp")  # whoever holds the run's lock is its only writer
    try:
        remove(new, FILES)
        new.mkdir(parents=True)
        for name, data in files.items():
            write_synced(new / name, data)
        read_record(new)
        put_in_place(new, target)
        discard_old(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove(new, FILES)
        raise not_saved(f"record {short_name(target)}", error) from error
    return read_record(target)


def discard_old(target: Path) -> None:
    """Delete the predecessor of a record; one that is damaged and has weights, which are hours of work, is kept."""
    old = beside(target, "old")
    if not old.exists():
        return
    try:
        if (old / WEIGHTS).exists():
            read_record(old)
        remove(old, FILES)
    except (CorruptRecord, OSError) as error:
        place = set_aside(old, target)
        warnings.warn(f"{error}; it is kept as {short_name(place)}", stacklevel=2)


def finish_replacement(target: Path) -> None:
    """Do what a process that died while it replaced a record had still to do. For who holds the run's lock."""
    new, old = beside(target, "tmp"), beside(target, "old")
    if new.exists():
        try:
            read_record(new)
        except CorruptRecord:  # it died while it wrote
            remove(new, FILES)
        else:
            put_in_place(new, target)
    if old.exists() and not target.exists():
        os.replace(old, target)
    discard_old(target)


def check_replaceable(target: Path) -> None:
    """Hold that a record may be written here: nothing stands there, or a folder of nothing but files of a record."""
    what = None
    if target.is_symlink():
        what = "is a symbolic link"
    elif target.exists() and not target.is_dir():
        what = "is a file"
    elif target.exists():
        others = sorted({path.name for path in target.iterdir()} - FILES)
        if others:
            what = f"holds {', '.join(others[:3])}, which no record does"
    if what:
        raise FileExistsError(f"{target} {what}, and is not replaced: move it away, or give --runs another folder")


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
    """Read a record and check all of it but the weights. Raises `CorruptRecord`, which names the file."""
    record = open_record(target)
    record.check()
    return record


def open_record(target: Path) -> Record:
    """A record of which only the config is read, and the other files when they are asked for."""
    digests = _digests(target)
    config = Record(target, {}, digests)._json("config.json")
    with _explained(target, "config.json"):
        config = upgrade(config)
        check_config(config)
    return Record(target, config, digests)


def _digests(target: Path) -> dict[str, str]:
    """What SHA256SUMS says: the digest of each file by its name."""
    try:
        require((target / SUMS).is_file(), "not there")  # nor a pipe, which would be waited for
        *lines, own = _text((target / SUMS).read_bytes()).decode().splitlines(keepends=True)
        require(own == f"{_sha256(''.join(lines).encode())}  {SUMS}\n", "changed")
        digests = dict(line.split()[::-1] for line in lines)
    except (OSError, ValueError) as error:
        raise CorruptRecord(f"record {short_name(target)}: {SUMS} is missing or damaged: {ADVICE}") from error
    with _explained(target, SUMS):
        lacking = set(JSONS) - digests.keys()
        require(not lacking, f"it does not list {', '.join(sorted(lacking))}")
        strange = digests.keys() - FILES
        require(not strange, f"it lists {', '.join(sorted(strange))}")
    return digests


def _intact(target: Path, name: str, digests: dict[str, str]) -> bytes:
    """What a file of a record holds, if it is as it was written."""
    path = target / name
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        reason = f"record {short_name(target)}: {name} cannot be read ({error.strerror})"
        raise CorruptRecord(reason) from error
    if not name.endswith(".safetensors"):
        data = _text(data)
    if _sha256(data) != digests.get(name):
        raise CorruptRecord(f"record {short_name(target)}: {name} is missing, truncated or changed: {ADVICE}")
    return data


@contextlib.contextmanager
def _explained(target: Path, name: str) -> Iterator[None]:
    """Make `CorruptRecord` of what Python raises about a file that is as it was written, yet not of a run of ours."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, SafetensorError) as error:
        if isinstance(error, CorruptRecord):
            raise
        reason = str(error) if isinstance(error, ValueError) else first_line(error)
        message = f"record {short_name(target)}: {name} is whole, and not of a run of this package: {reason}"
        raise CorruptRecord(" ".join(message.split())) from error


def _text(data: bytes) -> bytes:
    """A text file with line ends as they were written, whatever a checkout or a zip tool made of them.

    Nothing is lost by it: inside the strings of JSON a line end is written as two letters.
    """
    return data.replace(b"\r\n", b"\n")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- what a run can have written; each check raises what `_explained` takes

BOUNDS = {  # of what a point of the curve says: a share is at most 100 percent, an excess at most 1
    "step": (0, math.inf),
    "valid_loss": (0, math.inf),
    "train_loss": (0, math.inf),
    "sink_1": (0, 100),
    "sink_2": (0, 100),
    "sink_3": (0, 100),
    "sink_4": (0, 100),
    "sink_star": (0, 100),
    "excess_1": (-math.inf, 1),
    "excess_star": (-math.inf, 1),
}
EVERY_POINT = ("step", "valid_loss", "sink_1")


def check_config(config: Json) -> None:
    """Hold that an upgraded config has the fields that readers take from it, whatever its experiment."""
    check_name("experiment", config["experiment"])
    check_name("preset", config["preset"])
    integer("seed", config["seed"], least=0)
    integer("recipe", config["recipe"], least=1)
    for name in ("name", "sha256"):
        instance(f"the corpus's {name}", config["corpus"][name], str)
    for name in ("context_length", "vocab_size", "num_layers", "num_heads"):
        integer(name, config["model"][name], least=1)
    integer("batch_size", config["train"]["batch_size"], least=1)
    window = config["model"]["attention"]["window"]
    if window is not None:
        integer("window", window, least=1)


def check_metrics(metrics: Any) -> None:
    """Hold that a run can end with these numbers."""
    require(metrics["status"] in ("done", "failed"), f"status is {metrics['status']!r}")
    if metrics["reason"] is not None:
        instance("reason", metrics["reason"], str)
    final = metrics["final"]
    points = [*metrics["curve"], final] if final else metrics["curve"]
    require(bool(final) or metrics["status"] == "failed", "final is empty")
    for name, (least, most) in BOUNDS.items():
        values = [point[name] for point in points if name in point]
        require(name not in EVERY_POINT or len(values) == len(points), f"a point of the curve lacks {name}")
        _numbers(name, values, 1, least, most)
    for point in points:
        if "gradient_norms" in point:  # of a fine-tuning
            _numbers("gradient_norms", point["gradient_norms"], 1, 0, math.inf)
            _numbers("losses", point["losses"], 1, 0, math.inf)
    if "gradients" in final:
        _numbers("gradients", final["gradients"]["input"], 2, 0, math.inf)
    if "report" in final:
        check_report(final["report"])


def check_report(report: Any) -> None:
    """Hold that attention lies within 0 to 1, that norms are finite, and that all have as many blocks."""
    integer("T", report["T"], least=1)
    alpha = _numbers("alpha", report["alpha"], 3, 0, 1)  # (targets, L, H)
    require(len(report["targets"]) == len(alpha), "targets are not those of alpha")
    require(report["targets"][0] == 1, "the first token is not the first target")
    blocks = alpha.shape[1]
    rows = {}  # by block
    if report.get("alpha_star"):
        rows["alpha_star"] = _numbers("alpha_star", report["alpha_star"], 2, 0, 1)
    for name in ("hidden_norms", "key_norms", "value_norms"):
        rows[name] = _numbers(name, report[name], 2, 0, math.inf)
    for name in ("before_norm_norms", "hidden_peaks"):
        if name in report:
            rows[name] = _numbers(name, report[name], 2, 0, math.inf)
    for name, array in rows.items():
        require(len(array) == blocks and array.size > 0, f"{name} is of {len(array)} blocks and alpha of {blocks}")


def _numbers(name: str, values: Any, dimensions: int, least: float, most: float) -> numpy.ndarray:
    """Nested lists as an array, if they are so deep and of finite numbers in least..most."""
    array = numpy.array(values, dtype=None if values else float)
    require(array.ndim == dimensions and array.dtype.kind in "if", f"{name} is not {dimensions} lists deep of numbers")
    good = numpy.isfinite(array) & (least <= array) & (array <= most)
    if not good.all():
        raise ValueError(f"{name} is {array[~good][0]}, and has to be within {least} to {most}")
    return array
