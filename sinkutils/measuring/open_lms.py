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
from sinkutils.data.corpus import load_corpus
from sinkutils.data.probes import KINDS, bos_id, encode
from sinkutils.measuring.own import BOS, TEXT, Subject, subject
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import Report

EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)
TARGETS = (1, 2, 3)
LENGTHS = {16: 100, 32: 50, 64: 25, 128: 16, 256: 8, 512: 4, 1024: 2, 2048: 1}  # T, and how many texts
SAMPLES = 100  # texts of 64 tokens, as in the paper
FEW = 16  # texts, where a mean over texts hardly moves
LONG = (4, 512)  # texts and T of streaming
STREAMS = ((128, 0), (127, 1), (124, 4))  # windows and kept first keys, one cache size
MASSIVE = 1000  # times the median dimension
NUMBERS = ("sink", "interval", "alpha")
NORMS = {
    "natural": ("embedding_norms", "hidden_norms", "query_norms", "key_norms", "value_norms"),
    "repeat": ("hidden_norms",),
}
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
    corpus = load_corpus(measured.corpus) if isinstance(measured.corpus, str) else measured.corpus
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
        "natural": corpus.identity | {"texts": "first tokens of documents of the probe split"},
    }


def probes(measured: Subject) -> dict[str, Any]:
    """Table 1's three kinds of input, without and with BOS; T = 64, 100 texts. Norms of natural text (Fig. 2 top),
    hidden ones of repeated tokens too (Proposition 4).
    """
    result: dict[str, Any] = {}
    for kind in KINDS:
        result[kind] = {}
        for first in (TEXT, BOS):
            ids = measured.inputs(kind, SAMPLES, 64, first=first)
            report = measured.measure(ids, targets=TARGETS, epsilons=EPSILONS, bos=first == BOS)
            result[kind][first] = summary(report, NUMBERS + NORMS.get(kind, ()))
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
    """Fig. 2 bottom by layer and head: cos(q_i, k_j) and ||q_i|| ||k_j||, i >= 2, for j = 1 and for 1 < j <= i."""
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
    heads = []
    for layer, head in chosen:
        weights = kept[layer, head].map
        assert weights is not None
        rows = [[round(share, 3) for share in row[: i + 1]] for i, row in enumerate(weights[0].tolist())]
        heads.append({"layer": layer, "head": head, "alpha_1": float(alpha[layer, head]), "rows": rows})
    tokens = [measured.tokenizer.decode([token]) for token in ids[0].tolist()]
    return {"text": SAMPLE, "tokens": tokens, "heads": heads}


def first_token(measured: Subject) -> dict[str, Any]:
    """x_1 alone: by block the largest dimensions of h_1 over the median (massive activations), and by layer how near
    k_1 is to its mean over texts (Section 5: the sink's key is a constant).
    """
    from sinkutils.measuring import surgery  # needs transformers

    result: dict[str, Any] = {"samples": FEW}
    for first in (TEXT, BOS):
        ids = measured.inputs("natural", FEW, 64, first=first)
        values, dimensions = surgery.massive(measured.model, ids).topk(3, dim=-1)
        keys = torch.stack([k for k, _ in surgery.first_keys_values(measured.model, ids)])  # (L, n, H_kv, D)
        near = torch.cosine_similarity(keys, keys.mean(dim=1, keepdim=True), dim=-1).mean(dim=(1, 2))
        result[first] = {
            "dimensions": dimensions.tolist(),
            "over_median": values.tolist(),
            "cosine_k_1_to_mean": near.tolist(),
        }
    return result


def operations(measured: Subject) -> dict[str, Any]:
    """Surgery on natural text: losses in nats a token of tokens 2..T, shares in percent at eps = 0.3."""
    from sinkutils.measuring import surgery

    model, first = measured.model, BOS if REAL_MODELS[measured.name].bos else TEXT
    ids, plain = (measured.inputs("natural", FEW, 64, first=start) for start in (first, TEXT))
    donors = measured.inputs("natural", FEW, 64, seed=1, first=first)

    def told(outcome: surgery.Outcome) -> dict[str, float]:
        report = outcome.report
        assert report is not None
        star = {} if report.star is None else {"sink_star": report.sink_star()}
        return {"loss": outcome.loss, "sink_1": report.sink(), "sink_2": report.sink(2), **star}

    largest = surgery.massive(model, ids).amax(dim=-1)
    reached = (largest > MASSIVE).nonzero()[:, 0].tolist()
    blocks = sorted({reached[0], reached[len(reached) // 2], reached[-1]}) if reached else []
    layers = len(largest)
    long = measured.inputs("natural", *LONG, first=first)
    windows = {f"{window} + {sinks}": surgery.stream(model, long, window, sinks) for window, sinks in STREAMS}
    windows["full"] = surgery.untouched(model, long, shares=False)
    return {
        "samples": FEW,
        "T": 64,
        "first": first,
        "untouched": told(surgery.untouched(model, ids)),
        "plain": told(surgery.untouched(model, plain)),  # without a BOS, what a transplant puts k* and v* before
        "transplant": told(surgery.transplant(model, plain, donors)),
        "transplant, v* = 0 from layer": {
            str(layer): told(surgery.transplant(model, plain, donors, zero_values_from=layer))
            for layer in (0, layers // 4, layers // 2)
        },
        "hide": told(surgery.hide(model, ids)),
        "set back 3 dimensions after block": {
            str(block): told(surgery.set_back(model, ids, block)) for block in blocks
        },
        "rounded to bits": {
            str(bits): [surgery.rounded(model, ids, bits, first_exact=exact).loss for exact in (False, True)]
            for bits in (8, 6, 5, 4, 3)
        },
        "stream": {
            "samples": LONG[0],
            "T": LONG[1],
            "after": 2 * STREAMS[0][0],
            "loss": {name: float(one.losses[:, 2 * STREAMS[0][0] :].mean()) for name, one in windows.items()},
        },
    }


SECTIONS = {
    "about": about,
    "probes": probes,
    "lengths": lengths,
    "angles": angles,
    "maps": maps,
    "first_token": first_token,
    "operations": operations,
}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value
