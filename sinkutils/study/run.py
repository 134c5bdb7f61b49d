"""The state of one pre-training run between two optimiser steps.

Each use of random numbers has a generator of its own. That of the weights depends on the seed, that
of the order of the chunks on the seed and the epoch, and that of the evaluation is always the same.
So two runs with one seed differ only in what their configs say.
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
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import probe
from sinkutils.measuring.report import NotFinite, Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import Json, RunConfig, TrainConfig, learning_rate
from sinkutils.study.corpus import Corpus, load_corpus, public_name
from sinkutils.study.graph import GraphedStep
from sinkutils.study.packing import CPU, Batches, Chunks, fix_position
from sinkutils.study.record import rounded

# The batches of this many steps are copied to the device at once, which saves copies to a GPU.
AHEAD = 16
# A GPU holds the whole text of its run if it is smaller than this number of bytes. Every text of
# the study is, except for the Pile.
ON_DEVICE = 2**30
EVALUATION_SEED = 0
# Which positions k are measured, and what is kept of them: the last report has Sink_k for k = 1 to
# SINK_TARGETS (the longest prefix in the paper is 10) at each of EPSILONS. Each point of the curve
# has Sink_k for k in CURVE_TARGETS, and alpha_k of every head for k = 1 to ALPHA_TARGETS.
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)
SINK_TARGETS = 10
CURVE_TARGETS = (1, 2, 3, 4)
ALPHA_TARGETS = 3
NORM_DIGITS = 3  # the number of significant digits of norms in a record


class CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits (N, V) and targets (N,) in nats.

    The forward pass keeps the logits, in their own precision, and their log-sum-exp (lse). From
    these the backward pass computes the gradient in one pass over the logits. Compiled on a CPU, a
    small model's step takes a fifth less time than with F.cross_entropy, or with a gradient that is
    computed in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        lse = torch.logsumexp(logits.float(), dim=-1)  # (N,)
        ctx.save_for_backward(logits, targets, lse)
        target_logits = logits.gather(-1, targets[:, None])  # (N, 1)
        losses = lse - target_logits[:, 0].float()
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets, lse = ctx.saved_tensors
        N, V = logits.shape
        softmax = (logits.float() - lse[:, None]).exp()
        # int32, because comparing int64 numbers takes twice the time of the exponential
        tokens = torch.arange(V, dtype=torch.int32, device=logits.device)
        onehot = tokens == targets.int()[:, None]  # (N, V)
        gradient = (softmax - onehot.float()) * (grad_output / N)
        return gradient.to(logits.dtype), None  # the targets have no gradient


def next_token_loss(
    model: torch.nn.Module, chunks: Tensor, unscored: tuple[int, ...] = ()
) -> Tensor:
    """The mean next-token cross-entropy of chunks (B, C + 1), in nats.

    The model sees the tokens at the 1-based positions `unscored`, but the predictions that it makes
    there do not count.
    """
    logits = model(chunks[:, :-1])  # (B, C, V)
    targets = chunks[:, 1:]
    logits = without(logits, unscored).flatten(0, 1)
    targets = without(targets, unscored).flatten()
    return CrossEntropy.apply(logits, targets)


def without(x: Tensor, positions: tuple[int, ...]) -> Tensor:
    """x (B, T, ..) without these 1-based positions, which must be sorted."""
    if not positions:
        return x
    # Slices are used, because a list of indices would be copied from the host, and a CUDA graph
    # cannot contain such a copy.
    parts = []
    start = 0
    for position in positions:
        parts.append(x[:, start : position - 1])
        start = position
    return torch.cat([*parts, x[:, start:]], dim=1)


def instruction_set() -> list[str]:
    """The vector instructions that the CPU has. Where they differ, the last digits may differ."""
    has = torch.cpu.get_capabilities()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if has.get(name)]


def usable_precision(precision: str, device: torch.device) -> str:
    """bf16 if the config wants it and the device has instructions for it, and fp32 otherwise."""
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
    """The optimisers for a config. There is one, except that muon needs AdamW for the rest."""
    rate = train.learning_rate
    decay = train.weight_decay
    if train.optimizer == "sgd":
        return [SGD(named.values(), rate, momentum=train.beta1, weight_decay=decay)]
    # Muon is for the linear maps. Embeddings and gains are none, nor are biases, which are matrices
    # only because they have a row for each head. Muon updates q, k and v as the single matrix that
    # they are here, and gate and up as well; other implementations split them first.
    linear = list[nn.Parameter]()
    others = list[nn.Parameter]()
    for name, parameter in named.items():
        in_block = name.startswith("blocks.") and name.endswith(".weight")
        maps = train.optimizer == "muon" and in_block and parameter.ndim == 2
        (linear if maps else others).append(parameter)
    # AdamW gets the parameters that Muon does not take, or all of them.
    betas = (train.beta1, train.beta2)
    adamw = AdamW(others, rate, betas, train.adam_eps, weight_decay=decay, fused=True)
    if not linear:
        return [adamw]
    from torch.optim import Muon  # since torch 2.9

    # With match_rms_adamw an update has the size of AdamW's, so that both optimisers can share one
    # learning rate and one weight decay.
    return [Muon(linear, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """Set the learning rate of the next step. For a CUDA graph it is written into a tensor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class Run:
    """The state of one run between two optimiser steps. `trainer.train` makes the steps.

    `FinetuneRun` sets other values of the first four attributes.
    """

    loss = staticmethod(next_token_loss)
    weight: Callable = staticmethod(len)  # the weight of a part of the validation text in its loss
    each_step = False  # whether the curve has the loss and the gradient norm of every step
    fixed_shapes = True  # whether all steps have the same shapes, as a CUDA graph needs
    # The attributes that a checkpoint holds beside the state of the model and the optimisers.
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
        """The state of a run before its first step.

        model: the model to start from. None means a new one, whose weights the seed determines.
        tokenizer: None means that of the corpus.
        batches: those for training and those for validation. None means chunks of the corpus.
        """
        # `torch.__version__` is compared as a version, not as a string.
        require(torch.__version__ >= "2.11", "training needs torch 2.11 or later")
        self.config = config
        self.corpus = corpus
        self.device = device
        self.tokenizer = tokenizer or corpus.tokenizer
        self.fingerprint = corpus.fingerprint
        self.more: Json = {}  # further entries of the record's provenance
        # The model, its loss and its optimisers.
        train = config.train
        self.precision = usable_precision(train.precision, device)
        model = model or TransformerLM(config.model, config.seed)
        self.model = model.to(device)
        # The loss as `update` calls it. `train` may replace it by its compiled form; evaluations
        # call `loss`, which is never compiled.
        self.forward: Callable[..., Tensor] = self.loss
        self.optimizers = make_optimizers(dict(self.model.named_parameters()), train)
        self.chunks, valid = batches or self.chunks_of_text()
        # The chunks of up to AHEAD steps, on the device (see `batch`).
        self.ahead: Tensor | None = None
        # The step as a CUDA graph, if `train` uses one.
        self.graph: GraphedStep | None = None
        # The evaluation uses a few chunks for the loss, and texts for the sink metric.
        first = np.arange(min(train.valid_chunks, len(valid)))
        self.valid = valid.take(first).to(device)
        count = train.eval_sequences
        length = train.eval_length
        ids = probe("natural", self.tokenizer, count, length, EVALUATION_SEED, corpus=corpus)
        # A fixed token is put into these texts as well, as in the authors' evaluation.
        ids = fix_position(ids, config.data.fixed_position, corpus.fix_id)
        self.probe = ids.to(device)
        # The progress of the run (`PROGRESS`), which a checkpoint holds.
        self.step = 0
        self.seconds = 0.0
        self.curve: list[Json] = []
        # alpha at each point of the curve: (targets, L, H), float16; * is the last target if any.
        self.alphas: list[Tensor] = []
        # The conditions of the training. There are several if the run moved to another machine.
        self.parts: list[Json] = []
        # The loss, and the gradient norm before clipping, of each step since the last evaluation.
        self.passed: list[tuple[Tensor, Tensor]] = []

    def chunks_of_text(self) -> tuple[Batches, Batches]:
        """The chunks for training and those for validation of a pre-training."""
        config = self.config
        length = config.model.context_length
        # Random tokens cannot be predicted, so the validation text keeps its tokens (Section 5).
        unchanged = dataclasses.replace(config.data, random_positions=(), random_place=False)
        size = self.corpus.tokens("train").nbytes
        device = self.device if size < ON_DEVICE else CPU
        train = Chunks(self.corpus, "train", length, config.data, config.seed, device)
        valid = Chunks(self.validation_corpus(), "valid", length, unchanged)
        return train, valid

    def validation_corpus(self) -> Corpus:
        """The corpus to validate on, with the tokenizer of the run.

        It is the one that the config names for validation, if the run is trained on the config's
        own corpus. Otherwise it is the corpus of the run.
        """
        data = self.config.data
        if data.validation is None or self.corpus.name != public_name(data.corpus):
            return self.corpus
        vocab_size = self.config.model.vocab_size
        tokenizer = str(self.corpus.folder / "tokenizer.json")
        return load_corpus(data.validation, vocab_size, tokenizer=tokenizer)

    def provenance(self) -> Json:
        """The device and other conditions of the training, its speed, and the size of its text."""
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
        """Autocast to bf16, if `precision` is bf16. Weights and optimiser stay in fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def batch(self) -> Tensor:
        """The chunks of this step, on the device.

        They are a slice of the chunks of `AHEAD` steps, which are copied there at once.
        """
        size = self.config.train.batch_size
        copies, index = divmod(self.step, AHEAD)
        if self.ahead is None or index == 0:
            rows = self.chunks.batch(copies, AHEAD * size, self.config.seed)
            self.ahead = rows.to(self.device)
        start = index * size
        return self.ahead[start : start + size]

    def advance(self) -> Tensor:
        """Make one optimiser step on the next batch. Returns the loss of the batch."""
        batch = self.batch()
        set_rate(self.optimizers, learning_rate(self.config.train, self.step))
        update = self.graph or self.update
        total, norm = update(batch)
        self.step += 1
        self.passed.append((total, norm))
        return total

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights on one batch.

        Returns the loss of the batch, and the norm of its gradient before clipping.
        """
        config = self.config.train
        parts = batch.split(config.micro_batch or config.batch_size)  # micro-batches
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self.autocast():
                loss = self.forward(self.model, part, self.unscored)
            loss = loss / len(parts)  # the gradients then add up to that of the batch's mean loss
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
        """Add a point to the curve, with validation loss and sink metric, and return the report.

        losses: the losses of the steps since the last evaluation. Returns None, and adds no point,
        if the model computes numbers that are not finite.
        """
        with self.autocast():
            valid_loss = self.valid_loss()
        if not math.isfinite(valid_loss):
            return None
        targets = min(SINK_TARGETS, self.config.train.eval_length)
        positions = range(1, targets + 1)
        try:
            report = measure(self.model, self.probe, targets=positions, epsilons=EPSILONS)
        except NotFinite:  # this may happen even though the loss is still finite
            return None
        # The point of the curve, as metrics.json will hold it.
        point = {"step": self.step, "valid_loss": valid_loss, **sinks(report)}
        if losses:
            point["train_loss"] = sum(losses) / len(losses)
        if self.each_step:  # Figure 30
            point["losses"] = losses
            point["gradient_norms"] = [float(norm) for _, norm in self.passed]
        self.curve.append(point)
        # alpha of every head, from which the ledger computes further quantities.
        alpha = report.alpha[:, :ALPHA_TARGETS].mean(dim=0)  # over texts: (targets, L, H)
        if report.star is not None:
            star = report.star.mean(dim=0)  # (L, H)
            alpha = torch.cat([alpha, star[None]])
        self.alphas.append(alpha.half())
        self.passed.clear()
        return report

    def valid_loss(self) -> float:
        """The mean loss of the validation text, whose parts are weighted by `weight`."""
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

        They are the positions inside a prefix (Section 6), the one before a fixed token
        (Section 5), and those that the config names.
        """
        # The tokens of a prefix see each other. So all but the last already see the next token.
        data = self.config.data
        prefix = self.config.model.attention.prefix
        positions = {*range(1, prefix), *data.unscored}
        fixed = data.fixed_position or 1
        if fixed > 1:
            positions.add(fixed - 1)  # the prediction here would be the fixed token
        return tuple(sorted(positions))

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.context_length


def sinks(report: Report) -> Json:
    """The sinks of a point of the curve: Sink_k in percent, excess, and numbers of x_1 by block.

    The numbers of x_1 are its largest element and its value's norm, as ratios (Section 3.1).
    """
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
