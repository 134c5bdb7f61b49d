"""The registry of Table 8, and loading of local and recorded models."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from helpers import DONE, refused, refuses, word_tokenizer
from safetensors.torch import load_file, save_file
from small_models import build, write_gguf
from tokenizers import processors

from sinkutils import LMConfig, TransformerLM, measure, paths, probe
from sinkutils import __main__ as cli
from sinkutils.measuring import load
from sinkutils.measuring.load import ModelUnavailable
from sinkutils.names import load_lm
from sinkutils.study.config import RunConfig
from sinkutils.study.record import write_record


def saved(folder, tokenizer: bool = True):
    model = build("llama")
    model.save_pretrained(folder)
    if tokenizer:
        raw = word_tokenizer(90)
        ends = {"bos_token": "<bos>", "eos_token": "<eos>"}
        made = tf.PreTrainedTokenizerFast(tokenizer_object=raw, **ends)
        made.save_pretrained(folder)
    return model


def test_a_model_is_known_by_the_papers_name_in_any_case(monkeypatch):
    asked = []
    monkeypatch.setattr(load, "_load_transformers", lambda name, *_: (asked.append(name), None))
    for name in ("GPT2-XL", "gpt2-xl", "owner/model"):
        load_lm(name)
    assert asked == ["openai-community/gpt2-xl"] * 2 + ["owner/model"]


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16])
def test_a_local_folder_loads_with_its_tokenizer(tmp_path, dtype):
    model = saved(tmp_path)
    loaded, tokenizer = load_lm(tmp_path, "cpu", dtype)
    expected = {None: torch.float32, "bfloat16": torch.bfloat16}.get(dtype, dtype)
    assert loaded.dtype == expected
    assert not loaded.training
    assert tokenizer("w3")["input_ids"] == [6]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(expected))


def test_a_recorded_run_loads_by_name_and_by_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    model = LMConfig(vocab_size=20, hidden_size=16, num_heads=2, num_layers=1)
    config = RunConfig("fixed_1", "tiny", model=model)
    model = TransformerLM(config.model)
    folder = tmp_path / "tiny" / "fixed_1" / "0"
    write_record(folder, config, DONE, {}, dict(model.state_dict()), word_tokenizer(17))
    for name in ("tiny/fixed_1/0", folder):
        loaded, tokenizer = load_lm(name)
        assert loaded.config == config.model
        ids = torch.arange(12)[None]
        assert torch.equal(loaded(ids), model(ids))
        assert tokenizer.get_vocab_size() == 20
    half, _ = load_lm(folder, dtype="bfloat16")
    assert half.unembed.weight.dtype == torch.bfloat16
    assert torch.equal(half.tables["cos"], model.tables["cos"])  # bfloat16 would blur far positions
    write_record(folder, config, DONE, {})
    says = r"without weights: python -m sinkutils train fixed_1 .* --keep-weights"
    with pytest.raises(ModelUnavailable, match=says):
        load_lm(folder)
    (folder / "SHA256SUMS").unlink()
    for name in ("tiny/fixed_1/0", folder):
        with pytest.raises(ModelUnavailable, match="SHA256SUMS is missing or damaged"):
            load_lm(name)
    absent = {
        "tiny/fixed_1/7": None,
        "laptop/fixed_1": None,
        "tiny/fixed_1/0": tmp_path / "elsewhere",
    }
    for name, runs in absent.items():
        says = f"no recorded run '{name}': give preset/experiment/seed of one"
        with pytest.raises(ModelUnavailable, match=says):
            load_lm(name, runs=runs)


BROKEN = {
    "malicious": "has a .bin file that is cut, or holds more than tensors",
    "cut": "is cut or is something else: Error while deserializing header",
    "vit": "is no causal language model: transformers has none for ViTConfig",
    "shapes": r"lm_head.weight is \(96, 32\) in the file and \(96, 64\) by config.json \(and 20 more\)",
    "no pickle": "has a .bin file that is cut, or holds more than tensors",
    "empty": "has a .bin file that is cut, or holds more than tensors",
    "git-lfs": r"has git-lfs pointers in place of files \(model.safetensors\): run `git lfs pull`",
    "no config": "has no config.json",
    "tokenizer": "could not be loaded",
    "newer": "was saved by a later transformers",
}


class Malicious:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def broken(way: str, folder: Path) -> None:
    """A folder of a model that is bad in one way."""
    if way == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = tf.ViTConfig(**sizes, intermediate_size=16)
        tf.ViTForImageClassification(config).save_pretrained(folder)
        return
    saved(folder)
    weights = folder / "model.safetensors"
    if way == "malicious":
        weights.unlink()
        torch.save({"lm_head.weight": Malicious(folder / "mark")}, folder / "pytorch_model.bin")
    if way in ("no pickle", "empty"):
        weights.unlink()
        page = "" if way == "empty" else "<html>not found</html>"
        (folder / "pytorch_model.bin").write_text(page)
    if way == "git-lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    if way == "no config":
        (folder / "config.json").unlink()
    if way == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    if way == "shapes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    if way == "newer":
        config = json.loads((folder / "config.json").read_text())
        config["transformers_version"] = "99.0.0"
        (folder / "config.json").write_text(json.dumps(config))
    if way == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_folder_is_one_clear_line_and_runs_nothing(tmp_path, way):
    broken(way, tmp_path / "model")
    with pytest.raises(ModelUnavailable, match=BROKEN[way]) as caught:
        load_lm(tmp_path / "model")
    assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)
    assert not (tmp_path / "model" / "mark").exists()


def test_a_path_beside_the_folder_of_a_model_says_which_is_meant(tmp_path):
    saved(tmp_path / "checkpoint-10")
    says = r"has no config.json: give a folder in it, '.*checkpoint-10'"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)
    for file in ("config.json", "model.safetensors"):
        path = tmp_path / "checkpoint-10" / file
        refuses("is a file: give the folder that holds it", load_lm, path, kind=ModelUnavailable)


def test_a_layer_that_predicts_further_tokens_is_unused_and_warned_of(tmp_path):
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    last = {k: v.clone() for k, v in weights.items() if "layers.1" in k}
    more = {k.replace("layers.1", "layers.2"): v for k, v in last.items()}
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    refuses("with 9 unused", load_lm, tmp_path, kind=ModelUnavailable)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.warns(UserWarning, match="with 9 unused .*layers.2"):
        load_lm(tmp_path)


def test_another_dtype_device_or_revision_is_refused_with_those_there_are(tmp_path):
    for dtype in (3, torch.int64, "float8_e4m3fn", ""):
        with refused("dtype must be one of float32, bfloat16, float16, float64"):
            load_lm(tmp_path, dtype=dtype)
    for device in ("banana", "meta", 3.5, ""):
        refuses("device ", load_lm, tmp_path, device=device)
    refuses("revision is of a hub id", load_lm, tmp_path, revision="step1000")


def test_what_the_hub_says_is_one_line_and_remote_code_runs_only_if_asked_for(monkeypatch):
    gated = "You are trying to access a gated repo.\nMake sure to have access to it"
    refuse = Mock(side_effect=OSError(gated))
    monkeypatch.setattr(load, "hub_reachable", lambda: False)
    says = r"'EleutherAI/pythia-14m' .* local cache and the hub cannot be reached"
    with pytest.raises(ModelUnavailable, match=says):
        load_lm("Pythia-14M")
    monkeypatch.setattr(load, "hub_reachable", lambda: True)
    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", refuse)
    for options in ({"trust_remote_code": False}, {"trust_remote_code": True}, {}):
        says = r"'owner/model' could not be loaded: .* gated repo\. Make sure to"
        with pytest.raises(ModelUnavailable, match=says):
            load_lm("owner/model", **options)
    trusted = [call.kwargs["trust_remote_code"] for call in refuse.call_args_list]
    assert trusted == [False, True, False]


RENAMED = {  # a part of a name, what it becomes (None: the weight goes), and what is said
    "all": ("", "_orig_mod.", r"without 21 \['lm_head.*'\], with 21 unused \['_orig_mod"),
    "a layer missing": ("layers.1", None, r"without 9 \['model\.layers\.1"),
    "one weight missing": ("layers.0.mlp.up", None, "without 1 .*up_proj.weight"),
    "one renamed": ("0.mlp.up", "0.mlp.upper", "with 1 unused .*upper_proj"),
}


@pytest.mark.parametrize("way", RENAMED)
def test_weights_that_are_not_those_of_the_configuration_are_refused_by_name(way, tmp_path, capsys):
    saved(tmp_path)
    part, other, says = RENAMED[way]
    weights = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        if part not in name:
            weights[name] = value
        elif other is not None:
            weights[name.replace(part, other, 1)] = value
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with refused(f"weights of .* are not those of its config.json: .*{says}", ModelUnavailable):
        load_lm(tmp_path)
    assert cli.main(["measure", str(tmp_path), "--probe", "random", "-n", "2", "-T", "8"]) == 2
    assert "are not those of its config.json" in capsys.readouterr().err


def test_a_layer_too_many_in_the_file_is_refused_and_an_unused_head_warned_of(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(r"with 9 unused \['model\.layers\.1", load_lm, tmp_path, kind=ModelUnavailable)
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"score.weight": torch.ones(2, 32)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="with 1 unused .*score.weight"):
        load_lm(tmp_path)


def test_a_folder_without_a_tokenizer_is_enough_for_random_ids(tmp_path, capsys):
    model = saved(tmp_path, tokenizer=False)
    loaded, tokenizer = load_lm(tmp_path)
    ids = probe("random", tokenizer, 50, 40)
    special = {model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id}
    assert 0 <= ids.min() and ids.max() < 96 and not special & set(ids.flatten().tolist())
    torch.testing.assert_close(measure(loaded, ids[:3]).alpha, measure(model, ids[:3]).alpha)
    command = ["measure", str(tmp_path), *"--probe random repeat -n 2 -T 8".split()]
    assert cli.main(command) == 0
    with pytest.raises(ValueError, match="no tokenizer files, so only random and repeated ids"):
        probe("natural", tokenizer, 1, 4, texts=["some words", "and others"])


@pytest.mark.parametrize("adds", [False, True])
def test_a_model_trained_with_a_bos_is_shown_with_and_without_it_unasked(adds, tmp_path, capsys):
    raw = word_tokenizer(90)
    if adds:
        with_bos = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
        raw.post_processor = with_bos
    build("llama").save_pretrained(tmp_path)
    tf.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>").save_pretrained(tmp_path)
    command = ["measure", str(tmp_path), "--probe", "random", "-n", "3", "-T", "16"]
    assert cli.main([*command, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    text, bos = (f"{tmp_path}, random, {first} first" for first in ("text", "BOS"))
    assert [*reports] == ([text, bos] if adds else [text])
    if adds:
        assert reports[text]["alpha"] != reports[bos]["alpha"]
    assert cli.main([*command, "--bos", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == [bos]


def test_a_page_needs_a_folder_and_is_written_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    build("llama").save_pretrained(tmp_path / "model")
    there = tmp_path / "page.html"
    command = ["report", str(tmp_path / "model"), "-o"]
    with monkeypatch.context() as patch:
        early = AssertionError("loaded before the folder is looked at")
        patch.setattr(load, "load_lm", Mock(side_effect=early))
        assert cli.main([*command, str(tmp_path / "nowhere" / "page.html")]) == 2
        assert "there is no folder" in capsys.readouterr().err
        assert cli.main([*command, str(tmp_path)]) == 2
        assert "is no regular file" in capsys.readouterr().err
        assert cli.main([*command, str(there), "--beside", command[1]]) == 2
        assert "must be another model" in capsys.readouterr().err
    there.write_text("an older page")
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(os, "fsync", Mock(side_effect=full))
        assert cli.main([*command, str(there)]) == 2
    said = capsys.readouterr().err
    assert "page.html (No space left on device): free some space" in said
    assert there.read_text() == "an older page" and [*tmp_path.glob("*.tmp")] == []
    assert cli.main([*command, str(there)]) == 0
    assert "random" in there.read_text() and [*tmp_path.glob("*.tmp")] == []


def test_a_gguf_file_or_a_folder_of_one_loads(tmp_path):
    pytest.importorskip("gguf")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.LlamaConfig(vocab_size=259, hidden_size=32, intermediate_size=48, **heads)
    model = tf.LlamaForCausalLM(config).eval()
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {
        "tokenizer_model": "llama",
        "token_list": words,
        "token_types": [2, 3, 3, *[6] * 256],
    }
    vocabulary |= {"token_scores": [0.0] * 259, "bos_token_id": 1, "eos_token_id": 2}
    write_gguf(tmp_path / "tiny.gguf", model, vocabulary)
    ids = torch.randint(3, 259, (2, 12))
    expected = measure(model, ids).alpha
    for path in (tmp_path / "tiny.gguf", tmp_path):
        loaded, tokenizer = load_lm(path)
        assert torch.allclose(measure(loaded, ids).alpha, expected, atol=1e-6)
        assert tokenizer.bos_token_id == 1
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    refuses("holds 2 GGUF files: give one of them", load_lm, tmp_path, kind=ModelUnavailable)
    refuses("could not be loaded", load_lm, tmp_path / "b.gguf", kind=ModelUnavailable)


def test_an_adapter_says_which_package_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "adapter_config.json").write_text("{}")
    refuses("adapter of another model: pip install peft", load_lm, tmp_path, kind=ModelUnavailable)


@pytest.mark.parametrize("name", ["SHA256SUMS", "provenance.json", "metrics.json"])
def test_a_models_folder_may_have_a_file_that_records_have(tmp_path, name):
    saved(tmp_path)
    for file in {name, "SHA256SUMS", "provenance.json"}:
        (tmp_path / file).write_text("{}")
    model, _ = load_lm(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.slow
def test_loading_a_model_and_measuring_it_opens_nothing_of_the_study(tmp_path):
    saved(tmp_path / "model")
    code = (
        "import sys, sinkutils as su\n"
        f"model, tokenizer = su.load_lm({str(tmp_path / 'model')!r})\n"
        "su.measure(model, su.probe('natural', tokenizer, n=2, length=8))\n"
        "study = [m for m in sys.modules if m.startswith(('sinkutils.study', 'sinkutils.ledger'))]\n"
        "assert not study, study\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "SINKUTILS_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
