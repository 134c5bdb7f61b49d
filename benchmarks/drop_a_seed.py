"""Which verdicts rest on a single seed: python benchmarks/drop_a_seed.py [PRESET]

Leaves out each seed of each experiment, one at a time, and counts the claims whose verdict changes: to another
conclusion, or only to inconclusive because fewer seeds say less. An experiment of three is then judged on two.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from sinkutils.ledger.claims import verdicts
from sinkutils.ledger.results import results
from sinkutils.ledger.rules import INCONCLUSIVE, NOT_RUN


def main(preset: str = "laptop") -> None:
    """Print every change, and how many there are."""
    ours = results(preset)
    whole, dropped, other, weaker = verdicts(ours), 0, 0, 0
    for name, seeds in sorted(ours.runs.items()):
        for seed in sorted(seeds):
            left = {kept: run for kept, run in seeds.items() if kept != seed}
            fewer = verdicts(replace(ours, runs=ours.runs | {name: left}, least=ours.least - 1, cache={}))
            changes = {id: now for id, now in fewer.items() if NOT_RUN not in (now, whole[id]) and now != whole[id]}
            dropped += 1
            weaker += sum(now == INCONCLUSIVE for now in changes.values())
            other += sum(now != INCONCLUSIVE for now in changes.values())
            for id, now in changes.items():
                print(f"without {name}/{seed}: {id} {whole[id]} -> {now}")
    print(
        f"{preset}: {dropped} seeds left out one at a time, {len(whole)} claims: {other} verdicts change, "
        f"{weaker} more become inconclusive"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
