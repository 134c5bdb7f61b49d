"""What data/open_lms keeps of the real models; benchmarks/open_lms.py and open_lm_texts.py write it."""

from __future__ import annotations

import json
from typing import Any

from sinkutils import paths

# The text of the maps: our own words.
SAMPLE = (
    "A sink is where water goes when nobody needs it. A head of attention has to put its weight somewhere too: its "
    "shares sum to one, whether or not the text holds what it looks for. Most heads of a trained model put what is "
    "left over on the first token, and that token learns to carry nothing."
)


def recorded(name: str) -> dict[str, Any]:
    """The committed measurements of a real model by section. Raises ValueError for a name that has none."""
    path = paths.OPEN_LMS / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in paths.OPEN_LMS.glob("*.json"))) or "none"
        raise ValueError(f"data/open_lms has no measurements of {name!r} (it has: {known})")
    return json.loads(path.read_text(encoding="utf-8"))
