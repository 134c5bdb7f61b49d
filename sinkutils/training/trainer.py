"""One run from one config: deterministic, resumable at any instant, recorded in any case."""

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
from sinkutils.data.corpus import Corpus, Identity, load_corpus, public_name
from sinkutils.measuring.report import Report
from sinkutils.paths import replace_file
from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig, Json, RunConfig, config_hash
from sinkutils.study.record import (
    CHECKPOINT_SECONDS,
    CorruptRecord,
    Record,
    write_record,
)
from sinkutils.study.store import Folder, RunFolder, Runs
from sinkutils.training.final import summary
from sinkutils.training.finetune import FinetuneRun
from sinkutils.training.graph import GraphedStep
from sinkutils.training.run import Run, instruction_set

CHECKPOINT = 2  # raised when what a checkpoint holds changes
DIGEST = hashlib.sha256().digest_size  # bytes of a digest, which stands before the rest


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
    """Train one run to its end and write its record; a finished one is returned as it is.

    A run that was killed goes on from its last checkpoint and ends in the same record, bit for bit
    on one kind of CPU. A run that diverges is recorded with status "failed" and the reason. On CPU
    it uses one thread, so that its numbers depend neither on the number of cores nor on what runs
    beside it. Raises `RunLocked` while another process trains the same run.

    A fine-tuning starts from the weights of a record, which is trained first where there is none or
    it has none; raises ValueError where that run failed. For instructions of one's own: its config
    with other `instructions` (a hub id, a .jsonl file) and another `experiment`, under which the
    record then stands.

    corpus: the text (of a fine-tuning, that of the sink metric), or where to load it from, in place
      of the config's own. Only a record on that very text is then returned, and the run's own
      stands apart (`study.store.Runs.of`).
    compile: use torch.compile; None: on a CPU as the preset says, where it works (`compiles`).
    graph: make each step one CUDA graph (`training.graph`); None: on a GPU, if the run allows it.
    """
    real("checkpoint_seconds", checkpoint_seconds, "a finite number of at least 0")
    store = Runs(runs)
    target = find_device(device)
    if corpus is None:  # a record is found without opening the text
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
        # On a GPU it has given NaN where eager steps did not (docs/scaling.md).
        compile = wanted and target.type == "cpu" and compiles()
    # Of a fine-tuning, what it starts from: a record, or a run of its own before this one.
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
        done = run_folder.record(keep_weights)  # also by whoever held the lock before
        if done is not None:
            return done
        run_folder.check_free()
        # The run as it begins, or as its checkpoint left it.
        run: Run
        if isinstance(config, FinetuneConfig) and start is not None:
            run = FinetuneRun(config, text, target, start)
        else:
            run = Run(config, text, target)
        load_checkpoint(run, run_folder.checkpoint)
        # How a step is made; the record says so.
        if graph is None:
            graph = may_graph(run) and not compile
        if graph:
            run.graph = GraphedStep(run)
        if compile:
            run.forward = torch.compile(run.loss)
        conditions = conditions_of(run, compile, graph)
        if run.parts[-1:] != [conditions]:  # a run may go on on another machine
            run.parts.append(conditions)
        checkpoint = run_folder.checkpoint
        reason, report = to_its_end(run, progress, checkpoint, checkpoint_seconds)
        return save_run(run, run_folder.folder, reason, report, keep_weights)


def save_run(
    run: Run, folder: Path, reason: str | None, report: Report | None, keep_weights: bool
) -> Record:
    """Write the record of a run that has ended.

    reason: of its failure, None if it has none. report: of its last evaluation.
    """
    return write_record(
        folder,
        run.config,
        metrics=summary(run, report, reason),
        provenance=run.provenance(),
        weights=run.model.state_dict() if keep_weights else None,
        tokenizer=run.tokenizer if keep_weights else None,
        corpus=run.corpus.identity,
        arrays={"curve": torch.stack(run.alphas)} if run.alphas else None,
    )


def _check_text(corpus: Corpus, run_folder: RunFolder, own_folder: RunFolder) -> None:
    """Warn where a run is not on the text that its config means, and say where its record will be.

    Raises ValueError where the text has more kinds of tokens than the model.
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
    """The record that a fine-tuning starts from; None where it is yet to be trained.

    before: its config. corpus: its text, if there is a record on that; else the config's own.
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
    """Train a run; returns why it failed, or None, and the report of its last evaluation.

    checkpoint: where it keeps its state.
    """
    schedule = run.config.train
    if not run.curve:  # what position terms and biases do by themselves, without a step
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
        disable=not progress,
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
            # Only here is the state whole: no losses wait to be averaged.
            if time.monotonic() - saved > checkpoint_seconds:
                save_checkpoint(run, checkpoint)
                saved = time.monotonic()


def conditions_of(run: Run, compiled: bool, graph: bool) -> Json:
    """On what and in which way a run is trained, for its provenance."""
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
    """Why a run has failed by this step, or None; and its report at this step where it has not."""
    losses = run.losses()
    # A uniform guess over V tokens has a loss of ln V.
    of_a_guess = math.log(run.config.model.vocab_size)
    reason = divergence(losses, hopeless=2 * of_a_guess)
    if reason is None:
        report = run.evaluate(losses)
        if report is not None:
            return None, report
        reason = "the model computed what is not finite"
    return f"{reason} by step {run.step}", None


def may_graph(run: Run) -> bool:
    """Whether a step can be one CUDA graph: on a GPU, with AdamW, whose state stays there."""
    on_gpu = run.device.type == "cuda"
    return on_gpu and run.fixed_shapes and run.config.train.optimizer == "adamw"


def divergence(losses: list[float], hopeless: float) -> str | None:
    """Why a run with these training losses has failed, or None; `hopeless` is twice a guess's."""
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    if min(losses) > hopeless:
        return f"the loss was over {hopeless:.2f}, twice that of a uniform guess"
    return None


@cache
def compiles() -> bool:
    """Whether torch.compile works here; on a CPU it needs a C++ compiler. Warns if it does not."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # whatever a missing or broken compiler raises
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}): training goes on without, "
            "slower, with other last digits; a C++ compiler mends that",
            stacklevel=2,
        )
        return False
    return True


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file, or leave the previous one: a full disk, a kill."""
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
    """Continue `run` from `path` if it holds this run's state; else say why not, and start anew."""
    state = _state_of(run, path)
    if not state:
        return
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        # Rates and the like are those of this start, which may be on another device.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved, "param_groups": groups})
    for name in run.PROGRESS:
        setattr(run, name, state[name])


def checkpoint_key(run: Run) -> list[Any]:
    """What a checkpoint has to be of: the config, and the text and whatever a run starts from."""
    return [CHECKPOINT, config_hash(run.config), run.fingerprint]


def read_checkpoint(path: Path) -> Json:
    """The state in a file, on the CPU. Raises `CorruptRecord` if a single byte has changed."""
    blob = path.read_bytes()
    digest = blob[:DIGEST]
    data = blob[DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is truncated or changed")
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _state_of(run: Run, path: Path) -> Json:
    """The state in a file; empty, with a warning that says why, if there is one of no use."""
    if not path.exists():
        return {}
    try:
        state = read_checkpoint(path)
        if state["of"] == checkpoint_key(run):
            return state
        reason = f"{path.parent.name}/{path.name} is of another config or corpus, or an older form"
    except CorruptRecord as error:
        reason = str(error)
    # A sweep finds this warning in the log of its worker by these words (`sweep.AGAIN`).
    warnings.warn(f"{reason}; training starts again from step 0", stacklevel=4)
    return {}


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """What makes numbers repeat, inside, and all as before outside.

    One CPU thread, as sums over threads depend on their number; on CUDA PyTorch's deterministic
    kernels, and a warning by name for an operation that has none. Attention's backward pass does
    not repeat to the bit then either.
    """
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()  # off, warn or error
    deterministic: Any = torch.utils.deterministic  # whose stubs lack the setting
    filled = deterministic.fill_uninitialized_memory
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda":
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")
        # It would write NaN into each new tensor, a kernel more for most of a step's.
        deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = filled


def device_name(device: torch.device) -> str:
    """The kind of machine, without its name: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
