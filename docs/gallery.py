"""The notebooks' pictures on one page, each under the section it stands in: python docs/gallery.py

`make book` runs it. The page and its pictures lie in docs, and Git keeps neither.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS.parent / "notebooks"
PICTURES = DOCS / "gallery"
OPENING = "# All pictures\n\nA picture leads to the section in which it is explained.\n"


def anchor(heading: str) -> str:
    """The address of a heading within its page, as the book makes it; none of one with a formula."""
    if "$" in heading:
        return ""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def pictures(notebook: Path) -> list[tuple[str, str, bytes]]:
    """Of each picture its cell's id, the heading above it and the PNG."""
    found, heading = [], ""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for line in re.findall(r"^#+ (.+)$", source, flags=re.MULTILINE):
                heading = line
            continue
        for output in cell["outputs"]:
            png = output.get("data", {}).get("image/png")
            if png:
                found.append((cell["id"], heading, base64.b64decode(png)))
    return found


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    parts = [OPENING]
    notebooks = sorted([*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("appendix/*.ipynb")])
    for notebook in notebooks:
        of_notebook = pictures(notebook)
        if not of_notebook:
            continue
        page = notebook.relative_to(DOCS.parent).as_posix()
        title = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"]
        parts.append("".join(title).splitlines()[0].replace("# ", "## ", 1) + "\n")
        for cell, heading, png in of_notebook:
            file = PICTURES / f"{notebook.stem}_{cell}.png"
            file.write_bytes(png)
            image = f"![{heading}](gallery/{file.name}){{width=480px}}"
            parts.append(f"[{image}](../{page}{anchor(heading)})\n\n*{heading}*\n")
    (DOCS / "gallery.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
