"""What notebooks 03, 04 and 06 show: packing and masks as drawn, sinks by position and text, operations compared."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from sinkutils.data.packing import DataConfig
from sinkutils.measuring.measure import measure
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.showing import diagrams, figures, operations
from sinkutils.showing.tables import sinks_by_position, sinks_by_text
from sinkutils.study.grid import config
from sinkutils.study.record import record_folder, write_record

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture
def record(tmp_path):
    """A record whose sink is 40 % on x_2 and nothing elsewhere."""
    run = config("fixed_2", "smoke")
    sink = {f"{k}": {"0.2": 90.0, "0.3": 40.0 if k == 2 else 0.0} for k in (1, 2, 10)}
    final = {"step": 1, "sink_1": 0.0, "train_loss": 2.0, "valid_loss": 3.0, "report": {"sink": sink}}
    outcome = {"status": "done", "reason": None, "curve": [], "final": final}
    return write_record(record_folder("smoke", "fixed_2", 0, tmp_path), run, outcome, {"wall_seconds": 1.0})


# --- 03 and 04 -------------------------------------------------------------------------------------------------------


def test_sinks_stand_by_position_and_what_is_not_run_is_empty(record):
    table = sinks_by_position({"2": record, "3": None})
    assert list(table.columns) == [1, 2, 10]
    assert table.loc["2"].tolist() == [0.0, 40.0, 0.0]
    assert table.loc["3"].isna().all()


def test_sinks_text_by_text_have_the_metric_as_their_mean():
    shape = LMConfig(vocab_size=50, context_length=12, num_layers=2, num_heads=2, hidden_size=16, intermediate_size=24)
    model = TransformerLM(shape, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # attention that is far from uniform
    ids = torch.randint(0, 50, (7, 12), generator=torch.Generator().manual_seed(1))
    report = measure(model, ids, targets=(1, 3), epsilons=(0.2,))
    table = sinks_by_text(report, 0.2)
    assert table.shape == (7, 2) and table[1].nunique() > 1
    for k in (1, 3):
        assert table[k].mean() == pytest.approx(report.sink(k, 0.2))


def test_final_values_say_what_has_no_run(record):
    figure = figures.final_values({"there": record, "not there": None}, "x")
    losses, sinks = figure.axes
    assert [label.get_text() for label in losses.get_xticklabels()] == ["there", "not there\n(no run)"]
    train, valid = (line.get_ydata() for line in losses.lines)
    assert train[0] == 2.0 and valid[0] == 3.0 and np.isnan([train[1], valid[1], sinks.lines[0].get_ydata()[1]]).all()


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
        [2, 0, 0, 0], [2, 1, 0, 0], [0, 3, 1, 0], [0, 0, 3, 1]]  # fmt: skip
    assert diagrams.regions(3, AttentionSpec(prefix=2)).tolist() == [[2, 2, 0], [2, 2, 0], [2, 2, 1]]


# --- 06 --------------------------------------------------------------------------------------------------------------


def test_the_table_of_operations_says_what_each_one_is():
    table = operations.operations()
    assert table.loc["softmax", ["row sums", "metric"]].tolist() == ["1.00 to 1.00", "weights"]
    assert table.loc["sigmoid, not normalised", "moved"] == "0.00"  # independent weights
    assert float(table.loc["sigmoid, normalised", "moved"]) > 0  # in its denominator they meet
    signed = table[table["least A_ij"].astype(float) < 0]
    assert set(signed["phi(x)"]) <= {"x", "mlp(x)"} and len(signed) >= 2
    assert set(table.loc[table["least A_ij"].astype(float) < 0, "metric"]) == {"proxy scores"}


def test_the_weights_that_are_drawn_are_those_of_attend():
    spec = AttentionSpec(similarity="sigmoid", normalizer="none")
    q, k, _ = operations.inputs()
    logits = q @ k.T / q.shape[1] ** 0.5
    assert torch.allclose(operations.weights(spec), torch.sigmoid(logits).tril())
    assert torch.equal(operations.weights(spec), attend(*[x[None, None] for x in (q, k, k)], spec)[1][0, 0])


def test_a_run_without_norms_is_shown_by_how_it_ended(record):
    failed = record.__class__(**{**vars(record), "metrics": {**record.metrics, "status": "failed"}})
    assert operations.norm_ratios({"a": failed, "b": None}) == {"a": "failed", "b": "not run"}
    axis = figures.norm_ratios({"a": "failed", "b": "not run", "c": [1.0, 2.0]}).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a: failed", "b: not run", "c"]


def test_only_bars_of_several_seeds_have_an_error_bar_which_the_heading_explains():
    table = pd.DataFrame({"row": ["one seed", "three", "none"], "paper": "done", "ours": ["done", "done", "not run"],
                          "sink_1_paper": 18.0, "sink_1": [5.0, 10.0, np.nan], "sink_1_low": [5.0, 8.0, np.nan],
                          "sink_1_high": [5.0, 13.0, np.nan]})  # fmt: skip
    ours = figures.paper_and_ours(table).axes[1]
    (lines,) = ours.collections
    assert [segment[:, 1].tolist() for segment in lines.get_segments() if len(segment)] == [[8.0, 13.0]]
    assert "range over seeds" in ours.get_title()
    assert figures.paper_and_ours(table[:1]).axes[1].get_title() == "ours"
