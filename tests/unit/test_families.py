"""Families of transformers, each as a small random model; benchmarks/families.py checks them all."""

import re
from typing import Any

import families
import pytest
import torch
import transformers
from families import CLASSES, check, tokens
from helpers import alpha_by_definition, refuses
from small_models import build, family_of
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sinkutils.measuring import families as rules
from sinkutils.measuring import surgery
from sinkutils.measuring.measure import measure
from sinkutils.paths import ROOT

MEASURED = {
    name: path
    for path, names in {
        "fused": "bart bert doge falcon_h1 gemma3 gemma3_text gemma3n_text gpt2 gpt2+inverse_layer gpt_neox gpt_oss "
                 "granite_swa granitemoe_swa jamba llama mimo_v2_flash minimax minimax_m3_vl_text "
                 "mistral olmo2 opt phi qwen3 qwen3_next roberta-prelayernorm",
        "exact": "deepseek_v3 deepseek_v32 gemma2 gemma2+softcap hy_v4 inkling2_text kimi_linear longcat_flash",
        "eager weights": "bloom falcon falcon+alibi git gpt_neo gptj mpt openai-gpt xglm",
    }.items()
    for name in names.split()
}  # fmt: skip
REASONS = {
    "blt": "patches of bytes", "cpmant": "prompt of its own", "deepseek_v4": "compressed", "diffllama": "two softmaxes",
    "hrm_text": "many times", "mamba": "no softmax attention", "musicgen": "codebooks", "prophetnet": "n-gram",
    "reformer": "hash buckets", "rwkv": "no softmax attention", "xlm": "list of their own", "xlnet": "later tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_alpha_is_that_of_dense_attention_and_logits_stay(name):
    with family_of(name) as family:
        result = check(family, lengths=(5, 24, 64))
    assert not result.refused
    assert not result.wrong, result
    assert result.path == MEASURED[name]
    report = measure(build(name), tokens(24), families.TARGETS)
    assert report.alpha.std() > 0.005  # otherwise the comparison would say nothing
    # the true index of the attention layer; norms are of every block
    if name in ("jamba", "qwen3_next"):
        assert report.layers == (1,)
        assert report.alpha.shape[2] == 1
        assert len(report.hidden_norms) == 2


@pytest.mark.parametrize("family", REASONS)
def test_what_cannot_be_measured_is_refused_for_its_true_reason(family):
    assert REASONS[family] in check(family, lengths=(8,)).refused


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa", "gpt_oss", "mimo_v2_flash"])
@torch.no_grad()
def test_a_learned_sink_is_star_on_every_path_and_in_every_layer(family):
    model, ids, dense = build(family), tokens(64), families.Oracle()
    AttentionInterface.register("dense", dense.attend)
    AttentionMaskInterface.register("dense", eager_mask)
    with families.attention(model, "dense"):
        model(ids, use_cache=False)
    kept = [layer.sum(dim=-1, keepdim=True) for layer in dense.maps]  # rows sum to less than one
    expected = {"alpha": alpha_by_definition(dense.maps, (1, 2))}
    expected["star"] = torch.stack([1 - rest.mean(dim=(-1, -2)) for rest in kept], 1)
    assert expected["star"].max() > 0.05
    modules = rules.attention_layers(model.base_model)[1]
    has_sink = [getattr(module, "sinks", None) is not None for module in modules]
    for exact in (False, True):
        report = measure(model, ids, (1, 2), exact=exact)
        assert report.path == ("exact" if exact else "fused")
        for name, value in expected.items():
            torch.testing.assert_close(getattr(report, name), value.float(), atol=1e-5, rtol=1e-4)
        for layer, sink in enumerate(has_sink):
            assert (report.star[:, layer].min() > 0.001) == sink


def test_a_sink_whose_part_in_the_output_is_not_known_is_refused():
    def halving(module, query, key, value, attention_mask, **kwargs):
        weights = torch.softmax(query @ key.mT * kwargs["scaling"] + attention_mask, dim=-1)
        return (weights @ value).transpose(1, 2) / 2, weights

    module = next(iter(rules.attention_layers(build("granite_swa").base_model)[1]))
    q, k, v = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    kwargs = {"scaling": 1.0, "s_aux": torch.ones(4)}
    with pytest.raises(ValueError, match="GraniteSWAAttention has a learned sink"):
        rules.chunk(rules.Call(module, q, k, v, None, kwargs, halving), torch.arange(6))


@pytest.mark.parametrize("family", ["gemma3n_text", "hy_v4"])
def test_norms_of_several_streams_are_means_over_them_and_there_is_no_one_h_1(family):
    model, ids, seen = build(family), tokens(9), []
    model.model.layers[0].register_forward_hook(lambda _, __, out: seen.append(out))
    report = measure(model, ids)
    hidden = seen[-1] if torch.is_tensor(seen[-1]) else seen[-1][0]  # streams stand first or third
    norms = hidden.norm(dim=-1).mean(dim=(0, 2) if hidden.shape[1] == 9 else (0, 1))
    torch.testing.assert_close(report.hidden_norms[0], norms)
    refuses("residual streams", surgery.set_back, model, ids, 0, (4, 9))


def test_the_committed_page_names_every_family_of_the_pinned_transformers():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, flags=re.M)
    assert sorted(named) == sorted(CLASSES.items())
    assert f"transformers {transformers.__version__}:" in page


class Adapted(nn.Module):
    """What peft.PeftModel is to measure: a wrapper that is no model of transformers."""

    def __init__(self, base: nn.Module, prompts: bool) -> None:
        super().__init__()
        self.base_model = base
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompts})

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_and_compilation_are_looked_through_and_learned_prompts_refused(compiled):
    model, ids = build("llama"), tokens(16)
    outer = torch.compile if compiled else lambda inner: inner
    for wrapped in (outer(model), outer(Adapted(model, prompts=False))):
        assert torch.equal(measure(wrapped, ids).alpha, measure(model, ids).alpha)
    refuses("learned prompts", measure, outer(Adapted(model, prompts=True)), ids)
