"""The contents of a record's metrics.json, as types."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from sinkutils.study.config import Json


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
