"""Texts to measure on, a user's files or docstrings that no training of ours sees, and tokenizers.

A tokenizer is one from a file or the hub, or a byte-level BPE that is trained on a corpus.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinkutils.checks import Refused, first_line, require, short
from sinkutils.paths import LEDGER, read_csv

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".txt", ".md", ".jsonl")
PIECE_CHARACTERS = 2_000  # the largest size of the documents into which a text file is cut
# The pattern of one such document. It is the rest of the text if that fits. Otherwise it ends at
# the last empty line, else at the last line end, else at the last space that fits, else at the
# limit.
PIECE = re.compile(
    r".{1,2000}\Z|.{1000,1998}(?=\n\n)|.{1000,1999}(?=\n)|.{1000,1999}(?= )|.{2000}", re.DOTALL
)
LARGE = 4_000_000  # larger files, in bytes, stay on disk and are read in pieces of PIECE_BYTES
PIECE_BYTES = 65_536
LONGEST_LINE = 64_000_000  # of a large .jsonl file, in bytes
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # all bytes of a character of UTF-8 but the first
# Columns: package; file in it; docstrings: which of the file's docstrings make the document, counted
# from 0; sha256: the first 16 digits of the document's hash. studies/held_out.py writes it.
PLACES = LEDGER / "held_out.csv"
STANDARD_LIBRARY = "python"  # stands in the column "package"
# The comments and strings of a Python source, in order. The quantifiers are possessive (++, *+), so
# that a quote that is never closed causes no backtracking.
COMMENT_OR_STRING = re.compile(
    r"""\#[^\n]*+
      | \"{3}(?:[^\\"]++|\\.|"(?!""))*+\"{3} | '{3}(?:[^\\']++|\\.|'(?!''))*+'{3}
      | "(?:[^"\\\n]++|\\.)*+" | '(?:[^'\\\n]++|\\.)*+'""",
    re.DOTALL | re.VERBOSE,
)

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


# --- a user's files


class Pieces:
    """Large files of text, which stay on disk: pieces that are read when they are asked for.

    A piece is a list of texts. Of a .jsonl file these are the lines that begin in its part of the
    file. Of another file it is that part as one text, cut without regard to words.
    """

    def __init__(self, files: list[Path]) -> None:
        starts = [(file, range(0, file.stat().st_size, PIECE_BYTES)) for file in files]
        # of each piece: the file and the first byte
        self.places = [(file, start) for file, each in starts for start in each]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[list[str]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> list[str]:
        file, start = self.places[index]
        stop = start + PIECE_BYTES
        with file.open("rb") as opened:
            if file.suffix.lower() != ".jsonl":
                opened.seek(start)
                data = opened.read(PIECE_BYTES + 3)
                first = _inside_character(data[:3])
                end = PIECE_BYTES + _inside_character(data[PIECE_BYTES:])
                return [_plain_text(data[first:end], f"{file}, after byte {start},")]
            if start:
                # The rest of a line that began before this piece. It is empty if that line ends
                # with the byte before.
                opened.seek(start - 1)
                opened.readline(LONGEST_LINE)
            lines = []
            while opened.tell() < stop and (line := opened.readline(LONGEST_LINE)):
                lines.append(line)
        return list(_texts_in(lines, f"{file}, after byte {start}"))


def _inside_character(data: bytes) -> int:
    """How many bytes at the beginning belong to a character of UTF-8 that began before them."""
    return len(data) - len(data.lstrip(CONTINUATION_BYTES))


def read_texts(path: str | Path) -> list[str] | Pieces:
    """The texts of a file, or of all files in a folder, for `probe(texts=..)`.

    Files are .txt, .md or .jsonl. Each line of a .jsonl file is one text, and each other file is
    one. If they have more than LARGE bytes together, they stay on disk as `Pieces`.
    Raises FileNotFoundError if there is no such file, and ValueError for a file that is not text;
    the message says where.
    """
    files = local_files(Path(os.path.expanduser(path)))
    if sum(file.stat().st_size for file in files) > LARGE:
        return Pieces(files)
    texts = [text for file in files for text in texts_of(file)]
    require(len(texts) > 0, f"{path} has no text in it")
    return texts


def texts_of(file: Path) -> Iterator[str]:
    """The text of a file, or the texts in the lines of a .jsonl file."""
    data = file.read_bytes()
    if file.suffix.lower() == ".jsonl":
        yield from _texts_in(data.splitlines(), str(file))
    else:
        yield _plain_text(data, str(file))


def _plain_text(data: bytes, where: str) -> str:
    # A file that was saved on Windows gets the same tokens.
    return _decoded(data, where).replace("\r\n", "\n")


def _texts_in(lines: list[bytes], where: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _decoded(line, f"{where}, line {number},")
        text: Any = None
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            text = json.loads(row, parse_int=float)["text"]  # Python limits the digits of an int
        wanted = 'expected a JSON object with a string under "text"'
        require(isinstance(text, str), f"{where}, line {number}: {wanted}")
        yield text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"{where} is not UTF-8 text: {error}") from error


def local_files(path: Path) -> list[Path]:
    """The .txt, .md and .jsonl files in a folder and its subfolders, sorted; or `path`, if a file.

    Raises FileNotFoundError if there are none.
    """
    every = (path, *sorted(path.rglob("*")))
    files = [file for file in every if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not files:
        wanted = (
            f"no such folder or file of text, whose name ends with one of {', '.join(SUFFIXES)}"
        )
        raise FileNotFoundError(f"path:{path}: {wanted}")
    return files


# --- the held-out documents of the study's corpus "docstrings", which make the natural probe


@cache
def held_out_documents() -> tuple[str, ...]:
    """The held-out documents, in the order of the corpus; "" for one whose file is not installed.

    Where another version of a package has other docstrings, the document is all docstrings that the
    file has there, and a warning says so: a number is then not quite that of the study's text.
    """
    documents = []
    lacking = set()
    for place in read_csv(PLACES):
        path = _located(place["package"], place["file"])
        texts = docstrings_of(text_of(path)) if path else []
        document = "\n\n".join(texts[i] for i in _indices(place["docstrings"]) if i < len(texts))
        if digest(document) != place["sha256"]:
            lacking.add(place["package"])
            document = "\n\n".join(dict.fromkeys(texts))
        documents.append(document)
    if lacking:
        warnings.warn(
            f"the natural text is another one than the study's: {', '.join(sorted(lacking))} "
            "is missing or of another version than constraints.txt pins, so numbers can differ "
            "a little from those of others",
            stacklevel=2,
        )
    return tuple(documents)


def natural_digest() -> str:
    """The first digits of the SHA-256 of the held-out documents together, to be named in reports."""
    return digest("\0".join(held_out_documents()))[:8]


def digest(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _located(package: str, file: str) -> Path | None:
    """Where a file of an installed package is, or None if the package is not installed."""
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"), file)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return Path(str(metadata.distribution(package).locate_file(file)))
    return None


def _indices(ranges: str) -> list[int]:
    """ "0-2 5" -> [0, 1, 2, 5]"""
    indices: list[int] = []
    for part in ranges.split():
        first, _, last = part.partition("-")
        indices += range(int(first), int(last or first) + 1)
    return indices


def docstrings_of(source: str) -> list[str]:
    """The docstrings of a Python source, in order.

    A docstring is a triple-quoted string that comes first in the file or follows a line that ends
    with a colon. A scan over comments and strings finds almost the same docstrings as a parser, ten
    times faster (in seconds instead of a minute for all of site-packages). Escape sequences stay as
    they are written.
    """
    texts = [inspect.cleandoc(match.group()[3:-3]) for match in docstring_matches(source)]
    return [text for text in texts if text]


def docstring_matches(source: str) -> Iterator[re.Match[str]]:
    """The docstrings of a Python source as matches, with their positions and their quotes."""
    first = True
    for match in COMMENT_OR_STRING.finditer(source):
        if not match.group().startswith(('"""', "'''")):
            continue
        line = source.rfind("\n", 0, match.start()) + 1  # the start of the line with the quotes
        prefix = source[line : match.start()]
        if prefix.strip(" \trRuU"):  # the string is part of an expression
            continue
        before = source[:line].rstrip()
        last = before[before.rfind("\n") + 1 :]  # the last line before the string that is not empty
        code = last.partition("#")[0].rstrip()
        after_colon = last.endswith(":") or code.endswith(":")
        # A module's docstring has only comments and empty lines before it.
        if after_colon or (first and all(x.lstrip()[:1] in ("", "#") for x in before.splitlines())):
            yield match
        first = False


def text_of(path: Path) -> str:
    """The text of a file. It is empty if the file is missing or is not UTF-8.

    Raises PermissionError for a file that may not be read, because the corpus would silently be
    another one without it.
    """
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return ""


# --- tokenizers


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
    wanted = "vocab_size must be at least that"
    fits = size <= vocab_size
    require(fits, f"tokenizer {name!r} has {size} tokens: {wanted}, got {vocab_size}")
    return tokenizer


def special_ids(tokenizer: Tokenizer, name: str | None) -> dict[str, Any]:
    """The ids of EOS, BOS and x_fix, and the first id that is not special.

    With GPT-NeoX's tokenizer x_fix is the padding token, as in the authors' code.
    """
    ids = {}
    for role, tokens in ROLES.items():
        ids[role] = _first(tokenizer, tokens)
        lacks = f"has none of {', '.join(tokens)} to serve as {role}"
        require(ids[role] is not None, f"tokenizer {name!r} {lacks}")
    # Often the smallest ids are special, and those of ordinary text follow.
    special = marked_special(tokenizer) | {*ids.values()}
    return ids | {"first_text_id": next(i for i in count() if i not in special)}


def marked_special(tokenizer: Any) -> set[int]:
    """All ids that a tokenizer marks as special; each library keeps them in lists of its own.

    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer.
    """
    special: set[int] = set()
    backend = _backend(tokenizer)
    if backend is not None:
        special |= {i for i, x in backend.get_added_tokens_decoder().items() if x.special}
        # The tokens that it puts before and after a text.
        plain = backend.encode("", add_special_tokens=False).ids
        special |= {*backend.encode("").ids} - {*plain}
    if backend is not tokenizer:
        special |= {*tokenizer.all_special_ids} - {None}  # tokens with a role, such as BOS
        # The tokenizers of mistral-common have no such list: all their special tokens have a role.
        with contextlib.suppress(AttributeError, NotImplementedError):
            special |= {i for i, x in tokenizer.added_tokens_decoder.items() if x.special}
    return special


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
    before, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
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
    ours = isinstance(tokenizer, Tokenizer)
    token: Any = _first(tokenizer, ROLES["bos_id"]) if ours else tokenizer.bos_token_id
    lacking = "a BOS first needs a tokenizer with a BOS token, and this one has none"
    require(token is not None, lacking)
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
    ids = (tokenizer.token_to_id(token) for token in tokens)
    return next((i for i in ids if i is not None), None)
