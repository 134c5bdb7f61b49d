"""What rounding to four bits changes of the numbers that the pages use, into data/four_bits.json:

    python benchmarks/four_bits.py

Our own kept models, in float32 and with the weights of every linear map and embedding in blocks of
32 of four bits, as GGUF's Q4_1 has them: one scale and one least value a block, in float16. Whisper
(whisper.py) is rounded in the same way. Seconds a model.
"""

from __future__ import annotations

from typing import Any

import torch
from inside import keep
from torch import Tensor, nn

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import Subject
from sinkutils.names import subject
from sinkutils.paths import RUNS

BLOCK, LEVELS = 32, 15
TEXTS = 32


def rounded(weights: Tensor) -> Tensor:
    """The weights in blocks of BLOCK along their last axis, each rounded to 16 levels."""
    blocks = weights.detach().unflatten(-1, (-1, BLOCK))
    least = blocks.amin(dim=-1, keepdim=True).half().float()
    step = ((blocks.amax(dim=-1, keepdim=True) - least) / LEVELS).half().float()
    levels = ((blocks - least) / step.clamp(min=1e-12)).round().clamp(0, LEVELS)
    return (least + step * levels).flatten(-2)


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round the linear maps and embeddings of a model in place; norms and biases stay."""
    done = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and id(module.weight) not in done:
            module.weight.copy_(rounded(module.weight))
            done.add(id(module.weight))  # an embedding may be the output matrix as well


def numbers(measured: Subject) -> dict[str, Any]:
    """What the pages say of a model, on TEXTS texts."""
    outcome = surgery.untouched(measured.model, measured.inputs("natural", TEXTS, 64))
    report = outcome.report
    alpha, even = report.alpha[:, 0], report.floor  # (n, L, H)
    values: Any = report.value_norms
    found = {
        "sink": report.sink(),
        "extra in later blocks": float((alpha[:, 1:].mean() - even) / (1 - even)),
        "extra in block 1": float((alpha[:, :1].mean() - even) / (1 - even)),
        "element after block 1": float(report.hidden_peaks[0, 0]),  # type: ignore[index]
        "value in later blocks": float((values[1:, 0] / values[1:, 1:].mean(dim=1)).mean()),
        "loss": outcome.loss,
    }
    if report.star is not None:
        found["sink_star"] = report.sink_star()
    return found


def main() -> None:
    for path in sorted((RUNS / "laptop").glob("*/*/model.safetensors")):
        name = "/".join(path.parts[-3:-1])
        measured = subject(f"laptop/{name}")
        before = numbers(measured)
        round_weights(measured.model)
        keep("four_bits", name, {"float32": before, "four bits": numbers(measured)})


if __name__ == "__main__":
    main()
