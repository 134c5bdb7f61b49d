"""With which tokens do the 16 texts of 07b begin? Into data/starts.json:

    python benchmarks/starts.py smollm2

The texts of one_number.py, mechanism.py and open_lms.py's `first_token`. The loss of each, of tokens 3 to
64, shows that they are the same. Seconds.
"""

from __future__ import annotations

import sys

from inside import keep
from open_lms import FEW, usual_first

from sinkutils.measuring import surgery
from sinkutils.names import subject

if __name__ == "__main__":
    for name in sys.argv[1:]:
        measured = subject(name)
        ids = measured.inputs("natural", FEW, 64, first=usual_first(measured))
        losses = surgery.untouched(measured.model, ids).losses[:, 1:].mean(dim=1)
        keep("starts", measured.name, {"first ids": ids[:, 0].tolist(), "loss": losses.tolist()})
