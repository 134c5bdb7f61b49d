#!/usr/bin/env bash
# Expected: position_ids (1, T) that restart at each text keep texts apart that are packed in a row,
# in Qwen2-VL as in LLaMA: collators for padding-free training write them so.
# What happens: Qwen2-VL takes them (it repeats them for its three axes of positions) but makes no
# mask of them, so that each text sees those before it. Nothing is said. Three axes, (3, 1, T), have
# the same effect. Only a fourth in front, (4, 1, T), keeps the texts apart.
# transformers 5.23.0, torch 2.13.0. Source: modeling_qwen2_vl.py, Qwen2VLTextModel.forward
# (text_position_ids); transformers pull request 40490 and issue 39400; met in axolotl's pull request
# 3817.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2VLConfig
from transformers import Qwen2VLForConditionalGeneration

sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
seeing = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(**sizes))
qwen = Qwen2VLForConditionalGeneration(
    Qwen2VLConfig(text_config=sizes | {"rope_parameters": rope}, vision_config=seeing)
)
ids = torch.randint(3, 80, (1, 12))
restarting = torch.cat([torch.arange(5), torch.arange(7)])[None]


def from_the_first_text(model, positions):
    model.set_attn_implementation("eager")
    given = {"position_ids": positions, "use_cache": False, "output_attentions": True}
    with torch.no_grad():
        maps = model.eval()(ids, **given).attentions
    return float(maps[0][0, :, 5:, :5].max())


print("the most attention that a token of the second text gives to one of the first:")
found = {}
for name, model, positions in (
    ("LLaMA, (1, T)", llama, restarting),
    ("Qwen2-VL, (1, T)", qwen, restarting),
    ("Qwen2-VL, (3, 1, T)", qwen, restarting.expand(3, 1, -1)),
    ("Qwen2-VL, (4, 1, T)", qwen, restarting.expand(4, 1, -1)),
):
    found[name] = from_the_first_text(model, positions)
    print(f"  {name}: {found[name]:.3f}")
llama_apart, two, three, four = found.values()
assert llama_apart == four == 0 and min(two, three) > 0.01, "the behaviour has changed"
PYTHON
