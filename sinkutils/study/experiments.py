"""The study: every row of every pre-training table and figure, and the fine-tunings, at every
scale.

The table is data/experiments.yaml. An experiment is what it changes: dotted paths into `RunConfig`
and values. A preset is a scale; `grid` joins them. The paper's values stand beside the names in
data/paper/pretraining.csv.

Learning rates, steps, batch sizes, windows, d_a and data amounts scale with the preset (`scaled`).
All else is as printed: weight decay, prefix, positions, alpha, p, m and numbers of heads. The
warm-up stays the preset's.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sinkutils.checks import choice
from sinkutils.paths import LEDGER, PAPER, read_csv, read_yaml
from sinkutils.study.config import Json, RunConfig
from sinkutils.study.presets import Preset

AFTER_PAPER = "8"  # what came after the paper, which has seven sections: data/paper/after_paper.csv
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)
USUAL_PRESETS = ("smoke", "minute", "laptop", "desk", "gpu", "paper")


def scaled(value: Any, old: Any, run: RunConfig, scale: Preset) -> Any:
    """The value of a change at a preset: {"times": 2} is twice the base's; what is not in braces
    stays as it is.

    {"times": 1/4, "of": "context"} is a quarter of that, and at most the base's value where it has
    one. Whole numbers stay whole. old, run: the base's value, and the base.
    """
    if not isinstance(value, dict):
        return tuple(value) if isinstance(value, list) else value
    of, context = value.get("of"), run.model.context_length
    what = {
        None: old,
        "context": context,
        "head_dim": run.model.head_dim,
        "step_tokens": (old or 0)
        * context,  # by a context, the batch size that has as many tokens as the base's
        "four_epochs": scale.four_epochs,
        "minus_log_context": -math.log(context),
    }[of]
    result = float(Fraction(value["times"])) * what
    if isinstance(what, int):
        result = max(1, int(result + 0.5))
    return min(result, old) if of == "context" and old else result


@dataclass(frozen=True)
class Experiment:
    """One run of the study as the difference from its base."""

    name: str
    section: str  # 4 to 7, C or D for what stands in that appendix alone, 8 for what came after the paper
    title: str
    change: Json = field(default_factory=dict, hash=False)  # dotted path into the config -> value
    base: bool = True  # changes the preset's base experiment; False: the preset itself
    weights: int = 0  # of how many seeds the weights are kept at small presets: for a notebook 1, for a claim 3
    seeds: int = 3  # how many a sweep trains, from 0; no verdict rests on fewer than three
    presets: tuple[str, ...] = USUAL_PRESETS
    start: str | None = None  # of a fine-tuning: the experiment whose weights it starts from
    download: bool = False  # needs the network: trained where it is named, not with the rest

    @property
    def rows(self) -> list[dict[str, str]]:
        """The paper's rows of this run, in its order; a cell that is lost in its text is empty."""
        names = (
            (self.name, "base") if self.name == "default" else (self.name,)
        )  # that of the preset at hand
        return [row for row in read_csv(PAPER / "pretraining.csv") if row["experiment"] in names]

    @property
    def item(self) -> str:
        """The first table of the paper that reports this run, else its first figure or section,
        else nothing.
        """
        return min(
            (row["item"] for row in self.rows),
            key=lambda item: not item.startswith("Table"),
            default="",
        )

    @property
    def paper(self) -> dict[str, float]:
        """What the paper reports: sink_1 to sink_4, sink_star (percent), valid_loss; only cells
        that are readable.
        """
        cells = [cell for row in self.rows for cell in row.items()]
        return {
            name: float(cell)
            for name, cell in cells
            if cell and name.startswith(("sink_", "valid_"))
        }


EXPERIMENTS = [
    Experiment(name, group["section"], **fields, presets=tuple(group.get("presets", USUAL_PRESETS)))
    for group in read_yaml(LEDGER / "experiments.yaml")
    for name, fields in group["experiments"].items()
]
BY_NAME = {e.name: e for e in EXPERIMENTS}


def experiments(section: str | None = None) -> list[Experiment]:
    """Every experiment, or those of a section: 4, 5, 6, 7, C, D or 8."""
    if section is not None:
        choice("section", str(section), SECTIONS)
    return [e for e in EXPERIMENTS if section is None or e.section == str(section)]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the names that are close."""
    if name in BY_NAME:
        return BY_NAME[name]
    close = ", ".join(difflib.get_close_matches(name, BY_NAME, n=5, cutoff=0.5))
    hint = f"did you mean {close}? " if close else ""
    raise ValueError(
        f"unknown experiment {name!r}: {hint}`python -m sinkutils list` shows all {len(EXPERIMENTS)}"
    )
