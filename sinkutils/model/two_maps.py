"""Differential attention on long sequences: (A_1 - lambda A_2) v for a few queries at a time.

The two maps have half of the dimensions of q and k each, and share one product with v. So all
products together cost as much as those of one softmax; two softmaxes would cost twice that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkutils.model.config import AttentionSpec
from sinkutils.model.pieces import Piece, logits, pieces, product, rooms


@torch._disable_dynamo
def in_two_maps(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mix: Tensor) -> Tensor:
    """The output (B, H, T, D) for q, k, v of this shape and one dtype; mix: lambda."""
    # (2, B H, T, D / 2): the first map has the even dimensions.
    maps = (x.flatten(0, 1).unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous() for x in (q, k))
    out = TwoMaps.apply(*maps, v.flatten(0, 1), mix.to(v.dtype), q.shape[1], spec)
    return out.unflatten(0, q.shape[:2])  # type: ignore[no-any-return]


class TwoMaps(torch.autograd.Function):
    """The output of `in_two_maps` and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mix: Tensor, heads: int, spec: AttentionSpec
    ) -> Tensor:
        out = torch.empty_like(v)
        room = rooms(q[0], k[0], 2)
        for piece in pieces(q[0], k[0], heads, spec):
            first, second = weights_of_maps(q, k, spec, piece, room)
            weights = first.addcmul_(second, mix, value=-1)
            out[piece.rows] = weights @ v[piece.keys]
        ctx.options = heads, spec
        ctx.save_for_backward(q, k, v, mix)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, spec = ctx.options
        q, k, v, mix = ctx.saved_tensors
        dq, dk, dv, dmix = map(torch.zeros_like, (q, k, v, mix))
        scale = q.shape[-1] ** -0.5
        room = rooms(q[0], k[0], 3)
        for piece in pieces(q[0], k[0], heads, spec):
            first, second = weights_of_maps(q, k, spec, piece, room)
            above = room[2][: first.numel()].view(first.shape)
            own = grad[piece.rows]
            torch.addcmul(first, second, mix, value=-1, out=above)
            dv[piece.keys].baddbmm_(above.mT, own)
            above = product(own, v[piece.keys], room[2])  # of A_1, and -1 / lambda times of A_2
            dmix -= above.flatten().dot(second.flatten())
            for each, weights, factor in ((0, first, scale), (1, second, -mix * scale)):
                ds = torch._softmax_backward_data(
                    above, weights, -1, weights.dtype, grad_input=weights
                )
                dq[each][piece.rows] = ds @ k[each][piece.keys] * factor
                dk[each][piece.keys].baddbmm_(ds.mT, q[each][piece.rows] * factor)
        return dq, dk, dv, dmix, None, None


def weights_of_maps(
    q: Tensor, k: Tensor, spec: AttentionSpec, piece: Piece, room: Tensor
) -> list[Tensor]:
    """A_1 and A_2 of a piece, (heads, R, S), in the first two rooms."""
    maps = [logits(q[each], k[each], spec, None, piece, room[each]) for each in (0, 1)]
    return [torch.ops.aten._softmax(s, -1, False, out=s) for s in maps]
