"""Where do heads rest if each value has a gate of its own? Into data/values_gated.json:

    python benchmarks/values_gated.py FOLDER

The baseline of `laptop` and `gate_value`, three seeds each, on the texts of `gates_close.py`. A run
without weights is trained once more, into FOLDER.

- the same silence: for the queries that rest in the baseline, the length of what attention gives a
  head, over blocks 2 to 4, as in `gates_close.py`;
- by block: how long the values are that a query reads behind the first token, over the values that
  it could read there; how much these lengths differ; and how long the first token's is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gates_close import FIRST, LENGTH, OTHERS, SEEDS, TEXTS, Look, lengths, passed, quieter
from inside import keep
from torch import Tensor

import sinkutils as su
from sinkutils.names import subject

SEES = 8  # a query is counted if it sees so many keys behind the first


class Values(Look):
    """Keeps the weights and the lengths of the values as well: (B, H, T, T) and (B, H, T) a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[dict[str, float]] = []

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, _: Any) -> Tensor:
        out = super().attention(layer, q, k, v, spec, _)
        logits = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
        shares = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        self.read.append(of_values(shares, v.norm(dim=-1)))
        return out


def of_values(shares: Tensor, length: Tensor) -> dict[str, float]:
    """One block's three numbers. shares: (B, H, T, T). length: of the values, (B, H, T)."""
    behind, others = shares[..., SEES:, 1:], length[..., 1:]
    seen = (behind * others[:, :, None]).sum(dim=-1) / behind.sum(dim=-1)
    steps = torch.arange(1, others.shape[-1] + 1)
    usual = (others.cumsum(dim=-1) / steps)[..., SEES - 1 :]  # of the keys 2 to i
    return {
        "read": float((seen / usual).mean()),
        "spread": float(others.log().std(dim=-1).mean()),
        "first": float((length[..., 0] / others.mean(dim=-1)).mean()),
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rests: list[Tensor] = []  # of the baselines: how much each query gives x_1, (B, T - 1)
    outputs: dict[str, list[Tensor]] = {"fixed_1": [], "gate_value": []}
    for name, of_seeds in outputs.items():
        for seed in SEEDS:
            if name == "fixed_1":
                measured = subject(f"laptop/{name}/{seed}")
            else:
                su.train(su.config(name, "laptop", seed), folder, keep_weights=True)
                measured = subject(str(folder / "laptop" / name / str(seed)))
            look = Values()
            ids = measured.inputs("natural", TEXTS + OTHERS, LENGTH)[:TEXTS]
            losses, weights = passed(measured.model, ids, look=look)
            of_seeds.append(lengths(look.outputs[FIRST:]))
            if name == "fixed_1":
                rests.append(weights.mean(dim=(1, 2)))
            result: dict[str, Any] = {
                "texts": len(ids),
                "loss": losses.tolist(),
                "blocks": look.read,
            }
            keep("values_gated", f"{name}/{seed}", result)
    for name, of_seeds in outputs.items():
        pairs = [(i, j) for i in SEEDS for j in SEEDS if name != "fixed_1" or i != j]
        groups = [quieter(rests[i], of_seeds[j]) for i, j in pairs]
        keep("values_gated", f"fixed_1, {name}", {"silence": np.mean(groups, axis=0).tolist()})


if __name__ == "__main__":
    main()
