"""Memory of measuring a long text with our own model, by operation: the peak of live tensors.

    python benchmarks/long_texts.py [sigmoid softpick ..] [--json benchmarks/results/long_texts.json]

The shares of attention are computed in float64 for some queries at a time, at most 2^24 shares in all, so that beyond
some length memory grows with the length alone. The model has one block of `laptop`'s shape and random weights.
"""

from __future__ import annotations

import dataclasses

import torch
from attention_ops import LiveTensors
from bench import keep, parser, show

import sinkutils as su

OPERATIONS = ("fixed_1", "sigmoid", "softpick", "mlp")
LENGTHS = (1024, 2048, 4096, 8192)


def peak_megabytes(name: str, length: int) -> float:
    """What one measurement of one text holds at its peak beyond the model."""
    model_config = su.config(name, "laptop", 0).model
    shape = dataclasses.replace(model_config, num_layers=1, context_length=length)
    model = su.TransformerLM(shape, seed=0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab_size, (1, length), generator=generator)
    with torch.no_grad(), LiveTensors() as live:
        su.measure(model, ids)
    return live.peak / 2**20


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("which", nargs="*", default=OPERATIONS)
    arguments.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.which:
        row: dict[str, object] = {"experiment": name}
        for length in options.lengths:
            row[f"MB at {length}"] = round(peak_megabytes(name, length))
        rows.append(row)
        show(row)
    keep(options.json, rows)


if __name__ == "__main__":
    main()
