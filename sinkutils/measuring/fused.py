"""Alpha without attention maps: a kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of a key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sinkutils.measuring import families
from sinkutils.measuring.families import Call, repeat_heads
from sinkutils.model import flash

CHECK_ROWS = 32  # queries, after each chosen key and all over the text, that are proved right
MOST_KEYS = 64  # chosen keys, beyond which whole rows are cheaper
# Keyword arguments that change nothing, that `fused_call` takes into account, or (of the keys that
# sparse attention chose) that the mask holds already.
KNOWN = set(
    "dropout scaling is_causal s_aux sliding_window position_ids cache_position use_cache "
    "output_attentions output_hidden_states output_router_logits position_embeddings "
    "block_indices indices".split()
)


class Fused(NamedTuple):
    """What a kernel computes of one call."""

    out: Tensor  # (B, T, H, D)
    shares: Tensor  # (B, H, T, K): A_ik of the chosen keys
    star: Tensor | None  # (B, H, T): the share of a learned sink


def can_serve(call: Call, columns: Tensor) -> bool:
    """Whether a kernel computes such a call."""
    if len(columns) > MOST_KEYS or call.q.shape[-1] != call.v.shape[-1]:
        return False
    for name, value in call.kwargs.items():
        if value is not None and name not in KNOWN:
            return False
    return call.q.dtype == call.k.dtype == call.v.dtype


def fused_call(call: Call, columns: Tensor) -> Fused:
    """Output by a fused kernel, and the attention to the keys at `columns` (K,)."""
    q, heads = call.q, call.q.shape[1]
    keys, values = repeat_heads(call.k, heads), repeat_heads(call.v, heads)
    # out: (B, H, T, D). lse: (B, H, T), the logarithm of each row's sum of exp(logits).
    if call.mask is None:
        out, lse = flash.fused(q, keys, values, scale=call.scale)
    else:
        out, lse = flash.fused_rows(q, keys, values, call.mask, call.scale)
    logits = q.float() @ keys[:, :, columns].float().mT * call.scale  # (B, H, T, K)
    mask = call.mask_of(call.rows, columns)  # (.., T, K)
    if mask.dtype != torch.bool:
        logits = logits + mask
    star = None
    if call.sink is not None:
        # A learned sink logit joins the softmax through its log-sum-exp: the tokens keep
        # exp(lse - logaddexp(lse, sink)) of each row.
        total = torch.logaddexp(lse, call.sink.float().reshape(1, -1, 1))
        rest = torch.exp(lse - total)  # (B, H, T)
        out = out * rest[..., None].to(out.dtype)
        lse, star = total, 1 - rest
    shares = torch.exp(logits - lse[..., None])
    shares = shares.masked_fill(~families.shown(mask), 0)
    return Fused(out.transpose(1, 2).contiguous(), shares, star)


def proves_right(call: Call, result: Fused, columns: Tensor) -> bool:
    """Whether the first text's output and A_ik are those of the family's eager function."""
    last, device = call.q.shape[2] - 1, columns.device
    # The rows after each key, as a window hides it from most others, and some all over the text.
    after = columns[:, None] + torch.arange(CHECK_ROWS, device=device)
    all_over = torch.linspace(0, last, CHECK_ROWS, device=device).long()
    rows = torch.cat([after.flatten(), all_over]).clamp(max=last).unique()
    first = call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1])
    out, weights = families.chunk(first, rows)  # (1, R, H, D), (1, H, R, T)
    tolerance = 2e-5 if out.dtype.itemsize >= 4 else 3e-2
    gap = (result.shares[:1, :, rows] - weights[..., columns]).abs().max()
    gap_of_out = (result.out[:1, rows] - out).abs().max()
    return bool(gap <= tolerance and gap_of_out <= tolerance * call.size)
