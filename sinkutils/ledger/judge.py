"""When a check holds, when it fails, and what verdict follows for a claim.

The paper prints Sink_1 at its own scale, so that points do not carry over to our models; shares do, since a ratio of
Sink_1 between two rows is about the ratio of their mean excess. So a bar is mostly a share of the base's excess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from sinkutils.ledger import real_models
from sinkutils.ledger.claims_file import PARTS, Check, Claim
from sinkutils.ledger.outcome import FAILS, HOLDS, MISSING, OPEN, Outcome, flipped
from sinkutils.ledger.quantities import BARS, EXCESSES, RATIOS
from sinkutils.ledger.readings import Readings, label
from sinkutils.ledger.statistics import Estimate, difference, level

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
SHARES = {"same": MARGIN, "kept": MARGIN, "alike": ALIKE, "loss": LOSS, "worse": LOSS}

GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    "any token": ("smoke", "minute", "laptop"),  # models this small have a sink only on a fixed first token
}


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and the outcomes of its checks and of what it takes for granted."""

    claim: Claim
    verdict: str
    outcomes: tuple[Outcome, ...] = ()
    premises: tuple[Outcome, ...] = ()


def judge_claims(claims: Sequence[Claim], ours: Readings) -> list[Judged]:
    """Every claim; directional checks after Holm over their part of the ledger."""
    judged = {}
    for part in PARTS:
        members = [claim for claim in claims if claim.part == part]
        asked = {claim.id: [check for check in claim.checks if _possible(check, ours)] for claim in members}
        corrected = _holm([check for checks in asked.values() for check in checks], ours)
        for claim in members:
            judged[claim.id] = _judged(claim, asked[claim.id], ours, corrected)
    return [judged[claim.id] for claim in claims]


def _judged(claim: Claim, checks: Sequence[Check], ours: Readings, corrected: Mapping[Check, float]) -> Judged:
    if claim.trivial in PROVED and not claim.checks:
        return Judged(claim, PROVED[claim.trivial])
    if ours.preset in GATED[claim.gate]:
        return Judged(claim, "not visible")
    outcomes: list[Outcome] = []
    for check in checks:
        if check.runs:
            outcomes.append(judge(check, ours, corrected))
        else:
            outcomes += _of_real_models(check)
    premises = [judge(check, ours, {}) for check in claim.given]
    result = verdict([outcome.state for outcome in outcomes], [outcome.state for outcome in premises])
    return Judged(claim, result, tuple(outcomes), tuple(premises))


def _possible(check: Check, ours: Readings) -> bool:
    """Whether a preset has every experiment of a check, and none that is at its scale the same as another one."""
    return all(name == "base" or label(name, ours.preset) == name for name in check.runs)


def _of_real_models(check: Check) -> list[Outcome]:
    """Whether a number of each model, or its interval, lies above (below) the bar."""
    outcomes = []
    for model, numbers in real_models.answers().items():
        low, high = numbers[check.quantity]
        state = OPEN
        if low > check.bar or high <= check.bar:
            state = HOLDS if (low > check.bar) == (check.kind == "above") else FAILS
        words = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        outcomes.append(Outcome(check.kind, (model,), check.quantity, state, bar=check.bar, words=words))
    return outcomes


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


def _holm(checks: Sequence[Check], ours: Readings) -> dict[Check, float]:
    """The p-values of all directional checks, corrected for their number (Holm 1979)."""
    directional = {check: judge(check, ours, {}).p for check in checks if check.kind == "more"}
    raw = {check: p for check, p in directional.items() if not math.isnan(p)}
    corrected, largest = {}, 0.0
    for rank, check in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - rank) * raw[check]))
        corrected[check] = largest
    return corrected


def judge(check: Check, ours: Readings, corrected: Mapping[Check, float]) -> Outcome:
    """The outcome of a check on records. corrected: p-values of directional checks after Holm."""
    outcome = Outcome(check.kind, tuple(label(name, ours.preset) for name in check.runs), check.quantity)
    if check.kind in ("fails", "trains"):
        return replace(outcome, state=_training(check, ours))
    outcome = replace(outcome, words=_censored(check, ours))
    needed = [(name, check.quantity) for name in check.runs]
    if check.quantity in EXCESSES:
        needed.append(("base", "excess"))
    lacking = [_lacking(name, quantity, check, ours) for name, quantity in needed]
    if any(lacking):
        return replace(outcome, state=MISSING if MISSING in lacking else OPEN)
    if check.quantity in EXCESSES and "base" not in check.runs[:1] and _base(ours).low <= BASE:
        return replace(outcome, state=OPEN, words="the base has no sink to measure by")
    if check.kind in ("together", "apart"):
        return _together(check, ours, outcome)
    if len(check.runs) == 1:
        return _present(check, ours, outcome)
    name, other = check.runs
    if len(ours.differences(name, other, check.quantity, check.fresh)) < ours.least:
        return replace(outcome, state=OPEN if check.quantity == "onset" else MISSING)
    estimate = difference(ours, name, other, check.quantity, check.fresh)
    if check.kind == "more":
        return _more(check, ours, outcome, estimate, corrected)
    return _within(check, ours, outcome, estimate)


def _base(ours: Readings) -> Estimate:
    """The level of the base's excess, the measure of all others."""
    return level(ours, "base", "excess")


def _training(check: Check, ours: Readings) -> str:
    """Whether training failed in every seed ("fails"), or in none ("trains")."""
    runs = ours.seeds(check.runs[0], check.fresh)
    lost = [run is None for run in runs.values()]
    if len(lost) < ours.least:
        return MISSING
    if any(lost) != all(lost):
        return OPEN
    return HOLDS if all(lost) == (check.kind == "fails") else FAILS


def _lacking(name: str, quantity: str, check: Check, ours: Readings) -> str:
    """The state of a check where an experiment holds a quantity in too few seeds: not run, but open where the reason is
    that training failed, which shows neither a sink nor its absence, or that the onset never came.
    """
    runs = ours.seeds(name, check.fresh)
    if len(ours.values(name, quantity, check.fresh)) >= ours.least:
        return ""
    explained = quantity == "onset" or None in runs.values()
    return OPEN if explained and len(runs) >= ours.least else MISSING


def _censored(check: Check, ours: Readings) -> str:
    """How many seeds are left out because the onset never came."""
    if check.quantity != "onset":
        return ""
    without = [f"{len(ours.seeds(name)) - len(ours.values(name, 'onset'))} of {name}" for name in check.runs]
    return f"seeds without an onset: {', '.join(without)}"


def _present(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """The 95 % interval of the level lies above the bar; at or below it, it fails. "absent" is the mirror image."""
    estimate = level(ours, check.runs[0], check.quantity, check.fresh)
    if check.quantity not in EXCESSES:
        bar = BARS[check.quantity]
        if check.quantity in RATIOS:
            bar = math.log(bar)
    elif outcome.runs == (label("base", ours.preset),):
        bar = BASE
    else:
        bar = SINK * _base(ours).mean
    state = HOLDS if estimate.low > bar else FAILS if estimate.high <= bar else OPEN
    return replace(outcome, state=flipped(state) if check.kind == "absent" else state, estimate=estimate, bar=bar)


def _together(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """Both a sink and a large element after block 1, or neither; one without the other, it fails."""
    if len(ours.values(check.runs[0], "element_1", check.fresh)) < ours.least:
        return replace(outcome, state=MISSING)
    sink = _present(replace(check, kind="present"), ours, outcome)
    element = _present(replace(check, kind="present", quantity="element_1"), ours, outcome)
    state = HOLDS if sink.state == element.state else FAILS
    if OPEN in (sink.state, element.state):
        state = OPEN
    words = f"sink: {sink.state}, large element: {element.state}"
    return replace(outcome, state=flipped(state) if check.kind == "apart" else state, words=words)


def _more(
    check: Check, ours: Readings, outcome: Outcome, estimate: Estimate, corrected: Mapping[Check, float]
) -> Outcome:
    """Significantly more after Holm; it fails where the interval leaves no room for a difference that counts."""
    p = min(1.0, 2 * min(estimate.p_above(), estimate.p_below()))
    p = corrected.get(check, p)
    bar = SINK * _base(ours).mean if check.quantity in EXCESSES else 0.0
    state = HOLDS if estimate.mean > 0 and p <= ALPHA else FAILS if estimate.high <= bar else OPEN
    return replace(outcome, state=state, estimate=estimate, bar=bar, p=p)


def _within(check: Check, ours: Readings, outcome: Outcome, estimate: Estimate) -> Outcome:
    """No effect beyond the margin, by one one-sided test per side that is asked (TOST); surely beyond it, it fails."""
    share = SHARES[check.kind]
    if check.quantity in RATIOS:
        margin = math.log(1 + share)
    elif check.quantity in EXCESSES:
        margin = share * _base(ours).mean
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
    if check.kind == "worse":
        state = flipped(state)
    passes = margin - float(stdtrit(estimate.freedom, 1 - ALPHA)) * estimate.error
    return replace(outcome, state=state, estimate=estimate, bar=margin, passes=max(0.0, passes))
