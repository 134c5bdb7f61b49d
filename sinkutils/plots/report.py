"""An HTML page about one model: its sink on several inputs, head by head, beside other models."""

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
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import (
    WithoutTokenizer,
    is_stream,
    one_by_one,
    probe,
    read_ahead,
)
from sinkutils.measuring.report import Report, norm_ratio
from sinkutils.measuring.texts import Pieces, adds_bos, bos_id, encode, natural_digest
from sinkutils.plots.figures import attention_map, heads_by_block, token_label
from sinkutils.plots.theme import COLORS, STYLE, json_in_html, printable

# The text of the attention maps, in our own words.
SAMPLE = (
    "A sink is where water goes when nobody needs it. A head of attention has to put its weight "
    "somewhere too: its shares sum to one, whether or not the text holds what it looks for. Most "
    "heads of a trained model put what is left over on the first token, and that token learns to "
    "carry nothing."
)
# A placeholder: `_svg` replaces this colour by the page's text colour, light or dark.
INK = "#010203"
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
# The colours of hidden states, keys and values
CURVES = {"h": COLORS["first"], "k": COLORS["other"], "v": COLORS["baseline"]}
MAP_TOKENS = 24  # in an attention map
EPS = 0.3  # the threshold of Sink_1 on the page
PACKAGES = ("sinkutils", "torch", "transformers")  # whose versions the page names
ABSENT = "–"  # in the place of a number that was not measured


def report_model(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    texts: Iterable[str] | Pieces | None = None,
    n: int = 100,
    length: int = 64,
    beside: Mapping[str, Report] | None = None,
) -> str:
    """Measure a model on the three probes, with and without a BOS, and return an HTML page.

    tokenizer: None if there is none. The page is then about random and repeated ids only.
    texts: your own natural text, which is cut into windows; None: docstrings. A stream is read
        only as far as it is needed.
    n, length: texts per probe, and tokens per text.
    beside: as in `report_page`.
    Raises ValueError like `probe` and `measure`.
    """
    if tokenizer is None:
        tokenizer = WithoutTokenizer(model)
    usable = texts is None or not isinstance(tokenizer, WithoutTokenizer)
    require(usable, "texts need a tokenizer, and there is none: give one, or leave texts out")
    if texts is not None and not isinstance(texts, Pieces):
        if is_stream(texts):
            texts = (text for text, _ in read_ahead(tokenizer, n, length, texts))
        texts = list(one_by_one(texts))
    inputs = _inputs(tokenizer, texts, n, length)
    reports = {title: measure(model, ids) for title, ids in inputs.items()}
    title, main = next(iter(reports.items()))
    size = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(tokenizer, WithoutTokenizer):
        source = "none: there is no tokenizer"
        ids = inputs[title][0]
    else:
        # The maps show a sentence, because random tokens would make labels without a meaning.
        source, text = f"docstrings, SHA-256 {natural_digest()}", SAMPLE
        if texts:
            first = texts[0]
            source, text = "given by the user", first if isinstance(first, str) else first[0]
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
    """A self-contained HTML page about a model. It also contains its numbers as JSON.

    The page needs neither scripts nor a network.
    reports: one report, or several by the title of their input, the main one first.
    name: the name of the model.
    beside: reports of other models, by name.
    facts: how the model was measured, as title -> text.
    maps: figures of attention maps, as SVG.
    Raises ValueError if the first token is not among the targets, or if two models have the same
    name.
    """
    if isinstance(reports, Report):
        reports = {"input": reports}
    beside = beside or {}
    facts = facts or {}
    instance("name", name, str)
    instance("facts", facts, Mapping)
    for argument, values in (("reports", reports), ("beside", beside)):
        instance(argument, values, Mapping)
        for report in values.values():
            instance(f"a value of {argument}", report, Report)
    require(len(reports) > 0, "reports must have at least one")
    main = next(iter(reports.values()))
    about = "the page is about the first token: measure(targets=(1, ..))"
    require(1 in main.targets, f"{about}, not {main.targets}")
    name = printable(name or main.name or "a model")
    models = {name: _row(main)}
    for other, report in beside.items():
        require(other != name, f"two models are called {name!r}: give one another name")
        models[printable(other)] = _row(report)
    own = models[name].items()
    numbers = "".join(f"<div><dt>{label}</dt><dd>{number}</dd></div>" for label, number in own)
    inputs = {title: _row(report) for title, report in reports.items()}
    method = {key: {"": value} for key, value in facts.items()}
    contents = {
        "name": name,
        "reports": {title: report.to_dict() for title, report in reports.items()},
        "facts": dict(facts) or None,
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # Text and axes are drawn in the placeholder INK, so that figures also suit a dark page.
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


def natural(
    tokenizer: Any,
    texts: list[str] | Pieces | None,
    n: int = 100,
    length: int = 64,
    bos: bool | None = None,
) -> Tensor:
    """The natural probe: n texts of `length` tokens, or fewer if there are not so many.

    Without texts these are the beginnings of docstrings. A user's texts are cut into windows: a
    book, for instance, is one text with many windows.
    bos: whether a BOS stands first; None: whether the tokenizer itself puts one.
    """
    if bos is None:
        bos = bool(adds_bos(tokenizer))
    if texts is None:
        return probe("natural", tokenizer, n, length, bos=bos)
    if not isinstance(texts, Pieces):
        windows = probe(None, tokenizer, None, length, bos=bos, texts=texts)
        if len(windows) <= n:
            return windows
    return probe(None, tokenizer, n, length, bos=bos, texts=texts)


def _inputs(
    tokenizer: Any, texts: list[str] | Pieces | None, n: int, length: int
) -> dict[str, Tensor]:
    """Title -> token ids of every probe, without a BOS and, if the tokenizer has one, with a BOS.

    The first one is the main input: natural text as the tokenizer itself makes it or, without a
    tokenizer, random ids.
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
    """The attention maps of four heads on ids (T,), as SVG.

    They are the head with the most attention to the first token, the one with the least, and two
    in between.
    """
    alpha = report.of(1).mean(dim=0)  # (layers, heads)
    order = alpha.flatten().argsort(descending=True)  # the head with the most attention first
    # A small model may have fewer than four heads.
    ranks = torch.linspace(0, len(order) - 1, 4).long().unique()
    places = [divmod(index, alpha.shape[1]) for index in order[ranks].tolist()]
    heads = [(report.layers[layer], head) for layer, head in places]
    with warnings.catch_warnings():  # `measure` warns of short texts, but no Sink_1 is shown here
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
    """One row of a table: label -> number of a report.

    The first attention layer is named by its block: in a hybrid model this may be block 3.
    """
    first, *later = report.excess_by_layer()
    mean_later = f"{np.mean(later):z.2f}" if later else ABSENT
    low, high = report.interval(1, EPS)
    row = {
        "Sink₁": f"{report.sink(1, EPS):.1f} %",
        "95 % interval": f"{low:.1f} to {high:.1f}",
        f"excess in block {1 + report.layers[0]}": f"{first:z.2f}",
        "excess in later blocks": mean_later,
    }
    if report.star is not None:  # the model has a key bias, a sink token or a learned sink logit
        row["Sink*"] = f"{report.sink_star(EPS):.1f} %"
    if report.hidden_peaks is not None:
        row["element of h₁ / median, largest"] = f"{report.hidden_peaks[:, 0].max():,.0f}"
    return row


def _table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """An HTML table, with a dash where a row has no value."""
    frame = pd.DataFrame.from_dict(rows, orient="index").fillna(ABSENT)
    with pd.option_context("display.max_colwidth", None):
        return str(frame.to_html(border=0))


def _axes(width: float = 4.6, height: float = 3.2) -> Axes:
    """The axes of a new figure. Its size is in inches."""
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _norms(report: Report) -> str:
    """Two figures over blocks, as SVG: the norm ratios of h, k and v, and h_1's largest element."""
    if report.hidden_peaks is None or report.length == 1:
        return ABSENT
    norms = {"h": report.hidden_norms, "k": report.key_norms, "v": report.value_norms}
    # Some models show their weights alone, without keys and values.
    ratios = {symbol: norm_ratio(rows) for symbol, rows in norms.items() if rows is not None}
    peaks = {"h": report.hidden_peaks[:, 0].tolist()}
    figure = _curves(report, "norm of token 1 / others", ratios)
    return figure + _curves(report, "largest element of token 1 / median", peaks)


def _curves(report: Report, label: str, curves: Mapping[str, list[float]]) -> str:
    """A figure of curves over blocks, as SVG. curves: "h", "k" or "v" -> a number per block."""
    ax = _axes()
    for symbol, values in curves.items():
        # Every block has hidden states. In a hybrid model, only some have keys and values.
        blocks = range(len(values)) if symbol == "h" else report.layers
        ax.plot(np.add(blocks, 1), values, "o-", ms=4, color=CURVES[symbol], label=symbol)
    # Massive activations are hundreds of times the median, while most blocks are near 1.
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
    """The figure as SVG for the page: in the page's text colour, and with text kept as text."""
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sinkutils"}):
        figure: Any = ax.get_figure(root=True)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    # Without the XML header in front of the <svg> element
    _, _, rest = drawn.getvalue().replace(INK, "currentColor").partition("<svg ")
    return f'<svg role="img" aria-label="{html.escape(alt)}" {rest}'
