"""Section 3 and Appendix B as tables: of the real models' committed measurements, or of any model measured now."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd

from sinkutils.measuring.load import MODELS, position_table, replace_position, swap_positions
from sinkutils.measuring.open_lms import recorded, sections
from sinkutils.measuring.own import BOS, TEXT, X_FIX, Subject, subject
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable
from sinkutils.measuring.report import Report
from sinkutils.measuring.saved import measured_sink, measurements, saved_scores
from sinkutils.paths import PAPER
from sinkutils.showing import notebook
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset

Sections = Mapping[str, Any]  # of `measuring.open_lms`, of one model
EXPERIMENTS = ("base", "learnable", "k_bias", "sigmoid")  # their records keep weights, at seed 0
FALLBACK = "laptop"  # whose records stand in at presets that keep no weights
EPSILON = 0.3
INPUTS = ("natural", "random", "repeat")
SCORES = ("acc", "acc_norm", "acc_norm_stderr", "questions")
TABLE_7 = ((1, 5), (2, 10), (3, 15), (4, 20), (5, 25), (6, 30))  # column and our t; the paper heads both last ones 25


def subjects(preset: str = "laptop", recompute: str = "never", device: str | None = None) -> list[Subject]:
    """Our recorded models whose weights were kept, the base first.

    At a preset that keeps no weights those of the laptop preset stand in, and their names say so. recompute "missing"
    trains what is not there; otherwise a line names it. Raises ValueError for another `recompute`.
    """
    scale = preset if find_preset(preset).keeps_weights else FALLBACK
    experiments = {name: name for name in dict.fromkeys(resolve(name, scale) for name in EXPERIMENTS)}
    records = notebook.recorded(experiments, scale, recompute=recompute, device=device, weights=True)
    found = [subject(f"{scale}/{name}/0", device) for name, record in records.items() if record is not None]
    return found if scale == preset else [replace(one, name=f"{one.name} of {scale}") for one in found]


def live(name: str, device: str | None = None) -> Subject | None:
    """A model that is here; of a real model that is not installed one line says so, and None stands for it.

    Raises ModelUnavailable for any other name that cannot be had.
    """
    try:
        return subject(name, device)
    except ModelUnavailable as error:
        if name not in REAL_MODELS:
            raise
        print(error)
        return None


def measured(one: Subject | None = None, n: int = 100) -> dict[str, Sections]:
    """What Section 3 shows, by a model's title: of the real models as it is committed, or of `one`, measured now on at
    most n texts where nothing of it is committed. One line a model says which it is.
    """
    found: dict[str, Sections] = {}
    for name in REAL_MODELS if one is None else (one.name,):
        known = recorded(name) if name in REAL_MODELS else sections(cast(Subject, one), n)
        about = known["about"]
        where = (
            f"committed measurements of a {about['precision'].split(',')[0]}"
            if name in REAL_MODELS
            else f"measured now, n = {n}"
        )
        print(f"{about['title']}: {about['parameters'] / 1e6:.1f}M parameters, {where}")
        found[about["title"]] = known
    return found


def usual(of: Sections) -> str:
    """What stood first in the training of a model, and stands first in its inputs where nothing else is said."""
    firsts = of["probes"]["natural"]
    return X_FIX if X_FIX in firsts else BOS if of["about"]["trained_with_bos"] and BOS in firsts else TEXT


def report(of: Sections, kind: str = "natural", first: str | None = None) -> dict[str, Any]:
    """The kept report of one kind of input, by default with what stood first in training."""
    return of["probes"][kind][first or usual(of)]


def alphas(of: Sections) -> np.ndarray:
    """alpha_1 on natural text as a mean over texts, (layers, heads)."""
    return np.asarray(report(of)["alpha"])[0]


def extreme_heads(report: Report) -> list[tuple[int, int]]:
    """The (layer, head) with the largest and the one with the smallest mean alpha_1."""
    alpha = report.alpha[:, 0].mean(dim=0)
    found = [divmod(int(index), alpha.shape[1]) for index in (alpha.argmax(), alpha.argmin())]
    return [(report.layers[row], head) for row, head in found]


# --- Section 3 ---------------------------------------------------------------------------------------------------


def by_length(of: Sections) -> pd.DataFrame:
    """Sink_1 on natural text against T and eps (Fig. 3): a row a T, a column an eps, and alpha_1 if uniform."""
    rows = {int(length): one for length, one in of["lengths"][usual(of)].items()}
    table = {
        length: {"uniform": one["floor"], "texts": one["samples"]}
        | {float(eps): one["sink"]["1"][eps] for eps in one["interval"]["1"]}
        for length, one in rows.items()
    }
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("T")


def by_input(models: Mapping[str, Sections]) -> pd.DataFrame:
    """Table 1 left: Sink_1 on the three inputs, the paper's rows (without BOS), then ours with what can stand first.

    "usual": whether that stood first in training; None for the paper's.
    """
    paper = open_lms("Table 1 left")
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "first": TEXT,
            "of": "paper",
            "usual": None,
            **dict(zip(part["input"], part["paper"], strict=True)),
        }
        for model, part in paper.groupby("model", sort=False)
    ]
    for title, of in models.items():
        for first in of["probes"]["natural"]:
            sinks = {kind: measured_sink(report(of, kind, first)) for kind in INPUTS}
            low, high = report(of, "natural", first)["interval"]["1"][str(EPSILON)]
            rows.append({"model": title, "first": first, "of": "ours", "usual": first == usual(of), **sinks,
                         "interval": f"{low:.1f} to {high:.1f}"})  # fmt: skip
    return pd.DataFrame(rows)


def by_domain(of: Sections, epsilons: Iterable[float] = (0.2, 0.3, 0.4)) -> pd.DataFrame:
    """Sink_1 by the kind of text (Fig. 9): a row a domain, a column an eps."""
    kept = of["domains"]["by"]
    return pd.DataFrame(
        {eps: {domain: one[usual(of)]["sink"]["1"][str(eps)] for domain, one in kept.items()} for eps in epsilons}
    )


def sizes(models: Mapping[str, Sections]) -> pd.DataFrame:
    """Sink_1 on natural text against size (Figs. 4 left, 10): the paper's printed values, what was measured here.

    Columns model, family, parameters, sink_1, source ("paper" or "measured"), and acc and acc_norm of HellaSwag where
    they were scored. The figures' other points are not printed anywhere.
    """
    rows = [{"model": title, "family": title, "parameters": of["about"]["parameters"],
             "sink_1": measured_sink(report(of)), "source": "measured", **_scores(of.get("hellaswag", {}))}
            for title, of in models.items()]  # fmt: skip
    kept, scores = measurements("natural"), saved_scores()
    for one in MODELS:
        values = {} if one.sink_1 is None else {"paper": one.sink_1}
        if one.name in kept:
            values["measured"] = measured_sink(kept[one.name])
        rows += [{"model": one.name, "family": one.family, "parameters": one.parameters, "sink_1": value,
                  "source": source, **_scores(scores.get(one.name, {}))}
                 for source, value in values.items()]  # fmt: skip
    return pd.DataFrame(rows).reindex(columns=["model", "family", "parameters", "sink_1", "source", *SCORES])


def _scores(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {key: kept[key] for key in SCORES if key in kept}


def open_lms(item: str) -> pd.DataFrame:
    """An item on open models ("Table 1 left", "Table 1 right", "Table 8", "Appendix B.3"): the paper's Sink_1 and
    what data/measurements holds, NaN where the paper prints none or nothing was measured.

    Raises ValueError, listing the items, for an unknown one.
    """
    frame = pd.read_csv(PAPER / "open_lms.csv")
    if item not in set(frame["item"]):
        raise ValueError(f"item must be one of {', '.join(frame['item'].unique())}; got {item!r}")
    kept = {kind: measurements(kind) for kind in INPUTS}
    frame = frame[frame["item"] == item].rename(columns={"sink_1": "paper"}).reset_index(drop=True)
    pairs = zip(frame["model"], frame["input"], strict=True)
    reports = [kept[kind].get(model) for model, kind in pairs]
    frame["measured"] = [np.nan if report is None else measured_sink(report) for report in reports]
    return frame[["model", "hub_id", "input", "paper", "measured"]]


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
        found = one.measure(one.inputs("natural", n, length, seed), norms=False)
        rows.append({"revision": revision, "step": int(number.group()), "sink_1": found.sink(1, EPSILON),
                     "alpha_1": float(found.alpha.mean())})  # fmt: skip
    return pd.DataFrame(rows).sort_values("step", ignore_index=True)


# --- Appendix B --------------------------------------------------------------------------------------------------


def has_positions(one: Subject) -> bool:
    """Whether the model has learned position embeddings, which Table 7 edits."""
    try:
        position_table(one.model)
    except ValueError:
        return False
    return True


def edited_positions(one: Subject | None = None, n: int = 100, length: int = 64, seed: int = 0) -> pd.DataFrame:
    """Table 7 on repeated tokens, the paper's beside ours: Sink_1 and Sink_t with p_1 replaced by or swapped with p_t.

    Ours only for a model with learned positions (ValueError otherwise), NaN without one. The paper's sixth column is
    headed 25 again: ours is t = 30.
    """
    with open(PAPER / "table_7.csv", newline="", encoding="utf-8") as file:
        paper = {(row["operation"], row["column"]): row for row in csv.DictReader(file)}

    def ours(*targets: int) -> dict[str, float]:
        if one is None:
            return dict.fromkeys(("sink_1", "sink_t"), np.nan)
        found = one.measure(one.inputs("repeat", n, length, seed), targets=targets, norms=False)
        return {"sink_1": found.sink(1, EPSILON), "sink_t": found.sink(targets[-1], EPSILON)}

    untouched = ours(1)["sink_1"]
    rows: list[dict[str, Any]] = [
        {"operation": "none", "t": 1, "paper_1": float(paper["none", ""]["sink_1"]), "sink_1": untouched}
    ]
    for operation, edit in (("replace", replace_position), ("swap", swap_positions)):
        for column, t in TABLE_7:
            printed = paper[operation, str(column)]
            row = {"operation": operation, "t": t, "paper_1": float(printed["sink_1"]),
                   "paper_t": float(printed["sink_t"])}  # fmt: skip
            if one is None:
                rows.append(row | ours())
            else:
                with edit(one.model, t):
                    rows.append(row | ours(1, t))
    return pd.DataFrame(rows)
