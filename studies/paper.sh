#!/usr/bin/env bash
# The paper's own scale: one run of 60M parameters or, with PRESET=paper-1b, of 1B, on one GPU.
# The first start streams and tokenises 5B tokens of the Pile. EXPERIMENT: any name of `python -m sinkutils list`.
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/.installed
PATH="$PWD/.venv/bin:$PATH"
PRESET="${PRESET:-paper}" EXPERIMENT="${EXPERIMENT:-base}"
python -m sinkutils train "$EXPERIMENT" --preset "$PRESET" --seed "${SEED:-0}" --keep-weights
python -m sinkutils list --preset "$PRESET"
