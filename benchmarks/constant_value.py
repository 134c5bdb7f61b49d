"""What of the first key's value is missed: a constant, or what differs between queries? Into
data/constant_value.json:

    python benchmarks/constant_value.py smollm2 gemma-3-270m

A cache that loses the value of the first key, and keeps the weights, takes A_i1 v_1 from each output
(lost_key.py). Here it is taken apart: into its mean over queries, of a head and on other texts, and
what a query has beside that mean. Notebook 08 shows what comes out. Two minutes a model on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from inside import keep
from lost_key import masked_logits
from open_lms import usual_first
from recall import AROUND, TEXTS, WINDOW
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

# cut(layer, first) -> what stands in place of A_i1 v_1 of the late queries. first: (B, H, T, D).
Cut = Callable[[int, Tensor], Tensor]


@contextmanager
def cutting(model: Any, cut: Cut) -> Iterator[None]:
    """A model of transformers whose late queries, those behind WINDOW, get another A_i1 v_1.

    Each query sees the first key and the last WINDOW - 1; its weights are as they were.
    """

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        v = v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        shares = masked_logits(q, k, mask, scaling).softmax(dim=-1)
        first = shares[..., :1] * v[:, :, :1]  # A_i1 v_1
        others = shares[..., 1:] @ v[:, :, 1:]
        late = (torch.arange(q.shape[2]) >= WINDOW)[:, None]
        out = others + torch.where(late, cut(module.layer_idx, first), first)
        return out.transpose(1, 2).contiguous().to(q.dtype), None

    AttentionInterface.register("cutting", attend)
    AttentionMaskInterface.register("cutting", eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("cutting")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def losses_of(model: Any, ids: Tensor, cut: Cut) -> list[float]:
    """The mean loss of each text at positions WINDOW + 1 and on."""
    with cutting(model, cut):
        logits = model(ids, use_cache=False).logits[:, WINDOW - 1 : -1].float()
    return F.cross_entropy(logits.mT, ids[:, WINDOW:], reduction="none").mean(dim=1).tolist()


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

    losses_of(model, others, look)
    cuts: dict[str, Cut] = {
        "kept": lambda _, first: first,
        "lost": lambda _, first: torch.zeros_like(first),
        "mean in its place": lambda layer, first: means[layer].expand_as(first),
        "mean taken off": lambda layer, first: first - means[layer],
    }
    losses = {name: losses_of(model, ids, cut) for name, cut in cuts.items()}
    # Of the sum of squares of A_i1 v_1, the share that is left beside the mean, by layer.
    return {"samples": TEXTS, "loss": losses, "share beside the mean": list(spreads.values())}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        keep("constant_value", measured.name, constant_value(measured))


if __name__ == "__main__":
    main()
