"""Do the heads that rest on x_1 do less than the others? Into data/heads.json:

    python benchmarks/heads.py laptop/fixed_1/0 .. smollm2 gemma-3-270m

One head's output at a time is set to zero, and the loss compared with that of the whole model. Then
all heads go that rest most of the time, beside as many heads drawn at random. A quarter of an hour
a real model on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from inside import BATCH, blocks, keep, passed
from open_lms import FEW, usual_first
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

from sinkutils.measuring.probes import Subject
from sinkutils.model.decoder import TransformerLM
from sinkutils.names import subject

Head = tuple[int, int]  # layer and head, from 0
RESTS = 0.9  # of its attention, in the mean over queries
DRAWS = 5


def projections(model: Any) -> list[nn.Linear]:
    """The output projection of each block, which reads the heads side by side."""
    if isinstance(model, TransformerLM):
        return [block.attention.out for block in model.blocks]
    return [block.self_attn.o_proj for block in blocks(model)]


@contextmanager
def removed(model: Any, heads: list[Head], count: int) -> Iterator[None]:
    """A model without the output of some heads. count: the heads of a block."""
    handles = []
    for layer, out in enumerate(projections(model)):
        gone = [head for at, head in heads if at == layer]

        def cut(_: Any, args: tuple[Tensor], gone: list[int] = gone) -> tuple[Tensor]:
            by_head = args[0].unflatten(-1, (count, -1)).clone()  # (B, T, H, D)
            by_head[:, :, gone] = 0
            return (by_head.flatten(-2),)

        if gone:
            handles.append(out.register_forward_pre_hook(cut, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def numbers(measured: Subject) -> dict[str, Any]:
    """What each head costs, beside its share of x_1, and what the resting heads cost together."""
    ids = measured.inputs("natural", FEW, 64, first=usual_first(measured))
    losses, alpha = passed(measured, ids)  # (n, 63), (n, L, H, T)
    whole = losses.mean()
    shares = alpha[..., 0].mean(dim=0)  # (L, H)
    layers, count = shares.shape
    every = [(layer, head) for layer in range(layers) for head in range(count)]

    def cost(heads: list[Head]) -> float:
        """How many nats the loss rises without them."""
        with removed(measured.model, heads, count):
            return float(plain_loss(measured.model, ids) - whole)

    costs = torch.tensor([cost([head]) for head in tqdm(every, disable=None)])
    order = costs.sort(descending=True).values
    rest = [head for head in every if shares[head] > RESTS]
    draw = torch.Generator().manual_seed(0)
    draws = [torch.randperm(len(every), generator=draw)[: len(rest)] for _ in range(DRAWS)]
    result = {
        "samples": len(ids),
        "share of x_1": shares.tolist(),
        "cost": costs.view(layers, count).tolist(),
        "correlation": float(stats.spearmanr(1 - shares.flatten(), costs).statistic),
        "share of the dearest fifth": float(order[: len(every) // 5].sum() / order.sum()),
        "resting heads": len(rest),
    }
    if rest:
        result["cost of the resting"] = cost(rest)
        result["cost of random"] = [cost([every[i] for i in chosen]) for chosen in draws]
    return result


def plain_loss(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of tokens 2 to T in ordinary passes."""
    sums = torch.zeros(())
    for batch in ids.split(BATCH):
        own = isinstance(model, TransformerLM)
        logits = model(batch) if own else model(batch, use_cache=False).logits
        nats = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        sums += nats * len(batch)
    return sums / len(ids)


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        title = name.removeprefix("laptop/") if name.startswith("laptop/") else measured.name
        keep("heads", title, numbers(measured))


if __name__ == "__main__":
    main()
