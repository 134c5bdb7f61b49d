"""Figures 9 and 10 on real models, from texts on this disk: python benchmarks/open_lm_texts.py MODEL FOLDER [PART ..]

FOLDER holds one JSONL file a domain (a `text` a line) that its MANIFEST.json names, and hellaswag_1000.jsonl with the
fields of HellaSwag. The texts are other people's and stay where they are; what was measured on them goes into
data/open_lms. Parts: domains, hellaswag (needs lm-eval); default: both. Part `installed` needs no texts and keeps
nothing: it prints Sink_1 on five kinds of text that come with every installation.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from importlib.metadata import files as files_of
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_lms import EPSILONS, add, summary
from scores import evaluate

from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import BOS, TEXT, bos_id, encode, probe
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.texts import COMMENT_OR_STRING, docstring_matches, text_of
from sinkutils.names import load_lm
from sinkutils.study import sources

PIECES, LENGTH = 100, 64  # a domain, as in Appendix B.3
DTYPE = "bfloat16"  # of the scores, as lm-eval would; sinks are measured in float32
QUESTIONS = "hellaswag_1000.jsonl"
KINDS = ("prose", "python", "c-headers", "licences", "data")
SUFFIXES = {
    "python": (".py",),
    "c-headers": sources.HEADERS,
    "data": (".json", ".csv", ".toml", ".yaml", ".yml", ".xml", ".ini", ".cfg"),
}
MAX_CHARACTERS = 20_000  # of an installed document
# Comments and preprocessor lines at the top of a C header: the same in most of them.
PREAMBLE = re.compile(r"\A(?:\s*(?:/\*.*?\*/|//[^\n]*|\#[^\n]*))++\s*", re.DOTALL)


def pieces(texts: list[str], tokenizer: Any) -> torch.Tensor:
    """PIECES of LENGTH tokens, drawn from all non-overlapping ones of all texts, (PIECES, LENGTH)."""
    found = []
    for text in texts:
        ids = encode(tokenizer, text)
        found += [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    chosen = np.random.default_rng(0).permutation(len(found))[:PIECES]
    return torch.tensor([found[index] for index in chosen])


def domains(name: str, folder: Path) -> dict[str, Any]:
    """Sink_1 by kind of text (Fig. 9), with what stood first in training."""
    model, tokenizer = load_lm(name)
    first = BOS if REAL_MODELS[name].bos else TEXT
    by: dict[str, Any] = {}
    for entry in json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8")):
        if entry["file"] == QUESTIONS:
            continue
        raw = (folder / entry["file"]).read_bytes()
        ids = pieces(
            [json.loads(line)["text"] for line in raw.decode("utf-8").splitlines()], tokenizer
        )
        source = [f"{part['repo']}@{part['commit'][:8]}:{part['path']}" for part in entry["from"]]
        if first == BOS:
            ids = torch.cat([torch.full_like(ids[:, :1], bos_id(tokenizer)), ids[:, :-1]], dim=1)
        report = measure(model, ids, epsilons=EPSILONS, norms=False, bos=first == BOS)
        digest = hashlib.sha256(raw).hexdigest()
        by[entry["pile_domain"]] = {"sha256": digest, "from": source, first: summary(report)}
        print(name, entry["pile_domain"], [report.sink(eps=eps) for eps in EPSILONS], flush=True)
    how = {
        "T": LENGTH,
        "first": first,
        "epsilons": list(EPSILONS),
        "pieces": "drawn from within documents",
    }
    return how | {"by": by}


def code_only(source: str) -> str:
    """Python source without comments and docstrings, so that it shares no text with the prose."""
    comments = (
        match for match in COMMENT_OR_STRING.finditer(source) if match.group().startswith("#")
    )
    code, end = "", 0
    for start, next_end in sorted(
        match.span() for match in (*comments, *docstring_matches(source))
    ):
        code += source[end:start].rstrip("" if source[start] == "#" else "rRuU")
        end = next_end
    code += source[end:]
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def installed_texts(kind: str) -> list[str]:
    """Texts of one of KINDS, shortened; first those that a corpus keeps for probing."""
    if kind == "prose":
        texts = list(sources.docstrings())
    elif kind == "licences":
        files = [file for name in sources.DISTRIBUTIONS for file in files_of(name) or ()]
        texts = [text_of(Path(str(f.locate()))) for f in files if sources.LICENCE.match(f.name)]
    else:
        texts = [text_of(path) for path in sources.files_with(*SUFFIXES[kind])]
    texts = [text for text in set(texts) if len(text) >= sources.MIN_CHARACTERS]
    texts.sort(key=sources.split_fraction)
    if kind == "python":
        texts = [code_only(text) for text in texts[: 4 * PIECES]]
    if kind == "c-headers":
        texts = [PREAMBLE.sub("", text) for text in texts]
    return [text[:MAX_CHARACTERS] for text in texts if len(text) >= sources.MIN_CHARACTERS]


def installed(name: str) -> dict[str, Any]:
    """Sink_1 by kind of text over the first tokens of installed documents."""
    model, tokenizer = load_lm(name)
    by = {}
    for kind in KINDS:
        texts = [text for text in installed_texts(kind) if len(encode(tokenizer, text)) >= LENGTH][
            :PIECES
        ]
        ids = probe(
            "natural", tokenizer, len(texts), LENGTH, bos=REAL_MODELS[name].bos, texts=texts
        )
        by[kind] = summary(measure(model, ids, epsilons=EPSILONS, norms=False))
    return by


def hellaswag(name: str, folder: Path) -> dict[str, Any]:
    """Zero-shot scores on the questions (Fig. 10), through lm-eval's own task on a local file."""
    model, tokenizer = load_lm(name, dtype=DTYPE)
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        raise SystemExit("lm-eval is missing: pip install -e '.[downstream]'")
    task = Path(package.origin).parent / "tasks" / "hellaswag"
    with tempfile.TemporaryDirectory() as own:
        (Path(own) / "utils.py").write_bytes((task / "utils.py").read_bytes())
        text = (task / "hellaswag.yaml").read_text(encoding="utf-8")
        local = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    validation: {(folder / QUESTIONS).resolve()}"
        text = text.replace("dataset_path: Rowan/hellaswag", local).replace(
            "training_split: train\n", ""
        )
        (Path(own) / "hellaswag.yaml").write_text(text, encoding="utf-8")
        bos = REAL_MODELS[name].bos
        scores = evaluate(model, tokenizer, "hellaswag", own, bos)
    digest = hashlib.sha256((folder / QUESTIONS).read_bytes()).hexdigest()
    return scores | {
        "bos": bos,
        "computed_in": DTYPE,
        "split": "validation, 1,000 of its questions",
        "sha256": digest,
    }


def main(arguments: list[str]) -> None:
    """Measure and keep."""
    name, folder, *parts = arguments
    for part in parts or ["domains", "hellaswag"]:
        if part == "installed":
            print(json.dumps(installed(name), indent=1))
            continue
        found = {"domains": domains, "hellaswag": hellaswag}[part](name, Path(folder))
        print(add(name, part, found).name, part)


if __name__ == "__main__":
    main(sys.argv[1:])
