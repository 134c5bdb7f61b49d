#!/usr/bin/env bash
# Expected: generate(output_attentions=True) gives each step's attention to all keys so far, so that
# column 0 is the first token, as it is in the first step.
# What happens: in a model with a sliding window the cache drops what has left the window, and
# column 0 of a later step is the oldest token that is still there. A curve of "attention to the
# first token" along a generation goes on without a break, and is of another token at each step.
# transformers 5.23.0, torch 2.13.0. Source: transformers/cache_utils.py, DynamicSlidingWindowLayer;
# the documentation of generate's outputs gives the shape (.., generated_length, sequence_length).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
config = MistralConfig(
    vocab_size=96, num_attention_heads=4, num_key_value_heads=2, sliding_window=6, **sizes
)
config._attn_implementation = "eager"
model = MistralForCausalLM(config).eval()
ids = torch.randint(3, 96, (1, 12))
options = {"do_sample": False, "pad_token_id": 0, "output_attentions": True}
steps = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **options)
for number, step in enumerate(steps.attentions):
    weights = step[0][0, :, -1, 0].mean()
    print(f"step {number}: {step[0].shape[-1]} columns, column 0 gets {float(weights):.3f}")
whole = model(steps.sequences[:, :-1], output_attentions=True).attentions[0]
first_token = float(whole[0, :, -1, 0].mean())
print(f"the first token gets {first_token:.3f} in the last step, by a pass over the whole text")
assert first_token == 0 and steps.attentions[-1][0].shape[-1] == 6
assert steps.attentions[-1][0][0, :, -1, 0].min() > 0.05, "the behaviour has changed"
PYTHON
