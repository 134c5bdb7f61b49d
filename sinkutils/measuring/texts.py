"""Texts to measure on: a user's files, and docstrings that no training of ours sees."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from sinkutils.checks import Refused, require
from sinkutils.paths import LEDGER, read_csv

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


# --- a user's files


class Pieces:
    """Large files of text, which stay on disk: pieces that are read when they are asked for.

    A piece is a list of texts. Of a .jsonl file these are the lines that begin in its part of the
    file. Of another file it is that part as one text, cut without regard to words.
    """

    def __init__(self, files: list[Path]) -> None:
        self.places = []  # of each piece: the file and the first byte
        for file in files:
            for start in range(0, file.stat().st_size, PIECE_BYTES):
                self.places.append((file, start))

    def __len__(self) -> int:
        return len(self.places)

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
    texts: list[str] = []
    for file in files:
        texts += texts_of(file)
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
        try:
            text = json.loads(row)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise Refused(
                f'{where}, line {number}: expected a JSON object with a string under "text"'
            )
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
    files = []
    for file in (path, *sorted(path.rglob("*"))):
        if file.suffix.lower() in SUFFIXES and file.is_file():
            files.append(file)
    if not files:
        raise FileNotFoundError(
            f"path:{path}: no such folder or file of text, whose name ends with one of "
            f"{', '.join(SUFFIXES)}"
        )
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
    try:
        return Path(str(metadata.distribution(package).locate_file(file)))
    except metadata.PackageNotFoundError:
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
    texts = []
    for match in docstring_matches(source):
        text = inspect.cleandoc(match.group()[3:-3])
        if text:
            texts.append(text)
    return texts


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
