"""Is the large element an output bias? Into data/output_bias.json: python benchmarks/output_bias.py

Each dimension of h_1, normed after the last block, adds a term to the logit of every token. Of the
largest element's term: how it correlates, over the vocabulary, with the logarithm of how often the
tokens stand in the training text. All models of `laptop` whose weights are kept; seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from inside import keep
from torch import Tensor

from sinkutils.measuring.probes import Subject
from sinkutils.names import subject
from sinkutils.paths import RUNS
from sinkutils.study.corpus import load_corpus

TEXTS = 16


def correlation(x: Any, y: Any) -> float:
    return float(np.corrcoef(x, y)[0, 1])


def cross_entropy(logits: Tensor, shares: Tensor) -> float:
    """Nats a token if tokens came with their shares in the text, and were predicted by logits."""
    return float(-(shares * logits.log_softmax(dim=0)).sum())


@torch.no_grad()
def output_bias(measured: Subject, counts: np.ndarray) -> dict[str, Any]:
    """The correlations of one model, and what its terms predict."""
    model: Any = measured.model
    seen: list[Tensor] = []
    handles = [model.norm.register_forward_hook(lambda *args: seen.append(args[2]))]
    handles.append(model.blocks[0].register_forward_hook(lambda *args: seen.append(args[2][0])))
    model(measured.inputs("natural", TEXTS, 64))
    for handle in handles:
        handle.remove()
    first = int(model.config.sink_token)  # such models have x* in front of x_1
    after_1, last = seen[0][:, first], seen[1][:, first].mean(dim=0)  # (n, d), (d,)
    dimension = int(after_1.abs().mean(dim=0).argmax())
    largest = int(last.abs().argmax())
    terms = model.unembed.weight * last  # (V, d)
    logs = np.log(counts + 1)
    occurs = counts > 0
    each = [correlation(column, logs) for column in terms.T.numpy()]
    term = terms[:, dimension]
    shares = torch.from_numpy(counts / counts.sum()).float()
    others = [value for index, value in enumerate(each) if index != dimension]
    return {
        "dimension": dimension,
        "largest after the last norm": largest,
        "term": each[dimension],
        "term, of the largest after the last norm": each[largest],
        "term, tokens that occur": correlation(term[torch.from_numpy(occurs)], logs[occurs]),
        "best other dimension": max(others),
        "all terms": correlation(terms.sum(dim=1), logs),
        "cross-entropy": {
            "all terms": cross_entropy(terms.sum(dim=1), shares),
            "the term alone": cross_entropy(term, shares),
            "all but the term": cross_entropy(terms.sum(dim=1) - term, shares),
            "the text's own frequencies": float(-(shares[occurs] * shares[occurs].log()).sum()),
            "even": float(np.log(len(counts))),
        },
    }


def main() -> None:
    corpus = load_corpus("docstrings", 1024)
    counts = np.bincount(corpus.tokens("train"), minlength=1024).astype(float)
    for path in sorted((RUNS / "laptop").glob("*/*/model.safetensors")):
        name = "/".join(path.parts[-3:-1])
        keep("output_bias", name, output_bias(subject(f"laptop/{name}"), counts))


if __name__ == "__main__":
    main()
