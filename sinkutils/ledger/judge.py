"""When a check holds, when it fails, and what verdict follows for a claim.

The paper prints Sink_1 at its own scale, so that points do not carry over to our models; shares do, since a ratio of
Sink_1 between two rows is about the ratio of their mean excess. So a bar is mostly a share of the base's excess.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sinkutils.ledger.claims_file import PARTS, Check, Claim
from sinkutils.ledger.quantities import BARS, EXCESSES, RATIOS, as_judged
from sinkutils.ledger.readings import Readings, label, real_models
from sinkutils.ledger.statistics import NOTHING, Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"  # what a check comes to
REAL = ("above", "below")  # kinds of check about real models
OPPOSITES = ("absent", "apart", "below", "fails", "worse")  # of present, together, above, trains, loss
ALPHA = 0.05  # of every test; of "more" after Holm over its part of the ledger
# A sink: the weakest row that the paper still calls one has 2.90 % (Table 9), its default 18.18 %.
SINK = 2.90 / 18.18
# The base needs a sink before anything is measured by it: 18.18 % of heads exactly at eps = 0.3, the others even.
BASE = 0.044
# No effect: half-way between the largest fall that the paper calls none (18.18 to 10.68, Table 12) and the least that
# it calls one (9.41, Table 14).
MARGIN = 1 - (10.68 + 9.41) / 2 / 18.18
# A comparable loss: half-way between the largest that the paper calls so (3.81, Table 3) and 3.90 (Table 2).
LOSS = (3.81 + 3.90) / 2 / 3.73 - 1
ALIKE = 1.0  # within a factor of two (Appendix D, without a number)
PROVED = {"mathematics": "by mathematics", "mathematics, in part": "partly"}  # verdicts that need no run
SHARES = {"same": MARGIN, "kept": MARGIN, "alike": ALIKE, "loss": LOSS, "worse": LOSS}  # SINK of other kinds

GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    "any token": ("smoke", "minute", "laptop"),  # models this small have a sink only on a fixed first token
}


@dataclass(frozen=True)
class Outcome:
    """The state of a check and the numbers that decided it; of a ratio, their logarithms."""

    check: Check  # its runs by the names that they have at the preset, or the real model
    state: str = MISSING
    estimate: Estimate = NOTHING
    bar: float = math.nan  # what the estimate is held against: a threshold, or a margin
    p: float = math.nan  # of a directional check, after Holm
    passes: float = math.nan  # of a "no effect" check, the largest effect that would still pass with these seeds
    words: str = ""  # what no estimate says


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and the outcomes of its checks and of what it takes for granted."""

    claim: Claim
    verdict: str
    outcomes: Sequence[Outcome] = ()
    premises: Sequence[Outcome] = ()


def judge_claims(claims: Sequence[Claim], ours: Readings) -> list[Judged]:
    """Every claim; directional checks after Holm over their part of the ledger."""
    alone = defaultdict(list)  # of each claim, before Holm
    for claim in claims:
        seen = ours.fresh() if claim.fresh else ours
        for check in claim.checks:
            # A preset may lack an experiment, or have it under another name: such a check is not asked.
            if check.kind in REAL or all(name in ("base", label(name, ours.preset)) for name in check.runs):
                alone[claim.id].append(judge(check, seen))
    corrected = {}
    for part in PARTS:
        outcomes = [outcome for claim in claims if claim.part == part for outcome in alone[claim.id]]
        corrected[part] = holm({one.check: one.p for one in outcomes if not math.isnan(one.p)})
    judged = []
    for claim in claims:
        if claim.trivial in PROVED and not claim.checks:
            judged.append(Judged(claim, PROVED[claim.trivial]))
        elif ours.preset in GATED[claim.gate]:
            judged.append(Judged(claim, "not visible"))
        else:
            outcomes = [_directed(one, corrected[claim.part].get(one.check, one.p)) for one in alone[claim.id]]
            premises = [judge(check, ours) for check in claim.given]
            result = verdict([one.state for one in outcomes], [one.state for one in premises])
            judged.append(Judged(claim, result, outcomes, premises))
    return judged


def verdict(states: Sequence[str], premises: Sequence[str] = ()) -> str:
    """The verdict on a claim from the states of its checks; without what it takes for granted nothing is shown."""
    if not states or MISSING in (*states, *premises):
        return "not run"
    if set(premises) - {HOLDS}:
        return "inconclusive"
    if set(states) == {HOLDS}:
        return "reproduced"
    if FAILS not in states:
        return "inconclusive"
    return "partly" if HOLDS in states else "not reproduced"


def holm(p: Mapping[Check, float]) -> dict[Check, float]:
    """p-values corrected for their number (Holm 1979)."""
    ranked = sorted(p, key=p.__getitem__)
    scaled = [(len(p) - rank) * p[check] for rank, check in enumerate(ranked)]
    return dict(zip(ranked, np.minimum(1, np.maximum.accumulate(scaled)).tolist(), strict=True))


def _directed(outcome: Outcome, p: float) -> Outcome:
    """A directional check, decided by this p-value; another outcome as it is.

    It fails where the interval leaves no room for a difference that counts.
    """
    if math.isnan(p):
        return outcome
    holds, fails = outcome.estimate.mean > 0 and p <= ALPHA, outcome.estimate.high <= outcome.bar
    return replace(outcome, p=p, state=_state(outcome.check.kind, holds, fails))


def _state(kind: str, holds: bool, fails: bool) -> str:
    """The state of a check; of one that asks for the opposite, the other way round."""
    if kind in OPPOSITES:
        holds, fails = fails, holds
    if holds:
        return HOLDS
    return FAILS if fails else OPEN


def judge(check: Check, ours: Readings) -> Outcome:
    """The outcome of a check on records; of a directional one, before any correction."""
    kind, quantity = check.kind, check.quantity
    if kind in REAL:  # whether a number of a model, or its interval, lies above (below) the bar
        low, high = real_models()[check.runs[0], quantity]
        words = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        return Outcome(check, _state(kind, low > check.bar, high <= check.bar), bar=check.bar, words=words)
    base = label("base", ours.preset)
    asked = check.runs
    check = replace(check, runs=tuple(label(name, ours.preset) for name in check.runs))
    if kind in ("fails", "trains"):  # whether training failed in every seed, or in none
        lost = [run is None for run in ours.seeds(check.runs[0]).values()]
        return Outcome(check, _state(kind, not any(lost), all(lost)) if len(lost) >= ours.least else MISSING)
    words = ""
    if quantity == "onset":
        without = [f"{len(ours.seeds(name)) - len(ours.values(name, 'onset'))} of {name}" for name in check.runs]
        words = f"seeds without an onset: {', '.join(without)}"
    if lacking := _lacking(check, ours):
        return Outcome(check, lacking, words=words)
    if quantity in EXCESSES and asked[0] != "base" and ours.base().low <= BASE:
        return Outcome(check, OPEN, words="the base has no sink to measure by")
    if kind in ("together", "apart"):
        return _together(check, ours)
    name, *others = check.runs
    estimate = ours.difference(name, others[0], quantity) if others else ours.level(name, quantity)
    if quantity in EXCESSES:
        bar = BASE if check.runs == (base,) else SHARES.get(kind, SINK) * ours.base().mean
    elif not others:
        bar = as_judged(BARS)[quantity]
    elif kind == "more":
        bar = 0.0
    elif quantity in RATIOS:
        bar = math.log(1 + SHARES[kind])
    else:
        bar = SHARES[kind] * ours.level(others[0], quantity).mean
    outcome = Outcome(check, OPEN, estimate, bar, words=words)
    if kind in ("present", "absent"):  # by the 95 % interval
        return replace(outcome, state=_state(kind, estimate.low > bar, estimate.high <= bar))
    if kind == "more":
        return _directed(outcome, estimate.p)
    # No effect beyond the margin, by a one-sided test per side that is asked (TOST); surely beyond, it fails.
    reach = estimate.reach(1 - ALPHA)
    least = -math.inf if kind in ("loss", "worse") else -bar
    most = math.inf if kind == "kept" else bar
    low, high = estimate.mean - reach, estimate.mean + reach
    state = _state(kind, least < low and high < most, high <= least or most <= low)
    return replace(outcome, state=state, passes=max(0.0, bar - reach))


def _lacking(check: Check, ours: Readings) -> str:
    """The state of a check for which too few seeds hold what it asks; "" where enough do.

    Not run, but open where the reason is that training failed, which shows neither a sink nor its absence, or that the
    onset never came.
    """
    needed = [(name, check.quantity) for name in check.runs]
    state = ""
    for name, quantity in [*needed, ("base", "excess")] if check.quantity in EXCESSES else needed:
        if len(ours.values(name, quantity)) < ours.least:
            runs = ours.seeds(name)
            if len(runs) < ours.least or (quantity != "onset" and None not in runs.values()):
                return MISSING
            state = OPEN
    paired = set.intersection(*(set(ours.values(*one)) for one in needed))  # compared seed by seed
    if not state and len(paired) < ours.least:
        return OPEN if check.quantity == "onset" else MISSING
    return state


def _together(check: Check, ours: Readings) -> Outcome:
    """Both a sink and a large element after block 1, or neither; one without the other, it fails."""
    sink = judge(replace(check, kind="present"), ours).state
    element = judge(replace(check, kind="present", quantity="element_1"), ours).state
    if element == MISSING:
        return Outcome(check)
    decided = OPEN not in (sink, element)
    state = _state(check.kind, decided and sink == element, decided and sink != element)
    return Outcome(check, state, words=f"sink: {sink}, large element: {element}")
