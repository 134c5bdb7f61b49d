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
from sinkutils.measuring.real import window_of
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
    window: float = float("inf")  # beyond it x_1 is hidden from most blocks
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

    models, scores = [], saved_scores()
    for path in sorted(paths.OPEN_LMS.glob("*.json")):
        sections = json.loads(path.read_text(encoding="utf-8"))
        about = sections.get("about", {})
        usual = "BOS" if about.get("trained_with_bos") else "text"
        title, parameters = about.get("title", path.stem), about.get("parameters", float("inf"))
        kept = {"probes": sections.get("probes", {}), "more": sections}
        models.append(Measured(title, parameters, usual=usual, window=window_of(sections), **kept))
    by_kind = {kind: measurements(kind) for kind in KINDS}
    for name in dict.fromkeys(name for reports in by_kind.values() for name in reports):
        known = find(name)
        probes = {kind: {"text": reports[name]} for kind, reports in by_kind.items() if name in reports}
        more = {"hellaswag": scores[name]} if name in scores else {}
        model = Measured(name, float("inf"), probes=probes, more=more)
        if known is not None:
            facts = {key: getattr(known, key) for key in ("parameters", "family", "in_paper", "chat")}
            model = replace(model, **facts)
        models.append(model)
    return tuple(models)


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


def _sink(model: Measured, report: dict[str, Any], says: str) -> Outcome:
    """Whether a sink is there, by the interval over texts."""
    low, high = report["interval"]["1"][str(EPSILON)]
    state = HOLDS if low > ONSET else FAILS if high <= ONSET else OPEN
    value = f"Sink_1 of {model.name} {measured_sink(report):.1f} ({low:.1f} to {high:.1f} over texts)"
    return Outcome(f"{model.name}: {says}", state, facts=value, why=f"threshold {ONSET}")


def _sinks(kind: str, first: str | None, keep: Callable[[Measured], bool] = lambda model: True) -> list[Outcome]:
    """A sink on one kind of input, for each model that was measured on it."""
    reports = [(model, model.report(kind, first)) for model in measured() if keep(model)]
    return [_sink(model, report, f"a sink on {kind} input") for model, report in reports if report]


def _positions(model: Measured) -> bool:
    """Whether the model has learned absolute positions."""
    return model.family in ("GPT2", "OPT")


@judge("gpt2")
def universal() -> Iterable[Outcome]:
    """Section 3: every model has a sink on natural text."""
    return _sinks("natural", None)


@judge("EleutherAI/pythia-14m")
def small() -> Iterable[Outcome]:
    """Fig. 4 left: so have the small ones."""
    return _sinks("natural", None, lambda model: model.parameters <= SMALL_PARAMETERS)


@judge("gpt2")
def random() -> Iterable[Outcome]:
    """Table 1 left: and on random tokens, without BOS."""
    return _sinks("random", "text")


@judge("gpt2")
def repeat() -> Iterable[Outcome]:
    """Table 1 left: none on one token repeated, without BOS and without absolute positions."""
    mirror = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
    for o in _sinks("repeat", "text", lambda model: not _positions(model)):
        yield replace(o, says=o.says.replace("a sink", "no sink"), state=mirror[o.state])


@judge("gpt2")
def repeat_norms() -> Iterable[Outcome]:
    """Section 3.3: all repeated tokens have the norm that natural text gives its first token alone."""
    for model in measured():
        natural, repeated = model.report(), model.report("repeat", "text")
        if natural and repeated and "hidden_norms" in repeated and not _positions(model):
            usual = [sum(row[1:]) / len(row[1:]) for row in natural["hidden_norms"][:-1]]
            least = [min(row) for row in repeated["hidden_norms"][:-1]]
            ratio = max(low / mean for low, mean in zip(least, usual, strict=True))
            facts = f"least norm of a repeated token of {model.name}, times the usual: {ratio:.1f}"
            says = f"{model.name}: every repeated token over {MASSIVE:g} times the usual norm"
            yield _check(says, ratio > MASSIVE, facts)


@judge("gpt2")
def norms() -> Iterable[Outcome]:
    """Figs. 2 top and 11-14: a massive ||h_1||, and where the sink is strongest a smaller ||k_1|| and ||v_1||."""
    for model in measured():
        report = model.report()
        if not report or "hidden_norms" not in report:
            continue
        layer = int(np.argmax([sum(heads) for heads in report["alpha"][0]]))
        ratios = {"h_1": max(norm_ratio(report["hidden_norms"][:-1]))}
        ratios |= {
            f"{x}_1": norm_ratio([report[f"{key}_norms"][layer]])[0] for x, key in (("k", "key"), ("v", "value"))
        }
        for symbol, ratio in ratios.items():
            massive = symbol == "h_1"
            says = f"{model.name}: ||{symbol}|| {f'over {MASSIVE:g} times' if massive else 'below'} the others'"
            facts = f"norm ratio of {symbol} of {model.name} {ratio:.2f}"
            yield _check(says, ratio > MASSIVE if massive else ratio < 1, facts)


@judge("gpt2")
def angles() -> Iterable[Outcome]:
    """Fig. 2 bottom: in the heads with a sink cos(q, k_1) is above the others', and ||q|| ||k_1|| below."""
    orders = {"cosine": "cos(q, k_1) above cos(q, k_j)", "norm_product": "||q|| ||k_1|| below ||q|| ||k_j||"}
    for model in measured():
        report, known = model.report(), model.more.get("angles")
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
            says = f"{model.name}: {order} in its {len(strong)} heads with a sink"
            facts = f"{key} of {model.name}: x_1 {first:.2f}, others {others:.2f}"
            yield _check(says, bool(strong) and (first > others) == (key == "cosine"), facts)


@judge("gpt2")
def length() -> Iterable[Outcome]:
    """Fig. 3: Sink_1 falls with T, by rank over all lengths; more of it is lost at eps = 0.4 than at 0.2.

    From T = 32 on, as at 16 uniform attention alone exceeds 0.2, and within the model's windows, which alone lower
    alpha_1 beyond.
    """
    from scipy.stats import spearmanr

    for model in measured():
        known = model.more.get("lengths", {}).get(model.usual, {})
        by_length = {int(t): report for t, report in known.items() if 32 <= int(t) <= model.window}
        if len(by_length) < 5:
            continue
        lengths = sorted(by_length)
        sinks = {eps: [by_length[t]["sink"]["1"][eps] for t in lengths] for eps in ("0.2", "0.3", "0.4")}
        rank, p = spearmanr(lengths, sinks["0.3"])
        kept = {eps: values[-1] / values[0] if values[0] else 1.0 for eps, values in sinks.items()}
        facts = f"{model.name} from T = {lengths[0]} to {lengths[-1]}: {sinks['0.3'][0]:.1f} to {sinks['0.3'][-1]:.1f}"
        state = OPEN if p > 0.05 else HOLDS if rank < 0 else FAILS
        why = f"rank correlation {rank:.2f}" + (f", p = {p:.2g}" if abs(rank) < 1 else f" over {len(lengths)} lengths")
        yield Outcome(f"{model.name}: Sink_1 falls with T", state, facts=facts, why=why)
        yield _check(f"{model.name}: a larger share of it is lost at eps 0.4 than at 0.2", kept["0.4"] < kept["0.2"])


@judge("gpt2")
def domains() -> Iterable[Outcome]:
    """Fig. 9: no domain's Sink_1 differs from the mean over domains by more than what the paper calls insignificant."""
    for model in measured():
        known = model.more.get("domains", {}).get("by", {})
        reports = {name: r[model.usual] for name, r in known.items() if model.usual in r} | measured_domains(model.name)
        sinks = {name: measured_sink(report) for name, report in reports.items()}
        if len(sinks) > 1:
            mean = sum(sinks.values()) / len(sinks)
            away = max(abs(value - mean) for value in sinks.values())
            facts = f"Sink_1 of {model.name}: " + ", ".join(f"{name} {value:.1f}" for name, value in sinks.items())
            says = f"{model.name}: no domain further than {INSIGNIFICANT:.1f} points from their mean"
            yield _check(says, away <= INSIGNIFICANT, facts)


def _paired(keep: Callable[[Measured, Measured], bool]) -> Iterable[tuple[Measured, Measured]]:
    models = [model for model in measured() if model.report()]
    return ((model, other) for model in models for other in models if keep(model, other))


def _value(model: Measured) -> float:
    return measured_sink(model.report() or {})


def _both(model: Measured, other: Measured) -> str:
    return f"Sink_1: {model.name} {_value(model):.1f}, {other.name} {_value(other):.1f}"


@judge("mistralai/Mistral-7B-v0.1")
def chat() -> Iterable[Outcome]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""

    def whose(model: Measured) -> tuple[Any, ...]:
        return model.name.split()[0], model.family, model.parameters

    for base, tuned in _paired(lambda base, tuned: tuned.chat and not base.chat and whose(base) == whose(tuned)):
        says = f"{tuned.name}: within {INSIGNIFICANT:.1f} points of {base.name}"
        yield _check(says, abs(_value(base) - _value(tuned)) <= INSIGNIFICANT, _both(base, tuned))


@judge("EleutherAI/pythia-14m")
def pythia() -> Iterable[Outcome]:
    """Fig. 4 left: within Pythia each measured model, three or more, has more of a sink than the next smaller one."""
    models = [model for model in measured() if model.family == "Pythia" and model.report()]
    pairs = list(pairwise(sorted(models, key=lambda model: model.parameters)))
    for small, large in pairs if len(pairs) > 1 else ():
        yield _check(f"{large.name} above {small.name}", _value(large) > _value(small), _both(small, large))


@judge("EleutherAI/pythia-14m")
def hellaswag() -> Iterable[Outcome]:
    """Fig. 10: within a family Sink_1 and acc_norm rise with size; more of a sink alone, OPT beside Pythia, makes no
    better model.
    """

    def score(model: Measured) -> float:
        return float(model.more["hellaswag"]["acc_norm"])

    def scored(model: Measured, other: Measured) -> bool:
        return all(m.in_paper and not m.chat and "acc_norm" in m.more.get("hellaswag", {}) for m in (model, other))

    def facts(model: Measured, other: Measured) -> str:
        return f"acc_norm: {score(model):.1f} and {score(other):.1f}"

    for small, large in _paired(lambda a, b: scored(a, b) and a.family == b.family and a.parameters < b.parameters):
        rises = _value(large) > _value(small) and score(large) > score(small)
        yield _check(f"{large.name} above {small.name} in Sink_1 and acc_norm", rises, facts(small, large))
    for model, other in _paired(lambda a, b: scored(a, b) and (a.family, b.family) == ("OPT", "Pythia")):
        if 1 / COMPARABLE_SIZE <= model.parameters / other.parameters <= COMPARABLE_SIZE:
            alone = _value(model) > _value(other) and abs(score(model) - score(other)) <= COMPARABLE_SCORE
            says = f"{model.name} above {other.name} in Sink_1, acc_norm within {COMPARABLE_SCORE:g}"
            yield _check(says, alone, facts(model, other))


@judge("gpt2")
def depths() -> Iterable[Outcome]:
    """Figs. 19-24: the first quarter of the layers has a smaller mean alpha_1 than the others."""
    for model in measured():
        report = model.report()
        if report and len(report["alpha"][0]) > 3:
            means = [sum(heads) / len(heads) for heads in report["alpha"][0]]
            early = len(means) // 4
            low, high = sum(means[:early]) / early, sum(means[early:]) / (len(means) - early)
            says = f"{model.name}: alpha_1 of the first quarter of the layers below the others'"
            yield _check(says, low < high, f"mean alpha_1 of {model.name}: {low:.2f}, then {high:.2f}")


@judge("ai21labs/Jamba-v0.1")
def jamba() -> Iterable[Outcome]:
    """Appendix B.3: Jamba has a strong sink, in most heads."""
    for model in measured():
        if model.family == "Jamba" and model.report():
            yield _check(f"{model.name}: Sink_1 above 50", _value(model) > 50, f"Sink_1: {_value(model):.1f}")


@judge("ai21labs/Jamba-v0.1")
def jamba_third() -> Iterable[Outcome]:
    """Fig. 27: heads without a sink are found in the third attention layer."""
    for model in measured():
        report = model.report()
        if model.family == "Jamba" and report:
            least = [min(heads) for heads in report["alpha"][0]]
            says = f"{model.name}: the head with the least alpha_1 is in the third attention layer"
            yield _check(says, least.index(min(least)) == 2)
