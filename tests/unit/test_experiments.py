"""The table of experiments: every one at every preset, each changing what it names and nothing else."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from helpers import refused, refuses

from sinkutils import claim_checks
from sinkutils.model.attention import AttentionSpec
from sinkutils.model.decoder import LMConfig
from sinkutils.paths import PAPER
from sinkutils.study import grid
from sinkutils.study.config import (
    DataConfig,
    RunConfig,
    TrainConfig,
    config_dict,
    config_hash,
    from_dict,
)
from sinkutils.study.grid import (
    Experiment,
    by_name,
    config,
    experiment,
    experiments,
    find_preset,
    plan,
    presets,
    resolve,
    unavailable,
)
from sinkutils.study.store import Runs

REPORTED = pd.read_csv(PAPER / "pretraining.csv")
SMALL = ("smoke", "minute", "laptop", "desk", "gpu", "paper")
# Where the default is the base, there is no fixed token to leave out.
DEFAULT = {f"{name}_default": name for name in ("prefix_5", "learnable", "sink_token")}
DIMS = {f"k_bias_dims_{d}": "k_bias_dims_1" for d in (2, 4, 8)}
# The rows that coincide at a scale: name -> the run they share.
SAME = {
    "smoke": {"heads_2": "fixed_1", "depth_2": "fixed_1", "weight_decay_0.1": "fixed_1", **DIMS},
    "laptop": {"heads_4": "fixed_1", "weight_decay_0.1": "fixed_1", **DIMS},
    "paper-1b": {f"sft_{name}_ultrachat": f"sft_{name}" for name in ("softmax", "sigmoid")},
}


def of(scale: str) -> list[Experiment]:
    return [e for e in experiments() if scale in e.presets]


def missing(preset, runs, seeds=None, only=None):
    return [(run.experiment, run.seed) for run in Runs(runs).missing(preset, seeds, only=only)]


def flat(value, prefix=""):
    """A config as {dotted path: value}."""
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    parts = {}
    for field in dataclasses.fields(value):
        path = f"{prefix}.{field.name}" if prefix else field.name
        parts |= flat(getattr(value, field.name), path)
    return parts


def changes(run: RunConfig, base: RunConfig) -> dict:
    """The paths in which two runs differ, apart from the name, with the new values."""
    before, after = flat(base), flat(run)
    changed = {path for path in after if after[path] != before[path]}
    return {path: after[path] for path in changed - {"experiment"}}


@pytest.mark.parametrize("scale", SMALL)
def test_every_experiment_is_available_at_every_preset_and_changes_exactly_what_it_names(scale):
    assert unavailable(scale) == {e.name for e in by_name().values() if scale not in e.presets}
    base, plain = config("base", scale), config("default", scale)
    for row in of(scale):
        run = config(row.name, scale, seed=3)
        assert (run.preset, run.seed) == (scale, 3)
        if row.start or resolve(row.name, scale) != row.name:
            continue
        changed = changes(dataclasses.replace(run, seed=0), base if row.base else plain)
        assert set(changed) <= set(row.change) and (changed or row.name == "default"), row.name
        values = flat(run)
        for path, value in row.change.items():
            as_it_stands = tuple(value) if isinstance(value, list) else value
            assert isinstance(value, dict) or values[path] == as_it_stands, (row.name, path)


@pytest.mark.parametrize("scale", presets())
def test_two_names_are_one_run_only_where_a_preset_cannot_tell_them_apart(scale):
    own = {e.name: resolve(e.name, scale) for e in of(scale)}
    same = {name: first for name, first in own.items() if name != first}
    assert same == SAME.get(scale, same)
    assert all(config(name, scale) == config(first, scale) for name, first in same.items())
    runs = [config(name, scale, seed=2) for name in dict.fromkeys(own.values())]
    contents = [json.dumps({**config_dict(run), "experiment": ""}, sort_keys=True) for run in runs]
    assert len(set(contents)) == len(contents)
    for run, content in zip(runs, contents, strict=True):
        values = {**json.loads(content), "experiment": run.experiment}
        values.pop("recipe")
        assert from_dict(type(run), values) == run


def test_the_base_is_a_fixed_first_token_where_the_default_shows_no_sink():
    bases = [*["fixed_1"] * 3, *["default"] * 3, "softmax_1b"]
    assert [scale.base for scale in presets().values()] == bases
    for name, position in (("base", 1), ("k_bias", 1), ("default", None)):
        assert config(name, "laptop").data.fixed_position == position
    # variants without a fixed token change the default and not the base
    for name, with_it in DEFAULT.items():
        assert config(name, "laptop").data.fixed_position is None
        assert config(name, "laptop").model == config(with_it, "laptop").model
        assert config(with_it, "laptop").data.fixed_position == 1
    # which hides no redrawn token
    for data in (config(e.name, "laptop").data for e in of("laptop")):
        assert data.fixed_position not in data.random_positions


def test_the_paper_preset_is_the_recipe_of_section_4():
    run = config("default", "paper")
    model, schedule = run.model, run.train
    assert (model.hidden_size, model.num_layers) == (768, 10)
    assert (model.num_heads, model.intermediate_size) == (8, 1536)
    assert (model.context_length, model.vocab_size) == (2048, 50_432)
    assert (model.position, model.ffn) == ("rotary", "swiglu")
    assert schedule.batch_size * model.context_length == 2**20  # 1M tokens
    rates = (schedule.steps, schedule.warmup_steps, schedule.learning_rate, schedule.weight_decay)
    assert rates == (20_000, 100, 4e-4, 0.1)
    assert (schedule.beta1, schedule.beta2) == (0.9, 0.95)
    assert (schedule.clip_norm, schedule.lr_floor) == (1.0, 0.1)
    assert (schedule.eval_sequences, schedule.eval_length) == (100, 64)
    assert (run.data.corpus, run.data.validation) == ("pile", "pile:Pile-CC")
    assert config("default_constant_lr", "paper").train.lr_floor == 1.0


PAPERS = {  # what a row scales by the preset, and what it comes to at the paper's
    "train.learning_rate": {
        "lr_x2": 8e-4,
        "lr_half": 2e-4,
        "lr_quarter": 1e-4,
        "lr_x2.5": 1e-3,
        "lr_x0.025": 1e-5,
    },
    "train.steps": {"lr_quarter_steps_x2": 40_000, "lr_x0.025": 80_000, "lr_x2_steps_half": 10_000},
    "train.batch_size": {"batch_quarter": 2**7, "batch_half": 2**8, "batch_x2": 2**10},
    "model.attention.window": {f"window_1_{n}": 2048 // n for n in (64, 32, 16, 8, 4, 2)},
    "model.attention.bias_dims": {f"k_bias_dims_{n}": n for n in (1, 2, 4, 8, 16, 32, 64)},
}


@pytest.mark.parametrize("path", PAPERS)
def test_scaled_values_come_to_the_papers_at_the_paper_preset(path):
    for name, value in PAPERS[path].items():
        assert flat(config(name, "paper"))[path] == pytest.approx(value), name


def test_unknown_names_are_refused_with_what_there_is():
    refuses(r"did you mean .*k_bias.*sinkutils list", experiment, "k_biass")
    refuses("smoke, minute, laptop, desk, gpu, paper", find_preset, "lap")
    refuses("belongs to preset paper-1b", config, "softmax_1b", "laptop")
    refuses("4, 5, 6, 7, C, D, 8", experiments, "9")


def test_a_wrong_value_in_the_table_is_an_error_and_no_experiment_that_vanishes(monkeypatch):
    changes = {"model.attention.similarity": "sigmod"}
    wrong = Experiment("wrong", "8", "a misspelt similarity", changes)
    monkeypatch.setitem(by_name(), "wrong", wrong)
    grid._runs.cache_clear()
    with refused("'wrong' is not available at preset 'minute': similarity must be one of"):
        unavailable("minute")
    misspelt = {"model.attention.window": {"times": 0.5, "of": "contxt"}}
    monkeypatch.setitem(by_name(), "wrong", Experiment("wrong", "6", "of nothing", misspelt))
    grid._runs.cache_clear()
    with refused("cannot be a multiple of 'contxt'"):
        unavailable("minute")
    grid._runs.cache_clear()


def test_a_sweep_starts_with_the_base_ends_with_what_came_after_and_trains_nothing_twice(tmp_path):
    pairs = missing("laptop", tmp_path)
    assert len(set(pairs)) == len(pairs)
    assert pairs[:3] == [("fixed_1", seed) for seed in (0, 1, 2)]
    rows = {name: experiment(name) for name, _ in pairs}
    assert set(pairs) == {(name, seed) for name, row in rows.items() for seed in range(row.seeds)}
    later = [rows[name].section == "8" for name, _ in pairs]
    assert later == sorted(later)
    ours = [pair for pair, after in zip(pairs, later, strict=True) if not after]
    further = [seed > 2 for _, seed in ours]
    assert further == sorted(further), "all have three seeds before one has more"
    first = [rows[name].seeds == 6 for name, seed in ours[3:] if seed == 0]
    assert first == sorted(first, reverse=True), "the headline comes first"
    assert missing("laptop", tmp_path, (1,), ("sft_sigmoid_ultrachat",)) == [
        ("sft_sigmoid_ultrachat", 1)
    ]
    assert missing("laptop", tmp_path, (1, 1), ("fixed_1",)) == [("fixed_1", 1)]
    two = [("random_1_depth_6", 0), ("random_1_depth_6", 1)]
    assert missing("laptop", tmp_path, only=("random_1_depth_6",)) == two


def test_a_plan_of_no_experiments_or_of_no_seeds_is_empty():
    assert plan("minute", only=[]) == plan("minute", seeds=[]) == []


def test_seeds_may_come_from_an_iterator():
    names = ["k_bias", "v_bias"]
    assert plan("smoke", iter([0, 1]), iter(names)) == plan("smoke", [0, 1], names)


@pytest.mark.parametrize("name", ["fixed_position", "random_positions", "unscored"])
def test_a_position_that_no_chunk_has_is_refused(name):
    position = 65 if name == "fixed_position" else (1, 65)
    with refused("position 65 is beyond context_length 64"):
        RunConfig("x", "smoke", data=DataConfig(**{name: position}))


def test_numpys_numbers_make_the_run_that_pythons_make():
    """Our own frames hand them out, and JSON takes none."""
    given = {"num_layers": np.int64(2), "qk_norm": np.True_}
    model = LMConfig(**given, attention=AttentionSpec(scale=np.float32(0.5), window=np.int64(8)))
    assert model == LMConfig(
        num_layers=2, qk_norm=True, attention=AttentionSpec(scale=0.5, window=8)
    )
    data = DataConfig(random_positions=(np.int64(1), 2))
    run = RunConfig("x", "smoke", np.int64(3), model, data, TrainConfig(steps=np.int64(5)))
    assert config_hash(run) == config_hash(from_dict(RunConfig, dataclasses.asdict(run)))
    assert config("k_bias", "smoke", np.int64(1)) == config("k_bias", "smoke", 1)


@pytest.mark.parametrize("scale", presets())
def test_what_a_preset_leaves_out_exists_carries_no_verdict_and_is_trained_where_it_is_named(scale):
    left_out = find_preset(scale).leaves_out
    swept = {run.experiment for run in grid.plan(scale)}
    assert set(left_out) <= set(by_name()) and not swept & set(left_out)
    for name in left_out:
        assert [run.experiment for run in grid.plan(scale, seeds=[0], only=[name])] == [name]
    if left_out:
        judged = claim_checks(scale).runs.str.split(", ").explode()
        assert not set(judged) & set(left_out)


def test_every_item_of_the_paper_is_covered_once_and_every_row_names_an_experiment():
    rows = pd.read_csv(PAPER / "items.csv")
    assert set(REPORTED.item) == set(rows.item) and not REPORTED.duplicated(["item", "row"]).any()
    named = set(REPORTED.experiment) - {"base"}
    # of later papers: after_paper.csv
    assert named == {e.name for e in by_name().values() if e.section != "8"}


def test_an_experiment_has_the_same_numbers_wherever_the_paper_repeats_it():
    """Those of the default run, 18.18 and 3.73, always both; cells that are lost in the text stay empty."""
    numbers = REPORTED.filter(regex="sink_|valid_")
    rows = [dict(row.dropna()) for _, row in numbers.iterrows()]
    named = zip(rows, REPORTED.experiment, strict=True)
    default = [row for row, name in named if name in ("base", "default")]
    assert len(default) >= 18
    assert all(row == {"sink_1": 18.18, "valid_loss": 3.73} for row in default)
    for row, name in zip(rows, REPORTED.experiment, strict=True):
        reported = experiment("default" if name == "base" else name).paper
        assert row.items() <= reported.items(), (name, row, reported)
    stars = REPORTED[REPORTED.item == "Table 5"].sink_star.fillna(-1).tolist()
    assert stars == [-1, -1, -1, -1, 69.74, -1, 0.0]
