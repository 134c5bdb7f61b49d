"""What pages say of records: sentences, cards and names, held against made-up records whose numbers are known."""

import math
import re
from itertools import cycle

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import made_up

from sinkutils import paths
from sinkutils.ledger import claims as ledger
from sinkutils.ledger.results import ledgers, results
from sinkutils.measuring.report import uniform_alpha
from sinkutils.showing import cards, comparisons, figures, items, names, reasons, seen
from sinkutils.study.experiments import experiments
from sinkutils.study.grid import config
from sinkutils.study.paper import paper_rows

matplotlib.use("agg")
FLOOR = uniform_alpha(64)
IDENTIFIER = re.compile(rf"(?<![\w./-])({'|'.join(e.name for e in experiments() if '_' in e.name)})(?![\w/])")


@pytest.fixture
def add(runs):
    """Add records of an experiment: alpha_1 of every head, by seed; failed where None."""

    def record(name, *alphas, star=None, losses=(2.7,), onset=None, norm=None, previous=None):
        for seed, (alpha, loss) in enumerate(zip(alphas, cycle(losses), strict=False)):
            if alpha is None:
                made_up(runs, name, seed, "laptop", status="failed", reason="not finite", final={"step": 9})
                continue
            shape = config(name, "laptop").model
            values = {"1": alpha, "2": 0.01} | ({"star": star} if star else {})
            sink = {k: {f"{eps}": 100.0 * (value > eps) for eps in (0.2, 0.3, 0.4)} for k, value in values.items()}
            maps = {k: [[value] * shape.num_heads] * shape.num_layers for k, value in values.items()}
            excess = {k: (value - FLOOR) / (1 - FLOOR) for k, value in values.items()}
            report = {"T": 64, "targets": [1, 2], "epsilons": [0.3], "layers": list(range(shape.num_layers))}
            report |= {"floor": FLOOR, "alpha": [maps["1"], maps["2"]], "sink": sink, "excess": excess}
            if norm:
                report["hidden_norms"] = [[norm, 1.0]] * shape.num_layers
            first = onset[seed] if isinstance(onset, tuple) else onset
            curve = [{"step": n, "sink_1": 50.0 * (n >= first), "valid_loss": loss} for n in range(10)] if onset else []
            final = {"step": 9, "sink_1": sink["1"]["0.3"], "valid_loss": loss, "train_loss": 2.6, "report": report}
            if previous:
                final["destinations"] = {"previous": [[previous] * shape.num_heads] * shape.num_layers}
            if star:
                report |= {"sink_star": sink.pop("star"), "alpha_star": maps["star"]}
                final["sink_star"] = report["sink_star"]["0.3"]
            made_up(runs, name, seed, "laptop", curve=curve, final=final)

    return record


@pytest.fixture
def some(add):
    """Weight decays: 0 less than the base, 0.5 more, 0.001 like it, 1 at one seed, 5 failed, the rest not run."""
    add("fixed_1", 0.50, 0.54, 0.52)
    add("weight_decay_0", 0.30, 0.33, 0.32)
    add("weight_decay_0.5", 0.70, 0.75, 0.72)
    add("weight_decay_0.001", 0.51, 0.53, 0.53)
    add("weight_decay_1", 0.7)
    add("weight_decay_5", None, None)


def test_sentences_put_each_row_on_its_side_with_the_numbers_of_the_records(some):
    base, more, less, paper, same, missing, one, failed = seen.sentences("Table 2")
    assert base == "The base has Sink₁ = 100.0 % (100.0 to 100.0 over 3 seeds)."
    for text, row, alphas in (
        (more, "decay 0.5", (0.70, 0.75, 0.72)),
        (less, "decay 0", (0.30, 0.33, 0.32)),
        (same, "decay 0.001", (0.51, 0.53, 0.53)),
    ):
        change = np.mean(np.subtract(alphas, (0.50, 0.54, 0.52))) / (1 - FLOOR)
        (number,) = re.findall(rf"{re.escape(row)} ([+−][\d.]+) \(", text)
        assert float(number.replace("−", "-")) == pytest.approx(change, abs=6e-4)
    assert more.startswith("More of a sink on x₁ than the base") and "Less" not in more
    assert less.startswith("Less of a sink on x₁ than the base: decay 0 ")
    assert same.startswith("Not to be told from the base")
    assert paper == "In the paper, too, both lie on this side of its base's 18.18 %."
    assert missing == "Not run yet: decay 0.01; decay 2."
    assert one == "One seed so far, so without an interval: decay 1."
    assert failed == "Training failed: decay 5 (2 of 2 seeds)."


def test_what_goes_the_other_way_than_in_the_paper_is_named(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("weight_decay_0", 0.70, 0.75, 0.72)
    add("weight_decay_0.5", 0.70, 0.75, 0.72)
    told = " ".join(seen.sentences("Table 2"))
    same = "The paper has 1 of the 2 with a number there on the side of its base's 18.18 % that ours has"
    assert f"{same}; the other way round: decay 0 15.2." in told


def test_a_difference_that_its_own_seeds_do_not_carry_is_named(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    for name in ("weight_decay_0", "weight_decay_0.001", "weight_decay_0.01", "weight_decay_1"):
        add(name, 0.30, 0.34, 0.32)
    add("weight_decay_0.5", 0.55, 0.95, 0.70)
    (line,) = [line for line in seen.sentences("Table 2") if line.startswith("By the spread")]
    assert line == "By the spread of its own seeds alone, not pooled, one could not tell: decay 0.5."


def test_without_an_onset_there_is_no_difference_of_it(add):
    add("fixed_1", 0.50, 0.54, 0.52, onset=3)
    add("lr_half", 0.40, 0.44, 0.42, onset=6)
    add("lr_quarter", 0.1, 0.1, 0.1, onset=10)
    told = seen.sentences("Figure 4 right", key="onset")
    assert told[0].startswith("In the base the sink sets in (Sink₁ stays at 2.9 % or more) after 0.333")
    assert any(line.startswith("A later onset of the sink than the base") and "0.003," in line for line in told)
    assert "No onset within the run, so no difference: rate 0.0015, 12,000 steps (3 of 3 seeds)." in told
    assert not any("0.0015, 12,000 steps +" in line for line in told)


def test_a_norm_ratio_is_given_beside_what_the_picture_shows(add, monkeypatch):
    monkeypatch.setattr("sinkutils.ledger.trials.untrained_ratio", lambda *arguments: 0.5)
    add("fixed_1", 0.50, 0.54, 0.52, norm=1.3)
    (line, *_) = seen.sentences("Figure 7 left", key="hidden")
    assert "itself: not divided" in line and "(1.30 to 1.30; itself 1.3)" in line, "never divided by less than 1"


def test_rows_of_a_bias_say_what_is_on_it_and_what_the_paper_has(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("k_bias", 0.05, 0.04, 0.06, star=0.6)
    assert "K biases 100 %, the paper 73" in " ".join(seen.sentences("Table 4", key="excess_star"))


def test_a_row_is_compared_with_what_it_changes(add):
    add("default", 0.01, 0.02, 0.01)
    add("default_constant_lr", 0.01, 0.02, 0.01)
    add("fixed_1", 0.50, 0.54, 0.52)
    add("constant_lr", 0.50, 0.54, 0.52)
    told = seen.sentences("Section 4")
    assert any(line.startswith("Not to be told from the default with these seeds: constant ") for line in told)
    assert any(line.startswith("Not to be told from the base with these seeds: constant, on the base") for line in told)


def test_windows_are_compared_with_the_base_at_their_own_length(add):
    add("fixed_1", 0.90, 0.94, 0.92)
    add("window_1_2", 0.51, 0.53, 0.53)
    assert "The base at this T is not recorded yet" in " ".join(seen.sentences("Figure 6 right", key="visible_1"))
    add("window_none", 0.50, 0.54, 0.52)
    told = " ".join(seen.sentences("Figure 6 right", key="visible_1"))
    assert "than the base at this T (difference" in told and "w = 32" in told


def test_the_study_as_a_whole_is_told_from_its_ends(add):
    add("fixed_1", 0.50, 0.54, 0.52, onset=(5, 5, 6))
    add("weight_decay_0.5", 0.70, 0.75, 0.72, onset=(1, 2, 2))
    add("lr_half", 0.40, 0.44, 0.42, onset=(8, 7, 8))
    add("weight_decay_0", 0.30, 0.33, 0.32, onset=(5, 6, 6))
    told = seen.study("laptop")
    assert told[1].startswith("Of the 3 with two seeds or more, 1 have more of a sink than the base, 2 less; 0 cannot")
    assert told[2].startswith("Most of all: weight decay 0.5 +0.")
    assert re.fullmatch(r"Least of all: weight decay 0 −0.* to .*; learning rate / 2 −0.*", told[3])
    onset = "than in the base the sink sets in (Sink₁ stays at 2.9 % or more; share of the steps) with"
    assert told[4].startswith(f"Earlier {onset} weight decay 0.5 −0.407 (")
    assert told[5].startswith(f"Later {onset} learning rate / 2 +0.259 (")


def test_the_most_on_any_other_position_is_the_most(runs):
    sink = {f"{k}": {"0.3": share} for k, share in ((1, 50.0), (2, 20.0), (3, 5.0))}
    report = {"T": 64, "targets": [1, 2, 3], "excess": {"1": 0.5, "2": 0.2, "3": 0.0}, "sink": sink}
    made_up(runs, "fixed_1", 0, "laptop", final={"report": report})
    assert seen.by_position("Table 10 right")[0].endswith("at most 20.0 % on any other of the first 3.")


def test_positions_name_where_the_sink_is(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("default", 0.01)
    first, missing = seen.by_position("Table 10 right")
    assert (
        first == "position 1: most on x₁, Sink₁ = 100.0 % (100.0 to 100.0 over 3 seeds), at most 0.0 % on any "
        "other of the first 2."
    )
    assert missing == "Not run yet: position 2; position 3."
    assert "none: no sink on any of the first 2 positions." in seen.by_position("Section 5")


@pytest.mark.parametrize("item", dict.fromkeys(row.item for row in paper_rows()))
def test_every_item_reads_well_with_some_records_and_with_none(item, some, tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(paths, "RUNS", tmp_path / "none")
        assert seen.sentences(item) == ["None of these runs is recorded yet."]
    told = seen.sentences(item)
    assert told and not IDENTIFIER.search(" ".join(told)) and "nan" not in " ".join(told)
    labels = [row.label for row in names.rows(item)]
    assert len(set(labels)) == len(labels) and not IDENTIFIER.search(" ".join(labels))


def test_our_setting_stands_before_the_papers():
    (row,) = [row for row in paper_rows("Table 9") if row.experiment == "lr_half_steps_x2"]
    run = config(row.experiment)
    expected = f"rate {run.train.learning_rate:g}, {run.train.steps:,} steps (rate 2e-4, 40k steps)"
    assert names.label(row, "laptop") == expected
    line = names.human("excess alpha_1: lr_half above fixed_1", "laptop")
    assert line == "excess of α₁: learning rate / 2 above the base"
    assert names.human("cos(q, k_j) above A_ti") == "cos(q, kⱼ) above Aₜᵢ"


# --- cards -----------------------------------------------------------------------------------------------------------


FOUND = [
    (("present", ("fixed_1",), "hidden"), (1.014, 0.65, 1.567), "threshold 2.00",
     "norm ratio of h₁, times the untrained: 1.01 (0.65 to 1.57) in the base, where 2.00 or more counts."),
    (("kept", ("heads_1", "fixed_1"), "excess_1"), (-0.2, -0.25, -0.15), "margin 0.091",
     "excess of α₁: 1 head differs by −0.200 (−0.250 to −0.150) from the base, beside a margin of 0.091."),
    (("more", ("fixed_1", "default"), "hidden"), (0.0, np.log(0.5), np.log(2)), "p = 1 after Holm",
     "norm ratio of h₁, times the untrained: the base has 1.00 (0.50 to 2.00) times that of any first token "
     "(the paper's default), and should be above it."),
    (("alike", ("sft_sigmoid", "sft_softmax"), "gradient"), np.log([3.0, 2.5, 3.6]), "margin 0.693",
     "median gradient norm: sigmoid, no normalisation, fine-tuned has 3.000 (2.500 to 3.600) times that of the base, "
     "fine-tuned, beside a margin of 2.00."),
    (("", (), ""), (np.nan,) * 3, "something 1.2; exact", "\u201casked\u201d (something 1.2; exact)."),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "numbers", "why", "words"), FOUND)
def test_a_reason_says_what_was_found_in_the_place_of_what_was_asked(asked, numbers, why, words):
    columns = ["check", "outcome", "mean", "low", "high", "seeds", "why", *ledger.ASKED, "premise"]
    checks = pd.DataFrame([("asked", "fails", *numbers, 3, why, *asked, False)], columns=columns)
    said = cards.reason({"id": "none", "verdict": "not reproduced"}, checks, "laptop")
    assert said.startswith(f"Does not hold: {words}")


def of_one(asked, numbers, why):
    """The checks of a claim that has one, which holds."""
    columns = ["check", "outcome", "mean", "low", "high", "seeds", "why", *ledger.ASKED, "premise"]
    return pd.DataFrame([("asked", "holds", *numbers, 3, why, *asked, False)], columns=columns)


def test_what_a_claim_starts_from_is_not_among_the_checks_that_hold(runs):
    asked = ("more", ("base", "gate_head"), "peak")
    checks = pd.concat([of_one(asked, (0.2, 0.1, 0.3), "p = 0.001 after Holm")] * 3, ignore_index=True)
    checks.loc[1, "outcome"], checks.loc[2, "premise"] = "fails", True
    said = cards.reason({"id": "none", "verdict": "partly"}, checks, "laptop")
    assert said.startswith("1 of 2 checks hold. Does not hold: ")
    open_ = checks[:2].replace({"outcome": {"fails": "inconclusive"}})
    said = cards.reason({"id": "none", "verdict": "inconclusive"}, open_, "laptop")
    assert said.startswith("1 of 2 checks hold, 1 cannot be told from our seeds. Cannot be told: ")
    said = cards.reason({"id": "none", "verdict": "inconclusive"}, open_.assign(premise=[False, True]), "laptop")
    assert said.startswith("Cannot be told, as what it starts from is not there here: ")


def test_a_loss_within_the_margin_that_is_surely_higher_is_called_a_price(runs):
    def said(low):
        checks = of_one(("comparable", ("elu", "fixed_1"), "valid_loss"), (0.05, low, 0.09), "margin 0.094")
        return cards.reason({"id": "none", "verdict": "reproduced"}, checks, "laptop")

    price = "validation loss: elu + 1, no normalisation differs by 0.050 (0.010 to 0.090) from the base"
    words = f"Within the margin, but not without a price: {price}, beside a margin of 0.094."
    assert said(0.01) == f"The one check holds. {words}" and said(-0.01) == "The one check holds."


def test_what_holds_by_the_pooled_spread_alone_says_so(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("weight_decay_0", 0.30, 0.34, 0.32)
    add("weight_decay_0.5", 0.55, 0.95, 0.70)

    def said(*pair):
        checks = of_one(("more", pair, "excess_1"), (0.2, 0.1, 0.3), "p = 0.001 after Holm")
        return cards.reason({"id": "none", "verdict": "reproduced"}, checks, "laptop")

    unsure = "By the spread of these seeds alone, not pooled, one could not tell: asked."
    assert said("weight_decay_0.5", "fixed_1") == f"The one check holds. {unsure}"
    assert said("fixed_1", "weight_decay_0") == "The one check holds."


def test_so_does_what_is_no_worse_or_no_different_by_the_pooled_spread_alone(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("weight_decay_0", 0.50, 0.54, 0.51)
    add("weight_decay_0.5", 0.40, 0.74, 0.52)

    def said(kind, name):
        checks = of_one((kind, (name, "fixed_1"), "excess_1"), (0.0, -0.01, 0.01), "margin 0.200")
        return cards.reason({"id": "none", "verdict": "reproduced"}, checks, "laptop")

    for kind in ("same", "kept"):
        assert said(kind, "weight_decay_0") == "The one check holds."
    assert said("same", "weight_decay_0.5").endswith("alone, not pooled, one could not tell: asked.")


def test_where_attention_goes_is_said_beside_the_base_with_what_goes_to_no_key():
    base = {"first": 0.40, "self": 0.10, "previous": 0.20, "rest": 0.30}
    star = {"star": 0.55, "first": 0.05, "self": 0.08, "previous": 0.12, "rest": 0.20}
    lost = {"first": 0.05, "self": 0.102, "previous": 0.15, "rest": 0.20}
    shares = {"the base": base, "K biases": star, "softpick": lost, "like it": base | {"first": 0.395, "self": 0.105}}
    assert seen.destinations(shares, "the base") == [
        "Shares of all attention beside the base's. K biases: x₁ −0.35; k*, x*, sink logit +0.55; the query itself "
        "−0.02; the token before −0.08; the rest −0.10.",
        "Softpick: x₁ −0.35; no key +0.50; the token before −0.05; the rest −0.10.",
    ]


def test_the_page_says_how_much_of_the_fall_of_the_loss_comes_before_the_sink(add, runs):
    assert seen.loss_at_onset() == [], "nothing recorded"
    curve = [(0, 6.0, 0), (1, 3.0, 0), (2, 2.8, 0), (3, 2.6, 50), (4, 2.0, 50)]
    points = [{"step": step, "valid_loss": loss, "sink_1": sink} for step, loss, sink in curve]
    for seed in (0, 1, 2):
        made_up(runs, "fixed_1", seed, "laptop", curve=points, final=points[-1])
    said = "It sets in after the first steep fall, not with it: 85 to 85 % of the whole fall are done by then."
    assert seen.loss_at_onset() == [said]


def test_a_claim_that_holds_says_what_it_leaves_open(add, monkeypatch):
    checks = of_one(("present", ("fixed_1",), "excess_1"), (0.3, 0.2, 0.4), "threshold 0.04")

    def said(id):
        return cards.reason({"id": id, "verdict": "reproduced"}, checks, "laptop")

    assert "In Gemma 3 270M the first key is hardly shorter than others (0.8" in said("norms_everywhere")
    assert said("small_models").endswith("Asked of models of 135M and 268M parameters; the paper's smallest has 14M.")
    assert said("sink_token") == "The one check holds.", "nothing of the default is recorded"
    add("fixed_1", 0.50, 0.54, 0.52), add("default", 0.07, 0.08, 0.07), add("sink_token", 0.2, 0.1, 0.2, star=0.4)
    assert "On the base, whose x₁ has one, the two share it: Sink* " in said("sink_token")
    assert "parameters; the paper's smallest has 14M. Ours of 0.3M, on any first token, have " in said("small_models")


def test_a_card_has_the_ledgers_numbers_under_human_names(some, monkeypatch):
    monkeypatch.setattr("sinkutils.ledger.results.ledgers", ledgers)
    row = ledger.claims("laptop").set_index("id", drop=False).loc["weight_decay"].to_dict()
    table, words, facts = cards.figures(row, "laptop")
    assert table.loc["weight decay 0.5", "paper: Sink₁ %"] == "41.08"
    assert table.loc["the base", "ours: Sink₁ %"] == "100.0"
    assert table.loc["weight decay 0", "ours: Sink₁ %"] == "66.7"  # at 0.3, of 100, 66.7 and 0 % at the ledger's three
    mean = (np.mean([0.50, 0.54, 0.52]) - FLOOR) / (1 - FLOOR)
    assert table.loc["the base", "ours: excess of α₁"].startswith(f"{mean:.3f} (")
    assert (words, facts) == ([], [])
    text, page = cards.card(row, ledger.checks("weight_decay", "laptop"), "laptop")
    assert text.startswith("[NOT RUN] Weight decay encourages the sink.")
    assert "three seeds of weight decay 1 (1 so far); weight decay 0.01" in " ".join(text.split())
    assert ">not run<" in page and cards.CHIPS["not run"][0] in page


def test_a_card_unfolds_to_the_share_of_heads_at_each_epsilon(some):
    ours = (
        "Sink_1 % at eps 0.2/0.3/0.4: fixed_1 80.0/71.4/60.0, weight_decay_0 40.0/27.1/-; excess alpha_1: fixed_1 0.3"
    )
    row = {"verdict": "reproduced", "claim": "", "source": "", "holds": "1 of 1", "id": "none"}
    row |= {"paper": "", "interval": "", "ours": ours}
    said = "Sink₁ % at ε = 0.2 / 0.3 / 0.4: the base 80.0 / 71.4 / 60.0; weight decay 0 40.0 / 27.1 / -."
    assert cards.at_each_epsilon(row, "laptop") == [said]
    text, page = cards.card(row, of_one(("present", ("fixed_1",), "excess_1"), (0.3, 0.2, 0.4), "above"), "laptop")
    assert f"<div>{said}</div></details>" in page and "80.0" not in text


def test_a_card_says_what_t_each_run_was_measured_at_where_they_differ():
    row = {"paper": "", "interval": "", "ours": "excess of alpha_1: context_32 0.2, context_512 0.1"}
    assert list(cards.figures(row, "laptop")[0].index) == [
        "context 32, as many tokens a step",
        "context 512, as many tokens a step",
    ]
    row["ours"] += ", fixed_1 0.3"
    assert list(cards.figures(row, "laptop")[0].index)[1:] == [
        "context 512, as many tokens a step, at T = 32",
        "the base, at T = 64",
    ]


def test_a_cause_is_named_of_claims_that_there_are_and_only_while_its_test_says_so(runs):
    known = {claim.id for part in ledger.PARTS.values() for claim in part}
    said = {id: reasons.why(id, results("laptop", runs)) for id in reasons.REASONS}
    assert set(said) <= known and reasons.why("universal", results("laptop", runs)) == ""
    assert said["first_token_norms"] == "", "no record, no test"
    assert "77.8 %" in said["random_input"] and "grows with the distance" in said["proposition_2"]


def test_what_is_left_of_a_sink_is_placed_only_where_one_block_has_it(runs, add):
    for name, others in (("elu", 0.05), ("softmax_plus_one", 0.12)):
        report = {"T": 64, "layers": [0, 1, 2, 3], "alpha": [[[0.3] * 4, *[[others] * 4] * 3]]}
        made_up(runs, name, 0, "laptop", final={"step": 9, "sink_1": 4.0, "valid_loss": 2.7, "report": report})
    assert "block 1 alone: heads there give x₁ 0.30 to 0.30" in reasons.why("no_normalisation", results("laptop"))
    assert "block 1 above all: heads" in reasons.why("softmax_plus_one", results("laptop")), "more than even elsewhere"
    add("sigmoid", 0.5)
    assert reasons.why("no_normalisation", results("laptop")) == "", "as much of it in every block"


def test_decays_are_compared_by_their_doses_only_while_the_sink_grows_between_two_of_them(some, add, monkeypatch):
    monkeypatch.setattr("sinkutils.ledger.results.ledgers", ledgers)
    assert reasons.why("weight_decay", results("laptop")) == "", "no run of 0.01"
    add("weight_decay_0.01", 0.30, 0.33, 0.32)
    said = reasons.why("weight_decay", results("laptop"))
    assert "our decays of 0.01, 0.1, 0.5, 1 are its 0.09, 0.9, 4.5, 9. From 0.09 to 0.9 the sink grows" in said
    assert f"by {0.61 / 3 / (1 - FLOOR):.3f} (" in said
    add("weight_decay_0.01", 0.51, 0.55, 0.53)
    assert reasons.why("weight_decay", results("laptop")) == ""


def test_twice_the_rate_is_said_to_learn_worse_only_while_it_surely_does(add):
    add("fixed_1", 0.5, 0.5, 0.5, losses=(2.70, 2.71, 2.72))
    add("lr_x2", 0.5, 0.5, 0.5, losses=(2.69, 2.71, 2.75))
    assert reasons.why("small_rate", results("laptop")) == "", "by chance, perhaps"
    add("lr_x2", 0.5, 0.5, 0.5, losses=(2.60, 2.61, 2.63))
    assert reasons.why("small_rate", results("laptop")) == "", "it learns better"
    add("lr_x2", 0.5, 0.5, 0.5, losses=(2.80, 2.81, 2.83))
    said = reasons.why("small_rate", results("laptop"))
    assert "our model also learns worse in every seed, by 0.100 to 0.110 nats, where" in said
    assert "(3.70 against 3.73)" in said


def test_longer_runs_are_said_to_learn_better_only_where_both_do(add):
    add("fixed_1", 0.5, 0.5, losses=(2.70, 2.71), onset=4)
    add("lr_half_steps_x2", 0.6, 0.6, losses=(2.65, 2.66), onset=4)
    assert reasons.why("compensated_rate", results("laptop")) == "", "one of two"
    add("lr_quarter_steps_x4", 0.6, 0.6, losses=(2.72, 2.73), onset=4)
    assert reasons.why("compensated_rate", results("laptop")) == "", "one of them learns worse"
    add("lr_quarter_steps_x4", 0.6, 0.6, losses=(2.599, 2.611), onset=4)
    said = reasons.why("compensated_rate", results("laptop"))
    assert "learn better, by 0.050 (0.050 to 0.050 by seed) and 0.100 (0.099 to 0.101 by seed) nats" in said
    assert "(3.68 and 3.67 against 3.73)" in said


def test_a_window_is_called_too_narrow_only_where_twice_the_width_has_the_sink(add, runs):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("window_1_4", 0.05, 0.051, 0.052)
    assert reasons.why("window_absolute", results("laptop")) == "", "no other width"
    add("window_1_2", 0.30, 0.31, 0.32)
    assert reasons.why("window_absolute", results("laptop")).startswith("A window of C / 4 is 16 tokens here, 512 in")
    for seed in (0, 1, 2):
        report = {"T": 64, "layers": [0, 1, 2, 3], "alpha": [[[0.05] * 4] * 4]}
        made_up(runs, "window_1_4", seed, "laptop", final={"step": 9, "sink_1": 25.0, "report": report})
    assert "the paper. 25 % of its heads are above 0.3, but" in reasons.why("window_absolute", results("laptop"))
    add("window_1_4", 0.20, 0.21, 0.22)
    assert reasons.why("window_absolute", results("laptop")) == "", "nothing to explain"


def test_where_block_1_gives_the_token_before_what_the_base_gives_the_first_is_said_of_all_runs_or_none(runs):
    def record(name, first, last, before):
        for seed in (0, 1):
            report = {"T": 64, "layers": [0, 1], "alpha": [[[first + seed / 100] * 2, [last] * 2]]}
            final = {"step": 9, "report": report, "destinations": {"previous": [[before] * 2, [0.9] * 2]}}
            made_up(runs, name, seed, "laptop", final=final)

    def said():
        return reasons.why("positions", results("laptop"))

    record("fixed_1", 0.5, 0.3, 0.1), record("learnable", 0.05, 0.25, 0.3)
    assert said() == "", "not without the other"
    record("absolute", 0.07, 0.35, 0.2)
    assert (
        "x₁ is 0.05 to 0.06 with learnable positions, 0.07 to 0.08 with sinusoidal positions and 0.50 to 0.51" in said()
    )
    assert "the token before 0.30 with learnable positions, 0.20 with" in said()
    assert said().endswith("0.25 with learnable positions, 0.35 with sinusoidal positions and 0.30 in the base.")
    record("absolute", 0.07, 0.35, 0.05)
    assert said() == "", "it looks at the token before no more than the base does"
    record("absolute", 0.55, 0.35, 0.2)
    assert said() == "", "it has the base's sink"


def test_a_sink_that_is_there_before_training_is_called_one_of_the_formula(add, runs):
    add("fixed_1", 0.50, 0.54, 0.52)

    def said(before, end):
        for seed in (0, 1, 2):
            curve = [
                {"step": step, "valid_loss": 3.0, "sink_1": 50.0, "excess_1": e} for step, e in ((0, before), (9, end))
            ]
            report = {"T": 64, "layers": [0], "alpha": [[[0.1] * 4]], "excess": {"1": end}}
            made_up(runs, "relative", seed, "laptop", curve=curve, final={"step": 9, "report": report})
        return reasons.why("positions", results("laptop"))

    assert said(0.0, 0.12) == "", "learned"
    assert said(0.28, 0.35) == "", "training adds to it"
    assert said(0.28, 0.12).endswith(
        "by formula: the excess is 0.280 before the first step, and training takes it down to 0.120."
    )


def test_how_far_a_run_is_behind_the_base_is_said_early_and_late(runs):
    def fall(name, *losses):
        for seed in (0, 1, 2):
            curve = [{"step": step, "sink_1": 0.0, "valid_loss": loss} for step, loss in enumerate(losses)]
            made_up(runs, name, seed, "laptop", curve=curve, final=curve[-1])

    fall("fixed_1", 6.0, 3.0, 2.9, 2.8, 2.7)
    assert reasons.why("relative_loss", results("laptop")) == "", "not recorded"
    fall("nope", 6.0, 3.2, 3.1, 2.9, 2.8)
    said = reasons.why("relative_loss", results("laptop"))
    assert "by 0.200 to 0.200 nats at a quarter of the steps and by 0.100 to 0.100 at the end: the gap narrows" in said
    fall("nope", 6.0, 3.2, 3.1, 2.9, 2.95)
    assert "the gap does not close with time." in reasons.why("relative_loss", results("laptop"))
    fall("nope", 6.0, 2.9, 2.9, 2.8, 2.7)
    assert reasons.why("relative_loss", results("laptop")) == "", "not behind"


def test_in_a_window_of_two_tokens_the_first_is_the_token_before_only_while_it_gets_no_more_than_that(add):
    second = [(1 + share) / 2 * 2 / 64 for share in (0.53, 0.55, 0.54)]  # alpha_1 of two queries, over all 64
    add("window_1_32", *second, previous=0.52)
    said = reasons.why("window_small", results("laptop"))
    assert said.startswith("A window of C / 32 is 2 tokens here, 64 in the paper.")
    assert "gives it 54 %, and later queries give the token before them 52 %" in said
    add("window_1_32", *second, previous=0.45)
    assert reasons.why("window_small", results("laptop")) == ""


def test_shared_biases_are_called_as_good_only_while_they_take_as_much_at_the_same_loss(add):
    add("fixed_1", 0.50, 0.54, 0.52)
    add("kv_bias", 0.01, 0.01, 0.01, star=0.5, losses=(2.70, 2.71, 2.72))
    assert reasons.why("shared_biases", results("laptop")) == "", "none of both"
    add("kv_bias_shared", 0.01, 0.01, 0.01, star=0.55, losses=(2.71, 2.70, 2.72))
    said = reasons.why("shared_biases", results("laptop"))
    assert said.startswith(
        "Sharing KV biases costs little here: within the ledger's margin k* takes as much (Sink* 100 %"
    )
    assert "moves by +0.000 nats (" in said and "4 heads share a bias here, 8 in the paper" in said
    add("kv_bias_shared", 0.01, 0.01, 0.01, star=0.55, losses=(2.91, 2.90, 2.92))
    assert reasons.why("shared_biases", results("laptop")) == "", "worse trained"
    add("kv_bias_shared", 0.01, 0.01, 0.01, star=0.2, losses=(2.71, 2.70, 2.72))
    assert reasons.why("shared_biases", results("laptop")) == "", "less on k*"


def test_runs_are_called_further_from_their_end_only_beside_a_base_that_is_nearer(runs):
    def growing(name, position, slope):
        last = {"step": 9, "sink_1": 0.0, "valid_loss": 2.7}
        alpha = torch.zeros(12, 3, 4, 4)
        alpha[:, position] = torch.linspace(1 - slope, 1, 12)[:, None, None]
        report = {"T": 64, "excess": {f"{k + 1}": float(k == position) for k in range(3)}}
        points = [last | {"step": step} for step in range(12)]
        made_up(
            runs, name, 0, "laptop", curve=points, final=last | {"report": report}, kept={"arrays": {"curve": alpha}}
        )

    growing("fixed_1", 0, 0.1), growing("fixed_2", 1, 0.4)
    assert reasons.why("fixed_token", results("laptop")) == "", "one of two positions"
    growing("fixed_3", 2, 0.5)
    assert "gained 11 to 14 % of what it ends with, the base's 3 to 3 %" in reasons.why(
        "fixed_token", results("laptop")
    )


def test_a_sink_is_said_to_grow_still_only_where_each_seed_is_further_from_its_end_than_every_base(runs):
    def growing(name, seed, slope):
        last = {"step": 9, "sink_1": 7.0, "valid_loss": 2.7}
        points = [last | {"step": step, "excess_1": 1 - slope * (11 - step) / 11} for step in range(12)]
        made_up(runs, name, seed, "laptop", curve=points, final=last)

    growing("fixed_1", 0, 0.1)
    assert reasons.why("norms_keep_sinks", results("laptop")) == "", "no run of it"
    growing("sandwich_norm", 0, 0.4), growing("sandwich_norm", 1, 0.5)
    said = reasons.why("norms_keep_sinks", results("laptop"))
    assert "(Sink₁ 7, 7 %)" in said and "gained 11 to 14 % of what it ends with, the base's 3 to 3 %" in said
    growing("fixed_1", 1, 0.45)
    assert reasons.why("norms_keep_sinks", results("laptop")) == "", "a seed of the base grows more"


def test_a_loss_is_said_to_stay_behind_or_to_catch_up_by_its_gap(runs):
    def learning(name, early, late):
        last = {"step": 12, "sink_1": 7.0, "valid_loss": late}
        points = [last | {"step": step, "valid_loss": early} for step in range(12)]
        made_up(runs, name, 0, "laptop", curve=[*points, last], final=last)

    learning("fixed_1", 3.0, 2.7), learning("dyt", 3.02, 2.75)
    assert "by 0.020 to 0.020 nats at a quarter of the steps and by 0.050 to 0.050" in reasons.why(
        "dyt", results("laptop")
    )
    learning("dyt", 3.08, 2.75)
    assert "the gap narrows" in reasons.why("dyt", results("laptop"))
    learning("dyt", 2.98, 2.75)
    assert reasons.why("dyt", results("laptop")) == "", "better a quarter in"


@pytest.mark.slow
def test_every_card_is_short_lines_without_identifiers(some):
    table = cards.judged((), "laptop")
    for id in table.index:
        text, page = cards.card(table.loc[id].to_dict(), ledger.checks(id, "laptop"), "laptop")
        assert max(map(len, text.split("\n"))) <= 100, id
        words = re.sub(r"`.*?`", "", text, flags=re.DOTALL) + re.sub(r"<code>.*?</code>", "", page)
        assert not IDENTIFIER.search(words), id
    with pytest.raises(ValueError, match="claims are universal"):
        cards.show_verdicts("weight_decays", preset="laptop")


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_comparison_draws_each_head_and_the_papers_value(some):
    rows = names.rows("Table 2")
    heads, shares = comparisons.comparison(rows).axes
    at = [row.label for row in rows].index("decay 0.5")
    drawn = [line for line in heads.lines if round(np.mean(line.get_ydata())) == at and len(line.get_xdata()) == 16]
    assert sorted(float(line.get_xdata()[0]) for line in drawn) == [0.70, 0.72, 0.75]
    diamonds = [line for line in shares.lines if line.get_marker() == "D"]
    assert [float(line.get_xdata()[0]) for line in diamonds] == [row.paper.values["sink_1"] for row in rows]
    assert [text.get_text() for text in heads.texts].count("not run yet") == 2
    assert "training failed" in [text.get_text() for text in heads.texts]
    assert comparisons.comparison(names.rows("Section 7.3")) is None


def test_a_figure_brings_its_caption_and_its_alt_text(some, shown, capsys):
    figures.show(comparisons.comparison(names.rows("Table 2")), "**Bold.** a < b", 'say "what"')
    assert '<img alt="say &quot;what&quot;"' in shown[0]["text/html"]
    assert "<figcaption" in shown[0]["text/html"] and "<b>Bold.</b> a &lt; b" in shown[0]["text/html"]
    assert shown[0]["text/plain"] == '[figure: say "what"]\nBold. a < b'
    figures.show(None, "caption", "alt")
    assert len(shown) == 1 and "Nothing to draw" in capsys.readouterr().out
    assert figures.save(None, "nothing") is None


def test_curves_show_each_seed_and_their_mean_and_no_line_of_what_a_run_has_not():
    curve = [{"step": step, "sink_1": float(step)} for step in range(3)]
    higher = [{**point, "sink_1": point["sink_1"] + 2} for point in curve]
    runs = {"base": [curve, higher], "one": [[{**point, "sink_star": 5.0} for point in curve]], "none": []}
    figure = figures.along_training(runs, {"sink_1": "y", "sink_star": "y"}, "base")
    lines = figure.axes[0].lines
    assert [line.get_ydata().tolist() for line in figure.axes[1].lines] == [[5.0] * 3]
    assert [line.get_ydata().tolist() for line in lines] == [[0, 1, 2], [2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert lines[2].get_color() == figures.BASE_COLOR
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base, 2 seeds", "one, 1 seed"]
    assert math.isclose(figure.axes[0].get_ylim()[0], -0.1, abs_tol=0.01)


def test_an_item_is_a_picture_a_table_and_sentences(some, shown, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RENDERED", tmp_path)
    items.compare("Table 2", "laptop")
    picture, table, sentences = shown
    assert (tmp_path / "figures" / "table_2_laptop.png").exists()
    assert "decay 0.5 100.0 (41.08)" in picture["text/html"]
    assert "<details><summary>The numbers: Table 2" in table["text/html"] and "decay 0.5" in table["text/plain"]
    assert sentences["text/plain"].startswith("What you see\n- The base has Sink₁ = 100.0 %")
    assert all(len(line) <= 100 for data in shown for line in data["text/plain"].split("\n"))
    assert results("laptop").values("fixed_1", "excess_1").size == 3
