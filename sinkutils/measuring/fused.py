"""The fused path of a capture: a kernel's output and, by its log-sum-exp, A_ik = exp(s_ik - lse_i) of chosen keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sinkutils.measuring import families, masks
from sinkutils.measuring.families import Call, repeat_heads
from sinkutils.model import flash

CHECK_ROWS = 64  # queries on which the fused path is compared with the exact one, or all
# Keyword arguments that do not change what attention computes, or that the fused path takes into account.
KNOWN = set(
    "dropout scaling is_causal s_aux sliding_window position_ids cache_position use_cache output_attentions "
    "output_hidden_states output_router_logits position_embeddings".split()
)


class Fused(NamedTuple):
    """What the fused path gives of one call."""

    out: Tensor  # (B, T, H, D)
    alpha: Tensor  # (B, H, T, K): A_ik of the chosen keys
    seen: Tensor  # (B or 1, H or 1, T, K): which of them a query sees
    shares: Tensor  # (B, H, T, K): A_ik over the tokens' sum, where a learned sink has a part of it
    star: Tensor | None  # (B, H, T): that part


def can_serve(call: Call) -> bool:
    """Whether a kernel computes such a call: its arguments are known, and queries, keys and values are of one kind."""
    unknown = any(value is not None and name not in KNOWN for name, value in call.kwargs.items())
    unlike = call.q.shape[-1] != call.v.shape[-1] or not call.q.dtype == call.k.dtype == call.v.dtype
    return not (unknown or unlike)


def fused(call: Call, columns: Tensor) -> Fused | None:
    """Output by a fused kernel, and the attention to the keys at `columns` (K,); None where no kernel serves."""
    q, mask = call.q, call.mask
    keys, values = repeat_heads(call.k, q.shape[1]), repeat_heads(call.v, q.shape[1])
    if mask is None:
        result = flash.fused(q, keys, values, scale=call.scale)
    else:
        result = flash.fused_rows(q, keys, values, mask, call.scale)
    if result is None:
        return None
    out, lse = result
    logits = q.float() @ keys[:, :, columns].float().mT * call.scale  # (B, H, T, K)
    seen = call.mask_of(torch.arange(q.shape[2], device=q.device), columns)
    if seen.dtype != torch.bool:
        logits, seen = logits + seen, seen > torch.finfo(seen.dtype).min / 2
    shares = torch.exp(logits - lse[..., None]).masked_fill(~seen, 0)
    sink = call.kwargs.get("s_aux")
    if sink is None:
        return Fused(out.transpose(1, 2).contiguous(), shares, seen, shares, None)
    sink = sink.float().reshape(1, -1, 1)  # a learned sink logit joins the softmax through its log-sum-exp
    total = torch.logaddexp(lse, sink)
    rest = torch.exp(lse - total)[..., None]
    out = (out * rest.to(out.dtype)).transpose(1, 2).contiguous()
    return Fused(out, shares * rest, seen, shares, torch.exp(sink - total))


def proves_right(call: Call, found: Fused, columns: Tensor) -> bool:
    """Whether the first text's output and A_ik are those of the exact path, at some rows that see those keys."""
    rows = masks.rows_to_compare(found.seen, CHECK_ROWS)
    first = call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1])
    expected, weights = families.chunk(first, rows)
    tolerance = 2e-5 if found.out.dtype in (torch.float32, torch.float64) else 3e-2
    gap = (found.alpha[:1, :, rows] - weights[..., columns]).abs().max()
    gap_of_out = (found.out[:1, rows] - expected).abs().max() / max(1.0, float(call.v.abs().max()))
    return bool(gap <= tolerance) and bool(gap_of_out <= tolerance)
