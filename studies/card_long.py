"""One long run on a lent GPU, at a constant rate, for as many steps as the seconds give.

    python studies/card_long.py NAME PRESET EXPERIMENT SEED --out FOLDER --corpus FOLDER --seconds N [FIELD=VALUE ..]

A point of the curve is added to FOLDER/NAME-curve.jsonl at each evaluation, so that a kill loses no more than one. At
the end come the record, FOLDER/NAME-record.tar, with the steps that were made in its config (which is true of a
constant rate alone), and the weights in float16, FOLDER/NAME-weights-<n>.safetensors. --floor STEP PERCENT: stop, with
exit code 3, where Sink_1 is below so much at that step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tarfile
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from sinkutils.checks import device as find_device
from sinkutils.data.corpus import Corpus
from sinkutils.study import grid
from sinkutils.training.graph import GraphedStep
from sinkutils.training.run import Run, next_token_loss
from sinkutils.training.trainer import evaluated, how, may_graph, reproducible, save

FILE_BYTES = 12_000_000  # of weights: a file of more than 16 MiB does not come back
GUARD_STEPS = 50
GUARD = 1e-2  # nats


def compiled_loss(config, corpus: Corpus, device: torch.device):
    """The compiled loss, if its first steps have the losses of eager ones; else None."""
    losses = []
    forms = next_token_loss, torch.compile(next_token_loss)
    for forward in forms:
        run = Run(config, corpus, device)
        losses.append(torch.stack([run.advance(forward) for _ in range(GUARD_STEPS)]))
    worst = float((losses[0] - losses[1]).abs().max())
    print(
        f"compiled steps are within {worst:.4f} nats of eager ones over {GUARD_STEPS} steps",
        flush=True,
    )
    return forms[1] if worst < GUARD else None  # also if it is nan


def keep_weights(run: Run, out: Path, name: str) -> None:
    part, size, number = {}, 0, 0
    for key, weight in run.model.state_dict().items():
        half = weight.half().cpu().contiguous()
        if part and size + half.nbytes > FILE_BYTES:
            save_file(part, out / f"{name}-weights-{number}.safetensors")
            part, size, number = {}, 0, number + 1
        part[key] = half
        size += half.nbytes
    save_file(part, out / f"{name}-weights-{number}.safetensors")


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
        if forward is None and may_graph(run):
            run.graph = GraphedStep(run)
        run.parts.append(how(run, forward is not None, run.graph is not None))
        run.evaluate([])
        report, curve = None, options.out / f"{options.name}-curve.jsonl"
        while run.step < config.train.steps and time.monotonic() - began < options.seconds:
            run.advance(forward or next_token_loss)
            if run.step % config.train.eval_every:
                continue
            reason, report = evaluated(run)
            run.seconds = time.monotonic() - began
            if report is None:
                break
            point = run.curve[-1]
            with curve.open("a") as file:
                file.write(
                    json.dumps(point | {"alpha": report.alpha[:, 0].mean(dim=0).tolist()}) + "\n"
                )
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
        run.config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, steps=run.step)
        )
        record = save(run, Path("/tmp/card-long", options.name), reason, report, keep_weights=False)
        with tarfile.open(options.out / f"{options.name}-record.tar", "w") as tar:
            tar.add(record.folder, options.name)
        if options.weights:
            keep_weights(run, options.out, options.name)
    print(
        f"{options.name}: {run.step} steps in {time.monotonic() - began:.0f} s, {reason or 'done'}",
        flush=True,
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
