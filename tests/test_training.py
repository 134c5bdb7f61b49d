"""One run: the schedule, the loss, determinism, and a record that no kill, full disk or divergence can spoil."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sinkutils.data.corpus import load_corpus
from sinkutils.data.packing import DataConfig
from sinkutils.model.attention import AttentionSpec
from sinkutils.study.config import RunConfig, TrainConfig, from_dict, learning_rate
from sinkutils.study.record import RunLocked, partial_folder, read_record, record_folder, run_lock
from sinkutils.training.checkpoints import load_checkpoint, save_checkpoint
from sinkutils.training.run import CrossEntropy, Run, next_token_loss
from sinkutils.training.trainer import deterministic_kernels, train

CPU = torch.device("cpu")


def change(config: RunConfig, **train_changes) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train_changes))


def compared(folder: Path) -> tuple[bytes, bytes]:
    """What two records of one run must share to the last byte."""
    return (folder / "config.json").read_bytes(), (folder / "metrics.json").read_bytes()


def test_the_rate_warms_up_then_falls_along_a_cosine_to_its_floor():
    config = TrainConfig(steps=101, warmup_steps=10, learning_rate=2.0, lr_floor=0.1)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0)
    assert rates[10] == pytest.approx(2.0) and rates[-1] == pytest.approx(0.2)
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    constant = dataclasses.replace(config, lr_floor=1.0)
    assert {learning_rate(constant, step) for step in range(10, 101)} == {2.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_equals_the_library_in_value_and_gradient(dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(37, 101)).to(dtype).requires_grad_()
    targets = torch.randint(0, 101, (37,))
    expected = F.cross_entropy(logits.float(), targets)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    loss = CrossEntropy.apply(logits, targets)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(gradient, 3 * expected_gradient, rtol=tolerance, atol=tolerance / 10)


def test_a_prefix_of_p_leaves_the_first_p_minus_1_predictions_without_loss(tiny, corpus):
    run = Run(tiny, corpus, CPU)
    chunks = run.valid[:2]
    logits = run.model(chunks[:, :-1])
    per_token = F.cross_entropy(logits.transpose(1, 2), chunks[:, 1:], reduction="none")
    for prefix in (1, 2, 5):
        torch.testing.assert_close(next_token_loss(run.model, chunks, prefix), per_token[:, prefix - 1 :].mean())


FIXED = ((1, 1, None), (2, 1, 0), (3, 1, 1), (3, 2, 1), (3, 4, None))


@pytest.mark.parametrize(("position", "prefix", "left_out"), FIXED)
def test_a_fixed_token_is_no_prediction_that_counts(tiny, corpus, position, prefix, left_out):
    tiny = dataclasses.replace(
        tiny,
        data=dataclasses.replace(tiny.data, fixed_position=position),
        model=dataclasses.replace(tiny.model, attention=AttentionSpec(prefix=prefix)),
    )
    run = Run(tiny, corpus, CPU)
    assert run.valid[:, position - 1].eq(corpus.fix_id).all()
    logits = run.model(run.valid[:, :-1])
    per_token = F.cross_entropy(logits.transpose(1, 2), run.valid[:, 1:], reduction="none")
    kept = [t for t in range(per_token.shape[1]) if t >= prefix - 1 and t != left_out]
    assert run.evaluate()[0]["valid_loss"] == pytest.approx(per_token[:, kept].mean().item(), rel=1e-6)
    batch = run.chunks.batch(0, 4, 0)
    expected = F.cross_entropy(run.model(batch[:, :-1])[:, kept].flatten(0, 1), batch[:, 1:][:, kept].flatten())
    assert float(run.advance(next_token_loss)) == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_can_be_validated_on_another_text_in_its_own_tokens(tiny, corpus, tmp_path, monkeypatch):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"{index} " + "zebra sink token head. " * 50)
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    data = dataclasses.replace(tiny.data, corpus=corpus.name, validation=f"path:{tmp_path}", fixed_position=None)
    run = Run(dataclasses.replace(tiny, data=data), corpus, CPU)
    assert "zebra" in run.tokenizer.decode(run.valid[0].tolist())
    assert "zebra" not in run.tokenizer.decode(run.chunks.batch(0, 4, 0).flatten().tolist())
    # Another text than the config's is validated on its own.
    elsewhere = dataclasses.replace(data, corpus="sources")
    other = Run(dataclasses.replace(tiny, data=elsewhere), corpus, CPU)
    assert "zebra" not in other.tokenizer.decode(other.valid.flatten().tolist())


def test_micro_batches_add_up_to_the_whole_batch(tiny, corpus):
    losses = [Run(change(tiny, micro_batch=m), corpus, CPU) for m in (None, 2)]
    first, second = (float(run.advance(next_token_loss)) for run in losses)
    assert first == pytest.approx(second, rel=1e-5)
    for a, b in zip(losses[0].model.parameters(), losses[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_two_runs_of_one_config_are_equal_to_the_last_bit(tiny, corpus, tmp_path):
    for name in ("a", "b"):
        train(tiny, tmp_path / name, corpus=corpus, progress=False)
    folders = [record_folder("test", "tiny", 0, tmp_path / name) for name in ("a", "b")]
    assert compared(folders[0]) == compared(folders[1])


def test_arms_of_one_seed_see_the_same_batches_and_another_seed_does_not(tiny, corpus):
    other = dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, attention=AttentionSpec(similarity="sigmoid", normalizer="none"))
    )
    a, b = Run(tiny, corpus, CPU), Run(other, corpus, CPU)
    c = Run(dataclasses.replace(tiny, seed=1), corpus, CPU)
    batches = [run.chunks.batch(5, 4, run.config.seed) for run in (a, b, c)]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    assert torch.equal(a.probe, c.probe) and torch.equal(a.valid, c.valid)


def test_a_record_says_what_ran_and_holds_the_curve(tiny, corpus, tmp_path):
    record = train(tiny, tmp_path, corpus=corpus, progress=False, keep_weights=True)
    assert record.status == "done" and record.metrics["reason"] is None
    assert [point["step"] for point in record.metrics["curve"]] == [0, 4, 8, 12]
    assert {"valid_loss", "train_loss", "sink_1"} <= set(record.metrics["final"])
    assert record.config["recipe"] >= 1 and record.config["seed"] == 0
    assert {"corpus_train_tokens", "code_sha256", "torch", "wall_seconds"} <= set(record.provenance)
    assert record.weights is not None and (record.folder / "tokenizer.json").exists()
    assert not partial_folder(record.folder).exists()


def test_training_again_returns_the_record_without_training(tiny, corpus, tmp_path):
    first = train(tiny, tmp_path, corpus=corpus, progress=False)
    before = (first.folder / "provenance.json").read_bytes()
    assert train(tiny, tmp_path, corpus=corpus, progress=False).metrics == first.metrics
    assert (first.folder / "provenance.json").read_bytes() == before


def test_a_diverging_run_is_recorded_as_failed_with_its_reason(tiny, corpus, tmp_path):
    wild = change(tiny, learning_rate=1e30, clip_norm=1e30)
    record = train(wild, tmp_path, corpus=corpus, progress=False)
    assert record.status == "failed"
    assert "not finite" in record.metrics["reason"] or "twice that" in record.metrics["reason"]
    assert read_record(record.folder).metrics["status"] == "failed"


def test_a_checkpoint_brings_back_the_same_state(tiny, corpus, tmp_path):
    unbroken, broken = Run(tiny, corpus, CPU), Run(tiny, corpus, CPU)
    for _step in range(6):
        unbroken.advance(next_token_loss)
    for _step in range(3):
        broken.advance(next_token_loss)
    save_checkpoint(broken, tmp_path / "c.safetensors")
    resumed = Run(tiny, corpus, CPU)
    load_checkpoint(resumed, tmp_path / "c.safetensors")
    assert resumed.step == 3
    for _step in range(3):
        resumed.advance(next_token_loss)
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_named_and_training_starts_again(tiny, corpus, tmp_path, damage):
    run = Run(tiny, corpus, CPU)
    run.advance(next_token_loss)
    path = tmp_path / "c.safetensors"
    save_checkpoint(run, path)
    blob = bytearray(path.read_bytes())
    if damage == "flip":
        blob[len(blob) // 2] ^= 1
    path.write_bytes({"truncate": blob[:-100], "flip": blob, "empty": b""}[damage])
    fresh = Run(tiny, corpus, CPU)
    with pytest.warns(UserWarning, match=r"c\.safetensors is truncated or changed; training starts again"):
        load_checkpoint(fresh, path)
    assert fresh.step == 0


def test_a_checkpoint_of_another_config_is_not_used(tiny, corpus, tmp_path):
    run = Run(tiny, corpus, CPU)
    save_checkpoint(run, tmp_path / "c.safetensors")
    with pytest.warns(UserWarning, match="another config or corpus"):
        load_checkpoint(Run(change(tiny, weight_decay=0.5), corpus, CPU), tmp_path / "c.safetensors")


def test_a_full_disk_leaves_the_previous_checkpoint(tiny, corpus, tmp_path, monkeypatch):
    run = Run(tiny, corpus, CPU)
    path = tmp_path / "c.safetensors"
    save_checkpoint(run, path)
    before = path.read_bytes()
    run.advance(next_token_loss)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="free some space"):
        save_checkpoint(run, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_run_in_training_is_not_trained_twice(tiny, corpus, tmp_path):
    folder = record_folder("test", "tiny", 0, tmp_path)
    with run_lock(folder), pytest.raises(RunLocked, match="test/tiny/0 is being trained by another process"):
        train(tiny, tmp_path, corpus=corpus, progress=False)
    assert train(tiny, tmp_path, corpus=corpus, progress=False).status == "done"


def test_a_record_of_one_text_is_not_given_for_another(tiny, corpus, text_folder, tmp_path):
    study = train(tiny, tmp_path, corpus=corpus, progress=False)
    other = load_corpus(f"path:{text_folder}", 300, cache_dir=tmp_path / "cache", progress=False)
    with pytest.warns(UserWarning, match="in place of 'docstrings' with 300: the record is test@path-texts"):
        apart = train(tiny, tmp_path, corpus=other, progress=False)
    assert apart.folder != study.folder and apart.config["corpus"] == other.identity != study.config["corpus"]
    assert train(tiny, tmp_path).folder == study.folder == train(tiny, tmp_path, corpus=corpus).folder
    for text, message in (("path:/nowhere", "no such folder"), ("nonsense", "unknown corpus")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(tiny, tmp_path, corpus=text, progress=False)
    for file in ("config.json", "provenance.json"):
        assert str(text_folder.parent) not in (apart.folder / file).read_text()


RUNNER = """
import json, sys
from pathlib import Path
import torch
from sinkutils.data.corpus import Corpus
from sinkutils.study.config import RunConfig, from_dict
from sinkutils.training.trainer import train
config, folder, runs = json.loads(sys.argv[1]), *sys.argv[2:]
corpus = Corpus(Path(folder))
print("ready", flush=True)
train(from_dict(RunConfig, config), runs, corpus=corpus, progress=False, checkpoint_seconds=0.0)
"""


def test_a_run_killed_at_random_instants_ends_in_the_unbroken_record(tiny, corpus, tmp_path):
    config = change(tiny, steps=60, eval_every=2)

    def start(runs: Path) -> subprocess.Popen:
        arguments = [json.dumps(dataclasses.asdict(config)), str(corpus.folder), str(runs)]
        process = subprocess.Popen([sys.executable, "-c", RUNNER, *arguments], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        return process

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    whole = time.monotonic() - began
    rng, kills = np.random.default_rng(0), 0
    folder = record_folder("test", "tiny", 0, tmp_path / "killed")
    for _attempt in range(20):
        process = start(tmp_path / "killed")
        try:
            process.wait(timeout=float(rng.uniform(0.02, 0.3)) * whole if kills < 5 else 120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 3, "the run ended before it was killed often enough to mean anything"
    assert compared(folder) == compared(record_folder("test", "tiny", 0, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"lr_floor": 2.0}, "lr_floor must be in 0..1"),
        ({"micro_batch": 3}, "micro_batch must divide batch_size"),
        ({"eval_length": 33}, "eval_length 33 is longer than context_length"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        change(tiny, **changes)


def test_configs_survive_json(tiny):
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, attention=AttentionSpec(bias="k", bias_dims=2)),
        data=DataConfig(random_positions=(1, 2)),
    )
    assert from_dict(RunConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(ValueError, match="RunConfig has no field colour"):
        from_dict(RunConfig, {**dataclasses.asdict(tiny), "colour": 1})


def test_a_corpus_with_more_tokens_than_the_model_is_refused(tiny, corpus, tmp_path):
    small = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, vocab_size=200))
    with pytest.raises(ValueError, match="raise vocab_size"):
        train(small, tmp_path, corpus=corpus, progress=False)


def test_bf16_trains_to_about_the_same_loss(tiny, corpus, tmp_path):
    losses = [
        train(change(tiny, precision=precision), tmp_path / precision, corpus=corpus, progress=False).metrics["final"]
        for precision in ("fp32", "bf16")
    ]
    assert losses[0]["valid_loss"] == pytest.approx(losses[1]["valid_loss"], rel=0.02)


def test_cuda_trains_with_deterministic_kernels_and_leaves_the_setting_as_it_was(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for device, inside in (("cpu", False), ("cuda", True)):
        with deterministic_kernels(torch.device(device)):
            assert torch.are_deterministic_algorithms_enabled() is inside
        assert not torch.are_deterministic_algorithms_enabled()
