"""Which digits a training run gives: on this machine twice, against a record, killed half-way, with fewer instructions.

    python benchmarks/digits.py record [laptop/fixed_1/0 ..] [--runs FOLDER] [--json benchmarks/results/again.json]
    python benchmarks/digits.py resume [--steps 200] [--json benchmarks/results/resume.json]
    python benchmarks/digits.py machines [--steps 100] [--json benchmarks/results/digits.json]
    python benchmarks/digits.py losses
    python benchmarks/digits.py smoke [sigmoid elu ..] --checkout OTHER [--json benchmarks/results/operations.json]
    python benchmarks/digits.py pairs [fixed_1 sigmoid ..] --checkout OTHER [--json benchmarks/results/pairs.json]

`record` trains records again, into FOLDER if one is given (where a killed run goes on), compares them to the last digit
and says where both end; it exits 1 where a digit differs. `resume` trains the laptop's base for a few steps as its
preset says, compiled and in bf16, once undisturbed and once killed half-way and started again; it exits 1 unless both
records are the same, bit by bit. `machines` trains the laptop's base for a few steps in processes that may use fewer
instructions, so that this machine computes as an older one would, and says at which step the loss first differs and
what a step costs. `losses` prints the base's first losses, to hold beside another machine's. `smoke` trains each
operation at that preset with the code here and with another checkout's, and says how far their curves are apart.
`pairs` does so in turns for the first steps at `laptop`, and says which losses differ and what a step costs, in seconds
of the processor.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from bench import ROOT, keep, parser, seconds, show

OPERATIONS = (
    *("fixed_1", "exp_unnormalised", "softmax_p1_2", "softmax_p2", "sigmoid", "sigmoid_normalised"),
    *("sigmoid_p2", "sigmoid_log_bias", "elu", "elu_normalised", "elu_kernel"),
    *("elu_kernel_normalised", "linear", "linear_normalised", "mlp", "mlp_normalised"),
    *("relu_length", "softpick", "differential", "alibi"),
)
MACHINES = {
    "as it is": {},
    "again": {},
    "without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "AVX2 only": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
}


def losses(precision: str, steps: int, experiment: str = "base") -> dict[str, object]:
    """The loss of each of `steps` steps at laptop, compiled, one thread, and the CPU seconds of the best ten."""
    import sinkutils as su

    try:
        from sinkutils.study.train import Run
    except ModuleNotFoundError:  # a checkout from before the package had two halves
        from sinkutils.training.run import Run

    torch.set_num_threads(1)
    if "ATEN_CPU_CAPABILITY" in os.environ:
        torch._inductor.config.cpp.simdlen = 256
    config = su.config(experiment, "laptop", 0)
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, precision=precision)
    )
    corpus = su.load_corpus(config.data.corpus, config.model.vocab_size)
    run = Run(config, corpus, torch.device("cpu"))
    run.forward = torch.compile(run.task.loss if hasattr(run, "task") else run.loss)
    tens = [10 * seconds(run.advance, 10, clock=time.process_time) for _ in range(steps // 10)]
    return {"losses": [float(loss) for loss, _ in run.passed], "seconds": min(tens)}


def losses_of(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What `losses` returns in a process of its own."""
    command = [sys.executable, __file__, "losses", *arguments]
    out = subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True
    ).stdout
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def first_difference(losses: list[float], others: list[float]) -> int | None:
    """The first step, from 1 on, with another loss."""
    pairs = zip(losses, others, strict=True)
    return next((step for step, (a, b) in enumerate(pairs, 1) if a != b), None)


def pairs(names: list[str], other: str, steps: int, rounds: int = 3) -> list[dict[str, object]]:
    """Each experiment at laptop by this checkout and by another one, in turns."""
    rows = []
    for name in names:
        turns = []
        for _ in range(rounds):
            here, there = (
                losses_of({"PYTHONPATH": str(checkout)}, "bf16", name, "--steps", str(steps))
                for checkout in (ROOT, other)
            )
            turns.append((here, there))
        steps_of_both = zip(here["losses"], there["losses"], strict=True)
        row = {
            "experiment": name,
            "steps": steps,
            "first_step_with_another_loss": first_difference(here["losses"], there["losses"]),
            "loss_apart": round(max(abs(a - b) for a, b in steps_of_both), 6),
            "time": round(statistics.median(a["seconds"] / b["seconds"] for a, b in turns), 2),
            "times": [round(a["seconds"] / b["seconds"], 2) for a, b in turns],
        }
        rows.append(row)
        show(row)
    return rows


def machines(steps: int) -> list[dict[str, object]]:
    """A row for each precision and set of instructions; times beside bf16 with all instructions, the better of two."""
    runs: dict[tuple[str, str], dict] = {}
    for precision in ("bf16", "fp32"):
        for name, limits in MACHINES.items():
            runs[precision, name] = losses_of(limits, precision, "--steps", str(steps))
    default = min(runs["bf16", name]["seconds"] for name in ("as it is", "again"))
    rows = []
    for (precision, name), mine in runs.items():
        row = {
            "precision": precision,
            "instructions": name,
            "steps": steps,
            "first_step_with_another_loss": first_difference(
                mine["losses"], runs[precision, "as it is"]["losses"]
            ),
            "loss": mine["losses"][-1],
            "time": round(mine["seconds"] / default, 2),
        }
        rows.append(row)
        show(row)
    return rows


def again(name: str, folder: str) -> dict[str, object]:
    """A record beside the same run trained here: whether every digit of it is the same, and where both end."""
    import sinkutils as su
    from sinkutils.paths import RUNS
    from sinkutils.study.record import read_record, rounded
    from sinkutils.study.train import train

    record = read_record(RUNS / name)
    preset, experiment, seed = name.split("/")
    anew = train(su.config(experiment, preset, int(seed)), folder)
    if anew.config["corpus"] != record.config["corpus"]:
        raise ValueError(f"{name} was trained on another text than the one here")
    both = (record, anew)
    ends = {
        key: [one.metrics["final"][key] for one in both]
        for key in ("sink_1", "excess_1", "valid_loss")
    }
    sets = dict(
        zip(
            ("made_on", "again_on"),
            (one.provenance["instruction_set"] for one in both),
            strict=True,
        )
    )
    return {
        "record": name,
        **sets,
        "same": rounded(record.metrics["curve"]) == anew.metrics["curve"],
        **ends,
    }


def part(
    steps: int,
    folder: str,
    experiment: str = "base",
    preset: str = "laptop",
    nudged: bool = False,
) -> None:
    """Train a run for `steps` steps, evaluated and saved five times, or go on from what was saved.

    nudged: at a learning rate that is higher by a tenth of a millionth, about a rounding of float32.
    """
    import sinkutils as su

    warnings.simplefilter(
        "error", UserWarning
    )  # a checkpoint that was not used, a compiler that is not there
    config = su.config(experiment, preset, 0)
    rate = config.train.learning_rate * (1 + 1e-7 * nudged)
    fields: dict[str, Any] = {"steps": steps, "eval_every": steps // 5, "learning_rate": rate}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))
    su.train(config, folder, keep_weights=True, checkpoint_seconds=0.0, progress=False)


def resume(steps: int, scratch: Path) -> dict[str, object]:
    """A run of `part` that is killed (-9) once half of it is saved, beside one that nothing disturbs."""
    import sinkutils as su
    from sinkutils.study.record import read_record, record_folder
    from sinkutils.study.store import Runs
    from sinkutils.study.train import read_checkpoint

    whole, broken = (
        record_folder("laptop", "fixed_1", 0, scratch / name) for name in ("whole", "broken")
    )
    command = [sys.executable, __file__, "part", "--steps", str(steps), "--runs"]
    subprocess.run([*command, scratch / "whole"], check=True)
    saved = Runs(scratch / "broken").of(su.config("base", "laptop", 0)).checkpoint
    process, step = subprocess.Popen([*command, scratch / "broken"]), 0
    while step < steps // 2 and process.poll() is None:
        time.sleep(0.05)
        if saved.exists():
            step = read_checkpoint(saved)["step"]
    process.kill()
    if process.wait() >= 0:
        raise RuntimeError(f"the run of {steps} steps ended before it was killed")
    subprocess.run([*command, scratch / "broken"], check=True)
    one, other = read_record(whole), read_record(broken)
    files = sorted({path.name for path in whole.iterdir()} - {"provenance.json", "SHA256SUMS"})
    points = list(zip(one.metrics["curve"], other.metrics["curve"], strict=True))
    differ = [name for name in files if (whole / name).read_bytes() != (broken / name).read_bytes()]
    return {
        "record": "laptop/fixed_1/0",
        "made_on": one.provenance["instruction_set"],
        "again_on": other.provenance["instruction_set"],
        "compiled": one.provenance["compiled"] and other.provenance["compiled"],
        "precision": one.config["train"]["precision"],
        "steps": steps,
        "killed_after": step,
        "compared": files,
        "same": not differ,
        "differ": differ,
        "first_step_with_another_loss": next((a["step"] for a, b in points if a != b), None),
    }


def smoke(names: list[str], other: str, steps: int, scratch: Path) -> list[dict[str, object]]:
    """Each operation at smoke, by this checkout and by another one: the largest differences along their curves.

    Beside them those between this checkout and itself, nudged: what rounding grows to in as many steps.
    """
    from sinkutils.study.record import read_record

    ways = {"here": (ROOT, []), "there": (other, []), "nudged": (ROOT, ["--nudged"])}
    for side, (checkout, options) in ways.items():
        command = [sys.executable, __file__, "part", *names, "--steps", str(steps), *options]
        command += ["--runs", str(scratch / side)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout)}, check=True)
    rows = []
    for name in names:
        here, there, nudged = (
            read_record(scratch / side / "smoke" / name / "0").metrics["curve"] for side in ways
        )
        row: dict[str, object] = {"experiment": name, "steps": steps}
        for key in ("valid_loss", "excess_1", "sink_1"):
            row[key] = apart(here, there, key)
            row[f"{key}_nudged"] = apart(here, nudged, key)
        rows.append(row)
        show(row)
    return rows


def apart(curve: list[dict[str, float]], other: list[dict[str, float]], key: str) -> float:
    """The largest difference along two curves."""
    return round(max(abs(a[key] - b[key]) for a, b in zip(curve, other, strict=True)), 6)


def without(known: list[dict], rows: list[dict]) -> list[dict]:
    """The kept rows without those that `rows` make anew: of the same record, on the same kind of machine."""
    made = [(row["record"], row["again_on"]) for row in rows]
    return [row for row in known if (row["record"], row["again_on"]) not in made]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "what", choices=("record", "resume", "machines", "losses", "part", "smoke", "pairs")
    )
    arguments.add_argument(
        "which", nargs="*", help="records, the precision of losses, or experiments of smoke, pairs"
    )
    arguments.add_argument("--nudged", action="store_true", help="of part")
    arguments.add_argument("--checkout", help="of smoke and pairs: the other one")
    arguments.add_argument(
        "--steps", type=int, help="of resume (default: 200), of the others (default: 100)"
    )
    arguments.add_argument(
        "--runs", help="folder of the runs trained again (default: one that is removed)"
    )
    options = arguments.parse_args()
    steps = options.steps or (200 if options.what == "resume" else 100)
    if options.what == "losses":
        precision, *names = options.which or ["bf16"]
        print(json.dumps(losses(precision, steps, *names)))
    elif options.what == "part":
        for name in options.which:
            part(steps, options.runs, name, "smoke", options.nudged)
        if not options.which:
            part(steps, options.runs)
    elif options.what == "machines":
        keep(options.json, machines(steps))
    elif options.what == "pairs":
        names = options.which or ["fixed_1", "sigmoid", "softpick"]
        keep(options.json, pairs(names, options.checkout, steps))
    elif options.what == "smoke":
        with tempfile.TemporaryDirectory() as folder:
            names = options.which or [*OPERATIONS]
            keep(options.json, smoke(names, options.checkout, steps, Path(folder)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            if options.what == "resume":
                rows = [resume(steps, Path(folder))]
            else:
                rows = [
                    again(name, options.runs or folder)
                    for name in options.which or ["laptop/fixed_1/0"]
                ]
        for row in rows:
            show(row)
        known = (
            json.loads(options.json.read_text(encoding="utf-8"))
            if options.json and options.json.exists()
            else []
        )
        keep(options.json, without(known, rows) + rows)
        return int(not all(row["same"] for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
