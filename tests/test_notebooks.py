"""The notebooks: their form, and that papermill runs them with other parameters."""

import json
import re

import nbformat
import pandas as pd
import pytest

from sinkutils.showing import notebook
from sinkutils.showing.notebook import NOTEBOOKS, find_notebooks, record_or_train, run_notebooks

PATHS = find_notebooks()


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_first_code_cell_holds_the_parameters(path):
    first = code_cells(path)[0]
    assert "parameters" in first.metadata.get("tags", [])
    assert all(name in first.source for name in ("preset", "seed", "recompute"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_was_run_from_top_to_bottom_and_no_cell_failed(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cells_are_short_have_ids_and_name_no_paths_or_dates(path):
    cells = code_cells(path)
    assert all(len(cell.source.splitlines()) <= 20 for cell in cells)
    assert len({cell.id for cell in cells}) == len(cells)
    text = json.dumps(json.loads(path.read_text()))
    assert not re.search(r"(/tmp/|/home/|site-packages)|\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b", text)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_pictures_are_small(path):
    for cell in code_cells(path):
        for output in cell.outputs:
            assert len(output.get("data", {}).get("image/png", "")) * 3 / 4 < 150_000


def test_papermill_runs_a_notebook_at_another_preset_and_without_records(tmp_path):
    parameters = {"preset": "smoke", "seed": 0, "recompute": "never"}
    assert run_notebooks(parameters, tmp_path, ["02"]) == []
    (path,) = tmp_path.glob("02_*.ipynb")
    injected = [cell for cell in code_cells(path) if "injected-parameters" in cell.metadata.get("tags", [])]
    assert 'preset = "smoke"' in injected[0].source


def test_a_failing_notebook_is_named_and_does_not_stop_the_others(tmp_path):
    parameters = {"preset": "no_such_preset", "seed": 0, "recompute": "never"}
    assert run_notebooks(parameters, tmp_path, ["02"]) == ["02_optimization"]


def test_what_is_missing_is_shown_as_missing_when_nothing_may_be_trained():
    assert record_or_train("lr_quarter_steps_x4", "smoke", recompute="never") is None
    with pytest.raises(ValueError, match="recompute must be"):
        record_or_train("base", "smoke", recompute="always")


def test_every_notebook_is_linked_from_the_readme():
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    assert all(path.name in readme for path in PATHS)


def test_a_table_is_shown_whole_as_text_and_as_html(monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda data, raw: shown.append(data))
    wide = pd.DataFrame({f"column {i}": [i / 3, None] for i in range(30)})
    notebook.show_frame(wide)
    notebook.show_frame(wide.set_index(pd.Index(["first", "second"])))
    for data in shown:
        assert all(f"column {i}" in data["text/plain"] and f"column {i}" in data["text/html"] for i in range(30))
        assert "0.33" in data["text/html"] and "<td>-</td>" in data["text/html"] and "NaN" not in data["text/plain"]
    assert "<th>0</th>" not in shown[0]["text/html"] and "<th>first</th>" in shown[1]["text/html"]
