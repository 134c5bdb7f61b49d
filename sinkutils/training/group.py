"""The process of a run among others: those that torchrun started, and the sweep that started it.

By DDP each of several processes holds the whole model. Rank 0 alone reads and writes records and
checkpoints. Where one process fails, torchrun ends the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sinkutils.checks import require

T = TypeVar("T")
PATIENCE = timedelta(days=2)  # for rank 0, which may have a corpus to tokenise
PARENT = "SINKUTILS_PARENT"  # the variable by which a worker knows the process that started it


@dataclass(frozen=True)
class Group:
    """The processes of one run. By default this one alone: each method is the plain thing then."""

    rank: int = 0
    size: int = 1
    control: Any = None  # a gloo group for what is said between the processes, beside the tensors

    @property
    def first(self) -> bool:
        """Whether this process reads, writes and prints."""
        return self.rank == 0

    def once(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call function(*arguments) on rank 0 alone, and return its result in every process."""
        if self.size == 1:
            return function(*arguments)
        result = [function(*arguments) if self.first else None]
        dist.broadcast_object_list(result, src=0, group=self.control)
        return result[0]  # type: ignore[return-value]

    def in_turn(self, function: Callable[[], T]) -> T:
        """`function()` in every process: on rank 0 before the others, as it fills a cache."""
        if self.size == 1:
            return function()
        if not self.first:
            dist.barrier(self.control)
        result = function()
        if self.first:
            dist.barrier(self.control)
        return result

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the processes."""
        if self.size == 1:
            return x
        x = x.clone()
        dist.all_reduce(x)
        return x / self.size

    def check_batch(self, batch_size: int, micro_batch: int | None) -> None:
        """Raise ValueError unless each process gets as many whole micro-batches as the others."""
        share = batch_size // self.size
        each = min(micro_batch or share, share)  # sequences a forward pass
        require(
            batch_size % self.size == 0 and share % each == 0,
            f"{self.size} processes cannot share batches of {batch_size} sequences: "
            f"start as many as divide {batch_size // (micro_batch or 1)}",
        )

    def share(self, batch: Tensor) -> Tensor:
        """The rows of a batch (B, ..) that this process trains on, (B / size, ..)."""
        return batch.chunk(self.size)[self.rank]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training: DDP averages its gradients over the processes."""
        if self.size == 1:
            return model
        device = next(model.parameters()).device
        indices = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, indices, gradient_as_bucket_view=True)


ALONE = Group()


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """The group in which torchrun started this process, `ALONE` where it did not.

    Each process takes the GPU of its local rank. Raises ValueError for more processes on a machine
    than it has GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        gpus = torch.cuda.device_count()
        require(
            local_rank < gpus,
            f"there are {gpus} GPUs here: torchrun --nproc-per-node must be at most that",
        )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Group(dist.get_rank(), size, control)
    finally:
        dist.destroy_process_group()


def end_with_parent() -> None:
    """Of a worker: end when the sweep that started this process has ended, or was killed."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
