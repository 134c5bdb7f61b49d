#!/usr/bin/env bash
# Expected: papermill's -p lr 1e-3 and a file of parameters (-f) with the line "lr: 1e-3" give a
# notebook the same number.
# What happens: -p tries Python's float, and the file is read as YAML 1.1, where a number with an
# exponent needs a dot and a sign. So from the file the notebook gets the text '1e-3', and
# "lr * 2" is '1e-31e-3': no error here, but another value. (1.0e-3 is a number in both.)
# papermill 2.7.0, PyYAML 6.0.4. Sources: papermill/cli.py, _resolve_type, and papermill/iorw.py; the
# YAML 1.1 type of floats; yaml/pyyaml issue 173.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q papermill==2.7.0 ipykernel PyYAML==6.0.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import subprocess
import sys
from pathlib import Path

import nbformat

cell = nbformat.v4.new_code_cell("lr = 0.1", metadata={"tags": ["parameters"]})
notebook = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell("print(repr(lr * 2))")])
notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python", "language": "python"}
nbformat.write(notebook, "in.ipynb")
Path("parameters.yaml").write_text("lr: 1e-3\n")
seen = {}
for way in ("-p lr 1e-3", "-f parameters.yaml"):
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", *way.split()]
    subprocess.run(command, check=True, capture_output=True)
    seen[way] = nbformat.read("out.ipynb", 4).cells[-1].outputs[0].text.strip()
print("twice the learning rate:", seen)
assert seen == {"-p lr 1e-3": "0.002", "-f parameters.yaml": "'1e-31e-3'"}, "it has changed"
PYTHON
