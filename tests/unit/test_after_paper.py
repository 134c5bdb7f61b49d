"""What later papers add to a model, and what records keep for them: gradients, peaks, where the attention goes."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import SHAPE, DenseMaps, own_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from sinkutils.measuring.destinations import destinations, line_breaks
from sinkutils.measuring.gradients import gradient_norms
from sinkutils.measuring.measure import measure
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.config import LMConfig
from sinkutils.model.decoder import TransformerLM
from sinkutils.model.positions import rotary_tables, rotate


def test_v_scale_shrinks_small_values_and_changes_no_attention():
    scaled, plain, ids = own_model(value_scale=True), own_model(), torch.randint(60, (2, 21))
    block = scaled.blocks[0].attention
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        block.double().value_scale[0] = 0.7
    v = block.qkv(x).chunk(3, dim=-1)[2].detach().view(1, 5, 2, 8).transpose(1, 2)
    seen: list[Tensor] = []
    block(x, {}, observer=SimpleNamespace(attention=lambda layer, q, k, v, spec, extras: seen.append(v)))
    r, c = v.square().sum(-1, keepdim=True), 0.4 * 8 * torch.tensor([math.exp(0.7), 1.0]).view(2, 1, 1)
    torch.testing.assert_close(seen[0], v * r / (r + c))
    start = TransformerLM(LMConfig(**SHAPE, value_scale=True), 0)
    assert start.blocks[0].attention.value_scale.tolist() == [0, 0]
    alphas = [measure(m, ids).alpha[:, :, 0] for m in (scaled.float(), plain)]
    torch.testing.assert_close(*alphas)


def test_the_gradient_by_position_is_that_of_autograd_over_the_summed_texts():
    model, ids = own_model(sink_token=True).double(), torch.randint(60, (3, 9))
    found = gradient_norms(model, ids)
    assert all(p.grad is None for p in model.parameters())
    read: list[Tensor] = []
    handle = model.blocks[1].attention.register_forward_hook(
        lambda module, args, out: read.append(args[0]) or args[0].retain_grad()
    )
    torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    handle.remove()
    expected = read[0].grad.sum(0)[1:].norm(dim=-1)  # without x*
    assert found[1] == pytest.approx(expected.tolist(), rel=1e-3)
    assert [len(row) for row in found] == [8, 8]
    assert gradient_norms(model, ids[:, :1]) == [], "one token predicts none"
    with torch.no_grad():
        model.embed.weight[ids[0, 0]] = torch.nan
    assert gradient_norms(model, ids) == []


def test_destinations_are_the_shares_of_the_dense_maps_by_kind_of_key():
    model, ids = own_model(attention=AttentionSpec(bias="k")), torch.randint(5, 60, (3, 12))
    ids[:, 4] = 2  # a line break
    dense = DenseMaps(model, ids)
    found = destinations(model, ids, torch.tensor([2]))
    rows = dense.maps[1][:, 0, 2:, :]  # of layer 2, head 1, queries 3..T; column 0 is k*
    at = torch.arange(2, 12)
    own, before = (rows[:, at - 2, at + 1 - back] for back in (0, 1))
    expected = {"star": rows[..., 0], "first": rows[..., 1], "self": own, "previous": before}
    for kind, at in expected.items():
        assert found[kind][1][0] == pytest.approx(float(at.mean()), abs=2e-4)
    later = range(6, 12)  # the line break at 5 is neither the query's own key nor the one before
    broken = sum(float(rows[:, i - 2, 5].mean()) for i in later) / rows.shape[1]
    assert found["line_break"][1][0] == pytest.approx(broken, abs=2e-4)
    assert sum(found[kind][1][0] for kind in found) == pytest.approx(1, abs=1e-3)
    assert destinations(model, ids[:, :2], torch.tensor([2])) == {}


def test_line_breaks_are_the_tokens_of_white_space_with_one_in_it():
    words = {text: number for number, text in enumerate(("\n", "\n\n  ", "a\n", " ", "a", " \n", ""))}
    assert line_breaks(Tokenizer(WordLevel(words, unk_token="a"))).tolist() == [0, 1, 5]


def test_dyt_is_the_tanh_of_a_scaled_input_and_scales_the_embeddings():
    model, ids = TransformerLM(LMConfig(**SHAPE, normalization="dyt"), 0), torch.randint(60, (2, 5))
    torch.testing.assert_close(DenseMaps(model, ids).first, 4 * model.embed(ids))  # sqrt(d)
    norm, x = model.blocks[1].norm_2, torch.randn(2, 5, 16)
    with torch.no_grad():
        norm.alpha.fill_(0.3)
        norm.weight.copy_(torch.linspace(0.5, 2, 16))
    torch.testing.assert_close(norm(x), torch.tanh(0.3 * x) * norm.weight)


@torch.no_grad()
def test_a_differential_layer_is_that_of_ye_et_al_from_its_weights():
    model, x = own_model(attention=AttentionSpec(differential=True)).double(), torch.randn(2, 6, 16).double()
    layer, tables = model.blocks[1].attention, rotary_tables(6, 4, torch.float64)  # each map's own, of half the size
    q, k, v = layer.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    first, second = (attend(*(rotate(y[..., n::2], *tables) for y in (q, k)), v[..., n::2])[1] for n in (0, 1))
    start = 0.8 - 0.6 * math.exp(-0.3)  # of the second layer
    q_1, k_1, q_2, k_2 = layer.mix
    heads = (first - ((q_1 @ k_1).exp() - (q_2 @ k_2).exp() + start) * second) @ v
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.head_norm.weight * (1 - start)
    got = layer(x, {"cos": model.cos[:6], "sin": model.sin[:6]})
    torch.testing.assert_close(got, heads.transpose(1, 2).flatten(2) @ layer.out.weight.T, atol=1e-5, rtol=1e-5)


def test_a_gated_norm_is_rmsnorm_times_a_gate_of_its_own_output():
    norm = TransformerLM(LMConfig(**SHAPE, normalization="gated"), 0).blocks[1].norm_2
    x = torch.randn(2, 5, 16)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    a = y @ norm.down.weight.T
    gate = 1 / (1 + torch.exp(-(a / (1 + torch.exp(-a))) @ norm.up.weight.T))
    torch.testing.assert_close(norm(x), y * gate)
    assert norm.down.weight.shape == (16, 16) and norm.up.weight.shape == (16, 16)
