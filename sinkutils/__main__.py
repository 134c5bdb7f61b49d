"""The command line: python -m sinkutils, with the commands at the end of this module."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinkutils.arguments import WRONG, parser
from sinkutils.checks import device as find_device
from sinkutils.study.presets import PRESETS

if TYPE_CHECKING:
    import pandas as pd

LOCKED, INTERRUPTED, BROKEN_PIPE = 3, 130, 141  # exit statuses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for an error in one line, 3 for a run trained elsewhere."""
    options = parser().parse_args(arguments)
    from sinkutils.study.record import CorruptRecord, RunLocked

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: print(f"sinkutils: {message}", file=sys.stderr)
            status = COMMANDS[options.command](options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RunLocked as error:
        print(f"sinkutils: {error}", file=sys.stderr)
        return LOCKED
    except (ValueError, OSError, ImportError, CorruptRecord, MemoryError, torch.OutOfMemoryError) as error:
        print("sinkutils:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("sinkutils: stopped; run the same command again to go on", file=sys.stderr)
        return INTERRUPTED


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options that a function takes by the same names."""
    return {name: getattr(options, name) for name in names}


def beside(options: argparse.Namespace, usual: Sequence[str], *allowed: str) -> str:
    """The options that differ from those of a plain command, as they are written; without those that are allowed."""
    plain = vars(parser().parse_args(usual))
    given = [name.replace("_", "-") for name, value in vars(options).items() if value != plain[name]]
    return ", ".join(f"{'--' if len(name) > 1 else '-'}{name}" for name in given if name not in allowed)


def note_no_records(runs: Path | None) -> None:
    """Say so where there is no folder of records at all, as in a folder that is no checkout."""
    from sinkutils.study.store import Runs

    folder = Runs(runs).folder
    if not folder.is_dir():
        advice = "give --runs, set SINKUTILS_HOME, or train some"
        print(f"sinkutils: there are no records in {folder}: {advice}", file=sys.stderr)


def duration(seconds: float) -> str:
    """A time in words, about as exact as an estimate is."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def list_command(options: argparse.Namespace) -> None:
    """Print the table of experiments."""
    from sinkutils.showing.tables import records
    from sinkutils.study.experiments import experiments
    from sinkutils.study.grid import resolve, unavailable

    note_no_records(options.runs)
    frame = records(options.preset, options.runs)
    refused, rows = unavailable(options.preset), experiments(options.section)
    print(f"{'experiment':<28}{'item':<18}{'paper Sink_1':>13}{'valid':>7}  recorded at {options.preset}: title")
    for row in rows:
        state = "not available"
        if row.name not in refused:
            name = resolve(row.name, options.preset)
            seeds = ((frame["experiment"] == name) & frame["status"].isin(["done", "failed"])).sum()
            state = f"{seeds} seed{'' if seeds == 1 else 's'}" if seeds else "missing"
            state += "" if name == row.name else f" (as {name})"
        cells = [f"{row.paper[key]:.2f}" if key in row.paper else "" for key in ("sink_1", "valid_loss")]
        print(f"{row.name:<28}{row.item:<18}{cells[0]:>13}{cells[1]:>7}  {state}: {row.title}")


def train_command(options: argparse.Namespace) -> None:
    """Train one experiment."""
    from sinkutils.study.config import FinetuneConfig
    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.training.group import joined
    from sinkutils.training.trainer import train

    run = config(options.experiment, options.preset, options.seed)
    device, keep = find_device(options.device), options.keep_weights or keeps_weights(run)
    given = chosen(options, "corpus", "compile", "checkpoint_seconds")
    with joined(options.parallel or PRESETS[options.preset].parallel, device) as group:
        record = train(run, options.runs, device=device, keep_weights=keep, group=group, **given)
    if not group.first:
        return
    name = "/".join(record.folder.parts[-3:])
    if record.status == "failed":
        print(f"{name}: training failed ({record.metrics['reason']}); this is recorded as the result")
        return
    final = record.metrics["final"]
    sink, loss = f"{final['sink_1']:.2f} %", f"{final['valid_loss']:.3f}"
    if isinstance(run, FinetuneConfig):
        start = record.metrics["curve"][0]
        sink, loss = f"{start['sink_1']:.2f} to {sink}", f"{start['valid_loss']:.3f} to {loss}"
    star = f", Sink_* {final['sink_star']:.2f} %" if "sink_star" in final else ""
    print(f"{name}: Sink_1 {sink}{star}, valid loss {loss}, {record.provenance['wall_seconds']:.0f} s")


def sweep_command(options: argparse.Namespace) -> int:
    """Train what is missing."""
    from sinkutils.study.grid import resolve
    from sinkutils.training.sweep import estimate, sweep

    seeds = tuple(options.seeds) if options.seeds else None
    only = tuple(resolve(name, options.preset) for name in options.only) if options.only else None
    if options.dry_run:
        plan = estimate(options.preset, seeds, options.runs, options.corpus, only)
        for run, seconds in plan:
            print(f"{run.experiment:<28} seed {run.seed}  about {duration(seconds)}")
        total = sum(seconds for _, seconds in plan)
        whole = f"about {duration(total)} for one worker, {duration(total / options.jobs)} with --jobs {options.jobs}"
        print(f"{len(plan)} run{'s' * (len(plan) > 1)}, {whole}" if plan else "0 runs: every record is there")
        return 0
    given = chosen(options, "jobs", "runs", "corpus", "device", "checkpoint_seconds")
    outcomes = sweep(options.preset, seeds=seeds, only=only, engine_name=options.engine, **given)
    for outcome in outcomes:
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
    return 1 if any(outcome.status == "crashed" for outcome in outcomes) else 0


def cost_command(options: argparse.Namespace) -> None:
    """Print what a run would take."""
    from sinkutils.study.cost import cost
    from sinkutils.study.grid import config

    print(cost(config(options.experiment, options.preset)).table(options.mfu, options.gpus))


def measure_command(options: argparse.Namespace) -> None:
    """Measure a model on one or more kinds of input."""
    from sinkutils.measuring.own import BOS, TEXT, X_FIX, subject
    from sinkutils.measuring.real import REAL_MODELS
    from sinkutils.measuring.saved import identity, save_measurement
    from sinkutils.model.decoder import TransformerLM

    if options.save and options.revision:
        raise ValueError("--save keeps a model as it was published: leave out --revision, or --save")
    if options.save and options.model.lower() in REAL_MODELS:
        raise ValueError(f"what is kept of {options.model} is in data/open_lms: python benchmarks/open_lms.py")
    if options.save and options.corpus != "docstrings":
        raise ValueError(f"--save keeps measurements on docstrings, not on {options.corpus}: leave one out")
    given = chosen(options, "dtype", "revision", "runs", "trust_remote_code")
    measured = replace(subject(options.model, options.device, **given), corpus=options.corpus)
    if options.save and isinstance(measured.model, TransformerLM):
        raise ValueError("--save is for open language models: a recorded run holds its own measurements")
    # A record whose training fixed a token is measured with that token, as it was trained, unless asked otherwise.
    plain = X_FIX not in measured.firsts or options.any_first
    first = BOS if options.bos else TEXT if plain else X_FIX
    results, given = {}, chosen(options, "targets", "bos", "batch_size")
    for kind in options.probe:
        ids = measured.inputs(kind, options.n, options.length, options.seed, first=first)
        report = measured.measure(ids, epsilons=options.eps, **given)
        at = 1 if kind == "repeat" else measured.fixed_position or 1  # of repeated tokens all are x_fix
        where = f", x_fix {'first' if at == 1 else f'at position {at}'}"
        fixed = first == X_FIX and at <= options.length
        report.name = f"{identity(options.model)}, {kind} input" + where * fixed
        results[kind] = report
    if options.json:
        print(json.dumps({kind: report.to_dict() for kind, report in results.items()}, indent=1))
    else:
        print("\n\n".join(str(report) for report in results.values()))
    if options.save:
        path = save_measurement(options.model, results)
        print(f"saved as {path.parent.name}/{path.name}", file=sys.stderr)


def models_command(options: argparse.Namespace) -> None:
    """Install real models, or list them."""
    from sinkutils.measuring.real import REAL_MODELS, install, listing

    for name in options.install or ():
        install(name)
        print(f"{name} is installed (licence: {REAL_MODELS[name].licence})")
    for row in [] if options.install else listing():
        for key, value in row.items():
            print(f"{value}" if key == "name" else f"  {key:<16}{value}")


def scores_command(options: argparse.Namespace) -> None:
    """Score a model."""
    from sinkutils.measuring.load import load_lm
    from sinkutils.measuring.real import REAL_MODELS
    from sinkutils.measuring.saved import save_scores
    from sinkutils.measuring.scores import evaluate

    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    bos, known = options.bos, REAL_MODELS.get(options.model.lower())
    if bos is None:
        bos = known is not None and known.bos
    scores = evaluate(model, tokenizer, options.task, limit=options.limit, bos=bos) | {"bos": bos}
    print(json.dumps(scores, indent=1))
    if options.limit is None:
        save_scores(options.model, scores)


def claims_command(options: argparse.Namespace) -> None:
    """Print the ledger, the paper's claims and those of later papers."""
    import pandas as pd

    from sinkutils.ledger.claims import PARTS, claims
    from sinkutils.ledger.results import results
    from sinkutils.ledger.rules import UNHELD
    from sinkutils.showing.reasons import why

    note_no_records(options.runs)
    ledgers = {part: claims(options.preset, options.runs, part) for part in PARTS}
    if options.long or options.csv:
        found = results(options.preset, options.runs)
        for part, ledger in ledgers.items():
            told = [
                why(id, found) if verdict in UNHELD else ""
                for id, verdict in zip(ledger["id"], ledger["verdict"], strict=True)
            ]
            ledgers[part] = ledger.assign(why=told)
    if options.csv:
        print(pd.concat([ledger.assign(part=part) for part, ledger in ledgers.items()]).to_csv(index=False), end="")
        return
    for part, ledger in ledgers.items():
        print_claims(ledger, f"claims {'of later papers ' * (part == 'later')}at {options.preset}", options.long)


def print_claims(ledger: pd.DataFrame, title: str, long: bool) -> None:
    """Print one part of the ledger, a paragraph a claim, as wide as the terminal, and how many have which verdict."""
    rows = ledger.astype(object).where(ledger.notna(), "").astype(str).to_dict("records")
    verdicts, ids = (max(len(row[column]) for row in rows) + 2 for column in ("verdict", "id"))
    width = max(60, shutil.get_terminal_size((100, 24)).columns)

    def paragraph(words: str, start: str) -> None:
        print(textwrap.fill(words, width, initial_indent=start, subsequent_indent=" " * len(start)))

    for row in rows:
        paragraph(f"{row['claim']} ({row['source']})", f"{row['verdict']:<{verdicts}}{row['id']:<{ids}}")
        for name in ("paper", "ours", "interval", *LONG) if long else ():
            if row.get(name):
                paragraph(f"{name}: {row[name]}", " " * verdicts + "- ")
    counts = ledger["verdict"].value_counts().sort_index()
    print(f"{len(rows)} {title}:", ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))


def run_command(options: argparse.Namespace) -> int:
    """Execute the notebooks."""
    from sinkutils.showing.notebook import refresh_notebooks, run_notebooks

    if options.in_place:
        if which := beside(options, ["run", "--in-place"], "only"):
            raise ValueError(f"--in-place runs notebooks with what stands in them: leave out {which}, or --in-place")
        refresh_notebooks(options.only)
        return 0
    parameters = chosen(options, "preset", "seed", "recompute")
    for name, text in options.parameter:
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return 1 if run_notebooks(parameters, options.output, options.only) else 0


def readme_command(options: argparse.Namespace) -> None:
    """Write README's generated parts anew."""
    from sinkutils.paths import ROOT
    from sinkutils.showing.readme import generated

    for name, text in generated().items():
        (ROOT / name).write_text(text, encoding="utf-8")


LONG = ("reason", "why", "holds", "effect", "low", "high")  # columns that only --long prints
OF_RUNS = (list_command, train_command, sweep_command, cost_command)
OF_MODELS = (measure_command, models_command, scores_command)
OF_PAGES = (claims_command, run_command, readme_command)
COMMANDS = {command.__name__.removesuffix("_command"): command for command in (*OF_RUNS, *OF_MODELS, *OF_PAGES)}

if __name__ == "__main__":
    sys.exit(main())
