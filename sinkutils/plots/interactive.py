"""Pictures that answer to hands, with no kernel and no network: attention along training, and logits to drag.

A notebook keeps each as a PNG and as HTML with a script (interactive.js) that draws it anew, in JupyterLab, nbviewer
and the book alike. Where scripts are stripped (an untrusted notebook, a PDF), the PNG stays.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.special import expit, softmax

from sinkutils.checks import require
from sinkutils.plots.attention import SHADES
from sinkutils.plots.theme import COLORS, STYLE, png
from sinkutils.study.record import Record

SCRIPT = Path(__file__).with_name("interactive.js")
PALETTE = [to_hex(color) for color in mpl.colormaps[SHADES](np.linspace(0, 1, 33))]  # of shares from 0 to 1
THUMBNAILS = 7
OTHER_LINES = (COLORS["other"], COLORS["baseline"], COLORS["paper"])
KEYS = ("k*", "the", "cat", "sat", "on", "it")
NOTHING_MATCHES = (2.0, -3.0, -2.5, -3.5, -2.0, -3.0)  # logits of k* and five keys
MATCHING = 5.0  # the logit of a key that does match


PAGE = Template("""
<figure style="margin:0;padding:8px;background:#fff;color:#222;max-width:760px">
<div style="overflow-x:auto">
<img src="data:image/png;base64,$image" alt="$alt" style="max-width:100%;display:block"></div>
<p class="still"><em>A still picture: run this cell to use the controls.</em></p>
<figcaption>$caption</figcaption>
<script>(
$script)(document.currentScript.parentElement,"$kind",$data)</script></figure>
""")


@dataclass(frozen=True)
class Interactive:
    """A still picture, a text for those who cannot see it, a caption, and what the script needs to bring it to life."""

    kind: str  # of `kinds` in interactive.js
    data: dict[str, Any]
    picture: bytes  # PNG
    alt: str
    caption: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        image = base64.b64encode(self.picture).decode()
        data = json.dumps(self.data | {"palette": PALETTE, "colors": COLORS}, separators=(",", ":"), ensure_ascii=False)
        page = PAGE.substitute(
            image=image,
            alt=html.escape(self.alt),
            caption=html.escape(self.caption, quote=False),
            script=SCRIPT.read_text(encoding="utf-8"),
            kind=self.kind,
            data=data.replace("</", "<\\/"),  # "</script>" in a token would end the script
        )
        return {"text/plain": repr(self), "image/png": image, "text/html": page}, {"image/png": {"alt": self.alt}}

    def __repr__(self) -> str:
        return f"[picture: {self.alt}]"


def film(runs: Mapping[str, Record], k: int | str = 1) -> Interactive:
    """Play back how a sink emerges: every head's mean attention to one key along training, one row per run.

    runs: records by title. k: which key: a position counted from 1, or "*" for k*, x* or a sink logit.
    Raises ValueError for no runs, a record without that key, or runs that were measured at different steps.
    """
    require(len(runs) > 0, "there is nothing to play")
    courses = {title: _course(title, record, k) for title, record in runs.items()}
    all_steps = [[point["step"] for point in record.metrics["curve"]] for record in runs.values()]
    steps = all_steps[0]
    require(all_steps.count(steps) == len(runs), "the runs of a film must have been measured at the same steps")
    key = "k*" if k == "*" else f"token {k}"
    data: dict[str, Any] = {
        "key": key,
        "steps": steps,
        "picks": np.unique(np.linspace(0, len(steps) - 1, THUMBNAILS).round().astype(int)).tolist(),
        "runs": [],
    }
    colors = [COLORS["star" if k == "*" else "first"], *OTHER_LINES]
    for (title, alphas), color in zip(courses.items(), cycle(colors), strict=False):
        frames = shade(alphas).reshape(len(steps), -1).tolist()
        run = {"name": title, "color": color, "heads": alphas.shape[2], "frames": frames}
        data["runs"].append(run | {"means": alphas.mean(axis=(1, 2)).round(4).tolist()})
    still = _film_still(data, [*courses.values()])
    alt = f"Attention of every head to {key} at steps of training, and its mean along training: {', '.join(courses)}"
    caption = (
        f"A square is a head (rows: blocks, columns: heads), darker the more attention it gives to {key}; with each "
        "grid stands its training step. The lines are means over all heads. Press play, or move the slider."
    )
    return Interactive("film", data, png(still), alt, caption)


def logits() -> Interactive:
    """One query's logits to drag, and what softmax, sigmoid, and softmax with k* make of them (Section 7)."""
    data = {"logits": NOTHING_MATCHES, "names": KEYS, "low": -6, "high": 6, "match": 2, "matching": MATCHING}
    alt = "Logits of k* and five keys that are all low, and the weights that softmax, sigmoid and softmax with k* give"
    caption = (
        "One query, to which no key of the text is like. Softmax spends 1 on the text all the same; sigmoid need not; "
        "with k*, whose value is zero, softmax can leave most of it there. Drag a logit, or choose it with Tab and "
        "move it with the arrow keys."
    )
    return Interactive("logits", data, png(_logits_still()), alt, caption)


def shade(shares: np.ndarray) -> np.ndarray:
    """Shares from 0 to 1 as indices of PALETTE."""
    return np.rint(np.clip(shares, 0, 1) * (len(PALETTE) - 1)).astype(np.uint8)


def still_figure(width: float, height: float) -> Figure:
    """An empty figure for a still picture, of no notebook's pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


def _course(title: str, record: Record, k: int | str) -> np.ndarray:
    """Every head's mean attention to the key at each evaluation, (evaluations, layers, heads)."""
    curve = record.arrays.get("curve")  # (evaluations, targets, layers, heads), k* last if any
    if curve is None:
        raise ValueError(f"the record of {title!r} keeps no attention along training")
    has_star = "sink_star" in record.metrics["curve"][0]
    keys: list[int | str] = [*range(1, 1 + curve.shape[1] - has_star), *["*"] * has_star]
    require(k in keys, f"the record of {title!r} keeps attention to the keys {keys}, not to {k!r}")
    return curve[:, keys.index(k)].double().numpy()


def _film_still(data: Mapping[str, Any], courses: Sequence[np.ndarray]) -> Figure:
    """A strip of grids per run, and below them the means."""
    with mpl.rc_context(STYLE):
        figure = still_figure(7.0, 1.3 * len(courses) + 2.4)
        *strips, ax = figure.subplots(len(courses) + 1, 1, height_ratios=[1.3] * len(courses) + [2.4])
        for strip, run, alphas in zip(strips, data["runs"], courses, strict=True):
            frames = np.pad(alphas[data["picks"]], ((0, 0), (0, 0), (0, 1)), constant_values=np.nan)
            strip.imshow(np.concatenate(frames, axis=1), cmap=SHADES, vmin=0, vmax=1)
            middles = np.arange(len(frames)) * frames.shape[2] + run["heads"] / 2 - 0.5
            strip.set_xticks(middles, [f"{data['steps'][pick]:,}" for pick in data["picks"]])
            strip.set_yticks([])
            strip.spines[:].set_visible(False)
            strip.grid(False)
            strip.set_title(run["name"], color=run["color"])
            ax.plot(data["steps"], run["means"], color=run["color"], linewidth=2.2)
        ax.set(ylim=(0, 1), xlabel="training step", ylabel=f"mean attention to {data['key']}")
        ax.grid(True, alpha=0.4)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def _logits_still() -> Figure:
    s = np.array(NOTHING_MATCHES)
    panels = {
        "softmax": softmax(s[1:]),
        "sigmoid, not normalised": expit(s[1:]),
        "softmax with k*": softmax(s),
    }
    with mpl.rc_context(STYLE):
        figure = still_figure(7.0, 5.4)
        top, *axes = figure.subplots(4, 1, sharex=True)
        top.bar(KEYS[:1], s[:1], color=COLORS["star"])
        top.bar(KEYS[1:], s[1:], color=COLORS["other"])
        top.set_title("logits s")
        for ax, (title, weights) in zip(axes, panels.items(), strict=True):
            of_text = weights[-5:]
            ax.bar_label(ax.bar(KEYS[1:], of_text, color=COLORS["other"]), fmt="%.2f")
            ax.set(title=f"{title}: {of_text.sum():.2f} on the text", ylim=(0, 1.25))
            if len(weights) > len(of_text):
                ax.bar_label(ax.bar(KEYS[:1], weights[:1], color=COLORS["star"]), fmt="%.2f")
    return figure
