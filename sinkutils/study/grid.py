"""An experiment at a preset is a run: `config` joins them, `plan` says which runs a preset has, in
which order.

At a small scale rows may coincide (d_a = 1 and 2 of a head of 16): such names are one run, and
`resolve` says which. A window w < T hides x_1 from most of the T queries of the metric, so that
alpha_1 <= w / T: the window experiments measure at T <= C / 4 (the paper: 64 of 2048).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

from sinkutils.checks import integer
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, from_dict
from sinkutils.study.experiments import (
    AFTER_PAPER,
    EXPERIMENTS,
    Experiment,
    Preset,
    experiment,
    scaled,
)
from sinkutils.study.experiments import preset as find_preset
from sinkutils.study.record import config_hash

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

FIRST_SEEDS = 3  # of every setting
HEADLINE_SEEDS = 6  # of a setting that the paper's headline rests on


def config(name: str, preset: str = "laptop", seed: int = 0) -> RunConfig:
    """The run of an experiment ("base": the preset's base) at a preset.

    Where two experiments coincide at this preset, both give the run of the first, under its name
    (`resolve`). Raises ValueError for unknown names, and with the reason where the preset cannot
    hold the experiment.
    """
    integer("seed", seed, least=0)
    first = _named(resolve(name, preset), preset)
    run = dataclasses.replace(first, seed=int(seed))  # of a table's column it may be NumPy's
    if isinstance(run, FinetuneConfig):
        return dataclasses.replace(run, start_sha256=config_hash(config(run.start, preset, seed)))
    return run


def keeps_weights(run: RunConfig) -> bool:
    """Whether a record keeps its weights: what a fine-tuning starts from, and some first seeds at
    small presets.
    """
    if find_preset(run.preset).keeps_weights and run.seed < experiment(run.experiment).weights:
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
    names = only or [name for name in _all(preset) if not experiment(name).download]
    names = list(dict.fromkeys(resolve(name, preset) for name in names))  # one of equal runs
    if only is None:
        names = [name for name in names if name not in find_preset(preset).leaves_out]
    base = resolve("base", preset)
    runs = []
    for name in names:
        for seed in dict.fromkeys(seeds or range(experiment(name).seeds)):
            runs.append(config(name, preset, seed))

    # False sorts before True, and the sort keeps the table's order among equals.
    def turn(run: RunConfig) -> tuple[bool, ...]:
        row = experiment(run.experiment)
        after_paper = row.section == AFTER_PAPER
        further_seed = run.seed >= FIRST_SEEDS
        headline = row.seeds >= HEADLINE_SEEDS
        return after_paper, further_seed, row.name != base, not headline

    return sorted(runs, key=turn)


@lru_cache(maxsize=4096)
def resolve(name: str, preset: str = "laptop") -> str:
    """The name under which an experiment runs at a preset: of "base", its base; of equal runs, the
    first.
    """
    own = _named(name, preset)
    for first, run in _all(preset).items():
        if dataclasses.replace(own, experiment=first) == run:
            return first
    raise AssertionError("an experiment equals itself")


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
        inner[name] = scaled(value, inner[name], run, scale)
    whole: RunConfig = from_dict(type(run), values)
    return whole
