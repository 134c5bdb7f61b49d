"""What draws heads, of what one or two neurons write into the first state? Into data/two_neurons.json:

    python benchmarks/two_neurons.py laptop/fixed_1/0 .. laptop/prefix_5/0 smollm2 QWEN'S_FOLDER

h_1 is replaced by the bare embedding of the token and a part of what the neurons wrote. A minute a
real model on one core, seconds a small one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from denominator import WRITERS
from inside import blocks, excess, keep
from open_lms import FEW, usual_first
from torch import Tensor

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import Subject
from sinkutils.model.decoder import TransformerLM
from sinkutils.names import subject

TEXTS = 8  # at a time, which `surgery.edit` hands over whole


def written(measured: Subject, ids: Tensor, block: int, count: int) -> tuple[Tensor, int]:
    """What the strongest neurons of a block (from 1) write into h_1, (n, d), and the element's place."""
    seen: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    plain = surgery.edit(measured.model, ids, "neurons", look, [block - 1])
    elements: Any = plain.report.first_elements  # (L, d)
    element = int(elements[block - 1].argmax())
    neurons = torch.cat(seen)[-len(ids) :, 0].float()  # (n, neurons), of x_1
    at: Any = blocks(measured.model)[block - 1]
    down = at.ffn.down if isinstance(measured.model, TransformerLM) else at.mlp.down_proj
    weights = down.weight.detach().float()  # (d, neurons)
    chosen = (neurons * weights[element]).mean(dim=0).abs().topk(count).indices
    return neurons[:, chosen] @ weights[:, chosen].T, element


def summed_up(outcomes: list[surgery.Outcome], length: int) -> dict[str, Any]:
    """By block the extra attention and the length of v_1; of each text the loss of tokens 3 to T."""
    alpha = torch.cat([one.report.alpha[:, 0].mean(dim=2) for one in outcomes])  # (n, L)
    every: list[Any] = [one.report.value_norms for one in outcomes]
    norms = torch.stack(every).mean(dim=0)  # (L, T)
    return {
        "extra": excess(alpha, length).mean(dim=0).tolist(),
        "value": (norms[:, 0] / norms[:, 1:].mean(dim=1)).tolist(),
        "loss": torch.cat([one.losses[:, 1:].mean(dim=1) for one in outcomes]).tolist(),
    }


def parts(measured: Subject, ids: Tensor, block: int, count: int) -> dict[str, Any]:
    """The model as it is, and with a part of what the neurons wrote as h_1 after a block (from 1)."""
    model: Any = measured.model
    wrote, element = written(measured, ids, block, count)
    table: Any = model.embed if isinstance(model, TransformerLM) else model.get_input_embeddings()
    embedding = table(ids[:, 0]).detach().float()  # (n, d)
    only = torch.zeros_like(wrote)
    only[:, element] = wrote[:, element]
    states = {
        "bare embedding": embedding,
        "all that they wrote": embedding + wrote,
        "the element alone": embedding + only,
        "all but the element": embedding + wrote - only,
    }

    def replaced(some: Tensor, state: Tensor) -> surgery.Outcome:
        def replace(h: Tensor) -> Tensor:
            h[:, 0] = state.to(h.dtype)
            return h

        return surgery.edit(model, some, "block", replace, [block - 1])

    texts, length = ids.split(TEXTS), ids.shape[1]
    untouched = [surgery.untouched(model, some) for some in texts]
    result = {"samples": len(ids), "neurons": count, "untouched": summed_up(untouched, length)}
    for case, state in states.items():
        pairs = zip(texts, state.split(TEXTS), strict=True)
        result[case] = summed_up([replaced(*pair) for pair in pairs], length)
    return result


def main() -> None:
    for name in sys.argv[1:]:
        own = name.startswith("laptop/")
        measured = subject(name) if own or name == "smollm2" else subject(name, dtype="bfloat16")
        ids = measured.inputs("natural", 32 if own else FEW, 64, first=usual_first(measured))
        for block in (1,) if own else WRITERS[measured.name]:
            title = name.removeprefix("laptop/") if own else measured.name
            keep("two_neurons", f"{title}, block {block}", parts(measured, ids, block, 2 - own))


if __name__ == "__main__":
    main()
