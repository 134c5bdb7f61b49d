#!/usr/bin/env bash
# Expected: GPT2Config(reorder_and_upcast_attn=True), with which the GPT-2 models of the Mistral project
# (stanford-crfm) were trained, computes logits and softmax in float32 whichever attention is named.
# What happens: only 'eager' reads the option. 'sdpa', which from_pretrained chooses by default, leaves
# it out without a word: in bfloat16 its logits are bit for bit those of a model without the option.
# With 'eager' the option goes past the attention interface, so that tools which read or replace
# attention through it see nothing.
# transformers 5.23.0, torch 2.13.0. Source: transformers/models/gpt2/modeling_gpt2.py,
# GPT2Attention.forward (using_eager and self.reorder_and_upcast_attn); configuration_gpt2.py promises
# "upcast attention dot-product/softmax to float() when training with mixed precision".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import GPT2Config, GPT2LMHeadModel

ids = torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(0))


def logits(upcast, attention):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, reorder_and_upcast_attn=upcast
    )
    config._attn_implementation = attention
    model = GPT2LMHeadModel(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    with torch.no_grad():
        return model.to(torch.bfloat16)(ids, use_cache=False).logits


chosen = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4)).config._attn_implementation
same = {}
for attention in ("eager", "sdpa"):
    same[attention] = torch.equal(logits(True, attention), logits(False, attention))
    print(f"{attention}: with and without the option the logits are {'equal' if same[attention] else 'different'}")
print(f"chosen by default: {chosen}")
assert same == {"eager": False, "sdpa": True} and chosen == "sdpa", "the behaviour has changed"
PYTHON
