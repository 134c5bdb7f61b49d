"""What a record may say: types and ranges, so that one that was signed but makes no sense is refused in a line."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from torch import Tensor

from sinkutils.checks import choice, integer, require

# The most that a model of a record may be; larger ones would not be read but fill the memory.
LARGEST = {
    **dict.fromkeys(("vocab_size", "context_length"), 2**20),
    **dict.fromkeys(("num_layers", "num_heads"), 1024),
    **{"hidden_size": 2**16, "intermediate_size": 2**18},
}
# How a key begins, and the least and the most of its value in a point of the curve or in `final`.
RANGES = (("sink_", 0, 100), ("excess_", -1, 1), ("valid_loss", 0, 1e6), ("train_loss", 0, 1e6), ("step", 0, 1e12))
EACH = ("step", "sink_1", "valid_loss")  # what each point has, and the end of a run that did not fail
# Fields of `Report.to_dict` with their number of axes, least and most. Shares are rounded to five digits.
ARRAYS = {
    **dict.fromkeys(("alpha", "alpha_renormalised"), (3, -1e-3, 1.001)),
    "alpha_star": (2, -1e-3, 1.001),
    "embedding_norms": (1, 0, math.inf),
    **{f"{name}_norms": (2, 0, math.inf) for name in ("hidden", "before_norm", "query", "key", "value")},
    "hidden_peaks": (2, 0, math.inf),
}


def check_record(config: Any, metrics: Any, provenance: Any) -> None:
    """Raise ValueError, naming the file and the field, unless the three files of a record make sense."""
    check_config(config)
    values = _mapping("metrics.json", metrics, "status", "reason", "curve", "final")
    choice("metrics.json: status", values["status"], ("done", "failed"))
    reason = values["reason"]
    require(reason is None or isinstance(reason, str), "metrics.json: reason must be a text or null")
    require(isinstance(values["curve"], list), "metrics.json: curve must be a list of points")
    try:
        json.dumps((metrics, provenance), allow_nan=False)  # nan, or a number that is too large for a float
    except ValueError as error:
        raise ValueError("metrics.json and provenance.json must hold finite numbers only") from error
    for index, point in enumerate(values["curve"]):
        _point(f"metrics.json: curve[{index}]", point, *EACH)
    _point("metrics.json: final", values["final"], *(EACH if values["status"] == "done" else ()))
    if "report" in values["final"]:
        check_report(values["final"]["report"])
    _mapping("provenance.json", provenance)
    if "wall_seconds" in provenance:
        _number("provenance.json: wall_seconds", provenance["wall_seconds"], 0, math.inf)


def check_config(config: Any) -> None:
    """Raise ValueError unless config.json holds a run's config of a size that can be built."""
    values = _mapping("config.json", config, "experiment", "preset", "seed", "recipe", "model", "data", "train")
    for name in ("experiment", "preset"):
        require(isinstance(values[name], str), f"config.json: {name} must be a text, got {values[name]!r:.80}")
    for name in ("seed", "recipe"):
        integer(f"config.json: {name}", values[name], least=0)
    if "corpus" in values:  # since recipe 2
        corpus = _mapping("config.json: corpus", values["corpus"], "name", "sha256")
        require(all(isinstance(corpus[name], str) for name in ("name", "sha256")), "config.json: corpus must be texts")
    model = _mapping("config.json: model", values["model"], *LARGEST)
    for name, most in LARGEST.items():
        integer(f"config.json: {name}", model[name], least=1, most=most)
    _mapping("config.json: data", values["data"], "fixed_position")
    train = _mapping("config.json: train", values["train"], "steps", "eval_length")
    for name in ("steps", "eval_length"):
        integer(f"config.json: {name}", train[name], least=1)


def check_arrays(arrays: dict[str, Tensor], points: int) -> None:
    """Raise ValueError unless alpha.safetensors holds shares, those of `curve` for each point of the curve."""
    for name, axes in (("curve", 4), ("final", 4), ("star", 3)):
        if name in arrays:
            _array(f"alpha.safetensors: {name}", arrays[name].numpy(), axes, -1e-3, 1.001)
    rows = len(arrays.get("curve", range(points)))
    require(rows == points, f"alpha.safetensors: curve must have a row for each of the {points} points, not {rows}")


def check_report(report: Any) -> None:
    """Raise ValueError unless this is what `Report.to_dict` makes, as far as the ledger and the figures read it."""
    where = "metrics.json: report"
    values = _mapping(where, report)
    for k, by_eps in _mapping(f"{where}: sink", values.get("sink", {})).items():
        for eps, percent in _mapping(f"{where}: sink {k}", by_eps).items():
            _number(f"{where}: sink {k} at {eps}", percent, 0, 100)
            require(_is_number(k) and _is_number(eps), f"{where}: sink must be keyed by position and eps")
    for eps, percent in _mapping(f"{where}: sink_star", values.get("sink_star", {})).items():
        _number(f"{where}: sink_star at {eps}", percent, 0, 100)
    for k, excess in _mapping(f"{where}: excess", values.get("excess", {})).items():
        _number(f"{where}: excess {k}", excess, -1, 1)
    given = [name for name in ARRAYS if name in values]
    for name in given:
        axes, least, most = ARRAYS[name]
        _array(f"{where}: {name}", values[name], axes, least, most)
    if given:
        integer(f"{where}: T", _mapping(where, values, "T")["T"], least=1, most=LARGEST["context_length"])
        norms = (name for name in given if name.endswith("_norms"))
        single = [name for name in norms if np.shape(values[name])[-1] < min(2, values["T"])]
        require(not single, f"{where}: {', '.join(single)} must have a number for each position")
    by_layer: dict[str, Any] = {name: values[name] for name in ("key_norms", "value_norms") if name in values}
    if "alpha" in values:
        by_layer["alpha"] = values["alpha"][0]
    if by_layer:
        layers = _mapping(where, values, "layers")["layers"]
        _array(f"{where}: layers", layers, 1, 0, len(values.get("hidden_norms", ())) or LARGEST["num_layers"])
        for name, rows in by_layer.items():
            require(len(rows) == len(layers), f"{where}: {name} must have a row for each of the {len(layers)} layers")


def _point(where: str, point: Any, *needed: str) -> None:
    for key, value in _mapping(where, point, *needed).items():
        for name, least, most in RANGES:
            if key.startswith(name) and value is not None:
                _number(f"{where}: {key}", value, least, most)
    for name in ("peak_1", "value_ratio_1"):  # by block, in newer records
        if name in point:
            _array(f"{where}: {name}", point[name], 1, 0, math.inf)
    if point.get("gradient_norms"):  # of a fine-tuning: every step since the point before
        for name in ("losses", "gradient_norms"):
            _array(f"{where}: {name}", point.get(name), 1, 0, math.inf)
        require(len(point["losses"]) == len(point["gradient_norms"]), f"{where}: losses and gradient_norms differ")


def _mapping(where: str, value: Any, *needed: str) -> dict[str, Any]:
    require(isinstance(value, dict), f"{where} must be an object, got {type(value).__name__}")
    lacking = [name for name in needed if name not in value]
    require(not lacking, f"{where} lacks {', '.join(lacking)}")
    return value


def _number(where: str, value: Any, least: float, most: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    require(good, f"{where} must be a number in {least:g}..{most:g}, got {value!r:.80}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _array(where: str, value: Any, axes: int, least: float, most: float) -> None:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    good = array.ndim == axes and array.size and array.dtype.kind in "iuf"
    good = bool(good and least <= array.min() and array.max() <= most)
    require(good, f"{where} must be numbers in {least:g}..{most:g} with {axes} axes")
