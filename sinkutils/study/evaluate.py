"""What is measured on a model in training: a point of its curve, and more at its end.

`destinations` measures to which kinds of keys the attention goes. `gradient_norms` measures at
which positions the gradient of the loss gathers (Chen and Yao 2026).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import BY_POSITION, Report
from sinkutils.model.decoder import Attention, TransformerLM
from sinkutils.study.config import Json
from sinkutils.study.record import rounded

# Which positions k are measured, and what is kept of them: the last report has Sink_k for k = 1 to
# SINK_TARGETS (the longest prefix in the paper is 10) at each of EPSILONS. Each point of the curve
# has Sink_k for k in CURVE_TARGETS, and alpha_k of every head for k = 1 to ALPHA_TARGETS.
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)
SINK_TARGETS = 10
CURVE_TARGETS = (1, 2, 3, 4)
ALPHA_TARGETS = 3
NORM_DIGITS = 3  # the number of significant digits of norms in a record
NOT_KEPT = ("interval", "embedding_norms", "skipped", "name")  # parts of a report
FIRST_QUERY = 3  # for earlier queries, the first, the previous and the own token are not distinct


def sinks(report: Report) -> Json:
    """The sinks of a point of the curve: Sink_k in percent, excess, and numbers of x_1 by block.

    The numbers of x_1 are its largest element and its value's norm, as ratios (Section 3.1).
    """
    numbers: Json = {}
    for k in CURVE_TARGETS:
        if k in report.targets:
            numbers[f"sink_{k}"] = report.sink(k)
    numbers["excess_1"] = report.excess(1)
    if report.star is not None:
        numbers["sink_star"] = report.sink_star()
        numbers["excess_star"] = report.excess("star")
    if report.length > 1:
        assert report.hidden_peaks is not None and report.value_norms is not None
        peaks = report.hidden_peaks[:, 0]  # (L,)
        others = report.value_norms[:, 1:].mean(dim=1)
        ratios = report.value_norms[:, 0] / others.clamp(min=1e-30)
        numbers["peak_1"] = rounded(peaks.tolist(), NORM_DIGITS)
        numbers["value_ratio_1"] = rounded(ratios.tolist(), NORM_DIGITS)
    return numbers


def alpha_by_head(report: Report) -> Tensor:
    """alpha of every head, as a record keeps it along the curve: (targets, L, H), float16.

    The ledger computes further quantities from it. If the model has a key of its own, that is the
    last target.
    """
    alpha = report.alpha[:, :ALPHA_TARGETS].mean(dim=0)  # over texts: (targets, L, H)
    if report.star is not None:
        star = report.star.mean(dim=0)  # (L, H)
        alpha = torch.cat([alpha, star[None]])
    return alpha.half()


def last_measurements(
    model: TransformerLM,
    ids: Tensor,
    tokenizer: Tokenizer,
    report: Report,
    autocast: Callable[[], torch.autocast],
) -> Json:
    """What a record says of a trained model alone, beside the last point of its curve.

    report: that of the texts `ids` (n, T). autocast: the context of the training, in which the
    gradients are computed.
    """
    numbers = report.to_dict(EPSILONS)
    for name in NOT_KEPT:
        numbers.pop(name, None)
    for name in numbers.keys() & set(BY_POSITION):
        numbers[name] = rounded(numbers[name], NORM_DIGITS)
    found: Json = {"report": numbers}
    found["destinations"] = destinations(model, ids, line_breaks(tokenizer))
    with autocast():
        by_position = gradient_norms(model, ids)
    found["gradients"] = {"input": rounded(by_position, NORM_DIGITS)}
    return found


def line_breaks(tokenizer: Tokenizer) -> Tensor:
    """The ids of the tokens that are white space and contain a line break: (n,)."""
    breaks = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\n" in text and not text.strip():
            breaks.append(token)
    return torch.tensor(breaks, dtype=torch.int64)


def destinations(model: TransformerLM, ids: Tensor, breaks: Tensor) -> dict[str, list[list[float]]]:
    """The share of the attention that goes to each kind of key, as (L, H) lists.

    The shares are means over the texts and over the queries 3..T of `ids` (n, T). A key counts for
    the first kind that fits it:

    star: k* or x*. In a model without them, the star is what a row lacks to a sum of one.
    first: x_1. self: the query's own token. previous: the token before the query.
    line_break: a token whose id is in `breaks`. rest: all other keys.

    If the weights do not sum to one, the proxy scores of Section 7.4 take their place. The result
    is empty if the sequences have fewer than 3 tokens.
    """
    length = ids.shape[1]
    if length < FIRST_QUERY:
        return {}
    # For each kind, the mask of its keys. The masks broadcast to (n, queries, T).
    at = torch.arange(length)
    back = at[FIRST_QUERY - 1 :, None] - at  # (queries, T): the distance from query to key
    fits = {
        "first": at == 0,
        "self": back == 0,
        "previous": back == 1,
        "line_break": torch.isin(ids.cpu(), breaks)[:, None],
        "rest": at >= 0,
    }
    layers = model.config.num_layers
    heads = model.config.num_heads
    every_head = [*np.ndindex(layers, heads)]
    report = measure(model, ids, heads=every_head, norms=False)
    maps = torch.stack([head.map for head in report.kept.values()])  # (L * H, n, T, T)
    left = maps[:, :, FIRST_QUERY - 1 :]  # the attention that is not yet assigned to a kind
    # Each kind takes the attention to its keys, if no earlier kind has taken it.
    shares = {"star": 1 - left.sum(dim=-1)}
    for kind, fitting in fits.items():
        taken = left * fitting
        shares[kind] = taken.sum(dim=-1)
        left = left - taken
    means = {}
    for kind, share in shares.items():
        by_head = share.double().mean(dim=(1, 2))  # over texts and queries
        by_head = by_head.view(layers, heads)
        means[kind] = by_head.numpy().round(4).tolist()
    return means


def gradient_norms(model: TransformerLM, ids: Tensor) -> list[list[float]]:
    """The norm of the loss gradient, by layer and position: (L, T - 1).

    The loss is the mean next-token loss of ids (n, T), which are on the model's device. The
    gradient is taken with respect to the input of each attention layer (after the norm before it).
    It is summed over the n texts before its norm is taken, as an optimiser step sums it. So the
    gradients of what all texts share, such as a first token, add up. The parameters' gradients do
    not change. The result is empty if a norm is not finite or if T = 1, where nothing is predicted.
    """
    if ids.shape[1] < 2:
        return []
    inputs: list[Tensor] = []  # the input of each attention layer, (n, T - 1, d)

    def keep(_: nn.Module, args: tuple[Tensor]) -> None:
        inputs.append(args[0])

    targets = ids[:, 1:].flatten()
    with torch.enable_grad(), ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, Attention):
                hooks.enter_context(layer.register_forward_pre_hook(keep))
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets)
        gradients = torch.autograd.grad(loss, inputs)
    first = int(model.config.sink_token)  # x* is no token of the text
    # In the sum over texts, gradients that they share add up, and the others mostly cancel.
    sums = []
    for gradient in gradients:
        over_texts = gradient.float().sum(dim=0)
        sums.append(over_texts[first:])
    norms = torch.linalg.vector_norm(torch.stack(sums), dim=-1)  # (L, T - 1)
    if not norms.isfinite().all():
        return []
    numbers: list[list[float]] = rounded(norms.tolist(), digits=4)  # the digits of all records
    return numbers


def divergence(losses: list[float], hopeless: float) -> str | None:
    """Why a run with these training losses has failed, or None.

    hopeless: twice the loss of a uniform guess. A run whose losses all exceed it has failed.
    """
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    if min(losses) > hopeless:
        return f"the loss was over {hopeless:.2f}, twice that of a uniform guess"
    return None
