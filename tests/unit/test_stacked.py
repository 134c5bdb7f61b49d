"""Stacked runs are the single runs: losses, gradients, clipping, records."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, refuses
from stacked import Stack, clip_each, train_stacked
from torch.testing import assert_close

from sinkutils import AttentionSpec, TransformerLM
from sinkutils.study import task
from sinkutils.study.config import RunConfig
from sinkutils.study.task import next_token_loss
from sinkutils.study.train import Run, train

STEPS = 20
always, never = (lambda config: True), (lambda config: False)
VARIANTS = {
    "fixed_1": {"data": {"fixed_position": 1}},
    "k_bias": {"attention": {"bias": "k"}},
    "kv_bias": {"attention": {"bias": "kv"}},
    "sigmoid": {"attention": {"similarity": "sigmoid", "normalizer": "none"}},
    "sink_logit": {"attention": {"sink_logit": "learned"}},
    "elu_kernel": {"attention": {"similarity": "linear", "kernel": "elu", "normalizer": "sum"}},
    "window": {"attention": {"window": 4}},
    "learnable": {"model": {"position": "learnable"}},
    "alibi": {"model": {"position": "alibi"}},
    "post_norm": {"model": {"norm": "post"}},
    "sink_token": {"model": {"sink_token": True}},
    "unscored": {"data": {"unscored": (1,)}},
    "random_1": {"data": {"random_positions": (1,)}},
}


def variant(tiny: RunConfig, name: str, seed: int, **train) -> RunConfig:
    """A tiny run with what a variant changes, in fp32."""
    change = VARIANTS[name]
    attention = AttentionSpec(**change.get("attention", {}))
    model = replace(tiny.model, attention=attention, **change.get("model", {}))
    data = replace(tiny.data, **change.get("data", {}))
    train = replace(tiny.train, precision="fp32", steps=STEPS, **train)
    return replace(tiny, seed=seed, model=model, data=data, train=train)


@pytest.mark.parametrize("name", VARIANTS)
def test_stacked_runs_have_the_losses_gradients_and_weights_of_single_runs(name, tiny, corpus):
    configs = [variant(tiny, name, seed) for seed in (0, 1, 2)]
    single = [Run(config, corpus, CPU) for config in configs]
    stack = Stack([Run(config, corpus, CPU) for config in configs])
    for _ in range(STEPS):
        stack.advance()
        for run in single:
            run.advance()
    batch = torch.stack([run.batch() for run in single])
    stack.losses(batch).sum().backward()
    for number, (alone, stacked) in enumerate(zip(single, stack.runs, strict=True)):
        for index in (0, 1):  # loss, gradient norm
            both = [torch.stack([step[index] for step in run.passed]) for run in (alone, stacked)]
            expected, got = both
            assert_close(got, expected, rtol=1e-5, atol=1e-5)
        next_token_loss(alone.model, batch[number], alone.unscored).backward()
        for key, parameter in alone.model.named_parameters():
            gradient = stack.parameters[key].grad[number]
            # In both, rounding differs by the processor's instructions: 2e-5 without AVX2.
            assert_close(gradient, parameter.grad, rtol=1e-4, atol=5e-5)
            assert_close(stacked.model.get_parameter(key), parameter, rtol=1e-4, atol=5e-5)
    assert len({float(run.passed[-1][0]) for run in stack.runs}) == len(configs)


def test_the_gradient_of_each_model_is_clipped_by_its_own_norm():
    stacked = [torch.nn.Parameter(torch.zeros(2, 3, 4)), torch.nn.Parameter(torch.zeros(2, 5))]
    for parameter in stacked:
        parameter.grad = torch.full_like(parameter, 0.01)
        parameter.grad[1] = 1e6
    small = [parameter.grad[0].clone() for parameter in stacked]
    norms = clip_each(stacked, most=1.0)
    assert_close(norms, torch.tensor([0.01, 1e6]) * 17**0.5)
    for parameter, before in zip(stacked, small, strict=True):
        assert torch.equal(parameter.grad[0], before)
    clipped = torch.cat([parameter.grad[1].flatten() for parameter in stacked])
    assert clipped.norm() == pytest.approx(1.0)


def test_records_of_stacked_runs_are_those_of_single_runs(tiny, corpus, tmp_path):
    configs = [variant(tiny, "k_bias", seed, eval_every=10) for seed in (0, 1)]
    records = train_stacked(
        configs, tmp_path / "stacked", corpus=corpus, device="cpu", keep_weights=always
    )
    assert [record.seed for record in records] == [0, 1]
    for config, record in zip(configs, records, strict=True):
        options = {"corpus": corpus, "device": "cpu", "compile": False, "progress": False}
        alone = train(config, tmp_path / "single", **options)
        assert record.config == alone.config
        assert record.provenance["stacked"] == 2
        assert record.metrics.keys() == alone.metrics.keys()
        assert record.metrics["final"].keys() == alone.metrics["final"].keys()
        for point, expected in zip(record.metrics["curve"], alone.metrics["curve"], strict=True):
            assert point["valid_loss"] == pytest.approx(expected["valid_loss"], abs=2e-4)
        assert_close(record.arrays["curve"], alone.arrays["curve"], rtol=0, atol=2e-3)
        assert record.weights is not None
    assert not list((tmp_path / "stacked").rglob("*.partial"))


def test_what_has_a_record_is_not_trained_again(tiny, corpus, tmp_path):
    configs = [variant(tiny, "fixed_1", seed, eval_every=10) for seed in (0, 1)]
    first = train(configs[0], tmp_path, corpus=corpus, device="cpu", compile=False, progress=False)
    records = train_stacked(configs, tmp_path, corpus=corpus, device="cpu", keep_weights=never)
    assert records[0].digests == first.digests
    assert records[1].provenance["stacked"] == 1


def test_a_run_that_fails_is_recorded_and_stops_no_other(tiny, corpus, tmp_path, monkeypatch):
    configs = [variant(tiny, "fixed_1", seed, eval_every=10) for seed in (0, 1)]

    def broken(config, seed):
        model = TransformerLM(config, seed)
        if seed == 1:
            model.unembed.weight.data.fill_(torch.nan)
        return model

    monkeypatch.setattr(task, "TransformerLM", broken)
    records = train_stacked(configs, tmp_path, corpus=corpus, device="cpu", keep_weights=never)
    assert [record.status for record in records] == ["done", "failed"]
    assert "by step 10" in records[1].reason
    assert records[0].metrics["curve"][-1]["step"] == STEPS


def test_runs_that_are_not_alike_are_refused(tiny, corpus):
    pair = [Run(variant(tiny, name, 0), corpus, CPU) for name in ("fixed_1", "k_bias")]
    refuses("must not differ in model", Stack, pair)
    sgd = Run(variant(tiny, "fixed_1", 0, optimizer="sgd"), corpus, CPU)
    refuses("adamw", Stack, [sgd])
