"""Surgery on small random models of five families, against plain recomputation."""

import random
import re
from functools import partial

import alone
import constant_value
import lost_key
import mechanism
import numpy as np
import pytest
import recall
import torch
from helpers import own_model, refused, refuses, tokens, word_tokenizer
from open_lms import rounded
from small_models import build, eager_maps
from torch.testing import assert_close
from transformers import DynamicCache

import sinkutils
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import Subject
from sinkutils.measuring.surgery import (
    edit,
    hide,
    operating,
    run,
    set_back,
    stream,
    transplant,
    untouched,
)
from sinkutils.model.attention import AttentionSpec, attend, rotate
from sinkutils.plots.lab import said_next

# What makes three blocks of a family
MIXED = ["full_attention", "sliding_attention"]
FAMILIES = {
    **{family: {"num_hidden_layers": 3} for family in ("llama", "gpt_neox", "opt", "mistral")},
    "gpt2": {"n_layer": 3},
    "gemma3_text": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", *MIXED]},
}
LENGTH = 12
PLACES = ("block", "query", "key", "value", "neurons")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def model(request):
    built = build(request.param, **FAMILIES[request.param])
    built.set_attn_implementation("sdpa")  # as models come
    return built


@pytest.fixture
def ids():
    return tokens(5, LENGTH, least=3)


def another_first(ids):
    """The same texts behind another first token."""
    return torch.cat([ids[:, :1] % 37 + 3, ids[:, 1:]], dim=1)


def plain_losses(model, ids, **options):
    with torch.no_grad():
        log_p = model(ids, **options).logits.log_softmax(dim=-1)
    return -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def test_untouched_is_what_measure_and_a_forward_pass_say(model, ids):
    found = untouched(model, ids)
    assert_close(found.losses, plain_losses(model, ids), atol=1e-4, rtol=1e-4)
    alpha = measure(model, ids, targets=(1, 2)).alpha
    assert_close(found.report.alpha, alpha, atol=1e-5, rtol=1e-4)


def test_a_transplant_from_texts_of_one_first_token_is_that_token_in_front(model, ids):
    token = 7
    donors = torch.cat([torch.full((4, 1), token), ids[:4, :5]], dim=1)
    found = transplant(model, ids, donors)
    longer = torch.cat([torch.full((len(ids), 1), token), ids], dim=1)
    assert_close(found.losses, plain_losses(model, longer)[:, 1:], atol=1e-4, rtol=1e-4)
    model.set_attn_implementation("eager")
    maps = torch.stack(eager_maps(model, longer), dim=1)  # (B, L, H, T + 1, T + 1)
    assert_close(found.report.star, maps[..., 1:, 0].mean(dim=-1), atol=1e-5, rtol=1e-4)
    assert_close(found.report.alpha[:, 0], maps[..., 1:, 1].mean(dim=-1), atol=1e-5, rtol=1e-4)


def test_k_star_and_v_star_are_means_and_v_star_is_zero_from_a_layer_up(model, ids):
    with torch.no_grad():
        layers = model(ids[:, :1], use_cache=True).past_key_values.layers
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(layers):
        k, v = (x.mean(dim=0).expand(len(ids), -1, -1, -1) for x in (layer.keys, layer.values))
        cache.update(k, v, index)
    expected = plain_losses(model, ids, past_key_values=cache)
    assert_close(transplant(model, ids, ids).losses, expected, atol=1e-4, rtol=1e-4)
    same = transplant(model, ids, ids, zero_values_from=3)
    assert_close(same.losses, transplant(model, ids, ids).losses)
    losses = [transplant(model, ids, ids, zero_values_from=layer).losses for layer in (0, 1, 2)]
    for x, y in zip(losses, [*losses[1:], same.losses], strict=True):
        assert (x - y).abs().max() > 1e-4


def test_a_window_sees_what_its_depth_lets_it_see(model, ids):
    assert_close(stream(model, ids, LENGTH).losses, untouched(model, ids).losses)
    other = another_first(ids)
    # Three layers of windows of three keys see six tokens back, unless x_1 is kept.
    plain, changed = (stream(model, x, 3).losses for x in (ids, other))
    assert_close(plain[:, 7:], changed[:, 7:], atol=1e-5, rtol=1e-5)
    assert (plain[:, :7] - changed[:, :7]).abs().max() > 1e-3
    if getattr(model.config, "sliding_window", None) is None:
        kept = [stream(model, x, 2, sinks=1).losses for x in (ids, other)]
        assert (kept[0] - kept[1])[:, 7:].abs().max() > 1e-4
        second = torch.cat([ids[:, :1], another_first(ids[:, 1:])], dim=1)  # x_2 is not kept
        again = stream(model, second, 2, sinks=1).losses
        assert_close(again[:, 7:], kept[0][:, 7:], atol=1e-5, rtol=1e-5)


def test_setting_back_changes_the_chosen_dimensions_of_h_1_only(model, ids):
    sizes = measure(model, ids).first_elements
    assert sizes.shape == (3, 32) and (sizes.median(dim=1).values > 0).all()
    seen: list[torch.Tensor] = []
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))

    def see(_, args, kwargs):
        seen.append((args or [kwargs["hidden_states"]])[0])

    handle = blocks[2].register_forward_pre_hook(see, with_kwargs=True)
    plain = untouched(model, ids)
    found = set_back(model, ids, 1, (4, 9))
    handle.remove()
    h, *_, edited = (x for x in seen if x.shape[:2] == ids.shape)  # of the first pass and the last
    over = h[:, 0].abs() / h.abs().flatten(1).median(dim=1).values[:, None]
    assert_close(sizes[1], over.mean(dim=0))
    assert_close(edited[:, 0, [4, 9]], h[:, 1:, [4, 9]].mean(dim=1))
    changed = (edited != h).any(dim=0)
    assert set(map(tuple, changed.nonzero().tolist())) == {(0, 4), (0, 9)}
    assert (found.losses - plain.losses).abs().max() > 1e-4
    assert_close(found.report.alpha[:, :, :2], plain.report.alpha[:, :, :2])
    largest = sizes[1].topk(2).indices.tolist()
    assert_close(set_back(model, ids, 1, 2).losses, set_back(model, ids, 1, largest).losses)


@pytest.mark.parametrize("first_exact", [False, True])
def test_rounded_keys_and_values_are_those_of_their_texts_nearest_levels(model, ids, first_exact):
    class Rounded(DynamicCache):
        def update(self, key_states, value_states, *args, **kwargs):
            for text in (*key_states, *value_states):  # (H_kv, T, D)
                part = text[:, int(first_exact) :]
                step = part.abs().max() / 3  # of three bits, -3 .. 3
                part.copy_((part / step).round() * step)
            return super().update(key_states, value_states, *args, **kwargs)

    model.set_attn_implementation("eager")
    expected = plain_losses(model, ids, past_key_values=Rounded(config=model.config))
    found = rounded(model, ids, 3, first_exact=first_exact).losses
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_models_without_a_cache_of_keys_and_values_say_so(ids):
    with refused("transplant needs a KV cache, and TransformerLM has none: use edit"):
        transplant(own_model(), ids, ids)
    with refused("BloomForCausalLM has attention outside transformers' interface"):
        hide(build("bloom"), ids)
    with refused("needs a TransformerLM or a causal LM of transformers, got LlamaModel"):
        untouched(build("llama").model, ids)
    refuses(r"block must be in 0\.\.1, got 3", set_back, build("llama"), ids, 3, (0,))
    for dimension in (-1, 999):
        with refused(f"each of dimensions must be in 0..31, got {dimension}"):
            set_back(build("llama"), ids, 0, (dimension,))


# --- edit, on models of ours against the equations, written out here


def by_hand(model, ids, place="", change=None, layers=()):
    """Logits and attention maps of a rotary pre-norm model, with change(x) in place of x in some layers."""

    def put(at, layer, x):
        return change(x.clone()) if at == place and layer in layers else x

    h, maps, cfg = model.embed(ids), [], model.config
    for layer, block in enumerate(model.blocks):
        x = block.norm_1(h)
        qkv = block.attention.qkv(x).view(*ids.shape, 3, cfg.num_heads, cfg.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        cos, sin = (model.tables[name][: ids.shape[1]] for name in ("cos", "sin"))
        q, k = put("query", layer, rotate(q, cos, sin)), put("key", layer, rotate(k, cos, sin))
        extras = {"key_bias": block.attention.key_bias} if cfg.attention.has_key_bias else {}
        out, weights = attend(q, k, put("value", layer, v), cfg.attention, **extras)
        maps.append(weights)
        h = h + block.attention.out(out.transpose(1, 2).flatten(2))
        gate, up = block.ffn.up(block.norm_2(h)).chunk(2, dim=-1)
        h = h + block.ffn.down(put("neurons", layer, torch.nn.functional.silu(gate) * up))
        h = put("block", layer, h)
    return model.unembed(model.norm(h)), torch.stack(maps, dim=1)


def shrink_the_third(x):
    """Of h or neurons (B, T, n) and of q, k, v (B, H, T, D) alike: half of what the third token has."""
    x[..., 2, :] *= 0.5
    return x


@pytest.mark.parametrize("bias", ["none", "k"])
@pytest.mark.parametrize("layers", [[0], [0, 1]])
@pytest.mark.parametrize("place", PLACES)
def test_an_edited_model_of_ours_computes_its_equations_with_the_change(place, layers, bias):
    ours, ids = own_model(attention=AttentionSpec(bias=bias)), tokens(4, LENGTH)
    with torch.no_grad():
        logits, maps = by_hand(ours, ids, place, shrink_the_third, layers)
        plain, _ = by_hand(ours, ids)
    found = edit(ours, ids, place, shrink_the_third, layers)
    log_p = logits.log_softmax(dim=-1)
    expected = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert_close(found.losses, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.predicted, logits[:, :-1].argmax(dim=-1))
    first = maps[..., int(bias == "k")]  # k* stands before the first token's key
    assert_close(found.report.alpha[:, 0], first.mean(dim=-1).float(), atol=1e-4, rtol=1e-4)
    assert (logits - plain).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(ours(ids), own_like(ours)(ids))


VARIANTS = {
    "softmax": {},
    "sigmoid": {"attention": AttentionSpec(similarity="sigmoid", normalizer="none")},
    "ALiBi": {"position": "alibi"},
    "a window": {"attention": AttentionSpec(window=4)},
    "k*": {"attention": AttentionSpec(bias="k")},
    "x*": {"sink_token": True},
}
HIDING = {
    "the first key": (hide, lambda i, j: j == 0),
    "the first key later": (partial(hide, since=5), lambda i, j: j == 0 and i >= 4),
    "the far keys": (partial(stream, window=3, sinks=1), lambda i, j: j > 0 and i - j >= 3),
}


def shown_keys(q, k, v, spec, hides, first, extras):
    """Output (B, H, T, D) and |A_ij| over its row's sum, (B, H, T, S), of the keys that a row sees."""
    B, H, T, D = q.shape
    shares, outs = torch.zeros(B, H, T, T), []
    for i in range(T):
        sees = [j for j in range(i + 1) if i - j < (spec.window or T)]
        # Positions in the text, which x* stands in front of, if there is one
        sees = [j for j in sees if j < first or j == i or not hides(i - first, j - first)]
        logits = (q[:, :, i, None] * k[:, :, sees]).sum(dim=-1) / D**0.5
        if "distance_bias" in extras:
            logits = logits + extras["distance_bias"][:, [i - j for j in sees]]
        f = logits.sigmoid() if spec.similarity == "sigmoid" else logits.exp()
        total = f.sum(dim=-1, keepdim=True)
        if spec.has_key_bias:  # its value is zero
            total = (
                total
                + (q[:, :, i] * extras["key_bias"]).sum(dim=-1, keepdim=True).div(D**0.5).exp()
            )
        shares[:, :, i, sees] = f / total
        weights = f if spec.normalizer == "none" else f / total
        outs.append((weights[..., None] * v[:, :, sees]).sum(dim=2))
    return torch.stack(outs, dim=2), shares


@pytest.mark.parametrize("what", HIDING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_keys_of_a_model_of_ours_are_keys_that_its_rows_do_not_have(
    monkeypatch, variant, what
):
    ours, ids, maps = own_model(gain=1.5, **VARIANTS[variant]), tokens(4, LENGTH), []
    first = int(ours.config.sink_token)
    operate, hides = HIDING[what]
    found, plain = operate(ours, ids), untouched(ours, ids)

    def plainly(q, k, v, spec, **extras):
        out, shares = shown_keys(q, k, v, spec, hides, first, extras)
        maps.append(shares[..., first:, first:])
        return out

    monkeypatch.setattr("sinkutils.model.fast.attention_output", plainly)
    with torch.no_grad():
        logits = ours(ids)
    log_p = logits.log_softmax(dim=-1)
    expected = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert_close(found.losses, expected, atol=1e-4, rtol=1e-4)
    alpha = torch.stack(maps, dim=1)[..., 0].mean(dim=-1)  # (B, L, H)
    assert_close(found.report.alpha[:, 0].float(), alpha, atol=1e-4, rtol=1e-4)
    if not (variant == "a window" and what != "the first key"):
        assert (found.losses - plain.losses).abs().max() > 1e-3
    assert not any(p.grad is not None for p in ours.parameters()) and not found.losses.requires_grad


def test_the_lab_of_a_model_of_ours_says_what_it_does_without_its_first_key():
    ours, ids = own_model(), tokens(1, LENGTH)
    rows = said_next(ours, ids, word_tokenizer(57), measure(ours, ids))
    assert [row["row"] for row in rows] == ["words_untouched", "words_hidden", "words_set_back"]
    hidden = (-hide(ours, ids).losses[0]).exp()
    assert_close(torch.tensor(rows[1]["shares"]), hidden, atol=6e-4, rtol=0)
    with torch.no_grad():
        shares, likeliest = ours(ids)[0, :-1].softmax(dim=-1).topk(3)
    found = torch.tensor([[share for _, share in place] for place in rows[0]["next"]])
    assert_close(found, shares, atol=6e-3, rtol=0)
    assert torch.equal(untouched(ours, ids).likeliest[0], likeliest)


def own_like(model):
    """A copy that no surgeon has seen."""
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("place", PLACES[:4])
def test_an_edited_model_of_transformers_computes_what_hooks_make_of_it(model, ids, place):
    """Layer 2 of three: its projections' outputs, where no rotation comes between, or its block's."""

    def third_to_zero(x):
        x[..., 2, :] = 0  # a zero stays one under a rotation and under norms of queries and keys
        return x

    found = edit(model, ids, place, third_to_zero, [1])
    if place == "block":
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        blocks = next(m for m in lists if len(m) == 3)

        def hook(_, __, out):
            if torch.is_tensor(out):
                return third_to_zero(out.clone())
            return third_to_zero(out[0].clone()), *out[1:]

        handle = blocks[1].register_forward_hook(hook)
    else:
        named = dict(model.named_modules())
        name = next((n for n in named if re.search(rf"\b1\..*{place[0]}_proj$", n)), None)
        if name is None:
            pytest.skip("queries, keys and values come from one projection")
        handle = named[name].register_forward_hook(lambda _, __, out: third_to_zero(out.clone()))
    expected = plain_losses(model, ids)
    handle.remove()
    assert_close(found.losses, expected, atol=1e-4, rtol=1e-4)
    assert (found.losses - plain_losses(model, ids)).abs().max() > 1e-4
    assert not any(m._forward_hooks for m in model.modules())


SECOND = {
    "llama": "model.layers.1.mlp.down_proj",
    "gemma3n_text": "model.layers.1.mlp.down_proj",
    "gpt2": "transformer.h.1.mlp.c_proj",
    "opt": "model.decoder.layers.1.fc2",
    "gpt_neox": "gpt_neox.layers.1.mlp.dense_4h_to_h",
}


@pytest.mark.parametrize("family", SECOND)
def test_a_silent_neuron_is_a_column_of_zeros(family, ids):
    model = build(family)

    def silence(x):
        x[:, :, 3] = 0
        return x

    found = edit(model, ids, "neurons", silence, [1])
    plain = untouched(model, ids)
    weight = model.get_submodule(SECOND[family]).weight
    with torch.no_grad():
        weight[(3, slice(None)) if family == "gpt2" else (slice(None), 3)] = 0
    assert_close(found.losses, untouched(model, ids).losses, atol=1e-4, rtol=1e-4)
    assert (found.losses - plain.losses).abs().max() > 1e-5


def test_neurons_of_an_adapted_layer_reach_its_adapter_as_well(ids):
    """As in PEFT, the layer and the branch beside it are inside another module of its name."""

    class Adapted(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer
            self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
            self.lora_A = torch.nn.Linear(self.in_features, 4, bias=False)
            self.lora_B = torch.nn.Linear(4, self.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(x))

    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    silent = edit(model, ids, "neurons", torch.zeros_like)
    for layer in model.model.layers:
        layer.mlp.forward = torch.zeros_like
    assert_close(silent.losses, untouched(model, ids).losses, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "mixtral"])
def test_experts_have_no_neurons_of_all_tokens(family, ids):
    refuses("has experts", edit, build(family), ids, "neurons", torch.zeros_like)


@pytest.mark.slow
def test_a_key_hidden_late_is_seen_until_then(ids):
    """Later queries are blind to x_1, and earlier ones are not, as a dense mask has it."""
    model = build("llama")
    model.set_attn_implementation("sdpa")
    late, plain = hide(model, ids, since=8), untouched(model, ids)
    # tokens 2..7
    assert_close(late.losses[:, :6], plain.losses[:, :6], atol=1e-5, rtol=1e-5)
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    mask[7:, 0] = False
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, least)[None, None]
    expected = plain_losses(model, ids, attention_mask=additive.expand(len(ids), -1, -1, -1))
    assert_close(late.losses, expected, atol=1e-4, rtol=1e-4)
    short = hide(model, ids, since=8, last=3)
    assert_close(short.losses, late.losses[:, -3:])
    assert torch.equal(short.predicted, late.predicted[:, -3:])


def test_an_edit_that_has_no_place_or_no_layer_is_refused(ids):
    ours = own_model()
    refuses("place must be", edit, ours, ids, "head", shrink_the_third)
    refuses(
        r"each of layers must be in 0\.\.1, got 2", edit, ours, ids, "block", shrink_the_third, [2]
    )
    refuses("least 2|must be", hide, build("llama"), ids, 1)
    refuses("layers must be several integers, got 1", edit, ours, ids, "block", shrink_the_third, 1)
    for operation in (untouched, hide, partial(stream, window=2)):
        refuses("ids must be int64", operation, ours, ids[0])


@pytest.mark.parametrize("make", [own_model, lambda: build("llama")], ids=["ours", "llama"])
@pytest.mark.parametrize("place", PLACES)
def test_a_change_has_to_return_what_stands_in_the_place_of_what_it_got(place, make, ids):
    model = make()
    refuses("what change returns must be of type Tensor", edit, model, ids, place, lambda x: None)
    refuses(
        r"change must return the shape \(5, .*got \(1,", edit, model, ids, place, lambda x: x[:1]
    )
    # Of another precision it is taken as x's.
    double, plain = edit(model, ids, place, lambda x: x.double()), untouched(model, ids)
    assert torch.equal(double.losses, plain.losses)


@pytest.mark.parametrize("place", PLACES)
def test_a_layer_that_is_named_twice_is_changed_once(place, ids):
    ours = own_model()
    once, twice = (edit(ours, ids, place, shrink_the_third, [0] * n) for n in (1, 2))
    assert torch.equal(once.losses, twice.losses)


def test_a_layer_without_attention_has_no_queries_to_change(ids):
    bamba = build("bamba")
    refuses(r"in layers \[1\] alone, got \[0\]", edit, bamba, ids, "query", torch.zeros_like, [0])
    refuses(r"layers must be in 0\.\.1, got 2", edit, bamba, ids, "query", torch.zeros_like, [2])
    everywhere, there = (edit(bamba, ids, "key", torch.neg, x) for x in (None, [1]))
    assert torch.equal(everywhere.losses, there.losses)


def test_a_model_that_has_no_such_place_says_what_is_missing(ids):
    bare = build("llama")
    bare.model.layers[0].mlp = torch.nn.Identity()
    refuses("no one linear layer", edit, bare, ids, "neurons", torch.zeros_like)
    refuses("outside transformers' interface, in which surgery", untouched, build("bloom"), ids)
    refuses("change must be a function, got 3", edit, build("llama"), ids, "block", 3)


@pytest.mark.parametrize("change", [lambda ids: ids.int(), None], ids=["int32", "return_dict"])
def test_surgery_takes_the_ids_and_the_models_that_measure_takes(change, ids):
    llama = build("llama")
    operations = [untouched, hide, partial(stream, window=3), partial(set_back, block=1)]
    operations += [partial(transplant, donors=ids)]
    expected = [operation(llama, ids).losses for operation in operations]
    if change is None:
        llama.config.return_dict = False
    else:
        ids = change(ids)
        operations[-1] = partial(transplant, donors=ids)
    for operation, losses in zip(operations, expected, strict=True):
        assert torch.equal(operation(llama, ids).losses, losses)


def test_layers_and_dimensions_may_come_from_an_iterator(ids):
    ours = own_model()
    for place in PLACES:
        listed = edit(ours, ids, place, shrink_the_third, [0]).losses
        assert torch.equal(edit(ours, ids, place, shrink_the_third, iter([0])).losses, listed)
    assert torch.equal(set_back(ours, ids, 0, iter([3])).losses, set_back(ours, ids, 0, [3]).losses)


def test_positions_and_tokens_that_are_not_there_are_refused(ids):
    llama = build("llama")
    for targets in ((0,), (1, LENGTH + 1), ()):
        refuses(f"positions of the ids, .* 1 to {LENGTH}", hide, llama, ids, targets=targets)
    refuses(f"since must be in 2..{LENGTH}, got 200", hide, llama, ids, since=200)
    refuses(r"ids must be in 0\.\.\d+, which", transplant, llama, ids, ids + 10_000)
    refuses("ids must be int64", transplant, llama, ids, ids.float())


def test_numpys_integers_mean_what_pythons_do(ids):
    ours, llama = own_model(), build("llama")
    for operation, model, number, options in (
        (untouched, ours, 3, {"last": None}),
        (partial(set_back, block=1), ours, 3, {"dimensions": None}),
        (partial(set_back, dimensions=3), ours, 1, {"block": None}),
        (hide, llama, 3, {"since": None}),
        (hide, llama, 3, {"last": None}),
        (stream, llama, 3, {"window": None}),
        (partial(stream, window=3), llama, 1, {"sinks": None}),
        (partial(transplant, donors=ids), llama, 1, {"zero_values_from": None}),
    ):
        (name,) = options
        found = [operation(model, ids, **{name: kind(number)}) for kind in (int, np.int64)]
        assert torch.equal(found[0].losses, found[1].losses), name


def test_only_a_transplant_needs_a_position_more_than_the_text_has():
    model, ids = build("gpt2"), tokens(1, 320)  # as many as its table has
    untouched(model, ids)
    refuses("321 positions, and the model has learned 320", transplant, model, ids, ids[:, :4])


def test_of_a_model_with_a_sink_token_h_1_is_set_back_and_not_the_state_of_the_sink_token():
    model = own_model(sink_token=True)
    ids = tokens(2, LENGTH, least=3)

    def by_hand(h):  # (B, 1 + T, d), x* in front
        h[:, 1, 4] = h[:, 2:, 4].mean(dim=1)
        return h

    expected = edit(model, ids, "block", by_hand, layers=[0]).losses
    assert_close(set_back(model, ids, 0, [4]).losses, expected)


def test_surgery_is_public():
    assert sinkutils.surgery.edit is edit
    assert {"hide", "stream", "transplant", "set_back"} <= set(dir(sinkutils.surgery))
    assert "surgery" in dir(sinkutils)


# --- benchmarks/alone.py, mechanism.py


@pytest.mark.parametrize("family", ["ours", "llama", "gemma3_text"])
def test_the_first_token_attends_to_itself_alone_and_a_later_one_can_be_made_to(family):
    model = own_model() if family == "ours" else build(family)
    ids = tokens(3, LENGTH, least=3)
    blocks = range(len(alone.attentions(model)))

    @torch.no_grad()
    def logits(ids):
        output = model(ids)
        return getattr(output, "logits", output)

    before = logits(ids)
    for place, changed in ((1, False), (5, True)):
        with alone.attending(model, ids, blocks, partial(alone.itself_alone, place)):
            after = logits(ids)
        different = (after - before).abs().amax(dim=(0, 2)) > 1e-4  # by position
        assert different[place - 1 :].any() == changed and not different[: place - 1].any()
    short = torch.stack([logits(row[4:5][None])[0, 0] for row in ids])  # a text of this token
    assert_close(after[:, 4], short, atol=1e-4, rtol=1e-4)

    # A first token that gets what it has anyway is no other; what another gets makes it another.
    for place, changed in ((1, False), (5, True)):
        company = partial(alone.in_company, 1, alone.seen_at(model, ids, place))
        with alone.attending(model, ids, blocks, company):
            different = (logits(ids) - before).abs().amax(dim=(0, 2)) > 1e-4
        assert different[0] == changed
    rows = alone.seen_at(model, ids, 5)
    lengths = {layer: row.norm(dim=-1) for layer, row in rows.items()}
    # As long as it is, or as its value. Gemma's norm behind attention takes a length away.
    for wanted, changed in ((lengths, False), (None, family != "gemma3_text")):
        with alone.attending(model, ids, blocks, partial(alone.as_long, 5, wanted)):
            different = (logits(ids) - before).abs().amax(dim=(0, 2)) > 1e-4
        assert different[4] == changed and not different[:4].any()
    # Where the token before is the same one and alone as well, to see it is to see oneself.
    twins = ids.clone()
    twins[:, 3] = ids[:, 4]
    with alone.attending(model, twins, blocks, partial(alone.itself_alone, 4)):
        with alone.attending(model, twins, blocks, partial(alone.another_alone, 5)):
            of_other = logits(twins)
        with alone.attending(model, twins, blocks, partial(alone.itself_alone, 5)):
            of_itself = logits(twins)
    assert_close(of_other[:, 4], of_itself[:, 4], atol=1e-4, rtol=1e-4)
    assert_close(logits(ids), before)


def test_with_the_old_key_and_value_no_token_but_the_first_notices_a_cut(ids):
    model = build("llama")

    def cut(h):
        h[:, 0, :8] += 5
        return h

    kept = mechanism.control(model, ids, 0, {"cut": cut})["cut"]
    plain = mechanism.numbers(untouched(model, ids))["loss of later tokens"]
    losses = {name: numbers["loss of later tokens"] for name, numbers in kept.items()}
    assert losses["both"] == pytest.approx(plain, abs=1e-5)
    for name in ("old key", "old value"):
        assert losses[name] != pytest.approx(plain, abs=1e-5)


def test_hide_reports_the_sinks_that_it_is_asked_for(ids):
    model = build("llama")
    report = hide(model, ids, since=5, targets=(1, 5)).report
    assert report.targets == (1, 5)
    assert_close(report.alpha[:, 0], hide(model, ids, since=5).report.alpha[:, 0])


# --- benchmarks/lost_key.py


def test_a_lost_key_takes_its_value_or_its_weight_or_both_with_it():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, 5, 5, generator=generator).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -torch.inf
    )
    v = torch.randn(1, 1, 5, 3, generator=generator)
    late = torch.arange(5) >= 3
    for case, (value, weights) in lost_key.CASES.items():
        out = lost_key.output(logits, v, case, late)[0, 0]
        for i in range(5):
            shares = logits[0, 0, i].softmax(dim=0)
            others = shares[1:] @ v[0, 0, 1:]
            if late[i] and not weights:
                others = others / (1 - shares[0])  # the other weights sum to one
            expected = others + shares[0] * v[0, 0, 0] * float(value or not late[i])
            assert_close(out[i], expected)


def test_a_lost_key_is_that_of_a_streaming_cache(monkeypatch):
    model = build("llama")
    ids = tokens(2, 9, least=3)
    monkeypatch.setattr(lost_key, "WINDOW", 4)
    keys = torch.arange(9)
    forgotten = (keys[:, None] - keys >= 3) & ((keys > 0) | (keys[:, None] >= 4))
    with operating(model, ids, cache=True) as (capture, inputs, _):
        without = run(capture, inputs, hidden=forgotten).losses
    expected = {"kept": stream(model, ids, window=3, sinks=1).losses, "both lost": without}
    for case, losses in expected.items():
        with torch.no_grad(), lost_key.attending(model, lost_key.losing(case)):
            logits = model(ids, use_cache=False).logits[:, :-1]
        nats = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        assert_close(nats, losses, atol=1e-5, rtol=1e-5)


def test_in_our_own_model_a_lost_key_changes_every_token_but_the_first():
    model = own_model()
    ids = tokens(3, LENGTH, least=3)
    with torch.no_grad():
        plain = model(ids)
    for case in lost_key.CASES:
        logits = lost_key.logits_of_our_own(model, ids, case)
        different = (logits - plain).abs().amax(dim=(0, 2)) > 1e-4  # by position
        assert different.tolist() == [False] + [case != "kept"] * (LENGTH - 1)
    with torch.no_grad():
        assert_close(model(ids), plain)  # left as it was


# --- benchmarks/constant_value.py


def test_a_cut_value_is_a_lost_one_or_as_it_was():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 1, 5, 5, generator=generator).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -torch.inf
    )
    v = torch.randn(2, 1, 5, 3, generator=generator)
    late = torch.arange(5) >= 3
    cuts = {
        "kept": lambda _, first: first,
        "value lost": lambda _, first: torch.zeros_like(first),
    }
    for case, cut in cuts.items():
        out = constant_value.cutting(cut)(0, logits, v, late)
        assert_close(out, lost_key.output(logits, v, case, late))
    shifted = constant_value.cutting(lambda _, first: first - 1)(0, logits, v, late)
    assert_close(shifted, logits.softmax(-1) @ v - late[:, None].float())


# --- benchmarks/recall.py


class Words:
    """A tokenizer of bytes, as `recall.encode` calls one."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


def test_a_prompt_holds_its_needle_at_its_depth_and_is_as_long_as_its_filler():
    filler = [0] * 300
    for depth in recall.DEPTHS:
        subject = Subject("", None, Words())
        ids, question, answer = recall.prompt(subject, filler, depth, random.Random(3))
        text = bytes(ids).decode()
        number = text[-answer:]
        name = re.search(r"The number that (\w+) keeps is$", text[:-answer])[1]
        needle = f"\n{name} keeps the number{number} in a drawer.\n"
        assert len(ids) == 300 and text.count(needle) == 1 and text[-answer - question] == "\n"
        before = text.index(needle)
        assert abs(before / (before + text[before + len(needle) :].count("\0")) - depth) < 0.01


@pytest.mark.parametrize(("per_token", "exact"), [(False, 0), (True, 0), (False, 1)])
def test_inputs_in_8_bits_are_the_nearest_of_255_levels(per_token, exact):
    model = build("llama")
    layer = model.model.layers[1].mlp.up_proj
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 50
    expected = x.clone()
    for text in expected:
        rest = text[exact:]
        largest = rest.abs().amax(dim=1, keepdim=True) if per_token else rest.abs().max()
        text[exact:] = (rest * 127 / largest).round() * largest / 127
    plain = layer(x)
    right = layer(expected)
    handles = recall.round_inputs(model, per_token, exact)
    rounded_, logits = layer(x), model.lm_head(x)
    for handle in handles:
        handle.remove()
    assert_close(rounded_, right, atol=1e-4, rtol=1e-4)
    assert (right - plain).abs().max() > 1e-3
    assert torch.equal(logits, model.lm_head(x)), "the unembedding is left alone"


@pytest.mark.parametrize("make", [own_model, lambda: build("llama")], ids=["ours", "llama"])
def test_the_report_has_the_norms_of_what_was_changed(make):
    lm, ids = make(), tokens(4, LENGTH, least=3)

    def empty(h):
        h[:, 0] = 0
        return h

    plain, changed = untouched(lm, ids).report, edit(lm, ids, "block", empty, [0]).report
    assert changed.hidden_norms[0, 0] == 0 and plain.hidden_norms[0, 0] > 0.1
    assert_close(changed.hidden_norms[0, 1:], plain.hidden_norms[0, 1:])
    assert changed.value_norms[1, 0] == 0 and plain.value_norms[1, 0] > 0.1


def test_neurons_are_found_by_name_where_the_ffn_is_as_wide_as_the_hidden_state(ids):
    model = build("llama", intermediate_size=32, num_key_value_heads=4)
    found = edit(model, ids, "neurons", torch.zeros_like)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    assert_close(found.losses, untouched(model, ids).losses, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", [False, True])
def test_a_change_may_run_and_measure_the_model_itself_which_is_then_not_edited(own, place, ids):
    model = own_model() if own else build("llama")
    logits = (lambda: model(ids)) if own else lambda: model(ids).logits
    plain, alpha, seen = logits(), measure(model, ids).alpha, []

    def change(x):
        seen.extend([logits(), measure(model, ids).alpha])
        return x / 2

    found = edit(model, ids, place, change, [0])
    assert_close(seen, [plain, alpha])
    assert torch.equal(found.losses, edit(model, ids, place, lambda x: x / 2, [0]).losses)


def test_the_module_names_its_public_functions_alone():
    assert dir(sinkutils.surgery) == sorted(sinkutils.surgery.__all__)
