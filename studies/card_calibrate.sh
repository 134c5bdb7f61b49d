#!/usr/bin/env bash
# On a GPU that is lent for minutes, first call: the profile of a step of `gpu`, a graph's losses against eager ones,
# the trials from which the second recipe is chosen, and 30 steps of every experiment of it (four minutes).
# Needs .card/ with packed token files (README of studies); what comes back is in $OUT.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 SINKUTILS_CACHE=${SINKUTILS_CACHE:-/tmp/cache} OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-}   # of a rehearsal on a CPU
JOBS=${JOBS:-15}

unpacked() { $PYTHON -c "
import sys
from sinkutils.data.corpus import load_corpus
print(load_corpus('packed:' + sys.argv[1], int(sys.argv[2])).folder)" ".card/$1" "$2" 2>>"$OUT/unpack.txt"; }

mps() { command -v nvidia-cuda-mps-control >/dev/null && CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps nvidia-cuda-mps-control -d && export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps; }

date +%T
DOCSTRINGS=$(unpacked docstrings-1024.tar.xz 1024)
EMBEDDED=$(unpacked embedded-4096.tar.xz 4096)
date +%T
cp -r .card/embedded-1024 /tmp/embedded-1024 && (time $PYTHON studies/retokenise.py "$EMBEDDED" /tmp/embedded-1024) > "$OUT/retokenise.log" 2>&1 &
if [ -z "$STEPS" ]; then
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 60 $PYTHON -m pytest -q -x -p no:cacheprovider tests/unit/test_training.py -k graph 2>&1 | tail -15
  date +%T
  timeout 60 $PYTHON benchmarks/gpu.py --corpus packed:.card/embedded-4096.tar.xz --forms eager graph --json "$OUT/gpu.json"
  date +%T
fi
wait
tail -3 "$OUT/retokenise.log"
mps
$PYTHON - > /tmp/plan <<EOF2
import os
steps = os.environ.get("STEPS")
for batch, n in ((64, 2000), (32, 3200), (128, 1000)):
    for rate in (0.01, 0.015, 0.006, 0.02):
        for decay in (0.2, 0.1, 0.3, 0.05):
            for seed in range(3):
                n = steps or n
                print(f"minute fixed_1 {seed} train.learning_rate={rate} train.weight_decay={decay} "
                      f"train.batch_size={batch} train.steps={n} train.eval_every={n}")
EOF2
[ -n "$STEPS" ] && sed -i 4q /tmp/plan
$PYTHON studies/card.py /tmp/plan --out "$OUT" --jobs "$JOBS" --seconds 110 --corpora "$DOCSTRINGS" 2>"$OUT/errors.txt"
date +%T
$PYTHON - > /tmp/plan <<EOF2
from sinkutils.study import grid
print("desk default_weight_decay_0.3 0 train.steps=600 train.eval_every=600")
print("laptop k_bias_weight_decay_0 0 train.steps=600 train.eval_every=600")
for run in grid.plan("minute", seeds=[0]):
    if not hasattr(run, "start"):
        print(f"minute {run.experiment} 0 train.steps=30 train.eval_every=30 train.batch_size=64")
EOF2
[ -n "$STEPS" ] && sed -i 3,5p /tmp/plan
mkdir -p "$OUT/rehearsal"
$PYTHON studies/card.py /tmp/plan --out "$OUT/rehearsal" --jobs "$JOBS" --seconds 60 --corpora "$DOCSTRINGS" /tmp/embedded-1024 2>>"$OUT/errors.txt"
head -c 300 "$OUT/rehearsal/results.jsonl"
date +%T
tail -5 "$OUT/errors.txt"
