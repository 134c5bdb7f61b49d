"""The lecture of `make slides`: one file, the short route's pages, nothing from the network."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers import refused

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # nbconvert takes a second to load


@pytest.fixture(scope="module")
def slides():
    spec = importlib.util.spec_from_file_location("slides", ROOT / "docs" / "slides.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lecture_takes_45_minutes_and_needs_no_network(slides, tmp_path, capsys):
    slides.main(tmp_path / "slides.html")
    assert "45 minutes" in capsys.readouterr().out
    lecture = (tmp_path / "slides.html").read_text(encoding="utf-8")
    one_by_one = re.findall(r"<section>.*?</section>", lecture, flags=re.DOTALL)
    assert len(one_by_one) > 20 and not re.search(r"""(src|href)=["']?(https?:)?//""", lecture)
    for slide in one_by_one:
        question = re.search(r"<h2>(.+?)</h2>", slide)
        notes = re.search(r"<aside>(.*?)</aside>", slide, re.DOTALL)
        assert question and len(notes[1].split()) > 10, slide[:100]
    pictures = re.findall(r'<img alt="(.*?)" src="data:image/png;base64,[A-Za-z0-9+/]{40}', lecture)
    assert len(pictures) >= 15 and all(pictures)


def test_a_cell_that_is_gone_or_shows_nothing_is_named(slides):
    for cell in ("no-such-cell", "imports"):
        part = {"page": "01_properties", "minutes": 1, "slides": {cell: "Why?"}}
        with refused(f"01_properties has no picture or table in a cell {cell}", SystemExit):
            slides.slides_of(part, 0)
