"""Verdicts as cards: a chip, the claim, the paper's numbers and ours with intervals, one reason in English.

A card is one HTML box, its checks folded away; as text, which a diff and nbval read, the same lines under 100
characters.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.ledger import claims as ledger
from sinkutils.ledger import rules
from sinkutils.ledger.results import QUANTITIES, results
from sinkutils.showing import names, reasons
from sinkutils.showing.pages import WIDTH, put
from sinkutils.study.grid import config, unavailable

# Background and ink of a chip, and the mark before it where there is no colour. The verdict's word always stands there.
CHIPS = {
    rules.REPRODUCED: ("#1a7f37", "white", "●"),
    rules.PARTLY: ("#b35900", "white", "◐"),
    rules.NOT_REPRODUCED: ("#a40e5c", "white", "✕"),
    rules.INCONCLUSIVE: ("#57606a", "white", "◌"),
    rules.NOT_VISIBLE: ("#d0d7de", "#24292f", "–"),
    rules.NOT_RUN: ("white", "#24292f", "○"),
}
# What was found where a check of this kind does not hold. {0}, {1}: its runs, {q}: its quantity.
FOUND = {
    **dict.fromkeys(("present", "absent"), "{q}: {value} in {0}, where {limit} or more counts"),
    "more": "{q}: {0} {apart} {1}, and should be above it",
    **dict.fromkeys(("same", "kept", "alike", "comparable"), "{q}: {0} {apart} {1}, beside a margin of {limit}"),
    "worse": "{q}: {0} {apart} {1}, where {limit} or more counts as worse",
}
LACKING = re.compile(r"^(.+): (\d+) of (\d+) seeds( hold .*)?$")


def show_verdicts(*ids: str, preset: str = "laptop") -> None:
    """Show the card of each of these claims. Raises ValueError for an unknown id or preset."""
    cards = [card(row, ledger.checks(row["id"], preset), preset) for row in judged(ids, preset).to_dict("records")]
    text, page = zip(*cards, strict=True)
    put("\n\n".join(text), "\n".join(page))


def show_summary(*ids: str, preset: str = "laptop") -> None:
    """The verdicts of several claims in a line each, for the end of a page."""
    text, page = [], ""
    for row in judged(ids, preset).to_dict("records"):
        claim = names.human(row["claim"])
        text.append(textwrap.fill(f"[{row['verdict'].upper()}] {claim}", WIDTH, subsequent_indent="  "))
        page += f"<div style='margin:0.25em 0'>{chip(row['verdict'])} {html.escape(claim)}</div>"
    put("\n".join(text), page)


def judged(ids: Sequence[str], preset: str) -> pd.DataFrame:
    """These claims of the ledger, a row each; of no ids, all. Raises ValueError for an unknown one."""
    table = pd.concat([ledger.claims(preset, part=part) for part in ledger.PARTS]).set_index("id", drop=False)
    if unknown := sorted(set(ids) - set(table.index)):
        raise ValueError(f"claims are {', '.join(table.index)}; got {', '.join(unknown)}")
    return table.loc[list(ids)] if ids else table


def card(row: dict[str, Any], checks: pd.DataFrame, preset: str) -> tuple[str, str]:
    """A claim's card as text and as HTML; row: of `su.claims`, checks: of `ledger.claims.checks`."""
    verdict, claim, source = row["verdict"], names.human(row["claim"]), names.human(row["source"])
    holds = "1 check holds" if row["holds"] == "1 of 1" else f"{row['holds']} checks hold"
    count = "" if verdict in (rules.NOT_RUN, rules.NOT_VISIBLE) else holds
    table, words, facts = figures(row, preset)
    paper = [("paper", part) for part in words]
    ours = [*(("ours", _minus(part)) for part in facts), ("why", reason(row, checks, preset))]
    numbers = []
    for column, cells in table.items():
        numbers.append((column, " | ".join(f"{run}: {value}" for run, value in cells.items() if value)))
    lines = [f"({'; '.join(filter(None, (source, count)))})"]
    lines += [f"{who}: {line}" for who, line in (*paper, *numbers, *ours)]
    text = [textwrap.fill(f"[{verdict.upper()}] {claim}", WIDTH, subsequent_indent="  ")]
    text += [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines]

    page = "" if table.empty else table.to_html(border=0, justify="left")
    for who, line in (*paper, *ours):
        said = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(line, quote=False))
        page += f"<div><b>{who}</b> {said}</div>"
    if count:
        items = "".join(f"<li>{_check(check, preset)}</li>" for _, check in checks.iterrows())
        sinks = "".join(f"<div>{html.escape(line, quote=False)}</div>" for line in at_each_epsilon(row, preset))
        page += f"<details><summary>{count}: each of them</summary><ul>{items}</ul>{sinks}</details>"
    border = f"1px solid #8c959f;border-left:6px solid {CHIPS[verdict][0]};border-radius:6px"
    claim, source = (html.escape(part, quote=False) for part in (claim, source))
    return "\n".join(text), (
        f'<div style="border:{border};padding:0.5em 0.9em;margin:0.5em 0;max-width:60em">'
        f"<div>{chip(verdict)} <b>{claim}</b> <small>{source}</small></div>"
        f'<div style="font-size:0.92em">{page}</div></div>'
    )


def chip(verdict: str) -> str:
    """A verdict as a coloured word, HTML."""
    ground, ink, _ = CHIPS[verdict]
    shape = "border:1px solid #8c959f;border-radius:1em;padding:0.1em 0.7em"
    words = "font-weight:600;font-size:0.85em;white-space:nowrap"
    return f'<span style="background:{ground};color:{ink};{shape};{words}">{verdict}</span>'


def figures(row: dict[str, Any], preset: str) -> tuple[pd.DataFrame, list[str], list[str]]:
    """A claim's numbers, a row a run: the paper's, the share of heads above epsilon = 0.3, means with 95 % intervals.

    Beside it what is no number of a run: the paper's words, and facts of ours.
    """
    columns: dict[str, dict[str, str]] = {}
    means: dict[str, dict[str, str]] = {}
    words, facts = [], []
    for heading, values in parsed(row["paper"]):
        if values:
            columns["paper: " + names.human(heading)] = values
        else:
            words.append(names.human(heading))
    intervals = dict(parsed(row["interval"]))
    for heading, values in parsed(row["ours"]):
        what, by_eps, _ = heading.partition(" at eps ")
        known = intervals.get(heading, {})
        if not values:
            facts.append(names.human(heading))
        elif by_eps:  # at 0.2/0.3/0.4
            columns["ours: " + names.human(what)] = {name: value.split("/")[1] for name, value in values.items()}
        else:
            cells = {name: f"{value} ({known[name]})" if name in known else value for name, value in values.items()}
            if heading == QUANTITIES["onset"].heading:  # in every seed
                cells = {
                    name: "none within the run" if values[name] == "1.000" else cell for name, cell in cells.items()
                }
            means["ours: " + names.human(heading)] = cells
    for column in columns.keys() & {"ours: Sink₁ %"}:  # of what the paper prints beside it, though no check asks for it
        for name in columns.get("paper: Sink₁ %", {}).keys() - columns[column].keys():
            shares = [run.final["sink_1"] for run in results(preset).seeds(name).values() if not run.failed]
            columns[column] |= {name: f"{np.mean(shares):.1f}"} if shares else {}
    table = pd.DataFrame(columns | means)
    table = table.rename(index=labels(list(table.index), preset))
    return table.map(lambda value: _minus(value) if isinstance(value, str) else ""), words, facts


def at_each_epsilon(row: dict[str, Any], preset: str) -> list[str]:
    """The share of heads above each epsilon of the ledger, a line a position, whose table in a card has 0.3 alone."""
    called, lines = called_runs(row, preset), []
    for heading, values in parsed(row["ours"]):
        what, by_eps, epsilons = heading.partition(" at eps ")
        if by_eps:
            cells = (f"{called[name]} {value.replace('/', ' / ')}" for name, value in values.items())
            lines.append(f"{names.human(what)} at ε = {epsilons.replace('/', ' / ')}: {'; '.join(cells)}.")
    return lines


def called_runs(row: dict[str, Any], preset: str) -> dict[str, str]:
    """What a card calls each run that the paper's numbers or ours name."""
    runs = dict.fromkeys(name for part in ("paper", "ours") for _, values in parsed(row[part]) for name in values)
    return labels(list(runs), preset)


def labels(runs: list[str], preset: str) -> dict[str, str]:
    """The runs' names on a card, with the T that each was measured at where that differs: alpha_1 falls with T."""
    lengths = {name: config(name, preset).train.eval_length for name in runs if name not in unavailable(preset)}
    differ = len(set(lengths.values())) > 1
    return {
        name: names.of(name, preset) + (f", at T = {lengths[name]}" if differ and name in lengths else "")
        for name in runs
    }


def reason(row: dict[str, Any], checks: pd.DataFrame, preset: str) -> str:
    """Why the verdict is what it is: which check decides it, by how much, and what a test says of the cause."""
    verdict = row["verdict"]
    if verdict == rules.NOT_VISIBLE:
        return names.human(row["reason"], preset).capitalize() + "."
    if verdict == rules.NOT_RUN:
        return _lacking(row, preset)
    tests, premises = checks[~checks["premise"]], checks[checks["premise"]]
    lacking = premises[premises["outcome"] != rules.HOLDS]
    if len(lacking):
        told = f"Cannot be told, as what it starts from is not there here: {_found(lacking.iloc[0], preset)}."
        return " ".join(filter(None, (told, _minus(reasons.why(row["id"], results(preset))))))
    if verdict == rules.REPRODUCED:
        said = {1: "The one check holds.", 2: "Both checks hold."}.get(len(tests), f"All {len(tests)} checks hold.")
        note = _minus(reasons.note(row["id"], results(preset)))
        return " ".join(filter(None, [said, *_costs(tests, preset), *_unsure(tests, preset), note]))
    counted = tests["outcome"].value_counts()
    counts = f"{counted.get(rules.HOLDS, 0)} of {len(tests)} checks hold"
    counts += f", {counted[rules.OPEN]} cannot be told from our seeds" if rules.OPEN in counted else ""
    state, opening = rules.FAILS, "Does not hold"
    if verdict == rules.INCONCLUSIVE:
        state, opening = rules.OPEN, "Cannot be told"
    decisive = tests[tests["outcome"] == state]
    opening += ", for one" if len(decisive) > 1 else ""
    said = f"{opening}: {_found(decisive.iloc[0], preset)}."
    said = f"{counts}. {said}" if len(tests) > 1 else said
    cause = _minus(reasons.why(row["id"], results(preset)))
    return " ".join(filter(None, (said, *_unsure(tests, preset), cause)))


def _unsure(checks: pd.DataFrame, preset: str) -> list[str]:
    """What the spread pooled over all settings decides of two runs, and that of their own few seeds would not."""
    alone, named = replace(results(preset), alone=True), []
    for _, check in checks[checks["outcome"].isin([rules.HOLDS, rules.FAILS])].iterrows():
        if len(check["runs"]) > 1:
            asked = rules.Check(check["kind"], tuple(check["runs"]), check["key"])
            if rules.judge(asked, alone, {}).state == rules.OPEN:
                named.append(names.human(check["check"], preset))
    words = "By the spread of these seeds alone, not pooled, one could not tell"
    return [f"{words}: {'; '.join(named)}."] if named else []


def _costs(checks: pd.DataFrame, preset: str) -> list[str]:
    """What is no worse by the ledger's margin, and all the same not for free."""
    worse = checks[(checks["kind"] == "comparable") & (checks["low"] > 0)]
    return [f"Within the margin, but not without a price: {_found(check, preset)}." for _, check in worse.iterrows()]


def _found(check: pd.Series, preset: str) -> str:
    """What a check asks and what was found in its place, with the number that would have counted."""
    says, why = (names.human(check[part], preset) for part in ("check", "why"))
    if check["kind"] not in FOUND or pd.isna(check["mean"]):
        return f"\u201c{says}\u201d ({why})"
    quantity, numbers = QUANTITIES[check["key"]], _measured(check)
    limit, digits = _plain(check, why).split("; ")[-1].split(" ")[1], quantity.digits
    if f"{numbers['low']:.{digits}f}" == limit or f"{numbers['high']:.{digits}f}" == limit:  # on which side, then?
        digits += 1
    mean, low, high = (_minus(f"{number:.{digits}f}") for number in numbers)
    runs = [names.of(name, preset) for name in check["runs"]]
    apart = "has {value} times that of" if quantity.log else "differs by {value} from"
    words = FOUND[check["kind"]]
    if check["kind"] == "more" and check["outcome"] == rules.OPEN and check["low"] > 0:
        words = "{q}: {0} {apart} {1}, but corrected for all comparisons of the ledger " + why.split(" after")[0]
    words = words.replace("{apart}", apart)
    return words.format(*runs, q=names.human(quantity.heading), value=f"{mean} ({low} to {high})", limit=limit)


def _of_logarithms(check: pd.Series) -> bool:
    """Whether what decides a check is a difference of logarithms, said to a reader as a ratio."""
    return len(check["runs"]) > 1 and QUANTITIES[check["key"]].log


def _measured(check: pd.Series) -> pd.Series:
    numbers = check[["mean", "low", "high"]].astype(float)
    return np.exp(numbers) if _of_logarithms(check) else numbers


def _plain(check: pd.Series, why: str) -> str:
    """A check's why with its margin as a ratio where it is one."""
    if not _of_logarithms(check):
        return why
    return re.sub(r"margin ([\d.]+)", lambda found: f"margin {math.exp(float(found[1])):.2f} times", why)


def _lacking(row: dict[str, Any], preset: str) -> str:
    """What a claim that cannot be judged still waits for."""
    seeds, others = {}, []
    for part in dict.fromkeys(row["reason"].split("; ")):
        lacking = LACKING.match(part)
        if not lacking:
            others.append(names.human(part, preset))
            continue
        run = names.human(lacking[1], preset)
        if lacking[4]:  # there are such runs, whose records do not keep what is asked
            run += f" that keep the {names.human(lacking[4].removeprefix(' hold '))}"
        seeds[run] = lacking[2]
    waits = "; ".join(name + (f" ({count} so far)" if count != "0" else "") for name, count in seeds.items())
    return "; ".join([*[f"Not judged before it has three seeds of {waits}"] * bool(waits), *others]) + "."


def parsed(text: str) -> list[tuple[str, dict[str, str]]]:
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


def _check(check: pd.Series, preset: str) -> str:
    says, why = (names.human(check[part], preset) for part in ("check", "why"))
    numbers = ""
    if not pd.isna(check["mean"]):
        digits = 3
        if any(why == f"threshold {_measured(check)[end]:.3f}" for end in ("low", "high")):  # on which side, then?
            digits = 4
        mean, low, high = (f"{number:.{digits}f}" for number in _measured(check))
        numbers = f"{mean}{' times' * _of_logarithms(check)} (95 %: {low} to {high})"
        if check["key"] == "onset" and any((results(preset).values(run, "onset") == 1).any() for run in check["runs"]):
            numbers += "; no onset within the run counts as 1"
    said = "; ".join(filter(None, (_minus(numbers), _plain(check, why))))
    state = check["outcome"] + " (what the claim starts from)" * bool(check["premise"])
    return f"{html.escape(state)}: {html.escape(says)} <small>{html.escape(said)}</small>"
