"""Whose loss rises if x_1 is hidden or a sink is transplanted? Into data/by_token.json:

    python benchmarks/by_token.py smollm2 gemma-3-270m

The texts and cuts of open_lms.py's `operations`, with the losses of x_2, of x_3 and of tokens 4 to 64
apart: x_2 is predicted from h_1 itself, and x_3 from the new sink. A minute a model on one core.
"""

from __future__ import annotations

import sys
from typing import Any

from inside import keep
from open_lms import FEW, usual_first

from sinkutils.measuring import surgery
from sinkutils.measuring.probes import TEXT
from sinkutils.names import subject


def by_token(outcome: surgery.Outcome) -> dict[str, Any]:
    """Of each text the loss of x_2, of x_3 and of the tokens behind them, in nats."""
    losses = outcome.losses  # (n, T - 1), of tokens 2 to T
    later = losses[:, 2:].mean(dim=1)
    return {"x_2": losses[:, 0].tolist(), "x_3": losses[:, 1].tolist(), "later": later.tolist()}


def main() -> None:
    for name in sys.argv[1:]:
        measured = subject(name)
        model, first = measured.model, usual_first(measured)
        ids, plain = (measured.inputs("natural", FEW, 64, first=start) for start in (first, TEXT))
        donors = measured.inputs("natural", FEW, 64, seed=1, first=first)
        transplant = surgery.transplant
        outcomes = {
            "untouched": surgery.untouched(model, ids),
            "hide": surgery.hide(model, ids),
            "plain": surgery.untouched(model, plain),
            "transplant": transplant(model, plain, donors),
            "transplant, v* = 0": transplant(model, plain, donors, zero_values_from=0),
        }
        keep("by_token", measured.name, {case: by_token(one) for case, one in outcomes.items()})


if __name__ == "__main__":
    main()
