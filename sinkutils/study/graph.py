"""The optimiser step as one CUDA graph, which needs one launch instead of several hundred.

The launches limit the speed of a small model: each kernel runs for microseconds only, and the host
takes longer than that to launch it. A CUDA graph is a recording of all kernels of a step, and the
GPU replays it by itself. The replay reads and writes the same memory as the recording. So whatever
changes from step to step, namely the batch and the learning rate, has to be copied into a tensor
that stays in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The number of ordinary steps before the recording. They allocate the optimiser's state and the
# workspaces of the libraries.
WARM_UP = 3


class GraphedStep:
    """Runs `run.update` as a CUDA graph.

    Create it after a checkpoint has been loaded, because that replaces the learning rates.
    run: a `Run`, or any object with the same `update`, `optimizers` and `device`.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                # As a plain number, the learning rate would be recorded as a constant.
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=run.device)
                group["capturable"] = True

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the gradient norm of one step on a batch, as `run.update` returns them."""
        self.steps += 1
        if self.steps <= WARM_UP:
            return self.run.update(batch)
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # this records the kernels and runs none of them
                self.loss, self.norm = self.run.update(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone(), self.norm.clone()
