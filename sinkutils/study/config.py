"""What a run is: its model, its text, its optimisation and its seed, as one frozen config that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, get_type_hints

from sinkutils.checks import choice, instance, integer, real, require
from sinkutils.data.packing import DataConfig
from sinkutils.model.config import LMConfig

PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "sgd", "muon")
LARGEST_SEED = 2**63 - 1  # what every generator takes


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and evaluation of one run (Section 4). Step counts are optimiser steps."""

    steps: int = 4000
    batch_size: int = 32  # sequences a step
    learning_rate: float = 6e-3  # peak
    warmup_steps: int = 100
    lr_floor: float = 0.1  # last over peak rate: 1 is constant, the authors' published config
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    precision: str = "fp32"  # bf16: autocast; weights and optimiser stay fp32
    eval_every: int = 100
    eval_sequences: int = 100  # for the sink metric
    eval_length: int = 64  # T of the sink metric
    valid_chunks: int = 128
    micro_batch: int | None = None  # sequences a forward pass; None: all at once
    optimizer: str = "adamw"  # sgd: momentum beta1; muon: for the matrices of the blocks, adamw for the rest

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_sequences", "eval_length", "valid_chunks"):
            integer(name, getattr(self, name), least=1)
        integer("warmup_steps", self.warmup_steps, least=0)
        choice("precision", self.precision, PRECISIONS)
        choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("learning_rate", "clip_norm"):
            real(name, getattr(self, name), "positive and finite")
        for name in ("weight_decay", "adam_eps"):
            real(name, getattr(self, name), "finite and not negative", ends="low")
        for name in ("beta1", "beta2"):
            real(name, getattr(self, name), "in [0, 1)", high=1.0, ends="low")
        real("lr_floor", self.lr_floor, "in 0..1", high=1.0, ends="both")
        if self.micro_batch is not None:
            integer("micro_batch", self.micro_batch, least=1)
            divides = self.batch_size % self.micro_batch == 0
            require(divides, f"micro_batch must divide batch_size={self.batch_size}, got {self.micro_batch}")


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run's numbers on one kind of machine, apart from the text itself."""

    experiment: str
    preset: str
    seed: int = 0
    model: LMConfig = field(default_factory=LMConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        kinds = {"experiment": str, "preset": str, "model": LMConfig, "data": DataConfig, "train": TrainConfig}
        for name, kind in kinds.items():
            instance(name, getattr(self, name), kind)
        integer("seed", self.seed, least=0, most=LARGEST_SEED)
        length, longest = self.train.eval_length, self.model.context_length
        require(length <= longest, f"eval_length {length} is longer than context_length {longest}")


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Everything that determines a fine-tuning (Appendix D), apart from the text and the weights it starts from."""

    start: str = "fixed_1"  # the experiment whose record of this preset and seed it starts from
    start_sha256: str = ""  # `record.config_hash` of that run
    instructions: str = "docstrings"
    pairs: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        model = f"a model with a fixed token at position {self.data.fixed_position}"
        advice = "it would overwrite a token of each question; start from one with position 1 or without"
        require(self.data.fixed_position in (None, 1), f"{model} cannot be fine-tuned: {advice}")
        size = self.train.batch_size
        require(self.pairs >= size, f"pairs must be at least the batch size {size}, got {self.pairs}")


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate at step 0, 1, ..: linear warm-up, then a cosine down to lr_floor of the peak at the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - 1 - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.learning_rate * (train.lr_floor + (1 - train.lr_floor) * cosine)


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """A frozen config from what `dataclasses.asdict` and JSON made of it. Raises ValueError for unknown fields."""
    known = _types(cls)
    unknown = sorted(set(values) - set(known))
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(known)}")
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(known[name]):
            value = from_dict(known[name], value)
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


@lru_cache
def _types(cls: type) -> dict[str, Any]:
    """The type of each field; annotations are strings here."""
    return get_type_hints(cls)
