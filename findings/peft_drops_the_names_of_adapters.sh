#!/usr/bin/env bash
# Expected: model(ids, adapter_names=["a", "b"]) runs each row with its own adapter, or raises an
# error where a kind of adapter cannot do that.
# What happens: LoRA does it, and checks the names. For IA3, VeRA, LoHa and most other kinds PEFT
# drops the argument without a word: every row runs with the adapter that is active, whatever is
# named, even a name that does not exist. HiRA is of these, too, although its layers have the code
# for it.
# peft 0.21.0, transformers 5.23.0, torch 2.13.0. Source: peft/peft_model.py (`forward` leaves out
# what stands in special_peft_forward_args; only some tuners have _enable_peft_forward_hooks); the
# guide to LoRA, "Inference with different LoRA adapters in the same batch"; PEFT's pull requests
# 1558 and 2090.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import copy
import warnings

import torch
from peft import HiraConfig, IA3Config, LoHaConfig, LoraConfig, VeraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
base = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
text = torch.randint(3, 96, (1, 12))
ids = text.repeat(2, 1)  # the same text twice
of_all = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
configs = {
    "LoRA": LoraConfig(r=4, **of_all),
    "IA3": IA3Config(feedforward_modules=[], **of_all),
    "VeRA": VeraConfig(r=4, **of_all),
    "LoHa": LoHaConfig(r=4, **of_all),
    "HiRA": HiraConfig(r=4, **of_all),
}


def logits(model, names):
    with torch.no_grad():
        return model(input_ids=ids, adapter_names=names).logits


print("rows of one text with the adapters first and second:")
found = {}
for kind, config in configs.items():
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="first")
    model.add_adapter("second", copy.deepcopy(config))
    for index, (name, weight) in enumerate(model.named_parameters()):
        if "first" in name or "second" in name:
            torch.manual_seed(index)
            weight.data += 0.3 * torch.randn_like(weight)
    model.eval()
    one, other = logits(model, ["first", "second"])
    apart = float((one - other).abs().max())
    try:
        logits(model, ["first", "nobody"])
        says = "a name that does not exist is taken"
    except ValueError as error:
        says = f"{type(error).__name__} for a name that does not exist"
    found[kind] = apart > 1e-3, says.startswith("ValueError")
    print(f"  {kind}: the rows differ by {apart:.3f}; {says}")
assert found.pop("LoRA") == (True, True), "the behaviour has changed"
assert {*found.values()} == {(False, False)}, "the behaviour has changed"
PYTHON
