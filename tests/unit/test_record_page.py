"""docs/records.md: its tables and sentences, held against made-up records whose numbers are known."""

import ast

import nbformat
import pytest
from helpers import made_up

from sinkutils.ledger.results import results
from sinkutils.ledger.rules import SINK
from sinkutils.measuring.report import uniform_alpha
from sinkutils.paths import NOTEBOOKS
from sinkutils.showing import record_page
from sinkutils.showing.tables import without_sink
from sinkutils.study.grid import config
from sinkutils.study.store import Runs

KINDS = ("star", "first", "self", "previous", "line_break", "rest")


@pytest.fixture
def add(runs):
    """Add records of an experiment: mean excess of alpha_1 by seed, shares by kind of key, alpha_2."""

    def record(name, *values, shares=(0.0, 0.4, 0.1, 0.2, 0.05, 0.25), star=False, second=0.1, preset="laptop"):
        for seed, value in enumerate(values):
            sink = {"1": {"0.2": 80.0 + seed, "0.3": 70.0 + seed, "0.4": 60.0 + seed}}
            alpha = [[[0.1, 0.3]], [[second + seed / 100, second]]]
            report = {"T": 64, "targets": [1, 2], "epsilons": [0.3], "layers": [0], "floor": 0.07}
            report |= {"excess": {"1": value}, "sink": sink, "alpha": alpha}
            kinds = {kind: [[share + 0.02, share - 0.02]] for kind, share in zip(KINDS, shares, strict=True)}
            final = {"step": 9, "sink_1": 70.0 + seed, "valid_loss": 2.7 + seed, "report": report}
            final |= {"destinations": kinds} | ({"sink_star": 90.0} if star else {})
            made_up(runs, name, seed, preset, final=final)

    return record


def cells(text, title):
    """The cells of the row of that title in a table."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {title} | ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_has_the_excess_and_sink_at_three_epsilons(add, runs):
    add("fixed_1", 0.30, 0.35, 0.37)
    add("k_bias", -0.0001, -0.051, star=True)
    made_up(runs, "sigmoid", 0, "laptop", final={"sink_1": 30.0})
    table = record_page.table("laptop")
    excess, sink, others, star, loss = cells(table, "a fixed token at position 1 (the base)")[4:]
    assert (excess, sink, others) == ("0.340 (0.300 to 0.370)", "71.00 (70.00 to 72.00)", "81.00 / 61.00")
    assert (star, loss) == ("", "3.70 (2.70 to 4.70)")
    bias = cells(table, "K biases")
    assert bias[1:5] == ["Table 4", "2", "64", "−0.026 (−0.051 to 0.000)"] and bias[7] == "90.00 (90.00 to 90.00)"
    assert cells(table, "sigmoid, no normalisation")[2:] == ["1", "64", "", "30.00", "", "", "3.00"], (
        "no report, one seed"
    )
    assert "\n\nMade: 6 on machines with neither AVX-512 nor AMX; [" in record_page.page()


def test_what_has_no_sink_is_told_by_the_ledgers_share_of_the_bases_mean(add):
    add("weight_decay_1", 0.01)
    assert without_sink(results("laptop")) == [], "no base"
    add("fixed_1", 0.5, 0.6, 0.4)
    add("kv_bias", *[0.5 * SINK + 1e-4] * 3), add("k_bias", *[0.5 * SINK - 1e-4] * 3), add("fixed_2", 0.2, -0.1, 0.0)
    assert without_sink(results("laptop")) == ["fixed_2", "weight_decay_1", "k_bias"], "in the study's order"
    add("fixed_1", 0.04, 0.03, 0.04)
    assert without_sink(results("laptop")) == [], "a base that has none"


def test_where_attention_goes_is_shown_of_all_without_a_sink(add):
    assert record_page.instead() == ["No base is recorded that has a sink to go elsewhere."]
    add("fixed_1", 0.5, 0.6, 0.4)
    add("default", 0.2, 0.2, 0.2, shares=(0.0, 0.02, 0.2, 0.3, 0.08, 0.4))
    add("fixed_2", -0.04, -0.05, -0.03, shares=(0.0, 0.01, 0.2, 0.3, 0.09, 0.4), second=0.19)
    add("k_bias", -0.06, -0.06, 0.1, shares=(0.5, 0.02, 0.1, 0.1, 0.08, 0.2), star=True)
    add("softpick", -0.04, -0.04, -0.04, shares=(0.7, 0.03, 0.02, 0.08, 0.02, 0.15))
    add("window_1_4", -0.01, 0.0, 0.01)
    add("sigmoid_normalised", 0.3, 0.3, 0.3)
    about, unsure, fixed, windows, table = record_page.instead()
    assert f"below {SINK * 0.5:.3f}, the share of the base's that the ledger asks of a sink (16 %)" in about
    assert unsure == "Too few or too different seeds to tell whether it is gone: K biases."
    assert fixed.endswith("It gets α₂ = 19.5 % with a fixed token at position 2."), "19, 19.5, 20"
    even = uniform_alpha(16)  # alpha_1 of 0.2 over 64 queries is 0.8 over the 16 that see x_1
    assert "on texts of 16 tokens" in windows
    assert windows.endswith(f": window of C / 4 {(0.8 - even) / (1 - even):.3f}.")
    words = "k*, x*, sink logit; x₁; the query itself; the token before; line breaks; the rest; no key"
    assert cells(table, "experiment")[2:] == words.split("; ")
    assert [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]] == [
        "the base", "any first token (the paper's default)", "a fixed token at position 2", "window of C / 4",
        "K biases", "softpick"]  # fmt: skip
    assert cells(table, "the base")[1:] == [
        "0.500 (0.400 to 0.600)", "", "40.0", "10.0", "20.0", "5.0", "25.0", ""]  # fmt: skip
    assert cells(table, "K biases")[2:] == ["50.0", "2.0", "10.0", "10.0", "8.0", "20.0", ""]
    assert cells(table, "softpick")[2:] == ["", "3.0", "2.0", "8.0", "2.0", "15.0", "70.0"], "no learned key"


def test_the_runs_of_notebook_06s_picture_have_no_sink():
    (path,) = NOTEBOOKS.glob("06_*.ipynb")
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if cell.id == "story-destinations"]
    lists = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.List)]
    shown = [name for node in lists for name in ast.literal_eval(node)]
    assert shown[0] == "base" and len(shown) <= 16
    kept = set(shown[1:]) - set(without_sink(results("laptop")))
    assert not kept, f"{', '.join(kept)}: a sink by the mean of its seeds, so it leaves the list of that cell"


def test_a_run_takes_the_median_of_its_kind_of_machine(runs, monkeypatch):
    assert record_page.minutes() == "No run is recorded whose time could be told."
    kinds = {"fixed_1": ["avx2", "avx512_f", "amx_bf16"], "k_bias": ["avx2"]}
    for name, minutes in (("fixed_1", (6, 7, 20)), ("k_bias", (24, 26)), ("lr_x2_steps_half", (1, 1, 1))):
        for seed, wall in enumerate(minutes):
            made = {"wall_seconds": 60.0 * wall, "instruction_set": kinds.get(name, [])}
            made_up(runs, name, seed, "laptop", made=made)
    train, model = config("base").train, config("base").model
    tokens = train.steps * train.batch_size * model.context_length
    monkeypatch.setattr(record_page, "base_rate", lambda: tokens / 300)
    said = record_page.minutes()
    assert ": 7.0 on machines with AMX (3 runs); 25.0 on machines with neither AVX-512 nor AMX (2 runs)." in said
    assert "take 5.0 (" in said


def test_the_hours_of_the_study_are_those_recorded_and_an_estimate_for_the_rest(runs, monkeypatch):
    missing = [config("fixed_1", "laptop", 5), config("lr_quarter_steps_x4"), config("sigmoid", "laptop", 1)]
    monkeypatch.setattr(Runs, "missing", lambda store, preset: missing)
    assert record_page.hours().endswith("how long the 3 that are missing take no record says.")
    for name, hours, kind in (("fixed_1", (1, 2, 9), "amx_bf16"), ("sigmoid", (20,), "avx2")):
        for seed, wall in enumerate(hours):
            made_up(runs, name, seed, "laptop", made={"wall_seconds": 3600.0 * wall, "instruction_set": [kind]})
    said = record_page.hours()  # 12 + 20; the median 2, four times the steps at the median pace of AMX, the one seed 20
    assert said.startswith("The 4 recorded runs of the study took 32 core-hours. The 3 that are missing take 30 more")
    assert "the whole study some 62." in said and "on machines with AMX" in said
    missing.clear()
    assert record_page.hours() == "All of the study took 32 core-hours, by the records of its 4 runs."


def test_another_scale_has_its_own_table_and_says_what_its_runs_took(add, runs):
    assert "## At `desk`" not in record_page.page()
    add("fixed_1", 0.3, preset="laptop")
    for seed, hours in enumerate((3.1, 4)):
        final = {"sink_1": 3.0 + seed, "report": {"excess": {"1": 0.02 + seed / 100}}}
        made_up(runs, "default", seed, "desk", final=final, made={"wall_seconds": 3600.0 * hours})
    study, _, desk = record_page.page().partition("## At `desk`")
    assert "models of 4.5M parameters. A run took 3.1 to 4.0 hours." in desk
    row = cells(desk, "any first token (the paper's default) (the base)")
    assert row[2:6] == ["2", "64", "0.025 (0.020 to 0.030)", "3.50 (3.00 to 4.00)"]
    assert "any first token" not in study.partition("## What")[0].partition("| experiment |")[2]
