"""The tokenizer of a corpus: byte-level BPE trained on its text, or one from a file or the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinkutils.checks import Refused, first_line, require, short

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_TOKENS = ["<eos>", "<bos>", "<fix>"]  # ids 0, 1, 2 of the tokenizers trained here
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
# A role is played by the first of its tokens that the vocabulary has. In GPT-2 and GPT-NeoX one
# token is both EOS and BOS.
ROLES = {
    "eos_id": ("<eos>", "<|endoftext|>", "</s>", "<|end_of_text|>"),
    "bos_id": ("<bos>", "<|begin_of_text|>", "<s>", "[BOS]", "<|bos|>", "<|endoftext|>"),
    "fix_id": ("<fix>", "<|padding|>", "<pad>", "<unk>"),
}
UNKNOWN = "\U00012219"  # a cuneiform sign, which is in no vocabulary


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. Its special tokens have the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def open_tokenizer(file: str | Path) -> Tokenizer:
    """Open a tokenizer.json so that a string such as "<eos>" in a text is read as ordinary text."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Load a tokenizer.json from disk, or the tokenizer of a hub model.

    Raises ConnectionError if it cannot be read, and ValueError if it has more than vocab_size
    tokens.
    """
    read = Tokenizer.from_file if Path(name).is_file() else Tokenizer.from_pretrained
    try:
        tokenizer: Tokenizer = read(name)
    except Exception as error:  # the Rust client raises plain Exception
        raise ConnectionError(
            f"tokenizer {name!r} could not be read from disk or the Hugging Face hub "
            f"({first_line(error)}): check the id and the network, give a tokenizer.json, or leave "
            "`tokenizer` out to train one"
        ) from error
    size = tokenizer.get_vocab_size()
    require(
        size <= vocab_size,
        f"tokenizer {name!r} has {size} tokens: vocab_size must be at least that, got {vocab_size}",
    )
    return tokenizer


def special_ids(tokenizer: Tokenizer, name: str | None) -> dict[str, int]:
    """The ids of EOS, BOS and x_fix, and the first id that is not special.

    With GPT-NeoX's tokenizer x_fix is the padding token, as in the authors' code.
    """
    ids = {}
    for role, tokens in ROLES.items():
        found = _first(tokenizer, tokens)
        if found is None:
            raise Refused(f"tokenizer {name!r} has none of {', '.join(tokens)} to serve as {role}")
        ids[role] = found
    # Often the smallest ids are special, and those of ordinary text follow.
    special = marked_special(tokenizer) | {*ids.values()}
    first_text_id = 0
    while first_text_id in special:
        first_text_id += 1
    return ids | {"first_text_id": first_text_id}


def marked_special(tokenizer: Any) -> set[int]:
    """All ids that a tokenizer marks as special; each library keeps them in lists of its own.

    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer.
    """
    special: set[int] = set()
    backend = _backend(tokenizer)
    if backend is not None:
        special |= _special_among(backend.get_added_tokens_decoder())
        # The tokens that it puts before and after a text.
        plain = backend.encode("", add_special_tokens=False).ids
        special |= {*backend.encode("").ids} - {*plain}
    if backend is not tokenizer:
        special |= {*tokenizer.all_special_ids} - {None}  # tokens with a role, such as BOS
        # The tokenizers of mistral-common have no such list: all their special tokens have a role.
        with contextlib.suppress(AttributeError, NotImplementedError):
            special |= _special_among(tokenizer.added_tokens_decoder)
    return special


def _special_among(added: dict[int, Any]) -> set[int]:
    return {i for i, token in added.items() if token.special}


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text, without special tokens.

    No special token is added, and the name of one inside the text is read as ordinary text. Some
    tokenizers cannot do this, because they are written in Python or hold the special token as a
    word. Then the special token is left out.

    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer. It is left unchanged.
    text: a lone surrogate, which JSON can hold and no tokenizer accepts, becomes "?".
    """
    ids = _text_ids(tokenizer, text.encode(errors="replace").decode())
    backend = _backend(tokenizer)
    if backend is not None and isinstance(backend.model, models.BPE):
        return ids  # the merges of BPE never produce a special token
    # The token for unknown characters may be marked as special, but it stands for text here.
    special = marked_special(tokenizer).difference(_text_ids(tokenizer, UNKNOWN))
    return [token for token in ids if token not in special]


def _backend(tokenizer: Any) -> Tokenizer | None:
    """The `tokenizers.Tokenizer` inside a tokenizer, or None if that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return backend if isinstance(backend, Tokenizer) else None


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids by the tokenizer's own option to add no special tokens, neither cut nor padded.

    Raises ValueError if the tokenizer itself fails at this text.
    """
    backend = _backend(tokenizer)
    if backend is None:
        with _told(text):
            return list(tokenizer.encode(text, add_special_tokens=False))
    before = backend.encode_special_tokens
    truncation = backend.truncation
    padding = backend.padding
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    try:
        with _told(text):
            return backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = before
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    """Turn a panic of a tokenizer into a ValueError.

    A pattern that backtracks too far on some text makes the Rust code panic. That is a
    BaseException, of a class that cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Refused(
            f"the tokenizer itself fails at a text of {len(text):,} characters, {short(text)}: "
            f"{first_line(error)}"
        ) from error


def fix_position(ids: Tensor, position: int | None, fix_id: int) -> Tensor:
    """`ids` (n, T) with x_fix at a 1-based position; unchanged if that is None or beyond T."""
    if position is None or position > ids.shape[1]:
        return ids
    ids = ids.clone()
    ids[:, position - 1].fill_(fix_id)
    return ids


def bos_id(tokenizer: Any) -> int:
    """The id of a tokenizer's BOS token. Raises ValueError if it has none."""
    if isinstance(tokenizer, Tokenizer):
        token = _first(tokenizer, ROLES["bos_id"])
    else:
        token = tokenizer.bos_token_id
    if token is None:
        raise Refused("a BOS first needs a tokenizer with a BOS token, and this one has none")
    return int(token)


def adds_bos(tokenizer: Any) -> bool | None:
    """Whether a tokenizer puts a BOS in front of a text by itself. None: it has no BOS."""
    try:
        bos = bos_id(tokenizer)
    except ValueError:
        return None
    encoded = tokenizer.encode("a")
    ids = getattr(encoded, "ids", encoded)  # tokenizers returns an object, transformers a list
    return bool(ids[0] == bos)


def _first(tokenizer: Tokenizer, tokens: Iterable[str]) -> int | None:
    """The id of the first of these tokens that is in the vocabulary, or None."""
    for token in tokens:
        i: int | None = tokenizer.token_to_id(token)
        if i is not None:
            return i
    return None
