"""The ledger as tables: one row per claim, one row per check, and one line for a notebook."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from sinkutils.ledger.claims_file import Claim, read_claims
from sinkutils.ledger.judge import Judged, judge_claims
from sinkutils.ledger.outcome import HOLDS, Outcome
from sinkutils.ledger.quantities import QUANTITIES
from sinkutils.ledger.readings import Readings, readings
from sinkutils.ledger.statistics import Estimate, difference, level

COLUMNS = ("id", "part", "source", "claim", "paper", "ours", "interval", "verdict", "holds", "effect", "low", "high")
CHECK_COLUMNS = (
    "id",
    "kind",
    "runs",
    "quantity",
    "state",
    "mean",
    "low",
    "high",
    "seeds",
    "bar",
    "p",
    "passes",
    "words",
)


def claims(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """The ledger at a preset: one row per claim.

    part: "paper", "later" (claims of later papers) or "ours". paper: the paper's numbers as printed. ours, interval:
    the levels that the checks read, and their 95 % intervals. verdict: reproduced, partly, not reproduced,
    inconclusive, not visible (such models cannot show it), not run, or by mathematics. holds: "k of n" checks. effect,
    low, high: the number of the first check that has one, with its 95 % interval; of a ratio, its logarithm. trivial:
    why the claim could not have failed here, if so. remark: by hand. Raises ValueError for an unknown preset.
    """
    ours = readings(preset, folder)
    rows = [_claim_row(one, ours) for one in _judged(ours, read_claims())]
    return pd.DataFrame(rows, columns=[*COLUMNS, "trivial", "remark"])


def checks(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per check of every claim: kind, runs, quantity and state, and the numbers behind it.

    mean, low, high: of the level or paired difference, over `seeds`. bar: what it is held against, a threshold or a
    margin. p: after Holm, of directional checks. passes: of a "no effect" check, the largest effect that would still
    pass. All of ratios as logarithms. premise: whether the claim takes it for granted.
    """
    rows = []
    for one in _judged(readings(preset, folder), read_claims()):
        for outcomes, premise in ((one.outcomes, False), (one.premises, True)):
            rows += [(one.claim.id, *_check_row(outcome), premise) for outcome in outcomes]
    return pd.DataFrame(rows, columns=[*CHECK_COLUMNS, "premise"])


def verdict(id: str, preset: str = "laptop", folder: Path | str | None = None) -> str:
    """The verdict on one claim, such as "reproduced (3 of 3 checks)". Raises ValueError for an unknown id."""
    for one in _judged(readings(preset, folder), read_claims()):
        if one.claim.id == id:
            return f"{one.verdict} ({_holds(one)} checks)" if one.outcomes else one.verdict
    raise ValueError(f"no claim {id!r} in data/claims.yaml")


def effect(
    name: str, reference: str, preset: str = "laptop", quantity: str = "excess", folder: Path | str | None = None
) -> Estimate:
    """One experiment's quantity less another's, over the seeds that both have, with its 95 % interval.

    Ratios are compared by their logarithms. Raises ValueError for an unknown quantity or preset, and where the two
    share fewer than two seeds.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}; got {quantity!r}")
    estimate = difference(readings(preset, folder), name, reference, quantity)
    if estimate is None:
        raise ValueError(f"{name} and {reference} share fewer than two seeds at preset {preset!r}: train more of them")
    return estimate


def _judged(ours: Readings, known: tuple[Claim, ...]) -> list[Judged]:
    return judge_claims(known, ours)


def _holds(one: Judged) -> str:
    held = sum(outcome.state == HOLDS for outcome in one.outcomes)
    return f"{held} of {len(one.outcomes)}"


def _claim_row(one: Judged, ours: Readings) -> tuple[object, ...]:
    claim = one.claim
    means, intervals = _levels(one, ours)
    first = next((outcome.estimate for outcome in one.outcomes if outcome.estimate), None)
    numbers = (first.mean, first.low, first.high) if first else (math.nan,) * 3
    start = (claim.id, claim.part, claim.source, claim.claim, claim.paper, means, intervals, one.verdict, _holds(one))
    return (*start, *numbers, claim.trivial, claim.remark)


def _check_row(outcome: Outcome) -> tuple[object, ...]:
    estimate = outcome.estimate
    numbers = (estimate.mean, estimate.low, estimate.high, estimate.seeds) if estimate else (math.nan,) * 3 + (0,)
    asked = (outcome.kind, ", ".join(outcome.runs), outcome.quantity, outcome.state)
    return (*asked, *numbers, outcome.bar, outcome.p, outcome.passes, outcome.words)


def _levels(one: Judged, ours: Readings) -> tuple[str, str]:
    """The level of each quantity for each run that a claim's checks read, and the intervals, as text."""
    means: dict[str, list[str]] = {}
    intervals: dict[str, list[str]] = {}
    for outcome in (*one.outcomes, *one.premises):
        if outcome.words:
            means.setdefault(outcome.quantity, []).append(f"{outcome.runs[0]} {outcome.words}")
        if outcome.quantity not in QUANTITIES:
            continue
        quantity = QUANTITIES[outcome.quantity]
        for run in outcome.runs:
            if len(ours.values(run, outcome.quantity)) < 2:
                continue
            estimate = level(ours, run, outcome.quantity)
            numbers = np.array([estimate.mean, estimate.low, estimate.high])
            mean, low, high = np.exp(numbers) if quantity.log else numbers
            means.setdefault(quantity.heading, []).append(f"{run} {mean:.3g}")
            intervals.setdefault(quantity.heading, []).append(f"{run} {low:.3g} to {high:.3g}")
    return _joined(means), _joined(intervals)


def _joined(cells: dict[str, list[str]]) -> str:
    return "; ".join(f"{heading}: {', '.join(dict.fromkeys(runs))}" for heading, runs in cells.items())
