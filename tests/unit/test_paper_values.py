"""The paper's numbers in data/paper: whole, consistent, and empty where its text lost them."""

import csv

import pytest

from sinkutils.paths import PAPER
from sinkutils.study.experiments import EXPERIMENTS, experiment
from sinkutils.study.paper import paper_rows


def table(name: str) -> list[dict[str, str]]:
    with open(PAPER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def values_of(item: str) -> list[dict[str, float]]:
    return [row.values for row in paper_rows() if row.item == item]


def test_every_item_is_covered_once_and_every_row_names_an_experiment():
    keys = [(row.item, row.row) for row in paper_rows()]
    assert {item for item, _ in keys} == {row["item"] for row in table("items.csv")} and len(set(keys)) == len(keys)
    named = {row.experiment for row in paper_rows()} - {"base"}
    assert named == {e.name for e in EXPERIMENTS if e.section != "8"}  # of later papers: after_paper.csv


def test_an_experiment_has_the_same_numbers_wherever_the_paper_repeats_it():
    """Those of the default run, 18.18 and 3.73, always both."""
    default = [row.values for row in paper_rows() if row.experiment in ("base", "default")]
    assert len(default) >= 18 and all(values == {"sink_1": 18.18, "valid_loss": 3.73} for values in default)
    for row in paper_rows():
        reported = experiment("default" if row.experiment == "base" else row.experiment).paper
        assert row.values.items() <= reported.items(), (row, reported)


def test_what_failed_and_curves_that_the_text_gives_no_numbers_for_are_empty():
    for item, known in (("Figure 5 middle", 0), ("Figure 6 right", 1), ("Figure 5 right", 1), ("Figure 28", 1)):
        assert sum(map(bool, values_of(item))) == known, item
    failed = [row for row in paper_rows() if row.note == "failed"]
    names = {"elu_normalised", "elu_kernel", "linear_normalised", "softmax_p2", "softmax_p3", "softmax_p4"}
    assert {row.experiment for row in failed} == names and not any(row.values for row in failed)


@pytest.mark.parametrize(
    ("item", "key", "expected"),
    [
        ("Table 2", "sink_1", [15.20, 15.39, 15.23, 18.18, 41.08, 37.71, 6.13, 0.01]),
        ("Table 4", "sink_star", [None, 74.12, 72.76, 73.34, None]),
        # Cells lost in the text are empty.
        ("Table 5", "sink_1", [0.0, 0.06, 3.71, 25.88, 2.15, None, 11.21]),
        ("Table 13", "valid_loss", [None, None, None, None, None, 3.73, 3.72]),
        ("Table 10 right", "sink_2", [0.00, 69.03, 0.00]),
        ("Figure 8 right", "valid_loss", [3.07, 3.10]),
    ],
)
def test_tables_read_as_printed(item, key, expected):
    assert [values.get(key) for values in values_of(item)] == expected


def test_open_models_have_the_numbers_of_table_1_and_the_32_ids_of_table_8():
    rows = table("open_lms.csv")
    by_item = {item: [r for r in rows if r["item"] == item] for item in {r["item"] for r in rows}}
    lengths = {item: len(found) for item, found in by_item.items()}
    assert lengths == {"Table 1 left": 12, "Table 1 right": 8, "Table 8": 32, "Appendix B.3": 2}
    assert len({r["hub_id"] for r in by_item["Table 8"]}) == 32
    # A number in Table 8's rows is the same model's number elsewhere in the paper, or absent.
    natural = {(r["model"], r["sink_1"]) for r in rows if r["item"] != "Table 8" and r["input"] == "natural"}
    assert {(r["model"], r["sink_1"]) for r in by_item["Table 8"] if r["sink_1"]} == natural
