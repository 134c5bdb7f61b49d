"""What `measure --save` and `scores` keep: a JSON file a model in data/measurements, which git ignores.

A file is named by the model's full hub id, or a folder's name and a digest of where it is, so that no two share one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sinkutils.measuring.load import MODELS, find
from sinkutils.measuring.report import Report
from sinkutils.paths import MEASUREMENTS

LENGTH, EPSILON, SAMPLES = 64, 0.3, 100  # of the paper's numbers (Section 3.2)
# What the ledger looks at here. The project's own models stand in data/open_lms, with what came first in training.
LISTED = {model.hub_id for model in MODELS if model.in_paper}
ADVICE = "is not what this command writes, so delete or remake it: python -m sinkutils "
MEASURING = "measure MODEL --save"


def identity(model: str) -> str:
    """What a model is called in what is kept of it: its hub id, or "local:name:digest" for a folder."""
    folder = Path(model)
    if folder.is_dir():
        where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        return f"local:{folder.resolve().name}:{where[:8]}"
    return known.hub_id if (known := find(model)) else model


def path_of(model: str, kind: str = "", domain: str = "") -> Path:
    """The file of a model: its measurements, on a domain of the Pile, or its scores on a task, the `kind`."""
    return MEASUREMENTS / kind / f"{quote(identity(model), safe='')}{'@' * bool(domain)}{quote(domain)}.json"


def save_measurement(model: str, reports: dict[str, Report], corpus: str = "docstrings") -> Path:
    """Write the reports of `measure --save`, by kind of input, where `measurements` finds them, beside other kinds.

    Raises ValueError unless they were made as the paper's were: 100 sequences, T = 64, no BOS, target 1 and eps 0.3,
    on the study's text or a domain of the Pile.
    """
    own, domain = corpus == "docstrings", corpus.removeprefix("pile:")
    if not own and domain == corpus:
        raise ValueError(f"--save keeps measurements on docstrings or pile:<domain>, not on {corpus}: leave one out")
    for kind, report in reports.items():
        alike = report.samples >= SAMPLES and report.length == LENGTH and not report.bos
        if not alike or 1 not in report.targets or EPSILON not in report.epsilons:
            usual = f"{SAMPLES} sequences at T = {LENGTH} without BOS, with target 1 and eps {EPSILON}"
            raise ValueError(f"--save keeps measurements of {usual}: leave out other options ({kind} input), or --save")
    path = path_of(model, domain="" if own else domain)
    before = _read(path, MEASURING) if path.is_file() else {}
    return _write(path, model, before | {kind: report.to_dict() for kind, report in reports.items()})


def measurements(kind: str = "natural", domain: str = "") -> dict[str, dict[str, Any]]:
    """The reports on one kind of input, and for one domain, of the models in LISTED, by the paper's name of a model."""
    paths = [path for path in sorted(MEASUREMENTS.glob("*.json")) if path.stem.partition("@")[2] == quote(domain)]
    saved = [_read(path, MEASURING, kind) for path in paths]
    return {_name(one["model"]): one[kind] for one in saved if one["model"] in LISTED and kind in one}


def measured_domains(model: str) -> dict[str, dict[str, Any]]:
    """A model's reports on natural text by domain of the Pile; model: its name in the paper."""
    domains = sorted({unquote(path.stem.partition("@")[2]) for path in MEASUREMENTS.glob("*@*.json")})
    reports = {domain: measurements("natural", domain).get(model) for domain in domains}
    return {domain: report for domain, report in reports.items() if report}


def measured_sink(report: dict[str, Any]) -> float:
    """Sink_1 in percent of a measured report."""
    return float(report["sink"]["1"][str(EPSILON)])


def save_scores(model: str, scores: dict[str, Any]) -> Path:
    """Keep a model's scores on a task where `saved_scores` finds them."""
    return _write(path_of(model, scores["task"]), model, scores)


def saved_scores(task: str = "hellaswag") -> dict[str, dict[str, Any]]:
    """The kept scores on a task, by the paper's name of a model where it has one."""
    saved = [_read(path, "scores MODEL") for path in sorted((MEASUREMENTS / task).glob("*.json"))]
    return {_name(scores["model"]): scores for scores in saved}


def _name(model: str) -> str:
    known = find(model)
    return known.name if known else model


def _write(path: Path, model: str, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**values, "model": identity(model)}, indent=1) + "\n", encoding="utf-8")
    return path


def _read(path: Path, command: str, kind: str = "") -> dict[str, Any]:
    """What a file holds. Raises ValueError for one that the `command` did not write: of a `kind` it reads Sink_1."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if kind in saved:
            measured_sink(saved[kind])
        if isinstance(saved["model"], str):
            return saved
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    folder = "data/measurements" if path.parent == MEASUREMENTS else f"data/measurements/{path.parent.name}"
    raise ValueError(f"{path.name} in {folder} {ADVICE}{command}")
