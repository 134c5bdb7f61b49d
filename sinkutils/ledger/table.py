"""The ledger as tables: a row per claim, a row per check, or a single verdict."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from sinkutils.checks import require
from sinkutils.ledger.claims_file import REAL, Claim, read_claims, read_own
from sinkutils.ledger.judge import FAILS, HOLDS, MISSING, OPEN, Judged, judge_claims, why_open
from sinkutils.ledger.quantities import QUANTITIES
from sinkutils.ledger.readings import Readings, readings
from sinkutils.study.record import Folder

COLUMNS = """id part source claim paper ours interval verdict reason checks effect low high trivial
 remark""".split()
CHECK_COLUMNS = """id kind runs quantity state mean low high seeds freedom prior bar leans p passes
 words why premise""".split()


def claims(
    preset: str = "laptop",
    folder: Folder = None,
    correction: str = "claim",
    *,
    file: str | Path | None = None,
) -> pd.DataFrame:
    """The ledger at a preset: one row per claim.

    preset: a preset, or the folder for another text, such as "laptop@path-mine-0123abcd".
    file: claims of your own, in the form of data/claims.yaml, in place of the study's. They may
    name variants of your own beside the experiments of the study, whose verdicts they do not move.
    correction: how the p-values are corrected for their number by Holm's method, for and against
    alike: over the checks of each "claim", which is the ledger's rule; over all of the "ledger"
    (each part by itself); or "none". Raises ValueError for an unknown preset or correction.

    These are the columns:
    part: "paper", "later" (claims of later papers) or "ours".
    paper: the paper's numbers as printed.
    ours, interval: the levels that the checks read, and their 95 % intervals. Excesses are means
    over blocks 2 to L.
    verdict: reproduced, partly, not reproduced, inconclusive, not visible (models of this preset
    cannot show it), not tested (they are too small to), not run, or by mathematics.
    reason: why checks stay open (`judge.why_open`): a dead block, a correction, a number near its
    bar, or too few seeds, with the number that would do.
    checks: how many checks hold, fail and stay open, such as "1 holds, 3 fail, 5 open".
    effect, low, high: the number of the first check that has one, with its 95 % interval. For a
    ratio it is the logarithm.
    trivial: the reason why the claim could not have failed here, if there is one.
    remark: a comment written by hand.
    """
    ours = readings(preset, folder)
    rows = []
    for judged in _all_judged(ours, correction, read_claims() if file is None else read_own(file)):
        # The runs that the checks read, by quantity. Dicts are used as ordered sets.
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
        # The levels that the checks read. A run has one level even if several checks read it.
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
    """One row per check of every claim: its kind, runs, quantity and state, and its numbers.

    mean, low, high: the level or difference, and its 95 % interval. For ratios all numbers are
    logarithms. seeds: the number of seeds.
    freedom: the degrees of freedom of the interval.
    prior: the degrees of freedom of the common variance of all settings, towards which each
    setting's own variance is shrunk. If they are few, it is shrunk little.
    bar: the threshold or margin with which the mean is compared. If it is a share of the base's
    mean, it has an error of its own. So the check may stay open although the interval lies above.
    leans: what the numbers speak for, holds or fails. p: its p-value after Holm's correction.
    passes: the largest effect with which a "no effect" check would still pass.
    words: the reason for the state, if no number shows it. why: why it is open.
    premise: whether the check is a premise of the claim.
    """
    rows = []
    ours = readings(preset, folder)
    for judged in _all_judged(ours):
        for number, outcome in enumerate((*judged.outcomes, *judged.premises)):
            check = outcome.check
            estimate = outcome.estimate
            row = vars(check) | vars(estimate) | vars(outcome)
            row["why"] = why_open(outcome)
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
    # This is checked first, because reading the records takes a while.
    require(id in known, f"no claim {id!r} in data/claims.yaml")
    table = claims(preset, folder).set_index("id")
    row = table.loc[id]
    return f"{row.verdict} ({row.checks})" if row.checks else row.verdict


@lru_cache(maxsize=4)
def _all_judged(
    ours: Readings, correction: str = "claim", file: tuple[Claim, ...] | None = None
) -> list[Judged]:
    return judge_claims(file or read_claims(), ours, correction)


def _tally(judged: Judged) -> str:
    """How many checks hold, fail and so on, such as "1 holds, 3 fail, 5 open", or ""."""
    states = [outcome.state for outcome in judged.outcomes]
    parts = []
    for state in (HOLDS, FAILS, OPEN, MISSING):
        count = states.count(state)
        verb = state if count == 1 else state.removesuffix("s")
        if count:
            parts.append(f"{count} {verb}")
    # A claim whose checks all hold is still open if one of its premises is.
    if any(premise.state != HOLDS for premise in judged.premises):
        parts.append("a premise is open")
    models = set()
    for outcome in judged.outcomes:
        if outcome.check.kind in REAL:
            models.add(outcome.check.runs)
    if models:  # a few pretrained models, which do not stand for all
        parts.append(f"in {len(models)} real models")
    return ", ".join(parts)


def _reasons(judged: Judged) -> str:
    """The reasons why checks stay open, each of them once."""
    reasons: dict[str, None] = {}
    for outcome in (*judged.outcomes, *judged.premises):
        if reason := why_open(outcome):
            reasons |= dict.fromkeys(reason.split("; "))
    return "; ".join(reasons)


def _levels(quantity: str, runs: Iterable[str], ours: Readings) -> tuple[str, str]:
    """The levels of some runs, and their 95 % intervals, as text."""
    levels = []
    intervals = []
    for run in runs:
        if len(ours.values(run, quantity)) < 2:  # these are too few for an interval
            continue
        estimate = ours.estimate((run,), quantity)
        numbers = np.array([estimate.mean, estimate.low, estimate.high])
        if QUANTITIES[quantity].ratio:
            numbers = np.exp(numbers)
        mean, low, high = numbers
        levels.append(f"{run} {mean:.3g}")
        intervals.append(f"{run} {low:.3g} to {high:.3g}")
    return ", ".join(levels), ", ".join(intervals)
