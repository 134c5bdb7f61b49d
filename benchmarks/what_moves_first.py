"""What moves first when a sink grows: element, value, logit or attention? Into data/what_moves_first.json:

    python benchmarks/what_moves_first.py 0 1 2

The baseline of `laptop` is trained once more, seed by seed, for the first quarter of its steps, and
looked at often. A run that was stopped goes on from its checkpoint in the cache. Some minutes a seed
on one core.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from inside import keep
from torch import Tensor

from sinkutils.measuring.tally import lower_median
from sinkutils.paths import cache_root
from sinkutils.study import grid
from sinkutils.study.corpus import load_corpus
from sinkutils.study.task import reproducible
from sinkutils.study.train import Run, load_checkpoint, save_checkpoint

STEPS = 3000
OFTEN, UNTIL, SELDOM = 25, 1000, 100  # a look every OFTEN steps until UNTIL, then every SELDOM
TEXTS = 32


class Look:
    """Observes a forward pass: by block, the numbers of x_1 of which one may move first."""

    def __init__(self) -> None:
        self.element: list[float] = []
        self.value: list[float] = []
        self.logit: list[float] = []
        self.excess: list[float] = []

    def embedding(self, hidden: Tensor) -> None: ...

    def attention(self, _: int, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> None:
        norms = v.float().norm(dim=-1)  # (B, H, T)
        self.value.append(float(norms[..., 0].mean() / norms[..., 1:].mean()))
        rows = torch.arange(q.shape[2])
        unseen = rows > rows[:, None]
        logits = (q @ k.mT / q.shape[-1] ** 0.5).float()  # (B, H, T, T)
        others = ~unseen & (rows > 0)
        on_others = (logits * others).sum(dim=-1)[..., 1:] / others.sum(dim=-1)[1:]
        self.logit.append(float((logits[..., 1:, 0] - on_others).mean()))
        alpha = logits.masked_fill(unseen, -torch.inf).softmax(dim=-1)[..., 0].mean()
        even = (1 / (rows + 1)).mean()
        self.excess.append(float((alpha - even) / (1 - even)))

    def block(self, _: int, hidden: Tensor, __: Tensor) -> None:
        sizes = hidden.float().abs()  # (B, T, d)
        median = lower_median(sizes.flatten(1))
        self.element.append(float((sizes[:, 0].amax(dim=1) / median).mean()))


@torch.no_grad()
def looked_at(run: Run) -> dict[str, Any]:
    """The numbers of one moment of the training, by block, and the loss of the same texts."""
    look = Look()
    ids = run.probe[:TEXTS]
    logits = run.model(ids, look)
    loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
    return {"step": run.step, "loss": float(loss), **vars(look)}


def is_due(step: int) -> bool:
    return step % (OFTEN if step <= UNTIL else SELDOM) == 0


def course(seed: int) -> list[dict[str, Any]]:
    """The numbers of one seed along its training."""
    config = grid.config("fixed_1", "laptop", seed)
    device = torch.device("cpu")
    checkpoint = cache_root() / f"what_moves_first-{seed}"
    with reproducible(device):
        run = Run(config, load_corpus(config.data.corpus, config.model.vocab_size), device)
        load_checkpoint(run, checkpoint)  # `curve` holds the numbers so far
        saved = time.monotonic()
        while True:
            if is_due(run.step) and (not run.curve or run.curve[-1]["step"] < run.step):
                run.curve.append(looked_at(run))
                run.passed.clear()
                if time.monotonic() - saved > 20:
                    save_checkpoint(run, checkpoint)
                    saved = time.monotonic()
            if run.step >= STEPS:
                save_checkpoint(run, checkpoint)
                return run.curve
            run.advance()


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        curve = course(seed)
        by_name = {name: [point[name] for point in curve] for name in curve[0]}
        keep("what_moves_first", f"seed {seed}", {"texts": TEXTS, **by_name})


if __name__ == "__main__":
    main()
