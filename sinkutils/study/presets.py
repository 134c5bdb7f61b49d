"""The scales of the study: the same experiments on another model, text and budget (Section 4 gives the paper's)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sinkutils.checks import choice
from sinkutils.data.packing import DataConfig
from sinkutils.model.config import LMConfig
from sinkutils.study.config import TrainConfig


@dataclass(frozen=True)
class Tuning:
    """The size of a fine-tuning (Appendix D)."""

    instructions: str  # a name that `load_instructions` knows
    pairs: int  # conversations, each seen once
    batch_size: int = 64
    eval_every: int = 24


@dataclass(frozen=True)
class Preset:
    """A scale: the same experiments on another model, text and budget."""

    name: str
    title: str
    model: LMConfig
    data: DataConfig
    train: TrainConfig
    tuning: Tuning
    base: str  # the experiment that the others change
    four_epochs: float  # share of the corpus of which a run makes four passes, about
    seconds: float  # of one run, roughly
    device: str = "cpu"  # what it is made for: "cuda" makes a sweep ask a cluster for GPUs
    compile: bool = False  # torch.compile, where it works
    parallel: str = "ddp"  # or fsdp: how several processes share a run that torchrun started
    keeps_weights: bool = False  # a few records keep their weights: see `Experiment.weights`


# In LMConfig's order: vocabulary, C, L, H, d, width of the FFN. In TrainConfig's: steps, batch, rate, warm-up.
_PAPER = Preset(
    "paper",
    "the paper's 60M: C 2048, 1M tokens a step, 20k steps on the Pile (Section 4)",
    LMConfig(50_432, 2048, 10, 8, 768, 1536),  # 60M are without embeddings
    DataConfig("pile", validation="pile:Pile-CC"),
    TrainConfig(20_000, 512, 4e-4, 100, precision="bf16", eval_every=250, micro_batch=16),
    Tuning("ultrachat", 200_000, eval_every=250),
    base="default",
    four_epochs=1.0,
    seconds=80_000,  # a GPU at 160 TFLOP/s
    device="cuda",
    compile=True,
)
_ALL = (
    Preset(
        "smoke",
        "seconds a run: tests, CI and live demonstrations; it decides no claim, but a K bias has its sink",
        LMConfig(512, 64, 2, 2, 32, 64),
        DataConfig("docstrings"),
        # A rate and so many steps that a K bias has its sink at each of three seeds.
        TrainConfig(1000, 8, 3e-2, 20, eval_every=100, eval_sequences=8, valid_chunks=8),
        Tuning("docstrings", 160, 8, 10),
        base="fixed_1",
        four_epochs=0.03,  # about one pass, so that a hundredth is still a few chunks
        seconds=10,
    ),
    Preset(
        "minute",
        "a minute or two a run on any core: live pages, and the study under a second recipe; the base is a fixed first "
        "token",
        LMConfig(1024, 32, 4, 4, 64, 128),
        DataConfig("docstrings"),
        TrainConfig(1600, 32, 1e-2, 100, weight_decay=0.5, eval_every=100, eval_length=32),
        Tuning("docstrings", 5_000, eval_every=8),
        base="fixed_1",
        four_epochs=0.0315,  # a quarter of the 1.6M tokens that the run sees, of 13.0M
        seconds=100,
    ),
    Preset(
        "laptop",
        "minutes a run on one core; the base is a fixed first token, as a BOS is (Table 10 right)",
        LMConfig(1024, 64, 4, 4, 64, 128),
        DataConfig("docstrings"),
        TrainConfig(12_000, 32, 6e-3, 100, precision="bf16", eval_every=300),
        Tuning("docstrings", 20_000),  # a tenth of the paper's
        base="fixed_1",
        four_epochs=0.474,  # a quarter of the 24.6M tokens that the run sees, of 13.0M
        seconds=400,
        compile=True,
        keeps_weights=True,
    ),
    Preset(
        "desk",
        "a night a run on one core; the base is the paper's default, at the smallest size that shows its sink",
        LMConfig(1024, 128, 6, 8, 256, 512),
        DataConfig("embedded"),
        TrainConfig(100_000, 8, 2e-3, 100, precision="bf16", eval_every=2000),
        Tuning("docstrings", 20_000),
        base="default",
        four_epochs=0.26,  # 102M tokens of 98.6M
        seconds=9000,
        compile=True,
    ),
    Preset(
        "gpu",
        "one data-centre GPU, by estimate a minute or two a run; the base is the paper's default",
        LMConfig(4096, 512, 8, 8, 512, 1024),
        DataConfig("embedded"),
        TrainConfig(1500, 128, 1e-3, 100, precision="bf16", eval_every=50),
        Tuning("docstrings", 60_000),
        base="default",
        four_epochs=0.33,  # 98M tokens of 75.0M
        seconds=80,
        device="cuda",
        compile=True,
    ),
    _PAPER,
    dataclasses.replace(
        _PAPER,
        name="paper-1b",
        title="the paper's 1B (Section 7.4), the shape of the config that the authors' scripts use. The text gives no "
        "recipe: 60M's, with the 40k steps of their config",
        model=LMConfig(50_432, 2048, 22, 16, 2048, 5632),
        train=dataclasses.replace(_PAPER.train, steps=40_000, micro_batch=4),
        base="softmax_1b",
        seconds=2_000_000,
        parallel="fsdp",
    ),
)
PRESETS = {scale.name: scale for scale in _ALL}


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists them."""
    choice("preset", name, list(PRESETS))
    return PRESETS[name]
