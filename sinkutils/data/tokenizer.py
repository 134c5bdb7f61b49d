"""The tokenizer of a corpus: byte-level BPE trained on its text, or one from a file or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<eos>", "<bos>", "<fix>"]  # ids 0, 1, 2 of the tokenizers trained here
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


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
    return tokenizer


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """A tokenizer.json on disk, or the tokenizer of a hub model, with at most vocab_size tokens."""
    try:
        tokenizer = Tokenizer.from_file(name) if Path(name).is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the Rust client raises plain Exception
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ConnectionError(
            f"tokenizer {name!r} could not be read from disk or the Hugging Face hub ({reason}). Check the id and the "
            "network, give the path of a tokenizer.json, or leave `tokenizer` out to train one"
        ) from error
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found > vocab_size:
        raise ValueError(f"tokenizer {name!r} has {found} tokens: vocab_size must be at least that, got {vocab_size}")
    return tokenizer


def special_ids(tokenizer: Tokenizer, name: str | None) -> dict[str, int]:
    """The ids of EOS, BOS and x_fix. GPT-NeoX has no BOS of its own; x_fix is its padding token, as the authors' is."""
    known = {
        "eos_id": ("<eos>", "<|endoftext|>", "</s>", "<|end_of_text|>"),
        "bos_id": ("<bos>", "<|begin_of_text|>", "<s>", "<|endoftext|>"),
        "fix_id": ("<fix>", "<|padding|>", "<pad>", "<unk>"),
    }
    ids: dict[str, int] = {}
    for key, tokens in known.items():
        found = [i for i in map(tokenizer.token_to_id, tokens) if i is not None]
        if not found:
            raise ValueError(f"tokenizer {name!r} has none of {', '.join(tokens)} to serve as {key}")
        ids[key] = found[0]
    special = {*ids.values(), *(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)}
    ids["first_text_id"] = next(i for i in count() if i not in special)
    return ids
