"""Propositions 1-4 of Appendix B.1, on random weights in float64."""

import math

import pytest
import torch

from sinkutils.measuring.measure import measure
from sinkutils.measuring.propositions import PROPOSITION, propositions, repeated_tokens
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.model.positions import distance_table

T = 160  # beyond D = 128, where Eq. 6 stops growing


@pytest.mark.parametrize("seed", [0, 1])
def test_repeated_tokens_have_one_hidden_state_in_every_block_and_attention_the_closed_form(seed) -> None:
    rows = {row["position"]: row for row in propositions(T, seed)}
    assert [(name, row["proposition"]) for name, row in rows.items()] == list(PROPOSITION.items())
    assert all(row["hidden_difference"] < 1e-10 and row["closed_form_difference"] < 1e-12 for row in rows.values())
    premises = [rows[name]["premise"] for name in ("nope", "relative", "alibi", "rotary")]
    assert premises == [None, False, True, None] and rows["rotary"]["bound_slack"] >= -1e-15
    assert rows["relative"]["alpha_1"] > rows["nope"]["alpha_1"] > rows["alibi"]["alpha_1"]


def test_proposition_1_attention_without_position_is_uniform() -> None:
    seen = repeated_tokens("nope", T)
    assert seen.hidden.dtype == torch.float64 and seen.hidden.abs().max() > 0.1
    weights = seen.weights
    t = torch.arange(1, T + 1, dtype=torch.float64)
    expected = torch.ones(T, T, dtype=torch.float64).tril() / t[:, None]
    torch.testing.assert_close(weights, expected.expand_as(weights), atol=1e-14, rtol=1e-11)


def test_proposition_2_fails_for_t5s_bucket_number_because_g_grows_with_distance() -> None:
    g = distance_table("relative", T, 1)[0]
    assert (g.diff() >= 0).all() and g[-1] > g[0]  # the proof takes g to be non-increasing
    weights = repeated_tokens("relative", T).weights
    # Distant tokens are favoured: at t = 16 the first token has 1 / (1 + e^-1 + .. + e^-15) of all attention,
    first = 1 / sum(math.exp(-m) for m in range(16))
    torch.testing.assert_close(weights[:, :, 15, 0], torch.full_like(weights[:, :, 15, 0], first))
    assert first > 0.6
    # and beyond D the first t - D keys share one value, the largest, as the proof says.
    last = weights[:, :, -1]
    torch.testing.assert_close(last[..., : T - 128], last[..., :1].expand_as(last[..., : T - 128]))
    assert (last[..., :1] >= last - 1e-12).all()


def test_the_bucket_number_as_a_bias_makes_a_sink_up_to_about_d_and_none_far_beyond() -> None:
    alphas = {t: float(repeated_tokens("relative", t).weights[..., 0].mean()) for t in (16, 64, 128, 160, 512)}
    assert [t for t, alpha_1 in alphas.items() if alpha_1 > 0.3] == [16, 64]
    # By the paper's own metric too.
    assert measure(TransformerLM(LMConfig(position="relative"), 0), torch.full((1, 16), 7)).sink(1, 0.3) == 100


def test_with_t5s_learned_bias_the_sign_of_the_bias_decides() -> None:
    seen = repeated_tokens("relative_learned", T)
    growing = seen.logits.diff(dim=-1) > 1e-12
    assert growing.any() and not growing.all()  # random buckets go up and down, so the premise holds for neither sign


def test_proposition_4_the_bound_on_rotary_attention_goes_to_zero() -> None:
    seen = repeated_tokens("rotary", T)
    bound = seen.bound()
    assert (bound.diff(dim=-1) < 0).all()
    assert (seen.logits.abs() <= seen.xi[..., None] + 1e-12).all()
    one = repeated_tokens("rotary", 8, num_heads=1)
    model = TransformerLM(LMConfig(64, 8, 3, 1, 32, 64, "rotary"), 0)
    norms = measure(model, torch.full((1, 8), 7))
    expected = norms.query_norms[:, :1] * norms.key_norms[:, :1] / 32**0.5
    torch.testing.assert_close(one.xi.float(), expected, rtol=1e-4, atol=1e-6)
    xi = float(seen.xi[0, 0])
    assert float(bound[0, 0, 9]) == pytest.approx(math.exp(2 * xi) / (math.exp(2 * xi) + 9))


@pytest.mark.parametrize("position", ["absolute", "learnable"])
def test_embeddings_that_move_h_0_are_outside_the_propositions(position: str) -> None:
    with pytest.raises(ValueError, match="leave h\\^0 alone"):
        repeated_tokens(position)
    model = TransformerLM(LMConfig(position=position), 0)
    report = measure(model, torch.full((1, 32), 7))
    assert report.hidden_norms[-1].std() > 1e-4  # Table 7 is about these
