"""Section 3 and Appendix B as tables: of the real models' committed measurements, or of any model measured now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from sinkutils.ledger.results import EPSILON, EPSILONS
from sinkutils.measuring.load import MODELS
from sinkutils.measuring.open_lms import recorded
from sinkutils.measuring.own import BOS, TEXT, X_FIX, Subject, subject
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable
from sinkutils.measuring.saved import measured_sink, measurements, saved_scores
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER
from sinkutils.showing import notebook
from sinkutils.study.grid import resolve
from sinkutils.study.presets import preset as find_preset

Sections = Mapping[str, Any]  # of `measuring.open_lms`, of one model
EXPERIMENTS = ("base", "k_bias", "sigmoid")  # their records keep weights, at seed 0
FALLBACK = "laptop"  # whose records stand in at presets that keep no weights
INPUTS = ("natural", "random", "repeat")
SCORES = ("acc", "acc_norm", "acc_norm_stderr", "questions")


def subjects(preset: str = "laptop", recompute: str = "never", device: str | None = None) -> list[Subject]:
    """Our recorded models whose weights were kept, the base first; those of FALLBACK, which say so, at other presets.

    recompute "missing" trains what is not there; otherwise a line names it. Raises ValueError for another `recompute`.
    """
    scale = preset if find_preset(preset).keeps_weights else FALLBACK
    experiments = {name: name for name in dict.fromkeys(resolve(name, scale) for name in EXPERIMENTS)}
    records = notebook.recorded(experiments, scale, recompute=recompute, device=device, weights=True)
    own = [subject(f"{scale}/{name}/0", device) for name, record in records.items() if record is not None]
    return own if scale == preset else [replace(model, name=f"{model.name} of {scale}") for model in own]


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


def measured(model: Subject | None = None, n: int = 100) -> dict[str, Sections]:
    """What Section 3 shows, by a model's title: of the real models as it is committed, or of `model`, measured now on
    at most n texts where nothing of it is committed. One line a model says which it is.
    """
    models: dict[str, Sections] = {}
    for name in (model.name,) if model else REAL_MODELS:
        kept = recorded(name)
        about, where = kept["about"], f"measured now, n = {n}"
        if name in REAL_MODELS:
            where = f"committed measurements of a {about['precision'].split(',')[0]}"
        print(f"{about['title']}: {about['parameters'] / 1e6:.1f}M parameters, {where}")
        models[about["title"]] = kept
    return models


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


def by_length(of: Sections) -> pd.DataFrame:
    """Sink_1 on natural text against T and eps (Fig. 3): a row a T, a column an eps, and alpha_1 if uniform."""
    rows: list[dict[Any, float]] = []
    for length, kept in of["lengths"][usual(of)].items():
        sinks = {float(eps): kept["sink"]["1"][eps] for eps in kept["interval"]["1"]}
        rows.append({"T": int(length), "uniform": kept["floor"], "texts": kept["samples"]} | sinks)
    return pd.DataFrame(rows).set_index("T")


def by_input(models: Mapping[str, Sections]) -> pd.DataFrame:
    """Table 1 left: Sink_1 on the three inputs, the paper's rows (without BOS), then ours with what can stand first.

    "usual": whether that stood first in training; None for the paper's.
    """
    rows: list[dict[str, Any]] = []
    for model, part in open_lms("Table 1 left").groupby("model", sort=False):
        values = dict(zip(part["input"], part["paper"], strict=True))
        rows.append({"model": model, "first": TEXT, "of": "paper", "usual": None} | values)
    for title, of in models.items():
        for first in of["probes"]["natural"]:
            row = {"model": title, "first": first, "of": "ours", "usual": first == usual(of)}
            row |= {kind: measured_sink(report(of, kind, first)) for kind in INPUTS}
            low, high = report(of, "natural", first)["interval"]["1"][str(EPSILON)]
            rows.append(row | {"interval": f"{low:.1f} to {high:.1f}"})
    return pd.DataFrame(rows)


def by_domain(of: Sections) -> pd.DataFrame:
    """Sink_1 by the kind of text (Fig. 9): a row a domain, a column an eps."""
    sinks = {domain: kept[usual(of)]["sink"]["1"] for domain, kept in of["domains"]["by"].items()}
    return pd.DataFrame({eps: {domain: sink[str(eps)] for domain, sink in sinks.items()} for eps in EPSILONS})


def sizes(models: Mapping[str, Sections]) -> pd.DataFrame:
    """Sink_1 on natural text against size (Figs. 4 left, 10), and SCORES on HellaSwag where they were scored.

    source: "measured" here, or "paper", its printed values; the figures' other points are not printed anywhere.
    """
    rows = []
    for title, of in models.items():
        about = {"model": title, "family": title, "parameters": of["about"]["parameters"], "source": "measured"}
        rows.append(of.get("hellaswag", {}) | about | {"sink_1": measured_sink(report(of))})
    kept, scores = measurements("natural"), saved_scores()
    for known in MODELS:
        about = {"model": known.name, "family": known.family, "parameters": known.parameters}
        row = scores.get(known.name, {}) | about
        if known.sink_1 is not None:
            rows.append(row | {"source": "paper", "sink_1": known.sink_1})
        if known.name in kept:
            rows.append(row | {"source": "measured", "sink_1": measured_sink(kept[known.name])})
    return pd.DataFrame(rows, columns=["model", "family", "parameters", "sink_1", "source", *SCORES])


def open_lms(item: str) -> pd.DataFrame:
    """An item on open models ("Table 1 left", "Table 1 right", "Table 8", "Appendix B.3"): the paper's Sink_1 and
    what data/measurements holds, NaN where the paper prints none or nothing was measured.

    Raises ValueError, listing the items, for an unknown one.
    """
    frame = pd.read_csv(PAPER / "open_lms.csv")
    if item not in set(frame["item"]):
        raise ValueError(f"item must be one of {', '.join(frame['item'].unique())}; got {item!r}")
    frame = frame[frame["item"] == item].rename(columns={"sink_1": "paper"}).reset_index(drop=True)
    here = {(model, kind): measured_sink(kept) for kind in INPUTS for model, kept in measurements(kind).items()}
    frame["measured"] = [here.get(pair, np.nan) for pair in zip(frame["model"], frame["input"], strict=True)]
    return frame[["model", "hub_id", "input", "paper", "measured"]]


def has_positions(model: Subject) -> bool:
    """Whether the model has learned position embeddings, which Table 7 edits."""
    try:
        position_table(model.model)
    except ValueError:
        return False
    return True


def edited_positions(model: Subject | None = None, n: int = 100, length: int = 64, seed: int = 0) -> pd.DataFrame:
    """Table 7 on repeated tokens, the paper's beside ours: Sink_1 and Sink_t with p_1 replaced by or swapped with p_t.

    Ours only for a model with learned positions (ValueError otherwise), NaN without one. The paper's sixth column is
    headed 25 again: ours is t = 30.
    """
    table = pd.read_csv(PAPER / "table_7.csv").rename(columns={"sink_1": "paper_1", "sink_t": "paper_t"})
    table["t"] = (5 * table["column"]).fillna(1).astype(int)  # 1: nothing is edited
    table = table[["operation", "t", "paper_1", "paper_t"]].assign(sink_1=np.nan, sink_t=np.nan)
    if model is None:
        return table
    edits = {"replace": replace_position, "swap": swap_positions}
    ids = model.inputs("repeat", n, length, seed)
    for place, operation, t in table[["operation", "t"]].itertuples():
        with edits[operation](model.model, t) if t > 1 else nullcontext():
            measured = model.measure(ids, targets=sorted({1, t}), norms=False)
            table.loc[place, ["sink_1", "sink_t"]] = [measured.sink(k, EPSILON) for k in (1, t)]
    return table


def replace_position(model: nn.Module, t: int) -> AbstractContextManager[nn.Module]:
    """While open, p_1 is p_t (Table 7 top); t counts from 1. The model's own table is put back."""
    return _edited(model, t, [1, 1])


def swap_positions(model: nn.Module, t: int) -> AbstractContextManager[nn.Module]:
    """While open, p_1 and p_t have changed places (Table 7 bottom); t counts from 1."""
    return _edited(model, t, [1, 0])


@contextmanager
def _edited(model: nn.Module, t: int, which: list[int]) -> Iterator[nn.Module]:
    """While open, positions 1 and t have the embeddings `which` of theirs: 0 is p_1, 1 is p_t."""
    table, offset = position_table(model)
    if not 1 < t <= len(table) - offset:
        raise ValueError(f"t must be a position after the first, 2..{len(table) - offset}, got {t}")
    rows = [offset, offset + t - 1]
    before = table[rows]  # a copy
    table[rows] = before[which]
    try:
        yield model
    finally:
        table[rows] = before


def position_table(model: nn.Module) -> tuple[Tensor, int]:
    """The learned position embeddings (positions, d) of a model, and the row of position 1."""
    if isinstance(model, TransformerLM):
        if model.config.position == "learnable":
            return model.position_embedding.detach(), int(model.config.sink_token)
    else:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions"):
                return module.weight.detach(), getattr(module, "offset", 0)  # OPT keeps two rows for padding
    own = "a TransformerLM with position='learnable'"
    raise ValueError(f"{type(model).__name__} has no learned position embeddings: use GPT-2, OPT, or {own}")
