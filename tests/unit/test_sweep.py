"""Sweeps: only what is missing, never one run by two workers, and no failure stops the others."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sinkutils.study.grid import config
from sinkutils.study.record import RunLocked, read_record, record_folder, run_lock
from sinkutils.training import sweep as sweep_module
from sinkutils.training.sweep import devices, engine, estimate, run_one, sweep
from sinkutils.training.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture
def quick(monkeypatch, corpus):
    """Sweeps whose runs train a tiny model in this process, on the tests' corpus."""

    def run_one(preset, experiment, seed, runs, log, checkpoint_seconds, text, device):
        if experiment == "v_bias":
            raise RuntimeError("the machine went away")
        try:
            train(config(experiment, preset, seed), runs, corpus=corpus, progress=False)
        except RunLocked:
            return 3
        return 0

    monkeypatch.setattr(sweep_module, "run_one", run_one)


ONLY = ("fixed_1", "k_bias", "sink_token")


def test_a_sweep_trains_what_is_missing_and_nothing_twice(quick, tmp_path):
    runs = tmp_path / "runs"
    first = sweep("smoke", seeds=(0,), only=ONLY, runs=runs, progress=False)
    assert {(o.experiment, o.status) for o in first} == {(name, "done") for name in ONLY}
    assert sweep("smoke", seeds=(0,), only=ONLY, runs=runs, progress=False) == []
    assert all(read_record(record_folder("smoke", name, 0, runs)).status == "done" for name in ONLY)


def test_a_damaged_record_is_named_and_made_again(quick, tmp_path):
    runs = tmp_path / "runs"
    sweep("smoke", seeds=(0,), only=("k_bias",), runs=runs, progress=False)
    path = record_folder("smoke", "k_bias", 0, runs)
    before = read_record(path).metrics
    (path / "metrics.json").write_bytes((path / "metrics.json").read_bytes()[:-2])
    with pytest.warns(UserWarning, match=r"smoke/k_bias/0: metrics\.json is .* counts as missing"):
        (outcome,) = sweep("smoke", seeds=(0,), only=("k_bias",), runs=runs, progress=False)
    assert outcome.status == "done" and read_record(path).metrics == before
    assert [left.name for left in path.parent.iterdir()] == ["0"]


def test_no_more_runs_than_jobs_are_under_way_and_an_interrupt_leaves_no_queue(monkeypatch, tmp_path):
    begun = []

    class Interrupted:
        def done(self):
            raise KeyboardInterrupt

    class Counting:
        def submit(self, function, *arguments):
            begun.append(arguments[1])
            return Interrupted()

    monkeypatch.setattr(sweep_module, "engine", lambda *arguments, **more: Counting())
    with pytest.raises(KeyboardInterrupt):
        sweep("smoke", jobs=2, seeds=(0,), runs=tmp_path / "runs", progress=False)
    assert len(begun) == 2


def test_a_failing_run_stops_no_other_and_one_that_another_worker_holds_is_left_to_it(quick, tmp_path):
    runs = tmp_path / "runs"
    with run_lock(record_folder("smoke", "k_bias", 0, runs)):
        outcomes = sweep("smoke", seeds=(0,), only=("v_bias", "k_bias", "fixed_1"), runs=runs, progress=False)
    ended = {outcome.experiment: outcome for outcome in outcomes}
    statuses = {name: outcome.status for name, outcome in ended.items()}
    assert statuses == {"v_bias": "crashed", "k_bias": "elsewhere", "fixed_1": "done"}
    assert "the machine went away" in ended["v_bias"].detail


def test_the_estimate_counts_steps_and_falls_to_nothing_as_records_come(quick, tmp_path):
    runs = tmp_path / "runs"
    before = estimate("smoke", (0,), runs)
    by_name = {run.experiment: seconds for run, seconds in before}
    assert by_name["lr_half_steps_x2"] == pytest.approx(2 * by_name["lr_half"])
    sweep("smoke", seeds=(0,), only=ONLY, runs=runs, progress=False)
    after = {run.experiment for run, _ in estimate("smoke", (0,), runs)}
    assert set(by_name) - after == set(ONLY)


def test_a_sweep_on_another_text_finds_it_first_and_counts_its_own_records(tmp_path, text_folder, monkeypatch):
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))

    def here(preset, experiment, seed, runs, log, checkpoint_seconds, text, device):  # with the tests' shorter smoke
        train(config(experiment, preset, seed), runs, corpus=text, progress=False)
        return 0

    monkeypatch.setattr(sweep_module, "run_one", here)
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        sweep("smoke", seeds=(0,), runs=tmp_path / "runs", corpus=f"path:{tmp_path}/nowhere", progress=False)
    text = f"path:{text_folder}"
    before = estimate("smoke", (0,), tmp_path / "runs", text)
    (outcome,) = sweep("smoke", seeds=(0,), only=("k_bias",), runs=tmp_path / "runs", corpus=text, progress=False)
    assert outcome.status == "done"
    assert len(estimate("smoke", (0,), tmp_path / "runs", text)) == len(before) - 1
    assert len(estimate("smoke", (0,), tmp_path / "runs")) == len(before)


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
        ("laptop", "local", 0, None, ("cpu", "cpu")),
        ("laptop", "local", 1, None, ("cuda:0", "cuda:0")),
        ("laptop", "local", 4, None, ("cuda:0", "cuda:1")),
        ("laptop", "local", 2, "cpu", ("cpu", "cpu")),
        ("gpu", "local", 1, None, ("cuda:0", "cuda:0")),
        ("gpu", "local", 2, "cuda", ("cuda:0", "cuda:1")),
        ("gpu", "local", 0, "cpu", ("cpu", "cpu")),
        ("laptop", "slurm", 0, None, ("cpu", "cpu")),
        ("gpu", "slurm", 0, None, ("cuda", "cuda")),
        ("gpu", "ray", 0, "cpu", ("cpu", "cpu")),
    ],
)
def test_a_sweeps_devices(gpus, preset, engine_name, count, asked, expected):
    gpus(count)
    assert devices(preset, engine_name, 2, asked) == expected


@pytest.mark.parametrize(
    ("preset", "asked", "message"),
    [("gpu", None, "made for a GPU and there is none here"), ("laptop", "cuda", "sees none of that kind"),
     ("laptop", "abacus", "device must be")],
)  # fmt: skip
def test_a_sweep_never_falls_back_to_the_cpu_unasked(gpus, preset, asked, message, tmp_path):
    gpus(0)
    with pytest.raises(ValueError, match=message):
        sweep(preset, device=asked, runs=tmp_path, progress=False)
    with pytest.raises(ValueError, match="local, slurm, ray"):
        engine("abacus", 1, tmp_path)


def test_runs_under_way_hold_different_gpus_and_a_free_one_is_taken_again(monkeypatch, tmp_path, quick, gpus):
    gpus(2)
    running, seen = set(), []

    class Done:
        def __init__(self, device):
            self.device = device
            assert device not in running
            running.add(device)
            seen.append(device)

        def done(self):
            return len(running) == 2 or len(seen) == len(ONLY)

        def result(self):
            running.discard(self.device)
            return 3

    pool = SimpleNamespace(submit=lambda function, *arguments: Done(arguments[-1]))
    monkeypatch.setattr(sweep_module, "engine", lambda *arguments, **more: pool)
    sweep("smoke", jobs=2, seeds=(0,), only=ONLY, runs=tmp_path / "runs", progress=False)
    assert seen[:2] == ["cuda:0", "cuda:1"] and len(seen) == 3 and not running


def test_a_worker_is_told_its_text_and_device(monkeypatch, tmp_path):
    commands, ended = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command) or ended)
    run_one("smoke", "k_bias", 0, str(tmp_path), str(tmp_path / "log"), 20.0, "packed:text", "cuda:1")
    assert commands[0][-4:] == ["--device", "cuda:1", "--corpus", "packed:text"]


@pytest.mark.parametrize("gpu", [False, True])
def test_clusters_are_asked_for_gpus(monkeypatch, tmp_path, gpu):
    asked = {}

    class Executor:
        def __init__(self, folder):
            pass

        def update_parameters(self, **parameters):
            asked["slurm"] = parameters["gpus_per_node"]

    def remote(**needs):
        asked["ray"] = needs["num_gpus"]
        future = SimpleNamespace(future=lambda: None)
        return lambda function: SimpleNamespace(remote=lambda *arguments: future)

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, remote=remote))
    engine("slurm", 1, tmp_path, gpu)
    engine("ray", 1, tmp_path, gpu).submit(print)
    assert asked == {"slurm": gpu, "ray": gpu}
