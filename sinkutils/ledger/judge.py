"""The rules by which a check holds or fails, and the verdict on a claim that follows.

The paper prints Sink_1 at its own scale. Differences in percentage points do not carry over to our
small models, but ratios do: the ratio of Sink_1 between two rows is about the ratio of their mean
excess. So most bars are shares of the base's excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.special import ndtr, stdtrit

from sinkutils.checks import choice
from sinkutils.ledger.claims_file import GATED, REAL, Check, Claim
from sinkutils.ledger.quantities import QUANTITIES, as_judged
from sinkutils.ledger.readings import ZERO, Bar, Readings, label, real_models
from sinkutils.ledger.statistics import NOTHING, Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"  # the states of a check
# The level of every test, whichever way it decides. The p-values are first corrected by Holm's
# method, over the checks of one claim ("claim"), of the whole part of the ledger ("ledger"), or not
# at all ("none"). The first is our rule: see docs/verdicts_that_moved.md.
LEVEL = 0.05
CORRECTIONS = ("claim", "ledger", "none")
POWER = 0.8  # with which the number of seeds that would decide an open check is reckoned
MANY = 12  # with more seeds than these an estimate is near its bar, rather than too uncertain
EXACT = 10  # the most runs of each for which a permutation test counts every division
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
Tested = tuple[float, Estimate]  # a p-value, and the number that it tests against zero

UNSEEN = {"large": "not tested"}  # the verdict where a gate is closed; "not visible" for the others


@dataclass(frozen=True)
class CheckOutcome:
    """The state of a check, and the numbers that decided it (for ratios, their logarithms)."""

    check: Check  # its runs have the names that they have at the preset
    state: str = MISSING
    estimate: Estimate = NOTHING
    bar: float = math.nan  # the threshold or the margin with which the estimate is compared
    leans: str = ""  # HOLDS or FAILS, whichever the numbers speak for
    p: float = math.nan  # the p-value of what it leans to; `corrected` corrects it
    test: Estimate = NOTHING  # the number that the p-value tests against zero
    # in a "no effect" check, the largest effect that would still pass
    passes: float = math.nan
    words: str = ""  # a reason that no number shows
    parts: tuple[CheckOutcome, ...] = ()  # of "together" and "apart": the sink and the element


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict, with the outcomes of its checks and of its premises."""

    claim: Claim
    verdict: str
    outcomes: Sequence[CheckOutcome] = ()
    premises: Sequence[CheckOutcome] = ()


def judge_claims(
    claims: Sequence[Claim], ours: Readings, correction: str = "claim"
) -> list[Judged]:
    """The verdicts on all claims.

    correction: the tests over which Holm's method corrects each p-value: those of the "claim"
    itself, those of all claims in its part of the "ledger", or "none".
    """
    choice("correction", correction, CORRECTIONS)
    # Two claims share a family of tests if they have the same key.
    found = []
    families: dict[str, list[CheckOutcome]] = {}
    for claim in claims:
        outcomes, premises = _outcomes(claim, ours)
        family = claim.part if correction == "ledger" else claim.id
        families.setdefault(family, []).extend([*outcomes, *premises])
        found.append((claim, family, outcomes, premises))
    judged = []
    for claim, family, outcomes, premises in found:
        p_values = holm(families[family]) if correction != "none" else {}
        outcomes = [corrected(outcome, p_values) for outcome in outcomes]
        premises = [corrected(outcome, p_values) for outcome in premises]
        judged.append(Judged(claim, _verdict(claim, ours, outcomes, premises), outcomes, premises))
    return judged


def _outcomes(claim: Claim, ours: Readings) -> tuple[list[CheckOutcome], list[CheckOutcome]]:
    """The outcomes of a claim's checks and of its premises, by their own p-values."""
    if ours.preset.partition("@")[0] in GATED[claim.gate]:
        return [], []
    outcomes = []
    for check in claim.checks:
        # A check is left out if the preset lacks one of its experiments, or has it under another
        # name because it coincides with an earlier one.
        available = [name in ("base", label(name, ours.preset)) for name in check.runs]
        if check.kind in REAL or all(available):
            outcomes.append(judge(check, ours))
    return outcomes, [judge(check, ours) for check in claim.given]


def _verdict(
    claim: Claim,
    ours: Readings,
    outcomes: Sequence[CheckOutcome],
    premises: Sequence[CheckOutcome],
) -> str:
    if claim.trivial in PROVED and not claim.checks:
        return PROVED[claim.trivial]
    if ours.preset.partition("@")[0] in GATED[claim.gate]:
        return UNSEEN.get(claim.gate, "not visible")
    states = [outcome.state for outcome in outcomes]
    return verdict_of(states, [outcome.state for outcome in premises])


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


def holm(outcomes: Iterable[CheckOutcome]) -> dict[Estimate, float]:
    """The p-value of each test of some checks, corrected for their number (Holm 1979).

    A test that several checks share counts once.
    """
    tests: dict[Estimate, float] = {}
    for outcome in outcomes:
        for part in outcome.parts or (outcome,):
            if part.leans:
                tests[part.test] = part.p
    ranked = sorted(tests, key=lambda test: tests[test])
    p_values = {}
    largest = 0.0  # a corrected p-value is at least as large as those before it
    for rank, test in enumerate(ranked):
        largest = max(largest, (len(ranked) - rank) * tests[test])
        p_values[test] = min(1.0, largest)
    return p_values


def corrected(outcome: CheckOutcome, p_values: Mapping[Estimate, float]) -> CheckOutcome:
    """An outcome with corrected p-values. It holds or fails only if these are small enough."""
    if outcome.parts:
        sink, element = (corrected(part, p_values) for part in outcome.parts)
        return _together(outcome.check, sink, element)
    if not outcome.leans:
        return outcome
    p = p_values.get(outcome.test, outcome.p)
    return replace(outcome, state=outcome.leans if p <= LEVEL else OPEN, p=p)


def seeds_needed(outcome: CheckOutcome) -> float:
    """The number of seeds with which an open check would be decided in four cases of five.

    It is reckoned from the numbers at hand: with n times the seeds, the error is smaller by the
    root of n, and the degrees of freedom are n times as many. It is infinite if more than a
    thousand would not do, or if no number leads to it.
    """
    test = outcome.test
    if not test.seeds:
        return math.inf
    seeds = np.arange(test.seeds + 1, 1000)
    more = seeds / test.seeds
    freedom = test.freedom * more
    reach = stdtrit(freedom, 1 - LEVEL / 2) + stdtrit(freedom, POWER)
    enough = seeds[abs(test.mean) >= reach * test.error / np.sqrt(more)]
    return int(enough[0]) if len(enough) else math.inf


def why_open(outcome: CheckOutcome) -> str:
    """Why a check is open, in a few words, or ""."""
    if outcome.state != OPEN:
        return ""
    if outcome.words:
        return outcome.words
    if outcome.parts:
        reasons = [why_open(part) for part in outcome.parts]
        return "; ".join(dict.fromkeys(filter(None, reasons)))
    if outcome.test.p <= LEVEL < outcome.p:
        return "correction"
    needed = seeds_needed(outcome)
    if needed <= MANY:
        return f"too few seeds: {needed:.0f} would do"
    return "near the bar"


def _state(kind: str, holds: bool, fails: bool) -> str:
    """The state of a check. For a kind in OPPOSITES, `holds` and `fails` change places."""
    if kind in OPPOSITES:
        holds, fails = fails, holds
    if holds:
        return HOLDS
    return FAILS if fails else OPEN


def judge(check: Check, ours: Readings) -> CheckOutcome:
    """The outcome of a check by itself, with its own p-value."""
    if check.kind in REAL:
        return _of_model(check)
    ours = ours.since(check.fresh)
    # From here on, the experiments have the names that they have at this preset.
    names = [label(name, ours.preset) for name in check.runs]
    check = replace(check, runs=tuple(names))
    if check.kind in ("fails", "trains"):
        return _trained(check, ours)
    # Three things leave a check undecided, whatever its numbers are: too few seeds, dead blocks, or
    # a base without a sink.
    if lacking := _lacking(check, ours):
        return CheckOutcome(check, lacking)
    if dead := _dead(check, ours):
        return CheckOutcome(check, OPEN, words=dead)
    base = label("base", ours.preset)
    measured_by_base = QUANTITIES[check.quantity].excess and check.runs != (base,)
    # Every excess is measured by that of the base, over all its seeds.
    if measured_by_base and (ours.whole or ours).estimate(("base",), "excess").low <= BASE:
        return CheckOutcome(check, OPEN, words="the base has no sink to measure by")
    if check.quantity == "onset":
        return _later(check, ours)
    if check.kind in ("together", "apart"):
        sink = replace(check, kind="present")
        element = replace(sink, quantity="element_1")
        return _together(check, judge(sink, ours), judge(element, ours))
    # `estimate` is the level or difference that a reader sees. `beyond` is the same minus the bar,
    # and decides the check.
    bar = _bar(check, base)
    estimate = ours.estimate(check.runs, check.quantity)
    beyond = ours.estimate(check.runs, check.quantity, bar)
    height = estimate.mean - beyond.mean  # the bar as a number
    outcome = CheckOutcome(check, OPEN, estimate, height)
    if check.kind in SIDES:
        return _no_effect(outcome, ours, bar)
    return _direction(outcome, beyond)


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


def _decided(outcome: CheckOutcome, above: Tested, below: Tested) -> CheckOutcome:
    """An outcome with the side that its numbers speak for.

    above, below: the p-value of each side, and the number that it tests. For a kind in OPPOSITES
    the check holds if its number is below.
    """
    holds, fails = (below, above) if outcome.check.kind in OPPOSITES else (above, below)
    # A check holds if that is shown, and else it leans to what is more likely.
    leans = HOLDS if holds[0] <= LEVEL or holds[0] <= fails[0] else FAILS
    p, test = holds if leans == HOLDS else fails
    return replace(outcome, state=leans if p <= LEVEL else OPEN, leans=leans, p=p, test=test)


def _direction(outcome: CheckOutcome, beyond: Estimate) -> CheckOutcome:
    """Decide a directional check: present, absent or more, by a two-sided test.

    beyond: the estimate minus the bar. "more" holds if the difference is surely above zero, and
    fails if it is surely below the bar.
    """
    high = outcome.estimate if outcome.check.kind == "more" else beyond
    above = high.p if high.mean > 0 else 1.0
    below = beyond.p if beyond.mean < 0 else 1.0
    return _decided(outcome, (above, high), (below, beyond))


def _later(check: Check, ours: Readings) -> CheckOutcome:
    """Whether the onsets of the first experiment are later than those of the second, by ranks.

    A run that never has its onset counts as later than all that do. The p-value is that of the
    permutation test of the rank sum (Wilcoxon), two-sided: exact for up to EXACT runs of each,
    and by the normal distribution for more.
    """
    onsets = []
    words = []
    for name in check.runs:
        times = []
        for run in ours.seeds(name).values():
            if run is not None:
                times.append(run.get("onset", math.inf))
        onsets.append(times)
        words.append(f"{times.count(math.inf)} of {name}")
    first, _ = onsets
    ranks = pd.Series(np.concatenate(onsets)).rank().to_numpy()  # scipy.stats takes long to import
    n, m = len(first), len(ranks) - len(first)
    total = ranks[:n].sum()
    mean = n * ranks.mean()
    if max(n, m) <= EXACT:
        # The shares of all divisions of these ranks in which the first has as late, or early, a sum.
        sums = np.array([sum(chosen) for chosen in combinations(ranks, n)])
        shares = np.mean(sums >= total), np.mean(sums <= total)
    else:
        deviation = math.sqrt(n * m * ranks.var(ddof=1) / len(ranks))
        shares = ndtr((mean - total) / deviation), ndtr((total - mean) / deviation)
    late, early = (min(1.0, 2 * float(share)) for share in shares)
    # The test as an estimate: the distance of the rank sum from its mean. It has no t interval.
    test = Estimate(float(total - mean), math.nan, math.nan, n)
    reached = CheckOutcome(
        check, OPEN, bar=0.0, words=f"seeds without an onset: {', '.join(words)}"
    )
    return _decided(reached, (late, test), (early, test))


def _bar(check: Check, base: str) -> Bar:
    """The bar with which the level or difference of a check is compared."""
    quantity = QUANTITIES[check.quantity]
    if quantity.excess:
        return Bar(BASE) if check.runs == (base,) else Bar(SHARES[check.kind], (base, "excess"))
    if len(check.runs) == 1:
        assert quantity.bar is not None
        (bar,) = as_judged({check.quantity: quantity.bar}).values()
        return Bar(bar)
    if check.kind == "more":
        return ZERO
    share = SHARES[check.kind]
    if quantity.ratio:
        return Bar(math.log(1 + share))
    _, other = check.runs
    return Bar(share, (other, check.quantity))


def _no_effect(outcome: CheckOutcome, ours: Readings, bar: Bar) -> CheckOutcome:
    """Decide a check for "no effect beyond a margin", by one test per side (TOST).

    The check fails if the effect is surely beyond the margin on one side.
    """
    sides = SIDES[outcome.check.kind]
    within: Tested = (0.0, NOTHING)  # the larger p-value of the sides
    outside: Tested = (1.0, NOTHING)  # the smaller one
    passes = outcome.bar
    for side in sides:
        margin = replace(bar, size=side * bar.size)
        beyond = ours.estimate(outcome.check.runs, outcome.check.quantity, margin)
        inside = beyond.p_below if side > 0 else beyond.p_above
        within = max(within, (inside, beyond), key=lambda tested: tested[0])
        outside = min(outside, (len(sides) * (1 - inside), beyond), key=lambda tested: tested[0])
        passes = min(passes, outcome.bar - beyond.reach(1 - LEVEL))
    outcome = replace(outcome, passes=max(0.0, passes))
    # For "worse", the opposite of "loss", to be within the margin is to fail.
    return _decided(outcome, within, outside)


def _lacking(check: Check, ours: Readings) -> str:
    """The state of a check if too few seeds have its quantity, and "" if enough have it.

    The state is "not run". But it is "open" if the quantity is missing because the training failed,
    which shows neither a sink nor its absence.
    """
    needed = [(ours, name, check.quantity) for name in check.runs]
    # Every excess is measured by that of the base, over all seeds.
    if QUANTITIES[check.quantity].excess:
        needed.append((ours.whole or ours, "base", "excess"))
    state = ""
    for ours, name, quantity in needed:
        runs = ours.seeds(name)
        if len(runs) < ours.least:
            return MISSING
        if quantity == "onset":  # a run without one is later than all others (`_later`)
            continue
        # There are enough runs, but too few of them have the quantity.
        if len(ours.values(name, quantity)) < ours.least:
            if None not in runs.values():
                return MISSING
            state = OPEN
    # Two experiments are compared over the seeds that both have, which may be too few.
    paired = needed[0][0].paired(check.runs, check.quantity)
    if not state and check.quantity != "onset" and len(paired) < ours.least:
        return MISSING
    return state


def _dead(check: Check, ours: Readings) -> str:
    """A sentence that names the seeds with a dead block, or "" if there are none.

    Only those blocks count whose attention the quantity reads. A dead block shows neither a sink
    nor its absence.
    """
    words = []
    for name in check.runs:
        dead = set()
        for live in QUANTITIES[check.quantity].reads:
            for seed, share in ours.values(name, live).items():
                if share == 0:  # no head of the block is live
                    dead.add(seed)
        if dead:
            seeds = ", ".join(map(str, sorted(dead)))
            words.append(f"dead block in {name}, seed {seeds}")
    return "; ".join(words)


def _together(check: Check, sink: CheckOutcome, element: CheckOutcome) -> CheckOutcome:
    """Check that there are both a sink and a large element after block 1, or neither of them."""
    if element.state == MISSING:
        return CheckOutcome(check)
    state = OPEN
    if OPEN not in (sink.state, element.state):
        alike = sink.state == element.state
        state = _state(check.kind, alike, not alike)
    words = f"sink: {sink.state}, large element: {element.state}"
    return CheckOutcome(check, state, words=words, parts=(sink, element))
