# What the scripts for a lent GPU share: the environment, what is checked before a second is spent, the texts.
# To be sourced. STEPS=20: a rehearsal of so many steps on a CPU. CARD: the folder with what was carried.
set -u
cd "$(dirname "$0")/.."
CARD=${CARD:-.card}
STEPS=${STEPS:-}
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
# All that a script says comes back in one file, since there may be eight (studies/card_out.py has the others).
exec > >(tee -a "$OUT/log.txt") 2>&1
PYTHON=${PYTHON:-python3}
# The package is not installed there: without this path the scripts in studies/ do not find it.
export PYTHONPATH="$PWD:$PWD/benchmarks" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export PYTHONWARNINGS=ignore::UserWarning  # each of hundreds of runs would warn of kernels that do not repeat
export SINKUTILS_CACHE=${SINKUTILS_CACHE:-/tmp/cache} CARD_DEVICE=${CARD_DEVICE:-cuda}
[ -n "$STEPS" ] && export CARD_DEVICE=cpu

stop() { echo "$0: $*" >&2; exit 2; }

# needs PACKAGE .. -- FILE ..: stop at once where a package, a carried file or the GPU is not there.
needs() {
  local packages=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do packages+=("$1"); shift; done
  shift
  $PYTHON -c 'import importlib.util as u, sys
missing = [name for name in sys.argv[1:] if not u.find_spec(name)]
sys.exit("missing packages: " + ", ".join(missing) if missing else 0)' \
    torch numpy tokenizers safetensors yaml tqdm filelock sinkutils "${packages[@]}" || stop "cannot start"
  for file; do [ -e "$CARD/$file" ] || stop "$CARD/$file is missing: name $CARD in carry"; done
  [ "$CARD_DEVICE" = cpu ] || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || stop "no GPU here"
}

# The folder of token files of a packed text: unpacked FILE VOCABULARY. It is kept for the next call on this machine.
unpacked() { $PYTHON -c '
import sys
from sinkutils.study.corpus import load_corpus
print(load_corpus("packed:" + sys.argv[1], int(sys.argv[2])).folder)' "$CARD/$1" "$2" || stop "$1 cannot be unpacked"; }

# NVIDIA's multi-process service, which may run from an earlier call; without it a GPU serves one process at a time.
mps() {
  command -v nvidia-cuda-mps-control >/dev/null || return 0
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
  echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 || nvidia-cuda-mps-control -d
}

began=$(date +%s)
clock() { echo "[$(($(date +%s) - began)) s] $*"; }
