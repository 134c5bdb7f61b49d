"""Three models whose later blocks have no sink, and one that has, opened, into data/no_sink.json:

    python benchmarks/no_sink.py FOLDER

They are runs of `laptop`, seed 0, whose weights Git does not keep. FOLDER: where they are trained,
ten minutes each on one core, unless it has them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from open_lms import short
from torch import Tensor, nn

import sinkutils as su
from sinkutils import paths
from sinkutils.measuring import surgery
from sinkutils.measuring.probes import Subject
from sinkutils.names import subject
from sinkutils.study.train import train

NAMES = ("weight_decay_0", "gate_head", "softpick", "sigmoid_normalised")
TEXTS, T = 32, 64
SHUT = 0.1  # a gate below it lets hardly anything through


def extra(outcome: surgery.Outcome) -> list[float]:
    """Extra attention to the first token, by block."""
    alpha = outcome.report.alpha[:, 0].mean(dim=(0, 2))  # (L,)
    even = outcome.report.floor
    return ((alpha - even) / (1 - even)).tolist()


def without_element(one: Subject, ids: Tensor) -> dict[str, Any]:
    """After each block but the last: the element at zero, and what becomes of losses and attention."""
    before = surgery.untouched(one.model, ids)
    elements: Any = before.report.first_elements  # (L, d)
    found: dict[str, Any] = {
        "extra attention": extra(before),
        "element": elements.amax(dim=1).tolist(),
        "loss": before.loss,
    }
    for block in range(len(elements) - 1):
        dimension = int(elements[block].argmax())

        def clear(h: Tensor, dimension: int = dimension) -> Tensor:  # (B, T, d)
            h[:, 0, dimension] = 0
            return h

        after = surgery.edit(one.model, ids, "block", clear, [block])
        rise = after.losses - before.losses  # (B, T - 1)
        found[f"zero after block {block + 1}"] = {
            "extra attention": extra(after),
            "loss of x_2": float(rise[:, 0].mean()),
            "loss of later tokens": float(rise[:, 1:].mean()),
        }
    return found


def gates(model: Any, ids: Tensor) -> dict[str, list[float]]:
    """By block: the mean gate over tokens and heads, and the share of those that are shut."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        seen.append(output.sigmoid())  # (B, T, H)

    hooks = [block.attention.gate.register_forward_hook(keep) for block in model.blocks]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "mean": [float(gate.mean()) for gate in seen],
        "shut": [float((gate < SHUT).float().mean()) for gate in seen],
    }


def main() -> None:
    folder = sys.argv[1]
    found = {}
    for name in NAMES:
        train(su.config(name, "laptop"), folder, keep_weights=True)
        one = subject(f"laptop/{name}/0", runs=folder)
        ids = one.inputs("natural", TEXTS, T)
        found[name] = without_element(one, ids)
        if name == "gate_head":
            found[name]["gates"] = gates(one.model, ids)
    text = json.dumps(short(found), indent=1) + "\n"
    (paths.LEDGER / "no_sink.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
