"""Is what marks a first token one direction? Into data/pushed.json: python benchmarks/pushed.py smollm2

What attention gives token 30 is moved in some blocks: by the mean first token's output less the mean
other token's, both of other texts, or by a random vector of the same length. Notebook 07a has the
cut beside it, where token 30 attends to itself alone. Two minutes on one core.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from alone import PLACE, T, about, attending, attentions
from inside import keep
from open_lms import usual_first
from torch import Tensor

from sinkutils.measuring import surgery
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

TEXTS = 12
DRAWS = 2  # random vectors
BLOCKS = (3, 12)  # the first so many are changed


def outputs(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """layer -> what attention returns, (B, T, d)."""
    seen: dict[int, Tensor] = {}

    def look(layer: int, _: Any, __: Tensor, output: Tensor) -> Tensor:
        seen[layer] = output
        return output

    with attending(model, ids, range(len(attentions(model))), look):
        model(ids, use_cache=False, logits_to_keep=1)
    return seen


def moved(by: dict[int, Tensor], layer: int, _: Any, __: Tensor, output: Tensor) -> Tensor:
    output[:, PLACE - 1] += by[layer]
    return output


@torch.no_grad()
def pushed(measured: Subject) -> dict[str, Any]:
    """By blocks and push: the sink on token 30, beside x_1 and with x_1 hidden."""
    model = measured.model
    ids = measured.inputs("natural", 2 * TEXTS, PLACE - 1 + T, first=usual_first(measured))
    seen = outputs(model, ids[TEXTS:])
    others = {layer: output[:, 8:].mean(dim=(0, 1)) for layer, output in seen.items()}
    toward = {layer: output[:, 0].mean(dim=0) - others[layer] for layer, output in seen.items()}
    # How much of a text's own first output, less the mean token's, lies along that direction.
    shares = []
    for layer in range(BLOCKS[-1]):
        own = seen[layer][:, 0] - others[layer]
        shares.append(float(torch.cosine_similarity(own, toward[layer][None]).mean()))
    generator = torch.Generator().manual_seed(0)
    pushes = {"first minus other": toward}
    for draw in range(DRAWS):
        pushes[f"random {draw + 1}"] = {
            layer: torch.nn.functional.normalize(torch.randn(len(d), generator=generator), dim=0)
            * d.norm()
            for layer, d in toward.items()
        }
    length = [float(seen[layer][:, PLACE - 1].norm(dim=-1).mean()) for layer in range(BLOCKS[-1])]
    result: dict[str, Any] = {
        "samples": TEXTS,
        "cosine of a first token to the mean one": shares,
        "length of the push": [float(toward[layer].norm()) for layer in range(BLOCKS[-1])],
        "length at token 30": length,
    }
    texts = ids[:TEXTS]
    for count in BLOCKS:
        for name, by in pushes.items():
            with attending(model, texts, range(count), partial(moved, by)):
                plain = measure(model, texts, targets=(1, PLACE))
                hidden = surgery.hide(
                    model, texts, since=PLACE, last=1, targets=(1, 2, PLACE)
                ).report
            result[f"{name}, blocks 1 to {count}"] = about(plain, PLACE) | {
                "x_1": plain.sink(1),
                "x_1 hidden": about(hidden, PLACE),
            }
            print(name, count, plain.sink(PLACE), hidden.sink(PLACE), flush=True)
    return result


def main() -> None:
    for name in sys.argv[1:]:
        keep("pushed", name, pushed(subject(name)))


if __name__ == "__main__":
    main()
