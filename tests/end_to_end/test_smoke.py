"""What the smoke preset is calibrated for, in its own steps and on its own text: a K bias has its sink."""

import dataclasses

from conftest import SMOKE

from sinkutils.study.grid import config
from sinkutils.training.trainer import train


def test_a_k_bias_has_its_sink_at_smoke_and_the_base_has_none(tmp_path):
    runs = [dataclasses.replace(config(name, "smoke"), train=SMOKE.train) for name in ("k_bias", "base")]
    biased, base = (train(run, tmp_path, device="cpu", progress=False).metrics["final"] for run in runs)
    assert base["sink_1"] < 5, f"the base has a sink: {base['sink_1']} %; it was calibrated to have none"
    assert biased["sink_star"] > base["sink_1"] + 15
