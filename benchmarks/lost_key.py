"""Why a lost first key costs so much: its value, or the weight that the other keys get? Into
data/lost_key.json:

    python benchmarks/lost_key.py smollm2 gemma-3-270m laptop/fixed_1/0 laptop/fixed_1/1 \\
        laptop/fixed_1/2 QWEN'S_FOLDER

A cache that loses k_1 loses two things at once: A_i1 v_1 in each output, and a weight A_i1 that goes
to the other keys, whose outputs grow by 1 / (1 - A_i1). Here they are lost one at a time. Notebooks
08 and 09 show what comes out. Two minutes a real model on one core, seconds for one of ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from open_lms import short, usual_first
from recall import AROUND, TEXTS, WINDOW
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sinkutils import paths
from sinkutils.measuring.probes import Subject
from sinkutils.model.decoder import TransformerLM
from sinkutils.names import subject

# Are A_i1 v_1 and the other keys' weights as they were? (value, weights)
CASES = {
    "kept": (True, True),
    "value lost": (False, True),
    "weight handed on": (True, False),
    "both lost": (False, False),
}


def output(logits: Tensor, v: Tensor, case: str, late: Tensor) -> Tensor:
    """What attention returns, (B, H, T, D): queries that are `late` (T,) have lost k_1 as a case says.

    logits: (B, H, T, T), -inf where a key is not seen. v: (B, H, T, D).
    """
    value, weights = CASES[case]
    shares = logits.softmax(dim=-1)
    first = shares[..., :1] * v[:, :, :1]  # A_i1 v_1
    others = shares[..., 1:] @ v[:, :, 1:]
    cut = torch.zeros_like(first)
    if value:
        cut = cut + first
    if weights:
        cut = cut + others
    else:
        # Query 1 sees no other key; it is never late.
        alone = logits[..., 1:].softmax(dim=-1).nan_to_num()
        cut = cut + alone @ v[:, :, 1:]
    return torch.where(late[:, None], cut, first + others)


# rule(layer, logits, v, late) -> what attention returns, (B, H, T, D); the arguments as in `output`.
Rule = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def attending(model: Any, rule: Rule) -> Iterator[None]:
    """A model of transformers whose attention is that of a rule. The queries behind the first WINDOW
    positions are `late`.

    Each query sees the first key and the last WINDOW - 1.
    """

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        groups = q.shape[1] // k.shape[1]
        kind = q.dtype
        q = q.float()  # attention is computed in float32, whatever the weights are
        k = k.float().repeat_interleave(groups, dim=1)
        v = v.float().repeat_interleave(groups, dim=1)
        rows = torch.arange(q.shape[2])
        behind = rows[:, None] - rows >= WINDOW - 1
        forgotten = behind & (rows > 0)  # (T, T)
        logits = q @ k.mT * scaling + mask
        logits = logits.masked_fill(forgotten, -torch.inf)
        out = rule(module.layer_idx, logits, v, rows >= WINDOW)
        return out.transpose(1, 2).contiguous().to(kind), None

    AttentionInterface.register("by a rule", attend)
    AttentionMaskInterface.register("by a rule", eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("by a rule")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def late_losses(model: Any, ids: Tensor, rule: Rule) -> list[float]:
    """The mean loss of each text at positions WINDOW + 1 and on."""
    with attending(model, rule):
        logits = model(ids, use_cache=False).logits[:, WINDOW - 1 : -1].float()
    return F.cross_entropy(logits.mT, ids[:, WINDOW:], reduction="none").mean(dim=1).tolist()


def losing(case: str) -> Rule:
    return lambda _, logits, v, late: output(logits, v, case, late)


@torch.no_grad()
def of_a_real_model(measured: Subject) -> dict[str, list[float]]:
    """The mean loss of each text at positions WINDOW + 1 and on, by case."""
    model = measured.model
    ids = measured.inputs("natural", TEXTS, AROUND[1] - 1, first=usual_first(measured))
    return {case: late_losses(model, ids, losing(case)) for case in CASES}


class Losing:
    """Puts a case's output in place of that of one of our own models, in the blocks from 2 up."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.out = Tensor()

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> None:
        rows = torch.arange(q.shape[2])
        logits = q @ k.mT / q.shape[-1] ** 0.5
        logits = logits.masked_fill(rows > rows[:, None], -torch.inf)
        late = (rows > 0) & (layer > 0)
        self.out = output(logits, v, self.case, late).transpose(1, 2).flatten(2)

    def put(self, *_: Any) -> Tensor:
        """What the output projection reads."""
        return self.out

    def __getattr__(self, _: str) -> Any:  # whatever else a model shows to what looks at it
        return lambda *_: None


@torch.no_grad()
def logits_of_our_own(model: TransformerLM, ids: Tensor, case: str) -> Tensor:
    """Of a model with plain rotary attention, (B, T, V)."""
    observer = Losing(case)
    with ExitStack() as hooks:
        for block in model.blocks:
            replaced = block.attention.out.register_forward_pre_hook(observer.put)
            hooks.callback(replaced.remove)
        return model(ids, observer)


def of_our_own(measured: Subject) -> dict[str, list[float]]:
    """The mean loss of each text by case."""
    ids = measured.inputs("natural", 32, 64)
    losses = {}
    for case in CASES:
        logits = logits_of_our_own(measured.model, ids, case)
        nats = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
        losses[case] = nats.mean(dim=1).tolist()
    return losses


def main() -> None:
    path = paths.LEDGER / "lost_key.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in sys.argv[1:]:
        measured = subject(name)
        own = isinstance(measured.model, TransformerLM)
        losses = of_our_own(measured) if own else of_a_real_model(measured)
        known[name if own else measured.name] = short(losses)
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
