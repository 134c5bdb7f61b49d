"""The inputs of Section 3.3 on which sinks are measured: natural text, random tokens, one repeated token."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sinkutils.checks import choice, flag, integer, require
from sinkutils.data.corpus import Corpus, load_corpus
from sinkutils.data.tokenizer import bos_id, marked_special

KINDS = ("natural", "random", "repeat")
CHARACTERS_A_TOKEN = 32  # a text is cut to this many for each token wanted before it is tokenised


def probe(
    kind: str,
    tokenizer: Any,
    n: int = 100,
    length: int = 64,
    seed: int = 0,
    *,
    bos: bool = False,
    corpus: str | Corpus = "docstrings",
    texts: Iterable[str] | None = None,
) -> Tensor:
    """Token ids (n, length), int64, a function of the arguments only.

    kind: "natural" is the first tokens of n documents outside the training text, "random" is uniform over the
    vocabulary without special tokens, "repeat" is one such token a sequence, repeated.
    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer; its own special tokens are never added.
    bos: whether the tokenizer's BOS stands first, within `length`.
    corpus, texts: where natural text comes from: the probe split of a corpus, or any texts given.

    Raises ValueError for an unknown kind, what is no tokenizer, one without BOS where one is asked for, or too few
    documents.
    """
    choice("kind", kind, KINDS)
    known = hasattr(tokenizer, "encode") and hasattr(tokenizer, "get_vocab")
    require(known, f"tokenizer must be a tokenizers.Tokenizer or a transformers tokenizer, got {tokenizer!r}")
    flag("bos", bos)
    integer("n", n, least=1)
    integer("length", length, least=1 + bos)
    integer("seed", seed, least=0)
    needed = length - bos
    generator = np.random.default_rng([seed, KINDS.index(kind)])
    if kind == "natural":
        ids = _natural(tokenizer, n, needed, generator, corpus, texts)
    else:
        vocabulary = sorted(set(tokenizer.get_vocab().values()) - marked_special(tokenizer))
        require(bool(vocabulary), "the tokenizer has special tokens only, none that could stand in a text")
        drawn = generator.choice(vocabulary, size=(n, needed if kind == "random" else 1))
        ids = np.broadcast_to(drawn, (n, needed))
    if bos:
        ids = np.insert(ids, 0, bos_id(tokenizer), axis=1)
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _natural(
    tokenizer: Any,
    n: int,
    needed: int,
    generator: np.random.Generator,
    corpus: str | Corpus,
    texts: Iterable[str] | None,
) -> np.ndarray:
    """The first `needed` tokens of n documents that have them, in an order drawn by `generator`."""
    items: list[Any]  # texts, or the ids of their tokens
    if texts is None:
        source = load_corpus(corpus) if isinstance(corpus, str) else corpus
        where = f"corpus {source.name!r}"
        items = list(source.documents("probe") if tokenizer is source.tokenizer else source.texts("probe"))
    else:
        where, items = "texts", list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
        good = all(isinstance(text, str) for text in items)
        require(good, f"texts must be several strings, a document each; got {type(texts).__name__}")
    drawn = (items[index] for index in generator.permutation(len(items)))
    ids = (head(tokenizer, item, needed) if isinstance(item, str) else item for item in drawn)
    chosen = list(islice((document[:needed] for document in ids if len(document) >= needed), n))
    few = f"{where} has {len(chosen)} documents of at least {needed} tokens (of {len(items)}), n={n} are needed"
    require(len(chosen) == n, f"{few}: give more text, a smaller n or a smaller length")
    return np.array(chosen)


def head(tokenizer: Any, text: str, needed: int) -> list[int]:
    """The first tokens of a text, without special tokens; at least `needed` of them if the text has so many."""
    ids = encode(tokenizer, text[: CHARACTERS_A_TOKEN * needed])
    # The last token of a cut text may not be a token of the whole text.
    return ids if len(ids) > needed or len(text) <= CHARACTERS_A_TOKEN * needed else encode(tokenizer, text)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens, for both kinds of tokenizer."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids.ids if isinstance(tokenizer, Tokenizer) else list(ids)
