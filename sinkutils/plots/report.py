"""One page about a model: its sink on several inputs, head by head, block by block, beside models we know."""

from __future__ import annotations

import hashlib
import html
import io
import json
from collections.abc import Iterable, Mapping
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
from sinkutils.plots.figures import attention_map, heads_by_block, token_label
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
    texts: Iterable[str] | None = None,
    n: int = 100,
    length: int = 64,
    beside: Mapping[str, Report] | None = None,
) -> str:
    """Measure a model on the three probes, with and without a BOS, and write its page.

    texts: natural text of one's own. n, length: texts per probe and tokens per text. beside: of `report_page`.
    Raises ValueError as `probe` and `measure` do.
    """
    own = None if texts is None else list(texts)
    inputs = _inputs(tokenizer, own, n, length)
    reports = {title: measure(model, ids) for title, ids in inputs.items()}
    title, main = next(iter(reports.items()))
    size = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "model": f"{type(model).__name__}, {size:,} parameters, {next(model.parameters()).dtype}",
        "weights": f"SHA-256 {_digest(dict(model.named_parameters()))}",
        "inputs": f"{n} texts of {length} tokens for each; the numbers on top are of {title}",
        "natural text": "given by the user" if own else "docstrings",
        "token ids": f"SHA-256 {_digest({'': inputs[title]})} ({title})",
        "attention": main.path,
        "versions": ", ".join(f"{package} {version(package)}" for package in ("sinkutils", "torch", "transformers")),
    }
    maps = _maps(model, tokenizer, own[0] if own else SAMPLE, "BOS" in title, main)
    return report_page(reports, name, beside, facts, maps)


def report_page(
    reports: Report | Mapping[str, Report],
    name: str = "",
    beside: Mapping[str, Report] | None = None,
    facts: Mapping[str, Any] | None = None,
    maps: str = "",
) -> str:
    """One self-contained HTML page about a model, without scripts or network; its numbers are also inside, as JSON.

    reports: of one kind of input, or several by title, the main one first. beside: reports of other models by name.
    facts: how it was measured. maps: figures of attention maps, as SVG.
    Raises ValueError where the first token was not among the targets, and for another model of the same name.
    """
    reports = {"input": reports} if isinstance(reports, Report) else dict(reports)
    main = next(iter(reports.values()))
    require(1 in main.targets, f"the page is about the first token: measure(targets=(1, ..)), not {main.targets}")
    name = name or main.name or "a model"
    require(name not in (beside or {}), f"two models are called {name!r}: give one another name")
    summaries = {title: report.to_dict() for title, report in reports.items()}
    rows = {title: _row(summary) for title, summary in summaries.items()}
    own = next(iter(rows.values()))
    others = {other: _row(report.to_dict()) for other, report in (beside or {}).items()}
    with mpl.rc_context(STYLE | dict.fromkeys(INKED, INK)):
        page = {
            "name": html.escape(name),
            "uniform": f"{main.floor:.3f}",
            "numbers": "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in own.items()),
            "inputs": _table(rows),
            "heads": _svg(
                heads_by_block(main.of(1).mean(dim=0), main.layers, ax=_axes(5.6)),
                "Every head's attention to the first token",
            ),
            "maps": maps or ABSENT,
            "norms": _norms(main) or ABSENT,
            "models": _table({name: own} | others | _references()),
            "facts": _table({key: {" ": value} for key, value in (facts or {}).items()}),
        }
    written = json.dumps({"name": name, "reports": summaries, "facts": facts}, separators=(",", ":"))
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(page, json=written.replace("<", "\\u003c"))


def _inputs(tokenizer: Any, texts: list[str] | None, n: int, length: int) -> dict[str, Tensor]:
    """Every probe without and, where the tokenizer has one, with a BOS; first the natural one that it makes itself."""
    starts = [False]
    try:
        bos = bos_id(tokenizer)
    except ValueError:
        pass
    else:
        ids = tokenizer.encode("a")
        own = getattr(ids, "ids", ids)[0] == bos
        starts = [own, not own]
    return {
        kind + ", BOS first" * start: probe(kind, tokenizer, n, length, bos=start, texts=texts)
        for start in starts
        for kind in KINDS
    }


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes, the first 16 digits; of plain tensors in memory, not offloaded ones."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if type(tensor.data) is Tensor and not tensor.is_meta:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _maps(model: nn.Module, tokenizer: Any, text: str, bos: bool, report: Report) -> str:
    """Maps of the heads with the most attention to the first token, the least, and two between, on a text."""
    ids = [bos_id(tokenizer)] * bos + encode(tokenizer, text)[:MAP_TOKENS]
    alpha = report.alpha[:, 0].mean(dim=0)
    order = alpha.flatten().argsort(descending=True)
    picks = order[torch.linspace(0, len(order) - 1, 4).long().unique()].tolist()
    heads = [(report.layers[pick // alpha.shape[1]], pick % alpha.shape[1]) for pick in picks]
    kept = measure(model, torch.tensor([ids]), heads=heads, norms=False).kept
    drawn = ""
    for layer, head in heads:
        title = f"block {layer + 1}, head {head + 1}"
        tokens = [token_label(token, tokenizer) for token in ids]
        ax = attention_map(kept[layer, head].map[0], tokens, _axes(4.2, 4.2))
        ax.set_title(title)
        drawn += _svg(ax, f"Attention map, {title}")
    return drawn


def _row(summary: Mapping) -> dict[str, str]:
    """The numbers of one model, from `Report.to_dict` or a part of it."""
    alpha = np.array(summary["alpha"][list(summary.get("targets", [1])).index(1)])
    uniform = summary["floor"]
    excess = ((alpha - uniform) / (1 - uniform)).mean(axis=1)
    low, high = summary["interval"]["1"]["0.3"]
    row = {"Sink<sub>1</sub>": f"{summary['sink']['1']['0.3']:.1f} %", "95 % interval": f"{low:.1f} to {high:.1f}"}
    if "sink_star" in summary:  # of a learned sink, a key of its own or a sink token
        row["Sink<sub>*</sub>"] = f"{summary['sink_star']['0.3']:.1f} %"
    first = 1 + summary.get("layers", [0])[0]  # of a hybrid model the first block that has attention
    row[f"excess in block {first}"] = f"{excess[0]:z.2f}"
    row["excess in later blocks"] = f"{excess[1:].mean():z.2f}" if len(excess) > 1 else ABSENT
    if "hidden_norms" in summary:
        # The last block's state is about the next token: its norms are another matter.
        *ratios, last = norm_ratio(summary["hidden_norms"])
        row["norm of h<sub>1</sub> / others, largest"] = f"{max(ratios or [last]):.1f}"
    if "hidden_peaks" in summary:
        row["element of h<sub>1</sub> / median, largest"] = f"{max(peaks[0] for peaks in summary['hidden_peaks']):,.0f}"
    return row


def _references() -> dict[str, dict]:
    """SmolLM2 and Gemma as data/open_lms keeps them, on natural text; none outside a checkout."""
    rows = {}
    for path in sorted(OPEN_LMS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        first = "BOS" if kept["about"]["trained_with_bos"] else "text"
        rows[f"{kept['about']['title']} (reference)"] = _row(kept["probes"]["natural"][first])
    return rows


def _table(rows: Mapping[str, Mapping]) -> str:
    """An HTML table; titles and values are escaped, the names of columns are ours."""
    frame = pd.DataFrame([{"": title} | dict(row) for title, row in rows.items()]).fillna(ABSENT)
    with pd.option_context("display.max_colwidth", None):
        return frame.astype(str).map(html.escape).to_html(index=False, border=0, escape=False)


def _axes(width: float = 4.6, height: float = 3.2) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _norms(report: Report) -> str:
    """Two figures by block: norm ratios of h, k and v, and the largest element of h_1; what was not measured is out."""
    norms = {"h": report.hidden_norms, "k": report.key_norms, "v": report.value_norms}
    ratios = {of: norm_ratio(rows) for of, rows in norms.items() if rows is not None}
    peaks = {} if report.hidden_peaks is None else {"h": report.hidden_peaks[:, 0].tolist()}
    drawn = ""
    for label, curves in (("norm of token 1 / others", ratios), ("largest element of token 1 / median", peaks)):
        if not curves:
            continue
        ax = _axes()
        for of, values in curves.items():  # not every block of a hybrid model has attention, keys and values
            blocks = range(len(values)) if of == "h" else report.layers
            ax.plot(np.add(blocks, 1), values, "o-", markersize=4, color=CURVES[of], label=of)
        low, high = ax.dataLim.intervaly
        if 0 < 10 * low < high:
            ax.set_yscale("log")
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set(xlabel="block", ylabel=label)
        ax.legend()
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.yaxis.set_major_formatter("{x:g}")
        drawn += _svg(ax, f"{label}, by block")
    return drawn


def _svg(ax: Axes, alt: str) -> str:
    """A figure as SVG inside the page, in the page's colours, its text as text."""
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sinkutils"}):
        ax.get_figure(root=True).savefig(drawn, format="svg", transparent=True, metadata={"Date": None})  # type: ignore
    written = drawn.getvalue()
    written = written[written.index("<svg") :].replace(INK, "currentColor")
    return written.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
