#!/usr/bin/env bash
# Expected: "causal" means one mask. With 3 queries and 5 keys, as in a decode step behind a cache,
# the last query stands at the last key, so the first query sees keys 1 to 3.
# What happens: the libraries disagree. torch's is_causal and jax's is_causal put the first query at
# the first key (it sees 1 key); mlx's mask="causal" puts the last query at the last key (it sees 3).
# Nothing is raised. Code that is ported between them is right for T = S and wrong in decoding.
# torch 2.13.0, jax 0.10.2, mlx 0.32.4. Sources: the documentation of
# torch.nn.functional.scaled_dot_product_attention (and torch.nn.attention.bias.causal_lower_right),
# jax.nn.dot_product_attention, mlx.core.fast.scaled_dot_product_attention ("lower-right alignment").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 jax==0.10.2 "mlx[cpu]==0.32.4"
"$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import torch

T, S = 3, 5
q = np.zeros((1, 1, T, S), np.float32)  # (B, H, T, D): even attention over what is seen
k = np.zeros((1, 1, S, S), np.float32)
v = np.eye(S, dtype=np.float32)[None, None]  # so that the output is the row of weights


def seen(out):
    return (np.array(out.tolist()).reshape(T, S) > 0).sum(axis=1).tolist()


by_torch = torch.nn.functional.scaled_dot_product_attention(
    *map(torch.from_numpy, (q, k, v)), is_causal=True
)
arrays = (jnp.array(x.transpose(0, 2, 1, 3)) for x in (q, k, v))
by_jax = jax.nn.dot_product_attention(*arrays, is_causal=True)
by_mlx = mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=1.0, mask="causal")
counts = {"torch": seen(by_torch), "jax": seen(by_jax), "mlx": seen(by_mlx)}
print("keys that each of 3 queries sees, of 5:", counts)
assert counts == {"torch": [1, 2, 3], "jax": [1, 2, 3], "mlx": [3, 4, 5]}, "the behaviour changed"
PYTHON
