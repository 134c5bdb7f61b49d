"""The notebooks: their form, and that papermill runs them with other parameters."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from helpers import made_up

import sinkutils
from sinkutils.ledger.conclusions import CLAIMS
from sinkutils.pages import NOTEBOOKS, find_notebooks, run_notebooks
from sinkutils.showing import figures, notebook
from sinkutils.study.experiments import experiments
from sinkutils.study.grid import config
from sinkutils.training.trainer import train

PATHS = find_notebooks()
STUDY = find_notebooks(["02", "03", "04", "05", "06", "07", "09"])
matplotlib.use("agg")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_page_begins_with_its_parameters_was_run_from_top_to_bottom_and_is_small(path):
    """Short cells that have ids, small pictures, no error and nothing of the machine or of the day."""
    cells = code_cells(path)
    assert "parameters" in cells[0].metadata.get("tags", [])
    assert all(name in cells[0].source for name in ("preset", "seed", "recompute"))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(len(cell.source.splitlines()) <= 20 for cell in cells)
    assert len({cell.id for cell in cells}) == len(cells)
    text = json.dumps(json.loads(path.read_text()))
    assert not re.search(r"(/tmp/|/home/|site-packages)|\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b", text)
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error", output
        data = output.get("data", {})
        pictures = re.findall(r"data:image/png;base64,([^\"]+)", data.get("text/html", ""))
        assert max(map(len, [data.get("image/png", ""), *pictures])) * 3 / 4 < 150_000


def test_every_notebook_is_linked_from_the_readme_and_every_claim_has_its_verdict_in_one():
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    assert all(path.name in readme for path in PATHS)
    source = "\n".join(cell.source for path in PATHS for cell in code_cells(path))
    assert [claim.id for claim in CLAIMS if not re.search(rf"\b{claim.id}\b", source)] == []


@pytest.fixture(scope="module")
def some(tmp_path_factory, corpus):
    """A few records of the smoke preset, with their weights, where most are missing."""
    folder = tmp_path_factory.mktemp("some")
    for name in ("fixed_1", "sink_token"):
        train(config(name, "smoke"), folder, corpus=corpus, keep_weights=True, progress=False)
    point = {"step": 0, "valid_loss": 3.0, "sink_1": 1.0}
    last = {"step": 2, "valid_loss": 2.9, "sink_1": 2.0, "losses": [3.0, 2.9], "gradient_norms": [1.0, 0.9]}
    on_the_same = {"corpus": corpus.identity}  # text, or the ledger would not read it
    made_up(folder, "sft_softmax", kept=on_the_same, curve=[point, last], final={**last, "train_loss": 2.9})
    return folder


@pytest.mark.parametrize("recorded", ["nothing", "some"])
@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.stem)
def test_it_runs_whatever_is_recorded_and_its_solutions_answer(
    path, recorded, some, runs, corpus, shown, tmp_path, monkeypatch, capsys
):
    if recorded == "some":
        shutil.copytree(some, runs)
    monkeypatch.setattr(sinkutils, "load_corpus", lambda *arguments, **named: corpus)
    monkeypatch.setattr(figures, "RENDERED", tmp_path)
    space = {"display": lambda shown: None}
    for cell in code_cells(path):
        exec(compile(cell.source, f"{path.stem}, cell {cell.id}", "exec"), space)
        if "parameters" in cell.metadata.get("tags", []):
            space |= {"preset": "smoke"}
    plt.close("all")
    drawn = {file.stem for file in tmp_path.glob("figures/*_smoke.png")}
    assert bool(drawn) == (recorded == "some")
    assert "Not recorded yet: " in capsys.readouterr().out
    if recorded == "some":
        answers = solutions(path)
        assert len(answers) >= 3
        for number, answer in enumerate(answers, start=1):
            exec(compile(answer, f"{path.stem}, solution {number}", "exec"), space)
            assert capsys.readouterr().out.strip(), f"solution {number} answers nothing"


def solutions(path):
    """The code of a page's folded solutions."""
    pages = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    folded = re.findall(r"<details><summary>Solution.*?</details>", "\n".join(pages), re.DOTALL)
    return [textwrap.dedent(code) for page in folded for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


IDENTIFIERS = re.compile(
    rf"(?<![\w./-])({'|'.join(re.escape(e.name) for e in experiments() if re.search('[_0-9]', e.name))}"
    r"|sink_[1-4]|sink_star|valid_loss|train_loss|excess_1)(?![\w./])"
)


@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.stem)
def test_pages_speak_of_experiments_by_their_names_in_short_lines_and_figures_have_captions(path):
    for cell in nbformat.read(path, as_version=4).cells:
        texts = [cell.source] if cell.cell_type == "markdown" else []
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text, page = output.get("text", "") + data.get("text/plain", ""), data.get("text/html", "")
            assert max(map(len, text.split("\n"))) <= 100, (cell.id, text)
            texts += [text, re.sub(r'src="data:[^"]*"|<script.*?</script>', "", page, flags=re.DOTALL)]
            assert "image/png" not in data and 'alt=""' not in page, cell.id
            assert page.count("<img ") <= page.count(" alt="), cell.id
            assert "<figcaption" in page or "<img alt=" not in page, cell.id
        for text in texts:
            code = r"```.*?```|`[^`]*`|<code>.*?</code>|^ {4}(python|torchrun).*$"
            found = IDENTIFIERS.search(re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE))
            assert not found, (cell.id, found[0])


def git_status():
    """What git sees of the checkout; nothing outside one."""
    return subprocess.run(["git", "status", "--porcelain"], cwd=NOTEBOOKS, capture_output=True).stdout


def test_papermill_runs_a_notebook_at_another_preset_and_without_records(tmp_path):
    parameters = {"preset": "smoke", "seed": 0, "recompute": "never"}
    before = git_status()
    assert run_notebooks(parameters, tmp_path, ["02"]) == []
    assert git_status() == before  # a lesson leaves the checkout as it was
    (path,) = tmp_path.glob("02_*.ipynb")
    injected = [cell for cell in code_cells(path) if "injected-parameters" in cell.metadata.get("tags", [])]
    assert 'preset = "smoke"' in injected[0].source


DRAW = """
import sys, matplotlib
matplotlib.use("Agg")
from pathlib import Path
import numpy as np, pandas as pd
from sinkutils.showing import figures
figures.FIGURES, figures.RENDERED = Path(sys.argv[1], "figures"), Path(sys.argv[1], "rendered")
figures.theme()
curve = [{"step": s, "train_loss": 1 / s, "valid_loss": 2 / s, "sink_1": s} for s in range(1, 9)]
figures.save(figures.along_training({"a run": [curve]}, {"train_loss": "loss", "sink_1": "sink"}), "curve")
figures.save(figures.sink_by_position(pd.DataFrame(np.eye(3), columns=[1, 2, 3])), "map")
"""


def test_a_lesson_leaves_figures_alone_and_the_same_picture_is_the_same_file(tmp_path):
    drawn = []
    for name, environment in (("lesson", {}), ("again", {}), ("committing", {figures.COMMITTED: "1"})):
        subprocess.run([sys.executable, "-c", DRAW, str(tmp_path / name)], check=True, env=os.environ | environment)
        drawn.append(
            {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*.*g")}
        )
    assert set(drawn[0]) == {f"rendered/figures/{name}" for name in ("curve.png", "curve.svg", "map.png", "map.svg")}
    assert drawn[0] == drawn[1]
    assert drawn[2] == {name.removeprefix("rendered/"): data for name, data in drawn[0].items()}


def test_a_failing_notebook_is_named_and_a_parameter_that_it_has_not_is_refused_before_anything_runs(tmp_path):
    parameters = {"preset": "no_such_preset", "seed": 0, "recompute": "never"}
    assert run_notebooks(parameters, tmp_path, ["02"]) == ["02_optimization"]
    with pytest.raises(ValueError, match="02_optimization has no parameter presett; it has preset, seed"):
        run_notebooks({"presett": "smoke"}, tmp_path / "out", ["02"])
    assert not (tmp_path / "out").exists()


def test_a_table_is_shown_whole_as_text_and_as_html(shown):
    wide = pd.DataFrame({f"column {i}": [i / 3, None] for i in range(30)})
    notebook.show_frame(wide)
    notebook.show_frame(wide.set_index(pd.Index(["first", "second"])))
    for data in shown:
        assert all(f"column {i}" in data["text/plain"] and f"column {i}" in data["text/html"] for i in range(30))
        assert "0.33" in data["text/html"] and "<td>-</td>" in data["text/html"] and "NaN" not in data["text/plain"]
    assert "<th>0</th>" not in shown[0]["text/html"] and "<th>first</th>" in shown[1]["text/html"]
