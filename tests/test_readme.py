"""README's numbers, and those of the generated pages, are those of the records."""

import subprocess
from pathlib import Path

import pytest

from sinkutils.showing import readme
from sinkutils.showing.readme import PAGES, PARTS, render
from sinkutils.study.grid import config, missing
from sinkutils.study.record import record_folder, write_record

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_generated_is_up_to_date():
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--", "data/runs/laptop"]
    if subprocess.run(status, cwd=ROOT, capture_output=True).stdout:
        pytest.skip("there are records here that are not committed")
    text = (ROOT / "README.md").read_text()
    assert all(f"<!-- begin {name} -->" in text for name in PARTS)
    assert render(text) == text, "run: python -m sinkutils readme"
    for name, make in PAGES.items():
        assert make() == (ROOT / "docs" / f"{name}.md").read_text(), "run: python -m sinkutils readme"


def test_the_state_says_what_is_recorded_and_what_is_missing(runs, monkeypatch):
    every = len(missing("laptop"))
    assert f"the number of seeds: none. The sweep is under way, {every} runs are missing" in readme.state_part()
    metrics = {"status": "done", "reason": None, "curve": [], "final": {"step": 1, "sink_1": 30.0, "valid_loss": 3.0}}
    for seed in (0, 1):
        write_record(record_folder("laptop", "fixed_1", seed), config("fixed_1", "laptop", seed), metrics, {})
    assert f"seeds: fixed_1 (2). The sweep is under way, {every - 2} runs are missing" in readme.state_part()
    assert "| fixed_1 | Table 10 right | 2 | 30.00 (30.00 to 30.00) |  | 3.00 (3.00 to 3.00) |" in readme.records_page()
    monkeypatch.setattr(readme, "missing", lambda preset: [])
    assert "All 1 experiments of `laptop` are recorded" in readme.state_part()
