"""The logits of a model's attention, collected over texts, and how much they vary (constant_logit.py)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

SINK = 0.3
LATE = 8  # spreads are over the queries behind this position


class Logits:
    """Collects, by layer and of several batches of texts, what the cuts need."""

    def __init__(self) -> None:
        self.on: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def look(self, layer: int, q: Tensor, _: Tensor, logits: Tensor) -> Tensor:
        length = logits.shape[-1]
        self.on["query"][layer].append(q[:, :, 1:].mean(dim=2))  # (B, H, D)
        self.on["k_1"][layer].append(logits[:, :, LATE:, 0])  # (B, H, T - LATE)
        self.on["k_1, all"][layer].append(logits[:, :, 1:, 0])
        self.on["k_2"][layer].append(logits[:, :, 2:, 1])
        self.on["own"][layer].append(logits.diagonal(dim1=2, dim2=3)[..., 1:])
        early = logits[:, :, LATE:, 1:LATE]  # keys 2 to LATE, which all these queries see
        self.on["early"][layer].append(early)
        strongest = strongest_of(logits)
        chosen = logits.gather(3, strongest[..., None, None].expand(-1, -1, length, 1))[..., 0]
        behind = torch.arange(length) > strongest[..., None]
        self.on["strongest"][layer].append(chosen.masked_fill(~behind, torch.nan))
        others = logits[:, :, LATE:, 1:].logsumexp(dim=-1)
        self.on["others"][layer].append(others)
        return logits

    def of(self, name: str, layer: int) -> Tensor:
        return torch.cat(self.on[name][layer])


def strongest_of(logits: Tensor) -> Tensor:
    """The key with the most attention among 2 to T / 2, by text and head, (B, H)."""
    half = logits.shape[-1] // 2
    shares = logits.softmax(dim=-1)[:, :, half:, 1:half]
    return shares.sum(dim=2).argmax(dim=-1) + 1


def spreads(known: Logits, alpha: Tensor, first: int) -> dict[str, Any]:
    """Standard deviations over queries and texts, medians over the heads with a sink on x_1."""
    found: dict[str, list[float]] = defaultdict(list)
    for layer in range(first, alpha.shape[1]):
        for head in (alpha[:, layer, :, 0].mean(dim=0) > SINK).nonzero()[:, 0].tolist():
            first_key, others = (known.of(name, layer)[:, head] for name in ("k_1", "others"))
            odds = first_key - others
            found["k_1"].append(float(first_key.std()))
            found["keys 2 to 8"].append(
                float(known.of("early", layer)[:, head].std(dim=(0, 1)).mean())
            )
            strongest = known.of("strongest", layer)[:, head]
            found["strongest other key"].append(float(strongest[strongest.isfinite()].std()))
            found["own key"].append(float(known.of("own", layer)[:, head, LATE:].std()))
            found["log odds"].append(float(odds.std()))
            found["share of the others"].append(float(others.var() / odds.var()))
    medians = {name: float(torch.tensor(values).median()) for name, values in found.items()}
    return {"heads": len(found["k_1"]), **medians}
