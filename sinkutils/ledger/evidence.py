"""What the ledger judges by: a preset's results, and checks on them that hold, fail, or were not run.

The thresholds come from the paper's words and numbers, not from ours. Percentages are Sink_k at eps = 0.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sinkutils.study.grid import experiment, resolve
from sinkutils.study.record import Record, read_record, record_folder
from sinkutils.training.finetune import history, planned

REPRODUCED, PARTLY, NOT_REPRODUCED = "reproduced", "partly", "not reproduced"
NOT_VISIBLE, NOT_RUN = "not visible", "not run"
VERDICTS = (REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_VISIBLE, NOT_RUN)

EPSILON = 0.3  # Section 3.2
PRESENT = 2.9  # a sink: the least that the paper still calls one ("less obvious", 2.90 in Table 9)
ABSENT = 1.0  # no sink: "less than 1%" (Appendix C.2); the largest called none at 60M is 0.81 (Table 14 right)
EMERGED = 5.0  # what a base must show before a claim about its sink can be judged
GROWTH = 10.0  # "emerges": so many times the value at a tenth of the steps
SPREAD = 9.0  # points by which rows that the paper calls unaffected differ (Table 12 left, H = 1 to 8)
SEEDS = 3  # seeds of the base that a "no effect" claim needs
COMPARABLE = 0.05  # share of the loss; losses called comparable differ by up to 4.8 % (3.91 and 3.73, Table 6)
MASSIVE = 3.0  # ||h_1|| over the others' mean in some block. The paper draws the ratio without a threshold (Figs.
UNMASSIVE = 2.0  # 7, 8): 1 is no difference, so three times counts as massive, below twice as not, between as neither
SPIKE = 10.0  # "no issues of training stability" (Appendix D): no gradient norm ten times the median of its run
ALIKE = 2.0  # "behave similarly" (Appendix D, without a number): within a factor of two
SMALL_VALUE = 0.5  # ||v_1|| over the others' mean: "much smaller" (Fig. 2)


@dataclass(frozen=True)
class Check:
    """One condition of a claim. `missing` says what would have to be run, where `holds` is None."""

    says: str
    holds: bool | None
    facts: tuple[tuple[str, str], ...] = ()  # (what, figure) pairs
    core: bool = True  # without any core check that holds, a claim is not reproduced
    missing: tuple[str, ...] = ()
    sometimes: bool = False  # it does not hold, but at some of the seeds it does


def judge(checks: Sequence[Check]) -> tuple[str, str]:
    """The verdict of a claim and why: all checks hold; none of the core ones at any seed; or some."""
    absent = dict.fromkeys(name for check in checks if check.holds is None for name in check.missing)
    lacking = f"not run: {', '.join(absent)}" if absent else ""
    seen = [check for check in checks if check.holds is not None]
    if not any(check.core for check in seen):
        return NOT_RUN, lacking
    failed = [check.says for check in seen if not check.holds]
    why = "; ".join(filter(None, (f"does not hold: {', '.join(failed)}" if failed else "", lacking)))
    if not any(check.holds or check.sometimes for check in seen if check.core):
        return NOT_REPRODUCED, why
    return (PARTLY, why) if why else (REPRODUCED, f"holds in all of {len(seen)}" if len(seen) > 1 else "holds")


def as_text(facts: Iterable[tuple[str, str]]) -> str:
    """Facts as one line, each once, grouped by what they are of: "Sink_1: fixed_1 24.0, k_bias 0.0"."""
    grouped: dict[str, dict[str, None]] = {}
    for what, figure in facts:
        grouped.setdefault(what, {})[figure] = None
    return "; ".join(f"{what}: {', '.join(figures)}" for what, figures in grouped.items())


def ratio_by_block(norms: Sequence[Sequence[float]], k: int = 1) -> list[float]:
    """The norm at position k over the mean of the others, for each row of norms (blocks, positions)."""
    return [row[k - 1] * (len(row) - 1) / (sum(row) - row[k - 1]) for row in norms]


def after_massive(report: dict[str, Any], name: str) -> float | None:
    """Mean ratio of key or value norms in the attention layers whose input has a massive ||h_1||; None without any."""
    if "hidden_norms" not in report:
        return None
    hidden, ratios = ratio_by_block(report["hidden_norms"]), ratio_by_block(report[name])
    chosen = [
        ratio for layer, ratio in zip(report["layers"], ratios, strict=True) if layer and hidden[layer - 1] >= MASSIVE
    ]
    return sum(chosen) / len(chosen) if chosen else None


def _largest_ratio(report: dict[str, Any], name: str) -> float | None:
    return max(ratio_by_block(report[name])) if name in report else None


def _sinks(report: dict[str, Any]) -> dict[int, float]:
    return {int(k): by_eps[str(EPSILON)] for k, by_eps in report.get("sink", {}).items() if str(EPSILON) in by_eps}


def _largest_sink(metrics: dict[str, Any], positions: range) -> float | None:
    sinks = _sinks(_report(metrics))
    return max((sinks[k] for k in positions if k in sinks), default=None)


def _depths(report: dict[str, Any]) -> float | None:
    """Mean alpha_1 of the first quarter of the attention layers over that of the others."""
    if "alpha" not in report or len(report["layers"]) < 2:
        return None
    means = [sum(heads) / len(heads) for heads in report["alpha"][0]]
    early = max(1, len(means) // 4)
    return (sum(means[:early]) / early) / (sum(means[early:]) / (len(means) - early))


def _early(metrics: dict[str, Any]) -> float | None:
    """Sink_1 at the last evaluation in the first tenth of the steps, or at the first one."""
    curve = metrics["curve"]
    if not curve:
        return None
    return [point for i, point in enumerate(curve) if i == 0 or point["step"] <= curve[-1]["step"] / 10][-1]["sink_1"]


def _onset(metrics: dict[str, Any]) -> float | None:
    """The first evaluated step with a sink; inf if there is none."""
    steps = [point["step"] for point in metrics["curve"] if point["sink_1"] >= PRESENT]
    return float(min(steps, default=math.inf)) if metrics["curve"] else None


def _gap(metrics: dict[str, Any]) -> float | None:
    final = metrics["final"]
    return final["valid_loss"] - final["train_loss"] if {"valid_loss", "train_loss"} <= set(final) else None


def _tenths(metrics: dict[str, Any]) -> tuple[float, float] | None:
    """The mean training loss of the first and of the last tenth of a fine-tuning's steps."""
    losses = [step["train_loss"] for step in history(metrics)]
    count = max(1, len(losses) // 10)
    return (sum(losses[:count]) / count, sum(losses[-count:]) / count) if losses else None


def _fall(metrics: dict[str, Any]) -> float | None:
    ends = _tenths(metrics)
    return ends[0] - ends[1] if ends else None


def _end_loss(metrics: dict[str, Any]) -> float | None:
    ends = _tenths(metrics)
    return ends[1] if ends else None


def _median_gradient(metrics: dict[str, Any]) -> float | None:
    norms = [step["gradient_norm"] for step in history(metrics)]
    return median(norms) if norms else None


def _spike(metrics: dict[str, Any]) -> float | None:
    norms = [step["gradient_norm"] for step in history(metrics)]
    return max(norms) / median(norms) if norms else None


def _report(metrics: dict[str, Any]) -> dict[str, Any]:
    return metrics["final"].get("report", {})


# What can be asked of a record: its heading, decimals, and how it follows from metrics.json.
QUANTITIES: dict[str, tuple[str, int, Callable[[dict[str, Any]], float | None]]] = {
    "sink_1": ("Sink_1 %", 1, lambda m: m["final"].get("sink_1")),
    "sink_2": ("Sink_2 %", 1, lambda m: m["final"].get("sink_2")),
    "sink_3": ("Sink_3 %", 1, lambda m: m["final"].get("sink_3")),
    "sink_star": ("Sink_* %", 1, lambda m: m["final"].get("sink_star")),
    "valid_loss": ("valid loss", 2, lambda m: m["final"].get("valid_loss")),
    "largest_sink": ("largest Sink_k %", 1, lambda m: _largest_sink(m, range(1, 11))),
    "inside": ("largest of Sink_2 to Sink_5 %", 1, lambda m: _largest_sink(m, range(2, 6))),
    "beyond": ("largest of Sink_6 to Sink_10 %", 1, lambda m: _largest_sink(m, range(6, 11))),
    "early": ("Sink_1 % at a tenth of the steps", 1, _early),
    "peak": ("largest Sink_1 % on the way", 1, lambda m: max((p["sink_1"] for p in m["curve"]), default=None)),
    "onset": ("first step with a sink", 0, _onset),
    "gap": ("valid minus train loss", 2, _gap),
    "fall": ("fall of the training loss", 2, _fall),
    "end_loss": ("training loss at the end", 2, _end_loss),
    "gradient": ("median gradient norm", 2, _median_gradient),
    "spike": ("largest over median gradient norm", 1, _spike),
    "hidden": ("norm ratio of h_1", 2, lambda m: _largest_ratio(_report(m), "hidden_norms")),
    "before_norm": ("norm ratio of h_1 before LN", 2, lambda m: _largest_ratio(_report(m), "before_norm_norms")),
    "key": ("norm ratio of k_1", 2, lambda m: after_massive(_report(m), "key_norms")),
    "value": ("norm ratio of v_1", 2, lambda m: after_massive(_report(m), "value_norms")),
    "depths": ("alpha_1 of early over later layers", 2, lambda m: _depths(_report(m))),
}


class Results:
    """The valid records of a preset by experiment, and what checks need of them. "base" is the preset's base."""

    def __init__(self, preset: str, runs: Path | str | None = None) -> None:
        from sinkutils.showing.tables import records

        self.preset, self.runs = preset, runs
        table = records(preset, runs)
        results = table[table["status"].isin(["done", "failed"])]
        self._rows = [(str(row.experiment), int(row.seed)) for row in results.itertuples()]
        self._read: dict[tuple[str, int], Record] = {}

    def label(self, name: str) -> str:
        """The name under which an experiment runs here."""
        try:
            return resolve(name, self.preset)
        except ValueError:
            return name

    def all_records(self, name: str) -> list[Record]:
        """The done and failed records of an experiment, by seed."""
        wanted = [row for row in self._rows if row[0] == self.label(name)]
        for row in wanted:
            if row not in self._read:
                self._read[row] = read_record(record_folder(self.preset, *row, self.runs))
        return [self._read[row] for row in wanted]

    def failed(self, name: str) -> bool:
        """Whether an experiment was run and no seed of it trained."""
        found = self.all_records(name)
        return bool(found) and all(record.status == "failed" for record in found)

    def values(self, name: str, key: str) -> list[float]:
        """A quantity of an experiment, a seed each, where it was recorded."""
        found = [QUANTITIES[key][2](record.metrics) for record in self.all_records(name) if record.status == "done"]
        return [value for value in found if value is not None]

    def mean(self, name: str, key: str = "sink_1") -> float | None:
        values = self.values(name, key)
        return sum(values) / len(values) if values else None

    def spread(self, name: str, key: str = "sink_1") -> float:
        """Largest minus smallest over seeds; 0 with one."""
        values = [value for value in self.values(name, key) if math.isfinite(value)]
        return max(values) - min(values) if values else 0.0

    def fact(self, name: str, key: str) -> tuple[str, str]:
        """A figure for people, (heading, "name value")."""
        heading, digits, _ = QUANTITIES[key]
        if self.failed(name):
            return "training", f"{self.label(name)} failed"
        value = self.mean(name, key)
        if value is None:
            return heading, f"{self.label(name)} -"
        return heading, f"{self.label(name)} {f'{value:.{digits}f}' if math.isfinite(value) else 'never'}"

    def check(
        self, says: str, wanted: Sequence[tuple[str, str]], test: Callable[..., bool], core: bool = True
    ) -> Check:
        """A check of `test` on the wanted (name, key) pairs: one on every seed, several on their means over seeds.

        A run that failed to train fails it.
        """
        values = [self.mean(name, key) for name, key in wanted]
        facts = tuple(
            self.fact(name, key)
            for (name, key), value in zip(wanted, values, strict=True)
            if value is not None or self.failed(name)
        )
        if any(self.failed(name) for name, _ in wanted):
            return Check(says, False, facts, core)
        lacking = [self._lacking(*pair) for pair, value in zip(wanted, values, strict=True) if value is None]
        if lacking:
            return Check(says, None, facts, core, tuple(lacking))
        if len(wanted) == 1:
            outcomes = [bool(test(value)) for value in self.values(*wanted[0])]
            if any(outcomes) and not all(outcomes):
                says += f" (at {sum(outcomes)} of {len(outcomes)} seeds)"
            return Check(says, all(outcomes), facts, core, sometimes=any(outcomes))
        return Check(says, bool(test(*values)), facts, core)

    def _lacking(self, name: str, key: str) -> str:
        if self.all_records(name):
            return f"{QUANTITIES[key][0]} of {self.label(name)} is not in its record"
        try:
            return planned(name, self.preset).experiment
        except ValueError:
            return f"{name} (not of this preset)"

    def varied(self, *names: str) -> tuple[str, ...]:
        """Those that are another run than the base here, such as 4 heads where the base has 8."""
        return tuple(name for name in names if self.label(name) != self.label("base"))

    def present(self, *names: str, key: str = "sink_1", core: bool = True) -> list[Check]:
        """Each has a sink."""
        heading = QUANTITIES[key][0]
        return [
            self.check(f"{self.label(n)}: {heading} at least {PRESENT}", [(n, key)], lambda x: x >= PRESENT, core)
            for n in names
        ]

    def absent(self, *names: str, key: str = "sink_1", core: bool = True) -> list[Check]:
        """Each has no sink."""
        heading = QUANTITIES[key][0]
        return [
            self.check(f"{self.label(n)}: {heading} at most {ABSENT}", [(n, key)], lambda x: x <= ABSENT, core)
            for n in names
        ]

    def more(self, *names: str, key: str = "sink_1", core: bool = True) -> list[Check]:
        """Each has more than the next, by more than the range over the seeds of either."""
        checks = []
        for larger, smaller in pairwise(names):
            if self.label(larger) == self.label(smaller):
                missing = (f"{larger} apart from {smaller} (one run at this preset)",)
                checks.append(Check("", None, core=core, missing=missing))
                continue
            noise = max(self.spread(larger, key), self.spread(smaller, key))
            says = f"{QUANTITIES[key][0]}: {self.label(larger)} above {self.label(smaller)}"
            says += f" by more than the seeds' {noise:.1f}" if noise else ""
            wanted = [(larger, key), (smaller, key)]
            checks.append(self.check(says, wanted, lambda a, b, noise=noise: a > b and a - b > noise, core))
        return checks

    def massive(self, *names: str, key: str = "hidden", core: bool = True) -> list[Check]:
        """Each has massive activations on x_1."""
        return [
            self.check(f"{self.label(n)}: {QUANTITIES[key][0]} at least {MASSIVE:g}", [(n, key)],
                       lambda x: x >= MASSIVE, core) for n in names
        ]  # fmt: skip

    def not_massive(self, *names: str, key: str = "hidden", core: bool = True) -> list[Check]:
        """None has massive activations on x_1."""
        return [
            self.check(f"{self.label(n)}: {QUANTITIES[key][0]} below {UNMASSIVE:g}", [(n, key)],
                       lambda x: x < UNMASSIVE, core) for n in names
        ]  # fmt: skip

    def comparable_loss(self, *names: str, core: bool = False) -> list[Check]:
        """Each one's validation loss is no worse than the base's by more than COMPARABLE."""
        return [
            self.check(f"{self.label(n)}: valid loss within {COMPARABLE:.0%} of the base's",
                       [(n, "valid_loss"), ("base", "valid_loss")], lambda a, b: a <= b * (1 + COMPARABLE), core)
            for n in names
        ]  # fmt: skip

    def worse_loss(self, *names: str, core: bool = False) -> list[Check]:
        """Each one's validation loss is worse than the base's by more than COMPARABLE."""
        return [
            self.check(f"{self.label(n)}: valid loss over {COMPARABLE:.0%} worse than the base's",
                       [(n, "valid_loss"), ("base", "valid_loss")], lambda a, b: a > b * (1 + COMPARABLE), core)
            for n in names
        ]  # fmt: skip

    def fails(self, *names: str) -> list[Check]:
        """Training of each fails."""
        return [
            Check(f"{self.label(n)} fails to train", self.failed(n) if self.all_records(n) else None,
                  (("training", f"{self.label(n)} {'failed' if self.failed(n) else 'done'}"),)
                  if self.all_records(n) else (), missing=() if self.all_records(n) else (self.label(n),))
            for n in names
        ]  # fmt: skip

    def trains(self, *names: str) -> list[Check]:
        """Training of each succeeds."""
        return [self.check(f"{self.label(n)} trains", [(n, "valid_loss")], math.isfinite) for n in names]

    def unaffected(self, *names: str, core: bool = False) -> list[Check]:
        """Each one's Sink_1 is near the base's: by twice the range over its seeds, or what the paper's rows differ by.

        One without a sink is affected, however wide that range is. Not run while the base has fewer than SEEDS seeds:
        without its spread there is no "no effect".
        """
        seeds, label = len(self.values("base", "sink_1")), self.label("base")
        if 0 < seeds < SEEDS:
            return [Check(f"Sink_1 near {label}'s", None, (), core, (f"{SEEDS} seeds of {label} (there are {seeds})",))]
        usual = experiment("default").paper["sink_1"]
        printed = [experiment(n).paper["sink_1"] for n in names if "sink_1" in experiment(n).paper]
        allowed = max([2 * self.spread("base"), SPREAD, *(abs(value - usual) for value in printed)])
        return [
            self.check(f"{self.label(n)}: a sink, within {allowed:.1f} points of {label}'s",
                       [(n, "sink_1"), ("base", "sink_1")],
                       lambda a, b: a >= PRESENT and abs(a - b) <= allowed, core)
            for n in names
        ]  # fmt: skip

    def intervals(self, names: Iterable[str], keys: Sequence[str]) -> str:
        """Least to greatest over the seeds, of the experiments that have several."""
        facts = []
        for key in keys:
            heading, digits, _ = QUANTITIES[key]
            for name in names:
                values = self.values(name, key)
                if len(values) > 1:
                    facts.append((heading, f"{self.label(name)} {min(values):.{digits}f} to {max(values):.{digits}f}"))
        return as_text(facts)

    def weights(self, name: str) -> Record | None:
        """The first record of an experiment that kept its weights."""
        return next((record for record in self.all_records(name) if record.weights), None)
