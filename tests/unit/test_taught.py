"""Families that the user teaches: models of our own under other names, right and wrong registrations."""

from typing import Any

import pytest
import torch
from helpers import alpha_by_definition, refuses
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sinkutils as su
from sinkutils.measuring import families as rules

D, H, VOCAB, T = 32, 4, 96, 24


def eager(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The reference attention of the first family."""
    logits = query @ key.mT * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights


class Mixer(nn.Module):
    """Attention through transformers' interface."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.is_causal = config, True
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x):
        return (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))

    def forward(self, x, mask=None):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(self, *self.heads(x), mask, scaling=(D // H) ** -0.5)
        return self.out(out.flatten(2))


class Shower(Mixer):
    """Attention that is computed in place; the module returns its weights."""

    wrong: Any = None  # what a test makes of the weights that are returned

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        logits = q @ k.mT * (D // H) ** -0.5
        weights = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
        weights = weights.softmax(dim=-1)
        out = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out, self.wrong(weights) if self.wrong else weights


class Stage(nn.Module):
    """A block; its FFN is as wide as the state."""

    def __init__(self, config) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mixer = (Shower if config.model_type == "shows" else Mixer)(config)
        self.ffn = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x, mask=None):
        mixed = self.mixer(self.one(x), mask)
        mixed, weights = mixed if isinstance(mixed, tuple) else (mixed, None)
        x = x + mixed
        return mixed, x + self.ffn(self.two(x)), weights


class AsksConfig(PreTrainedConfig):
    model_type = "asks"


class ShowsConfig(PreTrainedConfig):
    model_type = "shows"


class Asks(PreTrainedModel):
    config_class = AsksConfig
    _supports_sdpa = True
    forgets_mask = False  # whether its eager attention sees later tokens

    def __init__(self, config) -> None:
        super().__init__(config)
        self.words = nn.Embedding(VOCAB, D)
        self.stack = nn.ModuleList(Stage(config) for _ in range(3))
        self.unembed = nn.Linear(D, VOCAB)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.unembed

    def forward(self, input_ids):
        x, mask = self.words(input_ids), None
        if self.config._attn_implementation == "eager" and not self.forgets_mask:
            length = input_ids.shape[1]
            mask = torch.full((1, 1, length, length), torch.finfo(x.dtype).min).triu(1)
        for stage in self.stack:
            _, x, _ = stage(x, mask)
        return CausalLMOutput(logits=self.unembed(x))


class Shows(Asks):
    config_class = ShowsConfig


RIGHT = {"attention": "stack.*.mixer", "blocks": "stack.*", "hidden": lambda out: out[1]}


@pytest.fixture(autouse=True)
def nothing_taught(monkeypatch):
    monkeypatch.setattr(rules, "TAUGHT", {})


def build(kind, implementation="eager"):
    torch.manual_seed(0)
    model = kind(kind.config_class(attn_implementation=implementation)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def tokens(length=T):
    return torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def dense(model, ids):
    """Maps and hidden states, by the formulas, from the weights of the model alone."""
    x, maps, states = model.words(ids), [], []
    for stage in model.stack:
        q, k, v = stage.mixer.heads(stage.one(x))
        logits = q.double() @ k.double().mT * (D // H) ** -0.5
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        maps.append(weights)
        x = x + stage.mixer.out((weights.float() @ v).transpose(1, 2).flatten(2))
        x = x + stage.ffn(stage.two(x))
        states.append(x)
    return maps, states


@pytest.mark.parametrize("kind", [Asks, Shows])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("form", ["names", "functions", "lists"])
@torch.no_grad()
def test_a_taught_family_has_the_numbers_of_dense_attention_and_its_logits_stay(
    kind, implementation, form
):
    model, ids = build(kind, implementation), tokens()
    if kind is Shows:  # the other names AttentionInterface in its code, which is found
        refuses("su.families.register", su.measure, model, ids)
    where = dict(RIGHT)
    if form == "functions":
        where["attention"] = lambda model: [stage.mixer for stage in model.stack]
        where["blocks"] = lambda model: model.stack
    if form == "lists":
        where["blocks"] = "stack"
    su.families.register(kind.config_class.model_type, **where)
    before = model(ids).logits
    su.families.check(model)
    report = su.measure(model, ids, (1, 2))
    assert report.path == ("eager weights" if kind is Shows else "fused")
    maps, states = dense(model, ids)
    expected = alpha_by_definition(maps, (1, 2)).float()
    assert expected.std() > 0.01
    torch.testing.assert_close(report.alpha, expected, atol=1e-5, rtol=1e-4)
    norms = torch.stack([x.norm(dim=-1).mean(dim=0) for x in states])
    torch.testing.assert_close(report.hidden_norms, norms, atol=1e-3, rtol=1e-4)
    assert torch.equal(model(ids).logits, before)
    assert not any(stage._forward_hooks or stage._forward_pre_hooks for stage in model.stack)
    if kind is Asks:
        outcome = su.surgery.untouched(model, ids)
        torch.testing.assert_close(outcome.report.alpha[:, :1], report.alpha[:, :1])
        refuses("'block' cannot be edited", su.surgery.edit, model, ids, "block", torch.neg)


WRONG = {
    "has no modules 'stack..*mixr' .attention.*stack...mixer": {"attention": "stack.*.mixr"},
    "no modules .layers.+blocks.+ stack": {"blocks": "layers.*"},
    "stack.0.ffn is an attention module, .* but neither|Mixer computes attention, and is none|"
    "further softmax": {"attention": "stack.*.ffn"},
    "Mixer computes attention, and is none|more attention maps": {"attention": "stack.0.mixer"},
    "block 2 does not take the hidden state of block 1": {"hidden": lambda out: out[0]},
    "does not take the hidden state of block 1": {"hidden": None},
    "`hidden` finds no hidden state": {"hidden": lambda out: out["state"]},
    "finds no hidden state": {"hidden": lambda out: out[1][0]},
    "block . does not run after block .": {"blocks": lambda model: [*model.stack][::-1]},
    "0 blocks around one attention module": {"blocks": "stack.*.ffn"},
    "fails on .*no attribute 'h'": {"blocks": lambda model: model.h},
    "does not return modules": {"attention": lambda model: [nn.Linear(2, 2)]},
    "does not return modules of": {"attention": lambda model: []},
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("kind", [Asks, Shows])
def test_a_wrong_registration_is_refused_in_one_true_line(kind, message):
    su.families.register(kind.config_class.model_type, **RIGHT | WRONG[message])
    model = build(kind)
    refuses(message, su.measure, model, tokens())
    refuses(message, su.families.check, model)
    su.families.register(kind.config_class.model_type, **RIGHT)  # a second one replaces the first
    su.families.check(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: weights.roll(1, dims=1),  # other heads
        lambda weights: weights**2,
        lambda weights: torch.eye(weights.shape[-1]).expand_as(weights),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(make, monkeypatch):
    su.families.register("shows", **RIGHT)
    monkeypatch.setattr(Shower, "wrong", staticmethod(make))
    refuses("are not those of a softmax", su.families.check, build(Shows))


@pytest.mark.parametrize("part", [0, 1])
def test_an_eager_function_that_returns_other_weights_is_refused(part, monkeypatch):
    right = eager

    def other(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out, (weights.roll(1, dims=1), None)[part]

    monkeypatch.setitem(globals(), "eager", other)
    su.families.register("asks", **RIGHT)
    refuses("eager attention returns weights that are not", su.families.check, build(Asks))


def test_an_eager_attention_that_is_not_causal_is_refused(monkeypatch):
    su.families.register("asks", **RIGHT)
    su.families.check(build(Asks))
    monkeypatch.setattr(Asks, "forgets_mask", True)
    refuses("are not those of a softmax", su.families.check, build(Asks))


def test_what_asks_or_shows_can_be_told():
    su.families.register("shows", **RIGHT, returns_weights=False)
    refuses("neither returned weights", su.families.check, build(Shows))
    su.families.register("shows", **RIGHT, returns_weights=True)
    su.families.check(build(Shows))
    su.families.register("asks", **RIGHT, returns_weights=False)
    su.families.check(build(Asks))


def test_bad_arguments_are_refused():
    refuses("model_type must be a name", su.families.register, 3, **RIGHT)
    refuses("attention must be a name", su.families.register, "a", **RIGHT | {"attention": 3})
    refuses("returns_weights must be True", su.families.register, "a", **RIGHT, returns_weights=3)
    refuses("blocks must be a name", su.families.register, "a", **RIGHT | {"blocks": None})
    refuses("hidden must be a function", su.families.register, "a", **RIGHT | {"hidden": "x"})
    refuses("xlnet cannot be measured: .*later tokens", su.families.register, "xlnet", **RIGHT)
    refuses("no family 'asks' was registered", su.families.check, build(Asks))
    refuses("no family None", su.families.check, nn.Linear(2, 2))
