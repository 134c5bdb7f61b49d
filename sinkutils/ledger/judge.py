"""When a check holds, when it fails, and what verdict follows for a claim.

The paper prints Sink_1 at its own scale, so that points do not carry over to our models; shares do,
since a ratio of Sink_1 between two rows is about the ratio of their mean excess. So a bar is mostly
a share of the base's excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sinkutils.ledger.claims_file import REAL, Check, Claim
from sinkutils.ledger.quantities import BARS, EXCESSES, RATIOS, READS, as_judged
from sinkutils.ledger.readings import ZERO, Bar, Readings, label, real_models
from sinkutils.ledger.statistics import NOTHING, Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"  # what a check comes to
LEVEL = 0.05  # of every test; "present", "absent", "more" after Holm over their part of the ledger
# A sink: the weakest row that the paper still calls one has 2.90 % (Table 9), its default 18.18 %.
SINK = 2.90 / 18.18
# The base needs a sink before anything is measured by it: 18.18 % of heads exactly at eps = 0.3,
# the others even.
BASE = 0.044
# No effect: half-way between the largest fall that the paper calls none (18.18 to 10.68, Table 12)
# and the least that it calls one (9.41, Table 14).
MARGIN = 1 - (10.68 + 9.41) / 2 / 18.18
# A comparable loss: half-way between the largest that the paper calls so (3.81, Table 3) and 3.90
# (Table 2).
LOSS = (3.81 + 3.90) / 2 / 3.73 - 1
FACTOR = 1.0  # within a factor of two (Appendix D, without a number)
# Verdicts that need no run.
PROVED = {"mathematics": "by mathematics", "mathematics, in part": "partly"}
# Of present, together, above, trains and loss.
OPPOSITES = ("absent", "apart", "below", "fails", "worse")
SHARES = {"same": MARGIN, "kept": MARGIN, "alike": FACTOR, "loss": LOSS, "worse": LOSS}
SHARES |= dict.fromkeys(("present", "absent", "more"), SINK)
# On which sides a check that asks for no effect has a margin: 1 above, -1 below.
SIDES = {"same": (-1, 1), "alike": (-1, 1), "kept": (-1,), "loss": (1,), "worse": (1,)}
PValues = Mapping[Estimate, float]
UNCORRECTED: PValues = {}

# The presets that cannot show a claim.
GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    # Models this small have no sink on an ordinary first token.
    "any token": ("smoke", "minute", "laptop"),
}


@dataclass(frozen=True)
class CheckOutcome:
    """The state of a check and the numbers that decided it; of a ratio, their logarithms."""

    check: Check  # its runs by the names that they have at the preset, or the real model
    state: str = MISSING
    estimate: Estimate = NOTHING
    bar: float = math.nan  # what the estimate is held against: a threshold, or a margin
    p: float = math.nan  # of a directional check, after Holm
    passes: float = math.nan  # of a "no effect" check, the largest effect that would still pass
    words: str = ""  # what no estimate says
    tests: tuple[Estimate, ...] = ()  # against zero; their p-values are what Holm corrects


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and the outcomes of its checks and of what it takes for granted."""

    claim: Claim
    verdict: str
    outcomes: Sequence[CheckOutcome] = ()
    premises: Sequence[CheckOutcome] = ()


def judge_claims(claims: Sequence[Claim], ours: Readings, corrected: bool = True) -> list[Judged]:
    """Every claim; directional checks after Holm over their part of the ledger, if `corrected`."""
    judged = [_judge_claim(claim, ours, UNCORRECTED) for claim in claims]
    if not corrected:
        return judged
    tests: dict[str, list[Estimate]] = {}  # by part
    for result in judged:
        of_part = tests.setdefault(result.claim.part, [])
        for outcome in (*result.outcomes, *result.premises):
            of_part += outcome.tests
    # The second time with the corrected p-values.
    p_values = {part: holm(of_part) for part, of_part in tests.items()}
    return [_judge_claim(claim, ours, p_values[claim.part]) for claim in claims]


def _judge_claim(claim: Claim, ours: Readings, corrected: PValues) -> Judged:
    if claim.trivial in PROVED and not claim.checks:
        return Judged(claim, PROVED[claim.trivial])
    if ours.preset in GATED[claim.gate]:
        return Judged(claim, "not visible")
    seen = ours.fresh() if claim.fresh else ours
    outcomes = []
    for check in claim.checks:
        # A preset may lack an experiment, or have it under another name: such a check is not asked.
        asked = [name in ("base", label(name, ours.preset)) for name in check.runs]
        if check.kind in REAL or all(asked):
            outcomes.append(judge(check, seen, corrected))
    premises = [judge(check, ours, corrected) for check in claim.given]
    states = [outcome.state for outcome in outcomes]
    premise_states = [outcome.state for outcome in premises]
    verdict = verdict_of(states, premise_states)
    return Judged(claim, verdict, outcomes, premises)


def verdict_of(states: Sequence[str], premises: Sequence[str] = ()) -> str:
    """The verdict on a claim from the states of its checks.

    Without what it takes for granted nothing is shown.
    """
    if not states or MISSING in (*states, *premises):
        return "not run"
    if set(premises) - {HOLDS}:
        return "inconclusive"
    if set(states) == {HOLDS}:
        return "reproduced"
    if FAILS not in states:
        return "inconclusive"
    return "partly" if HOLDS in states else "not reproduced"


def holm(tests: Iterable[Estimate]) -> dict[Estimate, float]:
    """The p-values of different tests, corrected for their number (Holm 1979)."""
    ranked = sorted(set(tests), key=lambda test: test.p)
    corrected = {}
    largest = 0.0  # so far: a corrected p is no smaller than those before it
    for rank, test in enumerate(ranked):
        largest = max(largest, (len(ranked) - rank) * test.p)
        corrected[test] = min(1.0, largest)
    return corrected


def _state(kind: str, holds: bool, fails: bool) -> str:
    """The state of a check; of one that asks for the opposite, the other way round."""
    if kind in OPPOSITES:
        holds, fails = fails, holds
    if holds:
        return HOLDS
    return FAILS if fails else OPEN


def judge(check: Check, ours: Readings, corrected: PValues = UNCORRECTED) -> CheckOutcome:
    """The outcome of a check on records.

    corrected: p-values by test; a test that is not among them has its own.
    """
    if check.kind in REAL:
        return _of_model(check)
    # From here on by the names that the experiments have at this preset.
    names = [label(name, ours.preset) for name in check.runs]
    check = replace(check, runs=tuple(names))
    if check.kind in ("fails", "trains"):
        return _trained(check, ours)
    words = _never(check.runs, ours) if check.quantity == "onset" else ""
    # What leaves a check undecided whatever its numbers: too few seeds, dead heads, no base to
    # measure by.
    if lacking := _lacking(check, ours):
        return CheckOutcome(check, lacking, words=words)
    if dead := _dead(check, ours):
        return CheckOutcome(check, OPEN, words=dead)
    base = label("base", ours.preset)
    by_base = check.quantity in EXCESSES and check.runs != (base,)
    if by_base and ours.base().low <= BASE:
        return CheckOutcome(check, OPEN, words="the base has no sink to measure by")
    if check.kind in ("together", "apart"):
        return _together(check, ours, corrected)
    # The level or difference itself, which a reader sees, and less its bar, which decides.
    bar = _bar(check, base)
    estimate = ours.estimate(check.runs, check.quantity)
    beyond = ours.estimate(check.runs, check.quantity, bar)
    height = estimate.mean - beyond.mean  # of the bar, as a number
    outcome = CheckOutcome(check, OPEN, estimate, height, words=words)
    if check.kind in SIDES:
        return _no_effect(outcome, ours, bar)
    return _direction(outcome, beyond, corrected)


def _of_model(check: Check) -> CheckOutcome:
    """Whether a number of a real model, or its interval, lies above (below) the bar."""
    (model,) = check.runs
    low, high = real_models()[model, check.quantity]
    words = f"{low:.3g}"
    if low != high:
        words += f" to {high:.3g}"
    state = _state(check.kind, low > check.bar, high <= check.bar)
    return CheckOutcome(check, state, bar=check.bar, words=words)


def _trained(check: Check, ours: Readings) -> CheckOutcome:
    """Whether training failed in every seed, or in none."""
    (name,) = check.runs
    failed = [run is None for run in ours.seeds(name).values()]
    if len(failed) < ours.least:
        return CheckOutcome(check)
    return CheckOutcome(check, _state(check.kind, not any(failed), all(failed)))


def _direction(outcome: CheckOutcome, beyond: Estimate, corrected: PValues) -> CheckOutcome:
    """Present, absent or more: on which side of the bar the estimate is; beyond: it less the bar.

    To hold, a check needs a corrected p. To fail, the plain interval is enough.
    """
    kind = outcome.check.kind
    # "More" is tested against no difference at all; it fails where none is left that counts.
    test = outcome.estimate if kind == "more" else beyond
    p = corrected.get(test, test.p)
    shown = p <= LEVEL
    if kind == "absent":
        above = beyond.low > 0
        below = shown and test.mean < 0
    else:
        above = shown and test.mean > 0
        below = beyond.high <= 0
    return replace(outcome, state=_state(kind, above, below), p=p, tests=(test,))


def _never(names: Sequence[str], ours: Readings) -> str:
    """How many seeds of each experiment never had an onset."""
    counts = []
    for name in names:
        without = len(ours.seeds(name)) - len(ours.values(name, "onset"))
        counts.append(f"{without} of {name}")
    return f"seeds without an onset: {', '.join(counts)}"


def _bar(check: Check, base: str) -> Bar:
    """What the check's level or difference is held against."""
    if check.runs == (base,) and check.quantity in EXCESSES:
        return Bar(BASE)
    if check.quantity in EXCESSES:
        return Bar(SHARES[check.kind], (base, "excess"))
    if len(check.runs) == 1:
        bars = as_judged(BARS)
        return Bar(bars[check.quantity])
    if check.kind == "more":
        return ZERO
    share = SHARES[check.kind]
    if check.quantity in RATIOS:
        return Bar(math.log(1 + share))
    _, other = check.runs
    return Bar(share, (other, check.quantity))


def _no_effect(outcome: CheckOutcome, ours: Readings, bar: Bar) -> CheckOutcome:
    """No effect beyond the margin: a one-sided test per side (TOST). Surely beyond, it fails."""
    check = outcome.check
    within = True
    outside = False
    passes = outcome.bar
    for side in SIDES[check.kind]:
        margin = replace(bar, size=side * bar.size)
        beyond = ours.estimate(check.runs, check.quantity, margin)
        room = -side * beyond.mean  # how far the estimate is from the margin
        reach = beyond.reach(1 - LEVEL)  # of a one-sided 95 % interval
        within = within and room > reach
        outside = outside or room <= -reach
        passes = min(passes, outcome.bar - reach)
    state = _state(check.kind, within, outside)
    return replace(outcome, state=state, passes=max(0.0, passes))


def _lacking(check: Check, ours: Readings) -> str:
    """The state of a check for which too few seeds hold what it asks; "" where enough do.

    Not run, but open where the reason is that training failed, which shows neither a sink nor its
    absence, or that the onset never came.
    """
    needed = [(name, check.quantity) for name in check.runs]
    if check.quantity in EXCESSES:
        needed.append(("base", "excess"))  # the measure of all others
    state = ""
    for name, quantity in needed:
        runs = ours.seeds(name)
        if len(runs) < ours.least:
            return MISSING
        # There are runs enough, but not enough of them hold the quantity.
        if len(ours.values(name, quantity)) < ours.least:
            if quantity != "onset" and None not in runs.values():
                return MISSING
            state = OPEN
    # Two runs are compared seed by seed.
    paired = ours.paired(check.runs, check.quantity)
    if not state and len(paired) < ours.least:
        return OPEN if check.quantity == "onset" else MISSING
    return state


def _dead(check: Check, ours: Readings) -> str:
    """Which seeds have a wholly dead block among those that the quantity reads.

    It shows neither a sink nor its absence.
    """
    words = []
    for name in check.runs:
        dead = set()
        for live in READS.get(check.quantity, ()):
            for seed, share in ours.values(name, live).items():
                if share == 0:  # of the heads that are live
                    dead.add(seed)
        if dead:
            seeds = ", ".join(map(str, sorted(dead)))
            words.append(f"dead block in {name}, seed {seeds}")
    return "; ".join(words)


def _together(check: Check, ours: Readings, corrected: PValues) -> CheckOutcome:
    """Both a sink and a large element after block 1, or neither; with one of the two it fails."""
    of_sink = replace(check, kind="present")
    of_element = replace(of_sink, quantity="element_1")
    sink = judge(of_sink, ours, corrected)
    element = judge(of_element, ours, corrected)
    if element.state == MISSING:
        return CheckOutcome(check)
    state = OPEN
    if OPEN not in (sink.state, element.state):
        alike = sink.state == element.state
        state = _state(check.kind, alike, not alike)
    words = f"sink: {sink.state}, large element: {element.state}"
    return CheckOutcome(check, state, words=words, tests=sink.tests + element.tests)
