"""Several processes make the run that one makes; the paper's 60M takes a step; a bare machine is enough to train."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMOKE
from helpers import CPU, environment, torchrun
from safetensors.torch import load_file

from sinkutils import config, train
from sinkutils.data.corpus import pack_corpus
from sinkutils.study.record import read_record, record_folder
from sinkutils.study.store import Runs
from sinkutils.training.run import Run, next_token_loss

# A run that is broken off after a checkpoint, the same resumed, and another from its start to its end.
WORKER = """
import contextlib, dataclasses, json, sys
from pathlib import Path
import torch
from helpers import interrupted
from sinkutils.training import group as distributed
from sinkutils.training import run as states
from sinkutils.__main__ import main
from sinkutils.data.corpus import Corpus
from sinkutils.training.group import ALONE, joined
from sinkutils.study import grid
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.training.trainer import train

config, corpus, out = from_dict(RunConfig, json.loads(sys.argv[1])), Corpus(Path(sys.argv[2])), Path(sys.argv[3])

with joined(torch.device("cpu")) as ddp:
    arguments = {"corpus": corpus, "progress": False, "keep_weights": True, "group": ddp}
    train(config, out / "ddp", **arguments)
    with contextlib.suppress(KeyboardInterrupt), interrupted(10):
        train(config, out / "ddp-broken", checkpoint_seconds=0.0, **arguments)
    record = train(config, out / "ddp-broken", **arguments)
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="bf16"))
    states.usable_precision = lambda asked, device: asked  # also on a CPU that is slow in bf16
    train(half, out / "ddp-bf16", **arguments)
    (out / f"ddp-{ddp.rank}.json").write_text(json.dumps([record.status, record.metrics["final"]["step"]]))
    # Two processes take a micro batch each of what one process takes as two.
    smoke = grid.PRESETS["smoke"]
    short = dataclasses.replace(smoke.train, steps=4, eval_every=4, warmup_steps=1)
    grid.PRESETS["smoke"] = dataclasses.replace(smoke, train=short)
    tuning = grid.config("sft_softmax", "smoke")
    schedule = dataclasses.replace(tuning.train, steps=4, eval_every=2, batch_size=8, micro_batch=4, valid_chunks=8)
    tuning = dataclasses.replace(tuning, train=schedule, pairs=32, instructions=f"path:{sys.argv[5]}")
    for mode, group in (("one", ALONE), ("ddp", ddp)):
        if mode != "one" or ddp.first:
            train(dataclasses.replace(tuning, experiment=mode), out / "sft", corpus=corpus, progress=False, group=group)

    # A process joins once; the command line gets the group that is there.
    distributed.joined = lambda device: contextlib.nullcontext(ddp)
    arguments = ["train", "nope", "--preset", "smoke", "--corpus", f"packed:{sys.argv[4]}", "--runs", str(out / "cli")]
    assert main(arguments) == 0
"""


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / "corpus.tar.xz"
    pack_corpus(corpus, file)
    return file


@pytest.fixture(scope="module")
def modes(corpus, packed, tmp_path_factory):
    """Records of one config: by one process, and by two under DDP, whole and broken off."""
    out = tmp_path_factory.mktemp("modes")
    smoke = config("k_bias", "smoke")
    model = dataclasses.replace(smoke.model, vocab_size=300)
    sizes = {"steps": 16, "eval_every": 8, "batch_size": 8, "micro_batch": 2, "warmup_steps": 3}
    schedule = dataclasses.replace(smoke.train, **sizes)
    run = dataclasses.replace(smoke, model=model, train=schedule)
    train(run, out / "one", corpus=corpus, progress=False, keep_weights=True)
    worker = out / "worker.py"
    worker.write_text(WORKER)
    chats = out / "chats.jsonl"
    answers = ["a sink token " * (1 + n % 4) + f"{n}" for n in range(60)]
    said = [{"user": f"what is {n} ?", "assistant": a} for n, a in enumerate(answers)]
    rows = [{"messages": [{"role": r, "content": text} for r, text in row.items()]} for row in said]
    chats.write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        json.dumps(dataclasses.asdict(run)),
        *map(str, (corpus.folder, out, packed, chats)),
    ]
    done = torchrun(str(worker), *arguments, SINKUTILS_CACHE=str(out / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    (out / "stdout").write_text(done.stdout)
    return out


def record_of(modes: Path, name: str):
    return read_record(record_folder("smoke", "k_bias", 0, modes / name))


def test_two_processes_give_what_one_gives_resumed_bit_for_bit_and_nearly_in_bf16(modes):
    names = ("one", "ddp", "ddp-broken", "ddp-bf16")
    one, two, broken, half = (record_of(modes, name) for name in names)
    for rank in (0, 1):  # each process gets the record
        assert json.loads((modes / f"ddp-{rank}.json").read_text()) == ["done", 16]
    for record in (two, broken):
        assert record.provenance["processes"] == 2 and record.provenance["parallel"] == "ddp"
    for a, b in zip(one.metrics["curve"], two.metrics["curve"], strict=True):
        assert a["step"] == b["step"]
        # none before the first step
        assert a.get("train_loss", 0) == pytest.approx(b.get("train_loss", 0), rel=1e-5)
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-5)
    ours, theirs, half = (record.metrics["final"] for record in (one, two, half))
    np.testing.assert_allclose(ours["report"]["alpha"], theirs["report"]["alpha"], atol=1e-4)
    assert half["valid_loss"] != ours["valid_loss"] == pytest.approx(half["valid_loss"], rel=0.02)
    ours, theirs, resumed = (load_file(record.weights) for record in (one, two, broken))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert two.metrics == broken.metrics
    assert all(torch.equal(resumed[name], weight) for name, weight in theirs.items())


def test_a_fine_tuning_by_two_processes_is_that_of_one(modes):
    folders = [record_folder("smoke", name, 0, modes / "sft") for name in ("one", "ddp")]
    one, two = map(read_record, folders)
    assert two.provenance["processes"] == 2 and one.provenance["processes"] == 1
    for name in ("losses", "gradient_norms"):
        a, b = (
            [x for point in run.metrics["curve"] for x in point.get(name, ())] for run in (one, two)
        )
        assert len(b) == 4 and a == pytest.approx(b, rel=1e-4)
    loss = one.metrics["final"]["valid_loss"]
    assert two.metrics["final"]["valid_loss"] == pytest.approx(loss, rel=1e-5)


def test_an_error_in_one_process_ends_all(tmp_path):
    options = "nope --preset smoke --corpus path:/nowhere --device cpu"
    done = torchrun("-m", "sinkutils", "train", *options.split())
    assert done.returncode != 0 and "no such folder or file" in done.stderr


def test_the_command_line_joins_the_group_and_rank_0_alone_prints(modes):
    assert (modes / "stdout").read_text().count("smoke/nope/0: Sink_1") == 1
    record = read_record(record_folder("smoke", "nope", 0, modes / "cli"))
    assert (record.provenance["processes"], record.provenance["parallel"]) == (2, "ddp")


# ---- the paper's 60M, on 256 tokens in place of 2,048, for the time that it takes


def test_the_papers_60m_takes_an_optimiser_step(corpus):
    paper = config("default", "paper")
    assert paper.model.context_length == 2048 and paper.train.precision == "bf16"
    ones = dict.fromkeys(
        ("batch_size", "micro_batch", "warmup_steps", "valid_chunks", "eval_sequences"), 1
    )
    schedule = dataclasses.replace(paper.train, **ones)
    model = dataclasses.replace(paper.model, context_length=256)
    run = Run(dataclasses.replace(paper, train=schedule, model=model), corpus, CPU)
    # Of all its words.
    run.chunks.tokens = torch.randint(3, 50_432, run.chunks.tokens.shape)
    before = run.model.blocks[9].attention.qkv.weight[:4].detach().clone()
    loss = float(run.advance(next_token_loss))
    # Untrained logits are normal with variance 2/5, by the initialisation: the loss is log V + 1/5.
    assert loss == pytest.approx(np.log(50_432) + 0.2, abs=0.1)
    moved = (run.model.blocks[9].attention.qkv.weight[:4].detach() - before).abs()
    # Adam's first step is the rate in every weight.
    assert float(moved.median()) == pytest.approx(paper.train.learning_rate, rel=0.05)


# ---- a bare machine: torch, numpy, tokenizers, safetensors, PyYAML, tqdm, and what these need

BLOCKED = (
    "transformers pandas scipy matplotlib PIL seaborn datasets IPython nbformat nbclient".split()
)
BARE = """
import runpy, sys
for name in {blocked!r}:
    sys.modules[name] = None
sys.argv = ["sinkutils", *sys.argv[1:]]
runpy.run_module("sinkutils", run_name="__main__")
"""


def test_a_bare_machine_trains_a_preset_on_a_corpus_brought_there(
    packed, corpus, checkout, tmp_path
):
    runs, cache = tmp_path / "runs", str(tmp_path / "cache")
    asked = f"train fixed_1 --preset smoke --corpus packed:{packed} --runs {runs}".split()
    command = [sys.executable, "-c", BARE.format(blocked=BLOCKED), *asked]
    where = {"env": environment(SINKUTILS_CACHE=cache), "cwd": checkout}
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "smoke/fixed_1/0: Sink_1" in done.stdout
    assert "in place of 'docstrings' with 512" in done.stderr
    record = read_record(record_folder("smoke", "fixed_1", 0, runs))
    assert record.config["corpus"] == {"name": "docstrings", "sha256": corpus.fingerprint}
    schedule = dataclasses.replace(SMOKE.train, steps=200)
    run = dataclasses.replace(config("fixed_1", "smoke"), train=schedule)
    assert Runs(runs).of(run).record(), "the record is the preset's: its config has not changed"
