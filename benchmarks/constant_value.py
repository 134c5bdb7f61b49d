"""What of the first key's value is missed: a constant, or what differs between queries? Into
data/constant_value.json:

    python benchmarks/constant_value.py smollm2 gemma-3-270m

A cache that loses the value of the first key, and keeps the weights, takes A_i1 v_1 from each output
(lost_key.py). Here it is taken apart: into its mean over queries, of a head and on other texts, and
what a query has beside that mean. Notebook 08 shows what comes out. Two minutes a model on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from inside import keep
from lost_key import Rule, late_losses
from open_lms import usual_first
from recall import AROUND, TEXTS, WINDOW
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

# cut(layer, first) -> what stands in place of A_i1 v_1 of the late queries. first: (B, H, T, D).
Cut = Callable[[int, Tensor], Tensor]


def cutting(cut: Cut) -> Rule:
    def rule(layer: int, logits: Tensor, v: Tensor, late: Tensor) -> Tensor:
        shares = logits.softmax(dim=-1)
        first = shares[..., :1] * v[:, :, :1]  # A_i1 v_1
        others = shares[..., 1:] @ v[:, :, 1:]
        return others + torch.where(late[:, None], cut(layer, first), first)

    return rule


@torch.no_grad()
def constant_value(measured: Subject) -> dict[str, Any]:
    model, start = measured.model, usual_first(measured)
    both = measured.inputs("natural", 2 * TEXTS, AROUND[1] - 1, first=start)
    ids, others = both[:TEXTS], both[TEXTS:]
    assert not (ids[:, None] == others).all(dim=-1).any(), "the means are of other texts"
    means: dict[int, Tensor] = {}
    spreads: dict[int, float] = {}

    def look(layer: int, first: Tensor) -> Tensor:
        late = first[:, :, WINDOW:]
        means[layer] = late.mean(dim=(0, 2))[:, None]  # (H, 1, D)
        varies = (late - means[layer]).square().sum()
        spreads[layer] = float(varies / late.square().sum())
        return first

    late_losses(model, others, cutting(look))
    cuts: dict[str, Cut] = {
        "kept": lambda _, first: first,
        "lost": lambda _, first: torch.zeros_like(first),
        "mean in its place": lambda layer, first: means[layer].expand_as(first),
        "mean taken off": lambda layer, first: first - means[layer],
    }
    losses = {name: late_losses(model, ids, cutting(cut)) for name, cut in cuts.items()}
    # Of the sum of squares of A_i1 v_1, the share that is left beside the mean, by layer.
    return {"samples": TEXTS, "loss": losses, "share beside the mean": list(spreads.values())}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        keep("constant_value", measured.name, constant_value(measured))


if __name__ == "__main__":
    main()
