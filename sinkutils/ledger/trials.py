"""Trials on the weights that records kept: a number a seed, which the rules judge like any other."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.config import from_dict

if TYPE_CHECKING:
    from sinkutils.measuring.own import Subject
    from sinkutils.measuring.report import Report

SEQUENCES = 50
EDITED = (5, 10, 15, 20, 25, 30)  # t of Table 7; its sixth column is headed 25 again


def _repeat(own: Subject) -> float:
    """Excess alpha_1 on one token repeated (Table 1 left)."""
    return own.measure(own.inputs("repeat", SEQUENCES, own.length), norms=False).excess(1)


def _window_first(own: Subject) -> float:
    """Fig. 6 middle: mean excess of the first key that each query t > w sees, t - w + 1, at T = C; uniform is 1 / w.

    NaN, which counts as not held, for a model without a window, such as the base.
    """
    shape: Any = own.model.config
    window = shape.attention.window
    if window is None:
        return math.nan
    heads = [(layer, head) for layer in range(shape.num_layers) for head in range(shape.num_heads)]
    ids = own.inputs("random", SEQUENCES, own.context)
    report = own.measure(ids, norms=False, heads=heads, keep=("map",))
    maps = torch.stack([kept.map for kept in report.kept.values() if kept.map is not None])
    first = maps.diagonal(offset=1 - window, dim1=-2, dim2=-1)[..., 1:]  # A[t, t - w + 1] for t > w
    return float((first.mean() - 1 / window) / (1 - 1 / window))


def sink_token_ratios(model: nn.Module, ids: Tensor) -> list[float]:
    """||h|| at the sink token x* over the mean of x_1..x_T, for each block, mean over ids (samples, T) (Fig. 7 middle).

    What `measure` gives has x_1 as its first position; here x* is the first of T + 1. Raises ValueError for a model
    without a sink token.
    """
    from sinkutils.measuring.report import norm_ratio

    if not isinstance(model, TransformerLM) or not model.config.sink_token:
        raise ValueError("model must be a TransformerLM with a sink token: LMConfig(sink_token=True)")
    norms: list[list[float]] = []  # a row of means over samples for each block

    def see(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> None:
        norms.append(torch.linalg.vector_norm(output[0], dim=-1).mean(dim=0).tolist())

    with torch.no_grad(), ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_hook(see))
        model.hidden(ids.to(model.embed.weight.device))
    return norm_ratio(norms)


def untrained_ratio(model: str, length: int, name: str, positions: tuple[int, ...]) -> float:
    """The largest norm ratio at these positions of a model before its first step.

    model: the LMConfig of a record, as JSON. x_1 sees only itself, so that its state is not a mean of others': with
    softmax its norm is about three times theirs without any training.
    """
    report = _untrained(model, length)
    return max(max(report.norm_ratio(name, k)) for k in positions)


def untrained_peak(model: str, length: int) -> float:
    """The largest of `Report.hidden_peaks` before the last block, of a model before its first step."""
    peaks = _untrained(model, length).hidden_peaks
    assert peaks is not None
    return float(peaks[: max(1, len(peaks) - 1)].max())


@lru_cache(maxsize=512)
def _untrained(model: str, length: int) -> Report:
    """The report of a model before its first step, on 2 texts of random tokens."""
    from sinkutils.measuring.measure import measure

    untrained = TransformerLM(from_dict(LMConfig, json.loads(model))).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(untrained.config.vocab_size, (2, length), generator=generator)
    return measure(untrained, ids, targets=(1,))


def _star_hidden(own: Subject) -> float:
    """The largest of `sink_token_ratios` before the last block, over that of an untrained model, whose x* stands out a
    little too because it sees only itself; any input will do.
    """
    ids = own.inputs("random", SEQUENCES, own.length)
    models = (own.model, TransformerLM(own.model.config))  # type: ignore[arg-type]
    trained, untrained = (max(sink_token_ratios(model, ids)[:-1]) for model in models)
    return trained / max(1.0, untrained)


def _edited(own: Subject, swap: bool) -> float:
    """Table 7 on one token repeated, the weakest of its columns: with p_1 replaced by p_t, the largest share of the
    excess on x_1 that is left; with both swapped, the least excess of alpha_t over alpha_1.
    """
    ids = own.inputs("repeat", SEQUENCES, own.length)
    before = own.measure(ids, norms=False).excess(1)
    seen = []
    for t in EDITED:
        model: Any = own.model
        table = model.position_embedding.detach()
        before = table[[0, t - 1]]  # a copy
        table[[0, t - 1]] = before[[1, 0] if swap else [1, 1]]
        report = own.measure(ids, targets=(1, t), norms=False)
        table[[0, t - 1]] = before
        seen.append(report.excess(t) - report.excess(1) if swap else report.excess(1) / before)
    return min(seen) if swap else max(seen)


def _unbiased(own: Subject) -> Subject:
    """The same weights in a model without the biases k*, v* (Section 7.3)."""
    shape: Any = own.model.config
    plain = TransformerLM(dataclasses.replace(shape, attention=dataclasses.replace(shape.attention, bias="none")))
    plain.load_state_dict(own.model.state_dict(), strict=False)
    return dataclasses.replace(own, model=plain.eval())


def _without_bias(own: Subject) -> float:
    """Excess alpha_1 on natural text after the biases are taken away."""
    return _unbiased(own).measure(own.inputs("natural", SEQUENCES, own.length), norms=False).excess(1)


def _loss_without_bias(own: Subject) -> float:
    """What the loss on natural text rises by when the biases are taken away, in nats a token."""
    ids = own.inputs("natural", SEQUENCES, own.length)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()))

    return loss(_unbiased(own).model) - loss(own.model)


_TRIALS: dict[str, Callable[[Subject], float]] = {
    "repeat": _repeat,
    "window_first": _window_first,
    "star_hidden": _star_hidden,
    "replaced": lambda own: _edited(own, swap=False),
    "swapped": lambda own: _edited(own, swap=True),
    "without_bias": _without_bias,
    "loss_without_bias": _loss_without_bias,
}


@lru_cache
def trial(name: str, folder: Path, written: int) -> float:
    """The number of a trial on the weights of a record; `written`: when, so that new ones are tried anew."""
    from sinkutils.measuring.own import subject
    from sinkutils.training.trainer import one_thread

    with one_thread(torch.device("cpu")):  # too small for several
        return _TRIALS[name](subject(str(folder), "cpu"))
