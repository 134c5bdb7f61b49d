"""What later models add: output gates and secondary sinks, on small random models as their families are built."""

import pytest
import torch
import transformers as tf
from torch import Tensor

from sinkutils.measuring.later import gate_openness, secondary_sinks
from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import LMConfig, TransformerLM

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
}
OWN = LMConfig(vocab_size=60, context_length=40, num_layers=2, num_heads=2, hidden_size=16, intermediate_size=24)


def qwen3_next() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.Qwen3NextConfig(
        **SHAPE,
        num_experts=2,
        num_experts_per_tok=1,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return tf.Qwen3NextForCausalLM(config).eval()


def gpt_oss() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        **SHAPE,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size=16,
        sliding_window=100,
        attn_implementation="eager",
    )
    model = tf.GptOssForCausalLM(config).eval()
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks, 1.0)
    return model


def test_a_gate_of_qwen3_next_is_what_its_attention_multiplies_with():
    model, ids = qwen3_next(), torch.randint(60, (3, 12))
    found = gate_openness(model, ids)
    attention = [module for module in model.modules() if hasattr(module, "q_proj")]
    assert found.shape == (3, len(attention), 4)
    seen: list[Tensor] = []
    handle = attention[0].o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids)
        half = attention[0].q_proj.weight.view(4, 16, 32)
        half[2, 8:] = 0  # the gate of the third head is a half everywhere
        model(ids)
    handle.remove()
    after = gate_openness(model, ids)
    assert torch.allclose(after[:, 0, 2], torch.tensor(0.5))
    torch.testing.assert_close(after[:, 0, [0, 1, 3]], found[:, 0, [0, 1, 3]])
    gated, halved = (x.unflatten(-1, (4, 8))[:, :, 2] for x in seen)
    assert found[0, 0, 2] != 0.5 and not torch.allclose(gated, halved)


@pytest.mark.parametrize("gate", ["head", "element"])
def test_a_gate_of_our_own_is_the_sigmoid_of_its_map_of_the_input(gate):
    model, ids = TransformerLM(LMConfig(**{**vars(OWN), "gate": gate}), 0), torch.randint(60, (3, 12))
    inputs: list[Tensor] = []
    layer = model.blocks[1].attention
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    found = gate_openness(model, ids)
    handle.remove()
    expected = (inputs[0] @ layer.gate.weight.T).sigmoid().unflatten(-1, (2, -1)).mean(dim=(1, 3))
    torch.testing.assert_close(found[:, 1], expected)
    with pytest.raises(ValueError, match="TransformerLM has no output gates"):
        gate_openness(TransformerLM(OWN, 0), ids)


def test_a_learned_sink_is_read_raw_and_renormalised():
    model, ids = gpt_oss(), torch.randint(60, (3, 12))
    report = measure(model, ids, (1, 2))
    with torch.no_grad():
        maps = torch.stack(model(ids, output_attentions=True).attentions, dim=1)  # rows sum to less than one
    kept = maps.sum(-1, keepdim=True)
    assert float(kept.mean()) < 0.95
    for k in (1, 2):
        raw, whole = (x[..., k - 1 :, k - 1].mean(-1) for x in (maps, maps / kept))
        torch.testing.assert_close(report.alpha[:, k - 1], raw, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(report.renormalised[:, k - 1], whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(report.star, 1 - kept.mean(dim=(-1, -2)), rtol=1e-4, atol=1e-5)


def test_secondary_sinks_are_found_where_a_key_draws_attention_and_not_near_the_end():
    model, ids = gpt_oss(), torch.randint(1, 60, (3, 40))
    report = measure(model, ids, mass=True)
    report.mass = torch.full_like(report.mass, 0.1)
    report.mass[1, 2, 3, 6] = 0.5  # text 1, layer 2, head 3, position 7
    report.mass[0, 1, 0, 20] = 0.6
    report.mass[2, 0, 0, 30] = 0.9  # seen by ten queries only
    report.mass[:, :, :, 0] = 0.9  # the first key is no secondary one
    table = secondary_sinks(report, ids)
    assert table.drop(columns=["token", "alpha"]).values.tolist() == [[1, 0, 0, 21], [2, 3, 1, 7]]
    assert table["token"].tolist() == [int(ids[0, 20]), int(ids[1, 6])]
    assert len(secondary_sinks(report, ids, queries=5)) == 3 and secondary_sinks(report, ids, epsilon=0.95).empty
    with pytest.raises(ValueError, match="mass=True"):
        secondary_sinks(measure(model, ids), ids)
