"""`measure` on a GPU beside the forward pass and output_attentions: a llama in the shape of 8B, random weights, bf16.

Time and peak memory as multiples of the forward pass; then alpha against eager attention's own maps.
"""

import os
import time

import torch
import transformers
from bench import show

import sinkutils

device = torch.device(os.environ.get("CARD_DEVICE", "cuda"))
on_card = device.type == "cuda"
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
SIZES = ((100, 64), (4, 4096), (1, 32768)) if on_card else ((4, 16), (2, 64))


def llama(shape: dict, dtype: torch.dtype, length: int) -> torch.nn.Module:
    heads = shape["num_attention_heads"] // 4
    config = transformers.LlamaConfig(
        vocab_size=32000,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        **shape,
    )
    config.bos_token_id = config.eos_token_id = None
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def cost(work) -> tuple[float, float]:
    """Seconds and GiB beside the weights, after one call to warm up."""
    work()
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    work()
    if not on_card:
        return time.perf_counter() - began, float("nan")
    torch.cuda.synchronize()
    return time.perf_counter() - began, (torch.cuda.max_memory_allocated() - before) / 2**30


def with_maps(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """alpha_1 (samples, L, H) from eager attention's maps, a text at a time, as the published procedure does."""
    model.set_attn_implementation("eager")
    rows = []
    for text in ids[:, None]:
        maps = model(text, output_attentions=True, use_cache=False, logits_to_keep=1).attentions
        rows.append(torch.stack([layer[0, :, :, 0].double().mean(dim=-1) for layer in maps]))
    model.set_attn_implementation("sdpa")
    return torch.stack(rows)


with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        model = llama(SMALL, dtype, 1024)
        ids = torch.randint(0, 32000, (4, 512 if on_card else 32), device=device)
        alpha = sinkutils.measure(model, ids).alpha[:, 0].to(device)
        worst = float((alpha - with_maps(model, ids)).abs().max())
        show({"alpha_from_maps": f"{worst:.1e}", "dtype": dtype})
    model = llama(SHAPE if on_card else SMALL, torch.bfloat16, SIZES[-1][1])
    for samples, length in SIZES:
        ids = torch.randint(0, 32000, (samples, length), device=device)
        ways = {
            "forward": lambda ids=ids: model(ids, use_cache=False),
            "blocks": lambda ids=ids: model.model(ids, use_cache=False),
            "measure": lambda ids=ids: sinkutils.measure(model, ids).sink(),
            "output_attentions": lambda ids=ids: with_maps(model, ids),
        }
        if length > 4096:
            del ways["output_attentions"]  # its maps would take terabytes
        first = None
        for way, work in ways.items():
            try:
                took, gib = cost(work)
            except torch.OutOfMemoryError:
                show({"texts": f"{samples} x {length}", "way": way, "failed": "out of memory"})
                continue
            first = first or (took, gib)
            ratios = {
                "times_forward": f"{took / first[0]:.2f}",
                "memory_times_forward": f"{gib / first[1]:.2f}",
            }
            show(
                {
                    "texts": f"{samples} x {length}",
                    "way": way,
                    "s": f"{took:.3f}",
                    "gib": f"{gib:.2f}",
                }
                | ratios
            )
