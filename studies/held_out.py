"""Write data/held_out.csv: where the held-out documents of the docstring corpus stand.

`probe("natural", ..)` reads these documents from the installed packages, so that measuring a model
needs no corpus. To be run again when the pins of constraints.txt, and with them the text, change.
Takes a minute.
"""

import csv
import sysconfig
from importlib import metadata
from pathlib import Path

from sinkutils.measuring.texts import PLACES, STANDARD_LIBRARY, docstrings_of, text_of
from sinkutils.study import sources
from sinkutils.study.corpus import load_corpus


def places() -> dict[Path, tuple[str, str]]:
    """For each installed file: its package, and its path in the package."""
    root = Path(sysconfig.get_path("stdlib"))
    known = {}
    for name in sources.DISTRIBUTIONS:
        for file in metadata.files(name) or ():
            known[Path(str(file.locate()))] = name, file.as_posix()
    found = {}
    for path in sources.files_with(".py"):
        found[path] = known.get(path) or (STANDARD_LIBRARY, path.relative_to(root).as_posix())
    return found


def ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def rows() -> list[tuple[str, str, str, str]]:
    """package, file, docstrings and sha256 of each document of the probe split, in its order."""
    corpus = load_corpus("docstrings")
    wanted = list(map(corpus.decode, corpus.documents("probe")))
    # The same walk as in sources.docstrings, which remembers files.
    documents: dict[bytes, tuple[tuple[str, str], list[str]]] = {}
    for path, place in places().items():
        parts = docstrings_of(text_of(path))
        digest = sources.text_digest("\0".join(parts))
        if digest not in documents or place < documents[digest][0]:
            documents[digest] = place, parts
    seen: set[str] = set()
    table = []
    for _, (place, parts) in sorted(documents.items()):
        new = [part for part in dict.fromkeys(parts) if part not in seen]
        seen.update(new)
        document = "\n\n".join(new)
        if len(table) < len(wanted) and document == wanted[len(table)]:
            which = ranges([parts.index(part) for part in new])
            table.append((*place, which, sources.text_digest(document).hex()[:16]))
    assert len(table) == len(wanted), (len(table), len(wanted))
    return table


if __name__ == "__main__":
    with open(PLACES, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("package", "file", "docstrings", "sha256"))
        writer.writerows(rows())
