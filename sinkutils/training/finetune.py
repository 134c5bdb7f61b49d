"""Supervised fine-tuning of pre-trained models (Appendix D, Figure 30), as a kind of run.

Unlike the recipe that the paper names, only the answers carry loss, and a conversation is cut or
padded to C tokens. A fixed first token stays x_1, before the conversation.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sinkutils.data.corpus import Corpus
from sinkutils.data.instructions import IGNORED, Layout, Pairs, conversations, make_pairs
from sinkutils.data.tokenizer import special_ids
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.record import WEIGHTS, Record
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
        self, config: FinetuneConfig, corpus: Corpus, device: torch.device, start: Record
    ) -> None:
        model = TransformerLM(config.model)
        model.load_state_dict(start.load_weights())
        tokenizer = start.tokenizer  # not always the corpus's
        held_out, pairs = pairs_of(config, tokenizer, start.folder.name)
        batches = (pairs, held_out)
        super().__init__(config, corpus, device, model=model, tokenizer=tokenizer, batches=batches)
        weights = start.digests[WEIGHTS]
        self.more = {"pairs_sha256": pairs.fingerprint, "start_weights_sha256": weights}
        # A checkpoint is of this run only if it began with all of these.
        digests = corpus.fingerprint + pairs.fingerprint + held_out.fingerprint + weights
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()

    @staticmethod
    def weight(part: Tensor) -> int:
        """The number of the answers' tokens."""
        answers = part[:, 1, 1:] != IGNORED
        return int(answers.sum())


def pairs_of(config: FinetuneConfig, tokenizer: Tokenizer, name: str) -> list[Pairs]:
    """The conversations that are held out, and those that a run trains on.

    name: of the tokenizer, for messages.
    """
    special = special_ids(tokenizer, name)
    first = []
    if config.data.fixed_position:
        first = [special["fix_id"]]
    layout = Layout(tokenizer, first, special["eos_id"], config.model.context_length)
    # The held-out ones come first, so that more pairs leave them as they are.
    counts = (config.train.valid_chunks, config.pairs)
    return make_pairs(conversations(config.instructions), layout, counts, config.instructions)
