"""Does a norm of each head's output take the sink away? Into data/head_norm.json:

    python benchmarks/head_norm.py SEED [SEED ..]

The first query sees one value, the others a mixture, which is shorter. arXiv 2605.06611 proposes an
RMSNorm of each head's output, before the output projection, so that both have one length. Here it is
built into the baseline of `minute`, with the fixed first token and with ordinary ones, beside the
same training without it. Some two minutes a run on one core; a run that is there is not made again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from inside import excess, keep
from minute import is_made, trained
from torch import Tensor, nn

from sinkutils.measuring.measure import measure
from sinkutils.study.train import Run

SETTINGS = {"fixed first token": "fixed_1", "ordinary first tokens": "default"}


class HeadNorm(nn.Module):
    """RMSNorm of each head's output, without gains: (B, T, H D) -> (B, T, H D)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.heads, -1))
        return F.rms_norm(heads, heads.shape[-1:]).flatten(-2)


def put_norm(run: Run) -> None:
    """Norm each head's output, in front of the output projection."""
    for block in run.model.blocks:
        norm = HeadNorm(run.config.model.num_heads)
        block.attention.out = nn.Sequential(norm, block.attention.out)


CHANGES: dict[str, Callable[[Run], None]] = {"normed": put_norm, "plain": lambda run: None}


def numbers(run: Run) -> dict[str, Any]:
    """The sink and the loss at the end of a run."""
    report = measure(run.model, run.probe)
    by_block = excess(report.alpha[:, 0].mean(dim=(0, 2)), report.length)  # (L,)
    with torch.no_grad():
        loss = run.valid_loss()
    assert report.hidden_peaks is not None
    return {
        "sink_1": report.sink(1),
        "block_1": float(by_block[0]),
        "later_blocks": float(by_block[1:].mean()),
        "element": float(report.hidden_peaks[:, 0].max()),
        "valid_loss": loss,
    }


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        for setting, experiment in SETTINGS.items():
            for kind, change in CHANGES.items():
                name = f"{setting}, {kind}, seed {seed}"
                if not is_made("head_norm", name):
                    keep("head_norm", name, numbers(trained(experiment, seed, change)))


if __name__ == "__main__":
    main()
