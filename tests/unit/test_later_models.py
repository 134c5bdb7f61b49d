"""What later models add: output gates and secondary sinks, on small random models as their families are built."""

import pytest
import torch
from helpers import own_model, tokens
from small_models import build
from torch import Tensor

from sinkutils.measuring.destinations import secondary_sinks
from sinkutils.measuring.gates import gate_openness
from sinkutils.measuring.measure import measure


def test_a_gate_of_qwen3_next_is_what_its_attention_multiplies_with():
    model, ids = build("qwen3_next"), tokens(3, 12)
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
    model, ids = own_model(gate=gate), tokens(3, 12)
    inputs: list[Tensor] = []
    layer = model.blocks[1].attention
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    found = gate_openness(model, ids)
    handle.remove()
    expected = (inputs[0] @ layer.gate.weight.T).sigmoid().unflatten(-1, (2, -1)).mean(dim=(1, 3))
    torch.testing.assert_close(found[:, 1], expected)
    with pytest.raises(ValueError, match="TransformerLM has no output gates"):
        gate_openness(own_model(), ids)


def test_secondary_sinks_are_found_where_a_key_draws_attention_and_not_near_the_end():
    model, ids = own_model(context_length=40), tokens(3, 40)
    report = measure(model, ids, mass=True)
    report.mass = torch.full_like(report.mass, 0.1)
    report.mass[1, 1, 0, 6] = 0.6  # text 1, layer 1, head 0, position 7
    report.mass[0, 0, 1, 24] = 0.5  # seen by sixteen queries
    report.mass[2, 0, 0, 25] = 0.9  # and by fifteen
    report.mass[:, :, :, 0] = 0.9  # the first key is no secondary one
    table = secondary_sinks(report, ids)
    assert table.drop(columns=["token", "alpha"]).values.tolist() == [[1, 0, 1, 7], [0, 1, 0, 25]]
    assert table["token"].tolist() == [int(ids[1, 6]), int(ids[0, 24])]
    assert len(secondary_sinks(report, ids, queries=5)) == 3 and secondary_sinks(report, ids, epsilon=0.95).empty
    few = measure(model, ids[:, :10], mass=True)
    few.mass = torch.full_like(few.mass, 0.5)
    assert secondary_sinks(few, ids[:, :10]).empty, "no key is seen by sixteen"
    with pytest.raises(ValueError, match="mass=True"):
        secondary_sinks(measure(model, ids), ids)
