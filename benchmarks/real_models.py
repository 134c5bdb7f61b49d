"""What the ledger asks of finished language models, into data/real_models.csv: python benchmarks/real_models.py

One number per question and model, from their measurements in data/open_lms (benchmarks/open_lms.py); seconds.

T = 64, without BOS where the paper says so (Section 3.3), else with what stood first in the model's training. The bars
that the numbers are held against stand in data/claims.yaml.
"""

from __future__ import annotations

import csv
import math
from typing import Any

import numpy as np
from open_lms import recorded
from scipy import stats

from sinkutils import paths
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import norm_ratio

EPSILON = "0.3"
WINDOWS = {"gemma-3-270m": 512}  # keys that most blocks see: beyond, x_1 is hidden from them
SHORTEST = 32  # tokens: at 16, uniform attention alone exceeds eps = 0.2


def answers() -> dict[str, dict[str, tuple[float, float]]]:
    """By model and question: a number as the two ends of its interval, which are one where there is none."""
    found = {}
    for name in sorted(REAL_MODELS):  # the others in data/open_lms lack some of the sections
        sections = recorded(name)
        numbers = _of_probes(sections) | _of_lengths_and_domains(sections)
        found[sections["about"]["title"]] = numbers | _of_heads(sections) | _of_recall(sections)
    least, harm = _of_rounding()
    found[least]["int8_of_least_sink"] = harm
    return found


def _usual(sections: dict[str, Any]) -> str:
    """What stood first in the model's training."""
    return "BOS" if sections["about"]["trained_with_bos"] else "text"


def _once(number: float) -> tuple[float, float]:
    return float(number), float(number)


def _of_probes(sections: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Sink_1 in percent with its 95 % interval over texts (Table 1 left), and the norm of a repeated token."""
    probes = sections["probes"]
    reports = {"natural": probes["natural"][_usual(sections)]}
    reports |= {"random": probes["random"]["text"], "repeated": probes["repeat"]["text"]}
    numbers = {
        f"sink_{kind}": tuple(report["interval"]["1"][EPSILON]) for kind, report in reports.items()
    }
    # The least norm of a repeated token over that of natural text's later tokens, in the block where it is largest.
    repeated = np.min(reports["repeated"]["hidden_norms"][:-1], axis=1)
    natural = np.array(probes["natural"]["text"]["hidden_norms"][:-1])[:, 1:].mean(axis=1)
    return numbers | {"repeated_norm": _once(max(repeated / natural))}


def _of_lengths_and_domains(sections: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Figures 3 and 9: how Sink_1 goes with T, within the model's windows, and with the text."""
    known = sections["lengths"][_usual(sections)]
    longest = WINDOWS.get(sections["about"]["model"], math.inf)
    lengths = sorted(int(length) for length in known if SHORTEST <= int(length) <= longest)
    sinks = [known[str(length)]["sink"]["1"] for length in lengths]
    ranks = np.argsort(np.argsort([sink[EPSILON] for sink in sinks]))
    left = {eps: sinks[-1][eps] / sinks[0][eps] for eps in ("0.2", "0.4")}
    domains = sections["domains"]["by"].values()
    by_domain = np.array([reports[_usual(sections)]["sink"]["1"][EPSILON] for reports in domains])
    return {
        "rank_with_length": _once(np.corrcoef(np.arange(len(ranks)), ranks)[0, 1]),
        "left_at_large_eps": _once(
            left["0.4"] - left["0.2"]
        ),  # shares of Sink_1 that are left at the largest T
        "domain_deviation": _once(abs(by_domain - by_domain.mean()).max()),  # points
    }


def _of_heads(sections: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Figures 2 and 11 to 24: norms where the sink is strongest, angles in heads with a sink, alpha_1 by block."""
    report = sections["probes"]["natural"][_usual(sections)]
    alpha = np.array(report["alpha"][0])  # (blocks, heads)
    block = int(np.argmax(alpha.mean(axis=1)))
    numbers = {"h_norm": _once(max(norm_ratio(report["hidden_norms"][:-1])))}
    for name in ("key", "value"):
        numbers[f"{name}_norm"] = _once(norm_ratio([report[f"{name}_norms"][block]])[0])
    strong = alpha > float(EPSILON)
    for name in ("cosine", "norm_product"):
        first, others = (
            np.array(sections["angles"][name][which])[strong].mean()
            for which in ("first", "others")
        )
        numbers[f"{name}_difference"] = _once(first - others)
    quarter = len(alpha) // 4
    numbers["later_less_first"] = _once(alpha[quarter:].mean() - alpha[:quarter].mean())
    return numbers


def _of_recall(sections: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """How many points more of the needles are recalled once x_1 is dropped from the cache: a 95 % interval over
    prompts, paired.

    Not with x_1 hidden: x_2 may then become the sink.
    """
    rows = sections["recall"]["rows"]
    change = [100 * (row["dropped"][0] - row["kept"][0]) for row in rows]
    return {"recall_without_sink": _interval(np.mean(change), stats.sem(change), len(change) - 1)}


def _of_rounding() -> tuple[str, tuple[float, float]]:
    """The model with the least sink, and how many nats more than another it loses by activations in 8 bits, one scale
    a text: a 95 % interval over texts, which each model cuts into tokens of its own (Welch).
    """
    models = {}
    for name in REAL_MODELS:
        sections = recorded(name)
        losses = sections["int8"]["loss"]
        harm = np.array(losses["a text"]) - np.array(losses["exact"])
        models[sections["about"]["title"]] = sections["int8"]["sink_1"], harm
    (least, (_, ours)), *others = sorted(models.items(), key=lambda item: item[1][0])
    _, (_, theirs) = max(others, key=lambda item: item[1][1].mean())  # the other that suffers most
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return least, (float(found.low), float(found.high))


def _interval(mean: float, error: float, degrees: int) -> tuple[float, float]:
    low, high = stats.t.interval(0.95, degrees, mean, error)
    return float(low), float(high)


def main() -> None:
    """Write the table."""
    with (paths.LEDGER / "real_models.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "question", "low", "high"))
        for model, numbers in answers().items():
            writer.writerows((model, question, *ends) for question, ends in numbers.items())


if __name__ == "__main__":
    main()
