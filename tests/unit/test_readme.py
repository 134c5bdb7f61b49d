"""README: its numbers are those of the records, its links lead somewhere, and its code runs."""

import json
import re
import statistics
from pathlib import Path

import pytest

import sinkutils as su
from sinkutils.paths import OPEN_LMS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_each_number_of_ours_is_what_the_records_say():
    mean = su.runs("laptop").groupby("experiment")[["sink_1", "sink_star", "block_1", "later_blocks"]].mean()
    real = {name: json.loads((OPEN_LMS / f"{name}.json").read_text()) for name in ("smollm2", "gemma-3-270m")}
    smol = real["smollm2"]["probes"]["natural"]["text"]["sink"]["1"]["0.3"]
    third = {name: kept["moved"]["alpha"]["3"] for name, kept in real.items()}  # the BOS at the third place
    said = {
        f"keeps {mean.sink_1.k_bias:.1f} % of the heads ({mean.sink_1.fixed_1:.1f} % before)",
        f"the new key takes {mean.sink_star.k_bias:.1f} %",
        f"With sigmoid attention {mean.sink_1.sigmoid:.1f} % of the heads",
        f"normalised, {mean.sink_1.sigmoid_normalised:.1f} %",
        f"an excess of {mean.later_blocks.weight_decay_0:.2f}",
        f"with the usual 0.1 it is {mean.later_blocks.fixed_1:.2f}",
        f"with 0.5 it is {mean.later_blocks['weight_decay_0.5']:.2f}. Block 1 has {mean.block_1.weight_decay_0:.2f}",
        f"which gets {statistics.mean(third['smollm2']['first']):.2f} of the attention",
        f"Gemma follows its BOS, which keeps {statistics.mean(third['gemma-3-270m']['bos']):.2f}",
        f"has a sink in {smol + 1e-6:.1f} % of its heads",  # 72.75, which half the formatters round down
    }
    assert [words for words in said if words not in README] == []
    assert mean.sink_1["data_share_0.02"] == 0  # a fiftieth of the text


@pytest.mark.parametrize(
    "path", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_a_link_leads_to_a_file_that_is_there(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [target for target in targets if not (Path(ROOT / path).parent / target).exists()] == []
