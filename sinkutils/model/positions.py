"""The position embeddings of Appendix A: added to h or to the logits, or rotating q and k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Others rotate q and k (rotary) or are added to the embeddings (absolute, learnable). `relative`
# adds the number of T5's bucket itself, which grows with distance, as the authors' code does;
# `relative_learned` is T5's, one learned bias a bucket and head. Eq. 6 prints a third thing: see
# `relative_buckets`.
ADDED_TO_LOGITS = ("relative", "relative_learned", "alibi")
POSITIONS = ("rotary", "nope", "absolute", "learnable", *ADDED_TO_LOGITS)

NUM_BUCKETS = 32  # B of Eq. 6
MAX_DISTANCE = 128  # D of Eq. 6


def absolute_embedding(length: int, hidden_size: int) -> Tensor:
    """Sinusoidal p_t of Eq. 5 for t = 1..length: (length, hidden_size), sin and cos interleaved."""
    cos, sin = rotary_tables(length + 1, hidden_size)  # of the same angles, from 0
    interleaved = torch.stack([sin, cos], dim=-1).flatten(1)
    return interleaved[1:, :hidden_size]


def relative_buckets(length: int) -> Tensor:
    """T5's bucket of distances 0..length-1, (length,) int64.

    Exact up to B/2, logarithmic up to D, then B - 1.

    Not quite g of Eq. 6. T5, and the authors' code with it, takes the floor of the scaled
    logarithm; Eq. 6 prints the floor before the factor B/2, which puts all distances from B/2 to D
    - 1 in one bucket.
    """
    distance = torch.arange(length)
    exact = NUM_BUCKETS // 2
    farther = distance.clamp(min=1).double() / exact
    ratio = torch.log(farther) / math.log(MAX_DISTANCE / exact)
    coarse = exact + (ratio * (NUM_BUCKETS - exact)).long()
    coarse = coarse.clamp(max=NUM_BUCKETS - 1)
    return torch.where(distance < exact, distance, coarse)


def alibi_slopes(num_heads: int) -> Tensor:
    """m of Eq. 7 for heads 1..H: 2^(-h 2^(3 - log2 H)), shape (H,)."""
    head = torch.arange(1, num_heads + 1).double()
    return torch.exp2(-head * 8 / num_heads).float()


def rotary_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of m omega_i (Eq. 9) for m = 0..length-1, each (length, head_dim / 2)."""
    dimension = torch.arange(0, head_dim, 2, dtype=torch.float64)
    omega = 10_000.0 ** (-dimension / head_dim)
    position = torch.arange(length, dtype=torch.float64)
    angle = position[:, None] * omega
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R_{Theta, m} x (Eq. 8) on (..., T, D) with tables (T, D / 2).

    The pairs are (i, i + D/2), as in LLaMA's released code: Eq. 9 with the columns of W_Q and W_K
    permuted.
    """
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    return torch.cat([turned, other], dim=-1)
