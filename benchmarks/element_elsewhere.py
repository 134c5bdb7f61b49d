"""Which tokens besides the first carry SmolLM2's large element, and do heads rest on them? Into
data/element_elsewhere.json: python benchmarks/element_elsewhere.py smollm2

After block 3 the first token has a large element in dimension 507; a few later tokens have one as
well. A minute on one core.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from denominator import WRITERS
from first_tokens import even_shares
from inside import blocks, keep, passed
from open_lms import usual_first
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

TEXTS, LENGTH = 16, 128
LARGE = 100  # in the units of the states; the first token has some 700


def elsewhere(measured: Subject) -> dict[str, Any]:
    """The tokens that carry the element, by block that writes it, and the attention to them."""
    ids = measured.inputs("natural", TEXTS, LENGTH, first=usual_first(measured))
    states: dict[int, list[Tensor]] = {}
    handles = []
    for block in WRITERS[measured.name]:

        def look(_: Any, __: Any, output: Any, block: int = block) -> None:
            h = output if isinstance(output, Tensor) else output[0]
            states.setdefault(block, []).append(h)

        handles.append(blocks(measured.model)[block - 1].register_forward_hook(look))
    _, alpha = passed(measured, ids)  # (n, L, H, T)
    for handle in handles:
        handle.remove()
    even = even_shares(LENGTH)
    extra = ((alpha - even) / (1 - even)).mean(dim=2)  # (n, L, T)
    result: dict[str, Any] = {"samples": TEXTS, "T": LENGTH}
    for block, parts in states.items():
        h = torch.cat(parts).abs()
        dimension = int(h[:, 0].mean(dim=0).argmax())
        size = h[..., dimension]  # (n, T)
        later = torch.arange(LENGTH).expand_as(size) > 0
        half = torch.arange(LENGTH).expand_as(size) < LENGTH // 2  # late keys are also recent ones
        carries = (size > LARGE) & later
        earlier = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(dim=2)  # the token stood before
        tokens = Counter(measured.tokenizer.decode([token]) for token in ids[carries].tolist())
        same = torch.isin(ids, ids[carries].unique()) & later & ~carries
        after = extra[:, block : block + 6].mean(dim=1)  # in the six blocks behind
        result[f"block {block}"] = {
            "dimension": dimension,
            "at the first": float(size[:, 0].mean()),
            "texts with another": int(carries.any(dim=1).sum()),
            "tokens": tokens.most_common(12),
            "sizes": sorted(size[carries].tolist(), reverse=True)[:20],
            "places": sorted((carries.nonzero()[:, 1] + 1).tolist())[:40],
            "first of their kind in the text": int((carries & ~earlier).sum()),
            "same tokens without it": int(same.sum()),
            "of these, first of their kind": int((same & ~earlier).sum()),
            "extra attention": {
                "to the first": float(after[:, 0].mean()),
                "to another that carries it": mean(after[carries & half]),
                "most in a head": mean(
                    ((alpha - even) / (1 - even))[:, block : block + 6].amax(dim=(1, 2))[
                        carries & half
                    ]
                ),
                "to the same tokens without it": mean(after[same & half]),
                "to all others": mean(after[later & half & ~carries]),
            },
        }
    return result


def mean(x: Tensor) -> float | None:
    return float(x.mean()) if len(x) else None


def main() -> None:
    for name in sys.argv[1:]:
        keep("element_elsewhere", name, elsewhere(subject(name)))


if __name__ == "__main__":
    main()
