"""The study: all pre-training runs of the paper's tables and figures, and the fine-tunings.

An experiment (data/experiments.yaml) is described by what it changes in a base run: dotted paths
into `RunConfig`, with their values. A preset (data/presets.yaml) is a scale: a model, a text and a
budget. `config` joins an experiment and a preset to a run. `plan` lists the runs of a preset and
their order. data/paper/pretraining.csv has the paper's values beside the names of the experiments.

Learning rates, steps, batch sizes, windows, d_a and amounts of data scale with the preset
(`_scaled`). Weight decay, prefix, positions, alpha, p, m and numbers of heads are those of the
paper. The warm-up is that of the preset. A window w < T hides x_1 from T - w of the T queries of
the metric, so that alpha_1 <= w / T. So the window experiments measure at T <= C / 4 (in the paper
T is 64 and C is 2048).

At a small scale two experiments may come to the same run. For example, d_a = 1 and d_a = 2 coincide
when they are scaled to a head of 16 dimensions. Such a run is trained once, under the name of the
first experiment, which `resolve` returns.

The files are read when they are first needed. Then the runs of a preset are built once (`_runs`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sinkutils.checks import Refused, choice, instance, real, require, short
from sinkutils.model.config import LMConfig
from sinkutils.paths import LEDGER, PAPER, read_csv, read_own_yaml, read_yaml
from sinkutils.study.config import (
    DataConfig,
    FinetuneConfig,
    Json,
    RunConfig,
    TrainConfig,
    as_json,
    check_field,
    check_name,
    config_dict,
    config_hash,
    from_dict,
    paths_of,
)

# The "section" of experiments from later papers (data/paper/after_paper.csv). The paper has seven.
AFTER_PAPER = "8"
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)
USUAL_PRESETS = ("smoke", "minute", "laptop", "desk", "gpu", "paper")
FIRST_SEEDS = 3  # seeds of every experiment
HEADLINE_SEEDS = 6  # seeds of an experiment on which the paper's headline rests
# The changes that a fine-tuning makes to the pre-training it starts from, beside the preset's
# `tuning`. According to Appendix D, all weights are trained for one epoch, with batches of 64
# sequences of C tokens and a cosine from 2e-5, which is a twentieth of the pre-training rate. The
# rest follows the published recipe of the platform that the appendix names: a warm-up over a tenth
# of the steps, a cosine to zero, AdamW with betas 0.9 and 0.999, no weight decay, and gradients
# clipped at 1.
TUNING = {
    "train.learning_rate": {"times": "1/20"},
    "train.lr_floor": 0.0,
    "train.beta2": 0.999,
    "train.weight_decay": 0.0,
}


@dataclass(frozen=True)
class Preset:
    """A scale of the study: the model, the text and the budget of its experiments.

    data/presets.yaml explains each field.
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


Changed = TypeVar("Changed", RunConfig, Preset)  # what `_override` changes


@cache
def presets() -> dict[str, Preset]:
    """The presets of data/presets.yaml, by name."""
    entries = read_yaml(LEDGER / "presets.yaml")
    return {name: from_dict(Preset, {"name": name, **values}) for name, values in entries.items()}


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError, which lists the presets, if there is none."""
    choice("preset", name, presets())
    return presets()[name]


@dataclass(frozen=True)
class Experiment:
    """One experiment of the study, described by its difference from a base."""

    name: str
    section: str  # 4 to 7; C or D for an appendix; 8 for later papers
    title: str
    change: Json = field(default_factory=dict, hash=False)  # dotted path into the config -> value
    base: bool = True  # whether it changes the preset's base experiment, or else the preset itself
    # small presets keep the weights of this many seeds: 1 if a notebook needs them, 3 for a claim
    weights: int = 0
    seeds: int = 3  # a sweep trains the seeds 0, 1, .., of which a verdict needs at least three
    presets: tuple[str, ...] = USUAL_PRESETS
    start: str | None = None  # for a fine-tuning: the experiment whose weights it starts from
    download: bool = False  # needs the network, and so is trained only when it is asked for by name

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows that the paper has for this run, in the paper's order.

        A cell is empty where our copy of the paper's text lacks it.
        """
        return _reported().get(self.name, [])

    @property
    def item(self) -> str:
        """The first table of the paper with this run, else the first figure or section, else ""."""
        items = [row["item"] for row in self.rows]
        for item in items:
            if item.startswith("Table"):
                return item
        return items[0] if items else ""

    @property
    def paper(self) -> dict[str, float]:
        """The numbers that the paper reports: sink_1 to sink_4, sink_star (percent), valid_loss."""
        numbers = {}
        for row in self.rows:
            for name, cell in row.items():
                if cell and name.startswith(("sink_", "valid_")):
                    numbers[name] = float(cell)
        return numbers


@cache
def _reported() -> dict[str, list[dict[str, str]]]:
    """The rows of data/paper/pretraining.csv by experiment, in the paper's order."""
    rows: dict[str, list[dict[str, str]]] = {}
    for row in read_csv(PAPER / "pretraining.csv"):
        # The paper's base is the experiment "default".
        name = "default" if row["experiment"] == "base" else row["experiment"]
        rows.setdefault(name, []).append(row)
    return rows


@cache
def by_name() -> dict[str, Experiment]:
    """The experiments of data/experiments.yaml by name, in the order of the file."""
    rows = {}
    for group in read_yaml(LEDGER / "experiments.yaml"):
        at = tuple(group.get("presets", USUAL_PRESETS))
        for name, fields in group["experiments"].items():
            rows[name] = Experiment(name, group["section"], **fields, presets=at)
    return rows


def experiments(section: str | None = None) -> list[Experiment]:
    """All experiments, or those of one section: 4, 5, 6, 7, C, D, or 8 for later papers."""
    rows = [*by_name().values()]
    if section is None:
        return rows
    choice("section", str(section), SECTIONS)
    return [row for row in rows if row.section == str(section)]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError, which suggests similar names."""
    instance("experiment", name, str)
    rows = by_name()
    if name in rows:
        return rows[name]
    close = ", ".join(difflib.get_close_matches(name, rows, n=5, cutoff=0.5))
    hint = f"did you mean {close}? " if close else ""
    raise Refused(
        f"unknown experiment {name!r}: {hint}`python -m sinkutils list` shows all {len(rows)}"
    )


def config(
    experiment: str,
    preset: str | Path | Json = "laptop",
    seed: int = 0,
    *,
    change: Json | None = None,
    name: str | None = None,
) -> RunConfig:
    """The run of an experiment at a preset, or of a variant of your own.

    experiment: its name; "base" is the preset's base experiment. If several experiments coincide at
        this preset, the run has the name of the first (`resolve`).
    preset: the name of a preset of the study, or one of your own (`own_preset`).
    change: what your variant changes, by dotted path, such as {"model.attention.scale": 0.5}.
    name: the name of your variant and of its records. It is needed with `change`, and must be no
        experiment of the study.

    Raises ValueError for unknown names, with similar ones; for an experiment that is not possible
    at the preset; and for a change to a field that does not exist, or to a value that it cannot
    have.
    """
    require(isinstance(change or {}, dict), f"change must be a dict, got {short(change)}")
    own = not isinstance(preset, str) or preset.endswith((".yaml", ".yml"))
    scale = own_preset(preset) if own else find_preset(str(preset))
    run = dataclasses.replace(_first(experiment, scale), seed=seed)
    if change or name is not None:
        if name is None:
            raise Refused("a variant needs a name of its own: give name, such as 'mine'")
        require(
            str(name).lower() not in ("base", *by_name()),  # some disks do not tell A from a
            f"{name!r} is an experiment of the study: give your variant another name",
        )
        run = _override(dataclasses.replace(run, experiment=name), change or {}, scale)
    if isinstance(run, FinetuneConfig):
        start = config(run.start, scale.name, seed)
        return dataclasses.replace(run, start_sha256=config_hash(start))
    return run


def own_preset(source: str | Path | Json) -> Preset:
    """A preset of your own, from a dict or a YAML file.

    It has a "name". Its other fields are those of data/presets.yaml, as far as they differ from the
    preset that "like" names; the default is laptop. For example:

        {name: tiny, like: smoke, train: {steps: 300}, model: {num_layers: 3}}

    Raises ValueError for a field that does not exist, and OSError if there is no such file.
    """
    values: Any = source
    if isinstance(source, str | Path):
        values = read_own_yaml(source)
    require(
        isinstance(values, dict) and isinstance(values.get("name"), str),
        f"a preset is a name and fields, such as name: tiny, got {short(values)}",
    )
    name = values["name"]
    check_name("preset", name)
    require(name not in presets(), f"{name!r} is a preset of the study: give yours another name")
    like = find_preset(values.get("like", "laptop"))
    change: Json = {}
    for part, value in values.items():
        if part in ("model", "data", "train"):
            require(isinstance(value, dict), f"{part} of a preset must be fields and values")
            change |= {f"{part}.{inner}": number for inner, number in value.items()}
        elif part not in ("name", "like"):
            change[part] = value
    made = _override(dataclasses.replace(like, name=name), change, like)
    experiment(made.base)
    choice("device", made.device, ("cpu", "cuda", "mps"))
    real("four_epochs", made.four_epochs, "a number greater than 0", more=True)
    real("seconds", made.seconds, "a number greater than 0", more=True)
    return made


def contents(name: str, preset: str, seed: int) -> Json:
    """`config_dict` of `config`, for many records: it builds no config. Callers must not change it.

    Raises the errors of `config`.
    """
    run = _first(name, find_preset(preset))
    if isinstance(run, FinetuneConfig):
        return config_dict(config(name, preset, seed))
    return {**_contents(run), "seed": seed}


_contents = cache(config_dict)


def resolve(name: str, preset: str = "laptop") -> str:
    """The name under which an experiment runs at a preset.

    For "base" it is the preset's base experiment. If several experiments come to the same run, it
    is the first of them in data/experiments.yaml.
    """
    return _first(name, find_preset(preset)).experiment


def _first(name: str, scale: Preset) -> RunConfig:
    """The run of an experiment at a preset and seed 0, as `config`."""
    row = experiment(scale.base if name == "base" else name)
    if scale.name not in presets():  # one of your own
        require(
            row.start is None,
            f"{row.name!r} is a fine-tuning, which starts from a record: give a preset of the "
            "study",
        )
        return _pretraining(row, scale)
    if scale.name not in row.presets:
        known = " or ".join(row.presets)
        raise Refused(f"experiment {row.name!r} belongs to preset {known}, not {scale.name!r}")
    return _runs(scale.name)[row.name]


def unavailable(preset: str) -> set[str]:
    """The experiments that are not possible at a preset. `config` raises with the reason."""
    return by_name().keys() - _runs(preset).keys()


def keeps_weights(run: RunConfig) -> bool:
    """Whether the record of a run keeps its weights.

    It does if a fine-tuning starts from them, and for some first seeds at small presets.
    """
    if run.experiment not in by_name() or run.preset not in presets():
        return False  # a variant of one's own
    kept_seeds = experiment(run.experiment).weights
    if find_preset(run.preset).keeps_weights and run.seed < kept_seeds:
        return True
    for other in _runs(run.preset).values():
        if isinstance(other, FinetuneConfig) and other.start == run.experiment:
            return True
    return False


def plan(
    preset: str,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    change: Json | None = None,
    name: str | None = None,
) -> list[RunConfig]:
    """The runs of a preset, the most informative first, or those of a variant of your own.

    seeds: the seeds of every experiment. None means that each has its own number of seeds.
    only: the names of the experiments. None means all that need no download and that the preset
    does not leave out; these others are trained only when `only` names them.
    change, name: a variant, as for `config`, of the base or of the one experiment in `only`. It has
    three seeds if `seeds` does not say which.

    The first three seeds come first: the base, then the headline experiments, then the others.
    Further seeds follow in the same order. Experiments from later papers come last.
    """
    seeds = None if seeds is None else [*seeds]
    if change or name is not None:
        names = ["base"] if only is None else [*only]
        require(
            len(names) == 1, f"a variant changes one experiment, got {', '.join(names) or 'none'}"
        )
        numbers = range(FIRST_SEEDS) if seeds is None else seeds
        return [config(names[0], preset, seed, change=change, name=name) for seed in numbers]
    if only is None:
        left_out = find_preset(preset).leaves_out
        names = [name for name in _runs(preset) if not experiment(name).download]
        names = [name for name in names if resolve(name, preset) not in left_out]
    else:
        names = [*only]
    base = resolve("base", preset)
    runs = []
    for name in dict.fromkeys(resolve(name, preset) for name in names):  # equal runs count once
        own_seeds = range(experiment(name).seeds)
        for seed in dict.fromkeys(own_seeds if seeds is None else seeds):
            runs.append(config(name, preset, seed))

    # False sorts before True. Among equals, sorted() keeps the order of data/experiments.yaml.
    def turn(run: RunConfig) -> tuple[bool, ...]:
        row = experiment(run.experiment)
        after_paper = row.section == AFTER_PAPER
        further_seed = run.seed >= FIRST_SEEDS
        headline = row.seeds >= HEADLINE_SEEDS
        return after_paper, further_seed, row.name != base, not headline

    return sorted(runs, key=turn)


@cache
def _runs(preset: str) -> dict[str, RunConfig]:
    """The run of each experiment that is possible at a preset, by name, at seed 0.

    Experiments that come to the same run share it, under the name of the first.
    """
    scale = find_preset(preset)
    runs: dict[str, RunConfig] = {}
    first: dict[RunConfig, RunConfig] = {}  # a run without its name -> the first such run
    for name, row in by_name().items():
        if preset not in row.presets:
            continue
        try:
            run = _pretraining(row, scale) if row.start is None else _tuning(row, scale)
        except ValueError as error:
            raise Refused(
                f"experiment {name!r} is not available at preset {preset!r}: {error}"
            ) from error
        nameless = dataclasses.replace(run, experiment="any")
        runs[name] = first.setdefault(nameless, run)
    return runs


def _pretraining(row: Experiment, scale: Preset) -> RunConfig:
    """The run of a pre-training: the preset, changed by its base and then by the experiment."""
    run = RunConfig(row.name, scale.name, 0, scale.model, scale.data, scale.train)
    if row.base:
        run = _override(run, experiment(scale.base).change, scale)
    return _override(run, row.change, scale)


def _tuning(row: Experiment, scale: Preset) -> RunConfig:
    """The run of a fine-tuning: the pre-training from which it starts, with two kinds of changes.

    First come the changes that all fine-tunings share, then those of the experiment.
    """
    # At a preset of the 1B model the experiments have names that end with "_1b".
    known = scale.base if row.start == "base" else str(row.start)
    if scale.name not in experiment(known).presets:
        known += "_1b"
    start = _pretraining(experiment(known), scale)
    # Everything is as in the pre-training, except for the changes below.
    run: RunConfig = FinetuneConfig(
        row.name, scale.name, 0, start.model, start.data, start.train, start.experiment
    )
    run = _override(run, scale.tuning | TUNING, scale)
    # The training lasts one epoch, of which a tenth is warm-up.
    steps = run.pairs // run.train.batch_size  # type: ignore[attr-defined]
    run = _override(run, {"train.steps": steps, "train.warmup_steps": steps // 10}, scale)
    return _override(run, row.change, scale)


def _override(run: Changed, change: Json, scale: Preset) -> Changed:
    """The run or preset with the fields at dotted paths replaced. It is checked after all changes.

    Raises ValueError for a path that leads to no field, with similar ones.
    """
    known = [*paths_of(run)]
    values = as_json(run)
    for path, value in change.items():
        check_field(path, known)
        inner = values
        *parts, name = path.split(".")
        for part in parts:
            inner = inner[part]
        inner[name] = _scaled(value, inner[name], run.model, scale)
    whole: Changed = from_dict(type(run), values)
    return whole


def _scaled(value: Any, old: Any, base: LMConfig, scale: Preset) -> Any:
    """The value that a change has at a preset.

    {"times": 2} is twice the base's value, `old`. With "of", another number is multiplied instead:
    {"times": 1/4, "of": "context"} is a quarter of the context length, but at most the base's value
    if there is one. A count stays a whole number. A value that is no dict is used as it is.
    base: the model before this change.
    """
    if isinstance(old, float) and type(value) is int:
        return float(value)
    if not isinstance(value, dict) or isinstance(old, dict):  # a dict only in a preset's `tuning`
        return value
    require("times" in value and value.keys() <= {"times", "of"}, f"no such multiple: {value}")
    of = value.get("of")
    context = base.context_length
    try:
        share = float(Fraction(value["times"]))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise Refused(f"no such multiple: {value}") from error
    number = old if isinstance(old, int | float) else None
    references = {
        None: number,
        "context": context,
        "head_dim": base.head_dim,
        # The tokens of a step. Divided by a context length, they give the batch size with which a
        # step has as many tokens as in the base.
        "step_tokens": number and number * context,
        "four_epochs": scale.four_epochs,
        "minus_log_context": -math.log(context),
    }
    require(of in [*references], f"a change cannot be a multiple of {of!r}")
    reference = references[of]
    if reference is None:
        raise Refused(f"there is no number to take {value} of")
    # A count is a whole number of at least 1.
    result = share * reference
    if isinstance(reference, int):
        result = max(1, int(result + 0.5))
    return min(result, old) if of == "context" and old else result
