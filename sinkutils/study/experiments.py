"""The study: every row of every pre-training table and figure, and the fine-tunings, at every scale.

The table is data/experiments.yaml. An experiment is what it changes: dotted paths into `RunConfig` and values. A preset
is a scale; `grid` joins them. The paper's values stand beside the names in data/paper/pretraining.csv.

Learning rates, steps, batch sizes, windows, d_a and data amounts scale with the preset (`SCALED`). All else is as
printed: weight decay, prefix, positions, alpha, p, m and numbers of heads. The warm-up stays the preset's.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import yaml

from sinkutils import paths
from sinkutils.checks import choice
from sinkutils.study.config import RunConfig
from sinkutils.study.paper import PaperRow, paper_rows
from sinkutils.study.presets import Preset

AFTER_PAPER = "8"  # what came after the paper, which has seven sections: data/paper/after_paper.csv
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)
USUAL_PRESETS = ("smoke", "minute", "laptop", "desk", "gpu", "paper")

# A value that depends on the preset: of its argument, the base's value, the base's run, and the preset.
SCALED = {
    "times": lambda factor, old, run, scale: _whole(factor * old) if isinstance(old, int) else factor * old,
    "of_context": lambda share, old, run, scale: _whole(share * run.model.context_length),
    "of_context_at_most": lambda share, old, run, scale: min(_whole(share * run.model.context_length), old),
    "of_head_dim": lambda share, old, run, scale: _whole(share * run.model.head_dim),
    # of the text of which the preset's run makes four passes, as the paper's 20B tokens do of 5B
    "of_four_epochs": lambda share, old, run, scale: share * scale.four_epochs,
    # the batch size that makes a step as many tokens as the base's, at another context length
    "same_tokens": lambda context, old, run, scale: _whole(old * run.model.context_length / context),
    "minus_log_context": lambda factor, old, run, scale: -factor * math.log(run.model.context_length),
}


def scaled(value: Any, old: Any, run: RunConfig, scale: Preset) -> Any:
    """The value of a change at a preset: {"times": 2} becomes twice the base's; anything else stays as it is."""
    if not isinstance(value, dict):
        return tuple(value) if isinstance(value, list) else value
    ((name, argument),) = value.items()
    return SCALED[name](float(Fraction(argument)), old, run, scale)


def _whole(value: float) -> int:
    return max(1, int(value + 0.5))


@dataclass(frozen=True)
class Experiment:
    """One run of the study as the difference from its base."""

    name: str
    section: str  # 4 to 7, C or D for what stands in that appendix alone, 8 for what came after the paper
    title: str
    change: dict[str, Any] = field(default_factory=dict, hash=False)  # dotted path into the config -> value
    base: bool = True  # changes the preset's base experiment; False: the preset itself
    weights: int = 0  # of how many seeds the weights are kept at small presets: for a notebook 1, for a claim 3
    seeds: int = 3  # how many a sweep trains, from 0; no verdict rests on fewer than three
    presets: tuple[str, ...] = USUAL_PRESETS
    start: str | None = None  # of a fine-tuning: the experiment whose weights it starts from
    download: bool = False  # needs the network: trained where it is named, not with the rest

    @property
    def rows(self) -> list[PaperRow]:
        """The paper's rows of this run."""
        names = (self.name, "base") if self.name == "default" else (self.name,)
        return [row for row in paper_rows() if row.experiment in names]

    @property
    def item(self) -> str:
        """The first table of the paper that reports this run, else its first figure or section, else nothing."""
        return min((row.item for row in self.rows), key=lambda item: not item.startswith("Table"), default="")

    @property
    def paper(self) -> dict[str, float]:
        """What the paper reports: sink_1 to sink_4, sink_star (percent), valid_loss; only cells that are readable."""
        return {k: v for row in self.rows for k, v in row.values.items()}


def _read() -> tuple[Experiment, ...]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
    found = []
    for group in yaml.load((paths.LEDGER / "experiments.yaml").read_text(encoding="utf-8"), loader):
        presets = tuple(group.get("presets", USUAL_PRESETS))
        for name, fields in group["experiments"].items():
            found.append(Experiment(name, group["section"], **fields, presets=presets))
    return tuple(found)


EXPERIMENTS = _read()
BY_NAME = {e.name: e for e in EXPERIMENTS}


def experiments(section: str | None = None) -> list[Experiment]:
    """Every experiment, or those of a section: 4, 5, 6, 7, C, D or 8."""
    if section is None:
        return list(EXPERIMENTS)
    choice("section", str(section), SECTIONS)
    return [e for e in EXPERIMENTS if e.section == str(section)]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the names that are close."""
    if name in BY_NAME:
        return BY_NAME[name]
    close = difflib.get_close_matches(name, [e.name for e in EXPERIMENTS], n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise ValueError(f"unknown experiment {name!r}: {hint}`python -m sinkutils list` shows all {len(EXPERIMENTS)}")
