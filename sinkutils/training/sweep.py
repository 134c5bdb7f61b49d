"""Many runs: what is missing, most informative first, by as many workers as asked for, here or on a cluster.

Each run is a process of its own that takes a lock on its folder, so a sweep can be killed at any moment and started
twice at once. An engine is anything with `submit(function, *arguments)`, which gives a future.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from tqdm.auto import tqdm

from sinkutils.checks import choice, integer, require
from sinkutils.checks import device as find_device
from sinkutils.data.corpus import load_corpus, located
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.presets import preset
from sinkutils.study.record import CHECKPOINT_SECONDS, CorruptRecord, read_record
from sinkutils.study.store import Runs

POLL_SECONDS = 0.2
ENGINES = ("local", "slurm", "ray")
SAID = "sinkutils: "  # how messages of the command line begin
LEAST_ROOM = 2**16  # in bytes: with less a log may lack its last message
AGAIN = "training starts again"  # of those the one of a checkpoint that could not be used


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended: done, failed (recorded), elsewhere (another worker has it) or crashed.

    detail: why it failed or crashed, or that it had to start again.
    """

    experiment: str
    seed: int
    status: str
    detail: str = ""


def run_one(
    scale: str, experiment: str, seed: int, runs: str, log: str, seconds: float, corpus: str | None, device: str
) -> int:
    """Train one run in a process of its own, with its output in `log`; returns the exit status."""
    command = [sys.executable, "-m", "sinkutils", "train", experiment, "--preset", scale, "--seed", str(seed)]
    command += ["--runs", runs, "--checkpoint-seconds", str(seconds), "--device", device]
    if corpus:
        command += ["--corpus", corpus]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    # One thread for each worker: the numbers do not depend on it, the speed of two workers does.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with open(log, "ab") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode


def devices(preset_name: str, engine_name: str, jobs: int, asked: str | None) -> tuple[str, ...]:
    """The device of each worker: the one asked for, else this machine's GPUs in turn, else what the preset is made for.

    Raises ValueError where a GPU is asked for, or the preset is made for one, and this machine has none.
    """
    kind = asked or preset(preset_name).device
    if engine_name == "local":
        gpus = torch.cuda.device_count()
        advice = "--engine slurm or ray asks a cluster for one, --device cpu trains here all the same"
        lack = f"preset {preset_name!r} is made for a GPU and there is none here: {advice}"
        require(bool(asked) or kind != "cuda" or gpus > 0, lack)
        find_device(asked or "cpu")
        if gpus and asked in (None, "cuda"):
            return tuple(f"cuda:{worker % gpus}" for worker in range(jobs))
    return (kind,) * jobs


def engine(name: str, jobs: int, logs: Path, gpu: bool = False) -> Any:
    """An engine by name; gpu: each run needs one. Raises ImportError, with what to install, for a missing package."""
    choice("engine", name, ENGINES)
    if name == "local":
        return ThreadPoolExecutor(jobs)
    module = {"slurm": "submitit", "ray": "ray"}[name]
    try:
        package = import_module(module)
    except ImportError as error:
        raise ImportError(f"this engine needs {module}: pip install -e '.[{name}]'") from error
    if name == "ray":
        return RayEngine(package, jobs, gpu)
    executor = package.AutoExecutor(folder=logs / "submitit")  # without Slurm it starts processes on this machine
    executor.update_parameters(cpus_per_task=1, timeout_min=24 * 60, gpus_per_node=int(gpu))
    return executor


class RayEngine:
    """Ray behind the same `submit`."""

    def __init__(self, ray: Any, jobs: int, gpu: bool) -> None:
        self.ray, self.needs = ray, {"num_cpus": 1, "num_gpus": int(gpu)}
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS")
            ray.init(address=address, num_cpus=None if address else jobs, include_dashboard=False)

    def submit(self, function: Any, *arguments: Any) -> Any:
        return self.ray.remote(**self.needs)(function).remote(*arguments).future()


def sweep(
    preset_name: str,
    *,
    jobs: int = 1,
    seeds: tuple[int, ...] | None = None,
    only: tuple[str, ...] | None = None,
    runs: Path | str | None = None,
    engine_name: str = "local",
    corpus: str | None = None,
    device: str | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
) -> list[Outcome]:
    """Train every missing run of a preset, or of the experiments in `only`; returns how each ended.

    A fine-tuning waits until the run that it starts from has ended.

    jobs: how many runs the engine has at a time; the others wait here, so that a sweep that stops leaves no queue.
    corpus: where to load the text from in place of the preset's own, such as packed:<file> (see `training.train`).
    device: where runs train; None: the GPUs of this machine in turn, on a cluster what the preset is made for.
    Raises what `load_corpus` does where there is no such text.
    """
    integer("jobs", jobs, least=1)
    free = deque(devices(preset_name, engine_name, jobs, device))
    store = Runs(Runs(runs).folder.resolve())  # a worker may start in another folder
    corpus = corpus and located(corpus)
    logs = store.folder.parent / "logs" / preset_name
    text = identity(preset_name, corpus, progress)
    plan = store.missing(preset_name, seeds, text, only)
    pool = engine(engine_name, jobs, logs, gpu=free[0].startswith("cuda"))
    queue, waiting = list(plan), dict[Any, tuple[RunConfig, str, Path, int]]()
    outcomes: list[Outcome] = []
    total, title = sum(run.train.steps for run in plan), f"{preset_name}: 0/{len(plan)} runs"
    with tqdm(total=total, unit="step", unit_scale=True, disable=not progress, desc=title) as bar:
        while queue or waiting:
            while free and (run := _next(queue, [run for run, *_ in waiting.values()])):
                queue.remove(run)
                where = free.popleft()
                log = logs / f"{run.experiment}-{run.seed}.log"
                size = log.stat().st_size if log.exists() else 0
                options = (str(log), checkpoint_seconds, corpus, where)
                future = pool.submit(run_one, preset_name, run.experiment, run.seed, str(store.folder), *options)
                waiting[future] = (run, where, log, size)
            finished = [future for future in waiting if future.done()]
            for future in finished:
                run, where, log, size = waiting.pop(future)
                free.append(where)
                outcomes.append(_outcome(run.experiment, run.seed, store.place(run, text), log, size, future))
                bar.update(run.train.steps)
                bar.set_description(f"{preset_name}: {len(outcomes)}/{len(plan)} runs, last {run.experiment}")
            if not finished:
                time.sleep(POLL_SECONDS)
    return outcomes


def _next(queue: list[RunConfig], training: list[RunConfig]) -> RunConfig | None:
    """The first run of the queue whose start, if it is a fine-tuning, is neither before it nor being trained, be it by
    another fine-tuning, which trains a start that is missing.
    """
    pending = {(run.experiment, run.seed) for run in (*queue, *training)}
    pending |= {(run.start, run.seed) for run in training if isinstance(run, FinetuneConfig)}
    return next((run for run in queue if (getattr(run, "start", None), run.seed) not in pending), None)


def identity(preset_name: str, corpus: str | None, progress: bool = True) -> dict[str, str] | None:
    """`Corpus.identity` of a text that was asked for in place of the preset's own, None where none was."""
    vocab_size = preset(preset_name).model.vocab_size
    return load_corpus(corpus, vocab_size, progress=progress).identity if corpus else None


def _outcome(name: str, seed: int, folder: Path, log: Path, size: int, future: Any) -> Outcome:
    """size: of the log before the run, which adds to it."""
    where = f"see {log.parent.name}/{log.name}"
    try:
        status = future.result()
        if status == 3:
            return Outcome(name, seed, "elsewhere", "another worker holds its lock")
        said = _said(log, size)
        if status != 0:
            return Outcome(name, seed, "crashed", "; ".join([f"exit status {status}", *said[-1:], where]))
        record = read_record(folder)
    except CorruptRecord as error:
        return Outcome(name, seed, "crashed", str(error))
    except Exception as error:  # an engine may lose a worker in ways of its own: the other runs go on
        return Outcome(name, seed, "crashed", f"{type(error).__name__}: {error}; {where}")
    reasons = [record.metrics["reason"], *(line for line in said if AGAIN in line)]
    return Outcome(name, seed, record.status, "; ".join(filter(None, reasons)))


def _said(log: Path, size: int) -> list[str]:
    """The messages in a log beyond its first `size` bytes; some stand behind a progress bar."""
    lines = log.read_bytes()[size:].decode(errors="replace").splitlines() if log.exists() else []
    said = [line.partition(SAID)[2] for line in lines if SAID in line]
    full = log.parent.exists() and shutil.disk_usage(log.parent).free < LEAST_ROOM
    return said or ["the disk is full: free some space and run the same command again"] * full


def estimate(
    preset_name: str,
    seeds: tuple[int, ...] | None = None,
    runs: Path | str | None = None,
    corpus: str | None = None,
    only: tuple[str, ...] | None = None,
) -> list[tuple[RunConfig, float]]:
    """Every missing run with its seconds, by the speed of the runs that came to their end, else the preset's."""
    store = Runs(runs)
    rates = [
        entry.record.provenance["wall_seconds"] / entry.record.config["train"]["steps"]
        for entry in store.entries(preset_name)
        if entry.record is not None and entry.record.status == "done" and "wall_seconds" in entry.record.provenance
    ]
    base = preset(preset_name)
    per_step = median_high(rates) if rates else base.seconds / base.train.steps
    planned = store.missing(preset_name, seeds, identity(preset_name, corpus), only)
    return [(run, per_step * run.train.steps) for run in planned]
