#!/usr/bin/env bash
# Expected: Dataset.from_generator runs the generator. If the file that it reads has changed, the
# data set has changed, as load_dataset("text", data_files=..) notices.
# What happens: the key of the cache is made of the generator's code and its arguments. The file's
# name is an argument and its contents are not, so the old data come out of the cache, without a
# word. datasets.disable_caching() does not switch this off.
# datasets 5.2.0. Sources: datasets/packaged_modules/generator and datasets/builder.py
# (create_config_id); huggingface/datasets issue 7448.
# It matters for a study: the text that a run names is not the one that it read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from pathlib import Path

import datasets

datasets.disable_caching()
datasets.disable_progress_bars()
text = Path("text.txt")


def lines(path):
    yield from ({"text": line} for line in Path(path).read_text().splitlines())


def from_generator():
    options = {"gen_kwargs": {"path": str(text)}, "cache_dir": "cache"}
    return list(datasets.Dataset.from_generator(lines, **options)["text"])


def from_file():
    loaded = datasets.load_dataset("text", data_files=str(text), cache_dir="other")
    return list(loaded["train"]["text"])


text.write_text("the first version\n")
first = from_generator(), from_file()
text.write_text("the second version\nwhich is longer\n")
second = from_generator(), from_file()
print("by from_generator:", first[0], "then", second[0])
print("by load_dataset:  ", first[1], "then", second[1])
assert first[0] == first[1] == ["the first version"]
assert len(second[1]) == 2 and second[0] == first[0], "the behaviour has changed"
PYTHON
