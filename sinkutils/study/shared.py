"""One run that several processes share, each on a device of its own, through Accelerate.

    accelerate launch --num_processes 8 -m sinkutils train default --preset paper
    torchrun --nproc-per-node 8 -m sinkutils train default --preset paper

Each process takes an equal part of the rows of every batch, and the gradients are averaged. So the
batches and their order are those of a single process, and the numbers differ by rounding alone.
Each process has all weights (DDP) or, after `accelerate launch --use_fsdp`, a part of them (FSDP2).
The main process is the first. It alone evaluates, saves the state and writes the record.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sinkutils.checks import require
from sinkutils.measuring.report import Report
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.corpus import Corpus
from sinkutils.study.record import Folder, Record
from sinkutils.study.step import conditions_of, reproducible
from sinkutils.study.task import claim
from sinkutils.study.train import Run, load_checkpoint, save_run, to_its_end

# While the main process makes a text or evaluates, the others wait for it. If it is killed, the
# launcher stops them.
PATIENCE = timedelta(days=1)
LOST = ("peer", "NCCL", "gloo", "store")  # what PyTorch says if a process can no longer be reached


class SharedRun(Run):
    """A run of which this is one process. `model` is the whole model, in the main process."""

    def __init__(self, config: RunConfig, corpus: Corpus, world: Any) -> None:
        super().__init__(config, corpus, world.device)
        self.world = world
        self.main = world.is_main_process
        self.sharded = world.distributed_type == "FSDP"

    def share(self) -> None:
        """Hand model and optimisers to Accelerate, once the state is that of the checkpoint."""
        states = super().optimizer_states()
        trained = self.model
        if self.sharded and self.main:
            self.model = copy.deepcopy(trained)  # this one stays whole
        if self.sharded:
            for optimizer in self.optimizers:
                optimizer.state.clear()  # it is that of the whole parameters
        self.trained, *self.optimizers = self.world.prepare(trained, *self.optimizers)
        if self.sharded:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                _cut(optimizer, state)

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """As in a single process, on the rows of this one. Loss and norm are of the whole batch."""
        config = self.config.train
        rows = batch.chunk(self.world.num_processes)[self.world.process_index]
        parts = rows.split(config.micro_batch or len(rows))
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, start=1):
            # The gradients are averaged over the processes once, with those of the last part.
            ends = number == len(parts)
            with contextlib.nullcontext() if ends else self.world.no_sync(self.trained):
                with self.autocast():
                    loss = self.forward(self.trained, part, self.unscored)
                loss = loss / len(parts)
                self.world.backward(loss)
            total += loss.detach()
        norm = self.world.clip_grad_norm_(self.trained.parameters(), config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return self.world.reduce(total, "mean"), _whole(norm)

    def evaluate(self, losses: list[float]) -> Report | None:
        """In the main process; the others get what came of it."""
        if self.sharded:
            weights = {name: _whole(part) for name, part in self.trained.state_dict().items()}
            if self.main:
                self.model.load_state_dict(weights)
        report: Report | None = super().evaluate(losses) if self.main else None
        self.passed.clear()
        report, self.curve, self.alphas = self.of_main((report, self.curve, self.alphas))
        return report

    def optimizer_states(self) -> list[Any]:
        return [tree_map(_whole, state) for state in super().optimizer_states()]

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
    """`train`, called in each of several processes. The launcher starts one run, and no second.

    An error of the main process ends the others without a word.
    """
    main = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        if not main:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        try:
            _check(config, device)
        except ValueError:
            if main:
                raise
            raise SystemExit(2) from None
        world = _join(device)

        claimed = cache(lambda: claim(config, runs, corpus, keep_weights))

        def begin() -> bool:
            """Take the lock. Returns whether there is a record already."""
            place, _, done = claimed()
            if done is None:
                stack.enter_context(place.lock())
                done = place.record(keep_weights)
                place.check_free()
            return done is not None

        try:
            known = _first(world, begin)
            place, text, done = claimed()
            if known:
                world.end_training()
                done = place.record(keep_weights)
                assert done is not None
                return done
            assert text is not None
            stack.enter_context(reproducible(world.device))
            run = SharedRun(config, text, world)
            load_checkpoint(run, place.checkpoint)
            require(
                run.of_main(run.step) == run.step,
                f"process {world.process_index} does not see the checkpoint of the main process: "
                "--runs must be a folder that all machines share",
            )
            run.share()
            conditions = conditions_of(run, False, False)
            conditions |= {"processes": world.num_processes, "sharded": run.sharded}
            if run.parts[-1:] != [conditions]:
                run.parts.append(conditions)
            reason, report = to_its_end(run, progress, place.checkpoint, checkpoint_seconds)
            _first(
                world, lambda: save_run(run, place.folder, reason, report, keep_weights) and None
            )
        except RuntimeError as error:
            if not any(word in str(error) for word in LOST):
                raise
            raise ConnectionError(
                "another process of this run has ended; start all again, and the run goes on from "
                "its last checkpoint"
            ) from error
    record = place.record(keep_weights)
    world.end_training()
    assert record is not None
    return record


def _check(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError if these processes cannot share this run."""
    processes = int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    batch = config.train.batch_size
    require(
        not isinstance(config, FinetuneConfig),
        f"{config.experiment} is a fine-tuning, whose batches differ in length: train it in one "
        "process, without a launcher",
    )
    require(
        device.type == "cpu" or here <= torch.cuda.device_count(),
        f"{here} processes were started on a machine with {torch.cuda.device_count()} GPUs: start "
        "one for each GPU",
    )
    require(device.index is None, "with a launcher, each process gets a GPU: leave --device out")
    require(
        batch % processes == 0,
        f"a batch of {batch} rows cannot be divided by {processes} processes",
    )
    rows = batch // processes
    micro = min(config.train.micro_batch or rows, rows)
    require(
        rows % micro == 0,
        f"each of {processes} processes has {rows} rows of a batch, which micro_batch={micro} does "
        "not divide",
    )
    require(
        not _cuts() or config.train.optimizer != "muon",
        "muon needs whole matrices: leave out --use_fsdp",
    )
    require(
        not _cuts() or device.type != "cpu",
        "Accelerate cuts the weights on GPUs only: leave out --use_fsdp",
    )


def _cuts() -> bool:
    """Whether the launcher was told to cut the weights: accelerate launch --use_fsdp."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _join(device: torch.device) -> Any:
    """This process's place among those that the launcher has started: an `Accelerator`."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    plugin = None
    if _cuts():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
    # The precision is that of the config, by `Run.autocast`.
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


def _first(world: Any, action: Callable[[], Any]) -> Any:
    """Let the main process do something, and return its result in all processes.

    If it fails there, its error is raised there, and the others end.
    """
    from accelerate.utils import broadcast_object_list

    result, error = None, None
    if world.is_main_process:
        try:
            result = action()
        except Exception as raised:
            error = raised
    failed, result = broadcast_object_list([error is not None, result])
    if error is not None:
        raise error
    if failed:
        raise SystemExit(2)
    return result


def _whole(value: Any) -> Any:
    """A tensor whose parts are in several processes, put together, as each of them gets it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _cut(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Give an optimiser the state of a single process, cut as its parameters are."""
    from torch.distributed.tensor import distribute_tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state.items():
        parameter = parameters[index]
        for name, value in values.items():
            if value.ndim:
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            optimizer.state[parameter][name] = value
