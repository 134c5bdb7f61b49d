"""An experiment at a preset is a run: `config` joins them, `plan` says which runs a preset has, in which order.

At a small scale rows may coincide (d_a = 1 and 2 of a head of 16): such names are one run, and `resolve` says which. A
window w < T hides x_1 from most of the T queries of the metric, so that alpha_1 <= w / T: the window experiments
measure at T <= C / 4 (the paper: 64 of 2048).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sinkutils.checks import integer
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, from_dict
from sinkutils.study.experiments import AFTER_PAPER, EXPERIMENTS, experiment, scaled
from sinkutils.study.presets import Preset
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import config_hash

# What a fine-tuning changes in the pre-training that it starts from, beside the preset's `tuning`. Appendix D: all
# weights, batches of 64 sequences of C tokens, one epoch, and a cosine from 2e-5, which stays a twentieth of
# pre-training's rate. The rest is as in the published recipe of the platform that it names: a warm-up over a tenth of
# the steps, a cosine to zero, AdamW with betas 0.9 and 0.999, no weight decay, gradients clipped at 1.
TUNING = {
    "train.learning_rate": {"times": "1/20"},
    "train.lr_floor": 0.0,
    "train.beta2": 0.999,
    "train.weight_decay": 0.0,
}


def config(name: str, preset: str = "laptop", seed: int = 0) -> RunConfig:
    """The run of an experiment ("base": the preset's base) at a preset.

    Where two experiments coincide at this preset, both give the run of the first, under its name (`resolve`).
    Raises ValueError for unknown names, and with the reason where the preset cannot hold the experiment.
    """
    integer("seed", seed, least=0)
    run = dataclasses.replace(
        _build(resolve(name, preset), preset), seed=int(seed)
    )  # also of a table's column
    if isinstance(run, FinetuneConfig):
        return dataclasses.replace(run, start_sha256=config_hash(config(run.start, preset, seed)))
    return run


def keeps_weights(run: RunConfig) -> bool:
    """Whether a record keeps its weights: what a fine-tuning starts from, and some first seeds at small presets."""
    shown = run.seed < experiment(run.experiment).weights and find_preset(run.preset).keeps_weights
    return shown or run.experiment in {
        getattr(other, "start", None) for other in _all(run.preset).values()
    }


def plan(
    preset: str, seeds: Sequence[int] | None = None, only: Sequence[str] | None = None
) -> list[RunConfig]:
    """The runs of a preset, most informative first; of an experiment in `only`, or of all that need no download and
    that the preset does not leave out.

    At `seeds`; None: each at its own number of seeds. The first three seeds together: base, the headline, the others,
    then further seeds; what came after the paper, likewise, last.
    """
    names = only or tuple(name for name in _all(preset) if not experiment(name).download)
    rows = [experiment(name) for name in dict.fromkeys(resolve(name, preset) for name in names)]
    if only is None:
        rows = [row for row in rows if row.name not in find_preset(preset).leaves_out]
    runs = [config(row.name, preset, seed) for row in rows for seed in seeds or range(row.seeds)]
    base = resolve("base", preset)

    def turn(run):
        row = experiment(run.experiment)
        return row.section == AFTER_PAPER, run.seed > 2, row.name != base, row.seeds < 6

    return sorted(runs, key=turn)


@lru_cache(maxsize=4096)
def resolve(name: str, preset: str = "laptop") -> str:
    """The name under which an experiment runs at a preset: of "base", its base; of equal runs, the first."""
    own = _build(name, preset)
    return next(
        first
        for first, run in _all(preset).items()
        if dataclasses.replace(own, experiment=first) == run
    )


def unavailable(preset: str) -> set[str]:
    """The experiments that a preset cannot hold; `config` says why."""
    return {row.name for row in EXPERIMENTS} - _all(preset).keys()


@lru_cache
def _all(preset_name: str) -> dict[str, RunConfig]:
    """What a preset can hold, by name and in the table's order."""
    find_preset(preset_name)
    # A value that is wrong is no reason to leave an experiment out: it raises.
    return {
        row.name: _build(row.name, preset_name) for row in EXPERIMENTS if preset_name in row.presets
    }


@lru_cache
def _build(name: str, preset_name: str) -> RunConfig:
    """The run of an experiment at seed 0, under its own name: preset, then base, then what the experiment changes."""
    scale = find_preset(preset_name)
    row = experiment(scale.base if name == "base" else name)
    if preset_name not in row.presets:
        raise ValueError(
            f"experiment {row.name!r} belongs to preset {' or '.join(row.presets)}, not {preset_name!r}"
        )
    run = RunConfig(row.name, preset_name, 0, scale.model, scale.data, scale.train)
    try:
        if row.start is not None:
            known = scale.base if row.start == "base" else row.start
            start = _build(
                known if preset_name in experiment(known).presets else f"{known}_1b", preset_name
            )
            run = FinetuneConfig(
                row.name, preset_name, 0, start.model, start.data, start.train, start.experiment
            )
            run = _override(run, scale.tuning | TUNING, scale)
            steps = run.pairs // run.train.batch_size
            run = _override(run, {"train.steps": steps, "train.warmup_steps": steps // 10}, scale)
        elif row.base:
            run = _override(run, experiment(scale.base).change, scale)
        return _override(run, row.change, scale)
    except ValueError as error:
        raise ValueError(
            f"experiment {row.name!r} is not available at preset {preset_name!r}: {error}"
        ) from error


def _override(run: RunConfig, change: Json, scale: Preset) -> Any:
    """The run with the fields at dotted paths replaced. Only the whole is checked."""
    values = dataclasses.asdict(run)
    for path, value in change.items():
        *parts, name = path.split(".")
        inner = values
        for part in parts:
            inner = inner[part]
        inner[name] = scaled(value, inner[name], run, scale)
    return from_dict(type(run), values)
