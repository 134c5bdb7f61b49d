"""The optimisers that a config can name."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from sinkutils.study.config import TrainConfig
from sinkutils.training.group import ALONE, Group


def make_optimizers(
    named: dict[str, nn.Parameter], train: TrainConfig, group: Group = ALONE
) -> list[Optimizer]:
    """The optimisers that a config names: one, but for muon, which needs AdamW for the rest.

    Raises ValueError for muon in a group.
    """
    named = dict(named)
    rate, decay = train.learning_rate, train.weight_decay
    if train.optimizer == "sgd":
        return [SGD(named.values(), rate, momentum=train.beta1, weight_decay=decay)]
    optimizers = []
    if train.optimizer == "muon":
        if group.size > 1:
            raise ValueError(
                "optimizer='muon' runs in one process: leave out torchrun, or take adamw or sgd"
            )
        # Muon is for linear maps: not embeddings, gains, or biases that are matrices only by their
        # heads. It takes q, k and v as the one matrix that they are here, and gate and up likewise;
        # others cut them first.
        matrices = [name for name, p in named.items() if p.ndim == 2 and name.endswith(".weight")]
        linear = [named.pop(name) for name in matrices if name.startswith("blocks.")]
        # match_rms_adamw: an update has the size of AdamW's, so that one rate and one decay serve
        # both.
        optimizers.append(Muon(linear, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    betas = (train.beta1, train.beta2)
    return [
        *optimizers,
        AdamW(named.values(), rate, betas, train.adam_eps, weight_decay=decay, fused=True),
    ]


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """The learning rate of the next step; of a CUDA graph into the tensor that it reads."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
