"""What later models add: secondary sinks."""

import pytest
import torch
from helpers import own_model, tokens

from sinkutils.measuring.destinations import secondary_sinks
from sinkutils.measuring.measure import measure


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
