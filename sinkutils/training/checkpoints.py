"""The state of an unfinished run on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import state_dict as dcp

from sinkutils.study.config import Json
from sinkutils.study.files import not_saved, sync_folder, write_synced
from sinkutils.study.record import CorruptRecord, config_hash

if TYPE_CHECKING:
    from sinkutils.training.run import Run

# Of a model and its optimisers, however they are cut: whole, by name, in rank 0's memory.
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
DIGEST = hashlib.sha256().digest_size  # bytes of a digest, which stands before the rest


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the whole state to one file, or leave the previous one: a full disk, a kill."""
    model, optimizer = dcp.get_state_dict(run.model, run.optimizers, options=WHOLE)
    state = {"of": identity(run), "model": model, "optimizer": optimizer}
    run.group.once(_write, path, state | {name: getattr(run, name) for name in run.PROGRESS})


def _write(path: Path, state: Json) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    data = file.getvalue()
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_synced(temporary, hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_saved(path.name, error) from error
    sync_folder(path.parent)


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue `run` from `path` if it holds this run's state; else say why not, and start anew."""
    state = _state_of(run, path) if run.group.first else {}
    progress = run.group.once(
        lambda: {name: state[name] for name in run.PROGRESS} if state else None
    )
    if progress is None:
        return
    options = replace(WHOLE, broadcast_from_rank0=run.group.size > 1)
    # Those of rank 0, which hands them out.
    model, optimizer = state.get("model", {}), state.get("optimizer", {})
    dcp.set_model_state_dict(run.model, model, options=options)
    dcp.set_optimizer_state_dict(run.model, run.optimizers, optimizer, options=options)
    for name, value in progress.items():
        setattr(run, name, value)


def identity(run: Run) -> list[str]:
    """What a checkpoint has to be of: the config, and the text and whatever a run starts from."""
    return [config_hash(run.config), run.fingerprint]


def read_checkpoint(path: Path) -> Json:
    """The state in a file, on the CPU. Raises `CorruptRecord` if a single byte has changed."""
    blob = path.read_bytes()
    if hashlib.sha256(blob[DIGEST:]).digest() != blob[:DIGEST]:
        raise CorruptRecord(f"{path.parent.name}/{path.name} is truncated or changed")
    return torch.load(io.BytesIO(blob[DIGEST:]), weights_only=True, map_location="cpu")


def _state_of(run: Run, path: Path) -> Json:
    """The state in a file; empty, with a warning that says why, if there is one of no use."""
    if not path.exists():
        return {}
    try:
        state = read_checkpoint(path)
        if state["of"] == identity(run):
            return state
        reason = f"{path.parent.name}/{path.name} is of another config or corpus"
    except CorruptRecord as error:
        reason = str(error)
    warnings.warn(f"{reason}; training starts again from step 0", stacklevel=4)
    return {}
