"""One training step (forward and backward) of each attention operation beside softmax of the same shape.

Prints time and peak memory as ratios to softmax, which runs anew beside every operation, so that what slows one slows
both. On a CPU, a time is the processor's. It is the shortest of several rounds, since other work on the machine, which
shares its caches, can only lengthen it. Peak memory is
what the step holds beyond q, k, v: from the allocator on CUDA; on a CPU the sum of live tensors, which knows nothing of
a kernel's own workspace.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from bench import keep, parser, seconds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinkutils.model import fast
from sinkutils.model.attention import AttentionSpec
from sinkutils.model.decoder import LMConfig, position_tables

# name -> (spec, position term)
OPERATIONS: dict[str, tuple[AttentionSpec, str | None]] = {
    "softmax": (AttentionSpec(), None),
    "kv_bias": (AttentionSpec(bias="kv"), None),
    "v_bias": (AttentionSpec(bias="v"), None),
    "window": (AttentionSpec(window=64), None),
    "prefix": (AttentionSpec(prefix=16), None),
    "alibi": (AttentionSpec(), "alibi"),
    "relative": (AttentionSpec(), "relative"),
    "relative_learned": (AttentionSpec(), "relative_learned"),
    "window_1024": (AttentionSpec(window=1024), None),
    "k_bias": (AttentionSpec(bias="k"), None),
    "sink_logit": (AttentionSpec(sink_logit="zero"), None),
    "differential": (AttentionSpec(differential=True), None),
    "softpick": (AttentionSpec(similarity="softpick"), None),
    "exp": (AttentionSpec(normalizer="none"), None),
    "relu_length": (AttentionSpec(similarity="relu", normalizer="length"), None),
    "sigmoid_bias": (
        AttentionSpec(similarity="sigmoid", normalizer="none", logit_bias=-7.6),  # -log 2048
        None,
    ),
    "p_norm": (AttentionSpec(normalizer="p_norm", p=0.5), None),
    "sigmoid": (AttentionSpec(similarity="sigmoid", normalizer="none"), None),
    "sigmoid_sum": (AttentionSpec(similarity="sigmoid"), None),
    "sigmoid_p_norm": (AttentionSpec(similarity="sigmoid", normalizer="p_norm", p=2.0), None),
    "elu": (AttentionSpec(similarity="elu", normalizer="none"), None),
    "elu_sum": (AttentionSpec(similarity="elu"), None),
    "kernel_identity": (AttentionSpec(similarity="linear", normalizer="max_abs_sum"), None),
    "kernel_elu": (AttentionSpec(similarity="linear", kernel="elu"), None),
    "kernel_elu_none": (AttentionSpec(similarity="linear", kernel="elu", normalizer="none"), None),
    "kernel_mlp": (AttentionSpec(similarity="linear", kernel="mlp", normalizer="none"), None),
    "kernel_mlp_max": (
        AttentionSpec(similarity="linear", kernel="mlp", normalizer="max_abs_sum"),
        None,
    ),
}
COLUMNS = "{:<16} {:>9} {:>14} {:>8} {:>14}"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LiveTensors(TorchDispatchMode):
    """Bytes of the storages that operations make and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def training_step(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> Callable[[], None]:
    """A step of `fast.attention_output` on random (B, H, T, D) inputs that all want gradients."""
    spec, position = OPERATIONS[name]
    _, heads, length, head_dim = shape

    def leaf(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, requires_grad=True)

    q, k, v = leaf(*shape), leaf(*shape), leaf(*shape)
    extras: dict[str, Any] = {}
    if spec.has_key_bias:
        extras["key_bias"] = leaf(heads, head_dim)
    if spec.bias in ("kv", "v"):
        extras["value_bias"] = leaf(heads, head_dim)
    if spec.kernel == "mlp":
        first, second = leaf(head_dim, head_dim), leaf(head_dim, head_dim)
        extras["mlp"] = lambda x: torch.relu(x @ first) @ second
    if spec.differential:
        extras["mix"] = leaf()
    if position == "relative_learned":
        extras["distance_bias"] = leaf(heads, length)
    elif position is not None:
        config = LMConfig(position=position, num_heads=heads, hidden_size=heads * head_dim)
        extras["distance_bias"] = position_tables(config, length)["distance_bias"].T.to(
            device, dtype
        )
    leaves = [x for x in (q, k, v, *extras.values()) if isinstance(x, Tensor)]

    def step() -> None:
        fast.attention_output(q, k, v, spec, **extras).sum().backward()
        for x in leaves:
            x.grad = None

    return step


def peak_bytes(step: Callable[[], None], device: str) -> int:
    """What one step holds at its peak beyond what lived before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveTensors() as live:
        step()
    return live.peak


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    arguments.add_argument(
        "--dtype", choices=list(DTYPES), help="default: bfloat16 on CUDA, float32 on the CPU"
    )
    arguments.add_argument(
        "--batch", type=int, default=None, help="default: 8 on CUDA, 1 on the CPU"
    )
    arguments.add_argument("--heads", type=int, default=8)
    arguments.add_argument("--length", type=int, default=2048, help="C")
    arguments.add_argument("--head-dim", type=int, default=64)
    arguments.add_argument(
        "--rounds", type=int, default=10, help="pairs of steps; the shortest counts"
    )
    arguments.add_argument("--only", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    device, cuda = options.device, options.device == "cuda"
    clock = (
        time.perf_counter if cuda else time.process_time
    )  # of this one thread, which other processes do not stretch
    dtype = options.dtype or ("bfloat16" if cuda else "float32")
    shape = (options.batch or (8 if cuda else 1), options.heads, options.length, options.head_dim)
    print(f"(B, H, T, D) = {shape}, {dtype}, {device}")
    print(COLUMNS.format("operation", "ms", "times softmax", "MB", "times softmax"))
    softmax = training_step("softmax", shape, DTYPES[dtype], device)
    rows = []
    for name in options.only:
        step = training_step(name, shape, DTYPES[dtype], device)
        for warm_up in (step, softmax):
            warm_up()
        memory = {each: peak_bytes(each, device) for each in (step, softmax)}
        took = beside = math.inf
        for _ in range(options.rounds):
            took = min(took, seconds(step, device=device, clock=clock))
            beside = min(beside, seconds(softmax, device=device, clock=clock))
        row = {
            "operation": name,
            "milliseconds": round(1e3 * took, 3),
            "times_softmax": round(took / beside, 2),
            "megabytes": round(memory[step] / 2**20, 2),
            "memory_times_softmax": round(memory[step] / memory[softmax], 2),
        }
        rows.append(row)
        print(COLUMNS.format(*row.values()), flush=True)
    keep(options.json, {"shape": shape, "dtype": dtype, "device": device, "rows": rows})


if __name__ == "__main__":
    main()
