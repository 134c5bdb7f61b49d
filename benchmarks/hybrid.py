"""Has the one softmax block among kernel blocks a sink? Into data/hybrid.json:

    python benchmarks/hybrid.py SEED [SEED ..]

The baseline of `minute`, with its fixed first token. One block attends by softmax, the other three
by the elu + 1 kernel without normalisation; in one arm all four do. Some two minutes a run on one
core; a run that is there is not made again.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from inside import keep
from minute import Look, even_share, is_made, trained

from sinkutils.study import grid
from sinkutils.study.train import Run

ARMS = {"softmax in no block": 0} | {f"softmax in block {place}": place for place in range(1, 5)}


def make_hybrid(run: Run, place: int) -> None:
    """Let all blocks but that at `place`, counted from 1, attend by a kernel."""
    kernel = grid.config("elu_kernel", "minute", 0).model.attention
    for number, block in enumerate(run.model.blocks, start=1):
        if number != place:
            block.attention.config = dataclasses.replace(run.config.model, attention=kernel)


@torch.no_grad()
def numbers(run: Run, place: int) -> dict[str, Any]:
    """The element of x_1 after each block, the sink of the softmax block, and the loss."""
    look = Look()
    run.model(run.probe, look)
    result: dict[str, Any] = {"element": look.elements, "valid_loss": run.valid_loss()}
    if place:
        shares = look.maps[place - 1]  # (B, H, T, T)
        even = even_share(torch.ones(shares.shape[-2:], dtype=torch.bool).tril(), 1)
        alpha = shares[..., 0].mean(dim=2)  # (B, H)
        result["excess"] = float((alpha.mean() - even) / (1 - even))
        result["sink"] = 100 * float((alpha > 0.3).float().mean())
    return result


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        for arm, place in ARMS.items():
            name = f"{arm}, seed {seed}"
            if is_made("hybrid", name):
                continue

            def change(run: Run, place: int = place) -> None:
                make_hybrid(run, place)

            keep("hybrid", name, numbers(trained("fixed_1", seed, change), place))


if __name__ == "__main__":
    main()
