"""One training run from one config: deterministic, resumable at any instant, recorded whether it converges or not."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from tqdm.auto import tqdm

from sinkutils.checks import device as find_device
from sinkutils.checks import require
from sinkutils.data.corpus import Corpus, load_corpus, public_name
from sinkutils.measuring.report import Report
from sinkutils.model.fast import check_kernels
from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig, RunConfig
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import CHECKPOINT_SECONDS, Record, partial_folder, run_lock, short_name, write_record
from sinkutils.study.store import Runs
from sinkutils.training.checkpoints import WHOLE, load_checkpoint, save_checkpoint
from sinkutils.training.finetune import FinetuneRun
from sinkutils.training.group import ALONE, Group
from sinkutils.training.products import bf16_products
from sinkutils.training.run import Run, arrays, summary


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
) -> Record:
    """Train one run, pre-training or fine-tuning, to its end and write its record; a finished one is returned as it is.

    A run that was killed goes on from its last checkpoint and ends in the same record, bit for bit on one kind of
    machine. A run that diverges is recorded with status "failed" and the reason. On CPU it uses one thread, so
    that its numbers depend neither on the number of cores nor on what runs beside it. Raises `RunLocked` while
    another process trains the same run.

    A fine-tuning starts from the weights of a record, which is trained first where there is none or it has none; raises
    ValueError where that run failed. For instructions of one's own: its config with other `instructions` (a hub id, a
    .jsonl file) and another `experiment`, under which the record then stands.

    corpus: the text (of a fine-tuning, that of the sink metric), or where to load it from, in place of the config's
    own. Only a record on that very text is then returned, and the run's own stands apart (`study.store.Runs.place`).
    compile: use torch.compile; None: as the preset says, where it works (`compiles`).
    group: the processes that train this run together, each of which calls `train` (see `group.joined`).
    """
    store = Runs(runs)
    if corpus is None:  # a record is found without opening the text
        done = group.once(store.get, config, None, keep_weights)
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
    text = corpus.identity  # also where none was asked for: a record on another text is never replaced
    folder = group.once(store.place, config, text)
    size, most = corpus.vocab_size, config.model.vocab_size
    sizes = f"corpus {corpus.name!r} has {size} tokens, the model {most}"
    require(size <= most, f"{sizes}: raise vocab_size or load the corpus with fewer")
    if asked and (corpus.name, size) != (public_name(config.data.corpus), most):
        change = f"corpus {corpus.name!r} with {size} tokens in place of {config.data.corpus!r} with {most}"
        warnings.warn(f"training on {change}: the record is {short_name(folder)}", stacklevel=2)
    elif folder != store.place(config):
        kept = f"{short_name(store.place(config))} is on another text by the name of {corpus.name!r} and stays"
        warnings.warn(f"{kept}: the record is {short_name(folder)}", stacklevel=2)
    if compile is None:
        compile = PRESETS[config.preset].compile and compiles() if config.preset in PRESETS else False
    start = None
    if isinstance(config, FinetuneConfig):
        before = grid.config(config.start, config.preset, config.seed)
        start = group.once(lambda: store.get(before, text) or store.get(before))
        if start is None or (start.status == "done" and start.weights is None):
            options: dict[str, Any] = {"device": device, "compile": compile, "checkpoint_seconds": checkpoint_seconds}
            given = corpus if asked else None
            start = train(before, runs, corpus=given, keep_weights=True, progress=progress, group=group, **options)
        failed = f"{config.preset}/{config.start}/{config.seed}, and that run failed to train"
        reason = start.metrics["reason"]
        require(start.status == "done", f"{config.experiment} starts from {failed} ({reason})")
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread(target))
        stack.enter_context(deterministic_kernels(target))
        stack.enter_context(bf16_products(target))
        group.once(stack.enter_context, run_lock(folder))
        done = group.once(store.get, config, text, keep_weights)  # also by whoever held the lock before
        if done is not None:
            return done
        kind = Run if start is None else FinetuneRun
        run = kind(config, corpus, target, group, start)
        checkpoint = partial_folder(folder) / "checkpoint.safetensors"
        way = {"device": device_name(target), "compiled": compile}
        run.ways = [way]
        load_checkpoint(run, checkpoint)
        reason, report = _loop(run, checkpoint, checkpoint_seconds, progress, compile)
        provenance = {
            **run.provenance(),
            **way,
            "wall_seconds": round(run.seconds, 1),
            "tokens_per_second": round(run.step * run.tokens_per_step / run.seconds),
            "processes": group.size,
            "parallel": group.parallel,
        }
        weights = dict(get_model_state_dict(run.model, options=WHOLE)) if keep_weights else None  # on rank 0
        tokenizer = run.tokenizer if keep_weights else None
        parts = (summary(run, report, reason), provenance, weights, tokenizer, corpus.identity, arrays(run, report))
        return group.once(write_record, folder, config, *parts)


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
    before, first = run.seconds, run.step
    if not run.curve:  # an untrained control: what position terms and biases do by themselves
        point, report = run.evaluate()
        if report is not None:
            run.keep({**point, **run.steps([])}, report)
    name, steps = f"{config.experiment} seed {config.seed}", config.train.steps
    with tqdm(
        total=steps, initial=first, disable=not progress, unit="step", leave=False, desc=name, mininterval=1
    ) as bar:
        while run.step < steps:
            run.advance(forward)
            bar.update()
            ending = run.step == steps
            if run.step % config.train.eval_every and not ending:
                continue
            losses = run.group.mean(torch.stack([loss for loss, _ in run.passed])).tolist()
            failure = divergence(losses, hopeless)
            if not failure:
                point, report = run.evaluate()
                failure = divergence([point["valid_loss"]], hopeless)
                failure = failure or (None if report is not None else "the model computed what is not finite")
            passed = time.monotonic() - started
            run.seconds = before + passed
            if failure:
                return f"{failure} by step {run.step}", None
            assert report is not None
            run.keep({**point, **run.steps(losses), "train_loss": sum(losses) / len(losses)}, report)
            run.passed.clear()
            rate = int((run.step - first) * run.tokens_per_step / passed)
            bar.set_postfix(loss=f"{point['valid_loss']:.3f}", sink=f"{point['sink_1']:.1f}%", tokens_per_s=rate)
            # Only here is the state whole: no losses wait to be averaged. Rank 0's clock counts.
            if not ending and run.group.once(lambda since=saved: time.monotonic() - since > checkpoint_seconds):
                save_checkpoint(run, checkpoint)
                saved = time.monotonic()
    return None, report


def divergence(losses: list[float], hopeless: float) -> str | None:
    """Why a run with these losses has failed, or None: a loss that is not finite, or far above a uniform guess."""
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    if min(losses) > hopeless:
        return f"the loss was over {hopeless:.2f}, twice that of a uniform guess"
    return None


@cache
def compiles() -> bool:
    """Whether torch.compile works here: on a CPU it needs a C++ compiler. Warns where it does not."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # whatever a missing or broken compiler raises
        lack = f"torch.compile does not work here ({type(error).__name__}): training goes on without, slower"
        warnings.warn(f"{lack}, with other last digits; a C++ compiler mends that", stacklevel=2)
        return False
    return True


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One CPU thread inside, as before outside: sums over threads would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """PyTorch's deterministic CUDA kernels inside, with a warning by name where it has none; as before outside."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    before = torch.get_deterministic_debug_mode()  # off, warn or error
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def device_name(device: torch.device) -> str:
    """The kind of machine, without its name: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
