"""The committed measurements of the real models, data/open_lms/MODEL.json: how they are made, kept and read.

`python -m sinkutils measure MODEL --save` makes all sections but two; `domains` and `hellaswag`, on texts that are not
ours to keep, come from benchmarks/open_lm_texts.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sinkutils import paths
from sinkutils.data.probes import KINDS, bos_id, encode
from sinkutils.measuring.own import BOS, TEXT, Subject, subject
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import Report

EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)
TARGETS = (1, 2, 3)
LENGTHS = {16: 100, 32: 100, 64: 100, 128: 32, 256: 16, 512: 8, 1024: 4, 2048: 2}  # T, and how many texts
FEW = 16  # texts, where a mean over texts hardly moves
NUMBERS = ("sink", "interval", "alpha")
NORMS = ("embedding_norms", "hidden_norms", "query_norms", "key_norms", "value_norms")
# The text of the maps: our own words.
SAMPLE = (
    "A sink is where water goes when nobody needs it. A head of attention has to put its weight somewhere too: its "
    "shares sum to one, whether or not the text holds what it looks for. Most heads of a trained model put what is "
    "left over on the first token, and that token learns to carry nothing."
)


def recorded(name: str) -> dict[str, Any]:
    """The committed measurements of a real model by section. Raises ValueError for a name that has none."""
    path = paths.OPEN_LMS / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in paths.OPEN_LMS.glob("*.json"))) or "none"
        raise ValueError(f"data/open_lms has no measurements of {name!r} (it has: {known})")
    return json.loads(path.read_text(encoding="utf-8"))


def add(name: str, section: str, found: Any) -> Path:
    """Put one section into a model's file, in place of what stood there; numbers get four significant digits."""
    path = paths.OPEN_LMS / f"{name}.json"
    sections = recorded(name) if path.exists() else {}
    sections[section] = _short(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(sections.items()))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    temporary.replace(path)
    return path


def record(name: str) -> Path:
    """Measure a real model, section by section, and keep each in data/open_lms (some minutes on one core)."""
    measured = subject(name)
    for section, make in SECTIONS.items():
        path = add(name, section, make(measured))
    return path


def summary(report: Report, keys: Sequence[str] = NUMBERS) -> dict[str, Any]:
    """The chosen parts of `Report.to_dict`, with T and how many texts."""
    whole = report.to_dict()
    return {key: whole[key] for key in ("T", "samples", "bos", "floor", *keys)}


def about(measured: Subject) -> dict[str, Any]:
    """What was measured: where the weights are from, their hash and precision, the software."""
    known = REAL_MODELS[measured.name]
    return {
        "model": measured.name,
        "title": known.title,
        "packages": [pin for pin, _ in known.packages],
        "sha256": known.sha256,
        "precision": f"{known.precision}, computed in float32",
        "licence": known.licence,
        "hub_id": known.hub_id,
        "trained_with_bos": known.bos,
        "parameters": sum(p.numel() for p in measured.model.parameters()),
        "versions": {package: version(package).partition("+")[0] for package in ("torch", "transformers")},
        "natural": f"corpus {measured.corpus!r}, first tokens of documents",
    }


def probes(measured: Subject) -> dict[str, Any]:
    """Table 1's three kinds of input, without and with BOS; T = 64, 100 texts. Norms of natural text (Fig. 2 top)."""
    result: dict[str, Any] = {}
    for kind in KINDS:
        result[kind] = {}
        for first in (TEXT, BOS):
            ids = measured.inputs(kind, 100, 64, first=first)
            report = measured.measure(ids, targets=TARGETS, epsilons=EPSILONS, bos=first == BOS)
            result[kind][first] = summary(report, NUMBERS + NORMS * (kind == "natural"))
    return result


def lengths(measured: Subject) -> dict[str, Any]:
    """Sink_1 over T, natural text without and with BOS; the longer, the fewer texts."""
    result: dict[str, Any] = {}
    for first in (TEXT, BOS):
        result[first] = {}
        for length, n in LENGTHS.items():
            ids = measured.inputs("natural", n, length, first=first)
            report = measured.measure(ids, epsilons=EPSILONS, norms=False, bos=first == BOS)
            result[first][str(length)] = summary(report)
    return result


def angles(measured: Subject) -> dict[str, Any]:
    """By layer and head: cos(q_i, k_j) and ||q_i|| ||k_j|| for j = 1 and for the other j <= i, i >= 2 (Fig. 2 bottom)."""
    ids = measured.inputs("natural", FEW, 64, first=BOS if REAL_MODELS[measured.name].bos else TEXT)
    layers, heads = measured.measure(ids[:1], norms=False).alpha.shape[2:]
    pairs = [(layer, head) for layer in range(layers) for head in range(heads)]
    kept = measured.measure(ids, norms=False, heads=pairs, keep=("qk",)).kept
    others = torch.ones(64, 64).tril().bool()
    others[:, 0] = others[0] = False
    result: dict[str, Any] = {"samples": FEW, "T": 64}
    for name in ("cosine", "norm_product"):
        all_heads = torch.stack([getattr(kept[pair], name).mean(dim=0) for pair in pairs])  # (L * H, T, T)
        result[name] = {
            "first": all_heads[:, 1:, 0].mean(dim=1).view(layers, heads).tolist(),
            "others": all_heads[:, others].mean(dim=1).view(layers, heads).tolist(),
        }
    return result


def maps(measured: Subject) -> dict[str, Any]:
    """A_ij on one text of ours, of the heads with the least, middling and most alpha_1 (Fig. 1)."""
    bos = [bos_id(measured.tokenizer)] * REAL_MODELS[measured.name].bos
    ids = torch.tensor([(bos + encode(measured.tokenizer, SAMPLE))[:48]])
    alpha = measured.measure(ids, norms=False).alpha[0, 0]
    order = alpha.flatten().argsort().tolist()
    chosen = [divmod(order[round(share * (len(order) - 1))], alpha.shape[1]) for share in (0, 0.5, 0.9, 1)]
    kept = measured.measure(ids, norms=False, heads=chosen, keep=("map",)).kept
    return {
        "text": SAMPLE,
        "tokens": [measured.tokenizer.decode([token]) for token in ids[0].tolist()],
        "heads": [
            {"layer": layer, "head": head, "alpha_1": float(alpha[layer, head]),
             "rows": [row[: i + 1].tolist() for i, row in enumerate((kept[layer, head].map[0] * 1000).round() / 1000)]}
            for layer, head in chosen
        ],
    }  # fmt: skip


SECTIONS = {"about": about, "probes": probes, "lengths": lengths, "angles": angles, "maps": maps}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value
