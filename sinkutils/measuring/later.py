"""What models after the paper add to be looked at: output gates, and sinks on other keys than the first.

A learned sink logit (gpt-oss) is in every report: `alpha` as the model weighs, `renormalised` without the logit's part,
`star` that part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from sinkutils.measuring.report import Report, check_epsilons
from sinkutils.model.decoder import Attention, TransformerLM


@torch.no_grad()
def gate_openness(model: nn.Module, ids: Tensor) -> Tensor:
    """How open the output gate of each head is: the mean of sigmoid(gate) over tokens and elements, (n, layers, heads).

    ids: (n, T). Layers are those that have a gate, in their order. Of a `TransformerLM` with gates, and of models of
    transformers whose query projection also gives the gate (Qwen3-Next, Qwen3.5). Raises ValueError for others.
    """
    gates: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []  # the map, and how its output is cut by head
    for module in model.modules():
        if isinstance(module, Attention) and module.config.gate != "none":
            gates.append((module.gate, module.by_head))
        query, out = getattr(module, "q_proj", None), getattr(module, "o_proj", None)
        if isinstance(query, nn.Linear) and isinstance(out, nn.Linear) and query.out_features == 2 * out.in_features:
            gates.append((query, partial(_second_half, size=2 * int(module.head_dim))))  # type: ignore[arg-type]
    if not gates:
        kind = type(model).__name__
        raise ValueError(f"{kind} has no output gates: give LMConfig(gate='head') or a model such as Qwen3-Next")
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        for module, cut in gates:
            hook = partial(lambda cut, _, __, out: seen.append(cut(out).float().sigmoid()), cut)
            hooks.enter_context(module.register_forward_hook(hook))
        (model.hidden if isinstance(model, TransformerLM) else model)(ids)
    return torch.stack([gate.mean(dim=(2, 3)).cpu() for gate in seen], dim=1)


def _second_half(x: Tensor, size: int) -> Tensor:
    """The gates (B, H, T, D) in the output of a map that gives each head's queries and behind them its gates."""
    return x.unflatten(-1, (-1, size)).chunk(2, dim=-1)[1].transpose(1, 2)


def secondary_sinks(report: Report, ids: Tensor, epsilon: float = 0.3, queries: int = 16) -> pd.DataFrame:
    """The keys k > 1 that are sinks: mean attention alpha_k above epsilon from the at least `queries` that see them.

    report: of `measure(model, ids, mass=True)` on texts of one length; ids: the same (n, T). A row a layer, head, text
    and key, the largest first: layer and head (from 0), text, position (from 1), token (its id), alpha. A key near the
    end is seen by few queries, among them itself, so that any is "a sink" there. Raises ValueError without mass.
    """
    check_epsilons((epsilon,))
    if report.mass is None:
        raise ValueError("secondary sinks need alpha of every key: measure(model, ids, mass=True)")
    last = max(1, report.mass.shape[-1] - queries + 1)
    text, layer, head, key = (report.mass[..., 1:last] > epsilon).nonzero(as_tuple=True)
    columns: dict[str, Any] = {
        "layer": torch.tensor(report.layers)[layer],
        "head": head,
        "text": text,
        "position": key + 2,
        "token": ids.cpu()[text, key + 1],
        "alpha": report.mass[text, layer, head, key + 1],
    }
    table = pd.DataFrame({name: values.tolist() for name, values in columns.items()})
    return table.sort_values("alpha", ascending=False, ignore_index=True)
