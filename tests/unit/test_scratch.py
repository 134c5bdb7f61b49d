"""Pages 00 and 02: the transformer from scratch trains, each suggestion runs, exercises fail and then pass."""

import re
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import torch

import sinkutils
from sinkutils.paths import NOTEBOOKS

matplotlib.use("agg")
SCRATCH = (
    "imports attention config block-class transformer text-sample measure-alpha film-strip loop-train key-of-its-own "
    "sigmoid-weights"
)


@pytest.fixture
def page(corpus, monkeypatch):
    """What the from-scratch cells of page 02 define, on a tiny corpus."""
    monkeypatch.setattr(sinkutils, "load_corpus", lambda *arguments: corpus)
    space = SimpleNamespace(colors={}, steps=4, seed=0)
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOKS / "02_optimization.ipynb", as_version=4).cells}
    for name in SCRATCH.split():
        exec(compile(cells[name], name, "exec"), space.__dict__)
    exec(compile(cells["suggestions"], "suggestions", "exec"), space.__dict__)
    yield space
    plt.close("all")


def test_each_suggestion_trains_and_becomes_a_film(page):
    assert len(page.suggestions) >= 6
    for name, config in page.suggestions.items():
        _, history = page.train(config, 4, looks=2)
        assert history.loss.notna().all() and history.step.tolist() == [0, 2, 4], name
        page.film(history, "alpha_1", "black", name)


@pytest.mark.parametrize("name", ["00_quickstart", "02_optimization"])
def test_exercises_fail_before_their_solution_and_pass_with_it(page, name):
    source = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells[-1].source
    records = {"seed": [0] * 3, "step": [0, 2100, 2400], "sink_1": [0.0, 6.0, 9.0], "valid_loss": [7.0, 3.1, 3.0]}
    space = vars(page) | {"torch": torch, "baseline": pd.DataFrame(records)}
    curves = [pd.DataFrame(records).assign(experiment=name) for name in ("lr_x2", "fixed_1", "lr_half")]
    curves[2]["valid_loss"] -= 0.05
    space |= {"curves": pd.concat(curves), "without": torch.full((2, 4), 0.2)}
    space |= {"with_key": SimpleNamespace(star=torch.full((2, 4), 0.5))}
    exercises = re.split(r"^\*\*\d\. ", source, flags=re.MULTILINE)[1:]
    assert len(exercises) >= 2
    for exercise in exercises:
        question, solution = exercise.split("<summary>Solution</summary>")
        check, answer = (re.search(r"```python\n(.*?)```", part, re.DOTALL).group(1) for part in (question, solution))
        with pytest.raises(NameError):
            exec(check, space)
        exec(answer, space)
        exec(check, space)
