"""The claims about finished language models, judged on the measurements in data/open_lms, one check a model.

T = 64, without BOS where the paper says so (Section 3.3), else with what stood first in the model's training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np

from sinkutils import paths
from sinkutils.ledger.outcome import FAILS, HOLDS, OPEN, Outcome, flipped
from sinkutils.ledger.quantities import ONSET, norm_ratio

EPSILON = "0.3"
INSIGNIFICANT = 97.49 - 88.34  # points: the largest change that the paper calls so (Table 1 right, Mistral-7B)
MASSIVE = 2.0  # times the others' norm
WINDOWS = {"gemma-3-270m": 512}  # keys that most blocks see: beyond, x_1 is hidden from them
SHORTEST = 32  # tokens: at 16, uniform attention alone exceeds eps = 0.2

Report = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What data/open_lms keeps of one model. first: what stood first in its training, "text" or "BOS"."""

    name: str
    title: str
    first: str
    sections: dict[str, Any]

    def report(self, kind: str, first: str = "") -> Report:
        """The report on "natural", "random" or "repeat" input, with what stood first in training or as asked."""
        return self.sections["probes"][kind][first or self.first]


def models() -> tuple[Measured, ...]:
    """Every model that was measured."""
    files = tuple((path, path.stat().st_mtime_ns) for path in sorted(paths.OPEN_LMS.glob("*.json")))
    return _models(files)


@lru_cache(maxsize=1)
def _models(files: tuple[tuple[Path, int], ...]) -> tuple[Measured, ...]:
    found = []
    for path, _ in files:
        sections = json.loads(path.read_text(encoding="utf-8"))
        about = sections["about"]
        first = "BOS" if about["trained_with_bos"] else "text"
        found.append(Measured(path.stem, about["title"], first, sections))
    return tuple(found)


Judge = Callable[[Measured], Iterator[Outcome]]
JUDGES: dict[str, Judge] = {}


def judge(name: str) -> list[Outcome]:
    """The outcomes of a judge, by its name in data/claims.yaml, for every model."""
    if name not in JUDGES:
        raise ValueError(f"no such judge of real models: {name}; known are {', '.join(JUDGES)}")
    return [outcome for model in models() for outcome in JUDGES[name](model)]


def named(judge: Judge) -> Judge:
    """Put a judge into JUDGES under the name of its function."""
    JUDGES[judge.__name__] = judge
    return judge


def _told(model: Measured, quantity: str, holds: bool, words: str) -> Outcome:
    return Outcome("real", (model.title,), quantity, HOLDS if holds else FAILS, words=words)


def _sink(model: Measured, report: Report, quantity: str) -> Outcome:
    """Whether the 95 % interval over texts lies above the least that the paper calls a sink."""
    low, high = report["interval"]["1"][EPSILON]
    value = report["sink"]["1"][EPSILON]
    state = HOLDS if low > ONSET else FAILS if high <= ONSET else OPEN
    words = f"Sink_1 {value:.1f} % ({low:.1f} to {high:.1f} over texts)"
    return Outcome("real", (model.title,), quantity, state, bar=ONSET, words=words)


@named
def sink_on_natural_text(model: Measured) -> Iterator[Outcome]:
    """Section 3."""
    yield _sink(model, model.report("natural"), "Sink_1 on natural text")


@named
def sink_on_random_tokens(model: Measured) -> Iterator[Outcome]:
    """Table 1 left, without BOS."""
    yield _sink(model, model.report("random", "text"), "Sink_1 on random tokens")


@named
def no_sink_on_repeated_token(model: Measured) -> Iterator[Outcome]:
    """Table 1 left, without BOS; neither of our models has absolute positions."""
    sink = _sink(model, model.report("repeat", "text"), "no Sink_1 on one token repeated")
    yield Outcome(sink.kind, sink.runs, sink.quantity, flipped(sink.state), bar=sink.bar, words=sink.words)


@named
def repeated_tokens_massive(model: Measured) -> Iterator[Outcome]:
    """Section 3.3: all repeated tokens have the norm that natural text gives its first token alone."""
    usual = np.mean(np.array(model.report("natural", "text")["hidden_norms"][:-1])[:, 1:], axis=1)
    least = np.min(model.report("repeat", "text")["hidden_norms"][:-1], axis=1)
    ratio = float((least / usual).max())
    yield _told(model, "norm of every repeated token", ratio > MASSIVE, f"{ratio:.1f} times the usual")


@named
def norms(model: Measured) -> Iterator[Outcome]:
    """Figures 2 top and 11 to 14: a massive h_1, and where the sink is strongest a smaller k_1 and v_1."""
    report = model.report("natural")
    layer = int(np.argmax(np.mean(report["alpha"][0], axis=1)))
    hidden = norm_ratio(report["hidden_norms"][:-1]).max()
    yield _told(model, "norm ratio of h_1", hidden > MASSIVE, f"{hidden:.2f}")
    for name, symbol in (("key_norms", "k_1"), ("value_norms", "v_1")):
        ratio = norm_ratio([report[name][layer]])[0]
        yield _told(model, f"norm ratio of {symbol} in block {layer + 1}", ratio < 1, f"{ratio:.2f}")


@named
def angles(model: Measured) -> Iterator[Outcome]:
    """Figure 2 bottom: in heads with a sink cos(q, k_1) is above the others', and |q| |k_1| below."""
    strong = np.array(model.report("natural")["alpha"][0]) > float(EPSILON)
    if not strong.any():
        return
    for name, symbol in (("cosine", "cos(q, k)"), ("norm_product", "|q| |k|")):
        first, others = (
            np.array(model.sections["angles"][name][which])[strong].mean() for which in ("first", "others")
        )
        holds = first > others if name == "cosine" else first < others
        yield _told(model, f"{symbol} in heads with a sink", holds, f"x_1 {first:.2f}, others {others:.2f}")


@named
def lengths(model: Measured) -> Iterator[Outcome]:
    """Figure 3: Sink_1 falls with T, by rank within the model's window; more of it is lost at eps 0.4 than at 0.2."""
    from scipy.stats import spearmanr

    known = model.sections["lengths"][model.first]
    longest = WINDOWS.get(model.name, np.inf)
    asked = sorted(int(length) for length in known if SHORTEST <= int(length) <= longest)
    sinks = {}
    for eps in ("0.2", EPSILON, "0.4"):
        sinks[eps] = [known[str(length)]["sink"]["1"][eps] for length in asked]
    rank, p = spearmanr(asked, sinks[EPSILON])
    if abs(rank) > 1 - 1e-9:  # of all orders of so many lengths two are perfect; scipy's p is for many lengths
        p = 2 / factorial(len(asked))
    state = OPEN if p > 0.05 else HOLDS if rank < 0 else FAILS
    words = f"{sinks[EPSILON][0]:.1f} % at T = {asked[0]}, {sinks[EPSILON][-1]:.1f} % at {asked[-1]}"
    yield Outcome("real", (model.title,), "Sink_1 falls with T", state, p=p, words=words)
    left = {eps: values[-1] / values[0] for eps, values in sinks.items()}
    words = f"{left['0.2']:.2f} of it is left at eps 0.2, {left['0.4']:.2f} at 0.4"
    yield _told(model, "more is lost at a larger eps", left["0.4"] < left["0.2"], words)


@named
def domains(model: Measured) -> Iterator[Outcome]:
    """Figure 9: no domain's Sink_1 is further from their mean than the paper calls insignificant."""
    by_domain = model.sections["domains"]["by"].values()
    sinks = np.array([reports[model.first]["sink"]["1"][EPSILON] for reports in by_domain])
    away = abs(sinks - sinks.mean()).max()
    words = f"{sinks.min():.1f} to {sinks.max():.1f} % over {len(sinks)} domains"
    yield _told(model, "Sink_1 by domain", away <= INSIGNIFICANT, words)


@named
def later_blocks(model: Measured) -> Iterator[Outcome]:
    """Figures 19 to 24: the first quarter of the blocks has a smaller mean alpha_1 than the others."""
    means = np.mean(model.report("natural")["alpha"][0], axis=1)
    quarter = len(means) // 4
    low, high = means[:quarter].mean(), means[quarter:].mean()
    yield _told(model, "alpha_1 by block", low < high, f"{low:.2f} in the first quarter of the blocks, then {high:.2f}")
