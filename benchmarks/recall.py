"""What a sink is worth beside the loss, into data/open_lms:

    python benchmarks/recall.py smollm2 gemma-3-270m

Four sections, of the numbers of single texts, so that a page can give intervals:

    recall   a number stands in a text of docstrings and is asked for: found or not, and the loss
    leaving  the loss by position, before and after the first key leaves a streaming cache
    cuts     the loss under the operations of open_lms.py, of which that keeps the means
    int8     the loss with the inputs of all linear layers in blocks rounded to 8 bits

Some four minutes a model on one core.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.nn.functional as F
from open_lms import FEW, add, usual_first
from torch import Tensor, nn

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import BOS, TEXT, Subject
from sinkutils.names import subject

LENGTHS = (128, 256, 512)
PROMPTS = 4  # of each length and depth
NAMES = ("Alice", "Robert", "Maria", "Thomas")
DEPTHS = (0.1, 0.35, 0.6, 0.85)  # where in a text the needle stands
NEEDLE, QUESTION = "\n{} keeps the number {} in a drawer.\n", "\nThe number that {} keeps is"
WINDOW = 128
BIN = 4  # positions of which `leaving` keeps the mean
AROUND = (97, 193)  # the positions that it keeps
TEXTS = 24


def encode(measured: Subject, text: str) -> list[int]:
    return measured.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt(
    measured: Subject, filler: list[int], depth: float, generator: random.Random
) -> tuple[list[int], int, int]:
    """A text of docstrings with a needle, a question and its answer, as long as the filler; and how
    many tokens the question and the answer have.
    """
    name, number = generator.choice(NAMES), generator.randint(10_000, 99_999)
    needle = encode(measured, NEEDLE.format(name, number))
    question, answer = encode(measured, QUESTION.format(name)), encode(measured, f" {number}")
    room = len(filler) - len(needle) - len(question) - len(answer)
    start = round(depth * room)
    ids = filler[:start] + needle + filler[start:room] + question + answer
    return ids, len(question), len(answer)


def recall(measured: Subject) -> dict[str, Any]:
    """Every prompt three times: with the sink, with x_1 hidden from all other queries, and with x_1
    dropped from the cache when the question begins. A number counts as recalled where each of its
    tokens is the most likely one.
    """
    first, rows = usual_first(measured), []
    for length in LENGTHS:
        fillers = measured.inputs("natural", len(DEPTHS) * PROMPTS, length, first=first).tolist()
        generator = random.Random(length)
        for index, filler in enumerate(fillers):
            depth = DEPTHS[index % len(DEPTHS)]
            tokens, question, answer = prompt(measured, filler, depth, generator)
            ids = torch.tensor([tokens])
            asked = length - answer - question + 1  # the question's first position
            outcomes = {
                "kept": surgery.untouched(measured.model, ids, last=answer),
                "hidden": surgery.hide(measured.model, ids, last=answer),
                "dropped": surgery.hide(measured.model, ids, since=asked, last=answer),
            }
            row: dict[str, Any] = {"T": length, "depth": depth}
            for name, outcome in outcomes.items():
                right = outcome.predicted == ids[:, -answer:]
                row[name] = [int(right.all()), round(outcome.loss, 4)]
            rows.append(row)
    return {"first": first, "prompts": len(rows), "rows": rows}


def leaving(measured: Subject) -> dict[str, Any]:
    """The loss of each text, by position: caches of 128 keys, without and with the first, and all keys."""
    first = usual_first(measured)
    ids = measured.inputs("natural", TEXTS, AROUND[1] - 1, first=first)
    outcomes = {
        f"{WINDOW} + 0": surgery.stream(measured.model, ids, WINDOW),
        f"{WINDOW - 1} + 1": surgery.stream(measured.model, ids, WINDOW - 1, 1),
        "full": surgery.untouched(measured.model, ids),
    }
    losses = {}
    for name, outcome in outcomes.items():
        around = outcome.losses[:, AROUND[0] - 2 :]  # position 2 stands first
        losses[name] = around.unflatten(1, (-1, BIN)).mean(dim=2).tolist()
    return {
        "first": first,
        "samples": TEXTS,
        "window": WINDOW,
        "from": AROUND[0],
        "bin": BIN,
        "loss": losses,
    }


def round_inputs(model: nn.Module, per_token: bool, exact: int) -> list[Any]:
    """Hooks that round what the blocks' linear layers read to 255 levels, one scale a text or a
    token.

    exact: how many first tokens are left as they are and do not set the scale.
    """

    def to_levels(_: nn.Module, args: tuple) -> tuple:
        kept, x = args[0][:, :exact], args[0][:, exact:]  # (B, T, n)
        step = x.abs().amax(dim=-1 if per_token else (1, 2), keepdim=True).clamp(min=1e-30) / 127
        return (torch.cat([kept, (x / step).round() * step], dim=1),)

    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [layer.register_forward_pre_hook(to_levels) for layer in layers]


def cuts(measured: Subject) -> dict[str, Any]:
    """The loss of each text under operations of which open_lms.py keeps the means, on the same texts."""
    model, first = measured.model, usual_first(measured)
    ids, plain = (measured.inputs("natural", FEW, 64, first=start) for start in (first, TEXT))
    donors = measured.inputs("natural", FEW, 64, seed=1, first=first)
    outcomes = {
        "untouched": surgery.untouched(model, ids),
        "hide": surgery.hide(model, ids),
        "plain": surgery.untouched(model, plain),
        "transplant": surgery.transplant(model, plain, donors),
        "transplant, v* = 0": surgery.transplant(model, plain, donors, zero_values_from=0),
    }
    losses = {name: outcome.losses.mean(dim=1).tolist() for name, outcome in outcomes.items()}
    return {"first": first, "samples": FEW, "T": 64, "loss": losses}


@torch.no_grad()
def loss_by_text(model: nn.Module, ids: Tensor) -> list[float]:
    """Nats a token of each text, by the model's plain forward pass."""
    losses = []
    for text in ids:
        logits = model(text[None]).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, text[1:]).item())
    return losses


def int8(measured: Subject) -> dict[str, Any]:
    """The loss of each text with activations in 8 bits: one scale a text, one a token, one a text without x_1."""
    first = usual_first(measured)
    ids: Tensor = measured.inputs("natural", TEXTS, 64, first=first)
    sink = measured.measure(ids, norms=False).sink()
    losses = {"exact": loss_by_text(measured.model, ids)}
    ways = {"a text": (False, 0), "a token": (True, 0), "a text, x_1 exact": (False, 1)}
    for name, (per_token, exact) in ways.items():
        handles = round_inputs(measured.model, per_token, exact)
        losses[name] = loss_by_text(measured.model, ids)
        for handle in handles:
            handle.remove()
    return {"first": first, "samples": TEXTS, "T": 64, "sink_1": sink, "loss": losses}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        assert usual_first(measured) in (TEXT, BOS)
        for section in (cuts, int8, leaving, recall):
            print(add(name, section.__name__, section(measured)), section.__name__, flush=True)


if __name__ == "__main__":
    main()
