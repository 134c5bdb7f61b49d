"""Text from outside: hub data sets in streaming mode, the Pile's domains, local text and JSONL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sinkutils.checks import first_line

TEXT_FIELDS = ("text", "content")
TEXT_SUFFIXES = (".txt", ".md")
ROLES = ("system", "user", "assistant")
PIECE_CHARACTERS = 2_000  # at most, of the documents that a text file is cut into

# The original Pile is no longer distributed. This is assumed to be its counterpart: the same data without the
# copyrighted sets, which leaves the 17 that the paper names.
PILE = "monology/pile-uncopyrighted"
# The authors' sampling weights (they sum to 0.79; what counts is their ratio).
PILE_WEIGHTS = {
    "Pile-CC": 0.1121,
    "PubMed Central": 0.1071,
    "ArXiv": 0.1052,
    "StackExchange": 0.0929,
    "Wikipedia (en)": 0.0919,
    "PubMed Abstracts": 0.0845,
    "Github": 0.0427,
    "USPTO Backgrounds": 0.0420,
    "FreeLaw": 0.0386,
    "Gutenberg (PG-19)": 0.0199,
    "DM Mathematics": 0.0198,
    "HackerNews": 0.0075,
    "Ubuntu IRC": 0.0074,
    "NIH ExPorter": 0.0052,
    "EuroParl": 0.0043,
    "Enron Emails": 0.0030,
    "PhilPapers": 0.0027,
}
# The paper's tokenizer, whose 50,277 tokens its models pad to 50,432, and its amount of text (Section 5: 5B tokens).
NEOX_TOKENIZER = "EleutherAI/gpt-neox-20b"
NEOX_PADDED = 50_432
PILE_TOKENS = 5_000_000_000
PILE_SLACK = 1_000_000  # characters by which a domain may run ahead of its share


def hub(dataset: str, config: str | None = None) -> Iterator[str]:
    """The documents of the train split of a hub data set, streamed; the text field is "text" or "content"."""
    for row in _stream(dataset, config):
        field = next((name for name in TEXT_FIELDS if name in row), None)
        if field is None:
            fields = f"data set {dataset!r} has the fields {sorted(row)}, none of {TEXT_FIELDS} with text"
            raise ValueError(f"{fields}: save its text as .jsonl and use path:<folder>")
        if isinstance(row[field], str):  # else a document without text
            yield row[field]


def pile() -> Iterator[str]:
    """The Pile's 17 domains mixed by the authors' weights, in one pass over the stream.

    A document is taken where its domain is not ahead of its share of the text so far, counted in characters.
    """
    whole = sum(PILE_WEIGHTS.values())
    taken: Counter[str] = Counter()
    for row in _stream(PILE, None):
        text, name = row["text"], row["meta"]["pile_set_name"]
        share = PILE_WEIGHTS.get(name, 0) / whole
        if share and taken[name] <= share * (taken.total() + PILE_SLACK):
            taken[name] += len(text)
            yield text


def pile_domain(name: str) -> Iterator[str]:
    """The documents of one domain of the Pile (Fig. 9)."""
    return (row["text"] for row in _stream(PILE, None) if row["meta"]["pile_set_name"] == name)


def conversations(dataset: str, split: str = "train") -> Iterator[list[dict[str, str]]]:
    """The conversations of a hub data set of chats, streamed: lists of messages, each with a role and its content."""
    rows = enumerate(_stream(dataset, None, split), start=1)
    return (messages_of(row, f"data set {dataset!r}, row {number}") for number, row in rows)


def local_conversations(file: Path) -> Iterator[list[dict[str, str]]]:
    """The conversations of a .jsonl file, a line each, of the same shape as `conversations`."""
    if not file.is_file() or file.suffix.lower() != ".jsonl":
        raise FileNotFoundError(f"instructions path:{file}: there is no such .jsonl file")
    return (messages_of(row, where) for where, row in _json_lines(file))


def messages_of(row: Any, where: str) -> list[dict[str, str]]:
    """The messages of a row, as ultrachat has them. Raises ValueError, saying where, for any other shape."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str) for one in messages
    ):
        shape = '"messages", a list of {"role": system, user or assistant, "content": text}'
        raise ValueError(f"{where}: expected {shape}")
    return messages


def read_texts(path: str | Path) -> list[str]:
    """The texts of a .txt, .md or .jsonl file, or of those in a folder: `probe(texts=..)` takes them.

    A line of a .jsonl file is a text, and any other file. Raises FileNotFoundError where there is no such file, and
    ValueError for one that is not text, saying where.
    """
    return [text for _, text in _texts_of_files(Path(path).expanduser())]


def local(path: Path) -> Iterator[str]:
    """Local documents in the order of their names, from .txt, .md and .jsonl files.

    A line of a .jsonl file is a document, however long. Other files are cut at ends of paragraphs where they are longer
    than PIECE_CHARACTERS, because the splits are made by document: a novel or three have text for each.
    """
    for file, text in _texts_of_files(path):
        if file.suffix.lower() == ".jsonl":
            yield text
        else:
            yield from _pieces(text)


def _texts_of_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Each text of the files of a folder, or of the one given, with its file."""
    for file in local_files(path):
        if file.suffix.lower() == ".jsonl":
            for where, row in _json_lines(file):
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise ValueError(f'{where}: expected an object with a string under "text", got {row!r:.60}')
                yield file, row["text"]
        else:
            try:
                yield file, file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def local_files(path: Path) -> list[Path]:
    """The .txt, .md and .jsonl files of a folder and those below it, or the one given, sorted by name."""
    suffixes = (*TEXT_SUFFIXES, ".jsonl")
    if not path.exists():
        raise FileNotFoundError(f"corpus path:{path}: there is no such folder or file")
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in found if file.suffix.lower() in suffixes and file.is_file() and file.stat().st_size > 0]
    if not files:
        raise FileNotFoundError(f"corpus path:{path}: no {', '.join(suffixes)} file with text in it")
    return files


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Where each line of a .jsonl file stands, and its value. Raises ValueError for a line that is not JSON."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{where}: not JSON ({error})") from error


def _pieces(text: str) -> Iterator[str]:
    """The text as it is, or if it is long in pieces that end at the last empty line, line end or space that fits."""
    if len(text) <= PIECE_CHARACTERS:
        yield text
        return
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        middle, end = start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS
        for mark in ("\n\n", "\n", " "):
            found = text.rfind(mark, middle, end)
            if found >= 0:
                end = found
                break
        yield text[start:end].strip()
        start = end
    yield text[start:].strip()


def _stream(dataset: str, config: str | None, split: str = "train") -> Iterable[dict[str, Any]]:
    """The rows of a split. Whatever the client raises for a missing network becomes one clear line."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("hub corpora need the package datasets: pip install 'sinkutils[hub]'") from error
    asked = f"{dataset}/{config}" if config else dataset
    try:
        yield from datasets.load_dataset(dataset, config, split=split, streaming=True)
    except ValueError:  # an unknown config or split: datasets lists what exists
        raise
    except Exception as error:
        failure = f"data set {asked!r} could not be read from the Hugging Face hub ({first_line(error)})"
        advice = "check the id and the network, or use a corpus that needs none: 'docstrings' or 'path:<folder>'"
        raise ConnectionError(f"{failure}: {advice}") from error
