"""Notebooks rewritten where they are."""

import os

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from sinkutils import pages

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
