"""What the tests share: one thread, no GPU, a tiny corpus of our own words, tiny configs."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sinkutils import LMConfig, paths
from sinkutils.study import grid
from sinkutils.study.config import DataConfig, RunConfig, TrainConfig
from sinkutils.study.corpus import Corpus, load_corpus, verified, write_meta

WORDS = (
    "attention sink token head query key value softmax norm layer model train loss data first second weight decay "
    "window prefix mask bias scale proxy score measure figure table paper shows when where why the a of in and to"
).split()

# What is tested at smoke does not need the steps that a sink needs there.
SMOKE = grid.presets()["smoke"]
SHORT = dataclasses.replace(SMOKE.train, steps=60, batch_size=8, eval_every=20)
grid.presets()["smoke"] = dataclasses.replace(SMOKE, train=SHORT)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)  # before a module's own fixtures, which train
def no_gpu() -> Iterator[pytest.MonkeyPatch]:
    """What trains or measures with no word on where takes the CPU, also where there is a GPU; a test may undo it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # of processes that tests start
        yield patch


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records, in the place of the project's own."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up documents, enough of them that every split has some."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for index in range(400):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(100, 300)))
        (folder / f"{index:03d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus with a vocabulary of 300 from `text_folder`, under the name of the presets' text: it stands for that."""
    cache = tmp_path_factory.mktemp("cache")
    folder = load_corpus(f"path:{text_folder}", 300, cache_dir=cache).folder
    write_meta(folder, verified(folder) | {"name": "docstrings"})
    return Corpus(folder)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, without records, whose smoke has a fifth of the steps: for commands that run in their own processes."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("sinkutils", "data"):
        without = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(paths.ROOT / folder, copy / folder, ignore=without)
    shutil.copy(paths.ROOT / "pyproject.toml", copy)
    file = copy / "data" / "presets.yaml"
    file.write_text(file.read_text().replace("{steps: 1000, ", "{steps: 200, "))
    assert "{steps: 200, " in file.read_text()
    return copy


@pytest.fixture
def tiny() -> RunConfig:
    """A run of a second: 12 steps, evaluated every 4."""
    return RunConfig(
        experiment="tiny",
        preset="test",
        model=LMConfig(vocab_size=300, context_length=32, num_layers=2, num_heads=2, hidden_size=16,
                       intermediate_size=32),
        data=DataConfig(corpus="docstrings", fixed_position=1),
        train=TrainConfig(steps=12, batch_size=4, warmup_steps=3, eval_every=4, eval_sequences=2, eval_length=32,
                          valid_chunks=4),
    )  # fmt: skip


def pytest_collection_modifyitems(items):
    """Cells of notebooks wait longer for their output than nbval's 5 seconds, which a busy machine can take."""
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = 60
