"""Which heads are alive: a dead one spreads its attention evenly, whatever the keys."""

from __future__ import annotations

import numpy as np

from sinkutils.measuring.report import uniform_alpha
from sinkutils.study.config import Json

EVEN = 0.02  # a mean attention within 2 % of an even one counts as even


def live_heads(report: Json, window: int | None) -> np.ndarray:
    """Of each head 1 where it is alive, 0 where it is dead: (L, H).

    Dead is a head with |alpha_k / u_k - 1| <= 0.02 at each of the report's targets, the first ten
    keys. u_k is the mean of 1/t over t = k..T: what x_k gets if each query spreads evenly over the
    t keys that it sees. A window of w leaves min(t, w) of them, the last; a key of the model's own
    is one more. NaN where each query sees one key alone, so that no head could be otherwise.
    """
    own_keys = 1 if report.get("alpha_star") else 0
    alphas = np.array(report["alpha"])  # (targets, L, H)
    if window == 1 and not own_keys:
        return np.full(alphas.shape[1:], np.nan)
    alive = np.zeros(alphas.shape[1:])
    for k, alpha in zip(report["targets"], alphas, strict=True):
        even = uniform_alpha(report["T"], k, window, own_keys=own_keys)
        alive[abs(alpha / even - 1) > EVEN] = 1
    return alive
