"""A lecture of 45 minutes: one HTML file, made from the pages of the story as they were committed.

    python docs/slides.py [FILE]      writes book/slides.html (make slides); nothing is executed or fetched

docs/slides.yaml names the slides. Arrow keys turn them, N shows the notes, and printing prints both.
"""

import html
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbconvert.filters import markdown2html

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\|.*\n?", re.MULTILINE)
FOLDED = re.compile(r"<details.*?</details>", re.DOTALL)
LETTERS = re.compile(r"\$([^$\\_^]+)\$")  # a formula that reads the same without TeX
LINK = re.compile(r"\[(.+?)\]\([^)]*\)")  # a link between pages leads nowhere from here

BEFORE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>When attention sink emerges</title>
<style>
body { font: 22px/1.4 sans-serif; margin: 0; color: #222; background: #fff }
section { display: none; max-width: min(1600px, 94vw); margin: 0 auto; padding: 2vh 2vw }
section.shown { display: block }
img { width: 100%; max-height: 76vh; object-fit: contain }
table { font-size: 70%; border-collapse: collapse } td, th { border-bottom: 1px solid #ccc; padding: .3em }
footer { color: #777; font-size: 65% }
aside { display: none; font-size: 75%; border-top: 1px solid #ccc }
body.notes aside { display: block } .anchor-link { display: none }
@media print { section, aside { display: block } section { break-after: page } img { max-height: 50vh } }
</style><body>
"""
AFTER = """<script>
const slides = document.querySelectorAll("section");
let shown = 0;
function show(number) {
  slides[shown].classList.remove("shown");
  shown = Math.max(0, Math.min(slides.length - 1, number));
  slides[shown].classList.add("shown");
  scrollTo(0, 0);
}
document.addEventListener("keydown", event => {
  if (event.key === "ArrowRight" || event.key === "PageDown") show(shown + 1);
  if (event.key === "ArrowLeft" || event.key === "PageUp") show(shown - 1);
  if (event.key === "n") document.body.classList.toggle("notes");
});
show(0);
</script></body></html>
"""


def to_html(text: str) -> str:
    """Markdown without folds and links; formulas with an index or a command stay as TeX."""
    plain = LINK.sub(r"\1", FOLDED.sub("", text))
    return str(markdown2html(LETTERS.sub(r"*\1*", plain)))


def shown(cell: Any) -> str | None:
    """A code cell's picture, or a text cell's table."""
    if cell.cell_type == "markdown":
        table = "".join(TABLE.findall(cell.source))
        return to_html(table) if table else None
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            alt = html.escape(data["text/plain"].strip())
            return f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"]}">'
    return None


def slide(question: str, body: str, notes: str, footer: str) -> str:
    aside = f"<aside>{to_html(notes)}</aside>"
    return f"<section><h2>{html.escape(question)}</h2>{body}<footer>{footer}</footer>{aside}</section>\n"


def slides_of(part: dict[str, Any], start: int) -> list[str]:
    """A page's slides: its finding first, then its cells. start: the minute at which it begins."""
    cells = nbformat.read(ROOT / "notebooks" / f"{part['page']}.ipynb", as_version=4).cells
    heading, finding, *rest = cells[0].source.split("\n\n")
    footer = f"{part['page'][:2]} · minutes {start} to {start + part['minutes']}"
    slides = [slide(heading.lstrip("# "), to_html(finding), "\n\n".join(rest), footer)]
    places = {cell.id: place for place, cell in enumerate(cells)}
    for id, question in part["slides"].items():
        body = shown(cells[places[id]]) if id in places else None
        if body is None:
            raise SystemExit(
                f"docs/slides.yaml: {part['page']} has no picture or table in a cell {id}"
            )
        # The text that follows a picture; of a text cell, what it says beside its table.
        start_of_notes = places[id] if cells[places[id]].cell_type == "markdown" else places[id] + 1
        notes = next(cell.source for cell in cells[start_of_notes:] if cell.cell_type == "markdown")
        slides.append(slide(question, body, TABLE.sub("", notes), footer))
    return slides


def main(path: Path) -> None:
    lecture = yaml.safe_load((ROOT / "docs" / "slides.yaml").read_text())
    slides, start = [], 0
    for part in lecture:
        slides += slides_of(part, start)
        start += part["minutes"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(BEFORE + "".join(slides) + AFTER)
    print(f"{path}: {len(slides)} slides, {start} minutes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "book" / "slides.html")
