"""Put the lab together: `make lab` writes index.html, of the sources beside it.

Sources, words and the tokenizer are read anew each time. Weights and maps are those that the page
holds already: record_lab.py makes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import sinkutils as su
from sinkutils import plots
from sinkutils.paths import read_yaml
from sinkutils.plots.interactive import PALETTE, SCRIPTS
from sinkutils.plots.theme import COLORS

LAB = Path(__file__).parent
PAGE = LAB / "index.html"
RECORDED = ("models", "rounding", "real", "sentences")  # what record_lab.py makes


def data_of(page: str) -> dict:
    """The data that a page holds."""
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def tokenizer() -> dict:
    """The letters of every token, by id, and the pairs that are merged, the first first."""
    model = json.loads(su.load_corpus("docstrings", 1024).tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    return {"vocabulary": vocabulary, "merges": [" ".join(pair) for pair in model["merges"]]}


def page_of(recorded: dict) -> str:
    """The page with these weights and maps: words, sources and data in their places."""
    texts = read_yaml(LAB / "texts.yaml")
    if recorded["sentences"] != texts["sentences"]:
        raise SystemExit("the maps are of other sentences: run docs/lab/record_lab.py")
    data = {name: recorded[name] for name in RECORDED}
    data |= {"palette": PALETTE, "colors": COLORS, "tokenizer": tokenizer()}
    data |= {"words": texts["models"], "samples": texts["samples"], "tour": texts["tour"]}
    lines = json.dumps(data, ensure_ascii=False, indent=0)
    parts = texts["page"]
    parts["data"] = lines.replace("</", "<\\/")  # "</script>" would end the element that holds it
    parts["right"] = parts["right"].format(**data["rounding"])
    shared = [Path(plots.__file__).with_name(name) for name in SCRIPTS]
    for file in (*shared, *LAB.glob("*.js"), LAB / "style.css"):
        parts[file.name] = file.read_text(encoding="utf-8")
    page = (LAB / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\[\[(\S+?)\]\]", lambda name: parts[name[1]], page)


def write_page(recorded: dict) -> None:
    PAGE.write_text(page_of(recorded), encoding="utf-8", newline="\n")
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    write_page(data_of(PAGE.read_text(encoding="utf-8")))
