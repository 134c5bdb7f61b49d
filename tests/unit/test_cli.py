"""The command line: what it prints, and one line with advice for every mistake."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import nbformat
import pandas as pd
import psutil
import pytest
from helpers import made_up, word_tokenizer
from small_models import build
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from sinkutils import __version__, config, experiments, load_lm, measure, probe, train
from sinkutils.__main__ import main
from sinkutils.commands import WRONG, parser
from sinkutils.measuring.probes import WithoutTokenizer
from sinkutils.measuring.texts import special_ids
from sinkutils.names import record_named
from sinkutils.paths import ROOT
from sinkutils.plots.report import natural
from sinkutils.study.store import Runs
from sinkutils.study.task import fix_position


@pytest.mark.parametrize(
    "line",
    ["lab m a b -o x.html", "lab m -o x.html a b", "lab m a -o x.html b", "lab -o x.html m a b"],
)
def test_texts_may_stand_behind_an_option(line):
    options = parser().parse_args(line.split())
    assert (options.model, options.texts, str(options.output)) == ("m", ["a", "b"], "x.html")


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
    "train k_bias --preset smoke --device cuda:99": "got 'cuda:99', but PyTorch sees 0",
    "train k_bias --preset smoke --device meta": "device must be cpu, cuda",
    "train k_bias --preset smoke --seed -1": "seed must be",
    "train": "the following arguments are required: experiment",
    "list --section 9 --runs .": "section must be one of",
    "list --preset phone": "preset must be one of smoke",
    "sweep --jobs 0 --dry-run": "--jobs: must be an integer of at least 1, got '0'",
    "sweep --preset smoke --only k_byas": "did you mean k_bias",
    "sweep --preset smoke --engine abacus": "invalid choice: 'abacus'",
    "measure laptop/no_such_run/0": "no_such_run",
    "measure ./nothing": "there is no folder './nothing'",
    "measure x --targets 1 0": "targets are positions of the ids, which count from 1",
    "measure x --eps 0.3 1": "eps must be in (0, 1)",
    "measure x x": "give each model once",
    "measure x --text a.txt --probe random": "--text is measured in place of --probe and --corpus",
    "measure x --text a.txt --corpus sources": "--text is measured in place of --probe and",
    "measure x --dtype int8": "dtype must be one of float32, bfloat16, float16, float64",
    "measure x --device banana": "device must be cpu, cuda",
    "train base --preset smoke --checkpoint-seconds nan": "checkpoint_seconds must be a finite number of at least 0",
    "run --in-place -p n 3 --only 02": "leave out -p, or --in-place",
    "run -p n {": "-p n: '{' is not a value in YAML",
    "run -p n !!python/object/apply:os.system": "is not a value in YAML",
    "report ./nothing -o ./no/folder/x.html": "x.html: there is no folder",
    "report ./nothing -o .": "sinkutils: . is no regular file, and is not replaced",
    "report ./nothing -o /dev/null": "/dev/null is no regular file",
    "run --only 99": "starts with 99; there are 00_quickstart",
    "run --only 00 nosuch": "starts with nosuch; there are",
    "train k_bias --preset smoke --runs README.md": "(Not a directory): give --runs another folder",
    "run --only 07b -p colour red": "07b_the_first_tokens_state has no parameter colour; it has preset, texts",
    "": "the following arguments are required: command",
    "dance": "invalid choice: 'dance' (choose from 'list', 'train'",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_mistake_gives_one_line_that_helps_and_status_2(capsys, arguments):
    try:
        status = main(arguments.split())
    except SystemExit as stop:  # argparse's way
        status = stop.code
    out, error = capsys.readouterr()
    assert status == WRONG and out == ""
    assert REFUSED[arguments] in error and len(error.strip().splitlines()) == 1


def test_a_dry_run_says_what_would_run_and_how_long_it_takes(capsys, tmp_path):
    out = said(
        capsys, *f"sweep --preset smoke --dry-run --runs {tmp_path} --only k_bias --seeds 0".split()
    )
    assert "k_bias" in out and "about 0:00:10" in out and "1 runs are missing" in out
    assert not list(tmp_path.iterdir())


def test_every_command_has_help_that_names_each_default_once(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.search(r"{(.*?)}", capsys.readouterr().out)[1].split(",")
    assert len(commands) == 9
    for command in commands:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert stop.value.code == 0
        assert not re.search(r"default: (None|False|\[\])|\(default: [^()]*\) \(default", text)


def test_the_record_that_help_names_is_there(capsys):
    for command in ("measure", "report"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        (name,) = re.findall(r"\w+/\w+/\d", capsys.readouterr().out)
        assert record_named(name)


@pytest.mark.parametrize("command", ["list", "claims"])
def test_a_folder_without_records_is_named(capsys, tmp_path, command):
    assert main([command, "--runs", str(tmp_path / "nowhere")]) == 0
    assert f"there are no records in {tmp_path / 'nowhere'}: give --runs" in capsys.readouterr().err


def test_list_counts_records_that_do_not_count_and_shows_whole_titles(capsys, tmp_path):
    record = made_up(tmp_path, "k_bias")
    made_up(tmp_path, "nope")
    # another run than its folder says
    shutil.move(record.folder, tmp_path / "smoke" / "nope" / "7")
    (tmp_path / "smoke" / "k_bias" / "1").mkdir(parents=True)
    out = said(capsys, "list", "--preset", "smoke", "--runs", tmp_path)
    assert "not counted: 1 records that are stale" in out
    assert "not counted: 1 records that are corrupt" in out
    assert all(row.title in out for row in experiments())


@pytest.mark.slow
def test_a_report_takes_a_book_of_one_text(capsys, runs, tmp_path, monkeypatch):
    pages = []

    def report_model(model, tokenizer, name, texts, n, length, beside):
        pages.append((n, length, len(natural(tokenizer, texts, n, length))))
        return "<html>"

    monkeypatch.setattr("sinkutils.plots.report.report_model", report_model)
    (tmp_path / "book.txt").write_text("attention sink token head query key " * 2000)
    record, book = runs / "smoke" / "k_bias" / "0", tmp_path / "book.txt"
    usual = ("report", record, "--text", book, "-o", tmp_path / "x.html")
    said(capsys, *usual, "-T", 16)
    said(capsys, *usual, "-T", 16, "-n", 3)
    assert (tmp_path / "x.html").read_text() == "<html>"
    assert pages == [(100, 16, 100), (3, 16, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {"book.txt", "x.html"}


def test_a_report_measures_both_models_on_texts_as_their_tokenizers_make_them(
    capsys, tmp_path, monkeypatch
):
    """Gemma beside itself had 75.7 % and 0.0 %: the second without its BOS."""
    words = word_tokenizer(40)
    words.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>")
    monkeypatch.setattr("sinkutils.names.load_lm", lambda *_: (build("llama"), tokenizer))
    (tmp_path / "book.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 " * 20)
    page = tmp_path / "x.html"
    said(capsys, *f"report a --beside b --text {tmp_path}/book.txt -T 8 -n 4 -o {page}".split())
    a, b = re.findall(r"<th>[ab]</th>\s*<td>(.*?)</td>", page.read_text())
    assert a == b


def test_models_are_not_compared_on_text_where_one_has_no_tokenizer(capsys, tmp_path, monkeypatch):
    model = build("llama")
    loaded = (model, WithoutTokenizer(model))
    monkeypatch.setattr("sinkutils.names.load_lm", lambda *_: loaded)
    assert main(["report", "a", "--beside", "b", "-o", str(tmp_path / "x.html")]) == WRONG
    assert "--beside compares models on text, and a has no tokenizer" in capsys.readouterr().err


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
def test_measure_prints_a_table_or_json_for_a_record_with_its_first_token(capsys, runs):
    command = "measure smoke/k_bias/0 -n 5 -T 32 --probe random repeat"
    arguments = (*command.split(), "--runs", runs)
    table = said(capsys, *arguments, "--batch-size", 2)
    assert "BOS first: no" in table and "Sink" in table
    reports = json.loads(said(capsys, *arguments, "--json"))
    names = [f"smoke/k_bias/0, {kind}, x_fix first" for kind in ("random", "repeat")]
    assert [*reports] == names and reports[names[0]]["T"] == 32
    arguments = (*"measure smoke/fixed_1/0 -n 5 --probe random --json --runs".split(), runs)
    assert [*json.loads(said(capsys, *arguments))] == ["smoke/fixed_1/0, random, x_fix first"]
    command = "measure smoke/k_bias/0 smoke/fixed_1/0 -n 5 --probe random --runs"
    both = said(capsys, *command.split(), runs)
    header, *rows = both.strip().splitlines()[-3:]
    assert "later_blocks" in header
    assert [row.split()[0] for row in rows] == ["smoke/k_bias/0,", "smoke/fixed_1/0,"]


@pytest.mark.slow
def test_the_command_measure_gives_what_it_is_asked(
    capsys, runs, text_folder, tmp_path, monkeypatch
):
    """Of other positions, thresholds, seeds, precision and first tokens, and of other text."""
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path))
    folder, text = runs / "smoke" / "k_bias" / "0", f"path:{text_folder}"
    model, tokenizer = load_lm(str(folder), dtype="float64")
    command = "measure smoke/k_bias/0 -n 5 -T 32 --dtype float64 --json"
    usual = (*command.split(), "--runs", runs)
    asked = ("--targets", 1, 2, "--eps", 0.2, 0.4, "--seed", 3, "--bos")
    natural_ids = probe("natural", tokenizer, 5, 32, corpus=text)
    fixed = fix_position(natural_ids, 1, special_ids(tokenizer, "k_bias")["fix_id"])
    for kind, given, ids, options in (
        (
            "random",
            asked,
            probe("random", tokenizer, 5, 32, 3, bos=True),
            {"targets": (1, 2), "epsilons": (0.2, 0.4)},
        ),
        ("natural", ("--corpus", text), fixed, {}),  # with a fixed token, as in its training
    ):
        (told,) = json.loads(said(capsys, *usual, "--probe", kind, *given)).values()
        direct = measure(model, ids, bos=kind == "random", **options).to_dict()
        assert told | {"name": ""} == json.loads(json.dumps(direct)) | {"name": ""}


@pytest.mark.slow
def test_train_takes_seed_and_text_and_keeps_weights_if_told(capsys, corpus, tmp_path, monkeypatch):
    texts = []
    take = "sinkutils.study.task.load_corpus"
    monkeypatch.setattr(take, lambda name, *_, **__: texts.append(name) or corpus)
    usual = ("train", "v_bias", "--preset", "smoke", "--runs", tmp_path)
    for seed, options in ((0, ()), (1, ("--keep-weights", "--corpus", "path:mine"))):
        said(capsys, *usual, "--seed", seed, *options)
    found = [Runs(tmp_path).of(config("v_bias", "smoke", seed)).record() for seed in (0, 1)]
    assert [record.weights is not None for record in found] == [False, True]
    assert texts == ["docstrings", "path:mine"]


def test_a_package_that_is_missing_is_said_with_the_extra_that_brings_it(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "submitit", None)
    command = f"sweep --preset smoke --engine slurm --runs {tmp_path} --only k_bias"
    assert main(command.split()) == WRONG
    assert "submitit" in (line := capsys.readouterr().err) and "[slurm]" in line


def test_run_takes_what_it_is_given(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("sinkutils.pages.run_notebooks", lambda *arguments: asked.append(arguments))
    said(capsys, "run", "-p", "seeds", "[1, 2]", "-p", "device", "cpu", "--only", "02", "03")
    ((parameters, _, only),) = asked
    assert parameters == {"seeds": [1, 2], "device": "cpu"} and only == ["02", "03"]


@pytest.mark.parametrize(("command", "goes_on"), [("run", False), ("sweep --dry-run", True)])
def test_what_goes_on_where_it_was_says_so_when_stopped(command, goes_on, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sinkutils.pages.run_notebooks", stop)
    monkeypatch.setattr("sinkutils.study.sweep.estimate", stop)
    assert main(command.split()) == 130
    assert ("run the same command again" in capsys.readouterr().err) == goes_on


RUN = """
import sys
from pathlib import Path
from sinkutils import paths
paths.NOTEBOOKS, paths.RENDERED = Path("pages").resolve(), Path("rendered").resolve()
from sinkutils.__main__ import main
sys.exit(main(["run"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_ends_its_kernels_and_says_what_it_kept(number, status, tmp_path):
    (tmp_path / "pages").mkdir()
    sleep = "import os, time; open(str(os.getpid()), 'w').close(); time.sleep(600)"
    for name, code in (("1_quick", "1"), ("2_slow", sleep), ("3_slow", sleep), ("4_later", "1")):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        nbformat.write(book, tmp_path / "pages" / f"{name}.ipynb")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background job ignores the interrupt, and so would all that it starts.
    streams["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", RUN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams) as process:
        while len(kernels := list((tmp_path / "pages").glob("[0-9]*[0-9]"))) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "1_quick -> " in output and "slow" not in output
    assert errors.endswith("sinkutils: stopped\n")
    for kernel in kernels:
        assert not psutil.pid_exists(int(kernel.name))


def test_run_says_where_notebooks_are_where_there_are_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sinkutils.pages.NOTEBOOKS", tmp_path)
    assert main(["run"]) == WRONG
    words = f"sinkutils: there are no notebooks in {tmp_path}: they are in a checkout of the"
    words += " repository"
    assert capsys.readouterr().err.strip() == words


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "status"), [("--version", 0), ("mesure", WRONG)])
def test_the_version_and_a_mistyped_command_load_no_pytorch(argument, status):
    code = "import sys; sys.modules['torch'] = None; from sinkutils.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)
    assert done.returncode == status
    assert (f"sinkutils {__version__}" if status == 0 else "'measure'") in done.stdout + done.stderr


def ledger(preset, runs, file=None):
    words = "The sink is found wherever it was looked for, " * 4
    row = {"id": "sink", "source": "Table 4", "claim": words, "paper": "18.18", "ours": "24"}
    row["remark"] = "by hand"
    verdicts = ("not reproduced", "partly", "partly")
    table = pd.DataFrame([{**row, "verdict": verdict} for verdict in verdicts])
    table["ours"] = [24.0, math.nan, math.nan]
    return table


def test_claims_are_a_line_each_and_long_ones_say_more(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sinkutils.ledger.table.claims", ledger)
    with warnings.catch_warnings(action="error"):  # as of what pandas 4 will refuse
        short = said(capsys, "claims", "--runs", tmp_path)
    assert len(short.splitlines()) == 4 and "18.18" not in short
    assert short.splitlines()[0].startswith("not reproduced  sink")
    assert short.splitlines()[-1] == "3 claims at laptop: 1 not reproduced, 2 partly"
    long = said(capsys, "claims", "--runs", tmp_path, "--long")
    assert "paper: 18.18" in long
    assert "remark: by hand" in long


@pytest.mark.slow
def test_the_names_of_the_contract_are_there_whatever_is_imported_first():
    code = (
        "import sinkutils.study.record, sinkutils.ledger.table, sinkutils.study.grid, sinkutils as su\n"
        "names = 'LMConfig TransformerLM attend AttentionSpec load_lm probe measure experiments runs record claims'\n"
        "assert all(callable(getattr(su, name)) for name in names.split())\n"
        "assert len(su.experiments()) > 100 and len(su.experiments('6')) > 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
