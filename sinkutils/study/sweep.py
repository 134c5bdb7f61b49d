"""A sweep: all missing runs of a preset, by several workers, on this machine or on a cluster.

The most informative runs come first. Each run is a process of its own, which locks the folder of
the run. So a sweep can be killed at any moment, and many sweeps can share a folder. When a sweep
ends, or is killed, its workers on this machine end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from tqdm import tqdm

from sinkutils import paths
from sinkutils.checks import device as find_device
from sinkutils.checks import first_line, integer, real
from sinkutils.commands import LOCKED
from sinkutils.study.config import FinetuneConfig, Identity, Json, RunConfig
from sinkutils.study.corpus import load_corpus, located
from sinkutils.study.grid import find_preset
from sinkutils.study.record import CHECKPOINT_SECONDS, Folder
from sinkutils.study.store import RunFolder, Runs
from sinkutils.study.task import before

POLL_SECONDS = 0.2  # between two looks at the runs that other processes are training
STOP_SECONDS = 10.0  # the time that a worker has to end after the signal TERM
LEAST_ROOM = 2**16  # with less space on the disk (in bytes), a worker may lack its last words
# The environment variable that tells a worker the process id of its sweep (`study_commands`).
PARENT = "SINKUTILS_PARENT"


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

    def __str__(self) -> str:
        return f"{self.experiment:<28} seed {self.seed}  {self.status}  {self.detail}"


Ended = Callable[[RunOutcome], Any]  # called with the outcome of each run as soon as it has ended


def say(message: str) -> None:
    """Print a message to stderr, above the progress bar if there is one."""
    tqdm.write(f"sinkutils: {message}", sys.stderr)


# --- on one machine


def places(device: str, jobs: int) -> list[tuple[str, dict[str, str]]]:
    """For each worker of this machine, its device and the environment variables that it needs.

    A worker on a GPU sees no other, and calls it "cuda". The workers get the GPUs in turn, or all
    of them the one that `device` names, such as cuda:1. Raises ValueError if there is no such
    device.
    """
    target = find_device(device)
    if target.type != "cuda":
        return [(device, {})] * jobs
    # The GPUs that this process sees, by the names that it was told them.
    count = torch.cuda.device_count()
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",")[:count] if told else [str(gpu) for gpu in range(count)]
    if target.index is not None:
        names = [names[target.index]]
    return [("cuda", {"CUDA_VISIBLE_DEVICES": names[job % len(names)]}) for job in range(jobs)]


class Workers:
    """The processes of a sweep on this machine, at most one in each of its places."""

    def __init__(self, free: list[tuple[str, dict[str, str]]]) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False
        self.lock = threading.Lock()
        self.free = SimpleQueue[tuple[str, dict[str, str]]]()
        for place in free:
            self.free.put(place)

    def run(self, arguments: Sequence[str], log: Path) -> int:
        """Run `sinkutils train` to its end, with its output in `log`. Returns its exit status."""
        place = self.free.get()
        device, visible = place
        command = [sys.executable, "-m", "sinkutils", "train", *arguments, "--device", device]
        # Each worker has one thread. This makes several workers faster and changes no number.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, PARENT: str(os.getpid()), **visible}
        environment.pop("RANK", None)  # a launcher's, if it started the sweep (`checks.launched`)
        try:
            with self.lock, log.open("ab") as output:
                if self.stopped:
                    raise InterruptedError("the sweep was stopped")
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment
                )
                self.running.add(process)
            status = process.wait()
            self.running.discard(process)
            return status
        finally:
            self.free.put(place)

    def stop(self) -> int:
        """End all processes, and start no more. Returns their number. Their checkpoints stay."""
        with self.lock:
            self.stopped = True
        processes = [*self.running]
        for process in processes:
            process.terminate()
        # All processes have the same deadline. Those that have not ended by then are killed.
        until = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return len(processes)


@dataclass(frozen=True)
class Batch:
    """Runs that one machine trains, `jobs` at a time. To call it is to train them.

    device: cpu, cuda, .., as for `places`. text: the identity of the text if it is not the
    preset's own. options: further ones of `sinkutils train`. logs: the folder of the runs' logs.
    of: if the runs are those of a variant, the experiment that it changes.
    """

    runs: Sequence[RunConfig]
    jobs: int
    device: str
    store: Runs
    text: Identity | None
    options: Sequence[str]
    logs: Path
    of: str | None = None

    def __call__(self, ended: Ended = lambda outcome: None) -> list[RunOutcome]:
        """Train all runs, and return how each ended.

        A run that another process is training is tried again after all others. An exception, such
        as KeyboardInterrupt, stops the workers.
        """
        workers = Workers(places(self.device, self.jobs))
        elsewhere = set[RunConfig]()  # the runs that another process was training
        outcomes = list[RunOutcome]()
        waiting = [*self.runs]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while waiting:
                    runs = {pool.submit(self.one, run, workers): run for run in waiting}
                    waiting = []
                    for future in as_completed(runs):
                        outcome = future.result()
                        if outcome is not None:
                            outcomes.append(outcome)
                            ended(outcome)
                            continue
                        run = runs[future]
                        waiting.append(run)
                        if run not in elsewhere:
                            name = f"{run.experiment} seed {run.seed}"
                            say(f"{name}: waiting for the process that trains it")
                            elsewhere.add(run)
                    if waiting:
                        time.sleep(POLL_SECONDS)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                stopped = workers.stop()
                if stopped:
                    say(f"stopped {stopped} runs; what they have saved stays")
                raise
        return outcomes

    def one(self, run: RunConfig, workers: Workers) -> RunOutcome | None:
        """Train one run in a process of its own. None if another process is training it."""
        run_folder = self.store.of(run, self.text)
        if _locked(run_folder, self.store):
            return None
        record = run_folder.record()
        if record is not None:  # there was none when the sweep began
            return RunOutcome(run.experiment, run.seed, record.status, "by another process")
        log = self.logs / f"{run.experiment}-{run.seed}.log"
        arguments = (self.of or run.experiment, "--seed", str(run.seed), *self.options)
        try:
            said = log.stat().st_size if log.exists() else 0
            status = workers.run(arguments, log)
            if status == LOCKED:  # another process was faster
                return None
            record = run_folder.record() if status == 0 else None
            if record is not None:
                detail = record.reason or record.provenance.get("restarted") or ""
                return RunOutcome(run.experiment, run.seed, record.status, detail)
            reason = _reason(status, log, said)
        except Exception as error:  # such as a full disk; the other runs go on
            reason = first_line(error)
        detail = f"{reason}; see {log.parent.name}/{log.name}"
        return RunOutcome(run.experiment, run.seed, "crashed", detail)


def _reason(status: int, log: Path, said: int) -> str:
    """Why a worker ended with this exit status, by what it wrote to its log after `said` bytes.

    That is its last line. If there is a traceback, it is the first line below it.
    """
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    text = log.read_bytes()[said:].decode("utf-8", "replace")
    _, traceback, below = text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in below.splitlines() if line[:1].strip()]  # those without indentation
    if lines:
        return lines[0 if traceback else -1].removeprefix("sinkutils: ")
    if shutil.disk_usage(log.parent).free < LEAST_ROOM:
        return "the disk is full: free some space and run the same command again"
    return f"exit status {status}"


def _locked(run_folder: RunFolder, store: Runs) -> bool:
    """Whether another process is training the run, or the run that a fine-tuning starts from."""
    run = run_folder.config
    if isinstance(run, FinetuneConfig) and store.of(before(run), run_folder.corpus).locked():
        return True
    return run_folder.locked()


# --- all missing runs


def sweep(
    preset_name: str,
    *,
    jobs: int = 1,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    runs: Folder = None,
    slurm: Mapping[str, str] | None = None,
    corpus: str | None = None,
    change: Json | None = None,
    name: str | None = None,
    device: str | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
    ended: Ended = lambda outcome: None,
) -> list[RunOutcome]:
    """Train every missing run of a preset, or of the experiments in `only`.

    Returns how each run ended. If another process is training a run, or the run that a fine-tuning
    starts from, the sweep takes the other runs first. Afterwards it trains the run itself if there
    is still no record. An exception, such as KeyboardInterrupt, stops the workers on this machine.
    The logs are in logs/<preset> inside `runs`.

    jobs: how many runs are trained at a time; on a cluster, how many jobs run at a time.
    slurm: None means on this machine. Otherwise the runs go to a cluster, with these options of
    Slurm's, such as {"account": "mine", "time": "2:00:00"} (`study.slurm.submit`).
    corpus: where to load the text from instead of the preset's own, such as packed:<file>.
    change, name: a variant of your own to train instead (`grid.plan`).
    device: the device to train on. None means the one that the preset is made for, so that all
    seeds of a preset are trained alike.
    ended: is called with the outcome of each run as soon as it has ended.
    Raises the errors of `load_corpus` if there is no such text, and ValueError if there is no such
    device.
    """
    integer("jobs", jobs, least=1)
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    device = device or find_preset(preset_name).device
    if slurm is None:
        find_device(device)
    else:
        from sinkutils.study.slurm import check, submit

        check()
    # Every worker gets the same folder, text and preset as arguments.
    store = Runs(Runs(runs).folder.resolve())  # a worker may start in another folder
    options = ["--preset", preset_name, "--checkpoint-seconds", str(checkpoint_seconds)]
    options += ["--runs", str(store.folder)]
    text = None
    if corpus:
        options += ["--corpus", located(corpus)]
        text = _text_of(preset_name, located(corpus))
    missing = store.missing(preset_name, seeds, text, only, change=change, name=name)
    logs = store.folder / "logs" / preset_name
    batch = Batch(missing, jobs, device, store, text, options, logs)
    if name is not None:
        batch = replace(batch, of=(only or ["base"])[0])
        options += ["--name", name]
        for path, value in (change or {}).items():
            options += ["--set", f"{path}={json.dumps(value)}"]
    if not missing:
        return []
    batch.logs.mkdir(parents=True, exist_ok=True)
    if progress:
        print(f"logs of the runs: {batch.logs}", file=sys.stderr)
    if text is None:
        _make_texts(missing)
    # There is no bar if stderr is no terminal, such as the log of a cluster's job.
    with tqdm(
        desc=preset_name, total=len(missing), unit="run", disable=None if progress else True
    ) as bar:

        def count(outcome: RunOutcome) -> None:
            bar.update()
            ended(outcome)

        if slurm is None:
            return batch(count)
        return submit(batch, slurm, seconds_a_run(missing, store), count)


def _text_of(preset_name: str, corpus: str) -> Identity:
    """The identity of a corpus, tokenised with the vocabulary of a preset."""
    vocab_size = find_preset(preset_name).model.vocab_size
    return load_corpus(corpus, vocab_size).identity


def _make_texts(runs: Sequence[RunConfig]) -> None:
    """Make the texts of these runs, so that the workers find them and do not make one each."""
    for name, vocab_size in sorted({(run.data.corpus, run.model.vocab_size) for run in runs}):
        # A text that cannot be had, as without a network, stops only the runs that need it. Their
        # workers say why.
        with contextlib.suppress(Exception):
            load_corpus(name, vocab_size)


def seconds_a_run(runs: Sequence[RunConfig], store: Runs) -> list[float]:
    """How long each of these runs of one preset takes, by estimate, in seconds.

    A run is in proportion to its tokens. Their rate is the median of the preset's records, in
    `store` or in data/runs. Without records it is the preset's own.
    """
    if not runs:
        return []
    scale = find_preset(runs[0].preset)

    def tokens(train: Any, model: Any) -> float:
        return float(train.steps * train.batch_size * model.context_length)

    rate = tokens(scale.train, scale.model) / scale.seconds
    for folder in (store.folder, paths.RUNS):
        files = folder.glob(f"{scale.name}*/*/*/provenance.json")
        rates = [json.loads(file.read_bytes()).get("tokens_per_second") for file in files]
        rates = [rate for rate in rates if rate]
        if rates:
            rate = statistics.median(rates)
            break
    return [tokens(run.train, run.model) / rate for run in runs]


def estimate(
    preset_name: str,
    seeds: Sequence[int] | None = None,
    runs: Folder = None,
    corpus: str | None = None,
    only: Sequence[str] | None = None,
    **variant: Any,
) -> list[tuple[RunConfig, float]]:
    """Every missing run with its estimated seconds (`seconds_a_run`)."""
    text = _text_of(preset_name, corpus) if corpus else None
    store = Runs(runs)
    planned = store.missing(preset_name, seeds, text, only, **variant)
    return [*zip(planned, seconds_a_run(planned, store), strict=True)]
