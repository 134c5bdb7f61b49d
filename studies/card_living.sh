#!/usr/bin/env bash
# On a GPU that is lent for minutes: the second recipe's grid, the laptop's runs that decide, the lab's snapshots.
# SECONDS_LEFT: of the command. Needs .card/ with packed token files; what comes back is in $OUT.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 SINKUTILS_CACHE=${SINKUTILS_CACHE:-/tmp/cache} OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-28}
SECONDS_LEFT=${SECONDS_LEFT:-320}

unpacked() { $PYTHON -c "
import sys
from sinkutils.data.corpus import load_corpus
print(load_corpus('packed:' + sys.argv[1], int(sys.argv[2])).folder)" ".card/$1" "$2"; }

# Without this service the GPU serves one process at a time, ten times as slowly.
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d

DOCSTRINGS=$(unpacked docstrings-1024.tar.xz 1024)
date +%T
$PYTHON studies/card_plan.py > /tmp/plan
[ -n "${STEPS:-}" ] && awk 'NR % 150 == 8' /tmp/plan | sed "s/weights$//; s/$/ train.steps=$STEPS train.eval_every=$STEPS/" > /tmp/plan.2 && mv /tmp/plan.2 /tmp/plan
wc -l /tmp/plan
$PYTHON studies/card.py /tmp/plan --out "$OUT" --jobs "$JOBS" --seconds "$SECONDS_LEFT" --corpora "$DOCSTRINGS" 2>/tmp/errors.txt
date +%T
grep -v Warning /tmp/errors.txt | tail -5
cat /tmp/mps/control.log | tail -3
