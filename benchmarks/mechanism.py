"""How SmolLM2's sink is made, into data/open_lms: python benchmarks/mechanism.py smollm2

The surgery of notebook 07b, which does it live on the study's own models. A minute or two on one
core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from open_lms import FEW, add, usual_first
from torch import Tensor

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

# The blocks, from 0, behind which an element of h_1 is large: SmolLM2's third and twelfth.
WRITERS = (2, 11)


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
    others = seen[-1][:, 1:]  # (B, T - 1, n)
    weights: Any = measured.model.model.layers[block].mlp.down_proj.weight.detach()  # type: ignore[union-attr, index]
    written = (neurons * weights[dimension]).mean(dim=0)
    largest = written.abs().topk(5).indices
    two = largest[:2]
    return {
        "dimension": dimension,
        "neurons": largest.tolist(),
        "written": written[largest].tolist(),
        "all neurons": written.sum().item(),
        # the mean size of what each writes there at other tokens
        "elsewhere": (others * weights[dimension]).abs().mean(dim=(0, 1))[largest].tolist(),
        "h_1 of the two": neurons[:, two]
        @ weights[:, two].T,  # (B, d), what both write in all dimensions
    }


@contextmanager
def given(
    model: Any, layers: Iterable[int], projections: Sequence[str], change: Callable
) -> Iterator:
    """In some layers a projection of attention returns change((layer, projection), output)."""
    with ExitStack() as hooks:
        for layer, projection in product(layers, projections):
            module = model.model.layers[layer].self_attn.get_submodule(projection)

            def hook(_: Any, __: Any, output: Tensor, key: tuple = (layer, projection)) -> Tensor:
                return change(key, output)

            hooks.callback(module.register_forward_hook(hook).remove)
        yield


def control(
    model: Any, ids: Tensor, block: int, changes: dict[str, Callable[[Tensor], Tensor]]
) -> dict[str, Any]:
    """The loss under a change of h_1 if later blocks keep the old k_1, the old v_1, or both.

    With both no token but x_1 notices the change: the others read x_1 through these two only.
    """
    old: dict[tuple, Tensor] = {}
    later = range(block + 1, len(model.model.layers))

    def look(key: tuple, output: Tensor) -> Tensor:
        if output.shape[:2] == ids.shape:  # not the short text of `measure`'s check
            old[key] = output[:, :1]
        return output

    def put_back(key: tuple, output: Tensor) -> Tensor:
        if output.shape[:2] != ids.shape:
            return output
        return torch.cat([old[key], output[:, 1:]], dim=1)

    projections = {"old key": ["k_proj"], "old value": ["v_proj"], "both": ["k_proj", "v_proj"]}
    with given(model, later, projections["both"], look):
        surgery.untouched(model, ids)
    result: dict[str, Any] = {}
    for case, change in changes.items():
        result[case] = {}
        for kept, names in projections.items():
            with given(model, later, names, put_back):
                outcome = surgery.edit(model, ids, "block", change, [block])
            result[case][kept] = numbers(outcome)
    return result


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

        changes = {
            "element halved": scale(dimension, 0.5),
            "element at zero": scale(dimension, 0.0),
        }
        result[f"block {block + 1}"] = {
            "writers": written,
            "element halved": numbers(
                surgery.edit(model, ids, "block", changes["element halved"], [block])
            ),
            "element at zero": numbers(
                surgery.edit(model, ids, "block", changes["element at zero"], [block])
            ),
            "control": control(model, ids, block, changes),
            "bare embedding": numbers(surgery.edit(model, ids, "block", bare, [block])),
            "bare embedding and two neurons": numbers(
                surgery.edit(model, ids, "block", pair_alone, [block])
            ),
        }
    return result


def last_blocks(measured: Subject) -> dict[str, Any]:
    """What the last blocks do to the element, with its sign, after the cuts of `mechanism`.

    By case: the element after each of the last four blocks, as a share of what block 12 wrote in
    the untouched model; the attention of the last block; and the same with the element put back,
    after the last block but one, to what it is there in the untouched model.
    """
    model = measured.model
    ids = measured.inputs("natural", FEW, 64, first=usual_first(measured))
    elements: Any = surgery.untouched(model, ids).report.first_elements  # (L, d)
    blocks = len(elements)
    dimension = int(elements[WRITERS[1]].argmax())

    def passed(
        cut: int | None, factor: float, back: Tensor | None = None
    ) -> tuple[list[Tensor], float]:
        """The element after each block, (B,) each, and the attention of the last block."""
        seen: list[Tensor] = []

        def change(h: Tensor) -> Tensor:
            block = len(seen)
            if block == cut:
                h[:, 0, dimension] *= factor
            if back is not None and block == blocks - 2:
                h[:, 0, dimension] = back
            seen.append(h[:, 0, dimension])
            return h

        outcome = surgery.edit(model, ids, "block", change)
        return seen, numbers(outcome)["attention"][-1]

    usual, _ = passed(None, 1)
    written = usual[WRITERS[1]].mean()
    result = {}
    cases: list[tuple[str, int | None, float]] = [("untouched", None, 1.0)]
    for block, (words, factor) in product(WRITERS, (("halved", 0.5), ("at zero", 0.0))):
        cases.append((f"{words} after block {block + 1}", block, factor))
    for name, cut, factor in cases:
        seen, attention = passed(cut, factor)
        _, put_back = passed(cut, factor, usual[-2])
        left = [float(element.mean() / written) for element in seen[-4:]]
        result[name] = {"element": left, "attention": attention, "put back": put_back}
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        print(add(name, "mechanism", mechanism(measured)))
        print(add(name, "last_blocks", last_blocks(measured)))


if __name__ == "__main__":
    main()
