"""Records as tables: every run of a preset, and any item of the paper with its numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinkutils.ledger.results import EPSILON, Results, Run, sink
from sinkutils.ledger.rules import BASE, SINK
from sinkutils.measuring.report import Report
from sinkutils.model.decoder import TransformerLM
from sinkutils.showing.names import Row, human, printed
from sinkutils.study.config import RunConfig
from sinkutils.study.experiments import EXPERIMENTS
from sinkutils.study.grid import config, largest_alpha
from sinkutils.study.store import Entry, Runs

SINKS = ("sink_1", "sink_2", "sink_3", "sink_4", "sink_star")
VALUES = (*SINKS, "valid_loss")
EXCESS = ("excess_1", "excess_star")  # means of (alpha - u) / (1 - u), u that of uniform attention
NUMERIC = ("steps", *SINKS, *EXCESS, "valid_loss", "train_loss", "wall_seconds")
COLUMNS = ("preset", "experiment", "seed", "status", "reason", "corpus", "recipe", *NUMERIC, "section", "item")
HEADINGS = dict(zip(VALUES, ("Sink₁ %", "Sink₂ %", "Sink₃ %", "Sink₄ %", "Sink* %", "validation loss"), strict=True))


def records(preset: str = "laptop", runs: Path | str | None = None) -> pd.DataFrame:
    """Every record of a preset, a row each, sorted by experiment and seed; columns COLUMNS.

    status: done; failed (training diverged: `reason`); stale (its config is no longer that of the experiment); corrupt
    (a file is missing or changed: `reason` names it, and a warning is given). The first two count as results. corpus:
    name and short hash of the text. Runs on another text than the preset's are tables of their own: preset
    "laptop@path-mine-0123abcd", as their folder is named.
    """
    rows = [{"preset": preset} | _row(entry) for entry in Runs(runs).entries(preset)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({**dict.fromkeys(NUMERIC, float), "recipe": "Int64"})


def paper_beside_ours(item: str, preset: str = "laptop", runs: Path | str | None = None) -> pd.DataFrame:
    """An item of the paper ("Table 4", "Figure 6 right"): its rows in its order, with our numbers beside the paper's.

    For each value that the item or our records have: `<value>_paper`, and ours over the seeds that are done as
    `<value>`, `<value>_low` and `<value>_high` (mean, least, greatest). NaN where the paper's cell is lost or empty,
    and where ours is not run. `label` is our setting with the paper's in brackets; `paper` and `ours` say done, failed
    or not run; `seeds` counts ours. Raises ValueError, listing what there is, for an unknown item or preset.
    """
    table = pd.DataFrame([{"item": item} | _beside(row, preset) for row in printed(item, preset, runs)])
    hidden = []
    for value in VALUES:
        ours = value == "sink_star" and table[value].notna().any()  # few models have it
        if value not in ("sink_1", "valid_loss") and not ours and table[f"{value}_paper"].isna().all():
            hidden += [f"{value}_paper", value, f"{value}_low", f"{value}_high"]
    return table.drop(columns=hidden)


def plain(table: pd.DataFrame, digits: int = 2) -> pd.DataFrame:
    """What `paper_beside_ours` gives as text for people, rounded.

    A cell of ours is a mean, with the range over the seeds where there are several; "-": not run; empty: no number.
    """
    text, rows = pd.DataFrame(index=pd.Index(table["label"], name="")), table.to_dict("records")
    for value, heading in HEADINGS.items():
        if value in table:
            printed = [_number(row[f"{value}_paper"], digits) for row in rows]
            text[f"{heading}, paper"] = np.where(table["paper"] == "failed", "failed", printed)
            text[f"{heading}, ours"] = [_ours(row, value, digits) for row in rows]
    return text.assign(note=[human(note) for note in table["note"]])


def _row(entry: Entry) -> dict[str, Any]:
    """One row of `records`."""
    row: dict[str, Any] = {key: getattr(entry, key) for key in ("experiment", "seed", "status", "reason")}
    if entry.record is None:
        return row
    run, final = entry.record.config, entry.record.metrics["final"]
    row |= {key: final.get(key) for key in (*SINKS, *EXCESS, "valid_loss", "train_loss")} | {"steps": final.get("step")}
    row |= {"wall_seconds": entry.record.provenance.get("wall_seconds"), "recipe": run["recipe"]}
    corpus = run.get("corpus")
    row["corpus"] = corpus and f"{corpus['name']} {corpus['sha256'][:8]}"
    known = next((known for known in EXPERIMENTS if known.name == entry.experiment), None)
    return row | ({"section": known.section, "item": known.item} if known else {})


def _beside(row: Row, preset: str) -> dict[str, Any]:
    """One row of `paper_beside_ours`."""
    paper, seeds = row.paper, len(row.trained)
    cells: dict[str, Any] = {"row": paper.row, "label": row.label, "experiment": row.experiment, "seeds": seeds}
    cells["paper"] = "failed" if paper.note == "failed" else "done" if paper.values else ""
    cells["ours"] = "done" if seeds else "failed" if row.runs else "not run"
    note = [] if paper.note == "failed" else [paper.note]
    if 0 < seeds < len(row.runs):
        note.append(f"{len(row.runs) - seeds} of our {len(row.runs)} runs failed")
    largest = largest_alpha(config(paper.experiment, preset)) if row.experiment else 1.0
    if largest <= EPSILON:
        note.append(f"at this scale the window keeps α₁ at or below {largest:.2g}: no sink can be measured")
    if not row.experiment:
        note.append("not of this preset")
    for value in VALUES:
        numbers = pd.Series(row.final(value), dtype=float).dropna()
        cells[f"{value}_paper"] = paper.values.get(value, math.nan)
        cells |= {value: numbers.mean(), f"{value}_low": numbers.min(), f"{value}_high": numbers.max()}
    return cells | {"note": "; ".join(filter(None, note))}


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _ours(row: Mapping[str, Any], value: str, digits: int) -> str:
    if row["ours"] != "done":
        return "failed" if row["ours"] == "failed" else "-"
    mean, low, high = (_number(row[key], digits) for key in (value, f"{value}_low", f"{value}_high"))
    return mean if row["seeds"] == 1 or not mean else f"{mean} ({low} to {high})"


def sinks_by_position(rows: Sequence[Row], eps: float = EPSILON) -> pd.DataFrame:
    """Sink_k^eps in percent for every recorded position k, a row a setting, mean over its seeds; NaN without any."""
    means = {}
    for row in rows:
        seeds = pd.DataFrame(run.report.get("sink", {}) for run in row.trained.values())
        means[row.label] = seeds.map(lambda by_eps: by_eps[str(eps)], na_action="ignore").rename(columns=int).mean()
    return pd.DataFrame(means).T.sort_index(axis=1)


def norm_ratios(rows: Sequence[Row], key: str = "hidden_norms") -> dict[str, list[float] | str]:
    """||h_1^l|| over the mean of the others' norms by block but the last (Figs. 7, 8, 29), mean over a row's seeds, or
    why there is none.

    key: the norms in the report, such as "before_norm_norms" of a post-norm model.
    """
    ratios: dict[str, list[float] | str] = {}
    for row in rows:
        reports = [run.report for run in row.trained.values() if key in run.report]
        seeds = [Report.from_dict(report).norm_ratio(key) for report in reports]
        ratios[row.label] = np.mean(seeds, axis=0).tolist() if seeds else row.state or "not measured"
    return ratios


def means_and_thresholds(rows: Sequence[Row]) -> pd.DataFrame:
    """Mean alpha_1 and Sink_1 of each row that trained, over its seeds (Section 3.2: what a threshold keeps of a mean).

    Columns label, alpha, sink, base, hidden: Sink_1 under 1 % though alpha_1 is over twice that of even attention.
    """
    cells = []
    for row in rows:
        reports = [run.report for run in row.trained.values() if "alpha" in run.report]
        if reports:
            alpha, share = np.mean([report["alpha"][0] for report in reports]), np.mean(row.values(sink))
            cells.append((row.label, alpha, share, row.base, share < 1 and alpha > 2 * reports[0]["floor"]))
    table = pd.DataFrame(cells, columns=["label", "alpha", "sink", "base", "hidden"])
    return table.astype({"base": bool, "hidden": bool})


def destinations(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, dict[str, float]]:
    """Where attention goes in runs, by label and seed: its shares by kind of key, mean over layers, heads and seeds.

    Of runs without k* or x* what their rows do not sum to has no key, and is left out.
    """
    shares: dict[str, dict[str, float]] = {}
    for name, seeds in runs.items():
        kept = [run for run in seeds.values() if run.final.get("destinations")]
        for kind in kept[0].final["destinations"] if kept else ():
            if kind != "star" or "sink_star" in kept[0].final:
                mean = float(np.mean([run.final["destinations"][kind] for run in kept]))
                shares.setdefault(name, {})[kind] = mean
    return shares


def without_sink(ours: Results) -> list[str]:
    """The experiments whose mean excess alpha_1 is below what the ledger asks of a sink, a share of the base's, in the
    study's order; none where the base itself has no sink.
    """
    base = ours.values("base", "excess_1").mean()
    if not base > BASE:
        return []
    means = {row.name: ours.values(row.name, "excess_1").mean() for row in EXPERIMENTS if row.name in ours.runs}
    return [name for name, mean in means.items() if mean <= SINK * base]


def sinks_by_text(report: Report, eps: float = EPSILON) -> pd.DataFrame:
    """Share of heads in percent with alpha_k > eps, a row a sequence and a column a position k (Fig. 5 middle)."""
    active = (report.alpha > eps).double().mean(dim=(2, 3))  # (samples, targets)
    return pd.DataFrame(100 * active.numpy(), columns=list(report.targets))


def parameters(run: RunConfig) -> int:
    """How many numbers the model of a run has."""
    with torch.device("meta"):  # takes no memory
        return sum(weight.numel() for weight in TransformerLM(run.model).parameters())
