"""What a run is: its model, its text, its optimisation and its seed, as one frozen config, and how
JSON holds that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from sinkutils import checks
from sinkutils.checks import choice, require
from sinkutils.data.corpus import public_name
from sinkutils.data.packing import DataConfig
from sinkutils.model.decoder import LMConfig

Json = dict[str, Any]  # a config, a record's metrics, a report
# Raised by hand when a change to the trainer or the model changes the numbers of its runs.
RECIPE = 2
PRECISIONS = ("fp32", "bf16")
LARGEST_SEED = 2**63 - 1  # what every generator takes
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]{0,98}[A-Za-z0-9_])?")


def check_name(what: str, name: str) -> None:
    """Hold that a name is that of a folder, on every system, and no path to one."""
    require(
        NAME.fullmatch(name) is not None,
        f"{what} must be a name of at most 100 letters, digits and _, with . - @ inside, "
        f"got {name!r:.60}",
    )


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
    # adamw; sgd: momentum beta1; muon: for the matrices of the blocks, adamw for the rest
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        checks.fields(self, warmup_steps=0)
        choice("precision", self.precision, PRECISIONS)
        choice("optimizer", self.optimizer, ("adamw", "sgd", "muon"))
        for name in ("lr_floor", "beta1", "beta2"):
            value = getattr(self, name)
            require(value <= 1, f"{name} must be at most 1, got {value}")
        require(
            self.batch_size % (self.micro_batch or self.batch_size) == 0,
            f"micro_batch must divide batch_size={self.batch_size}, got {self.micro_batch}",
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run's numbers on one kind of machine, apart from the text
    itself.
    """

    experiment: str
    preset: str
    seed: int = 0
    model: LMConfig = field(default_factory=LMConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        checks.fields(self, seed=0)
        check_name("experiment", self.experiment)
        check_name("preset", self.preset)
        require(self.seed <= LARGEST_SEED, f"seed must be at most {LARGEST_SEED}, got {self.seed}")
        length = self.train.eval_length
        longest = self.model.context_length
        require(length <= longest, f"eval_length {length} is longer than context_length {longest}")
        data = self.data
        last = max([*data.random_positions, *data.unscored, data.fixed_position or 1])
        require(last <= longest, f"position {last} is beyond context_length {longest}")


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Everything that determines a fine-tuning (Appendix D), apart from the text and the weights it
    starts from.
    """

    start: str = "fixed_1"  # the experiment whose record of this preset and seed it starts from
    start_sha256: str = ""  # `config_hash` of that run
    instructions: str = "docstrings"
    pairs: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.data.fixed_position in (None, 1),
            f"a model with a fixed token at position {self.data.fixed_position} cannot be "
            "fine-tuned: it would overwrite a token of each question; start from one with "
            "position 1 or without",
        )
        size = self.train.batch_size
        pairs = self.pairs
        require(pairs >= size, f"pairs must be at least the batch size {size}, got {pairs}")


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate at step 0, 1, ..: linear warm-up, then a cosine down to lr_floor of the peak at the
    last step.
    """
    peak = train.learning_rate
    floor = train.lr_floor
    warm = train.warmup_steps
    # From peak / warm up to the peak.
    if step < warm:
        return peak * (step + 1) / warm
    last = max(1, train.steps - 1 - warm)  # counted from the end of the warm-up
    done = min(1.0, (step - warm) / last)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (floor + (1 - floor) * cosine)


def from_dict(cls: Any, values: Json) -> Any:
    """A frozen config from what `dataclasses.asdict` and JSON made of it.

    Raises TypeError for unknown fields.
    """
    types = checks.types(cls)  # by field: its type, and then what else it takes
    # JSON has dicts for the configs within a config, and lists for tuples.
    arguments = {}
    for name, value in values.items():
        kind, *_ = types.get(name, (None,))  # an unknown field is refused by cls
        if dataclasses.is_dataclass(kind):
            value = from_dict(kind, value)
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    return cls(**arguments)


def config_dict(config: RunConfig) -> Json:
    """What config.json holds beside the corpus that the run was made on: the config and the
    recipe's number.

    Texts have their public names: nothing of the machine.
    """
    fields = dataclasses.asdict(config) | {"recipe": RECIPE}
    values: Json = json.loads(json.dumps(fields))  # with lists for tuples, as a file has them
    data = values["data"]
    data["corpus"] = public_name(data["corpus"])
    if data["validation"]:
        data["validation"] = public_name(data["validation"])
    if "instructions" in values:
        values["instructions"] = public_name(values["instructions"])
    return values


def upgrade(config: Json) -> Json:
    """A record's config by today's fields: one that came later has its default, as older runs did
    not have it.

    Raises KeyError, TypeError or ValueError for what is no config of this version.
    """
    fields = dict(config)
    beside = {"recipe": fields.pop("recipe"), "corpus": fields.pop("corpus")}
    fields["data"] = dict(fields["data"])
    fields["data"].pop("bos", None)  # a field that has gone since, and was always False
    kind = FinetuneConfig if "start" in fields else RunConfig
    run = from_dict(kind, fields)
    return config_dict(run) | beside


def config_hash(config: RunConfig) -> str:
    """SHA-256 of what determines a run, apart from its text; fine-tunings name their start by it.

    It goes by the fields that the first records had: `bos`, always False, and no `unscored` or
    `random_place` where they are empty.
    """
    values = config_dict(config)
    values["data"]["bos"] = False
    for name in ("unscored", "random_place"):
        if not values["data"][name]:
            del values["data"][name]
    text = json.dumps(values, indent=1, sort_keys=True) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()
