"""How a step runs on a machine: its optimisers, its precision, and its form.

A step may be compiled, or be one CUDA graph, which needs one launch instead of several hundred. The
launches limit the speed of a small model: each kernel runs for microseconds only, and the host
takes longer than that to launch it. A CUDA graph is a recording of all kernels of a step, and the
GPU replays it by itself. The replay reads and writes the same memory as the recording. So whatever
changes from step to step, namely the batch and the learning rate, has to be copied into a tensor
that stays in its place.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from sinkutils.checks import require
from sinkutils.study.config import TrainConfig

# The number of ordinary steps before the recording. They allocate the optimiser's state and the
# workspaces of the libraries.
WARM_UP = 3
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_optimizers(named: dict[str, nn.Parameter], train: TrainConfig) -> list[Optimizer]:
    """The optimisers for a config. There is one, except that muon needs AdamW for the rest."""
    rate = train.learning_rate
    decay = train.weight_decay
    if train.optimizer == "sgd":
        return [SGD(named.values(), rate, momentum=train.beta1, weight_decay=decay)]
    # Muon is for the linear maps. Embeddings and gains are none, nor are biases, which are matrices
    # only because they have a row for each head. Muon updates q, k and v as the single matrix that
    # they are here, and gate and up as well; other implementations split them first.
    linear = list[nn.Parameter]()
    others = list[nn.Parameter]()
    for name, parameter in named.items():
        in_block = name.startswith("blocks.") and name.endswith(".weight")
        maps = train.optimizer == "muon" and in_block and parameter.ndim == 2
        (linear if maps else others).append(parameter)
    # AdamW gets the parameters that Muon does not take, or all of them.
    betas = (train.beta1, train.beta2)
    adamw = AdamW(others, rate, betas, train.adam_eps, weight_decay=decay, fused=True)
    if not linear:
        return [adamw]
    from torch.optim import Muon  # since torch 2.9

    # With match_rms_adamw an update has the size of AdamW's, so that both optimisers can share one
    # learning rate and one weight decay.
    return [Muon(linear, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """Set the learning rate of the next step. For a CUDA graph it is written into a tensor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def instruction_set() -> list[str]:
    """The vector instructions that the CPU has. Where they differ, the last digits may differ."""
    has = torch.cpu.get_capabilities()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if has.get(name)]


def usable_precision(precision: str, device: torch.device) -> str:
    """bf16 if the config wants it and the device has instructions for it, and fp32 otherwise."""
    if precision != "bf16":
        return "fp32"
    able = False
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        has = instruction_set()
        able = "avx512_bf16" in has or "amx_bf16" in has
    return "bf16" if able else "fp32"


def conditions_of(run: Any, compiled: bool, graph: bool) -> dict[str, Any]:
    """The device on which, and the way in which, a `Run` is trained, for its provenance."""
    conditions: dict[str, Any] = {
        "device": device_name(run.device),
        "compiled": compiled,
        "precision_used": run.precision,
        "instruction_set": instruction_set(),
    }
    if graph:
        conditions["graph"] = True
    return conditions


def may_graph(run: Any) -> bool:
    """Whether a step can be one CUDA graph. It needs a GPU, and AdamW, whose state stays there."""
    on_gpu = run.device.type == "cuda"
    adamw = run.config.train.optimizer == "adamw"
    return on_gpu and adamw and bool(run.task.fixed_shapes)


@cache
def compiles() -> bool:
    """Whether torch.compile works here. On a CPU it needs a C++ compiler. Warns if it fails."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # any error of a missing or broken compiler
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}): training goes on without, "
            "slower, with other last digits; a C++ compiler mends that",
            stacklevel=2,
        )
        return False
    return True


class GraphedStep:
    """Runs `run.update` as a CUDA graph.

    Create it after a checkpoint has been loaded, because that replaces the learning rates.
    run: a `Run`, or any object with the same `update`, `optimizers` and `device`.
    """

    def __init__(self, run: Any) -> None:
        require(
            run.device.type == "cuda",
            f"graph=True records a step for a GPU, and this run is on {run.device}: leave it out",
        )
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
            done: tuple[Tensor, Tensor] = self.run.update(batch)
            return done
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            # The kernels are recorded, and none of them runs. The recording is made on a stream of
            # the current device, which must be the run's.
            with torch.cuda.device(self.run.device), torch.cuda.graph(self.graph):
                self.loss, self.norm = self.run.update(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone(), self.norm.clone()


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """A context that makes results reproducible, and restores PyTorch's settings at its end.

    On a CPU it allows one thread, because sums depend on the number of threads. On CUDA it selects
    PyTorch's deterministic kernels; an operation that has none causes a warning with its name. Even
    so, attention's backward pass on CUDA is not reproducible to the bit.
    """
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()  # off, warn or error
    deterministic: Any = torch.utils.deterministic  # its type stubs lack the setting below
    filled = deterministic.fill_uninitialized_memory
    workspace = os.environ.get(WORKSPACE)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda":
        # cuBLAS reads this variable when it starts.
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.set_deterministic_debug_mode("warn")
        # PyTorch would otherwise fill each new tensor with NaN, which adds a kernel to most of a
        # step's kernels.
        deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def device_name(device: torch.device) -> str:
    """The device's kind: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
