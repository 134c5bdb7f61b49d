"""The ledger as tables: one row per claim, one row per check, and one line for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import pandas as pd

from sinkutils.checks import require
from sinkutils.ledger.claims_file import REAL, read_claims
from sinkutils.ledger.judge import FAILS, HOLDS, MISSING, OPEN, Judged, judge_claims
from sinkutils.ledger.quantities import RATIOS
from sinkutils.ledger.readings import Readings, readings
from sinkutils.study.record import Folder

COLUMNS = """id part source claim paper ours interval verdict reason checks effect low high trivial
 remark""".split()
CHECK_COLUMNS = """id kind runs quantity state mean low high seeds freedom prior bar p passes words
 premise""".split()


def claims(preset: str = "laptop", folder: Folder = None, corrected: bool = True) -> pd.DataFrame:
    """The ledger at a preset: one row per claim.

    part: "paper", "later" (claims of later papers) or "ours". paper: the paper's numbers as
    printed. ours, interval: the levels that the checks read, and their 95 % intervals, excess in
    blocks 2 to L. verdict: reproduced, partly, not reproduced, inconclusive, not visible
    (such models cannot show it), not run, or by mathematics. reason: why a check stays open where
    no number says it, a dead block above all. checks: how many hold, fail and stay open, such as
    "1 holds, 3 fail, 5 open". effect, low, high: of the first check that has a number, with its
    95 % interval; of a ratio, its logarithm. trivial: why the claim could not have failed here, if
    so. remark: by hand. corrected: whether directional checks are corrected for their number
    (Holm), as the ledger's verdicts are. Raises ValueError for an unknown preset.
    """
    ours = readings(preset, folder)
    rows = []
    for judged in _all_judged(ours, corrected):
        # The runs that the checks read, by quantity; a dict for each, as a set has no order.
        read: dict[str, dict[str, None]] = {}
        levels = []
        intervals = []
        for outcome in judged.outcomes:
            check = outcome.check
            if check.kind in REAL:
                (model,) = check.runs
                levels.append(f"{model} {check.quantity} {outcome.words}")
            else:
                runs = read.setdefault(check.quantity, {})
                runs |= dict.fromkeys(check.runs)
        # The levels behind the checks, each run's once though several checks read it.
        for quantity, runs in read.items():
            level, interval = _levels(quantity, runs, ours)
            levels.append(f"{quantity}: {level}")
            intervals.append(f"{quantity}: {interval}")
        row = vars(judged.claim) | {"verdict": judged.verdict, "reason": _reasons(judged)}
        row["ours"] = "; ".join(levels)
        row["interval"] = "; ".join(intervals)
        row["checks"] = _tally(judged)
        # The effect of the first check that has a number.
        for outcome in judged.outcomes:
            estimate = outcome.estimate
            if estimate.seeds:
                row |= {"effect": estimate.mean, "low": estimate.low, "high": estimate.high}
                break
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def claim_checks(preset: str = "laptop", folder: Folder = None) -> pd.DataFrame:
    """One row per check of every claim: kind, runs, quantity and state, and the numbers behind it.

    mean, low, high: of the level or paired difference, over `seeds`. freedom: degrees of freedom of
    that interval. prior: those of the variance that all settings have in common, towards which each
    setting's own is shrunk; few shrink it little. bar: what the mean is held against, a threshold
    or a margin; a share of the base's mean has an error of its own, so that an interval above it
    may still leave the check open. p: after Holm, of present, absent and more. passes: of a "no
    effect" check, the largest effect that would still pass. All of ratios as logarithms. premise:
    whether the claim takes it for granted.
    """
    rows = []
    ours = readings(preset, folder)
    for judged in _all_judged(ours):
        for number, outcome in enumerate((*judged.outcomes, *judged.premises)):
            check = outcome.check
            estimate = outcome.estimate
            row = vars(check) | vars(outcome) | vars(estimate)
            row["id"] = judged.claim.id
            row["premise"] = number >= len(judged.outcomes)
            if estimate.seeds:
                d0, _, _ = ours.prior(check.quantity)
                row["prior"] = d0
            row["runs"] = ", ".join(check.runs)
            row |= {"low": estimate.low, "high": estimate.high}
            rows.append(row)
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def verdict(id: str, preset: str = "laptop", folder: Folder = None) -> str:
    """The verdict on one claim, such as "partly (1 holds, 3 fail, 5 open)".

    Raises ValueError for an unknown id.
    """
    known = [claim.id for claim in read_claims()]
    require(id in known, f"no claim {id!r} in data/claims.yaml")  # before 600 records are read
    table = claims(preset, folder).set_index("id")
    row = table.loc[id]
    return f"{row.verdict} ({row.checks})" if row.checks else row.verdict


@lru_cache(maxsize=4)
def _all_judged(ours: Readings, corrected: bool = True) -> list[Judged]:
    return judge_claims(read_claims(), ours, corrected)


def _tally(judged: Judged) -> str:
    """How its checks come out, such as "1 holds, 3 fail, 5 open"; empty if it has none."""
    states = [outcome.state for outcome in judged.outcomes]
    parts = []
    for state in (HOLDS, FAILS, OPEN, MISSING):
        count = states.count(state)
        verb = state if count == 1 else state.removesuffix("s")
        if count:
            parts.append(f"{count} {verb}")
    # A claim whose checks all hold may still be open: it rests on another that is.
    if any(premise.state != HOLDS for premise in judged.premises):
        parts.append("a premise is open")
    models = set()
    for outcome in judged.outcomes:
        if outcome.check.kind in REAL:
            models.add(outcome.check.runs)
    if models:  # finished ones, which cannot speak for all
        parts.append(f"in {len(models)} real models")
    return ", ".join(parts)


def _reasons(judged: Judged) -> str:
    """What is said of the checks that stay open, each once."""
    reasons: dict[str, None] = {}
    for outcome in (*judged.outcomes, *judged.premises):
        ours = outcome.check.kind not in REAL  # a real model's words are its number
        if outcome.state == OPEN and ours and outcome.words:
            reasons |= dict.fromkeys(outcome.words.split("; "))
    return "; ".join(reasons)


def _levels(quantity: str, runs: Iterable[str], ours: Readings) -> tuple[str, str]:
    """Each run's level, and its 95 % interval, as text."""
    levels = []
    intervals = []
    for run in runs:
        if len(ours.values(run, quantity)) < 2:  # too few for an interval
            continue
        estimate = ours.estimate((run,), quantity)
        numbers = np.array([estimate.mean, estimate.low, estimate.high])
        if quantity in RATIOS:
            numbers = np.exp(numbers)
        mean, low, high = numbers
        levels.append(f"{run} {mean:.3g}")
        intervals.append(f"{run} {low:.3g} to {high:.3g}")
    return ", ".join(levels), ", ".join(intervals)
