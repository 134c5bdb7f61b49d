"""What a user hands over to be measured: token ids, with all else that a tokenizer or a trainer's
collator returns.

An entry of a batch counts or is refused. Those that the model's forward takes are handed to it, and
those that change nothing in a pass are left out. Which is which is read off the forward itself
(`Source.takes`).

A row of ids may hold several texts ("packed", padding-free). Where they stand is read off masks of
1, 2, .., position_ids that restart, cu_seq_lens or seq_idx. Such a row runs as it is handed over,
with its own mask and positions, and each of its texts is a sample of its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.checks import Refused, instance, require, short
from sinkutils.measuring.report import check_targets
from sinkutils.measuring.tally import Source

# Token ids, or a mapping with input_ids, as a tokenizer or a collator returns.
Ids: TypeAlias = Tensor | Mapping[str, Any]
MOST_ROWS = 8  # so many are looked at by themselves, to see whether an entry changes a pass
# Entries that say what a row without padding, which holds one text, says anyway.
POSITIONS = ("attention_mask", "position_ids", "seq_idx")
LENGTHS = ("cu_seq", "max_length_", "max_seqlen")  # how the names of entries for packing begin
# The names of entries for what a model keeps of tokens that it has read: keys and values, a state
CACHE = re.compile("past|^cache_params$|^mems$|^state$")


class Row(NamedTuple):
    """A row of the ids."""

    number: int  # its place among the rows
    first: int  # the index of its first text among all texts
    texts: tuple[slice, ...]  # where its texts stand, without padding
    whole: bool  # whether it runs as it is; else its one text runs alone, without padding


class Batch(NamedTuple):
    """What one forward pass takes."""

    ids: Tensor  # (B, T)
    entries: dict[str, Any]  # what else it takes, by the names of the forward's arguments
    texts: tuple[slice, ...] | None  # where the texts of a single row stand; None: a text each row
    places: list[int]  # the index of each text among all texts


class Inputs:
    """The texts of what a user hands over.

    ids: (samples, T), or a mapping. attention_mask: replaces that of the mapping.
    targets: texts shorter than the largest target are skipped.
    """

    def __init__(self, ids: Ids, attention_mask: Tensor | None, targets: Sequence[int]) -> None:
        entries: dict[str, Any] = {"input_ids": ids}
        if isinstance(ids, Mapping):
            entries = {str(name): x for name, x in ids.items() if x is not None}
            others = ", ".join(entries) or "nothing"
            require("input_ids" in entries, f"ids has no input_ids, but {others}")
        if attention_mask is not None:
            entries["attention_mask"] = attention_mask
        self.ids: Tensor = entries.pop("input_ids")  # (samples, T)
        self.entries = entries
        if not isinstance(self.ids, Tensor):
            advice = 'from a tokenizer: tokenizer(texts, return_tensors="pt", padding=True)'
            got = f"{type(self.ids).__name__}: {short(self.ids)}"
            raise Refused(f"ids must be of type Tensor, got {got}; {advice}")
        dense("ids", self.ids)
        integers = self.ids.dtype in (torch.int64, torch.int32)
        require(
            integers and self.ids.ndim == 2 and self.ids.numel() > 0,
            "ids must be int64 or int32 of the shape (samples, T), with at least one of each; "
            f"got {self.ids.dtype} of the shape {tuple(self.ids.shape)}",
        )
        for name, x in entries.items():
            check_entry(name)
            if isinstance(x, np.ndarray | list) and name != "attention_mask":
                with suppress(TypeError, ValueError, RuntimeError):  # it may hold no numbers
                    entries[name] = torch.as_tensor(x)
        longest = max(check_targets(targets, self.ids.shape[1]))
        self.rows: list[Row] = []
        self.skipped = 0
        count = 0
        for number, texts, whole in self._rows():
            long = tuple(text for text in texts if text.stop - text.start >= longest)
            self.skipped += len(texts) - len(long)
            if long:
                self.rows.append(Row(number, count, long, whole))
            count += len(long)
        needs = f"the {longest} tokens that target {longest} needs"
        require(len(self.rows) > 0, f"no row of ids has {needs}, without its padding")
        # We name the device, because torch.set_default_device may have set another one.
        lengths = [t.stop - t.start for row in self.rows for t in row.texts]
        self.lengths = torch.tensor(lengths, device="cpu")

    @property
    def texts(self) -> list[Tensor]:
        """The ids of each text, without padding."""
        return [self.ids[row.number, text] for row in self.rows for text in row.texts]

    def first(self, samples: int) -> dict[str, Any]:
        """The first rows of the ids, with all entries, as a mapping."""
        cut: dict[str, Any] = {"input_ids": self.ids[:samples]}
        for name, x in self.entries.items():
            count = min(samples, len(self.ids))
            cut[name] = x if self._axis(name) is None else self._rows_of(name, 0, count)
        return cut

    @property
    def whole(self) -> list[Row]:
        """The rows that run as they are."""
        return [row for row in self.rows if row.whole]

    @property
    def positions(self) -> int:
        """The number of positions that the longest row has."""
        longest = int(self.lengths.max())
        positions = self.entries.get("position_ids")
        for row in self.whole:
            if positions is None:
                return self.ids.shape[1]
            of_row = positions.select(self._axis("position_ids") or 0, row.number)
            longest = max(longest, int(of_row.max()) + 1)
        return longest

    # --- where the texts stand

    def _rows(self) -> Iterator[tuple[int, list[slice], bool]]:
        """Each row of the ids: its number, all its texts, and whether it runs as it is."""
        real = self._tokens()  # (samples, T)
        texts_by = self._descriptions()
        positions = self.entries.get("position_ids")
        for index, is_token in enumerate(real):
            places = is_token.nonzero()[:, 0]
            said = ""  # the entry that tells of several texts in this row
            starts = torch.zeros_like(places, dtype=torch.bool)  # where another text begins
            for name, numbers in texts_by.items():
                found = numbers[index, places].diff() != 0
                if not found.any():  # it tells of no second text, as a mask of ones
                    continue
                found = F.pad(found, (1, 0))
                agrees = not said or torch.equal(found, starts)
                require(agrees, f"{said} and {name} tell of different texts in a row")
                starts, said = found, name
            gaps = places.diff(prepend=places[:1] - 1) > 1
            require(
                not bool((gaps & ~starts).any()),
                "attention_mask has padding between the tokens of a row: put it at either end",
            )
            parts = torch.tensor_split(places, starts.nonzero()[:, 0])
            texts = [slice(int(tokens[0]), int(tokens[-1]) + 1) for tokens in parts]
            plain = len(texts) == 1
            if positions is not None:
                of_row = positions.select(self._axis("position_ids") or 0, index)
                lowest = float(of_row[..., places].min())
                require(lowest >= 0, f"position_ids must be at least 0, got {lowest:g}")
                found = of_row[..., texts[0]]
                counted = torch.arange(found.shape[-1], device="cpu")
                plain = plain and bool((found.cpu() == counted).all())
            yield index, texts, not plain

    def _tokens(self) -> Tensor:
        """Which ids are tokens, and no padding, (samples, T)."""
        mask = self.entries.get("attention_mask")
        if mask is None:
            return torch.ones(self.ids.shape, dtype=torch.bool, device="cpu")
        require(
            not isinstance(mask, Tensor) or mask.ndim < 3,
            "attention_mask says of each query which keys it sees, and not which ids are padding or "
            "where a text begins: give it as (samples, T), 1 at tokens and 0 at padding, and tell "
            "of texts packed in a row by position_ids",
        )
        self._by_token("attention_mask", mask)
        numbers = mask.to("cpu", torch.float64)
        require(
            bool((numbers == numbers.floor()).all() and (numbers >= 0).all()),
            "attention_mask must be 1 at tokens and 0 at padding, or 1, 2, .. for the texts packed "
            "in a row, and holds something else",
        )
        real: Tensor = numbers > 0
        require(bool(real.any(dim=1).all()), "attention_mask has a row of padding")
        return real

    def _descriptions(self) -> dict[str, Tensor]:
        """By the name of an entry, numbers (samples, T) that change where another text begins."""
        found = {}
        samples = len(self.ids)
        for name, x in self.entries.items():
            if name in ("attention_mask", "seq_idx"):
                self._by_token(name, x)
                found[name] = x.to("cpu").long()
            elif name == "position_ids":
                dense(name, x)
                require(x.dtype != torch.bool, "position_ids must be numbers, got booleans")
                if x.ndim < 2 or len(x) == 1:  # one row for all
                    x = x.reshape(1, -1).expand(samples, -1)
                    self.entries[name] = x
                x = x if self._axis(name) == 0 else x[0]  # some have several for a token
                self._by_token(name, x)
                steps = x.to("cpu", torch.float64).diff(dim=1)
                if bool(((steps > 0) & (steps != 1)).any()):
                    warnings.warn(
                        "position_ids have steps other than 1: without a mask and a cache, "
                        "transformers takes what follows one for another text, which sees nothing "
                        "before it",
                        stacklevel=5,
                    )
                found[name] = F.pad(steps <= 0, (1, 0)).cumsum(dim=1)
            elif name.startswith("cu_seq"):
                found[name] = self._by_length(name, x)
        return found

    def _by_token(self, name: str, x: Any) -> None:
        """Refuse an entry that has no number for each token."""
        dense(name, x)
        wanted = f"{name} must have the shape of ids, {tuple(self.ids.shape)}"
        require(x.shape == self.ids.shape, f"{wanted}; got {tuple(x.shape)}")

    def _by_length(self, name: str, x: Any) -> Tensor:
        """Number the texts of which cumulative lengths tell, (1, T)."""
        dense(name, x)
        ends = x.flatten().to("cpu").long()
        samples, length = self.ids.shape
        rises = bool((ends.diff() >= 0).all()) and len(ends) > 1
        require(
            samples == 1 and rises and int(ends[0]) == 0 and int(ends[-1]) == length,
            f"{name} must rise from 0 to the {length} tokens of one row of ids",
        )
        places = torch.arange(length, device="cpu")[None]
        return torch.bucketize(places, ends, right=True)

    # --- what is handed to the model

    def _axis(self, name: str) -> int | None:
        """Which axis of an entry counts the samples; None if none does."""
        x = self.entries[name]
        samples, length = self.ids.shape
        if isinstance(x, list | tuple):  # a name for each row, such as PEFT's adapters
            names = len(x) == samples and all(isinstance(name, str) for name in x)
            return 0 if names else None
        if not isinstance(x, Tensor) or x.ndim == 0:
            return None
        if name.startswith("encoder_"):  # of the encoder's own tokens, however many they are
            return 0 if len(x) == samples else None
        if x.shape[:2] != (samples, length) and x.shape[1:3] == (samples, length):
            return 1  # several position_ids for a token
        return 0 if len(x) == samples else None

    def keep(self, source: Source) -> None:
        """Keep the entries that the model's forward takes and that change its pass.

        Raises ValueError for one that says where texts stand, if the model does not take it.
        """
        doubtful = []
        for name in [*self.entries]:
            takes = source.takes(name)
            if takes is None and not self._says_where(name):
                doubtful.append(name)
            elif takes is False:
                where = self._says_where(name) and self.whole and name != "attention_mask"
                tells = (
                    f"takes no {name}, which tells of texts packed in a row or of other positions"
                )
                require(not where, f"{source.kind} {tells}: give each text a row of its own")
                del self.entries[name]
        for name in doubtful:
            different = self._different(name)
            batches: Iterable[Batch] = (self._batch([row]) for row in different)
            if len(different) > MOST_ROWS:  # then all rows, many at once
                batches = self.batches(source.tokens_a_batch)
            if not any(source.is_changed_by(name, b.ids, b.entries) for b in batches):
                del self.entries[name]
        for name, x in self.entries.items():
            of_rows = self._axis(name) is not None or self._says_where(name)
            of_none = f"{name} is of no one row of ids, and changes the pass"
            single = isinstance(x, str) or not hasattr(x, "__len__") or getattr(x, "ndim", 1) == 0
            alone = single or len(self.ids) == 1
            require(of_rows or alone, f"{of_none}: measure each row by itself")

    def _different(self, name: str) -> list[Row]:
        """Rows for which an entry holds different things."""
        if self._axis(name) is None:
            return self.rows[:1]
        different: dict[str, Row] = {}
        for row in self.rows:
            x = self._rows_of(name, row.number, 1)
            different.setdefault(str(x.tolist() if isinstance(x, Tensor) else x), row)
        return [*different.values()]

    def _rows_of(self, name: str, first: int, count: int) -> Any:
        """What an entry with an axis of samples holds for some rows in a row."""
        x = self.entries[name]
        if not isinstance(x, Tensor):
            return x[first : first + count]
        return x.narrow(self._axis(name) or 0, first, count)

    def _says_where(self, name: str) -> bool:
        return name in POSITIONS or name.startswith(LENGTHS)

    def batches(self, tokens: int, samples: int | None = None) -> Iterator[Batch]:
        """The forward passes. Texts of equal length run together, so that none needs padding.

        tokens: about so many in a pass. samples: so many texts in a pass instead.
        """
        alone: dict[int, list[Row]] = {}  # length -> the rows of one text
        for row in self.rows:
            if row.whole:
                yield self._batch([row])
            else:
                (text,) = row.texts
                alone.setdefault(text.stop - text.start, []).append(row)
        for length, rows in sorted(alone.items()):
            size = samples or max(1, tokens // length)
            for start in range(0, len(rows), size):
                yield self._batch(rows[start : start + size])

    def _batch(self, rows: list[Row]) -> Batch:
        """The pass of some rows of one text each, or of a single row that runs as it is."""
        places: list[int] = []
        for row in rows:
            places += range(row.first, row.first + len(row.texts))
        if rows[0].whole:
            (row,) = rows
            entries = {n: self._part(n, row.number, None) for n in self.entries}
            return Batch(self.ids[row.number][None], entries, row.texts, places)
        ids = torch.stack([self.ids[row.number, row.texts[0]] for row in rows])
        entries = {}
        for name in self.entries:
            if self._says_where(name):
                continue
            parts = [self._part(name, row.number, row.texts[0]) for row in rows]
            axis = self._axis(name)
            if axis is None:
                entries[name] = parts[0]
            elif isinstance(parts[0], Tensor):
                entries[name] = torch.cat(parts, dim=axis)
            else:
                entries[name] = [*chain.from_iterable(parts)]
        return Batch(ids, entries, None, places)

    def _part(self, name: str, index: int, text: slice | None) -> Any:
        """What an entry holds for a row, or for one text of it."""
        axis = self._axis(name)
        if axis is None:
            return self.entries[name]
        x = self._rows_of(name, index, 1)
        # The states of an encoder are of its own tokens, even if there are as many.
        of_tokens = isinstance(x, Tensor) and not name.startswith("encoder_")
        if text is None or not of_tokens or x.shape[axis + 1 : axis + 2] != self.ids.shape[1:]:
            return x
        return x.narrow(axis + 1, text.start, text.stop - text.start)


def check_entry(name: str) -> None:
    """Refuse an entry with which the ids are not the tokens that are measured."""
    require(
        not CACHE.search(name),
        f"{name} is for what a model keeps of other tokens, which would stand before the ids: "
        "leave it out, and give one text of all tokens as ids",
    )
    require(
        name != "inputs_embeds",
        "inputs_embeds take the place of ids, so that it is not known which tokens they are: leave "
        "them out, or give the maps of your own pass to su.report",
    )


def dense(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a dense tensor of finite, real numbers."""
    instance(name, value, Tensor)
    other = f"{name} must be a dense tensor, not a sparse or nested one, nor one on the meta device"
    require(value.layout == torch.strided and not (value.is_nested or value.is_meta), other)
    real = not value.is_complex() and bool(value.isfinite().all())
    require(real, f"{name} must hold real numbers, and none that is nan or infinite")
