"""What `measure --save` and `scores` keep: a JSON file a model in data/measurements, which git ignores.

A file is named by the model's hub id, or by a folder's name and a digest of where it is, so that no two share one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sinkutils.checks import require
from sinkutils.measuring.load import find
from sinkutils.measuring.report import Report
from sinkutils.paths import MEASUREMENTS

LENGTH, EPSILON, SAMPLES = 64, 0.3, 100  # of the paper's numbers (Section 3.2)


def identity(model: str) -> str:
    """What a model is called in what is kept of it: its hub id, or "local:name:digest" for a folder."""
    folder = Path(model)
    if folder.is_dir():
        where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        return f"local:{folder.resolve().name}:{where[:8]}"
    known = find(model)
    return known.hub_id if known else model


def save_measurement(model: str, reports: dict[str, Report]) -> Path:
    """Keep the reports of `measure --save`, by kind of input, beside those of other kinds.

    Raises ValueError unless they were made as the paper's: 100 sequences, T = 64, no BOS, target 1 and eps 0.3.
    """
    for report in reports.values():
        alike = report.samples >= SAMPLES and report.length == LENGTH and not report.bos
        alike = alike and 1 in report.targets and EPSILON in report.epsilons
        usual = f"{SAMPLES} sequences at T = {LENGTH} without BOS, with target 1 and eps {EPSILON}"
        require(alike, f"--save keeps measurements of {usual}: leave out other options, or --save")
    return _keep(model, {kind: report.to_dict() for kind, report in reports.items()})


def save_scores(model: str, scores: dict[str, Any]) -> Path:
    """Keep a model's scores on a task."""
    return _keep(model, {scores["task"]: scores})


def measurements(kind: str = "natural") -> dict[str, dict[str, Any]]:
    """The reports on one kind of input of the models of Table 8, by their names there."""
    found = {}
    for path in sorted(MEASUREMENTS.glob("*.json")):
        kept = _read(path)
        known = find(kept["model"])
        if known and known.in_paper and kept["model"] == known.hub_id and kind in kept:
            found[known.name] = kept[kind]
    return found


def saved_scores(task: str = "hellaswag") -> dict[str, dict[str, Any]]:
    """The kept scores on a task, by the paper's name of a model where it has one."""
    found = {}
    for path in sorted(MEASUREMENTS.glob("*.json")):
        kept = _read(path)
        known = find(kept["model"])
        if task in kept:
            found[known.name if known else kept["model"]] = kept[task]
    return found


def measured_sink(report: dict[str, Any]) -> float:
    """Sink_1 in percent of a measured report."""
    return float(report["sink"]["1"][str(EPSILON)])


def _keep(model: str, values: dict[str, Any]) -> Path:
    name = identity(model)
    path = MEASUREMENTS / f"{quote(name, safe='')}.json"
    before = _read(path) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(before | values | {"model": name}, indent=1) + "\n", encoding="utf-8")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept["model"], str):
            return kept
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{path.name} in data/measurements is not what `measure --save` and `scores` write: delete it")
