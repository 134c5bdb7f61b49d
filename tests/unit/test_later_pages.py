"""Notebook 09's picture, sentences and sources, on made-up records."""

import csv
import json

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import made_up

from sinkutils.ledger import trials
from sinkutils.ledger.effects import Effect
from sinkutils.ledger.results import ledgers, results
from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.paths import PAPER
from sinkutils.showing import cards, figures, later, reasons, reasons_of_models, reasons_of_training
from sinkutils.study.experiments import experiments
from sinkutils.study.grid import config

matplotlib.use("agg")


@pytest.fixture
def add(runs, tmp_path, monkeypatch):
    """Add records of three seeds: excess of alpha_1, the largest element over the median, validation loss, gradient."""
    monkeypatch.setattr(trials, "untrained_peak", lambda *arguments: 1.0)
    monkeypatch.setattr(figures, "RENDERED", tmp_path / "rendered")
    monkeypatch.setattr("sinkutils.study.record.ledger_sha256", lambda: ledgers(True)[-1])

    def record(name, excess=0.3, peak=4.0, loss=2.7, gradient=None, sink=50.0):
        for seed in (0, 1, 2):
            alpha, layers = excess + 0.02 * seed, config(name, "laptop").model.num_layers
            report = {"T": 64, "targets": [1], "epsilons": [0.3], "layers": list(range(layers))}
            report |= {"excess": {"1": alpha}, "alpha": [[[alpha] * 4] * layers], "sink": {"1": {"0.3": 50.0}}}
            report["hidden_peaks"] = [[peak * (1 + 0.05 * seed), 1.0]] * layers
            last = {"step": 9, "valid_loss": loss, "sink_1": sink}
            final = last | {"report": report}
            if gradient is not None:
                final["gradients"] = {"input": [[gradient, *[1.0] * 40]] * 3}
            made_up(runs, name, seed, "laptop", curve=[last], final=final)

    return record


@pytest.fixture
def said(shown):
    """The text of what is displayed, as one line; and that no line of it is long."""
    yield lambda: " ".join(" ".join(data["text/plain"] for data in shown).split())
    assert max(len(line) for data in shown for line in data["text/plain"].splitlines()) <= 100


def test_the_picture_has_a_point_a_seed_and_a_number_a_variant(add):
    add("fixed_1")
    assert later.picture("laptop") is None  # the base alone
    add("softpick", 0.0, 1.2, 2.8), add("v_scale", 0.3, 1.1), add("sgd", 0.01, 1.0, 6.0)
    figure = later.picture("laptop")
    axis = figure.axes[0]
    points = np.concatenate([collection.get_offsets() for collection in axis.collections])
    assert len(points) == 12 and np.isclose(points, (0.0, 1.2)).all(axis=1).any()
    assert [text.get_text() for text in axis.texts] == ["1", "2", "3", "4"]
    assert axis.lines[0].get_xydata()[0] == pytest.approx((0.32, 4.0 * (1.05 * 1.1) ** (1 / 3)))  # peaks by their ratio
    labels = [line.get_label() for line in figure.legends[0].legend_handles]
    assert labels[0] == "1 the base" and "V-scale" in " ".join(labels)
    plt.close(figure)


def test_a_group_is_told_from_its_records_and_what_is_missing_is_named(add, said, capsys):
    add("fixed_1")
    later.compare("norms and values", "laptop")
    assert capsys.readouterr().out.startswith("Not recorded yet: post-norm blocks")
    add("v_scale", 0.3, 1.1), add("dyt", 0.0, 1.2, 2.9)
    later.compare("norms and values", "laptop")
    assert "Less of a sink on x₁ than the base" in said() and "dynamic tanh instead of RMSNorm −0.300" in said()
    assert "Not above 2: V-scale: small values made smaller 1.15" in said() and "Above 2: the base 4.2" in said()
    assert "Not run yet: post-norm blocks (Eq. 3); RMSNorm with a gate; sandwich norm." in said()
    cards.show_verdicts("v_scale")
    assert "V-scale: small values made smaller that keep the gradient at x₁" in said()
    with pytest.raises(ValueError, match="group must be one of a way to say nothing"):
        later.rows("norms", "laptop")


def test_a_large_element_without_a_sink_is_named_while_three_runs_have_it(add):
    add("fixed_1", 0.6), add("k_bias", 0.0, 5.0), add("sink_logit", 0.0, 4.0)
    assert reasons.why("softpick_activations", results("laptop")) == "", "not without softpick's own"
    add("softpick", 0.0, 6.0)
    said = reasons.why("softpick_activations", results("laptop"))
    assert said.endswith(
        "K biases 5.2, a learned sink logit per head 4.2, softpick 6.3; none of them with a sink on x₁."
    )
    add("k_bias", 0.0, 1.95)
    said = reasons.why("softpick_activations", results("laptop"))
    assert "gets one, in most seeds, whether" in said and "K biases 2.0 (2 or more in 2 of 3 seeds), a" in said
    add("k_bias", 0.0, 1.85)
    assert reasons.why("softpick_activations", results("laptop")) == "", "no more than one of three"
    add("k_bias", 0.3, 5.0)
    assert reasons.why("softpick_activations", results("laptop")) == "", "one of them has a sink"


def test_seeds_without_a_sink_that_scatter_too_widely_to_leave_one_out_are_named(add, runs):
    add("fixed_1", 0.6), add("mlp", 0.0)
    assert reasons.why("mlp_kernel", results("laptop")) == "", "they tell"
    alpha = {0: 0.0, 1: 0.07, 2: -0.07}
    for seed, excess in alpha.items():
        report = {"T": 64, "layers": [0], "excess": {"1": excess}, "alpha": [[[0.07]]]}
        made_up(runs, "mlp", seed, "laptop", final={"step": 9, "report": report})
    assert "(excess 0.000, 0.070, -0.070) has a sink, where 0.099 counts" in reasons.why(
        "mlp_kernel", results("laptop")
    )


def test_elements_are_told_where_norms_say_nothing_and_only_there(runs, monkeypatch):
    monkeypatch.setattr(trials, "untrained_peak", lambda *arguments: 1.0)
    monkeypatch.setattr(trials, "untrained_ratio", lambda *arguments: 3.0)

    def record(name, peak, norm=3.3, other=1.0):
        for seed in (0, 1, 2):
            report = {"T": 64, "excess": {"1": 0.5}, "hidden_norms": [[norm, 1.0], [norm - 1, 1.0], [99.0, 1.0]]}
            report["hidden_peaks"] = [[peak * (1 + 0.05 * seed), other if seed == 2 else 1.0]] * 3
            made_up(runs, name, seed, "laptop", final={"step": 9, "report": report})

    record("fixed_1", 4.0), record("kv_bias", 1.1)
    assert reasons.why("bias_activations", results("laptop")) == "", "one of two biases"
    record("k_bias", 5.0)
    said = reasons.why("bias_activations", results("laptop"))
    assert "is 3.0 times the others' before the first step already" in said
    assert ": the base 4.2 (" in said and "; KV biases 1.2 (" in said
    assert said.endswith("By that, x₁ stands out with K biases as well.")
    record("kv_bias", 1.1, other=1.5)
    assert reasons.why("bias_activations", results("laptop")) == "", "another token's element in one seed"
    record("kv_bias", 1.1), record("fixed_1", 4.0, norm=9.0)
    assert reasons.why("bias_activations", results("laptop")) == "", "the norm tells"


def test_that_long_states_were_long_before_training_is_said_where_a_large_value_made_them_so(runs, monkeypatch):
    def record(name, norm, before):
        for seed in (0, 1, 2):
            made_up(
                runs, name, seed, "laptop", final={"step": 9, "report": {"T": 64, "hidden_norms": [[norm, 1.0]] * 2}}
            )
        starts[config(name, "laptop").model.attention.fixed_value] = before

    def untrained(model, *arguments):
        return starts[json.loads(model)["attention"]["fixed_value"]]

    starts = {}
    monkeypatch.setattr(trials, "untrained_ratio", untrained)
    record("k_bias", 2.5, 2.0), record("k_bias_first_20", 8.0, 6.0)
    assert reasons.why("value_norm_activations", results("laptop")) == "", "one of two values"
    record("k_bias_uniform_20", 9.0, 6.0)
    said = reasons.why("value_norm_activations", results("laptop"))
    assert "At the end and before it: K biases 2.5 and 2.0; K biases with v* = 20 v' 8.0 and 6.0; K biases with" in said
    record("k_bias_uniform_20", 9.0, 2.0)
    assert reasons.why("value_norm_activations", results("laptop")) == "", "it came with training"


def test_what_comes_apart_is_listed_by_which_of_both_is_there(add, runs, monkeypatch):
    assert reasons.why("activations_make_sinks", results("laptop")) == ""
    add("fixed_1", 0.6), add("post_norm", 0.5, 1.1), add("softpick", 0.0, 6.0), add("gated_norm", 0.5, 6.0)
    said = reasons.why("activations_make_sinks", results("laptop"))
    assert said == (
        "A sink without massive activations: post-norm blocks (Eq. 3). Massive activations without a sink: softpick."
    )
    monkeypatch.setattr(trials, "untrained_ratio", lambda *arguments: 1.0)
    for seed in (0, 1, 2):
        report = {"T": 64, "excess": {"1": 0.5}, "hidden_peaks": [[1.1, 1.0]], "before_norm_norms": [[5.0, 1.0]]}
        made_up(runs, "post_norm", seed, "laptop", final={"report": report})
    said = reasons.why("activations_make_sinks", results("laptop"))
    assert said.endswith("before it the norm of h₁ is 5.0 times the untrained model's.")


def test_an_element_is_said_to_need_no_gradient_only_while_one_without_it_is_there(add):
    assert reasons.why("v_scale", results("laptop")) == "", "no record"
    add("fixed_1", 0.6, gradient=16.0), add("k_bias", 0.0, 5.0, gradient=2.0)
    said = reasons.why("v_scale", results("laptop"))
    assert "gets 2.0 times the other tokens' gradient (in the base 16.0), and its largest element, times" in said
    assert said.endswith("the untrained model's, is 5.2 all the same.")
    add("k_bias", 0.0, 5.0, gradient=9.0)
    assert reasons.why("v_scale", results("laptop")) == "", "more than half of the base's"
    add("k_bias", 0.0, 1.0, gradient=2.0)
    assert reasons.why("v_scale", results("laptop")) == "", "no such element"


def test_elements_are_told_as_they_are_only_where_untrained_ones_differ(add, monkeypatch):
    add("fixed_1", 0.6, 4.0)
    assert reasons.why("differential", results("laptop")) == "", "no run of it"
    add("differential", 0.05, 4.0)
    monkeypatch.setattr(reasons_of_models, "untrained_peak", lambda model, length: 10.0)
    assert reasons.why("differential", results("laptop")) == "", "the same start"
    monkeypatch.setattr(
        reasons_of_models, "untrained_peak", lambda model, length: 4.0 if '"differential": true' in model else 10
    )
    assert "As they are, runs end at: the base 40 to 44" in reasons.why("differential", results("laptop"))


def test_seeds_whose_first_token_stands_out_are_counted_where_not_all_are(add):
    add("relu_length", 0.0, 4.0)
    assert reasons.why("relu", results("laptop")) == "", "in all of them"
    add("relu_length", 0.0, 1.95)
    said = reasons.why("relu", results("laptop"))
    assert said.startswith("x₁ stands out by more than twice in 2 of 3 seeds") and "is 1.9, 2.0, 2.1, that of" in said


def test_every_variant_stands_in_a_group_with_its_source(said):
    with open(PAPER / "after_paper.csv", newline="", encoding="utf-8") as file:
        groups = {row["name"]: row["group"] for row in csv.DictReader(file)}
    assert list(groups) == [row.name for row in experiments("8")]
    assert set(later.GROUPS) == set(groups.values()) - {"depth", "context length"}
    for group in set(groups.values()):
        later.show_sources(group)
    assert "arXiv 2603.17771" in said() and "read: Section 2 of the card" in said()


def test_blocks_are_measured_one_by_one():
    model = TransformerLM(LMConfig(num_layers=3), 0)
    ids = torch.randint(1024, (4, 40), generator=torch.Generator().manual_seed(0))
    table = later.blocks(model, ids)
    assert table["sink"].mean() == pytest.approx(measure(model, ids).excess(1), abs=1e-6)
    assert list(table) == ["sink", "peak", "value", "gradient"] and list(table.index) == [1, 2, 3]
    assert (table["sink"].abs() < 0.05).all() and (table["peak"] > 3).all() and (table["gradient"] > 1).all()


def test_context_lengths_are_compared_with_the_bases_own_at_their_length_of_text(add, said, shown):
    add("fixed_1", 0.1), add("context_64", 0.3), add("context_32", 0.4)
    shown_rows = later.rows("context length", "laptop")
    assert [row.experiment for row in shown_rows[:2]] == ["context_32", "context_64"], "steps in their order"
    assert [row.base for row in shown_rows[:2]] == [False, True]
    later.compare("context length", "laptop", ("excess_1",))
    assert "than the base at this T (difference of the excess of α₁, 95 % interval): context 32, as many" in said()
    lengths = {config(f"context_{length}", "laptop").train.eval_length for length in (32, 64, 128, 256, 512)}
    assert len(lengths) == 1, "α₁ falls with T whatever was trained on"


def test_sgd_is_said_to_stand_beside_an_adam_that_has_lost_much_already(add):
    add("fixed_1", 0.4), add("weight_decay_0", 0.4), add("sgd", 0.05, 1.2)
    assert reasons.why("sgd", results("laptop")) == "", "nothing is lost"
    add("weight_decay_0", 0.1, 1.3)
    assert "its excess of α₁ is 0.120, SGD's 0.070, the base's 0.420" in reasons.why("sgd", results("laptop"))
    add("weight_decay_0", 0.1, 4.0)
    assert reasons.why("sgd", results("laptop")) == "", "its massive activations are there"


def test_deeper_models_are_called_further_from_their_end_only_while_they_are(add, runs):
    def growing(name, slope):
        last = {"sink_1": 50.0, "valid_loss": 2.7}
        points = [last | {"step": step, "excess_1": 1 - slope * (1 - step / 11)} for step in range(12)]
        for seed in (0, 1, 2):
            made_up(runs, name, seed, "laptop", curve=points, final=points[-1])

    for name in ("depth_1", "depth_2", "depth_3", "fixed_1", "depth_6"):
        assert reasons.why("depth", results("laptop")) == "", "one is missing"
        growing(name, 0.1)
    assert reasons.why("depth", results("laptop")) == "", "all alike"
    growing("depth_6", 0.5)
    assert "3 % with 1, 3 % with 2, 3 % with 3, 3 % with 4, 14 % with 6 blocks." in reasons.why(
        "depth", results("laptop")
    )


def test_the_bases_own_context_is_called_best_only_while_it_is(add, monkeypatch):
    add("context_64", 0.4), add("context_32", 0.2)
    assert reasons.why("context", results("laptop")) == "", "no longer one"
    add("context_512", 0.1)
    said = reasons.why("context", results("laptop"))
    assert "largest at 64 tokens" in said and "(0.220 at 32, 0.420 at 64, 0.120 at 512)" in said
    with monkeypatch.context() as unsure:
        unsure.setattr(reasons_of_training, "paired", lambda *arguments: Effect(0.2, -0.1, 0.5, 3, 0.1, 4.0))
        assert reasons.why("context", results("laptop")) == "", "by chance, perhaps"
    add("context_128", 0.5)
    assert reasons.why("context", results("laptop")) == "", "a longer one has more"


def test_the_page_ends_with_who_has_a_sink_and_who_a_massive_activation(add):
    assert later.summary() == ["No variant has enough seeds yet."]
    (
        add("fixed_1", 0.6),
        add("softpick", 0.0, 6.0, sink=2.0),
        add("v_scale", 0.3, 1.1),
        add("gate_head", 0.0, 1.0, sink=8.2),
    )
    assert later.summary() == [
        "No sink on x₁ is left in the mean over heads: 2 of 3 – an output gate per head (Sink₁ 8 %: single heads); "
        "softpick.",
        "There is one, weaker or not: 1 of 3 – V-scale: small values made smaller.",
        "The seeds do not tell: 0 of 3.",
        "Massive activations without a sink: 1 of 3 – softpick.",
        "A sink without massive activations: 1 of 3 – V-scale: small values made smaller.",
    ]


def test_what_fails_in_the_paper_is_said_to_train_smoothly_only_while_it_does(runs):
    broken = ("elu_normalised", "elu_kernel", "linear_normalised")

    def fall(name, *losses, **status):
        for seed in (0, 1, 2):
            curve = [{"step": step, "sink_1": 0.0, "valid_loss": loss} for step, loss in enumerate(losses)]
            made_up(runs, name, seed, "laptop", curve=curve, final=curve[-1], **status)

    fall("fixed_1", 6.0, 3.0, 3.05, 2.7)
    for name in broken:
        assert reasons.why("failures", results("laptop")) == "", "not while one is missing"
        fall(name, 6.0, 3.1, 3.18, 2.8)
    said = reasons.why("failures", results("laptop"))
    assert "rises by 0.08 nats at most (the base's by 0.05)" in said and "they end +0.100, +0.100, +0.100" in said
    fall("elu_kernel", 6.0, 3.0, 3.2, 2.8)
    assert reasons.why("failures", results("laptop")) == "", "not as smoothly"
    fall("elu_kernel", 6.0, 3.1, 3.18, 2.8, status="failed")
    assert reasons.why("failures", results("laptop")) == "", "one fails"
