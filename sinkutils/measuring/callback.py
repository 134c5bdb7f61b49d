"""Following the sink during training: a callback for the Trainer of transformers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed, nn
from transformers import Trainer, TrainerCallback

from sinkutils.checks import integer, require
from sinkutils.measuring.batches import Ids, Inputs
from sinkutils.measuring.measure import DECODED, measure
from sinkutils.measuring.refusals import cut_by, is_sharded

LOGGER = logging.getLogger("sinkutils")
# What is not logged of `Report.summary`: where the element is
PLACE = {"element_block", "element_dimension"}


class SinkCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Measure the model at the start of training, every `every` optimiser steps, and at the end.

    ids: token ids (samples, T) to measure on, for instance from `su.probe`; or a mapping, such as a
        batch of the trainer's collator, also of packed texts (`su.measure`).
    options: keyword arguments of `su.measure`.

    These numbers of `Report.summary` go to the trainer's log, and so to every reporter, under the
    names sink/sink_1, sink/block_1, ..:

        sink_1                  the share of heads with a sink, in percent
        block_1, later_blocks   mean excess attention to the first token, in the first attention
                                layer and in the others
        element                 the first token's largest hidden element, divided by the median
                                element of its sequence
        value_ratio             the first token's value norm, divided by the mean norm of the other
                                tokens' values, in the layer where this ratio is smallest
        entropy                 of a row of attention, in nats, the learned sink's share included
        star, sink_logit        the attention to a learned sink, and its mean logit, where there is
                                one
        excess_full, excess_window, element_full, element_window, element_linear
                                the mean excess, and the element, by kind of layer, in a model that
                                has several: full attention, a window, no softmax attention

    The last row is of the model that the training leaves: if `load_best_model_at_end` has put back
    the best weights, it is theirs. A training that another callback stops has its last row too.
    The model's train or eval mode, the random state and the gradients do not change. Only the first
    process measures and logs. A model that FSDP2 shards is the exception: every process then takes
    part in the measurement, on the first process's ids. If the model cannot be measured, one
    warning says so and the training goes on. This is the case where DeepSpeed's ZeRO-3, tensor
    parallelism or the older FSDP split the model.
    """

    def __init__(self, ids: Ids, every: int = 500, **options: Any) -> None:
        decoders = isinstance(ids, Mapping) and DECODED & ids.keys()  # are not known yet
        if not decoders:
            Inputs(ids, options.get("attention_mask"), (1,))  # raises ValueError for anything else
        unknown = options.keys() - inspect.signature(measure).parameters.keys()
        require(not unknown, f"su.measure has no option {', '.join(sorted(unknown))}")
        self.ids = ids
        self.every = integer("every", every, least=1)
        self.options = {"entropy": True} | options
        self.last_step: int | None = None  # the step that was last measured
        self.sharded = False  # by FSDP2
        self.why_not: str | None = None  # the reason why this model cannot be measured, if any
        self.warned: set[str] = set()  # what a warning was given about

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Find out which processes measure. The trainer calls this once the model is in place."""
        self.sharded = is_sharded(others["model"])
        self.why_not = cut_by(others["model"])
        if self.why_not is not None:
            self._warn(state, f"the sink is not measured: the model is cut by {self.why_not}")
        # A forward pass of a sharded model gathers weights from all processes, so every process has
        # to run the same passes. With other ids or options, one of them would wait for ever.
        if self.sharded:
            shared: list[Any] = [self.ids, self.options]
            distributed.broadcast_object_list(shared, src=0)
            self.ids, self.options = shared
        self.last_step = None
        if state.global_step == 0:
            self._measure(state, control, others["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure if it is time to. The trainer calls this after each optimiser step."""
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._measure(state, control, others["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure if an evaluation has stopped the training after its last step."""
        if control.should_training_stop and self.last_step != state.global_step:
            self._measure(state, control, others["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure the model that is left, unless it was measured at this step."""
        put_back = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if put_back or self.last_step != state.global_step:
            self._measure(state, control, others["model"])

    def _measure(self, state: Any, control: Any, model: nn.Module) -> None:
        self.last_step = state.global_step
        first = state.is_world_process_zero
        if self.why_not is not None or not (first or self.sharded):
            return
        try:
            summary = measure(model, self.ids, **self.options).summary()
        except Exception as error:  # a failed measurement must not end the training
            self._warn(state, f"the sink was not measured at step {state.global_step}", error)
            return
        if first:
            should_log = control.should_log
            log = trainer_log()
            log({f"sink/{name}": x for name, x in summary.items() if name not in PLACE})
            # `log` clears this flag. It is restored, as the trainer may still have to log its loss.
            control.should_log = should_log

    def _warn(self, state: Any, message: str, error: object = "") -> None:
        """Log a warning in the first process. An error that recurs later is not logged again."""
        key = str(error) or message
        if not state.is_world_process_zero or key in self.warned:
            return
        self.warned.add(key)
        if error:
            message += f": {error}"
        LOGGER.warning("%s", message)


def trainer_log() -> Callable[..., None]:
    """The `log` method of the trainer that called the callback, found on the call stack.

    A callback gets no reference to its trainer in any of its events, and only this method reaches
    every reporter and the history of the log.
    """
    for caller in inspect.stack(context=0):
        trainer = caller.frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            log: Callable[..., None] = trainer.log
            return log
    return lambda numbers: LOGGER.info("%s", numbers)
