"""Where the attention goes that a first token does not take: its share by kind of key."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import TransformerLM

FIRST_QUERY = 3  # from here the first key, the one before and the query's own are three


def line_breaks(tokenizer: Tokenizer) -> Tensor:
    """The ids of tokens that are white space with a line break in it, (n,)."""
    breaks = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\n" in text and not text.strip():
            breaks.append(token)
    return torch.tensor(breaks, dtype=torch.int64)


def destinations(model: TransformerLM, ids: Tensor, breaks: Tensor) -> dict[str, list[list[float]]]:
    """The share of attention by kind of key, as (L, H) lists.

    They are means over the texts and the queries 3..T of `ids` (n, T). The kinds, each key counting
    for the first that fits: star (k* or x*; without them what rows lack to one), first (x_1), self,
    previous (the token before), line_break (its id is in `breaks`), rest. Where weights do not sum
    to one, the shares are of the proxy scores of Section 7.4. Sequences of fewer than 3 tokens have
    no such query: an empty dict.
    """
    length = ids.shape[1]
    if length < FIRST_QUERY:
        return {}
    at = torch.arange(length)
    back = at[FIRST_QUERY - 1 :, None] - at  # (queries, T): how far before its query a key stands
    fits = {
        "first": at == 0,
        "self": back == 0,
        "previous": back == 1,
        "line_break": torch.isin(ids.cpu(), breaks)[:, None],
        "rest": at >= 0,
    }
    layers, heads = model.config.num_layers, model.config.num_heads
    kept = measure(model, ids, heads=[*np.ndindex(layers, heads)], norms=False).kept
    maps = torch.stack([head.map for head in kept.values()])  # (L * H, n, T, T)
    left = maps[:, :, FIRST_QUERY - 1 :]  # what no kind has taken yet
    shares = {"star": 1 - left.sum(dim=-1)}
    for kind, fitting in fits.items():
        taken = left * fitting
        shares[kind], left = taken.sum(dim=-1), left - taken
    means = {}
    for kind, share in shares.items():
        by_head = share.double().mean(dim=(1, 2)).view(layers, heads)
        means[kind] = by_head.numpy().round(4).tolist()
    return means
