#!/usr/bin/env bash
# Expected: an attention function that is registered under a name of one's own, and is transformers'
# own eager function to the letter, computes what "eager" computes.
# What happens: masks are looked up by the same name. There is none for the new name, so no mask is
# made, the function gets attention_mask=None, and a causal language model attends to later tokens.
# Nothing is raised. (AttentionMaskInterface.register(name, eager_mask) mends it.)
# transformers 5.23.0, torch 2.13.0. Source: transformers/masking_utils.py, create_causal_mask and
# _preprocess_mask_arguments; the documentation's page "Attention backends" says in its part on masks
# that mask creation is skipped then.
# It matters for sinks: softmax off by one, softpick and the like are tried in this way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

AttentionInterface.register("mine", eager_attention_forward)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 96, (1, 12))
future = {}
for name in ("eager", "mine"):
    model.set_attn_implementation(name)
    maps = model(ids, output_attentions=True).attentions
    future[name] = float(maps[0].triu(1).sum(dim=-1).mean())
print("attention to later tokens, mean over queries:", future)
assert future["eager"] == 0 and future["mine"] > 0.2, "the behaviour has changed"
PYTHON
