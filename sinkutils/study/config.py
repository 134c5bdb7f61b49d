"""The config of a run: its model, its text, its optimisation and its seed.

A config is a frozen dataclass. This module also writes it to JSON and reads it back.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sinkutils import checks
from sinkutils.checks import Refused, choice, integer, require
from sinkutils.model.config import SIMILARITY_NAMES, LMConfig

Json = dict[str, Any]  # such as a config, the metrics of a record, or a report
# A corpus as records name it: "name", and "sha256" of the text and the tokenizer.
Identity = dict[str, str]
# Is raised by hand when a change to the trainer or the model changes the numbers of the runs.
RECIPE = 2
PRECISIONS = ("fp32", "bf16")
LARGEST_SEED = 2**63 - 1  # every random generator accepts it
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]{0,98}[A-Za-z0-9_])?")


def check_name(what: str, name: str) -> None:
    """Raise ValueError unless a name can be a folder's name on every system (and is no path)."""
    require(
        NAME.fullmatch(name) is not None,
        f"{what} must be a name of at most 100 letters, digits and _, with . - @ inside, "
        f"got {name!r:.60}",
    )


@dataclass(frozen=True)
class DataConfig:
    """The text that a run trains on. Positions are 1-based, as in the paper."""

    corpus: str = "docstrings"
    share: float = 1.0  # the share of the training tokens that is used (Fig. 5 right)
    # the tokens at these positions are drawn uniformly from the vocabulary, once for each chunk
    random_positions: tuple[int, ...] = ()
    # x_fix, a token that occurs in no text, overwrites this position (Table 10 right)
    fixed_position: int | None = None
    # each training chunk has x_fix at a random position, and measured texts at fixed_position
    random_place: bool = False
    unscored: tuple[int, ...] = ()  # the positions whose next-token prediction carries no loss
    # the corpus to validate on instead of `corpus` (Section 4: Pile-CC)
    validation: str | None = None

    def __post_init__(self) -> None:
        checks.fields(self)
        require(0 < self.share <= 1, f"share must be in (0, 1], got {self.share}")
        require(
            self.fixed_position is not None or not self.random_place,
            "random_place is of a fixed token: set fixed_position, where it is to be measured",
        )


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and evaluation of one run (Section 4). Step counts are optimiser steps."""

    steps: int = 4000
    batch_size: int = 32  # sequences per step
    learning_rate: float = 6e-3  # the peak rate
    warmup_steps: int = 100
    # the last rate divided by the peak rate; 1 keeps it constant, as in the authors' published code
    lr_floor: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    precision: str = "fp32"  # with bf16 autocast is used; weights and optimiser stay in fp32
    eval_every: int = 100
    eval_sequences: int = 100  # the number of sequences for the sink metric
    eval_length: int = 64  # T of the sink metric
    valid_chunks: int = 128  # the number of chunks for the validation loss
    micro_batch: int | None = None  # sequences per forward pass; None: the whole batch at once
    # adamw; sgd (its momentum is beta1); muon (for the blocks' matrices, and adamw for the rest)
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        checks.fields(self, warmup_steps=0)
        choice("precision", self.precision, PRECISIONS)
        choice("optimizer", self.optimizer, ("adamw", "sgd", "muon"))
        require(self.lr_floor <= 1, f"lr_floor must be at most 1, got {self.lr_floor}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(value < 1, f"{name} must be less than 1, got {value}")
        require(
            self.batch_size % (self.micro_batch or self.batch_size) == 0,
            f"micro_batch must divide batch_size={self.batch_size}, got {self.micro_batch}",
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines the numbers of a run on one kind of machine.

    Only the text itself is not part of it: a config names its corpus.
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
    """Everything that determines a fine-tuning (Appendix D), apart from the text and the weights.

    It starts from the weights of a pre-training, the record of `start`.
    """

    start: str = "fixed_1"  # the experiment to start from: its record at this preset and seed
    start_sha256: str = ""  # `config_hash` of that run
    instructions: str = "docstrings"  # the source of the conversations
    pairs: int = 20_000  # the number of conversations

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
    """The learning rate at a step (0, 1, ..).

    After a linear warm-up a cosine brings it down to lr_floor times the peak, at the last step.
    """
    peak = train.learning_rate
    floor = train.lr_floor
    warm = train.warmup_steps
    # The warm-up begins with peak / warm and ends with the peak.
    if step < warm:
        return peak * (step + 1) / warm
    last = max(1, train.steps - 1 - warm)  # counted from the end of the warm-up
    done = min(1.0, (step - warm) / last)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (floor + (1 - floor) * cosine)


def paths_of(config: Any, before: str = "") -> Iterator[str]:
    """The dotted paths of all fields of a config, apart from its name, preset and seed."""
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            yield from paths_of(value, f"{before}{name}.")
        elif name not in ("experiment", "preset", "seed"):
            yield f"{before}{name}"


def check_field(path: str, known: list[str]) -> None:
    """Raise ValueError unless there is such a field, with similar ones, first of the same end."""
    if path in known:
        return
    path = str(path)
    end = path.rpartition(".")[2]
    near = [one for one in known if one.rpartition(".")[2] == end]
    near += difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    ends = {one.rpartition(".")[2]: one for one in known}
    near += [ends[match] for match in difflib.get_close_matches(end, ends, n=2, cutoff=0.6)]
    there = ", ".join([*dict.fromkeys(near)][:3])
    hint = f": did you mean {there}?" if there else ", only " + ", ".join(known)
    raise Refused(f"there is no field {path!r}{hint}")


def from_dict(cls: Any, values: Json) -> Any:
    """The config of class `cls` whose fields JSON holds, the inverse of `dataclasses.asdict`.

    Raises TypeError for unknown fields.
    """
    types = checks.types(cls)  # for each field, its type and then any further types that it accepts
    # JSON holds an inner config as a dict, and a tuple as a list.
    arguments = {}
    for name, value in values.items():
        kind, *_ = types.get(name, (None,))  # cls itself refuses an unknown field
        if dataclasses.is_dataclass(kind):
            value = from_dict(kind, value)
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    return cls(**arguments)


def config_dict(config: RunConfig) -> Json:
    """The contents of config.json, apart from the corpus that the run was trained on.

    They are the config and the number of the recipe. Corpora have their public names, which hold no
    path of the machine.
    """
    values = as_json(config) | {"recipe": RECIPE}
    data = values["data"]
    data["corpus"] = public_name(data["corpus"])
    if data["validation"]:
        data["validation"] = public_name(data["validation"])
    if "instructions" in values:
        values["instructions"] = public_name(values["instructions"])
    return values


def as_json(config: Any) -> Json:
    """The fields of a config as JSON holds them: an inner config as a dict, a tuple as a list."""
    values = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            value = as_json(value)
        elif isinstance(value, tuple):
            value = list(value)
        values[name] = value
    return values


def upgrade(config: Json) -> Json:
    """The config of a record with the fields that a config has today.

    A field that did not exist when the record was made gets its default. Raises ValueError,
    TypeError or KeyError for what is no possible config.
    """
    fields = dict(config)
    recipe = integer("recipe", fields.pop("recipe"), least=0)
    corpus = fields.pop("corpus")
    texts = [corpus["name"], corpus["sha256"]]
    require(all(isinstance(text, str) for text in texts), "corpus must be a name and a hash")
    seed = integer("seed", fields.pop("seed"), least=0, most=LARGEST_SEED)
    values: Json = json.loads(_today(json.dumps(fields, sort_keys=True)))
    # A similarity that its author has registered may be unknown here (`_today`).
    values["model"]["attention"]["similarity"] = fields["model"]["attention"]["similarity"]
    return values | {"seed": seed, "recipe": recipe, "corpus": corpus}


@lru_cache(maxsize=4096)  # most records have the fields of another seed
def _today(text: str) -> str:
    fields = json.loads(text)
    fields["data"].pop("bos", None)  # a former field, which was always False
    spec = fields["model"]["attention"]
    if isinstance(spec["similarity"], str) and spec["similarity"] not in SIMILARITY_NAMES:
        spec["similarity"] = "relu"
    return json.dumps(
        as_json(from_dict(FinetuneConfig if "start" in fields else RunConfig, fields))
    )


def public_name(name: str) -> str:
    """The name of a corpus in caches and records. For path:<folder> it has no parent folders."""
    kind, _, rest = name.partition(":")
    if kind != "path":
        return name
    path = Path(os.path.expanduser(rest)).resolve()
    return f"path:{path.name}"


def config_hash(config: RunConfig) -> str:
    """SHA-256 of a run's config and recipe. A fine-tuning names the run it starts from by it.

    The hash must agree with those in the first records. So it includes their field `bos`, which was
    always False, and omits the later fields `unscored` and `random_place` where they are empty.
    """
    values = config_dict(config)
    values["data"]["bos"] = False
    for name in ("unscored", "random_place"):
        if not values["data"][name]:
            del values["data"][name]
    text = json.dumps(values, indent=1, sort_keys=True) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()
