"""The training of one run, from its config to its record. Read this file from top to bottom.

A run is deterministic. It can be killed at any moment and resumed, and it ends with a record even
if the training fails. Each use of random numbers has a generator of its own: that of the weights
depends on the seed, that of the order of the chunks on the seed and the epoch, and that of the
evaluation is always the same. So two runs with one seed differ only in what their configs say.
"""

from __future__ import annotations

import hashlib
import io
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sinkutils.checks import device as find_device
from sinkutils.checks import launched, real, require
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import probe
from sinkutils.measuring.report import NotFinite, Report
from sinkutils.measuring.texts import fix_position
from sinkutils.paths import Hashed, replace_file
from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, config_hash, learning_rate
from sinkutils.study.corpus import Corpus
from sinkutils.study.evaluate import (
    EPSILONS,
    SINK_TARGETS,
    alpha_by_head,
    divergence,
    last_measurements,
    sinks,
)
from sinkutils.study.record import CHECKPOINT_SECONDS, CorruptRecord, Folder, Record
from sinkutils.study.store import Runs, write_record
from sinkutils.study.task import (
    GraphedStep,
    before,
    claim,
    compiles,
    conditions_of,
    make_optimizers,
    may_graph,
    pretraining,
    reproducible,
    set_rate,
    start_of,
    usable_precision,
)

# The batches of this many steps are copied to the device at once, which saves copies to a GPU.
AHEAD = 16
EVALUATION_SEED = 0
CHECKPOINT = 2  # is raised when the contents of a checkpoint change
DIGEST = hashlib.sha256().digest_size  # the bytes of the digest with which a checkpoint begins


def train(
    config: RunConfig,
    runs: Folder = None,
    *,
    device: str | torch.device | None = None,
    corpus: Corpus | str | None = None,
    keep_weights: bool = False,
    compile: bool | None = None,
    graph: bool | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = True,
) -> Record:
    """Train one run to its end and write its record. If there is a record already, return it.

    A run that was killed continues from its last checkpoint. On one kind of CPU it ends with the
    same metrics, bit for bit. A run that diverges is recorded with status "failed" and the reason.
    On a CPU a run uses one thread, so that its numbers depend neither on the number of cores nor on
    other processes. Raises `RunLocked` while another process is training the same run.

    A fine-tuning starts from the weights of another run. That run is trained first if it has no
    record or if its record has no weights. Raises ValueError if it failed. To use instructions of
    your own, change two fields of a fine-tuning's config: `instructions`, to path:<file.jsonl>, and
    `experiment`, which is the name of the new record.

    corpus: a corpus, or where to load one from, instead of the config's own. In a fine-tuning it is
      the text for the sink metric. Only a record on exactly this text is returned. If it is not the
      config's text, the new record is kept apart from the study's (`study.store.Runs.of`).
    compile: whether to use torch.compile. None means on a CPU, if the preset says so and it works
      (`compiles`).
    graph: whether to make each step one CUDA graph (`GraphedStep`). None means on a GPU, if the
      run allows it.
    """
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    target = find_device(device)
    _, processes = launched()
    if processes > 1:
        from sinkutils.study.shared import train_shared

        return train_shared(
            config, runs, target, corpus, keep_weights, checkpoint_seconds, progress
        )
    place, text, done = claim(config, runs, corpus, keep_weights)
    if done is not None:
        return done
    assert text is not None
    if compile is None:
        preset = grid.presets().get(config.preset)
        wanted = preset is not None and preset.compile
        # On a GPU, compiled steps have produced NaN where eager steps did not (docs/scaling.md).
        compile = wanted and target.type == "cpu" and compiles()
    # A fine-tuning starts from a record. If there is none, that run is trained first.
    start: Record | None = None
    if isinstance(config, FinetuneConfig):
        start = start_of(config, Runs(runs), text) or train(
            before(config),
            runs,
            device=device,
            corpus=None if corpus is None else text,
            keep_weights=True,
            compile=compile,
            graph=graph,
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
        )
        require(
            start.status == "done",
            f"{config.experiment} starts from {config.preset}/{config.start}/{config.seed}, "
            f"and that run failed to train ({start.reason})",
        )
    with reproducible(target), place.lock():
        # Another process may have finished the run in the meantime.
        done = place.record(keep_weights)
        if done is not None:
            return done
        place.check_free()
        run = Run(config, text, target, start)
        load_checkpoint(run, place.checkpoint)
        # Whether a step is compiled, or one CUDA graph. The record says which.
        if graph is None:
            graph = may_graph(run) and not compile
        if graph:
            run.graph = GraphedStep(run)
        if compile:
            run.forward = torch.compile(run.task.loss)
        conditions = conditions_of(run, compile, graph)
        reason, report = to_its_end(run, conditions, progress, place.checkpoint, checkpoint_seconds)
        save_run(run, place.folder, reason, report, keep_weights)
    done = place.record(keep_weights)
    assert done is not None
    return done


def to_its_end(
    run: Run, conditions: Json, progress: bool, checkpoint: Path, checkpoint_seconds: float
) -> tuple[str | None, Report | None]:
    """Train a run to its end.

    Returns why it failed, or None, and the report of the last evaluation, or None if it failed.
    conditions: how it is trained, for its provenance. checkpoint: the file that keeps its state.
    """
    schedule = run.config.train
    if run.parts[-1:] != [conditions]:  # a new run, or one that continues on another machine
        run.parts.append(conditions)
    # The evaluation before the first step shows the effect of position terms and biases alone.
    if not run.curve:
        run.evaluate([])
    saved = run.now()
    began = saved - run.seconds
    with tqdm(
        total=schedule.steps,
        initial=run.step,
        desc=f"{run.config.experiment} seed {run.config.seed}",
        unit="step",
        leave=False,
        mininterval=2,
        # tqdm takes None for: no bar if stderr is no terminal
        disable=None if progress and run.main else True,
    ) as bar:
        while True:
            run.advance()
            bar.update()
            ended = run.step == schedule.steps
            if run.step % schedule.eval_every and not ended:
                continue
            reason, report = evaluated(run)
            now = run.now()
            run.seconds = now - began
            if ended or reason is not None:
                return reason, report
            point = run.curve[-1]
            bar.set_postfix(loss=point["valid_loss"], sink=point["sink_1"])
            # A checkpoint is possible only right after an evaluation, when no losses of earlier
            # steps wait to be averaged.
            if now - saved > checkpoint_seconds:
                save_checkpoint(run, checkpoint)
                saved = run.now()


class Run:
    """The state of one run between two optimiser steps, and the step itself.

    `study.shared.SharedRun` is one that several processes share.
    """

    main = True  # whether this process saves the state and writes the record
    # The attributes that a checkpoint holds beside the state of the model and the optimisers.
    PROGRESS = ("step", "seconds", "curve", "alphas", "parts")

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, start: Record | None = None
    ) -> None:
        """The state of a run before its first step. start: the record that a fine-tuning needs."""
        # `torch.__version__` is compared as a version, not as a string.
        require(torch.__version__ >= "2.11", "training needs torch 2.11 or later")
        self.config = config
        self.corpus = corpus
        self.device = device
        self.precision = usable_precision(config.train.precision, device)
        if isinstance(config, FinetuneConfig):
            from sinkutils.study.finetune import finetuning  # imported here, since few runs need it

            assert start is not None
            self.task = finetuning(config, corpus, start)
        else:
            self.task = pretraining(config, corpus, device)
        self.model = self.task.model.to(device)
        # What `backward` trains: the model, or what shares it with other processes.
        self.trained: Any = self.model
        # The loss as `backward` calls it. `train` may replace it by its compiled form; evaluations
        # call `task.loss`, which is never compiled.
        self.forward: Callable[..., Tensor] = self.task.loss
        self.optimizers = make_optimizers(dict(self.model.named_parameters()), config.train)
        # The chunks of up to AHEAD steps, on the device (see `batch`).
        self.ahead: Tensor | None = None
        # The step as a CUDA graph, if `train` uses one.
        self.graph: GraphedStep | None = None
        # The evaluation uses a few chunks for the loss, and texts for the sink metric.
        first = np.arange(min(config.train.valid_chunks, len(self.task.valid)))
        self.valid = self.task.valid.take(first).to(device)
        count = config.train.eval_sequences
        length = config.train.eval_length
        ids = probe("natural", self.task.tokenizer, count, length, EVALUATION_SEED, corpus=corpus)
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

    def advance(self) -> Tensor:
        """Make one optimiser step on the next batch. Returns the loss of the batch."""
        batch = self.batch()
        set_rate(self.optimizers, learning_rate(self.config.train, self.step))
        update = self.graph or self.update
        total, norm = update(batch)
        self.step += 1
        self.passed.append((total, norm))
        return total

    def batch(self) -> Tensor:
        """The chunks of this step, on the device.

        They are a slice of the chunks of `AHEAD` steps, which are copied there at once.
        """
        size = self.config.train.batch_size
        copies, index = divmod(self.step, AHEAD)
        if self.ahead is None or index == 0:
            rows = self.task.train.batch(copies, AHEAD * size, self.config.seed)
            self.ahead = rows.to(self.device)
        start = index * size
        return self.ahead[start : start + size]

    def update(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Forward, backward and step on one batch.

        Returns the loss of the batch, and the norm of its gradient before clipping.
        """
        config = self.config.train
        parts = batch.split(config.micro_batch or config.batch_size)  # micro-batches
        total = torch.zeros((), device=self.device)
        for part in parts:
            total += self.backward(part, len(parts))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, norm

    def backward(self, part: Tensor, parts: int) -> Tensor:
        """Add the gradient of a micro-batch, one of `parts`. Returns its share of the batch's loss."""
        with self.autocast():
            loss = self.forward(self.trained, part, self.unscored)
        loss = loss / parts  # the gradients then add up to that of the batch's mean loss
        loss.backward()
        return loss.detach()

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
        if self.task.each_step:  # Figure 30
            point["losses"] = losses
            point["gradient_norms"] = [float(norm) for _, norm in self.passed]
        self.curve.append(point)
        self.alphas.append(alpha_by_head(report))
        self.passed.clear()
        return report

    def valid_loss(self) -> float:
        """The mean loss of the validation text, whose parts are weighted by the task's `weight`."""
        total = 0.0
        weights = 0
        for part in self.valid.split(32):
            loss = self.task.loss(self.model, part, self.unscored)
            weight = self.task.weight(part)
            total += float(loss) * weight
            weights += weight
        return total / weights

    def state(self) -> Json:
        """The weights, and for each optimiser the state of each parameter, by its number."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return {"model": self.model.state_dict(), "optimizers": states}

    def load(self, state: Json) -> None:
        """Take up the weights and the optimisers' state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # The settings, such as the rate, are of this process, which may use another device.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": saved, "param_groups": groups})

    def now(self) -> float:
        return time.monotonic()

    def autocast(self) -> torch.autocast:
        """Autocast to bf16, if `precision` is bf16. Weights and optimiser stay in fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

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


def evaluated(run: Run) -> tuple[str | None, Report | None]:
    """Evaluate a run. Returns (None, the report), or (the reason, None) if the run has failed."""
    losses = torch.stack([loss for loss, _ in run.passed]).tolist()
    uniform_loss = math.log(run.config.model.vocab_size)  # ln V, the loss of a uniform guess
    reason = divergence(losses, hopeless=2 * uniform_loss)
    if reason is None:
        report = run.evaluate(losses)
        if report is not None:
            return None, report
        reason = "the model computed what is not finite"
    return f"{reason} by step {run.step}", None


def save_run(
    run: Run, folder: Path, reason: str | None, report: Report | None, keep_weights: bool
) -> None:
    """Write the record of a run that has ended. All processes that share it take part.

    reason: why the run failed, or None. report: the report of its last evaluation, or None.
    """
    final: Json = dict(run.curve[-1]) if run.curve else {}
    arrays = {}
    if run.alphas:
        arrays["curve"] = torch.stack(run.alphas)
    if report is not None:
        final |= last_measurements(run.model, run.probe, run.task.tokenizer, report, run.autocast)
        # alpha_1 of every text, from which Sink_1 can be computed again: (n, 1, L, H)
        arrays["final"] = report.alpha[:, :1].float().contiguous()
        if report.star is not None:
            arrays["star"] = report.star.float().contiguous()  # (n, L, H)
    status = "failed" if reason else "done"
    provenance = {
        **run.parts[-1],
        "corpus_train_tokens": len(run.task.train.tokens),
        "wall_seconds": round(run.seconds, 1),
        "tokens_per_second": round(run.step * run.tokens_per_step / run.seconds),
        **run.task.more,
    }
    if len(run.parts) > 1:
        provenance["began_on"] = run.parts[:-1]
    weights = run.state()["model"] if keep_weights else None
    if not run.main:
        return
    write_record(
        folder,
        run.config,
        metrics={"status": status, "reason": reason, "curve": run.curve, "final": final},
        provenance=provenance,
        weights=weights,
        tokenizer=run.task.tokenizer if keep_weights else None,
        corpus=run.corpus.identity,
        arrays=arrays or None,
    )


# ---- checkpoints: a digest, and behind it what torch.save writes


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file. If this fails or is killed, the previous file stays."""
    state: Json = {"of": checkpoint_key(run), **run.state()}
    for name in run.PROGRESS:
        state[name] = getattr(run, name)

    def write(file: BinaryIO) -> None:
        file.write(bytes(DIGEST))  # the place of the digest, which is known last
        hashed: Any = Hashed(file)  # all of a file that torch.save needs
        torch.save(state, hashed)
        file.seek(0)
        file.write(hashed.digest.digest())

    if run.main:
        replace_file(path, write)


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue `run` from the checkpoint at `path`.

    If the checkpoint cannot be used, a warning says why, and the run starts from step 0.
    """
    if not path.exists():
        return
    place = f"{path.parent.name}/{path.name}"
    try:
        state = read_checkpoint(path)
        require(
            state["of"] == checkpoint_key(run),
            f"{place} is of another config or corpus, or an older form",
        )
    except (CorruptRecord, ValueError) as error:
        again = f"{error}; training starts again from step 0"
        warnings.warn(again, stacklevel=3)
        run.task.more["restarted"] = again
        return
    run.load(state)
    for name in run.PROGRESS:
        setattr(run, name, state[name])


def checkpoint_key(run: Run) -> list[Any]:
    """The identity of a run, which its checkpoint must have: config, text and start."""
    return [CHECKPOINT, config_hash(run.config), run.task.fingerprint]


def read_checkpoint(path: Path) -> Json:
    """The state in a checkpoint, on the CPU. Raises `CorruptRecord` if any byte has changed."""
    with open(path, "rb") as file:
        digest = file.read(DIGEST)
        data = file.read()
    if hashlib.sha256(data).digest() != digest:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is truncated or changed")
    state: Json = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return state
