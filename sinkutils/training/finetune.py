"""Supervised fine-tuning of the pre-trained softmax and sigmoid models (Appendix D, Figure 30), as runs of `training`.

What the appendix gives: all weights, a rate of 2e-5 with a cosine schedule, batches of 64 sequences of C tokens, one
epoch of the 200k conversations of UltraChat. What it leaves open is as in the published recipe of the platform that it
names, for that data set: warm-up over a tenth of the steps, a cosine to zero, AdamW with betas 0.9 and 0.999 and
without weight decay, gradients clipped at 1. Two things differ: only the answers carry loss, where that recipe trains
on the questions too, and a conversation that is longer than C is cut, a shorter one padded.

How it scales: the rate stays a twentieth of pre-training's, the batch is as printed, the data set is smaller. A model
that was trained with a fixed first token keeps it as x_1, before the conversation.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sinkutils.data.corpus import Corpus
from sinkutils.data.instructions import IGNORED, Layout, Pairs, conversations, make_pairs
from sinkutils.data.tokenizer import open_tokenizer, special_ids
from sinkutils.measuring.report import Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import RunConfig
from sinkutils.study.grid import config
from sinkutils.study.presets import preset as known_preset
from sinkutils.study.record import Record, config_hash, find_record, record_folder
from sinkutils.training.group import ALONE, Group
from sinkutils.training.trainer import CrossEntropy, Run, finished, train

RATE = 2e-5 / 4e-4  # fine-tuning over pre-training
WARMUP = 0.1  # of the steps


@dataclass(frozen=True)
class Scale:
    """The size of a fine-tuning at a preset."""

    instructions: str  # one of `instructions.instruction_names`
    pairs: int  # conversations, each seen once
    batch_size: int = 64
    eval_every: int = 24


SCALES = {
    "smoke": Scale("docstrings", 160, 8, 10),
    "laptop": Scale("docstrings", 20_000),  # a tenth of the paper's
    "gpu": Scale("docstrings", 60_000),
    "paper": Scale("ultrachat", 200_000, eval_every=250),
    "paper-1b": Scale("ultrachat", 200_000, eval_every=250),
}


@dataclass(frozen=True)
class Finetuning:
    """A fine-tuning of the study: which pre-trained model it starts from, and on what."""

    name: str
    title: str
    start: str  # an experiment; "base" is the preset's
    instructions: str | None = None  # None: the preset's
    section: str = "D"
    item: str = "Figure 30"


FINETUNINGS = {
    one.name: one
    for one in (
        Finetuning("sft_softmax", "the base model, softmax attention", "base"),
        Finetuning("sft_sigmoid", "sigmoid attention without normalisation", "sigmoid"),
        Finetuning("sft_softmax_ultrachat", "softmax attention, on UltraChat", "base", "ultrachat"),
        Finetuning("sft_sigmoid_ultrachat", "sigmoid attention, on UltraChat", "sigmoid", "ultrachat"),
    )
}


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Everything that determines a fine-tuning, apart from the text and the weights that it starts from."""

    start: str = "fixed_1"  # the experiment whose record of this preset and seed it starts from
    start_sha256: str = ""  # `config_hash` of that run
    instructions: str = "docstrings"
    pairs: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.fixed_position not in (None, 1):
            raise ValueError(
                f"a model with a fixed token at position {self.data.fixed_position} cannot be fine-tuned: it would "
                "overwrite a token of each question; start from one with position 1 or without"
            )
        if self.pairs < self.train.batch_size:
            raise ValueError(f"pairs must be at least the batch size {self.train.batch_size}, got {self.pairs}")


def finetune_config(name: str, preset: str = "laptop", seed: int = 0) -> FinetuneConfig:
    """The fine-tuning of that name at a preset. Raises ValueError, listing what there is, for unknown names."""
    if name not in FINETUNINGS:
        raise ValueError(f"fine-tuning must be one of {', '.join(FINETUNINGS)}; got {name!r}")
    one, scale = FINETUNINGS[name], SCALES[known_preset(preset).name]
    large = preset == "paper-1b" and one.start == "sigmoid"
    start = config("sigmoid_1b" if large else one.start, preset, seed)
    steps = scale.pairs // scale.batch_size
    settings = dataclasses.replace(
        start.train, steps=steps, batch_size=scale.batch_size, learning_rate=RATE * start.train.learning_rate,
        warmup_steps=int(WARMUP * steps), lr_floor=0.0, weight_decay=0.0, beta2=0.999, eval_every=scale.eval_every,
    )  # fmt: skip
    return FinetuneConfig(
        name, preset, seed, start.model, start.data, settings, start=start.experiment, start_sha256=config_hash(start),
        instructions=one.instructions or scale.instructions, pairs=scale.pairs,
    )  # fmt: skip


def planned(name: str, preset: str = "laptop", seed: int = 0) -> RunConfig:
    """The run of a name that a record can have: of an experiment, or of a fine-tuning. Raises ValueError for others."""
    return finetune_config(name, preset, seed) if name in FINETUNINGS else config(name, preset, seed)


def answer_loss(model: Any, chunks: Tensor, prefix: int = 1, given: int | None = None) -> Tensor:
    """Mean cross-entropy of the answers' tokens in nats; chunks: (B, 2, C + 1), tokens and targets.

    prefix and given are what `Run` hands to a loss: no answer starts within them. Of several micro batches of a step
    the means count alike.
    """
    targets = chunks[:, 1, 1:]
    kept = targets != IGNORED
    return CrossEntropy.apply(model.unembed(model.hidden(chunks[:, 0, :-1])[kept]), targets[kept])


class FinetuneRun(Run):
    """A run from the weights and with the tokenizer of a record, on conversations.

    The first point of its curve is the start, step 0. The others hold, beside what those of pre-training hold, the loss
    and the gradient norm (before clipping) of every step since the last.
    """

    config: FinetuneConfig
    loss = staticmethod(answer_loss)

    def __init__(
        self,
        config: FinetuneConfig,
        corpus: Corpus,
        device: torch.device,
        group: Group = ALONE,
        *,
        start: Record,
        progress: bool = True,
    ) -> None:
        self.start, self.progress = start, progress
        self.passed: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of each step since the last evaluation
        super().__init__(config, corpus, device, group)
        self.curve = [self.evaluate()[0]]

    def first_model(self) -> TransformerLM:
        """The model of the record it starts from; its tokenizer too, which need not be the corpus's."""
        path = self.start.folder / "model.safetensors"
        tokenizer = open_tokenizer(self.start.folder / "tokenizer.json")
        if tokenizer.to_str() != self.corpus.tokenizer.to_str():  # the same object tells `probe` that ids can be shared
            self.tokenizer = tokenizer
        model = TransformerLM(self.config.model)
        model.load_state_dict(load_file(path))
        self.weights_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return model

    def batches(self) -> tuple[Pairs, Pairs]:
        """The conversations after the first few, and these, which are held out."""
        special = special_ids(self.tokenizer, self.start.folder.name)
        first = (special["fix_id"],) if self.config.data.fixed_position else ()
        layout = Layout(self.tokenizer, first, special["eos_id"], self.config.model.context_length)
        counts = (self.config.train.valid_chunks, self.config.pairs)
        name = self.config.instructions
        held_out, pairs = make_pairs(conversations(name, self.progress), layout, counts, name, self.progress)
        self.pairs_sha256 = pairs.fingerprint
        digests = self.corpus.fingerprint + self.pairs_sha256 + held_out.fingerprint + self.weights_sha256
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()
        return pairs, held_out

    def provenance(self) -> dict[str, Any]:
        """What pre-training's says, with the conversations and the weights."""
        more = {"pairs_sha256": self.pairs_sha256, "start_weights_sha256": self.weights_sha256}
        return super().provenance() | more

    def advance(self, forward: Any) -> Tensor:
        """One optimiser step, of which the loss and the gradient norm are kept."""
        loss = super().advance(forward)
        self.passed.append((loss, self.gradient_norm))
        return loss

    def evaluate(self) -> tuple[dict[str, Any], Report | None]:
        """The validation loss, the sink metric, and what was kept of the steps since the last evaluation."""
        point, report = super().evaluate()
        losses, norms = ([float(step[index]) for step in self.passed] for index in (0, 1))
        self.passed.clear()
        return {**point, "losses": losses, "gradient_norms": norms}, report

    def valid_loss(self) -> float:
        """The mean over the tokens of the held-out answers."""
        parts = self.valid.split(32)
        counts = [int((part[:, 1, 1:] != IGNORED).sum()) for part in parts]
        losses = [float(self.loss(self.model, part)) * count for part, count in zip(parts, counts, strict=True)]
        return sum(losses) / sum(counts)


def start_record(run: FinetuneConfig, runs: Path | str | None = None) -> Record:
    """The record that a fine-tuning starts from, with weights. Raises ValueError that says how to make it."""
    advice = f"python -m sinkutils train {run.start} --preset {run.preset} --seed {run.seed} --keep-weights"
    found = find_record(record_folder(run.preset, run.start, run.seed, runs), config(run.start, run.preset, run.seed))
    where = f"{run.experiment} starts from the weights of {run.preset}/{run.start}/{run.seed}"
    if found is None:
        raise ValueError(f"{where}, which is not recorded: {advice}")
    if found.status != "done":
        raise ValueError(f"{where}, and that run failed to train ({found.metrics['reason']})")
    if found.weights is None:
        raise ValueError(f"{where}, whose record was written without them: {advice}")
    return found


def finetune(
    run: FinetuneConfig,
    runs: Path | str | None = None,
    *,
    device: str | torch.device | None = None,
    corpus: Corpus | str | None = None,
    keep_weights: bool = False,
    progress: bool = True,
) -> Record:
    """Fine-tune to the end and write the record; see `training.train`, which does it.

    run: of `finetune_config`; for instructions of one's own, that with other `instructions` (a hub id, a .jsonl file)
    and another `experiment`, under which the record then stands. corpus: where the text of the sink metric comes from,
    in place of the one that the start was trained on.
    """
    if corpus is None:
        done = finished(record_folder(run.preset, run.experiment, run.seed, runs), run, keep_weights)
        if done is not None:
            return done
    make = partial(FinetuneRun, start=start_record(run, runs), progress=progress)
    return train(run, runs, device=device, corpus=corpus, keep_weights=keep_weights, progress=progress, make=make)


def history(metrics: Mapping[str, Any]) -> list[dict[str, float]]:
    """Every step of a fine-tuning's metrics.json: step, train_loss, gradient_norm (Figure 30); none of pre-training."""
    points = [point for point in metrics["curve"] if "gradient_norms" in point]
    steps = [pair for point in points for pair in zip(point["losses"], point["gradient_norms"], strict=True)]
    return [
        {"step": step, "train_loss": loss, "gradient_norm": norm} for step, (loss, norm) in enumerate(steps, start=1)
    ]
