"""What the notebooks share: the live run, records that are trained when missing."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from sinkutils.measuring.own import subject
from sinkutils.showing import names
from sinkutils.showing.explorer import explore
from sinkutils.showing.pages import WIDTH, put
from sinkutils.showing.svg import Picture
from sinkutils.showing.tables import plain
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import config, keeps_weights, plan, resolve, unavailable
from sinkutils.study.paper import paper_rows
from sinkutils.study.record import Record
from sinkutils.study.store import Runs
from sinkutils.training.trainer import train


def live_run(bias: str = "k", *, seed: int = 0, device: str | None = None, steps: int = 2500) -> Record:
    """Train the quickstart's model, the laptop's with any first token and a bias of Table 4, in about a minute.

    It is trained anew each time, in a temporary folder: it is a demonstration, not a record of the study, with small
    batches for many steps in that time, and not compiled, which would take as long as it saves.
    """
    base = config("default", "laptop", seed)
    model = replace(base.model, attention=replace(base.model.attention, bias=bias))
    task = replace(base.train, steps=steps, batch_size=8, learning_rate=4e-3, eval_every=steps // 15)
    run = replace(base, experiment=f"quickstart_{bias}_bias", model=model, train=task)
    folder = tempfile.mkdtemp(prefix="sinkutils-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train(run, folder, device=device, keep_weights=True, compile=False)


def record_or_train(
    name: str, preset: str, seed: int = 0, recompute: str = "missing", device: str | None = None, weights: bool = False
) -> Record | None:
    """The record of an experiment or a fine-tuning, or what `recorded` makes of one that is missing."""
    return recorded({name: name}, preset, seed, recompute, device, weights)[name]


def look_around(
    name: str, preset: str, seed: int = 0, recompute: str = "never", device: str | None = None, first: str | None = None
) -> Picture | None:
    """An explorer of a recorded model on natural texts, with what training put first, or `first` (`Subject.inputs`).

    None, with a line, where the record or its weights are missing and are not to be made.
    """
    record = record_or_train(name, preset, seed, recompute, device, weights=True)
    if record is None:
        return None
    own = subject(str(record.folder), device)
    ids = own.inputs("natural", 4, min(32, own.length), first=first)
    return explore(own.model, ids, names.model(resolve(name, preset), preset), own.tokenizer)


def ensure(
    items: Sequence[str], preset: str, seed: int = 0, recompute: str = "missing", device: str | None = None
) -> None:
    """Train what is not recorded of these items of the paper, or name it in a line where recompute is "never".

    What the preset cannot hold is left out. Raises ValueError for an unknown item, preset or `recompute`.
    """
    refused = unavailable(preset)
    experiments = dict.fromkeys(row.experiment for item in items for row in paper_rows(item))
    here = [name for name in experiments if name not in refused and (name == "base" or not experiment(name).download)]
    recorded({name: name for name in here}, preset, seed, recompute, device)


def recorded(
    experiments: Mapping[str, str],
    preset: str,
    seed: int = 0,
    recompute: str = "missing",
    device: str | None = None,
    weights: bool = False,
) -> dict[str, Record | None]:
    """The records of experiments and fine-tunings by label; those that are missing are trained.

    Where recompute is "never" one line names them, with the command, and their values are None. weights: a record
    without its weights is missing too. Raises ValueError for an unknown name, preset or `recompute`.
    """
    if recompute not in ("never", "missing"):
        raise ValueError(f"recompute must be 'never' or 'missing', got {recompute!r}")
    records: dict[str, Record | None] = {}
    missing: dict[str, str] = {}
    for label, name in experiments.items():
        run = config(name, preset, seed)
        record = Runs().get(run, weights=weights)
        if record is None and recompute == "missing":
            record = train(run, device=device, keep_weights=weights or keeps_weights(run))
        if record is None:
            missing[run.experiment] = names.of(run.experiment, preset)
        records[label] = record
    if missing:
        what = "; ".join(missing.values()) if len(missing) < 12 else f"{len(missing)} of {len(records)} runs"
        lines = f"Not recorded yet: {'the weights of ' * weights}{what}, seed {seed}. To make what is missing:"
        commands = [f"sweep --preset {preset}"]
        if weights:
            commands = [f"train {name} --preset {preset} --seed {seed} --keep-weights" for name in missing]
        elif not {(name, seed) for name in missing} <= {(run.experiment, run.seed) for run in plan(preset)}:
            commands = [f"sweep --preset {preset} --seeds {seed} --only {' '.join(missing)}"]
        print("\n    python -m sinkutils ".join([textwrap.fill(lines, WIDTH), *commands]))
    return records


def show(table: pd.DataFrame) -> None:
    """Show a table of `paper_beside_ours`, rounded, the same on every run; in a page it is folded."""
    text = plain(table)
    items = ", ".join(table["item"].unique())
    page = f"<details><summary>The numbers: {items}</summary>{text.to_html(border=0)}</details>"
    put(text.drop(columns="note").to_string(line_width=WIDTH), page)


def show_frame(frame: pd.DataFrame, digits: int = 2) -> None:
    """Show all of a table, "-" where there is no value; rows that are only numbered are shown without their numbers.

    Of an empty table one line says that nothing is recorded.
    """
    if frame.empty:
        print("nothing recorded yet")
        return
    frame, index = frame.round(digits), not isinstance(frame.index, pd.RangeIndex)
    text = frame.to_string(index=index, na_rep="-", line_width=WIDTH, max_colwidth=60)
    put(text, frame.to_html(index=index, na_rep="-"))
