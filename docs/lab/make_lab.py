"""Put the lab together: `make lab` writes index.html, of the sources in sinkutils/plots/lab_page.

Sources and words are read anew each time. Weights, maps and the text to train on are those that the
page holds already: record_lab.py makes them. MAKE_LAB=<file> writes another file instead.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sinkutils.paths import read_yaml
from sinkutils.plots.lab import SOURCES, page_of

PAGE = Path(__file__).with_name("index.html")
RECORDED = ("models", "rounding", "real", "sentences", "text")  # what record_lab.py makes


def data_of(page: str) -> dict:
    """What was recorded of the data that a page holds."""
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    early = json.loads(page.split("let DATA = ")[1].split(";\n")[0])
    return {name: data[name] for name in RECORDED} | {"first": early["first"]}


def write_page(recorded: dict, file: Path = PAGE) -> None:
    """Write the page with these weights, maps and text."""
    if recorded["sentences"] != read_yaml(SOURCES / "texts.yaml")["sentences"]:
        raise SystemExit("the maps are of other sentences: run docs/lab/record_lab.py")
    file.write_text(page_of(recorded), encoding="utf-8", newline="\n")
    print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    write_page(data_of(PAGE.read_text(encoding="utf-8")), Path(os.environ.get("MAKE_LAB", PAGE)))
