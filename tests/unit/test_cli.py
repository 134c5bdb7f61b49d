"""The command line: what it prints, and one line with advice for every mistake."""

import json
import re
import subprocess
import sys

import pandas as pd
import pytest

import sinkutils
from sinkutils.__main__ import COMMANDS, main
from sinkutils.data.packing import fix_position
from sinkutils.data.probes import probe
from sinkutils.data.tokenizer import special_ids
from sinkutils.measuring.load import load_lm
from sinkutils.measuring.measure import measure
from sinkutils.study.grid import config
from sinkutils.study.store import Runs
from sinkutils.training.trainer import train


def said(capsys, *arguments) -> str:
    """What a command prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_list_shows_every_experiment_with_the_papers_value_or_one_section(capsys, tmp_path):
    out = said(capsys, "list", "--preset", "smoke", "--runs", tmp_path)
    assert "k_bias" in out and "Table 4" in out and "18.18" in out
    out = said(capsys, "list", "--section", "6", "--runs", tmp_path)
    assert "weight_decay_0.5" in out and "k_bias" not in out


REFUSED = {
    "train k_byas --preset smoke": "did you mean k_bias",
    "train k_bias --preset smoke --device banana": "device must be cpu, cuda",
    "train k_bias --preset smoke --device cuda:99": "'cuda:99' was asked for, but PyTorch sees",
    "train k_bias --preset smoke --device meta": "where a model has weights",
    "train k_bias --preset smoke --seed -1": "seed must be",
    "train k_bias --checkpoint-seconds nan": "must be a finite number of at least 0, got 'nan'",
    "train": "the following arguments are required: experiment",
    "list --section 9 --runs .": "section must be one of",
    "list --preset phone": "invalid choice: 'phone' (choose from 'smoke'",
    "sweep --jobs 0 --dry-run": "--jobs: must be an integer of at least 1, got '0'",
    "sweep --preset smoke --only k_byas": "did you mean k_bias",
    "sweep --preset smoke --engine abacus": "invalid choice: 'abacus'",
    "measure laptop/no_such_run/0": "no_such_run",
    "measure ./nothing": "there is no folder './nothing'",
    "measure x --targets 1 0": "--targets: must be an integer of at least 1, got '0'",
    "measure x --eps 0.3 1": "--eps: must be a number above 0 and below 1, got '1'",
    "measure x --dtype int8": "dtype must be one of float32, bfloat16, float16, float64",
    "measure x --device banana": "device must be cpu, cuda",
    "run --in-place -p n 3 --only 02": "leave out -p, or --in-place",
    "run --only 99": "no notebook starts with 99",
    "run --only 07 -p colour red": "07_after_pretraining has no parameter colour; it has preset",
    "": "give a command: one of list, train",
    "dance": "there is no command 'dance'",
    "mesure x": "did you mean measure?",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_mistake_gives_one_line_that_helps_and_status_2(capsys, arguments):
    try:
        status = main(arguments.split())
    except SystemExit as stop:  # argparse's way
        status = stop.code
    out, error = capsys.readouterr()
    assert status == 2 and out == ""
    assert REFUSED[arguments] in error and len(error.strip().splitlines()) == 1


def test_a_dry_run_says_what_would_run_and_how_long_it_takes(capsys, tmp_path):
    out = said(capsys, "sweep", "--preset", "smoke", "--dry-run", "--runs", tmp_path, "--only", "k_bias", "--seeds", 0)
    assert "k_bias" in out and "about 10 s" in out and "1 runs, about" in out and " 0.0 " not in out
    assert not list(tmp_path.iterdir())


def test_every_command_has_help_that_names_each_default_once_and_the_version_is_printed(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert stop.value.code == 0 and "(default: None)" not in text and "(default: False)" not in text
        assert "(default: [])" not in text
        assert not re.search(r"\(default: [^()]*\) \(default", text)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sinkutils {sinkutils.__version__}\n"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    """As `list | head -1`."""
    command = [sys.executable, "-m", "sinkutils", "list", "--preset", "smoke"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    """Records of smoke on the tests' corpus, with weights."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("k_bias", "fixed_1"):
        train(config(name, "smoke"), folder, corpus=corpus, keep_weights=True, progress=False)
    return folder


@pytest.mark.slow
def test_measure_prints_a_table_or_json_for_a_record_with_the_first_token_of_its_training(capsys, runs):
    arguments = ("measure", "smoke/k_bias/0", "--runs", runs, "-n", 5, "-T", 32, "--probe", "random", "repeat")
    table = said(capsys, *arguments, "--batch-size", 2)
    assert "BOS first: no" in table and "Sink" in table
    reports = json.loads(said(capsys, *arguments, "--json"))
    assert set(reports) == {"random", "repeat"} and reports["random"]["T"] == 32
    arguments = ("measure", "smoke/fixed_1/0", "--runs", runs, "-n", 5, "--probe", "random", "--json")
    assert json.loads(said(capsys, *arguments))["random"]["name"].endswith("x_fix first")
    both = said(capsys, "measure", "smoke/k_bias/0", "smoke/fixed_1/0", "--runs", runs, "-n", 5, "--probe", "random")
    header, *rows = both.strip().splitlines()[-3:]
    assert "later_blocks" in header and [row.split()[0] for row in rows] == ["smoke/k_bias/0", "smoke/fixed_1/0"]


@pytest.mark.slow
def test_what_measure_is_asked_for_is_what_the_function_gives(capsys, runs, text_folder, tmp_path, monkeypatch):
    """Of other positions, thresholds, seeds, precision and first tokens, and of other text."""
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path))
    folder, text = runs / "smoke" / "k_bias" / "0", f"path:{text_folder}"
    model, tokenizer = load_lm(str(folder), dtype="float64")
    usual = ("measure", "smoke/k_bias/0", "--runs", runs, "-n", 5, "-T", 32, "--dtype", "float64", "--json")

    def told(kind, *options):
        report = json.loads(said(capsys, *usual, "--probe", kind, *options))[kind]
        return {key: value for key, value in report.items() if key != "name"}

    def direct(ids, **options):
        report = json.loads(json.dumps(measure(model, ids, **options).to_dict()))
        return {key: value for key, value in report.items() if key != "name"}

    asked = ("--targets", 1, 2, "--eps", 0.2, 0.4, "--seed", 3, "--bos")
    ids = probe("random", tokenizer, 5, 32, 3, bos=True)
    assert told("random", *asked) == direct(ids, targets=(1, 2), epsilons=(0.2, 0.4), bos=True)
    natural = probe("natural", tokenizer, 5, 32, corpus=text)
    fixed = fix_position(natural, 1, special_ids(tokenizer, "k_bias")["fix_id"])  # as in its training
    assert told("natural", "--corpus", text) == direct(fixed, bos=False)


@pytest.mark.slow
def test_train_takes_the_seed_the_text_and_whether_weights_are_kept(capsys, corpus, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr("sinkutils.training.trainer.load_corpus", lambda name, *_, **__: texts.append(name) or corpus)
    usual = ("train", "v_bias", "--preset", "smoke", "--runs", tmp_path)
    for seed, options in ((0, ()), (1, ("--keep-weights", "--corpus", "path:mine"))):
        said(capsys, *usual, "--seed", seed, *options)
    found = [Runs(tmp_path).get(config("v_bias", "smoke", seed)) for seed in (0, 1)]
    assert [record.weights is not None for record in found] == [False, True] and texts == ["docstrings", "path:mine"]


def test_run_takes_what_it_is_given(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("sinkutils.pages.run_notebooks", lambda *arguments: asked.append(arguments))
    said(capsys, "run", "-p", "seeds", "[1, 2]", "-p", "device", "cpu", "--only", "02", "03")
    ((parameters, _, only),) = asked
    assert parameters == {"seeds": [1, 2], "device": "cpu"} and only == ["02", "03"]


@pytest.mark.slow
def test_the_version_and_a_mistyped_command_load_no_pytorch():
    for arguments, status in ((["--version"], 0), (["mesure"], 2)):
        code = "import sys\nfrom sinkutils.__main__ import main\nstatus = main(sys.argv[1:])\n"
        code += "sys.exit(9 if 'torch' in sys.modules else status)"
        assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == status


def ledger(preset, runs):
    words = "The sink is found wherever it was looked for, " * 4
    row = {"id": "sink", "source": "Table 4", "claim": words, "paper": "18.18", "ours": "24", "remark": "by hand"}
    return pd.DataFrame([{**row, "verdict": verdict} for verdict in ("not reproduced", "partly", "partly")])


def test_claims_fit_the_terminal_and_long_ones_say_more(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sinkutils.ledger.table.claims", ledger)
    monkeypatch.setenv("COLUMNS", "80")
    short = said(capsys, "claims", "--runs", tmp_path)
    assert all(len(line) <= 80 for line in short.splitlines()) and "18.18" not in short
    assert short.splitlines()[0].startswith("not reproduced  sink")
    assert short.splitlines()[-1] == "3 claims at laptop: 1 not reproduced, 2 partly"
    long = said(capsys, "claims", "--runs", tmp_path, "--long")
    assert all(len(line) <= 80 for line in long.splitlines()) and "paper: 18.18" in long and "remark: by hand" in long


@pytest.mark.slow
def test_the_names_of_the_contract_are_there_whatever_is_imported_first():
    code = (
        "import sinkutils.study.record, sinkutils.ledger.table, sinkutils.study.grid, sinkutils as su\n"
        "names = 'LMConfig TransformerLM attend AttentionSpec load_lm probe measure experiments records claims'\n"
        "assert all(callable(getattr(su, name)) for name in names.split())\n"
        "assert len(su.experiments()) > 100 and len(su.experiments('6')) > 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
