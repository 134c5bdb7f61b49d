#!/usr/bin/env bash
# The grid on one machine with GPUs, one run a GPU at a time, by estimate a minute or two each. Safe to stop.
# On a cluster: ENGINE=slurm, after pip install -e '.[slurm]'; JOBS: runs at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/.installed
PATH="$PWD/.venv/bin:$PATH"
python -m sinkutils sweep --preset gpu --jobs "${JOBS:-1}" --engine "${ENGINE:-local}"
python -m sinkutils claims --preset gpu
