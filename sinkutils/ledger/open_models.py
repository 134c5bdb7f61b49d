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
from itertools import pairwise, product
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np

from sinkutils import paths
from sinkutils.ledger.results import EPSILON, ONSET
from sinkutils.ledger.rules import FAILS, HOLDS, MISSING, OPEN, Outcome, mirrored, told
from sinkutils.measuring import saved
from sinkutils.measuring.real import window_of
from sinkutils.measuring.report import norm_ratio
from sinkutils.measuring.saved import measured_sink, measurements, saved_scores

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
    parameters: float = float("inf")
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
        seen = {"window": window_of(sections), "probes": sections.get("probes", {}), "more": sections}
        models.append(Measured(title, parameters, usual=usual, **seen))
    by_kind = {kind: measurements(kind) for kind in KINDS}
    for name in dict.fromkeys(name for reports in by_kind.values() for name in reports):
        known = find(name)
        probes = {kind: {"text": reports[name]} for kind, reports in by_kind.items() if name in reports}
        facts: dict[str, Any] = {
            key: getattr(known, key) for key in ("parameters", "family", "in_paper", "chat") if known
        }
        more = {"hellaswag": scores[name]} if name in scores else {}
        models.append(Measured(name, probes=probes, more=more, **facts))
    return tuple(models)


def measure_command(model: str) -> str:
    """How a missing measurement is made."""
    return f"python -m sinkutils measure {model} --probe natural random repeat --save"


# --- the claims: each judge yields the outcomes of the claim whose id it is named by ---------------------------------


Judge = Callable[[], Iterable[Outcome]]
JUDGES: dict[str, Callable[[], list[Outcome]]] = {}


def judge(example: str = "gpt2", also: str = "") -> Callable[[Judge], Judge]:
    """Put a function into JUDGES under its name; where it yields no outcome: a model to measure, and what else."""

    def register(outcomes: Judge) -> Judge:
        missing = Outcome("", MISSING, why=f"not measured: {measure_command(example)}{also}")
        JUDGES[outcomes.__name__] = lambda: list(outcomes()) or [missing]
        return outcomes

    return register


def _reports(kind: str = "natural", first: str | None = None) -> list[tuple[Measured, dict[str, Any]]]:
    """The models that were measured on a kind of input, each with its report."""
    return [(model, report) for model in measured() if (report := model.report(kind, first))]


def _sink(model: Measured, report: dict[str, Any], kind: str) -> Outcome:
    """Whether a sink is there, by the interval over texts."""
    low, high = report["interval"]["1"][str(EPSILON)]
    state = HOLDS if low > ONSET else FAILS if high <= ONSET else OPEN
    value = f"Sink_1 of {model.name} {measured_sink(report):.1f} ({low:.1f} to {high:.1f} over texts)"
    return Outcome(f"{model.name}: a sink on {kind} input", state, facts=value, why=f"threshold {ONSET}")


def _positions(model: Measured) -> bool:
    """Whether the model has learned absolute positions."""
    return model.family in ("GPT2", "OPT")


@judge()
def universal() -> Iterable[Outcome]:
    """Section 3: every model has a sink on natural text."""
    return [_sink(model, report, "natural") for model, report in _reports()]


@judge("EleutherAI/pythia-14m")
def small_models() -> Iterable[Outcome]:
    """Fig. 4 left: so have the small ones."""
    return [_sink(model, report, "natural") for model, report in _reports() if model.parameters <= SMALL_PARAMETERS]


@judge()
def random_input() -> Iterable[Outcome]:
    """Table 1 left: and on random tokens, without BOS."""
    return [_sink(model, report, "random") for model, report in _reports("random", "text")]


@judge()
def repeated_input() -> Iterable[Outcome]:
    """Table 1 left: none on one token repeated, without BOS and without absolute positions."""
    for model, report in _reports("repeat", "text"):
        if not _positions(model):
            outcome = mirrored(_sink(model, report, "repeat"))
            yield replace(outcome, says=outcome.says.replace("a sink", "no sink"))


@judge()
def repeated_massive() -> Iterable[Outcome]:
    """Section 3.3: all repeated tokens have the norm that natural text gives its first token alone."""
    for model, natural in _reports("natural", "text"):
        repeated = model.report("repeat", "text")
        if repeated and "hidden_norms" in repeated and not _positions(model):
            usual = [sum(row[1:]) / len(row[1:]) for row in natural["hidden_norms"][:-1]]
            least = [min(row) for row in repeated["hidden_norms"][:-1]]
            ratio = max(low / mean for low, mean in zip(least, usual, strict=True))
            facts = f"least norm of a repeated token of {model.name}, times the usual: {ratio:.1f}"
            says = f"{model.name}: every repeated token over {MASSIVE:g} times the usual norm"
            yield told(says, ratio > MASSIVE, facts)


@judge()
def norms_everywhere() -> Iterable[Outcome]:
    """Figs. 2 top and 11-14: a massive ||h_1||, and where the sink is strongest a smaller ||k_1|| and ||v_1||."""
    for model, report in _reports():
        if "hidden_norms" not in report:
            continue
        layer = int(np.argmax([sum(heads) for heads in report["alpha"][0]]))
        hidden = max(norm_ratio(report["hidden_norms"][:-1]))
        key, value = (norm_ratio([report[name][layer]])[0] for name in ("key_norms", "value_norms"))
        massive = f"over {MASSIVE:g} times"
        for symbol, ratio, order, holds in (
            ("h_1", hidden, massive, hidden > MASSIVE),
            ("k_1", key, "below", key < 1),
            ("v_1", value, "below", value < 1),
        ):
            where = "" if symbol == "h_1" else f" in block {layer + 1}"
            facts = f"norm ratio of {symbol} of {model.name}{where} {ratio:.2f}"
            yield told(f"{model.name}: ||{symbol}|| {order} the others'", holds, facts)


@judge()
def qk_angles() -> Iterable[Outcome]:
    """Fig. 2 bottom: in the heads with a sink cos(q, k_1) is above the others', and ||q|| ||k_1|| below."""
    orders = {"cosine": "cos(q, k_1) above cos(q, k_j)", "norm_product": "||q|| ||k_1|| below ||q|| ||k_j||"}
    for model, report in _reports():
        known, strong = model.more.get("angles"), np.array(report["alpha"][0]) > EPSILON
        if not known:
            continue
        for key, order in orders.items():
            first, others = (
                np.array(known[key][which])[strong].sum() / max(1, strong.sum()) for which in ("first", "others")
            )
            says = f"{model.name}: {order} in its {strong.sum()} heads with a sink"
            facts = f"{key} of {model.name}: x_1 {first:.2f}, others {others:.2f}"
            yield told(says, bool(strong.any()) and (first > others) == (key == "cosine"), facts)


@judge()
def length_and_threshold() -> Iterable[Outcome]:
    """Fig. 3: Sink_1 falls with T, by rank over all lengths; more of it is lost at eps = 0.4 than at 0.2.

    From T = 32 on, as at 16 uniform attention alone exceeds 0.2, and within the model's windows, which alone lower
    alpha_1 beyond.
    """
    from scipy.stats import spearmanr

    for model in measured():
        known = model.more.get("lengths", {}).get(model.usual, {})
        lengths = sorted(int(t) for t in known if 32 <= int(t) <= model.window)
        if len(lengths) < 5:
            continue
        sinks = {eps: [known[str(t)]["sink"]["1"][eps] for t in lengths] for eps in ("0.2", "0.3", "0.4")}
        rank, p = spearmanr(lengths, sinks["0.3"])
        if abs(rank) > 1 - 1e-9:  # of all orders of so many lengths two are perfect; scipy's p is for many
            rank, p = round(rank), 2 / factorial(len(lengths))
        kept = {eps: values[-1] / values[0] if values[0] else 1.0 for eps, values in sinks.items()}
        facts = f"{model.name} from T = {lengths[0]} to {lengths[-1]}: {sinks['0.3'][0]:.1f} to {sinks['0.3'][-1]:.1f}"
        state = OPEN if not p <= 0.05 else HOLDS if rank < 0 else FAILS
        why = f"rank correlation {rank:.2f} over {len(lengths)} lengths, p = {p:.2g}"
        yield Outcome(f"{model.name}: Sink_1 falls with T", state, facts=facts, why=why)
        yield told(f"{model.name}: a larger share of it is lost at eps 0.4 than at 0.2", kept["0.4"] < kept["0.2"])


@judge()
def domains() -> Iterable[Outcome]:
    """Fig. 9: no domain's Sink_1 differs from the mean over domains by more than what the paper calls insignificant."""
    for model in measured():
        known = model.more.get("domains", {}).get("by", {})
        reports = {name: r[model.usual] for name, r in known.items() if model.usual in r}
        sinks = {name: measured_sink(report) for name, report in reports.items()}
        if len(sinks) > 1:
            mean = sum(sinks.values()) / len(sinks)
            away = max(abs(value - mean) for value in sinks.values())
            facts = f"Sink_1 of {model.name}: " + ", ".join(f"{name} {value:.1f}" for name, value in sinks.items())
            says = f"{model.name}: no domain further than {INSIGNIFICANT:.1f} points from their mean"
            yield told(says, away <= INSIGNIFICANT, facts)


def _value(model: Measured) -> float:
    return measured_sink(model.report() or {})


def _both(model: Measured, other: Measured) -> str:
    return f"Sink_1: {model.name} {_value(model):.1f}, {other.name} {_value(other):.1f}"


@judge("mistralai/Mistral-7B-v0.1", ", and its chat version")
def base_and_chat() -> Iterable[Outcome]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""

    def whose(model: Measured) -> tuple[Any, ...]:
        return model.name.split()[0], model.family, model.parameters

    for (base, _), (tuned, _) in product(_reports(), repeat=2):
        if tuned.chat and not base.chat and whose(base) == whose(tuned):
            says = f"{tuned.name}: within {INSIGNIFICANT:.1f} points of {base.name}"
            yield told(says, abs(_value(base) - _value(tuned)) <= INSIGNIFICANT, _both(base, tuned))


@judge("EleutherAI/pythia-14m", ", and two more of Pythia")
def larger_pythia() -> Iterable[Outcome]:
    """Fig. 4 left: within Pythia each measured model, three or more, has more of a sink than the next smaller one."""
    models = [model for model, _ in _reports() if model.family == "Pythia"]
    pairs = list(pairwise(sorted(models, key=lambda model: model.parameters)))
    for small, large in pairs if len(pairs) > 1 else ():
        yield told(f"{large.name} above {small.name}", _value(large) > _value(small), _both(small, large))


@judge("EleutherAI/pythia-14m", ", and another of Pythia; the scores of both: `python -m sinkutils scores MODEL`")
def hellaswag() -> Iterable[Outcome]:
    """Fig. 10: within a family Sink_1 and acc_norm rise with size; more of a sink alone, OPT beside Pythia, makes no
    better model.
    """
    scores = {model.name: model.more.get("hellaswag", {}).get("acc_norm") for model in measured()}
    models = [m for m, _ in _reports() if m.in_paper and not m.chat and scores[m.name] is not None]
    within, across = [], []
    for a, b in product(models, repeat=2):
        score, other = float(scores[a.name]), float(scores[b.name])
        facts = f"acc_norm: {score:.1f} and {other:.1f}"
        if a.family == b.family and a.parameters < b.parameters:
            rises = _value(b) > _value(a) and other > score
            within.append(told(f"{b.name} above {a.name} in Sink_1 and acc_norm", rises, facts))
        alike = 1 / COMPARABLE_SIZE <= a.parameters / b.parameters <= COMPARABLE_SIZE
        if (a.family, b.family) == ("OPT", "Pythia") and alike:
            alone = _value(a) > _value(b) and abs(score - other) <= COMPARABLE_SCORE
            says = f"{a.name} above {b.name} in Sink_1, acc_norm within {COMPARABLE_SCORE:g}"
            across.append(told(says, alone, facts))
    return within + across


@judge()
def later_blocks() -> Iterable[Outcome]:
    """Figs. 19-24: the first quarter of the layers has a smaller mean alpha_1 than the others."""
    for model, report in _reports():
        means = [sum(heads) / len(heads) for heads in report["alpha"][0]]
        early = len(means) // 4
        if early:
            low, high = sum(means[:early]) / early, sum(means[early:]) / (len(means) - early)
            says = f"{model.name}: alpha_1 of the first quarter of the layers below the others'"
            yield told(says, low < high, f"mean alpha_1 of {model.name}: {low:.2f}, then {high:.2f}")


@judge("ai21labs/Jamba-v0.1")
def jamba() -> Iterable[Outcome]:
    """Appendix B.3: Jamba has a strong sink, in most heads."""
    for model, _ in _reports():
        if model.family == "Jamba":
            yield told(f"{model.name}: Sink_1 above 50", _value(model) > 50, f"Sink_1: {_value(model):.1f}")


@judge("ai21labs/Jamba-v0.1")
def jamba_third() -> Iterable[Outcome]:
    """Fig. 27: heads without a sink are found in the third attention layer."""
    for model, report in _reports():
        if model.family == "Jamba":
            least = [min(heads) for heads in report["alpha"][0]]
            says = f"{model.name}: the head with the least alpha_1 is in the third attention layer"
            yield told(says, least.index(min(least)) == 2)
