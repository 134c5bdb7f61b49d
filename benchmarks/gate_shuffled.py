"""Is it the size of the change that costs? Into data/gate_shuffled.json:

    python benchmarks/gate_shuffled.py laptop/fixed_1/0 .. smollm2 gemma-3-270m

gate.py freezes the share A_i1 of the first key. Here are two changes of the same share to set beside
it, on the same texts. Shuffled: the queries of a head and a text swap their shares. Doubled: the
log-odds of each share move as far as when it is frozen, but the other way. Notebook 08 shows what
comes out. A minute a real model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from constant_logit import FIRST_BLOCK, OURS
from gate import frozen, shares_of
from inside import Change, keep, passed
from open_lms import FEW, usual_first
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject


def odds_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the queries behind x_1: the log-odds of its share, and the log-sum-exp of the other keys."""
    others = logits[:, :, 1:, 1:].logsumexp(dim=-1)  # (B, H, T - 1)
    return logits[:, :, 1:, 0] - others, others


def put(logits: Tensor, odds: Tensor, others: Tensor) -> Tensor:
    """The logits with these log-odds of x_1's share. What the other keys get of the rest stays."""
    logits = logits.clone()
    logits[:, :, 1:, 0] = others + odds
    return logits


def shuffled(first: int) -> Change:
    """Shares change places among the queries of a head and a text."""
    generator = torch.Generator().manual_seed(0)

    def change(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer < first:
            return logits
        odds, others = odds_of(logits)
        order = torch.rand(odds.shape, generator=generator).argsort(dim=-1)
        return put(logits, odds.gather(-1, order), others)

    return change


def doubled(means: dict[int, Tensor], first: int) -> Change:
    """Shares move away from the head's mean share, as far in log-odds as `frozen` moves them there."""

    def change(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer < first:
            return logits
        odds, others = odds_of(logits)
        usual = means[layer].clamp(1e-6, 1 - 1e-6).logit()[:, None]  # (H, 1)
        return put(logits, 2 * odds - usual, others)

    return change


def shuffle(measured: Subject, n: int, first: int) -> dict[str, Any]:
    """By change: the loss of tokens 3 to T of each text, and by how much shares change in the mean."""
    ids = measured.inputs("natural", 2 * n, 64, first=usual_first(measured))
    means = shares_of(measured, ids[n:])["x_1"]
    changes: dict[str, Change] = {
        "untouched": lambda *args: args[3],
        "frozen": frozen(means, "x_1", first),
        "shuffled": shuffled(first),
        "doubled": doubled(means, first),
    }
    result: dict[str, Any] = {"samples": n, "from block": first + 1}
    for name, change in changes.items():
        moved: list[Tensor] = []

        def see(
            layer: int,
            q: Tensor,
            k: Tensor,
            logits: Tensor,
            change: Change = change,
            moved: list[Tensor] = moved,
        ) -> Tensor:
            after = change(layer, q, k, logits)
            if layer >= first:
                shares = after.softmax(dim=-1) - logits.softmax(dim=-1)
                moved.append(shares[:, :, 1:, 0].abs().mean())
            return after

        losses, _ = passed(measured, ids[:n], see)
        result[name] = {
            "loss": losses[:, 1:].mean(dim=1).tolist(),
            "mean change of a share": float(torch.stack(moved).mean()),
        }
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        own = name.startswith("laptop/")
        title = name.removeprefix("laptop/") if own else measured.name
        first = OURS if own else FIRST_BLOCK[measured.name]
        keep("gate_shuffled", title, shuffle(measured, 32 if own else FEW, first))


if __name__ == "__main__":
    main()
