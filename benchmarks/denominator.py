"""The large element and the norm's denominator apart, into data/denominator.json:

    python benchmarks/denominator.py laptop/fixed_1/0 .. laptop/prefix_5/0 smollm2 QWEN'S_FOLDER

An element at zero changes two things that the next block reads: the element itself, and the size
that its RMSNorm divides h_1 by. Here each is changed alone, in the norm in front of the attention
of the next block and nowhere else. Seconds a small model, a minute or two a real one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from inside import blocks, excess, keep, passed
from open_lms import FEW, usual_first
from torch import Tensor, nn

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject

# Is the element read? Is it in the denominator?
CASES = {
    "untouched": (True, True),
    "element gone": (False, True),
    "denominator gone": (True, False),
    "both gone": (False, False),
}
# After which blocks, from 1, a real model's element is cut; our own: after block 1.
WRITERS = {"smollm2": (3, 12), "qwen2.5-coder-0.5b": (3,)}


def states_after(measured: Subject, ids: Tensor, block: int) -> Tensor:
    """The hidden states that a block (from 1) passes on, (n, T, d)."""
    seen: list[Tensor] = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    handle = blocks(measured.model)[block - 1].register_forward_hook(look)
    passed(measured, ids)
    handle.remove()
    return torch.cat(seen)


def norm_after(model: Any, block: int) -> nn.Module:
    """The norm in front of the attention that reads what a block (from 1) passes on."""
    following = blocks(model)[block]
    return following.norm_1 if hasattr(following, "norm_1") else following.input_layernorm


def apart(measured: Subject, ids: Tensor, block: int) -> dict[str, Any]:
    """By case the extra attention of the next block and the loss of tokens 3 to T, of each text."""
    h_1 = states_after(measured, ids, block)[:, 0]
    dimension = int(h_1.abs().mean(dim=0).argmax())
    result: dict[str, Any] = {"dimension": dimension, "samples": len(ids)}
    for case, (read, in_denominator) in CASES.items():

        def change(
            _: nn.Module,
            args: tuple,
            output: Tensor,
            read: bool = read,
            in_denominator: bool = in_denominator,
        ) -> Tensor:
            h, output = args[0][:, 0].float(), output.clone()
            if not in_denominator:
                rest = h.clone()
                rest[:, dimension] = 0
                output[:, 0] *= (h.norm(dim=-1) / rest.norm(dim=-1))[:, None].to(output.dtype)
            if not read:
                output[:, 0, dimension] = 0
            return output

        handle = norm_after(measured.model, block).register_forward_hook(change)
        losses, alpha = passed(measured, ids)
        handle.remove()
        extra = excess(alpha[:, block, :, 0].mean(dim=1), ids.shape[1])
        result[case] = {"extra": extra.tolist(), "loss": losses[:, 1:].mean(dim=1).tolist()}
    rest = h_1.clone()
    rest[:, dimension] = 0
    result["divides by"] = float((h_1.norm(dim=-1) / rest.norm(dim=-1)).mean())
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        own = name.startswith("laptop/")
        ids = measured.inputs("natural", 32 if own else FEW, 64, first=usual_first(measured))
        for block in (1,) if own else WRITERS[measured.name]:
            title = name.removeprefix("laptop/") if own else measured.name
            keep("denominator", f"{title}, block {block + 1}", apart(measured, ids, block))


if __name__ == "__main__":
    main()
