"""Alpha without attention maps: a kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of a key.

PyTorch's ops that return the log-sum-exp are private: one can change or be missing, and one
backend's is in base 2 (pytorch #181645). `proves_right` compares a kernel's first numbers with
exact rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.measuring import families
from sinkutils.measuring.families import Call, repeat_heads

ROWS = 512  # queries a call where there is a mask
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
    if len(columns) > MOST_KEYS:
        return False
    for name, value in call.kwargs.items():
        if value is not None and name not in KNOWN:
            return False
    # The kernels want values as wide as keys, and one type for all three.
    q, k, v = call.q, call.k, call.v
    one_type = q.dtype == k.dtype == v.dtype
    return one_type and q.shape[-1] == v.shape[-1]


def fused_call(call: Call, columns: Tensor) -> Fused:
    """Output by a fused kernel, and the attention to the keys at `columns` (K,)."""
    q = call.q
    heads = q.shape[1]
    keys = repeat_heads(call.k, heads)
    values = repeat_heads(call.v, heads)
    # out: (B, H, T, D). lse: (B, H, T), the logarithm of each row's sum of exp(logits).
    if call.mask is None:
        out, lse = fused(q, keys, values, scale=call.scale)
    else:
        out, lse = fused_rows(q, keys, values, call.mask, call.scale)
    # The logits of the chosen keys alone
    chosen = keys[:, :, columns].float()  # (B, H, K, D)
    logits = q.float() @ chosen.mT * call.scale  # (B, H, T, K)
    mask = call.mask_of(call.rows, columns)  # (.., T, K)
    # A mask of numbers is added whole: it may hold more than which keys are seen.
    if mask.dtype != torch.bool:
        logits = logits + mask
    star = None
    if call.sink is not None:
        # A learned sink logit joins the softmax through its log-sum-exp: the tokens keep
        # exp(lse - logaddexp(lse, sink)) of each row.
        sink = call.sink.float().reshape(1, -1, 1)
        total = torch.logaddexp(lse, sink)
        rest = torch.exp(lse - total)  # (B, H, T)
        star = 1 - rest
        out = out * rest[..., None].to(out.dtype)
        lse = total
    shares = torch.exp(logits - lse[..., None])  # A_ik = exp(s_ik - lse_i)
    hidden = ~families.shown(mask)
    shares = shares.masked_fill(hidden, 0)
    out = out.transpose(1, 2).contiguous()
    return Fused(out, shares, star)


def kernel_for(device: str, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    """Which of PyTorch's kernels `fused` calls, by name. Raises RuntimeError where none fits."""
    if device == "cpu":
        return "_scaled_dot_product_flash_attention_for_cpu"
    if device != "cuda" or dtype == torch.float64:
        raise RuntimeError(f"there is no fused kernel for {dtype} on {device}")
    # Flash attention takes no mask, no float32, and no wider heads.
    half = dtype in (torch.float16, torch.bfloat16)
    if half and head_dim <= 256 and not masked:
        return "_scaled_dot_product_flash_attention"
    return "_scaled_dot_product_efficient_attention"


def fused(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and natural log-sum-exp (B, H, T) of softmax attention.

    q: (B, H, T, D), k and v: (B, H, S, D). mask: added to the logits, or True where a key is seen;
    None is causal. scale: of the logits, 1/sqrt(D) unless given. Raises RuntimeError if no kernel
    fits, and what a missing op raises.
    """
    causal = mask is None
    device = q.device.type
    name = kernel_for(device, q.dtype, q.shape[-1], masked=not causal)
    op = getattr(torch.ops.aten, name)  # its 0.0 below is for no dropout
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)  # to be added
    if device == "cpu":
        # Called by its private name the op takes the last dimension for contiguous, and is wrong
        # where it is not.
        q, k, v = map(_last_contiguous, (q, k, v))
        out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif name == "_scaled_dot_product_flash_attention":
        out, lse, *_ = op(q, k, v, 0.0, causal, scale=scale)
    else:
        if mask is not None:  # the kernel wants rows that start at multiples of 16 elements
            keys = mask.shape[-1]
            lacking = -keys % 16  # up to the next multiple
            padded = F.pad(mask.to(q.dtype), (0, lacking))
            mask = padded[..., :keys]
            mask = mask.expand(*q.shape[:3], k.shape[2])
        # True asks for the log-sum-exp.
        out, lse, *_ = op(q, k, v, mask, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # some pad their rows


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def fused_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`fused` under a mask that broadcasts to (B, H, T, T), `ROWS` queries at a time.

    Of booleans only the keys that these queries see are read: a window is cheaper than a whole row.
    """
    outs, lses = [], []
    for queries, seen in zip(q.split(ROWS, dim=2), mask.split(ROWS, dim=-2), strict=True):
        keys, values = k, v
        if mask.dtype == torch.bool:
            in_any = seen.flatten(0, -2).any(dim=0)  # text, head or query: (T,)
            columns = in_any.nonzero()[:, 0]
            # From the first key that is seen to the last one
            between = slice(columns[0], columns[-1] + 1)
            keys = k[:, :, between]
            values = v[:, :, between]
            seen = seen[..., between]
        out, lse = fused(queries, keys, values, mask=seen, scale=scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def proves_right(call: Call, result: Fused, columns: Tensor) -> bool:
    """Whether the first text's output and A_ik are those of the family's eager function."""
    last = call.q.shape[2] - 1
    device = columns.device
    # The rows after each key, as a window hides it from most others, and some all over the text.
    after = columns[:, None] + torch.arange(CHECK_ROWS, device=device)  # (K, CHECK_ROWS)
    all_over = torch.linspace(0, last, CHECK_ROWS, device=device).long()
    rows = torch.cat([after.flatten(), all_over])
    rows = rows.clamp(max=last).unique()
    first_text = call._replace(q=call.q[:1], k=call.k[:1], v=call.v[:1])
    out, weights = families.chunk(first_text, rows)  # (1, R, H, D), (1, H, R, T)
    # In half precision both round, each in its own way.
    tolerance = 2e-5 if out.dtype.itemsize >= 4 else 3e-2
    gaps = result.shares[:1, :, rows] - weights[..., columns]
    gaps_of_out = result.out[:1, rows] - out
    # nan is below no tolerance.
    right = gaps.abs().max() <= tolerance
    right_out = gaps_of_out.abs().max() <= tolerance * call.size
    return bool(right and right_out)
