"""The ledger's rules, fixed before the first record that it judges: what a check asks, when it holds, when it fails.

The primary outcome is mean excess alpha_1, (alpha_1 - u) / (1 - u) with u that of uniform attention, over texts, layers
and heads; Sink_1 at three eps stands beside it. Every check on records has four outcomes: it holds, it fails, it is
inconclusive, or it was not run. None is judged on fewer than three seeds, at `desk`, where a run takes a night, two
(`Results.least`). What is read once, off an open model or a proof, holds or fails, but where an interval over texts or
a test of ranks stands beside it.

What is corrected. "More" asks for any difference at all, and the ledger asks it of some hundred pairs, so that a few
would come out by chance: its p-values are after Holm. The other checks ask whether an effect is as large as a
threshold, and a claim holds only where each of its own does, which makes a false "reproduced" rarer with every check,
not more frequent; they stand at 5 % each, uncorrected.

Where the constants come from. The paper prints Sink_1 at its own scale (18.18 % by default); ours has another base, so
that points do not carry over, but shares do: with a share f of heads above eps, all of one kind, mean excess is f times
theirs, and a ratio of Sink_1 between two rows is the ratio of mean excess.

- SINK: the weakest row that the paper still calls a sink, and that has no other, has 2.90 % ("less obvious", Table 9,
  1e-4; x_1's 1.98 % in Section 5 stands beside a sink on x_2), the strongest that it calls none at 60M 0.81 % (Table 14
  right). A run has a sink where its excess is above 2.90 / 18.18 of the base's.
- BASE: the base itself must have a sink without such a measure: 18.18 % of heads exactly on eps = 0.3 would have an
  excess of 0.18 * (0.3 - 0.074) / (1 - 0.074) = 0.044, the least that the paper's own default can have where all other
  heads attend evenly.
- MARGIN: among the rows that the paper calls unaffected (Tables 3, 10 left, 11, 12 left, V biases, post-norm) the
  largest fall is 18.18 to 10.68 (H = 4); the nearest below that it calls mitigated has 9.41 (alpha = 0.2, Table 14
  left). "No effect" is an effect of less than half-way between, 45 % of the base's excess, by two one-sided tests.
  Upwards the paper's own rows go to 33.13 and still count as "does not affect the emergence" (Table 3), so there only a
  fall counts: `kept`. (It also calls 11.21 "less obvious", Table 9: no margin fits all of its words.)
- LOSS: the largest loss that the paper calls comparable is 3.81 (NoPE, Table 3), the least of those that more weight
  decay hurts, as we read it, 3.90 (weight decay 1, Table 2); half-way between is 3.4 % above 3.73.
- The levels of norm ratios (`results.QUANTITIES`): the figures draw 1 where activations are not massive and print no
  number. Twice the ratio of the same model before its first step counts as massive, in blocks before the last: an
  untrained model has 3 already, because x_1 sees only itself. Where it is below 1 untrained (sigmoid's is), twice the
  others' norm counts. The same factor counts for the largest element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sinkutils.ledger.effects import Effect, level, paired
from sinkutils.ledger.results import QUANTITIES, Results

REPRODUCED, PARTLY, NOT_REPRODUCED = "reproduced", "partly", "not reproduced"
INCONCLUSIVE, NOT_VISIBLE, NOT_RUN = "inconclusive", "not visible", "not run"
UNHELD = (PARTLY, NOT_REPRODUCED, INCONCLUSIVE)  # which want a reason
VERDICTS = (REPRODUCED, PARTLY, NOT_REPRODUCED, INCONCLUSIVE, NOT_VISIBLE, NOT_RUN)
HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "inconclusive", "not run"

ALPHA = 0.05  # of every test; of "more" after Holm over the ledger
SINK = 2.90 / 18.18
BASE = 0.044
MARGIN = 1 - (10.68 + 9.41) / 2 / 18.18
LOSS = (3.81 + 3.90) / 2 / 3.73 - 1
TOO_FEW = "the two share fewer than {} seeds"
ALIKE = 2.0  # "behave similarly" (Appendix D, without a number): within a factor of two

# What a preset cannot show, whatever its records say.
NO_FREE_SINK = "models of ours of this size have a sink only where every text begins with the same token"
GATES: dict[str, tuple[tuple[str, ...], str]] = {
    "": ((), ""),
    "trained": (("smoke",), "a run of seconds has learned nothing yet"),
    "any token": (("smoke", "laptop"), NO_FREE_SINK),
}


@dataclass(frozen=True)
class Check:
    """One condition of a claim: its kind (of KINDS), the runs it reads, the quantity."""

    kind: str
    runs: tuple[str, ...]
    key: str = "excess_1"

    @property
    def by_base(self) -> bool:
        """Whether the base's excess is the measure."""
        return self.kind not in TRAINED and QUANTITIES[self.key].level == "sink"

    @property
    def reads(self) -> tuple[str, ...]:
        """Every run whose records decide it."""
        return tuple(dict.fromkeys((*self.runs, *["base"] * self.by_base)))


@dataclass(frozen=True)
class Outcome:
    """What a check came to. `p`: of a directional check, corrected over the ledger before it counts."""

    says: str
    state: str
    effect: Effect | None = None
    p: float | None = None
    why: str = ""
    facts: str = ""  # the figures, where no record gives them
    premise: bool = False  # of the claim, which it does not show


def told(says: str, holds: bool, facts: str = "", why: str = "as measured") -> Outcome:
    """The outcome of what no record decides; why: where it fails."""
    return Outcome(says, HOLDS if holds else FAILS, facts=facts, why="" if holds else why)


def judge(check: Check, ours: Results, corrected: Mapping[Check, float]) -> Outcome:
    """The outcome of a check on a preset's results; corrected: p-values of directional checks after Holm."""
    words, judged = KINDS[check.kind]
    if not check.by_base and check.kind in ("present", "absent"):  # above its own level, not "there"
        words = f"{{0}}: {{q}} {'' if check.kind == 'present' else 'not '}above {QUANTITIES[check.key].level:g}"
    says = words.format(*map(ours.label, check.runs), q=QUANTITIES[check.key].heading)
    lacking = [text for name in check.reads if (text := _lacking(check, name, ours))]
    if lacking:
        return Outcome(says, MISSING, why="; ".join(lacking))
    failed = [text for name in check.reads if (text := _failed(ours, name))]
    if failed and check.kind not in TRAINED:  # without training neither a sink nor its absence is shown
        return Outcome(says, OPEN, why="; ".join(failed))
    if check.by_base and not _is_base(check, ours) and not _base_has_sink(ours):
        return Outcome(says, OPEN, why=f"{ours.label('base')} has no sink to measure by")
    return replace(judged(check, ours, corrected), says=says)


def _lacking(check: Check, name: str, ours: Results) -> str:
    """What of a run a check cannot do without, or nothing."""
    seeds = ours.seeds(name)
    if check.kind in TRAINED or _failed(ours, name):
        return "" if len(seeds) >= ours.least else f"{ours.label(name)}: {len(seeds)} of {ours.least} seeds"
    key = check.key if name in check.runs else "excess_1"
    known = len(ours.values(name, key))
    if known >= ours.least:
        return ""
    what = f"{ours.label(name)}: {known} of {ours.least} seeds"
    return f"{what} hold {QUANTITIES[key].heading}" if known < len(seeds) else what


def _failed(ours: Results, name: str) -> str:
    """Of a run that failed in so many seeds that too few are left to judge it by: how many; else nothing."""
    runs = ours.seeds(name).values()
    failed = sum(run.failed for run in runs)
    if not failed or len(runs) - failed >= ours.least:
        return ""
    which = "" if failed == len(runs) else f" in {failed} of {len(runs)} seeds"
    return f"{ours.label(name)} failed to train{which}"


def _is_base(check: Check, ours: Results) -> bool:
    """Whether a check is on the base alone, by whichever name."""
    return {ours.label(name) for name in check.runs} == {ours.label("base")}


def _paired(check: Check, ours: Results) -> Effect | None:
    """The first run's quantity less the second's, over enough seeds that both have; None where there are fewer."""
    estimate = paired(ours, check.runs[0], check.runs[1], check.key)
    return None if estimate is None or estimate.seeds < ours.least else estimate


def _base_has_sink(ours: Results) -> bool:
    return level(ours.values("base", "excess_1")).low > BASE


def _margin(check: Check, ours: Results, share: float) -> float:
    """A share of the base's excess or of the second run's loss; of a ratio, on the log scale."""
    if QUANTITIES[check.key].log:
        return math.log(1 + share)
    return share * float(ours.values(*(("base", "excess_1") if check.by_base else (check.runs[1], check.key))).mean())


def _present(check: Check, ours: Results, corrected: Mapping[Check, float]) -> Outcome:
    """The 95 % interval of the run's level lies above the threshold; wholly at or below, it fails."""
    quantity = QUANTITIES[check.key]
    if not check.by_base:
        threshold = float(quantity.level)
    else:
        threshold = BASE if _is_base(check, ours) else _margin(check, ours, SINK)
    estimate = level(ours.values(check.runs[0], check.key), quantity.log)
    state = HOLDS if estimate.low > threshold else FAILS if estimate.high <= threshold else OPEN
    return Outcome("", state, estimate, why=f"threshold {threshold:.{quantity.digits}f}")


def _more(check: Check, ours: Results, corrected: Mapping[Check, float]) -> Outcome:
    """The first run has more than the second: significant after Holm. It fails where the interval leaves no room for
    a difference that counts: of an excess as much as a sink, else any at all.
    """
    estimate = _paired(check, ours)
    if estimate is None:
        return Outcome("", MISSING, why=TOO_FEW.format(ours.least))
    p = min(1.0, 2 * min(estimate.p_above(), estimate.p_below()))
    room = _margin(check, ours, SINK) if check.by_base else 0.0
    adjusted = corrected.get(check, p)
    state = HOLDS if estimate.mean > 0 and adjusted <= ALPHA else FAILS if estimate.high <= room else OPEN
    # No more digits than a normal distribution of a few seeds' differences can bear.
    said = f"p = {adjusted:.2g}" if adjusted >= 0.001 else "p < 0.001"
    return Outcome("", state, estimate, p, why=f"{'the other way round, ' * (estimate.mean < 0)}{said} after Holm")


def _within(
    low: bool, high: bool, share: float, check: Check, ours: Results, corrected: Mapping[Check, float]
) -> Outcome:
    """No effect below minus the margin, none above it, or neither (TOST); beyond it at the same level, it fails."""
    estimate = _paired(check, ours)
    if estimate is None:
        return Outcome("", MISSING, why=TOO_FEW.format(ours.least))
    margin = _margin(check, ours, share)
    inside = [estimate.p_above(-margin)] * low + [estimate.p_below(margin)] * high
    beyond = [estimate.p_below(-margin)] * low + [estimate.p_above(margin)] * high
    state = HOLDS if max(inside) <= ALPHA else FAILS if min(beyond) <= ALPHA else OPEN
    return Outcome("", state, estimate, why=f"margin {margin:.3f}")


def _not(judged: Judge) -> Judge:
    """The mirror image of a judgement."""
    return lambda check, ours, corrected: mirrored(judged(check, ours, corrected))


def mirrored(outcome: Outcome) -> Outcome:
    """It fails where the other holds, and the other way round."""
    return replace(outcome, state={HOLDS: FAILS, FAILS: HOLDS}.get(outcome.state, outcome.state))


def _together(check: Check, ours: Results, corrected: Mapping[Check, float]) -> Outcome:
    """The run has both a sink and massive activations, or neither; one without the other, it fails."""
    known = len(ours.values(check.runs[0], "peak"))
    if known < ours.least:
        return Outcome("", MISSING, why=f"{known} of {ours.least} seeds hold {QUANTITIES['peak'].heading}")
    sink, peak = (_present(replace(check, key=key), ours, corrected) for key in (check.key, "peak"))
    state = OPEN if OPEN in (sink.state, peak.state) else HOLDS if sink.state == peak.state else FAILS
    there = {HOLDS: "there", FAILS: "not there", OPEN: "undecided"}
    return Outcome("", state, peak.effect, why=f"sink {there[sink.state]}, massive activations {there[peak.state]}")


def _trained(check: Check, ours: Results, corrected: Mapping[Check, float]) -> Outcome:
    runs = ours.seeds(check.runs[0]).values()
    failed = sum(run.failed for run in runs)
    wanted = failed if check.kind == "fails" else len(runs) - failed
    state = HOLDS if wanted == len(runs) else FAILS if not wanted else OPEN
    return Outcome("", state, why=f"{failed} of {len(runs)} seeds failed")


Judge = Callable[[Check, Results, Mapping[Check, float]], Outcome]
TRAINED = ("fails", "trains")  # asked of every run, also of those that failed
# What each kind of check says ({0}, {1}: its runs, {q}: its quantity), and how it is judged.
KINDS: dict[str, tuple[str, Judge]] = {
    "present": ("{0}: {q} is there", _present),
    "absent": ("{0}: {q} is not there", _not(_present)),
    "more": ("{q}: {0} above {1}", _more),
    "same": ("{q}: no effect of {0} beside {1}", partial(_within, True, True, MARGIN)),
    "kept": ("{q}: {0} keeps that of {1}", partial(_within, True, False, MARGIN)),
    "alike": ("{q}: {0} within a factor of two of {1}", partial(_within, True, True, ALIKE - 1)),
    "comparable": ("{q}: {0} no worse than {1}", partial(_within, False, True, LOSS)),
    "together": ("{0}: sink and massive activations go together", _together),
    "apart": ("{0}: sink and massive activations come apart", _not(_together)),
    "worse": ("{q}: {0} worse than {1}", _not(partial(_within, False, True, LOSS))),
    "fails": ("{0} fails to train", _trained),
    "trains": ("{0} trains", _trained),
}


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Of a claim's checks: all hold; some hold and some fail; none holds and some fail; none fails, some are open.
    While one is not run the claim is not; without its premises it is inconclusive.
    """
    states = {outcome.state for outcome in outcomes if not outcome.premise}
    if not states or any(outcome.state == MISSING for outcome in outcomes):
        return NOT_RUN
    if any(outcome.premise and outcome.state != HOLDS for outcome in outcomes):
        return INCONCLUSIVE
    if states == {HOLDS}:
        return REPRODUCED
    if FAILS not in states:
        return INCONCLUSIVE
    return PARTLY if HOLDS in states else NOT_REPRODUCED
