"""Is a sink one and the same logit on the first key, whatever the query? Into data/constant_logit.json:

    python benchmarks/constant_logit.py laptop/fixed_1/0 .. smollm2 gemma-3-270m QWEN'S_FOLDER

The logits that all queries of a head give one key become one constant, estimated on other texts;
all other logits stay as they are. Controls do the same to other keys. And the spread of a logit
over queries and texts, which needs no cut. A minute or two a real model.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from inside import Change, excess, keep, passed
from open_lms import FEW, usual_first
from torch import Tensor

from sinkutils.measuring.subject import Subject, subject

# From which block on, counted from 0, a model has a sink on x_1: before it there is no constant to find.
FIRST_BLOCK = {"smollm2": 3, "qwen2.5-coder-0.5b": 3, "gemma-3-270m": 0}
OURS = 1
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


def cuts(known: Logits, first: int) -> dict[str, Change]:
    """By name, a change of the logits of the layers from `first` on."""

    def constant(name: str, layer: int) -> Tensor:
        return known.of(name, layer).nanmean(dim=(0, 2))  # (H,)

    def on_k_1(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer >= first:
            logits[:, :, 1:, 0] = constant("k_1, all", layer)[:, None]
        return logits

    def on_k_2(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer >= first:
            logits[:, :, 2:, 1] = constant("k_2", layer)[:, None]
        return logits

    def on_own(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer >= first:
            logits.diagonal(dim1=2, dim2=3)[..., 1:] = constant("own", layer)[:, None]
        return logits

    def on_strongest(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer >= first:
            key = strongest_of(logits)[..., None, None]  # (B, H, 1, 1)
            places = torch.arange(logits.shape[-1])
            cut = (places == key) & (places[:, None] > key)
            logits = torch.where(cut, constant("strongest", layer)[:, None, None], logits)
        return logits

    def mean_off(layer: int, _: Tensor, __: Tensor, logits: Tensor) -> Tensor:
        if layer >= first:
            logits[:, :, 1:, 0] -= constant("k_1, all", layer)[:, None]
        return logits

    def query_off(layer: int, _: Tensor, k: Tensor, logits: Tensor) -> Tensor:
        mean = known.of("query", layer).mean(dim=0)  # (H, D)
        return logits - (k @ mean[..., None]).mT  # (B, H, 1, T)

    return {
        "constant on k_1": on_k_1,
        "constant on k_2": on_k_2,
        "constant on the own key": on_own,
        "constant on the strongest other key": on_strongest,
        "mean logit on k_1 off": mean_off,
        "mean query off, all blocks": query_off,
    }


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


def constant_logit(measured: Subject, n: int, first: int) -> dict[str, Any]:
    """By cut: Sink_1 and the loss of tokens 3 to T of each text; and the spreads."""
    ids = measured.inputs("natural", 2 * n, 64, first=usual_first(measured))
    known = Logits()
    _, alpha = passed(measured, ids[n:], known.look)
    result: dict[str, Any] = {"samples": n, "from block": first + 1}
    result["spread"] = spreads(known, alpha, first)
    changes = cuts(known, first) | (
        {"constant on k_1, all blocks": cuts(known, 0)["constant on k_1"]} if first else {}
    )
    for name, change in {"untouched": lambda *args: args[3], **changes}.items():
        losses, alpha = passed(measured, ids[:n], change)
        sink = 100 * (alpha[..., 0] > SINK).float()  # (n, L, H)
        later = excess(alpha[:, first:, :, 0], ids.shape[1])
        result[name] = {
            "sink": sink.mean(dim=(1, 2)).tolist(),
            "sink_2": float(100 * (alpha[..., 1] > SINK).float().mean()),
            "extra": later.mean(dim=(1, 2)).tolist(),
            "loss": losses[:, 1:].mean(dim=1).tolist(),
        }
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        own = name.startswith("laptop/")
        title = name.removeprefix("laptop/") if own else measured.name
        first = OURS if own else FIRST_BLOCK[measured.name]
        keep("constant_logit", title, constant_logit(measured, 32 if own else FEW, first))


if __name__ == "__main__":
    main()
