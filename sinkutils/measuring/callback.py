"""The sink while a model trains: a callback for the Trainer of transformers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from sinkutils.checks import instance, integer, require
from sinkutils.measuring.measure import measure

LOGGER = logging.getLogger("sinkutils")


class SinkCallback(TrainerCallback):
    """Measures the model every so many optimiser steps and logs `Report.summary` as sink/sink_1, sink/block_1, ...

    ids: token ids (samples, T) to measure on, as `su.probe` gives them. options: of `su.measure`, such as batch_size.
    The numbers go through the trainer's own log, so that every reporter shows them. The model's mode, the random
    numbers and the gradients are left as they were. Of several processes only the first measures. What cannot be
    measured is logged once as a warning; it never stops the training.
    """

    def __init__(self, ids: Tensor, every: int = 500, **options: Any) -> None:
        instance("ids", ids, Tensor)
        require(ids.ndim == 2, f"ids must have the shape (samples, T), got {tuple(ids.shape)}")
        integer("every", every, least=1)
        self.ids, self.every, self.options = ids, every, options

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any) -> None:
        """Called by the trainer after each optimiser step."""
        if state.global_step % self.every or not state.is_world_process_zero or model is None:
            return
        try:
            summary = measure(model, self.ids, **self.options).summary()
        except Exception as error:  # whatever a model in training can do, its training goes on
            LOGGER.warning("the sink was not measured at step %d: %s", state.global_step, error)
            return
        due = control.should_log
        trainer_log()({f"sink/{name}": value for name, value in summary.items()})
        control.should_log = due  # logging switches it off, and the loss may be due at this step


def trainer_log() -> Callable:
    """`log` of the trainer that is calling. Callbacks are not told who calls, and only this reaches every reporter."""
    for caller in inspect.stack(context=0):
        trainer = caller.frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            return trainer.log
    return lambda numbers: LOGGER.info("%s", numbers)
