"""English prose that may be passed on, from Debian's documentation packages: data/debian_prose.yaml says from which.

    python studies/debian_prose.py FOLDER

It needs apt-get, dpkg-deb and a Debian mirror. Each package becomes FOLDER/<package>.jsonl, a page a line, which
`path:FOLDER` reads. Markup, code and tables are left out, and so are lines that an earlier page has.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from sinkutils.paths import LEDGER, read_yaml

BLOCKS = {
    "p",
    "li",
    "dd",
    "dt",
    "div",
    "td",
    "th",
    "tr",
    "br",
    "title",
    "h1",
    "h2",
    "h3",
    "h4",
    "section",
    "item",
}
NO_PROSE = {"script", "style", "pre", "nav", "code-block"}
SHORTEST_LINE = 40  # characters
LEAST_LETTERS = 0.7  # of a line's characters, English ones
SHORTEST_PAGE = 200  # characters


class Text(HTMLParser):
    """The text of an HTML or Mallard page, a paragraph a line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.hidden += tag in NO_PROSE
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in NO_PROSE))
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def pages(folder: Path, without: str | None) -> Iterator[list[str]]:
    """The paragraphs of each page in a folder of an unpacked package; `without` one file or folder of that name."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink() or without in path.parts:
            continue
        if path.name.endswith((".html", ".html.gz", ".page")):
            parser = Text()
            parser.feed(read(path))
            yield "".join(parser.parts).split("\n")
        elif path.suffix == ".pod":  # its paragraphs are wrapped
            yield [re.sub(r"\s+", " ", part) for part in read(path).split("\n\n")]
        elif path.name.endswith(".dict.dz"):  # an entry begins at the margin
            for entry in re.split(r"\n(?=\S)", read(path)):
                yield [re.sub(r"\s+", " ", part) for part in entry.split("\n\n")]


def read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", "ignore")


def is_prose(line: str) -> bool:
    letters = sum(c.isascii() and c.isalpha() for c in line)
    return len(line) >= SHORTEST_LINE and letters >= LEAST_LETTERS * len(line)


def package_file(name: str, package: dict, folder: Path) -> Path:
    """The .deb of a package, downloaded; raises ValueError unless it is the one of the list."""
    wanted = f"{name}={package['version']}"
    subprocess.run(
        ["apt-get", "download", "-q", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    (file,) = folder.glob(f"{name}_*.deb")
    if hashlib.sha256(file.read_bytes()).hexdigest() != package["sha256"]:
        raise ValueError(f"{file.name} is not the file that data/debian_prose.yaml names")
    return file


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    for name, package in read_yaml(LEDGER / "debian_prose.yaml").items():
        with tempfile.TemporaryDirectory() as scratch:
            file = package_file(name, package, Path(scratch))
            subprocess.run(["dpkg-deb", "-x", file, f"{scratch}/whole"], check=True)
            size = 0
            with (target / f"{name}.jsonl").open("w", encoding="utf-8") as out:
                for page in pages(
                    Path(scratch, "whole", package.get("folder", "")), package.get("without")
                ):
                    if any("distribute verbatim copies" in line for line in page):
                        continue  # the text of a licence, which must not be changed
                    lines = [line.strip() for line in page]
                    new = [line for line in lines if is_prose(line) and hash(line) not in seen]
                    seen.update(map(hash, new))
                    text = "\n\n".join(new)
                    if len(text) >= SHORTEST_PAGE:
                        out.write(json.dumps({"text": text}) + "\n")
                        size += len(text)
            print(f"{name}: {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
