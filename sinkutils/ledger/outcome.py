"""What a check came to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sinkutils.ledger.statistics import Estimate

HOLDS, FAILS, OPEN, MISSING = "holds", "fails", "open", "not run"


@dataclass(frozen=True)
class Outcome:
    """The state of a check and the numbers that decided it; of a ratio, their logarithms."""

    kind: str
    runs: tuple[str, ...]
    quantity: str
    state: str = MISSING
    estimate: Estimate | None = None
    bar: float = math.nan  # what the estimate is held against: a threshold, or a margin
    p: float = math.nan  # of a directional check, after Holm
    passes: float = math.nan  # of a "no effect" check, the largest effect that would still pass with these seeds
    words: str = ""  # what no estimate says


def flipped(state: str) -> str:
    """The state of the opposite check."""
    return {HOLDS: FAILS, FAILS: HOLDS}.get(state, state)
