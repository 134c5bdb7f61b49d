"""A language model, its tokenizer, and what is known about the inputs of its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.checks import choice
from sinkutils.measuring.load import load_lm
from sinkutils.measuring.measure import measure
from sinkutils.measuring.probes import probe
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import Report
from sinkutils.measuring.tokenizer import bos_id, special_ids
from sinkutils.study.corpus import Corpus
from sinkutils.study.record import read_record
from sinkutils.study.store import Runs
from sinkutils.study.task import fix_position

X_FIX, TEXT, BOS = "x_fix", "text", "BOS"  # what can stand first in an input


@dataclass(frozen=True)
class Subject:
    """A language model that can be measured on inputs like those of its training.

    Some models were trained with a fixed token x_fix at one position, or with a BOS.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    fixed_position: int | None = None  # the position at which training put x_fix (Table 10 right)
    corpus: str | Corpus = "docstrings"  # the source of natural text
    length: int = 64  # the T at which the model was measured during training
    bos_in_training: bool = False  # whether the training texts began with a BOS

    @property
    def firsts(self) -> tuple[str, ...]:
        """What can stand first in an input: x_fix if training had one, plain text, BOS if any."""
        firsts = [TEXT]
        if self.fixed_position:
            firsts.insert(0, X_FIX)
        if adds_bos(self.tokenizer) is not None:
            firsts.append(BOS)
        return tuple(firsts)

    @property
    def shown(self) -> tuple[str, ...]:
        """What stands first in the inputs that are measured by default.

        It is x_fix or plain text. A model that was trained with a BOS is measured in two ways:
        without it, as in the paper, and with it.
        """
        if self.bos_in_training and BOS in self.firsts:
            return (self.firsts[0], BOS)
        return self.firsts[:1]

    def inputs(
        self, kind: str | None = None, *sizes: int, first: str | None = None, **options: Any
    ) -> Tensor:
        """The token ids (n, length) of a probe of Section 3.3.

        kind, sizes (n, length and seed) and options (texts): as in `probes.probe`.
        first: one of `firsts`; None: what training put first.
        With x_fix, the probe "repeat" is a single sequence of x_fix at every position. Propositions
        1-4 assume that all tokens are equal. If another token was repeated, the sink would be
        missing for lack of x_fix, and nothing would be learned about repetition.
        Raises ValueError for a `first` that the model does not have.
        """
        first = first or self.firsts[0]
        bos = first == BOS
        if not bos:  # for a BOS, `probe` itself raises the error if the tokenizer has none
            choice("first", first, self.firsts)
        ids = probe(kind, self.tokenizer, *sizes, bos=bos, corpus=self.corpus, **options)
        if first != X_FIX:
            return ids
        fix_id = special_ids(self.tokenizer, self.name)["fix_id"]
        if kind == "repeat":
            return torch.full_like(ids[:1], fix_id)
        return fix_position(ids, self.fixed_position, fix_id)

    def measure(self, ids: Tensor, **options: Any) -> Report:
        """Measure the model on ids, as `measure` does. The report has the model's name."""
        return measure(self.model, ids, name=self.name, **options)


def adds_bos(tokenizer: Any) -> bool | None:
    """Whether a tokenizer puts a BOS in front of a text by itself. None: it has no BOS."""
    try:
        bos = bos_id(tokenizer)
    except ValueError:
        return None
    encoded = tokenizer.encode("a")
    ids = getattr(encoded, "ids", encoded)  # tokenizers returns an object, transformers a list
    return bool(ids[0] == bos)


def subject(name: str, device: str | None = None, **options: Any) -> Subject:
    """Load a model with all that a `Subject` has. A record also gives T and the fixed position.

    name, device, options: as in `load_lm`.
    """
    model, tokenizer = load_lm(name, device, **options)
    folder = Runs(options.get("runs")).named(name)
    if folder is None:
        # For some models we know whether training texts began with a BOS. For the others we assume
        # that they did if the tokenizer puts one.
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
