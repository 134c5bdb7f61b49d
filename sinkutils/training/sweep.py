"""Many runs: what is missing, most informative first, by as many workers as asked for, here or on a cluster.

Each run is a process of its own that takes a lock on its folder, so a sweep can be killed at any moment and started
twice at once. An engine is anything with `submit(function, *arguments)`, which gives a future.
"""

from __future__ import annotations

import os
import re
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

from sinkutils.checks import choice, first_line, integer, require
from sinkutils.checks import device as find_device
from sinkutils.data.corpus import load_corpus, located
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.presets import preset
from sinkutils.study.record import CHECKPOINT_SECONDS, read_record
from sinkutils.study.store import Runs

POLL_SECONDS = 0.2
ENGINES = ("local", "slurm", "ray")
LOCKED = 3  # the exit status of `sinkutils train` where another process has the run
SAID = "sinkutils: "  # how messages of the command line begin
LEAST_ROOM = 2**16  # in bytes: with less a log may lack its last message
AGAIN = "training starts again"  # of those the one of a checkpoint that could not be used


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


# --- engines


def devices(preset_name: str, engine_name: str, jobs: int, asked: str | None) -> tuple[str, ...]:
    """The device of each worker: the one asked for, else what the preset is made for, so that its seeds are alike.

    "cuda" on this machine means its GPUs in turn. Raises ValueError where a GPU is wanted and this machine has none.
    """
    kind = asked or preset(preset_name).device
    if engine_name == "local":
        gpus = torch.cuda.device_count()
        advice = "--engine slurm or ray asks a cluster for one, --device cpu trains here all the same"
        lack = f"preset {preset_name!r} is made for a GPU and there is none here: {advice}"
        require(bool(asked) or kind != "cuda" or gpus > 0, lack)
        find_device(kind)
        if kind == "cuda":
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
    """Ray behind the same `submit`: the cluster that RAY_ADDRESS names, else one that it starts here.

    Raises ValueError where the runs need a GPU and the cluster has none: such a task would wait for ever.
    """

    def __init__(self, ray: Any, jobs: int, gpu: bool) -> None:
        self.ray, self.needs = ray, {"num_cpus": 1, "num_gpus": int(gpu)}
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS")
            ray.init(address=address, num_cpus=None if address else jobs, include_dashboard=False)
        if gpu and ray.cluster_resources().get("GPU", 0) < 1:
            raise ValueError("these runs need a GPU and the Ray cluster has none: add one, or give --device cpu")

    def submit(self, function: Any, *arguments: Any) -> Any:
        return self.ray.remote(**self.needs)(function).remote(*arguments).future()


# --- the sweep


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended: done, failed (recorded), elsewhere (another worker has it) or crashed.

    detail: why it failed or crashed, or that it had to start again.
    """

    experiment: str
    seed: int
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Job:
    """A run that an engine has. size: of its log before the run, which adds to it."""

    run: RunConfig
    device: str
    folder: Path
    log: Path
    size: int
    future: Any

    @property
    def where(self) -> str:
        """Where to read more."""
        return f"see {self.log.parent.name}/{self.log.name}"

    def said(self) -> str:
        """What the run wrote to its log so far."""
        return self.log.read_bytes()[self.size :].decode(errors="replace") if self.log.exists() else ""

    def steps(self) -> int:
        """The step at which the run is, as its progress bar says."""
        bar = rf"{re.escape(self.run.experiment)} seed {self.run.seed}: [^\r]*?(\d+)/\d+ \["
        shown = re.findall(bar, self.said())
        return int(shown[-1]) if shown else 0

    def outcome(self) -> Outcome:
        """How the run ended, once its future is done."""
        try:
            status, detail = self._ended(self.future.result())
        except Exception as error:  # an engine may lose a worker in ways of its own: the other runs go on
            status, detail = "crashed", f"{first_line(error)}; {self.where}"
        return Outcome(self.run.experiment, self.run.seed, status, detail)

    def _ended(self, exit_status: int) -> tuple[str, str]:
        if exit_status == LOCKED:
            return "elsewhere", "another worker holds its lock"
        # Some messages stand behind a progress bar.
        messages = [line.partition(SAID)[2] for line in self.said().splitlines() if SAID in line]
        if exit_status == 0:
            record = read_record(self.folder)
            reasons = [record.metrics["reason"], *(message for message in messages if AGAIN in message)]
            return record.status, "; ".join(filter(None, reasons))
        if not messages and self.log.parent.exists() and shutil.disk_usage(self.log.parent).free < LEAST_ROOM:
            messages = ["the disk is full: free some space and run the same command again"]
        return "crashed", "; ".join([f"exit status {exit_status}", *messages[-1:], self.where])


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

    A fine-tuning waits until the run that it starts from has ended. Logs go to logs/<preset> inside `runs`.

    jobs: how many runs the engine has at a time; the others wait here, so that a sweep that stops leaves no queue.
    corpus: where to load the text from in place of the preset's own, such as packed:<file> (see `training.train`).
    device: where runs train; None: what the preset is made for.
    Raises what `load_corpus` does where there is no such text.
    """
    integer("jobs", jobs, least=1)
    free = deque(devices(preset_name, engine_name, jobs, device))
    store = Runs(Runs(runs).folder.resolve())  # a worker may start in another folder
    corpus = corpus and located(corpus)
    text = identity(preset_name, corpus)
    plan = store.missing(preset_name, seeds, text, only)
    logs = store.folder / "logs" / preset_name
    pool = engine(engine_name, jobs, logs, gpu=free[0].startswith("cuda"))
    queue, running, outcomes, ended = list(plan), list[Job](), list[Outcome](), 0
    if plan and progress:
        print(f"logs of the runs: {logs}", file=sys.stderr)
    total = sum(run.train.steps for run in plan)
    with tqdm(total=total, unit="step", unit_scale=True, disable=not progress) as bar:
        while queue or running:
            while free and (run := _next(queue, [job.run for job in running])):
                queue.remove(run)
                log, where = logs / f"{run.experiment}-{run.seed}.log", free.popleft()
                size = log.stat().st_size if log.exists() else 0
                task = (preset_name, run.experiment, run.seed, str(store.folder), str(log))
                future = pool.submit(run_one, *task, checkpoint_seconds, corpus, where)
                running.append(Job(run, where, store.place(run, text), log, size, future))
                if engine_name == "slurm":
                    bar.write(f"{run.experiment} seed {run.seed}: job {future.job_id}, which outlives this sweep")
            finished = [job for job in running if job.future.done()]
            for job in finished:
                running.remove(job)
                free.append(job.device)
                outcomes.append(job.outcome())
                ended += job.run.train.steps
            bar.set_description(f"{preset_name}: {len(outcomes)}/{len(plan)} runs", refresh=False)
            bar.update(ended + sum(job.steps() for job in running) - bar.n)
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


def identity(preset_name: str, corpus: str | None) -> dict[str, str] | None:
    """`Corpus.identity` of a text that was asked for in place of the preset's own, None where none was."""
    vocab_size = preset(preset_name).model.vocab_size
    return load_corpus(corpus, vocab_size).identity if corpus else None


def estimate(
    preset_name: str,
    seeds: tuple[int, ...] | None = None,
    runs: Path | str | None = None,
    corpus: str | None = None,
    only: tuple[str, ...] | None = None,
) -> list[tuple[RunConfig, float]]:
    """Every missing run with its seconds, by the speed of the runs that came to their end, else the preset's."""
    store = Runs(runs)
    rates = []
    for record in store.entries(preset_name):
        if record.status == "done":
            rates.append(record.provenance["wall_seconds"] / record.config["train"]["steps"])
    base = preset(preset_name)
    per_step = median_high(rates) if rates else base.seconds / base.train.steps
    planned = store.missing(preset_name, seeds, identity(preset_name, corpus), only)
    return [(run, per_step * run.train.steps) for run in planned]
