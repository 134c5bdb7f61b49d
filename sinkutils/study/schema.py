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
# Fields of `Report.to_dict`: numbers by keys (how many, each a number), and arrays by their axes; with least and most.
BY_KEY = {"sink": (2, 0, 100), "sink_star": (1, 0, 100), "excess": (1, -1, 1)}
BY_AXIS = {
    "embedding_norms": (1, 0, math.inf),
    **{f"{name}_norms": (2, 0, math.inf) for name in ("hidden", "before_norm", "query", "key", "value")},
    "hidden_peaks": (2, 0, math.inf),
    **dict.fromkeys(("alpha", "alpha_renormalised"), (3, -1e-3, 1.001)),  # shares are rounded to five digits
    "alpha_star": (2, -1e-3, 1.001),
}


def check_record(config: Any, metrics: Any, provenance: Any) -> None:
    """Raise ValueError, naming the file and the field, unless the three files of a record make sense."""
    _check_config(config)
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
        _check_report("metrics.json: report", values["final"]["report"])
    _mapping("provenance.json", provenance)
    _number("provenance.json: wall_seconds", provenance.get("wall_seconds", 0), 0, math.inf)


def _check_config(config: Any) -> None:
    """config.json holds a run's config of a size that can be built."""
    values = _mapping("config.json", config, "experiment", "preset", "seed", "recipe", "model", "data", "train")
    texts = {name: values[name] for name in ("experiment", "preset")}
    if "corpus" in values:  # since recipe 2
        texts |= _mapping("config.json: corpus", values["corpus"], "name", "sha256")
    for name, text in texts.items():
        require(isinstance(text, str), f"config.json: {name} must be a text, got {text!r:.80}")
    for name in ("seed", "recipe"):
        integer(f"config.json: {name}", values[name], least=0)
    _mapping("config.json: data", values["data"], "fixed_position")
    for part, names in (("model", tuple(LARGEST)), ("train", ("steps", "eval_length"))):
        sizes = _mapping(f"config.json: {part}", values[part], *names)
        for name in names:
            integer(f"config.json: {name}", sizes[name], least=1, most=LARGEST.get(name, math.inf))


def check_arrays(arrays: dict[str, Tensor], points: int) -> None:
    """Raise ValueError unless alpha.safetensors holds shares, those of `curve` for each point of the curve."""
    for name, axes in (("curve", 4), ("final", 4), ("star", 3)):
        if name in arrays:
            _array(f"alpha.safetensors: {name}", arrays[name].numpy(), axes, -1e-3, 1.001)
    rows = len(arrays.get("curve", range(points)))
    require(rows == points, f"alpha.safetensors: curve must have a row for each of the {points} points, not {rows}")


def _check_report(where: str, report: Any) -> None:
    """This is what `Report.to_dict` makes, as far as the ledger and the figures read it."""
    values = _mapping(where, report)
    for name, (keys, least, most) in BY_KEY.items():
        _by_key(f"{where}: {name}", values.get(name, {}), keys, least, most)
    given = {name: limits for name, limits in BY_AXIS.items() if name in values}
    if given:
        integer(f"{where}: T", _mapping(where, values, "T")["T"], least=1, most=LARGEST["context_length"])
    for name, limits in given.items():
        field, rows = f"{where}: {name}", values[name]
        _array(field, rows, *limits)
        short = name.endswith("_norms") and np.shape(rows)[-1] < min(2, values["T"])
        require(not short, f"{field} must have a number for each position")
        if name in ("alpha", "key_norms", "value_norms"):
            layers = _mapping(where, values, "layers")["layers"]
            blocks = len(values.get("hidden_norms", ())) or LARGEST["num_layers"]
            _array(f"{where}: layers", layers, 1, 0, blocks)
            same = len(rows[0] if name == "alpha" else rows) == len(layers)
            require(same, f"{field} must have a row for each of the {len(layers)} layers")


def _point(where: str, point: Any, *needed: str) -> None:
    for key, value in _mapping(where, point, *needed).items():
        for name, least, most in RANGES:
            if key.startswith(name) and value is not None:
                _number(f"{where}: {key}", value, least, most)
    by_step = ("losses", "gradient_norms") if point.get("gradient_norms") else ()  # of a fine-tuning
    for name in ("peak_1", "value_ratio_1", *by_step):  # the first two by block, in newer records
        if name in point or name in by_step:
            _array(f"{where}: {name}", point.get(name), 1, 0, math.inf)
    same = not by_step or len(point["losses"]) == len(point["gradient_norms"])
    require(same, f"{where}: losses and gradient_norms differ")


def _mapping(where: str, value: Any, *needed: str) -> dict[str, Any]:
    require(isinstance(value, dict), f"{where} must be an object, got {type(value).__name__}")
    lacking = [name for name in needed if name not in value]
    require(not lacking, f"{where} lacks {', '.join(lacking)}")
    return value


def _number(where: str, value: Any, least: float, most: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    require(good, f"{where} must be a number in {least:g}..{most:g}, got {value!r:.80}")


def _by_key(where: str, value: Any, keys: int, least: float, most: float) -> None:
    """A number, by so many keys: positions or *, and eps."""
    if keys == 0:
        _number(where, value, least, most)
        return
    for key, inner in _mapping(where, value).items():
        try:
            known = key == "star" or math.isfinite(float(key))
        except ValueError:
            known = False
        require(known, f"{where} must be keyed by position and eps, got {key!r:.80}")
        _by_key(f"{where} {key}", inner, keys - 1, least, most)


def _array(where: str, value: Any, axes: int, least: float, most: float) -> None:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    good = array.ndim == axes and array.size and array.dtype.kind in "iuf"
    good = bool(good and least <= array.min() and array.max() <= most)
    require(good, f"{where} must be numbers in {least:g}..{most:g} with {axes} axes")
