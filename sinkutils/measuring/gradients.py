"""Where the gradient of the loss gathers: its norm by position at the attention of each layer (Chen and Yao 2026)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.model.decoder import Attention, TransformerLM


class Values:
    """An `Observer` that keeps the values v of each layer, (B, H, T, D)."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def embedding(self, hidden: Tensor) -> None:
        """Not looked at."""

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> None:
        self.seen.append(v)

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        """Not looked at."""


def gradient_norms(model: TransformerLM, ids: Tensor) -> dict[str, list[list[float]]]:
    """The norm of the gradient of the mean next-token loss, by layer and position, as (L, T - 1) lists.

    ids: (n, T), on the model's device. "input" is what a layer's attention reads (after the norm before it), "value"
    its values. Each is summed over the n texts before its norm is taken, as an optimiser step sums it: what the
    texts share, such as their first token, adds up. No parameter's gradient changes. An empty dict where one is not
    finite, or where a text is one token and nothing is predicted.
    """
    if ids.shape[1] < 2:
        return {}
    inputs: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    values = Values()
    with torch.enable_grad(), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])))
        logits = model(ids[:, :-1], values)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, [*inputs, *values.seen])
    first = int(model.config.sink_token)  # x* is no token of the text
    sums = [x.float().sum(dim=0) for x in gradients]  # (T, d), and (H, T, D)
    norms = torch.stack([torch.linalg.vector_norm(x, dim=-1 if x.ndim == 2 else (0, 2)) for x in sums])[:, first:].cpu()
    if not norms.isfinite().all():
        return {}
    rows = [[float(f"{x:.3e}") for x in row] for row in norms.tolist()]
    return {"input": rows[: len(inputs)], "value": rows[len(inputs) :]}
