"""Many runs: what is missing, most informative first, by as many workers as asked for, here or on a cluster.

Each run is a process of its own that takes a lock on its folder, so a sweep can be killed at any moment and started
twice at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from sinkutils.checks import choice, first_line, integer, real, require
from sinkutils.checks import device as find_device
from sinkutils.data.corpus import load_corpus, located
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.presets import preset
from sinkutils.study.record import CHECKPOINT_SECONDS, read_record
from sinkutils.study.store import Folder, Runs

POLL_SECONDS = 0.2
LOCKED = 3  # the exit status of `sinkutils train` where another process has the run
SAID = "sinkutils: "  # how messages of the command line begin
LEAST_ROOM = 2**16  # in bytes: with less a log may lack its last message
AGAIN = "training starts again"  # of those the one of a checkpoint that could not be used


def run_one(arguments: tuple[str, ...], log: str) -> tuple[int, list[str]]:
    """`python -m sinkutils train` in a process of its own, with its output added to `log`: exit status and messages."""
    # One thread for each worker: the numbers do not depend on it, the speed of two workers does.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sinkutils", "train", *arguments]
    with open(log, "ab") as output:
        size = output.tell()
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    said = Path(log).read_bytes()[size:].decode(errors="replace")
    # Some messages stand behind a progress bar.
    return status, [line.partition(SAID)[2] for line in said.splitlines() if SAID in line]


def devices(preset_name: str, engine_name: str, jobs: int, asked: str | None) -> tuple[str, ...]:
    """The device of each worker: the one asked for, else what the preset is made for, so that its seeds are alike.

    "cuda" on this machine means its GPUs in turn. Raises ValueError where a GPU is wanted and this machine has none.
    """
    kind = asked or preset(preset_name).device
    if engine_name == "local":
        find_device(kind)
        if kind == "cuda":
            return tuple(f"cuda:{worker % torch.cuda.device_count()}" for worker in range(jobs))
    return (kind,) * jobs


def engine(name: str, jobs: int, logs: Path, gpu: bool = False) -> Callable:
    """What starts `run_one` with the arguments it is given and returns a future. gpu: each run needs one.

    slurm: jobs of submitit, which without Slurm are processes on this machine. ray: tasks of the cluster that
    RAY_ADDRESS names, else of one that it starts here. Raises ImportError for a missing package, and ValueError where
    the runs need a GPU and Ray's cluster has none: such a task would wait for ever.
    """
    choice("engine", name, ("local", "slurm", "ray"))
    if name == "local":
        return partial(ThreadPoolExecutor(jobs).submit, run_one)  # type: ignore[call-arg]
    if name == "slurm":
        import submitit

        executor = submitit.AutoExecutor(folder=logs / "submitit")
        executor.update_parameters(cpus_per_task=1, timeout_min=24 * 60, gpus_per_node=int(gpu))
        return partial(executor.submit, run_one)
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        ray.init(address=address, num_cpus=None if address else jobs, include_dashboard=False)
    require(
        not gpu or ray.cluster_resources().get("GPU", 0) >= 1,
        "these runs need a GPU and the Ray cluster has none: add one, or give --device cpu",
    )
    task = ray.remote(num_cpus=1, num_gpus=int(gpu))(run_one)
    return lambda *arguments: task.remote(*arguments).future()


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
    """A run that an engine has."""

    run: RunConfig
    device: str
    folder: Path
    log: Path
    future: Any

    def steps(self) -> int:
        """The step at which the run is, as the last progress bar in its log says."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        bar = rf"{re.escape(self.run.experiment)} seed {self.run.seed}: [^\r]*?(\d+)/\d+ \["
        return int((re.findall(bar, said) or [0])[-1])

    def outcome(self) -> Outcome:
        """How the run ended, once its future is done."""
        end = partial(Outcome, self.run.experiment, self.run.seed)
        where = f"see {self.log.parent.name}/{self.log.name}"
        try:
            status, messages = self.future.result()
            record = read_record(self.folder) if status == 0 else None
        except Exception as error:  # an engine may lose a worker in ways of its own: the other runs go on
            return end("crashed", f"{first_line(error)}; {where}")
        if record is not None:
            reasons = [record.reason, *(message for message in messages if AGAIN in message)]
            return end(record.status, "; ".join(filter(None, reasons)))
        if status == LOCKED:
            return end("elsewhere", "another worker holds its lock")
        if not messages and shutil.disk_usage(self.log.parent).free < LEAST_ROOM:
            messages = ["the disk is full: free some space and run the same command again"]
        return end("crashed", "; ".join([f"exit status {status}", *messages[-1:], where]))


def sweep(
    preset_name: str,
    *,
    jobs: int = 1,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    runs: Folder = None,
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
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    free = deque(devices(preset_name, engine_name, jobs, device))
    store = Runs(Runs(runs).folder.resolve())  # a worker may start in another folder
    corpus = corpus and located(corpus)
    text = load_corpus(corpus, preset(preset_name).model.vocab_size).identity if corpus else None
    queue = store.missing(preset_name, seeds, text, only)
    planned = len(queue)
    total = sum(run.train.steps for run in queue)
    logs = store.folder / "logs" / preset_name
    submit = engine(engine_name, jobs, logs, gpu=free[0].startswith("cuda"))
    if queue:
        logs.mkdir(parents=True, exist_ok=True)
        if progress:
            print(f"logs of the runs: {logs}", file=sys.stderr)
    options = f"--preset {preset_name} --checkpoint-seconds {checkpoint_seconds}".split()
    options += ["--runs", str(store.folder), *(["--corpus", corpus] if corpus else [])]
    running = list[Job]()
    outcomes = list[Outcome]()
    ended = 0
    with tqdm(total=total, unit="step", unit_scale=True, disable=not progress) as bar:
        while queue or running:
            while free and (run := _next(queue, [job.run for job in running])):
                queue.remove(run)
                log = logs / f"{run.experiment}-{run.seed}.log"
                where = free.popleft()
                future = submit((run.experiment, *options, "--seed", str(run.seed), "--device", where), str(log))
                running.append(Job(run, where, store.place(run, text), log, future))
                if engine_name == "slurm":
                    bar.write(f"{run.experiment} seed {run.seed}: job {future.job_id}, which outlives this sweep")
            finished = [job for job in running if job.future.done()]
            for job in finished:
                running.remove(job)
                free.append(job.device)
                outcomes.append(job.outcome())
                ended += job.run.train.steps
            bar.set_description(f"{preset_name}: {len(outcomes)}/{planned} runs", refresh=False)
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


def estimate(
    preset_name: str,
    seeds: Sequence[int] | None = None,
    runs: Folder = None,
    corpus: str | None = None,
    only: Sequence[str] | None = None,
) -> list[tuple[RunConfig, float]]:
    """Every missing run with its seconds, by those that the preset says a run of its steps takes."""
    base = preset(preset_name)
    text = load_corpus(corpus, base.model.vocab_size).identity if corpus else None
    planned = Runs(runs).missing(preset_name, seeds, text, only)
    return [(run, base.seconds * run.train.steps / base.train.steps) for run in planned]
