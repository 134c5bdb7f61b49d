"""Where the attention goes that a first token does not take: the share of it by kind of key."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import TransformerLM

KINDS = ("star", "first", "self", "previous", "line_break", "rest")
FIRST_QUERY = 3  # from here the first key, the one before and the query's own are three


def line_breaks(tokenizer: Tokenizer) -> Tensor:
    """The ids of tokens that are white space with a line break in it, (n,)."""
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
    return torch.tensor([i for i, text in enumerate(texts) if "\n" in text and not text.strip()], dtype=torch.int64)


def destinations(model: TransformerLM, ids: Tensor, breaks: Tensor) -> dict[str, list[list[float]]]:
    """The share of attention by kind of key, as (L, H) lists: means over texts and queries 3..T of `ids` (n, T).

    The kinds, each key counting for the first that fits: star (k* or x*), first (x_1), self, previous (the token
    before), line_break, rest. Where weights do not sum to one, the shares are of the proxy scores of Section 7.4.
    Shorter sequences than 3 tokens have no such query: an empty dict.
    """
    length = ids.shape[1]
    if length < FIRST_QUERY:
        return {}
    shape = (model.config.num_layers, model.config.num_heads)
    pairs = tuple((layer, head) for layer in range(shape[0]) for head in range(shape[1]))
    report = measure(model, ids, heads=pairs, norms=False)
    position = torch.arange(length)
    distance = (position[:, None] - position).expand(len(ids), -1, -1)
    kinds = {
        "first": (position == 0).expand_as(distance),
        "self": distance == 0,
        "previous": distance == 1,
        "line_break": torch.isin(ids.cpu(), breaks)[:, None].expand_as(distance),
        "rest": torch.ones_like(distance, dtype=torch.bool),
    }
    shares = {kind: torch.zeros(shape) for kind in KINDS}
    for pair in pairs:
        weights = report.kept[pair].map
        assert weights is not None
        rows = weights[:, FIRST_QUERY - 1 :]
        shares["star"][pair] = 1 - rows.sum(dim=-1).mean()
        free = torch.ones_like(distance, dtype=torch.bool)
        for kind, fits in kinds.items():
            chosen = (free & fits)[:, FIRST_QUERY - 1 :]
            shares[kind][pair] = (rows * chosen).sum(dim=-1).mean()
            free = free & ~fits
    return {kind: [[round(float(x), 4) for x in row] for row in share] for kind, share in shares.items()}
