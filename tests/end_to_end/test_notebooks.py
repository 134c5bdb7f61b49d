"""The notebooks: their form and size, their exercises, and that papermill runs them with other parameters."""

import ast
import json
import os
import re
import subprocess

import nbformat
import pandas as pd
import pytest
from helpers import refused
from nbclient import NotebookClient
from small_models import build

from sinkutils import experiments, pages
from sinkutils.pages import NOTEBOOKS, find_notebooks, run_notebooks
from sinkutils.paths import PAPER

PATHS = find_notebooks()
MAIN = [path for path in PATHS if path.parent == NOTEBOOKS]
IDENTIFIERS = "|".join(re.escape(e.name) for e in experiments() if re.search("[_0-9]", e.name))


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@each(PATHS)
def test_a_page_begins_with_its_parameters_was_run_from_top_to_bottom_and_is_small(path):
    """Short cells that have ids, small pictures, no error and nothing of the machine or of the day."""
    code = cells(path, "code")
    assert "parameters" in code[0].metadata.get("tags", [])
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert max(len(cell.source.splitlines()) for cell in code) <= 25
    assert len({cell.id for cell in code}) == len(code)
    text = json.dumps(json.loads(path.read_text()))
    assert not re.search(r"(/tmp/|/home/|site-packages)|\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b", text)
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type != "error", output
        data = output.get("data", {})
        assert len(data.get("image/png", "")) * 3 / 4 < 200_000
        assert "image/png" in data or "<svg" not in data.get("text/html", ""), (
            "a picture that PDF and slides lose"
        )


NUMBER = r"(?<![\w.])\d+\.?\d*(?:[eE][-+]?\d+)?"
BOUND = f"below {NUMBER}"  # a bound is written by a person, and no machine rounds it
PICTURES = r'(?s)<script>.*?</script>|data:image/png;base64,[^"]+'


def rounding_in(output):
    """The numbers of an output's text that are not 0 and yet below 1e-9, as what is left by rounding is."""
    data = output.get("data", {})
    texts = [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    text = re.sub(f"{PICTURES}|{BOUND}", "", "\n".join(texts))
    return [number for number in re.findall(NUMBER, text) if 0 < float(number) < 1e-9]


def test_rounding_is_told_from_small_numbers_and_from_bounds():
    shown = {
        "text": "1e-15 -2.5e-16 0.00000000001 0.0 1e-8 12 T_1e-15 below 1e-12, <script>1e-20</script>"
    }
    assert rounding_in(shown) == ["1e-15", "2.5e-16", "0.00000000001"]
    assert rounding_in({"data": {"text/html": "<td>4e-15</td>"}}) == ["4e-15"]


@each(PATHS)
def test_a_page_shows_no_number_that_rounding_made(path):
    """Such a number has other digits on another processor, and the page's outputs are compared there."""
    assert [n for c in cells(path, "code") for out in c.outputs for n in rounding_in(out)] == []


def only_calls_the_package(source):
    """Whether a code cell leaves all the work to sinkutils, apart from showing what comes back."""
    nodes = ast.walk(ast.parse(source))
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    return bool(called) and {name.partition(".")[0] for name in called} <= {
        "su",
        "print",
        "display",
    }


@each(MAIN)
def test_a_page_can_be_read_in_a_few_minutes_and_names_things_in_words(path):
    """And does its own work; `pytest -s -k few_minutes` prints the counts."""
    texts = [
        re.sub("<details.*?</details>", "", c.source, flags=re.S) for c in cells(path, "markdown")
    ]
    shown = " ".join(texts)
    words, code = len(shown.split()), [cell.source for cell in cells(path, "code")]
    share = sum(map(only_calls_the_package, code)) / len(code)
    print(
        f"\n{path.stem}: {words} words, {words / 220:.0f} minutes to read; {share:.0%} of its code is package calls"
    )
    assert share < 0.5
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", shown, flags=re.S)
    found = re.search(rf"(?<![\w./-])({IDENTIFIERS})(?![\w./])", prose)
    assert not found, found[0]
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    assert text.count("<summary>") >= 2 or path.stem.startswith("10"), (
        "exercises with a hint or a solution"
    )


def test_every_figure_and_table_of_the_paper_has_its_cell_or_a_reason_why_not():
    """The rows of data/paper/places.csv, which 10 shows, together name Figures 1 to 30 and Tables 1 to 15."""
    named = set()
    for row in pd.read_csv(PAPER / "places.csv", keep_default_na=False).itertuples():
        kind, first, last = re.match(r"(Figure|Table)s? (\d+)(?: to (\d+))?", row.item).groups()
        named |= {(kind, number) for number in range(int(first), int(last or first) + 1)}
        if row.page:
            ids = [cell.id for cell in cells(NOTEBOOKS / f"{row.page}.ipynb", "code")]
            assert row.cell in ids, row
        else:
            assert row.differs and not row.cell, row
    figures = {("Figure", number) for number in range(1, 31)}
    assert named == figures | {("Table", number) for number in range(1, 16)}


def test_every_notebook_is_linked_from_the_readme():
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    assert [path.name for path in MAIN if path.name not in readme] == []


def test_papermill_runs_a_notebook_and_leaves_the_checkout_as_it_was(tmp_path):
    git_status = {"args": ["git", "status", "--porcelain"], "cwd": NOTEBOOKS}
    before = subprocess.check_output(**git_status)
    assert run_notebooks({"seed": 1}, tmp_path, ["B"]) == []
    assert subprocess.check_output(**git_status) == before
    (path,) = tmp_path.glob("B_*.ipynb")
    assert any("injected-parameters" in c.metadata.get("tags", []) for c in cells(path, "code"))


def test_a_failing_notebook_is_named_and_an_unknown_parameter_refused_before_it_runs(tmp_path):
    assert run_notebooks({"length": 0}, tmp_path, ["B"]) == ["B_more_measurements"]
    with refused("B_more_measurements has no parameter lenght; it has length, seed, preset, texts"):
        run_notebooks({"lenght": 100}, tmp_path / "out", ["B"])
    assert not (tmp_path / "out").exists()


# ---- rewritten where they are

WIDGET = "application/vnd.jupyter.widget-view+json"
CODE = """
import pathlib, sys
from IPython.display import publish_display_data
_ = print("what it says"), print("a warning", file=sys.stderr)
publish_display_data({{"{widget}": {{}}, "text/plain": "a bar"}})
publish_display_data({{"text/html": "<table id=T_1b2c3><td id=T_1b2c3_row0>", "text/plain": "a styled table"}})
_ = pathlib.Path(r"{figure}").write_text("drawn")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two notebooks, each with a cell that draws a figure."""
    (tmp_path / "notebooks").mkdir()
    for name in ("notebooks", "figures", "rendered"):
        monkeypatch.setattr(pages, name.upper(), tmp_path / name)
    for number in ("01", "02"):
        figure = tmp_path / "rendered" / "figures" / f"of_{number}.svg"
        code = CODE.format(widget=WIDGET, figure=figure)
        cells = [nbformat.v4.new_markdown_cell("# A page"), nbformat.v4.new_code_cell(code)]
        book = nbformat.v4.new_notebook(cells=cells)
        nbformat.write(book, tmp_path / "notebooks" / f"{number}_page.ipynb")
    return tmp_path


def book_of(folder, number):
    return nbformat.read(folder / "notebooks" / f"{number}_page.ipynb", as_version=4)


def test_in_place_a_page_is_rewritten_without_what_differs_and_its_figures_are_copied(folder):
    before = book_of(folder, "01"), book_of(folder, "02")
    assert run_notebooks({}, None, ["02"]) == []
    after = book_of(folder, "02")
    output, table = after.cells[1].outputs
    expected = "<table id=T_ID><td id=T_ID_row0>".replace("ID", after.cells[1].id)
    assert table.data["text/html"] == expected
    assert (output.output_type, output.text) == ("stream", "what it says\n")
    assert after.cells[1].execution_count == 1
    after.cells[1] |= {"outputs": [], "execution_count": None}
    assert (book_of(folder, "01"), after) == before
    assert [path.name for path in (folder / "figures").iterdir()] == ["of_02.svg"]


def test_a_notebook_keeps_no_bar_of_loading_and_tokenising(tmp_path, text_folder):
    build("llama").save_pretrained(tmp_path / "model")
    code = f"""
import sinkutils as su
from sinkutils.study.corpus import load_corpus
_ = su.load_lm({str(tmp_path / "model")!r})
_ = load_corpus("path:{text_folder}", 300, cache_dir={str(tmp_path)!r})
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(book, timeout=120).execute()
    assert book.cells[0].outputs == []  # no bar where stderr is no terminal


def test_two_pages_at_a_time_run_in_their_folder_and_the_process_stays_in_its_own(folder):
    """papermill's `cwd` moves the whole process, and two threads do not lead it back."""
    for number, seconds in (("01", 0), ("02", 2)):
        book = book_of(folder, number)
        code = f"import os, time\ntime.sleep({seconds})\nprint(os.path.basename(os.getcwd()))"
        book.cells[1].source = code
        nbformat.write(book, folder / "notebooks" / f"{number}_page.ipynb")
    before = os.getcwd()
    assert run_notebooks({}, None) == []
    assert os.getcwd() == before
    said = [book_of(folder, number).cells[1].outputs[0].text for number in ("01", "02")]
    assert said == ["notebooks\n"] * 2


def test_a_page_that_fails_in_place_stays_as_it_was_and_so_do_the_figures(folder):
    book = book_of(folder, "01")
    book.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(book, folder / "notebooks" / "01_page.ipynb")
    assert run_notebooks({}, None) == ["01_page"]
    assert book_of(folder, "01") == book and not (folder / "figures").exists()
