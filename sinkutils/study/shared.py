"""One run that several processes share, each on a device of its own, through Accelerate.

    torchrun --nproc-per-node 8 -m sinkutils train default --preset paper
    accelerate launch --config_file studies/fsdp.yaml -m sinkutils train softmax_1b --preset paper-1b

Each process takes an equal part of the rows of every batch, and the gradients are averaged. So the
batches and their order are those of a single process, and the numbers differ by rounding alone.
Each process has all weights (DDP) or a part of them (FSDP2). All of them evaluate, on the same
weights. The first, the main process, saves the state and writes the record.
"""

from __future__ import annotations

import os
import time
import warnings
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sinkutils.checks import launched, require
from sinkutils.study.config import FinetuneConfig, Json, RunConfig
from sinkutils.study.corpus import Corpus
from sinkutils.study.record import Folder, Record
from sinkutils.study.task import claim, conditions_of, reproducible
from sinkutils.study.train import Run, load_checkpoint, save_run, to_its_end

PATIENCE = timedelta(days=1)  # the others wait so long while the main process makes a text
LOST = ("peer", "NCCL", "gloo", "store")  # what PyTorch says if a process can no longer be reached
UNSEEN = "does not see the main process's files: --runs must be a folder that all machines share"


class SharedRun(Run):
    """A run of which this is one process. Its `batch` is that of all processes."""

    def __init__(self, config: RunConfig, corpus: Corpus, world: Any) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        super().__init__(config, corpus, world.device)
        self.world = world
        self.main = world.is_main_process
        self.trained, *self.optimizers = world.prepare(self.model, *self.optimizers)
        register_fsdp_forward_method(self.model, "hidden")  # `measure` calls it

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        rows = batch.chunk(self.world.num_processes)[self.world.process_index]
        loss, norm = super().update(rows)
        return self.world.reduce(loss, "mean"), norm

    def backward(self, part: Tensor, parts: int) -> Tensor:
        with self.world.accumulate(self.trained):  # averages the gradients with the last part only
            return super().backward(part, parts)

    def state(self) -> Json:
        state: Json = tree_map(_whole, super().state())
        return state

    def load(self, state: Json) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in state["model"].items():
            state["model"][name] = _cut(value, parameters[name])
        super().load(state)
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                for name, value in values.items():
                    values[name] = _cut(value, parameter)

    def now(self) -> float:
        """The main process's clock, so that all save at the same step."""
        seconds: float = self.of_main(time.monotonic())
        return seconds

    def of_main(self, value: Any) -> Any:
        """What `value` is in the main process."""
        from accelerate.utils import broadcast_object_list

        (value,) = broadcast_object_list([value])
        return value


def train_shared(
    config: RunConfig,
    runs: Folder,
    device: torch.device,
    corpus: Corpus | str | None,
    keep_weights: bool,
    checkpoint_seconds: float,
    progress: bool,
) -> Record:
    """`train`, called in each of several processes. The launcher starts one run, and no second."""
    world = join(config, device)
    run = None
    with ExitStack() as stack:
        if not world.is_main_process:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
        try:
            with world.local_main_process_first():  # it makes the text, if there is none
                place, text, done = claim(config, runs, corpus, keep_weights)
                if done is None and world.is_main_process:
                    stack.enter_context(place.lock())
                    place.check_free()
            if place.record(keep_weights) is None:
                assert text is not None
                stack.enter_context(reproducible(world.device))
                run = SharedRun(config, text, world)
                load_checkpoint(run, place.checkpoint)
                if run.of_main(run.step) != run.step:
                    raise FileNotFoundError(f"process {world.process_index} {UNSEEN}")
                conditions = conditions_of(run, False, False)
                conditions |= {"processes": world.num_processes, "sharded": world.is_fsdp2}
                reason, report = to_its_end(
                    run, conditions, progress, place.checkpoint, checkpoint_seconds
                )
                save_run(run, place.folder, reason, report, keep_weights)
                world.wait_for_everyone()
        except RuntimeError as error:
            if not any(word in str(error) for word in LOST):
                raise
            if run is None or world.process_index > 1:  # another process says why
                raise SystemExit(1) from None
            raise ConnectionError(
                "another process of this run has ended; start all again, and the run goes on from "
                "its last checkpoint"
            ) from error
    world.end_training()
    record = place.record(keep_weights)
    if record is None:
        raise FileNotFoundError(f"process {world.process_index} {UNSEEN}")
    return record


def join(config: RunConfig, device: torch.device) -> Any:
    """This process's place among those that the launcher has started: an `Accelerator`.

    Raises ValueError if they cannot share this run.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    _, processes = launched()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    gpus = torch.cuda.device_count()
    batch = config.train.batch_size
    rows, rest = divmod(batch, processes)
    size = min(config.train.micro_batch or rows, rows)
    require(
        not isinstance(config, FinetuneConfig),
        f"{config.experiment} is a fine-tuning, whose batches differ in length: train it in one "
        "process, without a launcher",
    )
    require(
        device.type == "cpu" or here <= gpus,
        f"{here} processes were started on a machine with {gpus} GPUs: start one for each GPU",
    )
    require(device.index is None, "with a launcher, each process gets a GPU: leave --device out")
    require(
        rest == 0 and rows % size == 0,
        f"{processes} processes cannot divide a batch of {batch} rows into equal parts, with "
        f"micro_batch={config.train.micro_batch}",
    )
    world = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # `Run.autocast` has the precision of the config
        gradient_accumulation_steps=rows // size,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    cut = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    require(
        world.is_fsdp2 if cut else world.distributed_type.startswith("MULTI"),
        "processes share a run by DDP, or on GPUs by FSDP2 (studies/fsdp.yaml), and by nothing else",
    )
    return world


def _whole(value: Any) -> Any:
    """A tensor whose parts are in several processes, put together on the CPU of each of them."""
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def _cut(value: Any, parameter: Tensor) -> Any:
    """A tensor of a checkpoint, cut over the processes as its parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and value.ndim:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
