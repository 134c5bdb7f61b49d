#!/usr/bin/env bash
# Row 1: a step of `gpu`, eager, as a graph and compiled, against the peak measured; steps of stacked runs of `minute`.
. "$(dirname "$0")/card_common.sh"
needs -- docstrings-1024.tar.xz embedded-4096.tar.xz
DOCSTRINGS=$(unpacked docstrings-1024.tar.xz 1024) || exit 2
clock unpacked
gpu=(--corpus "packed:$CARD/embedded-4096.tar.xz")
sizes="1 3 8 16"
if [ -n "$STEPS" ]; then
  gpu=(--preset minute --corpus "packed:$CARD/docstrings-1024.tar.xz" --device cpu --forms eager --steps 2 --rounds 1)
  sizes=2
fi
timeout "${LIMIT:-120}" $PYTHON benchmarks/gpu.py "${gpu[@]}" --json "$OUT/gpu.json"
clock "a step of gpu"
timeout "${LIMIT:-120}" $PYTHON studies/card_profile.py minute "$DOCSTRINGS" $sizes
clock stacked
