"""00, 02, from_scratch: the transformer from scratch trains, each suggestion runs, exercises fail and then pass."""

import json
import re
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

import sinkutils
from sinkutils.paths import LEDGER, NOTEBOOKS

matplotlib.use("agg")
SCRATCH = (
    "imports attention config block-class transformer text-sample measure-alpha film-strip loop-train key-of-its-own "
    "sigmoid-weights"
)


def cells_of(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return {cell.id: cell.source for cell in notebook.cells}


@pytest.fixture
def page(corpus, monkeypatch):
    """What the cells of from_scratch define, on a tiny corpus."""
    monkeypatch.setattr(sinkutils, "load_corpus", lambda *arguments: corpus)
    space = SimpleNamespace(colors={}, steps=4, seed=0)
    cells = cells_of("from_scratch")
    for name in SCRATCH.split():
        exec(compile(cells[name], name, "exec"), space.__dict__)
    exec(compile(cells["suggestions"], "suggestions", "exec"), space.__dict__)
    yield space
    plt.close("all")


def test_each_suggestion_trains_and_becomes_a_film_and_its_answer_is_stored(page):
    stored = json.loads((LEDGER / "break_it.json").read_text())
    assert list(stored) == list(page.suggestions) and len(stored) == 9
    for name, config in page.suggestions.items():
        _, history = page.train(config, 4, looks=2)
        assert history.loss.notna().all() and history.step.tolist() == [0, 2, 4], name
        page.film(history, "alpha_1", name)
        assert history.alpha_1.iloc[-1].shape == np.shape(stored[name]["alpha_1"]), name


@pytest.mark.parametrize(
    "name", ["00_quickstart", "01_properties", "02_optimization", "from_scratch"]
)
def test_exercises_fail_before_their_solution_and_pass_with_it(page, name):
    source = cells_of(name)["exercises"]
    records = {"seed": [0] * 3, "step": [0, 2100, 2400]}
    records |= {"sink_1": [0.0, 6.0, 9.0], "valid_loss": [7.0, 3.1, 3.0]}
    space = vars(page) | {"torch": torch, "np": np, "pd": pd, "baseline": pd.DataFrame(records)}
    exercises = re.split(r"^\*\*\d\. ", source, flags=re.MULTILINE)[1:]
    with_code = [exercise.split("<summary>Solution</summary>") for exercise in exercises]
    with_code = [parts for parts in with_code if len(parts) == 2]  # others are answered in words
    assert len(with_code) >= 2
    for question, solution in with_code:
        codes = [
            re.search(r"```python\n(.*?)```", part, re.DOTALL) for part in (question, solution)
        ]
        check, answer = (code.group(1) for code in codes)
        with pytest.raises(NameError):
            exec(check, space)
        exec(answer, space)
        exec(check, space)
