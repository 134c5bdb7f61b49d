"""`measure`: the sink numbers of any causal language model, for about the cost of its forward pass.

transformers lets a model choose its attention function by name. The one registered here computes the module's own
output and, beside it, what a report needs, by one of two paths:

- fused: the kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of the chosen keys; compared with the exact path on a
  few rows of every module before it is trusted, and not used where a module asks for more than it can do
- exact: the family's own eager function on chunks of queries, whose weights are reduced and dropped

Families outside that interface are measured by hooks on the weights that their eager attention returns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.model import TransformerLM
from sinkutils.sinks import (
    NotFinite,
    Report,
    Request,
    Tally,
    check_epsilons,
    check_targets,
    keep_products,
    mean_over_queries,
    run_own,
)

NAME = "sinkutils"  # of the attention function and of its mask
KEPT = ("map", "qk")
TOKENS_A_BATCH = 8192  # the default batch_size keeps a forward pass at about this many tokens
EXACT_ELEMENTS = 2**25  # attention weights that the exact path holds at a time (128 MiB in float32)
CHECK_ROWS = 16  # queries on which the fused path is compared with the exact one
# Keyword arguments that do not change what attention computes; any other sends a module to the exact path.
HARMLESS = {"dropout", "scaling", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "s_aux",
            "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings"}  # fmt: skip
NO_SOFTMAX = re.compile("Linear|Lightning|Delta|Mamba|Rotary|Norm")


@torch.no_grad()
def measure(
    model: nn.Module,
    ids: Tensor,
    targets: Sequence[int] = (1,),
    epsilons: Sequence[float] = (0.3,),
    *,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    norms: bool = True,
    mass: bool = False,
    heads: Sequence[tuple[int, int]] = (),
    keep: Sequence[str] = KEPT,
    exact: bool = False,
    name: str = "",
    bos: bool | None = None,
) -> Report:
    """Measure the attention sinks of a causal LM on token ids (samples, T) (Section 3.2).

    model: a `TransformerLM`, or a causal LM of transformers; it is left as it was found, also after an exception.
    targets: the keys k of alpha_k, counted from 1. epsilons: the thresholds that the printed table shows.
    attention_mask: (samples, T), 0 at padding. Padding is cut off and sequences of one length run together, so that
        a padded sequence has the numbers that it has alone; positions count from its first token. Sequences shorter
        than the largest target are skipped and counted.
    batch_size: sequences a forward pass. norms: whether l2-norms are taken.
    mass: also alpha of every key. heads: 0-based (layer, head) pairs for which `keep` is kept: "map" is A_ij, "qk"
        are cos(q_i, k_j) and ||q_i|| ||k_j||, each (samples, T, T).
    exact: never use the fused kernel.
    name, bos: printed with the results; whether BOS stands first is read off the ids where the model names its BOS.

    Raises ValueError for inputs that have no meaning and for models that are no causal LM with softmax attention or
    that cannot be measured; NotFinite (a ValueError) where weights are nan.
    """
    rows, skipped = check_ids(ids, attention_mask, check_targets(targets, ids.shape[1] if ids.ndim == 2 else 0))
    epsilons = check_epsilons(epsilons)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if any(name not in KEPT for name in keep):
        raise ValueError(f"keep must be among {', '.join(KEPT)}; got {tuple(keep)}")
    request = Request(tuple(targets), norms, mass, tuple((int(a), int(b)) for a, b in heads), tuple(keep))
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    lengths = torch.tensor([len(row) for row in rows])
    tally = Tally(int(lengths.max()), norms)
    order: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        if isinstance(model, TransformerLM):
            path = "log-mass"
            run: Callable[[Tensor], None] = lambda batch: run_own(model, batch, request, tally)  # noqa: E731
        else:
            capture = stack.enter_context(capturing(model, request, tally, exact))
            capture.check_causal(rows[0])
            path, run = capture.path, capture.run
        for length in lengths.unique().tolist():
            same = (lengths == length).nonzero()[:, 0]
            for indices in same.split(batch_size or max(1, TOKENS_A_BATCH // length)):
                tally.add_batch(len(indices), length)
                run(torch.stack([rows[i] for i in indices]))
                order += indices.tolist()
    report = tally.report(torch.tensor(order).argsort(), targets=request.targets, epsilons=epsilons, lengths=lengths)
    _check_finite(report)
    report.name, report.path, report.skipped = name or _name(model), path, skipped
    report.skipped_why = f"shorter than target {max(targets)}" if skipped else ""
    report.bos = _starts_with_bos(model, rows) if bos is None else bos
    if set(request.heads) - set(report.kept):
        raise ValueError(f"heads {sorted(set(request.heads) - set(report.kept))} do not exist")
    return report


def check_ids(ids: Tensor, mask: Tensor | None, targets: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """The sequences without their padding, and how many were skipped as shorter than the largest target."""
    ...
