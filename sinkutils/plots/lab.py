"""The lab: one HTML page that shows attention sinks live, without a network.

Its sources are in `lab_page/`. docs/lab puts the study's models into it; `lab_of_model` records a
model of yours, for a page of its own. A small model can be grown in either.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkutils.checks import integer, require
from sinkutils.measuring import surgery
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import BOS, X_FIX, Subject
from sinkutils.measuring.report import Report
from sinkutils.measuring.texts import bos_id, encode, special_ids
from sinkutils.paths import PACKAGE, read_yaml
from sinkutils.plots.figures import token_label
from sinkutils.plots.interactive import PALETTE, maps_of
from sinkutils.plots.theme import COLORS, json_in_html, printable

SOURCES = Path(__file__).with_name("lab_page")
SHARED = ("draw.js", "toy.js")  # shared with the notebooks' interactive pictures
# Of base 85 three letters mean something in HTML: the page has others in their place.
SAFE = str.maketrans("&<>", ",.:")
TOKENS = 64  # of a text in the page, which its pictures are made for
LEVELS = 256  # of a recorded weight's square root: a byte
MOST = 20  # texts in a page
NEAREST = 10  # the most extra attention is looked for at so many first tokens


def lab_of_model(subject: Subject, texts: Sequence[str], length: int = TOKENS) -> str:
    """The lab's page with a model of yours: what it attends to in some texts, recorded.

    Recorded are every head's map, the norms of values, the likeliest next tokens as the model is
    and, where `surgery` can operate on it, without the first key and with the largest element set
    back, and a report. In the page a small model can be grown beside it.
    texts: at least one. In front stands what training put there: x_fix, a BOS or nothing.
    length: how many tokens of each text are read, at most 64.
    Raises ValueError like `measure`, and for a text of fewer than 3 tokens.
    """
    length = integer("length", length, least=3, most=TOKENS)
    require(0 < len(texts) <= MOST, f"the page has room for 1 to {MOST} texts, got {len(texts)}")
    require(len({*texts}) == len(texts), "give each text once")
    model = subject.model
    tokenizer = subject.tokenizer
    start = first_tokens(subject)
    recorded: list[dict[str, Any]] = []
    maps: list[bytes] = []
    rows: list[dict[str, Any]] = []
    for text in texts:
        ids = torch.tensor([start + encode(tokenizer, text)])[:, :length]
        T = ids.shape[1]
        front = " with the one in front of it" if start else ""
        require(T >= 3, f"a text must have at least 3 tokens, and {text!r:.60} has {T}{front}")
        shown, shades, report = record(model, ids, tokenizer, LEVELS)
        recorded.append(shown)
        maps.append(shades)
        rows.append(report_row(report, shown["labels"]))
    count = report.alpha.shape[-1]
    real = {"H": count, "levels": LEVELS, "texts": recorded, "packed": deflated(b"".join(maps))}
    first = int(np.argmax(recorded[0]["alpha"])) + 1  # the head that is shown first
    data = {"models": {}, "real": {"own": real}, "sentences": list(texts), "report": rows}
    data["words"] = {"own": {"title": printable(subject.name), "about": "", "head": first}}
    return page_of(data | {"text": deflated(own_text().encode())})


def record(
    model: nn.Module, ids: Tensor, tokenizer: Any, levels: int
) -> tuple[dict[str, Any], bytes, Report]:
    """What the page shows of a model's pass through ids (1, T), and its report.

    Of it every head's map as bytes of so many levels, alpha, the norms of the values and what comes
    next.
    """
    T = ids.shape[1]
    report = measure(model, ids, targets=range(1, min(NEAREST, T) + 1))
    heads = [(layer, head) for layer in report.layers for head in range(report.alpha.shape[-1])]
    weights, shades = maps_of(model, ids, heads, T, levels)
    labels = [token_label(token, tokenizer) for token in ids[0].tolist()]
    alpha = weights[0, :, :, 0].mean(axis=-1)  # (heads,)
    shown = {"labels": labels, "alpha": decimals(alpha, 3)}
    shown["said"] = said_next(model, ids, tokenizer, report)
    if report.value_norms is not None:
        shown["norms"] = significant(report.value_norms, 3)
    return shown, shades, report


def first_tokens(subject: Subject) -> list[int]:
    """What stands before a text, as in training: x_fix, a BOS or nothing."""
    tokenizer = subject.tokenizer
    if X_FIX in subject.firsts and subject.fixed_position == 1:
        return [special_ids(tokenizer, subject.name)["fix_id"]]
    if subject.bos_in_training and BOS in subject.firsts:
        return [bos_id(tokenizer)]
    return []


def decimals(values: Any, digits: int) -> Any:
    """Numbers for JSON, as lists, rounded to so many decimals."""
    return np.asarray(values, dtype=float).round(digits).tolist()


def significant(values: Any, digits: int) -> Any:
    """Numbers for JSON, as lists, rounded to so many significant digits."""
    return [[float(f"{value:.{digits}g}") for value in row] for row in np.asarray(values)]


def said_next(
    model: nn.Module, ids: Tensor, tokenizer: Any, report: Report
) -> list[dict[str, Any]]:
    """What the model says after each token: as it is, without the first key, with its largest
    element set back.

    Of each: the likeliest tokens with their probabilities, and the probability of the token that the
    text has. What `surgery` refuses of this model is left out.
    """
    block = 0  # after which the largest element first stands, at half its size or more
    if report.first_elements is not None:
        largest = report.first_elements.amax(dim=1)  # (blocks,)
        block = int((largest >= largest.max() / 2).nonzero()[0])
    operations: dict[str, Callable[..., surgery.Outcome]] = {
        "words_untouched": surgery.untouched,
        "words_hidden": surgery.hide,
        "words_set_back": partial(surgery.set_back, block=block),
    }
    rows = []
    for row, operation in operations.items():
        try:
            outcome = operation(model, ids)
        except ValueError:
            continue
        likeliest = []  # after each token, in pairs of a label and a probability
        for tokens, shares in zip(outcome.likeliest[0], outcome.shares[0], strict=True):
            labels = [token_label(token, tokenizer) for token in tokens.tolist()]
            likeliest.append(list(zip(labels, decimals(shares, 2), strict=True)))
        shares_of_text = decimals(outcome.losses[0].neg().exp(), 3)
        rows.append({"row": row, "next": likeliest, "shares": shares_of_text})
    return rows


def report_row(report: Report, labels: Sequence[str]) -> dict[str, Any]:
    """What the page's report says of a text."""
    most = max(report.targets, key=report.excess)
    excess = f"{report.excess(most):.2f}"
    numbers = report.summary()
    row: dict[str, Any] = {
        "sink": f"{numbers['sink_1']:.1f}",
        "excess": f"{report.excess():.2f}",
        "most": {"token": labels[most - 1], "place": most, "excess": excess},
        "tokens": len(labels),
    }
    if "element" in numbers:
        row["element"] = f"{numbers['element']:.0f}"
    if "value_ratio" in numbers:
        row["value"] = f"{numbers['value_ratio']:.2f}"
    return row


def own_text() -> str:
    """The docstrings of this package, cut by a zero: what a model that grows in the page reads."""
    texts = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append(ast.get_docstring(node) or "")
    return "\0".join(text for text in texts if text)


def deflated(content: bytes) -> str:
    """Deflated, in letters."""
    return in_letters(zlib.compress(content, 9))


def in_letters(content: bytes) -> str:
    """Bytes as a page holds them, which model.js reads: in base 85, a 16th shorter than in 64."""
    return base64.b85encode(content).decode().translate(SAFE)


def page_of(data: dict[str, Any]) -> str:
    """The page with these models: words, sources and data in their places.

    `first`, if it is there, is the map that the page shows while it is still being read.
    """
    english = read_yaml(SOURCES / "texts.yaml")
    page = (SOURCES / "page.html").read_text(encoding="utf-8")
    written = set(re.findall(r'data-say="(\w+)">', page))  # the script reads these words there
    words = {name: text for name, text in english["page"].items() if name not in written}
    texts = {"en": {"language": english["language"], "page": words, "said": english["said"]}}
    for file in sorted(SOURCES.glob("texts.*.yaml")):
        texts[file.suffixes[0][1:]] = read_yaml(file)
    tokenizer = json.loads((SOURCES / "tokenizer.json").read_text(encoding="utf-8"))
    whole = {"palette": PALETTE, "colors": COLORS, "tokenizer": tokenizer, "texts": texts}
    whole |= {"words": english["models"], "samples": english["samples"], "tour": []}
    if data["models"]:  # the tour is one through the study's models
        whole["tour"] = english["tour"]
    rest = {name: part for name, part in data.items() if name != "first"}
    parts = {"data": json_in_html(whole | rest), "noscript": english["page"]["noscript"]}
    parts["first"] = json_in_html(
        {"palette": PALETTE, "colors": COLORS, "first": data.get("first")}
    )
    shared = [Path(__file__).with_name(name) for name in SHARED]
    for file in (*shared, *SOURCES.glob("*.js"), SOURCES / "style.css"):
        parts[file.name] = file.read_text(encoding="utf-8")
    # English stands in the page itself, so that it can be read before its scripts run.
    page = re.sub(r'data-say="(\w+)">', lambda name: name[0] + english["page"][name[1]], page)
    return re.sub(r"\[\[(\S+?)\]\]", lambda name: parts[name[1]], page)
