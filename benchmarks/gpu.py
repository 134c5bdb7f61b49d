"""Time, tokens/s, memory and model FLOPs utilisation (MFU) of a preset's training step: eager, graphed, compiled, both.

MFU is the FLOPs that the model needs (`flops_per_token`) over the time of a step and the matmul peak
measured here, in bf16 where the preset trains in bf16. The step is the trainer's own:
batch from the token file, forward and backward under autocast, clipping, fused AdamW. On a bare machine:
--corpus packed:FILE.
"""

from __future__ import annotations

import dataclasses
import resource
from typing import Any

import torch
from bench import keep, matmul_peak, parser, seconds, show

from sinkutils.study.corpus import load_corpus
from sinkutils.study.grid import config, presets
from sinkutils.study.task import GraphedStep, device_name, reproducible, usable_precision
from sinkutils.study.train import Run

GIB = 2**30
FORMS = ("eager", "graph", "compiled", "compiled graph")


def memory(device: torch.device) -> float:
    """GiB: the most allocated on the GPU since the last reset, or the most this process ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def flops_per_token(run: Run) -> float:
    """6 for each weight but the embedding's, and 6 L d C for causal attention."""
    model = run.config.model
    weights = (
        sum(weight.numel() for weight in run.model.parameters())
        - model.vocab_size * model.hidden_size
    )
    return 6.0 * (weights + model.num_layers * model.hidden_size * model.context_length)


def kernels(run: Run) -> int:
    """How many kernels and copies one eager step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.advance()
        torch.cuda.synchronize()
    return sum(
        row.count
        for row in profile.key_averages()
        if row.device_type == torch.autograd.DeviceType.CUDA
    )


def measured(run: Run, form: str, steps: int, rounds: int, peak: float) -> dict[str, Any]:
    """One row: the best of `rounds` means over `steps` steps, after those that compile, record and warm up."""
    device, compile = run.device, "compiled" in form
    if "graph" in form:
        run.graph = GraphedStep(run)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if compile:
        run.forward = torch.compile(run.task.loss)
    ready = 3 * seconds(run.advance, 3, device)
    took = min(seconds(run.advance, steps, device) for _ in range(rounds))
    rate = run.tokens_per_step / took
    return {
        "form": form,
        "first_three_steps_s": round(ready, 1),
        "step_ms": round(1000 * took, 2),
        "tokens_per_second": round(rate),
        "mfu": round(rate * flops_per_token(run) / peak, 3),
        "memory_gib": round(memory(device), 2),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", default="gpu", choices=list(presets()))
    arguments.add_argument("--experiment", default="default")
    arguments.add_argument("--corpus", help="in place of the preset's, such as packed:FILE")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--steps", type=int, default=20, help="steps a round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--micro-batch", type=int, help="sequences a forward pass (default: the preset's)"
    )
    arguments.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = arguments.parse_args()
    device = torch.device(options.device)
    settings = config(options.experiment, options.preset)
    if options.micro_batch:
        train = dataclasses.replace(settings.train, micro_batch=options.micro_batch)
        settings = dataclasses.replace(settings, train=train)
    with reproducible(device):
        corpus = load_corpus(options.corpus or settings.data.corpus, settings.model.vocab_size)
        precision, name = usable_precision(settings.train.precision, device), device_name(device)
        peak = matmul_peak(torch.bfloat16 if precision == "bf16" else torch.float32, device)
        print(f"{name}, {options.preset}/{options.experiment}, {precision}: ", end="")
        print(f"matmul peak {peak / 1e12:.3g} TFLOP/s", flush=True)
        rows = []
        for form in options.forms:
            run = Run(settings, corpus, device)
            try:
                rows.append(measured(run, form, options.steps, options.rounds, peak))
            except RuntimeError as error:  # one form that fails stops no other
                rows.append({"form": form, "failed": str(error)[:300]})
            show(rows[-1])
        if device.type == "cuda":
            rows.append({"kernels": kernels(Run(settings, corpus, device))})
            show(rows[-1])
    what = {
        "device": name,
        "preset": options.preset,
        "experiment": options.experiment,
        "precision": precision,
    }
    keep(options.json, what | {"peak_tflops": round(peak / 1e12, 3), "rows": rows})


if __name__ == "__main__":
    main()
