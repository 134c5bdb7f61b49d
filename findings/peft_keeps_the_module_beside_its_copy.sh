#!/usr/bin/env bash
# Expected: in a model that PEFT wraps, the attention modules that a search by class finds are those
# that run, one a layer.
# What happens: for what `modules_to_save` names, PEFT trains a copy and keeps the original beside
# it, both under model.named_modules(). There are two attention modules a layer, the original is
# found first, and it does not run: a hook on it is never called, and its weights are the base's.
# peft 0.21.0, transformers 5.23.0, torch 2.13.0. Source: peft/utils/other.py, ModulesToSaveWrapper
# (`original_module`, `modules_to_save`).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_attention_heads=4, **sizes))
lora = LoraConfig(
    task_type="CAUSAL_LM", target_modules=["down_proj"], modules_to_save=["self_attn"]
)
model = get_peft_model(model, lora).eval()
found = [name for name, part in model.named_modules() if isinstance(part, LlamaAttention)]
called = []
for name in found:
    hook = lambda *_, name=name: called.append(name)
    model.get_submodule(name).register_forward_hook(hook)
with torch.no_grad():
    model(torch.randint(3, 96, (1, 12)))
print("layers: 2, attention modules found:", *found, sep="\n  ")
print("called:", *called, sep="\n  ")
originals = [name for name in found if name.endswith("original_module")]
assert len(found) == 4 and found[0] in originals, "the behaviour has changed"
assert called and not {*called} & {*originals}, "the behaviour has changed"
PYTHON
