"""Executing the notebooks headlessly: copies into a folder, or in place to commit the outputs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from sinkutils.checks import Refused
from sinkutils.paths import FIGURES, NOTEBOOKS, RENDERED

CELL_SECONDS = 1200  # the most that one cell may take
WIDGET = "application/vnd.jupyter.widget-view+json"


def find_notebooks(only: Sequence[str] = ("",)) -> list[Path]:
    """The notebooks, appendix included, whose names start with one of `only`.

    Raises ValueError if no notebook starts with one of them. This is always so outside a checkout,
    because the installed package contains no notebooks.
    """
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    paths += sorted(NOTEBOOKS.glob("appendix/*.ipynb"))
    if not paths:
        raise Refused(
            f"there are no notebooks in {NOTEBOOKS}: they are in a checkout of the repository"
        )
    for start in only:
        if not any(path.name.startswith(start) for path in paths):
            stems = ", ".join(path.stem for path in paths)
            raise Refused(f"no notebook in {NOTEBOOKS} starts with {start}; there are {stems}")
    return [path for path in paths if path.name.startswith(tuple(only))]


def run_notebooks(
    parameters: Mapping[str, Any], output: Path | None, only: Sequence[str] = ("",)
) -> list[str]:
    """Execute the notebooks with papermill, and return the names of those that failed.

    output: the folder that receives the executed copies. None executes in place: the outputs of
        each notebook that runs to its end replace the committed ones. Whatever differs on every run
        is left out (warnings, progress bars, widgets, generated names of tables). If no notebook
        fails, the figures that they saved are copied to figures/.
    Raises ValueError, before any notebook runs, if one of them lacks one of the parameters.
    """
    import papermill

    paths = find_notebooks(only)
    for path in paths:
        known = papermill.inspect_notebook(path)
        unknown = sorted({*parameters} - {*known})
        if unknown:
            raise Refused(
                f"{path.stem} has no parameter {', '.join(unknown)}; it has {', '.join(known)}"
            )
    output = output and output.absolute()
    figures = RENDERED / "figures"  # where `su.save` writes
    if output is None:
        shutil.rmtree(figures, ignore_errors=True)
    (output or figures).mkdir(parents=True, exist_ok=True)
    failed: list[str] = []

    def execute(path: Path) -> None:
        written = output and output / path.name
        try:
            done = papermill.execute_notebook(
                path,
                written,
                parameters,
                kernel_name="python3",
                execution_timeout=CELL_SECONDS,
                progress_bar=False,
                coalesce_streams=True,
            )
        except papermill.PapermillExecutionError as error:
            failed.append(path.stem)
            tqdm.write(f"{path.stem} failed: {error}")  # the error shows the cell and the line
            return
        if output is None:
            _refresh(path, done)
        tqdm.write(f"{path.stem} -> {written or path}")

    bar = tqdm(total=len(paths), unit="notebook")
    # Two notebooks run at a time, on one core each, unless the environment says how many threads.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # Not papermill's `cwd`: it moves the whole process, and two threads do not lead it back.
    with patch.dict(os.environ, threads), chdir(NOTEBOOKS), ThreadPoolExecutor(2) as pool, bar:
        running = [pool.submit(execute, path) for path in paths]
        try:
            for future in as_completed(running):
                future.result()
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            # A thread may be about to start another kernel, so we end kernels until none is left.
            while not all(future.done() for future in running):
                end_kernels()
                time.sleep(0.1)
            raise
    if output is None and not failed:
        shutil.copytree(figures, FIGURES, dirs_exist_ok=True)
    return failed


def end_kernels() -> None:
    """Kill the kernels that this process started: a ^C in the terminal does not reach them."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "ipykernel_launcher" in child.cmdline():
                child.kill()


def _refresh(path: Path, ran: Any) -> None:
    """Write the outputs of an execution into the notebook, without what differs on every run.

    ran: the executed notebook, as papermill returns it.
    """
    import nbformat

    book = nbformat.read(path, as_version=4)
    # Papermill's copy has the same cells, but its metadata holds notes on the run. So only the
    # outputs are taken from it.
    for cell, done in zip(book.cells, ran.cells, strict=True):
        if cell.cell_type != "code":
            continue
        cell.execution_count = done.execution_count
        cell.outputs = []
        for output in done.outputs:
            data = output.get("data", {})
            if output.get("name") == "stderr" or WIDGET in data:  # warnings, bars, widgets
                continue
            page = data.get("text/html")
            if page is not None:  # pandas gives a styled table a random name on every run
                data["text/html"] = re.sub("T_[0-9a-f]{5}", f"T_{cell.id}", page)
            cell.outputs.append(output)
    nbformat.write(book, path)
