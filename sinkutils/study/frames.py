"""The records of a preset as tidy frames: one row per run, per block, per head, or per evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.study.experiments import BY_NAME
from sinkutils.study.record import Record
from sinkutils.study.store import Runs

SINKS = ("sink_1", "sink_2", "sink_3", "sink_4", "sink_star")
FINAL = (*SINKS, "excess_1", "excess_star", "valid_loss", "train_loss")


def runs(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per record of a preset, sorted by experiment and seed.

    sink_k: Sink_k at epsilon 0.3, in percent. excess_1, excess_star: (alpha - u) / (1 - u), mean over blocks and heads,
    with u that of uniform causal attention; block_1 and later_blocks: excess_1 in block 1 and its mean over blocks 2
    to L. Losses in nats per token. element, element_block_1: the largest element of h_1 over the median of all hidden
    states, its maximum over blocks, and after block 1. status: done; failed (training diverged: `reason`); stale (the
    experiment has another config now); corrupt (`reason` names the file). Only done and failed are results.
    """
    rows = []
    for entry in Runs(folder).entries(preset):
        row = {"preset": preset, "experiment": entry.experiment, "seed": entry.seed}
        row |= {"status": entry.status, "reason": entry.reason}
        known = BY_NAME.get(entry.experiment)
        if known is not None:
            row |= {"title": known.title, "section": known.section, "item": known.item}
        if entry.record is not None:
            row |= _of_run(entry.record)
        rows.append(row)
    columns = ["preset", "experiment", "seed", "status", "reason", "title", "section", "item", *SINKS]
    return pd.DataFrame(rows, columns=None if rows else columns)


records = runs


def blocks(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per run and block, of runs that are done: what x_1 looks like and what attention it gets.

    excess_k, excess_star: means over heads, of the first ten tokens and of a key of its own. element: the largest
    element of h_1 over the median of all hidden states. hidden_ratio, key_ratio, value_ratio: the norm of x_1's state,
    key or value over the mean of the other tokens'.
    """
    rows = []
    for start, record, report in _done(preset, folder):
        excess = {f"excess_{k}": _excess(record, alpha, k) for k, alpha in enumerate(report["alpha"], start=1)}
        if report.get("alpha_star"):
            excess["excess_star"] = _excess(record, report["alpha_star"], "star")
        for block in range(len(report["alpha"][0])):
            row = start | {"block": block + 1}
            row |= {name: values[block].mean() for name, values in excess.items()}
            if "hidden_peaks" in report:
                row["element"] = report["hidden_peaks"][block][0]
            for name in ("hidden", "key", "value"):
                first, *others = report[f"{name}_norms"][block]
                others = np.mean(others) if others else 0
                row[f"{name}_ratio"] = first / others if others else np.nan  # a gate can shut all values off
            rows.append(row)
    return pd.DataFrame(rows)


def heads(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per run, block and head, of runs that are done: alpha_1 and alpha_star (mean over texts), and excess."""
    rows = []
    for start, record, report in _done(preset, folder):
        excess = _excess(record, report["alpha"][0])
        for block, head in np.ndindex(excess.shape):
            row = start | {"block": block + 1, "head": head + 1, "alpha_1": report["alpha"][0][block][head]}
            if report.get("alpha_star"):
                row["alpha_star"] = report["alpha_star"][block][head]
            rows.append(row | {"excess_1": excess[block, head]})
    return pd.DataFrame(rows)


def curves(preset: str = "laptop", folder: Path | str | None = None) -> pd.DataFrame:
    """One row per run and evaluation: step, tokens seen, losses, sink_k and excess_1, of every run that has a curve."""
    rows = []
    for entry in Runs(folder).entries(preset):
        if entry.record is None or entry.status not in ("done", "failed"):
            continue
        config = entry.record.config
        per_step = config["train"]["batch_size"] * config["model"]["context_length"]
        for point in entry.record.metrics["curve"]:
            numbers = {name: value for name, value in point.items() if isinstance(value, int | float)}
            start = {"experiment": entry.experiment, "seed": entry.seed, "tokens": point["step"] * per_step}
            rows.append(start | numbers)
    return pd.DataFrame(rows)


def _of_run(record: Record) -> dict[str, Any]:
    config, final = record.config, record.metrics["final"]
    row = {name: final.get(name) for name in FINAL}
    report = final.get("report")
    if report is not None:
        excess = _excess(record, report["alpha"][0]).mean(axis=1)
        row |= {"block_1": excess[0], "later_blocks": excess[1:].mean() if len(excess) > 1 else None}
        if "hidden_peaks" in report:
            elements = [block[0] for block in report["hidden_peaks"]]
            row |= {"element": max(elements), "element_block_1": elements[0]}
    row |= {name: config["train"][name] for name in ("learning_rate", "weight_decay", "batch_size")}
    corpus = config["corpus"]
    row |= {"steps": final.get("step"), "corpus": f"{corpus['name']} {corpus['sha256'][:8]}".strip()}
    return row | {"recipe": config["recipe"], "wall_seconds": record.provenance.get("wall_seconds")}


def _done(preset: str, folder: Path | str | None) -> Iterator[tuple[dict[str, Any], Record, dict[str, Any]]]:
    """Of each run that is done how its rows start, its record, and the report of its last evaluation."""
    for entry in Runs(folder).entries(preset):
        if entry.record is not None and entry.status == "done":
            report = entry.record.metrics["final"]["report"]
            yield {"experiment": entry.experiment, "seed": entry.seed}, entry.record, report


def _excess(record: Record, alpha: Any, k: int | str = 1) -> np.ndarray:
    """(alpha_k - u) / (1 - u): 0 where each query spreads evenly over the keys that it sees, 1 where all is on x_k.

    "star" is a key of its own, which every query sees beside the others.
    """
    length = record.metrics["final"]["report"]["T"]
    queries = np.arange(1 if k == "star" else k, length + 1)
    seen = np.minimum(queries, record.config["model"]["attention"]["window"] or length)
    even = 1 / (seen + 1) if k == "star" else np.where(queries - k < seen, 1 / seen, 0)
    uniform = even.mean()
    return (np.asarray(alpha) - uniform) / (1 - uniform) if uniform < 1 else np.zeros_like(alpha)
