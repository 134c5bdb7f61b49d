"""Supervised fine-tuning of pre-trained models (Appendix D, Figure 30), as a kind of run.

Unlike the recipe that the paper names, only the answers carry loss, and a conversation is cut or
padded to C tokens. A fixed first token stays x_1, before the conversation.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from sinkutils.data.corpus import Corpus
from sinkutils.data.instructions import IGNORED, Layout, Pairs, conversations, make_pairs
from sinkutils.data.tokenizer import open_tokenizer, special_ids
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.record import WEIGHTS, Record
from sinkutils.training.group import ALONE, Group
from sinkutils.training.run import CrossEntropy, Run


def answer_loss(model: Any, chunks: Tensor, unscored: tuple[int, ...] = ()) -> Tensor:
    """Mean cross-entropy of the answers' tokens in nats; chunks: (B, 2, C + 1), tokens and targets.

    unscored is what `Run` hands to a loss: no answer starts there. Of several micro batches of a
    step the means count alike.
    """
    inputs = chunks[:, 0, :-1]  # (B, C)
    targets = chunks[:, 1, 1:]
    answers = targets != IGNORED
    logits = model(inputs, kept=answers)  # (N, V), of the answers alone
    return CrossEntropy.apply(logits, targets[answers])


class FinetuneRun(Run):
    """A run from the weights and with the tokenizer of a record, `start`, on conversations."""

    config: FinetuneConfig
    loss = staticmethod(answer_loss)
    each_step = True
    fixed_shapes = False  # as many logits as the answers have tokens

    def __init__(
        self,
        config: FinetuneConfig,
        corpus: Corpus,
        device: torch.device,
        start: Record,
        group: Group = ALONE,
    ) -> None:
        self.start = start  # which `first_model` and `batches` read
        super().__init__(config, corpus, device, group)

    @staticmethod
    def weight(part: Tensor) -> int:
        """The number of the answers' tokens."""
        answers = part[:, 1, 1:] != IGNORED
        return int(answers.sum())

    def first_model(self) -> TransformerLM:
        """The model of the record it starts from, and its tokenizer: not always the corpus's."""
        self.tokenizer = open_tokenizer(self.start.folder / "tokenizer.json")
        model = TransformerLM(self.config.model)
        model.load_state_dict(self.start.load_weights())
        return model

    def batches(self) -> tuple[Pairs, Pairs]:
        """The conversations after the first few, and these, which are held out."""
        config = self.config
        special = special_ids(self.tokenizer, self.start.folder.name)
        first = []
        if config.data.fixed_position:
            first = [special["fix_id"]]
        layout = Layout(self.tokenizer, first, special["eos_id"], config.model.context_length)
        # The held-out ones come first, so that more pairs leave them as they are.
        counts = (config.train.valid_chunks, config.pairs)
        name = config.instructions
        held_out, pairs = self.group.in_turn(
            lambda: make_pairs(conversations(name), layout, counts, name)
        )
        weights = self.start.digests[WEIGHTS]
        self.more = {"pairs_sha256": pairs.fingerprint, "start_weights_sha256": weights}
        # A checkpoint is of this run only if it began with all of these.
        digests = self.corpus.fingerprint + pairs.fingerprint + held_out.fingerprint + weights
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()
        return pairs, held_out
