"""The state of an unfinished run on disk, so that a killed run goes on where it was (`training.Run`)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkutils.study.record import CorruptRecord, config_hash, read_tensors, write_tensors

if TYPE_CHECKING:
    from sinkutils.training.run import Run


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file, or leave the previous one as it was (a full disk, a kill)."""
    tensors = {f"model.{name}": value for name, value in run.group.weights(run.model).items()}
    for index, state in run.group.optimizer_state(run.model, run.optimizer).items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    if run.alphas:
        tensors["alphas"] = torch.stack(run.alphas)
    extra = {
        "config_sha256": config_hash(run.config),
        "corpus_sha256": run.fingerprint,
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
    run.alphas = list(tensors.get("alphas", ()))  # on rank 0, which writes the record


def read_checkpoint(run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors and the rest of a checkpoint of this run; nothing and None where there is none that can be used."""
    if not path.exists():
        return {}, None
    try:
        tensors, extra = read_tensors(path)
    except CorruptRecord as error:
        warnings.warn(f"{error}; training starts again from step 0", stacklevel=4)
        return {}, None
    if (extra["config_sha256"], extra["corpus_sha256"]) != (config_hash(run.config), run.fingerprint):
        warnings.warn(
            f"{path.parent.name}/{path.name} is of another config or corpus; training starts again from step 0",
            stacklevel=4,
        )
        return {}, None
    return tensors, extra
