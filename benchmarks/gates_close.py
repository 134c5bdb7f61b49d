"""Does a gate close where a head would rest? Into data/gates_close.json:

    python benchmarks/gates_close.py FOLDER

The baseline of `laptop` and four gates, three seeds each. A gated run without weights is trained once
more, into FOLDER (some minutes each on one core). All is over blocks 2 to 4 and the queries from the
second on:

- the same queries: a query's attention to x_1 in the baseline beside how far a gated model's gates
  are open for it, in the mean over heads;
- the same silence: for the same queries, the length of what attention gives a head, before and
  behind the gate;
- what must come and go: the loss with each gate frozen at its mean over other texts, or with each
  head's share of x_1 frozen so (`gate.py`);
- what is left: by head, its mean gate and its extra attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gate import frozen
from inside import Change, excess, keep, unchanged
from torch import Tensor, nn

import sinkutils as su
from sinkutils.measuring.probes import Subject
from sinkutils.model.masks import visible
from sinkutils.names import subject

GATES = ("gate_head", "gate_element", "gate_shared", "gate_open")
SEEDS = (0, 1, 2)
TEXTS, OTHERS, LENGTH = 64, 56, 64  # the held-out documents are 120
FIRST = 1  # the layer, counted from 0, that all this begins with
FIFTHS = 5


class Look:
    """Observes a pass, with logits changed if one wishes: by layer, the weights on x_1, (B, H, T), and
    what attention gives each query before the gate, (B, H, T, D).
    """

    def __init__(self, change: Change = unchanged) -> None:
        self.change = change
        self.on_first: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def embedding(self, *_: Any) -> None: ...

    def block(self, *_: Any) -> None: ...

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, _: Any) -> Tensor:
        q = q / q.shape[-1] ** 0.5
        rows = torch.arange(q.shape[2])
        logits = (q @ k.mT).masked_fill(~visible(rows[:, None], rows, spec), -torch.inf)
        shares = self.change(layer, q, k, logits).softmax(dim=-1)
        self.on_first.append(shares[..., 0])
        self.outputs.append(shares @ v)
        return self.outputs[-1]


def gate_layers(model: Any) -> list[nn.Linear]:
    """The linear maps whose sigmoids are the gates, from the block `FIRST` on; none in the baseline."""
    return [
        block.attention.gate for block in model.blocks[FIRST:] if hasattr(block.attention, "gate")
    ]


@contextmanager
def gates_seen(model: Any) -> Iterator[list[Tensor]]:
    """The sigmoids of the passes inside, a tensor (B, T, gates) per pass and layer."""
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        for gate in gate_layers(model):
            hook = gate.register_forward_hook(lambda _, __, out: seen.append(out.sigmoid()))
            hooks.callback(hook.remove)
        yield seen


@contextmanager
def gates_frozen(model: Any, means: list[Tensor]) -> Iterator[None]:
    """Every query gets the same gates. means: one (gates,) per layer, between 0 and 1."""
    with ExitStack() as hooks:
        for gate, mean in zip(gate_layers(model), means, strict=True):
            same = mean.logit()
            hook = gate.register_forward_hook(lambda _, __, out, same=same: same.expand_as(out))
            hooks.callback(hook.remove)
        yield


@torch.no_grad()
def passed(
    model: Any, ids: Tensor, change: Change = unchanged, look: Look | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of tokens 3 to T by text, (B,), and the weights on x_1, (B, L, H, T - 1)."""
    look = look or Look(change)
    logits = model(ids, look)
    nats = F.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    return nats[:, 1:].mean(dim=1), torch.stack(look.on_first[FIRST:], dim=1)[..., 1:]


@contextmanager
def heads_written(model: Any) -> Iterator[list[Tensor]]:
    """What the output projections of the passes inside read, behind the gates: (B, T, H D) each."""
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        for block in model.blocks[FIRST:]:
            out = block.attention.out
            hook = out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            hooks.callback(hook.remove)
        yield seen


def lengths(outputs: list[Tensor]) -> Tensor:
    """The mean length over layers and heads, by query: (B, T - 1). outputs: (B, H, T, D) each."""
    return torch.stack(outputs).norm(dim=-1).mean(dim=(0, 2))[:, 1:]


def by_head(sigmoids: list[Tensor], kind: str, heads: int) -> Tensor:
    """The mean gate of each head, (B, L, H, T - 1), of one pass."""
    gates = torch.stack(sigmoids, dim=1)[:, :, 1:]  # (B, L, T - 1, gates)
    if kind == "open":
        gates = (1 + gates) / 2
    if kind == "shared":  # each head gets all of them
        return gates.mean(dim=-1)[:, :, None].expand(-1, -1, heads, -1)
    return gates.unflatten(-1, (heads, -1)).mean(dim=-1).transpose(2, 3)


def looked_at(
    measured: Subject, ids: Tensor, others: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record of one model, and what its queries give x_1 and let through: (B, T - 1) each."""
    model: Any = measured.model
    config = model.config
    look = Look()
    with gates_seen(model) as seen, heads_written(model) as merged:
        losses, weights = passed(model, ids, look=look)
    written = [m.unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for m in merged]
    losses_frozen, _ = passed(model, ids, frozen(shares(model, others), "x_1", FIRST))
    extra = excess(weights_of_key(weights), LENGTH).mean(dim=0)
    result: dict[str, Any] = {
        "texts": len(ids),
        "loss": losses.tolist(),
        "share frozen": losses_frozen.tolist(),
        "extra": extra.flatten().tolist(),
    }
    queries = {
        "rest": weights.mean(dim=(1, 2)),
        "before": lengths(look.outputs[FIRST:]),
        "behind": lengths(written),
    }
    if seen:
        with gates_seen(model) as elsewhere:
            passed(model, others)
        with gates_frozen(model, [gates[:, 1:].mean(dim=(0, 1)) for gates in elsewhere]):
            result["gates frozen"] = passed(model, ids)[0].tolist()
        gates = by_head(seen, config.gate, config.num_heads)
        result["gate"] = gates.mean(dim=(0, 3)).flatten().tolist()
        queries["gate"] = gates.mean(dim=(1, 2))
    return result, queries


def weights_of_key(weights: Tensor) -> Tensor:
    """alpha_1, (B, L, H): the mean over all queries, of which the first has no choice."""
    return (1 + weights.sum(dim=-1)) / (1 + weights.shape[-1])


def shares(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """By layer, the mean share of x_1 in each head, (H,), over the queries behind it."""
    means = passed(model, ids)[1].mean(dim=(0, 3))  # (L, H)
    return dict(enumerate(means, start=FIRST))


def less_place(x: Tensor) -> Tensor:
    """What is left of (texts, places) without the mean at each place."""
    return x - x.mean(dim=0)


def compared(rest: Tensor, other: Tensor) -> dict[str, Any]:
    """A query's attention to x_1 in one baseline, and its number in another model: (B, T - 1) each."""
    x, y = less_place(rest).flatten(), less_place(other).flatten()
    fifths = x.argsort().tensor_split(FIFTHS)
    return {
        "correlation": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
        "rest": [float(x[part].mean() + rest.mean()) for part in fifths],
        "other": [float(y[part].mean() + other.mean()) for part in fifths],
    }


def quieter(rest: Tensor, length: Tensor) -> list[float]:
    """Lengths in the fifths of `compared`, over the geometric mean at a query's place."""
    order = less_place(rest).flatten().argsort()
    logs = less_place(length.log()).flatten()
    return [float(logs[part].mean().exp()) for part in order.tensor_split(FIFTHS)]


def pair(baseline: Tensor, of: dict[str, Tensor], number: str) -> dict[str, Any]:
    """What a model's queries do, by their attention to x_1 in one baseline."""
    silence = {place: quieter(baseline, of[place]) for place in ("before", "behind")}
    return compared(baseline, of[number]) | silence


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    queries: dict[str, list[dict[str, Tensor]]] = {}
    for name in ("fixed_1", *GATES):
        for seed in SEEDS:
            if name == "fixed_1":
                measured = subject(f"laptop/{name}/{seed}")
            else:
                su.train(su.config(name, "laptop", seed), folder, keep_weights=True)
                measured = subject(str(folder / "laptop" / name / str(seed)))
            ids = measured.inputs("natural", TEXTS + OTHERS, LENGTH)
            result, of_queries = looked_at(measured, ids[:TEXTS], ids[TEXTS:])
            keep("gates_close", f"{name}/{seed}", result)
            queries.setdefault(name, []).append(of_queries)
    baselines = [of_seed["rest"] for of_seed in queries["fixed_1"]]
    for name in GATES:
        pairs = [pair(rest, of, "gate") for rest in baselines for of in queries[name]]
        keep("gates_close", f"fixed_1, {name}", _together(pairs))
    others = [(i, j) for i in SEEDS for j in SEEDS if i != j]
    pairs = [pair(baselines[i], queries["fixed_1"][j], "rest") for i, j in others]
    keep("gates_close", "fixed_1, fixed_1", _together(pairs))


def _together(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "correlation": [pair["correlation"] for pair in pairs],
        **{
            name: np.mean([pair[name] for pair in pairs], axis=0).tolist()
            for name in ("rest", "other", "before", "behind")
        },
    }


if __name__ == "__main__":
    main()
