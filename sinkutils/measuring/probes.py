"""Probes: the texts of Section 3.3 on which sinks are measured.

They are natural text, random tokens, or one repeated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sinkutils.checks import Refused, choice, instance, integer, require, short
from sinkutils.measuring.measure import measure, token_ids
from sinkutils.measuring.report import Report
from sinkutils.measuring.texts import (
    Pieces,
    adds_bos,
    bos_id,
    encode,
    fix_position,
    held_out_documents,
    marked_special,
    special_ids,
)

# The index of a kind enters its seed, so that a new kind may only be appended.
PROBES = ("natural", "random", "repeat")
SEQUENCES = 100
# Before a text is tokenised it is cut to this many characters for each token that is needed.
CHARACTERS_A_TOKEN = 32
# A stream of texts is read until there are this many times the texts that are needed: they are drawn
# from these. It is given up after LONGEST_STREAM texts, or windows of tokens, in any case.
READ_AHEAD = 10
LONGEST_STREAM = 100_000
X_FIX, TEXT, BOS = "x_fix", "text", "BOS"  # what can stand first in an input


@runtime_checkable
class Corpus(Protocol):
    """What `probe` needs of a corpus: token ids by document, and their text."""

    def documents(self, split: str) -> Iterator[np.ndarray]: ...

    def decode(self, ids: np.ndarray) -> str: ...


def probe(
    kind: str | None = None,
    tokenizer: Any = None,
    n: int | None = None,
    length: int = 64,
    seed: int = 0,
    *,
    bos: bool = False,
    corpus: Corpus | None = None,
    texts: Iterable[str] | Pieces | None = None,
) -> Tensor:
    """Token ids (n, length), as `names.probe`, which also opens corpora by their names.

    corpus: None stands for the held-out documents of the corpus "docstrings".
    """
    require(
        kind in PROBES or (kind is None and texts is not None),
        f"kind must be one of {', '.join(PROBES)}, got {short(kind)}; "
        "to measure texts of your own say probe(texts=[..], tokenizer=..)",
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
        ids = _windows(tokenizer, n, needed, seed, texts)
    elif kind == "natural":
        large = "large files are cut into windows: leave out the kind"
        require(not isinstance(texts, Pieces), large)
        if texts is None and corpus is not None:
            texts = [corpus.decode(document) for document in corpus.documents("probe")]
        documents = held_out_documents() if texts is None else texts
        ids = _natural(tokenizer, n or SEQUENCES, needed, seed, documents)
    else:
        vocabulary = sorted({*tokenizer.get_vocab().values()} - marked_special(tokenizer))
        generator = np.random.default_rng([seed, PROBES.index(kind)])
        different = needed if kind == "random" else 1  # how many tokens are drawn for a sequence
        drawn = generator.choice(vocabulary, size=(n or SEQUENCES, different))
        ids = np.broadcast_to(drawn, (len(drawn), needed))
    if bos:
        ids = np.insert(ids, 0, bos_id(tokenizer), axis=1)
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def one_by_one(texts: Any) -> Iterator[str]:
    """The texts, of which a stream is read only as far as they are asked for.

    Raises ValueError unless they are several strings in an order.
    """
    # A loop over a table would yield the names of its columns.
    has_columns = hasattr(texts, "columns") or hasattr(texts, "column_names")
    # The order of a set differs from process to process.
    refused = isinstance(texts, str | Mapping | set | frozenset) or has_columns
    iterator = iter(() if refused or not isinstance(texts, Iterable) else texts)
    first = list(islice(iterator, 1))
    require(
        len(first) > 0,
        "texts must be several strings, a document each, and no set; of a table give one of the "
        f"columns; got {short(texts)}",
    )
    for index, text in enumerate(chain(first, iterator)):
        in_batches = isinstance(texts, DataLoader | Pieces) and isinstance(text, list | tuple)
        for part in text if in_batches else [text]:
            instance(f"texts[{index}]", part, str)
            yield part


def is_stream(texts: Any) -> bool:
    """Whether texts come one after the other from somewhere, perhaps without an end."""
    return not hasattr(texts, "__len__") or isinstance(texts, DataLoader | Pieces)


def _windows(tokenizer: Any, n: int | None, needed: int, seed: int, texts: Any) -> np.ndarray:
    """n windows of the texts, which are cut at every `needed` tokens: (n, needed).

    Of a stream, the first READ_AHEAD * n windows are those that are drawn from.
    """
    generator = np.random.default_rng(seed)
    windows = []
    if n is not None and isinstance(texts, Pieces):
        windows = _windows_of_pieces(tokenizer, n, needed, generator, texts)
    if not windows:
        windows = [x for _, each in read_ahead(tokenizer, n, needed, texts) for x in each]
    least = n or 1
    require(
        len(windows) >= least,
        f"texts have {len(windows)} windows of {needed} tokens, n={least} are needed: give more or "
        "longer texts, a smaller n or a smaller length",
    )
    drawn = np.sort(generator.permutation(len(windows))[:n])  # all windows if n is None
    return np.array(windows)[drawn]


def read_ahead(
    tokenizer: Any, n: int | None, needed: int, texts: Any
) -> Iterator[tuple[str, list[list[int]]]]:
    """Each text with its windows; those of a stream until there are READ_AHEAD * n windows."""
    stream = is_stream(texts)
    count = 0
    for index, text in enumerate(one_by_one(texts)):
        windows = _cut(tokenizer, text, needed)
        count += len(windows)
        yield text, windows
        if stream and n and count >= READ_AHEAD * n:
            return
        if stream and max(index, count) >= LONGEST_STREAM:
            seen = f"texts have not ended after {index + 1}, with {count:,} windows"
            require(n is not None, f"{seen}: say how many are to be drawn (n)")
            return


def _cut(tokenizer: Any, text: str, needed: int) -> list[list[int]]:
    """All windows of a text."""
    ids = encode(tokenizer, text)
    return [ids[start : start + needed] for start in range(0, len(ids) - needed + 1, needed)]


def _windows_of_pieces(
    tokenizer: Any, n: int, needed: int, generator: np.random.Generator, pieces: Pieces
) -> list[list[int]]:
    """About n windows of large files, equally many of pieces that are drawn.

    Only these pieces are read and tokenised. There are no windows if all pieces have fewer than n.
    """
    of_each = -(-n // len(pieces))  # n / len(pieces), rounded up
    windows: list[list[int]] = []
    for index in generator.permutation(len(pieces)):
        its_own = [window for text in pieces[index] for window in _cut(tokenizer, text, needed)]
        windows += [its_own[i] for i in generator.permutation(len(its_own))[:of_each]]
        if len(windows) >= n:
            return windows
    return []


def _natural(tokenizer: Any, n: int, needed: int, seed: int, texts: Any) -> np.ndarray:
    """The first `needed` tokens of n documents that are long enough: (n, needed).

    The seed determines the order in which the documents are tried. Those of a stream are the first
    READ_AHEAD * n, and further ones in their order only if these are not enough.
    """
    stream = one_by_one(texts)
    documents = list(islice(stream, READ_AHEAD * n if is_stream(texts) else None))
    generator = np.random.default_rng([seed, PROBES.index("natural")])
    drawn = (documents[index] for index in generator.permutation(len(documents)))
    chosen = []
    tried = 0
    for text in chain(drawn, islice(stream, LONGEST_STREAM)):
        tried += 1
        # The beginning of a long text is enough. It must have one token more than needed, because
        # the cut may change the last token.
        ids = encode(tokenizer, text[: CHARACTERS_A_TOKEN * needed])
        if len(ids) <= needed:
            ids = encode(tokenizer, text)
        if len(ids) >= needed:
            chosen.append(ids[:needed])
        if len(chosen) == n:
            return np.array(chosen)
    raise Refused(
        f"{len(chosen)} of {tried} documents have at least {needed} tokens, n={n} are "
        "needed: give more text, a smaller n or a smaller length; to cut texts of your own into "
        "windows and take all, leave out the kind"
    )


class WithoutTokenizer:
    """Stands in for a missing tokenizer. It is enough for the random and the repeated probe."""

    bos_token_id = None

    def __init__(self, model: Any, why: str = "this folder has no tokenizer files") -> None:
        self.why = why
        # Our own models name their table of embeddings `embed`.
        table = getattr(model, "embed", None) or model.get_input_embeddings()
        self.vocabulary = {f"<{i}>": i for i in range(len(table.weight))}
        self.all_special_ids: set[int] = set()
        for role in ("bos", "eos", "pad"):
            self.all_special_ids |= token_ids(model, f"{role}_token_id")

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise Refused(f"{self.why}; without it, only random and repeated ids can be made")

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(f"<{int(i)}>" for i in ids)


@dataclass(frozen=True)
class Subject:
    """A language model that can be measured on inputs like those of its training.

    Some models were trained with a fixed token x_fix at one position, or with a BOS.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    fixed_position: int | None = None  # the position at which training put x_fix (Table 10 right)
    corpus: Corpus | None = None  # the source of natural text; None: the held-out documents
    length: int = 64  # the T at which the model was measured during training
    bos_in_training: bool = False  # whether the training texts began with a BOS

    @property
    def firsts(self) -> tuple[str, ...]:
        """What can stand first in an input: x_fix if training had one, plain text, BOS if any."""
        fix = (X_FIX,) if self.fixed_position else ()
        return (*fix, TEXT) if adds_bos(self.tokenizer) is None else (*fix, TEXT, BOS)

    @property
    def shown(self) -> tuple[str, ...]:
        """What stands first in the inputs that are measured by default.

        It is x_fix or plain text. A model that was trained with a BOS is measured in two ways:
        without it, as in the paper, and with it.
        """
        both = self.bos_in_training and BOS in self.firsts
        return (self.firsts[0], BOS) if both else self.firsts[:1]

    def inputs(
        self, kind: str | None = None, *sizes: int, first: str | None = None, **options: Any
    ) -> Tensor:
        """The token ids (n, length) of a probe of Section 3.3.

        kind, sizes (n, length and seed) and options (texts): as in `probes.probe`.
        first: one of `firsts`; None: what training put first.
        With x_fix, the probe "repeat" is a single sequence of x_fix at every position. Propositions
        1-4 assume that all tokens are equal. If another token was repeated, the sink would be
        missing for lack of x_fix, and nothing would be learned about repetition.
        Raises ValueError for a `first` that the model does not have.
        """
        first = first or self.firsts[0]
        bos = first == BOS
        if not bos:  # for a BOS, `probe` itself raises the error if the tokenizer has none
            choice("first", first, self.firsts)
        ids = probe(kind, self.tokenizer, *sizes, bos=bos, corpus=self.corpus, **options)
        if first != X_FIX:
            return ids
        fix_id = special_ids(self.tokenizer, self.name)["fix_id"]
        if kind == "repeat":
            return torch.full_like(ids[:1], fix_id)
        return fix_position(ids, self.fixed_position, fix_id)

    def measure(self, ids: Tensor, **options: Any) -> Report:
        """Measure the model on ids, as `measure` does. The report has the model's name."""
        return measure(self.model, ids, name=self.name, **options)
