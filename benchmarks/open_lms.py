"""What Section 3 shows of the real models, by section, into data/open_lms: python benchmarks/open_lms.py smollm2 ..

Some minutes a model on one core. `domains` and `hellaswag`, on texts that are not ours to keep, come from
open_lm_texts.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sinkutils import paths
from sinkutils.measuring.probes import BOS, PROBES, TEXT, Subject, bos_id, encode
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import Kept, Report
from sinkutils.names import subject
from sinkutils.plots.report import SAMPLE
from sinkutils.study.corpus import load_corpus

EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.5)
TARGETS = (1, 2, 3)
LENGTHS = {
    16: 100,
    32: 50,
    64: 25,
    128: 16,
    256: 8,
    512: 4,
    1024: 2,
    2048: 1,
}  # T, and how many texts
SAMPLES = 100  # texts of 64 tokens, as in the paper
FEW = 16  # texts, where a mean over texts hardly moves
LONG = (20, 512)  # texts and T of streaming
STREAMS = ((128, 0), (127, 1), (124, 4))  # windows and kept first keys, one cache size
MASSIVE = 1000  # times the median dimension
NUMBERS = ("sink", "interval", "alpha")
NORMS = {
    "natural": ("embedding_norms", "hidden_norms", "key_norms", "value_norms"),
    "repeat": ("hidden_norms",),
}
DIGITS = {"rows": 3, "cosine": 2, "norm_product": 1}  # of the maps that are kept


def recorded(name: str) -> dict[str, Any]:
    """The measurements of a real model that are kept, by section."""
    return json.loads((paths.OPEN_LMS / f"{name}.json").read_text(encoding="utf-8"))


def add(name: str, section: str, values: Any) -> Path:
    """Put one section into a model's file, in place of what stood there; numbers get four significant digits."""
    path = paths.OPEN_LMS / f"{name}.json"
    sections = recorded(name) if path.exists() else {}
    sections[section] = short(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(sections.items())
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    temporary.replace(path)
    return path


def record(name: str) -> Path:
    """Measure a real model, section by section, and keep each in data/open_lms (some minutes on one core)."""
    measured = subject(name)
    for section, make in SECTIONS.items():
        path = add(name, section, make(measured, SAMPLES))
    return path


def summary(report: Report, keys: Sequence[str] = NUMBERS) -> dict[str, Any]:
    """The chosen parts of `Report.to_dict`, with T and how many texts."""
    whole = report.to_dict()
    return {key: whole[key] for key in ("T", "samples", "bos", "floor", *keys)}


def usual_first(measured: Subject) -> str:
    """What stood first in training: known of the real models and of our records, else what the tokenizer puts there."""
    if measured.name in REAL_MODELS:
        return BOS if REAL_MODELS[measured.name].bos else TEXT
    if measured.firsts[0] == TEXT and BOS in measured.firsts:
        ids = measured.tokenizer.encode("a")
        return BOS if getattr(ids, "ids", ids)[0] == bos_id(measured.tokenizer) else TEXT
    return measured.firsts[0]


def about(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """What was measured: parameters, software, text; of a real model also where the weights are from, their hash and
    precision.
    """
    corpus = measured.corpus or load_corpus("docstrings")
    facts = {
        "model": measured.name,
        "trained_with_bos": usual_first(measured) == BOS,
        "parameters": sum(p.numel() for p in measured.model.parameters()),
        "versions": {
            package: version(package).partition("+")[0] for package in ("torch", "transformers")
        },
        "natural": corpus.identity | {"texts": "first tokens of documents of the probe split"},
    }
    if measured.name not in REAL_MODELS:
        return facts | {"title": measured.name}
    known = REAL_MODELS[measured.name]
    facts |= {key: getattr(known, key) for key in ("title", "sha256", "licence", "hub_id")}
    return facts | {"packages": known.pins, "precision": f"{known.precision}, computed in float32"}


def context(measured: Subject) -> int:
    """C, the longest input that a model was made for."""
    config: Any = measured.model.config
    return getattr(config, "max_position_embeddings", None) or config.context_length


def probes(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """Table 1's three kinds of input, with what can stand first; T = 64, 100 texts. Norms of natural text (Fig. 2 top),
    hidden ones of repeated tokens too (Proposition 4).
    """
    result: dict[str, Any] = {kind: {} for kind in PROBES}
    for kind, first in product(PROBES, measured.firsts):
        report = _measured(measured, kind, n, _length(measured), first, targets=TARGETS, norms=True)
        result[kind][first] = summary(report, NUMBERS + NORMS.get(kind, ()))
    return result


def _measured(
    measured: Subject,
    kind: str,
    n: int,
    length: int,
    first: str,
    texts: list[str] | None = None,
    **options: Any,
) -> Report:
    ids = measured.inputs(kind, n, length, first=first, texts=texts)
    return measured.measure(
        ids, **{"epsilons": EPSILONS, "norms": False, "bos": first == BOS, **options}
    )


def lengths(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """Sink_1 over T, natural text with what can stand first; the longer, the fewer texts."""
    known = {
        length: min(n, texts) for length, texts in LENGTHS.items() if length <= context(measured)
    }
    return {
        first: {
            str(T): summary(_measured(measured, "natural", texts, T, first))
            for T, texts in known.items()
        }
        for first in measured.firsts
    }


def angles(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """Fig. 2 bottom by layer and head: cos(q_i, k_j) and ||q_i|| ||k_j||, i >= 2, for j = 1 and for 1 < j <= i."""
    length = _length(measured)
    ids = measured.inputs("natural", min(n, FEW), length, first=usual_first(measured))
    report = measured.measure(ids[:1], norms=False)
    layers, heads = report.alpha.shape[2:]
    pairs = [(layer, head) for layer in report.layers for head in range(heads)]
    products = measured.measure(ids, norms=False, heads=pairs).kept
    others = torch.ones(length, length).tril().bool()
    others[:, 0] = others[0] = False
    result: dict[str, Any] = {"samples": len(ids), "T": length}
    for name in ("cosine", "norm_product"):
        all_heads = torch.stack(
            [products_of(products[pair])[name].mean(dim=0) for pair in pairs]
        )  # (L * H, T, T)
        result[name] = {
            "first": all_heads[:, 1:, 0].mean(dim=1).view(layers, heads).tolist(),
            "others": all_heads[:, others].mean(dim=1).view(layers, heads).tolist(),
        }
    return result


def products_of(kept: Kept) -> dict[str, torch.Tensor]:
    """cos(q_i, k_j) and ||q_i|| ||k_j|| of one head (Fig. 2 bottom), (samples, T, T) each."""
    assert kept.queries is not None and kept.keys is not None
    product = kept.queries.norm(dim=-1)[:, :, None] * kept.keys.norm(dim=-1)[:, None]
    return {"cosine": kept.queries @ kept.keys.mT / product, "norm_product": product}


def maps(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """A_ij on one text of ours, of the heads with the least, middling and most alpha_1 (Fig. 1), each with
    cos(q_i, k_j) and ||q_i|| ||k_j|| (Fig. 2 bottom).
    """
    bos = [bos_id(measured.tokenizer)] if usual_first(measured) == BOS else []
    ids = torch.tensor([(bos + encode(measured.tokenizer, SAMPLE))[: min(48, context(measured))]])
    report = measured.measure(ids, norms=False)
    alpha = report.alpha[0, 0]
    order = alpha.flatten().argsort().tolist()
    chosen = [
        divmod(order[round(share * (len(order) - 1))], alpha.shape[1]) for share in (0, 0.5, 0.9, 1)
    ]
    pairs = [(report.layers[row], head) for row, head in chosen]
    whole = measured.measure(ids, norms=False, heads=pairs).kept
    heads = [
        {"layer": layer, "head": head, "alpha_1": float(alpha[row, head])}
        | {
            key: _lower(({"rows": kept.map} | products_of(kept))[key], digits)
            for key, digits in DIGITS.items()
        }
        for (row, _), (layer, head) in zip(chosen, pairs, strict=True)
        for kept in [whole[layer, head]]
    ]
    tokens = [measured.tokenizer.decode([token]) for token in ids[0].tolist()]
    return {"text": SAMPLE, "tokens": tokens, "heads": heads}


def _lower(values: torch.Tensor, digits: int) -> list[list[float]]:
    """What a causal mask leaves of the first sample's map, row by row."""
    return [
        [round(value, digits) for value in row[: i + 1]] for i, row in enumerate(values[0].tolist())
    ]


def elements(measured: Subject, ids: torch.Tensor) -> torch.Tensor:
    """|h_1| after each block over the median of |h| at all positions, mean over texts: (L, d)."""
    found = measured.measure(ids).first_elements
    assert found is not None
    return found


@torch.no_grad()
def first_token(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """x_1 alone (Section 3.1): by block the largest dimensions of h_1 over the median (massive activations), and how
    near k_1 is to its mean over texts, beside the key in the middle of the text.
    """
    length = _length(measured)
    result: dict[str, Any] = {"samples": min(n, FEW), "T": length, "middle": length // 2}
    for first in measured.firsts:
        ids = measured.inputs("natural", min(n, FEW), length, first=first)
        values, dimensions = elements(measured, ids).topk(3, dim=-1)
        cached = measured.model(ids, use_cache=True).past_key_values
        near = {}
        for name, position in (("cosine_k_1_to_mean", 1), ("cosine_k_middle_to_mean", length // 2)):
            keys = torch.stack(
                [layer.keys[:, :, position - 1] for layer in cached.layers]
            )  # (L, n, H_kv, D)
            cosines = torch.cosine_similarity(keys, keys.mean(dim=1, keepdim=True), dim=-1)
            near[name] = cosines.mean(dim=(1, 2)).tolist()
        result[first] = {"dimensions": dimensions.tolist(), "over_median": values.tolist()} | near
    return result


def operations(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """Surgery on natural text: losses in nats a token of tokens 2..T, shares in percent at eps = 0.3."""
    from sinkutils.measuring import surgery

    model, first = measured.model, usual_first(measured)
    ids, plain = (measured.inputs("natural", FEW, 64, first=start) for start in (first, TEXT))
    donors = measured.inputs("natural", FEW, 64, seed=1, first=first)

    def numbers(outcome: surgery.Outcome) -> dict[str, float]:
        report = outcome.report
        star = {} if report.star is None else {"sink_star": report.sink_star()}
        return {"loss": outcome.loss, "sink_1": report.sink(), "sink_2": report.sink(2), **star}

    largest = elements(measured, ids).amax(dim=-1)
    reached = (largest > MASSIVE).nonzero()[:, 0].tolist()
    blocks = sorted({reached[0], reached[len(reached) // 2], reached[-1]}) if reached else []
    layers = len(largest)
    return {
        "samples": FEW,
        "T": 64,
        "first": first,
        "untouched": numbers(surgery.untouched(model, ids)),
        "plain": numbers(
            surgery.untouched(model, plain)
        ),  # without a BOS, what a transplant puts k* and v* before
        "transplant": numbers(surgery.transplant(model, plain, donors)),
        "transplant, v* = 0 from layer": {
            str(layer): numbers(surgery.transplant(model, plain, donors, zero_values_from=layer))
            for layer in (0, layers // 4, layers // 2)
        },
        "hide": numbers(surgery.hide(model, ids)),
        "set back 3 dimensions after block": {
            str(b): numbers(surgery.set_back(model, ids, b)) for b in blocks
        },
        "rounded to bits": {
            str(bits): [
                rounded(model, ids, bits, first_exact=exact).loss for exact in (False, True)
            ]
            for bits in (8, 6, 5, 4, 3)
        },
    }


def rounded(model: torch.nn.Module, ids: torch.Tensor, bits: int, first_exact: bool) -> Any:
    """Round keys (after rotary) and values as they enter the cache to 2**bits - 1 levels around zero, one scale a text
    and tensor: an `Outcome`. first_exact: k_1 and v_1 stay exact and do not set the scale.
    """
    from transformers import DynamicCache

    from sinkutils.measuring import surgery

    class Rounded(DynamicCache):
        def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().update(to_levels(key_states), to_levels(value_states), *args, **kwargs)

    def to_levels(x: torch.Tensor) -> torch.Tensor:  # (B, H_kv, T, D)
        exact, rest = x[:, :, : int(first_exact)], x[:, :, int(first_exact) :]
        step = rest.abs().amax(dim=(1, 2, 3), keepdim=True) / (2 ** (bits - 1) - 1)
        return torch.cat([exact, (rest / step).round() * step], dim=2)

    with surgery.operating(model, ids, cache=True) as (capture, inputs, _):
        return surgery.run(capture, inputs, lambda _: Rounded(config=capture.config))


@torch.no_grad()
def streaming(measured: Subject, samples: int) -> dict[str, Any]:
    """What a cache of the last keys costs, with and without the first: the mean loss of each text (notebook 08)."""
    from sinkutils.measuring import surgery

    first = usual_first(measured)
    ids = measured.inputs("natural", *LONG, first=first)
    after = 2 * STREAMS[0][0]
    windows = {
        f"{window} + {sinks}": surgery.stream(measured.model, ids, window, sinks)
        for window, sinks in STREAMS
    }
    windows["full"] = surgery.untouched(measured.model, ids)
    losses = {
        name: outcome.losses[:, after:].mean(dim=1).tolist() for name, outcome in windows.items()
    }
    return {"samples": LONG[0], "T": LONG[1], "after": after, "first": first, "loss": losses}


def moved(measured: Subject, samples: int) -> dict[str, Any]:
    """Does the sink belong to the BOS or to the first position? The BOS at position 1, 2 and 3 of a text, and the
    attention of each block to it and to the first token: (L,) each, means over texts and heads (notebook 02).
    """
    ids = measured.inputs("natural", samples, _length(measured), first=TEXT)
    alphas = {}
    for position in TARGETS:
        there = ids.clone()
        there[:, position - 1] = bos_id(measured.tokenizer)
        alpha = measured.measure(there, targets=(1, position), norms=False).alpha.mean(
            dim=(0, 3)
        )  # (targets, L)
        alphas[str(position)] = {"first": alpha[0].tolist(), "bos": alpha[-1].tolist()}
    return {"samples": len(ids), "T": ids.shape[1], "alpha": alphas}


def positions(measured: Subject, n: int = SAMPLES) -> dict[str, Any]:
    """Sink_k of each of the first positions, on texts without a BOS: where a model looks that misses
    the token which its training put first.
    """
    ids = measured.inputs("natural", FEW, _length(measured), first=TEXT)
    targets = tuple(range(1, ids.shape[1] // 2 + 1))
    report = measured.measure(ids, targets=targets, norms=False)
    sink = [report.sink(k) for k in targets]
    return {"samples": FEW, "T": ids.shape[1], "first": TEXT, "sink": sink}


SECTIONS = {
    make.__name__: make
    for make in (
        *(about, probes, lengths, angles, maps, first_token, operations, streaming),
        *(moved, positions),
    )
}


def _length(measured: Subject) -> int:
    """T of the paper's probes, or all that the model can read."""
    return min(64, context(measured))


def short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    for model in sys.argv[1:] or REAL_MODELS:
        print(record(model).name)
