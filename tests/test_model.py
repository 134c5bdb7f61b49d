"""The decoder: shapes, equations, refusals, initialisation, and agreement of its two attention paths."""

import dataclasses
import math

import pytest
import torch

from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.decoder import FFNS, LMConfig, TransformerLM, fixed_value
from sinkutils.model.fast import attend as attend_fast
from sinkutils.model.positions import POSITIONS, alibi_slopes, relative_buckets, rotary_tables, rotate
from sinkutils.study.experiments import EXPERIMENTS
from sinkutils.study.grid import config, unavailable

VARIANTS = {
    "default": {},
    **{f"position_{p}": {"position": p} for p in POSITIONS},
    **{f"ffn_{f}": {"ffn": f} for f in FFNS},
    "post_norm": {"norm": "post"},
    "add": {"head_merge": "add"},
    "sink_token": {"sink_token": True},
    "sink_token_learnable": {"sink_token": True, "position": "learnable"},
    **{f"bias_{b}": {"attention": AttentionSpec(bias=b)} for b in ("k", "kv", "v")},
    "shared_bias": {"attention": AttentionSpec(bias="kv", bias_shared=True)},
    "few_bias_dims": {"attention": AttentionSpec(bias="k", bias_dims=3)},
    "fixed_value": {"attention": AttentionSpec(bias="k", fixed_value="uniform", fixed_value_norm=5.0)},
    "sigmoid": {"attention": AttentionSpec(similarity="sigmoid", normalizer="none")},
    "mlp": {"attention": AttentionSpec(similarity="linear", kernel="mlp", normalizer="max_abs_sum")},
    "window": {"attention": AttentionSpec(window=5)},
    "prefix": {"attention": AttentionSpec(prefix=4)},
}


def small(**changes) -> TransformerLM:
    shape = {"vocab_size": 50, "context_length": 24, "num_layers": 2, "num_heads": 2, "hidden_size": 16,
             "intermediate_size": 24}  # fmt: skip
    return TransformerLM(LMConfig(**{**shape, **changes}), 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_logits_and_its_fast_path_equals_the_reference(name):
    model = small(**VARIANTS[name]).double()
    ids = torch.randint(0, 50, (3, 17), generator=torch.Generator().manual_seed(1))
    fast, dense = model(ids), model(ids, dense=True)
    assert fast.shape == (3, 17, 50)
    torch.testing.assert_close(fast, dense, rtol=0, atol=1e-10)
    gradients = []
    for logits in (fast, dense):
        model.zero_grad()
        logits.square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == {n for n, _ in model.named_parameters()}, "a parameter gets no gradient"
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][parameter], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "prefix"])
def test_no_position_sees_a_later_token(name):
    model = small(**VARIANTS[name])
    ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_prefix_is_seen_by_the_tokens_before_it_and_nothing_else_is():
    model = small(attention=AttentionSpec(prefix=4))
    ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(3))
    inside, outside = ids.clone(), ids.clone()
    inside[0, 3] = (inside[0, 3] + 1) % 50
    outside[0, 4] = (outside[0, 4] + 1) % 50
    assert not torch.allclose(model(ids)[:, 0], model(inside)[:, 0])
    torch.testing.assert_close(model(ids)[:, :4], model(outside)[:, :4])


def test_a_sink_token_adds_a_position_that_the_logits_do_not_show():
    model = small(sink_token=True)
    ids = torch.randint(0, 50, (2, 24))
    assert model(ids).shape == (2, 24, 50)
    with torch.no_grad():
        before = model(ids)
        model.sink += 1.0
    assert not torch.allclose(model(ids), before)


def test_initialisation_has_the_authors_variances():
    config = LMConfig(vocab_size=4000, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4)
    model = TransformerLM(config, 0)
    std = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert std["embed.weight"] == pytest.approx(math.sqrt(0.4 / 256), rel=0.02)
    assert std["blocks.0.attention.out.weight"] == pytest.approx(math.sqrt(0.4 / 256), rel=0.02)
    assert std["blocks.3.ffn.up.weight"] == pytest.approx(math.sqrt(0.4 / 256), rel=0.02)
    assert std["blocks.3.ffn.down.weight"] == pytest.approx(1 / math.sqrt(512) / 4, rel=0.02)
    assert model.norm.weight.eq(1).all()


@pytest.mark.parametrize("ffn", FFNS)
def test_the_output_of_swiglu_alone_starts_small_as_in_the_published_code(ffn):
    config = LMConfig(hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, ffn=ffn)
    std = TransformerLM(config, 0).blocks[2].ffn.down.weight.std().item()
    assert std == pytest.approx(1 / math.sqrt(512) / 4 if ffn == "swiglu" else math.sqrt(0.4 / 512), rel=0.02)


def test_learned_positions_start_like_the_embeddings():
    config = LMConfig(vocab_size=1000, context_length=1000, position="learnable", attention=AttentionSpec(bias="k"))
    model = TransformerLM(config, 0)
    assert model.position_embedding.std().item() == pytest.approx(math.sqrt(0.4 / 64), rel=0.02)
    assert model.blocks[0].attention.key_bias.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("position", ["alibi", "relative", "relative_learned"])
def test_distances_are_exact_under_bfloat16(position):
    model = small(context_length=400, position=position, num_heads=2)
    tables = dict(model.named_buffers(recurse=False))
    bias = model.blocks[0].attention.extras(tables, torch.bfloat16)["distance_bias"]
    if position == "alibi":
        expected = -alibi_slopes(2)[:, None] * torch.arange(400)
        assert len(expected[0].bfloat16().unique()) < 400 == len(bias[0].unique())
    elif position == "relative":
        expected = relative_buckets(400).float()[None]
    else:
        expected = model.blocks[0].attention.bucket_bias[:, relative_buckets(400)]
    assert torch.equal(bias, expected)


@pytest.mark.parametrize("length", [400, 600])
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(normalizer="p_norm", p=1.5)])
def test_neighbouring_distances_differ_in_bfloat16_attention(spec, length):
    q = torch.zeros(1, 2, length, 8, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[:, :, :2, 0] = torch.tensor([1.0, -1.0])  # the last query sees the difference of its two farthest keys
    distance_bias = torch.arange(length).float()[None]
    share = torch.exp(torch.tensor([0.0, -1.0])) / torch.exp(-spec.p * torch.arange(length)).sum() ** (1 / spec.p)
    with torch.autocast("cpu", torch.bfloat16):
        fast = attend_fast(q, q, v, spec, distance_bias=distance_bias)[0, 0, -1, 0]
    dense = attend(q, q, v, spec, distance_bias=distance_bias)[0][0, 0, -1, 0]
    assert float(fast) == pytest.approx(float(share[0] - share[1]), rel=1e-2)
    assert float(dense) == pytest.approx(float(share[0] - share[1]), rel=1e-2)


def test_one_seed_gives_the_same_shared_weights_whatever_the_attention():
    default, other = small(), small(attention=AttentionSpec(similarity="sigmoid", normalizer="none"))
    for (name, a), (_, b) in zip(default.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_paper_model_has_about_60_million_parameters_without_embeddings():
    config = LMConfig(vocab_size=50432, context_length=2048, num_layers=10, num_heads=8, hidden_size=768,
                      intermediate_size=1536)  # fmt: skip
    with torch.device("meta"):
        model = TransformerLM(config)
    count = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    assert count == pytest.approx(60e6, rel=0.02)


def test_the_observer_sees_every_layer_and_does_not_change_the_logits():
    class Collect:
        def __init__(self):
            self.seen = []

        def embedding(self, hidden):
            self.seen.append(("embedding", tuple(hidden.shape)))

        def attention(self, layer, q, k, v, spec, extras):
            self.seen.append(("attention", layer, tuple(q.shape)))

        def block(self, layer, hidden, before_norm):
            self.seen.append(("block", layer, before_norm is hidden))

    model, observer = small(norm="post"), Collect()
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(ids, observer), model(ids))
    assert observer.seen == [
        ("embedding", (2, 9, 16)),
        ("attention", 0, (2, 2, 9, 8)),
        ("block", 0, False),
        ("attention", 1, (2, 2, 9, 8)),
        ("block", 1, False),
    ]


def test_rotary_products_depend_on_the_distance_only():
    cos, sin = rotary_tables(40, 8)
    q, k = torch.randn(2, 8).double()
    cos, sin = cos.double(), sin.double()

    def product(i, j):
        return rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j])

    torch.testing.assert_close(product(5, 2), product(35, 32), rtol=1e-6, atol=1e-6)
    assert not torch.isclose(product(5, 2), product(6, 2))


def test_alibi_slopes_are_the_papers_examples():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16)[:3], torch.tensor([2**-0.5, 2**-1.0, 2**-1.5]))


def test_relative_buckets_grow_with_distance_as_t5s_do_and_equation_6_prints_one_step():
    exact = torch.arange(16, 128)
    printed = 16 + 16 * torch.floor(torch.log(exact / 16) / math.log(128 / 16))  # Eq. 6, floor before the factor
    assert printed.eq(16).all() and relative_buckets(128)[16:].unique().tolist() == list(range(16, 32))
    buckets = relative_buckets(400)
    assert buckets[:16].tolist() == list(range(16))
    assert (buckets.diff() >= 0).all()
    assert buckets[128:].eq(31).all()
    assert buckets[16:128].max() == 31 and buckets[16] == 16


def test_fixed_values_have_the_norm_m():
    for kind in ("first", "uniform"):
        value = fixed_value(AttentionSpec(bias="k", fixed_value=kind, fixed_value_norm=5.0), 16)
        assert value.norm().item() == pytest.approx(5.0, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"context_length": 2.5}, "context_length must be a positive integer"),
        ({"position": "sinusoid"}, "position must be one of"),
        ({"ffn": "mish"}, "ffn must be one of"),
        ({"norm": "both"}, "norm must be one of"),
        ({"attention": AttentionSpec(prefix=25)}, "prefix must be at most"),
        ({"attention": AttentionSpec(bias="k", bias_dims=9)}, "bias_dims"),
        ({"attention": AttentionSpec(prefix=2), "position": "alibi"}, "no bias for keys after the query"),
        ({"num_heads": 16}, "even head dimension"),
    ],
)
def test_shapes_that_make_no_sense_are_refused_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"shape \(B, T\)"),
        (torch.zeros(1, 3), "int64 or int32"),
        (torch.full((1, 3), 50), r"0\.\.49"),
        (torch.full((1, 3), -1), r"0\.\.49"),
        (torch.zeros(1, 25, dtype=torch.long), "1 to 24 positions"),
        (torch.zeros(1, 0, dtype=torch.long), "1 to 24 positions"),
        ([[1, 2]], "must be a tensor"),
    ],
)
def test_ids_that_do_not_fit_are_refused_with_the_allowed_values(ids, message):
    with pytest.raises(ValueError, match=message):
        small()(ids)


def test_configs_are_values():
    assert LMConfig() == LMConfig() and hash(LMConfig()) == hash(LMConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        LMConfig().num_heads = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", [e.name for e in EXPERIMENTS if "smoke" in e.presets])
def test_an_experiment_and_the_base_start_from_the_same_values_where_they_share_a_parameter(name):
    if name in unavailable("smoke"):
        pytest.skip(unavailable("smoke")[name])
    base, variant = (dict(TransformerLM(config(n, "smoke").model, seed=3).named_parameters()) for n in ("base", name))
    shared = [key for key in base if key in variant and base[key].shape == variant[key].shape]
    assert shared
    for key in shared:
        if key.endswith("ffn.down.weight"):  # Table 11: its scale depends on the kind of FFN
            torch.testing.assert_close(variant[key] / variant[key].std(), base[key] / base[key].std())
        else:
            assert torch.equal(variant[key], base[key]), key


def test_starts_differ_between_seeds_names_and_shapes():
    first, again, other = (dict(TransformerLM(LMConfig(), seed=seed).named_parameters()) for seed in (0, 0, 1))
    for key, value in first.items():
        assert torch.equal(value, again[key])
        assert value.ndim == 1 or not torch.equal(value, other[key])
    blocks = [first[f"blocks.{layer}.attention.qkv.weight"] for layer in range(2)]
    assert not torch.equal(*blocks)
