"""Attention for a few queries at a time, with O(T d_h) memory, whatever the operation.

The backward pass computes the logits of each piece once more. Its derivative is written by hand:
autograd in each piece takes twice as long. With A_ij = f_ij / Z_i, and with dA_ij = <dout_i, v_j>,

    ds_ij = f'_ij / Z_i (dA_ij - <dout_i, out_i> z_ij),    z_ij = dZ_i / df_ij

where z is 1 for a sum, 0 for a Z that depends on no f, and (f_ij / Z_i)^(p - 1) for a p-norm. f, f'
and Z are divided by one number a row, e^peak, which cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkutils.model.attention import LOGARITHMS, similarity
from sinkutils.model.config import AttentionSpec
from sinkutils.model.masks import visible

BY_HAND = ("exp", "sigmoid", "elu", "linear", "relu", "softpick")  # those that `in_place` knows
Step = Callable[[Tensor], Tensor]
Place = tuple[slice, slice]  # which heads of all texts, and which positions
ROWS = 128  # queries in a piece
# Logits in a piece: on a CPU, as many as a core's cache holds; on a GPU, enough to keep it busy.
LOGITS = {"cpu": 2**18}
LOGITS_ON_A_GPU = 2**23


@dataclass
class Piece:
    """Some queries of some heads, with the keys that they see."""

    rows: Place  # of a tensor (B H, T, ..)
    keys: Place  # of a tensor (B H, S, ..)
    # (R, E): 1 where a query sees one of the last E keys, 0 elsewhere. All see those before.
    seen: Tensor
    hidden: Tensor  # (R, E): 0, and -inf at hidden keys
    first: int  # the position of the first of these keys that is no k*
    star: int  # 1 where k* is among the keys


def pieces(q: Tensor, k: Tensor, heads: int, spec: AttentionSpec) -> Iterator[Piece]:
    """All queries of q (B H, T, D), piece by piece. k: (B H, S, D), with k* in front if any.

    A piece has all heads of some texts, or some of one text.
    """
    every, T, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    star = k.shape[1] - T
    size = LOGITS.get(q.device.type, LOGITS_ON_A_GPU)
    masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # most pieces have the same
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        last = max(stop, min(spec.prefix, T))
        # Without a window, all of these queries see all keys before the first of them. With one,
        # the keys before it are left out; k* would be left out too, so that it stays with a k*.
        first = 0
        edge = start
        if spec.window is not None:
            edge = 0 if star else max(0, start - spec.window + 1)
            first = edge
        sizes = (stop - start, start - edge, last - edge, min(start, spec.prefix))
        if sizes not in masks:
            rows = torch.arange(start, stop, device=q.device)[:, None]
            seen = visible(rows, torch.arange(edge, last, device=q.device), spec).to(wide)
            # 1 - 1 / 1 and 1 - 1 / 0; `log` of 0 is slow
            masks[sizes] = seen, 1 - seen.reciprocal()
        together = max(1, size // ((stop - start) * (star + last - first)))  # heads
        texts = heads * max(1, together // heads)
        for text in range(0, every, texts):
            end = min(text + texts, every)
            step = min(together, heads) if texts == heads else texts
            for head in range(text, end, step):
                chosen = slice(head, min(head + step, end))
                queries = (chosen, slice(start, stop))
                keys = (chosen, slice(first, last + star))
                yield Piece(queries, keys, *masks[sizes], first, star)


# A compiler would unroll the loop. `torch.compiler.disable` does the same, and imports the compiler
# (80 MB) with this module, not when the function is called.
@torch._disable_dynamo
def in_pieces(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, g: Tensor | None) -> Tensor:
    """The output (B, H, T, E) for q, k, v after phi and g. The caller multiplies by alpha."""
    with torch.autocast(q.device.type, enabled=False):
        out = Pieces.apply(*(x.flatten(0, 1) for x in (q, k, v)), q.shape[1], spec, g)
    return out.unflatten(0, q.shape[:2])  # type: ignore[no-any-return]


class Pieces(torch.autograd.Function):
    """The output of `in_pieces` and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, spec: AttentionSpec, g: Tensor | None
    ) -> Tensor:
        out = v.new_empty(*q.shape[:2], v.shape[2])
        wide = torch.promote_types(q.dtype, torch.float32)
        peaks = q.new_zeros(*q.shape[:2], 1, dtype=wide)
        totals = torch.ones_like(peaks)
        room, *spare = rooms(q, k, 2)
        band = None if g is None else band_of(g.to(wide), q.shape[1], spec)
        for piece in pieces(q, k, heads, spec):
            s = logits(q, k, spec, band, piece, room)
            if spec.normalizer not in ("none", "length"):
                peaks[piece.rows] = peak_of(s, spec)
            f, _ = in_place(s, peaks[piece.rows], spec, spare)
            if spec.normalizer != "none":
                total = total_of(f, piece.seen, spec)
                totals[piece.rows] = total.masked_fill(total == 0, torch.inf)
            out[piece.rows] = f @ v[piece.keys].to(wide) / totals[piece.rows]
        ctx.options = heads, spec
        ctx.save_for_backward(q, k, v, g, out, peaks, totals)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, spec = ctx.options
        q, k, v, g, out, peaks, totals = ctx.saved_tensors
        wide = peaks.dtype
        scale = q.shape[-1] ** -0.5
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k, dtype=wide)
        dv = torch.zeros_like(v, dtype=wide)
        dg = torch.zeros_like(g, dtype=wide) if ctx.needs_input_grad[5] else None
        room, *spare = rooms(q, k, 3)
        band = None if g is None else band_of(g.to(wide), q.shape[1], spec)
        for piece in pieces(q, k, heads, spec):
            s = logits(q, k, spec, band, piece, room)
            f, times_slope = in_place(s, peaks[piece.rows], spec, spare)
            total = totals[piece.rows]
            shares = grad[piece.rows].to(wide) / total  # dout_i / Z_i
            along = shares * out[piece.rows]
            delta = along.sum(dim=-1, keepdim=True)  # <dout_i, out_i> / Z_i
            positive = f
            if spec.similarity == "softpick":
                positive = torch.clamp(f, min=0, out=spare[1][: f.numel()].view(f.shape))
            dv[piece.keys].baddbmm_(positive.mT, shares)
            # dA_ij / Z_i, and ds_ij in the end.
            ds = product(shares, v[piece.keys].to(wide), spare[1])
            if spec.similarity == "softpick":  # relu(f) over the sum of |f|
                torch.ops.aten.threshold_backward(ds, f, 0, grad_input=ds)
                ds.addcmul_(f.sign_(), delta, value=-1)
            elif spec.normalizer == "p_norm":
                ds.addcmul_(slope_of_norm(f, total, spec), delta, value=-1)
            elif spec.normalizer == "max_abs_sum":  # Z is constant where the sum is within 1
                signed = f.sum(dim=-1, keepdim=True)
                ds.sub_(delta * signed.sign() * (signed.abs() >= 1))
            elif spec.normalizer == "sum":
                ds.sub_(delta)
            ds = times_slope(ds)
            if spec.similarity == "linear":
                ds[..., -piece.seen.shape[1] :].mul_(piece.seen)
            if dg is not None:
                add_along_diagonals(dg, ds, piece)
            dq[piece.rows] = ds @ k[piece.keys].to(wide) * scale
            dk[piece.keys].baddbmm_(ds.mT, q[piece.rows].to(wide) * scale)
        dg = None if dg is None else dg.to(g.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, dg


def of_heads(g: Tensor, piece: Piece) -> Tensor:
    """The part of g (1 or heads, ..) that the heads of a piece read."""
    head = piece.rows[0].start % len(g)
    return g[head : head + piece.rows[0].stop - piece.rows[0].start]


def rooms(q: Tensor, k: Tensor, count: int) -> Tensor:
    """Memory for the logits of a piece, `count` times: used again and again, it stays in the cache."""
    wide = torch.promote_types(q.dtype, torch.float32)
    size = max(LOGITS.get(q.device.type, LOGITS_ON_A_GPU), ROWS * k.shape[1])
    return q.new_empty(count, size, dtype=wide)


def product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b.mT, (heads, R, S), in the memory of `room`."""
    heads, rows, keys = len(a), a.shape[1], b.shape[1]
    result = room[: heads * rows * keys].view(heads, rows, keys)
    return torch.bmm(a, b.mT, out=result)


def logits(
    q: Tensor, k: Tensor, spec: AttentionSpec, band: Tensor | None, piece: Piece, room: Tensor
) -> Tensor:
    """s_ij of a piece, (heads, R, S), in float32 at least. Hidden keys have f(s_ij) = 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q[piece.rows].to(wide) * q.shape[-1] ** -0.5
    s = product(queries, k[piece.keys].to(wide), room)
    if band is not None:
        bias = of_heads(band, piece)
        own = s[..., piece.star :].unflatten(0, (-1, len(bias)))  # k* has no position
        rows, keys = own.shape[-2:]
        zero = q.shape[1] - piece.rows[1].start  # the column of the key at position 0
        own.add_(bias[:, :rows, zero + piece.first :][..., :keys])
    if spec.logit_bias != 0:
        s.add_(spec.logit_bias)
    # A mask by multiplication and addition is ten times as fast as `masked_fill` is on a CPU.
    edge = s[..., -piece.seen.shape[1] :]
    if spec.hidden_is_zero:
        edge.mul_(piece.seen)
    else:
        edge.add_(piece.hidden)
    return s


def band_of(g: Tensor, length: int, spec: AttentionSpec) -> Tensor:
    """g(i - j) for the rows of a piece, (1 or heads, R, T + ..), from g (1 or heads, >= T).

    It is the same for all pieces: the query `start + r` and the key j find g(start + r - j) at the
    row r and the column T - start + j.
    """
    after = max(ROWS, min(spec.prefix, length))  # columns of keys that may stand at or after start
    distance = torch.arange(length + ROWS - 1, -after, -1, device=g.device)
    # Keys after the query are hidden, or in a prefix: they get g of distance 0, as in `attend`.
    line = g[:, distance.clamp(0, length - 1)]
    return line.unfold(-1, length + after, 1).flip(1)


def add_along_diagonals(dg: Tensor, ds: Tensor, piece: Piece) -> None:
    """Add the gradient ds (heads, R, S) of the logits to that of g, distance by distance."""
    ds = ds[..., piece.star :]
    heads, rows, keys = ds.shape
    width = rows + keys - 1
    # Row i, shifted to the right by R - 1 - i, has equal distances below each other.
    shifted = ds.new_zeros(heads, rows, width)
    place = shifted.as_strided(ds.shape, (rows * width, width - 1, 1), rows - 1)
    place.copy_(ds)
    line = shifted.sum(dim=1)  # (heads, R + S - 1), from far to near
    slopes = of_heads(dg, piece)
    line = line.unflatten(0, (-1, len(slopes))).sum(dim=0)
    ahead = piece.rows[1].start + rows - piece.first
    slopes[:, :ahead] += line[:, :ahead].flip(-1)
    slopes[:, 0] += line[:, ahead:].sum(dim=-1)


def peak_of(s: Tensor, spec: AttentionSpec) -> Tensor:
    """The number that is subtracted from the logits of a row, (heads, R, 1)."""
    own_log = LOGARITHMS.get(spec.similarity) if spec.similarity not in BY_HAND else None
    top = (own_log(s) if own_log else s).amax(dim=-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0)  # in a row that sees no key
    if spec.similarity in ("sigmoid", "elu"):
        # Both are e^s below -60, to the last digit of float64. A row far below is moved up to
        # there, which multiplies its f by one number, and no other row is moved.
        peak = (top + 60).clamp(max=0)
    elif spec.similarity == "softpick":
        peak = top.clamp(min=0)
    elif spec.similarity == "exp" or own_log:
        peak = top
    else:
        peak = torch.zeros_like(top)
    if spec.normalizer == "max_abs_sum":  # Z is at least 1, so e^peak must be, too
        peak = peak.clamp(min=0)
    return peak


def in_place(
    s: Tensor, peak: Tensor, spec: AttentionSpec, spare: list[Tensor]
) -> tuple[Tensor, Step]:
    """f / e^peak, in the memory of the logits s, and a step that multiplies by its derivative.

    spare: two more rooms, of which the step needs the first; one, if no step will follow.
    softpick's f is e^s - 1 here. (`torch.where` takes thirty times as long as one of these steps on
    a CPU.)
    """
    room, room_2 = (each[: s.numel()].view(s.shape) for each in (spare[0], spare[-1]))
    if spec.similarity == "exp":
        f = exp_in_place(s.sub_(peak))
        return f, lambda ds: ds.mul_(f)
    if spec.similarity == "sigmoid":
        f = s.sub_(peak).sigmoid_()
        return f, lambda ds: torch.ops.aten.sigmoid_backward(ds, f)
    if spec.similarity == "elu":
        slope = exp_in_place(torch.clamp(s.sub_(peak), max=0, out=room))
        return s.relu_().add_(slope), lambda ds: ds.mul_(slope)
    if spec.similarity == "softpick":
        # e^s - 1 = tanh(s/2) (e^s + 1), which does not cancel where s is small. `expm1` takes seven
        # times as long as `exp`, and its form in `exp_minus_one` many steps. What is below e^-60 is
        # lost beside the 1.
        slope = torch.sub(s, peak, out=room).clamp_(min=-60).exp_()
        f = s.mul_(0.5).tanh_().mul_(torch.add(slope, (-peak).exp(), out=room_2))
        return f, lambda ds: ds.mul_(slope)
    if spec.similarity == "linear":
        return s, lambda ds: ds
    if spec.similarity == "relu":
        f = s.relu_()
        return f, lambda ds: ds.mul_(f.sign())
    with torch.enable_grad():  # a similarity of the user's own
        inputs = s.detach().requires_grad_()
        log = LOGARITHMS.get(spec.similarity)
        f = (log(inputs) - peak).exp() if log else similarity(inputs, spec)
        (slope,) = torch.autograd.grad(f.sum(), inputs)
    return f.detach(), lambda ds: ds.mul_(slope)


def exp_in_place(x: Tensor) -> Tensor:
    """e^x in the memory of x, and 0 where it is hardly a normal number, as for much of ALiBi.

    On a CPU, `exp` takes twenty times as long where its result is 0, and two hundred times as long
    where it lies below the smallest normal number.
    """
    least = math.log(torch.finfo(x.dtype).tiny) + 7
    powers = x.clamp_(min=least).exp_()
    return F.threshold(powers, math.exp(least + 1), 0.0, inplace=True)


def total_of(f: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """Z_i / e^peak, (heads, R, 1), from the f of a piece; see `attention.normalizer`.

    Of softpick's f it leaves the positive ones.
    """
    if spec.normalizer == "length":
        before = f.shape[-1] - seen.shape[-1]
        count = seen.sum(dim=-1, keepdim=True) + before
        return count.expand(len(f), -1, -1).contiguous()
    if spec.normalizer == "p_norm":  # of shares of the largest, whose powers do not overflow
        top = f.amax(dim=-1, keepdim=True)
        share = f / top.clamp(min=torch.finfo(f.dtype).tiny)
        if spec.similarity == "linear":
            share.relu_()
        return top * share.pow_(spec.p).sum(dim=-1, keepdim=True).pow(1 / spec.p)
    total = f.sum(dim=-1, keepdim=True)
    if spec.similarity == "softpick":  # of |f|; the weights that are left are the positive ones
        return 2 * f.relu_().sum(dim=-1, keepdim=True) - total
    if spec.normalizer == "max_abs_sum":
        return total.abs().clamp(min=1)
    return total


def slope_of_norm(f: Tensor, total: Tensor, spec: AttentionSpec) -> Tensor:
    """z of a p-norm, (f_ij / Z_i)^(p - 1). Like `attention._power` it is 0 unless f is positive."""
    share = f / total
    power = share.clamp_(min=torch.finfo(f.dtype).tiny).pow_(spec.p - 1)  # finite for p < 1 as well
    if spec.similarity in ("exp", "sigmoid", "elu", "relu"):
        return power  # where f is 0, so is its derivative, by which this is multiplied
    return power.mul_(f.sign().relu_())


# ---- differential attention, (A_1 - lambda A_2) v: the two maps have half of the dimensions of q
# and k each, and share one product with v, so that all products together cost as much as those of
# one softmax; two softmaxes would cost twice that


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
