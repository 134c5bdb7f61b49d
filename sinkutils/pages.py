"""Running the notebooks: all of them headlessly into a folder, or where they are, for committing their outputs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from sinkutils.paths import FIGURES, NOTEBOOKS
from sinkutils.plots.theme import COMMITTED

CELL_SECONDS = 1200
WIDGET = "application/vnd.jupyter.widget-view+json"


def find_notebooks(only: Sequence[str] | None = None) -> list[Path]:
    """The numbered notebooks and the appendix, or those whose names start with one of `only`.

    Raises ValueError if none does, FileNotFoundError outside a checkout, as the package brings none.
    """
    if not NOTEBOOKS.is_dir():
        raise FileNotFoundError("the notebooks are in a checkout of the repository: run this command in one")
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")) + sorted(NOTEBOOKS.glob("appendix/*.ipynb"))
    chosen = [path for path in paths if only is None or path.name.startswith(tuple(only))]
    if not chosen:
        there = ", ".join(path.stem for path in paths)
        raise ValueError(f"no notebook starts with {' or '.join(only or ())}; there are {there}")
    return chosen


def run_notebooks(parameters: dict[str, Any], output: Path, only: Sequence[str] | None = None) -> list[str]:
    """Execute the notebooks into `output` with these parameters; returns the names of those that failed.

    Raises ValueError, before any is run, for a parameter that one of them does not have.
    """
    import papermill

    paths = find_notebooks(only)
    for path in paths:
        known = papermill.inspect_notebook(path)
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            raise ValueError(f"{path.stem} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    output.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"cwd": NOTEBOOKS, "progress_bar": False, "execution_timeout": CELL_SECONDS}
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
    """Execute the notebooks where they are, with the parameters that stand in them.

    Cell ids and tags stay. What differs on every run is left out: times, progress bars, warnings, widgets. Of all
    notebooks, figures/ then holds what they saved and nothing older. Raises nbclient's CellExecutionError for a cell
    that fails; the notebook is then left as it was.
    """
    import nbformat
    from nbclient import NotebookClient

    started = time.time()
    options: dict[str, Any] = {"timeout": CELL_SECONDS, "record_timing": False, "coalesce_streams": True}
    for path in tqdm(find_notebooks(only), unit="notebook"):
        book = nbformat.read(path, as_version=4)
        client = NotebookClient(book, resources={"metadata": {"path": NOTEBOOKS}}, **options)
        client.execute(env=os.environ | {COMMITTED: "1"})
        book.metadata.pop("widgets", None)
        for cell in book.cells:
            if cell.cell_type == "code":
                shown = [output for output in cell.outputs if output.get("name") != "stderr"]
                cell.outputs = [output for output in shown if WIDGET not in output.get("data", {})]
        nbformat.write(book, path)
    if only is None:
        for figure in FIGURES.glob("*.*"):
            if figure.stat().st_mtime < started:
                figure.unlink()
