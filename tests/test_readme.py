"""README's numbers are those of the records."""

from pathlib import Path

from sinkutils.showing.readme import PARTS, render

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_generated_parts_are_up_to_date():
    text = README.read_text()
    assert render(text) == text, "run: python -m sinkutils readme"


def test_rendering_twice_changes_nothing():
    once = render(README.read_text())
    assert render(once) == once and all(f"<!-- begin {name} -->" in once for name in PARTS)
