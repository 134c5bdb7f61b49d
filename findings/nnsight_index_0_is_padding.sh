#!/usr/bin/env bash
# Expected: in nnsight each invoke of a trace is a text of its own, and index 0 of what it saves is
# its first token.
# What happens: the texts of several invokes are padded on the left to one length, and what a short
# one saves begins with its padding: index 0 is a pad, and the shape is that of the longest text.
# The same lines with one text give its first token at index 0. Nothing is said.
# nnsight 0.8.1, transformers 5.23.0, torch 2.13.0. Source: nnsight's language model, which sets
# padding_side to "left" and makes one batch of all invokes.
# It matters for sinks: norms and attention "of the first token" are then those of padding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 nnsight==0.8.1
cd "$folder"
cat > trace.py <<'PYTHON'
import warnings

warnings.filterwarnings("ignore")

import torch
from nnsight import LanguageModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = {word: i for i, word in enumerate(["<unk>", "<eos>", "a", "b", "c"])}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>")
ends = {"bos_token_id": 1, "eos_token_id": 1}
config = GPT2Config(vocab_size=5, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, **ends)
model = LanguageModel(GPT2LMHeadModel(config).eval(), tokenizer=tokenizer)

with model.trace() as tracer:
    with tracer.invoke("a b c a b c"):
        long = model.transformer.wte.output.save()
    with tracer.invoke("b c"):
        short = model.transformer.wte.output.save()
with model.trace("b c"):
    alone = model.transformer.wte.output.save()

print("shapes:", tuple(long.shape), tuple(short.shape), "and alone", tuple(alone.shape))
moved = float((short[0, 0] - alone[0, 0]).abs().max())
last = float((short[0, -1] - alone[0, -1]).abs().max())
print(f"embedding at index 0 in the batch and alone: {moved:.2f} apart; at index -1: {last:.2f}")
assert short.shape[1] == 6 and alone.shape[1] == 2 and last == 0
assert moved > 0.01, "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" trace.py  # nnsight compiles the source of a trace, so it needs a file
