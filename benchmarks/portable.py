"""Whether pages and unit tests pass as on other machines: with fewer instructions, elsewhere, cloned as on Windows.

    python benchmarks/portable.py [--capability default avx2 avx512] [--threads 1 2] [--only tests/unit notebooks/01*]

Each setting gets a clone of the last commit, with CRLF for line ends where .gitattributes allows it, in a folder with a
space and an umlaut, an empty HOME, another time zone and another language. Prints a row of docs/robustness.md for each
and exits 1 where a test failed. An instruction set that this processor lacks is left out.
"""

from __future__ import annotations

import argparse
import glob
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("notebooks/[0-9]*.ipynb", "notebooks/appendix/*.ipynb")
CAPABILITIES = {  # what PyTorch's own kernels, MKL and oneDNN may use
    "default": ("SSE4_2", "SSE41"),
    "avx2": ("AVX2", "AVX2"),
    "avx512": ("AVX512", "ALL"),
}


def environment(capability: str, threads: int, home: Path) -> dict[str, str]:
    mkl, onednn = CAPABILITIES[capability]
    changes = {
        "ATEN_CPU_CAPABILITY": capability,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "OMP_NUM_THREADS": str(threads),
        "HOME": str(home),
        "TZ": "Asia/Kathmandu",
        "LANG": "tr_TR.UTF-8",
    }
    # These would have the last word over LANG and HOME.
    dropped = ("LC_ALL", "LC_CTYPE", "LANGUAGE", "XDG_CACHE_HOME", "SINKUTILS_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | changes


def run(capability: str, threads: int, only: list[str], scratch: Path) -> dict[str, int]:
    """The counts of a pytest run in a clone below `scratch`."""
    clone, home, counts = scratch / "sinkutils", scratch / "home", scratch / "counts.xml"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", "-c", "core.autocrlf=true", ROOT, clone], check=True)
    files = [name for pattern in only for name in sorted(glob.glob(pattern, root_dir=clone))]
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--dist=loadfile"]
    command += ["--nbval", "--nbval-cell-timeout=1200"]
    command += ["--nbval-sanitize-with", "notebooks/nbval_sanitize.cfg", f"--junitxml={counts}"]
    env = environment(capability, threads, home) | {"PYTHONPATH": str(clone)}
    # As `make test` does: the text's making shows its progress, which would be a page's output.
    text = "from sinkutils.study.corpus import load_corpus; load_corpus('docstrings', 1024)"
    subprocess.run([sys.executable, "-c", text], cwd=clone, env=env, check=True)
    subprocess.run([*command, *files], cwd=clone, env=env)
    suite = ElementTree.parse(counts).getroot()[0]
    return {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--capability", nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES)
    )
    options.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    options.add_argument(
        "--only", nargs="+", default=["tests/unit", *PAGES], help="files or patterns"
    )
    args = options.parse_args()
    failed = 0
    for capability in args.capability:
        if capability == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
            print(f"| {capability} | | this processor lacks it |", flush=True)
            continue
        for threads in args.threads:
            with tempfile.TemporaryDirectory(prefix="a pläce ") as scratch:
                counts = run(capability, threads, args.only, Path(scratch))
            bad = counts["failures"] + counts["errors"]
            passed = counts["tests"] - bad - counts["skipped"]
            print(f"| {capability} | {threads} | {passed:,} passed, {bad} failed |", flush=True)
            failed += bad
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
