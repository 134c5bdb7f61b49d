"""Many runs on one GPU that is lent for minutes: processes that stay, a list of runs in order, results as they come.

    python studies/card.py PLAN --out FOLDER --jobs 15 --seconds 500 --corpora packed-1.tar.xz ..

PLAN has a line a run: preset, experiment, seed, and "weights" where these are to come back. Each finished record is
added to FOLDER/files-<n>.tar at once (`card_out`), so that a kill loses what is unfinished.
Runs that differ in seed or text alone are trained as one (`stacked`), at most --stack of them.
A line may set fields of the config, as trials do: "minute fixed_1 0 train.learning_rate=0.02"; such a run is no record
of the study, and its last evaluation goes to FOLDER/results.jsonl as well. A line with "snapshots=0,200,1000" is no
record either: the weights at these steps, in float16, come back as lab/<experiment>/<step>.safetensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import yaml
from card_out import add
from stacked import alike, train_stacked

from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.corpus import verified
from sinkutils.study.record import Record
from sinkutils.study.train import train

RUNS = Path("/tmp/card-runs")  # outside of the tree; a second call on the machine finds them


def start_worker(corpora: list[str], graph: str) -> None:
    """What each process does once: one thread, and the texts that its runs take."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sinkutils.study.corpus import Corpus

    torch.set_num_threads(1)
    global TEXTS, GRAPH
    opened = [Corpus(Path(folder)) for folder in corpora]
    TEXTS = {(corpus.name, corpus.vocab_size): corpus for corpus in opened}
    GRAPH = {"auto": None, "on": True, "off": False}[graph]


def parsed(line: str) -> tuple:
    """The config of a line, what it changes in it, and the other words."""
    preset, experiment, seed, *words = line.split()
    config = grid.config(experiment, preset, int(seed))
    changes = {}
    for word in words:
        path, equals, value = word.partition("=")
        if equals and path != "snapshots":
            changes[path] = yaml.safe_load(value)
    if changes:
        config = grid._override(config, changes, grid.find_preset(preset))
    return config, changes, words


def stacks(lines: list[str], most: int) -> list[list[str]]:
    """The lines in groups of at most `most` that can be trained as one, in the order of each group's first line."""
    groups: list[list[str]] = []
    open_groups: dict[tuple, list[str]] = {}
    for line in lines:
        config, changes, words = parsed(line)
        stackable = config.train.optimizer == "adamw" and config.train.micro_batch is None
        if (
            not stackable
            or isinstance(config, FinetuneConfig)
            or any("snapshots" in word for word in words)
        ):
            groups.append([line])
            continue
        key = (alike(config), config.data.corpus, str(changes))
        group = open_groups.get(key)
        if group is None or len(group) == most:
            group = open_groups[key] = []
            groups.append(group)
        group.append(line)
    return groups


def attempt(lines: list[str]) -> list[dict]:
    """The lines of a group: what became of each; one that fails stops no other."""
    began = time.time()
    if len(lines) > 1:
        try:
            return together(lines)
        except Exception as error:  # such as an operation that has no form for a stack
            print(f"one by one: {lines[0]}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    results = []
    for line in lines:
        try:
            results.append(one_run(line))
        except Exception as error:
            seconds = time.time() - began
            results.append(
                {
                    "line": line,
                    "error": f"{type(error).__name__}: {error}"[:400],
                    "seconds": seconds,
                }
            )
    return results


def together(lines: list[str]) -> list[dict]:
    """Runs that are alike, trained as one."""
    began = time.time()
    configs, weights, trial, words = [], set(), False, []
    for line in lines:
        config, changes, words = parsed(line)
        configs.append(config)
        trial = bool(changes)
        if "weights" in words or grid.keeps_weights(config):
            weights.add(config)
    first = configs[0]
    corpus = TEXTS[first.data.corpus, first.model.vocab_size]
    runs = folder_of(trial, words)
    records = train_stacked(
        configs, runs, device=DEVICE, corpus=corpus, keep_weights=weights.__contains__, graph=GRAPH
    )
    results = []
    for line, record in zip(lines, records, strict=True):
        results.append(outcome(line, record, trial, began) | {"stacked": len(lines)})
    return results


def one_run(line: str) -> dict:
    began = time.time()
    config, changes, words = parsed(line)
    if words and words[0].startswith("snapshots="):
        return snapshots(
            config, [int(step) for step in words[0].partition("=")[2].split(",")], line
        )
    runs = folder_of(bool(changes), words)
    keep = "weights" in words or grid.keeps_weights(config)
    corpus = TEXTS[config.data.corpus, config.model.vocab_size]
    options = {
        "device": DEVICE,
        "corpus": corpus,
        "keep_weights": keep,
        "compile": False,
        "progress": False,
    }
    try:
        record = train(config, runs, graph=GRAPH, checkpoint_seconds=1e6, **options)
    except RuntimeError as error:  # an operation that no graph can hold
        print(f"without a graph: {line}: {str(error)[:200]}", flush=True)
        record = train(config, runs, graph=False, checkpoint_seconds=1e6, **options)
    return outcome(line, record, bool(changes), began)


def folder_of(trial: bool, words: list[str]) -> Path:
    return RUNS / "trials" / "-".join(words).replace("/", "-") if trial else RUNS


def outcome(line: str, record: Record, trial: bool, began: float) -> dict:
    """What results.jsonl says of a run."""
    found = {
        "line": line,
        "folder": str(record.folder),
        "seconds": round(time.time() - began, 1),
        "trial": trial,
    }
    if trial:
        last = record.metrics["final"]
        for name in ("valid_loss", "sink_1", "excess_1"):
            found[name] = last.get(name)
        found["alpha"] = last.get("report", {}).get("alpha")
        found["status"] = record.status
    return found


def snapshots(config, steps: list[int], line: str) -> dict:
    """The weights of a run at some steps, a file each."""
    from safetensors.torch import save_file

    from sinkutils.checks import device
    from sinkutils.study.task import GraphedStep, reproducible
    from sinkutils.study.train import Run

    began = time.time()
    folder = RUNS / "lab" / config.experiment
    folder.mkdir(parents=True)
    target = device(DEVICE)
    with reproducible(target):
        run = Run(config, TEXTS[config.data.corpus, config.model.vocab_size], target)
        if target.type == "cuda":
            run.graph = GraphedStep(run)
        for step in steps:
            while run.step < step:
                run.advance()
                run.passed.clear()
            half = {
                name: weight.half().cpu().contiguous()
                for name, weight in run.model.state_dict().items()
            }
            save_file(half, folder / f"{step}.safetensors")
    return {
        "line": line,
        "folder": str(folder),
        "seconds": round(time.time() - began, 1),
        "trial": False,
    }


DEVICE = os.environ.get("CARD_DEVICE", "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument(
        "--stack", type=int, default=8, help="runs that are trained as one, at most"
    )
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="after which nothing is waited for"
    )
    parser.add_argument("--corpora", nargs="+", required=True, help="folders of token files")
    parser.add_argument("--graph", choices=["auto", "on", "off"], default="auto")
    options = parser.parse_args()
    began = time.time()
    for folder in options.corpora:  # a worker that cannot start would be started again for ever
        verified(Path(folder))
    lines = Path(options.plan).read_text().split("\n")
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    context = multiprocessing.get_context("spawn")
    done = 0
    groups = stacks(lines, options.stack)
    with context.Pool(options.jobs, start_worker, (options.corpora, options.graph)) as pool:
        results = pool.imap_unordered(attempt, groups)
        for _ in groups:
            left = options.seconds - (time.time() - began)
            try:
                group = results.next(timeout=max(left, 0.01))
            except multiprocessing.TimeoutError:
                print(f"time is up after {done} of {len(lines)} runs", flush=True)
                break
            for found in group:
                done += 1
                with (options.out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(found) + "\n")
                if "folder" in found:
                    add(options.out, RUNS, sorted(Path(found["folder"]).iterdir()))
            print(
                round(time.time() - began),
                done,
                {k: v for k, v in found.items() if k != "alpha"},
                flush=True,
            )
        pool.terminate()
    print(f"{done} of {len(lines)} runs in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
