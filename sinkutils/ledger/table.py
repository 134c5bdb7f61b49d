"""The ledger as tables: one row per claim, one row per check, and one line for a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from sinkutils.ledger.claims_file import read_claims
from sinkutils.ledger.judge import HOLDS, Judged, judge_claims
from sinkutils.ledger.quantities import EXCESSES, QUANTITIES, RATIOS
from sinkutils.ledger.readings import Readings, readings
from sinkutils.ledger.statistics import Estimate

CHECK_COLUMNS = "id kind runs quantity state mean low high seeds bar p passes words premise".split()


def claims(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """The ledger at a preset: one row per claim.

    part: "paper", "later" (claims of later papers) or "ours". paper: the paper's numbers as printed. ours, interval:
    the levels that the checks read, and their 95 % intervals, excess in blocks 2 to L. block_1, sink_1: of those runs,
    the excess in block 1 and the paper's Sink_1 over all blocks, in percent. verdict: reproduced, partly, not
    reproduced, inconclusive, not visible (such models cannot show it), not run, or by mathematics. holds: "k of n"
    checks. effect, low, high: of the first check that has a number, with its 95 % interval; of a ratio, its logarithm.
    trivial: why the claim could not have failed here, if so. remark: by hand. Raises ValueError for an unknown preset.
    """
    ours = readings(preset, folder)
    return pd.DataFrame([_claim_row(one, ours) for one in judge_claims(read_claims(), ours)])


def claim_checks(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per check of every claim: kind, runs, quantity and state, and the numbers behind it.

    mean, low, high: of the level or paired difference, over `seeds`. bar: what it is held against, a threshold or a
    margin. p: after Holm, of directional checks. passes: of a "no effect" check, the largest effect that would still
    pass. All of ratios as logarithms. premise: whether the claim takes it for granted.
    """
    rows = []
    for one in judge_claims(read_claims(), readings(preset, folder)):
        for premise, outcomes in ((False, one.outcomes), (True, one.premises)):
            for outcome in outcomes:
                row = {"id": one.claim.id, **vars(outcome), "runs": ", ".join(outcome.runs), "premise": premise}
                row |= _numbers("mean", outcome.estimate)
                row["seeds"] = outcome.estimate.seeds if outcome.estimate else 0
                rows.append(row)
    return pd.DataFrame(rows, columns=CHECK_COLUMNS if rows else None)


def verdict(id: str, preset: str = "laptop", folder: Path | str | None = None) -> str:
    """The verdict on one claim, such as "reproduced (3 of 3 checks)". Raises ValueError for an unknown id."""
    for one in judge_claims(read_claims(), readings(preset, folder)):
        if one.claim.id == id:
            return f"{one.verdict} ({_holds(one)} checks)" if one.outcomes else one.verdict
    raise ValueError(f"no claim {id!r} in data/claims.yaml")


def _holds(one: Judged) -> str:
    held = [outcome for outcome in one.outcomes if outcome.state == HOLDS]
    return f"{len(held)} of {len(one.outcomes)}"


def _claim_row(one: Judged, ours: Readings) -> dict[str, Any]:
    """A claim as a row; see `claims`."""
    read: dict[str, dict[str, None]] = {}  # the runs that the checks read, by quantity
    lines = []
    for outcome in one.outcomes:
        if outcome.quantity in QUANTITIES:
            read.setdefault(outcome.quantity, {}).update(dict.fromkeys(outcome.runs))
        else:
            lines.append(f"{outcome.runs[0]} {outcome.quantity} {outcome.words}")
    excesses = {run: None for quantity in read if quantity in EXCESSES for run in read[quantity]}
    intervals = []
    for quantity, runs in read.items():
        lines.append(f"{quantity}: {_levels(quantity, runs, ours)}")
        intervals.append(f"{quantity}: {_levels(quantity, runs, ours, interval=True)}")
    claim = one.claim
    return {
        **{name: getattr(claim, name) for name in ("id", "part", "source", "claim", "paper")},
        "ours": "; ".join(lines),
        "interval": "; ".join(intervals),
        **{name: _levels(name, excesses, ours) for name in ("block_1", "sink_1")},
        "verdict": one.verdict,
        "holds": _holds(one),
        **_numbers("effect", next((outcome.estimate for outcome in one.outcomes if outcome.estimate), None)),
        "trivial": claim.trivial,
        "remark": claim.remark,
    }


def _numbers(name: str, estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {name: math.nan, "low": math.nan, "high": math.nan}
    return {name: estimate.mean, "low": estimate.low, "high": estimate.high}


def _levels(quantity: str, runs: Iterable[str], ours: Readings, interval: bool = False) -> str:
    """Each run's level, or its 95 % interval, as text."""
    cells = []
    for run in runs:
        if len(ours.values(run, quantity)) < 2:
            continue
        estimate = ours.level(run, quantity)
        numbers = [estimate.low, estimate.high] if interval else [estimate.mean]
        if quantity in RATIOS:
            numbers = [math.exp(number) for number in numbers]
        cells.append(f"{run} {' to '.join(f'{number:.3g}' for number in numbers)}")
    return ", ".join(cells)
