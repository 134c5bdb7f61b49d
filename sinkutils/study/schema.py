"""What a record's files may say: the form of metrics.json as types, and checks of what a run can
have written.

The digests of a record are no signature: one from elsewhere may be whole and yet not of a run of
this package. Each check raises whatever Python raises about such values, which the reader of a
record makes one line of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import numpy

from sinkutils.checks import choice, instance, integer, require
from sinkutils.study.config import Json, check_name

# How deep numbers are nested, their least and greatest value, and which these are
Forms = tuple[tuple[int, float, float, tuple[str, ...]], ...]
POINT: Forms = (
    (0, 0, math.inf, ("step", "valid_loss", "train_loss")),
    (0, 0, 100, ("sink_1", "sink_2", "sink_3", "sink_4", "sink_star")),  # percent
    (0, -math.inf, 1, ("excess_1", "excess_star")),
    (1, 0, math.inf, ("losses", "gradient_norms")),
)
NORMS = ("hidden_norms", "key_norms", "value_norms")
REPORT: Forms = (
    (3, 0, 1, ("alpha",)),  # (targets, L, H)
    (2, 0, 1, ("alpha_star",)),  # (L, H)
    (2, 0, math.inf, (*NORMS, "before_norm_norms", "hidden_peaks")),  # (L, T)
)
GRADIENTS: Forms = ((2, 0, math.inf, ("input",)),)  # (L, T - 1)


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


def check_config(config: Json) -> None:
    """Hold that an upgraded config has the fields that readers take from it, whatever its
    experiment.
    """
    check_name("experiment", config["experiment"])
    check_name("preset", config["preset"])
    integer("seed", config["seed"], least=0)
    for name in ("name", "sha256"):
        instance(f"the corpus's {name}", config["corpus"][name], str)
    counts = {"recipe": config["recipe"], "batch_size": config["train"]["batch_size"]}
    for name in ("context_length", "vocab_size", "num_layers", "num_heads"):
        counts[name] = config["model"][name]
    counts["window"] = config["model"]["attention"]["window"] or 1
    for name, count in counts.items():
        integer(name, count, least=1)


def check_metrics(metrics: Any) -> None:
    """Hold that a run can end with these numbers."""
    final = metrics["final"]
    choice("status", metrics["status"], ("done", "failed"))
    if metrics["reason"] is not None:
        instance("reason", metrics["reason"], str)
    # `final` is a point as well; only a run that failed at once has none.
    points = metrics["curve"]
    if final or metrics["status"] == "done":
        points = [*points, final]
    for point in points:
        _check_numbers(point, POINT, needed=("step", "valid_loss", "sink_1"))
    if "gradients" in final:
        _check_numbers(final["gradients"], GRADIENTS, needed=("input",))
    if "report" in final:
        report = final["report"]
        integer("T", report["T"], least=1)
        arrays = _check_numbers(report, REPORT, needed=("alpha", *NORMS))
        targets, blocks, _ = arrays.pop("alpha").shape
        require(len(report["targets"]) == targets, "targets are not those of alpha")
        require(report["targets"][0] == 1, "the first token is not the first target")
        for name, rows in arrays.items():
            same = len(rows) == blocks and rows.size > 0
            require(same, f"{name} is of {len(rows)} blocks and alpha of {blocks}")


def check_alpha(arrays: Mapping[str, Any], metrics: Metrics, model: Json) -> None:
    """Hold that attention lies within 0 to 1, and "curve" is of this model's and curve's shape."""
    for name, alpha in arrays.items():
        least, most = alpha.aminmax()  # nan if any is
        within = bool(least >= 0) and bool(most <= 1)
        require(within, f"{name} is not within 0 to 1")
    if "curve" in arrays:
        evaluations, _, *heads = arrays["curve"].shape
        points = len(metrics["curve"])
        require(evaluations == points, "curve is not as long as in metrics.json")
        require(heads == [model["num_layers"], model["num_heads"]], "curve is of another model")


def _check_numbers(
    values: Mapping[str, Any], forms: Forms, needed: tuple[str, ...]
) -> dict[str, numpy.ndarray[Any, Any]]:
    """Lists of numbers of these forms as arrays, without those that may be left out and are."""
    arrays = {}
    for depth, least, most, names in forms:
        for name in names:
            value: Any = values.get(name)
            empty = not value and value != 0  # None or an empty list; 0 is a number
            if empty and name not in needed:
                continue
            if depth == 0:  # a record has a hundred of these: an array of each would take long
                good = type(value) in (int, float)
                good = good and least <= value <= most and abs(value) < math.inf
            else:
                array = numpy.array(value)
                good = array.ndim == depth and array.dtype.kind in "if"  # integers, floats
                if good:
                    within = (least <= array) & (array <= most) & numpy.isfinite(array)
                    good = bool(within.all())
                arrays[name] = array
            require(good, f"{name} is not {depth} lists deep, of numbers within {least} to {most}")
    return arrays
