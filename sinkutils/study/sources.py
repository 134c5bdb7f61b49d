"""The documents of a corpus: embedded text, data sets of the hub, or files of one's own.

The embedded text is that of pinned packages and of Python's standard library, which every machine
that can run the project has.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sinkutils.checks import Refused, first_line
from sinkutils.measuring.texts import PIECE, PIECE_CHARACTERS, docstrings_of, text_of, texts_of
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
TEXT_FIELDS = ("text", "content")
# The original Pile is no longer distributed. We assume that this copy is the paper's data: it lacks
# the copyrighted sets, which leaves the 17 domains that the paper names.
PILE = "monology/pile-uncopyrighted"
PILE_WEIGHTS = read_yaml(LEDGER / "pile.yaml")
# The paper's tokenizer has 50,277 tokens, and the vocabulary of its models is padded to 50,432. The
# paper trains on 5B tokens (Section 5).
NEOX_TOKENIZER = "EleutherAI/gpt-neox-20b"
NEOX_PADDED = 50_432
PILE_TOKENS = 5_000_000_000
PILE_SLACK = 1_000_000  # the number of characters by which a domain may exceed its share


def text_digest(text: str) -> bytes:
    """SHA-256 of a document. Documents are compared and sorted by it."""
    return hashlib.sha256(text.encode()).digest()


def split_fraction(text: str) -> float:
    """A number in [0, 1) that decides on a document's split.

    It depends on the text alone, so that a document is in the same split in every corpus.
    """
    return int.from_bytes(text_digest(text)[-8:], "big") / 2**64


# ---- the embedded text


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


def python(*others: str) -> Iterator[str]:
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
    return python(*HEADERS, *PROSE)


def files_with(*suffixes: str) -> Iterator[Path]:
    """The files with these suffixes in the standard library and the installed distributions.

    Licences are left out. A distribution contributes the files that its RECORD lists, that is, the
    contents of its wheel and nothing else that lies in its folders. Scripts, which are installed
    outside these folders, and *-info folders, which describe the installation, are left out too.
    """
    files = list(_standard_library())
    missing = []
    for name in DISTRIBUTIONS:
        try:
            listed = metadata.files(name) or ()
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        for file in listed:
            top = file.parts[0]
            its_own = top != ".." and not top.endswith("-info")
            if its_own and file.as_posix() not in OF_THE_BUILD:
                files.append(Path(str(file.locate())))
    if missing:
        warnings.warn(
            f"the embedded text lacks {', '.join(missing)}, so its hash is another one: install "
            "what constraints.txt pins (pip install -c constraints.txt '.[text]'), or bring a file "
            "of pack_corpus",
            stacklevel=2,
        )
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


# ---- other text


def hub_rows(
    dataset: str, split: str = "train", config: str | None = None, **options: Any
) -> Iterator[dict[str, Any]]:
    """The rows of a split of a hub data set, streamed.

    Raises ConnectionError with advice if the data set cannot be read, for example without a
    network, and ValueError for an unknown config or split.
    """
    import datasets

    try:
        yield from datasets.load_dataset(dataset, config, split=split, streaming=True, **options)
    except ValueError:  # an unknown config or split: the message of datasets lists the known ones
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, which may be full or not writable
        raise ConnectionError(
            f"data set {dataset!r} could not be read ({first_line(error)}): check the id and the "
            "network, or use a corpus that needs none: 'docstrings' or 'path:<folder>'"
        ) from error


def hub(dataset: str, config: str | None = None) -> Iterator[str]:
    """The documents of a hub data set's train split, from the field "text" or "content"."""
    for row in hub_rows(dataset, config=config):
        if row.keys().isdisjoint(TEXT_FIELDS):
            raise Refused(
                f"data set {dataset!r} has the fields {sorted(row)}, none of {TEXT_FIELDS} with "
                "text"
            )
        yield row.get("text", row.get("content")) or ""


def pile(domain: str = "") -> Iterator[str]:
    """The documents of one domain of the Pile (Fig. 9), or of all 17 with the authors' weights.

    The stream is read once. In the mixture, a document is skipped if its domain already has more
    than its share of the characters so far.
    """
    weights = {domain: 1.0} if domain else PILE_WEIGHTS
    whole = sum(weights.values())
    taken: Counter[str] = Counter()
    for row in hub_rows(PILE):
        text = row["text"]
        name = row["meta"]["pile_set_name"]
        share = weights.get(name, 0) / whole
        most = share * (taken.total() + PILE_SLACK)
        if share and taken[name] <= most:
            taken[name] += len(text)
            yield text


def local(files: list[Path]) -> Iterator[str]:
    """The documents of .txt, .md and .jsonl files, in their order.

    Each line of a .jsonl file is one document, however long it is. Another file is cut into pieces,
    mostly at the ends of paragraphs, if it is longer than PIECE_CHARACTERS. The splits are made by
    document, so that one novel would otherwise have no text for two of the three splits.
    """
    for file in files:
        for text in texts_of(file):
            if file.suffix.lower() == ".jsonl" or len(text) <= PIECE_CHARACTERS:
                yield text
            else:
                yield from map(str.strip, PIECE.findall(text))
