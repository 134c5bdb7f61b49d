"""How a model of 25M parameters makes a sink of any first token, into data/any_first_token.json:

    python benchmarks/any_first_token.py CORPUS WEIGHTS ..

CORPUS: "embedded", or "packed:<file>" of it. WEIGHTS: the safetensors files, joined the state dict,
of the run `gpu/default_constant_lr_steps_13638/0`: 50 MB, too large for Git. Appendix G shows what
comes out. Ten minutes on one core.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from alone import PLACE, T, about, another_alone, attending, in_company, itself_alone, seen_at
from mechanism import numbers
from open_lms import short
from safetensors.torch import load_file
from torch import Tensor, nn

from sinkutils import paths
from sinkutils.measuring import surgery
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import probe
from sinkutils.measuring.report import Report
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.config import from_dict
from sinkutils.study.corpus import Corpus, load_corpus
from sinkutils.study.store import Runs

RECORD = "gpu/default_constant_lr_steps_13638/0"
TEXTS = 16
LONG = 512  # the context that it was trained on
FIRST = ("_", ".", "(", "\n   ", " a", " =")  # common tokens


def cut_anywhere(corpus: Corpus, n: int, length: int) -> Tensor:
    """Token ids (n, length) of validation text, from places drawn at random, as in training."""
    tokens = corpus.tokens("valid")
    starts = np.random.default_rng(0).integers(0, len(tokens) - length, n)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length)].astype(np.int64))


def attention(report: Report, k: int = 1) -> dict[str, Any]:
    """Sink_k with its interval over texts, and alpha_k by block."""
    alpha = report.alpha[:, report.targets.index(k)]  # (samples, L, H)
    return {
        "sink": report.sink(k),
        "interval": report.interval(k),
        "attention": alpha.mean(dim=(0, 2)).tolist(),
    }


def starts(model: nn.Module, corpus: Corpus) -> dict[str, Any]:
    """The sink on texts cut anywhere, on longer ones, and on what is no text.

    The run's own record has the sink on texts cut where a document begins.
    """
    kinds = {
        "anywhere in a document": cut_anywhere(corpus, 2 * TEXTS, T),
        "random tokens": probe("random", corpus.tokenizer, TEXTS, T),
        "one token repeated": probe("repeat", corpus.tokenizer, TEXTS, T),
        f"anywhere, T = {LONG}": cut_anywhere(corpus, TEXTS // 2, LONG),
    }
    result = {}
    for kind, ids in kinds.items():
        report = measure(model, ids, targets=range(1, 11))
        peaks: Any = report.hidden_peaks  # (L, T)
        result[kind] = attention(report) | {
            "floor": report.floor,
            "sinks at 2 to 10": [report.sink(k) for k in range(2, 11)],
            "element": peaks[:, 0].tolist(),
            "element elsewhere": peaks[:, 1:].mean(dim=1).tolist(),
            "heads": report.alpha[:, 0].mean(dim=0).tolist(),
        }
    return result


def tokens(model: nn.Module, corpus: Corpus) -> dict[str, Any]:
    """The same texts with one and the same token first, for several tokens."""
    # Training never saw <bos> and <fix>; <eos> stands between documents.
    ids_of = {"<bos>": corpus.bos_id, "<fix>": corpus.fix_id, "<eos>": corpus.eos_id}
    for token in FIRST:
        (ids_of[token],) = corpus.tokenizer.encode(token).ids
    result = {}
    for token, token_id in ids_of.items():
        ids = cut_anywhere(corpus, TEXTS, T)
        ids[:, 0] = token_id
        result[token] = attention(measure(model, ids, targets=(1,)))
    return result


def solitude(model: TransformerLM, corpus: Corpus) -> dict[str, Any]:
    """A token in the middle attends to itself alone in some blocks; or the first one to others."""
    ids = cut_anywhere(corpus, TEXTS, PLACE - 1 + T)
    cut = ids[:, PLACE - 1 :]  # the same token first
    alone = partial(itself_alone, PLACE)
    company = partial(in_company, 1, seen_at(model, ids, PLACE))
    cases: dict[str, Iterable[int]] = {"untouched": [], "block 1": [0], "block 2": [1]}
    cases |= {"block 3": [2], "blocks 2 and 3": [1, 2], "blocks 1 to 3": range(3)}
    cases |= {"all blocks": range(8)}
    result: dict[str, Any] = {"place": PLACE, "middle": {}, "first": {}, "both": {}}
    for case, layers in cases.items():
        with attending(model, ids, layers, alone):
            report = measure(model, ids, targets=(1, PLACE))
        result["middle"][case] = about(report, PLACE) | {"x_1": about(report, 1)}

    for case in ("untouched", "blocks 2 and 3", "blocks 1 to 3"):
        with attending(model, cut, cases[case], company):
            outcome = surgery.untouched(model, cut)
        result["first"][case] = about(outcome.report, 1) | numbers(outcome)

    with attending(model, ids, range(3), partial(another_alone, PLACE)):
        report = measure(model, ids, targets=(1, PLACE))
    result["another alone"] = about(report, PLACE)

    # The two change places: x_1 is in company in blocks 2 and 3, token 30 alone in blocks 1 to 3.
    with (
        attending(model, ids, range(3), alone),
        attending(model, ids, [1, 2], company),
    ):
        report = measure(model, ids, targets=(1, PLACE))
    result["both"] = about(report, PLACE) | {"x_1": about(report, 1)}

    # The same with one token at both places, so that neither gets what another token got.
    twins = ids.clone()
    twins[:, 0] = ids[:, PLACE - 1]
    own_company = partial(in_company, 1, seen_at(model, twins, PLACE))
    with (
        attending(model, twins, range(3), alone),
        attending(model, twins, [1, 2], own_company),
    ):
        report = measure(model, twins, targets=(1, PLACE))
    result["both, one token"] = about(report, PLACE) | {"x_1": about(report, 1)}
    return result


def writers(model: TransformerLM, ids: Tensor, dimension: int) -> list[dict[str, Any]]:
    """By block, what attention and FFN add to an element of h_1, and its three largest neurons."""
    found: dict[str, list[Tensor]] = {"attention": [], "ffn": [], "neurons": []}

    def look(kind: str, _: nn.Module, __: Any, output: Tensor) -> None:
        found[kind].append(output[:, 0])

    def before(_: nn.Module, args: tuple) -> None:
        found["neurons"].append(args[0][:, 0])

    with ExitStack() as hooks:
        for block in model.blocks:
            for kind in ("attention", "ffn"):
                handle = getattr(block, kind).register_forward_hook(partial(look, kind))
                hooks.callback(handle.remove)
            hooks.callback(block.ffn.down.register_forward_pre_hook(before).remove)
        model.hidden(ids)
    result = []
    for layer, block in enumerate(model.blocks):
        down: Any = block.ffn.down.weight
        written = (found["neurons"][layer] * down[dimension]).mean(dim=0)
        largest = written.abs().topk(3).indices
        result.append(
            {
                "attention": found["attention"][layer][:, dimension].mean().item(),
                "ffn": found["ffn"][layer][:, dimension].mean().item(),
                "neurons": largest.tolist(),
                "written": written[largest].tolist(),
            }
        )
    return result


def cuts(model: TransformerLM, corpus: Corpus) -> dict[str, Any]:
    """Surgery on h_1 and on the queries."""
    ids = cut_anywhere(corpus, TEXTS, T)
    plain = surgery.untouched(model, ids)
    elements: Any = plain.report.first_elements  # (L, d)
    dimension = int(elements[4].argmax())
    embedding = model.embed.weight[ids[:, 0]]

    def scale(factor: float, h: Tensor) -> Tensor:
        h[:, 0, dimension] *= factor
        return h

    def bare(h: Tensor) -> Tensor:
        h[:, 0] = embedding
        return h

    def without_mean(q: Tensor) -> Tensor:
        return q - q.mean(dim=(0, 2), keepdim=True)

    hidden: list[Tensor] = []

    def look(h: Tensor) -> Tensor:
        hidden.append(h[:, 0])
        return h

    surgery.edit(model, ids, "block", look)
    likeness = [torch.nn.functional.cosine_similarity(h[:, None], h, dim=-1) for h in hidden[-8:]]
    pairs = ~torch.eye(TEXTS, dtype=torch.bool)

    operations: dict[str, tuple] = {
        "element halved after every block": ("block", partial(scale, 0.5), None),
        "element at zero after block 5": ("block", partial(scale, 0.0), [4]),
        "element at zero after every block": ("block", partial(scale, 0.0), None),
        "bare embedding after block 1": ("block", bare, [0]),
        "bare embedding after block 2": ("block", bare, [1]),
        "bare embedding after block 3": ("block", bare, [2]),
        "mean query off": ("query", without_mean, None),
    }
    result: dict[str, Any] = {
        "dimension": dimension,
        "element": elements[:, dimension].tolist(),
        "cosine of h_1 between texts": [x[pairs].mean().item() for x in likeness],
        "writers": writers(model, ids, dimension),
        "untouched": attention(plain.report) | numbers(plain),
    }
    for name, operation in operations.items():
        outcome = surgery.edit(model, ids, *operation)
        result[name] = attention(outcome.report) | numbers(outcome)
    return result


@torch.no_grad()
def main() -> None:
    corpus = load_corpus(sys.argv[1], 4096)
    folder: Any = Runs().named(RECORD)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = TransformerLM(from_dict(LMConfig, config["model"]))
    weights: dict[str, Tensor] = {}
    for path in sys.argv[2:]:
        weights |= load_file(path)
    model.load_state_dict(weights)
    model.eval()
    result = {"record": RECORD, "texts": TEXTS, "T": T}
    for part in (solitude, cuts, starts, tokens):
        result[part.__name__] = part(model, corpus)
        print(part.__name__, flush=True)
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in short(result).items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (paths.LEDGER / "any_first_token.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
