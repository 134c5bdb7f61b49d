"""At which scale a sink is seen: how it comes block by block, along training, and a ladder of models by size."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from sinkutils.ledger.results import EPSILON, Run, results, sink
from sinkutils.measuring.open_lms import recorded
from sinkutils.measuring.own import BOS, TEXT
from sinkutils.measuring.report import uniform_alpha
from sinkutils.measuring.saved import measured_sink
from sinkutils.showing import figures, names
from sinkutils.showing.pages import WIDTH, show_text
from sinkutils.showing.seen import capital
from sinkutils.showing.tables import parameters
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import config

ANY, ONE = "any first token", "one fixed first token, or a BOS"
LOOKS = {ANY: ("o", figures.BASE_COLOR), ONE: ("s", figures.FIRST_COLOR)}
OURS = ("laptop", "desk")


def millions(run: Run) -> np.ndarray:
    """The tokens, in millions, that a run had seen at each point of its curve."""
    task, length = run.record.config["train"], run.record.config["model"]["context_length"]
    return np.array([point["step"] for point in run.curve]) * task["batch_size"] * length / 1e6


def watched(run: Run) -> int | str:
    """Which alpha a run's picture is of: that of k*, x* or a sink logit ("star") where it has one, else alpha_1."""
    return "star" if "sink_star" in run.curve[-1] else 1


def heads(run: Run) -> np.ndarray:
    """Mean alpha_1, or alpha_* where there is one, of each head at each point of the curve, (points, layers, heads)."""
    return run.record.arrays["curve"][:, -1 if watched(run) == "star" else 0].float().numpy()


def trained(name: str, preset: str) -> dict[int, Run]:
    """The runs of an experiment that trained, by seed."""
    return {seed: run for seed, run in results(preset).seeds(name).items() if not run.failed}


def by_block(name: str, preset: str = "desk") -> Figure | None:
    """Along training, a row a seed, a colour a block: alpha_1 (alpha_* where there is one) of each head, h_1's largest
    element over the sequence's median one, v_1's norm over the others' (Fig. 4 middle; Section 3.1). None where nothing
    is recorded.
    """
    runs = trained(name, preset)
    if not runs:
        return None
    figure, axes = plt.subplots(len(runs), 3, figsize=(8.6, 1.45 * len(runs) + 0.85), squeeze=False, sharex=True)
    for row, (seed, run) in zip(axes, runs.items(), strict=True):
        tokens, alpha = millions(run), heads(run)
        colors = sns.color_palette("flare", alpha.shape[1])
        for block, color in enumerate(colors):
            row[0].plot(tokens, alpha[:, block], color=color, linewidth=0.8)
            for axis, key in ((row[1], "peak_1"), (row[2], "value_ratio_1")):
                values = [point[key][block] for point in run.curve]
                axis.plot(tokens, values, color=color, label=f"block {block + 1}")
        for level, line in ((EPSILON, "--"), (uniform_alpha(run.report["T"], watched(run)), ":")):
            row[0].axhline(level, color=figures.PAPER_COLOR, linestyle=line, linewidth=1)
        mark = r"\ast" if watched(run) == "star" else "1"
        row[0].set(ylabel=rf"$\alpha_{{{mark}}}^{{l,h}}$, seed {seed}", ylim=(0, None))
        row[1].set(ylabel=r"$\max |h_1|$ / median", yscale="log")
        row[1].yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
        row[1].yaxis.set_major_formatter("{x:g}")
        row[1].yaxis.set_minor_formatter("")
        row[2].set(ylabel=r"$\|v_1\|$ / the others'", ylim=(0, None))
    for axis in axes[-1]:
        axis.set_xlabel("million tokens")
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
    return figure


def halfway(tokens: np.ndarray, course: np.ndarray) -> float:
    """After how many tokens a course has first gone half the way from its start to its end."""
    way = (course - course[0]) / (course[-1] - course[0])
    return float(tokens[np.argmax(way >= 0.5)])


def sentences(name: str, preset: str = "desk") -> list[str]:
    """What `by_block` shows of each seed: the end, the largest head and when it came, what h_1 and v_1 do by then."""
    lines = []
    for seed, run in trained(name, preset).items():
        tokens, alpha = millions(run), heads(run)
        block, head = np.unravel_index(alpha[-1].argmax(), alpha[-1].shape)
        course = alpha[:, block, head]
        after = tokens[course > EPSILON]
        passed = f"first above {EPSILON} after {after[0]:.0f}M tokens" if len(after) else f"never above {EPSILON}"
        peaks, values = (np.array([point[key] for point in run.curve]) for key in ("peak_1", "value_ratio_1"))
        peaks = peaks / peaks[0]
        massive, small = peaks[-1].argmax(), values[-1].argmin()
        courses = (course, np.log(peaks[:, massive]), values[:, small])
        starred = watched(run) == "star"
        of_star, mark = (f"Sink∗ = {run.curve[-1]['sink_star']:.1f} %, ", "∗") if starred else ("", "₁")
        when = ""
        if len(after) and not starred:  # where none has come on x₁ there is no way to speak of
            attention, element, value = (halfway(tokens, one) for one in courses)
            when = (
                f" Half of the way to where it ends was gone after {attention:.0f}M tokens by that head, after "
                f"{element:.0f}M by the element (on a log scale), after {value:.0f}M by the value ratio."
            )
        lines.append(
            f"Seed {seed}: after {tokens[-1]:.0f}M tokens {of_star}Sink₁ = {run.curve[-1]['sink_1']:.1f} %. The "
            f"largest mean α{mark} is {course[-1]:.2f}, of head {head + 1} in block {block + 1}, {passed} (even "
            f"attention: {uniform_alpha(run.report['T'], watched(run)):.3f}). The largest element of h₁ over the "
            f"median is at the end {peaks[-1, massive]:.1f} times the untrained model's in block {massive + 1}, "
            f"the least value ratio {values[-1, small]:.2f} in block {small + 1}.{when}"
        )
    return lines


def show_by_block(experiments: Sequence[str], preset: str = "desk") -> None:
    """`by_block` and its sentences, an experiment after the other; what is not recorded is named."""
    missing = []
    for name in experiments:
        title, lines = names.title(name), sentences(name, preset)
        if not lines:
            missing.append(title)
            continue
        starred = any(watched(run) == "star" for run in trained(name, preset).values())
        caption = (
            f"**{capital(title)}, block by block along training.** A row a seed, a colour a block. Left, "
            f"{'attention to k∗, ' if starred else ''}a line a head (dashed: ε; dotted: even attention); middle, the "
            "massive activation of the first token; right, its value's norm beside the others'."
        )
        figures.show(by_block(name, preset), caption, f"{title}: {' '.join(lines)}", f"by_block_{name}_{preset}")
        show_text(lines)
    if missing:
        print(textwrap.fill(f"Not recorded yet for this model: {'; '.join(missing)}.", WIDTH))


def show_ladder() -> None:
    """`ladder` as a picture, and `scope` under it."""
    table = ladder()
    caption = (
        "**At which scale each kind of sink is seen.** A row a model, by its parameters (with embeddings); hollow: the "
        "paper's numbers. The models differ in their text and training too, so that this is a list, not a law."
    )
    rows = table.itertuples()
    each = [f"{row.model} ({_size(row.parameters)}) {row.sink_1:.1f} with {row.first}" for row in rows]
    figures.show(draw_ladder(table), caption, f"Sink_1 in percent by model: {'; '.join(each)}", "ladder")
    show_text(scope())


def ladder() -> pd.DataFrame:
    """Sink_1 on natural text by size of model and by what stands first: ours, the paper's, the real models'.

    Columns model, parameters, first (ANY or ONE), sink_1 (percent, a mean over seeds), of ("paper" or "measured"),
    seeds (of ours; else 0).
    """
    rows: list[tuple[str, int, str, float, str, int]] = []
    for preset in (*OURS, "paper"):
        for name, first in (("default", ANY), ("fixed_1", ONE)):
            size = parameters(config(name, preset))
            shares = [share for run in trained(name, preset).values() if (share := sink(run)) is not None]
            if preset == "paper":
                rows.append(("the paper's 60M", size, first, experiment(name).paper["sink_1"], "paper", 0))
            elif shares:
                rows.append(("ours", size, first, float(np.mean(shares)), "measured", len(shares)))
    for kept in map(recorded, ("gemma-3-270m", "smollm2")):
        title, size, natural = kept["about"]["title"], kept["about"]["parameters"], kept["probes"]["natural"]
        for kind, first in ((TEXT, ANY), (BOS, ONE)):
            if kind in natural:
                rows.append((title, size, first, measured_sink(natural[kind]), "measured", 0))
    columns = ["model", "parameters", "first", "sink_1", "of", "seeds"]
    return pd.DataFrame(rows, columns=columns).sort_values("parameters", kind="stable")


def scope() -> list[str]:
    """At which scale each kind of sink is seen, a line each: the ladder's numbers, and what the desk's default has."""
    table, lines = ladder(), []
    for first, words in ((ANY, "any first token"), (ONE, "one fixed first token, or a BOS")):
        cells = []
        for row in table[table["first"] == first].itertuples():
            number = f"{row.seeds} seed{'s' * (row.seeds != 1)}"
            model = f"ours of {_size(row.parameters)} ({number})" if row.model == "ours" else row.model
            cells.append(f"{row.sink_1:.1f} % in {model}")
        lines.append(f"**A sink on {words}**: {', '.join(cells)}.")
    if runs := trained("default", "desk"):
        size, ends = parameters(config("default", "desk")), [heads(run)[-1].max() for run in runs.values()]
        even = uniform_alpha(next(iter(runs.values())).report["T"])
        largest = " and ".join(f"{end:.2f}" for end in ends)
        lines[0] += (
            f" In ours of {_size(size)} it begins: α₁ of the largest head is {largest} in its {len(ends)} seeds (even "
            f"attention: {even:.3f})."
        )
    return lines


def _size(parameters: int) -> str:
    return f"{parameters / 1e6:.{0 if parameters > 1e7 else 1}f}M"


def draw_ladder(table: pd.DataFrame) -> Figure:
    """A row a model by size, a mark for what stands first: Sink_1; hollow: the paper's."""
    models = [f"{row.model} ({_size(row.parameters)})" for row in table.itertuples()]
    places = {model: place for place, model in enumerate(dict.fromkeys(models))}
    figure, axis = plt.subplots(figsize=(7.6, 0.42 * len(places) + 1.3))
    for first, (mark, color) in LOOKS.items():
        axis.plot([], [], mark, color=color, label=first)
    for model, row in zip(models, table.itertuples(), strict=True):
        mark, color = LOOKS[row.first]
        face = "white" if row.of == "paper" else color
        axis.plot(row.sink_1, places[model], mark, color=color, markerfacecolor=face, markersize=8)
    axis.set_yticks(list(places.values()), list(places))
    axis.set(xlabel=figures.SINK_LABEL, xlim=(-3, 103), ylim=(-0.6, len(places) - 0.4))
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure
