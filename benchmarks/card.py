"""The rows of docs/speed.md on a card, from results/gpu.json and results/card.json; it measures nothing.

card.json holds what the fifth time on a lent GPU printed: the second of each evaluation of `card_any_token.sh` with
compiled steps, and how many runs `card_living.sh` had made by which second.
"""

from __future__ import annotations

import json

from bench import ROOT, show


def any_token(run: dict) -> dict:
    """Milliseconds of a step with its evaluations; and without them, from the steps after the last full interval."""
    first, *_, last = run["evaluated_at_second"]
    intervals = len(run["evaluated_at_second"]) - 1
    interval = (last - first) / intervals  # of eval_every steps and an evaluation
    rest = run["steps"] % run["eval_every"]  # and an evaluation
    # The seconds were printed whole, so the last interval may have been half a second longer.
    longest = run["wall_seconds"] - last + 0.5
    least = (interval - longest) / (run["eval_every"] - rest)
    most = interval / run["eval_every"]
    return {
        "form": run["form"],
        "step_and_evaluation_ms": round(1000 * most, 1),
        "step_ms_at_least": round(1000 * least, 1),
    }


def living(call: dict) -> dict:
    """Steps a millisecond of all processes: from the call's start, and from the first run's end."""
    (first, before), *_, (last, runs) = call["second_and_runs_done"]
    steps = call["steps_a_run"]
    return {
        "runs": runs,
        "seconds": last,
        "steps_a_ms": round(runs * steps / last / 1000, 2),
        "from_the_first_end": round((runs - before) * steps / (last - first) / 1000, 2),
    }


for name in ("gpu", "card"):
    numbers = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    print(numbers["device"], numbers.get("peak_tflops", ""))
    for row in numbers.get("rows", ()):
        show(row)
show(any_token(numbers["any_token"]))
show(living(numbers["living"]))
