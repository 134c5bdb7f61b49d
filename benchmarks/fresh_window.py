"""What does a window lose beside the first key? Into data/fresh_window.json:

    python benchmarks/fresh_window.py smollm2 gemma-3-270m

Behind position 256 a cache of the last 127 keys and the first still costs some loss. Is that what any
window forgets? Here a model reads the last tokens as a text of their own, with a first token of its
own (Gemma: its BOS), for every STRIDE-th prediction. Its loss is set beside that of the streaming
caches and of the full cache, for the same predictions. Notebook 08 shows what comes out. Ten to
twenty minutes a model on one core.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from inside import keep
from open_lms import LONG, usual_first
from recall import WINDOW
from torch import Tensor

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import TEXT, Subject
from sinkutils.names import subject

STRIDE = 4
AFTER = 2 * WINDOW


@torch.no_grad()
def fresh(measured: Subject, ids: Tensor, places: range) -> Tensor:
    """The loss of the tokens at `places`, each read behind the last WINDOW tokens alone, (B, places)."""
    own = usual_first(measured) != TEXT  # a token in front that is not of the text
    losses = []
    for place in places:
        window = ids[:, place - WINDOW : place]
        if own:
            window = torch.cat([ids[:, :1], window[:, 1:]], dim=1)
        logits = measured.model(window, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        losses.append(F.cross_entropy(logits, ids[:, place], reduction="none"))
    return torch.stack(losses, dim=1)


def fresh_window(measured: Subject) -> dict[str, Any]:
    ids = measured.inputs("natural", *LONG, first=usual_first(measured))
    places = range(AFTER + 1, ids.shape[1], STRIDE)  # counted from 0; a loss is of the token there
    model = measured.model
    outcomes = {
        f"{WINDOW} + 0": surgery.stream(model, ids, WINDOW),
        f"{WINDOW - 1} + 1": surgery.stream(model, ids, WINDOW - 1, 1),
        "full": surgery.untouched(model, ids),
    }
    # Of an outcome's losses the first is that of the second token.
    losses = {
        name: outcome.losses[:, [p - 1 for p in places]] for name, outcome in outcomes.items()
    }
    losses["fresh"] = fresh(measured, ids, places)
    means = {name: loss.mean(dim=1).tolist() for name, loss in losses.items()}
    return {"samples": LONG[0], "T": LONG[1], "after": AFTER, "stride": STRIDE, "loss": means}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        keep("fresh_window", measured.name, fresh_window(measured))


if __name__ == "__main__":
    main()
