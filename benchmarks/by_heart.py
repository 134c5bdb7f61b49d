"""Has a model that knows its text by heart a sink on that text? Into data/by_heart.json:

    python benchmarks/by_heart.py data_share_0.01/0 data_share_0.01/1 ..

Trains each run of the preset `laptop` in a temporary folder (ten to twenty minutes on one core), and
looks at it on pieces of its own training text, as it was cut in training, and on new text.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inside import excess, keep

import sinkutils as su
from sinkutils.measuring.surgery import untouched
from sinkutils.study.task import Chunks

TEXTS, SINK = 100, 0.3


def seen_and_new(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """By text: the pairs with a sink (%), the extra attention of blocks 2 to 4, and the loss."""
    config = su.config(name, "laptop", seed)
    su.train(config, folder, keep_weights=True)
    model, _ = su.load_lm(folder / "laptop" / name / str(seed))
    corpus = su.load_corpus(config.data.corpus, config.model.vocab_size)
    result: dict[str, Any] = {"texts": TEXTS}
    for words, split in (("its own text", "train"), ("new text", "valid")):
        chunks = Chunks(corpus, split, config.model.context_length, config.data, seed)
        ids = chunks.take(np.linspace(0, chunks.length - 1, TEXTS).astype(int))[:, :-1]
        outcome = untouched(model, ids)
        alpha = outcome.report.alpha[:, 0]  # (texts, L, H)
        losses: Any = outcome.losses
        result[words] = {
            "sink": float(100 * (alpha > SINK).float().mean()),
            "later blocks": float(excess(alpha[:, 1:].mean(dim=(1, 2)), ids.shape[1]).mean()),
            "loss": float(losses.mean()),
        }
    return result


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for run in sys.argv[1:]:
            name, seed = run.split("/")
            keep("by_heart", run, seen_and_new(name, int(seed), Path(folder)))


if __name__ == "__main__":
    main()
