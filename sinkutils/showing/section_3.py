"""The pictures of Section 3 and Appendix B; what is seen in them is said in `section_3_seen`.

models: of `properties.measured`. Positions, blocks and heads count from 1, dimensions from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinkutils.measuring.real import window_of
from sinkutils.showing import figures
from sinkutils.showing.explorer import kept_map
from sinkutils.showing.figures import BASE_COLOR, FIRST_COLOR, PAPER_COLOR, SINK_LABEL, STAR_COLOR
from sinkutils.showing.properties import by_domain, by_length, report, usual
from sinkutils.showing.section_3_seen import FIRSTS, MASSIVE, SHOWN_TOKENS, Models, head_name, repeated_norms

SHOWN_ANGLES = 24
POSITIONS = {
    "nope": "none (NoPE)",
    "relative": "relative, bucket numbers",
    "relative_learned": "relative, learned",
    "alibi": "ALiBi",
    "rotary": "rotary",
}
SINK = SINK_LABEL.split(",")[0]


def _first(axis: Axes, values: Any, others: Any, name: str = "mean of the others", color: str = BASE_COLOR) -> None:
    """The first token's line by block and that of what it is compared with."""
    blocks = range(1, len(values) + 1)
    axis.plot(blocks, values, "o-", markersize=4, color=FIRST_COLOR, label="first token")
    axis.plot(blocks, others, "s--", markersize=3, color=color, label=name)


def _beside(axis: Axes) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def token_maps(models: Models) -> Figure:
    """A_ij on the first tokens of one text, with the tokens: of the head with the most alpha_1 and a middling one."""
    figure, axes = plt.subplots(len(models), 2, figsize=(9.6, 4.5 * len(models)), squeeze=False)
    for row, (title, of) in zip(axes, models.items(), strict=True):
        tokens = [token.strip() or "·" for token in of["maps"]["tokens"]][:SHOWN_TOKENS]
        for axis, head in zip(row, (of["maps"]["heads"][-1], of["maps"]["heads"][1]), strict=True):
            image = figures.draw_map(axis, kept_map(head, len(tokens)))
            axis.set_xticks(range(1, len(tokens) + 1), tokens, rotation=90, fontsize="small")
            axis.set_yticks(range(1, len(tokens) + 1), tokens, fontsize="small")
            axis.set(title=f"{title}, {head_name(head)}", xlabel="key $j$", ylabel="query $i$")
    figure.colorbar(image, ax=axes, label="$A_{i,j}$", shrink=0.6)
    return figure


def norms(models: Models) -> Figure:
    """The l2-norms of h, k, v by block: first token against the mean of the others (Figs. 2 top, 11-14)."""
    figure, axes = plt.subplots(len(models), 3, figsize=(9.6, 2.7 * len(models) + 0.3), squeeze=False)
    for row, (title, of) in zip(axes, models.items(), strict=True):
        for axis, name in zip(row, ("hidden", "key", "value"), strict=True):
            values = np.asarray(report(of).get(f"{name}_norms", ()))
            axis.set_visible(len(values) > 0)
            if len(values):
                _first(axis, values[:, 0], values[:, 1:].mean(axis=1))
                axis.set_ylabel(rf"$\|{name[0]}\|$")
                axis.set(yscale="log") if name == "hidden" else axis.set_ylim(0, None)
        row[1].set_title(title)
        figures.block_axis(*row)
    axes[0, 2].legend(fontsize="small", loc="upper left")
    return figure


def chain(models: Models) -> Figure | None:
    """Section 3.1's steps by block: a massive h_1, what LN leaves of it, how near k_1 is to one vector."""
    models = {title: of for title, of in models.items() if "first_token" in of}
    if not models:
        return None
    figure, axes = plt.subplots(len(models), 3, figsize=(9.8, 2.4 * len(models) + 0.6), squeeze=False)
    for (sizes, shares, keys), (title, of) in zip(axes, models.items(), strict=True):
        first, middle = of["first_token"][usual(of)], of["first_token"]["middle"]
        for rank, label in enumerate(("largest", "second", "third")):
            values = np.array(first["over_median"])[:, rank]
            shade = mpl.colors.to_rgba(FIRST_COLOR, 1 - 0.3 * rank)
            sizes.plot(range(1, len(values) + 1), values, color=shade, label=label)
        sizes.axhline(MASSIVE, color=PAPER_COLOR, linestyle=":")
        sizes.set(yscale="log", ylabel=r"$|h_{1,j}|$ / median")
        share, others = 100 * np.array(first["normed_share"]).T
        _first(shares, share, others)
        shares.set(ylabel="three dimensions' share\n" + r"of $\|\mathrm{LN}(h)\|^2$ (%)", ylim=(0, 103), title=title)
        near, control = first["cosine_k_1_to_mean"], first["cosine_k_middle_to_mean"]
        _first(keys, near, control, f"token {middle}", STAR_COLOR)
        keys.set(ylabel=r"$\cos(k, \mathrm{mean}\ k)$", ylim=(0, 1.03))
    figures.block_axis(*axes.flat)
    for axis in axes[-1]:  # below, where no curve runs
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=3, columnspacing=1)
    return figure


def angle_maps(models: Models) -> Figure:
    """A_ij, cos(q_i, k_j), ||q_i|| ||k_j|| on one text, of the heads with most and least alpha_1 (Fig. 2 bottom)."""
    heads = [(title, of["maps"]["heads"][rank]) for title, of in models.items() for rank in (-1, 0)]
    panels = (
        ("rows", "$A_{i,j}$", "rocket_r", (0, 1)),
        ("cosine", r"$\cos(q_i, k_j)$", "vlag", (-0.7, 0.7)),
        ("norm_product", r"$\|q_i\| \|k_j\|$", "mako_r", None),  # a scale a head
    )
    figure, axes = plt.subplots(3, len(heads), figsize=(2.35 * len(heads) + 0.9, 6.6), squeeze=False)
    for row, (key, symbol, cmap, limits) in zip(axes, panels, strict=True):
        for axis, (title, head) in zip(row, heads, strict=True):
            values = kept_map(head, SHOWN_ANGLES, key)
            image = figures.draw_map(axis, values, mpl.colors.Normalize(*(limits or (0, values.max()))), cmap)
            if key == "rows":
                axis.set_title(f"{title}\n{head_name(head)}", fontsize="x-small")
            if limits is None:
                figure.colorbar(image, ax=axis, shrink=0.7)
        if limits:
            figure.colorbar(image, ax=row, label=symbol, shrink=0.9)
        row[0].set_ylabel("query $i$" if limits else f"query $i$; {symbol}")
    for axis in axes[-1]:
        axis.set_xlabel("key $j$")
    return figure


def angles(models: Models) -> Figure:
    """cos(q, k) and ||q|| ||k|| by block, first token against the others, means and ranges over heads (Figs. 15-18)."""
    models = {title: of for title, of in models.items() if "angles" in of}
    labels = {"cosine": r"$\cos(q, k)$", "norm_product": r"$\|q\| \|k\|$"}
    looks = {"others": (BASE_COLOR, "--", "the others"), "first": (FIRST_COLOR, "-", "first token")}
    figure, axes = plt.subplots(len(models), 2, figsize=(7.8, 2.3 * len(models) + 0.2), squeeze=False)
    for row, (title, of) in zip(axes, models.items(), strict=True):
        for axis, (key, label) in zip(row, labels.items(), strict=True):
            for which, (color, line, name) in looks.items():
                values = np.array(of["angles"][key][which])  # (layers, heads)
                blocks = np.arange(1, len(values) + 1)
                axis.fill_between(blocks, values.min(axis=1), values.max(axis=1), color=color, alpha=0.2, linewidth=0)
                axis.plot(blocks, values.mean(axis=1), line, color=color, label=name)
            axis.set(ylabel=label, title=title)
    figures.block_axis(*axes.flat)
    axes[0, 0].legend(fontsize="small")
    return figure


def lengths(models: Models) -> Figure:
    """Sink_1 against T, a line an eps (Fig. 3); hollow where even attention exceeds eps, or T most blocks' windows."""
    figure, axes = plt.subplots(1, len(models), figsize=(4.4 * len(models) + 1.2, 3.4), sharey=True, squeeze=False)
    for axis, (title, of) in zip(axes[0], models.items(), strict=True):
        table = by_length(of)
        values = table.drop(columns=["uniform", "texts"])
        for color, (eps, line) in zip(sns.color_palette("flare", values.shape[1]), values.items(), strict=True):
            saturated = (table["uniform"] > eps) | (table.index > window_of(of))
            axis.plot(values.index, line, "o-", color=color, label=rf"$\epsilon = {eps:g}$")
            axis.plot(values.index[saturated], line[saturated], "o", markerfacecolor="white", color=color)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values.index, [str(length) for length in values.index])
        axis.set(xlabel="sequence length $T$", title=f"{title}, {FIRSTS[usual(of)]}", ylim=(-2, 103))
    axes[0, 0].set_ylabel(SINK)
    _beside(axes[0, -1])
    return figure


def inputs(table: pd.DataFrame) -> Figure:
    """Table 1 left as a picture: Sink_1 on natural, random and repeated tokens, a row a model; `by_input`."""
    figure, axis = plt.subplots(figsize=(8.2, 0.36 * len(table) + 1.0))
    kinds = {"natural": ("natural text", "o"), "random": ("random tokens", "s"), "repeat": ("one token repeated", "D")}
    ours, places = table["of"] == "ours", np.arange(len(table))
    for color, (kind, (label, mark)) in zip((BASE_COLOR, FIRST_COLOR, STAR_COLOR), kinds.items(), strict=True):
        axis.plot(table[kind][ours], places[ours], mark, color=color, label=label)
        axis.plot(table[kind][~ours], places[~ours], mark, color=color, markerfacecolor="white")
    names = []
    for row in table.itertuples():
        note = " (paper)" if row.of == "paper" else " (as trained)" if row.usual else ""
        names.append(f"{row.model}, {FIRSTS[row.first]}{note}")
    axis.set_yticks(places, names, fontsize="small")
    axis.set(xlabel=SINK_LABEL, xlim=(-3, 103))
    axis.invert_yaxis()
    _beside(axis)
    return figure


def repeats(models: Models) -> Figure:
    """||h_t|| by position on natural text and on one token repeated, without BOS (Section 3.3)."""
    figure, axes = plt.subplots(1, len(models), figsize=(4.4 * len(models) + 0.4, 3.2), sharey=True, squeeze=False)
    for axis, (title, of) in zip(axes[0], models.items(), strict=True):
        peak, natural, repeated = repeated_norms(of)
        for mark, values, color in (("s--", repeated, STAR_COLOR), ("o-", natural, BASE_COLOR)):
            axis.plot(range(1, len(values) + 1), values, mark, markersize=3, color=color)
        axis.set(xlabel="position $t$", yscale="log", title=f"{title}, after block {peak + 1}")
    axes[0, 0].set_ylabel(r"$\|h_t\|$ / natural mean, $t > 1$")
    axes[0, -1].legend(["one token repeated", "natural text"])
    return figure


def repeated_attention(seen: Mapping[str, Any]) -> Figure:
    """Left, the largest A_t,1 over layers and heads on t equal tokens (Propositions 1-4), by position embedding; right,
    of those with a bias g, the exponent by distance. seen: their `propositions.RepeatedTokens`.
    """
    figure, (attention, biases) = plt.subplots(1, 2, figsize=(9.6, 3.4))
    for color, (name, equal) in zip(sns.color_palette("colorblind"), seen.items(), strict=False):
        first = np.asarray(equal.weights[..., 0]).max(axis=(0, 1))
        attention.plot(range(1, len(first) + 1), first, color=color, label=POSITIONS[name])
        if name in ("relative", "alibi"):
            bias = np.asarray(equal.logits[0, 0] - equal.logits[0, 0, 0])
            biases.plot(range(len(bias)), bias, color=color, label=POSITIONS[name])
    bound = np.asarray(seen["rotary"].bound()).max(axis=(0, 1))
    attention.plot(range(1, len(bound) + 1), bound, color=PAPER_COLOR, linestyle=":", label="bound of Eq. 28")
    attention.set(xscale="log", yscale="log", ylim=(1e-3, 1.5))
    attention.set(xlabel="number of equal tokens $t$", ylabel=r"$\max_{l,h} A_{t,1}$")
    biases.set(xlabel="distance $t - i$", ylabel=r"$g(t - i) - g(0)$")
    biases.set_yscale("symlog", linthresh=1)
    for axis in (attention, biases):
        axis.legend(fontsize="small")
    return figure


def edited_positions(table: pd.DataFrame, name: str = "") -> Figure:
    """Table 7 as a picture: Sink_1 and Sink_t over t, p_1 replaced by p_t or swapped with it; `name`: of our model."""
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.3), sharey=True)
    for axis, (operation, rows) in zip(axes, table[table["t"] > 1].groupby("operation"), strict=True):
        for key, color, aside in (("1", FIRST_COLOR, -0.4), ("t", BASE_COLOR, 0.4)):  # ours may coincide
            label, paper, ours = rf"$\mathrm{{Sink}}_{key}$", rows[f"paper_{key}"], rows[f"sink_{key}"]
            axis.plot(rows["t"], paper, "o:", color=color, markerfacecolor="white", label=f"{label}, GPT2-XL (paper)")
            if ours.notna().any():
                axis.plot(rows["t"] + aside, ours, "s-", color=color, label=f"{label}, {name}")
        axis.axhline(table["paper_1"].iloc[0], color=PAPER_COLOR, linestyle=":", linewidth=1)
        done = "replaced by" if operation == "replace" else "swapped with"
        axis.set(xlabel="$t$", title=f"$p_1$ {done} $p_t$")
        axis.set_xticks(rows["t"], [*map(str, rows["t"][:-1]), f"{rows['t'].iloc[-1]} (25)"])  # as the paper heads it
    axes[0].set_ylabel("% of heads, repeated tokens")
    _beside(axes[1])
    return figure


def domains(models: Models) -> Figure | None:
    """Sink_1 by the kind of text, a colour an eps (Fig. 9)."""
    tables = {title: by_domain(of) for title, of in models.items() if "domains" in of}
    if not tables:
        return None
    size = (3.3 * len(tables) + 3.0, 0.26 * max(map(len, tables.values())) + 1.2)
    figure, axes = plt.subplots(1, len(tables), figsize=size, sharey=True, squeeze=False)
    for axis, (title, table) in zip(axes[0], tables.items(), strict=True):
        for color, mark, eps in zip(sns.color_palette("flare", 5)[1:4], "osD", table, strict=True):
            axis.axvline(table[eps].mean(), color=color, linewidth=1, linestyle=":")
            axis.plot(table[eps], range(len(table)), mark, color=color, label=rf"$\epsilon = {eps:g}$")
        axis.set_yticks(range(len(table)), table.index, fontsize="small")
        axis.set(xlim=(0, 103), xlabel=SINK, title=title)
    axes[0, 0].invert_yaxis()
    _beside(axes[0, -1])
    return figure


def by_size(table: pd.DataFrame, values: Mapping[str, str]) -> Figure:
    """Columns of `sizes` by their labels against size, a panel each (Figs. 4 left, 10); empty marks are the paper's."""
    figure, axes = plt.subplots(1, len(values), figsize=(3.9 * len(values) + 1.8, 3.5), squeeze=False)
    here = table[table["source"] == "measured"]["family"].unique()
    colors = dict(zip(here, sns.color_palette("colorblind"), strict=False))
    for axis, (column, label) in zip(axes[0], values.items(), strict=True):
        score = column.startswith("acc")  # the paper prints none, so that all are ours
        for index, (family, rows) in enumerate(table.groupby("family", sort=False)):
            for source, part in rows.dropna(subset=column).sort_values("parameters").groupby("source"):
                look = {"color": PAPER_COLOR, "markerfacecolor": "white", "markersize": 6, "label": f"{family} (paper)"}
                if source == "measured" or score:
                    look = {
                        "color": colors.get(family, PAPER_COLOR),
                        "linestyle": "-",
                        "markersize": 8,
                        "label": family,
                    }
                axis.plot(part["parameters"], part[column], figures.MARKS[index % len(figures.MARKS)], **look)
        spread = (table["parameters"].min() / 2, 2 * table["parameters"].max())
        axis.set(xscale="log", xlim=spread, xlabel="parameters", ylabel=label, ylim=(0, 103))
        axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        if score:
            axis.axhline(25, color=PAPER_COLOR, linestyle=":")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return figure
