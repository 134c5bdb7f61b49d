"""The command line: what it prints, and one line with advice for every mistake."""

import json
import subprocess
import sys

import pytest

from sinkutils.__main__ import main
from sinkutils.study.record import RUNS


def test_list_shows_every_experiment_with_the_papers_value(capsys):
    assert main(["list", "--preset", "smoke"]) == 0
    out = capsys.readouterr().out
    assert "k_bias" in out and "Table 4" in out and "18.18" in out and "missing" in out


def test_list_can_show_one_section(capsys):
    assert main(["list", "--section", "6"]) == 0
    out = capsys.readouterr().out
    assert "weight_decay_0.5" in out and "k_bias" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "k_byas", "--preset", "smoke"], "did you mean k_bias"),
        (["list", "--section", "9"], "section must be one of"),
        (["measure", "laptop/no_such_run/0"], "no_such_run"),
        (["run", "--only", "99"], "no notebook starts with 99"),
    ],
)
def test_a_mistake_gives_one_line_that_helps(capsys, arguments, message):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_an_unknown_preset_lists_the_presets(capsys):
    with pytest.raises(SystemExit):
        main(["list", "--preset", "phone"])
    assert "smoke" in capsys.readouterr().err


def test_notebooks_run_at_every_preset_that_holds_the_study(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--preset", "paper-1b"])
    assert "choose from 'smoke', 'laptop', 'gpu', 'paper'" in capsys.readouterr().err


def test_a_dry_run_says_what_would_run_and_how_long_it_takes(capsys, tmp_path):
    assert (
        main(["sweep", "--preset", "smoke", "--dry-run", "--runs", str(tmp_path), "--only", "k_bias", "--seeds", "0"])
        == 0
    )
    out = capsys.readouterr().out
    assert "k_bias" in out and "1 runs" in out and "core-hours" in out
    assert not list(tmp_path.iterdir())


def test_every_command_has_help():
    for command in ("list", "train", "finetune", "sweep", "measure", "claims", "run"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0


def test_measure_prints_a_table_or_json_for_a_recorded_model(capsys):
    arguments = ["measure", "laptop/k_bias/0", "-n", "5", "-T", "32", "--probe", "random", "repeat"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "BOS first: no" in table and "Sink" in table
    assert main([*arguments, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert set(reports) == {"random", "repeat"} and reports["random"]["T"] == 32


def test_a_record_is_measured_with_the_first_token_that_it_was_trained_with(capsys):
    record = json.loads((RUNS / "laptop/fixed_1/0/metrics.json").read_text())
    assert main(["measure", "laptop/fixed_1/0", "--json"]) == 0
    with_it = json.loads(capsys.readouterr().out)["natural"]
    assert with_it["sink"]["1"]["0.3"] > 5 and record["final"]["sink_1"] > 5
    assert with_it["name"].endswith("x_fix first")
    assert main(["measure", "laptop/fixed_1/0", "--any-first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["natural"]["sink"]["1"]["0.3"] < 5


def test_the_names_of_the_contract_are_there_whatever_is_imported_first():
    code = (
        "import sinkutils.study.record, sinkutils.ledger.claims, sinkutils.study.grid, sinkutils as su\n"
        "names = 'LMConfig TransformerLM attend AttentionSpec load_lm probe measure experiments records claims'\n"
        "assert all(callable(getattr(su, name)) for name in names.split())\n"
        "assert len(su.experiments()) > 100 and len(su.experiments('6')) > 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
