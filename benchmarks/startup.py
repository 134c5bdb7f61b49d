"""CPU seconds, user and system, of whole commands: help, lists, and a user's first and second `measure`.

The first `measure` has an empty cache of texts (a temporary SINKUTILS_CACHE); the model is the same folder each time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from statistics import median

from bench import keep, parser, show

from sinkutils.measuring.real import model_folder


def cpu_seconds(command: list[str], cache: str) -> float:
    """Of one run of `python -m sinkutils`, its own children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "sinkutils", *command],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"SINKUTILS_CACHE": cache},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", help="what `measure` measures (default: smollm2)")
    options.add_argument("--rounds", type=int, default=3, help="of each command; the median counts")
    arguments = options.parse_args()
    rows = []
    # Its folder, because installed models are found in the cache
    measure = ["measure", arguments.model or str(model_folder("smollm2")), "-n", "20"]
    with tempfile.TemporaryDirectory() as cache:
        first = cpu_seconds(measure, cache)
        commands = {"--help": ["--help"], "list": ["list"], "models": ["models"]}
        for name, command in (commands | {"measure, the second time": measure}).items():
            took = [cpu_seconds(command, cache) for _ in range(arguments.rounds)]
            rows.append({"command": name, "cpu_seconds": round(median(took), 2)})
            show(rows[-1])
    rows.append({"command": "measure, the first time", "cpu_seconds": round(first, 2)})
    show(rows[-1])
    keep(arguments.json, rows)


if __name__ == "__main__":
    main()
