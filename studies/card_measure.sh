#!/usr/bin/env bash
# Row 6: what measuring a model of 8B costs on a card, and each CUDA test of operations by itself, 40 s each.
# Two of those tests never ended; log.txt says which.
. "$(dirname "$0")/card_common.sh"
needs transformers pytest hypothesis
timeout 200 $PYTHON studies/card_measure.py
clock measured
$PYTHON -m pytest --collect-only -q -o addopts= -p no:cacheprovider tests/unit/test_fast.py -k test_cuda 2>/dev/null | grep :: > /tmp/ids
clock "$(wc -l < /tmp/ids) tests"
one_test() { timeout 40 "$PYTHON" -m pytest -q -p no:cacheprovider "$1" >/dev/null 2>&1; echo "$? $1"; }
export -f one_test; export PYTHON
# Exit codes: 0 passed, 124 did not end; four at a time, as each compiles.
[ -n "$STEPS" ] && sed -i 2q /tmp/ids
tr '\n' '\0' < /tmp/ids | xargs -0 -n 1 -P 4 bash -c 'one_test "$1"' _
clock done
