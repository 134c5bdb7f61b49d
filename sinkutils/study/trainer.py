"""The training of one run from one config.

A run is deterministic. It can be killed at any moment and resumed, and it ends with a record even
if the training fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sinkutils.checks import device as find_device
from sinkutils.checks import real, require
from sinkutils.measuring.report import Report
from sinkutils.paths import replace_file
from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, config_hash
from sinkutils.study.corpus import Corpus, Identity, load_corpus, public_name
from sinkutils.study.final import summary
from sinkutils.study.finetune import FinetuneRun
from sinkutils.study.graph import GraphedStep
from sinkutils.study.record import (
    CHECKPOINT_SECONDS,
    CorruptRecord,
    Record,
    write_record,
)
from sinkutils.study.run import Run, instruction_set
from sinkutils.study.store import Folder, RunFolder, Runs

CHECKPOINT = 2  # is raised when the contents of a checkpoint change
DIGEST = hashlib.sha256().digest_size  # the bytes of the digest with which a checkpoint file begins


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
    graph: whether to make each step one CUDA graph (`training.graph`). None means on a GPU, if the
      run allows it.
    """
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    store = Runs(runs)
    target = find_device(device)
    # The first look for a record. It saves opening the text, if this is the config's own.
    if corpus is None:
        done = store.of(config).record(keep_weights)
        if done is not None:
            return done
    text = corpus
    if not isinstance(text, Corpus):
        text = load_corpus(text or config.data.corpus, config.model.vocab_size)
    run_folder = store.of(config, text.identity)
    _check_text(text, run_folder, own_folder=store.of(config))
    if compile is None:
        preset = grid.PRESETS.get(config.preset)
        wanted = preset is not None and preset.compile
        # On a GPU, compiled steps have produced NaN where eager steps did not (docs/scaling.md).
        compile = wanted and target.type == "cpu" and compiles()
    # A fine-tuning starts from a record. If there is none, that run is trained first.
    start: Record | None = None
    if isinstance(config, FinetuneConfig):
        before = grid.config(config.start, config.preset, config.seed)
        start = _start_of(store, before, text.identity)
        if start is None:
            start = train(
                before,
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
    with reproducible(target), run_folder.lock():
        # The second look for a record: now for exactly this text, and under the lock, since another
        # process may have finished the run in the meantime.
        done = run_folder.record(keep_weights)
        if done is not None:
            return done
        run_folder.check_free()
        # The run starts from the beginning, or from its checkpoint if there is one.
        run: Run
        if isinstance(config, FinetuneConfig) and start is not None:
            run = FinetuneRun(config, text, target, start)
        else:
            run = Run(config, text, target)
        load_checkpoint(run, run_folder.checkpoint)
        # Whether a step is compiled, or one CUDA graph. The record says which.
        if graph is None:
            graph = may_graph(run) and not compile
        if graph:
            run.graph = GraphedStep(run)
        if compile:
            run.forward = torch.compile(run.loss)
        conditions = conditions_of(run, compile, graph)
        if run.parts[-1:] != [conditions]:  # a new run, or one that continues on another machine
            run.parts.append(conditions)
        checkpoint = run_folder.checkpoint
        reason, report = to_its_end(run, progress, checkpoint, checkpoint_seconds)
        return save_run(run, run_folder.folder, reason, report, keep_weights)


def save_run(
    run: Run, folder: Path, reason: str | None, report: Report | None, keep_weights: bool
) -> Record:
    """Write the record of a run that has ended.

    reason: why the run failed, or None. report: the report of its last evaluation, or None.
    """
    arrays = {}
    if run.alphas:
        arrays["curve"] = torch.stack(run.alphas)
    if report is not None:
        # alpha_1 of every text, from which Sink_1 can be computed again: (n, 1, L, H)
        arrays["final"] = report.alpha[:, :1].float().contiguous()
        if report.star is not None:
            arrays["star"] = report.star.float().contiguous()  # (n, L, H)
    return write_record(
        folder,
        run.config,
        metrics=summary(run, report, reason),
        provenance=run.provenance(),
        weights=run.model.state_dict() if keep_weights else None,
        tokenizer=run.tokenizer if keep_weights else None,
        corpus=run.corpus.identity,
        arrays=arrays or None,
    )


def _check_text(corpus: Corpus, run_folder: RunFolder, own_folder: RunFolder) -> None:
    """Warn if a run is not trained on its config's own text. The warning names the record.

    Raises ValueError if the vocabulary of the text is larger than that of the model.
    """
    size = corpus.vocab_size
    vocabulary = run_folder.config.model.vocab_size
    what = f"corpus {corpus.name!r} with {size} tokens"
    require(
        size <= vocabulary,
        f"{what} is too large for a model of {vocabulary}: "
        "raise vocab_size or load the corpus with fewer",
    )
    if run_folder.folder != own_folder.folder or size != vocabulary:
        warnings.warn(
            f"training on {what} in place of {public_name(run_folder.config.data.corpus)!r} "
            f"with {vocabulary}, its own text: the record is {run_folder.name}",
            stacklevel=3,
        )


def _start_of(store: Runs, before: RunConfig, corpus: Identity) -> Record | None:
    """The record that a fine-tuning starts from, or None if this run has yet to be trained.

    before: the config of the run to start from. corpus: its text. If there is no record on this
    text, one on the config's own text is taken.
    """
    record = store.of(before, corpus).record()
    if record is None:
        record = store.of(before).record()
    if record is not None and record.status == "done" and record.weights is None:
        return None
    return record


def to_its_end(
    run: Run, progress: bool, checkpoint: Path, checkpoint_seconds: float
) -> tuple[str | None, Report | None]:
    """Train a run to its end.

    Returns why it failed, or None, and the report of the last evaluation, or None if it failed.
    checkpoint: the file that keeps its state.
    """
    schedule = run.config.train
    # The evaluation before the first step shows the effect of position terms and biases alone.
    if not run.curve:
        run.evaluate([])
    saved = time.monotonic()
    began = saved - run.seconds
    bar = tqdm(
        total=schedule.steps,
        initial=run.step,
        desc=f"{run.config.experiment} seed {run.config.seed}",
        unit="step",
        leave=False,
        mininterval=2,
        disable=None if progress else True,  # no bar if stderr is no terminal
    )
    with bar:
        while True:
            run.advance()
            bar.update()
            ended = run.step == schedule.steps
            if run.step % schedule.eval_every and not ended:
                continue
            reason, report = evaluated(run)
            run.seconds = time.monotonic() - began
            if ended or reason is not None:
                return reason, report
            point = run.curve[-1]
            bar.set_postfix(loss=point["valid_loss"], sink=point["sink_1"])
            # A checkpoint is possible only right after an evaluation, when no losses of earlier
            # steps wait to be averaged.
            if time.monotonic() - saved > checkpoint_seconds:
                save_checkpoint(run, checkpoint)
                saved = time.monotonic()


def conditions_of(run: Run, compiled: bool, graph: bool) -> Json:
    """The device on which, and the way in which, a run is trained, for its provenance."""
    conditions: Json = {
        "device": device_name(run.device),
        "compiled": compiled,
        "precision_used": run.precision,
        "instruction_set": instruction_set(),
    }
    if graph:
        conditions["graph"] = True
    return conditions


def evaluated(run: Run) -> tuple[str | None, Report | None]:
    """Evaluate a run. Returns (None, the report), or (the reason, None) if the run has failed."""
    losses = run.losses()
    uniform_loss = math.log(run.config.model.vocab_size)  # ln V, the loss of a uniform guess
    reason = divergence(losses, hopeless=2 * uniform_loss)
    if reason is None:
        report = run.evaluate(losses)
        if report is not None:
            return None, report
        reason = "the model computed what is not finite"
    return f"{reason} by step {run.step}", None


def may_graph(run: Run) -> bool:
    """Whether a step can be one CUDA graph. It needs a GPU, and AdamW, whose state stays there."""
    on_gpu = run.device.type == "cuda"
    return on_gpu and run.fixed_shapes and run.config.train.optimizer == "adamw"


def divergence(losses: list[float], hopeless: float) -> str | None:
    """Why a run with these training losses has failed, or None.

    hopeless: twice the loss of a uniform guess. A run whose losses all exceed it has failed.
    """
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    if min(losses) > hopeless:
        return f"the loss was over {hopeless:.2f}, twice that of a uniform guess"
    return None


@cache
def compiles() -> bool:
    """Whether torch.compile works here. On a CPU it needs a C++ compiler. Warns if it fails."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # any error of a missing or broken compiler
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}): training goes on without, "
            "slower, with other last digits; a C++ compiler mends that",
            stacklevel=2,
        )
        return False
    return True


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file. If this fails or is killed, the previous file stays."""
    state: Json = {"of": checkpoint_key(run), "model": run.model.state_dict()}
    state["optimizers"] = [optimizer.state_dict()["state"] for optimizer in run.optimizers]
    for name in run.PROGRESS:
        state[name] = getattr(run, name)
    file = io.BytesIO()
    torch.save(state, file)
    data = file.getvalue()
    digest = hashlib.sha256(data).digest()
    replace_file(path, digest + data)


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue `run` from the checkpoint at `path`.

    If the checkpoint cannot be used, a warning says why, and the run starts from step 0.
    """
    state = _state_of(run, path)
    if not state:
        return
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        # The learning rates and similar settings are not from the checkpoint, because this process
        # may use another device.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved, "param_groups": groups})
    for name in run.PROGRESS:
        setattr(run, name, state[name])


def checkpoint_key(run: Run) -> list[Any]:
    """The identity of a run, which its checkpoint must have: config, text and start."""
    return [CHECKPOINT, config_hash(run.config), run.fingerprint]


def read_checkpoint(path: Path) -> Json:
    """The state in a checkpoint, on the CPU. Raises `CorruptRecord` if any byte has changed."""
    blob = path.read_bytes()
    digest = blob[:DIGEST]
    data = blob[DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is truncated or changed")
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _state_of(run: Run, path: Path) -> Json:
    """The state in a checkpoint, or an empty dict if there is none that can be used.

    A warning says why a checkpoint cannot be used.
    """
    if not path.exists():
        return {}
    try:
        state = read_checkpoint(path)
        if state["of"] == checkpoint_key(run):
            return state
        reason = f"{path.parent.name}/{path.name} is of another config or corpus, or an older form"
    except CorruptRecord as error:
        reason = str(error)
    again = f"{reason}; training starts again from step 0"
    warnings.warn(again, stacklevel=4)
    run.more["restarted"] = again
    return {}


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """A context that makes results reproducible, and restores PyTorch's settings at its end.

    On a CPU it allows one thread, because sums depend on the number of threads. On CUDA it selects
    PyTorch's deterministic kernels; an operation that has none causes a warning with its name. Even
    so, attention's backward pass on CUDA is not reproducible to the bit.
    """
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()  # off, warn or error
    deterministic: Any = torch.utils.deterministic  # its type stubs lack the setting below
    filled = deterministic.fill_uninitialized_memory
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda":
        # cuBLAS reads this variable when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")
        # PyTorch would otherwise fill each new tensor with NaN, which adds a kernel to most of a
        # step's kernels.
        deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = filled


def device_name(device: torch.device) -> str:
    """The device's kind: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
