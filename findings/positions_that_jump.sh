#!/usr/bin/env bash
# Expected: position_ids say at which angles queries and keys are rotated, and no more. Two published
# methods rest on that: PoSE trains on a short text whose positions jump once (0 to 5, 100 to 105),
# and Self-Extend reads a long text with floor(position / G), such as 0, 0, 1, 1, 2, 2.
# What happens: without a mask and without a cache, transformers takes each step other than 1 for the
# beginning of another text that is packed in the same row. After PoSE's jump no token sees what
# stands before it; with Self-Extend's positions most tokens see only themselves. Nothing is said.
# With a cache, which is the default of model(ids), the same call gives the expected attention.
# transformers 5.23.0, torch 2.13.0. Source: transformers/masking_utils.py,
# find_packed_sequence_indices; transformers pull request 39194. PoSE: arXiv 2309.10400. Self-Extend:
# arXiv 2401.01325.
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
config._attn_implementation = "eager"
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 96, (1, 12))


def last_row(positions, **options):
    maps = model(ids, position_ids=positions, output_attentions=True, **options).attentions
    return [round(float(weight), 2) for weight in maps[0][0, 0, -1]]


jump = torch.cat([torch.arange(6), torch.arange(100, 106)])[None]
grouped = (torch.arange(12) // 2)[None]
with_cache = last_row(jump)
pose = last_row(jump, use_cache=False)  # as the Trainer calls it
extend = last_row(grouped, use_cache=False)
print("attention of the last of 12 tokens, positions 0 to 5 and 100 to 105, with a cache:")
print(with_cache)
print("without a cache:")
print(pose)
print("positions 0, 0, 1, 1, .., 5, 5, without a cache:")
print(extend)
assert min(with_cache) > 0 and pose[:6] == [0] * 6 and extend == [0] * 11 + [1], "it has changed"
PYTHON
