"""What metrics.json says of a run, and what is measured for it once, at the end.

Where the attention goes that a first token does not take, by kind of key; and where the gradient of
the loss gathers, by position (Chen and Yao 2026).
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
from sinkutils.training.run import EPSILONS, NORM_DIGITS, Run

NOT_KEPT = ("interval", "embedding_norms", "skipped", "name")  # of a report
FIRST_QUERY = 3  # from here the first key, the one before and the query's own are three


def summary(run: Run, report: Report | None, reason: str | None) -> Json:
    """What metrics.json holds: status, curve, and at the end norms, destinations, gradients too.

    report: of the last evaluation. reason: why the run failed, or None.
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
    """What a record keeps of a report: Sink at `EPSILONS`, alpha, and the norms by position."""
    numbers = report.to_dict(EPSILONS)
    for name in NOT_KEPT:
        numbers.pop(name, None)
    for name in numbers.keys() & set(BY_POSITION):
        numbers[name] = rounded(numbers[name], NORM_DIGITS)
    return numbers


def line_breaks(tokenizer: Tokenizer) -> Tensor:
    """The ids of tokens that are white space with a line break in it, (n,)."""
    breaks = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\n" in text and not text.strip():
            breaks.append(token)
    return torch.tensor(breaks, dtype=torch.int64)


def destinations(model: TransformerLM, ids: Tensor, breaks: Tensor) -> dict[str, list[list[float]]]:
    """The share of attention by kind of key, as (L, H) lists.

    They are means over the texts and the queries 3..T of `ids` (n, T). The kinds, each key counting
    for the first that fits: star (k* or x*; without them what rows lack to one), first (x_1), self,
    previous (the token before), line_break (its id is in `breaks`), rest. Where weights do not sum
    to one, the shares are of the proxy scores of Section 7.4. Sequences of fewer than 3 tokens have
    no such query: an empty dict.
    """
    length = ids.shape[1]
    if length < FIRST_QUERY:
        return {}
    # Which keys are of a kind, by text and query: shapes that broadcast to (n, queries, T).
    at = torch.arange(length)
    back = at[FIRST_QUERY - 1 :, None] - at  # (queries, T): how far before its query a key stands
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
    left = maps[:, :, FIRST_QUERY - 1 :]  # what no kind has taken yet
    # Each kind takes its keys from what those before it have left.
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
    """The norm of the gradient of the mean next-token loss, by layer and position, (L, T - 1).

    ids: (n, T), on the model's device. The gradient is of what a layer's attention reads (after the
    norm before it), summed over the n texts before its norm is taken, as an optimiser step sums it:
    what the texts share, such as their first token, adds up. No parameter's gradient changes. An
    empty list where one is not finite, or where a text is one token and nothing is predicted.
    """
    if ids.shape[1] < 2:
        return []
    inputs: list[Tensor] = []  # of each attention, (n, T - 1, d)

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
    # As an optimiser sums texts: what they share adds up, what differs cancels.
    sums = []
    for gradient in gradients:
        over_texts = gradient.float().sum(dim=0)
        sums.append(over_texts[first:])
    norms = torch.linalg.vector_norm(torch.stack(sums), dim=-1)  # (L, T - 1)
    if not norms.isfinite().all():
        return []
    return rounded(norms.tolist(), digits=4)  # as all records have them
