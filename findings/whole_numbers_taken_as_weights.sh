#!/usr/bin/env bash
# Expected: a folder whose weights are stored as int8, and whose config.json has lost its
# quantization_config (merged by hand, re-saved without it), does not load, or a line says so.
# What happens: from_pretrained takes the whole numbers as they are for the float weights. Nothing is
# missing, unexpected or mismatched in the loading info, no line is logged, and the model runs: its
# weights are -127 to 127 in place of some hundredths.
# transformers 5.23.0, torch 2.13.0, safetensors 0.8.0. Source: transformers/core_model_loading.py,
# where each tensor of the file is cast to the parameter's dtype (tensor.to(device=.., dtype=..)),
# whatever it was stored in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=4, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
weights = load_file("model/model.safetensors")
name = "model.layers.0.self_attn.q_proj.weight"
scale = weights[name].abs().max() / 127  # a format of quantised weights keeps it beside them
save_file(
    weights | {name: (weights[name] / scale).round().to(torch.int8)},
    "model/model.safetensors",
    {"format": "pt"},
)
model, info = LlamaForCausalLM.from_pretrained("model", output_loading_info=True)
loaded = dict(model.named_parameters())[name]
print(f"in the file: int8; loaded: {loaded.dtype}, up to {float(loaded.detach().abs().max()):.0f}")
print(f"before: up to {float(weights[name].abs().max()):.3f}; the loading info: {info}")
assert loaded.dtype == torch.float32 and loaded.abs().max() == 127, "the behaviour has changed"
assert not any(info.values()), "the behaviour has changed"
PYTHON
