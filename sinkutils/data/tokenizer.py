"""The tokenizer of a corpus: byte-level BPE trained on its text, or one from a file or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinkutils.checks import first_line, require

SPECIAL_TOKENS = ["<eos>", "<bos>", "<fix>"]  # ids 0, 1, 2 of the tokenizers trained here
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
# What each is called in the tokenizers of others. GPT-NeoX and GPT-2 have one token for both ends.
NAMES = {
    "eos_id": ("<eos>", "<|endoftext|>", "</s>", "<|end_of_text|>"),
    "bos_id": ("<bos>", "<|begin_of_text|>", "<s>", "[BOS]", "<|bos|>", "<|endoftext|>"),
    "fix_id": ("<fix>", "<|padding|>", "<pad>", "<unk>"),
}
UNKNOWN = "\U00012219"  # a cuneiform sign, in no vocabulary


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the special tokens at ids 0, 1, 2."""
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
    tokenizer.encode_special_tokens = True
    return tokenizer


def open_tokenizer(file: str | Path) -> Tokenizer:
    """A tokenizer.json, to which "<eos>" and the like written in a text are text."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """A tokenizer.json on disk, or the tokenizer of a hub model, with at most vocab_size tokens."""
    try:
        tokenizer = Tokenizer.from_file(name) if Path(name).is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the Rust client raises plain Exception
        failure = f"tokenizer {name!r} could not be read from disk or the Hugging Face hub ({first_line(error)})"
        raise ConnectionError(f"{failure}: check the id and the network, or give a tokenizer.json") from error
    size = tokenizer.get_vocab_size()
    require(size <= vocab_size, f"tokenizer {name!r} has {size} tokens: vocab_size must be at least that")
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_ids(tokenizer: Tokenizer, name: str | None) -> dict[str, int]:
    """The ids of EOS, BOS and x_fix, and of the first token that is not special.

    x_fix of GPT-NeoX is its padding token, as the authors' is. Raises ValueError where a tokenizer lacks one of them.
    """
    ids: dict[str, int] = {}
    for key, tokens in NAMES.items():
        token = _first(tokenizer, tokens)
        if token is None:
            raise ValueError(f"tokenizer {name!r} has none of {', '.join(tokens)} to serve as {key}")
        ids[key] = token
    special = marked_special(tokenizer) | {*ids.values()}
    return ids | {"first_text_id": next(i for i in count() if i not in special)}


def marked_special(tokenizer: Any) -> set[int]:
    """The ids that a `tokenizers.Tokenizer` or a transformers tokenizer marks as special, in whatever list of its."""
    if isinstance(tokenizer, Tokenizer):
        added = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        put_around_a_text = {*tokenizer.encode("").ids} - {*tokenizer.encode("", add_special_tokens=False).ids}
        return added | put_around_a_text
    special = {*tokenizer.all_special_ids} - {None}  # those with a role, such as BOS
    try:
        added_tokens = tokenizer.added_tokens_decoder  # those without one, such as reserved tokens
    except (AttributeError, NotImplementedError):  # of mistral-common, to which all of them have a role
        return special
    special |= {i for i, token in added_tokens.items() if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return special | marked_special(backend) if isinstance(backend, Tokenizer) else special


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, none of them special: none is added, and one that is written in the text is left out.

    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer. Those trained here read what looks like a special
    token as text.
    """
    special = marked_special(tokenizer) - {*_ids(tokenizer, UNKNOWN)}  # a word that it does not know is a word
    return [i for i in _ids(tokenizer, text) if i not in special]


def _ids(tokenizer: Any, text: str) -> list[int]:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text, add_special_tokens=False).ids
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def bos_id(tokenizer: Any) -> int:
    """The id of the BOS of a `tokenizers.Tokenizer` or a transformers tokenizer. Raises ValueError if it has none."""
    token = _first(tokenizer, NAMES["bos_id"]) if isinstance(tokenizer, Tokenizer) else tokenizer.bos_token_id
    if token is None:
        raise ValueError("bos=True needs a tokenizer with a BOS token, and this one has none: use bos=False")
    return int(token)


def _first(tokenizer: Tokenizer, tokens: Iterable[str]) -> int | None:
    return next((i for i in map(tokenizer.token_to_id, tokens) if i is not None), None)
