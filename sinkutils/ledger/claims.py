"""The ledger at a preset: every claim's verdict, and the numbers that it rests on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkutils.checks import choice
from sinkutils.ledger import open_models, proofs
from sinkutils.ledger.conclusions import CLAIMS, Claim
from sinkutils.ledger.effects import Effect, level, paired
from sinkutils.ledger.later import LATER
from sinkutils.ledger.results import EPSILONS, QUANTITIES, Results, results, sink
from sinkutils.ledger.rules import GATES, HOLDS, MISSING, NOT_RUN, NOT_VISIBLE, TRAINED, Check, Outcome, judge
from sinkutils.ledger.rules import verdict as of_outcomes
from sinkutils.study.grid import config, experiment, unavailable

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("id", "source", "claim", "paper", "ours", "interval", "verdict", "holds", "effect", "low", "high", "reason")
ASKED = ("kind", "runs", "key")  # of a check, in `checks`
# The paper's column that stands beside a quantity of ours, and its heading.
PRINTED = {
    **dict.fromkeys(("excess_1", "learned_1"), ("sink_1", "Sink_1 %")),
    **dict.fromkeys(("excess_star", "learned_star"), ("sink_star", "Sink_* %")),
    **{f"excess_{k}": (f"sink_{k}", f"Sink_{k} %") for k in (2, 3)},
    "valid_loss": ("valid_loss", "valid loss"),
}
# Where the alpha of a quantity is, for those beside which Sink at three eps is shown.
POSITION: dict[str, int | str] = {
    **{f"excess_{k}": k for k in (1, 2, 3)},
    **{"learned_1": 1, "excess_star": "star", "learned_star": "star"},
}
ELSEWHERE = {**proofs.PROOFS, **open_models.JUDGES}  # by id, how claims without checks are judged
PARTS = {"paper": CLAIMS, "later": LATER}  # the paper's own claims, and those of later papers
Judged = dict[str, tuple[str, list[tuple[Check | None, Outcome]]]]  # by claim: its verdict, and each check's outcome


def claims(preset: str = "laptop", runs: Path | str | None = None, part: str = "paper") -> pd.DataFrame:
    """The ledger at a preset: a row a claim, columns COLUMNS; text, but for the numbers effect, low and high.

    part: "paper", the paper's own claims, or "later", those of later papers.

    ours, interval: the means over seeds of what the checks read, and their 95 % intervals. holds: "k of n" checks.
    effect, low, high: the claim's first paired difference of an excess, or that of its first run's alpha_1 from the
    base's (the default's, where it changes that), with the 95 % interval; of a claim on the base alone or on another
    quantity, its level. reason: of the verdict.
    Raises ValueError for an unknown preset or part.
    """
    import pandas as pd

    choice("part", part, tuple(PARTS))
    ours = results(preset, runs)
    judged = _judged(ours)
    return pd.DataFrame([_row(claim, ours, *judged[claim.id]) for claim in PARTS[part]], columns=list(COLUMNS))


def verdicts(ours: Results) -> dict[str, str]:
    """Every claim's verdict on results that are read."""
    return {id: result for id, (result, _) in _judged(ours).items()}


def verdict(id: str, preset: str = "laptop", runs: Path | str | None = None) -> str:
    """One claim's verdict as a line for a notebook. Raises ValueError for an unknown id."""
    claim, ours = _claim(id), results(preset, runs)
    row = _row(claim, ours, *_judged(ours)[id])
    figures = f"; 95 %: {row['interval']}" if row["interval"] else ""
    evidence = f"paper: {row['paper']}" + (f" | ours: {row['ours']}{figures}" if row["ours"] else "")
    return f"{row['verdict'].capitalize()} ({row['holds']}): {row['claim']} ({evidence}) [{row['reason']}]"


def checks(id: str, preset: str = "laptop", runs: Path | str | None = None) -> pd.DataFrame:
    """The checks under one claim's verdict, a row each: what it says, its outcome, the numbers and why.

    mean, low, high: of the level or paired difference that decides it, over `seeds`. kind, runs, key: of its `Check`,
    empty where no record decides it. premise: whether it is what the claim takes for granted.
    Raises ValueError for an unknown id.
    """
    import pandas as pd

    _claim(id)
    rows, ours = [], results(preset, runs)
    for check, outcome in _judged(ours)[id][1]:
        asked = (check.kind, tuple(map(ours.label, check.runs)), check.key) if check else ("", (), "")
        seeds = outcome.effect.seeds if outcome.effect else 0
        why = "; ".join(filter(None, (outcome.facts, outcome.why)))
        rows.append((outcome.says, outcome.state, *_numbers(outcome.effect), seeds, why, *asked, outcome.premise))
    columns = ["check", "outcome", *("mean", "low", "high", "seeds"), "why", *ASKED, "premise"]
    return pd.DataFrame(rows, columns=columns)


def _numbers(estimate: Effect | None) -> tuple[float, float, float]:
    return (estimate.mean, estimate.low, estimate.high) if estimate else (np.nan, np.nan, np.nan)


def _claim(id: str) -> Claim:
    known = {claim.id: claim for part in PARTS.values() for claim in part}
    if id not in known:
        raise ValueError(f"id must be one of {', '.join(known)}; got {id!r}")
    return known[id]


def _judged(ours: Results) -> Judged:
    """Every claim's verdict and outcomes; directional checks after Holm over their part of the ledger."""
    key = ("ledger", open_models.state())
    if key not in ours.cache:
        ours.cache[key] = {id: result for part in PARTS.values() for id, result in _judged_part(part, ours).items()}
    return ours.cache[key]


def _judged_part(part: tuple[Claim, ...], ours: Results) -> Judged:
    visible = [claim for claim in part if not claim.checks or ours.preset not in GATES[claim.gate][0]]
    held = {claim.id: _held(claim, ours) for claim in visible}
    asked = dict.fromkeys(check for checks in held.values() for check in checks)
    corrected = _holm({check: p for check in asked if (p := judge(check, ours, {}).p) is not None})
    judged: Judged = {claim.id: (NOT_VISIBLE, []) for claim in part}
    for claim in visible:
        outcomes: list[tuple[Check | None, Outcome]] = [(c, judge(c, ours, corrected)) for c in held[claim.id]]
        outcomes += [(c, replace(judge(c, ours, {}), premise=True)) for c in claim.given]
        if not claim.checks:
            outcomes = [(None, outcome) for outcome in ELSEWHERE[claim.id]()]
        judged[claim.id] = of_outcomes([outcome for _, outcome in outcomes]), outcomes
    return judged


def _holm(raw: dict[Check, float]) -> dict[Check, float]:
    from statsmodels.stats.multitest import multipletests

    adjusted = multipletests(list(raw.values()), method="holm")[1].tolist() if raw else []
    return dict(zip(raw, adjusted, strict=True))


def _held(claim: Claim, ours: Results) -> list[Check]:
    """The checks that a preset can hold: not of runs that it lacks, or that are the base itself or another row's, nor
    of what a window of one key leaves to x_1.
    """
    refused, base = unavailable(ours.preset), ours.label("base")
    checks: dict[tuple[str, tuple[str, ...], str], Check] = {}
    for check in claim.checks:
        labels = tuple(map(ours.label, check.runs))
        is_base = base in map(ours.label, set(check.runs) - {"base", base})
        if is_base or len(set(labels)) < len(labels) or set(check.runs) & set(refused):
            continue
        if check.key != "visible_1" or min(_window(name, ours) for name in check.runs) > 1:
            checks.setdefault((check.kind, labels, check.key), check)
    return list(checks.values())


def _window(name: str, ours: Results) -> float:
    return config(name, ours.preset).model.attention.window or np.inf


def _row(claim: Claim, ours: Results, result: str, judged: list[tuple[Check | None, Outcome]]) -> dict[str, Any]:
    outcomes = [outcome for _, outcome in judged]
    tested = [outcome for outcome in outcomes if not outcome.premise]
    shown = [check for check, _ in judged if check is not None and check.kind not in TRAINED]
    facts = [outcome.facts for outcome in outcomes if outcome.facts]
    numbers = dict(zip(("effect", "low", "high"), _numbers(_effect(shown, ours)), strict=True))
    return numbers | {
        "id": claim.id,
        "source": claim.source,
        "claim": claim.text,
        "paper": claim.paper or _printed(claim, ours),
        "ours": "; ".join([*_figures(shown, ours), *facts]),
        "interval": "; ".join(_figures(shown, ours, interval=True)),
        "verdict": result,
        "holds": f"{sum(outcome.state == HOLDS for outcome in tested)} of {len(tested)}",
        "reason": _reason(claim, ours, result, outcomes),
    }


def _reason(claim: Claim, ours: Results, result: str, outcomes: list[Outcome]) -> str:
    if result == NOT_VISIBLE:
        return GATES[claim.gate][1]
    if result == NOT_RUN:
        lacking = dict.fromkeys(outcome.why for outcome in outcomes if outcome.state == MISSING)
        runs = {ours.label(name) for check in (*claim.checks, *claim.given) for name in check.reads}
        count = sum(record.partition("/")[0] in runs for record in ours.unjudged)
        unjudged = [f"{count} records from before the ledger was frozen, or on another text, are not judged"]
        return "; ".join([*lacking, *unjudged * bool(count)]) or f"not of preset {ours.preset!r}"
    others = [f"{outcome.state}: {outcome.says} ({outcome.why})" for outcome in outcomes if outcome.state != HOLDS]
    return "; ".join(others) or "all hold"


def _runs_by_key(shown: list[Check]) -> dict[str, dict[str, None]]:
    by_key: dict[str, dict[str, None]] = {}
    for check in shown:
        by_key.setdefault(check.key, {}).update(dict.fromkeys(check.reads))
    return by_key


def _figures(shown: list[Check], ours: Results, interval: bool = False) -> list[str]:
    """A line a quantity: the mean over seeds (or its 95 % interval) of each run; of alpha also Sink at three eps."""
    lines = []
    for key, names in _runs_by_key(shown).items():
        quantity, cells = QUANTITIES[key], []
        for label in dict.fromkeys(map(ours.label, names)):
            values = ours.values(label, key)
            if len(values) > interval:
                estimate = level(values, quantity.log) if len(values) > 1 else None
                numbers = [estimate.mean if estimate else values.mean()]
                if interval and estimate:
                    numbers = [estimate.low, estimate.high]
                cells.append(f"{label} {' to '.join(f'{x:.{quantity.digits}f}' for x in numbers)}")
        lines += [f"{quantity.heading}: {', '.join(cells)}"] if cells else []
    for k in dict.fromkeys(POSITION[check.key] for check in shown if check.key in POSITION and not interval):
        labels = dict.fromkeys(ours.label(n) for check in shown if POSITION.get(check.key) == k for n in check.reads)
        cells = [f"{label} {'/'.join(cell)}" for label in labels if (cell := _sinks(label, ours, k))]
        symbol = "*" if k == "star" else k
        lines += [f"Sink_{symbol} % at eps {'/'.join(map(str, EPSILONS))}: {', '.join(cells)}"] if cells else []
    return lines


def _sinks(name: str, ours: Results, k: int | str) -> list[str]:
    runs = [run for run in ours.seeds(name).values() if not run.failed]
    by_eps = [[value for run in runs if (value := sink(run, k, eps)) is not None] for eps in EPSILONS]
    return [f"{sum(values) / len(values):.1f}" if values else "-" for values in by_eps] if any(by_eps) else []


def _effect(shown: list[Check], ours: Results) -> Effect | None:
    """The number that a claim is about; see `claims`."""
    for check in shown:
        if len(check.runs) == 2 and check.by_base:
            return paired(ours, *check.runs, check.key)
    if not shown:
        return None
    name, key = shown[0].runs[0], shown[0].key
    if name != "base" and key in POSITION:
        return paired(ours, name, "base" if experiment(name).base else "default", "excess_1")
    values = ours.values(name, key)
    return level(values, QUANTITIES[key].log) if len(values) > 1 else None


def _printed(claim: Claim, ours: Results) -> str:
    """The paper's figures for the runs of a claim; beside our base, those of the default and of its own row."""
    lines: dict[str, dict[str, None]] = {}
    for key, names in _runs_by_key([check for check in claim.checks if check.key in PRINTED]).items():
        column, heading = PRINTED[key]
        for name in names:
            for row in dict.fromkeys(("default", ours.label("base")) if name == "base" else (name,)):
                value = experiment(row).paper.get(column)
                if value is not None:
                    lines.setdefault(heading, {})[f"{row} {value:.2f}"] = None
    return "; ".join(f"{heading}: {', '.join(cells)}" for heading, cells in lines.items())
