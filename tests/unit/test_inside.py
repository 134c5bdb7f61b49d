"""The surgery of benchmarks/inside.py and its users, against `measure`, `surgery` and plain sums."""

import struct
from itertools import pairwise

import constant_logit
import denominator
import first_tokens
import four_bits
import gate_shuffled
import gates_close
import inside
import numpy as np
import one_number
import pytest
import torch
import two_neurons
import values_gated
import whisper_file
from helpers import own_model, tokens
from small_models import build
from torch.testing import assert_close

from sinkutils.measuring.probes import Subject
from sinkutils.measuring.surgery import edit, untouched

TARGETS = (1, 2)


@pytest.fixture(params=["own", "llama", "gemma3_text"])
def measured(request):
    model = own_model() if request.param == "own" else build(request.param)
    return Subject(request.param, model.eval(), None)


@pytest.fixture
def ids():
    return tokens(5, 12, least=3)


def test_a_pass_that_changes_nothing_is_that_of_surgery(measured, ids):
    outcome = untouched(measured.model, ids)
    losses, alpha = inside.passed(measured, ids)
    assert_close(losses, outcome.losses, atol=1e-4, rtol=1e-4)
    for place, k in enumerate(TARGETS):
        assert_close(alpha[..., k - 1], outcome.report.alpha[:, place], atol=1e-5, rtol=1e-4)


def test_the_mean_query_off_is_that_of_surgery(measured, ids):
    """With the mean of the same texts; surgery's cut takes it over all positions of a batch."""
    seen = {}

    def look(layer, q, k, logits):
        seen[layer] = q.mean(dim=(0, 2))
        return logits

    def off(layer, q, k, logits):
        return logits - (k @ seen[layer][..., None]).mT

    few = ids[: inside.BATCH]
    for layer in (0, 1):  # a later layer's mean query is that of the untouched model
        inside.passed(measured, few, look)
        changed, _ = inside.passed(
            measured, few, lambda *args, at=layer: off(*args) if args[0] == at else args[3]
        )
        by_surgery = edit(
            measured.model, few, "query", lambda q: q - q.mean(dim=(0, 2), keepdim=True), [layer]
        )
        assert_close(changed, by_surgery.losses, atol=1e-4, rtol=1e-4)


def test_one_constant_stands_in_place_of_every_logit_on_a_key(ids):
    known = constant_logit.Logits()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 12, 12, generator=generator)
    logits = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    q = k = torch.randn(3, 2, 12, 4, generator=generator)
    known.look(0, q, k, logits.clone())
    changes = constant_logit.cuts(known, first=0)
    cut = changes["constant on k_1"](0, q, k, logits.clone())
    assert_close(cut[0, 1, 1:, 0], logits[:, 1, 1:, 0].mean().expand(11))
    assert_close(cut[..., 1:], logits[..., 1:])
    other = changes["constant on the strongest other key"](0, q, k, logits.clone())
    for text in range(3):
        for head in range(2):
            changed = (other != logits)[text, head]
            (column,) = changed.any(dim=0).nonzero()[:, 0].tolist()
            shares = logits[text, head].softmax(dim=-1)[6:, 1:6].sum(dim=0)
            assert column == 1 + int(shares.argmax())
            assert changed[:, column].nonzero()[:, 0].tolist() == list(range(column + 1, 12))
    untouched_before = constant_logit.cuts(known, first=1)["constant on k_1"]
    assert_close(untouched_before(0, q, k, logits.clone()), logits)


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_element_and_denominator_are_changed_apart(kind, ids):
    model = own_model() if kind == "own" else build(kind)
    measured = Subject(kind, model.eval(), None)
    found = denominator.apart(measured, ids, 1)

    def without(h):
        h[:, 0, found["dimension"]] = 0
        return h

    both = edit(model, ids, "block", without, [0])  # the norm reads the same in both ways
    extra = inside.excess(both.report.alpha[:, 0, 1].mean(dim=1), ids.shape[1])
    assert_close(torch.tensor(found["both gone"]["extra"]), extra, atol=1e-4, rtol=1e-3)
    cases = [found[case]["extra"] for case in denominator.CASES]
    assert all(a != b for a, b in pairwise(cases))


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_all_neurons_together_write_what_the_ffn_adds(kind, ids):
    model = own_model() if kind == "own" else build(kind)
    measured = Subject(kind, model.eval(), None)
    first = inside.blocks(model)[0]
    ffn = first.ffn if kind == "own" else first.mlp
    added = []
    handle = ffn.register_forward_hook(lambda _, __, output: added.append(output[:, 0]))
    untouched(model, ids)
    handle.remove()
    down = ffn.down if kind == "own" else ffn.down_proj
    wrote, _ = two_neurons.written(measured, ids, 1, down.in_features)
    assert_close(wrote, added[-1], atol=1e-5, rtol=1e-4)


def test_the_parts_of_what_neurons_wrote(measured, ids):
    """A state that holds all that the neurons write differs from its parts; the usual model is as ever."""
    found = two_neurons.parts(measured, ids, 1, 1)
    plain = untouched(measured.model, ids)
    extra = inside.excess(plain.report.alpha[:, 0].mean(dim=2), ids.shape[1]).mean(dim=0)
    assert_close(torch.tensor(found["untouched"]["extra"]), extra, atol=1e-5, rtol=1e-4)
    cases = [found[case]["loss"] for case in found if isinstance(found[case], dict)]
    assert len(cases) == 5 and all(a != b for a, b in pairwise(cases))


def test_a_state_of_one_number(measured, ids):
    """The two parts are the state, and a part that is the whole state changes nothing."""
    state = torch.tensor([[3.0, -7.0, 1.0, 2.0]])
    assert torch.equal(sum(part(state, 1) for part in one_number.CASES.values()), state)
    assert one_number.alone(state, 1).tolist() == [[0.0, -7.0, 0.0, 0.0]]
    assert one_number.another_place(state, 1).tolist() == [[0.0, 0.0, 0.0, -7.0]]
    whole = {"whole": lambda state, _: state, **one_number.CASES}
    found = one_number.one_number(measured, ids, 1, whole)
    plain = two_neurons.summed_up([untouched(measured.model, ids)], ids.shape[1])
    for number in ("extra", "value", "loss"):
        assert_close(found["whole"][number], plain[number], atol=1e-5, rtol=1e-4)
    assert (
        found["the element alone"]["loss"] != plain["loss"] != found["all but the element"]["loss"]
    )


def test_even_shares_are_alpha_of_an_even_spread():
    rows = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    expected = [float(rows[k:, k].mean()) for k in range(9)]
    assert_close(first_tokens.even_shares(9), torch.tensor(expected))


def test_four_bits_leave_sixteen_levels_a_block():
    weights = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    rounded = four_bits.rounded(weights)
    step = (weights.unflatten(-1, (2, 32)).amax(-1) - weights.unflatten(-1, (2, 32)).amin(-1)) / 15
    error = (rounded - weights).unflatten(-1, (2, 32)).abs().amax(-1)
    assert (error < 0.51 * step + 2e-3).all()
    assert max(len(block.unique()) for block in rounded.view(-1, 32)) <= 16


def test_a_model_bin_is_read_as_it_was_written():
    def text(word):
        return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"

    joined = np.arange(12, dtype=np.float16).reshape(6, 2)
    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 1)
    data += text("decoder/layer_0/self_attention/linear_0/weight")
    data += struct.pack("<BIIBI", 2, 6, 2, 4, joined.nbytes) + joined.tobytes()
    arrays = whisper_file.arrays(data)
    arrays["decoder/embeddings/weight"] = torch.ones(1, 2)
    state = whisper_file.state_dict(arrays)
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        part = state[f"model.decoder.layers.0.self_attn.{name}.weight"]
        assert_close(part, torch.from_numpy(joined[2 * place : 2 * place + 2]).float())


@pytest.mark.parametrize("kind", gates_close.GATES)
def test_gates_are_seen_and_frozen(kind, ids):
    kind = kind.removeprefix("gate_")
    model = own_model(gate=kind).eval()
    heads = model.config.num_heads
    with gates_close.gates_seen(model) as seen:
        losses, weights = gates_close.passed(model, ids)
    plain = untouched(model, ids)
    assert_close(losses, plain.losses[:, 1:].mean(dim=1), atol=1e-5, rtol=1e-4)
    alpha = gates_close.weights_of_key(weights)
    assert_close(alpha, plain.report.alpha[:, 0, 1:], atol=1e-5, rtol=1e-4)
    # The mean gate of each head, query by query.
    gates = gates_close.by_head(seen, kind, heads)
    for layer, sigmoids in enumerate(seen):
        for head in range(heads):
            of_head = sigmoids.chunk(heads, dim=-1)[head] if kind != "shared" else sigmoids
            mean = of_head.mean(dim=-1)[:, 1:]
            mean = (1 + mean) / 2 if kind == "open" else mean
            assert_close(gates[:, layer, head], mean)
    # Frozen at what they are, all gates stay; at another number, they do not.
    one = ids[:1].expand(2, -1)[:, :2]
    with gates_close.gates_seen(model) as seen:
        before = model(one)
    with gates_close.gates_frozen(model, [gate[0, 1] for gate in seen]):
        after = model(one)
    assert_close(after[:, 1], before[:, 1], atol=1e-4, rtol=1e-4)
    with gates_close.gates_frozen(model, [torch.full_like(gate[0, 1], 0.5) for gate in seen]):
        assert not torch.allclose(model(one)[:, 1], before[:, 1], atol=1e-3)


@pytest.mark.parametrize("kind", ["none", "head"])
def test_lengths_before_and_behind_the_gate(kind, ids):
    model = own_model(gate=kind).eval()
    look = gates_close.Look()
    with gates_close.gates_seen(model) as seen, gates_close.heads_written(model) as merged:
        gates_close.passed(model, ids, look=look)
    before = look.outputs[gates_close.FIRST :]
    behind = [m.unflatten(-1, (model.config.num_heads, -1)).transpose(1, 2) for m in merged]
    if kind == "head":
        before = [o * g.mT[..., None] for o, g in zip(before, seen, strict=True)]
    assert_close(behind, before)
    found = gates_close.lengths(behind)
    mean = sum(o.square().sum(dim=-1).sqrt().mean(dim=1) for o in behind) / len(behind)
    assert_close(found, mean[:, 1:])


def test_the_values_that_are_read_are_compared_with_those_in_view():
    shares, length = torch.rand(2, 3, 12, 12).tril(), torch.rand(2, 3, 12)
    shares = shares / shares.sum(dim=-1, keepdim=True)
    ratios = []
    for text in range(2):
        for head in range(3):
            for query in range(values_gated.SEES, 12):
                weights, seen = (x[text, head][..., 1 : query + 1] for x in (shares, length))
                ratios.append((weights[query] @ seen) / weights[query].sum() / seen.mean())
    found = values_gated.of_values(shares, length)
    assert found["read"] == pytest.approx(float(sum(ratios) / len(ratios)), rel=1e-5)
    first = length[..., 0] / length[..., 1:].mean(dim=-1)
    assert found["first"] == pytest.approx(float(first.mean()), rel=1e-5)


def test_values_are_seen_behind_their_gate(ids):
    model = own_model(gate="value").eval()
    look = values_gated.Values()
    losses, _ = gates_close.passed(model, ids, look=look)
    assert_close(losses, untouched(model, ids).losses[:, 1:].mean(dim=1), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        model.blocks[1].attention.gate.weight.zero_()  # all gates of a block at a half
        at_half = values_gated.Values()
        gates_close.passed(model, ids, look=at_half)
        model.blocks[1].attention.qkv.weight[32:] *= 2
        twice = values_gated.Values()
        gates_close.passed(model, ids, look=twice)
    assert look.read[0] == at_half.read[0] and look.read[1] != at_half.read[1]
    assert twice.read[1]["read"] == pytest.approx(at_half.read[1]["read"], rel=1e-4)


def test_quieter_is_a_ratio_to_the_usual_of_a_place():
    rest = torch.arange(50.0).repeat(4, 1).T  # (texts, places): the same in each place
    length = torch.exp(-0.1 * rest) * torch.tensor([1.0, 5.0, 0.2, 9.0])
    found = gates_close.quieter(rest, length)
    expected = torch.exp(-0.1 * (torch.tensor([4.5, 14.5, 24.5, 34.5, 44.5]) - 24.5))
    assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-3)


def test_shares_are_frozen_at_their_mean(ids):
    model = own_model().eval()
    means = gates_close.shares(model, ids)
    change = gates_close.frozen(means, "x_1", gates_close.FIRST)
    _, weights = gates_close.passed(model, ids, change)
    expected = torch.stack(list(means.values()))[None, :, :, None].expand_as(weights)
    assert_close(weights, expected, atol=1e-4, rtol=1e-3)


def test_queries_are_compared_without_the_mean_of_their_place():
    rest = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    places = torch.arange(5.0)
    found = gates_close.compared(rest + places, 1 - 0.1 * rest - 3 * places)
    assert found["correlation"] == pytest.approx(-1, abs=1e-4)
    assert found["rest"] == sorted(found["rest"])
    assert found["other"] == sorted(found["other"], reverse=True)
    assert np.mean(found["rest"]) == pytest.approx(float((rest + places).mean()), abs=1e-5)


# --- benchmarks/gate_shuffled.py


def test_shares_of_the_first_key_are_swapped_or_doubled_and_the_rest_is_divided_as_before():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.ones(6, 6).triu(1).bool()
    logits = torch.randn(2, 3, 6, 6, generator=generator).masked_fill(hidden, -torch.inf)
    before = logits.softmax(dim=-1)
    usual = before[:, :, 1:, 0].mean(dim=(0, 2))  # (H,)
    swap = gate_shuffled.shuffled(1)
    double = gate_shuffled.doubled({1: usual}, 1)
    assert swap(0, None, None, logits) is logits  # a block that is left alone
    assert double(0, None, None, logits) is logits
    for change in (swap, double):
        after = change(1, None, None, logits).softmax(dim=-1)
        assert not torch.allclose(after, before)
        assert_close(after[:, :, 0], before[:, :, 0])  # the first query has one key
        rest = after[:, :, 1:, 1:] / after[:, :, 1:, 1:].sum(dim=-1, keepdim=True)
        assert_close(rest, before[:, :, 1:, 1:] / before[:, :, 1:, 1:].sum(dim=-1, keepdim=True))
    swapped = swap(1, None, None, logits).softmax(dim=-1)[:, :, 1:, 0]
    assert_close(swapped.sort(dim=-1).values, before[:, :, 1:, 0].sort(dim=-1).values)
    away = double(1, None, None, logits).softmax(dim=-1)[:, :, 1:, 0].logit()
    there = before[:, :, 1:, 0].logit()
    assert_close(away - there, there - usual.logit()[:, None])
