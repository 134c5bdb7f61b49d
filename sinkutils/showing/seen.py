"""What you see: a few plain sentences with numbers for an item of the paper, made from the records and never written by
hand, so that they stay true whatever the records come to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.ledger.effects import each_seed, level, paired
from sinkutils.ledger.results import ONSET, QUANTITIES, Results, excess, results, sink
from sinkutils.measuring.report import norm_ratio
from sinkutils.showing.comparisons import DESTINATIONS
from sinkutils.showing.names import Row, every, human, of, rows
from sinkutils.showing.pages import show_text
from sinkutils.showing.tables import means_and_thresholds
from sinkutils.study.experiments import experiment
from sinkutils.study.grid import config

# By the ledger's quantity, how the level of a reference is said, and what more and less of it are called.
LEVELS = {
    "excess_1": "{name} has Sink₁ = {value}.",
    "visible_1": "In {name} the excess of α₁ over the queries that see x₁ is {value}.",
    "valid_loss": "{name} ends at a validation loss of {value}.",
    "gap": "In {name} validation less training loss (a mean over the steps before) is {value} at the end.",
    "onset": f"In {{name}} the sink sets in (Sink₁ stays at {ONSET:g} % or more) after {{value}} of the steps.",
}
CHANGES = {
    "excess_1": ("More of a sink on x₁", "Less of a sink on x₁"),
    "excess_star": ("More of a sink on the bias", "Less of a sink on the bias"),
    "visible_1": ("More of a sink for the queries that see x₁", "Less of a sink for the queries that see x₁"),
    "valid_loss": ("A higher validation loss", "A lower validation loss"),
    "gap": ("A larger gap between validation and training loss", "A smaller gap between them"),
    "onset": ("A later onset of the sink", "An earlier onset of the sink"),
}


def show(item: str, preset: str = "laptop", keys: Sequence[str] = ("excess_1",)) -> None:
    """Show what the records of an item say: for each of keys (of the ledger's quantities) `sentences`."""
    show_text([sentence for key in keys for sentence in sentences(item, preset, key)])


def sentences(item: str, preset: str = "laptop", key: str = "excess_1") -> list[str]:
    """What the records of an item say of a quantity of the ledger, in plain sentences.

    Of a quantity with a threshold (a norm ratio) which rows are above it; of another, the reference, which rows have
    more or less than it by the paired difference and its 95 % interval, which cannot be told from it, how many lie on
    the paper's side, the spread over seeds; always what is missing. Raises ValueError for an unknown item or preset.
    """
    return of_rows(rows(item, preset), results(preset), key)


def of_rows(shown: Sequence[Row], ours: Results, key: str = "excess_1") -> list[str]:
    """`sentences` of rows that are at hand."""
    if not any(row.runs for row in shown):
        return ["None of these runs is recorded yet."]
    if not any(row.trained for row in shown):
        return _missing(shown)
    if QUANTITIES[key].log and isinstance(QUANTITIES[key].level, float):
        return [*_levels(shown, ours, key), *_missing(shown)]
    # Beside the default's rows an item may have some that change the base: each is compared with what it changes.
    split = reference(shown) == "default"
    others = [row for row in shown if split and (row.base or (row.experiment and experiment(row.experiment).base))]
    lines = _compared([row for row in shown if row not in others], ours, key)
    return [*lines, *(_compared(others, ours, key) if others else []), *_missing(shown)]


def reference(shown: Sequence[Row]) -> str:
    """The experiment that an item's rows are compared with: the base, in its place that of the windows or of the
    context lengths, which are measured on shorter texts, or the default where rows change that.
    """
    control = next((row.experiment for row in shown if row.base and row.experiment.startswith("context_")), "")
    if control:
        return control
    there = {row.experiment for row in shown}
    if "default" not in there and any(row.base for row in shown):
        return "base"
    return next((name for name in ("window_none", "default") if name in there), "base")


def differences(shown: Sequence[Row], ours: Results, key: str) -> pd.DataFrame:
    """Each row's mean paired difference from the reference with its 95 % interval, where they share two seeds.

    Columns label, mean, low, high; paper, beside: the paper's Sink_1 and that of its base, NaN where it prints none;
    seeds: the difference of each; alone: whether the interval by the spread of these seeds alone leaves out 0. Rows
    that a seed of has no onset have no difference in it.
    """
    other, printed = reference(shown), next((row.paper.values for row in shown if row.base), {})
    based = printed.get("sink_1") or experiment("default").paper["sink_1"]  # where an item does not print it again
    changes = []
    for row in shown:
        change = None if row.experiment in ("", ours.label(other)) else paired(ours, row.experiment, other, key)
        if change is None or (key == "onset" and _never(row, ours)):
            continue
        seeds = each_seed(ours, row.experiment, other, key)
        own, paper = level(seeds), row.paper.values.get("sink_1", np.nan)
        alone = own.low > 0 or own.high < 0
        changes.append((row.short, change.mean, change.low, change.high, paper, based, seeds.tolist(), alone))
    return pd.DataFrame(changes, columns=["label", "mean", "low", "high", "paper", "beside", "seeds", "alone"])


def _never(row: Row, ours: Results) -> str:
    """In how many of a row's seeds the sink has no onset within the run; "" where it has one in each."""
    onsets = ours.values(row.experiment, "onset")
    count = (onsets == 1).sum()
    return f"{count} of {len(onsets)} seeds" if count else ""


def _without_onset(shown: Sequence[Row], ours: Results) -> list[str]:
    cells = [f"{row.short} ({seeds})" for row in shown if (seeds := _never(row, ours))]
    return _listing("No onset within the run, so no difference", cells)


def _compared(shown: Sequence[Row], ours: Results, key: str) -> list[str]:
    other = reference(shown)
    name = "the default" if other == "default" else of(other, ours.preset)
    if other == "window_none" or other.startswith("context_"):
        name = "the base at this T"
    lines = _of_base(ours, other, key, name)
    table = differences(shown, ours, key)
    more, less = table[table["low"] > 0], table[table["high"] < 0]
    decided = pd.concat([more, less])
    which = f" (difference of the {human(QUANTITIES[key].heading)}, 95 % interval)"  # said once
    for words, part in zip(CHANGES[key], (more, less), strict=True):
        if len(part):
            lines += _listing(f"{words} than {name}{which}", _effects(part))
            which = ""
    if key == "excess_1":
        lines += _beside_paper(decided)
    unsure = decided.loc[~decided["alone"].astype(bool), "label"]
    lines += _listing("By the spread of its own seeds alone, not pooled, one could not tell", unsure)
    if key == "onset":
        lines += _without_onset(shown, ours)
    lines += _listing(f"Not to be told from {name} with these seeds", _effects(table.drop(decided.index)))
    if key == "visible_1":
        windows = [row for row in shown if row.experiment and row.trained]
        alone = [row.short for row in windows if config(row.experiment, ours.preset).model.attention.window == 1]
        lines += _listing("Without such an excess, as no query but x₁ itself sees x₁", alone)
    if key == "excess_star":
        lines += _on_the_bias(shown)
    return lines


def _of_base(ours: Results, other: str, key: str, name: str) -> list[str]:
    """The reference itself: its share of heads or its level, with the range over seeds."""
    runs = [run for run in ours.seeds(other).values() if not run.failed]
    if not runs:
        return [f"{capital(name)} is not recorded yet, so that nothing can be compared with it."]
    if key == "excess_1":
        values, unit, digits = [value for run in runs if (value := sink(run)) is not None], " %", 1
    else:
        values, unit, digits = list(ours.values(other, key)), "", QUANTITIES[key].digits
    if not values or key not in LEVELS:
        return []
    return [capital(LEVELS[key].format(name=name, value=spread(values, digits, unit)))]


def spread(values: Sequence[float], digits: int, unit: str) -> str:
    """A mean with its range over seeds."""
    seeds = f"{min(values):.{digits}f} to {max(values):.{digits}f} over {len(values)} seeds"
    said = f"{np.mean(values):.{digits}f}{unit} ({seeds if len(values) > 1 else 'one seed'})"
    return said.replace("-", "\N{MINUS SIGN}")


def capital(text: str) -> str:
    """A text as a sentence begins."""
    return text[:1].upper() + text[1:]


def _beside_paper(decided: pd.DataFrame) -> list[str]:
    """How many of the rows that differ do so in the paper's direction, and the paper's numbers of those that do not."""
    printed = decided.dropna(subset="paper")
    if not len(printed):
        return []
    count, base = len(printed), f"its base's {printed['beside'].iloc[0]:g} %"
    same = np.sign(printed["mean"]) == np.sign(printed["paper"] - printed["beside"])
    others = "; ".join(f"{row.label} {row.paper:g}" for row in printed[~same].itertuples())
    if not same.any():
        return [f"In the paper it is the other way round: {others}, beside {base}."]
    if not same.all():
        which = f"{same.sum()} of the {count} with a number there on the side of {base} that ours has"
        return [f"The paper has {which}; the other way round: {others}."]
    which = {1: "it lies", 2: "both lie"}.get(count, f"all {count} with a number there lie")
    return [f"In the paper, too, {which} on this side of {base}."]


def _on_the_bias(shown: Sequence[Row]) -> list[str]:
    """The share of heads on a bias or sink token, where there is one."""
    cells = []
    for row in shown:
        if values := row.values(lambda run: sink(run, "star")):
            printed = row.paper.values.get("sink_star")
            paper = "" if printed is None else f", the paper {printed:.0f}"
            cells.append(f"{row.short} {np.mean(values):.0f} %{paper}")
    return _listing("Heads with their sink on the bias or sink token itself", cells)


def _levels(shown: Sequence[Row], ours: Results, key: str) -> list[str]:
    """Which rows' level lies above the ledger's threshold of a quantity, by its 95 % interval."""
    quantity, threshold = QUANTITIES[key], float(QUANTITIES[key].level)
    sides: dict[str, list[str]] = {"Above": [], "Not above": [], "Not to be told from": []}
    for row in shown:
        values, itself = ours.values(row.experiment, key), ""
        if len(values) < 2:
            continue
        estimate = level(values, quantity.log)
        above, below = estimate.low > threshold, estimate.high <= threshold
        side = "Above" if above else "Not above" if below else "Not to be told from"
        if key == "hidden":  # what the untrained model's ratio divides where it is above 1
            norms = row.values(lambda run: run.report.get("hidden_norms"))
            largest = geometric_mean(max(norm_ratio(blocks[:-1] or blocks)) for blocks in norms)
            itself = f"; itself {largest:.1f}"
        sides[side].append(f"{row.short} {_effect(estimate, quantity.digits, also=itself)}")
    lines = [line for side, cells in sides.items() for line in _listing(f"{side} {threshold:g}", cells)]
    what = "95 % interval" + (
        "; of each seed the largest block, their geometric mean; itself: not divided" if key == "hidden" else ""
    )
    return [" ".join([f"{capital(human(quantity.heading))} ({what}).", *lines])] if lines else []


def _missing(shown: Sequence[Row]) -> list[str]:
    """What has no run, one seed, or failed."""
    waiting = [row.short for row in shown if row.state == "not run yet"]
    lines = _listing("Not run yet", waiting)
    if len(waiting) > 3 and len(waiting) > len(shown) / 2:
        lines = [f"{len(waiting)} of the {len(shown)} rows are not run yet."]
    lines += _listing("Not at this scale", [row.short for row in shown if row.state == "not at this scale"])
    lines += _listing("One seed so far, so without an interval", [row.short for row in shown if len(row.trained) == 1])
    failures = [(row, len(row.runs) - len(row.trained)) for row in shown]
    cells = [f"{row.short} ({failed} of {len(row.runs)} seeds)" for row, failed in failures if failed]
    return lines + _listing("Training failed", cells)


def by_position(item: str, preset: str = "laptop") -> list[str]:
    """Where among the first positions each row has its sink (Section 5, Table 10 right, Fig. 5), a sentence each.

    The position with the largest mean excess, its Sink_k over the seeds, and the largest Sink at any other.
    """
    shown, lines = rows(item, preset), []
    for row in shown:
        seeds = row.values(lambda run: {k: excess(run, k) or 0.0 for k in run.report.get("targets", ())} or None)
        if not seeds:
            continue
        mean = pd.DataFrame(seeds).mean()
        where, count = mean.idxmax(), len(mean)
        shares = {k: row.values(partial(sink, k=k)) for k in mean.index}
        most, rest = shares.pop(where), max(map(np.mean, shares.values()), default=0.0)
        if np.mean(most) < 0.05:
            lines.append(f"{row.short}: no sink on any of the first {count} positions.")
            continue
        here = f"most on x_{where}, Sink_{where} = {spread(most, 1, ' %')}"
        lines.append(human(f"{row.short}: {here}, at most {rest:.1f} % on any other of the first {count}."))
    return lines + _missing(shown) if lines else ["None of these runs is recorded yet."]


def study(preset: str = "laptop") -> list[str]:
    """What the records tell as a whole: what strengthens and what weakens the sink, what a threshold hides."""
    shown, ours = every(preset), results(preset)
    table = differences(shown, ours, "excess_1").sort_values("mean", ascending=False)
    others = [row for row in shown if not row.base]
    trained = sum(bool(row.trained) for row in others)
    lines = [f"{trained} of the {len(others)} settings that change the base are trained."]
    more, less = table[table["low"] > 0], table[table["high"] < 0][::-1]
    if len(table):
        lines.append(
            f"Of the {len(table)} with two seeds or more, {len(more)} have more of a sink than the base, {len(less)} "
            f"less; {len(table) - len(more) - len(less)} cannot be told from it. (By 95 % intervals with one spread "
            "for all, each by itself: not corrected for their number.)"
        )
        unsure = table.loc[((table["low"] > 0) | (table["high"] < 0)) & ~table["alone"].astype(bool), "label"]
        lines += _listing("By the spread of their own seeds alone one could not tell", unsure)
    later = differences(shown, ours, "onset").sort_values("mean")
    onset = f"than in the base the sink sets in (Sink₁ stays at {ONSET:g} % or more; share of the steps) with"
    parts = {
        "Most of all:": more,
        "Least of all:": less,
        f"Earlier {onset}": later[later["high"] < 0],
        f"Later {onset}": later[later["low"] > 0][::-1],
    }
    lines += [f"{words} {'; '.join(_effects(part[:3]))}." for words, part in parts.items() if len(part)]
    lines += _without_onset(others, ours)
    means = means_and_thresholds(shown)
    hidden = means[means["hidden"]]
    if len(means) > 1:
        which = ", ".join(f"{row.label} (mean α₁ {row.alpha:.2f})" for row in hidden.itertuples())
        even = f"although their mean α₁ is over twice that of even attention{': ' * bool(which)}{which}"
        counted = f"the {len(means)}{', the base among them,' * bool(means['base'].any())}"
        lines.append(f"{len(hidden)} of {counted} have Sink₁ under 1 % {even}.")
    return lines


def destinations(shares: Mapping[str, Mapping[str, float]], base: str) -> list[str]:
    """Of runs whose attention goes elsewhere than the base's, a sentence each: what x_1 loses and what gains it.

    shares: of all attention by kind of key, by label (`tables.destinations`); base: the label of what they are beside.
    """
    lines = []
    for name, kinds in shares.items():
        moved = {kind: share - shares.get(base, kinds).get(kind, 0.0) for kind, share in kinds.items()}
        gains = [(gain, DESTINATIONS[kind][0]) for kind, gain in moved.items() if kind != "first"]
        gains = sorted([*gains, (-sum(moved.values()), "no key")], reverse=True)
        if name != base and moved["first"] <= -0.01:
            cells = "; ".join(f"{words} {gain:+.2f}" for gain, words in gains if abs(gain) >= 0.01)
            lines.append(f"{capital(name)}: x₁ {moved['first']:+.2f}; {cells}.".replace("-", "\N{MINUS SIGN}"))
    return [f"Shares of all attention beside {base}'s. {lines[0]}", *lines[1:]] if lines else []


def loss_at_onset(preset: str = "laptop") -> list[str]:
    """How much of the fall of the base's validation loss is done when its sink sets in, from least to most by seed."""
    ours, done = results(preset), []
    for seed, share in ours.values("base", "onset").items():
        curve = ours.seeds("base")[seed].curve
        losses = {point["step"]: point["valid_loss"] for point in curve}
        first, *_, last = losses.values()
        if share < 1 and first > last:
            done.append(100 * (first - losses[round(share * curve[-1]["step"])]) / (first - last))
    if not done:
        return []
    place = "after the first steep fall, not with it" if min(done) > 50 else "while the loss still falls steeply"
    return [f"It sets in {place}: {min(done):.0f} to {max(done):.0f} % of the whole fall are done by then."]


def _listing(words: str, cells: Iterable[str]) -> list[str]:
    """A sentence that names something; none where there is nothing to name."""
    named = "; ".join(cells)
    return [f"{words}: {named}."] if named else []


def _effects(table: pd.DataFrame) -> list[str]:
    return [f"{row.label} {_effect(row, 3, sign='+')}" for row in table.itertuples()]


def _effect(estimate: Any, digits: int, sign: str = "", also: str = "") -> str:
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} ({low} to {high}{also})".replace("-", "\N{MINUS SIGN}")
