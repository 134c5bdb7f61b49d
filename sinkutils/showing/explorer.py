"""An interactive picture of a model: choose a head by its alpha_1, see its map with tokens, follow a query."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from sinkutils.measuring.measure import measure
from sinkutils.measuring.open_lms import recorded
from sinkutils.measuring.report import uniform_alpha
from sinkutils.showing import svg
from sinkutils.showing.figures import BASE_COLOR, STAR_COLOR
from sinkutils.showing.svg import GREY, PALETTE, WIDTH, Picture

MOST = 80_000  # weights that a picture carries, a byte each before they are packed
SIDE = 350  # of the map


def explore(model: nn.Module, ids: Tensor, name: str = "the model", tokenizer: Any = None, length: int = 32) -> Picture:
    """An explorer of a model's attention: choose a head by its alpha_1, see its map with tokens, follow a query.

    ids: (samples, T); the first `length` tokens are shown, fewer of a model with many heads, and as many texts as one
    output can carry. tokenizer: names the tokens, else their ids do.
    """
    probe = measure(model, ids[:1], norms=False)
    pairs = [(layer, head) for layer in probe.layers for head in range(probe.alpha.shape[-1])]
    shown = min(length, ids.shape[1])
    while shown > 8 and len(pairs) * shown * (shown + 1) / 2 > MOST:
        shown -= 1
    ids = ids[: max(1, int(MOST / (len(pairs) * shown * (shown + 1) / 2))), :shown]
    report = measure(model, ids, heads=pairs, keep=("map",), norms=False)
    weights = np.stack([np.asarray(report.kept[pair].map) for pair in pairs], axis=1)
    tokens = [[label(token, tokenizer) for token in row] for row in ids.tolist()]
    return maps(weights, pairs, tokens, name, report.alpha.shape[-1])


def recorded_maps(name: str, length: int = 24) -> Picture:
    """`explore` without the model: the heads whose maps data/open_lms keeps. Raises ValueError for an unknown name."""
    kept = recorded(name)
    heads, title = kept["maps"]["heads"], kept["about"]["title"]
    tokens = [token.strip() or "␣" for token in kept["maps"]["tokens"][:length]]
    weights = np.array([[kept_map(head, length) for head in heads]])
    return maps(weights, [(head["layer"], head["head"]) for head in heads], [tokens], title, 1)


def kept_map(head: Mapping[str, Any], length: int, key: str = "rows") -> np.ndarray:
    """The first `length` queries and keys of a map in data/open_lms, (length, length), zeros where keys are hidden."""
    return np.array([row[:length] + [0.0] * (length - len(row)) for row in head[key][:length]])


def maps(
    weights: np.ndarray, heads: Sequence[tuple[int, int]], tokens: Sequence[Sequence[str]], name: str, columns: int
) -> Picture:
    """The picture of `explore` from maps that are there already; starts at the head with the largest alpha_1.

    weights: (texts, heads, T, T); heads: block and head of each, from 0; tokens: their names, text by text; columns:
    heads in a row of the grid.
    """
    length, alpha = weights.shape[-1], weights[..., 0].mean(axis=-1)  # (texts, heads)
    best, levels, (i, j) = int(alpha[0].argmax()), svg.shade(np.sqrt(weights)), np.tril_indices(length)
    packed = zlib.compress(levels[..., i, j].astype(np.uint8).tobytes(), 9)
    blocks = [layer + 1 for layer, _ in heads[::columns]]
    top, cell = 96, min(150 / columns, SIDE / len(blocks), 26)
    left, right, root = 34, WIDTH - SIDE - 4, svg.canvas(490)
    title = f"block {heads[best][0] + 1}, head {heads[best][1] + 1}: α₁ = {alpha[0, best]:.2f}"
    svg.text(root, title, left, 20, part="title", font_weight="bold")
    svg.text(root, "α₁ by head", left, top - 8)
    svg.grid(root, svg.shade(alpha[0]).reshape(-1, columns), left, top, cell, part="heads")
    frame = svg.add(root, "g", transform=f"translate({left} {top}) scale({cell:.3f})")
    box = {"width": 1, "height": 1, "fill": "none", "stroke": BASE_COLOR, "stroke_width": 3 / cell}
    svg.add(frame, "rect", "chosen", x=best % columns, y=best // columns, **box)
    for row in range(len(blocks)) if cell > 20 else sorted({0, len(blocks) // 2, len(blocks) - 1}):
        svg.text(root, f"{blocks[row]}", left - 6, top + cell * (row + 0.5) + 4, text_anchor="end", fill=GREY)
    size = token_map(root, weights[0, best], tokens[0], right, top, SIDE)
    frame = svg.add(root, "g", transform=f"translate({right} {top}) scale({size:.3f})")
    box = {"width": length, "height": 1, "fill": "none", "stroke": STAR_COLOR, "stroke_width": 1.5 / size}
    svg.add(frame, "rect", "query", x=0, y=length - 1, **box)
    shares = (levels[0, best, -1] / (len(PALETTE) - 1)) ** 2
    most = np.argsort(-shares, kind="stable")[:3]
    looks = ", ".join(f"{j + 1} “{tokens[0][j]}” {shares[j]:.2f}" for j in most)
    svg.text(root, f"query {length} “{tokens[0][-1]}” looks at about {looks}", left, 480, part="said")
    data = {"packed": base64.b64encode(packed).decode(), "palette": PALETTE, "tokens": [list(row) for row in tokens]}
    data |= {"alpha": alpha.round(3).tolist(), "names": [[layer + 1, head + 1] for layer, head in heads]}
    data |= {"columns": columns, "T": length, "head": best, "size": size, "cell": cell}
    caption = (
        f"Where {name} looks. Left, heads (a row a block), darker the more attention they give the first token; "
        "right, one of them on the text along the edges: a row a query, a column a key, hidden keys white, weights as "
        "their square roots so that small ones show. "
        f"Shown is the head with the largest α₁ on this one text, {alpha[0, best]:.2f}; the mean of the {len(heads)} "
        f"heads is {alpha[0].mean():.2f}, plain causal attention that is even over {length} tokens "
        f"has {uniform_alpha(length):.2f}. Click a head, point at a row."
    )
    alt = f"Attention map of {title}, with tokens on both axes, beside the attention of heads to the first token"
    return Picture(root, alt, caption, "explorer", data)


def side_by_side(
    maps: Mapping[str, np.ndarray], tokens: Sequence[str], caption: str, alt: str, below: str = ""
) -> Picture:
    """Two attention maps of one text by their titles, each (T, T) or, with k* before the text, (T, T + 1)."""
    root, side = svg.canvas(380), 262.0
    cell = side / max(weights.shape[1] for weights in maps.values())  # the same in both, so that their rows line up
    for left, (title, weights) in zip((82, 366), maps.items(), strict=True):
        token_map(root, weights, tokens, left, 96, cell * weights.shape[1], queries=left < 100)
        svg.text(root, title, left, 18, font_weight="bold")
    svg.text(root, below, 82, 376, fill=GREY)
    return Picture(root, alt, caption)


def token_map(
    root: ET.Element, weights: np.ndarray, tokens: Sequence[str], x: float, y: float, side: float, queries: bool = True
) -> float:
    """Draw A_ij with its tokens above and, for `queries`, left; hidden keys stay white. Returns a cell's size.

    weights: (T, T), or (T, T + 1) with k* before the text.
    """
    length, columns = weights.shape
    size, extra = side / columns, columns - length
    svg.grid(root, np.where(np.tri(length, columns, extra), svg.shade(np.sqrt(weights)), -1), x, y, size, part="map")
    small = {"font_size": min(12.0, 0.95 * size), "font_family": "monospace"}
    for i, token in enumerate(["k∗"] * extra + list(tokens)):
        above = x + size * (i + 0.75)
        svg.text(root, token, above, y - 5, part=f"key{i}", transform=f"rotate(-90 {above:.1f} {y - 5:.1f})", **small)
    for i, token in enumerate(tokens if queries else ()):
        svg.text(root, token, x - 5, y + size * (i + 0.78), part=f"query{i}", text_anchor="end", **small)
    return size


def label(token: int, tokenizer: Any) -> str:
    """A token as it is written, its blanks made visible, at most eight letters; its id without a tokenizer."""
    text = str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
    text = "".join({"\n": "↵", "\t": "→"}.get(c, c) for c in text if c in "\n\t" or c.isprintable()).strip() or "␣"
    return text if len(text) <= 8 else text[:7] + "…"
