"""Human names: of an experiment, of an item's rows at our settings and the paper's, of quantities and their symbols.

An experiment is called by its title in the grid, a row by our setting with the paper's in brackets, as
data/paper/items.csv says for each item; no page shows an identifier of code.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sinkutils.ledger.results import Run, results
from sinkutils.paths import PAPER
from sinkutils.study.config import RunConfig
from sinkutils.study.experiments import AFTER_PAPER, EXPERIMENTS, experiment
from sinkutils.study.grid import config, resolve, unavailable
from sinkutils.study.paper import PaperRow, paper_rows

SUBSCRIPTS = str.maketrans("0123456789ktij", "₀₁₂₃₄₅₆₇₈₉ₖₜᵢⱼ")
SYMBOL = re.compile(r"\b(alpha|Sink|x|h|k|v|p|A|q)_(\d+|k|t|\*)(?![\w_])")
NAMES = re.compile(rf"(?<![\w.-])({'|'.join(sorted((re.escape(e.name) for e in EXPERIMENTS), key=len, reverse=True))})"
                   r"(?![\w-])(?!\.\d)")  # fmt: skip
WORDS = {
    r"\beps\b": "ε",
    "excess alpha": "excess of alpha",
    "valid[ _]loss": "validation loss",
    r"\bsink_star\b": "Sink*",
    r"\bsink_(?=\d)": "Sink_",
    "norm_product": "norm product",
    r"(python -m sinkutils[^;`]*[^;`.])": r"`\1`",
}


def of(name: str, preset: str = "laptop") -> str:
    """What an experiment is called at a preset, "the base" for its base. Raises ValueError for an unknown one."""
    return "the base" if name in ("base", resolve("base", preset)) else title(name)


def title(name: str) -> str:
    """What an experiment is called wherever it is; "base" is the paper's default."""
    return experiment("default" if name == "base" else name).title.replace(" x ", " × ").replace("alpha", "α")


def is_experiment(name: str) -> bool:
    """Whether this is the identifier of an experiment."""
    return bool(NAMES.fullmatch(name))


def human(text: str, preset: str | None = None) -> str:
    """A line of the ledger with its symbols as one writes them and, given the preset, experiments by their names."""
    if preset is None:  # a word such as "default" may stand for itself
        text = NAMES.sub(lambda found: title(found[1]) if "_" in found[1] else found[1], text)
    else:
        text = NAMES.sub(lambda found: of(found[1], preset), text)
    for pattern, words in WORDS.items():
        text = re.sub(pattern, words, text)
    text = SYMBOL.sub(lambda found: found[1] + found[2].translate(SUBSCRIPTS), text)
    return re.sub(r"\balpha\b(?! =)|\balpha(?=[₀-₉ₖ*])", "α", text)


@dataclass(frozen=True)
class Row:
    """A row of an item: the paper's, its label on an axis, and our runs of it by seed."""

    paper: PaperRow
    label: str  # our setting, the paper's in brackets where that is another
    experiment: str  # the run's name at the preset; "" where the preset cannot hold it
    runs: dict[int, Run]
    base: bool

    @property
    def short(self) -> str:
        """The label without the paper's setting."""
        return self.label.removesuffix(f" ({self.paper.row})")

    @property
    def trained(self) -> dict[int, Run]:
        """The runs that did not fail."""
        return {seed: run for seed, run in self.runs.items() if not run.failed}

    @property
    def state(self) -> str:
        """What there is of ours: "" if something trained, else why nothing is shown."""
        if self.trained:
            return ""
        return "training failed" if self.runs else "not run yet" if self.experiment else "not at this scale"


@lru_cache
def _items() -> dict[str, dict[str, str]]:
    with open(PAPER / "items.csv", newline="", encoding="utf-8") as file:
        return {row["item"]: row for row in csv.DictReader(file)}


def axis(item: str) -> str:
    """What the rows of an item differ in."""
    return _items()[item]["axis"]


def ordered(item: str) -> bool:
    """Whether the rows of an item are steps of one quantity, which are drawn in sequential colours."""
    return bool(_items()[item]["ordered"])


def label(row: PaperRow, preset: str) -> str:
    """Our setting of a row, with the paper's in brackets where that is another."""
    pattern = _items()[row.item]["ours"]
    try:
        ours = _setting(pattern, config(row.experiment, preset)) if pattern else row.row
    except ValueError:  # not of this preset
        return row.row
    return ours if ours == row.row else f"{ours} ({row.row})"


def _setting(pattern: str, run: RunConfig) -> str:
    tokens = run.train.batch_size * run.model.context_length
    return pattern.format(run=run, tokens=tokens).replace("w = None", "no window")


def rows(item: str, preset: str = "laptop", runs: Path | str | None = None) -> list[Row]:
    """The rows of an item in the paper's order, with the records of ours that the ledger judges.

    Rows that are one run at this preset (d_a = 1 and 2 of a small head) are one row. Raises ValueError for an unknown
    item or preset.
    """
    ours, found, base = results(preset, runs), dict[str, Row](), resolve("base", preset)
    for row in paper_rows(item):
        try:
            name = resolve(row.experiment, preset)
        except ValueError:
            name = ""
        found.setdefault(name or row.experiment, Row(row, label(row, preset), name, ours.seeds(name), name == base))
    return list(found.values())


def every(preset: str = "laptop", runs: Path | str | None = None) -> list[Row]:
    """The base and every experiment of the paper that changes it and is measured at its length, a row each."""
    ours, base, found = results(preset, runs), resolve("base", preset), dict[str, Row]()
    length = config("base", preset).train.eval_length
    for one in EXPERIMENTS:
        if one.section in (AFTER_PAPER, "D") or not (one.base or one.name == base) or one.name in unavailable(preset):
            continue
        if config(one.name, preset).train.eval_length == length:
            name = resolve(one.name, preset)
            paper = PaperRow("", title(name), name, one.paper, "")
            found.setdefault(name, Row(paper, paper.row, name, ours.seeds(name), name == base))
    return list(found.values())
