"""When a check holds, when it fails, and what verdict follows for a claim.

The paper prints Sink_1 at its own scale, so that points do not carry over to our models; shares do, since a ratio of
Sink_1 between two rows is about the ratio of their mean excess. So a bar is mostly a share of the base's excess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from sinkutils.ledger.claims_file import PARTS, Check, Claim
from sinkutils.ledger.quantities import BARS, EXCESSES, RATIOS, as_judged
from sinkutils.ledger.readings import Readings, label, real_models
from sinkutils.ledger.statistics import Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"  # what a check comes to
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
SHARES = {"more": SINK, "same": MARGIN, "kept": MARGIN, "alike": ALIKE, "loss": LOSS, "worse": LOSS}

GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    "any token": ("smoke", "minute", "laptop"),  # models this small have a sink only on a fixed first token
}


@dataclass(frozen=True)
class Outcome:
    """The state of a check and the numbers that decided it; of a ratio, their logarithms."""

    kind: str
    runs: tuple[str, ...]
    quantity: str
    state: str = MISSING
    estimate: Estimate | None = None
    bar: float = math.nan  # what the estimate is held against: a threshold, or a margin
    p: float = math.nan  # of a directional check, after Holm
    passes: float = math.nan  # of a "no effect" check, the largest effect that would still pass with these seeds
    words: str = ""  # what no estimate says


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and the outcomes of its checks and of what it takes for granted."""

    claim: Claim
    verdict: str
    outcomes: tuple[Outcome, ...] = ()
    premises: tuple[Outcome, ...] = ()


def judge_claims(claims: Sequence[Claim], ours: Readings) -> list[Judged]:
    """Every claim; directional checks after Holm over their part of the ledger."""
    asked = {}
    for claim in claims:
        asked[claim.id] = [check for check in claim.checks if _possible(check, ours)]
    corrected = {}
    for part in PARTS:
        directional = [check for claim in claims if claim.part == part for check in asked[claim.id]]
        corrected[part] = holm(directional, ours)
    return [_judged(claim, asked[claim.id], ours, corrected[claim.part]) for claim in claims]


def _judged(claim: Claim, checks: Sequence[Check], ours: Readings, corrected: Mapping[Check, float]) -> Judged:
    if claim.trivial in PROVED and not claim.checks:
        return Judged(claim, PROVED[claim.trivial])
    if ours.preset in GATED[claim.gate]:
        return Judged(claim, "not visible")
    outcomes: list[Outcome] = []
    for check in checks:
        outcomes += [judge(check, ours, corrected)] if check.runs else _of_real_models(check)
    premises = [judge(check, ours, {}) for check in claim.given]
    result = verdict([outcome.state for outcome in outcomes], [outcome.state for outcome in premises])
    return Judged(claim, result, tuple(outcomes), tuple(premises))


def _possible(check: Check, ours: Readings) -> bool:
    """Whether a preset has every experiment of a check, and none that is at its scale the same as another one."""
    return all(name == "base" or label(name, ours.preset) == name for name in check.runs)


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


def holm(checks: Sequence[Check], ours: Readings) -> dict[Check, float]:
    """The p-values of all directional checks, corrected for their number (Holm 1979)."""
    directional = {check: judge(check, ours, {}).p for check in checks if check.kind == "more"}
    raw = {check: p for check, p in directional.items() if not math.isnan(p)}
    corrected, largest = {}, 0.0
    for rank, check in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - rank) * raw[check]))
        corrected[check] = largest
    return corrected


def _of_real_models(check: Check) -> list[Outcome]:
    """Whether a number of each model, or its interval, lies above (below) the bar."""
    outcomes = []
    for model, numbers in real_models().items():
        low, high = numbers[check.quantity]
        words = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        state = _state(check.kind, low > check.bar, high <= check.bar)
        outcomes.append(Outcome(check.kind, (model,), check.quantity, state, bar=check.bar, words=words))
    return outcomes


def _state(kind: str, holds: bool, fails: bool) -> str:
    """The state of a check; of one that asks for the opposite, the other way round."""
    if kind in OPPOSITES:
        holds, fails = fails, holds
    if holds:
        return HOLDS
    return FAILS if fails else OPEN


def judge(check: Check, ours: Readings, corrected: Mapping[Check, float]) -> Outcome:
    """The outcome of a check on records. corrected: p-values of directional checks after Holm."""
    runs = tuple(label(name, ours.preset) for name in check.runs)
    outcome = Outcome(check.kind, runs, check.quantity)
    if check.kind in ("fails", "trains"):
        return replace(outcome, state=_training(check, ours))
    if check.quantity == "onset":
        outcome = replace(outcome, words=_censored(check, ours))
    lacking = _lacking(check, ours)
    if lacking:
        return replace(outcome, state=lacking)
    if check.quantity in EXCESSES and "base" not in check.runs[:1] and _base(ours).low <= BASE:
        return replace(outcome, state=OPEN, words="the base has no sink to measure by")
    if check.kind in ("together", "apart"):
        return _together(check, ours, outcome)
    if check.kind in ("present", "absent"):
        return _present(check, ours, outcome)
    return _compared(check, ours, outcome, corrected)


def _training(check: Check, ours: Readings) -> str:
    """Whether training failed in every seed ("fails"), or in none ("trains")."""
    lost = [run is None for run in ours.seeds(check.runs[0], check.fresh).values()]
    if len(lost) < ours.least:
        return MISSING
    return _state(check.kind, not any(lost), all(lost))


def _censored(check: Check, ours: Readings) -> str:
    """How many seeds are left out because the onset never came."""
    without = [f"{len(ours.seeds(name)) - len(ours.values(name, 'onset'))} of {name}" for name in check.runs]
    return f"seeds without an onset: {', '.join(without)}"


def _lacking(check: Check, ours: Readings) -> str:
    """The state of a check for which too few seeds hold what it asks; "" where enough do.

    Not run, but open where the reason is that training failed, which shows neither a sink nor its absence, or that the
    onset never came.
    """
    needed = [(name, check.quantity) for name in check.runs]
    if check.quantity in EXCESSES:
        needed.append(("base", "excess"))
    held = [ours.values(*one, check.fresh).keys() for one in needed]
    state = ""
    for (name, quantity), seeds in zip(needed, held, strict=True):
        if len(seeds) >= ours.least:
            continue
        runs = ours.seeds(name, check.fresh)
        if len(runs) < ours.least or (quantity != "onset" and None not in runs.values()):
            return MISSING
        state = OPEN
    if not state and len(check.runs) == 2 and len(held[0] & held[1]) < ours.least:  # compared seed by seed
        return OPEN if check.quantity == "onset" else MISSING
    return state


def _base(ours: Readings) -> Estimate:
    """The level of the base's excess, the measure of all others."""
    return ours.level("base", "excess")


def _present(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """Whether the 95 % interval of the level lies above the bar."""
    estimate = ours.level(check.runs[0], check.quantity, check.fresh)
    if check.quantity not in EXCESSES:
        bar = as_judged(BARS)[check.quantity]
    elif outcome.runs == (label("base", ours.preset),):
        bar = BASE
    else:
        bar = SINK * _base(ours).mean
    state = _state(check.kind, estimate.low > bar, estimate.high <= bar)
    return replace(outcome, state=state, estimate=estimate, bar=bar)


def _together(check: Check, ours: Readings, outcome: Outcome) -> Outcome:
    """Both a sink and a large element after block 1, or neither; one without the other, it fails."""
    sink = judge(replace(check, kind="present"), ours, {}).state
    element = judge(replace(check, kind="present", quantity="element_1"), ours, {}).state
    if element == MISSING:
        return outcome
    decided = OPEN not in (sink, element)
    state = _state(check.kind, decided and sink == element, decided and sink != element)
    return replace(outcome, state=state, words=f"sink: {sink}, large element: {element}")


def _compared(check: Check, ours: Readings, outcome: Outcome, corrected: Mapping[Check, float]) -> Outcome:
    """More: significantly so after Holm; it fails where the interval leaves no room for a difference that counts.

    The others: no effect beyond the margin, by a one-sided test per side that is asked (TOST); surely beyond, it fails.
    """
    kind, quantity = check.kind, check.quantity
    name, other = check.runs
    estimate = ours.difference(name, other, quantity, check.fresh)
    if quantity in EXCESSES:
        bar = SHARES[kind] * _base(ours).mean
    elif kind == "more":
        bar = 0.0
    elif quantity in RATIOS:
        bar = math.log(1 + SHARES[kind])
    else:
        bar = SHARES[kind] * ours.level(other, quantity, check.fresh).mean
    outcome = replace(outcome, estimate=estimate, bar=bar)
    if kind == "more":
        p = min(1.0, 2 * min(estimate.p_above(), estimate.p_below()))
        p = corrected.get(check, p)
        return replace(outcome, state=_state(kind, estimate.mean > 0 and p <= ALPHA, estimate.high <= bar), p=p)
    fall = estimate.p_above(-bar) if kind not in ("loss", "worse") else 0.0  # how likely with a fall that counts
    rise = estimate.p_below(bar) if kind != "kept" else 0.0
    p = max(fall, rise)
    passes = bar - float(stdtrit(estimate.freedom, 1 - ALPHA)) * estimate.error
    return replace(outcome, state=_state(kind, p <= ALPHA, p >= 1 - ALPHA), passes=max(0.0, passes))
