#!/usr/bin/env bash
# Expected: output_attentions=True is an option of one call, and leaves the model as it was. So a
# model can be pickled after it (for joblib, multiprocessing with spawn, torch.save(model)).
# What happens: the first such call installs hooks on the modules, which stay. They are local
# functions, so pickle raises AttributeError from then on.
# transformers 5.23.0, torch 2.13.0. Source: transformers/utils/output_capturing.py,
# install_output_capuring_hook.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import pickle

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)
config._attn_implementation = "eager"
model = LlamaForCausalLM(config).eval()
print("bytes before:", len(pickle.dumps(model)))
model(torch.arange(8)[None], output_attentions=True)
hooks = sum(len(module._forward_hooks) for module in model.modules())
try:
    pickle.dumps(model)
    error = None
except AttributeError as caught:
    error = caught
print(f"after output_attentions=True: {hooks} hooks; pickle says {error!r}")
assert hooks > 0 and error is not None, "the behaviour has changed"
PYTHON
