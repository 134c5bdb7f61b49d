"""Is the first token's state one number? Into data/one_number.json:

    python benchmarks/one_number.py laptop/fixed_1/0 .. laptop/prefix_5/0 smollm2 gemma-3-270m QWEN'S_FOLDER

After each block in turn h_1 keeps its largest number alone, or all but this number. After the block
that writes it, the number also gets the other sign, ten times its size, or another place. Some
minutes a real model on one core, seconds a small one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from denominator import WRITERS
from inside import blocks, keep
from open_lms import FEW, usual_first
from torch import Tensor
from two_neurons import TEXTS, summed_up

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import Subject
from sinkutils.names import subject


def alone(state: Tensor, element: int) -> Tensor:
    """A state, (n, d), with zero in place of all its numbers but one."""
    kept = torch.zeros_like(state)
    kept[:, element] = state[:, element]
    return kept


def another_place(state: Tensor, element: int) -> Tensor:
    """A state of zeros with its largest number half of the width away from where it was."""
    return alone(state, element).roll(state.shape[-1] // 2, dims=-1)


CASES = {
    "the element alone": alone,
    "all but the element": lambda state, element: state - alone(state, element),
}
AT_THE_WRITER = {
    "the other sign": lambda state, element: -alone(state, element),
    "ten times as large": lambda state, element: 10 * alone(state, element),
    "another place": another_place,
}


def one_number(measured: Subject, ids: Tensor, block: int, cases: dict[str, Any]) -> dict[str, Any]:
    """By case, what follows if h_1 after a block (from 1) is changed; and which number is its largest."""
    model: Any = measured.model
    texts, length = ids.split(TEXTS), ids.shape[1]
    elements: Any = surgery.untouched(model, texts[0]).report.first_elements  # (L, d)
    element = int(elements[block - 1].argmax())
    result: dict[str, Any] = {"element": element}
    for case, change in cases.items():

        def replace(h: Tensor, change: Any = change) -> Tensor:
            h[:, 0] = change(h[:, 0].clone(), element)
            return h

        outcomes = [surgery.edit(model, some, "block", replace, [block - 1]) for some in texts]
        result[case] = summed_up(outcomes, length)
    return result


def main() -> None:
    for name in sys.argv[1:]:
        own = name.startswith("laptop/")
        half = not own and name not in ("smollm2", "gemma-3-270m")
        measured = subject(name, dtype="bfloat16") if half else subject(name)
        ids = measured.inputs("natural", 32 if own else FEW, 64, first=usual_first(measured))
        model: Any = measured.model
        texts = ids.split(TEXTS)
        outcomes = [surgery.untouched(model, some) for some in texts]
        untouched = summed_up(outcomes, ids.shape[1])
        elements: Any = torch.stack([one.report.first_elements for one in outcomes]).mean(dim=0)
        untouched["element"] = elements.amax(dim=1).tolist()  # by block, x median
        found: dict[str, Any] = {"samples": len(ids), "untouched": untouched}
        writers = (1,) if own else WRITERS.get(measured.name, ())
        for block in range(1, len(blocks(model))):
            more = AT_THE_WRITER if block in writers else {}
            found[f"block {block}"] = one_number(measured, ids, block, CASES | more)
        keep("one_number", name.removeprefix("laptop/") if own else measured.name, found)


if __name__ == "__main__":
    main()
