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

from sinkutils.checks import instance, integer, require
from sinkutils.study.config import Json, check_name

# Of what a point of the curve says: a share is at most 100 percent, an excess at most 1.
BOUNDS: dict[str, tuple[float, float]]
BOUNDS = dict.fromkeys(("step", "valid_loss", "train_loss"), (0, math.inf))
BOUNDS |= dict.fromkeys(("sink_1", "sink_2", "sink_3", "sink_4", "sink_star"), (0, 100))
BOUNDS |= dict.fromkeys(("excess_1", "excess_star"), (-math.inf, 1))
EVERY_POINT = ("step", "valid_loss", "sink_1")


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
    require(bool(final) or metrics["status"] == "failed", "final is empty")
    points = [*metrics["curve"], final] if final else metrics["curve"]
    for point in points:
        for name in EVERY_POINT:
            require(name in point, f"a point of the curve lacks {name}")
        for name, (least, most) in BOUNDS.items():
            if name in point:
                _check_number(name, point[name], least, most)
        if "gradient_norms" in point:  # of a fine-tuning
            _check_numbers("gradient_norms", point["gradient_norms"], 1, 0, math.inf)
            _check_numbers("losses", point["losses"], 1, 0, math.inf)
    if "gradients" in final:
        _check_numbers("gradients", final["gradients"]["input"], 2, 0, math.inf)
    if "report" in final:
        check_report(final["report"])


def check_report(report: Any) -> None:
    """Hold that attention lies within 0 to 1, that norms are finite, and that all have as many
    blocks.
    """
    integer("T", report["T"], least=1)
    alpha = _check_numbers("alpha", report["alpha"], 3, 0, 1)
    targets, blocks, _ = alpha.shape  # (targets, L, H)
    require(len(report["targets"]) == targets, "targets are not those of alpha")
    require(report["targets"][0] == 1, "the first token is not the first target")
    norms = ["hidden_norms", "key_norms", "value_norms"]
    for name in ("before_norm_norms", "hidden_peaks", "alpha_star"):
        if report.get(name):
            norms.append(name)
    for name in norms:  # by block
        most = 1 if name == "alpha_star" else math.inf
        rows = _check_numbers(name, report[name], 2, 0, most)
        require(
            len(rows) == blocks and rows.size > 0,
            f"{name} is of {len(rows)} blocks and alpha of {blocks}",
        )


def check_alpha(arrays: Mapping[str, Any], metrics: Metrics, model: Json) -> None:
    """Hold that attention lies within 0 to 1, and "curve" is of this model's and curve's shape."""
    for name, alpha in arrays.items():
        least, most = alpha.aminmax()  # nan if any is
        require(bool(least >= 0) and bool(most <= 1), f"{name} is not within 0 to 1")
    if "curve" in arrays:
        evaluations, _, layers, heads = arrays["curve"].shape
        require(
            evaluations == len(metrics["curve"]), "curve is not as long as that of metrics.json"
        )
        require(
            (layers, heads) == (model["num_layers"], model["num_heads"]),
            "curve is of another model",
        )


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    """A finite number in least..most. A record has a hundred, and an array of each takes long."""
    require(type(value) in (int, float), f"{name} is no number")
    if not (least <= value <= most and abs(value) < math.inf):
        raise ValueError(f"{name} is {value}, and has to be within {least} to {most}")


def _check_numbers(
    name: str, values: Any, dimensions: int, least: float, most: float
) -> numpy.ndarray[Any, Any]:
    """Nested lists as an array, if they are so deep and of finite numbers in least..most."""
    # An empty list has no kind of its own.
    array = numpy.array(values, dtype=float if values == [] else None)
    require(
        array.ndim == dimensions and array.dtype.kind in "if",
        f"{name} is not {dimensions} lists deep of numbers",
    )
    good = numpy.isfinite(array) & (least <= array) & (array <= most)
    if not good.all():
        raise ValueError(f"{name} is {array[~good][0]}, and has to be within {least} to {most}")
    return array
