"""`measure` on models of transformers, against the attention maps of their own eager attention."""

import functools
import math
from unittest.mock import Mock

import families
import pytest
import torch
import transformers as tf
from helpers import WRONG, refused, refuses, spoil
from small_models import build, eager_alpha, eager_maps, state_of, tokens
from torch.testing import assert_close

from sinkutils.measuring import passes
from sinkutils.measuring.families import attention_layers
from sinkutils.measuring.measure import measure

T, VOCAB = 24, families.VOCAB
TARGETS = (1, 2, 5)
WINDOWED = ("mistral", "gemma3_text", "gpt_oss", "gemma2+softcap")
close = functools.partial(assert_close, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neo"])
def test_norms_are_those_of_the_hidden_states_and_of_the_cache(family):
    model, ids, seen = build(family), tokens(), []
    if family == "llama":
        model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, use_cache=True)
    report = measure(model, ids, batch_size=2)
    hidden = [h.norm(dim=-1).mean(dim=0) for h in (*output.hidden_states[:2], *seen[:1])]
    close(report.embedding_norms, hidden[0])
    close(report.hidden_norms[0], hidden[1])
    if family == "llama":
        close(report.hidden_norms[-1], hidden[2])  # before the final norm
    assert (report.key_norms is None) == (family == "gpt_neo")
    for layer, cached in enumerate(output.past_key_values.layers if family != "gpt_neo" else ()):
        keys, values = (x.norm(dim=-1).mean(dim=(0, 1)) for x in (cached.keys, cached.values))
        close(report.key_norms[layer], keys)
        close(report.value_norms[layer], values)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bloom", "mistral"])
def test_alpha_of_every_key_and_maps_of_the_heads_asked_for_or_refused_by_name(family):
    model, ids = build(family), tokens()
    maps = eager_maps(model, ids)
    chosen = ((1, 2), (0, 3), (1, 2), [0, 1])
    report = measure(model, ids, range(1, T + 1), heads=chosen, batch_size=2)
    close(report.alpha, eager_alpha(model, ids, tuple(range(1, T + 1))))
    assert set(report.kept) == {(1, 2), (0, 3), (0, 1)}
    for (layer, head), kept in report.kept.items():
        close(kept.map, maps[layer][:, head])
        if family == "llama":  # two heads share a key
            logits = kept.queries @ kept.keys.mT / math.sqrt(8)
            hidden = torch.ones(T, T).triu(1).bool()
            close(logits.masked_fill(hidden, -math.inf).softmax(dim=-1), kept.map)
    strange = (((0, 99),), r"\(0, 99\).*heads 0..3"), (((7, 0),), r"\(7, 0\).*layers are \[0, 1\]")
    for heads, named in strange:
        refuses(named, measure, model, ids, heads=heads)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_a_padded_sequence_has_the_numbers_that_it_has_alone(family, side):
    model, ids, lengths = build(family), tokens(4), (T, 11, 17, 11)
    mask, padded = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(T - length, T)
        padded[row, place], mask[row, place] = ids[row, :length], 1
    report = measure(model, padded, TARGETS, attention_mask=mask)
    alone = [measure(model, ids[i : i + 1, :n], TARGETS) for i, n in enumerate(lengths)]
    close(report.alpha, torch.cat([r.alpha for r in alone]))
    assert report.lengths.tolist() == list(lengths)
    at_10 = torch.stack([r.hidden_norms[:, 10] for r in alone]).mean(dim=0)
    close(report.hidden_norms[:, 10], at_10)
    # only one sequence is that long
    close(report.hidden_norms[:, -1], alone[0].hidden_norms[:, -1])
    mask[[1, 3]] = 0
    mask[1, :4] = mask[3, :5] = 1  # the largest target is 5
    short = measure(model, padded, TARGETS, attention_mask=mask)
    assert (short.samples, short.skipped) == (3, 1) and "skipped 1" in str(short)


PRECISIONS = [
    *((family, dtype) for family in ("gpt2", "llama", "mistral", "gemma3_text", "gpt_oss", "gemma2+softcap")
      for dtype in (torch.bfloat16, torch.float16)),
    *((family, torch.float64) for family in ("llama", "mistral", "qwen3", "gemma2+softcap", "gpt_neo")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "dtype"), PRECISIONS, ids=str)
def test_other_precisions_stay_close_to_dense_float32(family, dtype):
    model, ids = build(family).to(dtype), tokens()
    report = measure(model, ids, TARGETS)
    assert report.alpha.dtype == report.hidden_norms.dtype == torch.float32
    wide = model if dtype == torch.float64 else model.float()
    limit = 1e-6 if dtype == torch.float64 else 0.03
    assert (report.alpha - eager_alpha(wide, ids, TARGETS)).abs().max() < limit


@pytest.mark.parametrize(
    "family", ["llama", "gpt_neo", "falcon", "xglm"]
)  # the last leaves hooks on itself
def test_the_model_is_left_as_it_was_also_after_an_exception_and_its_own_outputs_still_come(family):
    model, ids = build(family), tokens()
    model.train()
    model.config._attn_implementation = "sdpa"  # as models come
    blocks = attention_layers(model.base_model)[0]
    blocks[0].eval()  # a frozen part in a training model
    before = state_of(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    first = measure(model, ids)
    assert state_of(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    broken = blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure(model, ids)
    broken.remove()
    assert state_of(model) == before
    model.config._attn_implementation = "eager"
    assert len(eager_maps(model, ids)) == 2  # which installs hooks that are its own to keep
    before = state_of(model)
    assert torch.equal(measure(model, ids).alpha, first.alpha)
    assert state_of(model) == before and len(eager_maps(model, ids)) == 2


def test_positions_that_are_not_learned_are_refused_before_they_are_looked_up(monkeypatch):
    def look_up(self, input_ids):
        raise AssertionError("as on a GPU")

    for family in ("gpt2", "opt"):
        model = build(family)
        monkeypatch.setattr(type(model.base_model), "forward", look_up)
        refuses("321 positions, and the model has learned 320", measure, model, tokens(1, 321))


def test_bos_is_read_off_the_ids_and_printed_also_where_there_are_several():
    model, ids = build("llama"), tokens()
    assert measure(model, ids).bos is False
    ids[:, 0] = model.config.bos_token_id
    model.name_or_path = "somebody/llama"
    report = measure(model, ids)
    assert report.name == "somebody/llama" and measure(model, ids, name="mine").name == "mine"
    assert report.bos is True and "BOS first: yes" in str(report) and "T = 24, n = 3" in str(report)
    vars(model.config)["bos_token_id"] = [1, 2]  # as some families have it
    ids[:, 0] = torch.tensor([1, 2, 1])
    assert measure(model, ids).bos is True
    ids[1, 0] = 5
    assert measure(model, ids).bos is False


@pytest.mark.parametrize("where", WRONG)
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_a_fused_path_with_a_wrong_row_sum_is_not_used(kind, where, monkeypatch):
    """Also where only row 3 is wrong, which sees the first keys."""
    model, ids = build("llama" if kind == "causal" else "mistral"), tokens()
    expected = eager_alpha(model, ids, TARGETS)
    assert measure(model, ids, TARGETS).path == "fused"
    spoil(monkeypatch, where)
    report = measure(model, ids, TARGETS)
    assert report.path == "exact"
    assert_close(report.alpha, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_kernel_that_is_not_there_is_not_used_and_a_full_memory_is_said(error, monkeypatch):
    model, ids = build("llama"), tokens()
    expected = eager_alpha(model, ids, TARGETS)
    monkeypatch.setattr(passes, "fused", Mock(side_effect=error("no such op")))
    report = measure(model, ids, TARGETS)
    assert report.path == "exact"
    assert_close(report.alpha, expected, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(passes, "fused", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        measure(model, ids, TARGETS)


def test_a_kernel_is_tried_anew_where_longer_sequences_bring_a_mask(monkeypatch):
    model, ids, mask = build("mistral"), tokens(), torch.ones(3, T, dtype=torch.long)
    mask[0, 6:] = 0  # shorter than the window of 7: plainly causal, and run first
    right = passes.fused

    def wrong(q, k, v, mask=None, **kwargs):
        out, lse = right(q, k, v, mask=mask, **kwargs)
        return out, lse + (mask is not None)

    monkeypatch.setattr(passes, "fused", wrong)
    report = measure(model, ids, TARGETS, attention_mask=mask)
    assert_close(report.alpha[1:], eager_alpha(model, ids[1:], TARGETS), atol=1e-6, rtol=1e-5)
    assert report.path == "exact" and report.windows == (7, 7)


def test_a_window_longer_than_a_block_of_queries_has_the_same_numbers(monkeypatch):
    model, ids = build("mistral"), tokens()
    expected = measure(model, ids, TARGETS)
    monkeypatch.setattr(passes, "ROWS", 5)
    report = measure(model, ids, TARGETS)
    close(report.alpha, expected.alpha)
    close(report.hidden_norms, expected.hidden_norms)
    assert report.path == expected.path == "fused"


def test_texts_longer_than_a_chunk_that_does_not_slide_are_refused():
    model = build("llama4_text+chunks")
    assert measure(model, tokens(length=families.WINDOW), epsilons=(0.5,)).windows == ()
    refuses("attends within chunks of 7 tokens: ids have 24", measure, model, tokens())


@pytest.mark.parametrize("family", [*WINDOWED, "gpt_neo", "doge"])
def test_windows_are_named_and_alpha_comes_over_the_queries_that_see_the_key(family):
    model, ids = build(family), tokens()
    maps, report = eager_maps(model, ids), measure(model, ids, TARGETS)
    for k in TARGETS:
        seeing = [(layer[:, :, k - 1 :, k - 1] > 0).float().mean(dim=(0, 1, 2)) for layer in maps]
        assert report.caps(k) == pytest.approx([float(share) for share in seeing])
        columns = [m[:, :, k - 1 :, k - 1] for m in maps]
        over = torch.stack([x.sum(-1) / (x[0, 0] > 0).sum() for x in columns], 1)
        assert_close(report.visible_alpha(k), over, atol=1e-5, rtol=1e-4)
    assert min(report.caps()) == pytest.approx(7 / T)
    assert "in layers with a window alpha_1 is at most 0.292: see caps(1)" in str(report)


def test_chunks_of_queries_change_nothing(monkeypatch):
    for family in ("gemma2+softcap", "gpt_oss", "mistral"):
        model, ids = build(family), tokens()
        whole = measure(model, ids, TARGETS, exact=True, heads=((0, 1),))
        with monkeypatch.context() as patch:
            patch.setattr(passes, "EXACT_ELEMENTS", 3 * 4 * T * 5)  # five queries at a time
            pieces = measure(model, ids, TARGETS, exact=True, heads=((0, 1),))
        for name in ("alpha", "hidden_norms"):
            assert_close(getattr(pieces, name), getattr(whole, name), atol=1e-6, rtol=1e-5)
        assert_close(pieces.kept[0, 1].map, whole.kept[0, 1].map, atol=1e-6, rtol=1e-5)


def without_rotary_angles():
    """As after `load_state_dict(assign=True)` of a model that was made on the meta device."""
    model = build("llama")
    model.model.rotary_emb.to("meta")
    return model


NONE = {
    "a buffer on the meta device .*inv_freq": without_rotary_angles,
    "reorder_and_upcast_attn, set_attn_implementation": lambda: build(
        "gpt2", reorder_and_upcast_attn=True
    ),
    "no causal LM": lambda: tf.BertForMaskedLM(
        tf.BertConfig(vocab_size=VOCAB, num_hidden_layers=1)
    ),
    "encoder-decoder": lambda: tf.T5ForConditionalGeneration(families.small_config("t5")),
    "embeds no tokens": lambda: tf.ViTModel(tf.ViTConfig(num_hidden_layers=1)),
    "meta device .*load it first": lambda: build("llama").to("meta"),
    "float8_e4m3fn weights": lambda: build("llama").to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("message", NONE)
def test_models_without_a_sink_to_measure_are_refused(message):
    refuses(message, measure, NONE[message](), tokens())


def test_bad_input_is_a_clear_error():
    model, ids = build("llama"), tokens()
    refuses("count from 1 to 3", measure, model, tokens(length=3), targets=(5,))
    refuses("count from 1", measure, model, ids, targets=(0,))
    refuses(r"in \(0, 1\)", measure, model, ids, epsilons=(1.0,))
    refuses("epsilons must be a sequence of numbers", measure, model, ids, epsilons=0.3)
    refuses("int64", measure, model, tokens().float())
    refuses(r"ids must be in 0..95, .* got 96..96", measure, model, torch.full((1, 4), VOCAB))
    refuses("a row of padding", measure, model, ids, attention_mask=torch.zeros(3, T))
    refuses("attention_mask must be of type Tensor", measure, model, ids, attention_mask=[[1]])
    with refused("between the tokens"):
        measure(model, ids, attention_mask=torch.tensor([1, 0] * (T // 2)).repeat(3, 1))
    with refused("attention_mask says of each query"):
        measure(model, ids, attention_mask=torch.ones(3, 1, T, T))
    refuses("heads must be a sequence of", measure, model, ids, heads=(1, 0))
    refuses("bos must be True, False or None", measure, model, ids, bos="maybe")
    ragged = torch.nested.nested_tensor([ids[0], ids[1]])
    for without in (ids.to("meta"), ids.to_sparse(), ragged):
        refuses("ids must be a dense tensor", measure, model, without)
        refuses(
            "attention_mask must be a dense tensor", measure, model, ids, attention_mask=without
        )
