"""When a check holds, when it fails, and what verdict follows for a claim.

Each check is held against one bar. The paper prints Sink_1 at its own scale, so that points do not carry over to our
models; shares do, since a ratio of Sink_1 between two rows is about the ratio of their mean excess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from sinkutils.ledger import real_models
from sinkutils.ledger.claims_file import PARTS, Check, Claim
from sinkutils.ledger.outcome import FAILS, HOLDS, MISSING, OPEN, Outcome, flipped
from sinkutils.ledger.quantities import QUANTITIES
from sinkutils.ledger.readings import Readings, label
from sinkutils.ledger.statistics import Estimate, difference, level
from sinkutils.study.grid import config, unavailable

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
SHARES = {"same": MARGIN, "kept": MARGIN, "alike": ALIKE, "loss": LOSS, "worse": LOSS}
OF_TRAINING = ("fails", "trains")

GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    "any token": ("smoke", "minute", "laptop"),  # models this small have a sink only on a fixed first token
}
REPRODUCED, PARTLY, NOT_REPRODUCED = "reproduced", "partly", "not reproduced"
INCONCLUSIVE, NOT_VISIBLE, NOT_RUN, MATHEMATICS = "inconclusive", "not visible", "not run", "by mathematics"


@dataclass(frozen=True)
class Judged:
    """A claim with the outcomes of its checks and of what it takes for granted."""

    claim: Claim
    verdict: str
    outcomes: tuple[Outcome, ...]
    premises: tuple[Outcome, ...]


def judge_claims(claims: Sequence[Claim], ours: Readings) -> list[Judged]:
    """Every claim; directional checks after Holm over their part of the ledger."""
    judged = []
    for part in PARTS:
        members = [claim for claim in claims if claim.part == part]
        asked = {claim.id: _asked(claim, ours) for claim in members}
        corrected = _holm(asked, ours)
        for claim in members:
            outcomes = tuple(outcome for check in asked[claim.id] for outcome in _outcomes(check, ours, corrected))
            premises = tuple(judge(check, ours, {}) for check in claim.given if asked[claim.id])
            judged.append(Judged(claim, _of_claim(claim, ours, outcomes, premises), outcomes, premises))
    return judged


def _of_claim(claim: Claim, ours: Readings, outcomes: Sequence[Outcome], premises: Sequence[Outcome]) -> str:
    if ours.preset in GATED[claim.gate] and claim.checks and claim.checks[0].kind != "real":
        return NOT_VISIBLE
    if claim.trivial == "mathematics" and not claim.checks:
        return MATHEMATICS
    return verdict([outcome.state for outcome in outcomes], [outcome.state for outcome in premises])


def verdict(states: Sequence[str], premises: Sequence[str] = ()) -> str:
    """The verdict on a claim from the states of its checks; without what it takes for granted nothing is shown."""
    if not states or MISSING in (*states, *premises):
        return NOT_RUN
    if set(premises) - {HOLDS}:
        return INCONCLUSIVE
    if set(states) == {HOLDS}:
        return REPRODUCED
    if FAILS not in states:
        return INCONCLUSIVE
    return PARTLY if HOLDS in states else NOT_REPRODUCED


def _asked(claim: Claim, ours: Readings) -> list[Check]:
    """The checks that a preset can hold: not of experiments that it lacks, or that coincide there, nor of a window of
    one key, which shows nothing of x_1.
    """
    if ours.preset in GATED[claim.gate] and claim.checks and claim.checks[0].kind != "real":
        return []
    refused = unavailable(ours.preset)
    kept: dict[tuple[str, tuple[str, ...], str], Check] = {}
    for check in claim.checks:
        labels = tuple(label(name, ours.preset) for name in check.runs)
        another_base = any(
            name not in ("base", ours.base) and label(name, ours.preset) == ours.base for name in check.runs
        )
        if another_base or len(set(labels)) < len(labels) or set(check.runs) & set(refused):
            continue
        if check.quantity == "visible" and min(_window(name, ours.preset) for name in check.runs) == 1:
            continue
        kept.setdefault((check.kind, labels, check.quantity), check)
    return list(kept.values())


def _window(name: str, preset: str) -> float:
    return config(name, preset).model.attention.window or math.inf


def _holm(asked: Mapping[str, Sequence[Check]], ours: Readings) -> dict[Check, float]:
    """The p-values of all directional checks, corrected for their number (Holm 1979)."""
    raw = {}
    for checks in asked.values():
        for check in checks:
            p = judge(check, ours, {}).p if check.kind == "more" else math.nan
            if not math.isnan(p):
                raw[check] = p
    corrected, largest = {}, 0.0
    for rank, check in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - rank) * raw[check]))
        corrected[check] = largest
    return corrected


def _outcomes(check: Check, ours: Readings, corrected: Mapping[Check, float]) -> list[Outcome]:
    if check.kind == "real":
        return real_models.judge(check.quantity)
    return [judge(check, ours, corrected)]


def judge(check: Check, ours: Readings, corrected: Mapping[Check, float]) -> Outcome:
    """The outcome of a check on records. corrected: p-values of directional checks after Holm."""
    outcome = Outcome(check.kind, tuple(label(name, ours.preset) for name in check.runs), check.quantity)
    if check.kind in OF_TRAINING:
        return replace(outcome, state=_training(check, ours))
    names = [*check.runs, *(["base"] if QUANTITIES[check.quantity].by_base else [])]
    if any(_too_few(name, check, ours) for name in names):
        return replace(outcome, state=MISSING)
    if any(_mostly_failed(name, check, ours) for name in names):
        return replace(outcome, state=OPEN)  # without training neither a sink nor its absence is shown
    alone = {label(name, ours.preset) for name in check.runs} == {ours.base}
    if QUANTITIES[check.quantity].by_base and not alone and level(ours, "base", "excess").low <= BASE:
        return replace(outcome, state=OPEN)  # the base has no sink to measure by
    if check.kind in ("present", "absent"):
        return _present(check, ours, outcome)
    if check.kind in ("together", "apart"):
        return _together(check, ours, outcome)
    estimate = difference(ours, *check.runs, check.quantity, check.fresh)
    if estimate is None or estimate.seeds < ours.least:
        return replace(outcome, state=MISSING)
    if check.kind == "more":
        return _more(check, ours, replace(outcome, estimate=estimate), corrected)
    return _within(check, ours, replace(outcome, estimate=estimate), estimate)


def _training(check: Check, ours: Readings) -> str:
    runs = ours.seeds(check.runs[0], check.fresh)
    if len(runs) < ours.least:
        return MISSING
    lost = sum(run is None for run in runs.values())
    wanted = lost if check.kind == "fails" else len(runs) - lost
    if wanted == len(runs):
        return HOLDS
    return OPEN if wanted else FAILS


def _too_few(name: str, check: Check, ours: Readings) -> bool:
    quantity = check.quantity if name in check.runs else "excess"
    known = len(ours.values(name, quantity, check.fresh))
    return known < ours.least and not _mostly_failed(name, check, ours)


def _mostly_failed(name: str, check: Check, ours: Readings) -> bool:
    """Whether training failed in so many seeds that too few are left to judge by."""
    runs = ours.seeds(name, check.fresh)
    trained = sum(run is not None for run in runs.values())
    return len(runs) >= ours.least > trained


def _share_of_base(share: float, ours: Readings) -> float:
    return share * level(ours, "base", "excess").mean


def _present(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """The 95 % interval of the level lies above the bar; at or below it, it fails. "absent" is the mirror image."""
    name, quantity = check.runs[0], QUANTITIES[check.quantity]
    estimate = level(ours, name, check.quantity, check.fresh)
    if quantity.by_base:
        bar = BASE if label(name, ours.preset) == ours.base else _share_of_base(SINK, ours)
    else:
        bar = math.log(quantity.bar) if quantity.log else quantity.bar
    state = HOLDS if estimate.low > bar else FAILS if estimate.high <= bar else OPEN
    return replace(outcome, state=flipped(state) if check.kind == "absent" else state, estimate=estimate, bar=bar)


def _together(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """Both a sink and massive activations, or neither; one without the other, it fails."""
    if len(ours.values(check.runs[0], "element", check.fresh)) < ours.least:
        return replace(outcome, state=MISSING)
    sink, element = (
        _present(replace(check, kind="present", quantity=name), ours, outcome) for name in ("excess", "element")
    )
    state = OPEN if OPEN in (sink.state, element.state) else HOLDS if sink.state == element.state else FAILS
    return replace(element, kind=check.kind, state=flipped(state) if check.kind == "apart" else state)


def _more(check: Check, ours: Readings, outcome: Outcome, corrected: Mapping[Check, float]) -> Outcome:
    """Significantly more after Holm; it fails where the interval leaves no room for a difference that counts."""
    estimate = outcome.estimate
    assert estimate is not None
    p = min(1.0, 2 * min(estimate.p_above(), estimate.p_below()))
    bar = _share_of_base(SINK, ours) if QUANTITIES[check.quantity].by_base else 0.0
    significant = estimate.mean > 0 and corrected.get(check, p) <= ALPHA
    state = HOLDS if significant else FAILS if estimate.high <= bar else OPEN
    return replace(outcome, state=state, bar=bar, p=corrected.get(check, p))


def _within(check: Check, ours: Readings, outcome: Outcome, estimate: Estimate) -> Outcome:
    """No effect beyond the margin, by one one-sided test per side that is asked (TOST); surely beyond it, it fails."""
    quantity = QUANTITIES[check.quantity]
    share = SHARES[check.kind]
    if quantity.log:
        margin = math.log(1 + share)
    elif quantity.by_base:
        margin = _share_of_base(share, ours)
    else:
        margin = share * level(ours, check.runs[1], check.quantity, check.fresh).mean
    inside, beyond = [], []
    if check.kind in ("same", "alike", "kept"):  # a fall counts
        inside.append(estimate.p_above(-margin))
        beyond.append(estimate.p_below(-margin))
    if check.kind in ("same", "alike", "loss", "worse"):  # a rise counts
        inside.append(estimate.p_below(margin))
        beyond.append(estimate.p_above(margin))
    state = HOLDS if max(inside) <= ALPHA else FAILS if min(beyond) <= ALPHA else OPEN
    passes = margin - float(stdtrit(estimate.freedom, 1 - ALPHA)) * estimate.error
    return replace(
        outcome, state=flipped(state) if check.kind == "worse" else state, bar=margin, passes=max(0.0, passes)
    )
