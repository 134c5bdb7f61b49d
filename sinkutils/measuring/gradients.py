"""Where the gradient of the loss gathers, by position at each attention (Chen and Yao 2026)."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.model.decoder import Attention, TransformerLM


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

    with torch.enable_grad(), ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, Attention):
                hooks.enter_context(layer.register_forward_pre_hook(keep))
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, inputs)
    first = int(model.config.sink_token)  # x* is no token of the text
    # As an optimiser sums texts: what they share adds up, what differs cancels.
    sums = torch.stack([x.float().sum(dim=0)[first:] for x in gradients])  # (L, T - 1, d)
    norms = torch.linalg.vector_norm(sums, dim=-1)
    if not norms.isfinite().all():
        return []
    return [[float(f"{x:.3e}") for x in row] for row in norms.tolist()]  # as all records have them
