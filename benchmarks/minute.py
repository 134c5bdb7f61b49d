"""Short trainings at `minute` with something changed by hand, and what the trials measure in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinkutils.measuring.tally import lower_median
from sinkutils.paths import LEDGER
from sinkutils.study import grid
from sinkutils.study.corpus import load_corpus
from sinkutils.study.task import reproducible
from sinkutils.study.train import Run

CPU = torch.device("cpu")


def trained(experiment: str, seed: int, change: Callable[[Run], None]) -> Run:
    """A run at its last step. `change` acts on it before the first."""
    config = grid.config(experiment, "minute", seed)
    run = Run(config, load_corpus(config.data.corpus, config.model.vocab_size), CPU)
    change(run)
    run.forward = torch.compile(run.forward)
    with reproducible(CPU):
        while run.step < config.train.steps:
            run.advance()
    return run


def is_made(file: str, name: str) -> bool:
    """Whether data/FILE.json has this result."""
    path = LEDGER / f"{file}.json"
    return path.exists() and name in json.loads(path.read_text(encoding="utf-8"))


def even_share(seen: Tensor, k: int) -> float:
    """What x_k gets of queries that look evenly at all keys that they see. seen: (T, T), bool."""
    shares = seen[k - 1 :, k - 1].float() / seen[k - 1 :].sum(dim=1)
    return float(shares.mean())


class Look:
    """Observes a pass: the maps of softmax, and the element of x_1, block by block.

    seen: which keys each query sees, (T, T); without it, all up to its own.
    """

    def __init__(self, seen: Tensor | None = None) -> None:
        self.seen = seen
        self.maps: dict[int, Tensor] = {}  # (B, H, T, T) by layer
        self.elements: list[float] = []

    def embedding(self, hidden: Tensor) -> None: ...

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, _: Any
    ) -> Tensor | None:
        if spec.similarity != "exp":
            return None
        T = q.shape[2]
        seen = torch.ones(T, T, dtype=torch.bool).tril() if self.seen is None else self.seen
        logits = (q @ k.mT / q.shape[-1] ** 0.5).float().masked_fill(~seen, -torch.inf)
        self.maps[layer] = logits.softmax(dim=-1)
        return self.maps[layer].to(v.dtype) @ v

    def block(self, _: int, hidden: Tensor, __: Tensor) -> None:
        sizes = hidden.float().abs()  # (B, T, d)
        median = lower_median(sizes.flatten(1))
        self.elements.append(float((sizes[:, 0].amax(dim=1) / median).mean()))
