"""The ledger: the paper's conclusions, each with its evidence and a verdict at a preset.

A claim is reproduced if all its checks hold, not reproduced if none of its core checks does at any seed, partly
otherwise (`evidence.judge`; the thresholds and their reasons stand in `evidence`, the criteria of "not visible" in
`gates`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sinkutils.ledger.conclusions import CLAIMS, Claim
from sinkutils.ledger.evidence import NOT_VISIBLE, QUANTITIES, Results, as_text, judge
from sinkutils.study.grid import experiment
from sinkutils.training.trainer import one_thread

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("id", "source", "claim", "paper", "ours", "interval", "verdict", "why")


def claims(preset: str = "laptop", runs: Path | str | None = None) -> pd.DataFrame:
    """The ledger at a preset: a row a claim, columns COLUMNS, all text.

    interval: least to greatest over seeds, where an experiment has several. why: the reason of a verdict other than
    reproduced. Raises ValueError for an unknown preset.
    """
    import pandas as pd

    results = Results(preset, runs)
    return pd.DataFrame([_row(claim, results) for claim in CLAIMS], columns=list(COLUMNS))


def verdict(id: str, preset: str = "laptop", runs: Path | str | None = None) -> str:
    """One claim's verdict as a line for a notebook. Raises ValueError for an unknown id."""
    found = next((claim for claim in CLAIMS if claim.id == id), None)
    if found is None:
        raise ValueError(f"id must be one of {', '.join(claim.id for claim in CLAIMS)}; got {id!r}")
    row = _row(found, Results(preset, runs))
    ours = row["ours"] + (f"; over seeds: {row['interval']}" if row["interval"] else "")
    evidence = f"paper: {row['paper']}" + (f" | ours: {ours}" if ours else "")
    reason = "" if row["verdict"] == "reproduced" else f" [{row['why']}]"
    return f"{row['verdict'].capitalize()}: {row['claim']} ({evidence}){reason}"


def _row(claim: Claim, results: Results) -> dict[str, str]:
    stopped = claim.gate(results) if claim.gate else None
    if stopped and stopped[0] == NOT_VISIBLE and not any(results.all_records(name) for name in claim.needs):
        checks = []  # nothing to show beside the reason
    else:
        with one_thread(torch.device("cpu")):  # the trials are too small for several
            checks = claim.predicate(results)
    result, why = stopped or judge(checks)
    return {
        "id": claim.id,
        "source": claim.source,
        "claim": claim.text,
        "paper": claim.paper or reported(claim.needs, claim.keys),
        "ours": as_text(fact for check in checks for fact in check.facts),
        "interval": results.intervals(claim.needs, claim.keys),
        "verdict": result,
        "why": why,
    }


def reported(names: tuple[str, ...], keys: tuple[str, ...]) -> str:
    """The paper's figures for experiments, by quantity."""
    facts = []
    for key in keys:
        for name in names:
            paper = experiment("default" if name == "base" else name).paper
            if key in paper:
                facts.append((QUANTITIES[key][0], f"{'default' if name == 'base' else name} {paper[key]:.2f}"))
    return as_text(facts)
