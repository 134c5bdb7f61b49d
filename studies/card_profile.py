"""A step of stacked runs on a GPU: time, kernels, and a graph's losses against eager ones.

python studies/card_profile.py PRESET FOLDER K ..       FOLDER: of token files
"""

import os
import sys
from pathlib import Path

import torch
from bench import seconds, show
from stacked import Stack
from torch.nn.attention import SDPBackend

from sinkutils.checks import device as find_device
from sinkutils.study import grid
from sinkutils.study.corpus import Corpus
from sinkutils.study.task import GraphedStep, reproducible
from sinkutils.study.train import Run

preset, folder, *sizes = sys.argv[1:]
device, corpus = find_device(os.environ.get("CARD_DEVICE", "cuda")), Corpus(Path(folder))
STEPS = 100 if device.type == "cuda" else 3
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def losses(stack: Stack, steps: int) -> torch.Tensor:
    return torch.stack([stack.advance() for _ in range(steps)])


with reproducible(device):
    for size in map(int, sizes):
        for name, attention in (("products", SDPBackend.MATH), ("fused", FUSED)):
            try:
                first = {}
                for form in ("eager", "graph") if device.type == "cuda" else ("eager",):
                    stack = Stack(
                        [
                            Run(grid.config("fixed_1", preset, seed), corpus, device)
                            for seed in range(size)
                        ]
                    )
                    stack.attention = attention
                    stack.graph = GraphedStep(stack) if form == "graph" else None
                    first[form] = losses(stack, 10)
                    took = seconds(stack.advance, STEPS, device)
                    row = {"preset": preset, "stacked": size, "attention": name, "form": form}
                    show(
                        row
                        | {
                            "step_ms": round(1000 * took, 2),
                            "runs_steps_a_ms": round(size / took / 1000, 3),
                        }
                    )
                if "graph" in first:
                    show({"graph_from_eager": float((first["graph"] - first["eager"]).abs().max())})
            except Exception as error:  # one form that fails stops no other
                print(
                    f"{preset} {size} {name}: {type(error).__name__}: {str(error)[:300]}",
                    flush=True,
                )
