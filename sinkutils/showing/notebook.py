"""What the notebooks share: executing them headlessly, the live run, records that are trained when missing."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from sinkutils.measuring.own import subject
from sinkutils.paths import FIGURES, NOTEBOOKS
from sinkutils.showing import names
from sinkutils.showing.explorer import explore
from sinkutils.showing.figures import COMMITTED
from sinkutils.showing.pages import WIDTH, put
from sinkutils.showing.svg import Picture
from sinkutils.showing.tables import plain
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import config, keeps_weights, plan, resolve, unavailable
from sinkutils.study.paper import paper_rows
from sinkutils.study.record import Record
from sinkutils.study.store import Runs
from sinkutils.training.trainer import train

CELL_SECONDS = 1200  # of a cell that trains nothing; one that trains what is missing may take hours


def find_notebooks(only: Sequence[str] | None = None) -> list[Path]:
    """The numbered notebooks, or those whose names start with one of `only`.

    Raises ValueError if none does, FileNotFoundError outside a checkout, as the package brings none.
    """
    if not NOTEBOOKS.is_dir():
        raise FileNotFoundError("the notebooks are in a checkout of the repository: run this command in one")
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    chosen = [path for path in paths if only is None or any(path.name.startswith(start) for start in only)]
    if not chosen:
        raise ValueError(f"no notebook starts with {' or '.join(only or ())}; there are {[p.stem for p in paths]}")
    return chosen


def run_notebooks(parameters: dict[str, Any], output: Path, only: Sequence[str] | None = None) -> list[str]:
    """Execute the notebooks into `output` with these parameters; returns the names of those that failed.

    Raises ValueError, before any is run, for a parameter that one of them does not have.
    """
    import papermill

    paths = find_notebooks(only)
    for path in paths:
        there = papermill.inspect_notebook(path)
        if unknown := sorted(set(parameters) - set(there)):
            raise ValueError(f"{path.stem} has no parameter {', '.join(unknown)}; it has {', '.join(there)}")
    output.mkdir(parents=True, exist_ok=True)
    limit = None if parameters.get("recompute") == "missing" else CELL_SECONDS
    options: dict[str, Any] = {"cwd": NOTEBOOKS, "progress_bar": False, "execution_timeout": limit}
    failed = []
    for path in tqdm(paths, unit="notebook"):
        outcome = f"-> {output / path.name}"
        try:
            papermill.execute_notebook(path, output / path.name, parameters, kernel_name="python3", **options)
        except papermill.PapermillExecutionError as error:
            failed.append(path.stem)
            outcome = f"failed in cell {error.cell_index}: {error.ename}: {error.evalue}"
        tqdm.write(f"{path.stem} {outcome}")
    return failed


def refresh_notebooks(only: Sequence[str] | None = None) -> None:
    """Execute the notebooks where they are, with the parameters that stand in them, for committing their outputs and
    figures.

    What differs on every run is left out: progress bars, warnings, widgets, times. Of all notebooks, figures/ then
    holds what they saved and nothing older. Raises nbclient's CellExecutionError for a cell that fails.
    """
    import nbformat
    from nbclient import NotebookClient

    started, widget = time.time(), "application/vnd.jupyter.widget-view+json"
    options: dict[str, Any] = {"timeout": CELL_SECONDS, "record_timing": False, "coalesce_streams": True}
    for path in tqdm(find_notebooks(only), unit="notebook"):
        book = nbformat.read(path, as_version=4)
        client = NotebookClient(book, resources={"metadata": {"path": NOTEBOOKS}}, **options)
        client.execute(env=os.environ | {COMMITTED: "1"})
        book.metadata.pop("widgets", None)
        for cell in (cell for cell in book.cells if cell.cell_type == "code"):
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [output for output in kept if widget not in output.get("data", {})]
        nbformat.write(book, path)
    for figure in FIGURES.glob("*.*") if only is None else ():
        if figure.stat().st_mtime < started:
            figure.unlink()


def live_run(bias: str = "k", *, seed: int = 0, device: str | None = None, steps: int = 2500) -> Record:
    """Train the quickstart's model, the laptop's with any first token and a bias of Table 4, in about a minute.

    It is trained anew each time, in a temporary folder: it is a demonstration, not a record of the study, with small
    batches for many steps in that time, and not compiled, which would take as long as it saves.
    """
    base = config("default", "laptop", seed)
    model = replace(base.model, attention=replace(base.model.attention, bias=bias))
    task = replace(base.train, steps=steps, batch_size=8, learning_rate=4e-3, eval_every=steps // 15)
    run = replace(base, experiment=f"quickstart_{bias}_bias", model=model, train=task)
    return train(run, tempfile.mkdtemp(prefix="sinkutils-"), device=device, keep_weights=True, compile=False)


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
