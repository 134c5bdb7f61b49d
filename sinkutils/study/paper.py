"""The numbers that the paper prints: data/paper, read as it stands."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache

from sinkutils.paths import PAPER


@dataclass(frozen=True)
class PaperRow:
    """One row of a table or figure of the paper. Cells lost in its text are absent from `values`."""

    item: str
    row: str
    experiment: str  # "base" stands for the base of the preset at hand
    values: dict[str, float]
    note: str


@lru_cache
def paper_rows() -> tuple[PaperRow, ...]:
    """The paper's pre-training numbers, in its order."""
    rows = []
    with open(PAPER / "pretraining.csv", newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            values = {k: float(v) for k, v in cells.items() if v and k.startswith(("sink_", "valid_"))}
            rows.append(PaperRow(cells["item"], cells["row"], cells["experiment"], values, cells["note"]))
    return tuple(rows)
