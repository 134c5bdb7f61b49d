#!/usr/bin/env bash
# Expected: gradient checkpointing saves memory and changes no number. A padding-free batch, whose
# position_ids restart at each text (DataCollatorWithFlattening), is one batch with one loss.
# What happens: transformers looks for packed texts only if there is neither a mask nor a cache. A
# model makes itself a cache by default, also in train mode, so the texts attend to each other. With
# gradient checkpointing the cache is switched off, and the same batch is kept apart: the logits and
# the loss change. (The Trainer sets use_cache=False, so there they are kept apart in both cases.)
# transformers 5.23.0, torch 2.13.0. Source: masking_utils.py, _preprocess_mask_arguments ("only if
# the 2D attention mask is explicitly None, and we don't have past_key_values").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).train()
first, second = torch.randint(3, 96, (2, 1, 6))
ids = torch.cat([first, second], dim=1)
positions = torch.arange(6).repeat(2)[None]
alone = model(second).logits  # of the second text


def of_the_second(**options):
    return model(ids, position_ids=positions, **options).logits[:, 6:]


default = float((of_the_second() - alone).abs().max())
no_cache = float((of_the_second(use_cache=False) - alone).abs().max())
model.gradient_checkpointing_enable()
checkpointed = float((of_the_second() - alone).abs().max())
print(f"logits of the second text, packed, from those of it alone: {default:.3f} by default")
print(f"{no_cache:.1e} without a cache, {checkpointed:.1e} with gradient checkpointing")
assert default > 0.01 and no_cache < 1e-4 and checkpointed < 1e-4, "the behaviour has changed"
PYTHON
