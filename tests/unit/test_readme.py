"""README and docs/: what is generated is that of the records, and no identifier of code stands outside code."""

import re
import subprocess

import nbformat
import numpy as np
import pytest
from helpers import made_up

from sinkutils.ledger import frozen, rules
from sinkutils.ledger.conclusions import CLAIMS
from sinkutils.ledger.later import LATER
from sinkutils.ledger.results import results
from sinkutils.paths import NOTEBOOKS, ROOT
from sinkutils.showing import readme
from sinkutils.study.grid import config
from sinkutils.study.store import Runs

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|<img [^>]*>|https?://\S+", re.MULTILINE | re.DOTALL)
SYMBOL = r"(?:Sink|alpha|\w)_"  # Sink_1, alpha_k, x_1
IDENTIFIER = re.compile(rf"(?<![\w/.])(?!{SYMBOL})[a-zA-Z]+(?:_[a-z0-9]+)+(?![\w/])")


@pytest.mark.slow
def test_what_is_generated_is_up_to_date():
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--", "data/runs/laptop"]
    if subprocess.run(status, cwd=ROOT, capture_output=True).stdout:
        pytest.skip("there are records here that are not committed")
    marked = "".join((ROOT / name).read_text(encoding="utf-8") for name in readme.WITH_PARTS)
    assert {f"<!-- begin {name} -->" for name in readme.PARTS} == set(re.findall("<!-- begin .* -->", marked))
    stale = [name for name, text in readme.generated().items() if (ROOT / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run: python -m sinkutils readme"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_identifier_stands_outside_code(path):
    text = CODE.sub(" ", path.read_text(encoding="utf-8"))
    assert set(IDENTIFIER.findall(text)) == set()


def test_readme_is_short_and_links_to_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    linked = set(re.findall(r"\]\((?:\.\./)?([\w./-]+)\)", text))
    assert {path.relative_to(ROOT).as_posix() for path in PAGES} - {"README.md"} <= linked
    assert all((ROOT / link).exists() for link in linked)


def test_the_state_says_what_is_recorded_and_what_is_missing(runs, monkeypatch):
    every = len(Runs().missing("laptop"))
    assert f"0 runs of 0 experiments, recipe 2. {every} runs are missing" in readme.state_part()
    for seed in (0, 1):
        made_up(runs, "fixed_1", seed, "laptop", final={"step": 1, "sink_1": 30.0, "valid_loss": 3.0})
    assert f"2 runs of 1 experiments, recipe 2. {every - 2} runs are missing" in readme.state_part()
    assert "ends at 30.0 % (2 seeds); one that meets any first token, at not recorded yet" in readme.notebooks_part()
    monkeypatch.setattr(Runs, "missing", lambda store, preset: [])
    assert readme.state_part() == "All of the study at `laptop` is recorded: 2 runs of 1 experiments, recipe 2."
    made_up(runs, "default", 0, "desk")
    assert readme.state_part().endswith(" At `desk`: 1 seed of any first token (the paper's default).")


def test_a_headline_has_the_excess_beside_the_share_of_heads_and_the_papers_number(runs, monkeypatch):
    for seed, excess in enumerate((0.31, 0.35, 0.36)):
        report = {"excess": {"1": excess, "2": -excess}, "sink": {k: {"0.3": 60.0} for k in ("1", "2")}}
        made_up(runs, "fixed_1", seed, "laptop", final={"sink_1": 60.0, "report": report})
    sinks = "; ".join(f"Sink_{k} % at eps 0.2/0.3/0.4: fixed_1 70.0/60.0/50.0" for k in (1, 2))
    row = {"verdict": rules.PARTLY, "source": "Table 10 right", "paper": "Sink_1 %: fixed_1 74.11", "interval": ""}
    assert readme._numbers(row | {"ours": sinks}) == [
        "Sink₁ % (excess of α₁): the base: 60.0 (0.340; the paper 74.11).",
        "Sink₂ % (excess of α₂): the base: 60.0 (−0.340).",
    ]


def test_differences_are_the_claims_that_do_not_hold_the_worst_first(runs, monkeypatch):
    table = readme.ledger.claims("laptop").iloc[:4].copy()
    table["verdict"] = [rules.PARTLY, rules.REPRODUCED, rules.NOT_REPRODUCED, rules.NOT_RUN]
    table["holds"] = ["2 of 3", "2 of 2", "0 of 3", "0 of 1"]
    monkeypatch.setattr(readme.ledger, "claims", lambda preset: table)
    monkeypatch.setattr(readme.cards, "reason", lambda row, checks, preset: f"2 of 3 checks hold. {row['id']}")
    lines = readme.differences_part().splitlines()
    folded = "<details><summary>2 of 3 checks hold: why</summary>{}</details>"
    assert [line.partition(") ")[2] for line in lines] == [folded.format(table["id"].iloc[i]) for i in (2, 0)]
    table["verdict"] = rules.REPRODUCED
    assert readme.differences_part() == "Of what is recorded so far, nowhere."


def test_the_ledgers_page_holds_the_rules_the_claims_and_since_when_they_stand():
    page = readme.ledger_page()
    assert page.count("\n| ") == len(CLAIMS) + len(LATER) + 4 and "18.18" in page
    assert frozen.ledgers()[0][:16] in page


@pytest.mark.parametrize("number", ["02", "03", "04", "05", "06"])
def test_what_a_page_says_of_the_base_is_what_its_configuration_says(number):
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    said = " ".join(nbformat.read(path, 4).cells[0].source.split())
    run = config("base", "laptop")
    shape, train = run.model, run.train
    assert f"{shape.num_layers} blocks of {shape.num_heads} heads, width {shape.hidden_size} and context" in said
    assert f"$C = {shape.context_length}$" in said and run.data.fixed_position == 1
    assert f"for {train.steps:,} steps at a learning rate of up to {train.learning_rate:g}" in said
    assert f"of the base itself {rules.BASE:.3f}" in said and round(1 / rules.SINK) == 6, "a sixth of the base's"


def test_what_notebook_01_says_of_the_bases_largest_element_is_what_its_records_say():
    said = " ".join(cell.source for cell in nbformat.read(NOTEBOOKS / "01_properties.ipynb", 4).cells)
    low, high = map(int, re.search(r"one with its largest at (\d+) to (\d+) times", said).groups())
    peaks = [np.max(run.report["hidden_peaks"][:-1]) for run in results("laptop").seeds("base").values()]
    assert (low, high) == (round(min(peaks)), round(max(peaks)))
