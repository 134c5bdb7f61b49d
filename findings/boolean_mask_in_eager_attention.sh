#!/usr/bin/env bash
# Expected: a boolean attention mask (B, 1, T, T), True where a key may be seen, works with eager
# attention as it works with sdpa, to which it is the natural form.
# What happens: eager attention adds the mask to the logits. True adds 1 and False adds 0, so every
# token attends to later ones, and nothing is raised. With sdpa the same call is right.
# transformers 5.23.0, torch 2.13.0. Source: eager_attention_forward of the models ("attn_weights +
# attention_mask"); transformers/masking_utils.py hands a mask of four dimensions on as it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 96, (1, 12))
other = ids.clone()
other[0, -1] = 3 + (ids[0, -1] - 2) % 93  # another last token, which token 1 must not notice
mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
changed = {}
for name in ("sdpa", "eager"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        one, two = (model(row, attention_mask=mask).logits[0, 0] for row in (ids, other))
    changed[name] = float((one - two).abs().max())
print("change of the first token's logits when the last token is another:", changed)
assert changed["sdpa"] == 0 and changed["eager"] > 1e-3, "the behaviour has changed"
PYTHON
