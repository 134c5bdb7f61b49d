"""Packing documents into chunks (Section 2, Fig. 1 right), with the interventions of Section 5 as
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils import checks
from sinkutils.checks import require
from sinkutils.data.corpus import Corpus

CPU = torch.device("cpu")
# The streams of random numbers of a seed. Another number makes other records.
ORDER, REDRAWN, PLACES = 1, 5, 6


@dataclass(frozen=True)
class DataConfig:
    """What a run trains on. Positions are 1-based, as in the paper."""

    corpus: str = "docstrings"
    share: float = 1.0  # share of the training tokens kept (Fig. 5 right)
    # redrawn uniformly from the vocabulary, once for each chunk
    random_positions: tuple[int, ...] = ()
    fixed_position: int | None = None  # overwritten with x_fix, a token of its own (Table 10 right)
    # x_fix stands elsewhere in each chunk trained on, and at fixed_position where it is measured
    random_place: bool = False
    unscored: tuple[int, ...] = ()  # positions whose next-token prediction carries no loss
    # the corpus to validate on in place of `corpus` (Section 4: Pile-CC)
    validation: str | None = None

    def __post_init__(self) -> None:
        checks.fields(self)
        require(0 < self.share <= 1, f"share must be in (0, 1], got {self.share}")
        require(
            self.fixed_position is not None or not self.random_place,
            "random_place is of a fixed token: set fixed_position, where it is to be measured",
        )


class Batches:
    """Rows that are drawn in an order that depends on seed and step only."""

    tokens: Any  # all that the rows hold
    length: int  # number of rows

    def __len__(self) -> int:
        return self.length

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by index, (n, ..) int64."""
        raise NotImplementedError

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The `size` rows of step 0, 1, ..: a fresh permutation each epoch, a function of (seed,
        step) only.
        """
        # The rows are numbered on from step to step: number n is place n mod N of epoch n div N.
        numbers = np.arange(step * size, (step + 1) * size)
        epochs, places = np.divmod(numbers, self.length)
        rows = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():  # one, or two where an epoch ends in this step
            here = epochs == epoch
            order = _permutation(self.length, seed, epoch)
            rows[here] = order[places[here]]
        return self.take(rows)


@lru_cache(maxsize=64)  # a step may stand in two epochs; stacked runs (studies) take turns
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, ORDER, epoch]).permutation(length)


class Chunks(Batches):
    """A split as chunks of C + 1 tokens: inputs are the first C, targets the last C.

    Documents are joined with EOS and cut at every C tokens, so a chunk starts anywhere in a
    document and the next chunk begins with the token that this one only predicts.

    device: where chunks are cut. On the CPU the tokens stay on disk; elsewhere all of them go to
    the device once, and later only the numbers of the chunks.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        context_length: int,
        data: DataConfig,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        tokens = torch.from_numpy(corpus.tokens(split))  # unsigned, as on disk
        if split == "train":
            tokens = tokens[: int(len(tokens) * data.share)]
        if device.type != "cpu":  # few operations of a GPU know unsigned integers
            tokens = tokens.int().to(device)
        self.tokens = tokens
        self.data = data
        self.fix_id = corpus.fix_id
        self.context_length = context_length
        self.length = (len(tokens) - 1) // context_length
        require(
            self.length > 0,
            f"corpus {corpus.name!r} has {len(tokens)} {split} tokens (share {data.share}), "
            f"less than one chunk of context_length + 1 = {context_length + 1}: give more text or "
            "a smaller context_length",
        )
        last = max((*data.random_positions, *data.unscored, data.fixed_position or 1))
        require(
            last <= context_length, f"position {last} is beyond context_length={context_length}"
        )
        # One draw for each chunk, as on the authors' disk: seeing a chunk again shows the same
        # tokens.
        size = (self.length, len(data.random_positions))
        of_tokens = np.random.default_rng([seed, REDRAWN])
        of_places = np.random.default_rng([seed, PLACES])
        redrawn = of_tokens.integers(corpus.first_text_id, corpus.vocab_size, size=size)
        places = of_places.integers(context_length, size=self.length)
        self.redrawn = torch.from_numpy(redrawn).to(device)
        self.places = torch.from_numpy(places).to(device)
        self.columns = torch.arange(context_length + 1, device=device)

    def take(self, indices: np.ndarray) -> Tensor:
        """Chunks by index, (n, C + 1) int64, with the interventions made."""
        # Places in the text, one row of C + 1 a chunk.
        data = self.data
        rows = torch.from_numpy(np.ascontiguousarray(indices)).to(self.places.device)
        starts = rows[:, None] * self.context_length  # (n, 1)
        ids: Tensor = self.tokens[starts + self.columns].long()
        for column, position in enumerate(data.random_positions):
            ids[:, position - 1] = self.redrawn[rows, column]
        if data.random_place:
            places = self.places[rows]  # (n,), from 0
            return ids.scatter_(1, places[:, None], self.fix_id)
        return fix_position(ids, data.fixed_position, self.fix_id)


def fix_position(ids: Tensor, position: int | None, fix_id: int) -> Tensor:
    """`ids` (n, T) with x_fix at 1-based `position`; unchanged where that is None or beyond T."""
    if position is None or position > ids.shape[1]:
        return ids
    ids = ids.clone()
    ids[:, position - 1].fill_(fix_id)
    return ids
