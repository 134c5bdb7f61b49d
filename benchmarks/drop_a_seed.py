"""Which verdicts hang on a single seed: python benchmarks/drop_a_seed.py [PRESET]

Leaves out each seed of each experiment, one at a time, and counts the claims whose verdict changes: to another
conclusion, or only to or from inconclusive. An experiment of three seeds is then judged on two.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from sinkutils.ledger.claims_file import read_claims
from sinkutils.ledger.judge import judge_claims
from sinkutils.ledger.readings import Readings, readings


def verdicts(ours: Readings) -> dict[str, str]:
    """The verdict on every claim."""
    return {one.claim.id: one.verdict for one in judge_claims(read_claims(), ours)}


def main(preset: str = "laptop") -> None:
    """Print every change, and on how many claims there is one."""
    ours = readings(preset)
    whole, dropped = verdicts(ours), 0
    firm, weak = set(), set()
    for name, seeds in sorted(ours.runs.items()):
        for seed in sorted(seeds):
            left = {kept: run for kept, run in seeds.items() if kept != seed}
            fewer = verdicts(replace(ours, runs={**ours.runs, name: left}, least=ours.least - 1))
            dropped += 1
            for id, now in fewer.items():
                if now == whole[id] or "not run" in (now, whole[id]):
                    continue
                print(f"without {name}/{seed}: {id} {whole[id]} -> {now}")
                (weak if "inconclusive" in (now, whole[id]) else firm).add(id)
    print(
        f"{preset}: {dropped} seeds left out one at a time, {len(whole)} claims: {len(firm)} hang on a seed, "
        f"{len(weak - firm)} more become inconclusive, or cease to be, without one"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
