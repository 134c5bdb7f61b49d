#!/usr/bin/env bash
# Row 4: the paper's own body, 59M, with a vocabulary of 8,192 and a context of 512, 64k tokens a step, constant rate.
# DECAY: 0.1, then 0.5 in another call. TEXT: a packed corpus of 8,192 kinds of tokens in $CARD.
. "$(dirname "$0")/card_common.sh"
TEXT=${TEXT:-prose-8192.tar.xz}
needs -- "$TEXT"
DECAY=${DECAY:-0.1}
SECONDS_LEFT=${SECONDS_LEFT:-540}
FOLDER=$(unpacked "$TEXT" 8192) || exit 2
clock unpacked
fields=(model.vocab_size=8192 model.context_length=512 train.batch_size=128 train.micro_batch=null
  train.learning_rate=0.0008 train.weight_decay="$DECAY" train.steps=4000 train.eval_every=100 train.valid_chunks=32
  data.validation=null)
[ -n "$STEPS" ] && fields+=("train.steps=$STEPS" train.eval_every=10 train.valid_chunks=2 train.batch_size=1
  model.num_layers=1 model.hidden_size=64 model.intermediate_size=64 model.num_heads=2)
$PYTHON studies/card_long.py "paper_body_decay_$DECAY" paper default 0 "${fields[@]}" --out "$OUT" --corpus "$FOLDER" \
  --seconds $((SECONDS_LEFT - $(date +%s) + began)) ${COMPILE:+--compile}
clock "ended with $?"
