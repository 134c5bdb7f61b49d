"""The metric of Section 3.2 and our own model's way to it, against the dense reference."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkutils.measuring import tally
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import NotFinite, Report, uniform_alpha
from sinkutils.model import fast
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.decoder import LMConfig, TransformerLM

T, TARGETS = 20, (1, 2, 5)
SMALL = {"vocab_size": 60, "context_length": 24, "num_layers": 2, "num_heads": 2, "hidden_size": 16,
         "intermediate_size": 24}  # fmt: skip
VARIANTS = {
    "softmax": {},
    "scaled": {"attention": AttentionSpec(scale=0.1)},
    "window": {"attention": AttentionSpec(window=4)},
    "prefix": {"attention": AttentionSpec(prefix=3)},
    "k-bias": {"attention": AttentionSpec(bias="k")},
    "kv-bias-shared": {"attention": AttentionSpec(bias="kv", bias_shared=True)},
    "v-bias": {"attention": AttentionSpec(bias="v")},
    "sink-token": {"sink_token": True},
    "sink-token-learnable": {"sink_token": True, "position": "learnable"},
    "alibi": {"position": "alibi"},
    "relative": {"position": "relative"},
    "t5-k-bias": {"position": "relative_learned", "attention": AttentionSpec(bias="k")},
    "post-norm": {"norm": "post"},
    "sigmoid": {"attention": AttentionSpec(similarity="sigmoid")},
    "sigmoid-none-k-bias": {"attention": AttentionSpec(similarity="sigmoid", normalizer="none", bias="k")},
    "elu": {"attention": AttentionSpec(similarity="elu", normalizer="none")},
    "p-norm": {"attention": AttentionSpec(normalizer="p_norm", p=0.5)},
    "identity-kernel": {"attention": AttentionSpec(similarity="linear", normalizer="none")},
    "elu-kernel": {"attention": AttentionSpec(similarity="linear", kernel="elu")},
    "mlp-kernel": {"attention": AttentionSpec(similarity="linear", kernel="mlp", normalizer="max_abs_sum")},
}


def build(variant: str) -> TransformerLM:
    model = TransformerLM(LMConfig(**{**SMALL, **VARIANTS[variant]}), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Attention far from uniform; but the reference's elu(s) + 1 rounds to 0 at s = -17, log space does not.
            parameter.mul_(1.5 if variant == "elu" else 2.5)
    return model


def tokens(samples: int = 3, length: int = T) -> Tensor:
    return torch.randint(0, 60, (samples, length), generator=torch.Generator().manual_seed(1))


class DenseMaps:
    """An observer that keeps whole maps: |f(s)| over its row sum, from the reference's own pieces."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.before: list[Tensor] = []
        self.first: Tensor | None = None

    def embedding(self, hidden: Tensor) -> None:
        self.first = hidden

    def attention(self, layer, q, k, v, spec, extras) -> None:
        if spec.similarity == "exp":
            plain = AttentionSpec(bias=spec.bias, window=spec.window, prefix=spec.prefix, bias_shared=spec.bias_shared)
            self.maps.append(attend(q, k, v, plain, **extras)[1])
            return
        # The reference's un-normalised weights of this operation are f(s) itself.
        raw = AttentionSpec(similarity=spec.similarity, kernel=spec.kernel, normalizer="none", bias=spec.bias)
        weights = attend(q, k, v, raw, **extras)[1].abs()
        total = weights.sum(dim=-1, keepdim=True)
        self.maps.append((weights / total).masked_fill(total == 0, 0))  # an mlp's ReLU can give rows of zeros

    def block(self, layer, hidden, before_norm) -> None:
        self.hidden.append(hidden)
        self.before.append(before_norm)


def by_definition(maps: list[Tensor], star: int) -> Tensor:
    """alpha, (B, K, L, H), from maps (B, H, T, T) without a star's row and column."""
    own = [m[:, :, m.shape[2] - T :, star:] for m in maps]
    return torch.stack([torch.stack([m[:, :, k - 1 :, k - 1].mean(-1) for m in own], 1) for k in TARGETS], 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_alpha_and_star_are_those_of_the_dense_maps(variant: str) -> None:
    model, ids, dense = build(variant), tokens(), DenseMaps()
    with torch.no_grad():
        model(ids, dense)
    star = model.config.attention.has_key_bias or model.config.sink_token
    report = measure(model, ids, TARGETS, batch_size=2)
    expected = by_definition(dense.maps, int(star))
    assert report.alpha.shape == expected.shape == (3, 3, 2, 2)
    torch.testing.assert_close(report.alpha, expected, atol=2e-5, rtol=1e-4)
    assert (report.star is not None) == star
    if star:
        share = torch.stack([m[:, :, m.shape[2] - T :, 0].mean(-1) for m in dense.maps], 1)
        torch.testing.assert_close(report.star, share, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", ["softmax", "sink-token", "k-bias", "post-norm"])
def test_norms_count_positions_from_the_first_real_token(variant: str) -> None:
    model, ids, dense = build(variant), tokens(), DenseMaps()
    with torch.no_grad():
        model(ids, dense)
    report = measure(model, ids, TARGETS, batch_size=2)
    first = int(model.config.sink_token)
    expected = torch.stack([h[:, first:].norm(dim=-1).mean(dim=0) for h in dense.hidden])
    torch.testing.assert_close(report.hidden_norms, expected)
    torch.testing.assert_close(report.embedding_norms, dense.first[:, first:].norm(dim=-1).mean(dim=0))
    assert report.key_norms.shape == report.value_norms.shape == report.query_norms.shape == (2, T)
    if variant == "post-norm":
        before = torch.stack([h.norm(dim=-1).mean(dim=0) for h in dense.before])
        torch.testing.assert_close(report.before_norm_norms, before)
    else:
        assert report.before_norm_norms is None


@pytest.mark.parametrize("variant", ["softmax", "k-bias", "sink-token", "window", "sigmoid"])
def test_mass_and_maps_of_our_model_are_the_dense_ones(variant: str) -> None:
    model, ids, dense = build(variant), tokens(), DenseMaps()
    with torch.no_grad():
        model(ids, dense)
    report = measure(model, ids, TARGETS, mass=True, heads=((1, 0),), batch_size=2)
    own = dense.maps[1][:, :, -T:, -T:]
    torch.testing.assert_close(report.mass[:, 1], own.sum(dim=2) / torch.arange(T, 0, -1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(report.kept[1, 0].map, own[:, 0], atol=1e-5, rtol=1e-4)
    assert report.kept[1, 0].cosine.abs().max() <= 1 + 1e-5
    assert report.mass.shape == (3, 2, 2, T)


def test_repeated_heads_are_kept_once_and_those_that_are_not_there_are_named() -> None:
    model, ids, dense = build("softmax"), tokens(), DenseMaps()
    with torch.no_grad():
        model(ids, dense)
    report = measure(model, ids, heads=((1, 0), (0, 1), (1, 0)), batch_size=2)
    for layer, head in ((1, 0), (0, 1)):
        torch.testing.assert_close(report.kept[layer, head].map, dense.maps[layer][:, head], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"\(0, 99\).*2 layers of 2 heads"):
        measure(model, ids, heads=((0, 99), (0, 1)))


@pytest.mark.parametrize("variant", ["sink-token", "relative", "mlp-kernel"])
def test_the_row_sums_of_a_layer_are_computed_once_however_many_keys_are_asked_for(variant, monkeypatch) -> None:
    calls, log_mass = [], fast.log_mass
    monkeypatch.setattr(fast, "log_mass", lambda *args, **kw: calls.append(1) or log_mass(*args, **kw))
    monkeypatch.setattr(tally, "COLUMNS", 4)
    model = build(variant)
    report = measure(model, tokens(), TARGETS, mass=True, heads=((0, 1),))
    assert len(calls) == model.config.num_layers
    torch.testing.assert_close(report.mass[..., [k - 1 for k in TARGETS]], report.alpha.permute(0, 2, 3, 1))


@pytest.mark.parametrize("variant", ["softmax", "window", "sigmoid", "k-bias", "mlp-kernel"])
def test_float64_models_have_float32_reports(variant: str) -> None:
    model, ids = build(variant), tokens()
    single = measure(model, ids, TARGETS)
    double = measure(model.double(), ids, TARGETS)
    assert double.alpha.dtype == double.hidden_norms.dtype == torch.float32
    torch.testing.assert_close(double.alpha, single.alpha, atol=2e-5, rtol=1e-4)


def test_our_models_refuse_what_they_have_no_numbers_for() -> None:
    model = build("softmax")
    with pytest.raises(ValueError, match=r"ids must be in 0..59, .* got 60..60"):
        measure(model, torch.full((1, 4), 60))
    with pytest.raises(ValueError, match="meta device"):
        measure(TransformerLM(LMConfig(**SMALL)).to("meta"), tokens())


def test_the_batch_size_changes_nothing() -> None:
    model, ids = build("softmax"), tokens(7)
    one, all_at_once = measure(model, ids, batch_size=1), measure(model, ids)
    torch.testing.assert_close(one.alpha, all_at_once.alpha)
    torch.testing.assert_close(one.hidden_norms, all_at_once.hidden_norms)


def test_half_precision_and_autocast_stay_close() -> None:
    for variant in ("softmax", "mlp-kernel", "k-bias"):
        model, ids = build(variant), tokens()
        exact = measure(model, ids).alpha
        with torch.autocast("cpu", torch.bfloat16):
            assert (measure(model, ids).alpha - exact).abs().max() < 0.05
        assert (measure(model.bfloat16(), ids).alpha - exact).abs().max() < 0.05


def report_of(alpha: list) -> Report:
    """A report whose alpha is given, (samples, layers, heads), for target 1 and T = 64."""
    values = torch.tensor(alpha)[:, None]
    return Report(values, (1,), (0.3,), torch.full((len(values),), 64), tuple(range(values.shape[2])))


def test_sink_thresholds_each_sequence_and_then_averages() -> None:
    # The mean of alpha over sequences is 0.31 in the first head and 0.25 in the second: 50 % would come out
    # if the mean were thresholded.
    report = report_of([[[0.6, 0.5]], [[0.01, 0.0]], [[0.32, 0.25]]])
    assert report.sink(1, 0.3) == pytest.approx(50.0)
    report = report_of([[[0.9]], [[0.1]], [[0.1]]])
    assert report.sink(1, 0.3) == pytest.approx(100 / 3)


def test_the_threshold_is_strict() -> None:
    assert report_of([[[0.25]]]).sink(1, 0.25) == 0


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_curve_falls_with_eps_and_the_interval_holds_the_estimate(values: list[float]) -> None:
    report = report_of([[[value]] for value in values])
    curve = report.curve()
    assert (np.diff(curve) <= 1e-9).all()
    low, high = report.interval(draws=200)
    assert 0 <= low <= high <= 100
    assert report.interval(draws=200) == (low, high)
    if len({bool(np.float32(value) > np.float32(0.3)) for value in values}) == 1:  # alpha is float32
        assert low == high == report.sink()


def test_the_floor_is_that_of_uniform_attention() -> None:
    assert uniform_alpha(64) == pytest.approx(sum(1 / i for i in range(1, 65)) / 64)
    assert report_of([[[0.1]]]).floor == pytest.approx(0.0741, abs=1e-4)
    weights = torch.ones(64, 64).tril()
    weights /= weights.sum(dim=-1, keepdim=True)
    for k in (1, 2, 40):
        assert uniform_alpha(64, k) == pytest.approx(float(weights[k - 1 :, k - 1].mean()), rel=1e-5)


def test_repeated_tokens_give_the_floor_without_position() -> None:
    model = TransformerLM(LMConfig(**SMALL, position="nope"))
    report = measure(model, torch.full((2, T), 7))
    torch.testing.assert_close(report.alpha, torch.full_like(report.alpha, report.floor))


def test_a_report_is_json_and_says_under_which_conditions() -> None:
    report = measure(build("k-bias"), tokens(), TARGETS, (0.2, 0.3), bos=False, name="tiny")
    summary = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert summary["T"] == T
    assert summary["bos"] is False
    assert summary["sink"]["1"]["0.3"] == pytest.approx(report.sink(1, 0.3), abs=1e-4)
    assert summary["sink_star"]["0.2"] == pytest.approx(report.sink_star(0.2), abs=1e-4)
    text = str(report)
    for said in ("tiny", "T = 20", "n = 3", "BOS first: no", "eps=0.2", "eps=0.3", f"{report.floor:.3f}"):
        assert said in text


def test_questions_a_report_cannot_answer_are_clear_errors() -> None:
    report = measure(build("softmax"), tokens(), (1, 2))
    for question, message in (
        (lambda: report.sink(3), r"targets \(1, 2\)"),
        (lambda: report.sink(1, 1.5), r"in \(0, 1\)"),
        (lambda: report.sink_star(), "key bias"),
        (lambda: report.interval("star"), "key bias"),
        (lambda: report.interval(level=2), "level"),
        (lambda: report.interval(draws=0), "draws must be at least 1"),
        (lambda: report.excess(3), r"targets \(1, 2\)"),
        (lambda: report.excess("star"), "key bias"),
    ):
        with pytest.raises(ValueError, match=message):
            question()


def test_our_model_is_left_as_it_was_and_nan_weights_are_refused() -> None:
    model = build("softmax").train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    measure(model, tokens())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="context_length"):
        measure(model, tokens(length=25))
    assert [module.training for module in model.modules()] == before
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[0, 0] = math.nan
    with pytest.raises(NotFinite, match="nan or infinite"):
        measure(model, tokens())


def test_excess_is_by_definition_the_mean_of_each_sequences_own_above_its_uniform_share() -> None:
    mask = torch.ones(3, T, dtype=torch.long)
    mask[1, 9:] = 0  # sequences of unequal length have unequal floors
    report = measure(build("softmax"), tokens(), TARGETS, attention_mask=mask)
    for k in TARGETS:
        each = []
        for row, length in enumerate((T, 9, T)):
            u = sum(1 / i for i in range(k, length + 1)) / (length - k + 1)
            each += [(float(a) - u) / (1 - u) for a in report.alpha[row, TARGETS.index(k)].flatten()]
        assert report.excess(k) == pytest.approx(sum(each) / len(each), abs=1e-6)
    assert report_of([[[1.0]]]).excess() == 1
    assert report_of([[[uniform_alpha(64)]]]).excess() == pytest.approx(0, abs=1e-7)
    assert measure(build("softmax"), tokens(length=1)).excess() == 0


@pytest.mark.parametrize(("variant", "key"), [("window", 1), ("window", 5), ("k-bias", "star"), ("sink-token", "star")])
def test_uniform_attention_has_no_excess_and_is_seen_as_such_through_a_window(variant: str, key: int | str) -> None:
    model = build(variant)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:32] = 0  # q = k = 0: every visible key gets the same share
            if hasattr(block.attention, "key_bias"):
                block.attention.key_bias.zero_()
    report = measure(model, tokens(), TARGETS)
    assert report.excess(key) == pytest.approx(0, abs=1e-6)


def test_a_window_is_named_with_its_cap_and_alpha_over_the_queries_that_see_the_key() -> None:
    model, dense = build("window"), DenseMaps()
    with torch.no_grad():
        model(tokens(), dense)
    report = measure(model, tokens(), TARGETS)
    assert report.windows == (4, 4)
    for k in TARGETS:
        seeing = slice(k - 1, k - 1 + 4)
        expected = torch.stack([m[:, :, seeing, k - 1].mean(-1) for m in dense.maps], 1)
        torch.testing.assert_close(report.visible_alpha(k), expected)
        assert report.caps(k) == pytest.approx([4 / (T - k + 1)] * 2)
    assert "layers 0, 1 see 4 keys: alpha_1 is at most 0.200 there" in str(report)
    plain = measure(build("softmax"), tokens(), TARGETS)
    assert torch.equal(plain.visible_alpha(2), plain.alpha[:, 1]) and plain.caps(2) == [1, 1]
    assert "see" not in str(plain)


@pytest.mark.parametrize("variant", ["window", "k-bias", "softmax"])
def test_a_recorded_report_answers_as_the_live_one(variant: str) -> None:
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, :3] = 0
    live = measure(build(variant), tokens(), TARGETS, (0.3, 0.22), attention_mask=mask, name="tiny", bos=True)
    summary = json.loads(json.dumps(live.to_dict(digits=9), allow_nan=False))
    read = Report.from_dict(summary)
    keys = [*TARGETS, *(["star"] if live.star is not None else [])]
    for k in keys:
        assert read.excess(k) == pytest.approx(live.excess(k), abs=1e-6)
        for eps in (0.05, 0.2, 0.22, 0.3, 0.4):
            assert read.sink(k, eps) == pytest.approx(live.sink(k, eps), abs=1e-6)
        assert read.interval(k, 0.22) == pytest.approx(live.interval(k, 0.22), abs=1e-6)
    torch.testing.assert_close(read.visible_alpha(2), live.visible_alpha(2).mean(dim=0, keepdim=True))
    for name in ("hidden_norms", "key_norms", "value_norms"):
        assert read.norm_ratio(name) == pytest.approx(live.norm_ratio(name), rel=1e-6)
    assert (read.samples, read.bos, read.windows, read.to_dict()) == (3, True, live.windows, summary)
    with pytest.raises(ValueError, match="eps must be one that the record has"):
        read.sink(1, 0.123)
    by_text = Report.from_dict(summary, live.alpha[:, :2].half(), None if live.star is None else live.star.half())
    assert by_text.targets == (1, 2) and by_text.sink(1, 0.123) == live.sink(1, 0.123)


def test_norm_ratios_compare_one_position_with_the_mean_of_the_others_and_leave_the_last_block_out() -> None:
    report = report_of([[[0.1]]])
    report.hidden_norms = torch.tensor([[6.0, 1.0, 3.0], [1.0, 1.0, 1.0], [9.0, 1.0, 1.0]])
    assert report.norm_ratio() == [3.0, 1.0]
    assert report.norm_ratio(last=True) == [3.0, 1.0, 9.0]
    assert report.norm_ratio(k=2) == pytest.approx([1 / 4.5, 1.0])
    report.value_norms = torch.tensor([[1.0, 2.0]])
    assert report.norm_ratio("value_norms") == [0.5]
    for name, k, message in (("key_norms", 1, "has no key_norms"), ("value_norms", 3, "at least two positions"),
                             ("norms", 1, "name must be one of")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            report.norm_ratio(name, k)
