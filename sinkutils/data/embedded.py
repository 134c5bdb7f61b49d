"""The text that is on every machine that can run the project: pinned packages and the standard
library.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from sinkutils.paths import LEDGER, read_yaml

# Shorter documents are skipped: about 64 tokens at a vocabulary of 1,024 and more.
MIN_CHARACTERS = 256
DISTRIBUTIONS = read_yaml(LEDGER / "text_packages.yaml")
# Of the standard library: what some distributors leave out.
PRUNED = {"__pycache__", "test", "tests", "idle_test"}
OF_THE_BUILD = ("torch/version.py",)  # says whether it is the build for CPUs
PROSE = (".rst", ".md", ".txt")
HEADERS = (".h", ".hpp", ".cuh")
LICENCE = re.compile(r"(?:.*_)?(?:LICEN[SC]E|COPYING|NOTICE)", re.IGNORECASE)  # and NUMPY_LICENSE
# Comments and strings of a Python source, in order; possessive, so that an open quote cannot
# backtrack.
COMMENT_OR_STRING = re.compile(
    r"""\#[^\n]*+
      | \"{3}(?:[^\\"]++|\\.|"(?!""))*+\"{3} | '{3}(?:[^\\']++|\\.|'(?!''))*+'{3}
      | "(?:[^"\\\n]++|\\.)*+" | '(?:[^'\\\n]++|\\.)*+'""",
    re.DOTALL | re.VERBOSE,
)


def text_versions() -> dict[str, str | None]:
    """The versions of the distributions whose text is used; None for those not installed."""
    versions: dict[str, str | None] = dict.fromkeys(DISTRIBUTIONS)
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def text_digest(text: str) -> bytes:
    """SHA-256 of a document: what makes it the same document, and what sorts it."""
    return hashlib.sha256(text.encode()).digest()


def split_fraction(text: str) -> float:
    """A number in [0, 1) that decides on a document's split: so the same in every corpus."""
    return int.from_bytes(text_digest(text)[-8:], "big") / 2**64


def docstrings() -> Iterator[str]:
    """The docstrings of the modules, classes and functions of a file, joined: a document a file.

    Sorted by the hash of the text, each docstring kept once: the same installed versions give the
    same documents, wherever, with whatever else and whenever they were installed.
    """
    documents = {}
    for path in files_with(".py"):
        parts = docstrings_of(text_of(path))
        documents[text_digest("\0".join(parts))] = parts
    # A docstring that stands in several files is of the first of them.
    seen = set()
    for _, parts in sorted(documents.items()):
        new = [part for part in dict.fromkeys(parts) if part not in seen]
        seen.update(new)
        document = "\n\n".join(new)
        if len(document) >= MIN_CHARACTERS:
            yield document


def sources(*others: str) -> Iterator[str]:
    """The Python sources and files with other suffixes, a document a file, sorted by the hash of
    the text.

    Those that are UTF-8, long enough and not generated, each once.
    """
    unique = {}
    for path in files_with(".py", *others):
        text = text_of(path)
        if len(text) >= MIN_CHARACTERS and "@generated" not in text[:256]:
            unique[text_digest(text)] = path
    # Read a second time rather than kept: the text is hundreds of megabytes.
    for digest in sorted(unique):
        yield text_of(unique[digest])


def everything() -> Iterator[str]:
    """Python sources, C and C++ headers, and .rst, .md and .txt files: no licences, no data."""
    return sources(*HEADERS, *PROSE)


def docstrings_of(source: str) -> list[str]:
    """The docstrings of a Python source in order: triple-quoted, first in the file or on a line
    after a colon.

    Found by a scan over comments and strings, ten times faster than by parsing (seconds instead of
    a minute for all of site-packages) and all but equal to it. Escapes stay as they are written.
    """
    texts = []
    for match in docstring_matches(source):
        text = inspect.cleandoc(match.group()[3:-3])
        if text:
            texts.append(text)
    return texts


def docstring_matches(source: str) -> Iterator[re.Match[str]]:
    """The docstrings of a Python source where they stand, quotes included."""
    first = True
    for match in COMMENT_OR_STRING.finditer(source):
        if not match.group().startswith(('"""', "'''")):
            continue
        line = source.rfind("\n", 0, match.start()) + 1  # where the quotes' line begins
        prefix = source[line : match.start()]
        if prefix.strip(" \trRuU"):  # part of an expression
            continue
        before = source[:line].rstrip()
        last = before[before.rfind("\n") + 1 :]  # the last line before it that is not empty
        code = last.partition("#")[0].rstrip()
        after_colon = last.endswith(":") or code.endswith(":")
        if after_colon or (first and _only_comments(before)):
            yield match
        first = False


def _only_comments(source: str) -> bool:
    for line in source.splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            return False
    return True


def files_with(*suffixes: str) -> Iterator[Path]:
    """The files with these suffixes, without licences, of the standard library and of the installed
    distributions.

    Of a distribution those that its RECORD lists: they came in its wheel, whatever else lies in its
    folders. Not scripts (outside its folders) nor *-info folders (records of the installation).
    """
    packages = text_versions()
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        warnings.warn(
            f"the embedded text lacks {', '.join(missing)}, so its hash is another one: install "
            "what constraints.txt pins (pip install -c constraints.txt '.[text]'), or bring a file "
            "of pack_corpus",
            stacklevel=2,
        )
    files = list(_standard_library())
    for name in packages.keys() - missing:
        for file in metadata.files(name) or ():
            top = file.parts[0]
            its_own = top != ".." and not top.endswith("-info")
            if its_own and file.as_posix() not in OF_THE_BUILD:
                files.append(Path(str(file.locate())))
    # As a list, whose length the bar shows.
    paths = []
    for path in files:
        if path.name.lower().endswith(suffixes) and not LICENCE.match(path.name):
            paths.append(path)
    yield from tqdm(paths, desc="reading sources", unit="file", leave=False)


def _standard_library() -> Iterator[Path]:
    """The files of the running Python's own modules, without their tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for top in root.iterdir():
        if top.stem not in sys.stdlib_module_names:
            continue
        for file in top.rglob("*") if top.is_dir() else [top]:
            *folders, _ = file.relative_to(root).parts
            if PRUNED.isdisjoint(folders):
                yield file


def text_of(path: Path) -> str:
    """The text of a file; empty where there is none or it is not UTF-8.

    One that may not be read raises PermissionError: without it the text would be another one.
    """
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return ""
