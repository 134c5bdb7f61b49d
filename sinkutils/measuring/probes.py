"""Probes: the texts of Section 3.3 on which sinks are measured.

They are natural text, random tokens, or one repeated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils.checks import instance, integer, require, short
from sinkutils.measuring.tokenizer import bos_id, encode, marked_special
from sinkutils.study.corpus import Corpus, load_corpus

# The index of a kind enters its seed, so that a new kind may only be appended.
PROBES = ("natural", "random", "repeat")
SEQUENCES = 100
# Before a text is tokenised it is cut to this many characters for each token that is needed.
CHARACTERS_A_TOKEN = 32


def probe(
    kind: str | None = None,
    tokenizer: Any = None,
    n: int | None = None,
    length: int = 64,
    seed: int = 0,
    *,
    bos: bool = False,
    corpus: str | Corpus = "docstrings",
    texts: Iterable[str] | None = None,
) -> Tensor:
    """Token ids (n, length), int64, to measure sinks on. They depend on the arguments only.

    kind: "natural" takes the first tokens of n documents. "random" draws every token uniformly from
    the vocabulary without special tokens. "repeat" draws one such token for each sequence and
    repeats it. None cuts each of `texts` into consecutive windows of `length` tokens; the rest at
    the end of a text is not used.
    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer. No special token is added, and
    the name of a special token inside a text is read as ordinary text.
    n: the number of sequences. None means 100, or with kind=None all windows. If n is smaller than
    the number of windows, n of them are drawn and keep their order.
    bos: whether each sequence begins with the tokenizer's BOS, which counts towards `length`.
    corpus: the corpus whose probe split, which no training sees, gives the natural text.
    texts: texts to use instead of a corpus.

    Raises ValueError for an unknown kind, an object that is no tokenizer, a tokenizer without BOS
    if bos is set, or too little text.
    """
    if kind not in PROBES and (kind is not None or texts is None):
        raise ValueError(
            f"kind must be one of {', '.join(PROBES)}, got {short(kind)}; "
            "to measure texts of your own say probe(texts=[..], tokenizer=..)"
        )
    require(
        hasattr(tokenizer, "encode") and hasattr(tokenizer, "get_vocab"),
        "tokenizer must be a tokenizers.Tokenizer or a transformers tokenizer, got "
        f"{short(tokenizer)}",
    )
    instance("bos", bos, bool)
    if n is not None:
        n = integer("n", n, least=1)
    length = integer("length", length, least=1 + bos)
    seed = integer("seed", seed, least=0)
    # The number of tokens that the text has to supply: all but the BOS.
    needed = length - bos
    if kind is None:
        ids = _windows(tokenizer, n, needed, seed, _several(texts))
    elif kind == "natural":
        ids = _natural(tokenizer, n or SEQUENCES, needed, seed, corpus, texts)
    else:
        every = set(tokenizer.get_vocab().values())
        vocabulary = sorted(every - marked_special(tokenizer))
        generator = np.random.default_rng([seed, PROBES.index(kind)])
        different = needed if kind == "random" else 1  # how many tokens are drawn for a sequence
        drawn = generator.choice(vocabulary, size=(n or SEQUENCES, different))
        ids = np.broadcast_to(drawn, (len(drawn), needed))
    if bos:
        ids = np.insert(ids, 0, bos_id(tokenizer), axis=1)
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _several(texts: Any) -> list[str]:
    """The texts as a list. Raises ValueError unless they are a collection of strings."""
    # A loop over a table would yield the names of its columns.
    has_columns = hasattr(texts, "columns") or hasattr(texts, "column_names")
    # The order of a set differs from process to process.
    refused = isinstance(texts, str | Mapping | set | frozenset) or has_columns
    documents = []
    if isinstance(texts, Iterable) and not refused:
        documents = list(texts)
    require(
        len(documents) > 0,
        "texts must be several strings, a document each, and no set; of a table give one of the "
        f"columns; got {short(texts)}",
    )
    for index, text in enumerate(documents):
        instance(f"texts[{index}]", text, str)
    return documents


def _windows(tokenizer: Any, n: int | None, needed: int, seed: int, texts: list[str]) -> np.ndarray:
    """n windows of the texts, which are cut at every `needed` tokens: (n, needed)."""
    windows = []
    for text in texts:
        ids = encode(tokenizer, text)
        for start in range(0, len(ids) - needed + 1, needed):
            windows.append(ids[start : start + needed])
    least = n or 1
    require(
        len(windows) >= least,
        f"texts have {len(windows)} windows of {needed} tokens, n={least} are needed: give more or "
        "longer texts, a smaller n or a smaller length",
    )
    order = np.random.default_rng(seed).permutation(len(windows))
    drawn = np.sort(order[:n])  # all windows if n is None
    return np.array(windows)[drawn]


def _natural(
    tokenizer: Any,
    n: int,
    needed: int,
    seed: int,
    corpus: str | Corpus,
    texts: Iterable[str] | None,
) -> np.ndarray:
    """The first `needed` tokens of n documents that are long enough: (n, needed).

    The seed determines the order in which the documents are tried.
    """
    if texts is None:
        source = load_corpus(corpus) if isinstance(corpus, str) else corpus
        instance("corpus", source, Corpus)
        texts = map(source.decode, source.documents("probe"))
    documents = _several(texts)
    generator = np.random.default_rng([seed, PROBES.index("natural")])
    chosen = []
    for index in generator.permutation(len(documents)):
        text = documents[index]
        # The beginning of a long text is enough. It must have one token more than needed, because
        # the cut may change the last token.
        ids = encode(tokenizer, text[: CHARACTERS_A_TOKEN * needed])
        if len(ids) <= needed:
            ids = encode(tokenizer, text)
        if len(ids) >= needed:
            chosen.append(ids[:needed])
        if len(chosen) == n:
            return np.array(chosen)
    raise ValueError(
        f"{len(chosen)} of {len(documents)} documents have at least {needed} tokens, n={n} are "
        "needed: give more text, a smaller n or a smaller length; to cut texts of your own into "
        "windows and take all, leave out the kind"
    )
