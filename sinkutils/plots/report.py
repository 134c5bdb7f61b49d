"""One page about a model: its sink on several inputs, head by head, beside other models."""

from __future__ import annotations

import html
import io
import warnings
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

from sinkutils.checks import instance, require
from sinkutils.data.probes import probe
from sinkutils.data.tokenizer import bos_id, encode
from sinkutils.measuring.load import WithoutTokenizer
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Report, norm_ratio
from sinkutils.measuring.subject import adds_bos
from sinkutils.plots.figures import attention_map, heads_by_block, token_label
from sinkutils.plots.theme import COLORS, STYLE, json_in_html, printable

# The text of the maps: our own words.
SAMPLE = (
    "A sink is where water goes when nobody needs it. A head of attention has to put its weight "
    "somewhere too: its shares sum to one, whether or not the text holds what it looks for. Most "
    "heads of a trained model put what is left over on the first token, and that token learns to "
    "carry nothing."
)
INK = "#010203"  # what a figure draws in this colour takes that of the page's text, light or dark
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
CURVES = {  # of hidden states, keys and values
    "h": COLORS["first"],
    "k": COLORS["other"],
    "v": COLORS["baseline"],
}
MAP_TOKENS = 24
EPS = 0.3  # of Sink_1 on the page
PACKAGES = ("sinkutils", "torch", "transformers")
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

    tokenizer: None where there is none; the page is of random and repeated ids then.
    texts: natural text of one's own, cut into windows. n, length: texts per probe and
        tokens per text. beside: of `report_page`.
    Raises ValueError as `probe` and `measure` do.
    """
    texts = None if texts is None else list(texts)
    if tokenizer is None:
        tokenizer = WithoutTokenizer(model)
    inputs = _inputs(tokenizer, texts, n, length)
    reports = {title: measure(model, ids) for title, ids in inputs.items()}
    title, main = next(iter(reports.items()))
    size = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(tokenizer, WithoutTokenizer):
        source = "none: there is no tokenizer"
        ids = inputs[title][0]
    else:
        # Maps are drawn of a sentence, as random tokens would say nothing beside a row.
        source, text = "docstrings", SAMPLE
        if texts:
            source, text = "given by the user", texts[0]
        start = [bos_id(tokenizer)] if "BOS" in title else []
        ids = torch.tensor(start + encode(tokenizer, text))
    dtype = next(model.parameters()).dtype
    facts = {
        "model": f"{type(model).__name__}, {size:,} parameters, {dtype}",
        "inputs": f"{main.samples} texts of {length} tokens; the numbers on top are of {title}",
        "natural text": source,
        "token ids": f"SHA-256 {main.digest} ({title})",
        "attention": main.path,
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    }
    maps = _maps(model, tokenizer, ids[:MAP_TOKENS], main)
    return report_page(reports, name, beside, facts, maps)


def report_page(
    reports: Report | Mapping[str, Report],
    name: str = "",
    beside: Mapping[str, Report] | None = None,
    facts: Mapping[str, str] | None = None,
    maps: str = ABSENT,
) -> str:
    """One self-contained HTML page about a model; its numbers are also inside, as JSON.

    It needs neither scripts nor a network.
    reports: of one kind of input, or several by title, the main one first. beside: reports of other
    models by name. facts: how it was measured. maps: figures of attention maps, as SVG.
    Raises ValueError where the first token was not among the targets, and for another model of the
    same name.
    """
    if isinstance(reports, Report):
        reports = {"input": reports}
    beside = beside or {}
    facts = facts or {}
    instance("name", name, str)
    instance("facts", facts, Mapping)
    _check_reports("reports", reports)
    _check_reports("beside", beside)
    require(len(reports) > 0, "reports must have at least one")
    main = next(iter(reports.values()))
    require(
        1 in main.targets,
        f"the page is about the first token: measure(targets=(1, ..)), not {main.targets}",
    )
    name = printable(name or main.name or "a model")
    models = {name: _row(main)}
    for other, report in beside.items():
        require(other != name, f"two models are called {name!r}: give one another name")
        models[printable(other)] = _row(report)
    numbers = ""
    for label, number in models[name].items():
        numbers += f"<div><dt>{label}</dt><dd>{number}</dd></div>"
    inputs = {title: _row(report) for title, report in reports.items()}
    method = {key: {"": value} for key, value in facts.items()}
    contents = {
        "name": name,
        "reports": {title: report.to_dict() for title, report in reports.items()},
        "facts": dict(facts) or None,
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # Figures are SVG in one colour that `_svg` makes the page's own: they follow a dark page.
    with mpl.rc_context(STYLE | dict.fromkeys(INKED, INK)):
        alpha = main.of(1).mean(dim=0)  # (layers, heads)
        heads = heads_by_block(alpha, main.layers, ax=_axes(5.6))
        return Template(page).substitute(
            name=html.escape(name),
            uniform=f"{main.floor:.3f}",
            numbers=numbers,
            inputs=_table(inputs),
            heads=_svg(heads, "Every head's attention to the first token"),
            maps=maps,
            norms=_norms(main),
            models=_table(models),
            facts=_table(method),
            json=json_in_html(contents),
        )


def _check_reports(name: str, reports: Any) -> None:
    """Hold that these are reports by title."""
    instance(name, reports, Mapping)
    for report in reports.values():
        instance(f"a value of {name}", report, Report)


def natural(
    tokenizer: Any,
    texts: list[str] | None,
    n: int = 100,
    length: int = 64,
    bos: bool | None = None,
) -> Tensor:
    """The first tokens of documents, or windows of one's own texts: n of them, if there are.

    A book is one text, and has many windows. bos: None: as the tokenizer itself makes its texts.
    """
    if bos is None:
        bos = bool(adds_bos(tokenizer))
    if texts is None:
        return probe("natural", tokenizer, n, length, bos=bos)
    windows = probe(None, tokenizer, None, length, bos=bos, texts=texts)
    if len(windows) <= n:
        return windows
    return probe(None, tokenizer, n, length, bos=bos, texts=texts)


def _inputs(tokenizer: Any, texts: list[str] | None, n: int, length: int) -> dict[str, Tensor]:
    """Every probe without and, where the tokenizer has one, with a BOS.

    First the natural one as the tokenizer itself makes it; without a tokenizer, random ids.
    """
    adds = adds_bos(tokenizer)
    inputs = {}
    choices = (False,) if adds is None else (adds, not adds)
    for bos in choices:
        suffix = ", BOS first" if bos else ""
        if not isinstance(tokenizer, WithoutTokenizer):
            inputs["natural" + suffix] = natural(tokenizer, texts, n, length, bos)
        for kind in ("random", "repeat"):
            inputs[kind + suffix] = probe(kind, tokenizer, n, length, bos=bos)
    return inputs


def _maps(model: nn.Module, tokenizer: Any, ids: Tensor, report: Report) -> str:
    """Maps of the heads with the most attention to the first token, the least, and two between."""
    alpha = report.of(1).mean(dim=0)  # (layers, heads)
    order = alpha.flatten().argsort(descending=True)  # of all heads, the one with most first
    ranks = torch.linspace(0, len(order) - 1, 4).long()
    ranks = ranks.unique()  # fewer than four of a small model
    heads = []
    for index in order[ranks].tolist():
        layer, head = divmod(index, alpha.shape[1])
        heads.append((report.layers[layer], head))
    with warnings.catch_warnings():  # a short text, of which no Sink_1 is shown
        warnings.simplefilter("ignore")
        kept = measure(model, ids[None], heads=heads, norms=False).kept
    tokens = [token_label(token, tokenizer) for token in ids.tolist()]
    drawn = ""
    for (layer, head), of_head in kept.items():
        title = f"block {layer + 1}, head {head + 1}"
        ax = attention_map(of_head.map[0], tokens, _axes(4.2, 4.2))
        ax.set_title(title)
        drawn += _svg(ax, f"Attention map, {title}")
    return drawn


def _row(report: Report) -> dict[str, str]:
    """The numbers of one model. Of a hybrid model the first block with attention may be the third."""
    first, *later = report.excess_by_layer()
    mean_later = f"{np.mean(later):z.2f}" if later else ABSENT
    low, high = report.interval(1, EPS)
    row = {
        "Sink₁": f"{report.sink(1, EPS):.1f} %",
        "95 % interval": f"{low:.1f} to {high:.1f}",
        f"excess in block {1 + report.layers[0]}": f"{first:z.2f}",
        "excess in later blocks": mean_later,
    }
    if report.star is not None:  # of a learned sink, a key of its own or a sink token
        row["Sink*"] = f"{report.sink_star(EPS):.1f} %"
    if report.hidden_peaks is not None:
        row["element of h₁ / median, largest"] = f"{report.hidden_peaks[:, 0].max():,.0f}"
    return row


def _table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """An HTML table; what a row lacks is a dash."""
    frame = pd.DataFrame.from_dict(rows, orient="index").fillna(ABSENT)
    with pd.option_context("display.max_colwidth", None):
        return str(frame.to_html(border=0))


def _axes(width: float = 4.6, height: float = 3.2) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _norms(report: Report) -> str:
    """Two figures by block: norm ratios of h, k and v, and the largest element of h_1."""
    if report.hidden_peaks is None or report.length == 1:
        return ABSENT
    ratios: dict[str, list[float]] = {}
    norms = {"h": report.hidden_norms, "k": report.key_norms, "v": report.value_norms}
    for symbol, rows in norms.items():
        if rows is not None:  # where a model shows weights alone, nothing is known of k and v
            ratios[symbol] = norm_ratio(rows)
    peaks = {"h": report.hidden_peaks[:, 0].tolist()}
    figure = _curves(report, "norm of token 1 / others", ratios)
    return figure + _curves(report, "largest element of token 1 / median", peaks)


def _curves(report: Report, label: str, curves: Mapping[str, list[float]]) -> str:
    """A figure of numbers by block."""
    ax = _axes()
    for symbol, values in curves.items():
        # Not every block of a hybrid model has attention, keys and values.
        blocks = range(len(values)) if symbol == "h" else report.layers
        from_1 = np.add(blocks, 1)
        ax.plot(from_1, values, "o-", markersize=4, color=CURVES[symbol], label=symbol)
    # Massive activations are hundreds of times the median, most blocks are near one.
    low, high = ax.dataLim.intervaly
    if 0 < 10 * low < high:
        ax.set_yscale("log")
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="block", ylabel=label)
    ax.legend()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter("{x:g}")
    return _svg(ax, f"{label}, by block")


def _svg(ax: Axes, alt: str) -> str:
    """A figure as SVG inside the page, in the page's colours, its text as text."""
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sinkutils"}):
        figure: Any = ax.get_figure(root=True)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    written = drawn.getvalue().replace(INK, "currentColor")
    # From its element on, without the file's head
    _, _, rest = written.partition("<svg ")
    return f'<svg role="img" aria-label="{html.escape(alt)}" {rest}'
