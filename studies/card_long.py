"""One long run on a lent GPU, at a constant rate, for as many steps as the seconds give.

    python studies/card_long.py NAME PRESET EXPERIMENT SEED --out FOLDER --corpus FOLDER --seconds N [FIELD=VALUE ..]

A point of the curve is added to FOLDER/curves.jsonl at each evaluation, so that a kill loses no more than one. At the
end come the record, of an experiment NAME_steps_<n> (with the steps that were made in its config, which is true of a
constant rate alone), and the weights in float16, both in FOLDER/files-<n>.tar (`card_out`). --floor STEP PERCENT: stop,
with exit code 3 and no weights, where Sink_1 is below so much at that step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import yaml
from card_out import add
from safetensors.torch import save_file

from sinkutils.checks import device as find_device
from sinkutils.study import grid
from sinkutils.study.corpus import Corpus
from sinkutils.study.task import (
    GraphedStep,
    conditions_of,
    may_graph,
    next_token_loss,
    reproducible,
)
from sinkutils.study.train import Run, evaluated, save_run

RUNS = Path("/tmp/card-long")
PART_BYTES = 2**21  # of weights: small parts leave no large gap at the end of an archive
GUARD_STEPS = 50
GUARD = 1e-2  # nats


def compiled_loss(config, corpus: Corpus, device: torch.device):
    """The compiled loss, if its first steps have the losses of eager ones; else None."""
    losses = []
    forms = next_token_loss, torch.compile(next_token_loss)
    for forward in forms:
        run = Run(config, corpus, device)
        run.forward = forward
        losses.append(torch.stack([run.advance() for _ in range(GUARD_STEPS)]))
    worst = float((losses[0] - losses[1]).abs().max())
    print(
        f"compiled steps are within {worst:.4f} nats of eager ones over {GUARD_STEPS} steps",
        flush=True,
    )
    return forms[1] if worst < GUARD else None  # also if it is nan


def keep_weights(run: Run, folder: Path, out: Path) -> None:
    """The weights in float16, in parts of some megabytes."""
    half = {name: weight.half().cpu() for name, weight in run.model.state_dict().items()}
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, weight in half.items():
        if sum(other.nbytes for other in parts[-1].values()) > PART_BYTES:
            parts.append({})
        parts[-1][name] = weight.contiguous()
    for number, part in enumerate(parts):
        path = folder / f"half-{number}.safetensors"
        save_file(part, path)
        add(out, RUNS, [path])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for word in ("name", "preset", "experiment"):
        parser.add_argument(word)
    parser.add_argument("seed", type=int)
    parser.add_argument("changes", nargs="*", metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder of token files")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--floor", nargs=2, type=float, metavar=("STEP", "PERCENT"))
    parser.add_argument(
        "--compile", action="store_true", help="where 50 compiled steps pass for eager ones"
    )
    parser.add_argument("--weights", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    changes = {"train.lr_floor": 1.0}
    for change in options.changes:
        path, _, value = change.partition("=")
        changes[path] = yaml.safe_load(value)
    config = grid.config(options.experiment, options.preset, options.seed)
    config = grid._override(config, changes, grid.find_preset(options.preset))
    corpus, device = Corpus(options.corpus), find_device(os.environ.get("CARD_DEVICE", "cuda"))
    code, reason = 0, None
    with reproducible(device):
        forward = compiled_loss(config, corpus, device) if options.compile else None
        run = Run(config, corpus, device)
        if forward is not None:
            run.forward = forward
        elif may_graph(run):
            run.graph = GraphedStep(run)
        run.parts.append(conditions_of(run, forward is not None, run.graph is not None))
        run.evaluate([])
        report, curve = None, options.out / "curves.jsonl"
        while run.step < config.train.steps and time.monotonic() - began < options.seconds:
            run.advance()
            if run.step % config.train.eval_every:
                continue
            float(run.passed[-1][0])  # waits for the GPU: so much was training
            trained = time.monotonic()
            reason, report = evaluated(run)
            run.seconds = time.monotonic() - began
            if report is None:
                break
            point = run.curve[-1]
            row = {"run": options.name, "seconds": run.seconds} | point
            row["evaluation_seconds"] = time.monotonic() - trained
            row["alpha"] = report.alpha[:, 0].mean(dim=0).tolist()
            with curve.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{run.seconds:.0f} s, step {run.step}: {point['valid_loss']:.3f}, {point['sink_1']:.1f} %",
                flush=True,
            )
            if (
                options.floor
                and run.step >= options.floor[0]
                and point["sink_1"] < options.floor[1]
            ):
                code = 3
                break
            options.floor = (
                None if options.floor and run.step >= options.floor[0] else options.floor
            )
        if reason is None and (report is None or run.passed):  # the steps since the last evaluation
            reason, report = evaluated(run)
            run.seconds = time.monotonic() - began
        name = f"{options.name}_steps_{run.step}"
        made = dataclasses.replace(config.train, steps=run.step)
        run.config = dataclasses.replace(config, experiment=name, train=made)
        folder = RUNS / config.preset / name / str(config.seed)
        save_run(run, folder, reason, report, keep_weights=False)
        add(options.out, RUNS, sorted(folder.iterdir()))
        if options.weights and code == 0:
            keep_weights(run, folder, options.out)
    print(
        f"{options.name}: {run.step} steps in {time.monotonic() - began:.0f} s, {reason or 'done'}",
        flush=True,
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
