"""The contents of a record's metrics.json: their types, and a check of what readers use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from sinkutils.checks import Refused, require
from sinkutils.study.config import Json

if TYPE_CHECKING:
    import numpy as np

BLOCKS = ("peak_1", "value_ratio_1")  # a number for each block
STEPS = ("losses", "gradient_norms")  # a number for each step since the point before
NUMBERS = ("step", "valid_loss", "train_loss", "sink_", "excess_")  # how their names begin
NORMS = ("hidden_norms", "key_norms", "value_norms", "before_norm_norms", "hidden_peaks")


class Point(TypedDict):
    """The results of one evaluation. Sinks are in percent, losses in nats per token."""

    step: int
    valid_loss: float
    train_loss: NotRequired[float]  # mean over the steps since the last evaluation; not at step 0
    sink_1: float
    sink_2: NotRequired[float]
    sink_3: NotRequired[float]
    sink_4: NotRequired[float]
    sink_star: NotRequired[float]  # the sink on a learned key or token of the model, if it has one
    excess_1: NotRequired[float]
    excess_star: NotRequired[float]
    # for each block: the largest element of h_1, divided by the median of all elements
    peak_1: NotRequired[list[float]]
    # for each block: the norm of v_1, divided by the mean norm of the other tokens
    value_ratio_1: NotRequired[list[float]]
    losses: NotRequired[list[float]]  # in a fine-tuning only: one for each step
    gradient_norms: NotRequired[list[float]]


class Final(Point):
    """The last evaluation, with the measurements that are made once, at the end."""

    report: NotRequired[Json]  # `Report.to_dict`, without the parts that a record does not keep
    destinations: NotRequired[Json]
    gradients: NotRequired[Json]


class Metrics(TypedDict):
    """The contents of metrics.json. `final` is empty if the run failed before any evaluation."""

    status: str  # "done", or "failed" if the training did not converge
    reason: str | None
    curve: list[Point]
    final: Final


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
    columns: dict[str, list[Any]] = {}  # all numbers of one name
    for point in points:
        require(isinstance(point, dict), "a point of its curve is no object")
        for name, value in point.items():
            column = columns.setdefault(name, [])
            if name in BLOCKS or name in STEPS:
                require(isinstance(value, list), f"{name} is no list")
                require(name in STEPS or len(value) == blocks, f"{name} is not of each block")
                column.extend(value)
            elif name.startswith(NUMBERS):
                column.append(value)
    for name in ("step", "valid_loss", "sink_1"):
        require(len(columns.get(name, [])) == len(points), f"a point of its curve lacks {name}")
    for name, column in columns.items():
        types = {*map(type, column)}
        require(types <= {int, float}, f"{name} holds what is no number")
        try:
            finite = all(map(math.isfinite, column))
        except OverflowError:  # an integer that is larger than any float
            finite = False
        require(finite, f"{name} holds what is not finite")
        if name == "step":
            require(types <= {int} and min(column, default=0) >= 0, "step is no count")
        if name.startswith("sink_"):
            low, high = min(column, default=0), max(column, default=0)
            require(low >= 0 and high <= 100, f"{name} of {low:g} to {high:g} is no share")


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
