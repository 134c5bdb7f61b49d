"""The decoder: shapes, equations, refusals, initialisation, and agreement of its two attention paths."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    SHAPE,
    DenseMaps,
    architectures,
    by_the_reference,
    own_model,
    refused,
    refuses,
    tokens,
)
from torch import Tensor
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from sinkutils import AttentionSpec, attend, measure
from sinkutils.model.attention import (
    absolute_embedding,
    alibi_slopes,
    relative_buckets,
    rotary_tables,
    rotate,
)
from sinkutils.model.decoder import FFNS, LMConfig, TransformerLM, fixed_value
from sinkutils.study.grid import by_name, config, unavailable

ARCHITECTURES = architectures()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_variant_is_causal_and_its_fast_path_equals_the_reference(name):
    model, ids = own_model(1.0, **ARCHITECTURES[name]).double(), tokens(3, 32)
    fast, dense = model(ids), by_the_reference(model, ids)
    assert fast.shape == (3, 32, 60)  # as many positions as the context, x* beside them
    assert_close(fast, dense, rtol=0, atol=1e-10)
    seen = DenseMaps(model, ids)
    assert torch.equal(model(ids, seen), fast) and len(seen.maps) == 4  # of two layers, seen twice
    names, parameters = zip(*model.named_parameters(), strict=True)
    # raises where one has none
    gradients = [torch.autograd.grad(x.square().mean(), parameters) for x in (fast, dense)]
    for parameter, got, expected in zip(names, *gradients, strict=True):
        assert_close(
            got, expected, rtol=0, atol=1e-10, msg=lambda text, p=parameter: f"{p}: {text}"
        )
    later = ids.clone()
    later[:, 12] = (ids[:, 12] + 1) % 60
    assert_close(model(later)[:, :12], fast[:, :12])
    assert not torch.allclose(model(later)[:, 12], fast[:, 12])
    if name == "prefix_4":  # seen by the tokens before it
        later[:, 3] = (ids[:, 3] + 1) % 60
        assert not torch.allclose(model(later)[:, 0], fast[:, 0])


def test_initialisation_has_the_authors_variances():
    spec = AttentionSpec(bias="k")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "num_heads": 4}
    model = TransformerLM(LMConfig(4000, 1000, **shape, position="learnable", attention=spec), 0)
    std = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    blocks = ("blocks.0.attention.out.weight", "blocks.3.ffn.up.weight")
    for name in ("embed.weight", "position_embedding", *blocks):
        assert std[name] == pytest.approx(math.sqrt(0.4 / 256), rel=0.02)
    assert model.norm.weight.eq(1).all()
    biases = [block.attention.key_bias.flatten() for block in model.blocks]
    assert torch.cat(biases).std().item() == pytest.approx(0.02, rel=0.1)
    differential = LMConfig(**shape, sink_token=True, attention=AttentionSpec(differential=True))
    later = TransformerLM(differential, 0)
    assert later.sink.std().item() == pytest.approx(0.02, rel=0.15)
    mixes = [block.attention.mix.flatten() for block in later.blocks]
    assert torch.cat(mixes).std().item() == pytest.approx(0.1, rel=0.15)
    for ffn in FFNS:  # the output of SwiGLU alone starts small, as in the published code
        down = TransformerLM(LMConfig(**shape, ffn=ffn), 0).blocks[2].ffn.down.weight.std().item()
        expected = 1 / math.sqrt(512) / 4 if ffn == "swiglu" else math.sqrt(0.4 / 512)
        assert down == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("position", ["alibi", "relative", "relative_learned"])
def test_distances_are_exact_under_bfloat16(position):
    model = own_model(context_length=400, position=position)
    attention = model.blocks[0].attention
    bias = attention.extras(model.tables, torch.bfloat16)["distance_bias"]
    if position == "alibi":
        expected = -alibi_slopes(2)[:, None] * torch.arange(400)
        assert len(expected[0].bfloat16().unique()) < 400 == len(bias[0].unique())
    elif position == "relative":
        expected = relative_buckets(400).float()[None]
    else:
        expected = attention.bucket_bias[:, relative_buckets(400)]
    assert torch.equal(bias, expected)


@pytest.mark.parametrize("position", ["rotary", "absolute", "alibi", "relative"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_its_position_tables(position, dtype):
    model, ids = own_model(1.0, context_length=400, position=position), tokens(2, 400)
    exact = {name: table.clone() for name, table in model.tables.items()}
    half = model.to(dtype=dtype)
    assert {p.dtype for p in half.parameters()} == {half(ids).dtype} == {dtype}
    for name, table in half.tables.items():
        assert torch.equal(table, exact[name]) and table.dtype == exact[name].dtype


@pytest.mark.parametrize("name", [e.name for e in by_name().values() if "smoke" in e.presets])
def test_an_experiment_and_the_base_start_from_the_same_values_where_they_share_a_parameter(name):
    """Of one seed: of another they start from others, and so do two layers."""
    if name in unavailable("smoke"):
        pytest.skip("not at this scale")
    models = [TransformerLM(config(n, "smoke").model, seed=3) for n in ("base", name)]
    base, variant = (dict(model.named_parameters()) for model in models)
    other = dict(TransformerLM(config("base", "smoke").model, seed=4).named_parameters())
    out = "blocks.{}.attention.out.weight"
    starts = [base[out.format(0)], other[out.format(0)], base[out.format(1)]]
    assert not torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    shared = [key for key in base if key in variant and base[key].shape == variant[key].shape]
    assert shared
    for key in shared:
        if key.endswith("ffn.down.weight"):  # Table 11: its scale depends on the kind of FFN
            assert_close(variant[key] / variant[key].std(), base[key] / base[key].std())
        else:
            assert torch.equal(variant[key], base[key]), key


def test_a_gate_multiplies_the_output_of_a_head_and_changes_no_attention():
    gated, plain, ids = own_model(gate="head"), own_model(), tokens(2, 21)
    block, other = gated.blocks[0].attention, plain.blocks[0].attention
    x = torch.randn(2, 21, 16)
    with torch.no_grad():
        block.gate.weight.zero_()
        assert_close(2 * block(x, {}), other(x, {}))  # sigmoid(0) is a half
        block.gate.weight[0] = 1e4 * x[0, 0]
        for attention in (block, other):
            attention.out.weight.copy_(torch.eye(16))
        assert_close(block(x, {})[0, 0, :8], other(x, {})[0, 0, :8])
        assert_close(2 * block(x, {})[0, 0, 8:], other(x, {})[0, 0, 8:])
    assert_close(measure(gated, ids).alpha[:, :, 0], measure(plain, ids).alpha[:, :, 0])


def test_an_open_gate_lets_at_least_a_half_of_each_element_through():
    gated, plain = own_model(gate="open"), own_model()
    block, other = gated.blocks[0].attention, plain.blocks[0].attention
    x = torch.randn(1, 21, 16)
    with torch.no_grad():
        for attention in (block, other):
            attention.out.weight.copy_(torch.eye(16))
        block.gate.weight.zero_()
        block.gate.weight[:8] = 1e4 * x[0, 0]
        block.gate.weight[8:] = -1e4 * x[0, 0]
        assert_close(block(x, {})[0, 0, :8], other(x, {})[0, 0, :8])
        assert_close(2 * block(x, {})[0, 0, 8:], other(x, {})[0, 0, 8:])


def test_a_shared_gate_multiplies_the_elements_of_all_heads_alike():
    gated, plain = own_model(gate="shared"), own_model()
    block, other = gated.blocks[0].attention, plain.blocks[0].attention
    heads, head_dim = gated.config.num_heads, gated.config.head_dim
    assert block.gate.weight.shape == (head_dim, 16)
    x = torch.randn(1, 21, 16)
    with torch.no_grad():
        for attention in (block, other):
            attention.out.weight.copy_(torch.eye(16))
        expected = other(x, {}) * block.gate(x).sigmoid().tile(heads)
        assert_close(block(x, {}), expected)


def test_a_constant_gate_multiplies_each_element_of_a_heads_output_alike_for_every_token():
    gated, plain, ids = own_model(gate="constant"), own_model(), tokens(2, 21)
    block, other = gated.blocks[0].attention, plain.blocks[0].attention
    x = torch.randn(2, 21, 16)
    with torch.no_grad():
        block.gate_logit.copy_(torch.tensor([[0.0] * 8, [1e4] * 4 + [-1e4] * 4]))
        for attention in (block, other):
            attention.out.weight.copy_(torch.eye(16))
        assert_close(block(x, {})[..., :8], other(x, {})[..., :8] / 2)
        assert_close(block(x, {})[..., 8:12], other(x, {})[..., 8:12])
        assert not block(x, {})[..., 12:].any()
    assert_close(measure(gated, ids).alpha[:, :, 0], measure(plain, ids).alpha[:, :, 0])


def test_a_gate_on_the_values_multiplies_each_value_before_any_query_reads_it():
    block = own_model(gate="value").blocks[0].attention
    x = torch.randn(1, 21, 16)
    with torch.no_grad():
        block.out.weight.copy_(torch.eye(16))
        q, k, v = block.qkv(x).chunk(3, dim=-1)  # (1, 21, 16) each, two heads of 8
        v = v * block.gate(x).sigmoid()
        for head in (slice(0, 8), slice(8, 16)):
            logits = q[0, :, head] @ k[0, :, head].T / 8**0.5
            weights = logits.masked_fill(torch.ones(21, 21).triu(1).bool(), -torch.inf).softmax(-1)
            assert_close(block(x, {})[0, :, head], weights @ v[0, :, head])


def test_ffns_are_those_of_table_11():
    phi = {
        "re": torch.relu,
        "ge": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
        "sw": lambda x: x * torch.sigmoid(x),
    }
    for name in FFNS:
        ffn, x = own_model(ffn=name).blocks[0].ffn, torch.randn(5, 16)
        gate, *up = (x @ ffn.up.weight.T).split(24, dim=-1)
        assert len(up) == name.endswith("glu")
        assert_close(ffn(x), (phi[name[:2]](gate) * (up[0] if up else 1)) @ ffn.down.weight.T)


def test_the_learned_kernel_is_two_maps_with_a_relu_between():
    spec = AttentionSpec(similarity="linear", kernel="mlp", normalizer="none")
    mlp, x = own_model(attention=spec).blocks[0].attention.mlp, torch.randn(5, 8)
    first, second = mlp.parameters()
    assert_close(mlp(x), (x @ first.T).clamp(min=0) @ second.T)


def test_added_heads_are_joined_ones_with_one_output_map_for_all():
    added, joined = (own_model(head_merge=merge).blocks[0].attention for merge in ("add", "concat"))
    x = torch.randn(2, 5, 16)
    joined.load_state_dict(added.state_dict() | {"out.weight": added.out.weight.repeat(1, 2)})
    assert_close(added(x, {}), joined(x, {}))


def test_queries_and_keys_are_normed_before_they_are_turned():
    model, seen = own_model(qk_norm=True), []
    layer = model.blocks[0].attention
    with torch.no_grad():
        for norm in (layer.query_norm, layer.key_norm):
            norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x, tables = torch.randn(1, 6, 16), {name: table[:6] for name, table in model.tables.items()}
    observer = SimpleNamespace(attention=lambda layer, q, k, *_: seen.extend((q, k)))
    layer(x, tables, observer=observer)
    parts = layer.qkv(x).view(1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    for part, got in zip(parts, seen, strict=False):
        rms = (part.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        normed = part / rms * layer.query_norm.weight
        assert_close(got, rotate(normed, *tables.values()))


def by_plain_matrices(model: TransformerLM, ids: Tensor, norm: str) -> Tensor:
    """Logits from the model's matrices alone: Eq. 2 (pre), Eq. 3 (post), or norms on both sides of a sublayer."""

    def ln(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def attention(x: Tensor, name: str) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        heads = []
        for head in range(2):
            rows = slice(8 * head, 8 * head + 8)
            q, k, v = (x @ part[rows].T for part in w[f"{name}.qkv.weight"].split(16))
            logits = (q @ k.mT / 8**0.5).masked_fill(hidden, -math.inf)
            heads.append(logits.softmax(-1) @ v)
        return torch.cat(heads, dim=-1) @ w[f"{name}.out.weight"].T

    def ffn(x: Tensor, name: str) -> Tensor:
        gate, up = (x @ part.T for part in w[f"{name}.up.weight"].split(24))
        return (gate * torch.sigmoid(gate) * up) @ w[f"{name}.down.weight"].T

    w = dict(model.named_parameters())
    h = w["embed.weight"][ids]
    for layer in range(2):
        name = f"blocks.{layer}"
        first, second = w[f"{name}.norm_1.weight"], w[f"{name}.norm_2.weight"]
        if norm == "pre":
            middle = attention(ln(h, first), f"{name}.attention") + h
            h = ffn(ln(middle, second), f"{name}.ffn") + middle
        elif norm == "post":
            middle = ln(attention(h, f"{name}.attention") + h, first)
            h = ln(ffn(middle, f"{name}.ffn") + middle, second)
        else:
            added = attention(ln(h, first), f"{name}.attention")
            middle = ln(added, w[f"{name}.after_1.weight"]) + h
            added = ffn(ln(middle, second), f"{name}.ffn")
            h = ln(added, w[f"{name}.after_2.weight"]) + middle
    return ln(h, w["norm.weight"]) @ w["unembed.weight"].T


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
def test_a_block_is_its_equation_in_plain_matrices(norm):
    model, ids = own_model(1.0, norm=norm, position="nope").double(), tokens(2, 9)
    with torch.no_grad():
        for index, parameter in enumerate(p for p in model.parameters() if p.ndim == 1):
            gains = torch.linspace(0.5, 2, 16, dtype=torch.float64)
            parameter.copy_(gains.roll(index))  # no two norms have the same
    assert_close(model(ids), by_plain_matrices(model, ids, norm), rtol=0, atol=1e-10)


@pytest.mark.parametrize("bias", ["k", "kv", "v"])
def test_a_shared_bias_is_one_for_all_heads_of_a_block(bias):
    """Table 12 right: the rows of a bias are its heads', or there is one row."""
    for shared, rows in ((True, 1), (False, 2)):
        model = own_model(attention=AttentionSpec(bias=bias, bias_shared=shared))
        layers = [block.attention for block in model.blocks]
        for name in [n for n in ("key_bias", "value_bias") if hasattr(layers[0], n)]:
            assert getattr(layers[0], name).shape == (rows, 8)
            by_head = layers[0].extras({}, torch.float32)[name]
            assert torch.equal(by_head[0], by_head[1]) == shared
            assert not torch.equal(getattr(layers[0], name), getattr(layers[1], name))


def test_positions_turn_and_are_embedded_at_the_papers_frequencies():
    cos, sin = rotary_tables(40, 8)
    turned = 7 / 10_000 ** (2 * 3 / 8)  # position 7 from 0, pair 3 from 0
    expected = pytest.approx((math.cos(turned), math.sin(turned)))
    assert (float(cos[7, 3]), float(sin[7, 3])) == expected
    turn = rotate(torch.eye(8)[3], cos[7], sin[7])  # pairs are (i, i + 4)
    assert (float(turn[3]), float(turn[7])) == pytest.approx((math.cos(turned), math.sin(turned)))
    assert absolute_embedding(9, 6).shape == (9, 6)
    angle = 5 / 10_000 ** (2 / 6)  # of p_5, the first position being p_1
    expected = pytest.approx([math.sin(angle), math.cos(angle)])
    assert absolute_embedding(9, 6)[4, 2:4].tolist() == expected


def test_alibi_slopes_are_the_papers_and_fixed_values_have_the_norm_m():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert_close(alibi_slopes(16)[:3], torch.tensor([2**-0.5, 2**-1.0, 2**-1.5]))
    for kind in ("first", "uniform"):
        value = fixed_value(AttentionSpec(bias="k", fixed_value=kind, fixed_value_norm=5.0), 16)
        assert value.norm().item() == pytest.approx(5.0, rel=1e-5)
        assert value.tolist() == ([5.0] + [0.0] * 15 if kind == "first" else [1.25] * 16)


def test_relative_buckets_grow_with_distance_as_t5s_do():
    buckets = relative_buckets(400)
    buckets_of = T5Attention._relative_position_bucket
    of_t5 = buckets_of(-torch.arange(400), False, num_buckets=32, max_distance=128)
    assert torch.equal(buckets, of_t5)
    assert buckets[:17].tolist() == list(range(17))
    assert (buckets.diff() >= 0).all()
    assert buckets[128:].eq(31).all()


def test_shapes_that_make_no_sense_are_refused_with_the_reason():
    refuses("num_heads must divide", own_model, num_heads=3)
    for spec in (AttentionSpec(window=4), AttentionSpec(prefix=4)):
        refuses("sink_token cannot be combined", own_model, sink_token=True, attention=spec)
    refuses("context_length must be an integer, got 2.5", own_model, context_length=2.5)
    refuses("num_heads must be an integer, got None", own_model, num_heads=None)
    refuses(
        "gate must be one of none, head, element, shared, open, constant, value",
        own_model,
        gate="both",
    )
    refuses("sink_token must be of type bool", own_model, sink_token="yes")
    refuses("attention must be of type AttentionSpec", own_model, attention="softmax")
    refuses("prefix must be at most", own_model, attention=AttentionSpec(prefix=33))
    refuses("bias_dims", own_model, attention=AttentionSpec(bias="k", bias_dims=9))
    with refused("no bias for keys after the query"):
        own_model(attention=AttentionSpec(prefix=2), position="alibi")
    refuses("head dimension must be a multiple of 2", own_model, num_heads=16)
    with refused("must be a multiple of 4 with"):
        own_model(num_heads=8, attention=AttentionSpec(differential=True))


def test_ids_that_do_not_fit_are_refused_with_the_allowed_values():
    model = own_model()
    refuses(r"shape \(B, T\), int64 or int32", model, torch.zeros(3, dtype=torch.long))
    refuses("int64 or int32", model, torch.zeros(1, 3))
    refuses(r"0\.\.59", model, torch.full((1, 3), -1))
    refuses("1 to 32 positions", model, torch.zeros(1, 33, dtype=torch.long))
    refuses("must be a tensor", model, [[1, 2]])


def test_v_scale_shrinks_small_values_and_changes_no_attention():
    scaled, plain, ids = own_model(value_scale=True), own_model(), torch.randint(60, (2, 21))
    block = scaled.blocks[0].attention
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        block.double().value_scale[0] = 0.7
    v = block.qkv(x).chunk(3, dim=-1)[2].detach().view(1, 5, 2, 8).transpose(1, 2)
    seen: list[Tensor] = []
    observer = SimpleNamespace(attention=lambda layer, q, k, v, *_: seen.append(v))
    block(x, {}, observer=observer)
    r = v.square().sum(-1, keepdim=True)
    c = 0.4 * 8 * torch.tensor([math.exp(0.7), 1.0]).view(2, 1, 1)
    assert_close(seen[0], v * r / (r + c))
    start = TransformerLM(LMConfig(**SHAPE, value_scale=True), 0)
    assert start.blocks[0].attention.value_scale.tolist() == [0, 0]
    alphas = [measure(m, ids).alpha[:, :, 0] for m in (scaled.float(), plain)]
    assert_close(*alphas)


def test_dyt_is_the_tanh_of_a_scaled_input_and_scales_the_embeddings():
    model, ids = TransformerLM(LMConfig(**SHAPE, normalization="dyt"), 0), torch.randint(60, (2, 5))
    assert_close(DenseMaps(model, ids).first, 4 * model.embed(ids))  # sqrt(d)
    norm, x = model.blocks[1].norm_2, torch.randn(2, 5, 16)
    with torch.no_grad():
        norm.alpha.fill_(0.3)
        norm.weight.copy_(torch.linspace(0.5, 2, 16))
    assert_close(norm(x), torch.tanh(0.3 * x) * norm.weight)


@torch.no_grad()
def test_a_differential_layer_is_that_of_ye_et_al_from_its_weights():
    model = own_model(attention=AttentionSpec(differential=True)).double()
    x = torch.randn(2, 6, 16).double()
    # each map's own, of half the size
    layer, tables = (model.blocks[1].attention, rotary_tables(6, 4))
    q, k, v = layer.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    maps = []
    for n in (0, 1):
        halves = (rotate(x[..., n::2], *tables) for x in (q, k))
        maps.append(attend(*halves, v[..., n::2])[1])
    first, second = maps
    start = 0.8 - 0.6 * math.exp(-0.3)  # of the second layer
    q_1, k_1, q_2, k_2 = layer.mix
    heads = (first - ((q_1 @ k_1).exp() - (q_2 @ k_2).exp() + start) * second) @ v
    rms = (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    heads = heads / rms * layer.head_norm.weight * (1 - start)
    got = layer(x, {name: table[:6] for name, table in model.tables.items()})
    assert_close(got, heads.transpose(1, 2).flatten(2) @ layer.out.weight.T, atol=1e-5, rtol=1e-5)


def test_a_gated_norm_is_rmsnorm_times_a_gate_of_its_own_output():
    norm = TransformerLM(LMConfig(**SHAPE, normalization="gated"), 0).blocks[1].norm_2
    x = torch.randn(2, 5, 16)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    a = y @ norm.down.weight.T
    gate = 1 / (1 + torch.exp(-(a / (1 + torch.exp(-a))) @ norm.up.weight.T))
    assert_close(norm(x), y * gate)
    assert norm.down.weight.shape == (16, 16) and norm.up.weight.shape == (16, 16)
