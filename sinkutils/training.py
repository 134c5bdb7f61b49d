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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from sinkutils.capture import measure
from sinkutils.corpora import Corpus, load_corpus
from sinkutils.distributed import ALONE, Group
from sinkutils.model import LMConfig, TransformerLM
from sinkutils.packing import Chunks, DataConfig, fix_position
from sinkutils.probes import probe
from sinkutils.records import (
    CorruptRecord,
    Record,
    config_hash,
    find_record,
    partial_folder,
    read_tensors,
    record_folder,
    run_lock,
    write_record,
    write_tensors,
)
from sinkutils.sinks import Report

PRECISIONS = ("fp32", "bf16")
EVALUATION_SEED = 0
SINK_TARGETS = tuple(range(1, 11))  # the paper looks at positions up to the longest prefix, 10


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation and evaluation of one run (Section 4). Step counts are optimiser steps."""

    steps: int = 4000
    batch_size: int = 32  # sequences a step
    learning_rate: float = 6e-3  # peak
    warmup_steps: int = 100
    lr_floor: float = 0.1  # last over peak rate: 1 is constant, the authors' published config
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    precision: str = "fp32"  # bf16: autocast; weights and optimiser stay fp32
    eval_every: int = 100
    eval_sequences: int = 100  # for the sink metric
    eval_length: int = 64  # T of the sink metric
    valid_chunks: int = 128
    micro_batch: int | None = None  # sequences a forward pass; None: all at once

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_sequences", "eval_length", "valid_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {self.precision!r}")
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise ValueError("learning_rate must be positive and weight_decay not negative")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"lr_floor must be in 0..1, got {self.lr_floor}")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch must divide batch_size={self.batch_size}, got {self.micro_batch}")


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run's numbers on one kind of machine, apart from the text itself."""

    experiment: str
    preset: str
    seed: int = 0
    model: LMConfig = field(default_factory=LMConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.train.eval_length > self.model.context_length:
            raise ValueError(
                f"eval_length {self.train.eval_length} is longer than context_length {self.model.context_length}"
            )


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate at step 0, 1, ..: linear warm-up, then a cosine down to lr_floor of the peak at the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - 1 - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.learning_rate * (train.lr_floor + (1 - train.lr_floor) * cosine)


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (N, V) and targets (N,) in nats, with one exponential for both passes.

    The gradient, (softmax - onehot) / N, is made with the loss: on a CPU and a small model that saves a tenth of
    a training step against F.cross_entropy, which a test compares it with.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        count = len(targets)
        peak = logits.amax(-1, keepdim=True)
        gradient = (logits - peak).float().exp_()
        total = gradient.sum(-1, keepdim=True)
        at_target = logits.gather(-1, targets[:, None]).float() - peak.float()
        gradient.div_(total * count)
        gradient.scatter_add_(-1, targets[:, None], gradient.new_full((count, 1), -1 / count))
        ctx.save_for_backward(gradient.to(logits.dtype))
        return (total.log() - at_target).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None


def next_token_loss(model: torch.nn.Module, chunks: Tensor, prefix: int = 1) -> Tensor:
    """Mean cross-entropy of chunks (B, C + 1) in nats; the first prefix - 1 predictions carry none (Section 6)."""
    logits = model(chunks[:, :-1])[:, prefix - 1 :].flatten(0, 1)
    targets = chunks[:, prefix:].flatten()
    if logits.is_cuda:  # there torch.compile fuses the plain form
        return F.cross_entropy(logits.float(), targets)
    return CrossEntropy.apply(logits, targets)


class Run:
    """The state of one run between two optimiser steps; `train` drives it."""

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device, group: Group = ALONE) -> None:
        self.config, self.corpus, self.device, self.group = config, corpus, device, group
        generator = torch.Generator().manual_seed(config.seed)
        self.model = TransformerLM(config.model, generator).to(device)
        train = config.train
        self.trained = group.wrap(self.model, train.precision)  # the model itself, or what DDP puts around it
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        length = config.model.context_length
        self.chunks = Chunks(corpus, "train", length, config.data, seed=config.seed)
        # Tokens redrawn at random cannot be predicted, so the validation text keeps its own (Section 5).
        valid = Chunks(corpus, "valid", length, dataclasses.replace(config.data, random_positions=()))
        self.valid = valid.take(np.arange(min(train.valid_chunks, len(valid)))).to(device)
        self.probe = probe_ids(config, corpus).to(device)
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.train_losses: list[float] = []
        self.seconds = 0.0

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
                    loss = forward(self.trained, part, self.config.model.attention.prefix) / len(parts)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
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
        prefix = self.config.model.attention.prefix
        parts = self.valid.split(32)
        with self.autocast():
            losses = [float(next_token_loss(self.model, part, prefix)) * len(part) for part in parts]
        # Rank 0's, so that all take it for finite or none.
        point = {"step": self.step, "valid_loss": self.group.once(lambda: sum(losses) / len(self.valid))}
        if not math.isfinite(point["valid_loss"]):
            return point, None
        report = measure(self.model, self.probe, targets=self.targets)
        point |= {f"sink_{k}": report.sink(k) for k in self.targets[:4]}
        if report.star is not None:
            point["sink_star"] = report.sink_star()
        return point, report

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.context_length

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(k for k in SINK_TARGETS if k <= self.config.train.eval_length)


def probe_ids(config: RunConfig, corpus: Corpus) -> Tensor:
    """The sequences of the sink metric: 100 natural ones outside the training text, T = 64 (Section 4).

    A fixed token is also fixed here, as the authors' evaluation does.
    """
    train = config.train
    ids = probe("natural", corpus.tokenizer, train.eval_sequences, train.eval_length, EVALUATION_SEED,
                bos=config.data.bos, corpus=corpus)  # fmt: skip
    return fix_position(ids, config.data.fixed_position, corpus.fix_id)


def train(
    config: RunConfig,
    runs: Path | str | None = None,
    *,
    device: str | torch.device | None = None,
    corpus: Corpus | str | None = None,
    keep_weights: bool = False,
    compile: bool = False,
    checkpoint_seconds: float = 20.0,
    progress: bool = True,
    group: Group = ALONE,
) -> Record:
    """Train one run to its end and write its record; a finished record is returned as it is.

    A run that was killed goes on from its last checkpoint and ends in the same record, bit for bit on one kind of
    machine. A run that diverges is recorded with status "failed" and the reason. On CPU it uses one thread, so
    that its numbers depend neither on the number of cores nor on what runs beside it. Raises `RunLocked` while
    another process trains the same run.

    corpus: the text, or where to load it from, in place of the config's own; the record's provenance names it.
    group: the processes that train this run together, each of which calls `train` (see `distributed.joined`).
    """
    folder = record_folder(config.preset, config.experiment, config.seed, runs)
    done = group.once(finished, folder, config, keep_weights)
    if done is not None:
        return done
    group.check_batch(config.train.batch_size, config.train.micro_batch)
    progress = progress and group.first
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(corpus, Corpus):
        corpus = group.in_turn(partial(open_corpus, config, corpus, progress))
        group.agree("the corpus", corpus.fingerprint)
    if corpus.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"corpus {corpus.name!r} has {corpus.vocab_size} tokens, the model {config.model.vocab_size}: "
            "raise vocab_size or load the corpus with fewer"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread(target))
        group.once(stack.enter_context, run_lock(folder))
        done = group.once(finished, folder, config, keep_weights)  # by whoever held the lock before
        if done is not None:
            return done
        run = Run(config, corpus, target, group)
        checkpoint = partial_folder(folder) / "checkpoint.safetensors"
        load_checkpoint(run, checkpoint)
        reason, report = _loop(run, checkpoint, checkpoint_seconds, progress, compile)
        provenance = {
            "corpus": "path" if corpus.name.startswith("path:") else corpus.name,
            "corpus_sha256": corpus.fingerprint,
            "corpus_train_tokens": len(run.chunks.tokens),
            "device": device_name(target),
            "wall_seconds": round(run.seconds, 1),
            "tokens_per_second": round(run.step * run.tokens_per_step / run.seconds),
            "compiled": compile,
            "processes": group.size,
            "parallel": group.parallel,
        }
        weights = dict(group.weights(run.model)) if keep_weights else None
        tokenizer = corpus.tokenizer if keep_weights else None
        outcome = summary(run, report, reason)
        return group.once(write_record, folder, config, outcome, provenance, weights, tokenizer)


def open_corpus(config: RunConfig, name: str | None, progress: bool) -> Corpus:
    """The corpus of a config, or the one of that name in its place; warns where the two are not the same."""
    corpus = load_corpus(name or config.data.corpus, config.model.vocab_size, progress=progress)
    if name and (corpus.name, corpus.vocab_size) != (config.data.corpus, config.model.vocab_size):
        warnings.warn(
            f"training on corpus {corpus.name!r} with {corpus.vocab_size} tokens in place of {config.data.corpus!r} "
            f"with {config.model.vocab_size}: the record names it in its provenance only",
            stacklevel=3,
        )
    return corpus


def finished(folder: Path, config: RunConfig, weights: bool) -> Record | None:
    """The whole record of this very config, with its weights if they are wanted; else None."""
    record = find_record(folder, config)
    return record if record is not None and (record.weights or not weights) else None


def _loop(
    run: Run, checkpoint: Path, checkpoint_seconds: float, progress: bool, compile: bool
) -> tuple[str | None, Report | None]:
    """Train to the last step. Returns the reason of a failure, or None, and the last evaluation's report."""
    config, report = run.config, None
    forward = torch.compile(next_token_loss) if compile else next_token_loss
    hopeless = 2 * math.log(config.model.vocab_size)  # twice the loss of a uniform guess
    saved = started = time.monotonic()
    before = run.seconds
    first = run.step
    recent: list[Tensor] = []
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
                run.curve.append({**point, "train_loss": sum(losses) / len(losses)})
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
    """What metrics.json holds: status, the curve, and at the end losses, sinks, norms."""
    final: dict[str, Any] = dict(run.curve[-1]) if run.curve else {}
    if report is not None and reason is None:
        final["report"] = report.to_dict()
    return {"status": "failed" if reason else "done", "reason": reason, "curve": run.curve, "final": final}


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file, or leave the previous one as it was (a full disk, a kill)."""
    tensors = {f"model.{name}": value for name, value in run.group.weights(run.model).items()}
    for index, state in run.group.optimizer_state(run.model, run.optimizer).items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    extra = {
        "config_sha256": config_hash(run.config),
        "corpus_sha256": run.corpus.fingerprint,
        "step": run.step,
        "seconds": run.seconds,
        "curve": run.curve,
    }
    run.group.once(write_tensors, path, tensors, extra)


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue `run` from `path` if it holds this run's state; else say why not, and start from step 0."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] | None = None
    if run.group.first:
        tensors, extra = read_checkpoint(run, path)
    extra = run.group.once(lambda: extra)
    if extra is None:
        return
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    run.group.load(run.model, run.optimizer, weights, state)
    run.step, run.seconds, run.curve = extra["step"], extra["seconds"], extra["curve"]


def read_checkpoint(run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors and the rest of a checkpoint of this run; nothing and None where there is none that can be used."""
    if not path.exists():
        return {}, None
    try:
        tensors, extra = read_tensors(path)
    except CorruptRecord as error:
        warnings.warn(f"{error}; training starts again from step 0", stacklevel=4)
        return {}, None
    if (extra["config_sha256"], extra["corpus_sha256"]) != (config_hash(run.config), run.corpus.fingerprint):
        warnings.warn(
            f"{path.parent.name}/{path.name} is of another config or corpus; training starts again from step 0",
            stacklevel=4,
        )
        return {}, None
    return tensors, extra


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


def device_name(device: torch.device) -> str:
    """The kind of machine, without its name: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """A frozen config from the dict that `dataclasses.asdict` and JSON made of it."""
    hints = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(hints)}")
    made = {}
    for name, value in values.items():
        default = hints[name].default_factory
        if dataclasses.is_dataclass(default):
            value = from_dict(default, value)  # type: ignore[arg-type]
        made[name] = tuple(value) if isinstance(value, list) else value
    return cls(**made)
