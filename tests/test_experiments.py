"""The table of experiments: every one at every preset, each changing what it names and nothing else."""

import dataclasses
import json
from importlib import import_module

import pytest
import torch

from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.study.experiments import EXPERIMENTS, Experiment, experiment, experiments
from sinkutils.study.grid import config, largest_alpha, plan, resolve, unavailable
from sinkutils.study.presets import PRESETS, preset
from sinkutils.study.record import config_dict, record_folder, write_record
from sinkutils.study.store import Runs
from sinkutils.training.run import next_token_loss

SMALL = ("smoke", "laptop", "gpu", "paper")
HEADLINE = {
    *("default", "fixed_1", "learnable", "post_norm", "sink_token", "k_bias", "kv_bias", "v_bias"),
    *("sigmoid", "sigmoid_normalised", "prefix_5", "window_1_64", "window_1_2", "weight_decay_0", "weight_decay_5"),
    *("sft_softmax", "sft_sigmoid"),  # by what they start from
}
# Where the default is the base, there is no fixed token to leave out.
DEFAULT = {f"{name}_default": name for name in ("prefix_5", "learnable", "sink_token")}
ULTRACHAT = {f"sft_{name}_ultrachat": f"sft_{name}" for name in ("softmax", "sigmoid")}  # the paper's own
# The rows that coincide at a scale: name -> the run they share.
SAME = {
    "smoke": {"heads_2": "fixed_1", "depth_2": "fixed_1", **{f"k_bias_dims_{d}": "k_bias_dims_1" for d in (2, 4, 8)}},
    "laptop": {"heads_4": "fixed_1", **{f"k_bias_dims_{d}": "k_bias_dims_1" for d in (2, 4, 8)}},
    "gpu": {
        **DEFAULT,
        **{"constant_lr": "default_constant_lr", "window_none": "default", "heads_8": "default"},
        "k_bias_dims_2": "k_bias_dims_1",
        "context_512": "default",
    },
    "paper": {
        **DEFAULT,
        **{"constant_lr": "default_constant_lr", "window_none": "default", "heads_8": "default"},
        "data_share_1": "default",
        **ULTRACHAT,
    },
    "paper-1b": ULTRACHAT,
}


def missing(preset, runs, seeds=None, only=None):
    return [(run.experiment, run.seed) for run in Runs(runs).missing(preset, seeds, only=only)]


def flat(value, prefix=""):
    """A config as {dotted path: value}."""
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    found = {}
    for field in dataclasses.fields(value):
        found |= flat(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    return found


def changes(run: RunConfig, base: RunConfig) -> dict:
    """The paths in which two runs differ, apart from the name, with the new values."""
    before, after = flat(base), flat(run)
    return {path: after[path] for path in after if after[path] != before[path] and path != "experiment"}


def test_names_are_unique_and_read_as_file_names():
    names = [e.name for e in EXPERIMENTS]
    assert len(set(names)) == len(names) >= 113
    assert all(name == name.lower() and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.") for name in names)


@pytest.mark.parametrize("scale", SMALL)
def test_every_experiment_is_available_at_every_preset(scale):
    after = {e.name for e in experiments("8")} if scale == "paper" else set()
    assert set(unavailable(scale)) == {"softmax_1b", "sigmoid_1b"} | after
    for one in experiments():
        if scale in one.presets:
            run = config(one.name, scale, seed=3)
            assert (run.preset, run.seed) == (scale, 3)


def test_the_1b_preset_has_the_pair_of_section_7_4_and_nothing_else():
    pair = [e.name for e in experiments() if e.name not in unavailable("paper-1b")]
    assert [name for name in pair if not name.startswith("sft_")] == ["softmax_1b", "sigmoid_1b"]
    assert changes(config("sigmoid_1b", "paper-1b"), config("softmax_1b", "paper-1b")) == {
        "model.attention.similarity": "sigmoid",
        "model.attention.normalizer": "none",
    }


@pytest.mark.parametrize("scale", SMALL)
def test_an_experiment_changes_exactly_what_it_names(scale):
    base = config("base", scale)
    plain = config("default", scale)
    for one in experiments():
        if one.start or scale not in one.presets or resolve(one.name, scale) != one.name:
            continue
        changed = changes(config(one.name, scale), base if one.base else plain)
        assert set(changed) <= set(one.overrides), one.name
        assert changed or one.name == "default", one.name
        values = flat(config(one.name, scale))
        for path, value in one.overrides.items():
            assert dataclasses.is_dataclass(value) or values[path] == value, (one.name, path)


def test_every_experiment_has_a_model_whose_every_weight_gets_a_gradient():
    chunks = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(0))
    for model_config in dict.fromkeys(config(e.name, "smoke").model for e in experiments() if "smoke" in e.presets):
        model = TransformerLM(model_config, 1)
        loss = next_token_loss(model, chunks, model_config.attention.prefix)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert torch.isfinite(loss), model_config
        assert all(g is not None and torch.isfinite(g).all() for g in gradients.values()), model_config


@pytest.mark.parametrize("scale", PRESETS)
def test_no_two_names_are_one_run_unless_the_preset_cannot_tell_them_apart(scale):
    own = {e.name: resolve(e.name, scale) for e in experiments() if scale in e.presets}
    assert {name: first for name, first in own.items() if name != first} == SAME[scale]
    for name, first in SAME[scale].items():
        assert config(name, scale) == config(first, scale)
    contents = [
        json.dumps({**config_dict(config(n, scale)), "experiment": ""}, sort_keys=True) for n in set(own.values())
    ]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("scale", PRESETS)
def test_every_run_survives_the_round_trip_through_json(scale):
    for one in experiments():
        if scale in one.presets:
            run = config(one.name, scale, seed=2)
            values = config_dict(run)
            values.pop("recipe")
            assert from_dict(type(run), json.loads(json.dumps(values))) == run


def test_the_base_is_a_fixed_first_token_where_the_default_shows_no_sink():
    bases = {name: scale.base for name, scale in PRESETS.items()}
    assert bases == {
        "smoke": "fixed_1",
        "laptop": "fixed_1",
        "gpu": "default",
        "paper": "default",
        "paper-1b": "softmax_1b",
    }
    assert config("base", "laptop").data.fixed_position == 1
    assert config("k_bias", "laptop").data.fixed_position == 1
    assert config("default", "laptop").data.fixed_position is None


def test_redrawn_tokens_are_never_hidden_under_the_fixed_token_of_a_base():
    for one in experiments():
        data = config(one.name, "laptop").data if "laptop" in one.presets else None
        assert data is None or data.fixed_position not in data.random_positions


def test_the_paper_preset_is_the_recipe_of_section_4():
    run = config("default", "paper")
    model, train = run.model, run.train
    assert (model.hidden_size, model.num_layers, model.num_heads, model.intermediate_size) == (768, 10, 8, 1536)
    assert (model.context_length, model.vocab_size, model.position, model.ffn) == (2048, 50_432, "rotary", "swiglu")
    assert train.batch_size * model.context_length == 2**20  # 1M tokens
    assert (train.steps, train.warmup_steps, train.learning_rate, train.weight_decay) == (20_000, 100, 4e-4, 0.1)
    assert (train.beta1, train.beta2, train.clip_norm, train.lr_floor) == (0.9, 0.95, 1.0, 0.1)
    assert (train.eval_sequences, train.eval_length) == (100, 64)
    assert (run.data.corpus, run.data.validation) == ("pile", "pile:Pile-CC")
    assert 58e6 < parameters(model) < 62e6
    assert config("default_constant_lr", "paper").train.lr_floor == 1.0


def test_the_1b_preset_has_the_heads_of_the_authors_config_and_about_1b_parameters_without_embeddings():
    model = config("softmax_1b", "paper-1b").model
    assert (model.num_heads, model.head_dim) == (16, 128)
    assert 1.0e9 < parameters(config("softmax_1b", "paper-1b").model) < 1.2e9


def parameters(model: LMConfig) -> int:
    """Weights of the matrices of the blocks: four of attention, three of SwiGLU."""
    per_block = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * per_block


def test_scaled_values_come_to_the_papers_at_the_paper_preset():
    assert [config(f"lr_{n}", "paper").train.learning_rate for n in ("x2", "half", "quarter")] == [8e-4, 2e-4, 1e-4]
    assert config("lr_x2.5", "paper").train.learning_rate == pytest.approx(1e-3)
    assert config("lr_x0.025", "paper").train.learning_rate == pytest.approx(1e-5)
    steps = [config(name, "paper").train.steps for name in ("lr_quarter_steps_x2", "lr_quarter_steps_x4", "lr_x0.025")]
    assert steps == [40_000, 80_000, 80_000]
    assert config("lr_x2_steps_half", "paper").train.steps == 10_000
    batches = [config(f"batch_{n}", "paper").train.batch_size * 2048 for n in ("quarter", "half", "x2")]
    assert batches == [2**18, 2**19, 2**21]
    windows = [config(f"window_1_{n}", "paper").model.attention.window for n in (64, 32, 16, 8, 4, 2)]
    assert windows == [32, 64, 128, 256, 512, 1024]
    dims = [config(f"k_bias_dims_{n}", "paper").model.attention.bias_dims for n in (1, 2, 4, 8, 16, 32, 64)]
    assert dims == [1, 2, 4, 8, 16, 32, 64]
    shares = [config(f"data_share_{n}", "paper").data.share for n in ("1", "0.5", "0.1", "0.04", "0.02", "0.01")]
    assert shares == [1.0, 0.5, 0.1, 0.04, 0.02, 0.01]


def test_windows_are_measured_where_the_paper_measures_them_and_say_when_they_cannot_show_a_sink():
    assert config("window_1_64", "paper").train.eval_length == 64
    assert config("window_1_8", "laptop").train.eval_length == config("window_none", "laptop").train.eval_length == 16
    reach = {n: largest_alpha(config(f"window_1_{n}", "laptop")) for n in (64, 32, 16, 8, 4, 2)}
    assert reach == {64: 1 / 16, 32: 1 / 8, 16: 1 / 4, 8: 1 / 2, 4: 1.0, 2: 1.0}
    assert largest_alpha(config("window_1_64", "paper")) == 0.5
    assert largest_alpha(config("default", "laptop")) == 1.0


def test_sections_partition_the_experiments():
    by_section = {s: experiments(s) for s in ("4", "5", "6", "7", "C", "D", "8")}
    assert sorted(e.name for part in by_section.values() for e in part) == sorted(e.name for e in experiments())
    assert all(isinstance(e, Experiment) and e.title for e in experiments())
    assert all(e.section == section for section, part in by_section.items() for e in part)
    with pytest.raises(ValueError, match="4, 5, 6, 7, C, D, 8"):
        experiments("9")


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"did you mean .*k_bias.*sinkutils list"):
        experiment("k_biass")
    with pytest.raises(ValueError, match="smoke, laptop, gpu, paper"):
        preset("lap")
    with pytest.raises(ValueError, match="smoke, laptop, gpu, paper"):
        config("default", "lap")
    with pytest.raises(ValueError, match="belongs to preset paper-1b"):
        config("softmax_1b", "laptop")
    with pytest.raises(ValueError, match="belongs to preset smoke"):
        config("k_bias", "paper-1b")


def test_what_a_preset_cannot_hold_is_listed_with_the_reason(monkeypatch):
    narrow = dataclasses.replace(
        PRESETS["smoke"], name="narrow", model=LMConfig(hidden_size=54, num_heads=3, num_layers=1)
    )
    monkeypatch.setitem(PRESETS, "narrow", narrow)
    table = tuple(dataclasses.replace(e, presets=(*e.presets, "narrow")) for e in EXPERIMENTS)
    monkeypatch.setattr(import_module("sinkutils.study.grid"), "EXPERIMENTS", table)
    monkeypatch.setattr(import_module("sinkutils.study.experiments"), "BY_NAME", {e.name: e for e in table})
    assert set(unavailable("narrow")) == {"heads_8", "heads_4", "heads_2", "differential"}
    assert "even head dimension, got 27" in unavailable("narrow")["heads_2"]
    assert "num_heads must divide hidden_size=54" in unavailable("narrow")["heads_4"]
    with pytest.raises(ValueError, match=r"heads_4.*not available at preset 'narrow'.*num_heads"):
        config("heads_4", "narrow")
    assert not any(run.experiment == "heads_4" for run in plan("narrow"))


def test_a_sweep_starts_with_the_headline_and_trains_nothing_twice(tmp_path):
    plan = missing("laptop", tmp_path)
    assert len(set(plan)) == len(plan)
    after = {e.name for e in EXPERIMENTS if e.section == "8"}
    names = {e.name for e in EXPERIMENTS if "laptop" in e.presets and not e.download} - set(SAME["laptop"]) - after
    parts = []  # in the order of the plan
    for size in (3, 3 * len(HEADLINE) - 3, 3 * len(names - HEADLINE), 3 * len(HEADLINE), 3 * len(after)):
        parts.append(plan[:size])
        plan = plan[size:]
    assert not plan
    assert parts[0] == [("fixed_1", seed) for seed in (0, 1, 2)]
    for part, held in ((parts[1], HEADLINE - {"fixed_1"}), (parts[2], names - HEADLINE)):
        assert set(part) == {(name, seed) for name in held for seed in (0, 1, 2)}
        assert [seed for _, seed in part] == [0, 1, 2] * len(held), "all three of an experiment together"
    assert set(parts[3]) == {(name, seed) for name in HEADLINE for seed in (3, 4, 5)}
    assert set(parts[4]) == {(name, seed) for name in after for seed in (0, 1, 2)}
    assert set(missing("laptop", tmp_path, (5,))) == {(name, 5) for name in names | after}
    assert missing("laptop", tmp_path, (1,), ("sft_sigmoid_ultrachat",)) == [("sft_sigmoid_ultrachat", 1)]


def test_a_base_that_is_not_of_the_headline_has_three_seeds(tmp_path):
    seeds = (0, 1, 2)
    names = ("softmax_1b", "sigmoid_1b", "sft_softmax", "sft_sigmoid")
    assert missing("paper-1b", tmp_path) == [(name, seed) for name in names for seed in seeds]


def test_variants_without_a_fixed_token_change_the_default_and_not_the_base():
    for name, with_it in DEFAULT.items():
        assert config(name, "laptop").data.fixed_position is None
        assert config(name, "laptop").model == config(with_it, "laptop").model
        assert config(with_it, "laptop").data.fixed_position == 1


def test_a_record_counts_only_while_it_is_of_this_config(tmp_path):
    for name, run in (("fixed_1", config("fixed_1", "smoke")), ("k_bias", config("k_bias", "smoke", seed=9))):
        metrics = {"status": "done", "reason": None, "curve": [], "final": {}}
        write_record(record_folder("smoke", name, 0, tmp_path), run, metrics, {})
    plan = missing("smoke", tmp_path)
    assert ("fixed_1", 0) not in plan
    assert ("k_bias", 0) in plan  # what lies there is the record of another seed
