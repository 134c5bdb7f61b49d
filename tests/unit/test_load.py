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
from sinkutils.measuring.load import ModelUnavailable, check_loaded
from sinkutils.names import load_lm
from sinkutils.study.config import RunConfig
from sinkutils.study.store import write_record


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
    monkeypatch.setattr(load, "from_transformers", lambda name, *_: (asked.append(name), None))
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
    if hasattr(os, "mkfifo"):
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")  # of which a reader waits for a writer
        with pytest.raises(ModelUnavailable, match="is missing or damaged"):
            load_lm(folder)


BROKEN = {
    "malicious": "has a .bin file that is cut, or holds more than tensors",
    "cut": "is cut or is something else: Error while deserializing header",
    "vit": "is no causal language model: transformers has none for ViTConfig",
    "shapes": r"lm_head.weight is \(96, 32\) in the file and \(96, 64\) by config.json \(and 20 more\)",
    "no pickle": "has a .bin file that is cut, or holds more than tensors",
    "empty": "has a .bin file that is cut, or holds more than tensors",
    "git-lfs": r"has git-lfs pointers in place of files \(model.safetensors\): run `git lfs pull`",
    "no config": "has no config.json",
    "no object": "has a config.json that is no JSON object",
    "activation": "transformers looked up 'gelus' and found nothing",
    "sizes": r"has a config.json of a model with 124,439,808 weights, and [\d,]+ in its files: does",
    "sizes, .bin": r"has a config.json of a model with 124,439,808 weights, and 21,664 in its files",
    "integers": r"holds whole numbers \(model.layers.1.self_attn.q_proj.weight: torch.int8\)",
    "integers, .bin": r"holds whole numbers \(model.layers.1.self_attn.q_proj.weight: torch.int8\)",
    "tokenizer": "has a tokenizer that could not be read",
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
    if way == "sizes":  # of a family whose default model is small
        build("gpt2").save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
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
    if way == "no object":
        (folder / "config.json").write_text("null")
    if way == "activation":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelus"}))
    if way.startswith("integers"):
        tensors = load_file(weights)
        name = "model.layers.1.self_attn.q_proj.weight"
        save_file(tensors | {name: tensors[name].to(torch.int8)}, weights, {"format": "pt"})
    if way == "sizes, .bin":
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    if way.endswith(".bin"):
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
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
    with pytest.raises(ValueError, match="no tokenizer files; without it, only random"):
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
        patch.setattr(load, "from_transformers", Mock(side_effect=early))
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
    refuses("is no GGUF file", load_lm, tmp_path / "b.gguf", kind=ModelUnavailable)


def test_an_adapter_says_which_package_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    adapter = {"base_model_name_or_path": "owner/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setattr(load, "hub_reachable", lambda: False)
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


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("kind", ["base", "reward", "tokens", "questions"])
def test_a_model_without_its_unembedding_loads_with_a_warning(kind, tmp_path):
    config = build("llama").config
    config.num_labels = 2
    makers = {"base": tf.LlamaModel, "reward": tf.LlamaForSequenceClassification}
    makers |= {
        "tokens": tf.LlamaForTokenClassification,
        "questions": tf.LlamaForQuestionAnswering,
    }
    model = makers[kind](config).eval()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="attention does not depend on them, but the logits are"):
        loaded, _ = load_lm(tmp_path)
    ids = torch.randint(3, 90, (2, 12))
    base = tf.LlamaForCausalLM(config).eval()
    base.model = model.base_model
    torch.testing.assert_close(measure(loaded, ids).alpha, measure(base, ids).alpha)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "kv_scale", "k_proj.output_scale"])
def test_scales_of_a_cache_in_the_file_change_nothing(name, tmp_path, recwarn):
    saved(tmp_path)
    scales = {f"model.layers.{i}.self_attn.{name}": torch.ones(1) for i in range(2)}
    edit_weights(tmp_path, lambda weights: weights | scales)
    load_lm(tmp_path)
    assert [str(warning.message) for warning in recwarn if "unused" in str(warning.message)] == []


FOREIGN = {
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "is quantised by MLX.*mlx_lm.convert"),
    "MLX, newer": (
        {"quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"}},
        "is quantised by MLX",
    ),
    "ModelOpt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "is quantised by ModelOpt, which this transformers does not read: load the model that",
    ),
    "EXL2": ({"quantization_config": {"quant_method": "exl2", "bits": 4}}, "is quantised by exl2"),
    "EXL3": ({"quantization_config": {"quant_method": "exl3"}}, "is quantised by exl3"),
    "BitBLAS": ({"quantization_config": {"quant_method": "bitblas"}}, "is quantised by bitblas"),
    "no name": ({"quantization_config": {"w_bit": 4}}, "by a scheme without a name .w_bit."),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_scheme_that_transformers_does_not_read_is_named(kind, tmp_path):
    saved(tmp_path)
    changes, message = FOREIGN[kind]
    edit_config(tmp_path, **changes)
    refuses(message, load_lm, tmp_path, kind=ModelUnavailable)


QUANTISED = {
    "scales": "MLX",
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "W_q": "HQQ",
    "qweight": "GPTQ",
}


@pytest.mark.parametrize("ending", QUANTISED)
def test_quantised_weights_that_the_config_says_nothing_of_are_named(ending, tmp_path):
    saved(tmp_path)

    def change(weights):
        del weights["model.layers.0.mlp.up_proj.weight"]
        return weights | {f"model.layers.0.mlp.up_proj.{ending}": torch.ones(2, 2)}

    edit_weights(tmp_path, change)
    says = f"are quantised .model.layers.0.mlp.up_proj.{ending}: {QUANTISED[ending]}"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)


def test_sizes_that_differ_are_put_down_to_the_vocabulary_only_if_it_is_that(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, vocab_size=100)
    refuses("was the vocabulary resized", load_lm, tmp_path, kind=ModelUnavailable)
    saved(tmp_path)
    edit_config(tmp_path, intermediate_size=64)
    refuses("of a model of another size", load_lm, tmp_path, kind=ModelUnavailable)


UNREAD = {
    "model/__0_0.distcp": "shards of FSDP: gather them first",
    "zero_to_fp32.py": "shards of DeepSpeed: gather them first",
    "global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "shards of DeepSpeed",
    "consolidated.00.pth": "weights in Meta's own form",
    "consolidated.safetensors": "weights in Mistral's own form",
    "lit_model.pth": "LitGPT",
    "weights.00.npz": "weights of MLX",
    "qmodel.pt": "HQQ",
    "onnx/model.onnx": "an ONNX export",
    "flax_model.msgpack": "weights of Flax",
    "epoch=1.ckpt": "a checkpoint of a trainer",
    "ckpt.pt": "a file of torch.save",
}


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("file", UNREAD)
def test_what_has_to_be_gathered_or_converted_first_is_said(file, config, tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if not config:
        (tmp_path / "config.json").unlink()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("x")
    lacks = "model.safetensors" if config else "config.json"
    says = f"has no {lacks}: it holds .*{UNREAD[file]}"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)


def test_a_file_of_weights_beside_shards_that_differ_is_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:9]}
    shards |= {"model-00002-of-00002.safetensors": names[9:]}
    for shard, keys in shards.items():
        save_file({key: weights[key] for key in keys}, tmp_path / shard, {"format": "pt"})
    places = {key: shard for shard, keys in shards.items() for key in keys}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    load_lm(tmp_path)  # they are the same

    edit_weights(tmp_path, lambda weights: weights | {names[-1]: weights[names[-1]] + 1})
    says = rf"holds model.safetensors and the shards of .*they differ .{names[-1]}.; .* move away"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)
    edit_weights(tmp_path, lambda weights: {key: weights[key] for key in names[1:]})
    refuses(rf"they differ .{names[0]}.", load_lm, tmp_path, kind=ModelUnavailable)
    file.unlink()
    loaded, _ = load_lm(tmp_path)
    assert torch.equal(loaded.state_dict()[names[0]], weights[names[0]])
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    saved(tmp_path)
    load_lm(tmp_path)


def test_a_bin_file_beside_shards_that_differ_or_are_damaged_is_refused(tmp_path):
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    shard = tmp_path / "pytorch_model-00001-of-00001.bin"
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard.name)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save(weights, shard)
    load_lm(tmp_path)  # they are the same

    torch.save({key: x + 1 for key, x in weights.items()}, shard)
    says = "holds pytorch_model.bin and the shards of pytorch_model.bin.index.json, and they differ"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)
    shard.write_bytes(shard.read_bytes()[:-99])
    refuses(rf"{shard.name} is not there, or damaged", load_lm, tmp_path, kind=ModelUnavailable)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cut")
    refuses("has a .bin file that is cut", load_lm, tmp_path, kind=ModelUnavailable)


def test_shards_need_an_index_that_is_one(tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    for contents in ("[]", '{"weight_map": {}}', '{"metadata": {}, "weight_map": ', "{}"):
        index.write_text(contents)
        says = "has a model.safetensors.index.json that is cut, or lacks metadata or weight_map"
        refuses(says, load_lm, tmp_path, kind=ModelUnavailable)
    index.unlink()
    says = "has no model.safetensors: it holds shards of a model, which need their index"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("quantization_config", [], "quantization_config is no JSON object"),
        ("quantization_config", "int8", "quantization_config is no JSON object"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "loaded: .Missing required"),
        ("hidden_act", "nosuch", "looked up 'nosuch'"),
    ],
)
def test_what_is_wrong_in_config_json_is_said(field, value, says, tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_settings_without_a_vocabulary_are_no_tokenizer_and_no_reason_to_refuse(file, tmp_path):
    saved(tmp_path, tokenizer=False)
    (tmp_path / file).write_text('{"chat_template": "{{ x }}"}')
    _, tokenizer = load_lm(tmp_path)
    assert probe("random", tokenizer, n=2).shape == (2, 64)
    with refused("settings of a tokenizer, but no vocabulary; without it, only random"):
        tokenizer.encode("text")


def test_boolean_weights_are_whole_numbers(tmp_path):
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.ones(32, 32) > 0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    refuses("whole numbers .*q_proj.weight: torch.bool", load_lm, tmp_path, kind=ModelUnavailable)


@pytest.mark.parametrize("name", ["a/b/c/d", "C:\\models\\x", "https://host/org/name", "hf://a/b"])
def test_an_address_or_a_path_that_is_not_there_is_no_hub_id(name):
    refuses("no folder that is there, and no hub id", load_lm, name, kind=ModelUnavailable)


def test_an_older_file_of_weights_that_is_loaded_in_place_of_a_newer_one_is_named(tmp_path):
    saved(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    os.utime(tmp_path / "model.safetensors", (0, 0))
    says = "holds model.safetensors and pytorch_model.bin, which is newer: the former is loaded"
    with pytest.warns(UserWarning, match=says):
        load_lm(tmp_path)


def test_a_model_of_pictures_and_text_loads_by_its_own_class(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = tf.CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4)
    config = tf.LlavaConfig(
        vision_config=vision, text_config=build("llama").config, image_token_index=5
    )
    model = tf.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    loaded, _ = load_lm(tmp_path)
    ids = torch.randint(6, 90, (2, 12))
    torch.testing.assert_close(measure(loaded, ids).alpha, measure(model, ids).alpha)


def test_a_tokenizer_in_mistrals_form_is_said_to_need_its_package(tmp_path):
    saved(tmp_path, tokenizer=False)
    (tmp_path / "tekken.json").write_text("{}")
    _, tokenizer = load_lm(tmp_path)
    refuses("tekken.json, needs: pip install mistral-common", tokenizer.encode, "a")


GGUFS = {
    "lost.gguf": (None, "there is no file"),
    "page.gguf": (b"<html>" * 99, "is no GGUF file, or is cut off"),
    "short.gguf": (b"GGUF\3", "is no GGUF file, or is cut off"),
    "cut.gguf": (b"GGUF\3\0\0\0" + b"\1" * 30, "the GGUF file is cut or broken"),
    "m-00001-of-00003.gguf": (b"GGUF" * 9, "is one of 3 parts .* join them first"),
}


@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_file_that_is_no_whole_one_is_one_line(name, tmp_path, monkeypatch):
    content, message = GGUFS[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refuses(message, load_lm, tmp_path / name, kind=ModelUnavailable)
    if content is None:
        monkeypatch.chdir(tmp_path)
        refuses(message, load_lm, name, kind=ModelUnavailable)


def test_an_adapters_base_that_is_gone_is_named(tmp_path, monkeypatch):
    def write(**config):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    write(base_model_name_or_path=str(tmp_path / "gone"))
    refuses(
        "names the base model '.*gone' in adapter_config.json, and that is not there",
        load_lm,
        tmp_path,
        kind=ModelUnavailable,
    )
    write(peft_type="LORA")
    refuses("names no base model", load_lm, tmp_path, kind=ModelUnavailable)
    write(base_model_name_or_path="owner/base")
    monkeypatch.setattr(load, "hub_reachable", lambda: False)
    monkeypatch.setattr(load, "find_spec", lambda name: True)
    fails = Mock(side_effect=OSError("We couldn't connect"))
    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", fails)
    says = "is an adapter of 'owner/base', which is not in the local cache"
    refuses(says, load_lm, tmp_path, kind=ModelUnavailable)


@pytest.mark.parametrize(
    ("key", "in_file", "in_model", "reason"),
    [
        ("q_proj.lora_A.weight", (4, 32), (8, 32), "another rank"),
        ("q_proj.lora_B.weight", (32, 4), (32, 8), "another rank"),
        ("q_proj.lora_A.weight", (8, 64), (8, 32), "another base model"),
        ("q_proj.lora_B.weight", (64, 8), (32, 8), "another base model"),
    ],
)
def test_an_adapter_of_another_rank_or_base_is_told_apart(tmp_path, key, in_file, in_model, reason):
    (tmp_path / "adapter_config.json").write_text("{}")
    info = {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [(key, in_file, in_model)],
    }
    says = rf"by adapter_config.json .and 0 more.: is it of {reason}"
    refuses(says, check_loaded, str(tmp_path), build("llama"), info, kind=ModelUnavailable)


def test_no_bar_is_written_where_stderr_is_no_terminal(tmp_path, capfd):
    saved(tmp_path)
    capfd.readouterr()
    load_lm(tmp_path)
    assert capfd.readouterr().err == ""
