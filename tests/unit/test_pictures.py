"""What notebooks 03, 04 and 06 show: packing and masks as drawn, sinks by position and text, operations compared."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import made_up, own_model, tokens

from sinkutils.data.packing import DataConfig
from sinkutils.measuring.measure import measure
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.showing import comparisons, diagrams, figures, names, operations
from sinkutils.showing.tables import destinations, means_and_thresholds, norm_ratios, sinks_by_position, sinks_by_text

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture
def rows(runs):
    """Table 10 right at smoke, position 2 with a sink of 40 and 60 % on x_2 at two seeds, the others not run."""
    for seed, share in ((0, 40.0), (1, 60.0)):
        sink = {f"{k}": {"0.2": 90.0, "0.3": share if k == 2 else 0.0} for k in (1, 2, 10)}
        norms = [[2.0 + seed, 1.0, 1.0], [4.0, 1.0, 1.0]]
        report = {"T": 3, "floor": 0.09, "targets": [1], "epsilons": [0.3], "layers": [0, 1], "sink": sink}
        report |= {"alpha": [[[0.2, 0.2]] * 2], "hidden_norms": norms}
        kinds = {"star": [[0.2, 0.0]], "first": [[0.3, 0.7]], "self": [[0.5, 0.3]]}
        final = {"step": 1, "sink_1": 0.0, "train_loss": 2.0, "valid_loss": 3.0}
        made_up(runs, "fixed_2", seed, final=final | {"report": report, "destinations": kinds})
    return names.rows("Table 10 right", "smoke")


# --- 03 and 04 -------------------------------------------------------------------------------------------------------


def test_sinks_stand_by_position_and_what_is_not_run_is_empty(rows):
    table = sinks_by_position(rows)
    assert list(table.columns) == [1, 2, 10]
    assert table.loc["position 2"].tolist() == [0.0, 50.0, 0.0]
    assert table.loc["position 3"].isna().all()


def test_sinks_text_by_text_have_the_metric_as_their_mean():
    model, ids = own_model(4.0), tokens(7, 12)
    report = measure(model, ids, targets=(1, 3), epsilons=(0.2,))
    table = sinks_by_text(report, 0.2)
    assert table.shape == (7, 2) and table[1].nunique() > 1
    for k in (1, 3):
        assert table[k].mean() == pytest.approx(report.sink(k, 0.2))


def test_the_packing_that_is_drawn_is_that_of_the_training_text():
    corpus = diagrams.ToyCorpus((3, 6))  # A1 A2 A3 EOS B1 .. B6 EOS
    assert diagrams.packed(corpus, 5, DataConfig()) == [
        ["A1", "A2", "A3", "EOS", "B1", "B2"],
        ["B2", "B3", "B4", "B5", "B6", "EOS"],
    ]
    rows = diagrams.packed(corpus, 5, DataConfig(random_positions=(1, 2), fixed_position=3))
    assert [row[:4] for row in rows] == [["?", "?", "fix", "EOS"], ["?", "?", "fix", "B5"]]


def test_the_regions_of_a_mask_are_those_that_attention_sees():
    causal = diagrams.regions(4, AttentionSpec())
    assert causal.tolist() == [[2, 0, 0, 0], [2, 1, 0, 0], [2, 1, 1, 0], [2, 1, 1, 1]]
    assert diagrams.regions(4, AttentionSpec(window=2)).tolist() == [
        [2, 0, 0, 0],
        [2, 1, 0, 0],
        [0, 3, 1, 0],
        [0, 0, 3, 1],
    ]
    assert diagrams.regions(3, AttentionSpec(prefix=2)).tolist() == [[2, 2, 0], [2, 2, 0], [2, 2, 1]]


# --- 06 --------------------------------------------------------------------------------------------------------------


def test_the_table_of_operations_says_what_each_one_is():
    table = operations.operations()
    assert table.loc["softmax", ["row sums", "metric"]].tolist() == ["1.00 to 1.00", "weights"]
    assert table.loc["sigmoid, not normalised", "moved"] == "0.00"  # independent weights
    assert float(table.loc["sigmoid, normalised", "moved"]) > 0  # in its denominator they meet
    signed = table[table["least weight"].astype(float) < 0]
    assert set(signed["φ(x)"]) <= {"x", "mlp(x)"} and len(signed) >= 2
    assert set(signed["metric"]) == {"proxy scores"}


def test_the_weights_that_are_drawn_are_those_of_attend():
    spec = AttentionSpec(similarity="sigmoid", normalizer="none")
    q, k, _ = operations.inputs()
    logits = q @ k.T / q.shape[1] ** 0.5
    assert torch.allclose(operations.weights(spec), torch.sigmoid(logits).tril())
    assert torch.equal(operations.weights(spec), attend(*[x[None, None] for x in (q, k, k)], spec)[1][0, 0])


def test_norm_ratios_are_means_over_seeds_and_say_what_there_is_not(rows):
    ratios = norm_ratios(rows)
    assert ratios == {"position 1": "not run yet", "position 2": [2.5], "position 3": "not run yet"}
    figure = figures.by_block(ratios | {"two seeds": [[0.1, 0.2], [0.3, 0.2]]}, "ratio", "position 2")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["position 1: not run yet", "position 2", "position 3: not run yet", "two seeds"]
    drawn = {tuple(line.get_ydata().round(9)) for line in figure.axes[0].lines[2:]}
    assert {(2.5,), (0.1, 0.2), (0.3, 0.2), (0.2, 0.2)} - drawn <= {(2.5,)}  # each seed and their mean


def test_where_attention_goes_is_a_mean_over_seeds_and_heads(rows):
    shares = destinations({row.label: row.trained for row in rows})
    assert shares == {"position 2": {"first": pytest.approx(0.5), "self": pytest.approx(0.4)}}, "no k*: to no key"
    bars = comparisons.destinations(shares).axes[0].patches
    assert [bar.get_width() for bar in bars] == [pytest.approx(0.5), pytest.approx(0.4)]


def test_a_threshold_may_hide_a_mean(rows):
    table = means_and_thresholds(rows)
    assert table[["label", "alpha", "sink", "hidden"]].values.tolist() == [
        ["position 2", pytest.approx(0.2), 0.0, True]
    ]
    for run in rows[1].runs.values():
        run.report["floor"] = 0.11
    assert means_and_thresholds(rows)["hidden"].tolist() == [False], "not twice that of even attention"
    assert comparisons.means_and_thresholds(table[:0]) is None


def test_effects_are_filled_where_their_interval_leaves_out_zero():
    table = pd.DataFrame({"label": ["a", "b"], "mean": [0.2, 0.1], "low": [0.1, -0.1], "high": [0.3, 0.3]})
    table["seeds"] = [[0.1, 0.3], [0.0, 0.2]]
    points = [line for line in comparisons.effects(table, "x").axes[0].lines if line.get_marker() == "o"]
    assert [point.get_markerfacecolor() == "white" for point in points] == [False, True]


def test_keys_that_a_query_cannot_see_stay_white():
    image = figures.attention_map(np.full((4, 4), 0.25)).axes[0].images[0].get_array()
    assert np.isnan(np.ma.filled(image, np.nan)).tolist() == np.triu(np.ones((4, 4)), 1).astype(bool).tolist()
    image = figures.attention_map(np.full((4, 4), 0.25), 2).axes[0].images[0].get_array()
    seen = np.tril(np.ones((4, 4))) - np.tril(np.ones((4, 4)), -2)
    assert np.isnan(np.ma.filled(image, np.nan)).tolist() == (seen == 0).tolist(), "nor what lies before its window"


def test_steps_of_a_quantity_have_one_ramp_and_names_beside_them_their_own_colours():
    labels = ["softmax, p = 1", "softmax, p = 2", "v* = v'", "sigmoid, not normalised", "SmolLM2, first ten"]
    colors = figures.colors_of(labels, "softmax, p = 1", ordered=True)
    assert colors["softmax, p = 1"] == figures.BASE_COLOR
    assert [isinstance(colors[label], tuple) for label in labels[1:]] == [True, True, False, False], "RGB on the ramp"
    assert len(set(colors.values())) == len(labels)
