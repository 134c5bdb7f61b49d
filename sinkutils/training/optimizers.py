"""The optimisers that a config can name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sinkutils.study.config import TrainConfig
from sinkutils.training.group import ALONE, Group


class MuonAndAdamW:
    """Muon for the matrices of the blocks, AdamW for all else, under the interface of one optimiser."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], train: TrainConfig) -> None:
        rate, decay = train.learning_rate, train.weight_decay
        # An update has the size of AdamW's, so that one rate and one decay serve both.
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, adamw(others, train))
        self.sizes = (len(matrices), len(others))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both by index: Muon's parameters come first."""
        muon, other = (part.state_dict()["state"] for part in self.parts)
        return {"state": muon | {index + self.sizes[0]: state for index, state in other.items()}}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            own = {i - start: state for i, state in values["state"].items() if start <= i < start + size}
            part.load_state_dict({**part.state_dict(), "state": own})
            start += size


def adamw(parameters: Iterable[Tensor], train: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.adam_eps,
                             weight_decay=train.weight_decay, fused=True)  # fmt: skip


def make_optimizer(model: torch.nn.Module, train: TrainConfig, group: Group = ALONE) -> Any:
    """The optimiser that a config names, over all parameters of a model.

    Raises ValueError for muon in a group of processes.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=train.learning_rate, momentum=train.beta1, weight_decay=train.weight_decay
        )
    if train.optimizer == "muon":
        if group.size > 1:
            raise ValueError("optimizer='muon' runs in one process: leave out torchrun, or take adamw or sgd")
        # Muon is for linear maps: not embeddings, gains, or biases that are matrices only by their heads.
        chosen = {name for name, p in model.named_parameters()
                  if name.startswith("blocks.") and name.endswith(".weight") and p.ndim == 2}  # fmt: skip
        matrices = [p for name, p in model.named_parameters() if name in chosen]
        return MuonAndAdamW(matrices, [p for name, p in model.named_parameters() if name not in chosen], train)
    return adamw(model.parameters(), train)
