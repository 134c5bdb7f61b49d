"""The style of all figures, and how they are saved and shown: as small PNGs with an alt text."""

from __future__ import annotations

import base64
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from sinkutils.paths import RENDERED, read_yaml

# The first four are from seaborn's "colorblind" palette. Readers with any kind of colour blindness
# can tell them apart, and in grey they differ by lightness.
COLORS = {
    "first": "#de8f05",  # attention to the first token, x_1
    "star": "#029e73",  # attention to k*, a key that no token owns
    "other": "#0173b2",  # any other token; one of our own models
    "baseline": "#949494",
    "paper": "#555555",  # the numbers that the paper prints
}

STYLE = read_yaml(Path(__file__).with_name("style.yaml"))


def theme() -> dict[str, str]:
    """Set the style of all figures, and return the named colours. Call it at the top of a notebook.

    In a notebook, figures are then shown as small PNGs with an alt text (`alt_text`). NumPy's
    global random generator, which jitters dots, is seeded there, so that a notebook without changes
    gets the same pictures again. Outside a notebook, the generator is not touched.
    """
    import matplotlib.pyplot as plt
    import numpy as np
    import seaborn as sns

    # Orange always means the first token, and green a key that no token owns. So the automatic
    # cycle of colours has neither.
    cycle = [COLORS["other"], "#222222", "#949494", "#c8c8c8"]
    sns.set_theme(style="whitegrid", palette=cycle, font_scale=0.9, rc=STYLE)
    ipython = sys.modules.get("IPython")  # in a notebook, IPython is imported already
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        np.random.seed(0)  # noqa: NPY002
        # Load the inline backend now, because it sets its own formatters when it is loaded.
        plt.switch_backend(mpl.get_backend())
        formatters = shell.display_formatter.formatters
        formatters["image/png"].for_type(Figure, _shown)
        formatters["text/plain"].for_type(Figure, _print)
    return dict(COLORS)


def save(figure: Figure | Axes, name: str) -> Path:
    """Save a figure as a PNG with 256 colours, and return its path.

    The same picture gives the same bytes. The file goes to rendered/figures/, which git ignores.
    `run --in-place` copies it from there to figures/.
    """
    path = RENDERED / "figures" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole: Any = figure.get_figure(root=True)
    path.write_bytes(png(whole))
    return path


def png(figure: Figure) -> bytes:
    """A figure as a PNG with a palette of 128 colours.

    This takes a quarter of the bytes, and is enough for lines and text.
    """
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # Tokens may have characters of any language, for which the font has no glyph.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(drawn, format="png", metadata={"Software": None})
    reduced = (
        Image.open(drawn)
        .convert("RGB")
        .quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    small = io.BytesIO()
    reduced.save(small, format="png", optimize=True)
    return small.getvalue()


def alt_text(figure: Figure) -> str:
    """The figure's label (`figure.set_label`) or, without one, its titles and axis labels."""
    label = figure.get_label()
    if label:
        return str(label)
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        parts += [ax.get_title("left"), ax.get_title(), ax.get_xlabel(), ax.get_ylabel()]
    lines = [part.replace("\n", " ") for part in parts if part]
    return "; ".join(dict.fromkeys(lines)) or "a figure"  # without duplicates


def printable(name: str) -> str:
    """Replace half a character by "?". It can stand where a name was cut, and cannot be printed."""
    return name.encode(errors="replace").decode()


def json_in_html(value: Any) -> str:
    """The value as JSON that can stand inside a <script> of a page.

    "<" is escaped. Otherwise "</script>" in a token or a name would end the script, and "<!--"
    could hide the rest of the page.
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _print(figure: Figure, printer: Any, cycle: bool) -> None:
    """Print a figure's alt text where a notebook shows plain text."""
    printer.text(f"[figure: {alt_text(figure)}]")


def _shown(figure: Figure) -> tuple[str, dict[str, Any]]:
    """A figure as a notebook stores it: the PNG in base64, and its alt text and width in pixels."""
    picture = png(figure)
    drawn = int.from_bytes(picture[16:20])  # bytes 16 to 19 of a PNG hold its width
    width = round(drawn * STYLE["figure.dpi"] / STYLE["savefig.dpi"])
    return base64.b64encode(picture).decode(), {"alt": alt_text(figure), "width": width}
