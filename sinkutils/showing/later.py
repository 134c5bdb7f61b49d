"""What came after the paper, for notebook 09: its variants by group, their picture, what stands in which block."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from scipy.spatial.distance import cdist
from scipy.stats import gmean

from sinkutils.ledger.results import QUANTITIES, excess, results
from sinkutils.ledger.rules import FAILS, HOLDS, MISSING, OPEN, Check, judge
from sinkutils.measuring.gradients import gradient_norms
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import norm_ratio, uniform_alpha
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER
from sinkutils.showing import figures, items, names, seen
from sinkutils.showing.pages import WIDTH
from sinkutils.study.grid import config
from sinkutils.study.paper import PaperRow

# Runs of the paper's own variants that belong into a group too, before its own.
BESIDE = {
    "a way to say nothing": ("k_bias",),
    "another function of the logits": ("sigmoid",),
    "norms and values": ("post_norm",),
    "optimiser": ("weight_decay_0",),
}
# The groups of the picture, and their marks.
GROUPS = {"a way to say nothing": "o", "another function of the logits": "s", "norms and values": "^", "optimiser": "D"}
LOSSES = "viridis_r"
CONTEXTS = "context length"
STEPS = {"depth": "num_layers", CONTEXTS: "context_length"}  # groups whose rows are steps of a quantity, in its order


def sources() -> pd.DataFrame:
    """data/paper/after_paper.csv: where each variant comes from, what its source says, what was read of it."""
    return pd.read_csv(PAPER / "after_paper.csv", dtype=str, keep_default_na=False).set_index("name")


def show_sources(group: str) -> None:
    """What the papers behind a group's variants say, and in brackets what was read of them."""
    variants = sources().query("group == @group").reset_index()
    lines = []
    for (title, source, says, checked), part in variants.groupby(["title", "source", "says", "checked"], sort=False):
        what = seen.capital("; ".join(names.title(name) for name in part["name"]))
        paper = f"{title}, arXiv {source}" if source else title
        lines.append(f"**{what}.** {says} ({paper}; read: {checked}.)")
    seen.show_text(lines, heading="")


def rows(group: str, preset: str = "laptop") -> list[names.Row]:
    """The base, or what stands for it, then the variants of a group, with the records of ours that the ledger judges.

    Raises ValueError for an unknown group or preset.
    """
    table, ours = sources(), results(preset)
    if group not in set(table["group"]):
        raise ValueError(f"group must be one of {', '.join(table['group'].unique())}; got {group!r}")
    variants = list(table.index[table["group"] == group])
    # Contexts are measured on shorter texts than the base, so beside a run of its context that is too.
    control = f"context_{config('base', preset).model.context_length}"
    experiments = list(dict.fromkeys([control if group == CONTEXTS else "base", *BESIDE.get(group, ()), *variants]))
    if group in STEPS:
        experiments.sort(key=lambda name: getattr(config(name, preset).model, STEPS[group]))
    labels = {ours.label(name): names.of(name, preset) for name in experiments}
    shown = names.named([(PaperRow(group, label, name, {}, ""), label) for name, label in labels.items()], preset)
    return [replace(row, base=row.base or row.experiment == ours.label(control)) for row in shown]


def compare(group: str, preset: str = "laptop", keys: Sequence[str] = ("excess_1", "peak", "valid_loss")) -> None:
    """A group of variants as picture and sentences on `keys` of the ledger's quantities, as `items.compare`."""
    shown, ours = rows(group, preset), results(preset)
    if sum(bool(row.trained) for row in shown) < 2:
        lacking = "; ".join(row.label for row in shown if not row.trained)
        print(textwrap.fill(f"Not recorded yet: {lacking}.", WIDTH))
        return
    starred = any(row.final("sink_star") for row in shown)
    items.show_rows(shown, seen.capital(group), "", preset, ("1", "star") if starred else ("1",))
    seen.show_text([sentence for key in keys for sentence in seen.of_rows(shown, ours, key)])


def summary(preset: str = "laptop") -> list[str]:
    """Which variants have a sink on x_1 and which have none, and where massive activations do otherwise; in sentences.

    A variant is told by the ledger's rules, from the 95 % interval of its own seeds: in the mean over its heads, so
    that Sink_1 stands beside it where single heads of one that has none are above epsilon.
    """
    ours, keys, said = results(preset), ("excess_1", "peak"), {}
    shown = {row.label: row.experiment for group in GROUPS for row in rows(group, preset) if not row.base}
    for label, name in shown.items():
        told = [judge(Check("present", (name,), key), ours, {}).state for key in keys]
        if MISSING not in told:
            share = np.mean([run.final["sink_1"] for run in ours.seeds(name).values() if not run.failed])
            few = bool(told[0] == FAILS and share > seen.ONSET)
            said[label + f" (Sink₁ {share:.0f} %: single heads)" * few] = told
    if not said:
        return ["No variant has enough seeds yet."]

    def which(words: str, sink: str, peak: str | None = None) -> str:
        found = [label for label, told in said.items() if told[0] == sink and peak in (None, told[1])]
        return f"{words}: {len(found)} of {len(said)}{' – ' * bool(found)}{'; '.join(found)}."

    return [
        which("No sink on x₁ is left in the mean over heads", FAILS),
        which("There is one, weaker or not", HOLDS),
        which("The seeds do not tell", OPEN),
        which("Massive activations without a sink", FAILS, HOLDS),
        which("A sink without massive activations", HOLDS, FAILS),
    ]


def picture(preset: str = "laptop") -> Figure | None:
    """Every variant at its sink (excess alpha_1) and its massive activations (largest element of h over the median,
    times the untrained model's), validation loss as colour: a mark a seed, tied to their mean; a variant's number
    stands at its mark that is furthest from other variants'. None without any.
    """
    peak, points = QUANTITIES["peak"], []
    for group, shape in GROUPS.items():
        for row in rows(group, preset):
            mark = "*" if row.base else shape
            values = [(excess(run), peak.read(run), run.final["valid_loss"]) for run in row.trained.values()]
            points += [(row.label, mark, *numbers) for numbers in values]
    table = pd.DataFrame(points, columns=["label", "mark", "sink", "peak", "loss"]).drop_duplicates().dropna()
    table = table.reset_index(drop=True)
    if table["label"].nunique() < 2:
        return None
    figure, axis = plt.subplots(figsize=(9.2, 5.2))
    norm = plt.Normalize(table["loss"].min(), table["loss"].quantile(0.9))  # what did not learn is off the scale
    edge: dict[str, Any] = {"edgecolors": figures.PAPER_COLOR, "linewidths": 0.5, "s": 34, "alpha": 0.8}
    at = np.column_stack([table["sink"], np.log2(table["peak"])])  # as they are drawn
    apart = cdist(at / np.ptp(at, axis=0), at / np.ptp(at, axis=0))
    lines = []
    for number, ((mark, label), part) in enumerate(table.groupby(["mark", "label"], sort=False), start=1):
        mean = part["sink"].mean(), gmean(part["peak"])
        for seed in part.itertuples():
            axis.plot((mean[0], seed.sink), (mean[1], seed.peak), color=figures.PAPER_COLOR, linewidth=0.5, zorder=0)
        axis.scatter("sink", "peak", c="loss", data=part, norm=norm, cmap=LOSSES, marker=mark, **edge)
        alone = apart[np.ix_(table.index.isin(part.index), ~table.index.isin(part.index))].min(axis=1).argmax()
        where = part["sink"].iloc[alone], part["peak"].iloc[alone]
        named = axis.annotate(str(number), where, (4, 4), textcoords="offset points", fontsize="small", weight="bold")
        named.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # marks and lines lie under some
        lines.append(Line2D([], [], marker=mark, color=figures.PAPER_COLOR, linestyle="", label=f"{number} {label}"))
    axis.axhline(float(peak.level), color="black", linestyle="--", linewidth=1)
    axis.set(xlabel=r"sink: excess of $\alpha_1$", ylabel="largest element over the median,\ntimes the untrained")
    axis.set_yscale("log", base=2)
    axis.margins(x=0.07)
    axis.yaxis.set_major_formatter("{x:g}")
    colours = plt.cm.ScalarMappable(norm, LOSSES)
    figure.colorbar(colours, ax=axis, location="top", aspect=40, label="validation loss (nats a token)", extend="max")
    figure.legend(handles=lines, loc="outside right center", fontsize="x-small")
    return figure


def blocks(model: TransformerLM, ids: torch.Tensor) -> pd.DataFrame:
    """What stands in each block of a model on texts (n, T): a row a block, from 1.

    sink: mean excess alpha_1 of its heads; peak: the largest element of h_1 over the sequence's median one, at its
    output; value: the norm of v_1 over the others'; gradient: that of x_1 over those of x_2 to x_32, where it reads.
    """
    report = measure(model, ids)
    assert report.hidden_peaks is not None
    uniform = uniform_alpha(ids.shape[1])
    alpha = report.alpha[:, 0].mean(dim=(0, 2)).numpy()
    gradients = gradient_norms(model, ids)["input"]
    return pd.DataFrame(
        {
            "sink": (alpha - uniform) / (1 - uniform),
            "peak": report.hidden_peaks[:, 0],
            "value": report.norm_ratio("value_norms"),
            "gradient": [norm_ratio([row[:32]])[0] for row in gradients],
        },
        index=pd.RangeIndex(1, len(alpha) + 1, name="block"),
    )
