"""Step time, tokens/s, memory and model FLOPs utilisation (MFU) of a preset's training step, eager and compiled.

MFU is the FLOPs that the model needs (`sinkutils.study.cost`) over the time of a step and the matmul peak
measured here, in bf16 where the preset trains in bf16. The step is the trainer's own:
batch from the token file, forward and backward under autocast, clipping, fused AdamW. On a bare machine:
--corpus packed:FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sinkutils.data.corpus import load_corpus
from sinkutils.study.config import RunConfig
from sinkutils.study.cost import GIB, cost
from sinkutils.study.grid import config
from sinkutils.study.presets import PRESETS
from sinkutils.training.run import Run, next_token_loss
from sinkutils.training.trainer import device_name, one_thread


def seconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Mean seconds of `work` over `repeats` calls, with the device's queue emptied before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """The best rate of a large matmul here, in FLOP/s."""
    size, repeats = (8192, 30) if device.type == "cuda" else (1024, 3)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds(lambda: a @ b, repeats, device)
    return 2 * size**3 / min(seconds(lambda: a @ b, repeats, device) for _ in range(3))


def memory(device: torch.device) -> float:
    """GiB: the most allocated on the GPU since the last reset, or the most this process ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measured(run: Run, compile: bool, steps: int, rounds: int, peak: float) -> dict[str, Any]:
    """One row: the best of `rounds` means over `steps` steps, after those that compile and warm up."""
    device = run.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    forward = torch.compile(next_token_loss) if compile else next_token_loss
    ready = 3 * seconds(lambda: run.advance(forward), 3, device)
    took = min(seconds(lambda: run.advance(forward), steps, device) for _ in range(rounds))
    rate = run.tokens_per_step / took
    return {
        "compiled": compile,
        "first_three_steps_s": round(ready, 1),
        "step_ms": round(1000 * took, 2),
        "tokens_per_second": round(rate),
        "mfu": round(rate * cost(run.config).flops_per_token / peak, 3),
        "memory_gib": round(memory(device), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpu", choices=list(PRESETS))
    parser.add_argument("--experiment", default="default")
    parser.add_argument("--corpus", help="in place of the preset's, such as packed:FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, help="sequences a forward pass (default: the preset's)")
    parser.add_argument("--compile", choices=["both", "on", "off"], default="both")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    settings: RunConfig = config(options.experiment, options.preset)
    if options.micro_batch:
        train = dataclasses.replace(settings.train, micro_batch=options.micro_batch)
        settings = dataclasses.replace(settings, train=train)
    with one_thread(device):
        corpus = load_corpus(options.corpus or settings.data.corpus, settings.model.vocab_size)
        dtype = torch.bfloat16 if settings.train.precision == "bf16" else torch.float32
        peak = matmul_peak(dtype, device)
        print(
            f"{device_name(device)}, {options.preset}/{options.experiment}, {settings.train.precision}: "
            f"matmul peak {peak / 1e12:.3g} TFLOP/s",
            flush=True,
        )
        rows = []
        for compile in {"both": (False, True), "on": (True,), "off": (False,)}[options.compile]:
            rows.append(measured(Run(settings, corpus, device), compile, options.steps, options.rounds, peak))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        result = {
            "device": device_name(device),
            "preset": options.preset,
            "experiment": options.experiment,
            "precision": settings.train.precision,
            "peak_tflops": round(peak / 1e12, 3),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
