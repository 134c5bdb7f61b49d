"""One run: the schedule, the loss, the optimisers, determinism, checkpoints, and a record whatever becomes of it."""

import dataclasses
import itertools
import json
import math
import os
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, interrupted, own_model, refused, refuses
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from sinkutils import AttentionSpec, TransformerLM, load_corpus, load_lm, measure, probe
from sinkutils.measuring.report import NotFinite, norm_ratio
from sinkutils.study import task as stepping
from sinkutils.study import train as training
from sinkutils.study.config import DataConfig, RunConfig, TrainConfig, from_dict, learning_rate
from sinkutils.study.evaluate import NOT_KEPT, destinations, divergence, gradient_norms, line_breaks
from sinkutils.study.grid import plan, presets
from sinkutils.study.record import read_record, rounded
from sinkutils.study.store import Runs
from sinkutils.study.task import (
    Chunks,
    CrossEntropy,
    GraphedStep,
    fix_position,
    instruction_set,
    make_optimizers,
    next_token_loss,
    reproducible,
    set_rate,
)
from sinkutils.study.train import Run, train


def change(run: RunConfig, **changes) -> RunConfig:
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **changes))


def advanced(run: RunConfig, corpus, steps: int) -> Run:
    """The state of a run after so many steps."""
    state = Run(run, corpus, CPU)
    for _ in range(steps):
        state.advance()
    return state


def test_the_rate_warms_up_then_falls_along_a_cosine_to_its_floor():
    schedule = TrainConfig(steps=101, warmup_steps=10, learning_rate=2.0, lr_floor=0.1)
    rates = [learning_rate(schedule, step) for step in range(101)]
    expected = [0.2, 2.0, 2.0, 2 * (0.1 + 0.9 * 0.5), 0.2]
    assert [rates[step] for step in (0, 9, 10, 55, 100)] == pytest.approx(expected)
    constant = dataclasses.replace(schedule, lr_floor=1.0)
    assert {learning_rate(constant, step) for step in range(10, 101)} == {2.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_equals_the_library_in_value_and_gradient(dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(37, 101)).to(dtype).requires_grad_()
    targets = torch.randint(0, 101, (37,))
    expected, loss = F.cross_entropy(logits.float(), targets), CrossEntropy.apply(logits, targets)
    gradient, expected_gradient = (torch.autograd.grad(3 * x, logits)[0] for x in (loss, expected))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(loss, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance / 10)


LOSSES = (
    (None, 1, (), ()),
    (None, 5, (), ()),
    (1, 1, (1, 5, 6, 32), (0, 4, 5, 31)),
    (2, 1, (), (0,)),
    (3, 2, (), (1,)),
    (3, 4, (), ()),
)


@pytest.mark.parametrize(("fixed", "prefix", "unscored", "left_out"), LOSSES)
def test_prefixes_fixed_and_unscored_tokens_are_no_loss(
    tiny, corpus, fixed, prefix, unscored, left_out
):
    model = dataclasses.replace(tiny.model, attention=AttentionSpec(prefix=prefix))
    data = dataclasses.replace(tiny.data, fixed_position=fixed, unscored=unscored)
    run = Run(dataclasses.replace(tiny, model=model, data=data), corpus, CPU)
    assert fixed is None or run.valid[:, fixed - 1].eq(corpus.fix_id).all()
    logits = run.model(run.valid[:, :-1])
    per_token = F.cross_entropy(logits.transpose(1, 2), run.valid[:, 1:], reduction="none")
    kept = [t for t in range(per_token.shape[1]) if t >= prefix - 1 and t not in left_out]
    assert run.evaluate([])
    assert run.curve[0]["valid_loss"] == pytest.approx(per_token[:, kept].mean().item(), rel=1e-6)
    batch = run.task.train.batch(0, 4, 0)
    logits = run.model(batch[:, :-1])[:, kept].flatten(0, 1)
    expected = F.cross_entropy(logits, batch[:, 1:][:, kept].flatten())
    assert float(run.advance()) == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_can_be_validated_on_another_text_in_its_tokens(tiny, corpus, tmp_path, monkeypatch):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"{index} " + "zebra sink token head. " * 50)
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    texts = {"corpus": corpus.name, "validation": f"path:{tmp_path}"}
    data = dataclasses.replace(tiny.data, fixed_position=None, **texts)
    run = Run(dataclasses.replace(tiny, data=data), corpus, CPU)
    assert "zebra" in run.task.tokenizer.decode(run.valid[0].tolist())
    assert "zebra" not in run.task.tokenizer.decode(
        run.task.train.batch(0, 4, 0).flatten().tolist()
    )
    # Another text than the config's is validated on its own.
    sources = dataclasses.replace(data, corpus="sources")
    other = Run(dataclasses.replace(tiny, data=sources), corpus, CPU)
    assert "zebra" not in other.task.tokenizer.decode(other.valid.flatten().tolist())


def test_micro_batches_add_up_to_the_whole_batch(tiny, corpus):
    whole, parts = (Run(change(tiny, micro_batch=m), corpus, CPU) for m in (None, 2))
    loss = float(parts.advance())
    assert float(whole.advance()) == pytest.approx(loss, rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_each_step_has_the_chunks_of_its_own_number(tiny, corpus, monkeypatch):
    """Also behind the first copy of several steps to the device."""
    monkeypatch.setattr(training, "AHEAD", 2)
    run = Run(tiny, corpus, CPU)
    for step in range(5):
        expected = Chunks(corpus, "train", 32, tiny.data, tiny.seed).batch(step, 4, tiny.seed)
        assert torch.equal(run.batch(), expected)
        run.advance()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_is_the_optimizers_on_a_seeds_batch_clipped_at_its_rate(optimizer, tiny, corpus):
    """Held against the recipe written out once more, with settings of which none is the default."""
    data = dataclasses.replace(tiny.data, random_positions=(3,))
    settings = {"weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "adam_eps": 1e-3}
    settings["clip_norm"] = 0.05
    run = dataclasses.replace(change(tiny, optimizer=optimizer, **settings), data=data, seed=1)
    model, chunks = TransformerLM(run.model, 1), Chunks(corpus, "train", 32, data, seed=1)
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    others += [model.embed.weight, model.unembed.weight]
    adamw = partial(torch.optim.AdamW, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    muon = {"weight_decay": 0.5, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    written_out = {
        "adamw": [adamw(model.parameters())],
        "sgd": [torch.optim.SGD(model.parameters(), momentum=0.8, weight_decay=0.5)],
        "muon": [torch.optim.Muon(matrices, **muon), adamw(others)],
    }[optimizer]
    for step in range(5):  # three of the warm-up, two of the cosine
        model.zero_grad()
        next_token_loss(model, chunks.batch(step, 4, 1)).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.1
        for part in written_out:
            part.param_groups[0]["lr"] = learning_rate(run.train, step)
            part.step()
    # Muon multiplies in bfloat16, whose last digit turns where instructions round otherwise.
    loose = {"rtol": 1e-3, "atol": 1e-4} if optimizer == "muon" else {}
    for a, b in zip(advanced(run, corpus, 5).model.parameters(), model.parameters(), strict=True):
        assert_close(a, b, **loose)


@torch.no_grad()
def test_a_run_is_validated_on_held_out_chunks_and_measured_as_it_was_trained(tiny, corpus):
    data = dataclasses.replace(tiny.data, fixed_position=2, random_positions=(3,))
    run = Run(dataclasses.replace(change(tiny, valid_chunks=40), data=data), corpus, CPU)
    text = Chunks(corpus, "valid", 32, DataConfig(fixed_position=2)).take(np.arange(40))
    assert torch.equal(run.valid, text), "nothing of it is redrawn"
    each = [float(next_token_loss(run.model, chunk[None], (1,))) for chunk in text]
    # though 40 are a pass of 32 and one of 8
    assert run.valid_loss() == pytest.approx(np.mean(each), rel=1e-6)
    assert run.probe[:, 1].eq(corpus.fix_id).all()


def test_a_record_says_of_its_end_what_is_measured_on_its_weights(tiny, corpus, tmp_path):
    """At a rate that makes sinks in 12 steps, of which each position has its own share."""
    run = change(tiny, learning_rate=0.3, eval_sequences=8)
    model = dataclasses.replace(run.model, attention=AttentionSpec(bias="k"))
    run = dataclasses.replace(run, model=model)
    record = train(run, tmp_path, device="cpu", corpus=corpus, keep_weights=True, progress=False)
    model, tokenizer = load_lm(record.folder, "cpu")
    ids = fix_position(probe("natural", tokenizer, 8, 32, 0, corpus=corpus), 1, corpus.fix_id)
    assert torch.equal(ids, Run(run, corpus, CPU).probe)
    report = measure(model, ids, range(1, 11), (0.1, 0.2, 0.3, 0.4, 0.5))
    final, curve, star = record.metrics["final"], record.arrays["curve"], report.star
    sinks = {f"sink_{k}": report.sink(k) for k in (1, 2, 3, 4)} | {"sink_star": report.sink_star()}
    assert sinks["sink_1"] not in (0, sinks["sink_2"], sinks["sink_star"])
    excess = {"excess_1": report.excess(1), "excess_star": report.excess("star")}
    assert {name: final[name] for name in sinks | excess} == rounded(sinks | excess)
    whole = report.to_dict()
    assert set(whole) - set(final["report"]) == set(NOT_KEPT)
    for name, value in final["report"].items():
        if name.endswith(("_norms", "_peaks")):
            np.testing.assert_allclose(value, whole[name], rtol=5e-3)
        elif not name.startswith("sink"):
            assert value == rounded(json.loads(json.dumps(whole[name]))), name
    assert final["report"]["sink"]["2"] == {
        str(eps): rounded(report.sink(2, eps)) for eps in (0.1, 0.2, 0.3, 0.4, 0.5)
    }
    assert curve.shape[:2] == (4, 4)  # four evaluations; x_1 to x_3, and k*
    measured = torch.cat([report.alpha[:, :3].mean(0), star.mean(0)[None]]).half()
    assert torch.equal(curve[-1], measured)
    last, peaks = record.metrics["curve"][-1], final["report"]["hidden_peaks"]
    assert last["peak_1"] == pytest.approx([row[0] for row in peaks], rel=5e-3)
    # of norms with three digits, to three digits
    ratios = norm_ratio(final["report"]["value_norms"])
    assert last["value_ratio_1"] == pytest.approx(ratios, rel=1.5e-2)
    assert final["destinations"] == destinations(model, ids, line_breaks(tokenizer))
    np.testing.assert_allclose(final["gradients"]["input"], gradient_norms(model, ids), rtol=1e-2)


def test_a_record_says_what_ran_and_a_second_run_equals_it_to_the_last_bit(tiny, corpus, tmp_path):
    record = train(tiny, tmp_path / "a", corpus=corpus, progress=False, keep_weights=True)
    assert record.status == "done" and record.metrics["reason"] is None
    assert [point["step"] for point in record.metrics["curve"]] == [0, 4, 8, 12]
    assert {"valid_loss", "train_loss", "sink_1"} <= set(record.metrics["final"])
    assert {"corpus_train_tokens", "rules", "torch", "instruction_set"} <= set(record.provenance)
    assert record.weights is not None and (record.folder / "tokenizer.json").exists()
    left = [path.name for path in record.folder.parent.iterdir()]
    assert left == ["0"], "what was unfinished is gone"
    before = (record.folder / "provenance.json").read_bytes()
    assert train(tiny, tmp_path / "a", corpus=corpus, progress=False).metrics == record.metrics
    after = (record.folder / "provenance.json").read_bytes()
    assert after == before, "a finished run was trained again"
    again = train(tiny, tmp_path / "b", corpus=corpus, progress=False).folder
    for file in ("config.json", "metrics.json", "alpha.safetensors"):
        assert (again / file).read_bytes() == (record.folder / file).read_bytes()


def test_a_run_on_a_cpu_takes_one_thread_and_gives_them_back(tiny, corpus, tmp_path, monkeypatch):
    seen = set()

    def counted(self, advance=Run.advance):
        seen.add(torch.get_num_threads())
        return advance(self)

    monkeypatch.setattr(Run, "advance", counted)
    torch.set_num_threads(2)  # until the next test
    train(tiny, tmp_path, device="cpu", corpus=corpus, progress=False)
    assert seen == {1} and torch.get_num_threads() == 2


def test_the_training_loss_of_a_point_is_the_mean_since_the_one_before(tiny, corpus, tmp_path):
    run = change(tiny, steps=8)
    losses = [float(loss) for loss, _ in advanced(run, corpus, 8).passed]
    _, *points = train(run, tmp_path, corpus=corpus, progress=False).metrics["curve"]
    means = [sum(losses[:4]) / 4, sum(losses[4:]) / 4]
    assert [point["train_loss"] for point in points] == pytest.approx(means, rel=1e-4)


def test_a_diverging_run_is_recorded_as_failed_not_overfitting(tiny, corpus, tmp_path, monkeypatch):
    wild = change(tiny, learning_rate=1e30, clip_norm=1e30)
    record = train(wild, tmp_path, corpus=corpus, progress=False)
    assert record.metrics["curve"][0]["step"] == 0
    assert "not finite" in record.metrics["reason"] or "twice that" in record.metrics["reason"]
    assert read_record(record.folder).status == "failed"
    assert divergence([3.0, 99.0], 11.0) is None, "one bad step of several"
    says = "the loss was over 11.00, twice that of a uniform guess"
    assert divergence([12.0, 99.0], 11.0) == says
    for worst in ([3.0, math.nan], [math.inf]):
        assert divergence(worst, 11.0) == "the loss was not finite"
    for loss, status in ((3 * math.log(300), "done"), (math.inf, "failed")):  # the first overfits
        monkeypatch.setattr(Run, "valid_loss", lambda run, loss=loss: loss)
        record = train(change(tiny, steps=4), tmp_path / status, corpus=corpus, progress=False)
        assert record.status == status


def test_attention_not_finite_at_a_finite_loss_is_a_failure(tiny, corpus, tmp_path, monkeypatch):
    times = itertools.count()

    def breaks(*arguments, really=training.measure, **options):
        if next(times) == 2:
            raise NotFinite("alpha holds nan")
        return really(*arguments, **options)

    monkeypatch.setattr(training, "measure", breaks)
    record = train(tiny, tmp_path, corpus=corpus, progress=False)
    assert record.status == "failed"
    assert [point["step"] for point in record.metrics["curve"]] == [0, 4]
    assert record.metrics["reason"] == "the model computed what is not finite by step 8"


@pytest.mark.parametrize(
    ("asked", "capabilities", "used"),
    [
        ("bf16", {"avx2": True, "avx512_f": True}, "fp32"),
        ("bf16", {"amx_bf16": True}, "bf16"),
        ("fp32", {"amx_bf16": True}, "fp32"),
    ],
)
def test_bf16_is_used_where_it_can_be(
    asked, capabilities, used, tiny, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    run = change(tiny, precision=asked, steps=4)
    record = train(run, tmp_path, corpus=corpus, progress=False)
    assert record.provenance["precision_used"] == used
    assert record.config["train"]["precision"] == asked
    short = train(change(tiny, steps=4), tmp_path / "fp32", corpus=corpus, progress=False)
    single = short.metrics["final"]
    assert record.metrics["final"]["valid_loss"] == pytest.approx(single["valid_loss"], rel=0.02)
    assert (record.metrics["final"] == single) == (used == "fp32")


def test_muon_takes_the_linear_maps_of_the_blocks_alone():
    model = own_model(attention=AttentionSpec(bias="kv"), gate="head")
    parameters = dict(model.named_parameters())
    both = make_optimizers(parameters, TrainConfig(optimizer="muon"))
    parts = [[id(p) for group in part.param_groups for p in group["params"]] for part in both]
    assert sorted(parts[0] + parts[1]) == sorted(map(id, model.parameters()))
    names = {name for name, p in model.named_parameters() if id(p) in parts[0]}
    ends = ("attention.qkv", "attention.out", "attention.gate", "ffn.up", "ffn.down")
    assert names == {f"blocks.{i}.{end}.weight" for i in (0, 1) for end in ends}


def test_a_rate_is_set_where_it_stands_also_where_a_cuda_graph_reads_it():
    there = torch.tensor(0.1)
    group = {"lr": there}
    set_rate([SimpleNamespace(param_groups=[group, other := {"lr": 0.1}])], 0.5)
    assert group["lr"] is there and float(there) == other["lr"] == 0.5


def test_a_record_says_the_seconds_of_all_its_parts_and_the_tokens_in_one(tiny, corpus, tmp_path):
    run = advanced(tiny, corpus, 4)
    run.seconds = 7.5
    run.passed.clear()
    checkpoint = Runs(tmp_path).of(tiny).checkpoint
    checkpoint.parent.mkdir(parents=True)
    training.save_checkpoint(run, checkpoint)
    said = train(tiny, tmp_path, corpus=corpus, progress=False).provenance
    assert said["wall_seconds"] >= 7.5
    assert said["tokens_per_second"] == pytest.approx(12 * 4 * 32 / said["wall_seconds"], rel=0.05)


def test_a_run_that_went_on_elsewhere_says_where_it_began(tiny, corpus, tmp_path, monkeypatch):
    for _ in range(2):  # and again on the same machine
        with interrupted(9), pytest.raises(KeyboardInterrupt):
            train(
                tiny, tmp_path, corpus=corpus, compile=False, checkpoint_seconds=0.0, progress=False
            )
    here = {"device": "cpu", "compiled": False, "precision_used": "fp32"}
    here["instruction_set"] = instruction_set()
    monkeypatch.setattr(stepping, "instruction_set", lambda: ["another"])
    monkeypatch.setattr(torch, "compile", lambda loss: loss)  # which would take most of a minute
    said = train(tiny, tmp_path, corpus=corpus, compile=True, progress=False).provenance
    assert (said["instruction_set"], said["compiled"]) == (["another"], True)
    assert said["began_on"] == [here]


def test_a_run_is_compiled_where_its_preset_says_so(tiny, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(presets(), "test", dataclasses.replace(presets()["laptop"], compile=True))
    # no answer from before
    monkeypatch.setattr(training, "compiles", compiles := training.compiles.__wrapped__)
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no compiler")))
    with pytest.warns(UserWarning, match=r"torch\.compile does not work here \(RuntimeError\)"):
        assert not compiles()
    with pytest.warns(UserWarning, match="goes on without, slower"):
        plain = train(tiny, tmp_path / "without", corpus=corpus, progress=False)
        assert not plain.provenance["compiled"]
    monkeypatch.setattr(torch, "compile", lambda loss: loss)
    assert train(tiny, tmp_path / "with", corpus=corpus, progress=False).provenance["compiled"]
    monkeypatch.setitem(presets(), "test", dataclasses.replace(presets()["laptop"], compile=False))
    assert not train(tiny, tmp_path / "plain", corpus=corpus, progress=False).provenance["compiled"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(optimizer, tiny, corpus, tmp_path):
    tiny = change(tiny, optimizer=optimizer)
    training.save_checkpoint(advanced(tiny, corpus, 3), tmp_path / "c.pt")
    resumed = Run(tiny, corpus, CPU)
    training.load_checkpoint(resumed, tmp_path / "c.pt")
    assert resumed.step == 3
    for _ in range(3):
        resumed.advance()
    weights = advanced(tiny, corpus, 6).model.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in resumed.model.state_dict().items())


def test_a_checkpoint_that_is_damaged_or_of_another_run_is_not_used(tiny, corpus, tmp_path):
    """Flipped and cut ones: test_sweep.py."""
    path = tmp_path / "c.pt"
    training.save_checkpoint(advanced(tiny, corpus, 1), path)
    with pytest.warns(UserWarning, match="another config or corpus"):
        training.load_checkpoint(Run(change(tiny, weight_decay=0.5), corpus, CPU), path)
    elsewhere = Run(tiny, corpus, CPU)
    elsewhere.task.fingerprint = "0" * 64  # of the same config on another text
    with pytest.warns(UserWarning, match="another config or corpus"):
        training.load_checkpoint(elsewhere, path)
    path.write_bytes(b"")
    fresh = Run(tiny, corpus, CPU)
    with pytest.warns(UserWarning, match=r"c\.pt is truncated or changed; training starts again"):
        training.load_checkpoint(fresh, path)
    assert fresh.step == 0


def test_a_record_of_one_text_is_not_given_for_another(tiny, corpus, text_folder, tmp_path):
    study = train(tiny, tmp_path, corpus=corpus, progress=False)
    other = load_corpus(f"path:{text_folder}", 300, cache_dir=tmp_path / "cache")
    says = "in place of 'docstrings' with 300, its own text: the record is test@path"
    with pytest.warns(UserWarning, match=says):
        apart = train(tiny, tmp_path, corpus=other, progress=False)
    assert apart.folder != study.folder
    assert apart.config["corpus"] == other.identity != study.config["corpus"]
    assert train(tiny, tmp_path).folder == study.folder
    assert train(tiny, tmp_path, corpus=corpus).folder == study.folder
    for file in ("config.json", "provenance.json"):
        # nothing of the machine
        assert str(text_folder.parent) not in (apart.folder / file).read_text()
    small = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, vocab_size=200))
    refuses("raise vocab_size", train, small, tmp_path, corpus=corpus, progress=False)


def test_settings_that_make_no_sense_are_refused(tiny):
    refuses("steps must be at least 1", change, tiny, steps=0)
    refuses("steps must be an integer", change, tiny, steps=1.5)
    refuses("optimizer must be one of adamw, sgd, muon", change, tiny, optimizer="adam")
    with refused("learning_rate must be finite and not negative"):
        change(tiny, learning_rate=float("nan"))
    refuses("beta2 must be less than 1", change, tiny, beta2=1.5)
    refuses("lr_floor must be at most 1", change, tiny, lr_floor=2.0)
    refuses("micro_batch must divide batch_size", change, tiny, micro_batch=3)
    refuses("eval_length 33 is longer than context_length", change, tiny, eval_length=33)


def test_configs_take_no_part_of_another_kind(tiny):
    refuses("unscored must be at least 1", DataConfig, unscored=(0,))
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        from_dict(RunConfig, {**dataclasses.asdict(tiny), "colour": 1})
    for field in ("seed", "model", "data", "train"):
        refuses(field, dataclasses.replace, tiny, **{field: -1})


def test_cuda_trains_with_deterministic_kernels_and_leaves_the_setting_as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.set_deterministic_debug_mode("error")
    try:
        for device, inside, workspace in (("cpu", 2, None), ("cuda", 1, ":4096:8")):  # 1 is to warn
            with reproducible(torch.device(device)):
                assert torch.get_deterministic_debug_mode() == inside
                assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
            assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_of_the_step_has_the_losses_of_eager_steps(precision, tiny, corpus):
    config = change(tiny, precision=precision, steps=50, batch_size=8)
    losses = {}
    for form in ("eager", "graph"):
        with reproducible(torch.device("cuda", 0)):
            run = Run(config, corpus, torch.device("cuda", 0))
            run.graph = GraphedStep(run) if form == "graph" else None
            losses[form] = torch.stack([run.advance() for _ in range(50)])
    assert_close(losses["graph"], losses["eager"], rtol=0, atol=1e-5)
    assert losses["eager"][-1] < losses["eager"][0]


class MadeOnTheHost(TorchDispatchMode):
    """Counts the tensors that are made of Python's numbers, which PyTorch marks by `lift_fresh`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.lift_fresh.default
        return function(*args, **(kwargs or {}))


def test_no_step_makes_a_tensor_on_the_host_which_no_cuda_graph_can_hold():
    with MadeOnTheHost() as mode:
        torch.zeros(2)[0] = 1.0
    assert mode.count == 1
    models = {run.model: run for run in plan("minute") if run.seed == 0}
    assert len(models) > 50
    for config, run in models.items():
        model = TransformerLM(config)
        chunks = torch.zeros(1, config.context_length + 1, dtype=torch.int64)
        with MadeOnTheHost() as mode:
            next_token_loss(model, chunks, unscored=(1,)).backward()
        assert mode.count == 0, run.experiment
