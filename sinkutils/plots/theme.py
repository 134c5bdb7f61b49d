"""How every figure looks, and how one is saved and shown: small, with an alt text."""

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

# Told apart by readers with any kind of colour blindness (seaborn's "colorblind"), and in grey by
# their lightness.
COLORS = {
    "first": "#de8f05",  # attention to the first token, x_1
    "star": "#029e73",  # attention to k*, a key that no token owns
    "other": "#0173b2",  # text, any other token; a model of ours
    "baseline": "#949494",
    "paper": "#555555",  # what the paper prints
}

STYLE = read_yaml(Path(__file__).with_name("style.yaml"))


def theme() -> dict[str, str]:
    """Set the style of all figures, once, at the top of a notebook; returns the named colours.

    In a notebook, figures are then shown as small PNGs with an alt text (`alt_text`), and NumPy's
    global generator, which jitters dots, is seeded: a page of which nothing changed keeps its
    pictures. Elsewhere it is left alone.
    """
    import matplotlib.pyplot as plt
    import numpy as np
    import seaborn as sns

    # Orange is the first token and green a key of its own wherever they stand: not in the cycle.
    cycle = [COLORS["other"], "#222222", "#949494", "#c8c8c8"]
    sns.set_theme(style="whitegrid", palette=cycle, font_scale=0.9, rc=STYLE)
    ipython = sys.modules.get("IPython")  # imported by whoever runs the notebook
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        np.random.seed(0)  # noqa: NPY002
        # This loads the inline backend, which sets its own formatters when it loads.
        plt.switch_backend(mpl.get_backend())
        formatters = shell.display_formatter.formatters
        formatters["image/png"].for_type(Figure, _shown)
        formatters["text/plain"].for_type(Figure, _print)
    return dict(COLORS)


def save(figure: Figure | Axes, name: str) -> Path:
    """Save a figure as a PNG in 256 colours, the same bytes for the same picture.

    It goes to rendered/figures/, which git ignores; `run --in-place` copies it to figures/. Returns
    its path.
    """
    path = RENDERED / "figures" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole: Any = figure.get_figure(root=True)
    path.write_bytes(png(whole))
    return path


def png(figure: Figure) -> bytes:
    """A figure as PNG in 256 colours of its own, a third of the bytes and all that lines need."""
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # tokens may be in any script
        figure.savefig(drawn, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB")
    reduced = picture.quantize(256, dither=Image.Dither.NONE)
    small = io.BytesIO()
    reduced.save(small, format="png", optimize=True)
    return small.getvalue()


def alt_text(figure: Figure) -> str:
    """The figure's label, if it was given one; else its titles and what stands on its axes."""
    label = figure.get_label()
    if label:
        return str(label)
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        parts += [ax.get_title("left"), ax.get_title("center")]
        parts += [ax.get_xlabel(), ax.get_ylabel()]
    lines = [part.replace("\n", " ") for part in parts if part]
    return "; ".join(dict.fromkeys(lines)) or "a figure"  # each once


def printable(name: str) -> str:
    """Half a character, as where a name was cut, as "?": neither page nor figure can hold it."""
    return name.encode(errors="replace").decode()


def json_in_html(value: Any) -> str:
    """JSON to stand in a script of a page.

    "</script>" in a token or a name would end the script, and "<!--" could swallow the page.
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _print(figure: Figure, printer: Any, cycle: bool) -> None:
    """A figure in the plain text of a notebook."""
    printer.text(f"[figure: {alt_text(figure)}]")


def _shown(figure: Figure) -> tuple[str, dict[str, Any]]:
    """A figure as a notebook keeps it: PNG in base64; alt text and width on the page in pixels."""
    picture = png(figure)
    drawn = int.from_bytes(picture[16:20])  # where the width stands in a PNG
    width = round(drawn * STYLE["figure.dpi"] / STYLE["savefig.dpi"])
    encoded = base64.b64encode(picture).decode()
    return encoded, {"alt": alt_text(figure), "width": width}
