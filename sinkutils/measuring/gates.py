"""How open the output gates of attention are: of our models with gates, and of those of transformers that have them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.model.decoder import Attention, TransformerLM


@torch.no_grad()
def gate_openness(model: nn.Module, ids: Tensor) -> Tensor:
    """How open the output gate of each head is: the mean of sigmoid(gate) over tokens and elements, (n, layers, heads).

    ids: (n, T). Layers are those that have a gate, in their order. Of a `TransformerLM` with gates, and of models of
    transformers whose query projection also gives the gate (Qwen3-Next, Qwen3.5). Raises ValueError for others.
    """
    seen: list[Tensor] = []

    def record(gates: Tensor) -> None:
        seen.append(gates.float().sigmoid().mean(dim=(2, 3)).cpu())  # of (B, H, T, 1 or D)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Attention) and module.config.gate != "none":
                hooks.enter_context(module.gate.register_forward_hook(_own_gates(module, record)))
            elif _query_gives_gate(module):
                hooks.enter_context(module.q_proj.register_forward_hook(_second_half(module, record)))  # type: ignore[union-attr, operator]
        body = model.hidden if isinstance(model, TransformerLM) else model
        body(ids)
    if not seen:
        kind = type(model).__name__
        raise ValueError(f"{kind} has no output gates: give LMConfig(gate='head') or a model such as Qwen3-Next")
    return torch.stack(seen, dim=1)


def _query_gives_gate(module: nn.Module) -> bool:
    """Whether an attention module's query projection is twice as wide as what its output projection reads."""
    query, out = getattr(module, "q_proj", None), getattr(module, "o_proj", None)
    if not isinstance(query, nn.Linear) or not isinstance(out, nn.Linear):
        return False
    return query.out_features == 2 * out.in_features


def _own_gates(module: Attention, record: Callable[[Tensor], None]) -> Callable[..., None]:
    """A hook of our own gates, (B, T, H) or (B, T, d)."""
    return lambda _, __, out: record(module.by_head(out))


def _second_half(module: Any, record: Callable[[Tensor], None]) -> Callable[..., None]:
    """A hook of a map that gives each head's queries and behind them its gates."""
    both = 2 * int(module.head_dim)
    return lambda _, __, out: record(out.unflatten(-1, (-1, both)).chunk(2, dim=-1)[1].transpose(1, 2))
