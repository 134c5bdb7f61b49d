"""Verdicts as cards: a chip, the claim, the paper's numbers and ours with intervals, one reason in English.

A card is one HTML box, its checks folded away; as text, which a diff and nbval read, the same lines under 100
characters.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import display

from sinkutils.ledger import claims as ledger
from sinkutils.ledger.rules import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NOT_REPRODUCED,
    NOT_RUN,
    NOT_VISIBLE,
    OPEN,
    PARTLY,
    REPRODUCED,
)
from sinkutils.showing import names

# Background and ink of a chip; the verdict's word stands in it, so that colour is not all there is.
COLORS = {
    REPRODUCED: ("#1a7f37", "white"),
    PARTLY: ("#b35900", "white"),
    NOT_REPRODUCED: ("#a40e5c", "white"),
    INCONCLUSIVE: ("#57606a", "white"),
    NOT_VISIBLE: ("#d0d7de", "#24292f"),
    NOT_RUN: ("white", "#24292f"),
}
WIDTH = 98  # of a line of text
LACKING = re.compile(r"^(.+): (\d+) of (\d+) seeds( hold .*)?$")


def show_verdicts(*ids: str, preset: str = "laptop", runs: Path | str | None = None) -> None:
    """Show the card of each of these claims. Raises ValueError for an unknown id or preset."""
    table = judged(ids, preset, runs)
    cards = [card(table.loc[id].to_dict(), ledger.checks(id, preset, runs), preset) for id in ids]
    text, page = zip(*cards, strict=True)
    display({"text/plain": "\n\n".join(text), "text/html": "\n".join(page)}, raw=True)


def show_summary(*ids: str, preset: str = "laptop", runs: Path | str | None = None) -> None:
    """The verdicts of several claims in a line each, for the end of a page."""
    table = judged(ids, preset, runs)
    claims = [(table.loc[id, "verdict"], names.human(table.loc[id, "claim"])) for id in ids]
    text = [textwrap.fill(f"[{verdict.upper()}] {claim}", WIDTH, subsequent_indent="  ") for verdict, claim in claims]
    page = "".join(
        f"<div style='margin:0.25em 0'>{chip(verdict)} {html.escape(claim)}</div>" for verdict, claim in claims
    )
    display({"text/plain": "\n".join(text), "text/html": page}, raw=True)


def judged(ids: Sequence[str], preset: str, runs: Path | str | None = None) -> pd.DataFrame:
    """The ledger by id, its parts together. Raises ValueError where it has no claim of these ids."""
    table = pd.concat([ledger.claims(preset, runs, part) for part in ledger.PARTS]).set_index("id", drop=False)
    if unknown := sorted(set(ids) - set(table.index)):
        raise ValueError(f"claims are {', '.join(table.index)}; got {', '.join(unknown)}")
    return table


def card(row: dict[str, Any], checks: pd.DataFrame, preset: str) -> tuple[str, str]:
    """A claim's card as text and as HTML; row: of `su.claims`, checks: of `ledger.claims.checks`."""
    verdict = row["verdict"]
    count = "" if verdict in (NOT_RUN, NOT_VISIBLE) else f"{row['holds']} checks hold"
    table, words, facts = figures(row, preset)
    why = reason(row, checks, preset)
    head = f"[{verdict.upper()}] {row['claim']}"
    below = f"({names.human(row['source'])}{'; ' + count if count else ''})"
    lines = [f"{column}: {' | '.join(f'{run}: {value}' for run, value in cells.items() if value)}"
             for column, cells in table.items()]  # fmt: skip
    text = [textwrap.fill(names.human(head), WIDTH, subsequent_indent="  "),
            *(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
              for line in [below, *(f"paper: {part}" for part in words), *lines, *(f"ours: {part}" for part in facts),
                           f"why: {why}"])]  # fmt: skip
    said = [*(("paper", part) for part in words), *(("ours", part) for part in facts), ("why", why)]
    return "\n".join(text), _page(row, checks, preset, count, table, said)


def chip(verdict: str) -> str:
    """A verdict as a coloured word, HTML."""
    ground, ink = COLORS[verdict]
    return (f'<span style="background:{ground};color:{ink};border:1px solid #8c959f;border-radius:1em;'
            f'padding:0.1em 0.7em;font-weight:600;font-size:0.85em;white-space:nowrap">{verdict}</span>')  # fmt: skip


def figures(row: dict[str, Any], preset: str) -> tuple[pd.DataFrame, list[str], list[str]]:
    """A claim's numbers, a row a run: the paper's, the share of heads above epsilon = 0.3, means with 95 % intervals.

    Beside it what is no number of a run: the paper's words, and facts of ours.
    """
    cells: dict[str, dict[str, str]] = {}
    words, facts = [], []
    for heading, values in _parsed(row["paper"]):
        if values:
            cells["paper: " + names.human(heading)] = values
        else:
            words.append(names.human(heading))
    intervals = dict(_parsed(row["interval"]))
    shares = {}
    for heading, values in _parsed(row["ours"]):
        if not values:
            facts.append(names.human(heading))
        elif " at eps " in heading:
            shares["ours: " + names.human(heading.partition(" at eps ")[0])] = {
                name: value.split("/")[1] for name, value in values.items()
            }
        else:
            known = intervals.get(heading, {})
            shown = {name: f"{value} ({known[name]})" if name in known else value for name, value in values.items()}
            cells["ours: " + names.human(heading)] = shown
    order = [column for column in cells if column.startswith("paper")]
    table = pd.DataFrame({column: cells[column] for column in order} | shares | cells)
    table.index = [names.of(name, preset) for name in table.index]
    return table.map(lambda value: _minus(value) if isinstance(value, str) else ""), words, facts


def reason(row: dict[str, Any], checks: pd.DataFrame, preset: str) -> str:
    """Why the verdict is what it is, one sentence or two."""
    verdict = row["verdict"]
    if verdict == NOT_VISIBLE:
        return names.human(row["reason"], preset).capitalize() + "."
    if verdict == NOT_RUN:
        return _lacking(row, preset)
    if verdict == REPRODUCED:
        return {1: "The one check holds.", 2: "Both checks hold."}.get(len(checks), f"All {len(checks)} checks hold.")
    states = checks["outcome"].value_counts()
    first = checks[checks["outcome"] == (OPEN if verdict == INCONCLUSIVE else FAILS)].iloc[0]
    says = names.human(first["check"], preset)
    why = names.human(first["why"].split("; ")[-1], preset)
    counts = f"{states.get(HOLDS, 0)} of {len(checks)} checks hold, {states.get(FAILS, 0)} fail"
    counts += f", {states[OPEN]} cannot be told from our seeds" if OPEN in states else ""
    opening = "Cannot be told" if verdict == INCONCLUSIVE else "Does not hold"
    return f"{counts}. {opening}, for one: \u201c{says}\u201d ({why})."


def _lacking(row: dict[str, Any], preset: str) -> str:
    """What a claim that cannot be judged still waits for."""
    seeds, others = {}, []
    for part in dict.fromkeys(row["reason"].split("; ")):
        found = LACKING.match(part)
        if found:
            run = names.human(found[1], preset)
            if found[4]:  # there are such runs, whose records do not keep what is asked
                run += f" that keep the {names.human(found[4].removeprefix(' hold '))}"
            seeds[run] = found[2]
        else:
            others.append(names.human(part, preset))
    waits = "; ".join(name + (f" ({count} so far)" if count != "0" else "") for name, count in seeds.items())
    return "; ".join([*([f"Not judged before it has three seeds of {waits}"] if waits else []), *others]) + "."


def _parsed(text: str) -> list[tuple[str, dict[str, str]]]:
    """The ledger's "heading: run value, run value; ..": each heading and its values; else the part."""
    parts = []
    for part in filter(None, text.split("; ")):
        heading, _, rest = part.rpartition(": ")
        cells = [cell.partition(" ") for cell in rest.split(", ")]
        runs = bool(heading) and all(names.is_experiment(name) and value for name, _, value in cells)
        parts.append((heading, {name: value for name, _, value in cells}) if runs else (part, {}))
    return parts


def _minus(number: str) -> str:
    return re.sub(r"(?<![\w.])-(?=\d)", "\N{MINUS SIGN}", number)


def _page(
    row: dict[str, Any], checks: pd.DataFrame, preset: str, count: str, table: pd.DataFrame, said: list[tuple[str, str]]
) -> str:
    def safe(text: str) -> str:
        return html.escape(names.human(text), quote=False)

    numbers = "" if table.empty else table.to_html(border=0, justify="left")
    lines = "".join(f"<div><b>{who}</b> {_code(html.escape(line, quote=False))}</div>" for who, line in said)
    folded = ""
    if count:
        items = "".join(
            f"<li>{html.escape(check['outcome'])}: {html.escape(names.human(check['check'], preset))}"
            f"{_numbers(check)}</li>"
            for check in checks.to_dict("records")
        )
        folded = f"<details><summary>{count}: each of them</summary><ul>{items}</ul></details>"
    return (
        '<div style="border:1px solid #8c959f;border-left:6px solid '
        f'{COLORS[row["verdict"]][0]};border-radius:6px;padding:0.5em 0.9em;margin:0.5em 0;max-width:60em">'
        f"<div>{chip(row['verdict'])} <b>{safe(row['claim'])}</b> <small>{safe(row['source'])}</small></div>"
        f'<div style="font-size:0.92em">{numbers}{lines}{folded}</div></div>'
    )


def _code(text: str) -> str:
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _numbers(check: dict[str, Any]) -> str:
    numbers = "" if pd.isna(check["mean"]) else f"{check['mean']:.3f} (95 %: {check['low']:.3f} to {check['high']:.3f})"
    why = html.escape(names.human(check["why"]))
    return f" <small>{'; '.join(filter(None, (_minus(numbers), why)))}</small>"
