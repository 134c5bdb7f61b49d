#!/usr/bin/env bash
# Rows 2 and 3: does any first token become a sink in a model of 25M? `gpu` at a constant rate, measured every 250 steps.
# Stop rule, written beforehand: Sink_1 below 8 % at step 15,000, then weight decay 0.5 from the start.
# WHAT: default, k_bias, sigmoid, or decay_0. SECONDS_LEFT: of the command. The curve is in $OUT/curves.jsonl as it is made.
. "$(dirname "$0")/card_common.sh"
needs -- embedded-4096.tar.xz
WHAT=${WHAT:-default}
SECONDS_LEFT=${SECONDS_LEFT:-540}
EMBEDDED=$(unpacked embedded-4096.tar.xz 4096) || exit 2
clock unpacked
fields=(train.steps=40000 train.eval_every=250 train.valid_chunks=32)
[ -n "$STEPS" ] && fields=("train.steps=$STEPS" train.eval_every=10 train.valid_chunks=2 train.batch_size=1
  model.num_layers=2 model.hidden_size=64 model.intermediate_size=64 model.num_heads=2)
experiment=$WHAT
[ "$WHAT" = decay_0 ] && experiment=default && fields+=(train.weight_decay=0)
floor=(); [ "$WHAT" = default ] && floor=(--floor "${FLOOR_STEP:-15000}" 8)
left() { echo $((SECONDS_LEFT - $(date +%s) + began)); }
long() { $PYTHON studies/card_long.py "$@" --out "$OUT" --corpus "$EMBEDDED" --seconds "$(left)" --weights ${COMPILE:+--compile}; }
long "${WHAT}_constant_lr" gpu "$experiment" 0 "${fields[@]}" "${floor[@]}"
code=$?
clock "ended with $code"
if [ $code = 3 ]; then
  long "${WHAT}_constant_lr_decay_0.5" gpu "$experiment" 0 "${fields[@]}" train.weight_decay=0.5
  clock "ended with $?"
fi
