"""Records as tables, and the paper's numbers beside ours."""

import pytest
from helpers import DONE, made_up

from sinkutils.showing.tables import COLUMNS, paper_beside_ours, plain, records
from sinkutils.study.grid import config
from sinkutils.study.paper import paper_rows
from sinkutils.study.record import RECIPE, write_record
from sinkutils.study.store import Runs


@pytest.fixture
def runs(tmp_path):
    """Four good runs, a failed one, a stale one and a corrupt one at the smoke preset."""
    made_up(tmp_path, "fixed_1", 0, final={"sink_1": 20.0, "valid_loss": 3.0, "train_loss": 2.9})
    made_up(tmp_path, "fixed_1", 1, final={"sink_1": 30.0, "valid_loss": 3.2, "train_loss": 3.1})
    made_up(tmp_path, "k_bias", final={"sink_star": 50.0, "excess_1": -0.01, "valid_loss": 3.1, "train_loss": 3.0})
    made_up(tmp_path, "sigmoid", final={"sink_1": 0.125, "valid_loss": 3.1, "train_loss": 3.0})
    reason = "the loss was not finite by step 20"
    made_up(tmp_path, "elu_normalised", status="failed", reason=reason, final={"valid_loss": None})
    made_up(tmp_path, "kv_bias", preset="laptop", final={"sink_1": 99.0, "valid_loss": 9.0})
    (tmp_path / "laptop" / "kv_bias").rename(tmp_path / "smoke" / "kv_bias")
    corrupt = made_up(tmp_path, "v_bias", final={"sink_1": 99.0, "valid_loss": 9.0})
    (corrupt.folder / "metrics.json").write_text("{}")
    (tmp_path / "smoke" / "sigmoid" / "1.partial").mkdir()
    return tmp_path


def read(runs):
    with pytest.warns(UserWarning, match=r"v_bias/0: metrics\.json is truncated or changed"):
        return records("smoke", runs).set_index(["experiment", "seed"])


def test_every_record_is_a_row_and_says_whether_it_counts(runs):
    table = read(runs)
    others = {("elu_normalised", 0): "failed", ("kv_bias", 0): "stale", ("v_bias", 0): "corrupt"}
    done = [("fixed_1", 0), ("fixed_1", 1), ("k_bias", 0), ("sigmoid", 0)]
    assert table["status"].to_dict() == dict.fromkeys(done, "done") | others
    assert table.loc[("elu_normalised", 0), "reason"] == "the loss was not finite by step 20"
    row = table.loc[("k_bias", 0), ["sink_star", "excess_1", "steps", "item", "section"]]
    assert row.tolist() == [50.0, -0.01, 60, "Table 4", "7"]


def test_a_table_names_the_text_and_keeps_runs_on_other_texts_apart(tmp_path):
    run = config("k_bias", "smoke")
    for name, letter in (("docstrings", "a"), ("path:novels", "b")):
        corpus = {"name": name, "sha256": letter * 64}
        write_record(Runs(tmp_path).place(run, corpus), run, DONE, {"wall_seconds": 1.5}, corpus=corpus)
    for preset, text in (("smoke", "docstrings aaaaaaaa"), ("smoke@path-novels-bbbbbbbb", "path:novels bbbbbbbb")):
        (row,) = records(preset, tmp_path).to_dict("records")
        assert (row["status"], row["corpus"], row["recipe"]) == ("done", text, RECIPE)
    strange = {"name": "path:novels", "sha256": "c" * 64}
    made_up(tmp_path, "v_bias", kept={"corpus": strange})
    assert records("smoke", tmp_path)["status"].tolist() == ["done", "stale"]


def test_a_record_of_no_known_experiment_is_stale(runs):
    (runs / "smoke" / "k_bias").rename(runs / "smoke" / "old_name")
    table = read(runs)
    assert table.loc[("old_name", 0), "status"] == "stale"
    assert "unknown experiment" in table.loc[("old_name", 0), "reason"]


def test_no_records_give_an_empty_table_with_its_columns(tmp_path):
    table = records("laptop", tmp_path)
    assert (len(table), list(table)) == (0, list(COLUMNS))
    beside = paper_beside_ours("Table 4", "laptop", tmp_path)
    assert set(beside["ours"]) == {"not run"}
    assert beside["sink_star_paper"].tolist()[1:4] == [74.12, 72.76, 73.34]


@pytest.mark.filterwarnings("ignore:record smoke/v_bias")
def test_the_papers_rows_stand_in_its_order_with_the_mean_and_range_of_ours(runs):
    table = paper_beside_ours("Table 4", "smoke", runs)
    assert table["row"].tolist() == ["no bias", "sink token", "KV biases", "K biases", "V biases"]
    assert table["experiment"].tolist()[0] == "fixed_1"  # the base of this preset
    none, k_bias = table.iloc[0], table.iloc[3]
    assert (none["seeds"], none["sink_1"], none["sink_1_low"], none["sink_1_high"]) == (2, 25.0, 20.0, 30.0)
    assert (none["sink_1_paper"], none["valid_loss_paper"]) == (18.18, 3.73)
    assert (k_bias["sink_star"], k_bias["sink_star_paper"]) == (50.0, 73.34)
    # A stale or a corrupt record is no result.
    assert table["ours"].tolist() == ["done", "not run", "not run", "done", "not run"]
    assert table["sink_1"].isna().tolist() == [False, True, True, False, True]


@pytest.mark.filterwarnings("ignore:record smoke/v_bias")
def test_text_tells_failed_from_not_run_and_from_lost(runs):
    text = plain(paper_beside_ours("Table 15", "smoke", runs))
    assert text.loc["elu + 1, normalised"].tolist() == ["failed", "failed", "failed", "failed", ""]
    assert text.loc["sigmoid, not normalised"].tolist()[:4] == ["0.44", "0.12", "3.70", "3.10"]
    assert text.loc["softmax", "Sink₁ %, ours"] == "25.00 (20.00 to 30.00)"
    assert text.loc["MLP kernel, not normalised", "Sink₁ %, ours"] == "-"
    lost = plain(paper_beside_ours("Table 13", "smoke", runs))
    assert lost.iloc[3]["Sink* %, paper"] == ""
    assert "lost in the text" in lost.iloc[3]["note"]
    assert text.equals(plain(paper_beside_ours("Table 15", "smoke", runs)))


def test_windows_too_short_to_show_a_sink_and_rows_of_another_scale_are_marked(tmp_path):
    table = paper_beside_ours("Figure 6 right", "laptop", tmp_path).set_index("row")
    assert "no sink can be measured" in table.loc["w = 128", "note"]
    assert "no sink can be measured" not in table.loc["w = 256", "note"]
    assert paper_beside_ours("Figure 8 right", "laptop", tmp_path)["note"].str.contains("not of this preset").all()


@pytest.mark.parametrize("item", dict.fromkeys(row.item for row in paper_rows()))
def test_every_item_of_the_paper_has_its_table(item, tmp_path):
    table = paper_beside_ours(item, "paper-1b" if item == "Figure 8 right" else "laptop", tmp_path)
    assert len(table) == len(plain(table)) == len(paper_rows(item))
    assert {"sink_1", "sink_1_paper", "valid_loss", "valid_loss_paper"} <= set(table)


def test_unknown_items_and_presets_are_refused_with_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"item must be one of .*Table 4"):
        paper_beside_ours("Table 99", "laptop", tmp_path)
    with pytest.raises(ValueError, match="preset must be one of smoke"):
        records("lap", tmp_path)
