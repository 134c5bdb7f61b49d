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


def parts(measured: Subject, ids: Tensor, block: int, count: int) -> dict[str, Any]:
    """By what h_1 is after a block (from 1): the extra attention by block, the value, and the loss.

    The loss is that of tokens 3 to T, of each text.
    """
    model = measured.model
    wrote, element = written(measured, ids, block, count)
    embedding = model.get_input_embeddings()(ids[:, 0]).detach().float()  # type: ignore[operator]
    only = torch.zeros_like(wrote)
    only[:, element] = wrote[:, element]
    added = {
        "bare embedding": torch.zeros_like(wrote),
        "all that they wrote": wrote,
        "the element alone": only,
        "all but the element": wrote - only,
    }

    def outcome_of(outcome: surgery.Outcome) -> dict[str, Any]:
        values: Any = outcome.report.value_norms  # (L, T)
        alpha = outcome.report.alpha[:, 0].mean(dim=2)  # (samples, L)
        return {
            "extra": excess(alpha, ids.shape[1]).mean(dim=0).tolist(),
            "value": (values[:, 0] / values[:, 1:].mean(dim=1)).tolist(),
            "loss": outcome.losses[:, 1:].mean(dim=1).tolist(),
        }

    result: dict[str, Any] = {"neurons": count, "samples": len(ids)}
    result["untouched"] = outcome_of(surgery.untouched(model, ids))
    for case, part in added.items():

        def replace(h: Tensor, part: Tensor = part) -> Tensor:
            h[:, 0] = (embedding + part).to(h.dtype)
            return h

        result[case] = outcome_of(surgery.edit(model, ids, "block", replace, [block - 1]))
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
