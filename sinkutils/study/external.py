"""External text: hub data sets in streaming mode, the domains of the Pile, and local files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinkutils.checks import Refused, first_line
from sinkutils.measuring.texts import PIECE, PIECE_CHARACTERS, texts_of
from sinkutils.paths import LEDGER, read_yaml

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
