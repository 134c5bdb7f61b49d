"""The norms of a block: RMSNorm, and two replacements from later papers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GATE_RANK = 16


class RMSNorm(nn.RMSNorm):
    """The LN of Section 3.1: h / RMS(h) * g. The gain g is cast to the precision of h."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.to(x.dtype)
        return F.rms_norm(x, gain.shape, gain, eps=1e-5)


class DyT(nn.Module):
    """DynamicTanh, tanh(alpha h) * g, which replaces a norm (Zhu et al. 2025)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        bounded = torch.tanh(self.alpha.to(x.dtype) * x)
        return bounded * self.weight.to(x.dtype)


class GatedNorm(RMSNorm):
    """y * sigmoid(W_up silu(W_down y)), where y = RMSNorm(h) and W_up W_down has rank 16.

    Qiu et al. (2026) proposed it.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.down = nn.Linear(size, GATE_RANK, bias=False)
        self.up = nn.Linear(GATE_RANK, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gate: Tensor = self.up(F.silu(self.down(y)))
        return y * gate.sigmoid().to(y.dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "dyt": DyT, "gated": GatedNorm}
