"""One training run from one config: deterministic, resumable at any instant, recorded whether it converges or not.

Three generators never touch each other: the weights (seed), the order of the chunks (seed and step), and the
evaluation (fixed), so that two runs with one seed differ in nothing but what their configs say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm.auto import tqdm

from sinkutils.checks import device as find_device
from sinkutils.data.corpus import Corpus, load_corpus, public_name
from sinkutils.data.packing import Batches, Chunks, fix_position
from sinkutils.data.probes import probe
from sinkutils.measuring.destinations import destinations, line_breaks
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.model.fast import check_kernels
from sinkutils.study.config import RunConfig, TrainConfig, learning_rate
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import (
    CHECKPOINT_SECONDS,
    Record,
    find_record,
    partial_folder,
    record_folder,
    run_folder,
    run_lock,
    write_record,
)
from sinkutils.training.checkpoints import load_checkpoint, save_checkpoint
from sinkutils.training.group import ALONE, Group

EVALUATION_SEED = 0
EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the last report; the curve keeps alpha itself
SINK_TARGETS = tuple(range(1, 11))  # the paper looks at positions up to the longest prefix, 10


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (N, V) and targets (N,) in nats; keeps the logits, in their precision, and lse.

    The gradient, (softmax - onehot) / N, is one pass over the logits: compiled on a CPU, that makes a step of a
    small model a fifth faster than F.cross_entropy or a gradient made in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        lse = torch.logsumexp(logits.float(), dim=-1)
        ctx.save_for_backward(logits, targets, lse)
        return (lse - logits.gather(-1, targets[:, None])[:, 0].float()).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets, lse = ctx.saved_tensors
        softmax = (logits.float() - lse[:, None]).exp()
        onehot = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        return ((softmax - onehot.float()) * (grad_output / len(targets))).to(logits.dtype), None


def next_token_loss(model: torch.nn.Module, chunks: Tensor, prefix: int = 1, given: int | None = None) -> Tensor:
    """Mean cross-entropy of chunks (B, C + 1) in nats; the first prefix - 1 predictions carry none (Section 6).

    given: the 1-based position, beyond the prefix, of a fixed token (Section 5), whose prediction carries none either.
    """
    logits, targets = model(chunks[:, :-1])[:, prefix - 1 :], chunks[:, prefix:]
    if given is not None and given > prefix:
        before = given - prefix - 1
        logits, targets = (torch.cat([x[:, :before], x[:, before + 1 :]], dim=1) for x in (logits, targets))
    logits, targets = logits.flatten(0, 1), targets.flatten()
    return CrossEntropy.apply(logits, targets)


class MuonAndAdamW:
    """Muon for the matrices of the blocks, AdamW for all else, under the interface of one optimiser."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], train: TrainConfig) -> None:
        rate, decay = train.learning_rate, train.weight_decay
        # An update has the size of AdamW's, so that one rate and one decay serve both.
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, adamw(others, train))
        self.sizes = (len(matrices), len(others))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both by index: Muon's parameters come first."""
        muon, other = (part.state_dict()["state"] for part in self.parts)
        return {"state": muon | {index + self.sizes[0]: state for index, state in other.items()}}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            own = {i - start: state for i, state in values["state"].items() if start <= i < start + size}
            part.load_state_dict({**part.state_dict(), "state": own})
            start += size


def adamw(parameters: Iterable[Tensor], train: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.adam_eps,
                             weight_decay=train.weight_decay, fused=True)  # fmt: skip


def make_optimizer(model: torch.nn.Module, train: TrainConfig, group: Group = ALONE) -> Any:
    """The optimiser that a config names, over all parameters of a model.

    Raises ValueError for muon in a group of processes.
    """
    if train.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=train.learning_rate, momentum=train.beta1,
                               weight_decay=train.weight_decay)  # fmt: skip
    if train.optimizer == "muon":
        if group.size > 1:
            raise ValueError("optimizer='muon' runs in one process: leave out torchrun, or take adamw or sgd")
        # Muon is for linear maps: not embeddings, gains, or biases that are matrices only by their heads.
        chosen = {name for name, p in model.named_parameters()
                  if name.startswith("blocks.") and name.endswith(".weight") and p.ndim == 2}  # fmt: skip
        matrices = [p for name, p in model.named_parameters() if name in chosen]
        return MuonAndAdamW(matrices, [p for name, p in model.named_parameters() if name not in chosen], train)
    return adamw(model.parameters(), train)


class Run:
    """The state of one run between two optimiser steps; `train` drives it."""

    loss = staticmethod(next_token_loss)

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device, group: Group = ALONE) -> None:
        self.config, self.corpus, self.device, self.group = config, corpus, device, group
        self.tokenizer, self.fingerprint = corpus.tokenizer, corpus.fingerprint
        self.model = self.first_model().to(device)
        train = config.train
        self.trained = group.wrap(self.model, train.precision)  # the model itself, or what DDP puts around it
        self.optimizer = make_optimizer(self.model, train, group)
        self.chunks, valid = self.batches()
        self.valid = valid.take(np.arange(min(train.valid_chunks, len(valid)))).to(device)
        self.probe = probe_ids(config, corpus, self.tokenizer).to(device)
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self.alphas: list[Tensor] = []  # a point of the curve each: (targets, and * if any, L, H), float16
        self.gradient_norm = torch.zeros(())  # of the last step, before clipping
        self.seconds = 0.0

    def first_model(self) -> TransformerLM:
        """The model before the first step."""
        return TransformerLM(self.config.model, self.config.seed)

    def batches(self) -> tuple[Batches, Batches]:
        """What the run trains on, and what it is validated on."""
        config, length = self.config, self.config.model.context_length
        # Tokens redrawn at random cannot be predicted, so the validation text keeps its own (Section 5).
        kept = dataclasses.replace(config.data, random_positions=())
        return (
            Chunks(self.corpus, "train", length, config.data, seed=config.seed),
            Chunks(self.group.in_turn(self.validation_corpus), "valid", length, kept),
        )

    def validation_corpus(self) -> Corpus:
        """What the run is validated on, in its own tokens: the config's other corpus, if it trains on the config's."""
        data = self.config.data
        if data.validation is None or self.corpus.name != public_name(data.corpus):
            return self.corpus
        vocab_size, tokenizer = self.config.model.vocab_size, str(self.corpus.folder / "tokenizer.json")
        return load_corpus(data.validation, vocab_size, tokenizer=tokenizer, progress=self.group.first)

    def provenance(self) -> dict[str, Any]:
        """What the record says of the run's text beside its name and hash."""
        return {
            "corpus_train_tokens": len(self.chunks.tokens),
        }

    def autocast(self) -> contextlib.AbstractContextManager:
        """bf16 where the config asks for it."""
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def advance(self, forward: Any) -> Tensor:
        """One optimiser step; returns the loss of the batch, of a group the process's share of it, on the device."""
        config = self.config.train
        batch = self.group.share(self.chunks.batch(self.step, config.batch_size, self.config.seed)).to(self.device)
        parts = batch.split(config.micro_batch or config.batch_size)
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, start=1):
            with self.group.backward_of(self.trained, last=number == len(parts)):
                with self.autocast():
                    loss = forward(self.trained, part, *self.unscored) / len(parts)
                loss.backward()
            total += loss.detach()
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], Report | None]:
        """The validation loss and the sink metric at this step, and the report; none of a model that is not finite.

        In a group every process evaluates, because the weights may be cut over all of them.
        """
        with self.autocast():
            valid_loss = self.valid_loss()
        # Rank 0's, so that all take it for finite or none.
        point = {"step": self.step, "valid_loss": self.group.once(lambda: valid_loss)}
        if not math.isfinite(point["valid_loss"]):
            return point, None
        report = measure(self.model, self.probe, targets=self.targets, epsilons=EPSILONS)
        point |= {f"sink_{k}": report.sink(k) for k in self.targets[:4]} | {"excess_1": report.excess(1)}
        if report.star is not None:
            point |= {"sink_star": report.sink_star(), "excess_star": report.excess("star")}
        return point, report

    def keep(self, point: dict[str, float], report: Report) -> None:
        """Add a point to the curve, and to `alphas` the mean alpha of its report."""
        self.curve.append(point)
        star = [] if report.star is None else [report.star.mean(dim=0)[None]]
        self.alphas.append(torch.cat([report.alpha.mean(dim=0), *star]).half())

    def valid_loss(self) -> float:
        """The mean loss of the validation chunks."""
        losses = [float(self.loss(self.model, part, *self.unscored)) * len(part) for part in self.valid.split(32)]
        return sum(losses) / len(self.valid)

    @property
    def unscored(self) -> tuple[int, int | None]:
        """The prefix and the position of a fixed token, whose predictions carry no loss (`next_token_loss`)."""
        return self.config.model.attention.prefix, self.config.data.fixed_position

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.context_length

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(k for k in SINK_TARGETS if k <= self.config.train.eval_length)


def probe_ids(config: RunConfig, corpus: Corpus, tokenizer: Tokenizer) -> Tensor:
    """The sequences of the sink metric: 100 natural ones outside the training text, T = 64 (Section 4).

    A fixed token is also fixed here, as the authors' evaluation does.
    """
    train = config.train
    ids = probe("natural", tokenizer, train.eval_sequences, train.eval_length, EVALUATION_SEED,
                bos=config.data.bos, corpus=corpus)  # fmt: skip
    return fix_position(ids, config.data.fixed_position, corpus.fix_id)


def train(
    config: RunConfig,
    runs: Path | str | None = None,
    *,
    device: str | torch.device | None = None,
    corpus: Corpus | str | None = None,
    keep_weights: bool = False,
    compile: bool | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
    group: Group = ALONE,
    make: Callable[..., Run] = Run,
) -> Record:
    """Train one run to its end and write its record; a finished record is returned as it is.

    A run that was killed goes on from its last checkpoint and ends in the same record, bit for bit on one kind of
    machine. A run that diverges is recorded with status "failed" and the reason. On CPU it uses one thread, so
    that its numbers depend neither on the number of cores nor on what runs beside it. Raises `RunLocked` while
    another process trains the same run.

    corpus: the text, or where to load it from, in place of the config's own. Only a record on that very text is then
    returned, and the run's own stands apart from those of the study (see `study.record.run_folder`).
    compile: use torch.compile; None: as the preset says, where it works (`compiles`).
    group: the processes that train this run together, each of which calls `train` (see `distributed.joined`).
    make: the kind of run: pre-training, or what `finetuning` makes of it.
    """
    if corpus is None:  # a record is found without opening the text
        study = record_folder(config.preset, config.experiment, config.seed, runs)
        done = group.once(finished, study, config, keep_weights)
        if done is not None:
            return done
    group.check_batch(config.train.batch_size, config.train.micro_batch)
    progress = progress and group.first
    target = find_device(device)
    asked = corpus is not None
    if not isinstance(corpus, Corpus):
        name = corpus or config.data.corpus
        corpus = group.in_turn(partial(load_corpus, name, config.model.vocab_size, progress=progress))
        group.agree("the corpus", corpus.fingerprint)
    wanted = corpus.identity if asked else None
    folder = group.once(run_folder, config, runs, wanted)
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"corpus {corpus.name!r} has {corpus.vocab_size} tokens, the model {config.model.vocab_size}: "
            "raise vocab_size or load the corpus with fewer"
        )
    if asked and (corpus.name, corpus.vocab_size) != (public_name(config.data.corpus), config.model.vocab_size):
        warnings.warn(
            f"training on corpus {corpus.name!r} with {corpus.vocab_size} tokens in place of {config.data.corpus!r} "
            f"with {config.model.vocab_size}: the record is {'/'.join(folder.parts[-3:])}",
            stacklevel=2,
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread(target))
        group.once(stack.enter_context, run_lock(folder))
        done = group.once(finished, folder, config, keep_weights, wanted)  # also by whoever held the lock before
        if done is not None:
            return done
        run = make(config, corpus, target, group)
        checkpoint = partial_folder(folder) / "checkpoint.safetensors"
        load_checkpoint(run, checkpoint)
        if compile is None:
            compile = PRESETS[config.preset].compile and compiles() if config.preset in PRESETS else False
        reason, report = _loop(run, checkpoint, checkpoint_seconds, progress, compile)
        provenance = {
            **run.provenance(),
            "device": device_name(target),
            "instruction_set": instruction_set(),
            "wall_seconds": round(run.seconds, 1),
            "tokens_per_second": round(run.step * run.tokens_per_step / run.seconds),
            "compiled": compile,
            "processes": group.size,
            "parallel": group.parallel,
        }
        weights = dict(group.weights(run.model)) if keep_weights else None
        tokenizer = run.tokenizer if keep_weights else None
        outcome, alphas = summary(run, report, reason), arrays(run, None if reason else report)
        parts = (outcome, provenance, weights, tokenizer, corpus.identity, alphas)
        return group.once(write_record, folder, config, *parts)


def finished(folder: Path, config: RunConfig, weights: bool, corpus: dict[str, str] | None = None) -> Record | None:
    """The whole record of this very config and corpus, with its weights if they are wanted; else None."""
    record = find_record(folder, config, corpus)
    return record if record is not None and (record.weights or not weights) else None


def _loop(
    run: Run, checkpoint: Path, checkpoint_seconds: float, progress: bool, compile: bool
) -> tuple[str | None, Report | None]:
    """Train to the last step. Returns the reason of a failure, or None, and the last evaluation's report."""
    config, report = run.config, None
    if compile:
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        check_kernels(config.model.attention, run.device, dtype, config.model.head_dim)
    forward = torch.compile(run.loss) if compile else run.loss
    hopeless = 2 * math.log(config.model.vocab_size)  # twice the loss of a uniform guess
    saved = started = time.monotonic()
    before = run.seconds
    first = run.step
    recent: list[Tensor] = []
    if not run.curve:  # an untrained control: what position terms and biases do by themselves
        point, report = run.evaluate()
        if report is not None:
            run.keep(point, report)
    bar = tqdm(total=config.train.steps, initial=first, disable=not progress, unit="step", leave=False,
               desc=f"{config.experiment} seed {config.seed}")  # fmt: skip
    with bar:
        while run.step < config.train.steps:
            recent.append(run.advance(forward))
            bar.update()
            ending = run.step == config.train.steps
            if run.step % config.train.eval_every == 0 or ending:
                losses = run.group.mean(torch.stack(recent)).tolist()
                recent.clear()
                failure = divergence(losses, hopeless)
                if not failure:
                    point, report = run.evaluate()
                    failure = divergence([point["valid_loss"]], hopeless)
                if failure:
                    run.seconds = before + time.monotonic() - started
                    return f"{failure} by step {run.step}", None
                assert report is not None  # the validation loss is finite
                run.keep({**point, "train_loss": sum(losses) / len(losses)}, report)
                rate = (run.step - first) * run.tokens_per_step / (time.monotonic() - started)
                bar.set_postfix(
                    loss=f"{point['valid_loss']:.3f}", sink=f"{point['sink_1']:.1f}%", tokens_per_s=int(rate)
                )
                # Only here is the state whole: no losses wait to be averaged. Rank 0's clock counts.
                if not ending and run.group.once(lambda since=saved: time.monotonic() - since > checkpoint_seconds):
                    run.seconds = before + time.monotonic() - started
                    save_checkpoint(run, checkpoint)
                    saved = time.monotonic()
    run.seconds = before + time.monotonic() - started
    return None, report


def divergence(losses: list[float], hopeless: float) -> str | None:
    """Why a run with these losses has failed, or None: a loss that is not finite, or far above a uniform guess."""
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    if min(losses) > hopeless:
        return f"the loss was over {hopeless:.2f}, twice that of a uniform guess"
    return None


def summary(run: Run, report: Report | None, reason: str | None) -> dict[str, Any]:
    """What metrics.json holds: status, the curve, and at the end losses, sinks, norms, where the attention goes."""
    final: dict[str, Any] = dict(run.curve[-1]) if run.curve else {}
    if report is not None and reason is None:
        final["report"] = report.to_dict()
        final["destinations"] = destinations(run.model, run.probe, line_breaks(run.tokenizer))
    return {"status": "failed" if reason else "done", "reason": reason, "curve": run.curve, "final": final}


def arrays(run: Run, report: Report | None) -> dict[str, Tensor]:
    """What alpha.safetensors holds, float16: `curve` (evaluations, targets, L, H), means over the texts; at the end
    `final` (texts, targets 1..3, L, H) and `star` (texts, L, H) if there is one, so that any eps can be asked later.
    """
    kept = {"curve": torch.stack(run.alphas)} if run.alphas else {}
    if report is not None:
        kept["final"] = report.alpha[:, :3].half()
        if report.star is not None:
            kept["star"] = report.star.half()
    return kept


@cache
def compiles() -> bool:
    """Whether torch.compile works here: on a CPU it needs a C++ compiler. Warns where it does not."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # whatever a missing or broken compiler raises
        warnings.warn(f"torch.compile does not work here ({type(error).__name__}): training goes on without, slower, "
                      "and its numbers differ in the last digits; a C++ compiler mends that", stacklevel=2)  # fmt: skip
        return False
    return True


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One CPU thread inside, as before outside: sums over threads would depend on their number."""
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def instruction_set() -> list[str]:
    """What decides the roundings of a CPU's products: machines that differ in it give other last digits."""
    has = torch.cpu.get_capabilities()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if has.get(name)]


def device_name(device: torch.device) -> str:
    """The kind of machine, without its name: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
