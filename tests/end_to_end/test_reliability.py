"""Runs and real sweeps under kills, beside each other and on other engines; benchmarks/reliability.py has more."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import reliability
from helpers import DONE

from sinkutils.study.record import read_record, record_folder, write_record


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    return reliability.Sweeps(tmp_path_factory.mktemp("sweeps"), only=("k_bias", "sigmoid"))


@pytest.fixture(scope="module")
def unbroken(sweeps):
    """How long an unbroken sweep takes, and its results."""
    seconds = sweeps.finish("whole")
    return seconds, sweeps.results("whole")


def test_a_sweep_of_two_workers_killed_at_random_loses_nothing_and_ends_as_an_unbroken_one(sweeps, unbroken):
    seconds, expected = unbroken
    assert set(expected) == set(sweeps.only)
    counts = reliability.kill_at_random(sweeps, expected, seconds, kills=3)
    assert sum(counts["hit"].values()) == 3


def test_two_sweeps_started_at_once_train_every_run_once(sweeps, unbroken):
    assert reliability.two_at_once(sweeps) == dict.fromkeys(sweeps.only, 1)
    assert sweeps.results("twice") == unbroken[1]


def test_every_byte_flipped_and_every_cut_of_a_record_is_noticed_and_named(tiny, tmp_path):
    folder = record_folder("test", "tiny", 0, tmp_path)
    write_record(folder, tiny, DONE, {"device": "cpu"})
    counts = reliability.damage(folder)
    assert counts["files"] == 4 and counts["flipped"] == counts["cut"] > 1000
    assert counts["missed"] == counts["unnamed"] == 0
    assert read_record(folder).status == "done"


def extra(engine: str, package: str):
    """An engine's name; skipped, before anything is trained for it, where its package is not installed."""
    reason = f"the extra sinkutils[{engine}] is not installed"
    return pytest.param(engine, marks=pytest.mark.skipif(find_spec(package) is None, reason=reason))


@pytest.mark.parametrize("engine", [extra("slurm", "submitit"), extra("ray", "ray")])
def test_another_engine_makes_the_same_records_with_two_workers(sweeps, unbroken, engine):
    dataclasses.replace(sweeps, engine=engine).finish(engine)
    assert sweeps.results(engine) == unbroken[1]
    assert sweeps.trainings(engine) == dict.fromkeys(sweeps.only, 1)


RUNNER = """
import json, sys
from pathlib import Path
import torch
from sinkutils.data.corpus import Corpus
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.training.trainer import train
config, folder, runs = json.loads(sys.argv[1]), *sys.argv[2:]
corpus = Corpus(Path(folder))
print("ready", flush=True)
train(from_dict(RunConfig, config), runs, corpus=corpus, progress=False, checkpoint_seconds=0.0)
"""


def test_a_run_killed_at_random_instants_ends_in_the_unbroken_record(tiny, corpus, tmp_path):
    config = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, steps=60, eval_every=2))

    def start(runs: Path) -> subprocess.Popen:
        arguments = [json.dumps(dataclasses.asdict(config)), str(corpus.folder), str(runs)]
        process = subprocess.Popen([sys.executable, "-c", RUNNER, *arguments], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        return process

    process = start(tmp_path / "whole")
    began = time.monotonic()  # when it is ready: imports take longer than the run, and would let it end before a kill
    assert process.wait() == 0
    whole = time.monotonic() - began
    rng, kills = np.random.default_rng(0), 0
    folder = record_folder("test", "tiny", 0, tmp_path / "killed")
    for _attempt in range(20):
        process = start(tmp_path / "killed")
        try:
            process.wait(timeout=float(rng.uniform(0.02, 0.3)) * whole if kills < 5 else 120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 3, "the run ended before it was killed often enough to mean anything"
    whole_folder = record_folder("test", "tiny", 0, tmp_path / "whole")
    assert all((folder / f).read_bytes() == (whole_folder / f).read_bytes() for f in ("config.json", "metrics.json"))
