"""Whether the preset `paper` fits a card of 80 GiB at its own micro-batch, with operations that are no plain softmax.

A step of one text at C 2048 on the CPU, in the preset's precision, with one block and with two: the difference is a
block, and the rest is what stands outside. The peak of the live tensors is counted, which knows nothing of a kernel's
workspace. Extrapolated to all blocks and the micro-batch; weights, gradients and AdamW's two moments come on top.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from attention_ops import LiveTensors
from bench import keep, parser, show

from sinkutils.model.decoder import TransformerLM
from sinkutils.study.grid import config

GIB = 2**30
NAMES = ["base", "sigmoid", "alibi", "softmax_p1_2"]


def peak_of_a_step(model_config: Any) -> int:
    """Bytes at the peak of one forward and backward pass of one text, without the gradients of weights."""
    model = TransformerLM(model_config, 0)
    ids = torch.randint(model_config.vocab_size, (1, model_config.context_length))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that these are not counted
    with LiveTensors() as live:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    return live.peak


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--names", nargs="+", default=NAMES)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.names:
        run = config(name, "paper")
        peaks = [peak_of_a_step(replace(run.model, num_layers=layers)) for layers in (1, 2)]
        block = peaks[1] - peaks[0]
        text = peaks[0] + (run.model.num_layers - 1) * block
        with torch.device("meta"):
            weights = sum(p.numel() for p in TransformerLM(run.model).parameters())
        total = text * run.train.micro_batch + 16 * weights  # float32: weight, gradient, moments
        row = {
            "experiment": name,
            "gib_a_block_and_text": round(block / GIB, 3),
            "micro_batch": run.train.micro_batch,
            "gib_in_all": round(total / GIB, 1),
            "fits_80_gib": total < 80 * GIB,
        }
        rows.append(row)
        show(row)
    keep(arguments.json, rows)


if __name__ == "__main__":
    main()
