"""An experiment at a preset is a run: `config` joins them, `plan` says which runs a preset has, in which order.

Fine-tuning (Appendix D): all weights, a rate of 2e-5 with a cosine schedule, batches of 64 sequences of C tokens, one
epoch of the 200k conversations of UltraChat. What the appendix leaves open is as in the published recipe of the
platform that it names, for that data set: warm-up over a tenth of the steps, a cosine to zero, AdamW with betas 0.9 and
0.999 and without weight decay, gradients clipped at 1. The rate stays a twentieth of pre-training's.

What a small scale cannot hold. Rows may coincide (d_a = 1 and 2 of a head of 16): such names are one run, and
`resolve` says which. A window w < T hides x_1 from most of the T queries of the metric, so that alpha_1 <= w / T: the
window experiments measure at T <= C / 4 (the paper: 64 of 2048, so no change there), and `largest_alpha` tells which of
them can reach epsilon at all.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.experiments import AFTER_PAPER, EXPERIMENTS, Experiment, Scaled, experiment
from sinkutils.study.presets import Preset, preset
from sinkutils.study.record import config_hash

SEEDS = (0, 1, 2)
HEADLINE_SEEDS = (0, 1, 2, 3, 4, 5)
TUNING_RATE = 2e-5 / 4e-4  # fine-tuning over pre-training
TUNING_WARMUP = 0.1  # of the steps


def config(name: str, preset: str = "laptop", seed: int = 0) -> RunConfig:
    """The run of an experiment ("base": the preset's base) at a preset.

    Where two experiments coincide at this preset, both give the run of the first, under its name (`resolve`).
    Raises ValueError for unknown names, and with the reason where the preset cannot hold the experiment.
    """
    run = dataclasses.replace(_build(resolve(name, preset), preset), seed=seed)
    if isinstance(run, FinetuneConfig):
        return dataclasses.replace(run, start_sha256=config_hash(config(run.start, preset, seed)))
    return run


def keeps_weights(run: RunConfig) -> bool:
    """Whether the record of a run keeps its weights: of what a fine-tuning starts from, and the first seeds of
    some experiments at small presets.
    """
    shown = run.seed < experiment(run.experiment).weights and preset(run.preset).keeps_weights
    return shown or any(
        run.experiment == other.start for other in _all(run.preset)[0].values() if isinstance(other, FinetuneConfig)
    )


def plan(preset: str, seeds: tuple[int, ...] | None = None, only: tuple[str, ...] | None = None) -> list[RunConfig]:
    """The runs of a preset, most informative first; of an experiment in `only`, or of all that need no download.

    seeds None: the headline experiments at HEADLINE_SEEDS and the others at SEEDS. All SEEDS of an experiment come
    together, since no verdict rests on fewer: the base, the headline, the others, then more seeds of the headline, then
    what came after the paper. A fine-tuning is as headline as what it starts from, and comes after it. Otherwise all
    experiments at each of `seeds`.
    """
    names = only or tuple(name for name in _all(preset)[0] if not experiment(name).download)
    runs = {run.experiment: run for run in (config(name, preset) for name in names)}
    base = resolve("base", preset)
    headline = {name for name, run in runs.items() if experiment(getattr(run, "start", name)).headline}
    after = {name for name in runs if experiment(name).section == AFTER_PAPER}
    first = sorted(runs, key=lambda name: (name in after, name != base, name not in headline))
    if seeds is not None:
        return [config(name, preset, seed) for seed in seeds for name in first]
    pairs = [(name, seed) for name in first if name not in after for seed in SEEDS]
    pairs += [(name, seed) for name in first if name in headline for seed in HEADLINE_SEEDS if seed not in SEEDS]
    pairs += [(name, seed) for name in first if name in after for seed in SEEDS]
    return [config(name, preset, seed) for name, seed in pairs]


def resolve(name: str, preset: str = "laptop") -> str:
    """The name under which an experiment runs at a preset: of "base", its base; of equal runs, the first."""
    own = _build(name, preset)
    built, _ = _all(preset)
    return next(first for first, run in built.items() if _same(run, own))


def unavailable(preset: str) -> dict[str, str]:
    """The experiments that a preset cannot hold, with the reason."""
    return dict(_all(preset)[1])


def largest_alpha(run: RunConfig) -> float:
    """The most that alpha_1 can be under the run's mask: min(w, T) / T with a window w, else 1."""
    window, length = run.model.attention.window, run.train.eval_length
    return 1.0 if window is None else min(window, length) / length


@lru_cache
def _all(preset_name: str) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """What a preset can hold, by name and in the table's order, and the reasons for what it cannot."""
    preset(preset_name)
    built, refused = {}, {}
    for row in EXPERIMENTS:
        try:
            built[row.name] = _build(row.name, preset_name)
        except ValueError as error:
            refused[row.name] = str(error)
    return built, refused


@lru_cache
def _build(name: str, preset_name: str) -> RunConfig:
    """The run of an experiment at seed 0, under its own name: preset, then base, then the experiment's overrides."""
    scale = preset(preset_name)
    row = experiment(scale.base if name == "base" else name)
    if preset_name not in row.presets:
        raise ValueError(f"experiment {row.name!r} belongs to preset {' or '.join(row.presets)}, not {preset_name!r}")
    run = RunConfig(row.name, preset_name, model=scale.model, data=scale.data, train=scale.train)
    try:
        if row.start is not None:
            return _override(_finetuning(row, scale), row.overrides)
        if row.base:
            run = _override(run, _scaled(experiment(scale.base).overrides, run, scale))
        return _override(run, _scaled(row.overrides, run, scale))
    except ValueError as error:
        raise ValueError(f"experiment {row.name!r} is not available at preset {preset_name!r}: {error}") from error


def _finetuning(row: Experiment, scale: Preset) -> FinetuneConfig:
    """The fine-tuning of a model that was pre-trained at this preset, under its name there."""
    known = scale.base if row.start == "base" else str(row.start)
    start = _build(known if scale.name in experiment(known).presets else f"{known}_1b", scale.name)
    tuning = scale.tuning
    steps = tuning.pairs // tuning.batch_size
    schedule: dict[str, Any] = {
        "steps": steps,
        "warmup_steps": int(TUNING_WARMUP * steps),
        "eval_every": tuning.eval_every,
    }
    rates: dict[str, Any] = {"learning_rate": TUNING_RATE * start.train.learning_rate, "lr_floor": 0.0, "beta2": 0.999}
    train = dataclasses.replace(start.train, **schedule, **rates, batch_size=tuning.batch_size, weight_decay=0.0)
    before, text = (start.model, start.data, train, start.experiment), (tuning.instructions, tuning.pairs)
    return FinetuneConfig(row.name, scale.name, 0, *before, "", *text)


def _scaled(overrides: dict[str, Any], run: RunConfig, scale: Preset) -> dict[str, Any]:
    """The overrides with every `Scaled` value replaced by what it comes to."""
    return {
        path: value.apply(attrgetter(path)(run), run, scale) if isinstance(value, Scaled) else value
        for path, value in overrides.items()
    }


def _override(run: Any, values: dict[str, Any]) -> Any:
    """A frozen config with the fields at dotted paths replaced, all at once, so that only the whole is checked."""
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        part, _, rest = path.partition(".")
        if rest:
            inner.setdefault(part, {})[rest] = value
        else:
            changes[part] = value
    changes |= {part: _override(getattr(run, part), below) for part, below in inner.items()}
    return dataclasses.replace(run, **changes)


def _same(run: RunConfig, other: RunConfig) -> bool:
    values, others = ({**vars(each), "experiment": ""} for each in (run, other))
    return values == others and type(run) is type(other)
