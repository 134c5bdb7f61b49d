"""Kinds of models that people met elsewhere (files: test_load.py): the right numbers, or one line that says what to do.

The right value is by definition: from the weights that the model itself computes.
"""

import contextlib
import copy
import functools
import pickle
import sys
import threading
import types

import families
import numpy as np
import pytest
import torch
import transformers as tf
from helpers import alpha_by_definition, refused, refuses
from small_models import build, eager_alpha, state_of, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from sinkutils.measuring import surgery
from sinkutils.measuring.families import repeat_heads
from sinkutils.measuring.measure import measure
from sinkutils.names import load_lm

T, TARGETS = 24, (1, 2, 5)
close = {"atol": 1e-5, "rtol": 1e-4}


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "q_proj")]


# --- attention functions and classes of one's own


def mine(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention that somebody registered: softmax with one more in the denominator."""
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    logits = query @ key.mT * scaling + attention_mask
    weights = logits.exp() / (1 + logits.exp().sum(dim=-1, keepdim=True))
    return (weights @ value).transpose(1, 2).contiguous(), weights


FORMS = {
    "function": mine,
    "lambda": lambda *inputs, **options: mine(*inputs, **options),
    "partial": functools.partial(mine, marked=1),
    "partial of transformers": functools.partial(eager_attention_forward, dropout=0.0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mine", "sdpa"], ids=["registered", "in the place of sdpa"])
def test_an_attention_function_of_ones_own_is_read_by_the_weights_that_it_returns(
    name, form, monkeypatch
):
    model, ids, maps = build("llama"), tokens(), []

    class Recorder:
        def __call__(self, *inputs, **options):
            out, weights = FORMS[form](*inputs, **options)
            maps.append(weights)
            return out, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, name, Recorder())
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, eager_mask)
    model.set_attn_implementation(name)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    expected = alpha_by_definition(maps, TARGETS)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, FORMS[form])
    report = measure(model, ids, TARGETS)
    assert_close(report.alpha, expected, **close)
    assert report.key_norms is not None
    found = surgery.untouched(model, ids)
    assert_close(found.report.alpha, expected[:, :2], **close)
    nats = nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    assert_close(found.losses, nats, **close)
    if form != "partial of transformers":
        refuses("hidden from transformers' own attention functions", surgery.hide, model, ids)


def test_an_attention_function_of_ones_own_without_weights_is_refused_for_that(monkeypatch):
    model, ids = build("llama"), tokens()
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "mine", lambda *a, **b: (mine(*a, **b)[0], None)
    )
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", eager_mask)
    model.set_attn_implementation("mine")
    refuses("'mine' is none of transformers', and returns no weights", measure, model, ids)
    # without a mask of its own, which transformers then leaves out, it sees later tokens
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "mine")
    seeing = lambda *a, **b: mine(*a[:4], 0.0, **b)  # noqa: E731
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", seeing)
    refuses("sees later tokens", measure, model, ids)


def test_transformers_own_paged_attention_says_what_it_needs():
    model = build("llama")
    model.set_attn_implementation("paged|eager")
    refuses("without a paged attention cache", measure, model, tokens())


class Derived(LlamaAttention):
    pass


@pytest.mark.parametrize("exact", [False, True])
def test_a_derived_attention_class_is_measured_by_its_bases_function(exact):
    model, ids = build("llama"), tokens()
    expected = eager_alpha(model, ids, TARGETS)
    elsewhere = types.ModuleType("modeling_of_somebody")
    sys.modules["modeling_of_somebody"] = elsewhere
    kind = type("Remote", (LlamaAttention,), {"__module__": "modeling_of_somebody"})
    for layer, cls in zip(attentions(model), (Derived, kind), strict=True):
        layer.__class__ = cls
    assert_close(measure(model, ids, TARGETS, exact=exact).alpha, expected, **close)
    assert_close(surgery.untouched(model, ids).report.alpha, expected[:, :2], **close)


class Side(nn.Module):
    """A submodule with a `config` of its own kind."""

    def __init__(self, inner: nn.Module, config) -> None:
        super().__init__()
        self.inner, self.config = inner, config

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    "config", [None, {}, {"a": 1}, "text", types.SimpleNamespace(hidden_size=3)], ids=str
)
def test_a_submodules_config_may_be_anything(config):
    model, ids = build("llama"), tokens()
    expected = measure(model, ids).alpha
    model.model.layers[0].mlp = Side(model.model.layers[0].mlp, config)
    assert torch.equal(measure(model, ids).alpha, expected)
    surgery.untouched(model, ids)


# --- causality


@pytest.mark.parametrize("texts", ["words", "one word repeated"])
@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_attention_made_bidirectional_is_refused_unless_eager_ignores_the_flag(layers, texts):
    model, ids = build("llama"), tokens() if texts == "words" else torch.full((3, T), 7)
    right = measure(model, ids).alpha
    for layer in layers:
        attentions(model)[layer].is_causal = False
    assert_close(measure(model, ids).alpha, right, **close)  # eager
    model.set_attn_implementation("sdpa")
    for operate in (measure, surgery.untouched):
        refuses("sees later tokens by its attention 'sdpa'", operate, model, ids)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["one token first", "one token last"])
@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_bidirectional_configuration_is_refused_whichever_row_stands_first(family, order):
    name = "use_bidirectional_attention" if family == "gemma3_text" else "is_causal"
    flag = {name: family == "gemma3_text"}
    model, ids = build(family, **flag), tokens()
    mask = torch.ones_like(ids)
    mask[0, 1:] = 0
    refuses("sees later tokens", measure, model, ids[order], attention_mask=mask[order])


def test_an_edited_function_that_the_model_does_not_use_is_refused(monkeypatch):
    model, ids = build("llama"), tokens()
    model.set_attn_implementation("sdpa")
    module = sys.modules[LlamaAttention.__module__]
    monkeypatch.setattr(module, "eager_attention_forward", mine)
    refuses("computes something else by its attention 'sdpa'", measure, model, ids)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_scale_of_activations_per_text_is_no_reason_to_refuse(family):
    model, ids = build(family), tokens()
    for layer in (m.mlp for m in model.modules() if hasattr(m, "mlp")):

        def coarse(_, args):
            step = args[0].abs().amax(dim=(1, 2), keepdim=True) / 7
            return ((args[0] / step).round() * step, *args[1:])

        layer.register_forward_pre_hook(coarse)
    assert_close(measure(model, ids, TARGETS).alpha, eager_alpha(model, ids, TARGETS), **close)


def test_a_hook_sees_the_check_which_can_be_turned_off():
    model, ids, seen = build("llama"), tokens(), []
    model.model.layers[0].register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    measure(model, ids)
    measure(model, ids, check=False)
    assert [tuple(shape[:2]) for shape in seen] == [(1, 16), (3, T), (3, T)]


def test_a_prefix_model_says_that_it_is_measured_as_a_causal_one():
    model = build("llama")
    model.config.model_type = "paligemma"
    with pytest.warns(UserWarning, match="is measured as a causal LM"):
        measure(model, tokens())


# --- special ids


@pytest.mark.filterwarnings("error")
def test_special_ids_of_the_text_part_are_read():
    model, ids = build("gemma3"), tokens()
    text = model.config.get_text_config()
    for part in (model.config, text):
        part.bos_token_id = part.pad_token_id = None
    ids[:, 0] = text.bos_token_id = 5
    assert measure(model, ids).bos is True
    ids[1, -1] = text.pad_token_id = 7
    with pytest.warns(UserWarning, match=r"padding token \(7\)"):
        measure(model, ids)
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    measure(model, ids, attention_mask=mask)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pad", [None, -1])
def test_padding_by_eos_that_only_the_tokenizer_knows_of_is_warned_of(pad):
    model, ids = build("llama"), tokens()
    model.config.pad_token_id = pad
    ids[0, -1] = model.config.eos_token_id  # one is text, several at an end are not
    measure(model, ids)
    ids[0, -3:] = model.config.eos_token_id
    with pytest.warns(UserWarning, match="give attention_mask"):
        measure(model, ids)


# --- models that are put together in other ways


class TinyLM(tf.PreTrainedModel):
    """A nanoGPT-like model of remote code, whose forward takes nothing that it does not need."""

    config_class = tf.LlamaConfig

    def __init__(self, config, shows: bool = True) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, 16)
        attentions = [{"SelfAttention": TinyAttention(shows)} for _ in range(2)]
        self.blocks = nn.ModuleList(map(nn.ModuleDict, attentions))
        for block in self.blocks:
            block.forward = lambda x, block=block: x + block["SelfAttention"](x)[0]
        self.post_init()

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


class TinyAttention(nn.Module):
    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.qkv, self.shows = nn.Linear(16, 48), shows

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        logits = 9 * q @ k.mT
        later = torch.ones(logits.shape[-2:]).triu(1).bool()
        self.maps = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
        out = (self.maps @ v).transpose(1, 2).flatten(2)
        return (out, self.maps) if self.shows else (out,)


def test_a_model_without_use_cache_and_named_embeddings_is_measured_where_its_weights_are_shown():
    config = tf.LlamaConfig(vocab_size=96, num_hidden_layers=2)
    model, ids = TinyLM(config).eval(), tokens()
    report = measure(model, ids, TARGETS)
    maps = [module.maps for module in model.modules() if isinstance(module, TinyAttention)]
    assert_close(report.alpha, alpha_by_definition(maps, TARGETS).detach(), **close)
    refuses("AttentionInterface, or weights", measure, TinyLM(config, shows=False).eval(), ids)
    with refused(r"out of any wrapper; got TinyAttention: what is read are .* AttentionInterf"):
        measure(TinyAttention(True), ids)


PLACES = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
PLACES |= dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head"), "cpu")
WAYS = {
    "cpu_offload": {"execution_device": "cpu"},
    "disk_offload": {"execution_device": "cpu"},
    "dispatch_model": {"device_map": PLACES, "main_device": "cpu"},  # as `device_map` loads it
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_an_offloaded_model_and_one_spread_over_places_are_measured(family, way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = build(family), tokens()
    right = measure(model, ids).alpha
    where = {} if way == "cpu_offload" else {"offload_dir": tmp_path}
    spread = getattr(accelerate, way)(model, **WAYS[way], **where)
    assert_close(measure(spread, ids).alpha, right, **close)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_another_default_device_changes_nothing(family):
    model, ids = build(family), tokens()
    right = measure(model, ids, TARGETS, heads=[(0, 1)])
    with torch.device("meta"):
        report = measure(model, ids, TARGETS, heads=[(0, 1)])
        assert report.to_dict() == right.to_dict() and str(report) == str(right)
        assert report.excess(2) == right.excess(2) and report.caps() == right.caps()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_another_default_dtype_changes_nothing(family):
    model, ids = build(family), tokens()
    right = measure(model, ids, TARGETS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        report = measure(model, ids, TARGETS)
        assert report.to_dict() == right.to_dict() and str(report) == str(right)
        assert report.excess(2) == right.excess(2) and report.caps() == right.caps()
        assert torch.equal(report.visible_alpha(), right.visible_alpha())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_composite_models_parts_keep_their_attention():
    model, ids = build("gemma3"), tokens()
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    before = state_of(model)
    parts = [model.config, model.config.text_config, model.config.vision_config]
    kinds = [part._attn_implementation for part in parts]
    for operate in (measure, surgery.untouched, surgery.hide):
        operate(model, ids)
        assert [part._attn_implementation for part in parts] == kinds and state_of(model) == before


# --- surgery


@pytest.mark.parametrize(
    "family", ["deepseek_v32", "falcon_h1", "minimax", "jamba", "qwen3_next", "hy_v4"]
)
def test_what_keeps_more_than_keys_and_values_is_not_given_others_and_hides_none(family):
    model, ids = build(family), tokens()
    for operate in (surgery.hide, lambda m, x: surgery.transplant(m, x, x[:, :4])):
        refuses("keeps something else than keys and values", operate, model, ids)


# --- several threads, several models


@contextlib.contextmanager
def beside(work):
    """Another thread that does this all the while; what came out, or the error."""
    stop, found = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    found.append(work())
            except Exception as error:
                found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v32"])
def test_another_thread_may_use_a_model_that_is_measured_or_operated_on(family, implementation):
    model, ids = build(family), tokens(2)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
    report, before = measure(model, ids), state_of(model)
    operations = [measure, surgery.untouched]
    if family != "deepseek_v32":
        operations += [surgery.hide, lambda m, x: surgery.set_back(m, x, 0, 2)]
        operations.append(lambda m, x: surgery.stream(m, x, 4))
    serve, look = (lambda: model(ids, use_cache=False).logits), (lambda: measure(model, ids).alpha)
    with beside(serve) as logits, beside(look) as alphas:
        for operate in operations * 4:
            operate(model, ids)
        again = measure(model, ids)
    for found, expected in ((logits, right), (alphas, report.alpha)):
        assert found
        assert all(torch.allclose(one, expected, atol=1e-5) for one in found)
    assert_close(again.alpha, report.alpha)
    assert_close(again.hidden_norms, report.hidden_norms)
    assert state_of(model) == before


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_second_model_of_one_configuration_runs_within_a_hook_of_the_first(implementation):
    first, ids, seen = build("llama"), tokens(), []
    second = copy.deepcopy(first)
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    first.set_attn_implementation(implementation)
    right = measure(first, ids).alpha
    with torch.no_grad():
        logits = second(ids, use_cache=False).logits
        first.model.layers[0].register_forward_hook(
            lambda *_: seen.append(second(ids, use_cache=False).logits)
        )
        assert_close(measure(first, ids).alpha, right, **close)
    assert all(torch.allclose(one, logits, atol=1e-5) for one in seen) and seen


# --- rounding, streams, blocks that replace, skip or rename


class Coarse(TorchFunctionMode):
    """Products of float32 are of bfloat16, as on hardware with set_float32_matmul_precision("medium")."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        named = getattr(function, "__name__", "") in ("matmul", "__matmul__", "linear", "addmm")
        if named and args[0].dtype == torch.float32:
            args = tuple(x.bfloat16().float() if isinstance(x, Tensor) else x for x in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_products_that_are_rounded_are_no_reason_to_refuse(family):
    model, ids = build(family), tokens()
    with Coarse():
        expected = eager_alpha(model, ids, TARGETS)
        model.set_attn_implementation("sdpa")
        assert_close(measure(model, ids, TARGETS).alpha, expected, atol=5e-3, rtol=0)


def test_streams_side_by_side_have_norms_of_their_own_and_no_one_h_1():
    model, ids = build("qwen4_exp"), tokens(3, 9)
    seen: list = []
    block = model.model.layers[0]
    block.register_forward_hook(lambda _, __, out: seen.append(out))
    report = measure(model, ids)
    out = seen[-1] if isinstance(seen[-1], Tensor) else seen[-1][0]
    width = model.config.get_text_config().hidden_size
    streams = out.unflatten(-1, (-1, width))  # (B, T, S, d)
    assert streams.shape[2] > 1 and report.first_elements.shape[1] == width
    assert_close(report.hidden_norms[0], streams.norm(dim=-1).mean(dim=(0, 2)))
    refuses("residual streams", surgery.set_back, model, ids, 0, 2)


def test_block_sparse_attention_is_refused_before_the_model_changes_itself():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape["intermediate_size"] = 64
    sparse = {"is_decoder": True, "attention_type": "block_sparse", "block_size": 4}
    config = tf.BigBirdConfig(vocab_size=96, **shape, **sparse)
    model = tf.BigBirdForCausalLM(config).eval()
    refuses(r"random blocks .*set_attention_type\('original_full'\)", measure, model, tokens())
    assert model.bert.attention_type == "block_sparse"
    model.base_model.set_attention_type("original_full")
    assert_close(measure(model, tokens()).alpha, eager_alpha(model, tokens(), (1,)), **close)


def test_attention_that_is_replaced_during_the_pass_is_refused():
    model = build("llama")

    def replace(block, _):
        block.self_attn = copy.deepcopy(block.self_attn)

    model.model.layers[1].register_forward_pre_hook(replace)
    refuses("replaces its attention modules while it runs", measure, model, tokens())


def test_blocks_behind_an_early_exit_are_left_out_and_one_that_is_skipped_is_named():
    model, ids = build("llama", num_hidden_layers=4, layer_types=None), tokens()
    whole = measure(model, ids, TARGETS)
    model.config.num_hidden_layers = 2
    report = measure(model, ids, TARGETS)
    assert_close(report.alpha, whole.alpha[:, :, :2], **close)
    assert_close(report.hidden_norms, whole.hidden_norms[:2], **close)
    skipping = build("gpt2")
    skipping.transformer.forward = lambda input_ids, **_: skipping.transformer.h[1](
        skipping.transformer.wte(input_ids)
    )
    refuses("skips block 1", measure, skipping, ids)


@pytest.mark.parametrize("form", ["keyword", "dict"])
def test_blocks_may_take_and_return_hidden_states_in_any_form(form):
    model, ids = TinyLM(tf.LlamaConfig(vocab_size=96, num_hidden_layers=2)).eval(), tokens()
    plain = measure(model, ids)
    for block in model.blocks:
        inner = block["SelfAttention"]
        block.forward = lambda states, inner=inner: {"out": [states + inner(states)[0]]}

    def forward(input_ids, labels=None):
        x = model.embed(input_ids)
        for block in model.blocks:
            x = (block(states=x) if form == "keyword" else block(x))["out"][0]
        return x

    model.forward = forward
    report = measure(model, ids)
    assert_close(report.alpha, plain.alpha)
    assert_close(report.hidden_norms, plain.hidden_norms)
    for block in model.blocks:
        block.forward = lambda states, inner=block["SelfAttention"]: {
            "out": [inner(states)[0][..., None, None]]
        }
    model.forward = lambda input_ids: [block(model.embed(input_ids)) for block in model.blocks]
    refuses("no hidden states .*norms=False", measure, model, ids)


def test_an_attention_module_that_goes_by_another_name_is_not_said_to_be_missing():
    model = TinyLM(tf.LlamaConfig(vocab_size=96, num_hidden_layers=2)).eval()
    for block in model.blocks:
        block["SelfAttention"].__class__ = type("Mixer", (TinyAttention,), {})
    refuses("shows no attention module: what is read", measure, model, tokens())


def test_what_is_not_finite_is_said_to_be_the_weights_or_the_activations():
    model = build("llama")
    with torch.no_grad():
        for name in ("up_proj", "down_proj"):
            getattr(model.model.layers[0].mlp, name).weight.mul_(5000)
    assert measure(model, tokens()).alpha.isfinite().all()
    with refused("every weight is finite and activations overflow float16"):
        measure(model.half(), tokens())
    with torch.no_grad():
        model.lm_head.weight[0, 0] = model.model.norm.weight[0] = model.model.layers[
            0
        ].input_layernorm.weight[0] = torch.nan
    refuses("weights hold nan or infinite values", measure, model.float(), tokens())


def test_an_index_error_of_a_hook_is_its_own():
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda *_: [][3])
    with pytest.raises(IndexError, match="list index out of range"):
        measure(model, tokens())


def test_two_bos_short_texts_and_too_many_positions_are_warned_of():
    model, ids = build("llama"), tokens()
    twice = ids.clone()
    twice[:, :2] = model.config.bos_token_id
    short = (ids[:, :8], "8 tokens are too short for eps = 0.3")
    for batch, message in ((twice, "begins with two BOS"), (twice[:, :2], "two BOS"), short):
        with pytest.warns(UserWarning, match=message):
            measure(model, batch)
    with pytest.warns(UserWarning, match="24 positions, and the model was made for 20"):
        measure(build("llama", max_position_embeddings=20), ids)
    with pytest.warns(UserWarning) as warned:
        measure(model, twice[:, :1])
    assert not [warning for warning in warned if "BOS" in str(warning.message)]


def test_what_a_tokenizer_returns_is_measured_with_its_mask():
    model, ids = build("llama"), tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    batch = tf.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    assert_close(measure(model, batch).alpha, measure(model, ids, attention_mask=mask).alpha)


def test_numpys_integers_are_integers_and_what_holds_no_ids_is_refused():
    model, ids = build("llama"), tokens(3, 12)
    expected = measure(model, ids).alpha
    assert torch.allclose(measure(model, ids, batch_size=np.int64(2)).alpha, expected)
    refuses("ids has no input_ids, but words", measure, model, {"words": ids})
    for name in (None, 3, []):
        refuses("name_or_path must be a name or a path", load_lm, name)


def test_attention_that_runs_twice_or_shows_no_weights_is_told_what_to_do():
    shared, replaced, older = build("llama"), build("llama"), build("gpt_neo")
    shared.model.layers[1].self_attn = shared.model.layers[0].self_attn
    refuses(r"ran more than once .* give each place a copy", measure, shared, tokens())
    says = r"(layers|h)\.1\.\S+ did not show its weights: was its forward replaced"
    layers = replaced.model.layers[1].self_attn, older.transformer.h[1].attn.attention
    for model, silent in zip((replaced, older), layers, strict=True):
        silent.forward = lambda hidden_states, **others: (hidden_states, None)
        refuses(says, measure, model, tokens())


# --- what the user hands over is what runs


def test_an_adapter_that_peft_switches_on_in_its_own_forward_is_measured():
    peft = pytest.importorskip("peft")
    model, ids = build("llama"), tokens()
    model.prepare_inputs_for_generation = lambda *_, **__: {}
    plain = measure(model, ids, TARGETS).alpha
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"], init_lora_weights=False,
        r=8, lora_alpha=64, alora_invocation_tokens=ids[0, 3:5].tolist(),
    )  # fmt: skip
    wrapped = peft.get_peft_model(model, config).eval()
    ids[:, 3:5] = ids[0, 3:5]
    plain = measure(wrapped.get_base_model(), ids, TARGETS).alpha  # without its forward
    with torch.no_grad():
        maps = wrapped(ids, use_cache=False, output_attentions=True).attentions
    expected = alpha_by_definition(maps, TARGETS)
    assert (expected - plain).abs().max() > 1e-3
    assert_close(measure(wrapped, ids, TARGETS).alpha, expected, **close)
    assert_close(surgery.untouched(wrapped, ids).report.alpha, expected[:, :2], **close)


class ModulesToSaveWrapper(torch.nn.Module):
    """As in PEFT: a module, and copies of it by the name of an adapter, of which one runs."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})
        self.disable_adapters, self.active_adapters = False, ["default"]
        for parameter in self.modules_to_save.parameters():
            parameter.data *= 1.5

    def forward(self, *args, **kwargs):
        use = self.original_module if self.disable_adapters else self.modules_to_save["default"]
        return use(*args, **kwargs)


def test_of_a_module_and_its_trained_copy_the_one_that_runs_is_measured():
    model, ids = build("llama"), tokens()
    plain = measure(model, ids, TARGETS).alpha
    layer = model.model.layers[0]
    layer.self_attn = ModulesToSaveWrapper(layer.self_attn)
    layer.mlp = ModulesToSaveWrapper(layer.mlp)
    expected = eager_alpha(model, ids, TARGETS)
    assert (expected - plain).abs().max() > 1e-3
    assert_close(measure(model, ids, TARGETS).alpha, expected, **close)
    silent = surgery.edit(model, ids, "neurons", torch.zeros_like, [0])
    assert (silent.losses - surgery.untouched(model, ids).losses).abs().max() > 1e-4
    layer.self_attn.disable_adapters = layer.mlp.disable_adapters = True
    assert_close(measure(model, ids, TARGETS).alpha, plain, **close)


class PeftMixedModel(torch.nn.Module):
    """As in PEFT: around a tuner, around the model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model

    def forward(self, input_ids, **others):
        return self.base_model.model(input_ids=input_ids % 50 + 3, **others)


def test_adapters_of_several_kinds_at_once_are_run_as_they_are_handed_over():
    model, ids = build("llama"), tokens()
    expected = eager_alpha(model, ids % 50 + 3, TARGETS)
    assert_close(measure(PeftMixedModel(model), ids, TARGETS).alpha, expected, **close)


def test_prompts_that_are_switched_off_are_no_reason_to_refuse():
    model, ids = build("llama"), tokens()

    class Prompted(torch.nn.Module):
        active_peft_config = types.SimpleNamespace(is_prompt_learning=True)

        def get_base_model(self):
            return model

    wrapped = Prompted()
    refuses("puts learned prompts before the ids", measure, wrapped, ids)
    wrapped.forward = model.forward  # as PEFT's disable_adapter does
    assert_close(measure(wrapped, ids).alpha, eager_alpha(model, ids, (1,)), **close)


def test_hooks_inside_compiled_code_are_refused_and_others_are_run():
    model, ids = build("llama"), tokens()
    right = measure(model, ids).alpha
    compiled = torch.compile(copy.deepcopy(model))
    assert_close(measure(compiled, ids).alpha, right)
    compiled._orig_mod.model.layers[0].register_forward_hook(lambda _, __, out: out * 2)
    refuses(r"layers.0 has a hook and is compiled.*_orig_mod", measure, compiled, ids)
    measure(compiled._orig_mod, ids)
    part = copy.deepcopy(model)
    part.model.layers[1].compile()
    assert_close(measure(part, ids).alpha, right)
    part.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    refuses("mlp has a hook and is compiled", measure, part, ids)


@pytest.mark.parametrize("sdpa", [False, True])
def test_a_hook_of_the_ids_own_length_is_run(sdpa):
    model, ids = build("llama"), tokens()
    if sdpa:
        model.set_attn_implementation("sdpa")
    steering = torch.randn(3, T, 32, generator=torch.Generator().manual_seed(0))
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + steering)
    report = measure(model, ids, TARGETS)
    model.set_attn_implementation("eager")
    assert_close(report.alpha, eager_alpha(model, ids, TARGETS), **close)
    model.model.layers[0].self_attn.is_causal = False
    model.set_attn_implementation("sdpa")
    refuses("sees later tokens", measure, model, ids)


class Staged(TinyLM):
    """Blocks in stages: a list of lists."""

    def __init__(self, config) -> None:
        super().__init__(config)
        first, second = self.blocks
        del self.blocks
        third = copy.deepcopy(first)
        stages = ([first, second], [third])
        self.stages = nn.ModuleList(map(nn.ModuleList, stages))

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in (block for stage in self.stages for block in stage):
            x = x + block["SelfAttention"](x)[0] if self.inner else block(x)
        return x @ self.embed.weight.T

    inner = False


def test_blocks_in_stages_are_counted_in_order():
    model, ids = Staged(tf.LlamaConfig(vocab_size=96, num_hidden_layers=3)).eval(), tokens()
    for stage in model.stages:
        for block in stage:
            block.forward = lambda x, block=block: x + block["SelfAttention"](x)[0]
    report = measure(model, ids, TARGETS)
    maps = [module.maps for module in model.modules() if isinstance(module, TinyAttention)]
    assert_close(report.alpha, alpha_by_definition(maps, TARGETS).detach(), **close)
    assert report.layers == (0, 1, 2) and len(report.hidden_norms) == 3


def test_a_model_whose_layers_run_again_is_told_so():
    model = build("llama")
    inner = model.model.forward

    def twice(input_ids=None, inputs_embeds=None, **others):
        first = inner(input_ids=input_ids, **others)
        return inner(inputs_embeds=first.last_hidden_state, **others)

    model.model.forward = twice
    refuses("its layers run 2 times a token", measure, model, tokens())


class Needy(TinyLM):
    def forward(self, input_ids, pixel_values, labels=None):
        return super().forward(input_ids) + 0 * pixel_values.sum()


def test_a_forward_that_needs_more_than_ids_says_what_and_gets_it_from_a_mapping():
    model, ids = Needy(tf.LlamaConfig(vocab_size=96, num_hidden_layers=2)).eval(), tokens()
    refuses("missing a required argument: .pixel_values. of its forward", measure, model, ids)
    report = measure(model, {"input_ids": ids, "pixel_values": torch.zeros(3, 2)})
    assert_close(report.alpha, measure(model, {"input_ids": ids, "pixel_values": ids * 1.0}).alpha)


@pytest.mark.parametrize("family", ["llama", "xglm"])
def test_a_model_can_be_pickled_after_it_was_measured(family):
    model = build(family)
    pickle.dumps(model)
    measure(model, tokens())
    pickle.dumps(model)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_decoder_of_an_encoder_decoder_is_measured_alone(family):
    config = families.small_config(family)
    config.is_decoder = False
    whole = tf.AutoModelForSeq2SeqLM.from_config(config).eval()
    decoder = whole.get_decoder()
    ids = torch.randint(3, 90, (2, 12))
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(decoder(input_ids=ids, output_attentions=True).attentions)
    first = maps[..., 0].mean(dim=-1).transpose(0, 1)  # (samples, layers, heads)
    for kind in ("eager", "sdpa"):
        whole.set_attn_implementation(kind)
        assert torch.allclose(measure(decoder, ids).alpha[:, 0], first, atol=1e-6)
    for other in (whole, whole.get_encoder()):
        refuses("encoder-decoder model.* its decoder alone can be", measure, other, ids)


def test_the_first_two_mistakes_are_told_what_to_write():
    model, ids = build("llama"), [[3, 4, 5]]
    refuses(r"return_tensors=.pt., padding=True", measure, model, ids)
    refuses(r"return_tensors=.pt., padding=True", measure, model, {"input_ids": ids})
    refuses(r"got str: su.load_lm loads one", measure, "smollm2", torch.tensor(ids))
