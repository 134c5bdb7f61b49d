"""Many runs: what is missing, most informative first, by many workers, here or on a cluster.

Each run is a process of its own that takes a lock on its folder, so a sweep can be killed at any
moment and started twice at once. A worker on this machine ends with the sweep that started it,
however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sinkutils.checks import choice, first_line, integer, real
from sinkutils.checks import device as find_device
from sinkutils.data.corpus import Identity, load_corpus, located
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.grid import config, find_preset
from sinkutils.study.record import CHECKPOINT_SECONDS, read_record
from sinkutils.study.store import Folder, RunFolder, Runs

POLL_SECONDS = 0.2
LOCKED = 3  # the exit status of `sinkutils train` where another process has the run
SAID = "sinkutils: "  # how messages of the command line begin
STOP_SECONDS = 10.0  # which a worker has to end after TERM
LEAST_ROOM = 2**16  # in bytes: with less a log may lack its last message
AGAIN = "training starts again"  # of those the one of a checkpoint that could not be used
PARENT = "SINKUTILS_PARENT"  # the variable by which a worker knows the sweep that started it


class Worker:
    """`python -m sinkutils train` in a process of its own: a future whose output goes to `log`."""

    def __init__(self, arguments: tuple[str, ...], log: str) -> None:
        # One thread for each worker: two workers are faster so, and the numbers are the same.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, PARENT: str(os.getpid())}
        command = [sys.executable, "-m", "sinkutils", "train", *arguments]
        self.log = Path(log)
        with open(log, "ab") as output:
            self.begin = output.tell()
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def done(self) -> bool:
        return self.process.poll() is not None

    def result(self) -> tuple[int, list[str]]:
        """Its exit status, once it has ended, and its messages."""
        status = self.process.wait()
        output = self.log.read_bytes()[self.begin :]  # before it stand earlier workers' lines
        messages = []
        for line in output.decode(errors="replace").splitlines():
            _, prefix, message = line.partition(SAID)  # some stand behind a progress bar
            if prefix:
                messages.append(message)
        return status, messages


def end_with_parent() -> None:
    """Of a worker: end when the sweep that started this process has ended, or was killed."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def stop(jobs: list[Job]) -> int:
    """End the workers on this machine; what they have saved stays. Returns how many they were."""
    workers = [job.future for job in jobs if isinstance(job.future, Worker)]
    for worker in workers:
        worker.process.terminate()
    # All have the same time to end in; whoever does not is killed.
    until = time.monotonic() + STOP_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    return len(workers)


def run_one(arguments: tuple[str, ...], log: str) -> tuple[int, list[str]]:
    """A run from beginning to end, where an engine has sent it: exit status and messages."""
    return Worker(arguments, log).result()


def devices(preset_name: str, engine_name: str, jobs: int, device: str | None) -> tuple[str, ...]:
    """The device of each worker: `device`, else what the preset is made for.

    So the seeds of a preset are alike. "cuda" on this machine means its GPUs in turn. Raises
    ValueError where a GPU is wanted and this machine has none.
    """
    kind = device or find_preset(preset_name).device
    if engine_name == "local":
        find_device(kind)
        if kind == "cuda":
            gpus = torch.cuda.device_count()
            return tuple(f"cuda:{worker % gpus}" for worker in range(jobs))
    return (kind,) * jobs


def engine(name: str, logs: Path, gpu: bool = False) -> Callable:
    """What starts a run with the arguments of `run_one` and returns a future.

    gpu: each run needs one. slurm: jobs of submitit, which without Slurm are processes on this
    machine. Raises ImportError where that is missing.
    """
    choice("engine", name, ("local", "slurm"))
    if name == "local":
        return Worker
    import submitit

    executor = submitit.AutoExecutor(folder=logs / "submitit")
    executor.update_parameters(cpus_per_task=1, timeout_min=24 * 60, gpus_per_node=int(gpu))
    return partial(executor.submit, run_one)


@dataclass(frozen=True)
class RunOutcome:
    """How one run of a sweep ended: done, failed (recorded) or crashed.

    detail: why it failed or crashed, that it began anew, or that another process trained it.
    """

    experiment: str
    seed: int
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Job:
    """A run that an engine has."""

    run_folder: RunFolder
    device: str
    log: Path
    future: Any

    def outcome(self) -> RunOutcome | None:
        """How the run ended, once its future is done; None where another process has it."""
        run = self.run_folder.config
        end = partial(RunOutcome, run.experiment, run.seed)
        where = f"see {self.log.parent.name}/{self.log.name}"
        try:
            status, messages = self.future.result()
            if status == LOCKED:
                return None
            if status == 0:
                record = read_record(self.run_folder.folder)
                again = [message for message in messages if AGAIN in message]
                detail = record.reason or "; ".join(again)
                return end(record.status, detail)
        except Exception as error:  # whatever an engine raises that lost a worker: the others go on
            return end("crashed", f"{first_line(error)}; {where}")
        if not messages and shutil.disk_usage(self.log.parent).free < LEAST_ROOM:
            messages = ["the disk is full: free some space and run the same command again"]
        reasons = [f"exit status {status}", *messages[-1:], where]  # the last message, if any
        return end("crashed", "; ".join(reasons))


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
) -> list[RunOutcome]:
    """Train every missing run of a preset, or of the experiments in `only`; returns how each ended.

    A run that another process trains, or whose start one does, waits until that has ended: then it
    is trained here if there is no record. An exception, KeyboardInterrupt above all, stops the
    workers here. Logs go to logs/<preset> inside `runs`.

    jobs: how many runs the engine has at a time; a sweep that stops leaves no queue there.
    corpus: where to load the text from in place of the preset's own, such as packed:<file>.
    device: where runs train; None: what the preset is made for.
    Raises what `load_corpus` does where there is no such text.
    """
    integer("jobs", jobs, least=1)
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    free = deque(devices(preset_name, engine_name, jobs, device))
    # What every worker is told: the same folder, text and preset.
    store = Runs(Runs(runs).folder.resolve())  # a worker may start in another folder
    logs = store.folder / "logs" / preset_name
    options = ["--preset", preset_name, "--checkpoint-seconds", str(checkpoint_seconds)]
    options += ["--runs", str(store.folder)]
    text = None
    if corpus:
        options += ["--corpus", located(corpus)]
        text = _text_of(preset_name, located(corpus))
    queue = store.missing(preset_name, seeds, text, only)
    submit = engine(engine_name, logs, gpu=free[0].startswith("cuda"))
    if queue:
        logs.mkdir(parents=True, exist_ok=True)
        if progress:
            print(f"logs of the runs: {logs}", file=sys.stderr)
    running = list[Job]()
    elsewhere = set[RunConfig]()  # what another process has had
    outcomes = list[RunOutcome]()
    with tqdm(desc=preset_name, total=len(queue), unit="run", disable=not progress) as bar:
        try:
            while queue or running:
                # Give each free worker the first run that nobody else trains.
                for run in list(queue):
                    if not free:
                        break
                    name = f"{run.experiment} seed {run.seed}"
                    run_folder = store.of(run, text)
                    # One that another process trains waits in the queue, and the next one has its
                    # turn.
                    if _locked(run_folder, store):
                        if run not in elsewhere:
                            bar.write(f"{name}: waiting for the process that trains it", sys.stderr)
                        elsewhere.add(run)
                        continue
                    queue.remove(run)
                    # The other process may have recorded it.
                    record = run_folder.record() if run in elsewhere else None
                    if record is not None:
                        detail = "by another process"
                        outcomes.append(RunOutcome(run.experiment, run.seed, record.status, detail))
                        continue
                    log = logs / f"{run.experiment}-{run.seed}.log"
                    where = free.popleft()
                    own = ["--seed", str(run.seed), "--device", where]
                    future = submit((run.experiment, *options, *own), str(log))
                    running.append(Job(run_folder, where, log, future))
                    if engine_name == "slurm":
                        bar.write(f"{name}: job {future.job_id}, which outlives this sweep")
                # Take in what has ended.
                finished = [job for job in running if job.future.done()]
                for job in finished:
                    running.remove(job)
                    free.append(job.device)
                    outcome = job.outcome()
                    if outcome is None:  # another process was quicker to take it
                        run = job.run_folder.config
                        queue.append(run)
                        elsewhere.add(run)
                    else:
                        outcomes.append(outcome)
                bar.update(len(outcomes) - bar.n)
                if not finished:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            stopped = stop(running)
            if stopped:
                bar.write(f"{SAID}stopped {stopped} runs; what they have saved stays", sys.stderr)
            raise
    return outcomes


def _text_of(preset_name: str, corpus: str) -> Identity:
    """What a text is, in the tokens of a preset."""
    vocab_size = find_preset(preset_name).model.vocab_size
    return load_corpus(corpus, vocab_size).identity


def _locked(run_folder: RunFolder, store: Runs) -> bool:
    """Whether another process trains the run, or what it starts from."""
    run = run_folder.config
    if isinstance(run, FinetuneConfig):
        before = config(run.start, run.preset, run.seed)
        start = store.of(before, run_folder.corpus)
        return run_folder.locked() or start.locked()
    return run_folder.locked()


def estimate(
    preset_name: str,
    seeds: Sequence[int] | None = None,
    runs: Folder = None,
    corpus: str | None = None,
    only: Sequence[str] | None = None,
) -> list[tuple[RunConfig, float]]:
    """Every missing run with its seconds, by those that the preset names for its own steps."""
    base = find_preset(preset_name)
    text = _text_of(preset_name, corpus) if corpus else None
    planned = Runs(runs).missing(preset_name, seeds, text, only)
    a_step = base.seconds / base.train.steps
    return [(run, a_step * run.train.steps) for run in planned]
