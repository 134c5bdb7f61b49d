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
        title, parameters = about.get("title", path.stem), about.get("parameters", float("inf"))
        found.append(Measured(title, parameters, usual=usual, probes=sections.get("probes", {}), more=sections))
    by_kind = {kind: measurements(kind) for kind in KINDS}
    for name in dict.fromkeys(name for reports in by_kind.values() for name in reports):
        known = find(name)
        probes = {kind: {"text": reports[name]} for kind, reports in by_kind.items() if name in reports}
        more = {"hellaswag": scores[name]} if name in scores else {}
        one = Measured(name, float("inf"), probes=probes, more=more)
        if known is not None:
            facts = {key: getattr(known, key) for key in ("parameters", "family", "in_paper", "chat")}
            one = replace(one, **facts)
        found.append(one)
    return tuple(found)


def measure_command(model: str, domain: str = "") -> str:
    """How a missing measurement is made; with a domain of the Pile, that of Fig. 9."""
    inputs = f"--corpus 'pile:{domain}'" if domain else "--probe natural random repeat"
    return f"python -m sinkutils measure {model} {inputs} --save"


# --- the claims ------------------------------------------------------------------------------------------------------


Judge = Callable[[], Iterable[Outcome]]
JUDGES: dict[str, Callable[[], list[Outcome]]] = {}


def _check(says: str, holds: bool, facts: str = "") -> Outcome:
    return Outcome(says, HOLDS if holds else FAILS, facts=facts, why="" if holds else "by the measurement")


def judge(example: str) -> Callable[[Judge], Judge]:
    """Put a function, which yields the outcomes of a claim's checks, into JUDGES under its name.

    example: a model to measure where there is no outcome.
    """

    def register(outcomes: Judge) -> Judge:
        missing = Outcome("", MISSING, why=f"not measured: {measure_command(example)}")
        JUDGES[outcomes.__name__] = lambda: list(outcomes()) or [missing]
        return outcomes

    return register


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


@judge("gpt2")
def universal() -> Iterable[Outcome]:
    """Section 3: every model has a sink on natural text."""
    return _sinks("natural", None)


@judge("EleutherAI/pythia-14m")
def small() -> Iterable[Outcome]:
    """Fig. 4 left: so have the small ones."""
    return _sinks("natural", None, lambda one: one.parameters <= SMALL_PARAMETERS)


@judge("gpt2")
def random() -> Iterable[Outcome]:
    """Table 1 left: and on random tokens, without BOS."""
    return _sinks("random", "text")


@judge("gpt2")
def repeat() -> Iterable[Outcome]:
    """Table 1 left: none on one token repeated, without BOS and without absolute positions."""
    mirror = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    for o in _sinks("repeat", "text", lambda one: not _positions(one)):
        yield replace(o, says=o.says.replace("a sink", "no sink"), state=mirror[o.state])


@judge("gpt2")
def repeat_norms() -> Iterable[Outcome]:
    """Section 3.3: all repeated tokens have the norm that natural text gives its first token alone."""
    for one in measured():
        natural, repeated = one.report(), one.report("repeat", "text")
        if natural and repeated and "hidden_norms" in repeated and not _positions(one):
            usual = [sum(row[1:]) / len(row[1:]) for row in natural["hidden_norms"][:-1]]
            least = [min(row) for row in repeated["hidden_norms"][:-1]]
            ratio = max(low / mean for low, mean in zip(least, usual, strict=True))
            facts = f"least norm of a repeated token of {one.name}, times the usual: {ratio:.1f}"
            says = f"{one.name}: every repeated token over {MASSIVE:g} times the usual norm"
            yield _check(says, ratio > MASSIVE, facts)


@judge("gpt2")
def norms() -> Iterable[Outcome]:
    """Figs. 2 top and 11-14: a massive ||h_1||, and where the sink is strongest a smaller ||k_1|| and ||v_1||."""
    for one in measured():
        report = one.report()
        if not report or "hidden_norms" not in report:
            continue
        layer = int(np.argmax([sum(heads) for heads in report["alpha"][0]]))
        ratios = {"h_1": max(norm_ratio(report["hidden_norms"][:-1]))}
        ratios |= {
            f"{x}_1": norm_ratio([report[f"{key}_norms"][layer]])[0] for x, key in (("k", "key"), ("v", "value"))
        }
        for symbol, ratio in ratios.items():
            massive = symbol == "h_1"
            says = f"{one.name}: ||{symbol}|| {f'over {MASSIVE:g} times' if massive else 'below'} the others'"
            facts = f"norm ratio of {symbol} of {one.name} {ratio:.2f}"
            yield _check(says, ratio > MASSIVE if massive else ratio < 1, facts)


@judge("gpt2")
def angles() -> Iterable[Outcome]:
    """Fig. 2 bottom: in the heads with a sink cos(q, k_1) is above the others', and ||q|| ||k_1|| below."""
    orders = {"cosine": "cos(q, k_1) above cos(q, k_j)", "norm_product": "||q|| ||k_1|| below ||q|| ||k_j||"}
    for one in measured():
        report, known = one.report(), one.more.get("angles")
        if not report or not known:
            continue
        strong = [
            (layer, head) for layer, row in enumerate(report["alpha"][0]) for head, a in enumerate(row) if a > EPSILON
        ]
        for key, order in orders.items():
            first, others = (
                sum(known[key][which][layer][head] for layer, head in strong) / max(1, len(strong))
                for which in ("first", "others")
            )
            says = f"{one.name}: {order} in its {len(strong)} heads with a sink"
            facts = f"{key} of {one.name}: x_1 {first:.2f}, others {others:.2f}"
            yield _check(says, bool(strong) and (first > others) == (key == "cosine"), facts)


@judge("gpt2")
def length() -> Iterable[Outcome]:
    """Fig. 3: Sink_1 falls with T, by rank over all lengths; more of it is lost at eps = 0.4 than at 0.2.

    From T = 32 on: at 16 uniform attention alone exceeds 0.2.
    """
    from scipy.stats import spearmanr

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
        facts = f"{one.name} from T = {lengths[0]} to {lengths[-1]}: {sinks['0.3'][0]:.1f} to {sinks['0.3'][-1]:.1f}"
        state = OPEN if p > 0.05 else HOLDS if rank < 0 else FAILS
        why = f"rank correlation {rank:.2f}, p = {p:.2g}"
        yield Outcome(f"{one.name}: Sink_1 falls with T", state, facts=facts, why=why)
        yield _check(f"{one.name}: more is lost at eps 0.4 than at 0.2", kept["0.4"] < kept["0.2"])


@judge("gpt2")
def domains() -> Iterable[Outcome]:
    """Fig. 9: no domain's Sink_1 differs from the mean over domains by more than what the paper calls insignificant."""
    for one in measured():
        known = one.more.get("domains", {}).get("by", {})
        reports = {name: r[one.usual] for name, r in known.items() if one.usual in r} | measured_domains(one.name)
        sinks = {name: measured_sink(report) for name, report in reports.items()}
        if len(sinks) > 1:
            mean = sum(sinks.values()) / len(sinks)
            away = max(abs(value - mean) for value in sinks.values())
            facts = f"Sink_1 of {one.name}: " + ", ".join(f"{name} {value:.1f}" for name, value in sinks.items())
            yield _check(f"{one.name}: domains within {INSIGNIFICANT:.1f} points", away <= INSIGNIFICANT, facts)


def _paired(keep: Callable[[Measured, Measured], bool]) -> Iterable[tuple[Measured, Measured]]:
    models = [one for one in measured() if one.report()]
    return ((one, other) for one in models for other in models if keep(one, other))


def _value(one: Measured) -> float:
    return measured_sink(one.report() or {})


def _both(one: Measured, other: Measured) -> str:
    return f"Sink_1: {one.name} {_value(one):.1f}, {other.name} {_value(other):.1f}"


@judge("mistralai/Mistral-7B-v0.1")
def chat() -> Iterable[Outcome]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""

    def whose(one: Measured) -> tuple[Any, ...]:
        return one.name.split()[0], one.family, one.parameters

    for base, tuned in _paired(lambda base, tuned: tuned.chat and not base.chat and whose(base) == whose(tuned)):
        says = f"{tuned.name}: within {INSIGNIFICANT:.1f} points of {base.name}"
        yield _check(says, abs(_value(base) - _value(tuned)) <= INSIGNIFICANT, _both(base, tuned))


@judge("EleutherAI/pythia-14m")
def pythia() -> Iterable[Outcome]:
    """Fig. 4 left: within Pythia each measured model, three or more, has more of a sink than the next smaller one."""
    found = [one for one in measured() if one.family == "Pythia" and one.report()]
    pairs = list(pairwise(sorted(found, key=lambda one: one.parameters)))
    for small, large in pairs if len(pairs) > 1 else ():
        yield _check(f"{large.name} above {small.name}", _value(large) > _value(small), _both(small, large))


@judge("EleutherAI/pythia-14m")
def hellaswag() -> Iterable[Outcome]:
    """Fig. 10: within a family Sink_1 and acc_norm rise with size; more of a sink alone, OPT beside Pythia, makes no
    better model.
    """

    def score(one: Measured) -> float:
        return float(one.more["hellaswag"]["acc_norm"])

    def scored(one: Measured, other: Measured) -> bool:
        return all(m.in_paper and not m.chat and "acc_norm" in m.more.get("hellaswag", {}) for m in (one, other))

    def facts(one: Measured, other: Measured) -> str:
        return f"acc_norm: {score(one):.1f} and {score(other):.1f}"

    for small, large in _paired(lambda a, b: scored(a, b) and a.family == b.family and a.parameters < b.parameters):
        rises = _value(large) > _value(small) and score(large) > score(small)
        yield _check(f"{large.name} above {small.name} in Sink_1 and acc_norm", rises, facts(small, large))
    for one, other in _paired(lambda a, b: scored(a, b) and (a.family, b.family) == ("OPT", "Pythia")):
        if 1 / COMPARABLE_SIZE <= one.parameters / other.parameters <= COMPARABLE_SIZE:
            alone = _value(one) > _value(other) and abs(score(one) - score(other)) <= COMPARABLE_SCORE
            says = f"{one.name} above {other.name} in Sink_1, acc_norm within {COMPARABLE_SCORE:g}"
            yield _check(says, alone, facts(one, other))


@judge("gpt2")
def depths() -> Iterable[Outcome]:
    """Figs. 19-24: the first quarter of the layers has a smaller mean alpha_1 than the others."""
    for one in measured():
        report = one.report()
        if report and len(report["alpha"][0]) > 3:
            means = [sum(heads) / len(heads) for heads in report["alpha"][0]]
            early = len(means) // 4
            low, high = sum(means[:early]) / early, sum(means[early:]) / (len(means) - early)
            says = f"{one.name}: alpha_1 of the first quarter of the layers below the others'"
            yield _check(says, low < high, f"mean alpha_1 of {one.name}: {low:.2f}, then {high:.2f}")


@judge("ai21labs/Jamba-v0.1")
def jamba() -> Iterable[Outcome]:
    """Appendix B.3: Jamba has a strong sink, in most heads."""
    for one in measured():
        if one.family == "Jamba" and one.report():
            yield _check(f"{one.name}: Sink_1 above 50", _value(one) > 50, f"Sink_1: {_value(one):.1f}")


@judge("ai21labs/Jamba-v0.1")
def jamba_third() -> Iterable[Outcome]:
    """Fig. 27: heads without a sink are found in the third attention layer."""
    for one in measured():
        report = one.report()
        if one.family == "Jamba" and report:
            least = [min(heads) for heads in report["alpha"][0]]
            says = f"{one.name}: the head with the least alpha_1 is in the third attention layer"
            yield _check(says, least.index(min(least)) == 2)
