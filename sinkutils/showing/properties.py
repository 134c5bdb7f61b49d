"""Section 3 and Appendix B as tables, for our recorded models and any other causal language model alike."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.checks import device as find_device
from sinkutils.data.corpus import load_corpus
from sinkutils.data.embedded import DOMAINS, domain
from sinkutils.data.probes import KINDS, head
from sinkutils.measuring.load import MODELS, position_table, replace_position, swap_positions
from sinkutils.measuring.own import BOS, Subject, subject
from sinkutils.measuring.report import Report
from sinkutils.measuring.saved import measured_sink, measurements, saved_scores
from sinkutils.measuring.scores import METRICS
from sinkutils.model.decoder import TransformerLM
from sinkutils.showing.notebook import recorded
from sinkutils.study.config import RunConfig
from sinkutils.study.grid import PAPER, config, resolve
from sinkutils.study.presets import preset as find_preset

EXPERIMENTS = ("base", "learnable", "k_bias", "sigmoid")  # their records keep weights, at seed 0
FALLBACK = "laptop"  # whose records stand in at presets that keep no weights
EPSILON = 0.3
TABLE_7 = ((1, 5), (2, 10), (3, 15), (4, 20), (5, 25), (6, 30))  # column and our t; the paper heads both last ones 25


def subjects(
    preset: str = "laptop", model: str | None = None, recompute: str = "never", device: str | None = None
) -> list[Subject]:
    """The model of that name; without one, our recorded models whose weights were kept, the base first.

    At a preset that keeps no weights those of the laptop preset stand in, and their names say so. recompute "missing"
    trains what is not there; otherwise a line names it, and an untrained model stands in for the base. Raises
    ValueError for another `recompute`, ModelUnavailable for a `model` that cannot be had.
    """
    if model is not None:
        return [subject(model, device)]
    scale = preset if find_preset(preset).keeps_weights else FALLBACK
    names = {name: name for name in dict.fromkeys(resolve(name, scale) for name in EXPERIMENTS)}
    records = recorded(names, scale, recompute=recompute, device=device, weights=True)
    found = [subject(f"{scale}/{name}/0", device) for name, record in records.items() if record is not None]
    if scale != preset:
        found = [dataclasses.replace(one, name=f"{one.name} of {scale}") for one in found]
    base = config("base", scale)
    return [untrained(base, device), *found] if records[base.experiment] is None else found


def untrained(run: RunConfig, device: str | None = None) -> Subject:
    """The model of a run as its training would start, with that run's inputs."""
    model = TransformerLM(run.model, run.seed).to(find_device(device)).eval()
    corpus = load_corpus(run.data.corpus, run.model.vocab_size)
    return Subject(f"untrained {run.experiment}", model, corpus.tokenizer, run.data.fixed_position, corpus,
                   run.train.eval_length)  # fmt: skip


# --- Section 3 ---------------------------------------------------------------------------------------------------


def strongest_heads(report: Report, count: int = 4) -> list[tuple[int, int]]:
    """The (layer, head) with the largest mean alpha_1 in each of `count` attention layers, evenly spread."""
    alpha = report.alpha[:, 0].mean(dim=0)  # (layers, heads)
    chosen = np.unique(np.linspace(0, len(alpha) - 1, min(count, len(alpha))).round().astype(int))
    return [(report.layers[row], int(alpha[row].argmax())) for row in chosen]


def extreme_heads(report: Report) -> list[tuple[int, int]]:
    """The (layer, head) with the largest and the one with the smallest mean alpha_1."""
    alpha = report.alpha[:, 0].mean(dim=0)
    found = [divmod(int(index), alpha.shape[1]) for index in (alpha.argmax(), alpha.argmin())]
    return [(report.layers[row], head) for row, head in found]


def by_length(
    one: Subject, lengths: Sequence[int], epsilons: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5), n: int = 100,
    seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Sink_1 on natural text against T and eps (Fig. 3): a row a T, a column an eps, and alpha_1 if uniform."""
    rows = []
    for length in lengths:
        report = one.measure(one.inputs("natural", n, length, seed), norms=False)
        rows.append({"T": length, "uniform": report.floor} | {eps: report.sink(1, eps) for eps in epsilons})
    return pd.DataFrame(rows).set_index("T")


def by_input(ones: Iterable[Subject], n: int = 100, length: int = 64, seed: int = 0) -> pd.DataFrame:
    """Sink_1 on the three inputs of Table 1 left, under each condition of the first token; Sink_* where there is k*."""
    rows = []
    for one in ones:
        for first in one.firsts:
            row: dict[str, Any] = {"model": one.name, "first": first}
            for kind in KINDS:
                report = one.measure(one.inputs(kind, n, length, seed, first=first), norms=False, bos=first == BOS)
                row[kind] = report.sink(1, EPSILON)
                if kind == "natural":
                    row["interval"] = report.interval(1, EPSILON, seed=seed)
                    row["star"] = np.nan if report.star is None else report.sink_star(EPSILON)
            rows.append(row)
    return pd.DataFrame(rows)


def domain_texts(limit: int = 200) -> dict[str, list[str]]:
    """Texts of the embedded corpus by domain, the counterpart of the Pile's (Fig. 9); at most `limit` of each.

    Prose is the docstrings' probe split, which no training run has seen; the rest was never trained on at `laptop`.
    """
    prose = {"prose": list(islice(load_corpus("docstrings").texts("probe"), limit))}
    others = {name: list(islice(domain(name, progress=False), limit)) for name in DOMAINS if name != "prose"}
    return prose | others


def by_domain(
    ones: Iterable[Subject],
    texts: Mapping[str, Sequence[str]],
    epsilons: Sequence[float] = (0.2, 0.3, 0.4),
    n: int = 100,
    length: int = 64,
    seed: int = 0,
) -> pd.DataFrame:
    """Sink_1 by model, domain and eps (Fig. 9), with the number of texts that had `length` tokens, at most n."""
    rows = []
    for one in ones:
        for name, available in texts.items():
            found = [text for text in available if len(head(one.tokenizer, text, length)) >= length][:n]
            if not found:
                raise ValueError(f"texts has none of at least {length} tokens in the domain {name!r}: use a smaller "
                                 "length or more text")  # fmt: skip
            report = one.measure(one.inputs("natural", len(found), length, seed, texts=found), norms=False)
            rows += [{"model": one.name, "domain": name, "eps": eps, "texts": len(found),
                      "sink_1": report.sink(1, eps)} for eps in epsilons]  # fmt: skip
    return pd.DataFrame(rows)


def by_revision(
    name: str, revisions: Iterable[str], device: str | None = None, n: int = 100, length: int = 64, seed: int = 0
) -> pd.DataFrame:
    """Sink_1 and mean alpha_1 along the revisions of a hub model, such as Pythia's "step1000": a curve of emergence.

    step is the number in the revision's name. Raises ValueError for a revision without one.
    """
    rows = []
    for revision in revisions:
        number = re.search(r"\d+", revision)
        if number is None:
            raise ValueError(f"revisions must have their step in their names, such as 'step1000'; got {revision!r}")
        one = subject(name, device, revision=revision)
        report = one.measure(one.inputs("natural", n, length, seed), norms=False)
        rows.append({"revision": revision, "step": int(number.group()), "sink_1": report.sink(1, EPSILON),
                     "alpha_1": float(report.alpha.mean())})  # fmt: skip
    return pd.DataFrame(rows).sort_values("step", ignore_index=True)


# --- Appendix B --------------------------------------------------------------------------------------------------


def has_positions(one: Subject) -> bool:
    """Whether the model has learned position embeddings, which Table 7 edits."""
    try:
        position_table(one.model)
    except ValueError:
        return False
    return True


def edited_positions(
    one: Subject, first: str | None = None, n: int = 100, length: int = 64, seed: int = 0
) -> pd.DataFrame:
    """Table 7 on repeated tokens, the paper's beside ours: Sink_1 and Sink_t with p_1 replaced by or swapped with p_t.

    Only for learned positions (ValueError otherwise). The paper's sixth column is headed 25 again: ours is t = 30.
    """
    with open(PAPER / "table_7.csv", newline="", encoding="utf-8") as file:
        paper = {(row["operation"], row["column"]): row for row in csv.DictReader(file)}
    ids = one.inputs("repeat", n, length, seed, first=first)
    untouched = one.measure(ids, norms=False).sink(1, EPSILON)
    rows: list[dict[str, Any]] = [
        {"operation": "none", "t": 1, "paper_1": float(paper["none", ""]["sink_1"]), "sink_1": untouched}
    ]
    for operation, edit in (("replace", replace_position), ("swap", swap_positions)):
        for column, t in TABLE_7:
            with edit(one.model, t):
                report = one.measure(ids, targets=(1, t), norms=False)
            printed = paper[operation, str(column)]
            rows.append({"operation": operation, "t": t, "paper_1": float(printed["sink_1"]),
                         "sink_1": report.sink(1, EPSILON), "paper_t": float(printed["sink_t"]),
                         "sink_t": report.sink(t, EPSILON)})  # fmt: skip
    return pd.DataFrame(rows)


def open_lms(item: str) -> pd.DataFrame:
    """An item on open models ("Table 1 left", "Table 1 right", "Table 8", "Appendix B.3"): the paper's Sink_1 and
    what data/measurements holds, NaN where the paper prints none or nothing was measured.

    Raises ValueError, listing the items, for an unknown one.
    """
    frame = pd.read_csv(PAPER / "open_lms.csv")
    if item not in set(frame["item"]):
        raise ValueError(f"item must be one of {', '.join(frame['item'].unique())}; got {item!r}")
    measured = {kind: measurements(kind) for kind in KINDS}
    frame = frame[frame["item"] == item].rename(columns={"sink_1": "paper"}).reset_index(drop=True)
    pairs = zip(frame["model"], frame["input"], strict=True)
    reports = [measured[kind].get(model) for model, kind in pairs]
    frame["measured"] = [np.nan if report is None else measured_sink(report) for report in reports]
    return frame[["model", "hub_id", "input", "paper", "measured"]]


def model_sizes(ones: Iterable[Subject] = (), n: int = 100, length: int = 64, seed: int = 0) -> pd.DataFrame:
    """Sink_1 on natural text against size (Fig. 4 left): the paper's printed values, what was measured, and `ones`.

    Columns model, family, parameters, sink_1, source ("paper" or "measured"), and acc and acc_norm of HellaSwag for
    Fig. 10 where they were scored. The figures' other points are not printed anywhere.
    """
    measured, scores = measurements("natural"), saved_scores()
    rows = [
        {"model": one.name, "family": "ours", "parameters": sum(p.numel() for p in one.model.parameters()),
         "sink_1": one.measure(one.inputs("natural", n, length, seed), norms=False).sink(1, EPSILON),
         "source": "measured"}
        for one in ones
    ]  # fmt: skip
    for one in MODELS:
        values = {} if one.sink_1 is None else {"paper": one.sink_1}
        if one.name in measured:
            values["measured"] = measured_sink(measured[one.name])
        rows += [{"model": one.name, "family": one.family, "parameters": one.parameters, "sink_1": value,
                  "source": source} for source, value in values.items()]  # fmt: skip
    frame = pd.DataFrame(rows)
    for metric in METRICS:
        frame[metric] = [scores.get(model, {}).get(metric, np.nan) for model in frame["model"]]
    return frame
