"""Runs that differ in their seeds or texts alone, trained as one.

A GPU starts about one small kernel a microsecond, whoever asks for it, and that is what the step of
a small model takes. Here each parameter is a stack of those of K models, (K, ..), so that one
kernel serves them all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from sinkutils.checks import device as find_device
from sinkutils.checks import require
from sinkutils.measuring.report import Report
from sinkutils.study import grid
from sinkutils.study.config import RunConfig, learning_rate
from sinkutils.study.corpus import Corpus
from sinkutils.study.record import Folder, Record
from sinkutils.study.store import Runs
from sinkutils.study.task import (
    GraphedStep,
    conditions_of,
    make_optimizers,
    may_graph,
    reproducible,
    set_rate,
    without,
)
from sinkutils.study.train import Run, evaluated, save_run


def alike(config: RunConfig) -> tuple:
    """What runs that can be stacked have in common: model, training, and the scored positions."""
    return config.model, config.train, config.data.fixed_position, config.data.unscored


class Stack:
    """The step of K runs, whose models become views of the stacked parameters."""

    # Plain products: a CPU's fused kernel has no form for a stack, and a GPU's no gain here.
    attention = SDPBackend.MATH

    def __init__(self, runs: Sequence[Run]) -> None:
        first = runs[0]
        config = first.config
        require(
            all(alike(run.config) == alike(config) for run in runs),
            "runs to be stacked must not differ in model, training or unscored positions",
        )
        require(
            config.train.optimizer == "adamw" and config.train.micro_batch is None,
            "runs to be stacked need optimizer='adamw' and no micro_batch",
        )
        self.runs = runs
        self.device = first.device
        self.model = first.model
        self.clip_norm = config.train.clip_norm
        self.unscored = first.unscored
        self.parameters, _ = stack_module_state([run.model for run in runs])  # name -> (K, ..)
        for name, stacked in self.parameters.items():
            for run, view in zip(runs, stacked.detach(), strict=True):
                # What the optimiser writes into the stack is the model's.
                run.model.get_parameter(name).data = view
        self.optimizers = make_optimizers(self.parameters, config.train)
        self.graph: GraphedStep | None = None

    def advance(self) -> Tensor:
        """One step of each run; returns their losses (K,) on the device."""
        first = self.runs[0]
        batch = torch.stack([run.batch() for run in self.runs])  # (K, B, C + 1)
        set_rate(self.optimizers, learning_rate(first.config.train, first.step))
        update = self.graph or self.update
        losses, norms = update(batch)
        for run, loss, norm in zip(self.runs, losses, norms, strict=True):
            run.step += 1
            run.passed.append((loss, norm))
        return losses

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights by a batch (K, B, C + 1); returns losses and gradient norms, (K,).

        The norms are those before clipping.
        """
        with self.runs[0].autocast():
            loss = self.losses(batch)
        loss.sum().backward()  # no model's loss depends on another's parameters
        norms = clip_each(list(self.parameters.values()), self.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach(), norms

    def losses(self, batch: Tensor) -> Tensor:
        """`next_token_loss` of each model, (K,), on a batch (K, B, C + 1) of its own."""
        with sdpa_kernel(self.attention):
            logits = vmap(self.logits)(self.parameters, batch[:, :, :-1])  # (K, B, C, V)
        logits = without(logits.flatten(0, 1), self.unscored)
        targets = batch[:, :, 1:].flatten(0, 1)
        targets = without(targets, self.unscored)
        # Not CrossEntropy of task.py, which has but one mean.
        logits = logits.flatten(0, 1).float()
        each = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return each.view(len(batch), -1).mean(dim=1)

    def logits(self, parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(self.model, parameters, (ids,))


def clip_each(stacked: list[nn.Parameter], most: float) -> Tensor:
    """Clip each model's gradient to a norm of `most`, as clip_grad_norm_ does.

    Returns the norms before, (K,).
    """
    gradients = [parameter.grad for parameter in stacked if parameter.grad is not None]
    by_parameter = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients])
    norms = by_parameter.norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1)
    for gradient in gradients:
        ones = [1] * (gradient.ndim - 1)
        gradient.mul_(factors.view(-1, *ones))
    return norms


def to_their_ends(stack: Stack) -> Iterator[tuple[Run, str | None, Report | None]]:
    """Train the runs. Yields each as it ends, with why it failed, or with its last report."""
    alive = list(stack.runs)
    first = alive[0]
    train = first.config.train
    began = time.monotonic()
    while alive:
        stack.advance()
        ended = first.step == train.steps
        if first.step % train.eval_every and not ended:
            continue
        for run in list(alive):
            reason, report = evaluated(run)
            run.seconds = time.monotonic() - began
            if ended or reason is not None:
                yield run, reason, report
                alive.remove(run)


def train_stacked(
    configs: Sequence[RunConfig],
    runs: Folder = None,
    *,
    corpus: Corpus,
    device: str | torch.device | None = None,
    keep_weights: Callable[[RunConfig], bool] = grid.keeps_weights,
    graph: bool | None = None,
) -> list[Record]:
    """The records of pre-trainings that are `alike`; those that are missing are trained as one.

    There are no checkpoints: it is for minutes. Each run's record is written when that run ends,
    and its wall clock is that of all. keep_weights: of which runs; by default of those that the
    study keeps. The rest: as for `train`.
    """
    store = Runs(runs)
    target = find_device(device)
    places = [store.of(config, corpus.identity) for config in configs]
    with contextlib.ExitStack() as stack:
        stack.enter_context(reproducible(target))
        missing, folders = [], {}
        for config, place in zip(configs, places, strict=True):
            stack.enter_context(place.lock())
            if place.record(keep_weights(config)) is None:
                place.check_free()
                run = Run(config, corpus, target)
                missing.append(run)
                folders[run] = place.folder
        if missing:
            together = Stack(missing)
            if may_graph(missing[0]) if graph is None else graph:
                together.graph = GraphedStep(together)
            form = conditions_of(missing[0], compiled=False, graph=together.graph is not None)
            for run in missing:
                run.parts.append(form)
                run.task.more["stacked"] = len(missing)
                run.evaluate([])
            for run, reason, report in to_their_ends(together):
                save_run(run, folders[run], reason, report, keep_weights(run.config))
    return [record for place in places if (record := place.record())]
