"""A sweep: all missing runs of a preset, by several workers, on this machine or on a cluster.

The most informative runs come first. Each run is a process of its own, which locks the folder of
the run. So a sweep can be killed at any moment, and two sweeps can work at the same time. When a
sweep ends, or is killed, its workers on this machine end too.
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
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.corpus import Identity, load_corpus, located
from sinkutils.study.grid import config, find_preset
from sinkutils.study.record import CHECKPOINT_SECONDS, read_record
from sinkutils.study.store import Folder, RunFolder, Runs

POLL_SECONDS = 0.2
LOCKED = 3  # the exit status of `sinkutils train` if another process is training the run
SAID = "sinkutils: "  # the beginning of each message of the command line
STOP_SECONDS = 10.0  # the time that a worker has to end after the signal TERM
LEAST_ROOM = 2**16  # with less space on the disk (in bytes), a log may lack its last message
AGAIN = "training starts again"  # part of the warning that a checkpoint could not be used
# The environment variable that tells a worker the process id of its sweep.
PARENT = "SINKUTILS_PARENT"


class Worker:
    """A future that runs `python -m sinkutils train` in a process, whose output goes to `log`."""

    def __init__(self, arguments: tuple[str, ...], log: str) -> None:
        # Each worker has one thread. This makes several workers faster and changes no number.
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
        """Wait for the end of the process. Returns its exit status and its messages."""
        status = self.process.wait()
        output = self.log.read_bytes()[self.begin :]  # the lines of earlier workers come before
        messages = []
        for line in output.decode(errors="replace").splitlines():
            _, prefix, message = line.partition(SAID)  # a progress bar may precede the message
            if prefix:
                messages.append(message)
        return status, messages


def end_with_parent() -> None:
    """Make this process end as soon as the sweep that started it has ended or was killed.

    `sinkutils train` calls this. It does nothing in a process that no sweep has started.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def stop(jobs: list[Job]) -> int:
    """End the workers on this machine and return their number. Their checkpoints stay."""
    workers = [job.future for job in jobs if isinstance(job.future, Worker)]
    for worker in workers:
        worker.process.terminate()
    # All workers have the same deadline. Those that have not ended by then are killed.
    until = time.monotonic() + STOP_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    return len(workers)


def run_one(arguments: tuple[str, ...], log: str) -> tuple[int, list[str]]:
    """Train one run on the machine where an engine calls this: exit status and messages."""
    return Worker(arguments, log).result()


def devices(preset_name: str, engine_name: str, jobs: int, device: str | None) -> tuple[str, ...]:
    """The device of each worker.

    It is `device`, or by default the preset's own, so that all seeds of a preset are trained alike.
    On this machine, "cuda" assigns the GPUs to the workers in turn. Raises ValueError if a GPU is
    needed and this machine has none.
    """
    kind = device or find_preset(preset_name).device
    if engine_name == "local":
        find_device(kind)
        if kind == "cuda":
            gpus = torch.cuda.device_count()
            return tuple(f"cuda:{worker % gpus}" for worker in range(jobs))
    return (kind,) * jobs


def engine(name: str, logs: Path, gpu: bool = False) -> Callable:
    """A function that starts a run, with the arguments of `run_one`, and returns a future.

    name: "local" starts a process on this machine. "slurm" submits a job with submitit, which
    starts a process on this machine if there is no Slurm. Raises ImportError without submitit.
    gpu: whether each run needs a GPU.
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
    """How one run of a sweep ended.

    status: done, failed (the training failed, and the record says so) or crashed (no record).
    detail: why the run failed or crashed, or that it started again from step 0, or that another
    process trained it.
    """

    experiment: str
    seed: int
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Job:
    """A run that an engine is executing."""

    run_folder: RunFolder
    device: str
    log: Path
    future: Any

    def outcome(self) -> RunOutcome | None:
        """How the run ended; its future must be done. None if another process is training it."""
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
        except Exception as error:  # any error of an engine that lost a worker; other runs go on
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
    """Train every missing run of a preset, or of the experiments in `only`.

    Returns how each run ended. If another process is training a run, or the run that a fine-tuning
    starts from, the sweep waits for it. Afterwards it trains the run itself if there is still no
    record. An exception, such as KeyboardInterrupt, stops the workers on this machine. The logs are
    in logs/<preset> inside `runs`.

    jobs: how many runs the engine executes at a time. No further runs are queued there.
    corpus: where to load the text from instead of the preset's own, such as packed:<file>.
    device: the device to train on. None means the one that the preset is made for.
    Raises the errors of `load_corpus` if there is no such text.
    """
    integer("jobs", jobs, least=1)
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    free = deque(devices(preset_name, engine_name, jobs, device))
    # Every worker gets the same folder, text and preset as arguments.
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
    elsewhere = set[RunConfig]()  # the runs that another process was training
    outcomes = list[RunOutcome]()
    with tqdm(desc=preset_name, total=len(queue), unit="run", disable=not progress) as bar:
        try:
            while queue or running:
                # Give each free worker the first run that no other process is training.
                for run in list(queue):
                    if not free:
                        break
                    name = f"{run.experiment} seed {run.seed}"
                    run_folder = store.of(run, text)
                    # A run that another process is training stays in the queue, and the next one
                    # is tried.
                    if _locked(run_folder, store):
                        if run not in elsewhere:
                            bar.write(f"{name}: waiting for the process that trains it", sys.stderr)
                        elsewhere.add(run)
                        continue
                    queue.remove(run)
                    # The other process may have written its record.
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
                # Collect the runs that have ended.
                finished = [job for job in running if job.future.done()]
                for job in finished:
                    running.remove(job)
                    free.append(job.device)
                    outcome = job.outcome()
                    if outcome is None:  # another process locked it first, so it waits again
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
    """The identity of a corpus, tokenised with the vocabulary of a preset."""
    vocab_size = find_preset(preset_name).model.vocab_size
    return load_corpus(corpus, vocab_size).identity


def _locked(run_folder: RunFolder, store: Runs) -> bool:
    """Whether another process is training the run, or the run that a fine-tuning starts from."""
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
    """Every missing run with its estimated seconds.

    The preset states how long its usual number of steps takes; a run is in proportion to its steps.
    """
    base = find_preset(preset_name)
    text = _text_of(preset_name, corpus) if corpus else None
    planned = Runs(runs).missing(preset_name, seeds, text, only)
    a_step = base.seconds / base.train.steps
    return [(run, a_step * run.train.steps) for run in planned]
