"""The melting test: a sink is pushed into a model and released. Does it stay? Into data/melting.json:

    python benchmarks/melting.py NAME SEED [NAME SEED ..]

A model learns ordinary texts at one rate for PLAIN steps. Then it is copied: in the pushed copy
WEIGHT times the mean of -log A_i,k, over blocks 2 to L, heads and queries, is added to the loss for
PUSHED steps, faded out over FADED more, and left out for RELEASED more. Its twin sees the same
batches without the push. NAME is one of CASES. A run that was stopped goes on from its checkpoint in
the cache.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from inside import keep
from torch import Tensor

from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import TransformerLM
from sinkutils.model.masks import visible
from sinkutils.paths import cache_root, replace_file
from sinkutils.study import grid
from sinkutils.study.corpus import load_corpus
from sinkutils.study.task import reproducible
from sinkutils.study.train import Run

PLAIN, PUSHED, FADED, RELEASED = 1500, 1000, 200, 1800
STEPS = PLAIN + PUSHED + FADED + RELEASED
WEIGHT = 0.1
RATE = 0.002
OFTEN = 100
FOREIGN = 4  # tokens put in front of a text, to ask whether the place or the token draws


class Case(NamedTuple):
    """A model, and where it is pushed to. `change` is a difference from the preset `laptop`."""

    change: dict[str, Any]
    experiment: str = "default"  # ordinary first tokens
    k: int = 1


def width(d: int) -> dict[str, Any]:
    return {"model.hidden_size": d, "model.intermediate_size": 2 * d}


CASES = {
    "d 64": Case({}),
    "d 128": Case(width(128)),
    "d 256": Case(width(256)),
    "context 128": Case({"model.context_length": 128, "train.batch_size": 8}),
    "depth 8": Case({"model.num_layers": 8}),
    "fixed token": Case({}, "fixed_1"),
    "token 5": Case({}, k=5),
}


class Pushing:
    """Observes a pass: the mean of -log A_i,k over the queries i >= k of blocks 2 to L."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.terms: list[Tensor] = []

    def embedding(self, hidden: Tensor) -> None: ...

    def attention(self, layer: int, q: Tensor, k: Tensor, _: Tensor, spec: Any, __: Any) -> None:
        if layer == 0:
            return
        rows = torch.arange(q.shape[2])
        seen = visible(rows[:, None], rows, spec)
        logits = (q @ k.mT / q.shape[-1] ** 0.5).float().masked_fill(~seen, -torch.inf)
        column = logits.log_softmax(dim=-1)[:, :, self.k - 1 :, self.k - 1]
        self.terms.append(-column.mean())

    def block(self, _: int, hidden: Tensor, __: Tensor) -> None: ...

    def mean(self) -> Tensor:
        return torch.stack(self.terms).mean()


def strength(step: int) -> float:
    """The weight of the push in this step, counted from 0."""
    since = step - PLAIN
    if since < 0:
        return 0.0
    if since < PUSHED:
        return WEIGHT
    return WEIGHT * max(0.0, 1 - (since - PUSHED) / FADED)


def advance(run: Run, weight: float, k: int) -> float:
    """One step with the push. Returns the loss of the text alone."""
    ids = run.batch()
    pushing = Pushing(k)
    with run.autocast():
        logits = run.model(ids[:, :-1], pushing if weight else None)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    (loss + weight * pushing.mean() if weight else loss).backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.train.clip_norm)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (run.step + 1) / 100)
        optimizer.step()
        optimizer.zero_grad()
    run.step += 1
    return float(loss.detach())


@torch.no_grad()
def looked_at(run: Run, k: int) -> dict[str, Any]:
    """Sink_k and its excess by block, and the loss on validation text."""
    report = measure(run.model, run.probe, targets=(k,))
    floor = report.floor if k == 1 else None
    alpha = report.alpha[:, 0].mean(dim=(0, 2))  # (L,)
    return {
        "step": run.step,
        "sink": report.sink(k),
        "excess": report.excess(k),
        "later": float(alpha[1:].mean()),
        "alpha": alpha.tolist(),
        "floor": floor,
        "valid_loss": loss_of(run),
    }


def loss_of(run: Run) -> float:
    with run.autocast():
        return run.valid_loss()


@torch.no_grad()
def place_or_token(run: Run, k: int) -> dict[str, float]:
    """Attention in the later blocks to x_k, and to it and to place k behind FOREIGN other tokens."""
    ids = run.probe
    moved = torch.cat([ids.roll(1, dims=0)[:, -FOREIGN:], ids[:, :-FOREIGN]], dim=1)
    alone = measure(run.model, ids, targets=(k,)).alpha[:, 0, 1:].mean()
    behind = measure(run.model, moved, targets=(k, k + FOREIGN)).alpha[:, :, 1:].mean(dim=(0, 2, 3))
    return {"alone": float(alone), "the place": float(behind[0]), "the token": float(behind[1])}


def course(name: str, seed: int, pushed: bool) -> dict[str, Any]:
    """The numbers of one copy along its training."""
    case = CASES[name]
    change = {"train.batch_size": 16, "train.steps": STEPS, **case.change}
    config = grid.config(case.experiment, "laptop", seed, change=change, name="melting")
    run = Run(config, load_corpus(config.data.corpus, config.model.vocab_size), torch.device("cpu"))
    of = cache_root() / f"melting-{name}-{seed}".replace(" ", "-")
    own = of.with_name(f"{of.name}-{'pushed' if pushed else 'twin'}")
    result: dict[str, Any] = {"points": [], "losses": []}
    for path in (own, of):
        if path.exists():
            state = torch.load(path, weights_only=True)
            run.model.load_state_dict(state["model"])
            for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            run.step = state["step"]
            result = copy.deepcopy(state["result"])
            break
    sums: list[float] = []

    def save(path: Any) -> None:
        state = {
            "model": run.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "step": run.step,
            "result": result,
        }
        replace_file(path, lambda file: torch.save(state, file))

    while run.step < STEPS:
        sums.append(advance(run, strength(run.step) if pushed else 0.0, case.k))
        if run.step % OFTEN:
            continue
        result["losses"].append(sum(sums) / len(sums))
        sums.clear()
        if run.step >= PLAIN:
            result["points"].append(looked_at(run, case.k))
        if pushed and run.step == PLAIN + PUSHED:
            result["at the push's end"] = place_or_token(run, case.k)
        if run.step == PLAIN:
            save(of)
        if run.step > PLAIN and run.step % 500 == 0:
            save(own)
    assert isinstance(run.model, TransformerLM)
    result["parameters"] = sum(p.numel() for p in run.model.parameters())
    return result


def main() -> None:
    words = iter(sys.argv[1:])
    for name, seed in zip(words, words, strict=True):
        with reproducible(torch.device("cpu")):
            both = {kind: course(name, int(seed), kind == "pushed") for kind in ("pushed", "twin")}
        keep("melting", f"{name}, seed {seed}", both)


if __name__ == "__main__":
    main()
