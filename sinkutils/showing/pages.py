"""How something comes onto a page: as HTML and as lines of text, which a console, a diff and nbval read; or, of docs/,
as Markdown.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence

from IPython.display import display

WIDTH = 98  # of a line of text


def put(text: str, page: str) -> None:
    """Show something as text and as HTML."""
    display({"text/plain": text, "text/html": page}, raw=True)


def bold(text: str) -> str:
    """A text as HTML, **words** between stars in bold."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text, quote=False))


def show_text(lines: Sequence[str], heading: str = "What you see") -> None:
    """Show sentences under a heading, each once."""
    sentences = list(dict.fromkeys(lines))
    text = [textwrap.fill(f"- {line}".replace("**", ""), WIDTH, subsequent_indent="  ") for line in sentences]
    items = "".join(f"<li>{bold(line)}</li>" for line in sentences)
    above = f"<b>{heading}</b>" if heading else ""
    page = f'<div style="max-width:60em">{above}<ul style="margin-top:0.2em">{items}</ul></div>'
    put("\n".join([heading, *text] if heading else text), page)


def written(*parts: str) -> str:
    """A page of docs/, its parts a line apart."""
    return "\n\n".join(["<!-- written by python -m sinkutils readme -->", *(part.strip() for part in parts)]) + "\n"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells)
