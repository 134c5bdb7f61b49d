"""What the ledger reads: a preset's records as numbers, read once and kept until a file of the folder changes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from sinkutils.ledger import trials
from sinkutils.ledger.frozen import ledgers
from sinkutils.measuring.report import norm_ratio, uniform_alpha
from sinkutils.study.experiments import AFTER_PAPER, experiment
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset
from sinkutils.study.record import SUMS, Record, history
from sinkutils.study.store import Runs

EPSILONS = (0.2, 0.3, 0.4)  # Sink_1 is shown at each (Fig. 9); 0.3 is the paper's choice (Section 3.2)
EPSILON = 0.3
FEWEST = {"desk": 2}  # seeds of an experiment without which nothing is judged, where not 3: a night a run
ONSET = 2.9  # percent: the least Sink_1 that the paper still calls a sink, "less obvious" (Table 9, 1e-4)
STUCK = 0.99  # of ln V, the loss of a uniform guess: a run that ends there has learned nothing and counts as failed


@dataclass(frozen=True)
class Run:
    """One record and the numbers that follow from it."""

    record: Record

    @property
    def final(self) -> dict[str, Any]:
        return self.record.metrics["final"]

    @property
    def curve(self) -> list[dict[str, Any]]:
        return self.record.metrics["curve"]

    @property
    def report(self) -> dict[str, Any]:
        return self.final.get("report", {})

    @property
    def model(self) -> str:
        """The `LMConfig`, as JSON."""
        return json.dumps(self.record.config["model"], sort_keys=True)

    @property
    def failed(self) -> bool:
        """Whether training failed: it diverged, or its loss is still that of a uniform guess, on what it trains on too:
        a model that overfits may end worse than that on other text.
        """
        on_text = [point["train_loss"] for point in self.curve[-1:] if "train_loss" in point]
        loss = min([self.final.get("valid_loss", math.inf), *on_text])
        return self.record.status == "failed" or loss >= STUCK * math.log(self.record.config["model"]["vocab_size"])


# --- what can be asked of a record: each gives a number, or None where the record does not hold it -------------------


def excess(run: Run, k: int | str = 1) -> float | None:
    """Mean excess alpha_k over texts, layers and heads: (alpha_k - u) / (1 - u), u that of uniform attention."""
    return run.report.get("excess", {}).get(f"{k}")


def sink(run: Run, k: int | str = 1, eps: float = EPSILON) -> float | None:
    """Sink_k^eps in percent."""
    by_eps = run.report.get("sink_star", {}) if k == "star" else run.report.get("sink", {}).get(f"{k}", {})
    return by_eps.get(f"{eps}")


def _learned(run: Run, k: int | str) -> float | None:
    """What training added to the excess: the end less the untrained model, step 0 of the curve."""
    end, start = excess(run, k), next(iter(run.curve), {})
    before = start.get(f"excess_{k}") if start.get("step") == 0 else None
    return None if end is None or before is None else end - before


def _late(run: Run) -> float | None:
    """What the last nine tenths of the steps added to the excess."""
    early = [p for p in run.curve if p["step"] <= run.curve[-1]["step"] / 10 and "excess_1" in p]
    end = excess(run)
    return None if end is None or not early else end - early[-1]["excess_1"]


def _onset(run: Run) -> float | None:
    """The first step from which Sink_1 stays at ONSET or more, as a share of the steps; 1 where there is none."""
    if not run.curve:
        return None
    below = [i for i, point in enumerate(run.curve) if point["sink_1"] < ONSET]
    start = below[-1] + 1 if below else 0
    return run.curve[start]["step"] / run.curve[-1]["step"] if start < len(run.curve) else 1.0


def _turn(run: Run) -> float | None:
    """Where on the way the validation loss is least, as a share of the steps: early where the model overfits."""
    return min(run.curve, key=lambda p: p["valid_loss"])["step"] / run.curve[-1]["step"] if run.curve else None


def _peak(run: Run) -> float | None:
    return max((point["excess_1"] for point in run.curve if "excess_1" in point), default=None)


def _largest(run: Run, positions: range) -> float | None:
    return max((value for k in positions if (value := excess(run, k)) is not None), default=None)


def _difference(run: Run, k: int | str, other: int | str) -> float | None:
    a, b = excess(run, k), excess(run, other)
    return None if a is None or b is None else a - b


def _visible(run: Run) -> float | None:
    """Mean excess of alpha_1 over the queries that can see x_1 (i <= w), with u of uniform attention over them; None
    where that is x_1 alone.
    """
    window, alpha = run.record.config["model"]["attention"]["window"], run.report.get("alpha")
    if alpha is None or window == 1:
        return None
    length = run.report["T"]
    seen = min(window or length, length)
    return _over_uniform(_mean(alpha[0]) * length / seen, seen)


def _over_uniform(mean: float, length: int) -> float:
    uniform = uniform_alpha(length)
    return (mean - uniform) / (1 - uniform) if length > 1 else 0.0


def _gap(run: Run) -> float | None:
    return run.final["valid_loss"] - run.final["train_loss"] if {"valid_loss", "train_loss"} <= set(run.final) else None


def _ratio(run: Run, name: str, positions: tuple[int, ...] = (1,)) -> float | None:
    """The largest ratio of a position's norm to the mean of the others', over the blocks but the last, whose output
    reflects the prediction; beside that of the untrained model, where x_1 stands out because it sees only itself, but
    never beside less than 1: as long as the others is not standing out, whatever training began with.
    """
    norms = run.report.get(name)
    if not norms:
        return None
    largest = max(max(norm_ratio(norms[:-1] or norms, k)) for k in positions)
    return largest / max(1.0, trials.untrained_ratio(run.model, run.report["T"], name, positions))


def _peak_of(run: Run) -> float | None:
    """The largest element of a hidden state over the sequence's median one, before the last block, beside that of the
    untrained model: massive activations as Sun et al. (2024) define them.
    """
    rows = run.report.get("hidden_peaks")
    return max(map(max, rows[:-1] or rows)) / trials.untrained_peak(run.model, run.report["T"]) if rows else None


def _gradient(run: Run) -> float | None:
    """The gradient at x_1 over the mean of that at x_2 to x_32, where attention reads; median over the layers that a
    gradient reaches at all.
    """
    rows = [row[:32] for row in run.final.get("gradients", {}).get("input", ()) if any(row[1:32])]
    return median(norm_ratio(rows)) if rows else None


def _in_block(run: Run, block: int) -> float | None:
    """Mean excess alpha_1 of one block's heads; of the last one where there are fewer."""
    alpha = run.report.get("alpha")
    if alpha is None:
        return None
    return _over_uniform(_mean([alpha[0][min(block, len(alpha[0])) - 1]]), run.report["T"])


def _ratio_at_sink(run: Run, name: str) -> float | None:
    """The ratio of the first key's (or value's) norm to the others' in the layer with the largest mean alpha_1."""
    norms, alpha = run.report.get(name), run.report.get("alpha")
    if not norms or alpha is None:
        return None
    layer = max(range(len(alpha[0])), key=lambda row: _mean([alpha[0][row]]))
    return norm_ratio([norms[layer]])[0]


def _tuned(run: Run, key: str) -> float | None:
    """Of a fine-tuning: what its steps' losses (means of the first and last tenth) and gradient norms say."""
    steps = history(run.record.metrics)
    if not steps:
        return None
    losses, norms = [s["train_loss"] for s in steps], [s["gradient_norm"] for s in steps]
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    return {"fall": first - last, "end": last, "gradient": median(norms), "spike": max(norms) / median(norms)}[key]


def _mean(rows: list[list[float]]) -> float:
    return sum(map(sum, rows)) / sum(map(len, rows))


def _tried(run: Run, name: str) -> float | None:
    """A trial on a record's weights; None where they were not kept."""
    path = run.record.weights
    return trials.trial(name, run.record.folder, path.stat().st_mtime_ns) if path else None


@dataclass(frozen=True)
class Quantity:
    """A number that a record gives: its heading, how it is read, and what it takes for there to be something.

    level: "sink" (a share of the base's excess, `rules.SINK`), or a number; log: whether it is compared on a log scale.
    """

    heading: str
    read: Callable[[Run], float | None]
    level: float | str = math.nan
    digits: int = 3
    log: bool = False


_sink_of = partial(Quantity, level="sink")
_ratio_of = partial(Quantity, level=1.0, digits=2, log=True)
_massive = partial(Quantity, level=2.0, digits=2, log=True)
QUANTITIES: dict[str, Quantity] = {
    **{f"excess_{k}": _sink_of(f"excess alpha_{k}", partial(excess, k=k)) for k in (1, 2, 3)},
    "excess_star": _sink_of("excess alpha_*", partial(excess, k="star")),
    "learned_1": _sink_of("excess alpha_1 over the untrained model's", partial(_learned, k=1)),
    "learned_star": _sink_of("excess alpha_* over the untrained model's", partial(_learned, k="star")),
    "late_1": _sink_of("excess alpha_1 gained after a tenth of the steps", _late),
    "peak_1": _sink_of("largest excess alpha_1 on the way", _peak),
    "visible_1": _sink_of("excess alpha_1 over the queries that see x_1", _visible),
    "largest": _sink_of("largest excess alpha_k, k = 1..10", partial(_largest, positions=range(1, 11))),
    "inside": _sink_of("largest excess alpha_k, k = 2..5", partial(_largest, positions=range(2, 6))),
    "beyond": _sink_of("largest excess alpha_k, k = 6..10", partial(_largest, positions=range(6, 11))),
    "second_over_first": Quantity("excess alpha_2 less alpha_1", partial(_difference, k=2, other=1), 0.0),
    "onset": Quantity("onset, share of the steps", _onset),
    "turn": Quantity("least validation loss at, share of the steps", _turn),
    "valid_loss": Quantity("valid loss", lambda run: run.final.get("valid_loss")),
    "gap": Quantity("valid minus train loss", _gap),
    "hidden": _massive("norm ratio of h_1, times the untrained", partial(_ratio, name="hidden_norms")),
    "before_norm": _massive(
        "norm ratio of h_1 before LN, times the untrained", partial(_ratio, name="before_norm_norms")
    ),
    "peak": _massive("largest element of h over the median, times the untrained", _peak_of),
    "gathered": Quantity("gradient at x_1 over that at x_2 to x_32", _gradient, digits=2, log=True),
    "third_block": _sink_of("excess alpha_1 in the third block", partial(_in_block, block=3)),
    "key": _ratio_of("norm ratio of k_1 where the sink is", partial(_ratio_at_sink, name="key_norms")),
    "value": _ratio_of("norm ratio of v_1 where the sink is", partial(_ratio_at_sink, name="value_norms")),
    "hidden_prefix": _massive(
        "largest norm ratio of h_2 to h_5, times the untrained",
        partial(_ratio, name="hidden_norms", positions=(2, 3, 4, 5)),
    ),
    "fall": Quantity("fall of the training loss", partial(_tuned, key="fall"), 0.0),
    "end": Quantity("training loss at the end", partial(_tuned, key="end"), log=True),
    "gradient": Quantity("median gradient norm", partial(_tuned, key="gradient"), log=True),
    "spike": Quantity("largest over median gradient norm", partial(_tuned, key="spike"), 10.0, 1, log=True),
    "repeat": _sink_of("excess alpha_1 on one token repeated", partial(_tried, name="repeat")),
    "window_first": _sink_of("excess alpha of the window's first key", partial(_tried, name="window_first")),
    "star_hidden": _massive("norm ratio of h at x*, times the untrained", partial(_tried, name="star_hidden")),
    "replaced": Quantity("excess left on one token repeated, p_1 replaced", partial(_tried, name="replaced"), 0.5),
    "swapped": Quantity("excess alpha_t less alpha_1, p_1 and p_t swapped", partial(_tried, name="swapped"), 0.0),
    "without_bias": _sink_of("excess alpha_1 without the trained biases", partial(_tried, name="without_bias")),
    "loss_without_bias": Quantity("loss added by removing the biases", partial(_tried, name="loss_without_bias"), 0.0),
}


@dataclass(frozen=True)
class Results:
    """The records of a preset that the ledger judges. "base" is the preset's base in every name."""

    preset: str
    runs: dict[str, dict[int, Run]]  # experiment -> seed -> run
    unjudged: tuple[str, ...] = ()  # records made before the ledger was frozen, or on another text than most
    least: int = 3  # seeds of an experiment without which nothing is judged
    alone: bool = False  # a difference by the spread of its own seeds, not the pooled one: what those alone would tell
    cache: dict[tuple[str, Any], Any] = field(default_factory=dict, repr=False)

    def label(self, name: str) -> str:
        """The name under which an experiment runs here."""
        return _label(name, self.preset)

    def seeds(self, name: str) -> dict[int, Run]:
        """The runs of an experiment by seed, failed ones too."""
        return self.runs.get(self.label(name), {})

    def values(self, name: str, key: str) -> pd.Series:
        """A quantity of an experiment by seed, of the runs that trained and hold it; a ratio of nothing is not held."""
        wanted = (self.label(name), key)
        if wanted not in self.cache:
            read = {s: QUANTITIES[key].read(run) for s, run in self.seeds(name).items() if not run.failed}
            least = 0.0 if QUANTITIES[key].log else -math.inf
            known = {seed: value for seed, value in read.items() if value is not None and least < value < math.inf}
            self.cache[wanted] = pd.Series(known, dtype=float)
        return self.cache[wanted]


@lru_cache(maxsize=4096)
def _label(name: str, preset: str) -> str:
    try:
        return resolve(name, preset)
    except ValueError:  # not of this preset
        return name


def results(preset: str, runs: Path | str | None = None) -> Results:
    """The records of a preset, read again only when one was added, removed or changed.

    Raises ValueError for an unknown preset.
    """
    store = Runs(runs)
    sums = sorted((store.folder / find_preset(preset).name).glob(f"*/*/{SUMS}"))
    return _read(preset, store, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in sums))


@lru_cache(maxsize=4)
def _read(preset: str, store: Runs, state: tuple[tuple[Path, int, int], ...]) -> Results:
    """state: each record's digests, when they were written and how large they are."""
    by_name: dict[str, dict[int, Run]] = {}
    unjudged = []
    current = [
        (entry.experiment, entry.seed, entry.record)
        for entry in store.entries(preset)
        if entry.record is not None and entry.status != "stale"
    ]
    texts = Counter(_text(record) for _, _, record in current)
    usual = {name: text for (name, text), _ in reversed(texts.most_common())}  # runs are paired: on one text each
    for name, seed, record in current:
        corpus, text = _text(record)
        known = ledgers(later=experiment(name).section == AFTER_PAPER)
        if record.provenance.get("ledger", known[0]) in known and text == usual[corpus]:
            by_name.setdefault(name, {})[seed] = Run(record)
        else:
            unjudged.append(f"{name}/{seed}")
    return Results(preset, by_name, tuple(unjudged), FEWEST.get(preset, Results.least))


def _text(record: Record) -> tuple[str, str]:
    """The name and the hash of the text that a record was made on."""
    made_on = record.config["corpus"]
    return made_on["name"], made_on["sha256"]
