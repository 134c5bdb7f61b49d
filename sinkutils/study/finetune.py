"""Supervised fine-tuning of pre-trained models (Appendix D, Figure 30), as a kind of run.

It differs from the recipe that the paper names: only the answers carry loss, and each conversation
is cut or padded to C tokens. If the model was trained with a fixed first token, that token comes
before the conversation.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sinkutils.measuring.tokenizer import special_ids
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.corpus import Corpus
from sinkutils.study.instructions import IGNORED, Layout, Pairs, conversations, make_pairs
from sinkutils.study.record import WEIGHTS, Record
from sinkutils.study.run import CrossEntropy, Run


def answer_loss(model: Any, chunks: Tensor, unscored: tuple[int, ...] = ()) -> Tensor:
    """The mean cross-entropy over the tokens of the answers, in nats.

    chunks: (B, 2, C + 1), tokens and targets. unscored: not used, but `Run` passes it to every
    loss. If a step has several micro batches, their means have equal weights.
    """
    inputs = chunks[:, 0, :-1]  # (B, C)
    targets = chunks[:, 1, 1:]
    answers = targets != IGNORED
    logits = model(inputs, kept=answers)  # (N, V), for the N tokens of the answers
    return CrossEntropy.apply(logits, targets[answers])


class FinetuneRun(Run):
    """A run on conversations, which starts with the weights and the tokenizer of a record."""

    config: FinetuneConfig
    loss = staticmethod(answer_loss)
    each_step = True
    fixed_shapes = False  # the number of logits depends on the lengths of the answers

    def __init__(
        self, config: FinetuneConfig, corpus: Corpus, device: torch.device, start: Record
    ) -> None:
        model = TransformerLM(config.model)
        model.load_state_dict(start.load_weights())
        tokenizer = start.tokenizer  # it may differ from that of the corpus
        held_out, pairs = pairs_of(config, tokenizer, start.folder.name)
        batches = (pairs, held_out)
        super().__init__(config, corpus, device, model=model, tokenizer=tokenizer, batches=batches)
        weights = start.digests[WEIGHTS]
        self.more = {"pairs_sha256": pairs.fingerprint, "start_weights_sha256": weights}
        # A checkpoint belongs to this run only if it has the same text, conversations and start.
        digests = corpus.fingerprint + pairs.fingerprint + held_out.fingerprint + weights
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()

    @staticmethod
    def weight(part: Tensor) -> int:
        """The number of tokens in the answers."""
        answers = part[:, 1, 1:] != IGNORED
        return int(answers.sum())


def pairs_of(config: FinetuneConfig, tokenizer: Tokenizer, name: str) -> list[Pairs]:
    """The conversations for validation, and those to train on.

    name: the name of the tokenizer, for error messages.
    """
    special = special_ids(tokenizer, name)
    first = []
    if config.data.fixed_position:
        first = [special["fix_id"]]
    layout = Layout(tokenizer, first, special["eos_id"], config.model.context_length)
    # Those for validation come first, so that they stay the same when a run has more pairs.
    counts = (config.train.valid_chunks, config.pairs)
    return make_pairs(conversations(config.instructions), layout, counts, config.instructions)
