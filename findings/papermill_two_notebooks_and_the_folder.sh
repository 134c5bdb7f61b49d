#!/usr/bin/env bash
# Expected: execute_notebook(.., cwd=FOLDER) says where that notebook runs. Two of them in two threads
# of a process run each in its folder, and the process is afterwards where it was.
# What happens: cwd moves the whole process (os.chdir), and each call goes back to where the process
# stood when the call began. The second call begins while the first one has it moved. So when both
# are done, the process stands in the first one's folder, and without an error later relative paths
# lead there.
# papermill 2.7.0, Python 3.11. Source: papermill/utils.py, chdir, used in papermill/execute.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q papermill==2.7.0 ipykernel
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill

for name, seconds in (("first", 6), ("second", 12)):
    code = f"import time\ntime.sleep({seconds})"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python", "language": "python"}
    nbformat.write(book, f"{name}.ipynb")
    Path(name).mkdir()
here = Path.cwd()


def execute(name):
    book, folder = here / f"{name}.ipynb", here / name
    papermill.execute_notebook(book, folder / "out.ipynb", cwd=folder, progress_bar=False)


with ThreadPoolExecutor(2) as pool:
    first = pool.submit(execute, "first")
    time.sleep(2)
    second = pool.submit(execute, "second")
    first.result(), second.result()
print("the process stood in", here.name, "and stands in", Path(os.getcwd()).name)
assert Path(os.getcwd()).name == "first", "the behaviour has changed"
PYTHON
