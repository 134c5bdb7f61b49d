"""An explorer of a model's attention: choose a head by its alpha_1, see its map with tokens, follow a query."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from sinkutils.checks import integer
from sinkutils.measuring.measure import measure
from sinkutils.plots.attention import SHADES, attention_map, token_label
from sinkutils.plots.interactive import Interactive, shade, still_figure
from sinkutils.plots.theme import COLORS, STYLE, png

MOST_WEIGHTS = 80_000  # that a picture carries, a byte each before they are compressed
FEWEST_TOKENS = 8  # to which the text of a model with many heads is cut for that


def explore(model: nn.Module, ids: Tensor, name: str = "", tokenizer: Any = None, length: int = 32) -> Interactive:
    """Show where a model looks: choose a head by its alpha_1, see its attention map with tokens, follow a query.

    ids: (samples, T); the first `length` tokens are shown, fewer of a model with many heads, and as many texts as one
    output can carry. tokenizer: names the tokens, else their ids do. A still picture where scripts do not run.
    It starts at the head with the largest alpha_1 of the first text. Raises ValueError as `measure` does, and for a
    length that is no positive integer.
    """
    integer("length", length, least=1)
    probe = measure(model, ids[:1], norms=False)
    heads = [(layer, head) for layer in probe.layers for head in range(probe.alpha.shape[-1])]
    # A causal map of T tokens has about T^2 / 2 weights.
    most = max(FEWEST_TOKENS, int((2 * MOST_WEIGHTS / len(heads)) ** 0.5))
    shown = min(length, ids.shape[1], most)
    texts = max(1, 2 * MOST_WEIGHTS // (len(heads) * shown**2))
    ids = ids[:texts, :shown]
    kept = measure(model, ids, heads=heads, norms=False).kept
    weights = np.stack([np.asarray(kept[head].map) for head in heads], axis=1)  # (texts, heads, T, T)
    tokens = [[token_label(token, tokenizer) for token in row] for row in ids.tolist()]
    alpha = weights[..., 0].mean(axis=-1)  # (texts, heads)
    best = int(alpha[0].argmax())
    row, column = np.tril_indices(shown)
    packed = zlib.compress(shade(np.sqrt(weights))[..., row, column].tobytes(), 9)
    data = {
        "packed": base64.b64encode(packed).decode(),
        "tokens": tokens,
        "alpha": alpha.round(3).tolist(),
        "names": [[layer + 1, head + 1] for layer, head in heads],
        "columns": probe.alpha.shape[-1],
        "T": shown,
        "head": best,
    }
    layer, head = data["names"][best]
    title = f"block {layer}, head {head}"
    title += f" of {name}" if name else ""
    still = _still(weights[0, best], alpha[0], data, f"{title}: α₁ = {alpha[0, best]:.2f}")
    alt = f"Attention map of {title}, with tokens on both axes, beside the attention of every head to the first token"
    caption = (
        "Left, every head (one row per block), darker the more attention it gives to the first token. Right, the map "
        "of one head: a row per query, a column per key, the first key framed; square roots of the weights, so that "
        "small ones show. Click a head; point at a row to read where that query looks."
    )
    return Interactive("explorer", data, png(still), alt, caption)


def _still(weights: np.ndarray, alpha: np.ndarray, data: dict[str, Any], title: str) -> Figure:
    with mpl.rc_context(STYLE):
        figure = still_figure(7.0, 4.6)
        grid, ax = figure.subplots(1, 2, width_ratios=(1, 2.4))
        columns = data["columns"]
        y, x = divmod(data["head"], columns)
        grid.imshow(alpha.reshape(-1, columns), cmap=SHADES, vmin=0, vmax=1)
        grid.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=COLORS["other"], linewidth=2))
        rows = range(0, len(alpha) // columns, max(1, len(alpha) // columns // 6))
        grid.set_yticks(rows, [str(data["names"][row * columns][0]) for row in rows])
        grid.set(ylabel="block", xlabel="head", xticks=[])
        grid.grid(False)
        attention_map(weights, data["tokens"][0], ax)
        figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure
