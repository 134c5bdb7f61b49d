"""How much do a sink head's logits vary over the queries of one text? Into data/spread_within.json:

    python benchmarks/spread_within.py laptop/fixed_1/0 .. smollm2 gemma-3-270m QWEN'S_FOLDER

constant_logit.py pools queries and texts, and over texts other tokens stand on keys 2 to 8. Here a
standard deviation is over the queries behind position 8 of one text, a mean over texts, and a median
over the heads with a sink. A minute a real model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from constant_logit import FIRST_BLOCK, OURS
from inside import keep, passed
from open_lms import FEW, usual_first
from spread import SINK, Logits
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject


def within(known: Logits, alpha: Tensor, first: int) -> dict[str, Any]:
    """Standard deviations over the queries of a text, means over texts, medians over sink heads."""
    on_first, on_early = [], []
    for layer in range(first, alpha.shape[1]):
        for head in (alpha[:, layer, :, 0].mean(dim=0) > SINK).nonzero()[:, 0].tolist():
            k_1 = known.of("k_1", layer)[:, head]  # (n, queries)
            early = known.of("early", layer)[:, head]  # (n, queries, keys 2 to 8)
            on_first.append(float(k_1.std(dim=1).mean()))
            on_early.append(float(early.std(dim=1).mean()))
    medians = [float(torch.tensor(values).median()) for values in (on_first, on_early)]
    fewer = sum(a < b for a, b in zip(on_first, on_early, strict=True))
    return {"heads": len(on_first), "k_1": medians[0], "keys 2 to 8": medians[1], "k_1 less": fewer}


def measured_within(measured: Subject, n: int, first: int) -> dict[str, Any]:
    """The spreads on the texts on which constant_logit.py takes its own."""
    ids = measured.inputs("natural", 2 * n, 64, first=usual_first(measured))[n:]
    known = Logits()
    _, alpha = passed(measured, ids, known.look)
    return {"samples": n, "from block": first + 1, **within(known, alpha, first)}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        own = name.startswith("laptop/")
        title = name.removeprefix("laptop/") if own else measured.name
        first = OURS if own else FIRST_BLOCK[measured.name]
        keep("spread_within", title, measured_within(measured, 32 if own else FEW, first))


if __name__ == "__main__":
    main()
