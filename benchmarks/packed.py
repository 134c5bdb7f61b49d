"""Where is the sink if each row of the training holds two texts? Into data/packed.json:

    python benchmarks/packed.py SEED [SEED ..]

The baseline of `minute`, with its fixed token in front of each of two texts of 16 tokens. In some
arms a text sees the one before it, in some no other token sees the fixed tokens. Some two minutes a
run on one core; a run that is there is not made again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from inside import keep
from minute import Look, even_share, is_made, trained
from torch import Tensor

from sinkutils.study.task import CrossEntropy
from sinkutils.study.train import Run

TEXT = 16  # tokens of each of the two texts of a row
ARMS = ("single", "apart", "together", "apart, hidden", "together, hidden")


def seen_keys(arm: str) -> Tensor:
    """Which keys each query of a row sees, (32, 32), bool."""
    rows = torch.arange(2 * TEXT)
    seen = rows[:, None] >= rows
    if "apart" in arm:
        seen &= rows[:, None] // TEXT == rows // TEXT
    if "hidden" in arm:
        seen &= (rows % TEXT > 0) | (rows[:, None] == rows)
    return seen


class Masked:
    """Observes a pass, and lets each query see its own keys alone."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen

    def embedding(self, _: Tensor) -> None: ...

    def attention(self, _: int, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)

    def block(self, *_: Any) -> None: ...


def loss(seen: Tensor, put: Callable[[Tensor], Tensor], model: Any, chunks: Tensor, *_: Any) -> Any:
    """The mean next-token loss of rows of two texts. chunks: (B, 33)."""
    ids = put(chunks)
    logits = model(ids[:, :-1], Masked(seen))
    return CrossEntropy.apply(logits.flatten(0, 1), ids[:, 1:].flatten())


def packed(fixed: int, chunks: Tensor) -> Tensor:
    """The same chunks with the fixed token in front of the second text as well."""
    second = torch.arange(chunks.shape[1]) == TEXT
    return chunks.masked_fill(second, fixed)


@torch.no_grad()
def numbers(run: Run, arm: str) -> dict[str, Any]:
    """Excess on single texts by place, shares inside the rows, and the loss of single texts."""
    seen = seen_keys(arm)
    alone = seen[:TEXT, :TEXT]
    look = Look(alone)
    logits = run.model(run.valid[:, :TEXT], look)
    nats = F.cross_entropy(logits[:, 1:].float().mT, run.valid[:, 2 : TEXT + 1])
    result: dict[str, Any] = {"loss": float(nats)}
    later = torch.stack([look.maps[layer] for layer in sorted(look.maps)[1:]])
    for k in (1, 2, 3):
        even = even_share(alone, k)
        alpha = float(later[..., k - 1 :, k - 1].mean())
        result[f"excess of x_{k}"] = (alpha - even) / (1 - even)
    if arm != "single":
        look = Look(seen)
        run.model(packed(run.corpus.fix_id, run.valid[:, : 2 * TEXT]), look)
        later = torch.stack([look.maps[layer] for layer in sorted(look.maps)[1:]])
        first, second = later[..., 3:TEXT, :], later[..., TEXT + 3 :, :]
        result["first text to its own"] = float(first[..., 0].mean())
        result["second text to the first's"] = float(second[..., 0].mean())
        result["second text to its own"] = float(second[..., TEXT].mean())
    return result


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        for arm in ARMS:
            name = f"{arm}, seed {seed}"
            if is_made("packed", name):
                continue

            def change(run: Run, arm: str = arm) -> None:
                if arm != "single":
                    put = partial(packed, run.corpus.fix_id)
                    run.forward = partial(loss, seen_keys(arm), put)

            keep("packed", name, numbers(trained("fixed_1", seed, change), arm))


if __name__ == "__main__":
    main()
