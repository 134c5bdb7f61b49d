"""Real sweeps under kills, beside each other and on other engines; benchmarks/reliability.py has more."""

import dataclasses
from importlib.util import find_spec

import pytest
import reliability
from conftest import SMOKE
from helpers import DONE

from sinkutils import config, train
from sinkutils.study.record import read_record, record_folder
from sinkutils.study.store import write_record


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory, checkout):
    folder = tmp_path_factory.mktemp("sweeps")
    return reliability.Sweeps(folder, only=("k_bias", "sigmoid"), checkout=checkout)


@pytest.fixture(scope="module")
def unbroken(sweeps):
    """How long an unbroken sweep takes, and its results."""
    return sweeps.finish("whole"), sweeps.results("whole")


def test_a_sweep_of_two_workers_killed_at_random_ends_as_an_unbroken_one(sweeps, unbroken):
    seconds, expected = unbroken
    assert set(expected) == set(sweeps.only)
    counts = reliability.kill_at_random(sweeps, expected, seconds, kills=2)
    assert sum(counts["hit"].values()) == 2
    assert any(part.startswith(("training", "writing")) for part in counts["hit"])


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


@pytest.mark.skipif(find_spec("submitit") is None, reason="sinkutils[slurm] is not installed")
def test_jobs_of_slurm_make_the_same_records_though_one_is_queued_again(sweeps, unbroken):
    """Slurm's commands are stand-ins (benchmarks/fake_slurm.py), and submitit is not."""
    seconds, expected = unbroken
    jobs = dataclasses.replace(sweeps, engine="slurm")
    counts = reliability.requeue_at_random(jobs, expected, seconds, times=1)
    assert counts["queued_again"] >= 1
    names = (jobs.queue / "names").read_text().split()
    assert {"smoke:2runs", "smoke/k_bias/0", "smoke/sigmoid/0"} <= {*names}


def test_a_k_bias_has_its_sink_at_smoke_and_the_base_has_none(tmp_path):
    """What the smoke preset is calibrated for, in its own steps and on its own text."""
    configs = [config(name, "smoke") for name in ("k_bias", "base")]
    runs = [dataclasses.replace(run, train=SMOKE.train) for run in configs]
    ends = [train(run, tmp_path, device="cpu", progress=False).metrics["final"] for run in runs]
    biased, base = ends
    assert base["sink_1"] < 5 and biased["sink_star"] > base["sink_1"] + 15
