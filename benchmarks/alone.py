"""What makes a first token a sink: that it attends to itself alone? Into data/open_lms:

    python benchmarks/alone.py smollm2 gemma-3-270m QWEN'S_FOLDER

A token in the middle of a text is made to attend to itself alone in some blocks, and a first token
gets what attention gave to the same token in the middle. Notebooks 07 and 08 show what comes out.
A minute or two a model on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from open_lms import FEW, add, usual_first
from torch import Tensor, nn

from sinkutils.measuring import surgery
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import BOS, Subject
from sinkutils.measuring.report import Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.names import subject

T = 64
PLACE = 30  # of the token in the middle, from 1

# of the result; each holds several cases
PARTS = ("middle", "middle, x_1 hidden", "first token")
PARTS += ("another length", "of another text", "second token")

# change(layer, attention, x, output): of an attention layer with input x (B, T, d), its new output
Change = Callable[[int, Any, Tensor, Tensor], Tensor]


def attentions(model: Any) -> list[nn.Module]:
    """The attention of each block: of our own model, or of one in LLaMA's form."""
    if isinstance(model, TransformerLM):
        return [block.attention for block in model.blocks]
    return [block.self_attn for block in model.model.layers]


@contextmanager
def attending(model: nn.Module, ids: Tensor, layers: Iterable[int], change: Change) -> Iterator:
    """In some layers of a pass over texts as long as ids (B, T) `change` says what attention gives."""
    modules = attentions(model)
    with ExitStack() as hooks:
        for layer in layers:

            def hook(
                module: nn.Module, args: tuple, kwargs: dict, output: Any, layer: int = layer
            ) -> Any:
                own = isinstance(output, Tensor)
                x = args[0] if args else kwargs["hidden_states"]
                if x.shape[1] != ids.shape[1]:  # the short text of `measure`'s check
                    return output
                changed = change(layer, module, x, (output if own else output[0]).clone())
                return changed if own else (changed, *output[1:])

            handle = modules[layer].register_forward_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def own_value(attention: Any, x: Tensor) -> Tensor:
    """What attention returns at tokens x (B, d) that attend to themselves alone: their values."""
    if hasattr(attention, "qkv"):
        return attention.out(attention.qkv(x).chunk(3, dim=-1)[2])
    values = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))  # (B, H_kv, D)
    values = values.repeat_interleave(attention.num_key_value_groups, dim=1)  # (B, H, D)
    return attention.o_proj(values.flatten(1))


def itself_alone(place: int, _: int, attention: Any, x: Tensor, output: Tensor) -> Tensor:
    """The token at a place attends to itself alone."""
    output[:, place - 1] = own_value(attention, x[:, place - 1])
    return output


def another_alone(place: int, _: int, attention: Any, x: Tensor, output: Tensor) -> Tensor:
    """The token at a place attends to the one before it, and to nothing else."""
    output[:, place - 1] = own_value(attention, x[:, place - 2])
    return output


def as_long(
    place: int,
    lengths: dict[int, Tensor] | None,
    layer: int,
    attention: Any,
    x: Tensor,
    output: Tensor,
) -> Tensor:
    """What attention gives the token at a place gets other lengths (B,), or that of its own value."""
    if lengths is None:
        length = own_value(attention, x[:, place - 1]).norm(dim=-1)
    else:
        length = lengths[layer]
    row = output[:, place - 1]
    output[:, place - 1] = row * (length / row.norm(dim=-1))[:, None]
    return output


def seen_at(model: nn.Module, ids: Tensor, place: int) -> dict[int, Tensor]:
    """layer -> what attention returns at a place of ids, (B, d)."""
    seen: dict[int, Tensor] = {}

    def look(layer: int, _: Any, __: Tensor, output: Tensor) -> Tensor:
        seen[layer] = output[:, place - 1]
        return output

    with attending(model, ids, range(len(attentions(model))), look):
        measure(model, ids)
    return seen


def in_company(
    place: int, seen: dict[int, Tensor], layer: int, _: Any, __: Tensor, output: Tensor
) -> Tensor:
    """The token at a place gets what attention returned elsewhere."""
    output[:, place - 1] = seen[layer]
    return output


def about(report: Report, place: int) -> dict[str, Any]:
    """Sink_k of a place with its interval over texts; alpha_k and the element by block."""
    alpha = report.alpha[:, report.targets.index(place)]  # (samples, L, H)
    result = {
        "sink": report.sink(place),
        "interval": report.interval(place),
        "attention": alpha.mean(dim=(0, 2)).tolist(),
    }
    if report.hidden_peaks is not None:
        result["element"] = report.hidden_peaks[:, place - 1].tolist()
    return result


@torch.no_grad()
def alone(measured: Subject) -> dict[str, Any]:
    """By part and case, the sink on a token that is alone, and on one in company.

    middle: token 30. first token: token 30 put first, in company. second token: x_2 in company,
    with x_1 hidden.
    """
    model, first = measured.model, usual_first(measured)
    ids = measured.inputs("natural", FEW, PLACE - 1 + T, first=first)
    blocks = len(attentions(model))
    cases: dict[str, Iterable[int]] = {"untouched": [], "block 1": [0], "block 2": [1]}
    cases |= {"block 3": [2], "blocks 1 to 3": range(3)}
    cases |= {"blocks 1 to 4": range(4), "blocks 1 to 12": range(12)}
    cases |= {"all blocks": range(blocks)}
    result: dict[str, Any] = {"first": first, "samples": FEW, "T": T, "place": PLACE}
    for part in PARTS:
        result[part] = {}
    solitude = partial(itself_alone, PLACE)
    for case, layers in cases.items():
        with attending(model, ids, layers, solitude):
            plain = measure(model, ids, targets=(1, PLACE))
            hidden = surgery.hide(model, ids, since=PLACE, targets=(1, 2, PLACE)).report
        result["middle"][case] = about(plain, PLACE) | {"x_1": about(plain, 1)}
        result["middle, x_1 hidden"][case] = about(hidden, PLACE) | {"x_2": about(hidden, 2)}

    with attending(model, ids, range(12), partial(another_alone, PLACE)):
        plain = measure(model, ids, targets=(1, PLACE))
        hidden = surgery.hide(model, ids, since=PLACE, targets=(1, 2, PLACE)).report
    result["another alone"] = about(plain, PLACE) | {"x_1 hidden": about(hidden, PLACE)}

    if first == BOS:  # no other token than the BOS is a sink when it comes first
        return result
    cut = ids[:, PLACE - 1 :]  # the same token first
    company = partial(in_company, 1, seen_at(model, ids, PLACE))
    for case, layers in cases.items():
        with attending(model, cut, layers, company):
            result["first token"][case] = about(measure(model, cut), 1)

    # The direction kept, the length changed: of token 30, and of the first token.
    lengths = {layer: row.norm(dim=-1) for layer, row in seen_at(model, ids, PLACE).items()}
    for place, texts, wanted in ((PLACE, ids, None), (1, cut, lengths)):
        with attending(model, texts, range(12), partial(as_long, place, wanted)):
            report = measure(model, texts, targets=(place,))
        result["another length"][f"token {place}"] = about(report, place)

    # Two controls: what the same place got in another text.
    for place, texts in ((1, cut), (PLACE, ids)):
        seen = seen_at(model, texts, place)
        other = {layer: output.roll(1, dims=0) for layer, output in seen.items()}
        with attending(model, texts, range(12), partial(in_company, place, other)):
            report = measure(model, texts, targets=(place,))
        result["of another text"][f"token {place}"] = about(report, place)

    # x_1 hidden from all others: x_2 attends to itself alone, or gets what it got beside x_1.
    ids = ids[:, :T]
    company = partial(in_company, 2, seen_at(model, ids, 2))
    for case, layers in cases.items():
        with attending(model, ids, layers, company):
            # With the logits of one token alone all texts fit into one batch, as `seen_at` has them.
            report = surgery.hide(model, ids, last=1).report
        result["second token"][case] = about(report, 2)
    return result


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        print(add(measured.name, "alone", alone(measured)))


if __name__ == "__main__":
    main()
