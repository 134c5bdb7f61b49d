"""How SmolLM2's sink is made, into data/open_lms: python benchmarks/mechanism.py smollm2

The surgery of notebook 07, which does it live on the study's own models. A minute or two on one
core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from open_lms import FEW, add, usual_first
from torch import Tensor

from sinkutils.measuring import surgery
from sinkutils.measuring.subject import Subject, subject

WRITERS = (
    2,
    11,
)  # the blocks, from 0, behind which an element of h_1 is large: SmolLM2's third and twelfth


def numbers(outcome: surgery.Outcome) -> dict[str, Any]:
    """By block the attention to x_1, and |v_1| over the others'; by text the loss of x_2 and of all later tokens."""
    alpha = outcome.report.alpha[:, 0]  # (samples, L, H)
    values: Any = outcome.report.value_norms  # (L, T)
    return {
        "attention": alpha.mean(dim=(0, 2)).tolist(),
        "value": (values[:, 0] / values[:, 1:].mean(dim=1)).tolist(),
        "loss of x_2": outcome.losses[:, 0].tolist(),
        "loss of later tokens": outcome.losses[:, 1:].mean(dim=1).tolist(),
    }


def writers(measured: Subject, ids: Tensor, block: int, dimension: int) -> dict[str, Any]:
    """Which neurons of a block's FFN write a dimension of h_1: the largest, and the sum over all."""
    seen: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    surgery.edit(measured.model, ids, "neurons", look, [block])
    neurons = seen[-1][:, 0]  # (B, n), of x_1
    weights: Any = measured.model.model.layers[block].mlp.down_proj.weight.detach()  # type: ignore[union-attr, index]
    written = (neurons * weights[dimension]).mean(dim=0)
    largest = written.abs().topk(5).indices
    two = largest[:2]
    return {
        "dimension": dimension,
        "neurons": largest.tolist(),
        "written": written[largest].tolist(),
        "all neurons": written.sum().item(),
        "h_1 of the two": neurons[:, two]
        @ weights[:, two].T,  # (B, d), what both write in all dimensions
    }


def mechanism(measured: Subject) -> dict[str, Any]:
    """The model as it is and under each operation, on 16 texts of 64 tokens."""
    model, first = measured.model, usual_first(measured)
    ids = measured.inputs("natural", FEW, 64, first=first)
    plain = surgery.untouched(model, ids)
    embedding = model.get_input_embeddings()(ids[:, 0]).detach()  # type: ignore[operator]
    elements: Any = plain.report.first_elements  # (L, d)
    result: dict[str, Any] = {
        "first": first,
        "samples": FEW,
        "T": 64,
        "element": elements.amax(dim=1).tolist(),
        "untouched": numbers(plain),
        "mean query off": numbers(
            surgery.edit(model, ids, "query", lambda q: q - q.mean(dim=(0, 2), keepdim=True))
        ),
    }

    def scale(dimension: int, factor: float) -> Callable[[Tensor], Tensor]:
        def change(h: Tensor) -> Tensor:
            h[:, 0, dimension] *= factor
            return h

        return change

    def bare(h: Tensor) -> Tensor:
        h[:, 0] = embedding
        return h

    for block in WRITERS:
        dimension = int(elements[block].argmax())
        written = writers(measured, ids, block, dimension)
        # SmolLM2's elements are the work of two neurons (the study's own models need one).
        pair = written.pop("h_1 of the two")

        def pair_alone(h: Tensor, pair: Tensor = pair) -> Tensor:
            h[:, 0] = embedding + pair
            return h

        result[f"block {block + 1}"] = {
            "writers": written,
            "element halved": numbers(
                surgery.edit(model, ids, "block", scale(dimension, 0.5), [block])
            ),
            "element at zero": numbers(
                surgery.edit(model, ids, "block", scale(dimension, 0.0), [block])
            ),
            "bare embedding": numbers(surgery.edit(model, ids, "block", bare, [block])),
            "bare embedding and two neurons": numbers(
                surgery.edit(model, ids, "block", pair_alone, [block])
            ),
        }
    return result


def main() -> None:
    for name in sys.argv[1:]:
        print(add(name, "mechanism", mechanism(subject(name))))


if __name__ == "__main__":
    main()
