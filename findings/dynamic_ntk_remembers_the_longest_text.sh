#!/usr/bin/env bash
# Expected: what a model in eval mode computes for a text does not depend on the texts before it.
# What happens: rotary positions of the type "dynamic" (dynamic NTK) keep the frequencies of the
# longest text so far, until a text fits into the original context again. So a text longer than that
# context gets other logits after a longer one than before it, and the order of an evaluation changes
# its numbers.
# transformers 5.23.0, torch 2.13.0. Source: transformers/modeling_rope_utils.py,
# dynamic_frequency_update ("growing beyond the cached sequence length").
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
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
config = LlamaConfig(
    vocab_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    rope_parameters=rope,
    initializer_range=0.3,
    **sizes,
)
model = LlamaForCausalLM(config).eval()
long = torch.randint(3, 96, (1, 60))
text = long[:, :30]
with torch.no_grad():
    first = model(text).logits
    again = model(text).logits
    model(long)
    after_the_long_one = model(text).logits
    model(text[:, :10])
    after_a_short_one = model(text).logits
moved = float((after_the_long_one - first).abs().max())
print(f"the same text twice: logits differ by {float((again - first).abs().max())}")
print(f"after a longer text: by {moved:.3f} (the largest is {float(first.abs().max()):.1f})")
print(f"after a short one: by {float((after_a_short_one - first).abs().max())}")
assert torch.equal(again, first) and torch.equal(after_a_short_one, first)
assert moved > 0.01, "the behaviour has changed"
PYTHON
