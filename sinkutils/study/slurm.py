"""Sweeps on a cluster with Slurm, through submitit: an array of jobs that train a few runs each."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from sinkutils.checks import Refused, first_line, require
from sinkutils.study.config import RunConfig
from sinkutils.study.sweep import Batch, Ended, RunOutcome, Workers, say

# A job lasts at least half an hour by estimate, since many sites ask for that. Its time limit is
# four times the estimate, but at most a day, since it goes on when it has run out of time.
LEAST_SECONDS = 30 * 60
SLACK = 4
MOST_MINUTES = 24 * 60
TIMEOUTS = 100  # how often a job may run out of time


class Job(Batch):
    """Runs that one job trains."""

    def one(self, run: RunConfig, workers: Workers) -> RunOutcome | None:
        # The queue shows which run the job is at.
        name = f"JobName={run.preset}/{run.experiment}/{run.seed}"
        job = f"JobId={os.environ.get('SLURM_JOB_ID')}"
        with contextlib.suppress(OSError):
            subprocess.run(["scontrol", "update", job, name], capture_output=True)
        return super().one(run, workers)

    def checkpoint(self) -> Any:
        """What submitit queues again when the job is preempted or has run out of time: itself.

        It then passes over the runs that have a record, and the others go on.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def check() -> None:
    """Raise ImportError without submitit, and ValueError if this machine is none of a cluster."""
    import submitit  # noqa: F401

    require(
        shutil.which("sbatch") is not None and shutil.which("srun") is not None,
        "there is no Slurm here (no sbatch or srun): start the sweep on a machine of the cluster, "
        "or train the runs here, without --slurm",
    )


def submit(
    batch: Batch, options: Mapping[str, str], seconds: Sequence[float], ended: Ended
) -> list[RunOutcome]:
    """Train the runs of a batch as an array of jobs, `batch.jobs` at a time, and wait for them.

    The jobs outlive this process. A job that is preempted or runs out of time is queued again.

    options: of Slurm, such as account, partition, time, mem, by the names of submitit's `slurm_*`
    or of sbatch. By default a job has one core, and one GPU if the runs need one. A job trains as
    many runs at a time as `cpus_per_task` or `gpus_per_node` says.
    seconds: how long each run takes, by estimate.
    Raises ValueError if Slurm refuses the jobs.
    """
    import submitit
    from submitit.helpers import as_completed

    gpu = batch.device.startswith("cuda")
    chosen = _parameters(options, gpu)
    workers = _number(chosen.get("gpus_per_node" if gpu else "cpus_per_task", 1))
    size = math.ceil(LEAST_SECONDS * workers / statistics.median(seconds))
    jobs = []
    minutes = 1
    for first in range(0, len(batch.runs), size):
        part = slice(first, first + size)
        own = {"runs": batch.runs[part], "jobs": min(workers, len(batch.runs[part]))}
        jobs.append(Job(**{**vars(batch), **own}))
        # A job takes as long as its longest run, at the least.
        longest = max(sum(seconds[part]) / workers, *seconds[part])
        minutes = max(minutes, math.ceil(SLACK * longest / 60))
    chosen.setdefault("time", min(minutes, MOST_MINUTES))
    chosen.setdefault("array_parallelism", batch.jobs)
    chosen.setdefault("job_name", f"{batch.runs[0].preset}:{len(batch.runs)}runs")
    executor = submitit.SlurmExecutor(batch.logs / "submitit", max_num_timeout=TIMEOUTS)
    known = executor._valid_parameters()
    others = {name: chosen.pop(name) for name in [*chosen] if name not in known}
    executor.update_parameters(additional_parameters={"requeue": True, **others}, **chosen)
    try:
        with contextlib.redirect_stderr(io.StringIO()), executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except RuntimeError as error:
        raise Refused(f"Slurm took no job: {' '.join(str(error).split())}") from error
    number, _, _ = submitted[0].job_id.partition("_")
    say(f"the queue has job {number} in {len(jobs)} parts, which outlive this sweep (squeue)")
    outcomes = list[RunOutcome]()
    for done in as_completed(submitted):
        job = jobs[submitted.index(done)]
        try:
            of_job = done.result()
        except Exception as error:  # the job was lost; its runs may have been trained all the same
            of_job = [
                _lost(job, run, f"job {done.job_id}: {first_line(error)}") for run in job.runs
            ]
        for outcome in of_job:
            outcomes.append(outcome)
            ended(outcome)
    return outcomes


def _parameters(options: Mapping[str, str], gpu: bool) -> dict[str, Any]:
    """The parameters of an array of jobs, by submitit's names, with our defaults."""
    chosen: dict[str, Any] = {}
    for key, value in options.items():
        name = key.removeprefix("slurm_").replace("-", "_")
        chosen[name] = int(value) if value.isdecimal() else value
    if "time" in chosen:
        chosen["time"] = minutes_of(str(chosen["time"]))
    chosen.setdefault("cpus_per_task", 1)
    if gpu and not {"gpus_per_node", "gpus_per_task", "gres", "gpus"} & chosen.keys():
        chosen["gpus_per_node"] = 1
    # Since Slurm 22.05 the step of a job has one core unless it is told how many.
    steps = [f"--cpus-per-task={chosen['cpus_per_task']}"]
    chosen["srun_args"] = [*steps, *str(chosen.get("srun_args", "")).split()]
    if "setup" in chosen:
        chosen["setup"] = [chosen["setup"]]
    return chosen


def minutes_of(limit: str) -> int:
    """A time limit of Slurm's in minutes: 90, 90:00, 1:30:00, 1-0, 1-12:30 or 1-12:30:00."""
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    require(
        all(part.isdecimal() for part in parts)
        and len(parts) <= 3
        and (days.isdecimal() or not dash),
        f"time must be a limit such as 90 (minutes), 1:30:00 or 1-12, got {limit!r}",
    )
    numbers = [int(part) for part in parts]
    if not dash and len(numbers) < 3:  # minutes or minutes:seconds
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    total = math.ceil(24 * 60 * int(days or 0) + 60 * hours + minutes + seconds / 60)
    require(total > 0, f"time must be more than nothing, got {limit!r}")  # no limit, to Slurm
    return total


def _number(value: Any) -> int:
    """How many GPUs or cores an option of Slurm's names, such as 4 or "a100:4".

    It is 1 if the option is malformed. Slurm then says so.
    """
    count = str(value).rpartition(":")[2]
    return max(1, int(count)) if count.isdecimal() else 1


def _lost(job: Job, run: RunConfig, reason: str) -> RunOutcome:
    """The outcome of a run whose job did not say how it ended."""
    record = job.store.of(run, job.text).record()
    if record is not None:
        return RunOutcome(run.experiment, run.seed, record.status)
    return RunOutcome(run.experiment, run.seed, "crashed", reason)
