"""The records of a preset as data frames, with a row per run, block, head or evaluation."""

from __future__ import annotations

import contextlib

import numpy as np
import pandas as pd

from sinkutils.checks import real, require
from sinkutils.measuring.report import excess, norm_ratio, uniform_alpha
from sinkutils.study.config import Json
from sinkutils.study.grid import resolve
from sinkutils.study.record import Folder, Record
from sinkutils.study.store import Runs
from sinkutils.study.tables import Of

SINKS = ("sink_1", "sink_2", "sink_3", "sink_4", "sink_star")
RUN = ("experiment", "seed")
FINAL = (*SINKS, "excess_1", "excess_star", "valid_loss", "train_loss")
COMPARED = (*FINAL, "block_1", "later_blocks", "live", "element", "element_block_1")
EVEN = 0.02  # a mean attention within 2 % of uniform attention counts as even


def runs(preset: str = "laptop", folder: Folder = None) -> pd.DataFrame:
    """One row per record of a preset, sorted by experiment and seed.

    status: done; failed (the training diverged, and `reason` says how); stale (the experiment has
    another config now); corrupt (`reason` names the file). Only done and failed are results.
    sink_k: Sink_k at epsilon 0.3, in percent.
    excess_1, excess_star: (alpha - u) / (1 - u), as a mean over blocks and heads. u is the alpha of
    uniform causal attention.
    block_1, later_blocks: excess_1 in block 1, and its mean over blocks 2 to L.
    live: the share of heads that are not dead (`live_heads`); NaN with a window of one token.
    element: the largest element of h_1, divided by the median of all elements of the hidden states,
    as a maximum over the blocks. element_block_1: the same after block 1.
    valid_loss, train_loss: in nats per token.
    """
    rows = []
    for entry in Runs(folder).entries(preset, run_row):
        row = {"preset": preset, "experiment": entry.experiment, "seed": entry.seed}
        row |= {"status": entry.status, "reason": entry.reason}
        rows.append(row | (entry.value or {}))
    return _frame(rows, "preset", *RUN, "status", "reason", *SINKS)


def blocks(preset: str = "laptop", folder: Folder = None) -> pd.DataFrame:
    """One row per block of each run that is done: the states of x_1 and the attention it gets.

    excess_k: the excess of token k = 1..10, as a mean over heads. excess_star: that of the model's
    own key, if it has one.
    element: the largest element of h_1, divided by the median of all elements of the hidden states.
    live: the share of the block's heads that are not dead (`live_heads`). In a dead block it is 0,
    and the excess of 0 there is no finding.
    hidden_ratio, key_ratio, value_ratio: the norm of x_1's hidden state, key or value, divided by
    the mean norm of the other tokens.
    """
    return _frame(_rows(preset, folder, block_rows, "done"), *RUN, "block", "excess_1")


def heads(preset: str = "laptop", folder: Folder = None) -> pd.DataFrame:
    """One row per head of each run that is done.

    alpha_1 and alpha_star are means over texts. excess_1 is computed from alpha_1, as in `runs`.
    """
    rows = _rows(preset, folder, head_rows, "done")
    return _frame(rows, *RUN, "block", "head", "alpha_1", "excess_1")


def curves(preset: str = "laptop", folder: Folder = None) -> pd.DataFrame:
    """One row per evaluation of each run that is done or failed.

    The columns are the step, the number of tokens seen so far, the losses, sink_k and excess_1.
    """
    rows = _rows(preset, folder, curve_rows, "done", "failed")
    return _frame(rows, *RUN, "tokens", "step", "valid_loss", "sink_1", "excess_1")


def compare_runs(
    a: str, b: str, preset: str = "laptop", folder: Folder = None, level: float = 0.95
) -> pd.DataFrame:
    """The paired difference of two experiments, or variants of your own, over their seeds.

    Two runs with one seed share their batches, and all weights that both models have. So their
    numbers are compared seed by seed, over the seeds of which both runs are done. "base" is the
    preset's base experiment.

    One row per number of `runs`, such as sink_1, excess_1, later_blocks and valid_loss: the means
    `a` and `b`, `difference` (a - b), the ends `low` and `high` of its t interval at this level,
    `p` (two-sided, of no difference), and the number of `seeds`. With one seed there is no
    interval: it is NaN.

    Raises ValueError if the two have no seed in common.
    """
    from scipy.special import stdtr, stdtrit  # imported here: a table needs no SciPy

    real("level", level, "between 0 and 1", more=True)
    require(level < 1, f"level must be between 0 and 1, got {level}")
    table = runs(preset, folder)
    table = table[table.status == "done"]
    done = []
    for name in (a, b):
        with contextlib.suppress(ValueError):  # a name of your own
            name = resolve(name, preset.partition("@")[0])
        rows = table[table.experiment == name].set_index("seed")
        require(
            len(rows) > 0, f"no run of {name!r} is done at {preset!r}: train it, or give folder"
        )
        done.append(rows)
    first, second = done
    seeds = first.index.intersection(second.index)
    require(len(seeds) > 0, f"{a!r} and {b!r} have no seed in common at {preset!r}")
    quantities = [name for name in COMPARED if name in table]
    of_a = first.loc[seeds, quantities].astype(float)
    of_b = second.loc[seeds, quantities].astype(float)
    differences = of_a - of_b
    both = differences.notna()
    n = both.sum()
    mean = differences.mean()
    error = differences.std() / np.sqrt(n)  # NaN for one seed
    reach = error * stdtrit(n - 1, (1 + level) / 2)
    p = 2 * stdtr(n - 1, -abs(mean) / error)
    columns = {"a": of_a[both].mean(), "b": of_b[both].mean(), "difference": mean}
    columns |= {"low": mean - reach, "high": mean + reach}
    columns |= {"p": p.where(error != 0, (mean == 0).astype(float)), "seeds": n}
    return pd.DataFrame(columns)[n > 0].rename_axis("quantity")


def by_block(report: Json, window: int | None) -> dict[str, np.ndarray]:
    """The columns of `blocks` for one report, as arrays of shape (L,).

    For post-norm blocks there is one more, the norm ratio before their last norm.
    """
    targets = [*report["targets"]]
    alphas = [*report["alpha"]]
    if report.get("alpha_star"):
        targets.append("star")
        alphas.append(report["alpha_star"])
    even = np.array([uniform_alpha(report["T"], k, window) for k in targets])
    by_head = excess(np.array(alphas), even[:, None, None])  # (targets, L, H)
    found = {}
    for k, by_layer in zip(targets, by_head.mean(axis=2), strict=True):
        found[f"excess_{k}"] = by_layer
    found["live"] = live_heads(report, window).mean(axis=1)
    if "hidden_peaks" in report:
        peaks = np.array(report["hidden_peaks"])  # (L, T)
        found["element"] = peaks[:, 0]
    if report["T"] == 1:  # no other tokens to compare the norms of x_1 with
        return found
    for name in ("hidden", "key", "value", "before_norm"):
        norms = report.get(f"{name}_norms")  # (L, T)
        if norms:
            ratios = norm_ratio(norms)
            found[f"{name}_ratio"] = np.array(ratios)
    return found


def live_heads(report: Json, window: int | None) -> np.ndarray:
    """1 for each head that is alive, and 0 for each that is dead: (L, H).

    A head is dead if its attention is uniform: |alpha_k / u_k - 1| <= 0.02 for each target k of the
    report, that is, for the first ten keys. u_k is the mean of 1/t over t = k..T. This is what x_k
    gets if each query spreads its attention evenly over the t keys that it sees. With a window of w
    a query sees only the last min(t, w) of these keys, and with a key of the model's own one more.
    The result is NaN if each query sees a single key, since every head must then be uniform.
    """
    own_keys = 1 if report.get("alpha_star") else 0
    alphas = np.array(report["alpha"])  # (targets, L, H)
    if window == 1 and not own_keys:
        return np.full(alphas.shape[1:], np.nan)
    targets = report["targets"]
    even = np.array([uniform_alpha(report["T"], k, window, own_keys) for k in targets])
    distance = abs(alphas / even[:, None, None] - 1)  # (targets, L, H)
    alive: np.ndarray = (distance > EVEN).any(axis=0).astype(float)
    return alive


# ---- the rows of one record, which `study.tables` copies


def run_row(record: Record) -> Json:
    """The values of a row of `runs`, apart from the status."""
    config = record.config
    final = record.metrics["final"]
    row = {name: final.get(name) for name in FINAL}
    if "report" in final:
        found = by_block(final["report"], record.config["model"]["attention"]["window"])
        first, *later = found["excess_1"]
        row["block_1"] = first
        row["later_blocks"] = np.mean(later) if later else None
        row["live"] = found["live"].mean()
        if "element" in found:
            row["element"] = found["element"].max()
            row["element_block_1"] = found["element"][0]
    for name in ("learning_rate", "weight_decay", "batch_size"):
        row[name] = config["train"][name]
    row["steps"] = final.get("step")
    corpus = config["corpus"]
    digest = corpus["sha256"][:8]  # empty if the record was written without the text's hash
    row["corpus"] = f"{corpus['name']} {digest}".strip()
    row["recipe"] = config["recipe"]
    row["wall_seconds"] = record.provenance.get("wall_seconds")
    return row


def block_rows(record: Record) -> list[Json]:
    report = record.metrics["final"].get("report")
    if not report:
        return []
    columns = by_block(report, record.config["model"]["attention"]["window"])
    columns.pop("before_norm_ratio", None)  # only post-norm has it, and only the ledger reads it
    rows = []
    for block, values in enumerate(zip(*columns.values(), strict=True), start=1):
        rows.append({"block": block, **dict(zip(columns, values, strict=True))})
    return rows


def head_rows(record: Record) -> list[Json]:
    report = record.metrics["final"].get("report")
    if not report:
        return []
    alpha = np.array(report["alpha"][0])  # (L, H), alpha_1
    star = report.get("alpha_star")
    excesses = excess(
        alpha, uniform_alpha(report["T"], 1, record.config["model"]["attention"]["window"])
    )
    rows = []
    for block, head in np.ndindex(alpha.shape):
        row = {"block": block + 1, "head": head + 1, "alpha_1": alpha[block, head]}
        if star:
            row["alpha_star"] = star[block][head]
        row["excess_1"] = excesses[block, head]
        rows.append(row)
    return rows


def curve_rows(record: Record) -> list[Json]:
    config = record.config
    tokens_per_step = config["train"]["batch_size"] * config["model"]["context_length"]
    rows = []
    for point in record.metrics["curve"]:
        row = {"tokens": point["step"] * tokens_per_step}
        for name, value in point.items():
            if isinstance(value, int | float):  # fine-tunings also have lists, one per step
                row[name] = value
        rows.append(row)
    return rows


def _rows(preset: str, folder: Folder, of: Of, *statuses: str) -> list[Json]:
    """The rows of all records that have one of these statuses, each with its run."""
    rows = []
    for entry in Runs(folder).entries(preset, of):
        if entry.status in statuses:
            run = {"experiment": entry.experiment, "seed": entry.seed}
            rows += [run | row for row in entry.value]
    return rows


def _frame(rows: list[Json], *columns: str) -> pd.DataFrame:
    """A data frame of these rows. Without rows, it has the columns that every row would have."""
    return pd.DataFrame(rows, columns=None if rows else list(columns))
