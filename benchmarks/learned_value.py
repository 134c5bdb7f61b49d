"""How long is the value that K and V biases learn? Into data/learned_value.json:

    python benchmarks/learned_value.py [SEED ..]

Trains K and V biases in the preset `minute` at three seeds, and compares the length of each head's
v* with the mean length of the text's values in its block. Five minutes a seed on a busy core.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from inside import keep
from safetensors.torch import load_file

import sinkutils as su

SEEDS = (0, 1, 2)


def lengths(seed: int, folder: Path) -> dict[str, list[float]]:
    """Of each block: the mean length of v* over heads, and that of a value of the text."""
    record = su.train(su.config("kv_bias", "minute", seed), folder, keep_weights=True)
    stored = load_file(folder / "minute" / "kv_bias" / str(seed) / "model.safetensors")
    learned = [weight for name, weight in sorted(stored.items()) if name.endswith("value_bias")]
    text = torch.tensor(record.metrics["final"]["report"]["value_norms"])  # (L, T)
    return {
        "v*": [round(float(weight.norm(dim=-1).mean()), 4) for weight in learned],  # (H, D) each
        "a value of the text": [round(float(mean), 4) for mean in text.mean(dim=1)],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in [int(word) for word in sys.argv[1:]] or SEEDS:
            keep("learned_value", f"seed {seed}", lengths(seed, Path(folder)))


if __name__ == "__main__":
    main()
