"""The paper's 60M takes a step, and a bare machine is enough to train."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import SMOKE
from helpers import CPU, environment

from sinkutils import config
from sinkutils.study.corpus import pack_corpus
from sinkutils.study.record import read_record, record_folder
from sinkutils.study.store import Runs
from sinkutils.study.train import Run


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / "corpus.tar.xz"
    pack_corpus(corpus, file)
    return file


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
    run.task.train.tokens = torch.randint(3, 50_432, run.task.train.tokens.shape)
    before = run.model.blocks[9].attention.qkv.weight[:4].detach().clone()
    loss = float(run.advance())
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
