#!/usr/bin/env bash
# Expected: torch.compiler.disable marks a function that torch.compile is to leave alone. To decorate
# one costs nothing in a program that compiles nothing.
# What happens: the decorator imports torch._dynamo at once, with sympy and parts of torch._inductor,
# so that a module with one such function takes seconds and tens of megabytes to import. The private
# torch._disable_dynamo, which PyTorch's own modules use, imports it when the function is called.
# torch 2.13.0. Source: torch/compiler/__init__.py, disable; torch/_compile.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import resource
import sys
import time

import torch


def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


assert "torch._dynamo" not in sys.modules
before, began = megabytes(), time.process_time()
torch._disable_dynamo(lambda x: x)
lazy = "torch._dynamo" in sys.modules
torch.compiler.disable(lambda x: x)
eager = "torch._dynamo" in sys.modules
seconds, more = time.process_time() - began, megabytes() - before
print(f"torch._dynamo is imported by _disable_dynamo: {lazy}; by torch.compiler.disable: {eager}")
print(f"that took {seconds:.1f} s of a processor and {more:.0f} MB")
assert eager and not lazy, "the behaviour has changed"
PYTHON
