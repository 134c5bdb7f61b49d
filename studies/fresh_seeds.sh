#!/usr/bin/env bash
# The fresh seeds of expectation R (docs/expectations.md): some four hours of one core. Safe to stop; the next start goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
RUNS="${RUNS:-data/runs}"
JOBS="${JOBS:-1}"
sweep() { python -m sinkutils sweep --preset laptop --runs "$RUNS" --jobs "$JOBS" "$@"; }
sweep --seeds 3 4 5 --only ffn_gelu data_share_0.1 data_share_1 window_none window_1_32 ffn_geglu elu_kernel_normalised linear k_bias_first_20
sweep --seeds 6 7 8 --only fixed_1
# Two claims need the weights. They stay out of git: benchmarks/trials.py reads them, and the records go in without.
for seed in 6 7 8; do
  for name in k_bias sink_token_default; do
    python -m sinkutils train "$name" --preset laptop --seed "$seed" --runs "$RUNS.weights" --keep-weights
  done
done
