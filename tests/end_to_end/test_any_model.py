"""Notebook 08 on models that it does not know: random ones of three families, in a folder."""

import re

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
import transformers as tf

from sinkutils.data import probes
from sinkutils.paths import NOTEBOOKS
from sinkutils.showing import figures

matplotlib.use("agg")
BASE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
MODELS = {
    "learned positions": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "parallel blocks": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**BASE)),
    "sliding windows": lambda: tf.MistralForCausalLM(
        tf.MistralConfig(**BASE, num_key_value_heads=2, sliding_window=12)
    ),
}


def saved(folder, build, corpus):
    """A random model with the tests' tokenizer, as a user would have one in a folder."""
    torch.manual_seed(0)
    build().save_pretrained(folder)
    tf.PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def run(number, parameters):
    """Execute a notebook's code cells and solutions in this process, with these parameters; returns what they left."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    space: dict = {"display": lambda *_: None}
    for cell in nbformat.read(path, as_version=4).cells:
        solutions = re.findall("```python\n(.*?)```", cell.source, re.DOTALL)
        for solution in solutions if space.get("ids") is not None else ():  # there is a model
            exec(compile(solution, f"{number}, a solution", "exec"), space)
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{number}, cell {cell.id}", "exec"), space)
            if "parameters" in cell.metadata.get("tags", []):
                space |= parameters
    plt.close("all")
    return space


@pytest.fixture(autouse=True)
def no_records_and_the_tests_text(corpus, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "load_corpus", lambda *_, **__: corpus)
    monkeypatch.setattr(figures, "RENDERED", tmp_path)


def texts(shown, start):
    """What is shown and begins so."""
    return [data["text/plain"] for data in shown if data["text/plain"].startswith(start)]


@pytest.mark.parametrize("family", MODELS)
def test_the_page_on_surgery_runs_on_any_model(family, corpus, tmp_path, shown):
    folder = saved(tmp_path / "a model", MODELS[family], corpus)
    parameters = {"model": str(folder), "preset": "smoke", "recompute": "never", "n": 4}
    assert run("08", parameters)["lm"] is not None
    assert len(texts(shown, "[figure")) == 6  # not the toy's
    assert len(texts(shown, "What you see")) >= 6
    assert str(tmp_path) not in "".join(texts(shown, ""))
    assert all(len(line) <= 100 for text in texts(shown, "") for line in text.split("\n"))


def test_without_the_model_the_page_on_surgery_says_what_is_missing(tmp_path, shown, capsys):
    parameters = {"model": str(tmp_path / "nothing"), "preset": "smoke", "recompute": "never"}
    assert run("08", parameters)["lm"] is None
    told = capsys.readouterr().out
    assert "there is no folder" in told and "which is not here; recorded: nothing yet" in told
    assert not texts(shown, "[figure")
