"""A language model together with what is needed to give it inputs as in its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.checks import choice
from sinkutils.data.corpus import Corpus
from sinkutils.data.packing import fix_position
from sinkutils.data.probes import probe
from sinkutils.data.tokenizer import bos_id, special_ids
from sinkutils.measuring.load import load_lm
from sinkutils.measuring.measure import measure
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import Report
from sinkutils.study.record import read_record
from sinkutils.study.store import Runs

X_FIX, TEXT, BOS = "x_fix", "text", "BOS"  # what stands first


@dataclass(frozen=True)
class Subject:
    """A language model with what is needed to give it inputs as in its training."""

    name: str
    model: nn.Module
    tokenizer: Any
    fixed_position: int | None = None  # where training put x_fix (Table 10 right)
    corpus: str | Corpus = "docstrings"  # of natural text
    length: int = 64  # T at which training measured it
    bos_in_training: bool = False  # whether texts began with a BOS

    @property
    def firsts(self) -> tuple[str, ...]:
        """What can stand first in an input: x_fix of training, plain text, a BOS if any."""
        firsts = [TEXT]
        if self.fixed_position:
            firsts.insert(0, X_FIX)
        if adds_bos(self.tokenizer) is not None:
            firsts.append(BOS)
        return tuple(firsts)

    @property
    def shown(self) -> tuple[str, ...]:
        """What stands first in the inputs whose numbers are shown, without being asked.

        A model that was trained with a BOS is shown without it, as the paper has it, and with it.
        """
        if self.bos_in_training and BOS in self.firsts:
            return (self.firsts[0], BOS)
        return self.firsts[:1]

    def inputs(
        self, kind: str | None = None, *sizes: int, first: str | None = None, **options: Any
    ) -> Tensor:
        """A probe of Section 3.3 (n, length), by default with what training put first.

        sizes: n, length and seed; these and the options (texts) as `probes.probe` takes them. With
        x_fix, "repeat" is x_fix at every position, one sequence: Propositions 1-4 take all tokens
        to be equal, and another token repeated would have no sink for want of x_fix, whatever
        repetition does. Raises ValueError for a `first` that the model does not have.
        """
        first = first or self.firsts[0]
        bos = first == BOS
        if not bos:  # of which `probe` says that the tokenizer has none
            choice("first", first, self.firsts)
        ids = probe(kind, self.tokenizer, *sizes, bos=bos, corpus=self.corpus, **options)
        if first != X_FIX:
            return ids
        fix_id = special_ids(self.tokenizer, self.name)["fix_id"]
        if kind == "repeat":
            return torch.full_like(ids[:1], fix_id)
        return fix_position(ids, self.fixed_position, fix_id)

    def measure(self, ids: Tensor, **options: Any) -> Report:
        """`measure.measure`, under this name."""
        return measure(self.model, ids, name=self.name, **options)


def adds_bos(tokenizer: Any) -> bool | None:
    """Whether a tokenizer puts a BOS in front of a text; None: it has none."""
    try:
        bos = bos_id(tokenizer)
    except ValueError:
        return None
    encoded = tokenizer.encode("a")
    ids = getattr(encoded, "ids", encoded)  # of tokenizers, or of transformers
    return bool(ids[0] == bos)


def subject(name: str, device: str | None = None, **options: Any) -> Subject:
    """Any model that `load_lm` takes; of a record also its T and where a token was fixed.

    options: of `load_lm`.
    """
    model, tokenizer = load_lm(name, device, **options)
    folder = Runs(options.get("runs")).named(name)
    if folder is None:
        # Whether texts began with a BOS is known of some, else as the tokenizer has it.
        known = REAL_MODELS.get(name.lower())
        bos = known.bos if known else bool(adds_bos(tokenizer))
        return Subject(Path(name).name, model, tokenizer, bos_in_training=bos)
    run = read_record(folder).config
    return Subject(
        run["experiment"],
        model,
        tokenizer,
        fixed_position=run["data"]["fixed_position"],
        length=run["train"]["eval_length"],
    )
