"""What a cache in few bits does to a model: the forecast of a forward pass beside the damage measured.

    python benchmarks/quantisation.py

Writes benchmarks/results/quantisation.csv, a row a model, part (keys or values) and format, and
prints the tables of docs/quantisation.md. The expectation is S in docs/expectations.md. The texts
are 8 natural ones of 64 tokens; Gemma's begin with its BOS.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from scipy.stats import spearmanr

import sinkutils as su
from sinkutils.measuring.peaks import FLOAT16, FORMATS, rounded

RESULTS = Path(__file__).parent / "results" / "quantisation.csv"
REAL = ["smollm2", "gemma-3-270m"]
SMALL = [
    "fixed_1",
    "k_bias",
    "learnable_random_1_unscored",
    "prefix_5",
    "sigmoid",
    "sink_token_default",
    "window_1_4",
]
PARTS = {"k": "key", "v": "value"}


def of_model(name: str) -> list[dict[str, object]]:
    """The rows of one model."""
    real = name in REAL
    model, tokenizer = su.load_lm(name if real else f"laptop/{name}/0")
    bos = name == "gemma-3-270m"
    length = 64 if real else min(64, model.config.context_length)
    ids = su.probe("natural", tokenizer, n=8, length=length, bos=bos)
    report = su.measure(model, ids, bos=bos)
    peaks = report.peaks.groupby("part")[["first", "others"]].max()
    forecast = report.forecast.groupby(["part", "format"])[["zero", "lost_bits"]].mean()
    before = su.surgery.untouched(model, ids).loss
    rows = []
    for part, place in PARTS.items():
        for format in FORMATS:
            row: dict[str, object] = {"model": name, "part": part, "format": format}
            row |= {"sink_1": report.sink(), "loss": before}
            row |= {"zero": forecast.zero[part, format]}
            row |= {"lost_bits": forecast.lost_bits[part, format]}
            for kind in ("first", "others"):
                row[f"largest_{kind}"] = peaks[kind][part]
                row[f"state_{kind}"] = peaks[kind]["h"]
            for leave_out in (False, True):
                change = rounded(format, leave_out_first=leave_out)
                after = su.surgery.edit(model, ids, place, change).loss
                row["damage_others" if leave_out else "damage"] = after - before
            rows.append(row)
    return rows


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for name in REAL + SMALL:
        rows += of_model(name)
        print(name, flush=True)
    table = pd.DataFrame(rows).round(6)
    table.to_csv(RESULTS, index=False)
    four = table[table.format == "int4"]
    for part, group in four.groupby("part"):
        rho = spearmanr(group.zero, group.damage).statistic
        print(f"\n{PARTS[str(part)]}s, 4 bits: rank correlation of forecast and damage {rho:.2f}")
        columns = ["model", "sink_1", "zero", "lost_bits", "damage", "damage_others"]
        print(group[columns].round(3).to_csv(index=False, sep="|"))
    print("\nall formats, nats of loss:")
    print(table.pivot(index="model", columns=["part", "format"], values="damage").round(4))
    largest = table.groupby("model")[
        ["state_first", "state_others", "largest_first", "largest_others"]
    ].max()
    print(f"\nlargest numbers (float16 ends at {FLOAT16:.0f}):\n{largest.round(1)}")


if __name__ == "__main__":
    main()
