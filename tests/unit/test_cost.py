"""The estimate: counts against the built model, FLOPs by hand, activations against what autograd keeps."""

import dataclasses
import re

import pytest
import torch

from sinkutils.model.config import LMConfig
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import RunConfig, TrainConfig
from sinkutils.study.cost import GIB, GPUS, cost
from sinkutils.study.grid import config


def test_parameters_and_flops_of_the_paper_are_those_by_hand_and_of_the_built_model():
    small, large = cost(config("default", "paper")), cost(config("softmax_1b", "paper-1b"))
    assert small.body / 1e6 == pytest.approx(59.0, abs=0.05) and large.body / 1e9 == pytest.approx(1.13, abs=0.01)
    # L (4 d^2 + 3 d f + 2 d) + d, and twice V d
    assert small.body == 10 * (4 * 768**2 + 3 * 768 * 1536 + 2 * 768) + 768
    assert small.parameters == small.body + 2 * 50_432 * 768
    weights, tokens = small.body + 50_432 * 768, 20_000 * 512 * 2048
    assert small.tokens == tokens
    assert small.flops == pytest.approx(6 * weights * tokens + 6 * 10 * 768 * 2048 * tokens)
    assert small.flops == pytest.approx(1.43e19, rel=0.01)
    run = config("k_bias", "smoke")
    assert cost(run).parameters == sum(p.numel() for p in TransformerLM(run.model).parameters())


def test_hours_are_flops_over_the_reached_speed_gpus_share_them_and_fsdp_cuts_the_state():
    run, a100 = config("default", "paper"), GPUS[0]
    assert (a100.name, a100.peak) == ("A100", 312)
    assert cost(run).hours(a100, 0.4) == pytest.approx(1.43e19 / (0.4 * 312e12) / 3600, rel=0.01)
    assert cost(run).hours(a100, 0.4, 8) == pytest.approx(cost(run).hours(a100, 0.4) / 8)
    twice = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=40_000))
    assert cost(twice).flops == pytest.approx(2 * cost(run).flops)
    large = cost(config("softmax_1b", "paper-1b"))
    assert large.memory(8, "ddp") - large.memory(8, "fsdp") == pytest.approx(large.state_bytes / GIB * 7 / 8)
    shown = cost(run).table(gpus=4)
    assert "136.5M, 59.0M without embeddings" in shown and "on 4" in shown
    assert all(gpu.name in shown for gpu in GPUS)


def test_the_state_is_what_adamw_keeps_and_a_row_of_the_table_what_a_gpu_holds():
    large = cost(config("softmax_1b", "paper-1b"))
    assert large.state_bytes == 18 * large.parameters  # weights, gradients, two moments in fp32, and a bf16 copy
    full = config("softmax_1b", "paper-1b")
    full = dataclasses.replace(full, train=dataclasses.replace(full.train, precision="fp32"))
    assert cost(full).state_bytes == 16 * large.parameters
    hours = [f"{large.hours(GPUS[0], 0.4):.1f}", f"{large.hours(GPUS[0], 0.4, 8):.1f}"]
    usable = 0.9 * GPUS[0].memory
    for parallel in ("ddp", "fsdp"):
        for share, fits in ((0.99, "fits"), (1.01, "does not fit")):
            room = dataclasses.replace(large, activation_bytes=0, state_bytes=int(share * usable * GIB))
            if parallel == "fsdp":  # eight parts of the state: one GPU alone has no room for it
                room = dataclasses.replace(room, state_bytes=8 * room.state_bytes)
            row = next(line for line in room.table(0.4, 8).splitlines() if line.startswith(GPUS[0].name))
            other = "fits" if parallel == "ddp" else "does not fit"
            assert re.split(r"\s{2,}", row)[-4:] == [*hours, *((fits, other) if parallel == "ddp" else (other, fits))]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_activations_are_about_what_autograd_keeps(precision, ffn):
    # Longer than fast.DENSE_LENGTH, so that attention is fused.
    model = LMConfig(300, 576, num_layers=4, num_heads=4, hidden_size=64, intermediate_size=128, ffn=ffn)
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

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        lm.hidden(torch.randint(0, 300, (1, 576)))
    wide = 2 if precision == "bf16" else 4
    copies = 2 * cost(run).body if precision == "bf16" else 0  # autocast's bf16 weights, which state_bytes counts
    estimate = cost(run).activation_bytes - 576 * (2 * wide + 8) * 300
    assert estimate == pytest.approx(sum(sizes.values()) - copies, rel=0.15)
