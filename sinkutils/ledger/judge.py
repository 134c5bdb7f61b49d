"""The rules by which a check holds or fails, and the verdict on a claim that follows.

The paper prints Sink_1 at its own scale. Differences in percentage points do not carry over to our
small models, but ratios do: the ratio of Sink_1 between two rows is about the ratio of their mean
excess. So most bars are shares of the base's excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sinkutils.ledger.claims_file import REAL, Check, Claim
from sinkutils.ledger.quantities import BARS, EXCESSES, RATIOS, READS, as_judged
from sinkutils.ledger.readings import ZERO, Bar, Readings, label, real_models
from sinkutils.ledger.statistics import NOTHING, Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"  # the states of a check
# The level of every test. For "present", "absent" and "more" the p-values are first corrected by
# Holm's method, over all tests in their part of the ledger.
LEVEL = 0.05
# The bar for a sink, as a share of the base's excess. The weakest row that the paper still calls a
# sink has 2.90 % (Table 9), and its default has 18.18 %.
SINK = 2.90 / 18.18
# The base itself must have a sink, or else nothing can be measured by it. Its excess must exceed
# this number: that of a model in which 18.18 % of the heads have alpha_1 = 0.3 exactly, and all
# others are uniform.
BASE = 0.044
# The margin of "no effect": half-way between the largest fall that the paper calls no effect (from
# 18.18 to 10.68, Table 12) and the smallest that it calls an effect (to 9.41, Table 14).
MARGIN = 1 - (10.68 + 9.41) / 2 / 18.18
# The margin of a comparable loss: half-way between the largest loss that the paper calls comparable
# (3.81, Table 3) and 3.90 (Table 2), relative to the default's 3.73.
LOSS = (3.81 + 3.90) / 2 / 3.73 - 1
FACTOR = 1.0  # the margin of "alike": a factor of two (Appendix D gives no number)
# The verdicts on claims that need no run.
PROVED = {"mathematics": "by mathematics", "mathematics, in part": "partly"}
# These are the opposites of present, together, above, trains and loss.
OPPOSITES = ("absent", "apart", "below", "fails", "worse")
SHARES = {"same": MARGIN, "kept": MARGIN, "alike": FACTOR, "loss": LOSS, "worse": LOSS}
SHARES |= dict.fromkeys(("present", "absent", "more"), SINK)
# The sides on which a "no effect" check has a margin: 1 is above, -1 is below.
SIDES = {"same": (-1, 1), "alike": (-1, 1), "kept": (-1,), "loss": (1,), "worse": (1,)}
PValues = Mapping[Estimate, float]  # the corrected p-value of each test
UNCORRECTED: PValues = {}  # every test keeps its own p-value

# For each gate, the presets that cannot show the claim.
GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    # These models are so small that they have no sink on an ordinary first token.
    "any token": ("smoke", "minute", "laptop"),
}


@dataclass(frozen=True)
class CheckOutcome:
    """The state of a check, and the numbers that decided it (for ratios, their logarithms)."""

    check: Check  # its runs have the names that they have at the preset
    state: str = MISSING
    estimate: Estimate = NOTHING
    bar: float = math.nan  # the threshold or the margin with which the estimate is compared
    p: float = math.nan  # in a directional check, the p-value after Holm's correction
    # in a "no effect" check, the largest effect that would still pass
    passes: float = math.nan
    words: str = ""  # a reason that no number shows
    # estimates that are tested against zero, and whose p-values Holm's method corrects
    tests: tuple[Estimate, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict, with the outcomes of its checks and of its premises."""

    claim: Claim
    verdict: str
    outcomes: Sequence[CheckOutcome] = ()
    premises: Sequence[CheckOutcome] = ()


def judge_claims(claims: Sequence[Claim], ours: Readings, corrected: bool = True) -> list[Judged]:
    """The verdicts on all claims.

    corrected: whether the p-values of directional checks are corrected by Holm's method, over all
    tests in the same part of the ledger.
    """
    judged = [_judge_claim(claim, ours, UNCORRECTED) for claim in claims]
    if not corrected:
        return judged
    tests: dict[str, list[Estimate]] = {}  # by part of the ledger
    for result in judged:
        part_tests = tests.setdefault(result.claim.part, [])
        for outcome in (*result.outcomes, *result.premises):
            part_tests += outcome.tests
    # The claims are judged a second time, with the corrected p-values.
    p_values = {part: holm(part_tests) for part, part_tests in tests.items()}
    return [_judge_claim(claim, ours, p_values[claim.part]) for claim in claims]


def _judge_claim(claim: Claim, ours: Readings, corrected: PValues) -> Judged:
    if claim.trivial in PROVED and not claim.checks:
        return Judged(claim, PROVED[claim.trivial])
    if ours.preset in GATED[claim.gate]:
        return Judged(claim, "not visible")
    seen = ours.fresh() if claim.fresh else ours
    outcomes = []
    for check in claim.checks:
        # A check is left out if the preset lacks one of its experiments, or has it under another
        # name because it coincides with an earlier one.
        available = [name in ("base", label(name, ours.preset)) for name in check.runs]
        if check.kind in REAL or all(available):
            outcomes.append(judge(check, seen, corrected))
    premises = [judge(check, ours, corrected) for check in claim.given]
    states = [outcome.state for outcome in outcomes]
    premise_states = [outcome.state for outcome in premises]
    verdict = verdict_of(states, premise_states)
    return Judged(claim, verdict, outcomes, premises)


def verdict_of(states: Sequence[str], premises: Sequence[str] = ()) -> str:
    """The verdict on a claim, from the states of its checks and of its premises.

    If a premise does not hold, the claim is inconclusive.
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
    """The p-value of each test, corrected for the number of different tests (Holm 1979)."""
    ranked = sorted(set(tests), key=lambda test: test.p)
    corrected = {}
    largest = 0.0  # a corrected p-value is at least as large as those before it
    for rank, test in enumerate(ranked):
        largest = max(largest, (len(ranked) - rank) * test.p)
        corrected[test] = min(1.0, largest)
    return corrected


def _state(kind: str, holds: bool, fails: bool) -> str:
    """The state of a check. For a kind in OPPOSITES, `holds` and `fails` change places."""
    if kind in OPPOSITES:
        holds, fails = fails, holds
    if holds:
        return HOLDS
    return FAILS if fails else OPEN


def judge(check: Check, ours: Readings, corrected: PValues = UNCORRECTED) -> CheckOutcome:
    """The outcome of a check.

    corrected: the corrected p-values; a test that is not among them keeps its own p-value.
    """
    if check.kind in REAL:
        return _of_model(check)
    # From here on, the experiments have the names that they have at this preset.
    names = [label(name, ours.preset) for name in check.runs]
    check = replace(check, runs=tuple(names))
    if check.kind in ("fails", "trains"):
        return _trained(check, ours)
    words = _never(check.runs, ours) if check.quantity == "onset" else ""
    # Three things leave a check undecided, whatever its numbers are: too few seeds, dead blocks, or
    # a base without a sink.
    if lacking := _lacking(check, ours):
        return CheckOutcome(check, lacking, words=words)
    if dead := _dead(check, ours):
        return CheckOutcome(check, OPEN, words=dead)
    base = label("base", ours.preset)
    measured_by_base = check.quantity in EXCESSES and check.runs != (base,)
    if measured_by_base and ours.base().low <= BASE:
        return CheckOutcome(check, OPEN, words="the base has no sink to measure by")
    if check.kind in ("together", "apart"):
        return _together(check, ours, corrected)
    # `estimate` is the level or difference that a reader sees. `beyond` is the same minus the bar,
    # and decides the check.
    bar = _bar(check, base)
    estimate = ours.estimate(check.runs, check.quantity)
    beyond = ours.estimate(check.runs, check.quantity, bar)
    height = estimate.mean - beyond.mean  # the bar as a number
    outcome = CheckOutcome(check, OPEN, estimate, height, words=words)
    if check.kind in SIDES:
        return _no_effect(outcome, ours, bar)
    return _direction(outcome, beyond, corrected)


def _of_model(check: Check) -> CheckOutcome:
    """Check whether a real model's number, or its interval, lies above (or below) the bar."""
    (model,) = check.runs
    low, high = real_models()[model, check.quantity]
    words = f"{low:.3g}"
    if low != high:
        words += f" to {high:.3g}"
    state = _state(check.kind, low > check.bar, high <= check.bar)
    return CheckOutcome(check, state, bar=check.bar, words=words)


def _trained(check: Check, ours: Readings) -> CheckOutcome:
    """Check whether the training failed in every seed, or in none."""
    (name,) = check.runs
    failed = [run is None for run in ours.seeds(name).values()]
    if len(failed) < ours.least:
        return CheckOutcome(check)
    return CheckOutcome(check, _state(check.kind, not any(failed), all(failed)))


def _direction(outcome: CheckOutcome, beyond: Estimate, corrected: PValues) -> CheckOutcome:
    """Decide a directional check: present, absent or more.

    beyond: the estimate minus the bar. A check holds if the corrected p-value is small enough. It
    fails if the 95 % interval, without correction, lies on the other side.
    """
    kind = outcome.check.kind
    # "more" holds if the difference is surely above zero, and fails if it is surely below the bar.
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
    """A sentence that says how many seeds of each experiment never had an onset."""
    counts = []
    for name in names:
        without = len(ours.seeds(name)) - len(ours.values(name, "onset"))
        counts.append(f"{without} of {name}")
    return f"seeds without an onset: {', '.join(counts)}"


def _bar(check: Check, base: str) -> Bar:
    """The bar with which the level or difference of a check is compared."""
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
    """Decide a check for "no effect beyond a margin", by one test per side (TOST).

    The check fails if the effect is surely beyond the margin on one side.
    """
    check = outcome.check
    within = True
    outside = False
    passes = outcome.bar
    for side in SIDES[check.kind]:
        margin = replace(bar, size=side * bar.size)
        beyond = ours.estimate(check.runs, check.quantity, margin)
        room = -side * beyond.mean  # the distance from the estimate to the margin
        reach = beyond.reach(1 - LEVEL)  # the length of a one-sided 95 % interval
        within = within and room > reach
        outside = outside or room <= -reach
        passes = min(passes, outcome.bar - reach)
    state = _state(check.kind, within, outside)
    return replace(outcome, state=state, passes=max(0.0, passes))


def _lacking(check: Check, ours: Readings) -> str:
    """The state of a check if too few seeds have its quantity, and "" if enough have it.

    The state is "not run". But it is "open" if the quantity is missing because the training failed,
    which shows neither a sink nor its absence, or because the onset never came.
    """
    needed = [(name, check.quantity) for name in check.runs]
    if check.quantity in EXCESSES:
        needed.append(("base", "excess"))  # every excess is measured by that of the base
    state = ""
    for name, quantity in needed:
        runs = ours.seeds(name)
        if len(runs) < ours.least:
            return MISSING
        # There are enough runs, but too few of them have the quantity.
        if len(ours.values(name, quantity)) < ours.least:
            if quantity != "onset" and None not in runs.values():
                return MISSING
            state = OPEN
    # Two experiments are compared over the seeds that both have, which may be too few.
    paired = ours.paired(check.runs, check.quantity)
    if not state and len(paired) < ours.least:
        return OPEN if check.quantity == "onset" else MISSING
    return state


def _dead(check: Check, ours: Readings) -> str:
    """A sentence that names the seeds with a dead block, or "" if there are none.

    Only those blocks count whose attention the quantity reads. A dead block shows neither a sink
    nor its absence.
    """
    words = []
    for name in check.runs:
        dead = set()
        for live in READS.get(check.quantity, ()):
            for seed, share in ours.values(name, live).items():
                if share == 0:  # no head of the block is live
                    dead.add(seed)
        if dead:
            seeds = ", ".join(map(str, sorted(dead)))
            words.append(f"dead block in {name}, seed {seeds}")
    return "; ".join(words)


def _together(check: Check, ours: Readings, corrected: PValues) -> CheckOutcome:
    """Check that there are both a sink and a large element after block 1, or neither of them."""
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
