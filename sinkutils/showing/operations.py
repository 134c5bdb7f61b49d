"""The attention operations of Section 7.4 side by side: their formulas, and what each does to the same q and k."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.study.grid import config
from sinkutils.study.paper import paper_rows

ITEMS = ("Table 15", "Section 7.4")  # its rows, and exp without normalisation, of which the text alone speaks
SIMILARITY = {"exp": "exp(s)", "sigmoid": "sigmoid(s)", "elu": "elu(s) + 1", "linear": "s"}
KERNEL = {"identity": "x", "elu": "elu(x) + 1", "mlp": "mlp(x)"}
NORMALIZER = {"sum": "sum f", "none": "1", "max_abs_sum": "max(|sum f|, 1)", "p_norm": "(sum f^p)^(1/p)"}
STRETCH = 3.0  # what k_1 is multiplied by, to see which other weights it moves


def specs() -> dict[str, AttentionSpec]:
    """The twelve operations of Section 7.4 by the names of the paper's rows, "similarity, Z"."""
    rows = [row for item in ITEMS for row in paper_rows(item)]
    return {row.row: config(row.experiment, "paper").model.attention for row in rows}


def inputs(stretch: float = 1.0) -> tuple[Tensor, Tensor, Callable]:
    """Queries, keys (T, D) and an MLP kernel, the same on every call, in float64; k_1 is multiplied by `stretch`.

    All queries point somewhat towards k_1, so that s_i1 is positive, about 1 before stretching.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, first, second = (torch.randn(rows, 16, dtype=torch.float64, generator=draw) for rows in (8, 8, 16, 16))
    q, k[0] = q + 1, stretch / 4
    return q, k, lambda x: torch.relu(x @ first) @ second / 16


def weights(spec: AttentionSpec, stretch: float = 1.0) -> Tensor:
    """A_ij (T, T) of an operation on `inputs` (Eq. 29)."""
    q, k, mlp = inputs(stretch)
    q, k = q[None, None], k[None, None]
    return attend(q, k, torch.zeros_like(k), spec, mlp=mlp)[1][0, 0]


def operations() -> pd.DataFrame:
    """The twelve operations, a row each: phi, f and Z, and what `attend` gives for them on `inputs`.

    least weight and row sums: whether weights can be negative, and what they sum to. moved: the largest change of
    another key's weight when k_1 is stretched, 0 where weights are independent. metric: what Sink_k reads, the weights
    or proxy scores |f| / sum |f|, where these differ.
    """
    table = {}
    for name, spec in specs().items():
        before, after = weights(spec), weights(spec, STRETCH)
        seen = torch.ones_like(before).tril().bool()
        proxy = before.abs() / before.abs().sum(dim=-1, keepdim=True)
        sums, moved = before.sum(dim=-1), (after - before)[:, 1:].abs().max()
        table[name] = {
            "φ(x)": KERNEL[spec.kernel],
            "f(s)": SIMILARITY[spec.similarity],
            "Z": NORMALIZER[spec.normalizer],
            "least weight": f"{before[seen].min():.2f}",
            "row sums": f"{sums.min():.2f} to {sums.max():.2f}",
            "moved": f"{moved:.2f}",
            "metric": "weights" if torch.allclose(proxy, before) else "proxy scores",
        }
    return pd.DataFrame(table).T
