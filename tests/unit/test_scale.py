"""Which scale shows which sink: the picture by block, its sentences and the ladder, on made-up records."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import made_up

from sinkutils.ledger.results import ledgers
from sinkutils.showing import figures, scale
from sinkutils.study.grid import config

matplotlib.use("agg")

MODEL = config("default", "desk").model
LEVELS = (0.1, 0.2, 0.4)  # the largest head's alpha_1 at each point


@pytest.fixture
def desk(runs, monkeypatch):
    """Records of the default at two seeds; in the first the last head of block 3 gets a sink, in the other none."""
    monkeypatch.setattr("sinkutils.study.record.ledger_sha256", lambda: ledgers(False)[-1])
    for seed in (0, 1):
        alpha = torch.full((3, 1, MODEL.num_layers, MODEL.num_heads), 0.07)
        if seed == 0:
            alpha[:, 0, 2, -1] = torch.tensor(LEVELS)
        points = []
        for n, (step, share) in enumerate(((0, 0.0), (50_000, 1.0), (100_000, 2.0)), start=1):
            by_block = {"peak_1": [4.0, *[2.0 * n] * 5], "value_ratio_1": [1 / n] * 6}
            points.append({"step": step, "valid_loss": 3.0, "sink_1": share} | by_block)
        report = {"T": 64, "sink": {"1": {"0.3": 2.0 + seed}}}
        last, kept = points[-1] | {"report": report}, {"arrays": {"curve": alpha.half()}}
        made_up(runs, "default", seed, "desk", curve=points, final=last, kept=kept)


def test_the_picture_has_a_row_a_seed_and_a_line_a_head_and_a_block(desk):
    figure = scale.by_block("default")
    heads, peaks, values = figure.axes[:3]
    assert len(figure.axes) == 6
    assert len(heads.lines) == MODEL.num_layers * MODEL.num_heads + 2  # with eps and even attention
    assert len(peaks.lines) == len(values.lines) == MODEL.num_layers
    tokens = 100_000 * config("default", "desk").train.batch_size * MODEL.context_length / 1e6
    assert heads.lines[0].get_xdata()[-1] == pytest.approx(tokens)
    plt.close(figure)


def test_the_sentences_say_which_head_when_and_what_its_values_do(desk):
    first, second = scale.sentences("default")
    assert "head 8 in block 3" in first and "0.40" in first and "Sink₁ = 2.0 %" in first
    assert "head 8 in block 3, first above 0.3 after 102M tokens (even attention" in first
    assert first.endswith(
        "gone after 102M tokens by that head, after 51M by the element (on a log scale), after 51M by the value ratio."
    )
    assert "3.0 times the untrained model's in block 2" in first and "least value ratio 0.33 in block 1" in first
    assert "never above 0.3" in second and "Half of the way" not in second


def test_of_a_model_with_a_key_bias_the_heads_are_those_that_look_at_it(runs, desk, shown, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RENDERED", tmp_path)
    alpha = torch.full((2, 5, MODEL.num_layers, MODEL.num_heads), 0.07)
    alpha[-1, 0, 0, 0], alpha[-1, -1, 4, 2] = 0.2, 0.6  # the largest on x_1, and on k*
    points = [
        {"step": step, "valid_loss": 3.0, "sink_1": 1.0, "sink_star": 30.0}
        | {"peak_1": [4.0] * 6, "value_ratio_1": [0.9] * 6}
        for step in (0, 100_000)
    ]
    kept = {"arrays": {"curve": alpha.half()}}
    made_up(runs, "k_bias", 0, "desk", curve=points, final=points[-1] | {"report": {"T": 64}}, kept=kept)
    (line,) = scale.sentences("k_bias")
    assert "Sink∗ = 30.0 %, Sink₁ = 1.0 %. The largest mean α∗ is 0.60, of head 3 in block 5, first above 0.3" in line
    assert "(even attention: 0.059)" in line, "k* is one key more: the mean over i = 1..64 of 1 / (i + 1)"
    assert "Half of the way" not in line, "what x_1 does is not the doing of heads that look at k*"
    figure = scale.by_block("k_bias")
    assert figure.axes[0].get_ylabel() == r"$\alpha_{\ast}^{l,h}$, seed 0"
    assert max(line.get_ydata()[-1] for line in figure.axes[0].lines[:48]) == pytest.approx(0.6, abs=1e-3)
    plt.close(figure)
    scale.show_by_block(("k_bias",))
    assert "Left, attention to k∗, a line a head" in " ".join(shown[0]["text/plain"].split())


def test_half_the_way_is_where_a_course_first_has_gone_it_up_or_down():
    tokens = np.arange(5.0)
    assert scale.halfway(tokens, np.array([1.0, 1.9, 2.0, 1.4, 3.0])) == 2
    assert scale.halfway(tokens, np.array([1.0, 0.4, 0.9, 0.2, 0.0])) == 1


def test_the_ladder_has_each_model_by_size_with_what_stands_first(desk):
    table = scale.ladder()
    assert table["parameters"].is_monotonic_increasing
    ours = table[table["model"] == "ours"]
    assert ours["first"].tolist() == [scale.ANY] and ours["sink_1"].tolist() == [2.5]
    printed = table[table["of"] == "paper"].set_index("first")["sink_1"]
    assert printed.to_dict() == {scale.ANY: 18.18, scale.ONE: 74.11}
    assert {scale.ANY, scale.ONE} == set(table.loc[table["model"] == "Gemma 3 270M", "first"])
    figure = scale.draw_ladder(table)
    assert len(figure.axes[0].get_yticklabels()) == table["parameters"].nunique()
    plt.close(figure)


def test_the_scope_says_what_each_scale_shows_and_where_it_begins(desk):
    anything, fixed = scale.scope()
    assert "2.5 % in ours of 4.5M (2 seeds)" in anything and "18.2 % in the paper's 60M" in anything
    assert "the largest head is 0.40 and 0.07 in its 2 seeds (even attention: 0.074)" in anything
    assert "74.1 % in the paper's 60M" in fixed and "ours" not in fixed


def test_what_is_recorded_is_shown_with_its_sentences_and_the_rest_is_named(desk, shown, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RENDERED", tmp_path)
    scale.show_by_block(("default", "fixed_1"))
    picture, lines = (data["text/plain"] for data in shown)
    assert "any first token (the paper's default): Seed 0: after 102M tokens" in " ".join(picture.split())
    assert "Seed 1" in lines and "Seed 2" not in lines
    assert "Not recorded yet for this model: a fixed token at position 1." in capsys.readouterr().out
    assert scale.by_block("fixed_1") is None
    scale.show_ladder()
    picture, lines = (" ".join(data["text/plain"].split()) for data in shown[-2:])
    assert "ours (4.5M) 2.5 with any first token" in picture and "begins: α₁ of the largest head is 0.40" in lines
    assert {path.name for path in (tmp_path / "figures").glob("*.png")} == {"by_block_default_desk.png", "ladder.png"}
