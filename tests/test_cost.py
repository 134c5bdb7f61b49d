"""The estimate: counts against the built model, FLOPs by hand, activations against what autograd keeps."""

import dataclasses

import pytest
import torch

from sinkutils.__main__ import main
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.config import RunConfig, TrainConfig
from sinkutils.study.cost import GIB, GPUS, cost
from sinkutils.study.grid import config


def test_the_paper_preset_is_60m_without_embeddings_and_1b():
    small, large = cost(config("default", "paper")), cost(config("softmax_1b", "paper-1b"))
    assert small.body / 1e6 == pytest.approx(59.0, abs=0.05)
    assert large.body / 1e9 == pytest.approx(1.13, abs=0.01)
    # by hand: L (4 d^2 + 3 d f + 2 d) + d, and twice V d
    assert small.body == 10 * (4 * 768**2 + 3 * 768 * 1536 + 2 * 768) + 768
    assert small.parameters == small.body + 2 * 50_432 * 768


def test_flops_are_6_n_d_and_the_attention():
    found = cost(config("default", "paper"))
    tokens = 20_000 * 512 * 2048
    assert found.tokens == tokens
    weights = found.body + 50_432 * 768
    assert found.flops == pytest.approx(6 * weights * tokens + 6 * 10 * 768 * 2048 * tokens)
    assert found.flops == pytest.approx(1.43e19, rel=0.01)


def test_parameters_are_those_of_the_built_model():
    run = config("k_bias", "smoke")
    assert cost(run).parameters == sum(p.numel() for p in TransformerLM(run.model).parameters())


def test_hours_are_flops_over_the_reached_speed_and_gpus_share_them():
    found, a100 = cost(config("default", "paper")), GPUS[0]
    assert (a100.name, a100.peak) == ("A100", 312)
    assert found.hours(a100, 0.4) == pytest.approx(1.43e19 / (0.4 * 312e12) / 3600, rel=0.01)
    assert found.hours(a100, 0.4, 8) == pytest.approx(found.hours(a100, 0.4) / 8)


def test_fsdp_cuts_the_state_and_not_the_activations():
    found = cost(config("softmax_1b", "paper-1b"))
    assert found.memory(8, "ddp") - found.memory(8, "fsdp") == pytest.approx(found.state_bytes / GIB * 7 / 8)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_activations_are_about_what_autograd_keeps(precision, ffn):
    # Longer than fast.DENSE_LENGTH, so that attention is fused.
    shape = {"vocab_size": 300, "hidden_size": 64, "num_heads": 4, "context_length": 576, "ffn": ffn}
    model = LMConfig(**shape, intermediate_size=128, num_layers=4)
    run = RunConfig("x", "y", model=model, train=TrainConfig(batch_size=1, precision=precision))
    lm = TransformerLM(model)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.randint(0, 300, (1, 576))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        lm.hidden(ids)
    wide = 2 if precision == "bf16" else 4
    copies = 2 * cost(run).body if precision == "bf16" else 0  # autocast's bf16 weights, which state_bytes counts
    estimate = cost(run).activation_bytes - 576 * (2 * wide + 8) * 300
    assert estimate == pytest.approx(sum(sizes.values()) - copies, rel=0.15)


def test_longer_runs_cost_more():
    run = config("default", "paper")
    twice = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=40_000))
    assert cost(twice).flops == pytest.approx(2 * cost(run).flops)


def test_the_command_prints_the_table_and_refuses_impossible_values(capsys):
    assert main(["cost", "--preset", "paper", "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "136.5M, 59.0M without embeddings" in shown and "on 4" in shown
    assert all(gpu.name in shown for gpu in GPUS)
    for arguments in (["--mfu", "1.5"], ["--gpus", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main(["cost", *arguments])
        assert stopped.value.code == 2 and arguments[1] in capsys.readouterr().err
