"""The commands of python -m sinkutils that belong to the study: list, train, sweep and claims.

A module that loads PyTorch, which takes seconds, is imported inside the command that needs it.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from sinkutils.commands import Parser, add_records, chosen, count
from sinkutils.paths import Strict


def add_study(command: Parser) -> None:
    command.add_argument("--preset", default="laptop", help="scale of the study (default: laptop)")
    add_records(command)


def add_variant(command: Parser) -> None:
    add = command.add_argument
    add(
        "--set",
        dest="change",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        type=assignment,
        help="train a variant of your own: model.attention.scale=0.5, in YAML; needs --name; "
        "in a sweep it changes the base or the one of --only",
    )
    add("--name", help="the name of your variant, and of its records")


def assignment(text: str) -> tuple[str, Any]:
    """A field and its value, from FIELD=VALUE. The value is one of YAML's."""
    field, equals, written = text.partition("=")
    try:
        if not equals:
            raise yaml.YAMLError
        return field.strip(), yaml.load(written, Strict)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(
            f"must be FIELD=VALUE with a value of YAML, got {text!r}"
        ) from error


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


def list_options(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--section", help="only this section: 4, 5, 6, 7, C, D, or 8 for later papers"
    )


def list_command(options: argparse.Namespace) -> None:
    """Show every experiment with the paper's value and what is recorded."""
    from sinkutils.study.grid import experiments, resolve, unavailable
    from sinkutils.study.store import Runs

    rows = experiments(options.section)
    refused = unavailable(options.preset)
    statuses = Counter[str]()  # status -> number of records
    seeds = Counter[str]()  # experiment -> number of seeds recorded
    for entry in Runs(options.runs).entries(options.preset):
        statuses[entry.status] += 1
        if entry.status in ("done", "failed"):
            seeds[entry.experiment] += 1
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
    add_variant(command)
    add("--keep-weights", action="store_true", help="keep the trained weights in the record")


def train_command(options: argparse.Namespace) -> None:
    """Train or fine-tune one experiment and write its record; a killed run continues."""
    from sinkutils.checks import device as find_device
    from sinkutils.checks import launched
    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.study.record import short_name
    from sinkutils.study.sweep import PARENT
    from sinkutils.study.train import train

    parent = os.environ.pop(PARENT, None)
    if parent is not None:  # the process of a sweep
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    change = dict(options.change)
    asked = (options.experiment, options.preset, options.seed)
    run = config(*asked, change=change, name=options.name)
    where = chosen(options, "runs", "corpus", "checkpoint_seconds")
    where["keep_weights"] = options.keep_weights or keeps_weights(run)
    record = train(run, device=find_device(options.device), **where)
    rank, _ = launched()
    if rank > 0:  # the first of several processes says it
        return
    name = short_name(record.folder)
    if record.status == "failed":
        print(f"{name}: training failed ({record.reason}); this is recorded as the result")
        return
    final = record.metrics["final"]
    line = f"{name}: Sink_1 {final['sink_1']:.2f} %"
    if "sink_star" in final:
        line += f", Sink_* {final['sink_star']:.2f} %"
    print(f"{line}, validation loss {final['valid_loss']:.3f}")


def _end_with(parent: int) -> None:
    """Send this process the signal TERM as soon as its parent, the process of that id, has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


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
    add_variant(command)
    add(
        "--engine",
        default="local",
        choices=("local", "slurm"),
        help="where runs go: to this machine or to a cluster (default: local)",
    )
    add(
        "--slurm",
        nargs="*",
        metavar="KEY=VALUE",
        help="to a cluster, with options of Slurm: account=.. partition=.. time=2:00:00 mem=4G",
    )
    add("--dry-run", action="store_true", help="print what would run, and about how long it takes")


def sweep_command(options: argparse.Namespace) -> int:
    """Train every missing record, most informative first; safe to kill and to start twice."""
    from tqdm import tqdm

    from sinkutils.checks import require
    from sinkutils.study.sweep import RunOutcome, estimate, sweep

    def say(outcome: RunOutcome) -> None:
        tqdm.write(str(outcome))  # above the bar

    which = chosen(options, "seeds", "only", "runs", "corpus", "name")
    which["change"] = dict(options.change)
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
    slurm = None
    if options.slurm is not None or options.engine == "slurm":
        slurm = {}
        for pair in options.slurm or []:
            key, _, value = pair.partition("=")
            require(bool(key and value), f"--slurm takes KEY=VALUE, got {pair!r}")
            slurm[key] = value
    # A training that diverged ("failed") is a result. A crash is an error.
    how = chosen(options, "jobs", "device", "checkpoint_seconds")
    outcomes = sweep(options.preset, **which, **how, slurm=slurm, ended=say)
    return int(any(outcome.status == "crashed" for outcome in outcomes))


def claims_options(command: Parser) -> None:
    add_study(command)
    command.add_argument(
        "--long", action="store_true", help="also the paper's and our numbers, and remarks"
    )
    command.add_argument(
        "--file", type=Path, help="claims of your own, in the form of data/claims.yaml"
    )


def claims_command(options: argparse.Namespace) -> None:
    """Print the ledger: every claim and its verdict."""
    from sinkutils.ledger.table import claims

    ledger = claims(options.preset, options.runs, file=options.file).astype(object).fillna("")
    for row in ledger.to_dict("records"):
        print(f"{row['verdict']:<15} {row['id']}: {row['claim']} ({row['source']})")
        for name in ("paper", "ours", "remark"):
            if options.long and row[name]:
                print(f"{'':<15} {name}: {row[name]}")
    counts = Counter(ledger.verdict)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts))
    print(f"{len(ledger)} claims at {options.preset}: {summary}")
