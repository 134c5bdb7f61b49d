"""Drawings as SVG, and how one goes onto a page: as an image that `interactive.js`, where it may run, brings to life.

In JupyterLab and in the book alike, with no kernel and no network. An untrusted notebook keeps the still picture.
"""

from __future__ import annotations

import base64
import html
import json
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns

from sinkutils.showing.figures import LIGHT

SCRIPT = Path(__file__).with_name("interactive.js")
WIDTH = 640  # of every drawing, in its own units
PALETTE = sns.color_palette(LIGHT, 33).as_hex()  # of shares from 0 to 1
GREY, INK = "#888888", "#222222"


@dataclass(frozen=True)
class Picture:
    """One drawing, a text for those who cannot see it, a caption, and what the script needs to bring it to life."""

    drawing: ET.Element
    alt: str
    caption: str
    kind: str = ""  # of `kinds` in interactive.js; empty: it stays still
    data: Mapping[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        image, script = base64.b64encode(ET.tostring(self.drawing, "unicode").encode()).decode(), ""
        if self.kind:
            data = json.dumps(self.data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
            call = f"(document.currentScript.parentElement,{json.dumps(self.kind)},{data})"
            script = f"<script>(\n{SCRIPT.read_text(encoding='utf-8')}){call}</script>"
        return (
            '<figure style="margin:0;padding:8px;background:#fff;color:#222;max-width:760px">'
            '<div style="overflow-x:auto">'
            f'<img src="data:image/svg+xml;base64,{image}" alt="{html.escape(self.alt)}" '
            'style="width:100%;min-width:440px;display:block"></div>'
            f'<figcaption style="color:#222">{html.escape(self.caption, quote=False)}</figcaption>{script}</figure>'
        )

    def __repr__(self) -> str:
        return textwrap.fill(f"[{self.alt}] {self.caption}", 96)


def shade(shares: np.ndarray) -> np.ndarray:
    """Shares in [0, 1] as indices of PALETTE."""
    return np.rint(np.clip(shares, 0, 1) * (len(PALETTE) - 1)).astype(int)


def canvas(height: int) -> ET.Element:
    """An empty drawing on white."""
    fonts = {"font-family": "sans-serif", "font-size": "13", "fill": INK}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height}"} | fonts)
    add(root, "rect", width=WIDTH, height=height, fill="white")
    return root


def add(parent: ET.Element, tag: str, part: str = "", **attributes: Any) -> ET.Element:
    """A shape; part: the name by which interactive.js finds it."""
    attributes |= {"data_part": part} if part else {}
    written = {
        key.replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        for key, value in attributes.items()
    }
    return ET.SubElement(parent, tag, written)


def text(parent: ET.Element, words: str, x: float, y: float, part: str = "", **attributes: Any) -> None:
    """A line of text that begins at (x, y)."""
    add(parent, "text", part, x=x, y=y, **attributes).text = words


def line(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, part: str = "", **attributes: Any) -> None:
    """A straight line."""
    add(parent, "line", part, x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def scale(parent: ET.Element, left: float, right: float, marks: Mapping[str, float]) -> None:
    """Thin level lines at the heights of `marks`, with their names on the left."""
    for name, y in marks.items():
        line(parent, left, y, right, y, stroke=GREY, stroke_width=0.5)
        text(parent, name, left - 8, y + 4, text_anchor="end", fill=GREY)


def grid(
    parent: ET.Element,
    levels: np.ndarray,
    x: float,
    y: float,
    size: float,
    palette: Sequence[str] = PALETTE,
    part: str = "",
) -> None:
    """A grid of cells of `size`, a path a colour; levels (rows, columns) index the palette, below 0: no cell."""
    group = add(parent, "g", part, transform=f"translate({x:.1f} {y:.1f}) scale({size:.3f})")
    for level, color in enumerate(palette):
        cells = "".join(f"M{column} {row}h.94v.94h-.94z" for row, column in np.argwhere(levels == level))
        if cells:
            add(group, "path", fill=color, d=cells)
