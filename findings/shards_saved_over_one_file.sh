#!/usr/bin/env bash
# Expected: save_pretrained into a folder that already holds a model replaces it, and from_pretrained
# then loads what was saved last.
# What happens: if the first model was saved as one file and the second one in shards, the old
# model.safetensors stays beside the new shards and their index, and from_pretrained prefers it. The
# old weights are loaded without a warning. (So a training that writes twice into one folder, the
# second time in shards, is evaluated as it was the first time.)
# transformers 5.23.0, torch 2.13.0. Source: transformers/modeling_utils.py, save_pretrained ("Clean
# the folder from a previous save", which matches names of shards only). Diffusers has the like: its
# issue 14769.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config)
model.save_pretrained("model")
before = float(model.lm_head.weight.detach()[0, 0])
with torch.no_grad():
    model.lm_head.weight.add_(1)  # a training goes on
model.save_pretrained("model", max_shard_size="20KB")
after = float(model.lm_head.weight.detach()[0, 0])
loaded = float(LlamaForCausalLM.from_pretrained("model").lm_head.weight.detach()[0, 0])
print([name for name in sorted(os.listdir("model")) if "safetensors" in name])
print(f"a weight at the first save {before:.3f}, at the second {after:.3f}, loaded {loaded:.3f}")
assert loaded == before != after, "the behaviour has changed"
PYTHON
