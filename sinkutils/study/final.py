"""The contents of a run's metrics.json, with two measurements that are made once, at the end.

`destinations` measures to which kinds of keys the attention goes. `gradient_norms` measures at
which positions the gradient of the loss gathers (Chen and Yao 2026).
"""

from __future__ import annotations

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
from sinkutils.study.run import EPSILONS, NORM_DIGITS, Run

NOT_KEPT = ("interval", "embedding_norms", "skipped", "name")  # parts of a report
FIRST_QUERY = 3  # for earlier queries, the first, the previous and the own token are not distinct


def summary(run: Run, report: Report | None, reason: str | None) -> Json:
    """The contents of metrics.json.

    report: the report of the last evaluation, or None. With it, destinations and gradients are
    measured.
    reason: why the run failed, or None.
    """
    final: Json = dict(run.curve[-1]) if run.curve else {}
    if report is not None:
        final["report"] = of_report(report)
        final["destinations"] = destinations(run.model, run.probe, line_breaks(run.tokenizer))
        with run.autocast():
            by_position = gradient_norms(run.model, run.probe)
        final["gradients"] = {"input": rounded(by_position, NORM_DIGITS)}
    return {
        "status": "failed" if reason else "done",
        "reason": reason,
        "curve": run.curve,
        "final": final,
    }


def of_report(report: Report) -> Json:
    """The part of a report that a record keeps: Sink at `EPSILONS`, alpha, norms by position."""
    numbers = report.to_dict(EPSILONS)
    for name in NOT_KEPT:
        numbers.pop(name, None)
    for name in numbers.keys() & set(BY_POSITION):
        numbers[name] = rounded(numbers[name], NORM_DIGITS)
    return numbers


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
    return rounded(norms.tolist(), digits=4)  # the number of digits in all records
