"""The records as tidy frames, held against the JSON of the records themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sinkutils as su
from sinkutils import paths

FEW = ("fixed_1", "k_bias", "window_1_64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A few of the study's records in a folder of their own."""
    root = tmp_path_factory.mktemp("runs")
    for name in FEW:
        (root / "laptop" / name).mkdir(parents=True)
        for seed in (0, 1):
            (root / "laptop" / name / str(seed)).symlink_to(paths.RUNS / "laptop" / name / str(seed))
    return root


def report_of(name: str, seed: int) -> dict:
    return json.loads((paths.RUNS / "laptop" / name / str(seed) / "metrics.json").read_text())["final"]


def test_a_row_per_run_says_what_its_record_says(folder):
    table = su.runs("laptop", folder).set_index(["experiment", "seed"])
    assert len(table) == 2 * len(FEW) and (table.status == "done").all()
    row, final = table.loc[("k_bias", 1)], report_of("k_bias", 1)
    assert (row.sink_1, row.sink_star, row.valid_loss) == (final["sink_1"], final["sink_star"], final["valid_loss"])
    uniform = sum(1 / i for i in range(1, 65)) / 64
    alpha = np.array(final["report"]["alpha"][0])
    assert row.block_1 == pytest.approx(((alpha[0] - uniform) / (1 - uniform)).mean())
    assert (row.block_1 + 3 * row.later_blocks) / 4 == pytest.approx(row.excess_1, abs=1e-4)
    assert row.element == max(block[0] for block in final["report"]["hidden_peaks"])


def test_blocks_heads_and_curves_are_the_reports_numbers_in_their_order(folder):
    final = report_of("k_bias", 0)
    heads = su.heads("laptop", folder).query("experiment == 'k_bias' and seed == 0")
    assert heads.alpha_1.tolist() == np.ravel(final["report"]["alpha"][0]).tolist()
    assert heads.alpha_star.tolist() == np.ravel(final["report"]["alpha_star"]).tolist()
    blocks = su.blocks("laptop", folder).query("experiment == 'k_bias' and seed == 0")
    norms = final["report"]["value_norms"][2]
    assert blocks.value_ratio.tolist()[2] == pytest.approx(norms[0] / np.mean(norms[1:]))
    curve = su.curves("laptop", folder).query("experiment == 'k_bias' and seed == 0")
    assert curve.step.tolist()[-1] == 12_000 and curve.tokens.tolist()[-1] == 12_000 * 32 * 64
    assert curve.valid_loss.tolist()[-1] == final["valid_loss"]
    seen_once = su.blocks("laptop", folder).query("experiment == 'window_1_64'")
    assert np.isfinite(seen_once.excess_1).all()


def test_the_excess_by_block_has_the_mean_that_measuring_gave(folder):
    """Also under a window, and where there is a key of its own."""
    by_block = su.blocks("laptop", folder).groupby(["experiment", "seed"])
    table = su.runs("laptop", folder).set_index(["experiment", "seed"])
    for name in ("excess_1", "excess_star"):
        assert by_block[name].mean().tolist() == pytest.approx(table[name].tolist(), abs=1e-5, nan_ok=True)


def test_a_preset_without_records_is_an_empty_frame_with_the_columns(tmp_path):
    assert su.runs("smoke", tmp_path).columns[:3].tolist() == ["preset", "experiment", "seed"]
    with pytest.raises(ValueError, match="preset must be one of"):
        su.runs("laptp")
