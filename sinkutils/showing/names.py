"""Human names: of an experiment, of an item's rows at our settings and the paper's, of quantities and their symbols.

An experiment is called by its title in the grid, a row by our setting with the paper's in brackets, as
data/paper/items.csv says for each item; no page shows an identifier of code.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sinkutils.ledger.results import Run, results
from sinkutils.paths import PAPER
from sinkutils.study.experiments import AFTER_PAPER, EXPERIMENTS, experiment
from sinkutils.study.grid import config, resolve, unavailable
from sinkutils.study.paper import PaperRow, paper_rows

SUBSCRIPTS = str.maketrans("0123456789ktij", "₀₁₂₃₄₅₆₇₈₉ₖₜᵢⱼ")
SYMBOL = re.compile(r"\b(alpha|Sink|x|h|k|v|p|A|q)_(\d+|k|t|j|ti|\*)(?![\w_])")
LONGEST_FIRST = sorted((re.escape(row.name) for row in EXPERIMENTS), key=len, reverse=True)
NAMES = re.compile(rf"(?<![\w.-])({'|'.join(LONGEST_FIRST)})(?![\w-])(?!\.\d)")
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
    """What an experiment is called at a preset, "the base" for its base, unless that is this preset's alone (1B).

    Raises ValueError for an unknown one.
    """
    base = resolve("base", preset)
    return "the base" if name in ("base", base) and len(experiment(base).presets) > 1 else title(name)


def title(name: str) -> str:
    """What an experiment is called wherever it is; "base" is the paper's default."""
    return experiment("default" if name == "base" else name).title.replace(" x ", " × ").replace("alpha", "α")


def model(name: str, preset: str = "laptop") -> str:
    """What a model of ours is called, by its experiment or the name of its record."""
    called = human(name, preset)
    if called.startswith("the "):
        return called
    return f"the model with {'a ' if called.startswith(('prefix', 'window')) else ''}{called}"


def is_experiment(name: str) -> bool:
    """Whether this is the identifier of an experiment."""
    return bool(NAMES.fullmatch(name))


def human(text: str, preset: str | None = None) -> str:
    """A line of the ledger with its symbols as one writes them and, given the preset, experiments by their names."""

    def called(match: re.Match[str]) -> str:
        if preset is None:  # a word such as "default" may stand for itself
            return title(match[1]) if "_" in match[1] else match[1]
        return of(match[1], preset)

    text = NAMES.sub(called, text)
    for pattern, words in WORDS.items():
        text = re.sub(pattern, words, text)
    text = SYMBOL.sub(lambda match: match[1] + match[2].translate(SUBSCRIPTS), text)
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

    def values(self, read: Callable[[Run], Any]) -> list[Any]:
        """What is read of each run that trained and holds it."""
        return [value for run in self.trained.values() if (value := read(run)) is not None]

    def final(self, key: str) -> list[float]:
        """A final value, such as sink_1, of each run that trained and has it."""
        return self.values(lambda run: run.final.get(key))

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
def about() -> dict[str, dict[str, str]]:
    """By item: `axis`, what its rows differ in; `ours`, how our setting is written; `ordered`, "yes" where its rows are
    steps of one quantity, which are drawn in sequential colours.
    """
    with open(PAPER / "items.csv", newline="", encoding="utf-8") as file:
        return {row["item"]: row for row in csv.DictReader(file)}


def label(row: PaperRow, preset: str) -> str:
    """Our setting of a row, with the paper's in brackets where that is another."""
    pattern = about()[row.item]["ours"]
    try:
        run = config(row.experiment, preset)
    except ValueError:  # not of this preset
        return row.row
    ours = pattern.format(run=run, tokens=run.train.batch_size * run.model.context_length) if pattern else row.row
    ours = ours.replace("w = None", "no window")
    return ours if ours == row.row else f"{ours} ({row.row})"


def rows(item: str, preset: str = "laptop") -> list[Row]:
    """The rows of an item in the paper's order, with the records of ours that the ledger judges.

    Rows that are one run at this preset (d_a = 1 and 2 of a small head) are one row. Raises ValueError for an unknown
    item or preset.
    """
    return _once(printed(item, preset))


def printed(item: str, preset: str = "laptop", runs: Path | str | None = None) -> list[Row]:
    """`rows`, each that the paper prints, though two may be one run here."""
    return named([(row, label(row, preset)) for row in paper_rows(item)], preset, runs)


def every(preset: str = "laptop") -> list[Row]:
    """The base and every experiment of the paper that changes it and is measured at its length, a row each."""
    base, refused, changes = resolve("base", preset), unavailable(preset), []
    length = config("base", preset).train.eval_length
    for row in EXPERIMENTS:
        changed = row.section not in (AFTER_PAPER, "D") and (row.base or row.name == base) and row.name not in refused
        if changed and config(row.name, preset).train.eval_length == length:
            name = resolve(row.name, preset)
            changes.append((PaperRow("", title(name), name, row.paper, ""), title(name)))
    return _once(named(changes, preset))


def named(rows: Iterable[tuple[PaperRow, str]], preset: str, runs: Path | str | None = None) -> list[Row]:
    """Rows of the paper and their labels with the records of ours that the ledger judges."""
    ours, base, named_rows = results(preset, runs), resolve("base", preset), []
    for paper, words in rows:
        try:
            name = resolve(paper.experiment, preset)
        except ValueError:  # not of this preset
            name = ""
        named_rows.append(Row(paper, words, name, ours.seeds(name), name == base))
    return named_rows


def _once(rows: list[Row]) -> list[Row]:
    first = {row.experiment or row.paper.experiment: row for row in reversed(rows)}
    return [row for row in rows if row is first[row.experiment or row.paper.experiment]]
