"""The fused path of a capture: a kernel's output and, by its
log-sum-exp, A_ik = exp(s_ik - lse_i) of chosen keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sinkutils.measuring import families
from sinkutils.measuring.families import Call, repeat_heads
from sinkutils.model import flash

# Queries, after each chosen key and all over the text, on which it is compared with the exact path
CHECK_ROWS = 32
MOST_KEYS = 64  # chosen keys, beyond which whole rows are cheaper
# Keyword arguments that do not change what attention computes, that the fused path takes into
# account, or (of the keys
# that sparse attention chose) that the mask holds already.
KNOWN = set(
    "dropout scaling is_causal s_aux sliding_window position_ids cache_position use_cache output_attentions "
    "output_hidden_states output_router_logits position_embeddings block_indices indices".split()
)


class Fused(NamedTuple):
    """What the fused path gives of one call."""

    out: Tensor  # (B, T, H, D)
    shares: Tensor  # (B, H, T, K): A_ik of the chosen keys
    rest: Tensor | None  # (B, H, T, 1): what a learned sink leaves to the tokens


def can_serve(call: Call, columns: Tensor) -> bool:
    """Whether a kernel computes such a call."""
    if len(columns) > MOST_KEYS or call.q.shape[-1] != call.v.shape[-1]:
        return False
    for name, value in call.kwargs.items():
        if value is not None and name not in KNOWN:
            return False
    return call.q.dtype == call.k.dtype == call.v.dtype


def fused(call: Call, columns: Tensor) -> Fused:
    """Output by a fused kernel, and the attention to the keys at `columns` (K,)."""
    q, heads = call.q, call.q.shape[1]
    keys = repeat_heads(call.k, heads)
    values = repeat_heads(call.v, heads)
    if call.mask is None:
        out, lse = flash.fused(q, keys, values, scale=call.scale)
    else:
        out, lse = flash.fused_rows(q, keys, values, call.mask, call.scale)
    logits = q.float() @ keys[:, :, columns].float().mT * call.scale  # (B, H, T, K)
    mask = call.mask_of(call.rows, columns)
    if mask.dtype != torch.bool:
        logits = logits + mask
    rest = None
    if call.sink is not None:
        # A learned sink logit joins the softmax through its log-sum-exp: the tokens keep
        # exp(lse - logaddexp(lse, sink)) of each row.
        total = torch.logaddexp(lse, call.sink.float().reshape(1, -1, 1))
        rest = torch.exp(lse - total)[..., None]
        out = out * rest.to(out.dtype)
        lse = total
    shares = torch.exp(logits - lse[..., None])
    shares = shares.masked_fill(~families.shown(mask), 0)
    return Fused(out.transpose(1, 2).contiguous(), shares, rest)


def proves_right(call: Call, result: Fused, columns: Tensor) -> bool:
    """Whether the first text's output and A_ik are those of the exact path, at some rows."""
    last, device = call.q.shape[2] - 1, columns.device
    # The rows after each key, as a window hides it from most others, and some all over the text.
    after = columns[:, None] + torch.arange(CHECK_ROWS, device=device)
    all_over = torch.linspace(0, last, CHECK_ROWS, device=device).long()
    rows = torch.cat([after.flatten(), all_over]).clamp(max=last).unique()
    first = call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1])
    out, weights = families.chunk(first, rows)
    tolerance = 2e-5 if out.dtype.itemsize >= 4 else 3e-2
    gap = (result.shares[:1, :, rows] - weights[..., columns]).abs().max()
    gap_of_out = (result.out[:1, rows] - out).abs().max()
    size = max(1.0, float(call.v.abs().max()))
    return bool(gap <= tolerance) and bool(gap_of_out <= tolerance * size)
