#!/usr/bin/env bash
# Expected: AdamW of two frameworks with equal settings makes equal steps. Its first step is the
# learning rate, whatever the gradient, because of the correction of the bias (Kingma and Ba, 2015).
# What happens: mlx's Adam and AdamW leave the correction out by default, so that the first step is
# (1 - beta_1) / sqrt(1 - beta_2) times the learning rate: 3.16 times with beta_2 = 0.999, and 0.45
# times with 0.95. A recipe that is ported from PyTorch warms up otherwise. bias_correction=True
# mends it.
# mlx 0.32.4 (the CPU build). Source: the documentation of mlx.optimizers.AdamW (bias_correction,
# False by default).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math

import mlx.core as mx
import mlx.optimizers as optimizers

rate = 1e-3


def first_step(**options):
    adam = optimizers.AdamW(learning_rate=rate, weight_decay=0.0, **options)
    moved = adam.apply_gradients({"w": mx.array([0.5])}, {"w": mx.array([1.0])})
    return float(1 - moved["w"][0]) / rate


for beta_2 in (0.999, 0.95):
    default = first_step(betas=[0.9, beta_2])
    corrected = first_step(betas=[0.9, beta_2], bias_correction=True)
    print(f"beta_2 {beta_2}, first step in learning rates: {default:.2f}, corrected {corrected:.2f}")
    assert math.isclose(corrected, 1, rel_tol=1e-3)
    without = 0.1 / math.sqrt(1 - beta_2)
    assert math.isclose(default, without, rel_tol=1e-3), "the behaviour has changed"
PYTHON
