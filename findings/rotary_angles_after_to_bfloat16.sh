#!/usr/bin/env bash
# Expected: model.to(torch.bfloat16) and from_pretrained(.., dtype=torch.bfloat16) give one model.
# What happens: .to() also rounds the frequencies of the rotary positions, which are a buffer;
# from_pretrained keeps them in float32. The weights are equal bit by bit, and the angles are not: a
# frequency of three digits times a position of thousands is off by whole radians.
# transformers 5.23.0, torch 2.13.0. Source: transformers/models/llama/modeling_llama.py,
# LlamaRotaryEmbedding (register_buffer("inv_freq", ..)), and torch.nn.Module.to, which casts all
# floating point parameters and buffers.
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
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=96, num_attention_heads=1, num_key_value_heads=1, **sizes)
model = LlamaForCausalLM(config).eval()
model.save_pretrained("model")
loaded = LlamaForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
cast = model.to(torch.bfloat16)
weights = zip(loaded.parameters(), cast.parameters(), strict=True)
same = all(torch.equal(one, other) for one, other in weights)
rotary, rounded = loaded.model.rotary_emb.inv_freq, cast.model.rotary_emb.inv_freq
angle = 4096 * (rotary.double() - rounded.double()).abs().max()
print("all weights equal:", same)
print("inv_freq:", rotary.dtype, "by from_pretrained,", rounded.dtype, "by .to()")
print(f"the largest difference of angles at position 4096: {float(angle):.1f} radians")
assert same and rotary.dtype == torch.float32 and rounded.dtype == torch.bfloat16
assert angle > 1, "the behaviour has changed"
PYTHON
