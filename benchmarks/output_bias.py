"""Is the large element an output bias? Into data/output_bias.json:

    python benchmarks/output_bias.py [smollm2 QWEN'S_FOLDER ..]

Each dimension of h_1, normed after the last block, adds a term to the logit of every token. Of the
largest element's term: how it correlates, over the vocabulary, with the logarithm of how often the
tokens stand in the training text. Without a name: all models of `laptop` whose weights are kept, in
seconds. For a finished model the docstrings are cut into its own tokens; some minutes each.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from inside import keep
from open_lms import usual_first
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


def own_states(measured: Subject) -> tuple[Tensor, Tensor]:
    """h_1 after block 1, (n, d), and normed after the last block, the mean (d,), of our own models."""
    model: Any = measured.model
    seen: list[Tensor] = []
    handles = [model.norm.register_forward_hook(lambda *args: seen.append(args[2]))]
    handles.append(model.blocks[0].register_forward_hook(lambda *args: seen.append(args[2][0])))
    model(measured.inputs("natural", TEXTS, 64))
    for handle in handles:
        handle.remove()
    first = int(model.config.sink_token)  # such models have x* in front of x_1
    return seen[0][:, first], seen[1][:, first].mean(dim=0)


def real_states(measured: Subject) -> tuple[Tensor, Tensor]:
    """The same of a finished model, after the block behind which the element is largest."""
    ids = measured.inputs("natural", TEXTS, 64, first=usual_first(measured))
    model: Any = measured.model
    seen = model.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    firsts = [states[:, 0] for states in seen[:-1]]
    written = max(firsts, key=lambda state: float(state.abs().amax()))
    return written, seen[-1][:, 0].mean(dim=0)  # transformers gives the last one normed


@torch.no_grad()
def output_bias(
    written: Tensor, last: Tensor, unembedding: Tensor, counts: np.ndarray
) -> dict[str, Any]:
    """The correlations of one model, and what its terms predict.

    written: (n, d), where the element's dimension is read. last: (d,). unembedding: (V, d).
    """
    dimension = int(written.abs().mean(dim=0).argmax())
    largest = int(last.abs().argmax())
    terms = unembedding * last  # (V, d)
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


def of_real(name: str, text: str) -> None:
    measured = subject(name)
    model: Any = measured.model
    unembedding = model.lm_head.weight.detach().float()
    counts = np.zeros(len(unembedding))
    for line in text.splitlines(keepends=True):
        np.add.at(counts, measured.tokenizer.encode(line, add_special_tokens=False), 1)
    with torch.no_grad():
        states = real_states(measured)
    keep("output_bias", measured.name, output_bias(*states, unembedding, counts))


def main() -> None:
    corpus = load_corpus("docstrings", 1024)
    tokens = corpus.tokens("train")
    for name in sys.argv[1:]:
        of_real(name, corpus.tokenizer.decode(tokens.tolist()))
    if sys.argv[1:]:
        return
    counts = np.bincount(tokens, minlength=1024).astype(float)
    for path in sorted((RUNS / "laptop").glob("*/*/model.safetensors")):
        name = "/".join(path.parts[-3:-1])
        measured = subject(f"laptop/{name}")
        model: Any = measured.model
        with torch.no_grad():
            states = own_states(measured)
        keep("output_bias", name, output_bias(*states, model.unembed.weight.detach(), counts))


if __name__ == "__main__":
    main()
