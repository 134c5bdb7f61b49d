"""Text from outside: hub data sets in streaming mode, the Pile's domains, local text and JSONL."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinkutils.checks import first_line
from sinkutils.paths import LEDGER, read_yaml

TEXT_FIELDS = ("text", "content")
SUFFIXES = (".txt", ".md", ".jsonl")
PIECE_CHARACTERS = 2_000  # at most, of the documents that a text file is cut into
# One of them: the rest of the text, or it ends at the last empty line, line end or space that fits,
# or where it must.
PIECE = re.compile(
    r".{1,2000}\Z|.{1000,1998}(?=\n\n)|.{1000,1999}(?=\n)|.{1000,1999}(?= )|.{2000}", re.DOTALL
)

# The original Pile is no longer distributed. This is assumed to be its counterpart: the same data
# without the copyrighted sets, which leaves the 17 that the paper names.
PILE = "monology/pile-uncopyrighted"
PILE_WEIGHTS = read_yaml(LEDGER / "pile.yaml")
# The paper's tokenizer, whose 50,277 tokens its models pad to 50,432, and its amount of text
# (Section 5: 5B tokens).
NEOX_TOKENIZER = "EleutherAI/gpt-neox-20b"
NEOX_PADDED = 50_432
PILE_TOKENS = 5_000_000_000
PILE_SLACK = 1_000_000  # characters by which a domain may run ahead of its share


def hub_rows(
    dataset: str, split: str = "train", config: str | None = None, **options: Any
) -> Iterator[dict[str, Any]]:
    """The rows of a split of a hub data set, streamed.

    What the client raises for a missing network becomes one clear line.
    """
    import datasets

    try:
        yield from datasets.load_dataset(dataset, config, split=split, streaming=True, **options)
    except ValueError:  # an unknown config or split: datasets lists what exists
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk, a folder of someone else
        raise ConnectionError(
            f"data set {dataset!r} could not be read ({first_line(error)}): check the id and the "
            "network, or use a corpus that needs none: 'docstrings' or 'path:<folder>'"
        ) from error


def hub(dataset: str, config: str | None = None) -> Iterator[str]:
    """The documents of the train split of a hub data set, from its field "text" or "content"."""
    for row in hub_rows(dataset, config=config):
        if row.keys().isdisjoint(TEXT_FIELDS):
            raise ValueError(
                f"data set {dataset!r} has the fields {sorted(row)}, none of {TEXT_FIELDS} with "
                "text"
            )
        yield row.get("text", row.get("content")) or ""


def pile(domain: str = "") -> Iterator[str]:
    """The documents of one domain of the Pile (Fig. 9), or of all 17 mixed by the authors' weights.

    One pass over the stream: of all, a document is taken where its domain is not ahead of its share
    of the text so far, counted in characters.
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


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file, or of those in a folder: `probe(texts=..)` takes them.

    Files are .txt, .md or .jsonl. A line of a .jsonl file is a text, and any other file. Raises
    FileNotFoundError where there is no such file, and ValueError for one that is not text, saying
    where.
    """
    texts: list[str] = []
    for file in local_files(Path(os.path.expanduser(path))):
        texts += _texts_of(file)
    return texts


def local(files: list[Path]) -> Iterator[str]:
    """The documents of .txt, .md and .jsonl files, in their order.

    A line of a .jsonl file is a document, however long. Other files are cut at ends of paragraphs
    where they are longer than PIECE_CHARACTERS, because the splits are made by document: a novel or
    three have text for each.
    """
    for file in files:
        for text in _texts_of(file):
            if file.suffix.lower() == ".jsonl" or len(text) <= PIECE_CHARACTERS:
                yield text
            else:
                yield from map(str.strip, PIECE.findall(text))


def _texts_of(file: Path) -> Iterator[str]:
    """The text of a file, or those of the lines of a .jsonl file."""
    if file.suffix.lower() != ".jsonl":
        # The same text has the same tokens, also where it was saved on Windows.
        yield _decoded(file.read_bytes(), str(file)).replace("\r\n", "\n")
        return
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        row = _decoded(line, f"{file}, line {number},")
        try:
            text = json.loads(row)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f'{file}, line {number}: expected a JSON object with a string under "text"'
            )
        yield text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def local_files(path: Path) -> list[Path]:
    """The .txt, .md and .jsonl files of a folder and those below it, or the one given, sorted."""
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
