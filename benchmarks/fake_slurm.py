"""Stand-ins for Slurm's commands: a queue on this machine, where there is no Slurm.

    python benchmarks/fake_slurm.py FOLDER; PATH=FOLDER:$PATH python -m sinkutils sweep --preset smoke --slurm

It knows sbatch (with arrays), srun, scontrol requeue and update, scancel --signal, sacct, the partition "main" and the
account "mine". The state of the queue is files in FOLDER. benchmarks/slurm_here.sh starts Slurm itself, on one machine.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sacct", "squeue")


def install(folder: Path) -> None:
    """Write the commands into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        file = folder / name
        file.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "{folder}" {name} "$@"\n'
        )
        file.chmod(0o755)


def sbatch(queue: Path, script: str) -> None:
    """Take a script into the queue, and start its jobs in a process that outlives this one."""
    lines = re.findall(r"#SBATCH --([a-z-]+)(?:=(.*))?", Path(script).read_text())
    options = {name: value.strip("'") for name, value in lines}
    partition = options.get("partition", "main")
    if partition != "main":
        print(f"sbatch: error: invalid partition specified: {partition}", file=sys.stderr)
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    if options.get("account", "mine") != "mine":
        reason = "Invalid account or account/partition combination specified"
        sys.exit(f"sbatch: error: Batch job submission failed: {reason}")
    if options.get("cpus-per-task") == "0":
        sys.exit('sbatch: error: Invalid numeric value "0" for --cpus-per-task.')
    number = str(17 + len([*queue.glob("script-*")]))
    (queue / f"script-{number}").write_text(Path(script).read_text())
    (queue / "names").open("a").write(options["job-name"] + "\n")
    last = re.match(r"0-(\d+)", options.get("array", ""))
    tasks = [f"{number}_{task}" for task in range(int(last[1]) + 1)] if last else [number]
    for task in tasks:
        (queue / f"state-{task}").write_text("PENDING")
    subprocess.Popen(
        [sys.executable, __file__, str(queue), "run", *tasks],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(f"Submitted batch job {number}")


def run(queue: Path, *tasks: str) -> None:
    """Run jobs one after the other, and a job that was queued again until it no longer is."""
    for job in tasks:
        number, _, index = job.partition("_")
        environment = dict(os.environ, SLURM_JOB_ID=job)
        if index:
            environment |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
        again = True
        while again:
            (queue / f"state-{job}").write_text("RUNNING")
            status = subprocess.call(["bash", queue / f"script-{number}"], env=environment)
            again = (queue / f"requeue-{job}").exists()
            (queue / f"requeue-{job}").unlink(missing_ok=True)
        (queue / f"state-{job}").write_text("FAILED" if status else "COMPLETED")


def srun(queue: Path, *arguments: str) -> None:
    """Become the command, whose output goes to the files that the options name."""
    job = os.environ["SLURM_JOB_ID"]
    command = [*arguments]
    while command[0].startswith("--"):
        option = command.pop(0)
        if option in ("--output", "--error"):
            name = command.pop(0).replace("%j", job).replace("%A_%a", job).replace("%t", "0")
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1 if option == "--output" else 2)
    (queue / f"pid-{job}").write_text(str(os.getpid()))
    os.execvp(command[0], command)


def scontrol(queue: Path, verb: str, *arguments: str) -> None:
    if verb == "requeue":
        (queue / f"requeue-{arguments[0]}").touch()
        (queue / "requeues").open("a").write(arguments[0] + "\n")
    elif verb == "update":
        (queue / "names").open("a").write(arguments[1].removeprefix("JobName=") + "\n")


def scancel(queue: Path, job: str, option: str, name: str) -> None:
    """Send a signal to a job, as Slurm does before its time is up: scancel JOB --signal USR2."""
    os.kill(
        int((queue / f"pid-{job}").read_text()), signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    )


def sacct(queue: Path, *arguments: str) -> None:
    print("JobID|State|NodeList")
    for file in queue.glob("state-*"):
        print(f"{file.name.removeprefix('state-')}|{file.read_text()}|here")


def squeue(queue: Path, *arguments: str) -> None:
    sacct(queue)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        install(Path(sys.argv[1]).resolve())
    else:
        globals()[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
