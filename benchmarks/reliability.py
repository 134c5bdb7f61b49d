"""How reliable the running and the measuring are, in counts: kills, damage, inputs; and what a second worker gains.

    python benchmarks/reliability.py --kills 100        kill a sweep of two workers at random instants
    python benchmarks/reliability.py --stops 30         tell the sweep's own process to stop: TERM, INT or KILL
    python benchmarks/reliability.py --requeues 10      tell jobs of (a stand-in for) Slurm that their time is up
    python benchmarks/reliability.py --killed-ranks 5   kill one of two processes that share a run (torchrun)
    python benchmarks/reliability.py --damage           flip every byte and cut at every length of a record's files
    python benchmarks/reliability.py --cases 10000      property tests over configs, probes and inputs of measure
    python benchmarks/reliability.py --interrupts 2000  stop that many edits of surgery by a signal at random instants
    python benchmarks/reliability.py --packed 200       texts packed in a row at random, against each text alone
    python benchmarks/reliability.py --efficiency       one worker beside two, on the same runs of --preset
    python benchmarks/reliability.py .. --json benchmarks/results/reliability.json

Counts of other parts that are in the JSON already stay there. In short: tests/end_to_end/test_reliability.py.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import fake_slurm
from bench import ROOT, parser

from sinkutils.study.record import CorruptRecord, read_record

WORDS = "attention sink token head query key value softmax norm layer train loss weight decay window prefix".split()
HITS = {
    "*/.0.tmp": "writing a record",
    "*/0.partial/.*.tmp": "writing a checkpoint",
    "*/0.partial/*.safetensors": "training, after a checkpoint",
    "*/0.partial/lock": "training, before a checkpoint",
}
MINUTES = 8  # after which --stops sends no further signal
SMALLEST_WAIT = 0.002  # between two looks at the files


@dataclass(frozen=True)
class Sweeps:
    """Real sweeps, as a user starts them, of a few smoke runs on a text of our own, or of any on the preset's text."""

    folder: Path
    only: tuple[str, ...] = ("fixed_1", "k_bias", "sigmoid")
    jobs: int = 2
    preset: str = "smoke"
    engine: str = "local"
    own_text: bool = True
    checkout: Path = ROOT  # whose code and presets are run

    def start(self, name: str) -> subprocess.Popen:
        """Start `python -m sinkutils sweep`, the leader of a process group of its own."""
        options = f"--preset {self.preset} --jobs {self.jobs} --engine {self.engine} --seeds 0 --checkpoint-seconds 0"
        command = [
            sys.executable,
            "-m",
            "sinkutils",
            "sweep",
            *options.split(),
            "--runs",
            str(self.runs(name)),
        ]
        command += ["--only", *self.only]
        environment = dict(os.environ)
        if self.engine == "slurm":
            fake_slurm.install(self.queue)
            environment["PATH"] = f"{self.queue}{os.pathsep}{environment['PATH']}"
        if self.own_text:
            command += ["--corpus", f"path:{self.texts()}"]
            environment["SINKUTILS_CACHE"] = str(self.folder / "cache")
        self.runs(name).mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            streams = {"stdout": log, "stderr": log}
            return subprocess.Popen(
                command, cwd=self.checkout, env=environment, start_new_session=True, **streams
            )

    def finish(self, name: str) -> float:
        """Run one sweep to its end; returns the seconds. Raises RuntimeError with its output if it failed."""
        began = time.monotonic()
        if self.start(name).wait() != 0:
            raise RuntimeError(self.log(name).read_text()[-2000:])
        return time.monotonic() - began

    @property
    def queue(self) -> Path:
        """The folder of the stand-ins for Slurm's commands."""
        return self.folder / "queue"

    def log(self, name: str) -> Path:
        return self.folder / name / "sweep.log"

    def runs(self, name: str) -> Path:
        """The folder of the records of the sweeps of that name."""
        return self.folder / name / "runs"

    def records(self, name: str) -> Path:
        """The folder of the preset in it; on a text of our own it has that in its name."""
        return next(self.runs(name).glob(f"{self.preset}*"), self.runs(name) / self.preset)

    def texts(self) -> Path:
        """Made-up documents, the same each time."""
        folder, rng = self.folder / "texts", random.Random(0)
        if not folder.exists():
            new = Path(tempfile.mkdtemp(dir=self.folder))
            for index in range(400):
                (new / f"{index}.txt").write_text(
                    " ".join(rng.choices(WORDS, k=rng.randint(100, 300)))
                )
            new.rename(folder)
        return folder

    def results(self, name: str) -> dict[str, tuple[bytes, bytes]]:
        """The records there are, each checked: experiment -> config.json and metrics.json."""
        found = {}
        for one in self.only:
            for folder in self.records(name).glob(f"{one}/0"):
                read_record(folder)
                found[one] = (
                    (folder / "config.json").read_bytes(),
                    (folder / "metrics.json").read_bytes(),
                )
        return found

    def trainings(self, name: str) -> dict[str, int]:
        """How often each run was trained, by what the sweeps said: of the others they say "by another process"."""
        said = self.log(name).read_text()
        return {one: len(re.findall(rf"^{one} +seed 0  done  $", said, re.M)) for one in self.only}


def kill_at_random(
    sweeps: Sweeps,
    expected: dict[str, tuple[bytes, bytes]],
    seconds: float,
    kills: int,
    seed: int = 0,
) -> dict:
    """Kill sweeps of `seconds` at random instants and start them again, until they have been killed that often.

    A round is one set of records, made in spite of kills; after each kill every record that is there must be whole
    and none that was there may be missing, and at the end of a round all must be `expected`, byte for byte. Returns
    counts. Raises AssertionError or CorruptRecord, which names the file, for the first that is not so.
    """
    rng, hit, rounds, starts = random.Random(seed), Counter[str](), 0, 0
    while hit.total() < kills:
        rounds += 1
        name, before = f"killed-{rounds}", {}
        while len(before) < len(expected):
            starts += 1
            assert starts <= 20 * kills + 20, (
                f"after {rounds} rounds and {hit.total()} kills {name} is not complete"
            )
            began, process = time.time(), sweeps.start(name)
            if hit.total() < kills and wait_for_an_instant(
                process, sweeps.runs(name), seconds, rng
            ):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                hit[what_was_hit(sweeps.records(name), began)] += 1
            else:
                process.wait()
                seconds = max(
                    time.time() - began, seconds / 2
                )  # what else runs on the machine changes with time
            after = sweeps.results(name)
            assert before.items() <= after.items(), (
                f"a record was lost or changed: {set(before) - set(after)}"
            )
            assert after.items() <= expected.items(), (
                f"other results: {[k for k in after if after[k] != expected[k]]}"
            )
            before = after
    return {"kills": kills, "rounds": rounds, "records": rounds * len(expected), "hit": dict(hit)}


def stop_at_random(
    sweeps: Sweeps,
    expected: dict[str, tuple[bytes, bytes]],
    seconds: float,
    stops: int,
    seed: int = 0,
) -> dict:
    """Signal the process of a sweep alone at random instants, and start the sweep again, until it was so often, or for
    MINUTES.

    Afterwards no worker may be left; at the end all records must be `expected`. Returns counts by signal, with how
    often the exit status and the last line were those promised.
    """
    rng, told, said = random.Random(seed), Counter[str](), 0
    rounds, last = 0, time.monotonic() + 60 * MINUTES
    kinds = itertools.cycle((signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
    while told.total() < stops and time.monotonic() < last:
        rounds += 1
        name = f"stopped-{rounds}"
        while sweeps.results(name).keys() < expected.keys():
            process = sweeps.start(name)
            due = told.total() < stops and time.monotonic() < last
            if due and wait_for_an_instant(process, sweeps.runs(name), seconds, rng):
                number = next(kinds)
                process.send_signal(number)
                status = process.wait(timeout=60)
                if status == 0:  # it ended by itself before the signal came
                    continue
                if status == 1:
                    raise RuntimeError(sweeps.log(name).read_text()[-2000:])
                told[number.name] += 1
                promised = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}[number.name]
                said += status == promised
                end = time.monotonic() + 15
                while left := group_of(process.pid):
                    assert time.monotonic() < end, f"{number.name} left the processes {left}"
                    time.sleep(0.1)
            elif process.wait() != 0:
                raise RuntimeError(sweeps.log(name).read_text()[-2000:])
        assert sweeps.results(name) == expected
    return {"stops": told.total(), "as_promised": said, "rounds": rounds, "by": dict(told)}


def processes() -> Iterator[tuple[str, str, str]]:
    """Each process that is still there (Linux): its number, its parent's, and its group's."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, group = path.read_text().rpartition(")")[2].split()[:3]
            if state != "Z":
                yield path.parent.name, parent, group


def group_of(leader: int) -> list[str]:
    return [number for number, _, group in processes() if group == str(leader)]


def children_of(process: int) -> list[str]:
    return [number for number, parent, _ in processes() if parent == str(process)]


def wait_for_an_instant(
    process: subprocess.Popen, runs: Path, seconds: float, rng: random.Random
) -> bool:
    """Wait until a random instant, or until a little after a random change to the files, when most is at stake.

    False if the sweep ended before that.
    """
    changes = rng.randint(1, 12) if rng.random() < 0.5 else 0
    until = time.monotonic() + rng.uniform(0, seconds)
    seen = set(tree(runs))
    while process.poll() is None:
        time.sleep(SMALLEST_WAIT)
        if not changes:
            if time.monotonic() > until:
                return True
        elif (now := set(tree(runs))) != seen:
            seen, changes = now, changes - 1
            if not changes:
                time.sleep(rng.uniform(0, 0.02))
                return True
    return False


def tree(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Every file below a folder with its size and time of change, whatever comes and goes meanwhile."""
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                stat = os.stat(os.path.join(parent, file))
                yield os.path.join(parent, file), stat.st_size, stat.st_mtime_ns


def what_was_hit(folder: Path, began: float) -> str:
    """What a kill interrupted, by the files that the killed sweep had touched since it began."""
    for pattern, what in HITS.items():
        if any(path.stat().st_mtime >= began for path in folder.glob(pattern)):
            return what
    return "starting or ending"


def two_at_once(sweeps: Sweeps, name: str = "twice") -> dict[str, int]:
    """Start two sweeps of the same runs at the same time; returns how often each run was trained."""
    codes = [process.wait() for process in [sweeps.start(name) for _ in range(2)]]
    assert codes == [0, 0], sweeps.log(name).read_text()[-2000:]
    return sweeps.trainings(name)


def requeue_at_random(
    sweeps: Sweeps,
    expected: dict[str, tuple[bytes, bytes]],
    seconds: float,
    times: int,
    seed: int = 0,
) -> dict[str, int]:
    """Tell jobs at random instants that their time is up, as Slurm does, until they were queued again that often.

    sweeps: those of the engine "slurm", which are stand-ins (fake_slurm.py). At the end of each round all records must
    be `expected`. Returns counts.
    """
    rng, rounds, told = random.Random(seed), 0, 0
    file = sweeps.queue / "requeues"

    def queued_again() -> int:
        return len(file.read_text().split()) if file.exists() else 0

    while queued_again() < times:
        rounds += 1
        name = f"queued-{rounds}"
        while sweeps.results(name).keys() < expected.keys():
            process = sweeps.start(name)
            while process.poll() is None:
                time.sleep(rng.uniform(0, seconds))
                for state in sweeps.queue.glob("state-*"):
                    job = state.name.removeprefix("state-")
                    begun = (sweeps.queue / f"pid-{job}").exists()
                    if state.read_text() == "RUNNING" and begun and queued_again() < times:
                        with suppress(ProcessLookupError):
                            fake_slurm.scancel(sweeps.queue, job, "--signal", "USR2")
                            told += 1
            if process.returncode != 0:
                raise RuntimeError(sweeps.log(name).read_text()[-2000:])
        assert sweeps.results(name) == expected
    counts = {"told": told, "queued_again": queued_again(), "rounds": rounds}
    return {**counts, "records": rounds * len(expected)}


def kill_ranks(sweeps: Sweeps, times: int, seed: int = 0) -> dict[str, int]:
    """Kill (-9) one of the two processes of a shared run at random instants, and start again, until it was so often.

    After each kill the launcher must have ended both, and have failed. At the end of a round the record must be that of
    a run that nothing disturbed, in config and metrics. Returns counts.
    """
    rng, killed, rounds, resumed = random.Random(seed), 0, 0, 0
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m sinkutils train k_bias --preset smoke"
    command += " --set train.steps=200 --set train.eval_every=10 --name short --device cpu --checkpoint-seconds 0"
    command += f" --corpus path:{sweeps.texts()}"
    environment = os.environ | {"SINKUTILS_CACHE": str(sweeps.folder / "cache")}

    def start(name: str) -> subprocess.Popen:
        sweeps.runs(name).mkdir(parents=True, exist_ok=True)
        whole = [sys.executable, *command.split(), "--runs", str(sweeps.runs(name))]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(whole, cwd=ROOT, env=environment, start_new_session=True, **streams)

    def record(name: str) -> tuple[bytes, bytes]:
        (folder,) = sweeps.runs(name).glob("smoke*/short/0")
        read_record(folder)
        return (folder / "config.json").read_bytes(), (folder / "metrics.json").read_bytes()

    began = time.monotonic()
    assert start("ranks").wait() == 0
    seconds = time.monotonic() - began
    while killed < times:
        rounds += 1
        name = f"ranks-{rounds}"
        while not [*sweeps.runs(name).glob("smoke*/short/0")]:
            process = start(name)
            resumed += bool([*sweeps.runs(name).glob("smoke*/short/*.partial/checkpoint.pt")])
            until = time.monotonic() + rng.uniform(0, seconds)
            while process.poll() is None and (time.monotonic() < until or killed == times):
                time.sleep(SMALLEST_WAIT)
            ranks = children_of(process.pid)
            if process.poll() is not None or len(ranks) < 2:
                assert process.wait() == 0
                continue
            os.kill(int(rng.choice(ranks)), signal.SIGKILL)
            killed += 1
            assert process.wait(timeout=300) != 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert record(name) == record("ranks")
    return {"killed": killed, "resumed": resumed, "rounds": rounds, "records": rounds}


def damage(folder: Path) -> dict[str, int]:
    """Flip every byte of every file of a record, cut it at every length, and read; returns counts.

    Files are put back as they were. `missed` counts what was read without complaint, `unnamed` what was refused
    without the name of the file.
    """
    counts = Counter(files=0, flipped=0, cut=0, missed=0, unnamed=0)
    for path in sorted(folder.iterdir()):
        blob = path.read_bytes()
        counts["files"] += 1
        for i, byte in enumerate(blob):
            flipped = b"%b%c%b" % (blob[:i], byte ^ 1, blob[i + 1 :])
            for kind, damaged in (("flipped", flipped), ("cut", blob[:i])):
                path.write_bytes(damaged)
                counts[kind] += 1
                try:
                    read_record(folder)
                    counts["missed"] += 1
                except CorruptRecord as error:
                    counts["unnamed"] += path.name not in str(error)
        path.write_bytes(blob)
    return dict(counts)


def inputs(cases: int) -> dict[str, dict[str, int]]:
    """Run tests/property/test_inputs.py on that many cases; returns what came of them, by property."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        environment = {**os.environ, "SINKUTILS_CASES": str(cases), "SINKUTILS_COUNTS": str(counts)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(ROOT / "tests" / "property" / "test_inputs.py"),
        ]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return json.loads(counts.read_text())


def interrupted_surgery(times: int) -> dict[str, int]:
    """Interrupt edits of a small model of ours by a timer's signal, and look at the model after each.

    `lost`: a hook, a mode or other logits remained.
    """
    import torch

    import sinkutils as su

    torch.set_num_threads(1)
    config = su.LMConfig(
        vocab_size=64, context_length=32, num_layers=2, num_heads=2, hidden_size=16
    )
    model, ids = su.TransformerLM(config, 0).train(), torch.arange(16).reshape(2, 8)
    hooks = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def edit() -> None:
        su.surgery.edit(
            model, ids, ("block", "neurons", "query")[counts["edits"] % 3], torch.zeros_like
        )

    counts: Counter[str] = Counter(edits=0, interrupted=0, lost=0)
    for _ in range(3):  # so that nothing is imported or compiled in the timed ones
        edit()
        counts["edits"] += 1
    began = time.perf_counter()
    edit()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        right = model(ids)
    draw = random.Random(0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        while counts["interrupted"] < times:
            counts["edits"] += 1
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 1.1 * seconds))
                    edit()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                counts["interrupted"] += 1
            with torch.no_grad():
                same = torch.equal(model(ids), right)
            left = any(hooks) or not all(module.training for module in model.modules())
            counts["lost"] += left or not same or not torch.is_grad_enabled()
    finally:
        signal.signal(signal.SIGALRM, before)
    return dict(counts)


def packed(cases: int) -> dict[str, int]:
    """Pack texts of random lengths in rows, and hold each text's alpha_1 against that of it alone.

    `wrong`: kept apart, and further than 1e-6 from the text alone. `together`: the report says that the texts see each
    other.
    """
    import warnings

    import families
    import torch

    import sinkutils as su

    warnings.simplefilter("ignore")
    draw = random.Random(0)
    counts: Counter[str] = Counter(rows=0, texts=0, together=0, wrong=0)
    for name in ("llama", "mistral", "gpt2", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "phi"):
        model = families.build(name)
        for _ in range(cases // 8):
            lengths = [draw.randint(1, 20) for _ in range(draw.randint(2, 6))]
            ids = torch.tensor([[draw.randrange(3, families.VOCAB) for _ in range(sum(lengths))]])
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            report = su.measure(model, {"input_ids": ids, "position_ids": positions})
            counts["rows"] += 1
            counts["texts"] += len(lengths)
            if report.packed != "kept apart":
                counts["together"] += len(lengths)
                continue
            for text, alpha in zip(ids.split(lengths, dim=1), report.alpha, strict=True):
                alone = su.measure(model, text).alpha[0]
                counts["wrong"] += bool((alone - alpha).abs().max() > 1e-6)
    return dict(counts)


def efficiency(folder: Path, preset: str, only: tuple[str, ...]) -> dict:
    """Seconds of the same runs by one worker and by two: 1 is a second worker that halves the time.

    The preset's text must be in the cache, where any training has put it.
    """
    sweeps = (Sweeps(folder, only, jobs, preset, own_text=False) for jobs in (1, 2))
    one, two = (each.finish(f"jobs-{each.jobs}") for each in sweeps)
    return {
        "preset": preset,
        "runs": len(only),
        "one_worker_seconds": round(one, 1),
        "two_workers_seconds": round(two, 1),
        "efficiency": round(one / (2 * two), 3),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int)
    arguments.add_argument("--stops", type=int)
    arguments.add_argument("--requeues", type=int)
    arguments.add_argument("--killed-ranks", type=int)
    arguments.add_argument("--damage", action="store_true")
    arguments.add_argument("--cases", type=int)
    arguments.add_argument("--interrupts", type=int)
    arguments.add_argument("--packed", type=int)
    arguments.add_argument("--efficiency", action="store_true")
    arguments.add_argument("--preset", default="laptop", help="of --efficiency")
    arguments.add_argument(
        "--only",
        nargs="+",
        default=["fixed_1", "k_bias", "kv_bias", "v_bias"],
        help="of --efficiency",
    )
    options = arguments.parse_args()
    made: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.kills or options.damage or options.stops or options.requeues:
            sweeps = Sweeps(folder)
            seconds = sweeps.finish("whole")
            expected = sweeps.results("whole")
            if options.damage:
                made["damage"] = damage(sweeps.records("whole") / sweeps.only[0] / "0")
            if options.stops:
                made["stops"] = stop_at_random(sweeps, expected, seconds, options.stops)
            if options.requeues:
                queued = replace(sweeps, engine="slurm")
                made["requeues"] = requeue_at_random(queued, expected, seconds, options.requeues)
            if options.kills:
                twice = two_at_once(sweeps)
                made["twice"] = {
                    "runs": len(twice),
                    "trained_once": sum(n == 1 for n in twice.values()),
                }
                made["kills"] = kill_at_random(sweeps, expected, seconds, options.kills)
        if options.killed_ranks:
            made["killed_ranks"] = kill_ranks(Sweeps(folder), options.killed_ranks)
        if options.cases:
            made["inputs"] = inputs(options.cases)
        if options.interrupts:
            made["interrupted_surgery"] = interrupted_surgery(options.interrupts)
        if options.packed:
            made["packed"] = packed(options.packed)
        if options.efficiency:
            made["efficiency"] = efficiency(folder, options.preset, tuple(options.only))
    print(json.dumps(made, indent=1))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**known, **made}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
