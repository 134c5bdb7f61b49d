"""An item of the paper as a page shows it: its picture with caption and alt text, its numbers, what one sees.

Each function raises ValueError for an item, preset or experiment that there is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinkutils.ledger.results import QUANTITIES, results
from sinkutils.showing import comparisons, figures, names, notebook, seen, tables
from sinkutils.study.grid import resolve

# Ours begin with a fixed token, so that their levels are higher (Table 10 right, position 1).
DIAMONDS = "Diamonds: the paper's 60M models, most of which meet any first token, so that levels differ"
THIN = "; the thin one is its base with one fixed first token, as ours has"


def compare(item: str, preset: str, what: Sequence[str] = ("1",), keys: Sequence[str] = ("excess_1",)) -> None:
    """An item of the paper as picture, table and sentences: each head's alpha, the paper's numbers beside ours, and
    what the records say of `keys` (`seen.sentences`). what: "1" for alpha_1, "star" for alpha_*.
    """
    rows, axis, _ = _item(item, preset)
    show_rows(rows, item, axis, preset, what)
    notebook.show(tables.paper_beside_ours(item, preset))
    seen.show(item, preset, keys)


def _item(item: str, preset: str) -> tuple[list[names.Row], str, dict[str, Any]]:
    """The rows of an item, what they differ in, and how `figures.colors_of` is to colour them."""
    rows, about = names.rows(item, preset), names.about()[item]
    base = next((row.label for row in rows if row.base), None)
    return rows, about["axis"], {"base": base, "ordered": bool(about["ordered"])}


def show_rows(rows: Sequence[names.Row], title: str, axis: str, preset: str, what: Sequence[str] = ("1",)) -> None:
    """The picture of some rows, `comparisons.comparison`, with its caption; axis: what they differ in, if any."""
    called = f"{title}: {axis}" if axis else title
    symbols = " and ".join({"1": "α₁ (orange)", "star": "α* (green)"}[key] for key in what)
    printed = any(row.paper.values for row in rows)
    shares = []
    for key in what:
        column, cells = comparisons.SINKS[key][1], []
        for row in (row for row in rows if row.trained):
            mean = f"{np.mean(row.final(column)):.1f}" if row.final(column) else "none"
            theirs = row.paper.values.get(column, "failed" if row.paper.note == "failed" else "no number")
            cells.append(f"{row.short} {mean}" + f" ({theirs})" * printed)
        shares.append(f"{'Sink_1' if key == '1' else 'Sink*'}: {'; '.join(cells)}")
    control = [row.experiment == resolve("base", preset) for row in rows if row.base]
    what_for = "the base" if all(control) else "what the others are compared with"
    shaded = f", {what_for} is shaded" if control else ""
    caption = (
        f"**{called}.** Left, a dot is one head of one run: its {symbols}, mean over 100 texts; seeds lie below "
        f"each other, the dashed line is ε = 0.3{shaded}. Right, the share of heads and texts above ε: "
        "small marks are seeds, large ones their mean."
    )
    thin = any(comparisons.with_fixed_token(row) is not None for row in rows)
    caption += f" {DIAMONDS}{THIN * thin}." if printed else ""
    beside = " and in brackets the paper's" if printed else ""
    alt = f"{called}, heads above epsilon in percent, ours{beside}. {'. '.join(shares)}"
    figures.show(comparisons.comparison(rows, what, axis), caption, alt, f"{slug(title)}_{preset}")


def compare_norms(
    item: str, preset: str, more: Mapping[str, Sequence[float] | str] | None = None, note: str = ""
) -> None:
    """An item on massive activations as picture and sentences: the norm of h_1 over the others', block by block, with
    `more` lines by label and what the caption says of those.
    """
    rows, axis, colors = _item(item, preset)
    ratios = tables.norm_ratios(rows) | dict(more or {})
    caption = (
        f"**{item}: {axis}.** The norm of the first token's hidden state over the mean of the others', "
        "after each block but the last; the mean over seeds. At 1 (dotted) the first token is like any other."
    )
    caption += f" {note}" if note else ""
    largest = [f"{label} {line if isinstance(line, str) else f'{max(line):.1f}'}" for label, line in ratios.items()]
    alt = f"{item}, {axis}: largest norm ratio of the first token, {'; '.join(largest)}"
    symbol = r"$\|h_1^l\|\;/\;\mathrm{mean}_{t\neq 1}\|h_t^l\|$"
    figure = figures.by_block(ratios, symbol, level=1, **colors)
    figures.show(figure, caption, alt, f"{slug(item)}_{preset}")
    seen.show(item, preset, ("hidden",))


def along(item: str, preset: str, keys: Mapping[str, str]) -> None:
    """An item's runs along training, a panel for each of keys (its label)."""
    rows, _, colors = _item(item, preset)
    curves = {row.label: [run.curve for run in row.runs.values()] for row in rows}
    figure = figures.along_training(curves, keys, **colors)
    last = {row.short: [run.curve[-1]["sink_1"] for run in row.runs.values() if run.curve] for row in rows}
    ends = [f"{name} {np.mean(values):.1f}" for name, values in last.items() if values]
    caption = f"**{item} along training.** Thick, the mean over seeds; thin, each seed."
    caption += " Blue is the base." * any(row.base and row.runs for row in rows)
    if waiting := [row.label for row in rows if not row.runs]:
        caption += f" Not run yet: {'; '.join(waiting)}."
    alt = f"{item}: curves along training; Sink_1 in percent at the end: {'; '.join(ends)}"
    figures.show(figure, caption, alt, f"{slug(item)}_curves_{preset}")


def positions(item: str, preset: str) -> None:
    """Where each row of an item has its sink among the first ten positions: a heat map and sentences."""
    rows, axis, _ = _item(item, preset)
    figure = figures.sink_by_position(tables.sinks_by_position(rows), axis)
    caption = (
        f"**{item}: {axis}.** The share of heads, text by text, with α above 0.3 on each of the first ten "
        "positions, mean over seeds; white rows are not run yet."
    )
    lines = seen.by_position(item, preset)
    figures.show(figure, caption, f"{item}, heads with a sink by position. {' '.join(lines)}", f"{slug(item)}_{preset}")
    seen.show_text(lines)


def slug(item: str) -> str:
    """A file name's part for an item: "Figure 4 right" is fig4_right, "Table 9" is table_9."""
    return item.lower().replace("figure ", "fig").replace(" ", "_")


def effects(preset: str, key: str = "excess_1") -> None:
    """What the settings that change the base do to a quantity of the ledger, the largest and the smallest effects."""
    table = seen.differences(names.every(preset), results(preset), key)
    what = names.human(QUANTITIES[key].heading)
    figure = comparisons.effects(table, f"{what}, less the base's")
    caption = (
        f"**What moves the {what}.** A point is a setting's mean difference from the base over paired seeds, the line "
        "its 95 % interval; filled where that leaves out 0. The interval's spread is pooled over all settings and not "
        "corrected for their number; where the small marks, the seeds, scatter more than the line, it is too narrow. "
        "Where there are more settings, the ten largest and the ten smallest."
    )
    if key == "onset":
        caption += " Onset: when Sink₁ comes to stay at 2.9 % or more. Settings with a seed that has none are left out."
    figures.show(figure, caption, f"{what} of {len(table)} settings, less the base's", f"effects_{key}_{preset}")


def thresholds(preset: str) -> None:
    """Each setting's mean alpha_1 against its Sink_1."""
    table = tables.means_and_thresholds(names.every(preset))
    count = int(table["hidden"].sum())
    found = f"{count} of the {len(table)} have it (ringed)" if count else f"none of the {len(table)} has it"
    caption = (
        "**Does the threshold hide a sink?** A point is a setting: its mean α₁ over heads, texts and seeds, and the "
        "share of heads, text by text, above ε = 0.3. A hidden one would have Sink₁ under 1 % at a mean over twice "
        f"that of even attention: {found}."
    )
    alt = (
        f"Mean alpha_1 and Sink_1 of {len(table)} settings; {count} have next to no head above ε although their mean "
        "is over twice that of even attention"
    )
    figures.show(comparisons.means_and_thresholds(table), caption, alt, f"thresholds_{preset}")


def where_attention_goes(experiments: Sequence[str], preset: str) -> None:
    """The shares of attention by kind of key, a bar an experiment."""
    ours = results(preset)
    shares = tables.destinations({names.of(name, preset): ours.seeds(name) for name in experiments})
    caption = (
        "**Where attention goes.** The share of all attention by kind of key, each key counting for the first that "
        "fits; mean over layers, heads, texts and seeds, from the third query on. What does not sum to one is shown as "
        f"proxies{', softpick as it is' * ('softpick' in experiments)}."
    )
    if any(sum(kinds.values()) < 0.995 for kinds in shares.values()):
        caption += " Where a bar ends before 1, the rest goes to no key."
    words = "{} {:.2f} on the first token and {:.2f} on a bias"
    alt = "; ".join(words.format(name, kinds["first"], kinds.get("star", 0.0)) for name, kinds in shares.items())
    figures.show(comparisons.destinations(shares), caption, alt, f"destinations_{preset}")
    seen.show_text(seen.destinations(shares, names.of("base", preset)))
