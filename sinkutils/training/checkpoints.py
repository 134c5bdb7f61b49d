"""The state of an unfinished run on disk, so that a killed run goes on where it was (`training.Run`)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp

from sinkutils.study.record import CorruptRecord, config_hash, read_tensors, write_tensors

if TYPE_CHECKING:
    from sinkutils.training.run import Run

# Of a model and its optimisers, however they are cut: whole, by name, in rank 0's memory.
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file, or leave the previous one as it was (a full disk, a kill)."""
    weights, state = whole_state(run)
    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    for name, moments in state.get("state", {}).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    if run.alphas:
        tensors["alphas"] = torch.stack(run.alphas)
    extra = {"run": identity(run), "step": run.step, "seconds": run.seconds, "curve": run.curve}
    extra |= {"machines": run.machines, "ways": run.ways}
    run.group.once(write_tensors, path, tensors, extra)


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue `run` from `path` if it holds this run's state; else say why not, and start from step 0."""
    tensors, extra = read_checkpoint(run, path) if run.group.first else ({}, None)
    extra = run.group.once(lambda: extra)
    if extra is None:
        return
    weights, state = whole_state(run)  # of the start, to be filled
    weights.update({name: tensors[f"model.{name}"] for name in weights})
    for name, moments in state.get("state", {}).items():
        moments.update({key: tensors[f"optimizer.{name}.{key}"] for key in moments})
    options = replace(WHOLE, broadcast_from_rank0=run.group.size > 1)
    dcp.set_model_state_dict(run.model, weights, options=options)
    dcp.set_optimizer_state_dict(run.model, run.optimizers, state, options=options)
    run.step, run.seconds, run.curve = extra["step"], extra["seconds"], extra["curve"]
    run.alphas = list(tensors.get("alphas", ()))  # on rank 0, which writes the record
    run.machines = _joined(extra.get("machines", []), run.machines)
    run.ways = _joined(extra.get("ways", []), run.ways)


def _joined(before: list[Any], here: list[Any]) -> list[Any]:
    """What parts of a run were trained on, and what the one that goes on is, where that differs from the last."""
    return [*before, *here] if before[-1:] != here else before


def whole_state(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights by name, and the optimisers' "state" by the parameter's name; on ranks that do not write, nothing."""
    weights, state = dcp.get_state_dict(run.model, run.optimizers, options=WHOLE)
    return (weights, state) if run.group.first else ({}, {})


def identity(run: Run) -> list[str]:
    """What a checkpoint has to be of: the config, and the text with whatever else a run starts from."""
    return [config_hash(run.config), run.fingerprint]


def read_checkpoint(run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors and the rest of a checkpoint of this run; nothing and None where there is none that can be used."""
    if not path.exists():
        return {}, None
    try:
        tensors, extra = read_tensors(path)
        if extra.get("run") == identity(run):
            return tensors, extra
        reason = f"{path.parent.name}/{path.name} is of another config or corpus, or of an older version"
    except CorruptRecord as error:
        reason = str(error)
    warnings.warn(f"{reason}; training starts again from step 0", stacklevel=4)
    return {}, None
