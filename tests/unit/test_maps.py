"""`su.report`: attention that was computed elsewhere, and what a report says of number formats."""

import math

import numpy as np
import pytest
import small_models
import torch
from helpers import refuses, tokens
from torch import Tensor

import sinkutils as su
from sinkutils.measuring.peaks import FORMATS, nearest, rounded

IDS = small_models.tokens()


def softmax_maps(B: int = 3, H: int = 4, T: int = 12, layers: int = 2) -> list[Tensor]:
    """Causal maps whose rows sum to one."""
    generator = torch.Generator().manual_seed(T)
    logits = 2 * torch.randn(layers, B, H, T, T, generator=generator)
    hidden = torch.ones(T, T).triu(1).bool()
    return [*logits.masked_fill(hidden, -torch.inf).softmax(-1)]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_report_of_maps_is_that_of_the_model(family):
    model = small_models.build(family)
    right = su.measure(model, IDS, targets=(1, 4), norms=False)
    maps = small_models.eager_maps(model, IDS)
    windows = right.windows or None
    star = right.star is not None
    for given in (maps, [x.numpy() for x in maps], (x.double() for x in maps)):
        report = su.report(given, targets=(1, 4), window=windows, star=star, name="mine")
        torch.testing.assert_close(report.alpha, right.alpha, rtol=0, atol=1e-6)
        if star:
            torch.testing.assert_close(report.star, right.star, rtol=0, atol=1e-6)
        assert report.excess(4) == pytest.approx(right.excess(4), abs=1e-5)
        assert report.caps(1) == right.caps(1) and str(report).startswith("mine: T = 24, n = 3")
    assert {"sink_1", "block_1", "later_blocks"} <= {*report.summary()}
    assert "value_ratio" not in report.summary()


@pytest.mark.parametrize("chunk", [None, 100])
def test_a_report_of_queries_and_keys_is_that_of_their_maps(chunk, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("sinkutils.measuring.maps.ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    q = [torch.randn(2, 6, 9, 8, generator=generator) for _ in range(3)]
    k = [torch.randn(2, 2, 9, 8, generator=generator) for _ in range(3)]
    sinks = [torch.randn(6, generator=generator), None, torch.zeros(6)]
    windows = [None, 4, None]
    maps, stars = [], []
    for queries, keys, sink, window in zip(q, k, sinks, windows, strict=True):
        spec = su.AttentionSpec(sink_logit="none" if sink is None else "learned", window=window)
        given = {} if sink is None else {"sink_logit": sink}
        _, weights = su.attend(queries, keys, keys, spec, logit_scale=0.5, **given)
        maps.append(weights[..., -9:])
        stars.append(torch.zeros(2, 6) if sink is None else weights[..., 0].mean(-1))
    report = su.report(q=iter(q), k=iter(k), sinks=sinks, scale=0.5, window=windows, heads=[(1, 2)])
    right = su.report(maps, star=True, window=windows)
    torch.testing.assert_close(report.alpha, right.alpha, rtol=0, atol=1e-6)
    torch.testing.assert_close(report.star, torch.stack(stars, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(report.kept[1, 2].map, maps[1][:, 2], rtol=0, atol=1e-6)
    assert report.windows == (None, 4, None)


def test_weights_without_a_fixed_sum_are_read_by_their_proxies():
    model = su.TransformerLM(
        su.LMConfig(
            vocab_size=60,
            context_length=32,
            num_layers=2,
            num_heads=2,
            hidden_size=16,
            intermediate_size=24,
            attention=su.AttentionSpec(similarity="sigmoid", normalizer="none"),
        )
    )
    ids = tokens(3, 16)
    maps = []

    class Keep:
        def embedding(self, *_): ...
        def block(self, *_): ...
        def attention(self, layer, q, k, v, spec, extras):
            maps.append(su.attend(q, k, v, spec, **extras)[1].detach())

    model(ids, Keep())
    refuses(r"maps of layer 1 have rows that sum to .* say star=True", su.report, maps)
    report = su.report(maps, normalised=False)
    torch.testing.assert_close(report.alpha, su.measure(model, ids).alpha, rtol=0, atol=1e-6)


def test_a_layer_without_attention_keeps_its_place():
    maps = softmax_maps()
    report = su.report([maps[0], None, maps[1]])
    assert report.layers == (0, 2)


def test_arrays_of_jax_are_read():
    jax = pytest.importorskip("jax")
    maps = softmax_maps()
    given = [jax.numpy.array(x.numpy()) for x in maps]
    assert torch.equal(su.report(given).alpha, su.report(maps).alpha)
    half = [x.astype(jax.numpy.bfloat16) for x in given]
    assert (su.report(half).alpha - su.report(maps).alpha).abs().max() < 1e-2


def test_what_is_no_attention_is_refused_with_its_layer():
    maps = softmax_maps()
    later = maps[1].clone()
    later[0, 0, 0] = 1 / 12
    refuses("maps of layer 2 are not causal: a query gives 0.083", su.report, [maps[0], later])
    refuses("rows that sum to 0.5 to 0.5, not to 1", su.report, [maps[0] / 2])
    refuses("rows that sum to 2, more than 1", su.report, [maps[0] * 2], star=True)
    refuses("maps of layer 1 hold negative weights", su.report, [-maps[0]])
    refuses(
        "maps of layer 1 must hold real numbers, and none that is nan", su.report, [maps[0] / 0]
    )
    refuses(r"of the shape \(B, H, T, T\), got .* \(4, 12, 12\)", su.report, maps[0])
    refuses("must be as many keys as queries", su.report, [maps[0][..., :5]])
    refuses("layer 2 has 2 texts of 12 tokens, and the first", su.report, [maps[0], maps[0][:2]])
    refuses("layers have different numbers of heads", su.report, [maps[0], maps[0][:, :2]])
    refuses("there is no layer", su.report, [])
    refuses("maps must be arrays, one a layer; got 3", su.report, 3)
    refuses(
        "maps of layer 1 must be an array of numbers that PyTorch has, got str", su.report, ["map"]
    )
    refuses("give either maps, or q and k", su.report)
    refuses("give either maps, or q and k", su.report, maps, q=maps)
    refuses("queries need keys", su.report, q=maps)
    refuses("sinks and scale belong to q and k", su.report, maps, scale=1.0)
    refuses("normalised and star belong to maps", su.report, q=maps, k=maps, star=True)
    refuses("there are 1 layers of .'k'., and more of .'q'.", su.report, q=maps, k=maps[:1])
    refuses(r"\(B, G, T, D\), with H a multiple", su.report, q=maps, k=[x[:, :3] for x in maps])
    refuses(
        r"sinks of layer 1 must have the shape \(4,\)",
        su.report,
        q=maps,
        k=maps,
        sinks=[torch.ones(3)] * 2,
    )
    huge = [x * 1e30 for x in maps]
    refuses("products of q and k overflow", su.report, q=huge, k=huge)
    refuses("targets are positions", su.report, maps, targets=(13,))
    refuses("heads names .* pairs that the model does not have", su.report, maps, heads=[(5, 0)])
    refuses("window has 1 layers", su.report, maps, window=[3])
    of_layers = su.report(maps, window=np.array([3, 12]))
    assert of_layers.windows == (3, 12)
    refuses("bos must be True, False or None", su.report, maps, bos="yes")
    for odd in (maps[0].to_sparse(), maps[0].to("meta"), torch.nested.nested_tensor([*maps[0]])):
        refuses("maps of layer 2 must be a dense tensor", su.report, [maps[0], odd])
    padded = maps[0].clone()
    padded[:, :, :2] = 0
    refuses("without its padding", su.report, [padded])


# ---- peaks, entropy and the forecast


def test_peaks_are_the_largest_numbers_at_the_first_token_and_at_the_others():
    model = small_models.build("llama")
    seen: dict = {}

    def keep(name):
        def change(x: Tensor) -> Tensor:
            seen.setdefault(name, []).append(x.clone())
            return x

        return change

    for place in ("block", "key", "value"):
        su.surgery.edit(model, IDS, place, keep(place))
    report = su.measure(model, IDS, batch_size=2)
    table = report.peaks.set_index(["part", "block", "head"])
    for part, place in (("k", "key"), ("v", "value"), ("h", "block")):
        for layer, x in enumerate(seen[place]):
            x = x.abs() if part != "h" else x.abs()[:, None]
            for head in range(x.shape[1]):
                row = table.loc[part, layer + 1, 0 if part == "h" else head + 1]
                assert row["first"] == pytest.approx(float(x[:, head, 0].max()), rel=1e-6)
                assert row["others"] == pytest.approx(float(x[:, head, 1:].max()), rel=1e-6)
    assert "float16: fits" in str(report) and "would round" in str(report)
    assert len(su.measure(model, IDS, norms=False).peaks) == 0


def test_the_forecast_counts_what_the_rounding_makes_zero():
    model = small_models.build("llama")
    counts: dict = {}
    for name in ("int8", "fp8", "int4", "fp4"):
        for part, place in (("k", "key"), ("v", "value")):
            share = []

            def change(x: Tensor, name=name, share=share) -> Tensor:
                nonzero = x[:, :, 1:] != 0
                after = rounded(name)(x.clone())
                share.append(float(((after[:, :, 1:] == 0) & nonzero).float().mean()))
                return after

            su.surgery.edit(model, IDS, place, change, layers=[0])
            counts[part, name] = 100 * share[0]
    table = su.measure(model, IDS).forecast
    first = table[table.block == 1].set_index(["part", "format"]).zero
    for place, share in counts.items():
        assert first[place] == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_goes_to_the_nearest_number_of_the_format(name):
    x = torch.randn(2, 3, 5, 7)
    x[:, :, 0] *= 30
    after = rounded(name)(x.clone())
    scale = x.abs().amax((1, 2, 3), keepdim=True) / FORMATS[name][0]
    steps = after / scale
    assert torch.equal(nearest(name, steps).round(decimals=4), steps.round(decimals=4))
    sizes = {
        "int8": torch.arange(128.0),
        "int4": torch.arange(8.0),
        "fp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
        "fp8": torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    }[name]
    grid = torch.cat([-sizes, sizes])
    least = ((x / scale)[..., None] - grid).abs().amin(-1)
    torch.testing.assert_close((x / scale - steps).abs(), least, rtol=0, atol=2e-4)
    kept = rounded(name, leave_out_first=True)(x.clone())
    assert torch.equal(kept[:, :, 0], x[:, :, 0])
    assert (kept - x)[:, :, 1:].abs().max() <= (after - x)[:, :, 1:].abs().max()
    refuses("name must be one of int8, fp8, int4, fp4; got 'int3'", rounded, "int3")


def test_float16_overflow_is_foreseen():
    model = small_models.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e7
    assert "float16: h overflow" in str(su.measure(model, IDS))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "bloom"])
def test_entropy_is_that_of_the_whole_row(family):
    model = small_models.build(family)
    report = su.measure(model, IDS, entropy=True)
    for layer, weights in enumerate(small_models.eager_maps(model, IDS)):
        rest = (
            (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
            if family == "gpt_oss"
            else weights[..., :0]
        )
        rows = torch.special.entr(torch.cat([weights, rest], -1)).sum(-1)
        torch.testing.assert_close(report.entropy[:, layer], rows.mean(-1), rtol=0, atol=1e-5)
    assert su.measure(model, IDS).entropy is None
    assert "entropy" in report.summary() and report.summary()["entropy"] < math.log(24)


def test_numpy_arrays_that_may_only_be_read_are_copied():
    maps = [x.numpy() for x in softmax_maps()]
    for x in maps:
        x.setflags(write=False)
    assert isinstance(maps[0], np.ndarray) and su.report(maps).samples == 3
    swapped = [x.astype(">f4") for x in maps]  # as files of another machine hold them
    assert torch.equal(su.report(swapped).alpha, su.report(maps).alpha)
    later = np.triu(np.ones((12, 12), bool), 1) | np.zeros_like(maps[0], dtype=bool)
    hidden = [np.ma.masked_array(x, later) for x in maps]
    refuses("maps of layer 1 hides numbers by a mask", su.report, hidden)
    refuses("that PyTorch has, got ndarray: object", su.report, [maps[0].astype(object)])
