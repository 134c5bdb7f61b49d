"""A causal softmax with a window, by PyTorch's fused kernel for CPUs, with O(T d_h) memory.

That kernel has a causal mask and no window. So the mask is cut into parts that it has, and their
outputs are merged by their log-sum-exp. For six queries and a window of four (numbers: parts):

    1
    1 1
    1 1 1
    1 1 1 1
      3 2 2 1        part 3 is causal if queries and keys are in reverse
        2 2 1 1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Keys, times heads, of a part. Fewer make more calls, more take more memory and are no quicker.
SIZE = 1024


class Part(NamedTuple):
    """Some queries and keys of some heads. All see all of these, unless the part is causal."""

    heads: slice
    queries: slice
    keys: slice
    causal: bool = False
    reverse: bool = False

    def of_queries(self, *tensors: Tensor) -> list[Tensor]:
        return self.turned(*(x[:, self.heads, self.queries] for x in tensors))

    def of_keys(self, *tensors: Tensor) -> list[Tensor]:
        return self.turned(*(x[:, self.heads, self.keys] for x in tensors))

    def turned(self, *tensors: Tensor) -> list[Tensor]:
        return [x.flip(2) for x in tensors] if self.reverse else [*tensors]


def parts(heads: int, length: int, window: int) -> Iterator[Part]:
    """The parts of the mask: blocks of as many queries as the window has keys, each in up to 3."""
    together = max(1, SIZE // window)
    firsts = range(0, heads, together)
    for head, start in itertools.product(firsts, range(0, length, window)):
        some = slice(head, head + together)
        stop = min(start + window, length)
        queries = slice(start, stop)
        yield Part(some, queries, queries, causal=True)
        if start == 0:
            continue
        first = start - window  # which none of these queries sees
        after = first + stop - start  # the first key that all of them see
        if after < start:  # in the last block, which may be shorter
            yield Part(some, queries, slice(after, start))
        if first + 1 < after:
            but_last = slice(start, stop - 1)
            yield Part(some, but_last, slice(first + 1, after), causal=True, reverse=True)


# `torch.compiler.disable` would do the same; see `pieces.in_pieces`.
@torch._disable_dynamo
def in_parts(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The output of a softmax with a window on a CPU. q, k, v: (B, H, T, D)."""
    return Parts.apply(q, k, v, window)  # type: ignore[no-any-return]


class Parts(torch.autograd.Function):
    """The output of `in_parts` and its derivative."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(v, dtype=wide)
        lse = out.new_full(q.shape[:3], -torch.inf)
        for part in parts(q.shape[1], q.shape[2], window):
            inputs = part.of_queries(q) + part.of_keys(k, v)
            own, own_lse = part.turned(*_forward(*inputs, is_causal=part.causal))
            rows = (slice(None), part.heads, part.queries)
            both = torch.logaddexp(lse[rows], own_lse)
            share, own_share = ((each - both).exp()[..., None] for each in (lse[rows], own_lse))
            out[rows] = out[rows] * share + own * own_share
            lse[rows] = both
        out = out.to(v.dtype)
        ctx.window = window
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        grad = grad.contiguous()  # as the kernel wants it
        for part in parts(q.shape[1], q.shape[2], ctx.window):
            of_out, *inputs = part.of_queries(grad, q)
            inputs += part.of_keys(k, v) + part.of_queries(out, lse)
            # With the log-sum-exp of all parts, the kernel computes the weights among all keys.
            slopes = part.turned(*_backward(of_out, *inputs, 0.0, part.causal))
            places = (part.queries, part.keys, part.keys)
            for whole, place, slope in zip((dq, dk, dv), places, slopes, strict=True):
                whole[:, part.heads, place] += slope
        return *(whole.to(q.dtype) for whole in (dq, dk, dv)), None
