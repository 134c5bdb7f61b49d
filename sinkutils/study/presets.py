"""The scales of the study: the same experiments on another model, text and budget (Section 4 gives the paper's)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sinkutils.data.packing import DataConfig
from sinkutils.model.config import LMConfig
from sinkutils.study.config import TrainConfig


@dataclass(frozen=True)
class Tuning:
    """The size of a fine-tuning (Appendix D)."""

    instructions: str  # one of `instructions.instruction_names`
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


# 60M without embeddings; the batch is 1M tokens. lr_floor 0.1 is the cosine of the text (see default_constant_lr).
_PAPER_TRAIN = TrainConfig(
    steps=20_000, batch_size=512, learning_rate=4e-4, warmup_steps=100, precision="bf16", eval_every=250, micro_batch=16
)
_PAPER_TUNING = Tuning("ultrachat", 200_000, eval_every=250)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "smoke",
            "seconds a run: tests, CI and live demonstrations",
            LMConfig(
                vocab_size=512, context_length=64, num_layers=2, num_heads=2, hidden_size=32, intermediate_size=64
            ),
            DataConfig("docstrings"),
            TrainConfig(
                steps=500,
                batch_size=16,
                learning_rate=3e-2,  # so that a K bias has its sink within the run
                warmup_steps=20,
                eval_every=50,
                eval_sequences=8,
                valid_chunks=8,
            ),
            Tuning("docstrings", 160, 8, 10),
            base="fixed_1",
            four_epochs=0.03,  # about one pass, so that a hundredth is still a few chunks
            seconds=10,
        ),
        Preset(
            "laptop",
            "minutes a run on one core; the base is a fixed first token, as a BOS is (Table 10 right)",
            LMConfig(
                vocab_size=1024, context_length=64, num_layers=4, num_heads=4, hidden_size=64, intermediate_size=128
            ),
            DataConfig("docstrings"),
            TrainConfig(
                steps=12_000, batch_size=32, learning_rate=6e-3, warmup_steps=100, precision="bf16", eval_every=300
            ),
            Tuning("docstrings", 20_000),  # a tenth of the paper's
            base="fixed_1",
            four_epochs=0.474,  # a quarter of the 24.6M tokens that the run sees, of 13.0M
            seconds=400,
            compile=True,
            keeps_weights=True,
        ),
        Preset(
            "gpu",
            "one data-centre GPU, about a minute a run; the base is the paper's default",
            LMConfig(
                vocab_size=4096, context_length=512, num_layers=8, num_heads=8, hidden_size=512, intermediate_size=1024
            ),
            DataConfig("embedded"),
            TrainConfig(
                steps=1500, batch_size=128, learning_rate=1e-3, warmup_steps=100, precision="bf16", eval_every=50
            ),
            Tuning("docstrings", 60_000),
            base="default",
            four_epochs=0.33,  # 98M tokens of 75.0M
            seconds=80,
            device="cuda",
            compile=True,
        ),
        Preset(
            "paper",
            "the paper's 60M: C 2048, 1M tokens a step, 20k steps on the Pile (Section 4)",
            LMConfig(
                vocab_size=50_432,
                context_length=2048,
                num_layers=10,
                num_heads=8,
                hidden_size=768,
                intermediate_size=1536,
            ),
            DataConfig("pile", validation="pile:Pile-CC"),
            _PAPER_TRAIN,
            _PAPER_TUNING,
            base="default",
            four_epochs=1.0,
            seconds=80_000,  # a GPU at 160 TFLOP/s
            device="cuda",
            compile=True,
        ),
        Preset(
            "paper-1b",
            "the paper's 1B (Section 7.4), the shape of the config that the authors' scripts use. The text gives no "
            "recipe: 60M's, with the 40k steps of their config",
            LMConfig(
                vocab_size=50_432,
                context_length=2048,
                num_layers=22,
                num_heads=16,
                hidden_size=2048,
                intermediate_size=5632,
            ),
            DataConfig("pile", validation="pile:Pile-CC"),
            dataclasses.replace(_PAPER_TRAIN, steps=40_000, micro_batch=4),
            _PAPER_TUNING,
            base="softmax_1b",
            four_epochs=1.0,
            seconds=2_000_000,
            device="cuda",
            compile=True,
            parallel="fsdp",
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists them."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
