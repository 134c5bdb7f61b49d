#!/usr/bin/env bash
# Expected: with one seed, a longer row of random numbers begins with the shorter one, as in NumPy.
# So two models of which one has a larger vocabulary start alike as far as both go.
# What happens: on a CPU torch.randn draws 16 and more numbers by another method than fewer, so that
# even the first number is another. And if their count is no multiple of 16, the last 16 are drawn
# anew: randn(17) has one number in common with randn(16).
# torch 2.13.0. Source: aten/src/ATen/native/cpu/DistributionTemplates.h, normal_fill, which
# recomputes the last 16 values. PyTorch's notes on reproducibility do not name it.
# It matters for matched seeds: two starts that differ by one row of a table differ elsewhere too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import torch


def of_torch(n):
    torch.manual_seed(0)
    return torch.randn(n).numpy()


def of_numpy(n):
    return np.random.default_rng(0).standard_normal(n)


def in_common(draw, short, long):
    return int((draw(short) == draw(long)[:short]).sum())


pairs = [(15, 16), (16, 17), (32, 48), (1024, 1025)]
counts = {"torch": [], "NumPy": []}
for short, long in pairs:
    counts["torch"].append(in_common(of_torch, short, long))
    counts["NumPy"].append(in_common(of_numpy, short, long))
print("rows of so many numbers:", pairs)
print("in common:", counts)
assert counts["NumPy"] == [15, 16, 32, 1024]
assert counts["torch"] == [0, 1, 32, 1009], "the behaviour has changed"
PYTHON
