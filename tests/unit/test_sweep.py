"""Sweeps: only what is missing, never one run by two workers, and no failure stops the others."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import fake_slurm
import pytest
import torch
from helpers import interrupted, made_up, refused, refuses

from sinkutils import config, paths, train
from sinkutils.__main__ import main
from sinkutils.checks import launched
from sinkutils.commands import LOCKED, parser
from sinkutils.study import grid, store
from sinkutils.study import sweep as sweep_module
from sinkutils.study.record import RunLocked, read_record, record_folder
from sinkutils.study.slurm import minutes_of
from sinkutils.study.store import Runs
from sinkutils.study.sweep import Workers, estimate, places, sweep
from sinkutils.study.train import Run

pytestmark = pytest.mark.slow


def printed(capsys):
    """What a sweep printed, without the lines of its workers, which have the name of a record."""
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("smoke@"))


@pytest.fixture
def quick(monkeypatch, corpus, tmp_path):
    """Sweeps whose runs train a tiny model in this process, on the tests' corpus."""

    def run(workers, arguments, log):
        asked = parser().parse_args(["train", *arguments])
        if asked.experiment == "v_bias":
            raise RuntimeError("the machine went away")
        monkeypatch.chdir(tmp_path)  # a worker may be anywhere
        run = config(asked.experiment, asked.preset, asked.seed)
        try:
            train(run, asked.runs, corpus=asked.corpus or corpus, progress=False)
        except RunLocked:
            return LOCKED
        return 0

    monkeypatch.setattr(Workers, "run", run)
    monkeypatch.setattr(sweep_module, "_make_texts", lambda runs: None)


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


@pytest.mark.parametrize(
    ("recorded", "just_before"), [(True, False), (False, False), (False, True)]
)
def test_a_run_that_another_process_has_is_waited_for_and_trained_here_if_that_leaves_no_record(
    quick, runs, tmp_path, recorded, just_before, monkeypatch, capsys
):
    """Also where the other process takes it just before our worker does."""
    if just_before:
        monkeypatch.setattr(sweep_module, "_locked", lambda *_: False)
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


class Command:
    """`sinkutils sweep` of an experiment's first seeds, whose workers are in this process."""

    def __init__(self, seeds, text, runs):
        self.runs, self.steps = runs, Counter()
        options = f"--preset smoke --only k_bias --checkpoint-seconds 0 --runs {runs} --corpus path:{text} --seeds"
        self.arguments = ["sweep", *options.split(), *map(str, range(seeds))]

    def run(self, arguments, log):
        """What stands for a worker's process, which ends as in `main`; returns its exit status."""
        asked = parser().parse_args(["train", *arguments, "--device", "cpu"])
        try:
            return asked.function(asked) or 0
        except KeyboardInterrupt:
            log.write_text("sinkutils: stopped; run the same command again to go on\n")
            return 130
        except OSError as error:
            log.write_text(f"a warning\nsinkutils: {error}\n")
            return 2

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
        monkeypatch.setattr(
            Workers, "run", lambda workers, arguments, log: command.run(arguments, log)
        )
        monkeypatch.setattr(Run, "advance", lambda run: command.advance(run))
        return command

    return make


FULL = {  # the end of the name of the file without room: what is not saved, and the step that stays saved
    ".tmp": ("checkpoint.pt", 20),
    "metrics.json": ("record smoke@[^ ]+/k_bias/0", 40),
}


@pytest.mark.parametrize("file", FULL)
def test_a_full_disk_stops_no_other_run_and_goes_on(
    file, command, undisturbed, monkeypatch, capsys
):
    (name, saved), sweep, (_, expected) = FULL[file], command(2), undisturbed

    def write(path, data, really=store.write_synced):
        of_first = path.parent.name.startswith(("0", ".0")) and not sweep.steps[1]
        if path.name.endswith(file) and of_first and sweep.steps[0] > 20:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_synced", write)
        patch.setattr(paths, "write_synced", write)
        assert sweep.status() == 1
    reason = rf"\[Errno 28\] could not save {name} \(No space left on device\): free some space"
    said = rf"k_bias +seed 0  crashed  {reason} [^\n]+; see smoke/k_bias-0\.log\nk_bias +seed 1  done  \n"
    assert re.fullmatch(said, printed(capsys))
    partial = sweep.folder(0).with_name("0.partial")
    assert {path.name for path in partial.parent.iterdir()} == {partial.name, "1"}
    assert {path.name for path in partial.iterdir()} == {"checkpoint.pt", "lock"}
    assert sweep.results(1) == expected[1:2]
    assert sweep.status() == 0 and sweep.steps == {0: 60 - saved}
    assert re.fullmatch(r"k_bias +seed 0  done  \n", printed(capsys))
    assert sweep.results(0, 1) == expected[:2]


TRACEBACK = b"""a bar
Traceback (most recent call last):
  File "x.py", line 1, in x
    x()
RuntimeError: CUDA error: out of bounds
Compile with TORCH_USE_CUDA_DSA to enable device-side assertions.
"""


class Ended:
    """A process that has ended."""

    def __init__(self, status):
        self.wait = lambda *_: status


@pytest.mark.parametrize(
    ("status", "free", "printed", "said"),
    [
        (2, 2**30, b"a bar\nsinkutils: no such text\n", "no such text;"),
        (1, 2**30, TRACEBACK, "RuntimeError: CUDA error: out of bounds;"),
        (1, 2**30, b"", "exit status 1"),
        (-9, 2**30, b"a bar\n", "it was killed by SIGKILL"),
        (1, 0, b"", "the disk is full: free some"),
    ],
)
def test_the_last_line_of_a_worker_that_failed_says_why_or_else_its_exit_status(
    status, free, printed, said, monkeypatch, runs, capsys
):
    def worker(command, stdout, **options):
        stdout.write(printed)
        return Ended(status)

    monkeypatch.setattr(sweep_module, "_make_texts", lambda runs: None)
    monkeypatch.setattr(subprocess, "Popen", worker)
    (runs / "logs" / "smoke").mkdir(parents=True)
    (runs / "logs" / "smoke" / "k_bias-0.log").write_text("sinkutils: of an earlier sweep\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    (outcome,) = of_smoke("k_bias")
    assert outcome.status == "crashed"
    assert outcome.detail.startswith(said) and outcome.detail.endswith("; see smoke/k_bias-0.log")


def test_a_damaged_checkpoint_is_trained_again_and_stops_no_other(command, undisturbed, capsys):
    sweep, (_, expected) = command(3), undisturbed
    with interrupted(50):
        assert sweep.status() == 1
    says = "crashed  stopped; run the same command again"
    assert capsys.readouterr().out.count(says) == 3
    partial = [sweep.folder(seed).with_name(f"{seed}.partial") for seed in range(3)]
    flipped, cut, _ = (folder / "checkpoint.pt" for folder in partial)
    blob = flipped.read_bytes()
    flipped.write_bytes(blob[:5000] + bytes(byte ^ 1 for byte in blob[5000:5010]) + blob[5010:])
    cut.write_bytes(cut.read_bytes()[:-100])
    assert sweep.status() == 0 and sweep.steps == {0: 60, 1: 60, 2: 20}
    said = [line.partition("done")[2].strip() for line in printed(capsys).splitlines()]
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
    ("device", "told", "expected"),
    [
        ("cpu", None, [("cpu", None)] * 3),
        ("cuda", None, [("cuda", "0"), ("cuda", "1"), ("cuda", "0")]),
        ("cuda", "5,3", [("cuda", "5"), ("cuda", "3"), ("cuda", "5")]),
        ("cuda", "GPU-a,GPU-b", [("cuda", "GPU-a"), ("cuda", "GPU-b"), ("cuda", "GPU-a")]),
        ("cuda:1", "5,3", [("cuda", "3")] * 3),
    ],
)
def test_each_worker_sees_its_own_gpu(gpus, monkeypatch, device, told, expected):
    gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    found = [(name, own.get("CUDA_VISIBLE_DEVICES")) for name, own in places(device, 3)]
    assert found == expected


def test_a_sweep_never_falls_back_to_the_cpu_unasked(gpus, tmp_path):
    gpus(0)
    refuses("sees 0 of that kind", sweep, "gpu", runs=tmp_path, progress=False)
    refuses("sees 0 of that kind", sweep, "laptop", device="cuda", runs=tmp_path, progress=False)
    refuses("device must be", sweep, "laptop", device="abacus", runs=tmp_path, progress=False)


class Blocked:
    """Processes that end when as many as `together` run at a time; an interrupt comes when the last has begun."""

    def __init__(self, together):
        self.barrier = threading.Barrier(together)
        self.commands, self.environments = [], []

    def __call__(self, command, env, **options):
        self.commands.append(command)
        self.environments.append(env)
        return SimpleProcess(lambda: self.barrier.wait(20))


class SimpleProcess:
    def __init__(self, until):
        self.until = until

    def wait(self, timeout=None):
        self.until()
        return 1


def test_runs_at_the_same_time_hold_different_gpus_and_are_told_what_they_need(
    monkeypatch, runs, gpus
):
    gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = Blocked(together=2)
    monkeypatch.setattr(subprocess, "Popen", started)
    identity = {"name": "mine", "sha256": "0" * 64}
    text = SimpleNamespace(identity=identity)
    monkeypatch.setattr(sweep_module, "load_corpus", lambda *_, **__: text)
    options = {"corpus": "packed:/a/text", "device": "cuda", "checkpoint_seconds": 5.0}
    outcomes = of_smoke("k_bias", "fixed_1", jobs=2, **options)
    assert {outcome.status for outcome in outcomes} == {"crashed"}
    assert {env["CUDA_VISIBLE_DEVICES"] for env in started.environments} == {"0", "1"}
    assert all(
        env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1" for env in started.environments
    )
    asked = [parser().parse_args(command[3:]) for command in started.commands]
    assert {one.experiment for one in asked} == {"k_bias", "fixed_1"}
    for one in asked:
        assert (one.preset, one.seed, one.runs) == ("smoke", 0, runs)
        assert (one.corpus, one.device, one.checkpoint_seconds) == ("packed:/a/text", "cuda", 5.0)


def test_texts_are_made_once_before_the_workers_start(monkeypatch, runs):
    made = []

    def load(name, vocab_size):
        made.append((name, vocab_size))
        raise ConnectionError("no network")  # which the workers will say themselves

    monkeypatch.setattr(sweep_module, "load_corpus", load)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: made.append("worker") or Ended(1))
    of_smoke("k_bias", "fixed_1")
    assert made == [("docstrings", 512), "worker", "worker"]


def test_no_bar_goes_to_what_is_no_terminal(quick, runs, capsys):
    sweep("smoke", seeds=(0,), only=("k_bias",))
    assert re.fullmatch(r"logs of the runs: [^\n]+\n", capsys.readouterr().err)


def test_the_estimate_follows_the_records(runs):
    (run, usual), *_ = estimate("smoke", (0,), only=["k_bias"])
    assert usual == pytest.approx(grid.presets()["smoke"].seconds)
    for seed, rate in enumerate((1.0, 100.0, 50.0)):
        folder = made_up(runs, "fixed_1", seed=seed)
        file = folder.folder / "provenance.json"
        file.write_text(json.dumps({"tokens_per_second": rate}))
    (_, seconds), *_ = estimate("smoke", (0,), only=["k_bias"])
    tokens = run.train.steps * run.train.batch_size * run.model.context_length
    assert seconds == pytest.approx(tokens / 50)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("90", 90), ("90:30", 91), ("1:30:00", 90), ("2-0", 2880), ("1-12:30", 2190), ("0-0:0:1", 1)],
)
def test_time_limits_of_slurm_are_minutes(limit, minutes):
    assert minutes_of(limit) == minutes


@pytest.mark.parametrize("limit", ["soon", "1:2:3:4", "", "x-1", "1:"])
def test_a_time_limit_that_slurm_does_not_know_is_refused(limit):
    refuses("time must be a limit such as 90", minutes_of, limit)


@pytest.mark.parametrize("limit", ["0", "0:00", "0-0"])
def test_a_time_limit_of_nothing_which_is_none_to_slurm_is_refused(limit):
    refuses("time must be more than nothing", minutes_of, limit)


def test_what_a_cluster_cannot_do_is_one_line(monkeypatch, tmp_path, runs, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setattr(sweep_module, "_make_texts", lambda runs: None)
    usual = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses("there is no Slurm here", of_smoke, slurm={})
    fake_slurm.install(tmp_path / "queue")
    monkeypatch.setenv("PATH", f"{tmp_path / 'queue'}{os.pathsep}{usual}")
    for option, says in {
        "partition=night": "Slurm took no job: .*invalid partition",
        "account=other": "Slurm took no job: .*Invalid account",
        "cpus_per_task=0": "Slurm took no job: .*Invalid numeric value",
        "time=soon": "time must be",
    }.items():
        command = ["sweep", "--preset", "smoke", "--only", "k_bias", "--runs", str(runs)]
        assert main([*command, "--slurm", option]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert re.match(f"sinkutils: {says}", line)
    assert [file.name for file in runs.iterdir()] == ["logs"]


def test_a_worker_of_a_sweep_that_a_launcher_has_started_trains_alone(monkeypatch, tmp_path):
    seen = {}

    class Process:
        def __init__(self, command, env, **streams):
            seen.update(env)

        def wait(self):
            return 0

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sweep_module.subprocess, "Popen", Process)
    assert Workers([("cpu", {})]).run((), tmp_path / "log") == 0
    monkeypatch.setattr(os, "environ", seen)
    assert launched() == (0, 1)


def wait_until(condition, seconds=240):
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
    wait_until(lambda: len(list(tmp_path.glob("smoke@*/k_bias/*.partial/lock"))) == 2)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    workers = " ".join(file.read_text() for file in threads).split()
    assert len(workers) >= 2
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == status
    wait_until(lambda: all(map(gone, workers)), 15)
    if number != signal.SIGKILL:
        assert "sinkutils: stopped 2 runs; what they have saved stays" in error
        assert error.strip().endswith("sinkutils: stopped; run the same command again to go on")
