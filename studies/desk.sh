#!/usr/bin/env bash
# The paper's default on CPU cores: runs of some three hours each on one core. Safe to stop; the next start goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
make .venv/.installed
PATH="$PWD/.venv/bin:$PATH"
python -m sinkutils sweep --preset desk --jobs "${JOBS:-2}" --seeds 0 1 --only default
python -m sinkutils sweep --preset desk --jobs "${JOBS:-2}" --seeds 0 --only fixed_1 k_bias sigmoid sigmoid_normalised \
  weight_decay_0.5 learnable
# docs/expectations.md, L: where any first token may have more of a sink
python -m sinkutils sweep --preset desk --jobs "${JOBS:-2}" --seeds 0 --only default_constant_lr default_weight_decay_0.3 \
  lr_x2
python -m sinkutils run --in-place --only 02 05              # the pages that show them
