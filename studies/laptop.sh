#!/usr/bin/env bash
# The whole study on two CPU cores: some 480 runs of ten minutes each on a server's core, more on a laptop's. Safe to stop; the next start goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
make models                                                  # .venv and two real language models; needs a network
PATH="$PWD/.venv/bin:$PATH"
python -m sinkutils sweep --preset laptop --dry-run          # what is missing, and how long it takes
python -m sinkutils sweep --preset laptop --jobs "${JOBS:-2}"
python -m sinkutils claims --preset laptop                   # what the records say of the paper's claims
python -m sinkutils run --in-place                           # the notebooks and figures/ from these records
