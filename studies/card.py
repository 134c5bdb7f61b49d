"""Many runs on one GPU that is lent for minutes: processes that stay, a list of runs in order, results as they come.

    python studies/card.py PLAN --out FOLDER --jobs 15 --seconds 500 --corpora packed-1.tar.xz ..

PLAN has a line a run: preset, experiment, seed, and "weights" where these are to come back. Each finished record is
added to FOLDER/records-<preset>.tar (its weights to weights-<n>.tar) at once, so that a kill loses what is unfinished.
A line may set fields of the config, as trials do: "minute fixed_1 0 train.learning_rate=0.02"; such a run is no record
of the study, and its last evaluation goes to FOLDER/results.jsonl alone. A line with "snapshots=0,200,1000" is no
record either: the weights at these steps, in float16, come back in lab-<n>.tar.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tarfile
import time
from pathlib import Path

import yaml

from sinkutils.data.cache import verified

RUNS = Path("card-runs")
WEIGHTS_A_FILE = 12  # of a megabyte each
LABS_A_FILE = 3  # of five megabytes each


def start_worker(corpora: list[str], graph: str) -> None:
    """What each process does once: one thread, and the texts that its runs take."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sinkutils.data.corpus import Corpus

    torch.set_num_threads(1)
    global TEXTS, GRAPH
    opened = [Corpus(Path(folder)) for folder in corpora]
    TEXTS = {(corpus.name, corpus.vocab_size): corpus for corpus in opened}
    GRAPH = {"auto": None, "on": True, "off": False}[graph]


def attempt(line: str) -> dict:
    """One line of the plan: what became of it; one that fails stops no other."""
    began = time.time()
    try:
        return one_run(line)
    except Exception as error:
        return {"line": line, "error": f"{type(error).__name__}: {error}"[:400], "seconds": time.time() - began}


def one_run(line: str) -> dict:
    from sinkutils.study import grid
    from sinkutils.training.trainer import train

    began = time.time()
    preset, experiment, seed, *words = line.split()
    config = grid.config(experiment, preset, int(seed))
    if words and words[0].startswith("snapshots="):
        return snapshots(config, [int(step) for step in words[0].partition("=")[2].split(",")], line)
    changes = dict(option.split("=") for option in words if "=" in option)
    if changes:
        values = {path: yaml.safe_load(value) for path, value in changes.items()}
        config = grid._override(config, values, grid.preset(preset))
    runs = RUNS if not changes else RUNS / "trials" / "-".join(words).replace("/", "-")
    keep = "weights" in words or grid.keeps_weights(config)
    corpus = TEXTS[config.data.corpus, config.model.vocab_size]
    options = {"device": DEVICE, "corpus": corpus, "keep_weights": keep, "compile": False, "progress": False}
    try:
        record = train(config, runs, graph=GRAPH, checkpoint_seconds=1e6, **options)
    except RuntimeError as error:  # an operation that no graph can hold
        print(f"without a graph: {line}: {str(error)[:200]}", flush=True)
        record = train(config, runs, graph=False, checkpoint_seconds=1e6, **options)
    found = {"line": line, "folder": str(record.folder), "seconds": round(time.time() - began, 1)}
    found["trial"] = bool(changes)
    if changes:
        last = record.metrics["final"]
        report = last.get("report", {})
        names = ("valid_loss", "sink_1", "excess_1")
        found |= {name: last.get(name) for name in names} | {"alpha": report.get("alpha"), "status": record.status}
    return found


def snapshots(config, steps: list[int], line: str) -> dict:
    """The weights of a run at some steps, a file each."""
    from safetensors.torch import save_file

    from sinkutils.checks import device
    from sinkutils.training.graph import GraphedStep
    from sinkutils.training.run import Run
    from sinkutils.training.trainer import reproducible

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
                run.advance(run.loss)
                run.passed.clear()
            half = {name: weight.half().cpu().contiguous() for name, weight in run.model.state_dict().items()}
            save_file(half, folder / f"{step}.safetensors")
    return {"line": line, "folder": str(folder), "seconds": round(time.time() - began, 1), "trial": False}


DEVICE = os.environ.get("CARD_DEVICE", "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=500.0, help="after which nothing is waited for")
    parser.add_argument("--corpora", nargs="+", required=True, help="folders of token files")
    parser.add_argument("--graph", choices=["auto", "on", "off"], default="auto")
    options = parser.parse_args()
    began = time.time()
    for folder in options.corpora:  # a worker that cannot start would be started again for ever
        verified(Path(folder))
    lines = Path(options.plan).read_text().split("\n")
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    context = multiprocessing.get_context("spawn")
    done, counts = 0, {"weights": 0, "lab": 0}
    with context.Pool(options.jobs, start_worker, (options.corpora, options.graph)) as pool:
        results = pool.imap_unordered(attempt, lines)
        for _ in lines:
            left = options.seconds - (time.time() - began)
            try:
                found = results.next(timeout=max(left, 0.01))
            except multiprocessing.TimeoutError:
                print(f"time is up after {done} of {len(lines)} runs", flush=True)
                break
            done += 1
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
            if "error" in found or done % 25 == 0:
                print(round(time.time() - began), done, {k: v for k, v in found.items() if k != "alpha"}, flush=True)
            if "folder" in found and not found["trial"]:
                add(options.out, Path(found["folder"]), counts)
        pool.terminate()
    print(f"{done} of {len(lines)} runs in {time.time() - began:.0f} s", flush=True)


def add(out: Path, folder: Path, counts: dict[str, int]) -> None:
    """Add a record, or snapshots, to the archives; counts: how many had weights so far, and how many are snapshots."""
    preset = folder.relative_to(RUNS).parts[0]
    has_weights = (folder / "model.safetensors").exists()
    for path in sorted(folder.iterdir()):
        archive = f"records-{preset}.tar"
        if path.name == "model.safetensors":
            archive = f"weights-{counts['weights'] // WEIGHTS_A_FILE}.tar"
        if preset == "lab":
            archive = f"lab-{counts['lab'] // LABS_A_FILE}.tar"
        with tarfile.open(out / archive, "a") as tar:
            tar.add(path, path.relative_to(RUNS))
    counts["weights"] += has_weights
    counts["lab"] += preset == "lab"


if __name__ == "__main__":
    main()
