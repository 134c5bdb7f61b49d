"""What a batch holds beside its ids counts or is refused, and texts packed in a row are samples.

The right value is by definition: from the maps that the model itself computes of the same batch, or
from each text alone.
"""

import types
import warnings

import pytest
import torch
import transformers as tf
from helpers import alpha_by_definition, own_model, refuses
from small_models import build, eager_maps, state_of, tokens
from torch.testing import assert_close

from sinkutils import explore, surgery
from sinkutils.measuring.measure import measure

T, TARGETS = 24, (1, 2)
LENGTHS = (9, 1, 14)  # of the texts in a row
SPANS = (slice(0, 9), slice(9, 10), slice(10, 24))
close = {"atol": 1e-6, "rtol": 1e-5}


def restarting(lengths=LENGTHS):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def ends(lengths=LENGTHS):
    return torch.tensor((0, *lengths)).cumsum(0).int()


def alone(model, ids, **options):
    return [measure(model, ids[:, span], **options) for span in SPANS]


PACKED = [
    *((name, "sdpa") for name in ("llama", "mistral", "gpt2", "gemma3_text", "qwen3")),
    *((name, "eager") for name in ("llama", "mistral", "gpt2", "gemma2+softcap", "granite_swa")),
]


@pytest.mark.filterwarnings("ignore:texts of")
@pytest.mark.parametrize(("family", "implementation"), PACKED)
def test_each_text_packed_in_a_row_has_the_numbers_that_it_has_alone(family, implementation):
    model, ids = build(family), tokens(1)
    model.set_attn_implementation(implementation)
    batch = {"input_ids": ids, "position_ids": restarting(), "labels": ids}
    report = measure(model, batch, heads=[(0, 1)])
    expected = alone(model, ids, heads=[(0, 1)])
    assert report.lengths.tolist() == list(LENGTHS) and report.packed == "kept apart"
    assert_close(report.alpha, torch.cat([r.alpha for r in expected]), **close)
    if report.star is not None:
        assert_close(report.star, torch.cat([r.star for r in expected]), **close)
    for index, one in enumerate(expected):
        n = LENGTHS[index]
        assert_close(report.kept[0, 1].map[index, :n, :n], one.kept[0, 1].map[0], **close)
    at_8 = torch.stack([expected[i].hidden_norms[:, 8] for i in (0, 2)]).mean(dim=0)
    assert_close(report.hidden_norms[:, 8], at_8, atol=1e-4, rtol=1e-5)
    firsts = torch.stack([one.first_elements for one in expected]).mean(dim=0)
    assert_close(report.first_elements, firsts, atol=1e-4, rtol=1e-4)
    if family == "mistral":
        assert report.windows == (7, 7)
    exact = measure(model, batch, exact=True)
    assert_close(report.alpha, exact.alpha, **close)
    # the second token of a text of one is skipped
    assert measure(model, batch, TARGETS).skipped == 1
    assert "texts packed in a row: kept apart" in str(report)
    whole = measure(model, ids[:, SPANS[0]], bos=False).digest
    one = {"input_ids": ids[:, :9], "position_ids": torch.arange(9)[None]}
    assert measure(model, one).digest == whole and measure(model, one).packed == ""


WAYS = {
    "position_ids": lambda: {"position_ids": restarting()},
    "and cu_seq_lens": lambda: {
        "position_ids": restarting(), "cu_seq_lens_q": ends(), "cu_seq_lens_k": ends(),
        "max_length_q": 14, "max_length_k": 14,
    },
    "and seq_idx": lambda: {
        "position_ids": restarting(),
        "seq_idx": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int(),
    },
    "from 2 on": lambda: {"position_ids": restarting() + 2},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:texts of")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_collator_for_packing_returns_is_measured(way):
    model, ids = build("llama"), tokens(1)
    report = measure(model, {"input_ids": ids} | WAYS[way]())
    assert report.packed == "kept apart"
    expected = torch.cat([r.alpha for r in alone(model, ids)])
    assert_close(report.alpha, expected, **close)  # rotary knows distances alone


MIXED = {
    "a mask of 1, 2, ..": lambda: {
        "attention_mask": torch.arange(1, 4).repeat_interleave(torch.tensor(LENGTHS))[None]
    },
    "cu_seq_lens alone": lambda: {"cu_seq_lens_q": ends(), "cu_seq_lens_k": ends()},
    "position_ids with a mask": lambda: {
        "position_ids": restarting(), "attention_mask": torch.ones(1, T, dtype=torch.int64)
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:texts of")
@pytest.mark.parametrize(
    ("family", "way"),
    [*(("llama", way) for way in MIXED), ("bloom", "a mask of 1, 2, .."),
     ("gpt_oss", "position_ids"), ("opt", "position_ids")],
)  # fmt: skip
def test_texts_that_the_model_lets_see_each_other_are_measured_so_and_it_is_said(family, way):
    model, ids, given = build(family), tokens(1), (MIXED | WAYS)[way]()
    with pytest.warns(UserWarning, match="see the texts before them in 2 of 2 layers"):
        report = measure(model, {"input_ids": ids} | given)
    with torch.no_grad():
        maps = model(ids, **given, use_cache=False, output_attentions=True).attentions
    for index, span in enumerate(SPANS):
        own = alpha_by_definition([m[:, :, span, span] for m in maps], (1,))
        assert_close(report.alpha[index], own[0], atol=1e-5, rtol=1e-4)
    assert "see the texts before them" in str(report)


def test_several_packed_rows_and_padding_at_an_end_are_measured():
    model, ids = build("llama"), tokens(3)
    positions = torch.cat([restarting(), restarting((12, 12)), restarting((24,))])
    report = measure(model, {"input_ids": ids, "position_ids": positions})
    parts = [*(ids[:1, s] for s in SPANS), ids[1:2, :12], ids[1:2, 12:], ids[2:]]
    expected = [measure(model, part, epsilons=(0.99,)).alpha for part in parts]
    assert_close(report.alpha, torch.cat(expected), **close)
    assert report.lengths.tolist() == [9, 1, 14, 12, 12, 24]
    mask = torch.tensor([1] * 9 + [2] * 10 + [0] * 5)[None]
    with pytest.warns(UserWarning, match="see the texts before them"):
        padded = measure(model, ids[:1], attention_mask=mask)
    with torch.no_grad():
        maps = model(ids[:1], attention_mask=mask, use_cache=False, output_attentions=True)
    for index, span in enumerate((slice(0, 9), slice(9, 19))):
        own = alpha_by_definition([m[:, :, span, span] for m in maps.attentions], (1,))
        assert_close(padded.alpha[index], own[0], atol=1e-5, rtol=1e-4)


def test_descriptions_that_contradict_each_other_or_the_model_are_refused():
    model, ids = build("llama"), tokens(1)
    two = {"input_ids": ids, "position_ids": restarting(), "cu_seq_lens_q": ends((12, 12))}
    refuses("position_ids and cu_seq_lens_q tell of different texts", measure, model, two)
    short = {"input_ids": ids, "cu_seq_lens_q": ends((12, 11))}
    refuses("cu_seq_lens_q must rise from 0 to the 24 tokens", measure, model, short)
    packed = {"input_ids": ids, "position_ids": restarting()}
    small = {"input_ids": ids % 60, "position_ids": restarting()}
    refuses("TransformerLM takes no position_ids", measure, own_model(), small)
    refuses("surgery takes one text a row", surgery.untouched, model, packed)
    of_two = {"input_ids": tokens(2), "position_ids": torch.arange(T + 1)[None]}
    refuses("position_ids must have the shape of ids", measure, model, of_two)
    refuses("holds something else", measure, model, ids, attention_mask=torch.full((1, T), 0.5))


def test_positions_that_are_not_those_of_the_tokens_are_handed_over():
    model, ids = build("gpt2"), tokens()
    shifted = torch.arange(T)[None] + 7
    with torch.no_grad():
        maps = model(ids, position_ids=shifted, use_cache=False, output_attentions=True).attentions
    expected = alpha_by_definition(maps, TARGETS)
    assert (expected - measure(model, ids, TARGETS).alpha).abs().max() > 1e-3
    report = measure(model, {"input_ids": ids, "position_ids": shifted}, TARGETS)
    assert_close(report.alpha, expected, atol=1e-5, rtol=1e-4)
    left = torch.ones_like(ids)
    left[:, :5] = 0
    usual = {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)}
    report = measure(model, {"input_ids": ids} | usual, TARGETS)
    assert_close(report.alpha, measure(model, ids, TARGETS, attention_mask=left).alpha, **close)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_the_forward_takes_is_handed_to_it_and_what_changes_nothing_is_left_out(family):
    model, ids = build(family), tokens()
    plain = measure(model, ids, TARGETS)
    stray = {
        "labels": ids, "special_tokens_mask": torch.zeros_like(ids), "length": torch.full((3,), T),
        "offset_mapping": torch.zeros(3, T, 2), "overflow_to_sample_mapping": torch.arange(3),
        "assistant_masks": ids % 2, "text": ["a", "b", "c"], "output_attentions": True,
    }  # fmt: skip
    report = measure(model, {"input_ids": ids} | stray, TARGETS)
    assert torch.equal(report.alpha, plain.alpha) and report.path == plain.path
    kinds = (ids % 2) * 40
    report = measure(model, {"input_ids": ids, "token_type_ids": kinds}, TARGETS)
    with torch.no_grad():
        given = {"token_type_ids": kinds, "use_cache": False, "output_attentions": True}
        expected = alpha_by_definition(model(ids, **given).attentions, TARGETS)
    assert_close(report.alpha, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(report.alpha, plain.alpha) == (family == "llama")
    found = surgery.untouched(model, {"input_ids": ids, "token_type_ids": kinds})
    assert_close(found.report.alpha, report.alpha, atol=1e-5, rtol=1e-4)
    page = explore(model, {"input_ids": ids, "token_type_ids": kinds})
    assert page.data["alpha"][0] == pytest.approx(report.alpha[0, 0].flatten().tolist(), abs=2e-3)


def test_an_entry_of_no_one_row_counts_only_where_it_changes_the_pass():
    model, ids = build("llama"), tokens()
    stray = {"head_mask": torch.ones(2, 4), "overflowing_tokens": [[1]], "places": torch.arange(T)}
    report = measure(model, {"input_ids": ids} | stray, TARGETS)
    assert torch.equal(report.alpha, measure(model, ids, TARGETS).alpha)
    inner = model.model

    def forward(input_ids, **others):
        return inner(
            input_ids=input_ids, position_ids=others.get("places", torch.arange(T) + 3)[None]
        )

    model.forward = forward
    stray["places"] = torch.arange(T).flip(0)
    refuses("places is of no one row", measure, model, {"input_ids": ids} | stray)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_that_are_none_are_refused(family):
    model, ids = build(family), tokens()
    for positions, message in (
        (torch.arange(T)[None] - 5, "position_ids must be at least 0, got -5"),
        (torch.tensor(3), r"position_ids must have the shape of ids, .* got \(3, 1\)"),
    ):
        refuses(message, measure, model, {"input_ids": ids, "position_ids": positions})


@pytest.mark.filterwarnings("ignore:position_ids have steps")
@pytest.mark.parametrize("masked", [True, False])
def test_positions_between_whole_numbers_begin_no_text(masked):
    model, ids = build("llama"), tokens(1)
    given = {"position_ids": torch.arange(T)[None] / 2}
    if masked:
        given["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        maps = model(ids, **given, use_cache=False, output_attentions=True).attentions
    expected = alpha_by_definition(maps, TARGETS)
    assert_close(measure(model, {"input_ids": ids} | given, TARGETS).alpha, expected, **close)


def test_what_is_no_real_number_is_refused():
    model, ids = build("llama"), tokens(1)
    half = torch.arange(T)[None] / 2
    for name, x, message in (
        ("position_ids", half > 1, "position_ids must be numbers, got booleans"),
        ("position_ids", half * torch.nan, "position_ids must hold real numbers"),
        ("position_ids", half + 0j, "position_ids must hold real numbers"),
        ("attention_mask", torch.ones(1, T) * torch.inf, "attention_mask must hold real numbers"),
        ("seq_idx", half * torch.nan, "seq_idx must hold real numbers"),
    ):
        refuses(message, measure, model, {"input_ids": ids, name: x})


def test_a_batch_on_which_the_model_itself_does_not_run_is_refused_in_its_words():
    model, ids = build("llama"), tokens(1)
    several = torch.arange(T).flip(0).expand(3, 1, T)
    says = "LlamaForCausalLM does not run on this batch: RuntimeError"
    refuses(says, measure, model, {"input_ids": ids, "position_ids": several})
    model.model.layers[0].register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # a hook's error is its own
        measure(model, ids)


def adapted(model):
    """As PEFT: a forward that takes the name of an adapter for each row."""
    inner, known = model.model, {"a": 0, "b": 1, "c": 2}

    def forward(input_ids, adapter_names=None, **others):
        names = ["a"] * len(input_ids) if adapter_names is None else adapter_names
        if len(names) != len(input_ids):
            raise ValueError("as many names as rows")
        steps = torch.tensor([[1 + known[name]] for name in names])
        positions = torch.arange(input_ids.shape[1]) * steps
        return inner(input_ids, position_ids=positions, attention_mask=torch.ones_like(input_ids))

    model.forward = forward
    return model


def test_names_for_each_row_go_with_their_rows():
    model, ids = adapted(build("llama")), tokens(12)
    names = [*"abc" * 4]
    mask = torch.ones_like(ids)
    mask[::4, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "adapter_names": names}
    report = measure(model, batch, TARGETS, batch_size=2)
    for index, name in enumerate(names):
        one = {"input_ids": ids[index, None, mask[index] > 0], "adapter_names": [name]}
        assert_close(report.alpha[index], measure(model, one, TARGETS).alpha[0], **close)
    del batch["attention_mask"]
    shown = measure(model, batch, TARGETS)
    plain = measure(model, ids, TARGETS)
    assert_close(shown.alpha[::3], plain.alpha[::3], **close)
    assert (shown.alpha[1:3] - plain.alpha[1:3]).abs().amax(dim=(1, 2, 3)).min() > 1e-4
    page = explore(model, batch)
    assert page.data["alpha"][1] == pytest.approx(shown.alpha[1, 0].flatten().tolist(), abs=2e-3)


def test_an_entry_counts_that_only_one_of_many_rows_shows():
    model, ids = adapted(build("llama")), tokens(1).repeat(12, 1)
    inner = model.forward
    model.forward = lambda input_ids, kind=None, **others: inner(
        input_ids, None if kind is None else ["a" if k < 9 else "b" for k in kind]
    )
    report = measure(model, {"input_ids": ids, "kind": torch.arange(12)})
    assert_close(report.alpha[:9], report.alpha[:1].expand(9, -1, -1, -1), **close)
    assert (report.alpha[9:] - report.alpha[:1]).abs().max() > 1e-4


def test_a_container_that_changes_the_pass_is_of_no_one_row():
    model, ids = build("llama"), tokens()
    inner = model.model
    model.forward = lambda input_ids, more=None, **others: inner(
        inputs_embeds=inner.embed_tokens(input_ids)
        * (1 if more is None else more[0][:, None, None])
    )
    scales = [torch.tensor([1.0, 2.0, 3.0])]
    refuses("more is of no one row", measure, model, {"input_ids": ids, "more": scales})


def test_an_entry_that_only_a_forward_of_ones_own_reads_counts():
    model, ids = build("llama"), tokens()
    inner = model.model

    def forward(input_ids, **others):
        shift = others.pop("moved", torch.zeros(len(input_ids), 1).long())
        kept = torch.arange(input_ids.shape[1])[None] * (1 + shift)
        return inner(input_ids, position_ids=kept, attention_mask=torch.ones_like(input_ids))

    model.forward = forward
    plain, moved = measure(model, ids), torch.tensor([[0], [1], [2]])
    report = measure(model, {"input_ids": ids, "moved": moved}, batch_size=2)
    assert_close(report.alpha[:1], plain.alpha[:1], **close)
    assert (report.alpha[1:] - plain.alpha[1:]).abs().amax(dim=(1, 2, 3)).min() > 1e-4


class Longer(tf.LlamaForCausalLM):
    """Learned tokens in front of the text, or behind it."""

    behind = False

    def forward(self, input_ids, **others):
        embedded = self.model.embed_tokens(input_ids)
        memory = embedded[:, :4].flip(1)
        parts = [embedded, memory] if self.behind else [memory, embedded]
        hidden = self.model(inputs_embeds=torch.cat(parts, dim=1), use_cache=False)
        return types.SimpleNamespace(logits=self.lm_head(hidden.last_hidden_state))


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("behind", [False, True])
def test_positions_that_are_none_of_the_ids_are_refused_in_words(behind, norms):
    model = build("llama")
    model.__class__ = Longer
    model.behind = behind
    refuses("computes 28 positions for 24 ids", measure, model, tokens(), norms=norms)
    refuses("computes 28 positions", measure, model, tokens(), norms=norms, check=False)


def test_surgery_takes_a_mask_as_measure_does():
    model, ids = build("llama"), tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[2, 20:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    texts = (ids[:1, 9:], ids[1:2], ids[2:, :20])
    operations = (
        surgery.untouched,
        surgery.hide,
        lambda m, x, **o: surgery.stream(m, x, 4, 1, **o),
        lambda m, x, **o: surgery.set_back(m, x, 0, [3], **o),
        lambda m, x, **o: surgery.transplant(m, x, ids[:, :3], **o),
    )
    for operate in operations:
        found, masked = operate(model, batch), operate(model, ids, attention_mask=mask)
        for index, text in enumerate(texts):
            one = operate(model, text)
            n = one.losses.shape[1]
            assert_close(found.losses[index, :n], one.losses[0], atol=1e-5, rtol=1e-5)
            assert found.losses[index, n:].isnan().all()
            assert_close(found.report.alpha[index], one.report.alpha[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(found.predicted, masked.predicted)
    refuses("a text of ids has one token", surgery.untouched, model, ids[:, :1])


def test_recorded_maps_are_the_oracle_here():
    """The maps that these tests compare with are the model's own."""
    assert len(eager_maps(build("llama"), tokens(1))) == 2


# --- what transformers itself does with such batches, as docs/measuring.md and
# docs/all_on_the_first_token.md tell it


def of_the_first_text(model, ids, **given):
    """What the first half of the text gets from the second, at most."""
    with torch.no_grad():
        maps = model(ids, output_attentions=True, **given).attentions
    return float(maps[0][..., T // 2 :, : T // 2].max())


def test_transformers_keeps_packed_texts_apart_only_without_a_mask_and_a_cache():
    model, ids, positions = build("llama"), tokens(1), restarting((12, 12))
    packed = {"position_ids": positions}
    assert of_the_first_text(model, ids, **packed, use_cache=False) == 0
    assert of_the_first_text(model, ids, **packed) > 0.1
    assert of_the_first_text(model.train(), ids, **packed) > 0.1
    ones = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    assert of_the_first_text(model, ids, **packed, **ones) > 0.1
    with pytest.warns(UserWarning, match="see the texts before them"):
        measure(model, {"input_ids": ids, "use_cache": True} | packed)


def test_steps_of_two_make_each_token_a_text_and_a_boolean_mask_is_added():
    model, ids = build("llama"), tokens(1)
    with torch.no_grad():
        given = {"output_attentions": True, "use_cache": False}
        (first, _) = model(ids, position_ids=2 * torch.arange(T)[None], **given).attentions
        assert_close(first[0, 0], torch.eye(T))
        seen = torch.ones(1, 1, T, T).tril().bool()
        (first, _) = model(ids, attention_mask=seen, **given).attentions
        assert first[0].triu(1).sum(dim=-1).max() > 0.1
        left = torch.ones_like(ids)
        left[:, :3] = 0
        (first, _) = model(ids, attention_mask=left, **given).attentions
        assert_close(first[0, :, :3], torch.full((4, 3, T), 1 / T))
    message = "steps other than 1"
    with pytest.warns(UserWarning, match=message):
        measure(model, {"input_ids": ids, "position_ids": 2 * torch.arange(T)[None]})
    refuses(
        "attention_mask says of each query which keys", measure, model, ids, attention_mask=seen
    )
    assert tf.Gemma2ForCausalLM(build("gemma2").config)._supports_sdpa is False


# --- encoder-decoders


SMALL = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WHISPER = {"max_source_positions": 20, "num_mel_bins": 8, "suppress_tokens": None}
SPOKEN = {"input_features": torch.linspace(-1, 1, 3 * 8 * 40).reshape(3, 8, 40)}
WHOLE = {
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config(**T5, decoder_start_token_id=0)),
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig(**SMALL)),
    "whisper": (
        tf.WhisperForConditionalGeneration,
        tf.WhisperConfig(**SMALL | WHISPER, begin_suppress_tokens=None),
    ),
}


def whole(name):
    """A random encoder-decoder model, and what its encoder reads."""
    kind, config = WHOLE[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    mask = torch.arange(12)[None] < torch.tensor([[12], [9], [5]])
    written = {"input_ids": tokens(3, 12), "attention_mask": mask.long()}
    return model, SPOKEN if name == "whisper" else written


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.filterwarnings("ignore:texts of")
def test_a_decoder_is_measured_with_what_its_encoder_has_read(name):
    model, read = whole(name)
    target = tokens(3, 12).flip(1)
    mask = torch.ones_like(target)
    mask[1, 10:] = 0
    for said in (
        {"decoder_input_ids": target},
        {"labels": target},
        {"decoder_input_ids": target, "decoder_attention_mask": mask},
    ):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            maps = model(**read, **said, output_attentions=True).decoder_attentions
        before = state_of(model)
        report = measure(model, read | said, TARGETS)
        model.set_attn_implementation("sdpa")
        fast = measure(model, read | said, TARGETS)
        for index, n in enumerate(report.lengths.tolist()):
            expected = alpha_by_definition([m[index, None, :, :n, :n] for m in maps], TARGETS)
            assert_close(report.alpha[index], expected[0], **close)
            assert_close(fast.alpha[index], expected[0], **close)
        assert report.bos == ("labels" in said)
        model.set_attn_implementation("eager")
        assert state_of(model) == before
    with torch.no_grad():
        states = model.get_encoder()(**read)
    kept = {n: x for n, x in read.items() if n == "attention_mask"}
    for outputs in (states, (states[0],)):
        given = kept | {"encoder_outputs": outputs, "decoder_input_ids": target}
        report = measure(model, given, TARGETS)
        expected = measure(model, read | {"decoder_input_ids": target}, TARGETS).alpha
        assert_close(report.alpha, expected, **close)
    page = explore(model, read | {"decoder_input_ids": target})
    assert page.data["alpha"][0] == pytest.approx(expected[0, 0].flatten().tolist(), abs=2e-3)
    alone = measure(model.get_decoder(), target, TARGETS)
    assert (alone.alpha - expected).abs().max() > 0.05
    refuses("give su.measure a batch with decoder_input_ids", measure, model, target)


def test_bos_behind_the_decoders_first_token_is_no_second_bos():
    model, read = whole("bart")
    labels = tokens(3, 12)
    labels[:, 0] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure(model, read | {"labels": labels}, epsilons=(0.4,)).bos


@pytest.mark.parametrize("padded", [2, 3])
def test_padding_that_is_the_decoders_first_token_too_is_warned_of(padded):
    model, read = whole("t5")
    labels = tokens(3, 12).clamp(min=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(model, read | {"labels": labels}, epsilons=(0.4,))
    labels[1, -padded:] = -100  # as a collator marks what the loss leaves out
    with pytest.warns(UserWarning, match="padding token"):
        measure(model, read | {"labels": labels}, epsilons=(0.4,))


def test_an_encoders_states_are_of_a_row_even_where_their_shape_is_that_of_the_ids():
    """Of 3 rows an encoder reads 3 tokens, and a decoder as many as the states are wide."""
    model, _ = whole("bart")
    given = {"input_ids": tokens(3, 3), "decoder_input_ids": tokens(3, 32)}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**given, output_attentions=True).decoder_attentions
    expected = alpha_by_definition(maps, (1,))
    assert_close(measure(model, given, batch_size=1).alpha, expected, **close)


def test_a_batch_on_which_the_encoder_does_not_run_or_that_holds_a_cache_is_refused():
    model, read = whole("bart")
    given = read | {"labels": tokens(3, 12)}
    runs_not = "BartForConditionalGeneration does not run on this batch: "
    for message, batch in (
        (runs_not + "ValueError: You must specify", {"labels": given["labels"]}),
        (runs_not + "IndexError", given | {"input_ids": given["input_ids"] + 900}),
        (runs_not + "TypeError", given | {"encoder_outputs": 3}),
        ("past_key_values is for what a model keeps", given | {"past_key_values": object()}),
    ):
        refuses(message, measure, model, batch)
    model.get_decoder = lambda: model.model.decoder.layers[0]  # as FSMT's, which is a plain module
    refuses("has a decoder that is no model of transformers by itself", measure, model, given)


def test_a_mask_that_may_be_the_encoders_and_lists_are_refused():
    model, read = whole("bart")
    given = read | {"labels": tokens(3, 12)}
    mask = given["attention_mask"]
    refuses("the encoder's or the decoder's", measure, model, given, attention_mask=mask)
    for name, x in given.items():
        refuses(f"{name} must be of type Tensor", measure, model, given | {name: x.tolist()})


@pytest.mark.parametrize("operate", [measure, surgery.untouched])
def test_what_stands_for_other_tokens_than_the_ids_is_refused_by_its_name(operate):
    model, ids = build("llama"), tokens()
    with torch.no_grad():
        past = model(ids[:, :4], use_cache=True).past_key_values
        embedded = model.get_input_embeddings()(ids)
    seen = torch.ones(3, 1, T, T).tril()
    says = {
        "past_key_values is for what a model keeps of other tokens": {"past_key_values": past},
        "cache_params is for what a model keeps": {"cache_params": object()},
        "mems is for what a model keeps": {"mems": [torch.zeros(3, 3, 8)] * 2},
        "inputs_embeds take the place of ids": {"inputs_embeds": embedded},
        "attention_mask says of each query which keys": {"attention_mask": seen},
        "attention_mask says of each query which": {"attention_mask": seen[:, 0].bool()},
        "attention_mask must be of type Tensor, got dict": {"attention_mask": {"full": seen}},
    }
    for message, entry in says.items():
        refuses(message, operate, model, {"input_ids": ids} | entry)
