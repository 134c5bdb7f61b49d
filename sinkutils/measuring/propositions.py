"""Propositions 1-4 (Appendix B.1) on models with random weights: what repeated tokens do to attention, in float64.

Where nothing is added to the embeddings, one token repeated has one hidden state at every position (Eqs. 10-16), so
attention depends on the distance alone:

    NoPE (Prop. 1)                   A_ti = 1/t
    relative, ALiBi (Props. 2, 3)    A_ti = e^g(t-i) / sum_j e^g(t-j)
    rotary (Prop. 4)                 A_ti = e^s(t-i) / sum_j e^s(t-j) <= e^(2 xi) / (e^(2 xi) + t - 1)

with s(m) the logit of q and k at distance m and xi >= |s|. The 1/sqrt(d_h) of Eq. 4 is part of s and xi here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.model.positions import rotary_tables, rotate

PROPOSITION = {"nope": 1, "relative": 2, "relative_learned": 2, "alibi": 3, "rotary": 4}


@dataclass
class RepeatedTokens:
    """One model on one token repeated T times, observed; all float64."""

    hidden: Tensor  # (L + 1, T, d): h^0 .. h^L
    weights: Tensor  # (L, H, T, T): A_ti
    logits: Tensor  # (L, H, T): the closed form's exponent by distance m = t - i
    xi: Tensor  # (L, H): ||q|| ||k|| / sqrt(d_h)

    @property
    def hidden_difference(self) -> float:
        """max |h_t^l - h_1^l| over l and t."""
        return float((self.hidden - self.hidden[:, :1]).abs().max())

    @property
    def alpha_1(self) -> float:
        """The largest over layers and heads."""
        return float(self.weights[..., 0].mean(dim=-1).max())

    @property
    def closed_form_difference(self) -> float:
        """max |A_ti - its closed form|."""
        return float((self.weights - self.closed_form()).abs().max())

    @property
    def bound_slack(self) -> float:
        """The least distance of A_ti below Eq. 28's bound."""
        return float((self.bound()[..., None] - self.weights).min())

    def never_grows(self, tolerance: float) -> bool:
        """Whether g never grows with the distance, as Props. 2 and 3 take it to."""
        return bool((self.logits.diff(dim=-1) <= tolerance).all())

    def closed_form(self) -> Tensor:
        """A_ti of Eqs. 18, 20, 22 and 27, (L, H, T, T)."""
        t = torch.arange(self.logits.shape[-1])
        distance = t[:, None] - t
        return self.logits[..., distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf).softmax(dim=-1)

    def bound(self) -> Tensor:
        """e^(2 xi) / (e^(2 xi) + t - 1) of Eq. 28 for t = 1..T, (L, H, T)."""
        t = torch.arange(1, self.logits.shape[-1] + 1, dtype=torch.float64)
        return 1 / (1 + (t - 1) * torch.exp(-2 * self.xi[..., None]))


class _Repetition:
    """An `Observer` that collects, for each layer, what `RepeatedTokens` stacks."""

    def __init__(self, position: str) -> None:
        self.position = position
        self.parts: dict[str, list[Tensor]] = defaultdict(list)

    def embedding(self, hidden: Tensor) -> None:
        self.parts["hidden"].append(hidden[0])

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict[str, Any]
    ) -> None:
        length, head_dim = q.shape[-2:]
        self.parts["weights"].append(attend(q, k, v, spec, **extras)[1][0])
        # The first position is not rotated: from its q and k alone follow the logits at every distance.
        first_q, first_k = q[0, :, :1], k[0, :, :1]  # (H, 1, D)
        self.parts["xi"].append((first_q.norm(dim=-1) * first_k.norm(dim=-1))[:, 0] * head_dim**-0.5)
        if self.position == "rotary":
            # The query is turned as m positions after the key.
            first_q = rotate(first_q.expand(-1, length, -1), *rotary_tables(length, head_dim, torch.float64))
        logits = (first_q * first_k).sum(dim=-1) * head_dim**-0.5
        if "distance_bias" in extras:
            logits = logits + extras["distance_bias"][:, :length]
        self.parts["logits"].append(logits.expand(q.shape[1], length))

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.parts["hidden"].append(hidden[0])


@torch.no_grad()
def repeated_tokens(
    position: str, length: int = 160, *, num_layers: int = 3, num_heads: int = 4, hidden_size: int = 32, seed: int = 0
) -> RepeatedTokens:
    """Run one repeated token through a `TransformerLM` with random weights and this position embedding.

    Raises ValueError for a position embedding that the propositions do not speak of.
    """
    if position not in PROPOSITION:
        raise ValueError(f"position must be one of {', '.join(PROPOSITION)}, which leave h^0 alone; got {position!r}")
    config = LMConfig(64, length, num_layers, num_heads, hidden_size, 2 * hidden_size, position)
    model = TransformerLM(config, seed).double().eval()
    if position == "rotary":
        model.cos, model.sin = rotary_tables(length, config.head_dim, torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("bucket_bias"):  # T5's buckets start near zero, where they would say little
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
    observer = _Repetition(position)
    model(torch.full((1, length), 7), observer, dense=True)
    return RepeatedTokens(**{name: torch.stack(part) for name, part in observer.parts.items()})


def propositions(length: int = 160, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each position embedding: how far its proposition holds, as numbers.

    hidden_difference and closed_form_difference should be rounding errors; bound_slack is the least distance below
    Eq. 28's bound (None where there is none); premise says whether g (or A_ti) never grows with the distance, as
    Props. 2 and 3 take it to; first_token is the largest A_t,1 over layers, heads and t = 2..T.
    """
    rows = []
    for position, number in PROPOSITION.items():
        seen = repeated_tokens(position, length, seed=seed)
        rows.append(
            {
                "proposition": number,
                "position": position,
                "hidden_difference": seen.hidden_difference,
                "closed_form_difference": seen.closed_form_difference,
                "bound_slack": seen.bound_slack if position == "rotary" else None,
                "premise": seen.never_grows(1e-12) if number in (2, 3) else None,
                "first_token": float(seen.weights[:, :, 1:, 0].max()),
                "alpha_1": seen.alpha_1,
            }
        )
    return rows
