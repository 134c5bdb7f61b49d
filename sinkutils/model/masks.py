"""Which keys a query of an attention call sees, and which shapes a call may have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils import checks
from sinkutils.checks import require
from sinkutils.model.config import AttentionSpec


def visible(row: Tensor, column: Tensor, spec: AttentionSpec) -> Tensor:
    """The mask M of Eq. 4: whether the query at `row` sees the key at `column`, elementwise.

    row and column are positions, counted from 0. A query sees the keys up to its own position; with
    a window it sees only the last w of these. Without a window it also sees the first p keys of the
    sequence (Section 6).
    """
    causal = row >= column
    if spec.window is None:
        return causal | (column < spec.prefix)
    return causal & (row - column < spec.window)


def one_key_per_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with a head for each query head. Raises ValueError if these are no such tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.instance(name, x, Tensor)
        wide = x.is_floating_point() and x.dtype.itemsize > 1
        require(wide, f"{name} must hold floating-point numbers of 16 bits or more, got {x.dtype}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fit = q.ndim == k.ndim == v.ndim == 4 and min(q.shape[2:]) >= 1
    # k and v agree in batch, heads and length, and q and k in batch and D.
    fit = fit and k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    fit = fit and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    require(
        fit,
        "q, k and v must have the shapes (B, H, T, D), (B, G, S, D) and (B, G, S, E), with H a "
        f"multiple of G, and T and D at least 1; got {shapes}",
    )
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def check_start(q: Tensor, k: Tensor, start: int | None) -> int:
    """The 0-based position of the first query among the keys (see `attend`)."""
    if start is not None:
        return checks.integer("start", start, least=0)
    T, S = q.shape[2], k.shape[2]
    say = "say by `start` where the first query stands"
    require(T <= S, f"there are {T} queries and {S} keys: {say}")
    return S - T


def shown(hidden: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """The keys that are not hidden from a query beside those that the mask hides, (T, S)."""
    size = (q.shape[2], k.shape[2])
    if hidden is None:
        return torch.ones(size, dtype=torch.bool, device=q.device)
    checks.instance("hidden", hidden, Tensor)
    require(
        hidden.dtype == torch.bool and hidden.shape == size,
        f"hidden must be booleans of the shape {size}, one per query and key; got {hidden.dtype} "
        f"of the shape {tuple(hidden.shape)}",
    )
    return ~hidden.to(q.device)


def seen_keys(
    q: Tensor, k: Tensor, spec: AttentionSpec, start: int, first_keys: int, documents: Tensor | None
) -> Tensor:
    """Which keys each query sees, (T, S), or (B, 1, T, S) where documents differ."""
    B, _, T, _ = q.shape
    S = k.shape[2]
    rows = torch.arange(start, start + T, device=q.device)[:, None]
    columns = torch.arange(S, device=q.device)
    seen = visible(rows, columns, spec)  # (T, S)
    first = checks.integer("first_keys", first_keys, least=0)
    require(first == 0 or spec.window is not None, "first_keys needs a window, which hides no key")
    if documents is None:
        return seen | ((columns < first) & (columns <= rows))
    checks.instance("documents", documents, Tensor)
    whole = not (documents.is_floating_point() or documents.is_complex())
    require(
        whole and documents.shape in ((S,), (B, S)),
        f"documents must be integers of the shape ({S},) or ({B}, {S}), one per key; got "
        f"{documents.dtype} of the shape {tuple(documents.shape)}",
    )
    require(start + T <= S, "documents need each query to stand at one of the keys")
    of_key = documents.to(q.device).expand(B, S)
    begins = F.pad(of_key[:, 1:] != of_key[:, :-1], (1, 0), value=True)  # a document's first key
    begin = torch.where(begins, columns, 0).cummax(dim=1).values  # where each key's one begins
    for row, at in zip(of_key, begins, strict=True):
        require(
            len(row.unique()) == int(at.sum()),
            "documents must be contiguous: a number returns after another one",
        )
    place = (columns - begin)[:, None]  # of a key in its document, (B, 1, S)
    seen = seen | ((place < first) & (columns <= rows))  # (B, T, S)
    if spec.window is None:
        seen = seen | (place < spec.prefix)  # also of a document that is not the first
    of_query = of_key[:, start : start + T, None]
    seen = seen & (of_query == of_key[:, None])
    return seen[:, None]
