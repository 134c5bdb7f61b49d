"""What notebooks do to folders: rewritten where they are, and training what is missing."""

import os

import nbformat
import pytest
from helpers import made_up
from nbclient.exceptions import CellExecutionError

from sinkutils import pages
from sinkutils.showing import notebook
from sinkutils.training.trainer import train

WIDGET = "application/vnd.jupyter.widget-view+json"
CODE = """
import pathlib, sys
from IPython.display import publish_display_data
_ = print("what it says"), print("a warning", file=sys.stderr)
publish_display_data({{"{widget}": {{}}, "text/plain": "a bar"}})
_ = pathlib.Path(r"{figure}").write_text("drawn")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two notebooks, each with a cell that draws a figure, and a figure that none of them draws any more."""
    for name in ("notebooks", "figures"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(pages, name.upper(), tmp_path / name)
    for number in ("01", "02"):
        code = CODE.format(widget=WIDGET, figure=tmp_path / "figures" / f"of_{number}.svg")
        cells = [nbformat.v4.new_markdown_cell("# A page"), nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{number}_page.ipynb")
    old = tmp_path / "figures" / "old.svg"
    old.write_text("of an earlier page")
    os.utime(old, (1, 1))
    return tmp_path


def outputs(folder, number):
    return nbformat.read(folder / "notebooks" / f"{number}_page.ipynb", as_version=4).cells[1].outputs


def test_in_place_all_pages_are_rewritten_without_what_differs_and_figures_hold_what_they_drew(folder):
    pages.refresh_notebooks()
    for number in ("01", "02"):
        assert [(output.output_type, output.get("text")) for output in outputs(folder, number)] == [
            ("stream", "what it says\n")
        ]
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["of_01.svg", "of_02.svg"]


def test_of_one_page_the_others_and_their_figures_stay(folder):
    pages.refresh_notebooks(["02"])
    assert outputs(folder, "01") == [] and outputs(folder, "02")
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["of_02.svg", "old.svg"]


def test_a_page_that_fails_stays_as_it_was_and_so_do_the_figures(folder):
    path = folder / "notebooks" / "01_page.ipynb"
    book = nbformat.read(path, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(book, path)
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        pages.refresh_notebooks()
    assert path.read_bytes() == before and outputs(folder, "02") == []
    assert (folder / "figures" / "old.svg").exists()


@pytest.mark.parametrize(("recompute", "limit"), [("never", pages.CELL_SECONDS), ("missing", None)])
def test_a_cell_that_may_train_what_is_missing_has_no_limit(tmp_path, monkeypatch, recompute, limit):
    seen = []
    monkeypatch.setattr(
        "papermill.execute_notebook", lambda *_, execution_timeout, **__: seen.append(execution_timeout)
    )
    assert pages.run_notebooks({"recompute": recompute}, tmp_path, ["02"]) == [] and seen == [limit]


def test_what_is_missing_is_trained_once_and_with_its_weights_where_these_are_wanted(runs, corpus, monkeypatch):
    trained = []

    def training(run, **options):
        trained.append(run.experiment)
        return train(run, corpus=corpus, progress=False, **options)

    monkeypatch.setattr(notebook, "train", training)
    record = notebook.recorded({"with k*": "k_bias"}, "smoke", 0, "missing")["with k*"]
    assert record is not None and record.status == "done" and record.weights is None and trained == ["k_bias"]
    again = notebook.recorded({"with k*": "k_bias"}, "smoke", 0, "missing")["with k*"]
    assert again is not None and again.folder == record.folder and trained == ["k_bias"]
    made_up(runs, "v_bias", kept={"corpus": corpus.identity})
    kept = notebook.recorded({"V": "v_bias"}, "smoke", 0, "missing", weights=True)["V"]
    assert kept is not None and kept.weights is not None and trained == ["k_bias", "v_bias"]
