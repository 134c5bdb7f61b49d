"""The runs of studies/card_living.sh that have no record yet, most wanted first.

Records are not carried, so the list is made here: python studies/card_plan.py > .card/plan
"""

from pathlib import Path

from sinkutils.study import grid
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.store import Runs

WITHOUT_DECAY = ("k_bias", "sink_logit", "sink_token", "v_scale")
CELLS = ("learnable_random_1_unscored", "learnable_random_1", "learnable_unscored_1", "unscored_1")
OPENED = (
    "gate_head",
    "softpick",
    "sigmoid_normalised",
    "weight_decay_0",
)  # their weights are looked at

runs = Runs()


def show(preset: str, name: str, seed: int, weights: bool = False) -> None:
    """One line, unless the record is there."""
    if runs.of(grid.config(name, preset, seed)).record(weights) is None:
        print(f"{preset} {name} {seed}{' weights' if weights else ''}")


judged = (Path(__file__).parent.parent / "data" / "claims.yaml").read_text(encoding="utf-8")
plan = [run for run in grid.plan("minute") if not isinstance(run, FinetuneConfig)]
for run in plan:
    if run.experiment in judged:
        show("minute", run.experiment, run.seed)
for seed in range(3):
    for name in CELLS:
        show("laptop", name, seed, weights=True)
    for name in (*(f"{name}_weight_decay_0" for name in WITHOUT_DECAY), "k_bias_weight_decay_0.03"):
        show("laptop", name, seed)
    for name in OPENED:
        show("laptop", name, seed, weights=True)
for run in plan:
    if run.experiment not in judged:
        show("minute", run.experiment, run.seed)
for seed in (0, 1):
    show("laptop", "default_steps_x4", seed)
    show("laptop", "default_depth_6", seed)
