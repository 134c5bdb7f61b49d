"""Documents packed into chunks (Section 2, Fig. 1 right).

The interventions of Section 5 on the text are parameters.
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
from sinkutils.measuring.probes import fix_position
from sinkutils.study.corpus import Corpus

CPU = torch.device("cpu")
# Each seed has several streams of random numbers: for the order of the rows, for redrawn tokens and
# for the places of x_fix. To change a stream's number would change the records.
ORDER, REDRAWN, PLACES = 1, 5, 6


@dataclass(frozen=True)
class DataConfig:
    """The text that a run trains on. Positions are 1-based, as in the paper."""

    corpus: str = "docstrings"
    share: float = 1.0  # the share of the training tokens that is used (Fig. 5 right)
    # the tokens at these positions are drawn uniformly from the vocabulary, once for each chunk
    random_positions: tuple[int, ...] = ()
    # x_fix, a token that occurs in no text, overwrites this position (Table 10 right)
    fixed_position: int | None = None
    # each training chunk has x_fix at a random position, and measured texts at fixed_position
    random_place: bool = False
    unscored: tuple[int, ...] = ()  # the positions whose next-token prediction carries no loss
    # the corpus to validate on instead of `corpus` (Section 4: Pile-CC)
    validation: str | None = None

    def __post_init__(self) -> None:
        checks.fields(self)
        require(0 < self.share <= 1, f"share must be in (0, 1], got {self.share}")
        require(
            self.fixed_position is not None or not self.random_place,
            "random_place is of a fixed token: set fixed_position, where it is to be measured",
        )


class Batches:
    """Rows to train on, in an order that depends on the seed only."""

    tokens: Any  # the tokens of all rows
    length: int  # the number of rows

    def __len__(self) -> int:
        return self.length

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by index, (n, ..) int64."""
        raise NotImplementedError

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The `size` rows of a step (0, 1, ..). Each epoch has a fresh permutation of the rows.

        The result depends on seed and step only, so that a run can be resumed at any step.
        """
        # The steps number their rows consecutively. With N rows in all, number n is place n mod N
        # of epoch n div N.
        numbers = np.arange(step * size, (step + 1) * size)
        epochs, places = np.divmod(numbers, self.length)
        rows = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():  # more than one if an epoch ends in this step
            here = epochs == epoch
            order = _permutation(self.length, seed, epoch)
            rows[here] = order[places[here]]
        return self.take(rows)


@lru_cache(maxsize=64)  # a step may need two epochs, and the stacked runs of studies take turns
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, ORDER, epoch]).permutation(length)


class Chunks(Batches):
    """A split as chunks of C + 1 tokens. The first C are the inputs, the last C the targets.

    The documents are joined with EOS and cut at every C tokens. So a chunk may start anywhere in a
    document. Its last token is a target only, and is the first token of the next chunk.

    device: where the chunks are cut. On the CPU the tokens stay on disk. For a GPU, all tokens are
    copied there once, and later only the numbers of the chunks are copied.
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
        if device.type != "cpu":  # few operations on a GPU support unsigned integers
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
        # The draw is made once for each chunk, as in the authors' data on disk: in a later epoch a
        # chunk has the same random tokens again.
        size = (self.length, len(data.random_positions))
        of_tokens = np.random.default_rng([seed, REDRAWN])
        of_places = np.random.default_rng([seed, PLACES])
        redrawn = of_tokens.integers(corpus.first_text_id, corpus.vocab_size, size=size)
        places = of_places.integers(context_length, size=self.length)
        self.redrawn = torch.from_numpy(redrawn).to(device)
        self.places = torch.from_numpy(places).to(device)
        self.columns = torch.arange(context_length + 1, device=device)

    def take(self, indices: np.ndarray) -> Tensor:
        """The chunks with these indices, (n, C + 1) int64, after the interventions of `data`."""
        # Each chunk is one row of C + 1 places in the text.
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
