"""The optimiser step as one CUDA graph: a launch by the host in place of several hundred.

A small model's step is bound by its launches: each kernel runs for microseconds, and the host takes
longer to ask for it. A graph is a recording of all of them, which the GPU replays by itself. It
runs the same kernels on the same memory, so that what changes from step to step (the batch, the
rate) has to be written into tensors of fixed address.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Steps before the recording: they make the optimiser's state and the libraries' workspaces.
WARM_UP = 3


class GraphedStep:
    """`run.update` by a graph. To be made after a checkpoint was loaded, which sets the rates.

    run: a `Run`, or whatever has its update, optimizers and device.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                # A rate that is a number would be recorded as it was at the time.
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=run.device)
                group["capturable"] = True

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of one step on a batch, as `run.update` gives them."""
        self.steps += 1
        if self.steps <= WARM_UP:
            return self.run.update(batch)
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # which runs nothing yet
                self.loss, self.norm = self.run.update(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone(), self.norm.clone()
