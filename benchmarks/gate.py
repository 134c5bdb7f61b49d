"""Is 1 - A_i1 a gate that heads need? Into data/gate.json:

    python benchmarks/gate.py laptop/fixed_1/0 .. smollm2 gemma-3-270m QWEN'S_FOLDER

A head that rests on x_1 gives the other tokens 1 - A_i1 in all. Here that share is frozen: each
query of a head gives x_1 the head's mean share, from other texts, and divides the rest among the
other keys as before. Controls freeze another key's share instead: x_2's, the query's own token's, or
that of the strongest other key. A minute or two a real model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from constant_logit import FIRST_BLOCK, OURS
from inside import Change, keep, passed
from open_lms import FEW, usual_first
from spread import SINK, strongest_of
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

KEYS = ("x_1", "x_2", "own", "strongest other")


def chosen(name: str, logits: Tensor) -> Tensor:
    """Which entries are the key's: (T, T) or (B, H, T, T), bool. logits: (B, H, T, T).

    The strongest other key of a head and text is the one behind x_1 with the most attention. Only
    queries behind the key count.
    """
    length = logits.shape[-1]
    places = torch.arange(length)
    rows = places[:, None]
    if name == "own":
        return (places == rows) & (rows > 0)
    if name == "strongest other":
        key = strongest_of(logits)[..., None, None]  # (B, H, 1, 1)
    else:
        key = torch.tensor({"x_1": 0, "x_2": 1}[name])
    return (places == key) & (rows > key)


def shares_of(measured: Subject, ids: Tensor) -> dict[str, dict[int, Tensor]]:
    """By key and layer, the mean share of the key in each head: (H,)."""
    sums: dict[str, dict[int, list[Tensor]]] = {name: {} for name in KEYS}

    def look(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        shares = logits.softmax(dim=-1)
        for name in KEYS:
            at = chosen(name, logits).expand(logits.shape)
            total = (shares * at).sum(dim=(0, 2, 3))  # (H,)
            sums[name].setdefault(layer, []).append(total / at.sum(dim=(0, 2, 3)))
        return logits

    passed(measured, ids, look)
    return {
        name: {layer: torch.stack(means).mean(dim=0) for layer, means in by_layer.items()}
        for name, by_layer in sums.items()
    }


def frozen(means: dict[int, Tensor], name: str, first: int) -> Change:
    """Give the key the head's mean share in every row. The other logits stay as they are."""

    def change(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer < first:
            return logits
        at = chosen(name, logits)
        others = logits.masked_fill(at, -torch.inf).logsumexp(dim=-1, keepdim=True)
        odds = means[layer].clamp(1e-6, 1 - 1e-6).logit()[:, None, None]  # (H, 1, 1)
        return torch.where(at, others + odds, logits)

    return change


def gate(measured: Subject, n: int, first: int) -> dict[str, Any]:
    """By frozen key: Sink_1, and the loss of tokens 3 to T of each text."""
    ids = measured.inputs("natural", 2 * n, 64, first=usual_first(measured))
    means = shares_of(measured, ids[n:])
    changes: dict[str, Change] = {"untouched": lambda *args: args[3]}
    changes |= {name: frozen(means[name], name, first) for name in KEYS}
    result: dict[str, Any] = {"samples": n, "from block": first + 1}
    for name, change in changes.items():
        losses, alpha = passed(measured, ids[:n], change)
        sink = 100 * (alpha[..., 0] > SINK).float()  # (n, L, H)
        result[name] = {
            "sink": sink.mean(dim=(1, 2)).tolist(),
            "loss": losses[:, 1:].mean(dim=1).tolist(),
        }
    for name in KEYS:
        share = torch.stack([means[name][layer] for layer in sorted(means[name])[first:]])
        result[name]["mean share"] = float(share.mean())
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        own = name.startswith("laptop/")
        title = name.removeprefix("laptop/") if own else measured.name
        first = OURS if own else FIRST_BLOCK[measured.name]
        keep("gate", title, gate(measured, 32 if own else FEW, first))


if __name__ == "__main__":
    main()
