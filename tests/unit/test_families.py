"""Families of transformers, each as a small random model; benchmarks/families.py checks them all."""

import re
import sys

import families
import pytest
import torch
import transformers
from families import CLASSES, WINDOW, check, small_config, tokens
from torch import Tensor, nn

from sinkutils.measuring import families as rules
from sinkutils.measuring.families import REFUSED
from sinkutils.measuring.measure import measure
from sinkutils.paths import ROOT

pytestmark = pytest.mark.slow
MEASURED = {
    "bart": "fused", "bert": "fused", "bloom": "eager weights", "deepseek_v3": "exact", "deepseek_v32": "exact",
    "falcon": "eager weights", "gemma2": "exact", "gemma3": "fused", "gemma3n_text": "fused", "git": "eager weights",
    "gpt2": "fused", "gpt_neo": "eager weights", "gpt_oss": "fused", "gptj": "eager weights", "granite_swa": "fused",
    "granitemoe_swa": "fused", "hy_v4": "exact", "inkling2_text": "exact", "jamba": "fused", "kimi_linear": "exact",
    "longcat_flash": "exact", "mimo_v2_flash": "fused", "minimax_m3_vl_text": "fused", "openai-gpt": "eager weights",
    "qwen3_next": "fused", "roberta-prelayernorm": "fused", "xglm": "eager weights",
}  # fmt: skip
REASONS = {
    "blt": "patches of bytes", "cpmant": "prompt of its own", "deepseek_v4": "compressed", "diffllama": "two softmaxes",
    "hrm_text": "many times", "mamba": "no softmax attention", "musicgen": "codebooks", "prophetnet": "n-gram",
    "reformer": "hash buckets", "rwkv": "no softmax attention", "xlm": "list of their own", "xlnet": "later tokens",
}  # fmt: skip


@pytest.fixture
def page() -> str:
    return (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", MEASURED)
def test_alpha_is_that_of_dense_attention_and_logits_stay(family):
    result = check(family, lengths=(5, 64))
    assert not result.refused
    assert not result.wrong, result
    assert result.path == MEASURED[family]


@pytest.mark.parametrize("family", REASONS)
def test_what_cannot_be_measured_is_refused_for_its_true_reason(family):
    assert REASONS[family] in check(family, lengths=(8,)).refused


def test_the_oracle_notices_what_a_family_adds(monkeypatch):
    """Without its scaling by the sink, or without the choice of keys, a family would not pass."""
    monkeypatch.setattr(rules, "scaled_by_sink", lambda *arguments: arguments[-1])
    assert check("granite_swa", lengths=(64,)).wrong
    monkeypatch.undo()
    monkeypatch.setattr(rules, "chosen_keys", lambda module, mask, q, kwargs: mask)
    assert check("deepseek_v32", lengths=(64,)).wrong


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa", "gpt_oss", "mimo_v2_flash"])
def test_a_learned_sink_has_one_definition_on_every_path_and_in_every_layer(family):
    model, ids = families.build(family), tokens(64)
    fused, exact = (measure(model, ids, (1, 2), exact=exact, mass=False) for exact in (False, True))
    assert (fused.path, exact.path) == ("fused", "exact")
    for name in ("alpha", "renormalised", "star"):
        torch.testing.assert_close(getattr(fused, name), getattr(exact, name), atol=1e-5, rtol=1e-4)
    assert fused.star.shape == fused.alpha[:, 0].shape
    has_sink = [getattr(module, "sinks", None) is not None for module in rules.attention_layers(model.base_model)[1]]
    for layer, sink in enumerate(has_sink):
        assert (fused.star[:, layer].min() > 0.001) == sink
        assert torch.equal(fused.renormalised[:, :, layer], fused.alpha[:, :, layer]) != sink


def test_a_sink_whose_part_in_the_output_is_not_known_is_refused(monkeypatch):
    def halving(module, query, key, value, attention_mask, **kwargs):
        weights = torch.softmax(query @ key.mT * kwargs["scaling"] + attention_mask, dim=-1)
        return (weights @ value).transpose(1, 2) / 2, weights

    module = next(iter(rules.attention_layers(families.build("granite_swa").base_model)[1]))
    q, k, v = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    kwargs = {"scaling": 1.0, "s_aux": torch.ones(4)}
    monkeypatch.setattr(sys.modules[type(module).__module__], "eager_attention_forward", halving)
    with pytest.raises(ValueError, match="GraniteSWAAttention has a learned sink"):
        rules.chunk(rules.Call(module, q, k, v, None, kwargs), torch.arange(6))


@pytest.mark.parametrize("family", ["gemma3n_text", "hy_v4"])
def test_norms_of_several_streams_are_means_over_them(family):
    model, ids, seen = families.build(family), tokens(9), []
    model.model.layers[0].register_forward_hook(lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0]))
    report = measure(model, ids)
    hidden = seen[-1]  # the streams stand first or third
    norms = hidden.norm(dim=-1).mean(dim=(0, 2) if hidden.shape[1] == 9 else (0, 1))
    torch.testing.assert_close(report.hidden_norms[0], norms)


def test_the_committed_page_names_every_family_of_the_pinned_transformers(page):
    named = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, flags=re.M)
    assert sorted(named) == sorted(CLASSES.items())
    assert f"transformers {transformers.__version__}:" in page


def test_the_committed_page_says_what_a_check_finds(page):
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines()]
    rows = {cells[0]: cells[2:] for cells in table if len(cells) > 2}
    for family in ("llama", "granite_swa", "jamba"):
        result = check(family)
        assert [rows[family][0], rows[family][-1]] == [result.path, result.remarks]
    for family in REFUSED.keys() & CLASSES.keys():
        assert REFUSED[family] in rows[family][0]


def test_small_models_are_small_and_have_the_window():
    config = small_config("gemma3_text")
    assert (config.num_hidden_layers, config.hidden_size, config.sliding_window) == (2, 32, WINDOW)


class Adapted(nn.Module):
    """What peft.PeftModel is to measure: a wrapper that is no model of transformers."""

    def __init__(self, base: nn.Module, prompts: bool) -> None:
        super().__init__()
        self.base_model = base
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompts})

    def get_base_model(self) -> nn.Module:
        return self.base_model


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_are_looked_through_and_learned_prompts_refused(compiled):
    model, ids = families.build("llama"), tokens(16)

    def wrap(prompts: bool) -> nn.Module:
        wrapped = Adapted(model, prompts)
        return torch.compile(wrapped) if compiled else wrapped

    alpha: Tensor = measure(wrap(prompts=False), ids).alpha
    assert torch.equal(alpha, measure(model, ids).alpha)
    with pytest.raises(ValueError, match="learned prompts"):
        measure(wrap(prompts=True), ids)
