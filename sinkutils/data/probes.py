"""The inputs of Section 3.3 on which sinks are measured: natural text, random tokens, one repeated
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils.checks import instance, integer, require, short
from sinkutils.data.corpus import Corpus, load_corpus
from sinkutils.data.tokenizer import bos_id, encode, marked_special

PROBES = ("natural", "random", "repeat")  # a kind's place is part of its seed: append only
SEQUENCES = 100
CHARACTERS_A_TOKEN = 32  # a text is cut to this many for each token wanted before it is tokenised


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
    """Token ids (n, length), int64, a function of the arguments only.

    kind: "natural" is the first tokens of n documents (of `texts`, or outside the training text),
    "random" is uniform over the vocabulary without special tokens, "repeat" is one such token a
    sequence, repeated. None: `texts`, each cut into windows of `length` tokens, one after the
    other; what is left at the end of a text is not used. tokenizer: a `tokenizers.Tokenizer` or a
    transformers tokenizer. Its special tokens are never added, and written in a text they are text.
    n: sequences; None: 100, and of windows all. Windows that are fewer than all are drawn, and keep
    their order. bos: whether the tokenizer's BOS stands first, within `length`. corpus, texts:
    where natural text comes from: the probe split of a corpus, or any texts given.

    Raises ValueError for an unknown kind, what is no tokenizer, one without BOS where one is asked
    for, or too little text.
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
    # The tokens of the text: all but a BOS.
    needed = length - bos
    if kind is None:
        ids = _windows(tokenizer, n, needed, seed, _several(texts))
    elif kind == "natural":
        ids = _natural(tokenizer, n or SEQUENCES, needed, seed, corpus, texts)
    else:
        every = set(tokenizer.get_vocab().values())
        vocabulary = sorted(every - marked_special(tokenizer))
        generator = np.random.default_rng([seed, PROBES.index(kind)])
        different = needed if kind == "random" else 1  # tokens of a sequence
        drawn = generator.choice(vocabulary, size=(n or SEQUENCES, different))
        ids = np.broadcast_to(drawn, (len(drawn), needed))
    if bos:
        ids = np.insert(ids, 0, bos_id(tokenizer), axis=1)
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _several(texts: Any) -> list[str]:
    """The texts as a list. Raises ValueError unless they are several strings."""
    # Of what has columns, a loop would take the names.
    has_columns = hasattr(texts, "columns") or hasattr(texts, "column_names")
    # A set has another order in each process.
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
    """The texts cut at every `needed` tokens, (n, needed)."""
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
    drawn = np.sort(order[:n])  # all of them where n is None
    return np.array(windows)[drawn]


def _natural(
    tokenizer: Any,
    n: int,
    needed: int,
    seed: int,
    corpus: str | Corpus,
    texts: Iterable[str] | None,
) -> np.ndarray:
    """The first `needed` tokens of n documents that have them, in an order drawn by the seed."""
    if texts is None:
        source = load_corpus(corpus) if isinstance(corpus, str) else corpus
        instance("corpus", source, Corpus)
        texts = map(source.decode, source.documents("probe"))
    documents = _several(texts)
    generator = np.random.default_rng([seed, PROBES.index("natural")])
    chosen = []
    for index in generator.permutation(len(documents)):
        text = documents[index]
        # Of a long text a part will do; the last token of a cut text may not be a token of the
        # whole one.
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
