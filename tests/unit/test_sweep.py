"""Sweeps: only what is missing, never one run by two workers, and no failure stops the others."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from helpers import interrupted, made_up, refused, refuses

from sinkutils import config, paths, train
from sinkutils.__main__ import main
from sinkutils.commands import parser
from sinkutils.study import record as records_module
from sinkutils.study import sweep as sweep_module
from sinkutils.study.record import RunLocked, read_record, record_folder
from sinkutils.study.store import Runs
from sinkutils.study.sweep import devices, engine, estimate, run_one, sweep
from sinkutils.study.train import Run

pytestmark = pytest.mark.slow


class FakeWorker:
    """A worker whose run is a function, called when its end is asked for."""

    def __init__(self, arguments, log):
        self.arguments, self.log = arguments, log

    def done(self):
        return True

    def result(self):
        return self.run(self.arguments, self.log)


@pytest.fixture
def quick(monkeypatch, corpus, tmp_path):
    """Sweeps whose runs train a tiny model in this process, on the tests' corpus."""

    class Here(FakeWorker):
        def run(self, arguments, log):
            asked = parser().parse_args(["train", *arguments])
            if asked.experiment == "v_bias":
                raise RuntimeError("the machine went away")
            monkeypatch.chdir(tmp_path)  # a worker may be anywhere
            run = config(asked.experiment, asked.preset, asked.seed)
            try:
                train(run, asked.runs, corpus=asked.corpus or corpus, progress=False)
            except RunLocked:
                return 3, []
            return 0, []

    monkeypatch.setattr(sweep_module, "Worker", Here)


ONLY = ("fixed_1", "k_bias", "sink_token")


def of_smoke(*only, **options):
    return sweep("smoke", seeds=(0,), only=only or ONLY, progress=False, **options)


def test_a_sweep_trains_what_is_missing_or_damaged_once_and_its_estimate_falls_to_0(quick, runs):
    before = {run.experiment: seconds for run, seconds in estimate("smoke", (0,))}
    assert before["lr_half_steps_x2"] == pytest.approx(2 * before["lr_half"])
    assert {(o.experiment, o.status) for o in of_smoke()} == {(name, "done") for name in ONLY}
    assert of_smoke() == []
    assert all(read_record(record_folder("smoke", name, 0)).status == "done" for name in ONLY)
    assert set(before) - {run.experiment for run, _ in estimate("smoke", (0,))} == set(ONLY)
    path = record_folder("smoke", "k_bias", 0)
    metrics = read_record(path).metrics
    (path / "metrics.json").write_bytes((path / "metrics.json").read_bytes()[:-2])
    with pytest.warns(UserWarning, match=r"smoke/k_bias/0: metrics\.json is .* counts as missing"):
        (outcome,) = of_smoke()
    assert outcome.status == "done" and read_record(path).metrics == metrics
    assert [left.name for left in path.parent.iterdir()] == ["0"]


def test_a_failing_run_stops_no_other(quick, runs):
    ended = {outcome.experiment: outcome for outcome in of_smoke("v_bias", "fixed_1")}
    assert ended["v_bias"].status == "crashed"
    assert ended["fixed_1"].status == "done"
    assert "the machine went away" in ended["v_bias"].detail


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_another_process_has_is_waited_for_and_trained_here_if_that_leaves_no_record(
    quick, runs, tmp_path, recorded, monkeypatch, capsys
):
    """Also where the other process takes it just before our worker does."""
    other, naps = Runs().of(config("k_bias", "smoke")), []
    held = ExitStack()
    held.enter_context(other.lock())

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            if recorded:
                made_up(runs, "k_bias")
            held.close()

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(sweep_module, "time", clock)
    outcomes = of_smoke("k_bias", "fixed_1")
    ended = {outcome.experiment: (outcome.status, outcome.detail) for outcome in outcomes}
    assert ended["k_bias"] == ("done", "by another process" if recorded else "")
    assert ended["fixed_1"] == ("done", "")
    says = "k_bias seed 0: waiting for the process that trains it"
    assert capsys.readouterr().err.count(says) == 1
    assert len(naps) >= 3 and other.record()


def test_a_fine_tuning_whose_start_another_process_trains_waits_for_it(quick, runs, monkeypatch):
    start, naps = Runs().of(config("fixed_1", "smoke")), []
    assert config("sft_softmax", "smoke").start == "fixed_1"

    class Waited(Exception):
        pass

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise Waited

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(sweep_module, "time", clock)
    with start.lock(), pytest.raises(Waited):
        of_smoke("sft_softmax")


def test_another_text_has_records_of_its_own(quick, runs, tmp_path, text_folder, monkeypatch):
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    with refused("no such folder or file", FileNotFoundError):
        of_smoke(corpus=f"path:{tmp_path}/nowhere")
    monkeypatch.chdir(text_folder.parent)
    (outcome,) = of_smoke("k_bias", corpus=f"path:{text_folder.name}")
    assert outcome.status == "done"
    missing = [estimate("smoke", (0,), corpus=text) for text in (f"path:{text_folder}", None)]
    assert len(missing[0]) == len(missing[1]) - 1


def result(folder):
    """The files of a record that training it again has to give again."""
    read_record(folder)
    names = ("config.json", "metrics.json", "alpha.safetensors")
    return [(folder / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def undisturbed(text_folder, tmp_path_factory):
    """A cache with the tests' text, and the results of three seeds that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINKUTILS_CACHE", str(folder / "cache"))
        runs = [config("k_bias", "smoke", seed) for seed in range(3)]
        with pytest.warns(UserWarning, match="in place of 'docstrings'"):
            text = f"path:{text_folder}"
            records = [train(run, folder, corpus=text, progress=False) for run in runs]
    return folder / "cache", [result(record.folder) for record in records]


def ended(status):
    """A process that has ended."""
    return SimpleNamespace(poll=lambda: status, wait=lambda *_: status)


class Command:
    """`sinkutils sweep` of an experiment's first seeds, whose runs are `sinkutils train` in this process."""

    def __init__(self, seeds, text, runs):
        self.runs, self.steps = runs, Counter()
        options = f"--preset smoke --only k_bias --checkpoint-seconds 0 --runs {runs} --corpus path:{text} --seeds"
        self.arguments = ["sweep", *options.split(), *map(str, range(seeds))]

    def train(self, command, stdout, **options):
        """What stands for subprocess.Popen."""
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
            status = main(command[3:])
        stdout.write(said.getvalue().encode())
        return ended(status)

    def advance(self, run, really=Run.advance):
        self.steps[run.config.seed] += 1
        return really(run)

    def status(self):
        """Sweep, and count the steps of each seed anew."""
        self.steps.clear()
        return main(self.arguments)

    def folder(self, seed):
        (preset,) = self.runs.glob("smoke*")
        return preset / "k_bias" / str(seed)

    def results(self, *seeds):
        return [result(self.folder(seed)) for seed in seeds]


@pytest.fixture
def command(undisturbed, text_folder, runs, monkeypatch):
    def make(seeds):
        command = Command(seeds, text_folder, runs)
        monkeypatch.setenv("SINKUTILS_CACHE", str(undisturbed[0]))
        processes = SimpleNamespace(Popen=command.train, STDOUT=None)
        monkeypatch.setattr(sweep_module, "subprocess", processes)
        monkeypatch.setattr(Run, "advance", lambda run: command.advance(run))
        return command

    return make


FULL = {  # the file for which there is no room: how it is called, and the step that stays saved
    "checkpoint.pt.tmp": ("checkpoint.pt", 20),
    "metrics.json": ("record smoke@[^ ]+/k_bias/0", 40),
}


@pytest.mark.parametrize("file", FULL)
def test_a_full_disk_stops_no_other_run_and_goes_on(
    file, command, undisturbed, monkeypatch, capsys
):
    (name, saved), sweep, (_, expected) = FULL[file], command(2), undisturbed

    def write(path, data, really=records_module.write_synced):
        if path.name == file and path.parent.name.startswith(("0", ".0")) and sweep.steps[0] > 20:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(records_module, "write_synced", write)
        patch.setattr(paths, "write_synced", write)
        assert sweep.status() == 1
    reason = rf"exit status 2; \[Errno 28\] could not save {name} \(No space left on device\): free some space"
    said = rf"k_bias +seed 0  crashed  {reason} [^\n]+; see smoke/k_bias-0\.log\nk_bias +seed 1  done  \n"
    assert re.fullmatch(said, capsys.readouterr().out)
    partial = sweep.folder(0).with_name("0.partial")
    assert {path.name for path in partial.parent.iterdir()} == {partial.name, "1"}
    assert {path.name for path in partial.iterdir()} == {"checkpoint.pt", "lock"}
    assert sweep.results(1) == expected[1:2]
    assert sweep.status() == 0 and sweep.steps == {0: 60 - saved}
    assert re.fullmatch(r"k_bias +seed 0  done  \n", capsys.readouterr().out)
    assert sweep.results(0, 1) == expected[:2]


def test_a_run_whose_log_had_no_room_says_that_the_disk_is_full(command, monkeypatch, capsys):
    sweep = command(1)
    monkeypatch.setattr(sweep_module.subprocess, "Popen", lambda *_, **options: ended(1))
    full = "the disk is full: free some space and run the same command again; "
    for free, said in ((0, full), (2**30, "")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, usage=usage: usage)
        assert sweep.status() == 1
        says = f"seed 0  crashed  exit status 1; {said}see smoke/k_bias-0.log"
        assert says in capsys.readouterr().out


def test_a_damaged_checkpoint_is_trained_again_and_stops_no_other(command, undisturbed, capsys):
    sweep, (_, expected) = command(3), undisturbed
    with interrupted(50):
        assert sweep.status() == 1
    says = "crashed  exit status 130; stopped; run the same command again"
    assert capsys.readouterr().out.count(says) == 3
    partial = [sweep.folder(seed).with_name(f"{seed}.partial") for seed in range(3)]
    flipped, cut, _ = (folder / "checkpoint.pt" for folder in partial)
    blob = flipped.read_bytes()
    flipped.write_bytes(blob[:5000] + bytes(byte ^ 1 for byte in blob[5000:5010]) + blob[5010:])
    cut.write_bytes(cut.read_bytes()[:-100])
    assert sweep.status() == 0 and sweep.steps == {0: 60, 1: 60, 2: 20}
    said = [line.partition("done")[2].strip() for line in capsys.readouterr().out.splitlines()]
    damage = "{}.partial/checkpoint.pt is truncated or changed; training starts again from step 0"
    assert said == [damage.format(0), damage.format(1), ""]
    assert sweep.results(0, 1, 2) == expected


@pytest.fixture
def gpus(monkeypatch):
    """Let PyTorch see so many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return see


@pytest.mark.parametrize(
    ("preset", "engine_name", "count", "asked", "expected"),
    [
        ("laptop", "local", 4, None, ("cpu", "cpu")),
        ("laptop", "local", 4, "cuda", ("cuda:0", "cuda:1")),
        ("gpu", "local", 1, None, ("cuda:0", "cuda:0")),
        ("gpu", "local", 0, "cpu", ("cpu", "cpu")),
        ("laptop", "slurm", 0, None, ("cpu", "cpu")),
        ("gpu", "slurm", 0, None, ("cuda", "cuda")),
        ("gpu", "slurm", 0, "cpu", ("cpu", "cpu")),
    ],
)
def test_a_sweeps_devices(gpus, preset, engine_name, count, asked, expected):
    gpus(count)
    assert devices(preset, engine_name, 2, asked) == expected


def test_a_sweep_never_falls_back_to_the_cpu_unasked(gpus, tmp_path):
    gpus(0)
    refuses("sees 0 of that kind", sweep, "gpu", runs=tmp_path, progress=False)
    refuses("sees 0 of that kind", sweep, "laptop", device="cuda", runs=tmp_path, progress=False)
    refuses("device must be", sweep, "laptop", device="abacus", runs=tmp_path, progress=False)
    refuses("local, slurm", engine, "abacus", tmp_path)


def test_runs_hold_different_gpus_and_an_interrupt_leaves_no_queue(monkeypatch, runs, gpus):
    gpus(2)
    running, seen, interrupted = set(), [], []

    class Done:
        def __init__(self, device):
            self.device = device
            assert device not in running
            running.add(device)
            seen.append(device)

        def done(self):
            if interrupted:
                raise KeyboardInterrupt
            return len(running) == 2 or len(seen) == len(ONLY)

        def result(self):
            running.discard(self.device)
            return 1, ["ended"]

    monkeypatch.setattr(
        sweep_module, "engine", lambda *_, **__: lambda arguments, log: Done(arguments[-1])
    )
    of_smoke(jobs=2, device="cuda")
    assert seen[:2] == ["cuda:0", "cuda:1"] and len(seen) == 3 and not running
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        of_smoke(jobs=2, device="cuda")
    assert len(seen) == 3 + 2


def test_a_worker_is_told_its_text_and_device(monkeypatch, tmp_path):
    commands, asked, job = [], [], SimpleNamespace(done=lambda: True, result=lambda: (1, ["ended"]))
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: commands.append((command, options)) or ended(0),
    )
    assert run_one(("k_bias",), str(tmp_path / "log")) == (0, [])
    ((command, options),) = commands
    assert command[1:] == ["-m", "sinkutils", "train", "k_bias"]
    assert options["env"]["OMP_NUM_THREADS"] == options["env"]["MKL_NUM_THREADS"] == "1"
    monkeypatch.setattr(
        sweep_module,
        "engine",
        lambda *_, **__: lambda arguments, log: asked.append(arguments) or job,
    )
    text = SimpleNamespace(identity={"name": "mine", "sha256": "0" * 64})
    monkeypatch.setattr(sweep_module, "load_corpus", lambda *_, **__: text)
    of_smoke("k_bias", runs=tmp_path, corpus="packed:/a/text", device="cpu", checkpoint_seconds=5.0)
    given = parser().parse_args(["train", *asked[0]])
    assert (given.experiment, given.preset) == ("k_bias", "smoke")
    assert (given.seed, given.runs) == (0, tmp_path)
    assert (given.corpus, given.device, given.checkpoint_seconds) == ("packed:/a/text", "cpu", 5.0)


@pytest.mark.parametrize("gpu", [False, True])
def test_clusters_are_asked_for_gpus(monkeypatch, tmp_path, gpu):
    slurm = MagicMock()
    monkeypatch.setitem(sys.modules, "submitit", slurm)
    engine("slurm", tmp_path, gpu)
    parameters = slurm.AutoExecutor.return_value.update_parameters.call_args.kwargs
    assert parameters["gpus_per_node"] == gpu


def test_jobs_of_slurm_are_named_as_they_outlive_the_sweep(monkeypatch, runs, capsys):
    job = SimpleNamespace(job_id="4711", done=lambda: True, result=lambda: (1, ["ended"]))
    monkeypatch.setattr(sweep_module, "engine", lambda *_, **__: lambda arguments, log: job)
    of_smoke("k_bias", engine_name="slurm")
    assert "k_bias seed 0: job 4711, which outlives this sweep" in capsys.readouterr().out


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


def gone(pid) -> bool:
    """Whether a process has ended (a zombie has)."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_stopped_sweep_leaves_no_worker(undisturbed, text_folder, tmp_path, number, status):
    """Only the sweep's own process is told, as by kill, timeout or Slurm."""
    environment = {"SINKUTILS_CACHE": str(undisturbed[0]), "PYTHONPATH": str(paths.ROOT)}
    environment = os.environ | environment
    options = "sweep --preset smoke --only k_bias --jobs 2".split()
    command = [sys.executable, "-m", "sinkutils", *options]
    command += ["--seeds", "0", "1", "--runs", str(tmp_path), "--corpus", f"path:{text_folder}"]
    streams = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # Tests that run in the background have it ignored, and so would the sweep.
    streams["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment, **streams)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = []
    wait_until(lambda: len(list(tmp_path.glob("smoke@*/k_bias/*.partial/lock"))) == 2)
    workers = children.read_text().split()
    assert len(workers) >= 2
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == status
    wait_until(lambda: all(map(gone, workers)), 15)
    if number != signal.SIGKILL:
        assert "sinkutils: stopped 2 runs; what they have saved stays" in error
        assert error.strip().endswith("sinkutils: stopped; run the same command again to go on")
