"""What measuring costs: a plain forward pass, `sinkutils.measure`, and the published procedure, side by side.

    python benchmarks/measure.py                  100 x 64 and 4 x 1024 tokens
    python benchmarks/measure.py --long           and 1 x 32768, without the published procedure, also with windows
    python benchmarks/measure.py --json out.json
    python benchmarks/measure.py --model smollm2  a real one, in turns: 100 x 64 and 1 x 4096 tokens;
                                                  also --model gpt2, of random weights

With --model, set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ to 4000000000. Else glibc gives memory
back and asks for it again, and page faults decide the ratio.

GPT-2 of 124M parameters with random weights; time and memory do not depend on them. Every cell is a process of its
own, so that its peak memory is its own. The ways:

    blocks      the blocks alone by SDPA, which is all that measuring has to compute
    forward     the whole forward pass by SDPA, with its logits
    measure     sinkutils.measure, norms included
    window      sinkutils.measure of a Mistral of the same shape whose layers see 512 keys (with --long)
    published   one prompt at a time, eager, generate(max_new_tokens=1, output_attentions=True), all maps kept
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench import keep, parser, seconds, show

WAYS = ("blocks", "forward", "measure", "window", "published")
SETTINGS = ((100, 64), (4, 1024))
LONG = (1, 32768)


def build(way: str, ids: torch.Tensor) -> Callable[[], object]:
    """A function that does one way's work on ids (samples, T)."""
    import transformers

    torch.manual_seed(0)
    if way == "window":
        config = transformers.MistralConfig(
            vocab_size=50257,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            sliding_window=512,
            max_position_embeddings=ids.shape[1],
        )
    else:
        config = transformers.GPT2Config(n_positions=max(1024, ids.shape[1]) + 1)
    config.bos_token_id = config.eos_token_id = None
    implementation = "eager" if way == "published" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    ).eval()
    if way == "blocks":
        return lambda: model.transformer(ids, use_cache=False)
    if way == "forward":
        return lambda: model(ids, use_cache=False)
    if way in ("measure", "window"):
        import sinkutils

        return lambda: sinkutils.measure(model, ids, batch_size=len(ids)).sink()
    return lambda: published(model, ids)


def published(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Sink_1 in percent the way of the published evaluation."""
    maps = []
    for prompt in ids[:, None]:
        options = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": 1,
            "do_sample": False,
        }
        output = model.generate(
            prompt, **options, output_attentions=True, return_dict_in_generate=True
        )
        maps.append(output.attentions[0])
    alpha = torch.stack(
        [torch.stack([layer[0, :, :, 0].mean(dim=-1) for layer in layers]) for layers in maps]
    )
    return 100 * float((alpha > 0.3).double().mean())


def child(way: str, samples: int, length: int, repeats: int) -> None:
    """Time one cell in this process and print it as JSON."""
    ids = torch.randint(0, 50257, (samples, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        build(way, ids[:1, :16])()  # imports and first calls
        work = build(way, ids)
        took = statistics.median(seconds(work) for _ in range(repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    cell = {"way": way, "samples": samples, "length": length, "seconds": took, "peak_gib": peak}
    print(json.dumps(cell | {"threads": torch.get_num_threads()}))


def run(settings: list[tuple[int, int]], repeats: int) -> list[dict]:
    """Every cell, each in a process of its own; ratios are to the blocks alone on the same tokens."""
    cells = []
    print("samples x T   way            time      ratio     peak memory  ratio")
    for samples, length in settings:
        blocks: dict = {}
        for way in WAYS:
            if way == ("published" if (samples, length) == LONG else "window"):
                continue  # the maps of the long text would take 576 GiB; windows are for long texts
            command = [
                sys.executable,
                __file__,
                "--child",
                way,
                str(samples),
                str(length),
                "--repeats",
                str(repeats),
            ]
            command += ["--threads", str(torch.get_num_threads())]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{samples} x {length} {way}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            cell = json.loads(done.stdout.splitlines()[-1])
            cells.append(cell)
            blocks = blocks or cell
            time = f"{cell['seconds']:8.2f} s {cell['seconds'] / blocks['seconds']:6.2f} x"
            memory = f"{cell['peak_gib']:6.2f} GiB {cell['peak_gib'] / blocks['peak_gib']:6.2f} x"
            print(f"{samples:4d} x {length:<6d} {way:10s} {time}   {memory}", flush=True)
    return cells


IN_TURNS = ((100, 64), (1, 4096))


def in_turns(name: str, rounds: int) -> list[dict]:
    """A real model, or "gpt2" of random weights, in one process and in turns, by seconds of the CPU.

    A ratio is the median of the rounds' own: over a minute the machine drifts by more than the
    ways differ. Seconds of the CPU, which other work on the machine lengthens less than the clock's.
    """
    import transformers

    import sinkutils

    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=4096)
        config.bos_token_id = config.eos_token_id = None
        model: Any = transformers.GPT2LMHeadModel(config).eval()
    else:
        model, _ = sinkutils.load_lm(name)
    cells = []
    for samples, length in IN_TURNS:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (samples, length), generator=generator)

        def blocks(ids=ids):
            model.set_attn_implementation("sdpa")
            model.base_model(ids, use_cache=False)

        def without_norms(ids=ids):
            sinkutils.measure(model, ids, batch_size=len(ids), norms=False)

        def measure(ids=ids):
            sinkutils.measure(model, ids, batch_size=len(ids))

        def maps(ids=ids):
            model.set_attn_implementation("eager")
            model.base_model(ids, use_cache=False, output_attentions=True)

        ways = [blocks, without_norms, measure]
        if length < 1024:  # the maps of all layers of the long text would take 18 GiB
            ways.append(maps)
        taken = []
        with torch.no_grad():
            for way in ways:
                way(ids[:2, :64])  # imports and first calls
            for _ in range(rounds):
                taken.append({way.__name__: seconds(way, clock=time.process_time) for way in ways})
        for way in ways:
            ratios = [took[way.__name__] / took["blocks"] for took in taken]
            cell = {
                "model": name,
                "samples": samples,
                "length": length,
                "way": way.__name__,
                "threads": torch.get_num_threads(),
                "cpu_seconds": [round(took[way.__name__], 3) for took in taken],
                "ratio": round(statistics.median(ratios), 3),
            }
            show(cell)
            cells.append(cell)
    return cells


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--long", action="store_true", help="also 1 x 32768 tokens (minutes, some GiB)"
    )
    arguments.add_argument(
        "--repeats", type=int, default=3, help="runs of a cell, of which the median is shown"
    )
    arguments.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    arguments.add_argument(
        "--model", help="smollm2, gemma-3-270m or gpt2: this one only, the ways in turns"
    )
    arguments.add_argument(
        "--child", nargs=3, metavar=("WAY", "SAMPLES", "T"), help=argparse.SUPPRESS
    )
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.child:
        way, samples, length = options.child
        child(way, int(samples), int(length), options.repeats)
        return
    if options.model:
        cells = in_turns(options.model, options.repeats)
    else:
        cells = run([*SETTINGS, *([LONG] if options.long else [])], options.repeats)
    keep(options.json, cells)


if __name__ == "__main__":
    main()
