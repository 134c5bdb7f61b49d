"""The embedded text: that of pinned packages and of Python's standard library.

Every machine that can run the project has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from sinkutils.measuring.texts import docstrings_of, text_of
from sinkutils.paths import LEDGER, read_yaml

# Shorter documents are skipped. With a vocabulary of 1,024 this length is about 64 tokens.
MIN_CHARACTERS = 256
DISTRIBUTIONS = read_yaml(LEDGER / "text_packages.yaml")
# Folders of the standard library that are not used, because some distributors leave them out.
PRUNED = {"__pycache__", "test", "tests", "idle_test"}
OF_THE_BUILD = ("torch/version.py",)  # differs between the builds of torch for CPUs and GPUs
PROSE = (".rst", ".md", ".txt")
HEADERS = (".h", ".hpp", ".cuh")
# The names of licence files, also with a prefix, such as NUMPY_LICENSE.
LICENCE = re.compile(r"(?:.*_)?(?:LICEN[SC]E|COPYING|NOTICE)", re.IGNORECASE)


def text_versions() -> dict[str, str | None]:
    """The version of each distribution whose text is used, or None if it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(DISTRIBUTIONS)
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def text_digest(text: str) -> bytes:
    """SHA-256 of a document. Documents are compared and sorted by it."""
    return hashlib.sha256(text.encode()).digest()


def split_fraction(text: str) -> float:
    """A number in [0, 1) that decides on a document's split.

    It depends on the text alone, so that a document is in the same split in every corpus.
    """
    return int.from_bytes(text_digest(text)[-8:], "big") / 2**64


def docstrings() -> Iterator[str]:
    """The docstrings of each Python file, joined into one document per file.

    The documents are sorted by the hash of their text, and each docstring is kept once. So the same
    package versions give the same documents on every machine.
    """
    documents = {}
    for path in files_with(".py"):
        parts = docstrings_of(text_of(path))
        documents[text_digest("\0".join(parts))] = parts
    # A docstring that occurs in several files is kept in the first of them.
    seen = set()
    for _, parts in sorted(documents.items()):
        new = [part for part in dict.fromkeys(parts) if part not in seen]
        seen.update(new)
        document = "\n\n".join(new)
        if len(document) >= MIN_CHARACTERS:
            yield document


def sources(*others: str) -> Iterator[str]:
    """Python sources, and files with the other suffixes, as one document per file.

    Files that are not UTF-8, too short or generated are left out, and equal files are kept once.
    The documents are sorted by the hash of their text.
    """
    unique = {}
    for path in files_with(".py", *others):
        text = text_of(path)
        if len(text) >= MIN_CHARACTERS and "@generated" not in text[:256]:
            unique[text_digest(text)] = path
    # The files are read a second time, because their text is too large to keep in memory (hundreds
    # of megabytes).
    for digest in sorted(unique):
        yield text_of(unique[digest])


def everything() -> Iterator[str]:
    """Python sources, C and C++ headers, and .rst, .md and .txt files other than licences."""
    return sources(*HEADERS, *PROSE)


def files_with(*suffixes: str) -> Iterator[Path]:
    """The files with these suffixes in the standard library and the installed distributions.

    Licences are left out. A distribution contributes the files that its RECORD lists, that is, the
    contents of its wheel and nothing else that lies in its folders. Scripts, which are installed
    outside these folders, and *-info folders, which describe the installation, are left out too.
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
    # The files are collected in a list first, since the progress bar shows their number.
    paths = []
    for path in files:
        if path.name.lower().endswith(suffixes) and not LICENCE.match(path.name):
            paths.append(path)
    yield from tqdm(paths, desc="reading sources", unit="file", leave=False, disable=None)


def _standard_library() -> Iterator[Path]:
    """The files of the standard library of the running Python, without their tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for top in root.iterdir():
        if top.stem not in sys.stdlib_module_names:
            continue
        for file in top.rglob("*") if top.is_dir() else [top]:
            *folders, _ = file.relative_to(root).parts
            if PRUNED.isdisjoint(folders):
                yield file
