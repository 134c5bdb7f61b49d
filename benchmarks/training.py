"""Training speed beside `transformers.LlamaForCausalLM` of the same shape, in one run, on one thread.

Both take the same steps: forward, backward, clipping, fused AdamW, on random tokens. Rounds alternate between the
peers so that a busy machine slows both; the best round of each counts. The matmul peak is measured beside them.
--before CHECKOUT also takes the compiled step of an earlier commit, such as 8b1a0df, right after ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from bench import keep, matmul_peak, parser, seconds, show

from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.task import next_token_loss, usable_precision

SHAPES = {
    64: (4, 64, 32),
    128: (6, 128, 16),
    256: (6, 256, 8),
}  # d: (layers, context, sequences a step)
HEADS, VOCAB = 4, 1024


def peers(size: int, compiled: bool, precisions: Iterable[str]) -> dict[str, Callable[[], None]]:
    """A training step of the peer, in float32 as it comes, and of ours in each precision, eager and compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, context, batch = SHAPES[size]
    common = {"vocab_size": VOCAB, "hidden_size": size, "intermediate_size": 2 * size}
    theirs = LlamaConfig(
        **common,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        max_position_embeddings=context,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    ours = LMConfig(**common, num_layers=layers, num_heads=HEADS, context_length=context)
    ids, chunks = (
        torch.randint(0, VOCAB, (batch, context)),
        torch.randint(0, VOCAB, (batch, context + 1)),
    )
    llama = LlamaForCausalLM(theirs)
    steps = {"llama fp32": _step(llama, lambda: llama(input_ids=ids, labels=ids).loss)}
    ways = ["ours", "ours compiled"] if compiled else ["ours"]
    for name in (f"{way} {precision}" for way in ways for precision in precisions):
        steps[name] = _our_step(TransformerLM(ours), chunks, name)
    return steps


def _our_step(model: TransformerLM, chunks: torch.Tensor, name: str) -> Callable[[], None]:
    forward = torch.compile(next_token_loss) if "compiled" in name else next_token_loss

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=name.endswith("bf16")):
            return forward(model, chunks)

    return _step(model, loss)


def _step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def before(checkout: Path, size: int) -> int:
    """Tokens/s of the compiled bf16 step of an earlier commit, by its own benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "benchmarks/training.py",
            "--compile",
            "--sizes",
            str(size),
            "--json",
            str(table),
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    return next(row["tokens_per_second"] for row in rows if row["who"] == "ours compiled bf16")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--sizes", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES)
    )
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=10, help="steps a round")
    arguments.add_argument(
        "--compile", action="store_true", help="also ours with torch.compile (needs a C++ compiler)"
    )
    arguments.add_argument(
        "--before", type=Path, help="a checkout of an earlier commit; implies --compile"
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    peaks = {"fp32": matmul_peak(torch.float32)}
    if (
        usable_precision("bf16", torch.device("cpu")) == "bf16"
    ):  # emulated, a step would take minutes
        peaks["bf16"] = matmul_peak(torch.bfloat16)
    print(
        "matmul peak, one thread, GFLOP/s:",
        {name: round(peak / 1e9) for name, peak in peaks.items()},
    )
    rows = []
    for size in options.sizes:
        layers, context, batch = SHAPES[size]
        torch.compiler.reset()  # or the second size would be compiled for shapes that vary, which no training is
        steps = peers(size, bool(options.compile or options.before), peaks)
        best = dict.fromkeys(steps, float("inf"))
        for step in steps.values():
            seconds(step, 2)
        for _ in range(options.rounds):
            for name, step in steps.items():
                best[name] = min(best[name], seconds(step, options.steps))
        if options.before:
            best["before, compiled bf16"] = batch * context / before(options.before.resolve(), size)
        flops = 6 * batch * context * (layers * (4 * size**2 + 3 * size * 2 * size) + size * VOCAB)
        for name, took in best.items():
            row = {
                "d": size,
                "layers": layers,
                "context": context,
                "batch": batch,
                "who": name,
                "tokens_per_second": round(batch * context / took),
                "times_llama": round(best["llama fp32"] / took, 2),
                "share_of_matmul_peak": round(flops / took / peaks[name.split()[-1]], 2),
            }
            rows.append(row)
            show(row)
    keep(options.json, {"peaks_flops": peaks, "rows": rows})


if __name__ == "__main__":
    main()
