"""The sink while a model trains: a callback for the Trainer of transformers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed, nn
from transformers import Trainer, TrainerCallback

from sinkutils.checks import instance, integer, require
from sinkutils.measuring.measure import measure
from sinkutils.measuring.refusals import cut_by, is_sharded

LOGGER = logging.getLogger("sinkutils")
LOGGED = ("sink_1", "block_1", "later_blocks", "element", "value_ratio")


class SinkCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Measures the model every so many optimiser steps, at the start and at the end of a training.

    ids: token ids (samples, T) to measure on, as `su.probe` gives them.
    options: of `su.measure`. The trainer's own log, and so every
    reporter, gets these of `Report.summary`, as sink/sink_1, ..:

        sink_1                  the share of heads with a sink, in percent
        block_1, later_blocks   mean excess attention to the first token, in the first attention
                                layer and in the others
        element                 the first token's largest hidden element over the median one
        value_ratio             the first token's value norm over the others', in the least layer

    The model's mode, the random numbers and the gradients are left as they were. Where FSDP2 shards
    the model, every process measures, on the ids of the first; else the first alone. The first
    logs. What cannot be measured is said once, as a warning, and the training goes on; that is so
    for models that DeepSpeed's ZeRO-3, tensor parallelism or the older FSDP cut into parts.
    """

    def __init__(self, ids: Tensor, every: int = 500, **options: Any) -> None:
        instance("ids", ids, Tensor)
        require(ids.ndim == 2, f"ids must have the shape (samples, T), got {tuple(ids.shape)}")
        self.ids = ids
        self.every = integer("every", every, least=1)
        self.options = options
        self.sharded = False
        self.why_not: str | None = None  # the model is not measured
        self.warned: set[str] = set()  # warnings

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Called by the trainer once the model is where it trains: find out who measures."""
        self.sharded = is_sharded(model)
        self.why_not = cut_by(model)
        if self.why_not is not None:
            self._warn(state, f"the sink is not measured: the model is cut by {self.why_not}")
        # Each pass of a sharded model gathers weights from all processes: they have to run the same
        # ones. Of other shapes, or another number of them, a pass would wait for ever.
        if self.sharded:
            shared: list[Any] = [self.ids, self.options]
            distributed.broadcast_object_list(shared, src=0)
            self.ids, self.options = shared
        if state.global_step == 0:
            self._measure(state, control, model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Called by the trainer after each optimiser step."""
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._measure(state, control, model)

    def _measure(self, state: Any, control: Any, model: nn.Module) -> None:
        first = state.is_world_process_zero
        if self.why_not is not None or not (first or self.sharded):
            return
        try:
            summary = measure(model, self.ids, **self.options).summary()
        except Exception as error:  # whatever a model in training can do, its training goes on
            self._warn(state, f"the sink was not measured at step {state.global_step}", error)
            return
        if first:
            should_log = control.should_log
            logged = {}
            for name in LOGGED:
                if name in summary:
                    logged[f"sink/{name}"] = summary[name]
            log = trainer_log()
            log(logged)
            # Logging switches it off, and the loss may be due at this step.
            control.should_log = should_log

    def _warn(self, state: Any, message: str, error: object = "") -> None:
        """Say something once, in the first process: the same error is not said at another step."""
        key = str(error) or message
        if not state.is_world_process_zero or key in self.warned:
            return
        self.warned.add(key)
        if error:
            message += f": {error}"
        LOGGER.warning("%s", message)


def trainer_log() -> Callable[..., None]:
    """`log` of the trainer that is calling.

    Callbacks are not told who calls, and only this reaches every reporter.
    """
    for caller in inspect.stack(context=0):
        trainer = caller.frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            log: Callable[..., None] = trainer.log
            return log
    return lambda numbers: LOGGER.info("%s", numbers)
