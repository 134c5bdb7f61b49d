"""The metric of Section 3.2 and our own model's way to it, against whole maps of the dense reference."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import SHAPE, DenseMaps, architectures, draw, own_model, refused, refuses, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.testing import assert_close

from sinkutils import AttentionSpec, LMConfig, TransformerLM, attend, measure
from sinkutils.measuring import own
from sinkutils.measuring.own import attention_shares
from sinkutils.measuring.report import NotFinite, Report, norm_ratio, uniform_alpha
from sinkutils.measuring.surgery import untouched
from sinkutils.measuring.tally import Reduced, Tally
from sinkutils.study.evaluate import destinations, gradient_norms, line_breaks

T, TARGETS = 20, (1, 2, 5)
ARCHITECTURES = architectures()


def build(name: str) -> TransformerLM:
    return own_model(1.0 if name == "exp_unnormalised" else 2.5, **ARCHITECTURES[name])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_alpha_star_maps_and_norms_are_those_of_the_dense_maps(name):
    model, ids = build(name), tokens()
    norm = model.config.norm
    dense, close = DenseMaps(model, ids), {"atol": 1e-6, "rtol": 0, "check_dtype": False}
    report = measure(model, ids, TARGETS, heads=((1, 0), (0, 1), (1, 0)), batch_size=3)
    assert report.alpha.shape == (3, 3, 2, 2)
    assert_close(report.alpha, dense.alpha(TARGETS), **close)
    assert (report.star is not None) == bool(dense.star)
    if dense.star:
        assert_close(report.star, dense.star_share(), **close)
    for layer, head in ((1, 0), (0, 1)):
        assert_close(report.kept[layer, head].map, dense.own(layer)[:, head], **close)
    first = int(model.config.sink_token)  # norms count positions from the first real token
    q, k, _ = (x[:, 0, first:] for x in dense.qkv[1])
    assert_close(report.kept[1, 0].queries, q)
    assert_close(report.kept[1, 0].keys, k)
    hidden = torch.stack([h[:, first:].norm(dim=-1).mean(dim=0) for h in dense.hidden])
    assert_close(report.hidden_norms, hidden)
    sizes = dense.hidden[1][:, first:].abs()
    peaks = sizes.amax(dim=-1) / sizes.flatten(1).median(dim=1).values[:, None]
    assert_close(report.hidden_peaks[1], peaks.mean(dim=0))
    firsts = sizes[:, 0] / sizes.flatten(1).median(dim=1).values[:, None]
    assert_close(report.first_elements[1], firsts.mean(dim=0))
    assert_close(report.embedding_norms, dense.first[:, first:].norm(dim=-1).mean(dim=0))
    for part, norms in ((1, report.key_norms), (2, report.value_norms)):
        each = [layer[part][:, :, first:].norm(dim=-1) for layer in dense.qkv]
        expected = torch.stack([norm.mean(dim=(0, 1)) for norm in each])
        assert_close(norms, expected)
    assert (report.before_norm_norms is None) == (norm != "post")
    if norm == "post":
        before = torch.stack([h.norm(dim=-1).mean(dim=0) for h in dense.before])
        assert_close(report.before_norm_norms, before)
    single = measure(model, ids, TARGETS, batch_size=1)
    assert_close(single.alpha, report.alpha)
    assert_close(single.hidden_norms, report.hidden_norms, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["default", "window_1_16", "sigmoid_normalised", "k_bias", "mlp_normalised"]
)
def test_other_precisions_have_float32_reports_that_stay_close(name):
    model, ids = build(name), tokens()
    exact = measure(model, ids, TARGETS).alpha
    with torch.autocast("cpu", torch.bfloat16):
        assert (measure(model, ids, TARGETS).alpha - exact).abs().max() < 0.05
    double = measure(model.double(), ids, TARGETS)
    assert double.alpha.dtype == double.hidden_norms.dtype == torch.float32
    assert_close(double.alpha, exact, atol=2e-5, rtol=1e-4)
    assert (measure(model.bfloat16(), ids, TARGETS).alpha - exact).abs().max() < 0.05


def test_large_unnormalised_scores_neither_overflow_nor_are_coarser_under_autocast():
    """A_ij is |f| over its row's sum: for exp that is softmax, whatever the size of the logits."""
    spec, found = AttentionSpec(normalizer="none", window=9), []
    (q, k, v), _ = draw(spec, T, dtype=torch.float32)
    q = 60 * q
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(attention_shares(q, k, v, spec, {}))
    assert torch.equal(*found) and (q @ k.mT).max() > 200
    expected = attend(q.double(), k.double(), v.double(), AttentionSpec(window=9))[1]
    assert_close(found[0], expected, rtol=0, atol=1e-12)


def test_our_models_are_left_as_they_were_and_refuse_what_they_have_no_numbers_for():
    model = build("default").train()
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=r"\(0, 99\).*layers are \[0, 1\], with heads 0..1"):
        measure(model, tokens(), heads=((0, 99), (0, 1)))
    for heads in ([(0.0, 1)], [(True, 0)], [([0], 1)], torch.tensor([[0, 1]])):
        refuses("layer must be an integer, got", measure, model, tokens(), heads=heads)
    same = measure(model, tokens(), heads=[(np.int64(0), 1), (0, np.int64(1))])
    assert [*same.kept] == [(0, 1)]
    without_numbers = TransformerLM(LMConfig(**SHAPE)).to("meta")
    for look in (measure, untouched):
        refuses("meta device .*load it first", look, without_numbers, tokens())
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[0, 0] = math.nan
    refuses("nan or infinite", measure, model, tokens(), kind=NotFinite)
    assert [module.training for module in model.modules()] == before


def report_of(alpha: list) -> Report:
    """A report whose alpha is given, (samples, layers, heads), for target 1 and T = 64."""
    values = torch.tensor(alpha)[:, None]
    return Report(
        values, (1,), (0.3,), torch.full((len(values),), 64), tuple(range(values.shape[2]))
    )


def test_sink_thresholds_each_sequence_strictly_and_then_averages():
    # The mean of alpha over sequences is 0.31 in the first head and 0.25 in the second: 50 % would come out
    # if the mean were thresholded.
    three = report_of([[[0.6, 0.5]], [[0.01, 0.0]], [[0.32, 0.25]]])
    assert three.sink(1, 0.3) == pytest.approx(50.0)
    assert report_of([[[0.9]], [[0.1]], [[0.1]]]).sink(1, 0.3) == pytest.approx(100 / 3)
    assert report_of([[[0.25]]]).sink(1, 0.25) == 0


def test_the_floor_is_that_of_uniform_attention_and_repeated_tokens_without_position_have_it():
    assert uniform_alpha(64) == pytest.approx(sum(1 / i for i in range(1, 65)) / 64)
    assert report_of([[[0.1]]]).floor == pytest.approx(0.0741, abs=1e-4)
    unequal = Report(torch.zeros(2, 1, 1, 1), (1,), (0.3,), torch.tensor([1, 2]), (0,))
    assert unequal.floor == pytest.approx((1 + 3 / 4) / 2)
    report = measure(own_model(position="nope"), torch.full((2, T), 7))
    assert_close(report.alpha, torch.full_like(report.alpha, report.floor))


def test_an_interval_is_over_texts_not_heads_at_95_percent():
    # of two texts a draw has 0, 1 or 2 with a sink, in all heads
    two = report_of([[[0.9] * 50], [[0.1] * 50]])
    assert two.interval() == (0, 100)
    hundred = report_of([[[0.9]]] * 50 + [[[0.1]]] * 50)  # the binomial's quantiles
    assert hundred.interval() == pytest.approx((40, 60), abs=1)
    rows = [torch.linspace(0, 1, 97).roll(n)[:n].tolist() + [0] * (97 - n) for n in range(97)]
    spread = report_of([[row] for row in rows])
    assert spread.interval() == spread.interval()


def test_questions_a_report_cannot_answer_are_clear_errors():
    report = measure(build("default"), tokens(), (1, 2))
    refuses(r"alpha_3 was not measured, only \[1, 2\]", report.sink, 3)
    refuses(r"in \(0, 1\)", report.sink, 1, 1.5)
    refuses("key bias", report.excess, "star")
    refuses("alpha_None was not measured", report.excess, None)
    refuses("got str: 'xxx", measure, own_model(), "x" * 100)  # the beginning of a long value


def test_a_target_named_twice_is_one_target():
    twice, once = (measure(own_model(), tokens(), targets) for targets in ((2, 1, 2), (2, 1)))
    assert twice.targets == (2, 1) and torch.equal(twice.alpha, once.alpha)
    assert measure(own_model(), tokens(), epsilons=(0.2, 0.2)).epsilons == (0.2,)


def test_no_window_hides_a_key_of_the_models_own():
    report = measure(own_model(attention=AttentionSpec(bias="k", window=5)), tokens())
    assert report.caps("star") == [1, 1] and max(report.caps(1)) < 1
    assert torch.equal(report.visible_alpha("star"), report.star)
    refuses("alpha_25 was not measured", report.caps, 25)


def test_excess_is_by_definition_the_mean_of_each_sequences_own_above_its_uniform_share():
    mask = torch.ones(3, T, dtype=torch.long)
    mask[1, 9:] = 0  # sequences of unequal length have unequal floors
    report = measure(build("default"), tokens(), TARGETS, attention_mask=mask, heads=[(0, 0)])
    assert report.kept[0, 0].map[1, 9:].abs().max() == 0  # beyond the end of a shorter sequence
    for k in TARGETS:
        each = []
        for row, length in enumerate((T, 9, T)):
            u = sum(1 / i for i in range(k, length + 1)) / (length - k + 1)
            alphas = report.alpha[row, TARGETS.index(k)].flatten().tolist()
            each += [(a - u) / (1 - u) for a in alphas]
        assert report.excess(k) == pytest.approx(sum(each) / len(each), abs=1e-6)
    assert report_of([[[1.0]]]).excess() == 1
    assert report_of([[[uniform_alpha(64)]]]).excess() == pytest.approx(0, abs=1e-7)
    assert measure(build("default"), tokens(length=1)).excess() == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [("window_1_16", 1), ("window_1_16", 5), ("k_bias", "star"), ("sink_token", "star")],
)
def test_uniform_attention_has_no_excess_and_is_seen_as_such_through_a_window(name, key):
    model = build(name)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:32] = 0  # q = k = 0: every visible key gets the same share
            if hasattr(block.attention, "key_bias"):
                block.attention.key_bias.zero_()
    assert measure(model, tokens(), TARGETS).excess(key) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["window_1_16", "k_bias", "default"])
def test_a_report_says_under_which_conditions_and_its_summary_has_its_numbers(name):
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "name": "tiny", "bos": True}
    live = measure(build(name), tokens(), TARGETS, (0.3, 0.22), **options)
    summary = json.loads(json.dumps(live.to_dict(), allow_nan=False))
    for k in (*TARGETS, *(["star"] if live.star is not None else [])):
        sink = summary["sink_star"] if k == "star" else summary["sink"][str(k)]
        assert summary["excess"][str(k)] == pytest.approx(live.excess(k), abs=1e-5)
        for eps in (0.05, 0.2, 0.22, 0.3, 0.4):
            assert sink[str(eps)] == pytest.approx(live.sink(k, eps), abs=1e-5)
        ends = summary["interval"][str(k)]["0.22"]
        assert ends == pytest.approx(live.interval(k, 0.22), abs=1e-5)
    pairs = (
        ("alpha", live.alpha.mean(0)),
        ("alpha_star", live.star),
        ("hidden_norms", live.hidden_norms),
    )
    for name, values in pairs:
        if values is not None:
            values = values.mean(0) if name == "alpha_star" else values
            assert_close(torch.tensor(summary[name]), values, atol=1e-5, rtol=0)
    assert (summary["T"], summary["samples"], summary["bos"]) == (T, 3, True)
    assert summary["lengths"] == [17, T, T]
    if live.windows:
        visible = torch.tensor(summary["visible_alpha"]["2"])
        assert_close(visible, live.visible_alpha(2).mean(dim=0), atol=1e-5, rtol=0)
        assert tuple(summary["windows"]) == live.windows
    shown = ("tiny", "T = 17..20", "n = 3", "BOS first: yes", "eps=0.22", "eps=0.3")
    for said in (*shown, f"{live.floor:.3f}", f"{live.sink(1, 0.22):.2f} % ["):
        assert said in str(live)
    assert ("\n*" in str(live)) == (live.star is not None)


def test_the_summary_of_a_report_has_its_numbers_by_their_names():
    report = measure(build("k_bias"), tokens(), (1, 2), (0.22, 0.3))
    first, later = report.excess_by_layer()
    block, dimension = (report.first_elements == report.first_elements.max()).nonzero()[0]
    ratios = norm_ratio(report.value_norms)
    assert report.summary() == pytest.approx(
        {
            "sink_1": report.sink(1, 0.22), "block_1": first, "later_blocks": later,
            "element": float(report.first_elements.max()), "element_block": int(block) + 1,
            "element_dimension": int(dimension), "value_ratio": min(ratios),
            "star": float(report.star.mean()),
        }
    )  # fmt: skip
    assert report.sink_star(0.22) == report.sink("star", 0.22) != report.sink("star", 0.05)
    bare = measure(own_model(num_layers=1), tokens(length=2), norms=False)
    assert [*bare.summary()] == ["sink_1", "block_1"]
    assert "value_ratio" in measure(build("default"), tokens(length=2)).summary()


def test_norm_ratios_compare_the_first_position_with_the_mean_of_the_others():
    norms = torch.tensor([[6.0, 1.0, 3.0], [1.0, 1.0, 1.0], [9.0, 1.0, 1.0]])
    assert norm_ratio(norms) == [3.0, 1.0, 9.0]
    assert norm_ratio([[1.0, 2.0]]) == [0.5]
    refuses("at least two positions", norm_ratio, [[1.0]])


def test_the_gradient_by_position_is_that_of_autograd_over_the_summed_texts():
    model, ids = own_model(sink_token=True).double(), torch.randint(60, (3, 9))
    found = gradient_norms(model, ids)
    assert all(p.grad is None for p in model.parameters())
    read: list[Tensor] = []
    handle = model.blocks[1].attention.register_forward_hook(
        lambda module, args, out: read.append(args[0]) or args[0].retain_grad()
    )
    logits = model(ids[:, :-1]).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
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
    texts = ("\n", "\n\n  ", "a\n", " ", "a", " \n", "")
    words = {text: number for number, text in enumerate(texts)}
    assert line_breaks(Tokenizer(WordLevel(words, unk_token="a"))).tolist() == [0, 1, 5]


def test_layers_with_different_numbers_of_heads_are_refused():
    tally = Tally((1,), 4, norms=False)
    for layer, heads in enumerate((2, 3)):
        tally.add(layer, [Reduced(torch.full((1, heads, 4, 1), 0.5))])
    with refused("different numbers of heads"):
        tally.report(None, torch.tensor([4]), (0.3,))


def test_an_interval_is_no_point_where_all_texts_agree_and_none_of_one_text():
    def report(alpha):
        n = len(alpha)
        by_text = torch.tensor(alpha).reshape(n, 1, 1, 1)
        return Report(by_text, (1,), (0.3,), torch.full((n,), 20), (0,))

    # by stats.binomtest(0, 10).proportion_ci(0.95, "exact")
    assert report([0.1] * 10).interval() == pytest.approx((0, 30.8497), abs=1e-3)
    assert report([0.9] * 10).interval() == pytest.approx((69.1503, 100), abs=1e-3)
    low, high = report([0.9, 0.1] * 10).interval()
    assert 20 < low < 50 < high < 80
    assert report([0.9]).interval() == (0, 100) and "[n = 1]" in str(report([0.9]))


def test_excess_of_even_attention_is_0_or_the_print_says_what_it_is():
    model = own_model(attention=AttentionSpec(bias="k"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "key_bias" in name or ".q" in name or ".k" in name or "qk" in name:
                weight.zero_()
    report = measure(model, tokens(2, 20), (1, 2))
    assert report.excess("star") == pytest.approx(0, abs=1e-6)
    assert f"the excess ignores the key *: even attention to all has {report.excess(1):.3f}" in str(
        report
    )
    most = max((1, 2), key=report.excess)
    assert f"most attention: position {most}, of those measured" in str(report)


def test_a_long_text_is_measured_some_queries_at_a_time_with_the_same_numbers(monkeypatch):
    ids = tokens()
    for fields in (
        {"attention": AttentionSpec(similarity="sigmoid", normalizer="none", bias="k")},
        {"sink_token": True},
        {"attention": AttentionSpec(prefix=4)},
    ):
        model = own_model(**fields)
        whole = measure(model, ids, targets=(1, 3), heads=[(0, 1)])
        with monkeypatch.context() as patch:
            patch.setattr(own, "MOST_SHARES", 1)  # one query at a time
            pieces = measure(model, ids, targets=(1, 3), heads=[(0, 1)])
        assert_close(pieces.alpha, whole.alpha)
        assert_close(pieces.kept[0, 1].map, whole.kept[0, 1].map)
        if whole.star is not None:
            assert_close(pieces.star, whole.star)
