"""What a model's own special tokens do in front of a text, and where its attention then goes, into
data/open_lms, as `first_tokens`:

    python benchmarks/first_tokens.py smollm2 gemma-3-270m QWEN'S_FOLDER

Every special token in front, a line break, and nothing. By text: Sink_1, the position with the most
extra attention, the largest element, and the loss of the text itself. Some seconds a token.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from inside import blocks, passed
from open_lms import FEW, add
from torch import Tensor

from sinkutils.measuring.probes import TEXT, Subject
from sinkutils.measuring.tally import lower_median
from sinkutils.names import subject

SINK = 0.3
NOTHING = "nothing"


@contextmanager
def watching(model: Any) -> Iterator[dict[str, dict[int, list[Tensor]]]]:
    """By block: the largest |element| at each position over the text's median, and |v|; (B, T) each."""
    seen: dict[str, dict[int, list[Tensor]]] = {"element": {}, "value": {}}
    with ExitStack() as hooks:
        for layer, block in enumerate(blocks(model)):

            def states(_: Any, __: Any, output: Any, layer: int = layer) -> None:
                h = (output if isinstance(output, Tensor) else output[0]).abs().float()
                median = lower_median(h.flatten(1))[:, None]
                seen["element"].setdefault(layer, []).append(h.amax(dim=2) / median)

            def values(_: Any, __: Any, v: Tensor, layer: int = layer) -> None:
                seen["value"].setdefault(layer, []).append(v.float().norm(dim=-1))

            hooks.callback(block.register_forward_hook(states).remove)
            hooks.callback(block.self_attn.v_proj.register_forward_hook(values).remove)
        yield seen


def even_shares(length: int) -> Tensor:
    """alpha_k of an even spread, for each key k, (T,)."""
    shares = 1 / torch.arange(1, length + 1)
    return shares.flip(0).cumsum(0).flip(0) / torch.arange(length, 0, -1)


def seen_with(measured: Subject, ids: Tensor, skipped: int) -> dict[str, Any]:
    """What the texts ids show. skipped: how many tokens in front are not text."""
    with watching(measured.model) as seen:
        losses, alpha = passed(measured, ids)  # alpha (n, L, H, T)
    length = ids.shape[1]
    even = even_shares(length)
    extra = (alpha - even) / (1 - even)
    half = extra.shape[1] // 4  # the first quarter of the blocks looks around in all models
    by_key = extra[:, half:, :, : length // 2].mean(
        dim=(1, 2)
    )  # (n, T / 2): late keys are recent ones
    most, places = by_key.max(dim=1)
    tokens = [measured.tokenizer.decode([ids[row, place]]) for row, place in enumerate(places)]
    element = torch.stack(
        [torch.cat(parts) for parts in seen["element"].values()], dim=1
    )  # (n, L, T)
    norms = torch.stack([torch.cat(parts) for parts in seen["value"].values()], dim=1)
    value = norms[..., 0] / norms[..., 1:].mean(dim=-1)
    texts = losses[:, skipped + 1 :]  # from the text's third token on
    return {
        "sink": {
            str(k): (100 * (alpha[..., k - 1] > SINK).float()).mean(dim=(1, 2)).tolist()
            for k in (1, 2, 3)
        },
        "by block": alpha[..., 0].mean(dim=(0, 2)).tolist(),
        "place of the most": (places + 1).tolist(),
        "extra there": most.tolist(),
        "tokens there": Counter(tokens).most_common(6),
        "element at 1": element[:, :-1, 0].mean(dim=0).tolist(),
        "element there": element[torch.arange(len(ids)), :-1, places].amax(dim=1).tolist(),
        "value": value.mean(dim=0).tolist(),
        "loss": texts.mean(dim=1).tolist(),
    }


def first_tokens(measured: Subject, n: int = FEW, few: int = FEW) -> dict[str, Any]:
    """By what stands in front: the numbers of `seen_with`. few: texts of the less known tokens."""
    ids = measured.inputs("natural", n, 64, first=TEXT)[:, :-1]
    result: dict[str, Any] = {"T": 64, NOTHING: seen_with(measured, ids, 0)}
    line_break = measured.tokenizer.encode("\n", add_special_tokens=False)[-1]
    special = sorted({*measured.tokenizer.all_special_ids, *added(measured.tokenizer)})
    for token in [line_break, *special]:
        name = measured.tokenizer.convert_ids_to_tokens(token)
        texts = ids[: n if token in (line_break, *special[:3]) else few]
        front = torch.full_like(texts[:, :1], token)
        result[name] = seen_with(measured, torch.cat([front, texts], dim=1), 1)
        print(name, flush=True)
    return result


def added(tokenizer: Any) -> list[int]:
    """The special tokens that are no part of the vocabulary's words; of many equal ones, none."""
    found = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return found if len(found) < 40 else []


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        print(add(measured.name, "first_tokens", first_tokens(measured)))


if __name__ == "__main__":
    main()
