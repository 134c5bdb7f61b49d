"""Products in bf16 on a CPU without instructions for them, at nearly the speed of those in fp32.

PyTorch's own kernels take 25 to 75 times as long as in fp32 there. They multiply the factors' bf16 values, add up in
fp32 and round once; so do these, by fp32's kernel, which adds up in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # what autocast's and the compiler's products come down to
AT_ONCE = 2**19  # numbers of a factor or a result that stand in fp32 at once: 2 MiB, which a core's caches hold


def lacks_bf16() -> bool:
    """Whether this CPU's products in bf16 are slow: an x86 CPU without AVX-512, as most laptops have."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2")) and not has.get("avx512_f")


@contextmanager
def bf16_products(device: torch.device) -> Iterator[None]:
    """Inside, on a CPU that is slow in bf16, products of bf16 factors are made in fp32 and rounded; as before outside.

    It holds for all threads, as a backward pass has its own, and for what torch.compile has made.
    """
    if device.type != "cpu" or not lacks_bf16():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
            for name in PRODUCTS:
                plain, into = _in_fp32(name)
                library.impl(name, plain, "CPU", with_keyset=True, allow_override=True)
                library.impl(f"{name}.out", into, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _in_fp32(name: str) -> tuple[Any, Any]:
    """An operation that returns its result, and the one that writes it into `out`."""
    kernel, writing = (torch.library.get_kernel(f"aten::{name}{end}", "CPU") for end in ("", ".out"))

    def by_rows(keys: Any, factors: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """A product that is large, as that of the unembedding, some rows at a time."""
        left, right = factors[0], factors[1].float()
        rows = max(1, AT_ONCE // max(right.shape))
        for some, part in zip(left.split(rows), out.split(rows), strict=True):
            part.copy_(kernel.call_boxed(keys, some.float(), right))
        return out

    def large(factors: tuple[Tensor, ...]) -> bool:
        return name == "mm" and len(factors[0]) * max(factors[1].shape) > AT_ONCE

    def plain(keys: Any, *factors: Tensor, **scales: float) -> Tensor:
        if any(x.dtype != torch.bfloat16 for x in factors):
            return kernel.call_boxed(keys, *factors, **scales)
        if large(factors):
            return by_rows(keys, factors, factors[0].new_empty(len(factors[0]), factors[1].shape[1]))
        return kernel.call_boxed(keys, *(x.float() for x in factors), **scales).bfloat16()

    def into(keys: Any, *factors: Tensor, out: Tensor, **scales: float) -> Tensor:
        if any(x.dtype != torch.bfloat16 for x in (*factors, out)):
            return writing.call_boxed(keys, *factors, out=out, **scales)
        if large(factors):
            return by_rows(keys, factors, out)
        return out.copy_(kernel.call_boxed(keys, *(x.float() for x in factors), **scales))

    return plain, into
