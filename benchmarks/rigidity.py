"""After which block is the first token's state the same in every text? Into data/rigidity.json:

    python benchmarks/rigidity.py smollm2 gemma-3-270m QWEN'S_FOLDER

A minute a model on one core.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from inside import BATCH, keep
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

TEXTS = 32
OTHER = 30  # the token beside which the first is seen


def likeness(states: Tensor) -> list[float]:
    """The mean cosine between two texts, by layer. states: (n, L + 1, d)."""
    n = len(states)
    unit = torch.nn.functional.normalize(states.double(), dim=-1)
    total = unit.sum(dim=0).square().sum(dim=-1)  # n of the products are of a text with itself
    return ((total - n) / (n * (n - 1))).tolist()


@torch.no_grad()
def numbers(measured: Subject, first: str) -> dict[str, Any]:
    """By layer from the embedding on: likeness over texts, and the largest element of h_1."""
    ids = measured.inputs("natural", TEXTS, 64, first=first)
    firsts, others = [], []
    for batch in ids.split(BATCH):
        every = measured.model.model(batch, use_cache=False, output_hidden_states=True)
        states = torch.stack(every.hidden_states[:-1], dim=1).float()  # the last one is normed
        firsts.append(states[:, :, 0])
        others.append(states[:, :, OTHER - 1])
    state = torch.cat(firsts)  # (n, L, d)
    return {
        "samples": len(ids),
        "different first tokens": len(ids[:, 0].unique()),
        "first": likeness(state),
        f"token {OTHER}": likeness(torch.cat(others)),
        "largest element": state.abs().amax(dim=-1).mean(dim=0).tolist(),
        "to the next": torch.cosine_similarity(state[:, 1:], state[:, :-1], dim=-1)
        .mean(dim=0)
        .tolist(),
    }


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        for first in measured.firsts:
            keep("rigidity", f"{measured.name}, {first}", numbers(measured, first))


if __name__ == "__main__":
    main()
