"""Is a sink one and the same logit on the first key, whatever the query? Into data/constant_logit.json:

    python benchmarks/constant_logit.py laptop/fixed_1/0 .. smollm2 gemma-3-270m QWEN'S_FOLDER

The logits that all queries of a head give one key become one constant, estimated on other texts;
all other logits stay as they are. Controls do the same to other keys. And the spread of a logit
over queries and texts, which needs no cut. A minute or two a real model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from inside import Change, excess, keep, passed
from open_lms import FEW, usual_first
from spread import SINK, Logits, spreads, strongest_of
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

# From which block on, counted from 0, a model has a sink on x_1: before it there is no constant to find.
FIRST_BLOCK = {"smollm2": 3, "qwen2.5-coder-0.5b": 3, "gemma-3-270m": 0}
OURS = 1


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
