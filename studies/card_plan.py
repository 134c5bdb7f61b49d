"""The runs of studies/card_living.sh, most wanted first; what has a record already is left out."""

from pathlib import Path

from sinkutils.study import grid

LAB = ("fixed_1", "k_bias", "sigmoid", "default", "learnable_random_1_unscored")
SNAPSHOTS = "snapshots=0,200,500,1000,2000,4000,8000,12000"
WITHOUT_DECAY = ("k_bias", "sink_logit", "sink_token", "v_scale")
CELLS = ("learnable_random_1_unscored", "learnable_random_1", "learnable_unscored_1", "unscored_1")
OPENED = ("gate_head", "softpick", "sigmoid_normalised", "weight_decay_0")

for seed in (0, 1):
    print(f"laptop default_steps_x4 {seed}")
for name in LAB:
    print(f"laptop {name} 0 {SNAPSHOTS}")
for seed in range(3):
    print(f"laptop {CELLS[0]} {seed} weights")
    print(f"laptop k_bias_weight_decay_0 {seed}")
judged = (Path(__file__).parent.parent / "data" / "claims.yaml").read_text(encoding="utf-8")
plan = [run for run in grid.plan("minute") if not hasattr(run, "start")]
first = [run for run in plan if run.experiment in judged]
later = [run for run in plan if run.experiment not in judged]
for run in first[:150]:
    print(f"minute {run.experiment} {run.seed}")
for seed in range(3):
    for name in (*(f"{name}_weight_decay_0" for name in WITHOUT_DECAY[1:]), "k_bias_weight_decay_0.03"):
        print(f"laptop {name} {seed}")
    for name in CELLS[1:]:
        print(f"laptop {name} {seed} weights")
for seed in (0, 1):
    print(f"laptop default_depth_6 {seed}")
for run in first[150:]:
    print(f"minute {run.experiment} {run.seed}")
for seed in range(3):
    for name in OPENED:
        print(f"laptop {name} {seed} weights")
for run in later:
    print(f"minute {run.experiment} {run.seed}")
