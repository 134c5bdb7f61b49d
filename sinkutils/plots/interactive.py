"""Interactive pictures: attention along a training, and the attention of every head of a model.

They need neither a kernel nor a network. A notebook stores each one twice, as a PNG and as HTML
with a script. In JupyterLab, in nbviewer and in the book, the script draws the picture again, with
controls. Where scripts are removed (an untrusted notebook, a PDF), the PNG remains. The lab
(docs/lab) draws heads, maps and the toy by the same SCRIPTS.
"""

from __future__ import annotations

import base64
import html
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from sinkutils.checks import instance, integer, integers, require, short
from sinkutils.measuring.batches import Ids, Inputs
from sinkutils.measuring.measure import decoded, measure
from sinkutils.plots.figures import SHADES, attention_map, heads_by_block, token_label
from sinkutils.plots.theme import COLORS, STYLE, alt_text, json_in_html, png, printable

MOST_WEIGHTS = 80_000  # the most attention weights in a picture; one byte each, then compressed
FEWEST_TOKENS = 8  # a model with many heads gets a shorter text, but at least so many tokens
# The colours of 33 even steps from 0 to 1, in which weights are drawn
PALETTE = [to_hex(color) for color in mpl.colormaps[SHADES](np.linspace(0, 1, 33))]
SCRIPTS = ("inflate.js", "draw.js", "toy.js")  # what interactive.js needs
PAGE = Template("""
<figure style="margin:0;padding:8px;background:#fff;color:#222;max-width:760px">
<div style="overflow-x:auto">
<img src="data:image/png;base64,$image" alt="$alt" style="max-width:100%;display:block"></div>
<p class="still"><em>A still picture: run this cell to use the controls.</em></p>
<figcaption>$caption</figcaption>
<script>((root, kind, DATA) => {
$script})(document.currentScript.parentElement,"$kind",$data)</script></figure>
""")


@dataclass(frozen=True)
class Interactive:
    """An interactive picture: a still figure, a caption, and the data from which a script draws.

    Its alt text is that of the figure (`alt_text`).
    """

    kind: str  # a name in KINDS of interactive.js
    data: Mapping[str, Any]  # what the script needs
    figure: Figure
    caption: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        image = base64.b64encode(png(self.figure)).decode()
        alt = alt_text(self.figure)
        data = {**self.data, "palette": PALETTE, "colors": COLORS}
        files = [Path(__file__).with_name(name) for name in (*SCRIPTS, "interactive.js")]
        script = "".join(file.read_text(encoding="utf-8") for file in files)
        page = PAGE.substitute(
            image=image,
            alt=html.escape(alt),
            caption=html.escape(self.caption, quote=False),
            script=script,
            kind=self.kind,
            data=json_in_html(data),
        )
        shown = {"text/plain": f"[picture: {alt}]", "image/png": image, "text/html": page}
        return shown, {"image/png": {"alt": alt}}


def film(courses: Mapping[str, Any], steps: Sequence[int]) -> Interactive:
    """Show how a sink emerges: each head's mean attention to token 1 along a training.

    courses: title -> the attention of a run, (evaluations, layers, heads). In a record it is
        `record.arrays["curve"][:, 0]`, where index 0 stands for token 1. Each run gets a row.
    steps: the training step of each evaluation.
    Raises ValueError for a run with another number of evaluations.
    """
    instance("courses", courses, Mapping)
    require(len(courses) > 0, "courses must have at least one")
    steps = integers("steps", steps, least=0)
    runs = []
    with mpl.rc_context(STYLE):
        height = 0.5 + 1.9 * len(courses)
        still = Figure(figsize=(7.0, height), layout="constrained")
        rows = still.subplots(len(courses), 2, sharex="col", squeeze=False, width_ratios=(1.4, 2))
        for (title, course), (dots, line) in zip(courses.items(), rows, strict=True):
            alpha = np.asarray(course, dtype=float)
            wanted = f"{title!r} must have the shape (steps, layers, heads)"
            require(alpha.ndim == 3, f"{wanted}, got {alpha.shape}")
            times = f"{title!r} was measured {len(alpha)} times"
            require(len(alpha) == len(steps), f"{times}, not at {len(steps)} steps")
            # The script draws one frame per evaluation. A frame lists all heads, block by block.
            frames = alpha.reshape(len(steps), -1).round(3).tolist()
            means = alpha.mean(axis=(1, 2)).round(4).tolist()
            runs.append({"name": title, "H": alpha.shape[2], "frames": frames, "means": means})
            heads_by_block(alpha[-1], ax=dots)
            dots.set_ylabel("attention to token 1")
            dots.label_outer()  # only the last row has labels below
            dots.set_title(printable(title), parse_math=False)
            line.plot(steps, means, color=COLORS["first"], linewidth=2.5)
            line.set(ylim=(0, 1), ylabel="mean of all heads")
        line.set(xlabel="training step")
        line.xaxis.set_major_locator(MaxNLocator(4))  # with more ticks, the numbers would touch
        line.xaxis.set_major_formatter("{x:,.0f}")
    still.set_label(
        "Attention of every head to token 1 at the end of training, and its mean along training: "
        + printable(", ".join(courses))
    )
    caption = (
        "A dot is a head, over its block, at the height of the attention that it gives to token 1. "
        "Grey rings show where each head ends. Press play, or move the slider."
    )
    data = {"key": "token 1", "color": COLORS["first"], "steps": steps, "runs": runs}
    return Interactive("film", data, still, caption)


def explore(
    model: nn.Module,
    ids: Ids,
    name: str = "",
    tokenizer: Any = None,
    length: int = 32,
    head: tuple[int, int] | None = None,
) -> Interactive:
    """Explore a model's attention: choose a head by its alpha_1, see its map, follow a query.

    Where scripts do not run, it is a still picture.
    ids: (samples, T), or a mapping, as in `measure`. As many texts are shown as fit in one output.
    name: the name of the model, for the titles.
    tokenizer: gives the text of the tokens; None: their ids are shown.
    length: how many tokens of each text are shown. A model with many heads shows fewer, and texts
        of different lengths are shown as far as the shortest.
    head: the (block, head), from 1, that is shown first; None: the one with the largest alpha_1 on
        the first text.
    Raises ValueError like `measure`, and for an invalid length or head.
    """
    length = integer("length", length, least=1)
    model, ids = decoded(model, ids)
    inputs = Inputs(ids, None, (1,))
    decodes = tokenizer is None or hasattr(tokenizer, "decode")
    require(decodes, f"tokenizer must decode tokens, got {short(tokenizer)}")
    instance("name", name, str)
    name = printable(name)
    probe = measure(model, inputs.first(1), norms=False)
    columns = probe.alpha.shape[-1]
    heads = list(itertools.product(probe.layers, range(columns)))  # (layer, head)
    names = [(layer + 1, column + 1) for layer, column in heads]
    known = head is None or (isinstance(head, Iterable) and tuple(head) in names)
    require(known, f"head must be (block, head), up to {names[-1]}, got {head!r}")
    # A causal map of T tokens has about T^2 / 2 weights. From this follows how many tokens, and
    # then how many texts, a picture can hold for all heads.
    room = 2 * MOST_WEIGHTS // len(heads)
    fit = max(FEWEST_TOKENS, int(room**0.5))
    shown = min(length, int(inputs.lengths.min()), fit)
    texts = max(1, room // shown**2)
    weights, shades = maps_of(model, inputs.first(texts), heads, shown)
    starts = [text[:shown].tolist() for text in inputs.texts[: len(weights)]]
    tokens = [[token_label(token, tokenizer) for token in text] for text in starts]
    alpha = weights[..., 0].mean(axis=-1)  # (texts, heads)
    start = int(alpha[0].argmax()) if head is None else names.index((head[0], head[1]))
    data = {
        "packed": packed(shades),
        "tokens": tokens,
        "alpha": alpha.round(3).tolist(),
        "name": name,
        "H": columns,
        "blocks": [layer + 1 for layer in probe.layers],
        "T": shown,
        "head": start,
    }
    block, column = names[start]
    title = f"block {block}, head {column}" + (f" of {name}" if name else "")
    with mpl.rc_context(STYLE):
        still = Figure(figsize=(7.0, 4.6), layout="constrained")
        left, right = still.subplots(1, 2, width_ratios=(1, 2.4))
        heads_by_block(alpha[0].reshape(-1, columns), probe.layers, ax=left)
        attention_map(weights[0, start], tokens[0], right)
        written = f"{title}: α₁ = {alpha[0, start]:.2f}"
        heading = still.suptitle(written, fontsize=11, fontweight="bold")
        heading.set_parse_math(False)
    still.set_label(
        f"Attention map of {title}, with tokens on both axes, and every head's attention to the "
        "first token"
    )
    caption = (
        "Left, the attention that every head gives to the first token, by block. Right, the map of "
        "one head: a row per query, a column per key, the first key framed; square roots of the "
        "weights, so that small ones show. Click a head; point at a row to read where that query "
        "looks."
    )
    return Interactive("explorer", data, still, caption)


def maps_of(
    model: nn.Module,
    ids: Ids,
    heads: Sequence[tuple[int, int]],
    length: int,
    steps: int = len(PALETTE),
) -> tuple[np.ndarray, bytes]:
    """The attention maps of some heads, as numbers and as bytes for the script.

    heads: (layer, head) pairs. length: T, of the beginning of each text that is shown.
    Returns the weights, (texts, heads, T, T), and their causal halves, row by row, with one byte per
    weight: its square root in so many even steps, which are by default indices into PALETTE.
    """
    kept = measure(model, ids, heads=heads, norms=False).kept
    # Attention is causal: a map begins as that of the text's beginning does.
    maps = [kept[head].map[:, :length, :length] for head in heads]
    weights = np.stack(maps, axis=1)  # (texts, heads, T, T)
    roots = np.sqrt(np.clip(weights, 0, 1))  # the same square-root scale as `attention_map`
    shades = np.rint(roots * (steps - 1)).astype(np.uint8)
    queries, keys = np.tril_indices(length)
    return weights, shades[..., queries, keys].tobytes()  # T (T + 1) / 2 of each head


def packed(data: bytes) -> str:
    """Deflated, in letters of base 64: what `inflate.js` reads."""
    return base64.b64encode(zlib.compress(data, 9)).decode()
