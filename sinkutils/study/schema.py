"""What metrics.json of a record says, as types."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from sinkutils.study.config import Json


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
