"""Why claims do not hold or stay open: sentences that are said only while a test on the records says so."""

import numpy as np
import pytest
from helpers import made_up

from sinkutils.ledger.results import results
from sinkutils.measuring.report import uniform_alpha
from sinkutils.showing import reasons

FLOOR = uniform_alpha(64)


@pytest.fixture
def add(runs):
    """Add records of an experiment: a seed each of alpha_1, a row a block of so many heads."""

    def record(name, *seeds, preset="laptop", star=0.0, loss=2.7, onsets=(), **destinations):
        for seed, rows in enumerate(seeds):
            alpha = np.atleast_2d(np.asarray(rows, dtype=float))
            excess = {"1": float((alpha.mean() - FLOOR) / (1 - FLOOR)), "star": star}
            report = {"T": 64, "layers": list(range(len(alpha))), "alpha": [alpha.tolist()], "excess": excess}
            curve = [
                {"step": step, "sink_1": 50.0 * (not onsets or step >= onsets[seed]), "valid_loss": loss}
                | {f"excess_{k}": value * (step > 0) for k, value in excess.items()}
                for step in range(11)
            ]
            final = {"step": 10, "sink_1": 0.0, "sink_star": 90.0, "valid_loss": loss, "report": report}
            if destinations:  # each the same share in all heads of block 1
                final["destinations"] = {where: [[share[seed]]] for where, share in destinations.items()}
            made_up(runs, name, seed, preset, curve=curve, final=final)

    return record


def why(claim, preset="laptop"):
    return reasons.why(claim, results(preset))


def test_whether_eight_heads_are_why_shared_biases_lose_is_said_from_the_control_once_it_has_three_seeds(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("kv_bias", 0.01, 0.012, 0.011, star=0.5)
    add("kv_bias_shared", 0.01, 0.012, 0.011, star=0.5)
    assert why("shared_biases").endswith("8 in the paper; whether that is why, no run of ours has tried.")
    add("kv_bias_heads_8", 0.01, 0.012, 0.011)
    add("kv_bias_shared_heads_8", 0.21, 0.212)
    assert why("shared_biases").endswith("no run of ours has tried."), "two seeds"
    add("kv_bias_shared_heads_8", 0.21, 0.212, 0.211)
    moved = 0.2 / (1 - FLOOR)
    assert f"8 in the paper; with 8 here too, sharing moves the excess of α₁ by {moved:+.3f} (" in why("shared_biases")
    assert why("shared_biases").endswith(").")
    add("kv_bias_shared_heads_8", 0.01, 0.012, 0.011)
    assert why("shared_biases").endswith("), so their number is not why.")


def test_the_least_loss_orders_the_shares_only_where_it_does_and_the_smallest_are_learned_by_heart(runs):
    def record(share, least, valid, train=2.0):
        for seed in range(3):
            end = {"valid_loss": valid, "train_loss": train}
            losses = (7.0, least + 0.01 * seed)
            curve = [{"step": step, "sink_1": 0.0, "valid_loss": loss} for step, loss in enumerate(losses)]
            curve.append({"step": 2, "sink_1": 0.0} | end)
            made_up(runs, f"data_share_{share}", seed, "laptop", curve=curve, final=end)

    assert why("overfitting") == ""
    for share, least in (("0.04", 3.7), ("0.1", 3.4), ("0.5", 2.9), ("1", 2.7)):
        record(share, least, least + 0.1)
    record("0.02", 4.3, 11.9, train=0.19)
    assert why("overfitting") == "", "without the smallest"
    record("0.01", 5.4, 11.5, train=0.12)
    said = why("overfitting")
    assert "the training loss ends at 0.1 and 0.2 nats, the validation loss at 11.5 and 11.9" in said
    assert "even guessing costs 6.9" in said and said.endswith("in the mean 5.41, 4.31, 3.71, 3.41, 2.91, 2.71 nats.")
    record("0.04", 4.32, 4.4)
    assert why("overfitting") == "", "seeds of two shares overlap"
    record("0.04", 3.7, 3.8)
    record("0.01", 5.4, 6.5)
    assert why("overfitting") == "", "not learned by heart"


def test_that_scattered_seeds_agree_on_a_sink_or_on_none_is_said_while_their_mean_leaves_it_open(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("mlp", FLOOR, FLOOR + 0.06, FLOOR)
    assert why("mlp_kernel").startswith(
        "No seed of MLP kernel, no normalisation (excess 0.000, 0.065, 0.000) has a sink"
    )
    add("mlp", FLOOR, FLOOR + 0.1, FLOOR)
    assert why("mlp_kernel") == "", "one has"
    add("batch_quarter", 0.25, 0.65, 0.45)
    assert why("batch_size") == "", "half the batch is not known"
    add("batch_half", 0.25, 0.65, 0.45)
    assert why("batch_size").startswith("Each seed of batch size × 0.25 (excess ")
    assert "does not show one." in why("batch_size")
    add("batch_half", 0.25, 0.26, 0.25)
    assert why("batch_size") == "", "its mean tells"
    add("batch_half", FLOOR, 0.65, 0.45)
    assert why("batch_size") == "", "one has none"


def test_that_a_small_batch_does_not_stand_the_rate_is_said_where_half_of_it_helps_it_and_harms_the_base(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("batch_quarter", 0.20, 0.24, 0.22)
    add("lr_half", 0.40, 0.44, 0.42)
    assert why("batch_size") == "", "without the control"
    add("batch_quarter_lr_half", 0.30, 0.34, 0.33)
    up, down = ((0.10 + 0.10 + 0.11) / 3 / (1 - FLOOR), 0.10 / (1 - FLOOR))
    assert f"the excess is larger by {up:.3f} (" in why("batch_size")
    assert f"the base's is smaller by {down:.3f} (" in why("batch_size")
    assert "four times the steps" not in why("batch_size")
    add("batch_quarter_steps_x4", 0.45, 0.49)
    assert "four times the steps" not in why("batch_size"), "two seeds"
    add("batch_quarter_steps_x4", 0.45, 0.49, 0.47)
    assert f"it stands {-0.05 / (1 - FLOOR):+.3f} (" in why("batch_size")
    add("lr_half", 0.60, 0.64, 0.62)
    assert why("batch_size") == "", "half the rate helps the base as well"
    add("lr_half", 0.40, 0.44, 0.42)
    add("batch_quarter_lr_half", 0.10, 0.14, 0.13)
    assert why("batch_size") == "", "half the rate does not help"


def test_that_no_sink_is_left_to_take_is_said_where_a_smaller_decay_has_taken_it(add):
    add("fixed_1", 0.5, 0.54, 0.52)
    add("weight_decay_2", FLOOR, FLOOR + 0.002, FLOOR + 0.001, loss=3.9)
    assert why("much_weight_decay") == "", "what 5 does is not known"
    add("weight_decay_5", FLOOR, FLOOR, FLOOR, loss=5.7)
    said = why("much_weight_decay")
    assert said.startswith("At a decay of 2 the sink is gone: an excess of 0.001 (") and "by 1.80 nats" in said
    assert (
        "our 1, 2 and 5 are 9, 18 and 45 in the paper, whose largest is 5: its whole range ends near our 0.6." in said
    )
    add("weight_decay_5", FLOOR, FLOOR, FLOOR, loss=3.9)
    assert why("much_weight_decay") == "", "no harm"
    add("weight_decay_5", FLOOR, FLOOR, FLOOR, loss=5.7)
    add("weight_decay_2", 0.2, 0.21, 0.2, loss=3.9)
    assert why("much_weight_decay") == "", "a sink is left"


def test_that_seeds_agree_is_said_of_all_or_none(add):
    add("fixed_1", 0.5, 0.5, 0.5, onsets=(2, 2, 2))
    add("lr_half", 0.4, 0.4, 0.4, onsets=(3, 4, 4))
    said = "All 3 seeds agree in direction: onset, share of the steps, learning rate / 2 above the base by 0.100 to"
    assert why("small_rate_delays").startswith(said)
    add("lr_half", 0.4, 0.4, 0.4, onsets=(2, 8, 8))
    assert why("small_rate_delays") == "", "one seed does not"


def test_bias_dimensions_whose_neighbours_cannot_be_told_apart_are_told_by_their_ends(add):
    add("fixed_1", [[0.5], [0.5]], [[0.5], [0.6]], [[0.6], [0.5]])
    for name in ("k_bias_dims_16", "k_bias_dims_1"):
        add(name, [[0.30], [0.05]], [[0.20], [0.06]], [[0.25], [0.04]], star=0.3)
    left = "K biases learnable in 1 / 96 of their dimensions stands in block 1 alone: heads there give x₁ 0.20 to 0.30"
    add("k_bias_dims_64", 0.01, 0.01, 0.01, star=0.2)
    assert "agree" not in why("bias_dims") and left in why("bias_dims"), "the other way round"
    add("k_bias_dims_64", 0.01, 0.01, 0.01, star=0.5)
    assert why("bias_dims").startswith("All 3 seeds agree in direction: excess of α*, K biases learnable in 64 / 96 of")
    assert "by 0.200 to 0.200" in why("bias_dims") and left in why("bias_dims")
    add("k_bias_dims_1", [[0.30], [0.25]], [[0.20], [0.06]], [[0.25], [0.04]], star=0.3)
    assert left not in why("bias_dims"), "another block too"


def test_that_what_fails_in_the_paper_trains_smoothly_is_said_while_all_of_it_does(runs):
    def record(name, *losses):
        for seed in range(3):
            curve = [{"step": i, "sink_1": 0.0, "valid_loss": loss + 0.01 * seed} for i, loss in enumerate(losses)]
            made_up(runs, name, seed, "laptop", curve=curve, final=curve[-1])

    record("fixed_1", 7.0, 3.0, 3.05, 2.7)
    record("softmax_p2", 7.0, 3.0, 3.08, 2.8)
    record("softmax_p3", 7.0, 3.0, 2.9, 2.8)
    assert why("p_softmax_diverges") == "", "without the fourth power"
    record("softmax_p4", 7.0, 3.0, 3.0, 2.9)
    said = why("p_softmax_diverges")
    assert "by 0.08 nats at most (the base's by 0.05)" in said and "they end +0.100, +0.100, +0.200 nats" in said
    record("softmax_p4", 7.0, 3.0, 3.2, 2.9)
    assert why("p_softmax_diverges") == "", "one jumps"


def test_that_k_star_has_nothing_left_to_give_is_said_where_five_times_the_norm_leave_it_none(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("k_bias", FLOOR, FLOOR, FLOOR, star=0.5)
    for kind in ("first", "uniform"):
        assert why("value_norm") == "", "not without both"
        for norm, alpha, star in ((1, 0.1, 0.4), (5, 0.5, 0.0), (20, 0.5, 0.0)):
            add(f"k_bias_{kind}_{norm}", alpha, alpha + 0.01, alpha, star=star)
    said = why("value_norm")
    assert said.startswith("The excess of α₁ is 0.000, 0.0") and "with v* = 0, v', 5 v', 20 v' and 0.000, 0.0" in said
    assert said.endswith("the paper's Sink₁ still goes from 3.71 to 25.88 % from 5 v' to 20 v'.")
    add("k_bias_uniform_5", 0.5, 0.51, 0.5, star=0.2)
    assert why("value_norm") == "", "k* keeps some"
    add("k_bias_uniform_5", 0.2, 0.21, 0.2, star=0.0)
    assert why("value_norm") == "", "x_1 has not got it"


def test_that_the_sink_wanes_with_p_is_said_where_the_first_steps_of_p_take_some(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("softmax_p2", 0.10, 0.20, 0.15)
    assert why("inner_dependence_beyond") == "", "one step"
    add("softmax_p3", FLOOR, FLOOR + 0.01, FLOOR)
    add("softmax_p4", FLOOR, FLOOR, FLOOR)
    said = why("inner_dependence_beyond")
    assert ", 0.000 with p = 1, 2, 3, 4; less by 0.400 (" in said and said.endswith(
        "too close to what counts as a sink to tell."
    )
    add("softmax_p2", 0.30, 0.31, 0.30)
    assert why("inner_dependence_beyond").endswith("from 2 to 3."), "a sink"
    add("softmax_p3", 0.30, 0.32, 0.30)
    assert why("inner_dependence_beyond").endswith("from 1 to 2."), "nothing lost by the second"
    add("softmax_p2", 0.52, 0.54, 0.52)
    assert why("inner_dependence_beyond") == "", "nor by the first"
    for p, alpha in (("normalised", 0.5), ("p2", 0.2), ("p3", 0.1), ("p4", 0.1)):
        add(f"sigmoid_{p}", alpha, alpha + 0.01, alpha)
    assert why("normalisers").startswith("In p-normalised sigmoid the sink wanes as p grows: the excess of α₁ is 0.4")
    for root, alpha in ((2, 0.3), (3, 0.1), (4, 0.1)):
        add(f"softmax_p1_{root}", alpha, alpha + 0.01, alpha)
    said = why("normalisers").partition(". In p-normalised sigmoid")[0]
    assert said.startswith("In p-normalised softmax the sink wanes as p falls") and "p = 1, 1/2, 1/3, 1/4; less" in said
    assert said.endswith(" from 1/2 to 1/3"), "no more beyond"


def test_what_x_1_gets_by_block_is_said_where_block_1_gives_it_less_than_the_base_s_in_every_seed(add):
    add("fixed_1", [[0.5], [0.3]], [[0.6], [0.3]])
    add("nope", [[0.2], [0.1]], [[0.4], [0.1]])
    assert why("positions") == "", "not without ALiBi"
    add("alibi", [[0.1], [0.4]], [[0.1], [0.5]])
    assert why("positions").startswith(
        "From block to block x₁ gets in the mean: the base 0.55, 0.30; no position embedding 0.30, 0.10; ALiBi 0.10, "
        "0.45. In every seed"
    )
    add("alibi", [[0.55], [0.4]], [[0.1], [0.5]])
    assert why("positions") == "", "one seed has the base's"


def test_where_block_1_looks_in_the_place_of_x_1_is_said_where_it_does_so_in_every_seed(add):
    add("fixed_1", [[0.5], [0.3]], [[0.6], [0.4]], self=(0.05, 0.05), previous=(0.1, 0.2))
    add("heads_add", [[0.1], [0.1]], [[0.2], [0.3]], self=(0.5, 0.6), previous=(0.1, 0.3))
    by_itself = (
        "Block 1 looks elsewhere than the base's: its heads' mean attention to x₁ is 0.10 to 0.20 with heads added, "
        "not concatenated and 0.50 to 0.60 in the base, to the token itself 0.50 to 0.60 with heads added, not "
        "concatenated and 0.05 in the base. In the last block x₁ gets 0.10 to 0.30 with heads added, not concatenated "
        "and 0.30 to 0.40 in the base."
    )
    assert why("heads") == by_itself
    add("heads_1", [[0.3], [0.1]], [[0.3], [0.3]], self=(0.1, 0.1), previous=(0.3, 0.4))
    assert why("heads").startswith(by_itself + " Block 1 looks elsewhere")
    assert "to the token before 0.30 to 0.40 with 1 head and 0.10 to 0.20 in the base" in why("heads")
    add("heads_1", [[0.3], [0.1]], [[0.3], [0.3]], self=(0.1, 0.1), previous=(0.3, 0.15))
    assert why("heads") == by_itself, "one seed looks there no more than the base's"
    add("heads_add", [[0.1], [0.1]], [[0.55], [0.3]], self=(0.5, 0.6), previous=(0.1, 0.3))
    assert why("heads") == "", "one seed has the base's"
    add("scale_2", [[0.1], [0.1]], [[0.2], [0.3]], self=(0.5, 0.6), previous=(0.1, 0.3))
    assert why("scale").startswith("Block 1 looks elsewhere") and "0.60 with softmax scaled by α = 2" in why("scale")
    for name in ("scale_0.2", "scale_0.1", "scale_0.05"):
        add(name, [[0.3], [0.5]], [[0.4], [0.5]])
    assert why("scale").startswith("From block to block x₁ gets in the mean: the base 0.55, 0.35; softmax scaled by")


def test_a_sink_in_few_heads_is_said_while_the_mean_over_all_is_open(add):
    few = [np.where(np.arange(48) < count, 0.44, 0.07 + 0.02 * count).reshape(6, 8) for count in (1, 2)]
    add("default", *few, preset="desk")
    said = why("emerges_any_token", "desk")
    assert said.startswith("It begins in few heads: of 48, 1 and 2 give x₁ more than 0.3 in the seeds there are")
    assert "the largest 0.44 and 0.44." in said
    add("default", few[0], np.full((6, 8), 0.2), preset="desk")
    assert why("emerges_any_token", "desk") == "", "no head in one seed"
    add("default", *[np.full((6, 8), 0.5 + seed / 1000) for seed in range(2)], preset="desk")
    assert why("emerges_any_token", "desk") == "", "the mean tells"
