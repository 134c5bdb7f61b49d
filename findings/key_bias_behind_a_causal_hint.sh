#!/usr/bin/env bash
# Expected: nn.MultiheadAttention(add_bias_kv=True) gives every query one learned key more, a place
# for attention that has nowhere to go. With a causal mask every query still sees it.
# What happens: as nn.TransformerEncoderLayer calls it (attn_mask, is_causal=True and
# need_weights=False), the mask is dropped and the kernel's own causal mask is used. That mask stands
# at the first key, so the learned key, which is appended as the last one, is behind the future of
# every query: nobody sees it, and it gets no gradient. With need_weights=True the same call sees it.
# torch 2.13.0. Source: torch/nn/functional.py, multi_head_attention_forward ("Otherwise, we use the
# is_causal hint"); the dropped mask is also the subject of pytorch pull request 178588.
# It matters for sinks: a key bias is the best known way to take the sink off the first token.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn

torch.manual_seed(0)
T, d = 6, 16
attention = nn.MultiheadAttention(d, 2, add_bias_kv=True, batch_first=True)
x = torch.randn(1, T, d)
causal = nn.Transformer.generate_square_subsequent_mask(T)


def call(**options):
    out, weights = attention(x, x, x, attn_mask=causal, **options)
    (gradient,) = torch.autograd.grad(out.square().sum(), attention.bias_k)
    return out, weights, float(gradient.abs().max())


plain, _, plain_gradient = call(need_weights=False)
hinted, _, hinted_gradient = call(need_weights=False, is_causal=True)
shown, weights, shown_gradient = call(need_weights=True, is_causal=True)
print("gradient of the key bias, mask alone:", round(plain_gradient, 4))
print("the same with is_causal=True, need_weights=True:", round(shown_gradient, 4))
print("the same with is_causal=True, need_weights=False:", hinted_gradient)
print(f"the outputs of the two differ by {float((hinted - shown).abs().max()):.2f}")
print("attention to the key bias where it is seen:", [round(float(w), 2) for w in weights[0, :, -1]])
assert plain_gradient > 0.01 and torch.allclose(plain, shown, atol=1e-5)
assert hinted_gradient == 0 and (hinted - shown).abs().max() > 0.1, "the behaviour has changed"
PYTHON
