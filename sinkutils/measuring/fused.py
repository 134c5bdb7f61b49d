"""The fused path of a capture: a kernel's output and, by its log-sum-exp, A_ik = exp(s_ik - lse_i) of chosen keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sinkutils.measuring import families
from sinkutils.measuring.families import Call, repeat_heads
from sinkutils.model import flash

CHECK_ROWS = 32  # queries, after each chosen key and all over the text, on which it is compared with the exact path
MOST_KEYS = 64  # chosen keys, beyond which whole rows are cheaper
# Keyword arguments that do not change what attention computes, that the fused path takes into account, or (of the keys
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
    """Whether a kernel computes such a call: its arguments are known, and queries, keys and values are of one kind."""
    known = all(value is None or name in KNOWN for name, value in call.kwargs.items())
    alike = call.q.shape[-1] == call.v.shape[-1] and call.q.dtype == call.k.dtype == call.v.dtype
    return known and alike and len(columns) <= MOST_KEYS


def fused(call: Call, columns: Tensor) -> Fused:
    """Output by a fused kernel, and the attention to the keys at `columns` (K,)."""
    q, mask = call.q, call.mask
    keys, values = repeat_heads(call.k, q.shape[1]), repeat_heads(call.v, q.shape[1])
    if mask is None:
        out, lse = flash.fused(q, keys, values, scale=call.scale)
    else:
        out, lse = flash.fused_rows(q, keys, values, mask, call.scale)
    logits = q.float() @ keys[:, :, columns].float().mT * call.scale  # (B, H, T, K)
    seen = call.mask_of(torch.arange(q.shape[2], device=q.device), columns)
    if seen.dtype != torch.bool:
        logits, seen = logits + seen, seen > torch.finfo(seen.dtype).min / 2
    rest = None
    if call.sink is not None:  # a learned sink logit joins the softmax through its log-sum-exp
        total = torch.logaddexp(lse, call.sink.float().reshape(1, -1, 1))
        rest, lse = torch.exp(lse - total)[..., None], total
        out = out * rest.to(out.dtype)
    shares = torch.exp(logits - lse[..., None]).masked_fill(~seen, 0)
    return Fused(out.transpose(1, 2).contiguous(), shares, rest)


def proves_right(call: Call, found: Fused, columns: Tensor) -> bool:
    """Whether the first text's output and A_ik are those of the exact path, at some rows."""
    last, device = call.q.shape[2] - 1, columns.device
    after = columns[:, None] + torch.arange(CHECK_ROWS, device=device)  # a window hides the keys from most others
    all_over = torch.linspace(0, last, CHECK_ROWS, device=device).long()
    rows = torch.cat([after.flatten(), all_over]).clamp(max=last).unique()
    expected, weights = families.chunk(call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1]), rows)
    tolerance = 2e-5 if found.out.dtype.itemsize >= 4 else 3e-2
    gap = (found.shares[:1, :, rows] - weights[..., columns]).abs().max()
    gap_of_out = (found.out[:1, rows] - expected).abs().max() / max(1.0, float(call.v.abs().max()))
    return bool(gap <= tolerance) and bool(gap_of_out <= tolerance)
