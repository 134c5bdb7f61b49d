"""What reading costs: importing the package, the ledger from records, opening a text again; now and, beside it, before.

    python benchmarks/reading.py [--before CHECKOUT] [--json benchmarks/results/reading.json]

CHECKOUT: a clone at an earlier commit with its own records, such as 8b1a0df with 135. Each number is the best of three
processes, wall seconds. The ledger of the present code is read from as many records, copied from one that is there.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import ROOT, keep, parser, show

RECORDS = 135
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
WAYS = {
    "import sinkutils, after torch": "import torch; " + TIMED.format("import sinkutils"),
    "claims('laptop')": "import sinkutils as su, torch, pandas, transformers; "
    + TIMED.format("su.claims('laptop')"),
    "open a tokenised text again": "import sinkutils as su; su.load_corpus('docstrings', 1024); "
    + TIMED.format("su.load_corpus('docstrings', 1024).tokens('train')"),
}


def seconds(code: str, checkout: Path, home: Path | None) -> float:
    """The best of three fresh processes that run `code` on the package of `checkout`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        **({"SINKUTILS_HOME": str(home)} if home else {}),
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    runs = (
        subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True)
        for _ in range(3)
    )
    return min(float(run.stdout.split()[-1]) for run in runs)


def copies(home: Path) -> int:
    """RECORDS records below `home`, the same values under the name and config of one run each."""
    from sinkutils.paths import RUNS
    from sinkutils.study.grid import by_name, config, resolve
    from sinkutils.study.record import read_record, record_folder
    from sinkutils.study.store import write_record

    like = read_record(
        next(path.parent for path in sorted((RUNS / "laptop").glob("*/*/metrics.json")))
    )
    names = [
        e.name
        for e in by_name().values()
        if "laptop" in e.presets and resolve(e.name, "laptop") == e.name
    ]
    plan = [(name, seed) for seed in range(3) for name in names][:RECORDS]
    for name, seed in plan:
        run = dataclasses.replace(config(name, "laptop"), seed=seed)
        target = record_folder("laptop", name, seed, home / "runs")
        text = like.config["corpus"]
        write_record(target, run, like.metrics, like.provenance, corpus=text, arrays=like.arrays)
    return len(plan)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        count = copies(Path(folder))
        for way, code in WAYS.items():
            row = {
                "what": way,
                "records": count,
                "now": round(seconds(code, ROOT, Path(folder)), 3),
            }
            if options.before:
                row["before"] = round(seconds(code, options.before, None), 3)
            rows.append(row)
            show(row)
    keep(options.json, rows)


if __name__ == "__main__":
    main()
