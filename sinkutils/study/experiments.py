"""The study: every row of every pre-training table and figure, and the fine-tunings, at every
scale.

An experiment (data/experiments.yaml) is what it changes: dotted paths into `RunConfig` and values.
A preset (data/presets.yaml) is a scale; `grid` joins them. The paper's values stand beside the
names in data/paper/pretraining.csv.

Learning rates, steps, batch sizes, windows, d_a and data amounts scale with the preset (`scaled`).
All else is as printed: weight decay, prefix, positions, alpha, p, m and numbers of heads. The
warm-up stays the preset's.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sinkutils.checks import choice
from sinkutils.data.packing import DataConfig
from sinkutils.model.decoder import LMConfig
from sinkutils.paths import LEDGER, PAPER, read_csv, read_yaml
from sinkutils.study.config import Json, RunConfig, TrainConfig, from_dict

AFTER_PAPER = "8"  # what came after the paper, which has seven sections: data/paper/after_paper.csv
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)
USUAL_PRESETS = ("smoke", "minute", "laptop", "desk", "gpu", "paper")


@dataclass(frozen=True)
class Preset:
    """A scale: the same experiments on another model, text and budget. data/presets.yaml says what
    each field means.
    """

    name: str
    model: LMConfig
    data: DataConfig
    train: TrainConfig
    tuning: Json
    base: str
    four_epochs: float
    seconds: float
    device: str = "cpu"
    compile: bool = False
    keeps_weights: bool = False
    leaves_out: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {}
for _name, _values in read_yaml(LEDGER / "presets.yaml").items():
    PRESETS[_name] = from_dict(Preset, {"name": _name, **_values})


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists them."""
    choice("preset", name, PRESETS)
    return PRESETS[name]


def scaled(value: Any, old: Any, run: RunConfig, scale: Preset) -> Any:
    """The value of a change at a preset: {"times": 2} is twice the base's.

    {"times": 1/4, "of": "context"} is a quarter of that, and at most the base's value where it has
    one. Whole numbers stay whole, and what is not in braces stays as it is. old, run: the base's
    value, and the base.
    """
    if not isinstance(value, dict):
        return tuple(value) if isinstance(value, list) else value
    of = value.get("of")
    context = run.model.context_length
    share = float(Fraction(value["times"]))
    reference: Any  # an int or a float, as the field
    if of == "context":
        reference = context
    elif of == "head_dim":
        reference = run.model.head_dim
    elif of == "step_tokens":  # by a context: the batch size that has as many tokens as the base's
        reference = old * context
    elif of == "four_epochs":
        reference = scale.four_epochs
    elif of == "minus_log_context":
        reference = -math.log(context)
    else:
        reference = old
    result = share * reference
    if isinstance(reference, int):
        result = max(1, int(result + 0.5))
    return min(result, old) if of == "context" and old else result


@dataclass(frozen=True)
class Experiment:
    """One run of the study as the difference from its base."""

    name: str
    section: str  # 4 to 7; C, D: of that appendix alone; 8: of what came after the paper
    title: str
    change: Json = field(default_factory=dict, hash=False)  # dotted path into the config -> value
    base: bool = True  # changes the preset's base experiment; False: the preset itself
    # of how many seeds the weights are kept at small presets: for a notebook 1, for a claim 3
    weights: int = 0
    seeds: int = 3  # how many a sweep trains, from 0; no verdict rests on fewer than three
    presets: tuple[str, ...] = USUAL_PRESETS
    start: str | None = None  # of a fine-tuning: the experiment whose weights it starts from
    download: bool = False  # needs the network: trained where it is named, not with the rest

    @property
    def rows(self) -> list[dict[str, str]]:
        """The paper's rows of this run, in its order; a cell that is lost in its text is empty."""
        names = [self.name]
        if self.name == "default":  # the paper's base
            names.append("base")
        return [row for row in read_csv(PAPER / "pretraining.csv") if row["experiment"] in names]

    @property
    def item(self) -> str:
        """The paper's first table of this run, else its first figure or section, else nothing."""
        items = [row["item"] for row in self.rows]
        for item in items:
            if item.startswith("Table"):
                return item
        return items[0] if items else ""

    @property
    def paper(self) -> dict[str, float]:
        """What the paper reports: sink_1 to sink_4, sink_star (percent), valid_loss."""
        numbers = {}
        for row in self.rows:
            for name, cell in row.items():
                if cell and name.startswith(("sink_", "valid_")):
                    numbers[name] = float(cell)
        return numbers


EXPERIMENTS: dict[str, Experiment] = {}  # by name, in the table's order
for _group in read_yaml(LEDGER / "experiments.yaml"):
    _presets = tuple(_group.get("presets", USUAL_PRESETS))
    for _name, _fields in _group["experiments"].items():
        EXPERIMENTS[_name] = Experiment(_name, _group["section"], **_fields, presets=_presets)


def experiments(section: str | None = None) -> list[Experiment]:
    """Every experiment, or those of a section: 4, 5, 6, 7, C, D or 8."""
    rows = [*EXPERIMENTS.values()]
    if section is None:
        return rows
    choice("section", str(section), SECTIONS)
    return [row for row in rows if row.section == str(section)]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the names that are close."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    close = ", ".join(difflib.get_close_matches(name, EXPERIMENTS, n=5, cutoff=0.5))
    hint = f"did you mean {close}? " if close else ""
    raise ValueError(
        f"unknown experiment {name!r}: {hint}`python -m sinkutils list` shows all "
        f"{len(EXPERIMENTS)}"
    )
