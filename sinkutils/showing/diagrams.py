"""Pictures of how things work, drawn from the code that does them: packing, and which keys a query sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from string import ascii_uppercase
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle
from torch import Tensor

from sinkutils.data.corpus import Corpus
from sinkutils.data.packing import Chunks, DataConfig
from sinkutils.model.attention import AttentionSpec, visible

EOS, BOS, FIX, REDRAWN = "EOS", "BOS", "fix", "?"
HIDDEN, SEEN, FIRST, RELATIVE = range(4)  # what a key is to a query
MARKED = {EOS: "#333333", BOS: "#777777", FIX: "#d55e00", REDRAWN: "#ffffff"}


class ToyCorpus(Corpus):
    """A few documents A, B, .. of so many tokens each, in memory, for `packing` to pack."""

    def __init__(self, lengths: Sequence[int]) -> None:
        documents = [[f"{name}{i + 1}" for i in range(n)] for name, n in zip(ascii_uppercase, lengths, strict=False)]
        self.names = [EOS, BOS, FIX, *chain(*documents)]
        self.eos_id, self.bos_id, self.fix_id, self.first_text_id = range(4)
        self.name, self.vocab_size = "toy", len(self.names)
        stream = [self.names.index(name) for document in documents for name in (*document, EOS)]
        self._tokens = {("train", False): np.array(stream, dtype=np.uint16)}


def packed(corpus: ToyCorpus, context_length: int, data: DataConfig) -> list[list[str]]:
    """The names of the tokens in each training chunk, C inputs and the token that the last of them predicts.

    REDRAWN stands for a token that a uniform draw has replaced.
    """
    chunks = Chunks(corpus, "train", context_length, data)
    rows = chunks.take(np.arange(len(chunks)))
    names = np.array(corpus.names, dtype=object)[rows]
    redrawn = [position - 1 for position in data.random_positions if position != data.fixed_position]  # that comes last
    names[:, redrawn] = REDRAWN
    return names.tolist()


def packing(
    interventions: Mapping[str, DataConfig], lengths: Sequence[int] = (6, 11, 3, 13), context_length: int = 8
) -> Figure:
    """Documents joined by EOS and cut into chunks of C (Fig. 1 right); a panel for each intervention of Section 5."""
    corpus = ToyCorpus(lengths)
    stream = [corpus.names[token] for token in corpus.tokens("train")]
    figure = plt.figure(figsize=(9.6, 3.8))
    top, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 2.2))[:, 0]
    axis = top.subplots()
    _cells(axis, [stream])
    used = len(packed(corpus, context_length, DataConfig())) * context_length
    axis.vlines(range(0, used + 1, context_length), -0.35, 1.35, color="black", linewidth=2, capstyle="projecting")
    cuts = f"cut after every C = {context_length} tokens, the rest is left over"
    axis.set_title(f"documents A to {ascii_uppercase[len(lengths) - 1]}, each followed by EOS; {cuts}")
    panels = below.subplots(1, len(interventions), squeeze=False)[0]
    for panel, (name, data) in zip(panels, interventions.items(), strict=True):
        rows = packed(corpus, context_length, data)
        _cells(panel, rows, predicted=context_length)
        panel.set(title=name, xlabel="position $t$ (faint: only predicted)", ylabel="chunk")
        panel.set_yticks(np.arange(len(rows)) + 0.5, range(1, len(rows) + 1))
        panel.set_xticks(np.arange(context_length) + 0.5, range(1, context_length + 1))
    return figure


def _cells(axis: Axes, rows: Sequence[Sequence[str]], predicted: int | None = None) -> None:
    """Rows of named tokens as coloured squares, the first row on top; the column `predicted` is faint."""
    palette = sns.color_palette("colorblind")
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            face = MARKED.get(name) or palette[(0, 2, 8, 4, 9, 6)[ascii_uppercase.index(name[0]) % 6]]
            edge = "black" if name == REDRAWN else "white"
            faint = 0.3 if x == predicted else 1.0
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor=edge, alpha=faint))
            special = name in (EOS, BOS, FIX)
            turned: dict[str, Any] = {"color": "white" if special else "black", "rotation": 90 if special else 0}
            axis.text(x + 0.5, y + 0.5, name, ha="center", va="center", fontsize=7.5, alpha=faint, **turned)
    axis.set(xlim=(-0.1, max(map(len, rows)) + 0.1), ylim=(len(rows) + 0.4, -0.4), xticks=[], yticks=[])
    axis.grid(False)
    sns.despine(ax=axis, left=True, bottom=True)


def regions(length: int, spec: AttentionSpec) -> Tensor:
    """What each key is to each query under a mask, (T, T) of HIDDEN, SEEN, FIRST, RELATIVE (Figs. 5 and 6 left).

    FIRST: one of the first p keys (p = 1: x_1). RELATIVE: the first key of a query's window, t - w + 1, once that is
    no longer x_1.
    """
    positions = torch.arange(length)
    seen = visible(positions, positions, spec)
    kinds = seen.long() * SEEN
    kinds[seen & (positions < spec.prefix)] = FIRST
    if spec.window is not None:
        beyond = positions[spec.window :]
        kinds[beyond, beyond - spec.window + 1] = RELATIVE
    return kinds


# The steps of a block from its input up (Eqs. 2 and 3). At each "+" a residual comes in: to the first one from the
# input, to the second one from what the third step puts out.
BLOCKS = {
    "pre": ("LN", "MHSA", "+", "LN", "FFN", "+"),
    "post": ("MHSA", "+", "LN", "FFN", "+", "LN"),
}
BRANCHES = (0, 3)  # the residuals leave before these steps


def block_diagram() -> Figure:
    """A pre-norm and a post-norm transformer block, Eqs. 2 and 3 (Fig. 1 left), from BLOCKS."""
    figure, axes = plt.subplots(1, len(BLOCKS), figsize=(7.2, 5.0))
    for axis, (norm, steps) in zip(axes, BLOCKS.items(), strict=True):
        _block(axis, steps)
        axis.set_title(f"{norm}-norm (Eq. {2 if norm == 'pre' else 3})")
    return figure


def _block(axis: Axes, steps: Sequence[str]) -> None:
    """One block from bottom to top, a step every unit of height, residuals on the right."""
    colors = dict(zip(("LN", "MHSA", "FFN"), sns.color_palette("pastel", 3), strict=True))
    outputs = {"MHSA": "$O^l$", "FFN": "$F^l$"}
    arrow = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
    branches = iter(BRANCHES)
    for y, step in enumerate(steps):
        half = 0.14 if step == "+" else 0.25
        before = y - 1 + (0.14 if y and steps[y - 1] == "+" else 0.25)
        axis.annotate("", (0, y - half), (0, before), arrowprops=arrow)
        if step == "+":
            axis.add_patch(Circle((0, y), half, facecolor="white", edgecolor="black"))
            start = next(branches) - 0.55
            axis.plot([0, 1.1, 1.1], [start, start, y], color="black", linewidth=1)
            axis.annotate("", (half, y), (1.1, y), arrowprops=arrow)
        else:
            look = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": colors[step], "edgecolor": "black"}
            axis.add_patch(FancyBboxPatch((-0.6, y - half), 1.2, 2 * half, **look))
        axis.text(0, y, step, ha="center", va="center")
        axis.text(-0.1, y + 0.5, outputs.get(step, ""), ha="right", va="center")
    axis.annotate("", (0, len(steps) - 0.2), (0, len(steps) - 1 + half), arrowprops=arrow)
    axis.text(0, -0.85, "$H^{l-1}$", ha="center", va="top")
    axis.text(0, len(steps) - 0.15, "$H^l$", ha="center", va="bottom")
    if steps[-1] == "LN":
        axis.text(-0.1, len(steps) - 1.5, "before LN\n(Fig. 7 left)", ha="right", va="center", fontsize="small")
    axis.set(xlim=(-1.5, 1.5), ylim=(-1.3, len(steps) + 0.3), aspect="equal")
    axis.axis("off")
