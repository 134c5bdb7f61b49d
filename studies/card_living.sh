#!/usr/bin/env bash
# Row 5: the second recipe's records that are missing, and the laptop's that decide, seeds stacked.
# Before the call: mkdir -p .card; python studies/card_plan.py > .card/plan; the packed docstrings into .card/.
# SECONDS_LEFT: of the command. What comes back is in $OUT: records in files-<n>.tar, results.jsonl.
. "$(dirname "$0")/card_common.sh"
needs -- plan docstrings-1024.tar.xz
SECONDS_LEFT=${SECONDS_LEFT:-500}
mps
DOCSTRINGS=$(unpacked docstrings-1024.tar.xz 1024) || exit 2
cp "$CARD/plan" /tmp/plan
[ -n "$STEPS" ] && sed -n "1,6p" "$CARD/plan" | sed "s/ weights$//; s/$/ train.steps=$STEPS train.eval_every=10/" > /tmp/plan
clock "$(wc -l < /tmp/plan) runs"
$PYTHON studies/card.py /tmp/plan --out "$OUT" --jobs "${JOBS:-16}" --stack "${STACK:-8}" --seconds "$SECONDS_LEFT" \
  --corpora "$DOCSTRINGS"
clock "ended with $?"
