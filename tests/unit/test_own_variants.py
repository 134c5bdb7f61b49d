"""A variant, a preset and a similarity of one's own: said, trained, read and judged, and no verdict moved."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import made_up, refuses
from scipy import stats

import sinkutils as su
from sinkutils import __main__ as cli
from sinkutils.ledger.readings import readings
from sinkutils.model import attention
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.study import grid
from sinkutils.study.record import record_folder
from sinkutils.study.store import write_record

TINY = {"name": "tiny", "like": "smoke", "train": {"steps": 4, "eval_every": 2, "valid_chunks": 4}}


def test_a_variant_changes_what_it_names_and_has_a_name_of_its_own():
    change = {"model.attention.scale": 0.5, "train.steps": {"times": "1/2"}, "train.clip_norm": 2}
    run = su.config("base", "laptop", 3, change=change, name="mine")
    base = su.config("base", "laptop", 3)
    assert (run.experiment, run.seed, run.model.attention.scale) == ("mine", 3, 0.5)
    assert run.train.steps == base.train.steps // 2 and run.data == base.data
    assert isinstance(run.train.clip_norm, float)


REFUSED = {
    r"no field 'model.attention.scal': did you mean model.attention.scale": {
        "model.attention.scal": 1
    },
    r"no field 'learning_rat': did you mean train.learning_rate": {"learning_rat": 1},
    r"no field 'seed'": {"seed": 1},
    r"no field 'model.attention'": {"model.attention": {}},
    r"scale must be positive and finite, got 'high'": {"model.attention.scale": "high"},
    r"scale must be positive and finite, got True": {"model.attention.scale": True},
    r"steps must be an integer, got 1.5": {"train.steps": 1.5},
    r"no such multiple": {"train.steps": {"time": 2}},
    r"similarity must be one of exp, .*softpick.*got 'sigmod'": {
        "model.attention.similarity": "sigmod"
    },
    r"beta1 must be less than 1": {"train.beta1": 1.0},
    r"random_positions must be an integer, got 'x'": {"data.random_positions": [1, "x"]},
    r"change must be a dict": ["train.steps"],
    r"no field '3'": {3: 1},
    r"no such multiple: .'times': '1/0'": {"train.steps": {"times": "1/0"}},
    r"no number to take .'times': 2. of": {"model.attention.window": {"times": 2}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_change_that_cannot_be_is_refused_in_words(message):
    refuses(message, su.config, "base", "smoke", change=REFUSED[message], name="mine")


def test_a_variant_takes_no_name_of_the_studys():
    refuses("needs a name of its own", su.config, "base", change={"train.steps": 5})
    for name in ("k_bias", "K_Bias", "base"):
        refuses("is an experiment of the study", su.config, "base", name=name)
    refuses("must be a name", su.config, "base", name="../mine")


PRESETS = {
    "is a preset of the study": {"name": "laptop"},
    "a preset is a name and fields": {"like": "smoke"},
    "no field 'stesp'": {"name": "t", "stesp": 3},
    "did you mean model.hidden_size": {"name": "t", "model": {"hiden_size": 3}},
    "num_heads must divide": {"name": "t", "model": {"hidden_size": 7}},
    "train of a preset must be fields": {"name": "t", "train": 3},
    "unknown experiment": {"name": "t", "base": "nothing_like_it"},
    "seconds must be a number": {"name": "t", "seconds": "long"},
    "device must be one of": {"name": "t", "device": 3},
    "preset must be one of": {"name": "t", "like": "lap"},
    "experiment must be of type str": {"name": "t", "base": 3},
    "no field '3'": {"name": "t", 3: 4},
    "fields, such as name: tiny, got None": None,
}


@pytest.mark.parametrize("message", PRESETS)
def test_a_preset_that_cannot_be_is_refused_in_words(message):
    refuses(message, su.config, "base", PRESETS[message])


def test_a_preset_of_a_file_is_that_of_a_dict(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    run = su.config("k_bias", file, 1)
    assert run == su.config("k_bias", TINY, 1) == su.config("k_bias", str(file), 1)
    assert (run.preset, run.train.steps, run.experiment) == ("tiny", 4, "k_bias")
    assert run.train.batch_size == su.config("base", "smoke").train.batch_size
    refuses("is a fine-tuning", su.config, "sft_softmax", TINY)
    file.write_text("{name: t, like: smoke, train: {learning_rate: 1e-3}}")
    assert su.config("base", file).train.learning_rate == 1e-3
    for wrong, says in (
        ("name: [tiny", "tiny.yaml is no YAML: ParserError"),
        ("name: t\ntrain: {steps: 3, steps: 4}", "is no YAML: YAMLError: 'steps' stands twice"),
    ):
        file.write_text(wrong)
        refuses(says, su.config, "base", file)


@pytest.fixture
def three(tmp_path):
    """Records of the base, of an experiment and of a variant of one's own, of three seeds each."""
    report = {"T": 4, "targets": [1], "alpha": [[[0.5, 0.4], [0.6, 0.5]]]}
    for seed in range(3):
        end = {"excess_1": 0.1 * seed, "valid_loss": 3 + 0.1 * seed, "report": report}
        for name in ("fixed_1", "sigmoid"):
            made_up(tmp_path, name, seed, curve=[], final=end)
        mine = su.config("base", "smoke", seed, change={"model.attention.scale": 0.5}, name="mine")
        end = {
            "step": 9,
            "sink_1": 50.0,
            "excess_1": 0.1 * seed + 0.01 * (seed + 1),
            "valid_loss": 2.5,
        }
        metrics = {"status": "done", "reason": None, "curve": [], "final": end | {"report": report}}
        write_record(record_folder("smoke", "mine", seed, tmp_path), mine, metrics, {})
    return tmp_path


def test_its_records_stand_in_every_table(three):
    for read in (su.runs, su.blocks, su.heads):
        assert set(read("smoke", three).experiment) == {"fixed_1", "sigmoid", "mine"}
    assert set(su.runs("smoke", three).status) == {"done"}
    assert su.record("mine", "smoke", 1, three).status == "done"


def test_a_variant_in_the_folder_of_another_is_stale(three):
    (three / "smoke" / "mine").rename(three / "smoke" / "yours")
    rows = su.runs("smoke", three).set_index("experiment").loc["yours"]
    assert set(rows.status) == {"stale"} and "experiment" in rows.reason.iloc[0]


def test_it_moves_no_verdict_and_no_pooled_variance(three):
    with_mine = su.claims("smoke", three)
    seen = readings("smoke", three)
    prior = seen.prior("valid_loss")
    assert "mine" in seen.runs
    for seed in range(3):
        for file in (three / "smoke" / "mine" / str(seed)).iterdir():
            file.unlink()
    assert readings("smoke", three).prior("valid_loss") == prior
    assert su.claims("smoke", three).equals(with_mine)


def test_two_variants_are_compared_by_the_paired_t_interval_of_their_seeds(three):
    table = su.compare_runs("mine", "base", "smoke", three)
    row = table.loc["excess_1"]
    differences = np.array([0.01, 0.02, 0.03])
    expected = stats.t.interval(0.95, 2, differences.mean(), stats.sem(differences))
    assert (row.low, row.high) == pytest.approx(expected, rel=1e-3)
    assert row.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=1e-3)
    assert row.seeds == 3 and row.difference == pytest.approx(0.02)
    refuses("no run of 'nothing' is done", su.compare_runs, "nothing", "base", "smoke", three)
    refuses("level must be", su.compare_runs, "mine", "base", "smoke", three, 1.5)


def test_claims_of_a_file_are_judged_on_its_runs(three, tmp_path):
    file = tmp_path / "mine.yaml"
    check = {"id": "x", "claim": "mine has the lower loss", "checks": [{"loss": "mine"}]}
    file.write_text(yaml.safe_dump([check]))
    (row,) = su.claims("smoke", three, file=file).to_dict("records")
    assert row["verdict"] == "reproduced" and "mine 2.5" in row["ours"]
    for wrong, says in (
        ("[", "is no YAML"),
        ("x: 1", "is no list of claims"),
        ("[]", "is no list"),
    ):
        file.write_text(wrong)
        refuses(says, su.claims, "smoke", three, file=file)
    for entry in (
        {"id": "x", "claim": "y"},
        {"id": "x", "claim": "y", "checks": [{"lost": "mine"}]},
        {"id": "x", "claim": "y", "checks": [{"present": 3}]},
        {"id": "x", "claim": "y", "checks": [{"present": []}]},
        {"id": "x", "claim": "y", "checks": {"loss": "mine"}},
        {"id": "x", "claim": "y", "checks": [{"together": "mine", "of": "sink_1"}]},
        {"id": "x", "claim": "y", "checks": [{"same": "base"}]},
        {"id": "x", "claim": "y", "checks": [{"real": "sink_natural", "above": float("nan")}]},
        {"id": "x", "claim": ["y"], "checks": [{"loss": "mine"}]},
        {"id": "x", "claim": "y", "checks": [{"loss": "mine"}], "gate": "nothing"},
    ):
        file.write_text(yaml.safe_dump([entry]))
        refuses("claim x: ", su.claims, "smoke", three, file=file)
    file.write_text(yaml.safe_dump([check, check]))
    refuses("two claims have the id 'x'", su.claims, "smoke", three, file=file)
    file.write_text("- {id: x, id: y, claim: z, checks: [{loss: mine}]}")
    refuses("'id' stands twice", su.claims, "smoke", three, file=file)


def test_a_text_of_ones_own_is_judged_too(three):
    (three / "smoke").rename(three / "smoke@path-mine-01234567")
    ledger = su.claims("smoke@path-mine-01234567", three)
    assert len(ledger) > 100


@pytest.fixture
def softplus():
    """A similarity of one's own, which is forgotten afterwards."""
    su.attention.register("softplus", F.softplus)
    yield
    attention.SIMILARITY_NAMES.remove("softplus")
    attention.SIMILARITIES.pop("softplus")


def test_a_registered_similarity_is_computed_as_its_formula_says(softplus):
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    for normalizer in ("sum", "none"):
        spec = AttentionSpec(similarity="softplus", normalizer=normalizer)
        out, weights = attend(q, k, v, spec)
        for head in range(2):
            for i in range(6):
                sims = [F.softplus(q[0, head, i] @ k[0, head, j] / 2) for j in range(i + 1)]
                total = sum(sims) if normalizer == "sum" else 1
                expected = sum(sim / total * v[0, head, j] for j, sim in enumerate(sims))
                torch.testing.assert_close(out[0, head, i], expected)
        assert weights.triu(1).abs().max() == 0
        (slope,) = torch.autograd.grad(out.sum(), q)
        assert slope.isfinite().all()


SIMILARITIES = {
    "the gradient of f is not its slope": {
        "name": "x", "f": lambda s: 7 * s.exp() - 6 * s.exp().detach()
    },
    "the gradient of log is not its slope": {
        "name": "x", "f": torch.exp, "log": lambda s: 7 * s - 6 * s.detach()
    },
    "there is a similarity 'exp' already": {"name": "exp", "f": torch.exp},
    "name must be one word": {"name": "two words", "f": torch.exp},
    "f of 'x' is negative": {"name": "x", "f": lambda s: s},
    "f of 'x' is not elementwise": {"name": "x", "f": lambda s: s.softmax(-1)},
    "ZeroDivisionError": {"name": "x", "f": lambda s: s / (1 // 0)},
    "of the shape and dtype": {"name": "x", "f": lambda s: s.exp().float()},
    "f or its gradient is not finite": {"name": "x", "f": lambda s: s.abs().sqrt()},
    "log cannot be computed with a gradient": {"name": "x", "f": torch.exp, "log": 3},
    "log of 'x' is not the logarithm": {"name": "x", "f": torch.sigmoid, "log": lambda s: s},
    r"log or its gradient is not finite in torch.float32 at \[-200": {
        "name": "x", "f": F.softplus, "log": lambda s: F.softplus(s).log()
    },
}  # fmt: skip


@pytest.mark.parametrize("message", SIMILARITIES)
def test_a_similarity_that_is_none_is_refused(message):
    refuses(message, lambda: su.attention.register(**SIMILARITIES[message]))
    assert "x" not in attention.SIMILARITY_NAMES and "x" not in attention.LOGARITHMS


def test_a_record_of_a_registered_similarity_is_read_where_nobody_has_registered_it(tmp_path):
    su.attention.register("mysim", F.softplus)
    try:
        change = {"model.attention.similarity": "mysim"}
        run = su.config("base", "smoke", change=change, name="mine")
        end = {"step": 9, "sink_1": 5.0, "valid_loss": 3.0}
        metrics = {"status": "done", "reason": None, "curve": [], "final": end}
        write_record(record_folder("smoke", "mine", 0, tmp_path), run, metrics, {})
    finally:
        attention.SIMILARITY_NAMES.remove("mysim")
        attention.SIMILARITIES.pop("mysim")
    assert su.runs("smoke", tmp_path).status.tolist() == ["done"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "train base --set model.attention.scal=1 --name mine",
            "did you mean model.attention.scale",
        ),
        ("train base --set model.attention.scale=0.5", "needs a name of its own"),
        ("train base --name k_bias", "is an experiment of the study"),
        ("train base --preset nowhere.yaml", "nowhere.yaml"),
        ("claims --file nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_the_command_line_refuses_in_one_line(command, says, capsys):
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("written", ["train.steps", "train.steps=[1"])
def test_what_is_no_assignment_is_refused(written, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "base", "--set", written, "--name", "mine"])
    assert "must be FIELD=VALUE" in capsys.readouterr().err


def test_a_variant_is_trained_by_the_command_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sinkutils.study.task.load_corpus", lambda *_, **__: corpus)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    command = f"train base --preset {tmp_path / 'tiny.yaml'} --runs {tmp_path} --device cpu"
    sets = ["--set", "train.learning_rate=1e-3", "--set", "model.attention.scale=0.5"]
    assert cli.main([*command.split(), *sets, "--name", "mine"]) == 0
    assert "tiny/mine/0: Sink_1" in capsys.readouterr().out
    config = json.loads((tmp_path / "tiny" / "mine" / "0" / "config.json").read_text())
    assert config["train"]["learning_rate"] == 0.001
    assert config["model"]["attention"]["scale"] == 0.5
    assert su.runs("tiny", tmp_path).status.tolist() == ["done"]


def test_only_our_own_refusals_are_one_line(monkeypatch, capsys):
    """A mistake of ours, such as a wrong reshape, keeps its traceback; --debug shows all."""
    before = sys.exc_info()[0]  # after some tests of other files it is not None
    monkeypatch.setattr(
        "sinkutils.study.grid.experiments", lambda section: np.zeros(3).reshape(2, 2)
    )
    with pytest.raises(ValueError, match="cannot reshape"):
        cli.main(["list"])
    monkeypatch.undo()
    assert cli.main(["list", "--section", "9"]) == 2
    for command in (["--debug", "list", "--section", "9"], ["list", "--section", "9", "--debug"]):
        with pytest.raises(ValueError, match="section must be one of"):
            cli.main(command)
    assert "sinkutils:" in capsys.readouterr().err
    assert sys.exc_info()[0] is before


def test_a_sweep_of_a_variant_changes_one_experiment_and_has_three_seeds(tmp_path):
    change = {"model.attention.scale": 0.5}
    runs = grid.plan("smoke", change=change, name="mine")
    assert [(run.experiment, run.seed) for run in runs] == [("mine", 0), ("mine", 1), ("mine", 2)]
    assert {run.model.attention.scale for run in runs} == {0.5}
    (biased,) = grid.plan("smoke", [4], ["k_bias"], change=change, name="mine")
    assert biased == su.config("k_bias", "smoke", 4, change=change, name="mine")
    refuses("changes one experiment, got none", grid.plan, "smoke", only=[], name="mine")
    refuses("changes one experiment, got a, b", grid.plan, "smoke", only=["a", "b"], name="mine")
    refuses("needs a name of its own", grid.plan, "smoke", change=change)


@pytest.mark.slow
def test_the_workers_of_such_a_sweep_train_the_variant(tmp_path):
    values = {
        "model.attention.scale": 0.5,
        "train.steps": 2,  # no multiple: conftest shortens the preset in this process alone
        "train.eval_every": 1,
    }
    set_ = [f"--set={path}={json.dumps(value)}" for path, value in values.items()]
    arguments = ["sweep", "--preset", "smoke", "--name", "mine", "--seeds", "0", "--only", "k_bias"]
    assert cli.main([*arguments, *set_, "--runs", str(tmp_path)]) == 0
    record = su.record("mine", "smoke", 0, tmp_path)
    attention = record.config["model"]["attention"]
    assert (attention["scale"], attention["bias"], record.status) == (0.5, "k", "done")
    assert record.config["train"]["steps"] == 2
