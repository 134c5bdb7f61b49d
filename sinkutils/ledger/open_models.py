"""The paper's claims about open language models, judged on measurements that are kept, one model a check.

data/open_lms holds those of the project's real models (`measuring.open_lms`), data/measurements what a user saved by
`python -m sinkutils measure MODEL --probe natural random repeat --save`.
T = 64 without BOS where the paper says so (Section 3.3), else with what stood first in training. A sink is there where
the 95 % interval over texts is above the least that the paper calls one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sinkutils import paths
from sinkutils.ledger.results import EPSILON, ONSET
from sinkutils.ledger.rules import FAILS, HOLDS, MISSING, OPEN, Outcome
from sinkutils.measuring import saved
from sinkutils.measuring.report import norm_ratio
from sinkutils.measuring.saved import measured_domains, measured_sink, measurements, saved_scores

INSIGNIFICANT = 97.49 - 88.34  # points: the largest change that the paper calls so (Table 1 right, Mistral-7B)
MASSIVE = 2.0  # as in `results.QUANTITIES`
SMALL_PARAMETERS = 300e6
COMPARABLE_SIZE = 1.3  # times: OPT-125M and Pythia-160M, OPT-1.3B and Pythia-1.4B, .. stand beside each other
COMPARABLE_SCORE = 5.0  # points of acc_norm: a tenth of a middling model's
KINDS = ("natural", "random", "repeat")


@dataclass(frozen=True)
class Measured:
    """What is kept of one model: reports (`Report.to_dict`) by kind of input, with and without BOS."""

    name: str
    parameters: float
    family: str = ""
    in_paper: bool = False
    chat: bool = False
    usual: str = "text"  # what stood first in training: text or BOS
    probes: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # kind -> first -> report
    more: dict[str, Any] = field(default_factory=dict)  # lengths, angles, domains, hellaswag

    def report(self, kind: str = "natural", first: str | None = None) -> dict[str, Any] | None:
        return self.probes.get(kind, {}).get(first or self.usual)


def state() -> tuple[tuple[Path, int], ...]:
    """Every file of measurements, and when it was written."""
    files = [*paths.OPEN_LMS.glob("*.json"), *saved.MEASUREMENTS.glob("**/*.json")]
    return tuple((path, path.stat().st_mtime_ns) for path in sorted(files))


def measured() -> tuple[Measured, ...]:
    """Every model that was measured. Raises ValueError for a file that is no measurement."""
    return _measured(state())


@lru_cache(maxsize=1)
def _measured(files: tuple[tuple[Path, int], ...]) -> tuple[Measured, ...]:
    from sinkutils.measuring.load import find

    found, scores = [], saved_scores()
    for path in sorted(paths.OPEN_LMS.glob("*.json")):
        sections = json.loads(path.read_text(encoding="utf-8"))
        about = sections.get("about", {})
        usual = "BOS" if about.get("trained_with_bos") else "text"
        found.append(Measured(about.get("title", path.stem), about.get("parameters", float("inf")), usual=usual,
                              probes=sections.get("probes", {}), more=sections))  # fmt: skip
    by_kind = {kind: measurements(kind) for kind in KINDS}
    for name in dict.fromkeys(name for reports in by_kind.values() for name in reports):
        known = find(name)
        probes = {kind: {"text": reports[name]} for kind, reports in by_kind.items() if name in reports}
        more = {"hellaswag": scores[name]} if name in scores else {}
        one = Measured(name, float("inf"), probes=probes, more=more)
        found.append(one if known is None else replace(one, parameters=known.parameters, family=known.family,
                                                       in_paper=known.in_paper, chat=known.chat))  # fmt: skip
    return tuple(found)


def measure_command(model: str, domain: str = "") -> str:
    """How a missing measurement is made; with a domain of the Pile, that of Fig. 9."""
    inputs = f"--corpus 'pile:{domain}'" if domain else "--probe natural random repeat"
    return f"python -m sinkutils measure {model} {inputs} --save"


# --- the claims ------------------------------------------------------------------------------------------------------


def _check(says: str, holds: bool, facts: str = "") -> Outcome:
    return Outcome(says, HOLDS if holds else FAILS, facts=facts, why="" if holds else "by the measurement")


def _or_missing(outcomes: list[Outcome], model: str) -> list[Outcome]:
    return outcomes or [Outcome("", MISSING, why=f"not measured: {measure_command(model)}")]


def _sink(one: Measured, report: dict[str, Any], says: str) -> Outcome:
    """Whether a sink is there, by the interval over texts."""
    low, high = report["interval"]["1"][str(EPSILON)]
    state = HOLDS if low > ONSET else FAILS if high <= ONSET else OPEN
    value = f"Sink_1 of {one.name} {measured_sink(report):.1f} ({low:.1f} to {high:.1f} over texts)"
    return Outcome(f"{one.name}: {says}", state, facts=value, why=f"threshold {ONSET}")


def _sinks(kind: str, first: str | None, keep: Callable[[Measured], bool] = lambda one: True) -> list[Outcome]:
    """A sink on one kind of input, for each model that was measured on it."""
    reports = [(one, one.report(kind, first)) for one in measured() if keep(one)]
    return [_sink(one, report, f"a sink on {kind} input") for one, report in reports if report]


def _positions(one: Measured) -> bool:
    """Whether the model has learned absolute positions."""
    return one.family in ("GPT2", "OPT")


def universal() -> list[Outcome]:
    """Section 3: every model has a sink on natural text."""
    return _or_missing(_sinks("natural", None), "gpt2")


def small() -> list[Outcome]:
    """Fig. 4 left: so have the small ones."""
    return _or_missing(_sinks("natural", None, lambda one: one.parameters <= SMALL_PARAMETERS), "EleutherAI/pythia-14m")


def random() -> list[Outcome]:
    """Table 1 left: and on random tokens, without BOS."""
    return _or_missing(_sinks("random", "text"), "gpt2")


def repeat() -> list[Outcome]:
    """Table 1 left: none on one token repeated, without BOS and without absolute positions."""
    mirror = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    found = _sinks("repeat", "text", lambda one: not _positions(one))
    return _or_missing(
        [Outcome(o.says.replace("a sink", "no sink"), mirror[o.state], facts=o.facts, why=o.why) for o in found], "gpt2"
    )


def repeat_norms() -> list[Outcome]:
    """Section 3.3: all repeated tokens have the norm that natural text gives its first token alone."""
    outcomes = []
    for one in measured():
        natural, repeated = one.report(), one.report("repeat", "text")
        if natural and repeated and "hidden_norms" in repeated and not _positions(one):
            usual = [sum(row[1:]) / len(row[1:]) for row in natural["hidden_norms"][:-1]]
            least = [min(row) for row in repeated["hidden_norms"][:-1]]
            ratio = max(low / mean for low, mean in zip(least, usual, strict=True))
            facts = f"least norm of a repeated token of {one.name}, times the usual: {ratio:.1f}"
            says = f"{one.name}: every repeated token over {MASSIVE:g} times the usual norm"
            outcomes.append(_check(says, ratio > MASSIVE, facts))
    return _or_missing(outcomes, "gpt2")


def norms() -> list[Outcome]:
    """Figs. 2 top and 11-14: a massive ||h_1||, and where the sink is strongest a smaller ||k_1|| and ||v_1||."""
    outcomes = []
    for one in measured():
        report = one.report()
        if report and "hidden_norms" in report:
            layer = int(np.argmax([sum(heads) for heads in report["alpha"][0]]))
            for symbol, rows, massive in (("h_1", report["hidden_norms"][:-1], True),
                                          ("k_1", report["key_norms"][layer : layer + 1], False),
                                          ("v_1", report["value_norms"][layer : layer + 1], False)):  # fmt: skip
                ratio = max(norm_ratio(rows))
                says = f"over {MASSIVE:g} times" if massive else "below"
                outcomes.append(_check(f"{one.name}: ||{symbol}|| {says} the others'",
                                       ratio > MASSIVE if massive else ratio < 1,
                                       f"norm ratio of {symbol} of {one.name} {ratio:.2f}"))  # fmt: skip
    return _or_missing(outcomes, "gpt2")


def angles() -> list[Outcome]:
    """Fig. 2 bottom: in the heads with a sink cos(q, k_1) is above the others', and ||q|| ||k_1|| below."""
    outcomes = []
    for one in measured():
        report, known = one.report(), one.more.get("angles")
        if not report or not known:
            continue
        strong = [
            (layer, head) for layer, row in enumerate(report["alpha"][0]) for head, a in enumerate(row) if a > EPSILON
        ]
        for key, says, above in (("cosine", "cos(q, k_1) above cos(q, k_j)", True),
                                 ("norm_product", "||q|| ||k_1|| below ||q|| ||k_j||", False)):  # fmt: skip
            first, others = (
                sum(known[key][which][layer][head] for layer, head in strong) / max(1, len(strong))
                for which in ("first", "others")
            )
            outcomes.append(_check(f"{one.name}: {says} in its {len(strong)} heads with a sink",
                                   bool(strong) and (first > others) == above,
                                   f"{key} of {one.name}: x_1 {first:.2f}, others {others:.2f}"))  # fmt: skip
    return _or_missing(outcomes, "gpt2")


def length() -> list[Outcome]:
    """Fig. 3: Sink_1 falls with T, by rank over all lengths; more of it is lost at eps = 0.4 than at 0.2.

    From T = 32 on: at 16 uniform attention alone exceeds 0.2.
    """
    from scipy.stats import spearmanr

    outcomes = []
    for one in measured():
        by_length = {
            int(t): report for t, report in one.more.get("lengths", {}).get(one.usual, {}).items() if int(t) >= 32
        }
        if len(by_length) < 5:
            continue
        lengths = sorted(by_length)
        sinks = {eps: [by_length[t]["sink"]["1"][eps] for t in lengths] for eps in ("0.2", "0.3", "0.4")}
        rank, p = spearmanr(lengths, sinks["0.3"])
        kept = {eps: values[-1] / values[0] if values[0] else 1.0 for eps, values in sinks.items()}
        says = f"{one.name}: Sink_1 falls with T"
        facts = f"{one.name} from T = {lengths[0]} to {lengths[-1]}: {sinks['0.3'][0]:.1f} to {sinks['0.3'][-1]:.1f}"
        state = OPEN if p > 0.05 else HOLDS if rank < 0 else FAILS
        outcomes += [
            Outcome(says, state, facts=facts, why=f"rank correlation {rank:.2f}, p = {p:.2g}"),
            _check(f"{one.name}: more is lost at eps 0.4 than at 0.2", kept["0.4"] < kept["0.2"]),
        ]
    return _or_missing(outcomes, "gpt2")


def domains() -> list[Outcome]:
    """Fig. 9: no domain's Sink_1 differs from the mean over domains by more than what the paper calls insignificant."""
    by_model: dict[str, dict[str, float]] = {}
    for one in measured():
        known = one.more.get("domains", {}).get("by", {})
        by_model[one.name] = {name: measured_sink(r[one.usual]) for name, r in known.items() if one.usual in r}
    for one in measured():
        for domain, report in measured_domains(one.name).items():
            by_model[one.name][domain] = measured_sink(report)
    outcomes = []
    for model, sinks in by_model.items():
        if len(sinks) > 1:
            mean = sum(sinks.values()) / len(sinks)
            away = max(abs(value - mean) for value in sinks.values())
            facts = f"Sink_1 of {model}: " + ", ".join(f"{name} {value:.1f}" for name, value in sinks.items())
            outcomes.append(_check(f"{model}: domains within {INSIGNIFICANT:.1f} points", away <= INSIGNIFICANT, facts))
    return _or_missing(outcomes, "gpt2")


def _paired(keep: Callable[[Measured, Measured], bool]) -> Iterable[tuple[Measured, Measured]]:
    models = [one for one in measured() if one.report()]
    return ((one, other) for one in models for other in models if keep(one, other))


def _value(one: Measured) -> float:
    return measured_sink(one.report() or {})


def chat() -> list[Outcome]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""
    pairs = _paired(lambda base, chat: not base.chat and chat.chat and base.name.split()[0] == chat.name.split()[0]
                    and (base.family, base.parameters) == (chat.family, chat.parameters))  # fmt: skip
    return _or_missing([
        _check(f"{chat.name}: within {INSIGNIFICANT:.1f} points of {base.name}",
               abs(_value(base) - _value(chat)) <= INSIGNIFICANT,
               f"Sink_1: {base.name} {_value(base):.1f}, {chat.name} {_value(chat):.1f}") for base, chat in pairs
    ], "mistralai/Mistral-7B-v0.1")  # fmt: skip


def pythia() -> list[Outcome]:
    """Fig. 4 left: within Pythia each measured model has more of a sink than the next smaller one."""
    found = [one for one in measured() if one.family == "Pythia" and one.report()]
    pairs = list(pairwise(sorted(found, key=lambda one: one.parameters)))
    return _or_missing([
        _check(f"{large.name} above {small.name}", _value(large) > _value(small),
               f"Sink_1: {small.name} {_value(small):.1f}, {large.name} {_value(large):.1f}") for small, large in pairs
    ] if len(pairs) > 1 else [], "EleutherAI/pythia-14m")  # fmt: skip


def hellaswag() -> list[Outcome]:
    """Fig. 10: within a family Sink_1 and acc_norm rise with size; more of a sink alone, OPT beside Pythia, makes no
    better model.
    """

    def score(one: Measured) -> float:
        return float(one.more["hellaswag"]["acc_norm"])

    def scored(one: Measured, other: Measured) -> bool:
        return all(m.in_paper and not m.chat and "acc_norm" in m.more.get("hellaswag", {}) for m in (one, other))

    outcomes = []
    for small, large in _paired(lambda a, b: scored(a, b) and a.family == b.family and a.parameters < b.parameters):
        outcomes.append(_check(f"{large.name} above {small.name} in Sink_1 and acc_norm",
                               _value(large) > _value(small) and score(large) > score(small),
                               f"acc_norm: {score(small):.1f} and {score(large):.1f}"))  # fmt: skip
    for one, other in _paired(lambda a, b: scored(a, b) and (a.family, b.family) == ("OPT", "Pythia")):
        if 1 / COMPARABLE_SIZE <= one.parameters / other.parameters <= COMPARABLE_SIZE:
            outcomes.append(_check(f"{one.name} above {other.name} in Sink_1, acc_norm within {COMPARABLE_SCORE:g}",
                                   _value(one) > _value(other) and abs(score(one) - score(other)) <= COMPARABLE_SCORE,
                                   f"acc_norm: {score(one):.1f} and {score(other):.1f}"))  # fmt: skip
    return _or_missing(outcomes, "EleutherAI/pythia-14m")


def depths() -> list[Outcome]:
    """Figs. 19-24: the first quarter of the layers has a smaller mean alpha_1 than the others."""
    outcomes = []
    for one in measured():
        report = one.report()
        if report and len(report["alpha"][0]) > 3:
            means = [sum(heads) / len(heads) for heads in report["alpha"][0]]
            early = len(means) // 4
            low, high = sum(means[:early]) / early, sum(means[early:]) / (len(means) - early)
            outcomes.append(_check(f"{one.name}: alpha_1 of the first quarter of the layers below the others'",
                                   low < high, f"mean alpha_1 of {one.name}: {low:.2f}, then {high:.2f}"))  # fmt: skip
    return _or_missing(outcomes, "gpt2")


def jamba() -> list[Outcome]:
    """Appendix B.3: Jamba has a strong sink, in most heads."""
    found = [one for one in measured() if one.family == "Jamba" and one.report()]
    return _or_missing([_check(f"{one.name}: Sink_1 above 50", _value(one) > 50, f"Sink_1: {_value(one):.1f}")
                        for one in found], "ai21labs/Jamba-v0.1")  # fmt: skip


def jamba_third() -> list[Outcome]:
    """Fig. 27: heads without a sink are found in the third attention layer."""
    outcomes = []
    for one in measured():
        report = one.report()
        if one.family == "Jamba" and report:
            least = [min(heads) for heads in report["alpha"][0]]
            outcomes.append(_check(f"{one.name}: the head with the least alpha_1 is in the third attention layer",
                                   least.index(min(least)) == 2))  # fmt: skip
    return _or_missing(outcomes, "ai21labs/Jamba-v0.1")


JUDGES: dict[str, Callable[[], list[Outcome]]] = {
    judge.__name__: judge
    for judge in (universal, small, random, repeat, repeat_norms, norms, angles, length, domains, chat, pythia,
                  hellaswag, depths, jamba, jamba_third)
}  # fmt: skip
