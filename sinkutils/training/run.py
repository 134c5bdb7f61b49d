"""The state of one pre-training run between two optimiser steps.

Weights (seed), order of the chunks (seed and step) and evaluation (fixed) have generators of their
own, so that two runs with one seed differ in nothing but what their configs say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from sinkutils.checks import require
from sinkutils.data.corpus import Corpus, load_corpus, public_name
from sinkutils.data.packing import CPU, Batches, Chunks, fix_position
from sinkutils.data.probes import probe
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import NotFinite, Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import Json, RunConfig, TrainConfig, learning_rate
from sinkutils.study.record import rounded
from sinkutils.training.graph import GraphedStep

AHEAD = 16  # steps whose batches go to the device together
ON_DEVICE = 2**30  # bytes of a text that a GPU holds for its run: any of the study's but the Pile
EVALUATION_SEED = 0
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the last report; the curve keeps alpha itself
SINK_TARGETS = 10  # the paper looks at positions up to the longest prefix
CURVE_TARGETS = (1, 2, 3, 4)  # Sink_k along the curve
ALPHA_TARGETS = 3  # alpha itself along the curve: the first so many
NORM_DIGITS = 3  # significant ones, of norms


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (N, V) and targets (N,) in nats.

    For the backward pass it keeps the logits, in their precision, and lse.

    The gradient is one pass over the logits: compiled on a CPU, a step of a small model takes a
    fifth less time than with F.cross_entropy or a gradient made in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        lse = torch.logsumexp(logits.float(), dim=-1)  # (N,)
        ctx.save_for_backward(logits, targets, lse)
        of_targets = logits.gather(-1, targets[:, None])  # (N, 1)
        losses = lse - of_targets[:, 0].float()
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets, lse = ctx.saved_tensors
        N, V = logits.shape
        softmax = (logits.float() - lse[:, None]).exp()
        # int32, as comparing int64 takes twice the time of the exponential
        tokens = torch.arange(V, dtype=torch.int32, device=logits.device)
        onehot = tokens == targets.int()[:, None]  # (N, V)
        gradient = (softmax - onehot.float()) * (grad_output / N)
        return gradient.to(logits.dtype), None  # none of the targets


def next_token_loss(
    model: torch.nn.Module, chunks: Tensor, unscored: tuple[int, ...] = ()
) -> Tensor:
    """Mean cross-entropy of chunks (B, C + 1) in nats.

    The predictions made at the 1-based positions `unscored` are left out, yet the model sees them.
    """
    logits = model(chunks[:, :-1])  # (B, C, V)
    targets = chunks[:, 1:]
    logits = without(logits, unscored).flatten(0, 1)
    targets = without(targets, unscored).flatten()
    return CrossEntropy.apply(logits, targets)


def without(x: Tensor, positions: tuple[int, ...]) -> Tensor:
    """x (B, T, ..) without the 1-based positions, which are sorted."""
    if not positions:
        return x
    # Slices, as a list of indices would be copied from the host, which no CUDA graph can hold.
    parts = []
    start = 0
    for position in positions:
        parts.append(x[:, start : position - 1])
        start = position
    return torch.cat([*parts, x[:, start:]], dim=1)


def instruction_set() -> list[str]:
    """What decides the roundings of a CPU's products: where it differs, last digits do."""
    has = torch.cpu.get_capabilities()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if has.get(name)]


def usable_precision(precision: str, device: torch.device) -> str:
    """bf16 where the config asks for it and the device has instructions for it, else fp32."""
    if precision != "bf16":
        return "fp32"
    able = False
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        has = instruction_set()
        able = "avx512_bf16" in has or "amx_bf16" in has
    return "bf16" if able else "fp32"


def make_optimizers(named: dict[str, nn.Parameter], train: TrainConfig) -> list[Optimizer]:
    """The optimisers that a config names: one, but for muon, which needs AdamW for the rest."""
    rate = train.learning_rate
    decay = train.weight_decay
    if train.optimizer == "sgd":
        return [SGD(named.values(), rate, momentum=train.beta1, weight_decay=decay)]
    # Muon is for linear maps: not embeddings, gains, or biases that are matrices only by their
    # heads. It takes q, k and v as the one matrix that they are here, and gate and up likewise;
    # others cut them first.
    linear = list[nn.Parameter]()
    others = list[nn.Parameter]()
    for name, parameter in named.items():
        in_block = name.startswith("blocks.") and name.endswith(".weight")
        maps = train.optimizer == "muon" and in_block and parameter.ndim == 2
        (linear if maps else others).append(parameter)
    # All parameters, or those that Muon leaves.
    betas = (train.beta1, train.beta2)
    adamw = AdamW(others, rate, betas, train.adam_eps, weight_decay=decay, fused=True)
    if not linear:
        return [adamw]
    from torch.optim import Muon  # of torch 2.9 and later

    # match_rms_adamw: an update has the size of AdamW's, so that one rate and one decay serve both.
    return [Muon(linear, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """The learning rate of the next step; of a CUDA graph into the tensor that it reads."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class Run:
    """The state of one run between two optimiser steps; `train` drives it."""

    loss = staticmethod(next_token_loss)
    weight: Callable = staticmethod(len)  # of a part of the validation text: its chunks
    each_step = False  # whether the curve has the loss and gradient norm of every step
    fixed_shapes = True  # of all tensors of a step, so that a graph can hold it
    # What a checkpoint holds beside the model's state.
    PROGRESS = ("step", "seconds", "curve", "alphas", "parts")

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        device: torch.device,
        *,
        model: TransformerLM | None = None,
        tokenizer: Tokenizer | None = None,
        batches: tuple[Batches, Batches] | None = None,
    ) -> None:
        """model: to start from; None: one with fresh weights. tokenizer: None: that of the corpus.
        batches: to train on, and to validate on; None: chunks of the corpus.
        """
        # `torch.__version__` compares as a version and not as letters.
        require(torch.__version__ >= "2.11", "training needs torch 2.11 or later")
        self.config = config
        self.corpus = corpus
        self.device = device
        self.tokenizer = tokenizer or corpus.tokenizer
        self.fingerprint = corpus.fingerprint
        self.more: Json = {}  # that the record's provenance says
        # The model and what trains it.
        train = config.train
        self.precision = usable_precision(train.precision, device)
        model = model or TransformerLM(config.model, config.seed)
        self.model = model.to(device)
        self.forward: Callable[..., Tensor] = self.loss  # of a step; `train` may compile it
        self.optimizers = make_optimizers(dict(self.model.named_parameters()), train)
        self.chunks, valid = batches or self.chunks_of_text()
        # The batches of this step and the next ones, on the device.
        self.ahead: Tensor | None = None
        # How a step is made on a GPU, if not one kernel at a time.
        self.graph: GraphedStep | None = None
        # What it is measured on: a few chunks for the loss, texts for the sink metric.
        first = np.arange(min(train.valid_chunks, len(valid)))
        self.valid = valid.take(first).to(device)
        count = train.eval_sequences
        length = train.eval_length
        ids = probe("natural", self.tokenizer, count, length, EVALUATION_SEED, corpus=corpus)
        # A fixed token is also fixed here, as the authors' evaluation does.
        ids = fix_position(ids, config.data.fixed_position, corpus.fix_id)
        self.probe = ids.to(device)
        # How far it is, which a checkpoint holds.
        self.step = 0
        self.seconds = 0.0
        self.curve: list[Json] = []
        # For each point of the curve: (targets, and * if any, L, H), float16.
        self.alphas: list[Tensor] = []
        # On what it was trained: more than one where it moved to another machine.
        self.parts: list[Json] = []
        # Of each step since the last evaluation: loss, and gradient norm before clipping.
        self.passed: list[tuple[Tensor, Tensor]] = []

    def chunks_of_text(self) -> tuple[Batches, Batches]:
        """What a pre-training trains on, and what it is validated on."""
        config = self.config
        length = config.model.context_length
        # Random tokens cannot be predicted, so the validation text keeps its own (Section 5).
        unchanged = dataclasses.replace(config.data, random_positions=(), random_place=False)
        size = self.corpus.tokens("train").nbytes
        device = self.device if size < ON_DEVICE else CPU
        train = Chunks(self.corpus, "train", length, config.data, config.seed, device)
        valid = Chunks(self.validation_corpus(), "valid", length, unchanged)
        return train, valid

    def validation_corpus(self) -> Corpus:
        """The text to validate on, in the run's tokens: its own, or where it is the config's, that
        which the config names.
        """
        data = self.config.data
        if data.validation is None or self.corpus.name != public_name(data.corpus):
            return self.corpus
        vocab_size = self.config.model.vocab_size
        tokenizer = str(self.corpus.folder / "tokenizer.json")
        return load_corpus(data.validation, vocab_size, tokenizer=tokenizer)

    def provenance(self) -> Json:
        """On what the run was trained, how fast, and how large its text is."""
        tokens = self.step * self.tokens_per_step
        provenance = {
            **self.parts[-1],
            "corpus_train_tokens": len(self.chunks.tokens),
            "wall_seconds": round(self.seconds, 1),
            "tokens_per_second": round(tokens / self.seconds),
            **self.more,
        }
        if len(self.parts) > 1:
            provenance["began_on"] = self.parts[:-1]
        return provenance

    def autocast(self) -> torch.autocast:
        """bf16 where it is used, as `precision` says; weights and optimiser stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def batch(self) -> Tensor:
        """The chunks of this step, on the device; those of `AHEAD` steps come there in one copy."""
        size = self.config.train.batch_size
        copies, index = divmod(self.step, AHEAD)
        if self.ahead is None or index == 0:
            rows = self.chunks.batch(copies, AHEAD * size, self.config.seed)
            self.ahead = rows.to(self.device)
        start = index * size
        return self.ahead[start : start + size]

    def advance(self) -> Tensor:
        """One optimiser step; returns the loss of its batch."""
        batch = self.batch()
        set_rate(self.optimizers, learning_rate(self.config.train, self.step))
        update = self.graph or self.update
        total, norm = update(batch)
        self.step += 1
        self.passed.append((total, norm))
        return total

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The weights after one batch: its loss, and the norm of the gradient before clipping."""
        config = self.config.train
        parts = batch.split(config.micro_batch or config.batch_size)  # micro-batches
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self.autocast():
                loss = self.forward(self.model, part, self.unscored)
            loss = loss / len(parts)  # so that gradients add up to those of the batch's mean
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, norm

    def losses(self) -> list[float]:
        """The loss of each step since the last evaluation."""
        return torch.stack([loss for loss, _ in self.passed]).tolist()

    @torch.no_grad()
    def evaluate(self, losses: list[float]) -> Report | None:
        """Add validation loss and sink metric at this step to the curve; returns the report.

        losses: of each step since the last evaluation. A model that is not finite has no report.
        """
        with self.autocast():
            valid_loss = self.valid_loss()
        if not math.isfinite(valid_loss):
            return None
        targets = min(SINK_TARGETS, self.config.train.eval_length)
        positions = range(1, targets + 1)
        try:
            report = measure(self.model, self.probe, targets=positions, epsilons=EPSILONS)
        except NotFinite:  # also of a model whose loss is finite still
            return None
        # What a reader of the curve sees.
        point = {"step": self.step, "valid_loss": valid_loss, **sinks(report)}
        if losses:
            point["train_loss"] = sum(losses) / len(losses)
        if self.each_step:  # Figure 30
            point["losses"] = losses
            point["gradient_norms"] = [float(norm) for _, norm in self.passed]
        self.curve.append(point)
        # And alpha of every head, from which the ledger works out the rest.
        alpha = report.alpha[:, :ALPHA_TARGETS].mean(dim=0)  # over texts: (targets, L, H)
        if report.star is not None:
            star = report.star.mean(dim=0)  # (L, H)
            alpha = torch.cat([alpha, star[None]])
        self.alphas.append(alpha.half())
        self.passed.clear()
        return report

    def valid_loss(self) -> float:
        """The mean loss of the validation text, of which each part counts by its `weight`."""
        total = 0.0
        weights = 0
        for part in self.valid.split(32):
            loss = self.loss(self.model, part, self.unscored)
            weight = self.weight(part)
            total += float(loss) * weight
            weights += weight
        return total / weights

    @property
    def unscored(self) -> tuple[int, ...]:
        """The positions whose prediction carries no loss.

        They are inside a prefix (Section 6), before a fixed token (Section 5), or in the config.
        """
        # A prefix's tokens see each other, so that all but the last see what they predict.
        data = self.config.data
        prefix = self.config.model.attention.prefix
        positions = {*range(1, prefix), *data.unscored}
        fixed = data.fixed_position or 1
        if fixed > 1:
            positions.add(fixed - 1)  # where the fixed token would be predicted
        return tuple(sorted(positions))

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.context_length


def sinks(report: Report) -> Json:
    """What a point of the curve says: Sink_k in percent, excess, x_1 by block (Section 3.1)."""
    numbers: Json = {}
    for k in CURVE_TARGETS:
        if k in report.targets:
            numbers[f"sink_{k}"] = report.sink(k)
    numbers["excess_1"] = report.excess(1)
    if report.star is not None:
        numbers["sink_star"] = report.sink_star()
        numbers["excess_star"] = report.excess("star")
    if report.length > 1:
        assert report.hidden_peaks is not None and report.value_norms is not None
        peaks = report.hidden_peaks[:, 0]  # (L,)
        others = report.value_norms[:, 1:].mean(dim=1)
        ratios = report.value_norms[:, 0] / others.clamp(min=1e-30)
        numbers["peak_1"] = rounded(peaks.tolist(), NORM_DIGITS)
        numbers["value_ratio_1"] = rounded(ratios.tolist(), NORM_DIGITS)
    return numbers
