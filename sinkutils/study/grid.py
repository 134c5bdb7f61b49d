"""The study: every row of every pre-training table and figure, and the fine-tunings, at every
scale.

An experiment (data/experiments.yaml) is what it changes: dotted paths into `RunConfig` and values.
A preset (data/presets.yaml) is a scale. `config` joins them to a run, and `plan` says which runs a
preset has, in which order. The paper's values stand beside the names in data/paper/pretraining.csv.

Learning rates, steps, batch sizes, windows, d_a and data amounts scale with the preset (`_scaled`).
All else is as printed: weight decay, prefix, positions, alpha, p, m and numbers of heads. The
warm-up stays the preset's. A window w < T hides x_1 from most of the T queries of the metric, so
that alpha_1 <= w / T: the window experiments measure at T <= C / 4 (the paper: 64 of 2048).

At a small scale rows may coincide (d_a = 1 and 2 of a head of 16): such names are one run, and
`resolve` says which.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sinkutils.checks import choice
from sinkutils.data.packing import DataConfig
from sinkutils.model.decoder import LMConfig
from sinkutils.paths import LEDGER, PAPER, read_csv, read_yaml
from sinkutils.study.config import (
    FinetuneConfig,
    Json,
    RunConfig,
    TrainConfig,
    config_hash,
    from_dict,
)

AFTER_PAPER = "8"  # what came after the paper, which has seven sections: data/paper/after_paper.csv
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)
USUAL_PRESETS = ("smoke", "minute", "laptop", "desk", "gpu", "paper")
FIRST_SEEDS = 3  # of every setting
HEADLINE_SEEDS = 6  # of a setting that the paper's headline rests on
# What a fine-tuning changes in the pre-training that it starts from, beside the preset's `tuning`.
# Appendix D: all weights, batches of 64 sequences of C tokens, one epoch, and a cosine from 2e-5,
# which stays a twentieth of pre-training's rate. The rest is as in the published recipe of the
# platform that it names: a warm-up over a tenth of the steps, a cosine to zero, AdamW with betas
# 0.9 and 0.999, no weight decay, gradients clipped at 1.
TUNING = {
    "train.learning_rate": {"times": "1/20"},
    "train.lr_floor": 0.0,
    "train.beta2": 0.999,
    "train.weight_decay": 0.0,
}


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


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists them."""
    choice("preset", name, PRESETS)
    return PRESETS[name]


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
        table = read_csv(PAPER / "pretraining.csv")
        return [row for row in table if row["experiment"] in names]

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


def config(name: str, preset: str = "laptop", seed: int = 0) -> RunConfig:
    """The run of an experiment ("base": the preset's base) at a preset.

    Where two experiments coincide at this preset, both give the run of the first, under its name
    (`resolve`). Raises ValueError for unknown names, and with the reason where the preset cannot
    hold the experiment.
    """
    first = _named(resolve(name, preset), preset)
    run = dataclasses.replace(first, seed=seed)
    if isinstance(run, FinetuneConfig):
        start = config(run.start, preset, seed)
        return dataclasses.replace(run, start_sha256=config_hash(start))
    return run


def keeps_weights(run: RunConfig) -> bool:
    """Whether a record keeps its weights: what a fine-tuning starts from, and some first seeds at
    small presets.
    """
    kept_seeds = experiment(run.experiment).weights
    if find_preset(run.preset).keeps_weights and run.seed < kept_seeds:
        return True
    for other in _all(run.preset).values():
        if isinstance(other, FinetuneConfig) and other.start == run.experiment:
            return True
    return False


def plan(
    preset: str, seeds: Sequence[int] | None = None, only: Sequence[str] | None = None
) -> list[RunConfig]:
    """The runs of a preset, most informative first; of an experiment in `only`, or of all that need
    no download.

    At `seeds`; None: each at its own number of seeds. The first three seeds together: base, the
    headline, the others, then further seeds; what came after the paper, likewise, last. What the
    preset leaves out is trained where it is named.
    """
    seeds = None if seeds is None else [*seeds]
    if only is None:
        names = [name for name in _all(preset) if not experiment(name).download]
    else:
        names = [*only]
    # The names, without what is trained only where it is named.
    left_out = find_preset(preset).leaves_out if only is None else ()
    base = resolve("base", preset)
    runs = []
    for name in dict.fromkeys(resolve(name, preset) for name in names):  # one of equal runs
        if name in left_out:
            continue
        own_seeds = range(experiment(name).seeds)
        for seed in dict.fromkeys(own_seeds if seeds is None else seeds):
            runs.append(config(name, preset, seed))

    # False sorts before True, and the sort keeps the table's order among equals.
    def turn(run: RunConfig) -> tuple[bool, ...]:
        row = experiment(run.experiment)
        after_paper = row.section == AFTER_PAPER
        further_seed = run.seed >= FIRST_SEEDS
        headline = row.seeds >= HEADLINE_SEEDS
        return after_paper, further_seed, row.name != base, not headline

    return sorted(runs, key=turn)


def resolve(name: str, preset: str = "laptop") -> str:
    """The name under which an experiment runs at a preset: of "base", its base; of equal runs, the
    first.
    """
    run = dataclasses.replace(_named(name, preset), experiment="any")
    return _names(preset)[run]


@lru_cache
def _names(preset: str) -> dict[RunConfig, str]:
    """The first experiment, in the table's order, that is a run, by the run without its name."""
    names: dict[RunConfig, str] = {}
    for name, run in _all(preset).items():
        names.setdefault(dataclasses.replace(run, experiment="any"), name)
    return names


def unavailable(preset: str) -> set[str]:
    """The experiments that a preset cannot hold; `config` says why."""
    return EXPERIMENTS.keys() - _all(preset).keys()


@lru_cache
def _all(preset_name: str) -> dict[str, RunConfig]:
    """What a preset can hold, by name and in the table's order."""
    find_preset(preset_name)
    runs = {}
    for name, row in EXPERIMENTS.items():
        if preset_name in row.presets:
            runs[name] = _named(name, preset_name)
    return runs


@lru_cache
def _named(name: str, preset_name: str) -> RunConfig:
    """The run of an experiment at seed 0, under its own name."""
    scale = find_preset(preset_name)
    row = experiment(scale.base if name == "base" else name)
    if preset_name not in row.presets:
        presets = " or ".join(row.presets)
        raise ValueError(
            f"experiment {row.name!r} belongs to preset {presets}, not {preset_name!r}"
        )
    try:
        return _tuning(row, scale) if row.start is not None else _pretraining(row, scale)
    except ValueError as error:
        raise ValueError(
            f"experiment {row.name!r} is not available at preset {preset_name!r}: {error}"
        ) from error


def _pretraining(row: Experiment, scale: Preset) -> RunConfig:
    """The preset, then what its base changes, then what the experiment does."""
    run = RunConfig(row.name, scale.name, 0, scale.model, scale.data, scale.train)
    if row.base:
        run = _override(run, experiment(scale.base).change, scale)
    return _override(run, row.change, scale)


def _tuning(row: Experiment, scale: Preset) -> RunConfig:
    """The pre-training that it starts from, then what every fine-tuning changes, then its own."""
    # A preset of the 1B model has its rows under names of their own.
    known = scale.base if row.start == "base" else str(row.start)
    if scale.name not in experiment(known).presets:
        known += "_1b"
    start = _named(known, scale.name)
    # Everything is as in the pre-training, until it is changed below.
    run: RunConfig = FinetuneConfig(
        row.name, scale.name, 0, start.model, start.data, start.train, start.experiment
    )
    run = _override(run, scale.tuning | TUNING, scale)
    # One epoch, of which a tenth is warm-up.
    steps = run.pairs // run.train.batch_size  # type: ignore[attr-defined]
    run = _override(run, {"train.steps": steps, "train.warmup_steps": steps // 10}, scale)
    return _override(run, row.change, scale)


def _override(run: RunConfig, change: Json, scale: Preset) -> RunConfig:
    """The run with the fields at dotted paths replaced. Only the whole is checked."""
    values = dataclasses.asdict(run)
    for path, value in change.items():
        *parts, name = path.split(".")
        inner = values
        for part in parts:
            inner = inner[part]
        inner[name] = _scaled(value, inner[name], run.model, scale)
    whole: RunConfig = from_dict(type(run), values)
    return whole


def _scaled(value: Any, old: Any, base: LMConfig, scale: Preset) -> Any:
    """The value of a change at a preset: {"times": 2} is twice the base's.

    {"times": 1/4, "of": "context"} is a quarter of that, and at most the base's value where it has
    one. Whole numbers stay whole, and what is not in braces stays as it is. old, base: the base's
    value, and its model.
    """
    if not isinstance(value, dict):
        return tuple(value) if isinstance(value, list) else value
    of = value.get("of")
    context = base.context_length
    share = float(Fraction(value["times"]))
    reference: Any  # an int or a float, as the field
    if of == "context":
        reference = context
    elif of == "head_dim":
        reference = base.head_dim
    elif of == "step_tokens":  # by a context: the batch size that has as many tokens as the base's
        reference = old * context
    elif of == "four_epochs":
        reference = scale.four_epochs
    elif of == "minus_log_context":
        reference = -math.log(context)
    else:
        reference = old
    # What counts something is a whole number of at least 1.
    result = share * reference
    if isinstance(reference, int):
        result = max(1, int(result + 0.5))
    return min(result, old) if of == "context" and old else result
