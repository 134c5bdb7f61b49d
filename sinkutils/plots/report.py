"""One page about a model: its sink on several inputs, head by head, block by block, beside models we know."""

from __future__ import annotations

import hashlib
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from torch import Tensor, nn

from sinkutils.checks import require
from sinkutils.data.probes import KINDS, encode, probe
from sinkutils.data.tokenizer import bos_id
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Report, norm_ratio
from sinkutils.paths import OPEN_LMS
from sinkutils.plots.attention import attention_map, token_label
from sinkutils.plots.heads import heads_by_block
from sinkutils.plots.theme import COLORS, STYLE

# The text of the maps: our own words.
SAMPLE = (
    "A sink is where water goes when nobody needs it. A head of attention has to put its weight somewhere too: its "
    "shares sum to one, whether or not the text holds what it looks for. Most heads of a trained model put what is "
    "left over on the first token, and that token learns to carry nothing."
)
INK = "#010203"  # what a figure draws in this colour takes that of the page's text, light or dark
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
CURVES = {"h": COLORS["first"], "k": COLORS["other"], "v": COLORS["baseline"]}
MAP_TOKENS = 24
ABSENT = "–"


def report_model(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    beside: tuple[nn.Module, Any, str] | None = None,
    texts: Iterable[str] | None = None,
    n: int = 100,
    length: int = 64,
) -> str:
    """Measure a model on the three probes, with and without a BOS, and make its page (`report_page`).

    beside: another model, with its tokenizer and name, for a row of its own. texts: natural text of one's own.
    n, length: texts per probe and tokens per text. Raises ValueError as `probe` and `measure` do.
    """
    own = None if texts is None else list(texts)
    inputs = _inputs(tokenizer, own, n, length)
    reports = {title: measure(model, ids) for title, ids in inputs.items()}
    main = next(iter(reports))
    parameters = sum(p.numel() for p in model.parameters())
    digest = hashlib.sha256(inputs[main].numpy().tobytes()).hexdigest()
    facts = {
        "model": f"{type(model).__name__}, {parameters:,} parameters, {next(model.parameters()).dtype}",
        "inputs": f"{n} texts of {length} tokens for each; the numbers on top are of {main}",
        "natural text": "given by the user" if own else "docstrings",
        "token ids": f"SHA-256 {digest[:16]} ({main})",
        "attention": reports[main].path,
        "versions": ", ".join(f"{package} {version(package)}" for package in ("sinkutils", "torch", "transformers")),
    }
    text = encode(tokenizer, own[0] if own else SAMPLE)[:MAP_TOKENS]
    if "BOS" in main:
        text = [bos_id(tokenizer), *text]
    heads = _four_heads(reports[main])
    kept = measure(model, torch.tensor([text]), heads=heads, norms=False).kept
    maps = {f"block {layer + 1}, head {head + 1}": kept[layer, head].map for layer, head in heads}
    tokens = [token_label(token, tokenizer) for token in text]
    others = {}
    if beside is not None:
        other, its_tokenizer, its_name = beside
        ids = next(iter(_inputs(its_tokenizer, own, n, length).values()))
        others[its_name] = measure(other, ids)
    return report_page(reports, name, maps, tokens, others, facts)


def report_page(
    reports: Report | Mapping[str, Report],
    name: str = "",
    maps: Mapping[str, Any] | None = None,
    tokens: Sequence[str] | None = None,
    beside: Mapping[str, Report] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """One self-contained HTML page about a model, without scripts or network.

    reports: of one kind of input, or several by title, the main one first. maps: attention maps (T, T) or (1, T, T) by
    title, of one text with these tokens. beside: reports of other models by name. facts: how it was measured.
    """
    if isinstance(reports, Report):
        reports = {reports.name or "input": reports}
    main = next(iter(reports.values()))
    require(1 in main.targets, f"the page is about the first token: measure(targets=(1, ..)), not {main.targets}")
    name = name or main.name or "a model"
    others = dict(beside or {})
    require(name not in others, f"two models are called {name!r}: give one another name")
    summaries = {title: report.to_dict() for title, report in reports.items()}
    inputs = {title: _row(summary) for title, summary in summaries.items()}
    own = next(iter(inputs.values()))
    models = {name: own} | {other: _row(report.to_dict()) for other, report in others.items()} | _references()
    with mpl.rc_context(STYLE | dict.fromkeys(INKED, INK)):
        heads = heads_by_block(main.alpha[:, 0].mean(dim=0), ax=_axes(5.6))
        drawn = ""
        for title, weights in (maps or {}).items():
            ax = attention_map(np.squeeze(weights), tokens, ax=_axes(4.2, 4.2))
            ax.set_title(title)
            drawn += _svg(ax, f"Attention map, {title}")
        page = {
            "name": html.escape(name),
            "uniform": f"{main.floor:.3f}",
            "numbers": "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in own.items()),
            "inputs": _table(inputs),
            "heads": _svg(heads, f"Attention of every head to the first token, {name}"),
            "maps": drawn or ABSENT,
            "norms": _norms(main, name),
            "models": _table(models),
            "facts": _table({key: {" ": value} for key, value in (facts or {}).items()}),
        }
    written = json.dumps({"name": name, "reports": summaries, "facts": dict(facts or {})}, separators=(",", ":"))
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(page, json=written.replace("<", "\\u003c"))


def _inputs(tokenizer: Any, texts: list[str] | None, n: int, length: int) -> dict[str, Tensor]:
    """Every probe without and, where the tokenizer has one, with a BOS; first the natural one that it makes itself."""
    inputs = {kind: probe(kind, tokenizer, n, length, texts=texts) for kind in KINDS}
    try:
        bos = bos_id(tokenizer)
    except ValueError:
        return inputs
    with_bos = {f"{kind}, BOS first": probe(kind, tokenizer, n, length, bos=True, texts=texts) for kind in KINDS}
    ids = tokenizer.encode("a")
    puts_bos = getattr(ids, "ids", ids)[0] == bos
    return with_bos | inputs if puts_bos else inputs | with_bos


def _four_heads(report: Report) -> list[tuple[int, int]]:
    """Layer and head of those with the most attention to the first token, the least, and two between."""
    alpha = report.alpha[:, 0].mean(dim=0)
    order = alpha.flatten().argsort(descending=True)
    chosen = order[torch.linspace(0, len(order) - 1, 4).long().unique()]
    return [(report.layers[pick // alpha.shape[1]], pick % alpha.shape[1]) for pick in chosen.tolist()]


def _row(summary: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of one model, from `Report.to_dict` or a part of it."""
    alpha, uniform = np.array(summary["alpha"][0]), summary["floor"]
    excess = ((alpha - uniform) / (1 - uniform)).mean(axis=1)
    row = {"Sink<sub>1</sub>": f"{summary['sink']['1']['0.3']:.1f} %"}
    if "0.3" in summary["interval"]["1"]:
        low, high = summary["interval"]["1"]["0.3"]
        row["95 % interval"] = f"{low:.1f} to {high:.1f}"
    if "sink_star" in summary:  # of a learned sink, a key of its own or a sink token
        row["Sink<sub>*</sub>"] = f"{summary['sink_star']['0.3']:.1f} %"
    row["excess in block 1"] = f"{excess[0]:.2f}"
    row["excess in later blocks"] = f"{excess[1:].mean():.2f}" if len(excess) > 1 else ABSENT
    if "hidden_norms" in summary and summary["T"] > 1:
        ratios = norm_ratio(summary["hidden_norms"])
        # The last block's state is about the next token: its norms are another matter.
        row["norm of h<sub>1</sub> / others, largest"] = f"{max(ratios[:-1] or ratios):.1f}"
    if "hidden_peaks" in summary:
        largest = max(peaks[0] for peaks in summary["hidden_peaks"])
        row["element of h<sub>1</sub> / median, largest"] = f"{largest:,.0f}"
    return row


def _references() -> dict[str, dict[str, str]]:
    """SmolLM2 and Gemma as data/open_lms keeps them, on natural text; none outside a checkout."""
    rows = {}
    for path in sorted(OPEN_LMS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        first = "BOS" if kept["about"]["trained_with_bos"] else "text"
        rows[f"{kept['about']['title']} (reference)"] = _row(kept["probes"]["natural"][first])
    return rows


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """An HTML table; titles and values are escaped, the names of columns are ours."""
    frame = pd.DataFrame([{"": title} | dict(row) for title, row in rows.items()]).fillna(ABSENT)
    with pd.option_context("display.max_colwidth", None):
        return frame.astype(str).map(html.escape).to_html(index=False, border=0, escape=False)


def _axes(width: float = 4.6, height: float = 3.2) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _norms(report: Report, name: str) -> str:
    """Two figures by block: norm ratios of h, k and v, and the largest element of h_1; what was not measured is out."""
    norms = {"h": report.hidden_norms, "k": report.key_norms, "v": report.value_norms}
    ratios = {of: norm_ratio(rows) for of, rows in norms.items() if rows is not None and report.length > 1}
    peaks = {} if report.hidden_peaks is None else {"h": report.hidden_peaks[:, 0].tolist()}
    drawn = _by_block(ratios, "norm of token 1 / others", name)
    drawn += _by_block(peaks, "largest element of token 1 / median", name)
    return drawn or ABSENT


def _by_block(curves: Mapping[str, list[float]], label: str, name: str) -> str:
    """A figure of curves over blocks, on a logarithmic scale where they differ much; nothing without curves."""
    if not curves:
        return ""
    ax = _axes()
    for of, values in curves.items():
        ax.plot(range(1, len(values) + 1), values, "o-", markersize=4, color=CURVES[of], label=of)
    values = [value for curve in curves.values() for value in curve if value > 0]
    if values and max(values) > 10 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="block", ylabel=label)
    ax.legend()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter("{x:g}")
    return _svg(ax, f"{label}, by block, of {name}")


def _svg(ax: Axes, alt: str) -> str:
    """A figure as SVG inside the page, in the page's colours, its text as text."""
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sinkutils"}):
        ax.get_figure(root=True).savefig(drawn, format="svg", transparent=True, metadata={"Date": None})  # type: ignore
    written = drawn.getvalue()
    written = written[written.index("<svg") :].replace(INK, "currentColor")
    return written.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
