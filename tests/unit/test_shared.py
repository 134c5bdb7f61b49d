"""One run that two processes share: the batches, losses and record of one; a lost process; what cannot be shared."""

import dataclasses
import json
import shutil
import warnings

import pytest
import torch
from helpers import refuses, torchrun

from sinkutils import config as study_config
from sinkutils import train
from sinkutils.checks import launched
from sinkutils.study import shared
from sinkutils.study.store import Runs
from sinkutils.study.train import Run

# A process of two. It writes the losses of its steps; where it is told to, it kills itself before a step. Accelerate
# cuts weights on GPUs only: "cut" lets it do so here too.
WORKER = """
import json, os, signal, sys
from pathlib import Path

from sinkutils.study import shared
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.study.corpus import Corpus
from sinkutils.study.train import Run, train

told = json.loads(sys.argv[1])
config = from_dict(RunConfig, told["config"])
losses = {}
advance, join = Run.advance, shared.join


def kept(run):
    if told["lost"] == run.step and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    step = run.step
    losses[step] = float(advance(run))


Run.advance = kept
if told["cut"]:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    def cut(config, device):
        world = join(config, device)
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
        world.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        return world

    shared.join = cut
options = {"device": "cpu", "checkpoint_seconds": 0, "keep_weights": True}
record = train(config, told["runs"], corpus=Corpus(Path(told["corpus"])), **options)
assert record.status == "done"
if os.environ["RANK"] == "0":
    Path(told["losses"]).write_text(json.dumps(losses))
"""
TOLERANCE = 1e-6


def of_two(tmp_path, config, corpus, runs, lost=None, cut=False):
    """Two processes train a run; returns them, and the losses by step if they came to the end."""
    worker, losses = tmp_path / "worker.py", tmp_path / "losses.json"
    worker.write_text(WORKER)
    told = {"config": dataclasses.asdict(config), "corpus": str(corpus.folder), "runs": str(runs)}
    told |= {"losses": str(losses), "lost": lost, "cut": cut}
    ended = torchrun(str(worker), json.dumps(told))
    found = json.loads(losses.read_text()) if losses.exists() else {}
    return ended, {int(step): loss for step, loss in found.items()}


def alone(config, corpus, runs):
    """The losses of a run by step, and its record, made by this process."""
    losses = {}
    advance = Run.advance
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Run, "advance", lambda run: losses.update({run.step: float(advance(run))}))
        options = {"device": "cpu", "progress": False, "keep_weights": True}
        return losses, train(config, runs, corpus=corpus, **options)


@pytest.fixture
def eight(tiny):
    """A run of 12 steps of 8 rows, two at a time."""
    return dataclasses.replace(
        tiny, train=dataclasses.replace(tiny.train, batch_size=8, micro_batch=2)
    )


@pytest.mark.slow
def test_two_processes_make_the_record_of_one_and_go_on_where_one_was_lost(tmp_path, eight, corpus):
    """First as DDP, until a process is killed; then as FSDP2, and in one process, from the same checkpoint."""
    expected, single = alone(eight, corpus, tmp_path / "single")
    ended, _ = of_two(tmp_path, eight, corpus, tmp_path / "two", lost=6)
    assert ended.returncode != 0
    place = Runs(tmp_path / "two").of(eight)
    assert place.checkpoint.exists() and not place.locked() and place.record() is None
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    after, resumed = alone(eight, corpus, tmp_path / "one")
    ended, cut = of_two(tmp_path, eight, corpus, tmp_path / "two", cut=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for losses in (after, cut):
        assert losses.keys() == set(range(4, 12))
        assert all(abs(loss - expected[step]) < TOLERANCE for step, loss in losses.items())
    shared_record = place.record()
    for record in (resumed, shared_record):
        for point, other in zip(record.metrics["curve"], single.metrics["curve"], strict=True):
            assert point["valid_loss"] == pytest.approx(other["valid_loss"], abs=2e-4)
            assert point["excess_1"] == pytest.approx(other["excess_1"], abs=2e-4)
        torch.testing.assert_close(record.arrays, single.arrays, atol=1e-3, rtol=0)
        weights = record.load_model().state_dict()
        torch.testing.assert_close(weights, single.load_model().state_dict(), atol=1e-4, rtol=0)
    assert shared_record.provenance["processes"] == 2 and shared_record.provenance["sharded"]
    assert shared_record.provenance["began_on"][0]["processes"] == 2
    assert "processes" not in single.provenance
    assert [file.name for file in place.folder.parent.iterdir()] == ["0"]


class World:
    """What Accelerate makes of the launcher's variables."""

    distributed_type, is_fsdp2 = "MULTI_CPU", False

    def __init__(self, **told):
        self.told = told


def join(monkeypatch, config, processes=2, here=2, device="cpu", **environment):
    monkeypatch.setattr("accelerate.Accelerator", World)
    environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(here)}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return shared.join(config, torch.device(device)).told["gradient_accumulation_steps"]


def test_what_processes_cannot_share_is_refused_in_a_line(monkeypatch, eight):
    assert join(monkeypatch, eight) == 2
    assert join(monkeypatch, eight, processes=4) == 1
    refuses("3 processes cannot divide a batch of 8 rows", join, monkeypatch, eight, 3)
    refuses("16 processes cannot divide", join, monkeypatch, eight, 16)
    odd = dataclasses.replace(eight.train, batch_size=12, micro_batch=4)
    odd = dataclasses.replace(eight, train=odd)
    refuses("a batch of 12 rows into equal parts, with micro_batch=4", join, monkeypatch, odd)
    refuses(
        "2 processes were started on a machine with 0 GPUs", join, monkeypatch, eight, 2, 2, "cuda"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    join(monkeypatch, eight, device="cuda")
    refuses("leave --device out", join, monkeypatch, eight, 2, 2, "cuda:1")
    refuses("is a fine-tuning", join, monkeypatch, study_config("sft_softmax", "smoke"))
    sharded = {"ACCELERATE_USE_FSDP": "true"}
    refuses("on GPUs by FSDP2", join, monkeypatch, eight, **sharded)
    monkeypatch.setattr(World, "is_fsdp2", True)
    join(monkeypatch, eight, device="cuda", **sharded)


@pytest.mark.parametrize("stray", [{"WORLD_SIZE": "8"}, {"RANK": "3", "LOCAL_RANK": "3"}])
def test_a_variable_that_is_left_over_does_not_make_a_run_wait_for_others(monkeypatch, stray):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    assert launched() == (0, 1)


def test_a_run_that_another_machine_may_be_training_is_trained_with_a_warning(
    tiny, corpus, tmp_path
):
    """As where two clusters write one folder, and share no locks."""
    place = Runs(tmp_path).of(tiny)
    place.partial.mkdir(parents=True)
    (place.partial / "owner").write_text("another-cluster 17")
    with pytest.warns(UserWarning, match="on another-cluster began this run and has not ended it"):
        record = train(tiny, tmp_path, corpus=corpus, device="cpu", progress=False)
    assert record.status == "done" and not place.partial.exists()
