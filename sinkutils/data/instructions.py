"""Instruction data for fine-tuning (Appendix D): conversations as rows of tokens of which the answers carry loss.

A conversation is a list of messages {"role": system, user or assistant, "content": text}, as in UltraChat. The embedded
ones ask what a class, function or method of an installed package does; its docstring's first paragraph is the answer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm.auto import tqdm

from sinkutils.checks import require
from sinkutils.data import embedded, external
from sinkutils.data.packing import Batches
from sinkutils.data.tokenizer import encode

Conversation = list[dict[str, str]]
ULTRACHAT = ("HuggingFaceH4/ultrachat_200k", "train_sft")  # the paper's data set, and the split for fine-tuning
SOURCES = ("docstrings", "ultrachat", "path:<file.jsonl>")
IGNORED = -100  # a target without loss
TEMPLATES = {"system": "{}\n", "user": "Q: {}\n", "assistant": "A:"}  # an answer and EOS follow
QUESTIONS = {"class": "What is the class {}?", "function": "What does {} do?", "method": "What does {} do?"}
MIN_WORDS = 3  # of an answer


class Pairs(Batches):
    """Conversations as rows (2, C + 1): the tokens, and the same where an answer's token is to be predicted."""

    def __init__(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        self.rows, self.length = rows, len(rows)
        self.tokens = rows[:, 0][np.arange(rows.shape[2]) < lengths[:, None]]

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by index, (n, 2, C + 1) int64."""
        return torch.from_numpy(self.rows[indices].astype(np.int64))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows."""
        return hashlib.sha256(np.ascontiguousarray(self.rows).tobytes()).hexdigest()


@dataclass(frozen=True)
class Layout:
    """How a conversation becomes a row: with which tokenizer, after which tokens, how long."""

    tokenizer: Tokenizer
    first: tuple[int, ...]  # ids before the conversation: x_fix where the model was trained with one
    eos_id: int  # ends an answer, and pads
    context_length: int  # C


def conversations(name: str, progress: bool = True) -> Iterator[Conversation]:
    """The conversations of a source, one of SOURCES.

    Raises ValueError for an unknown name, FileNotFoundError for a file that is not there, ConnectionError where the
    hub cannot be reached.
    """
    if name == "docstrings":
        return (pair for source in embedded.sources(progress) for pair in conversations_of(source))
    if name == "ultrachat":
        return external.conversations(*ULTRACHAT)
    kind, _, file = name.partition(":")
    if kind == "path" and file:
        return external.conversations("json", data_files=str(Path(file).expanduser()))
    raise ValueError(f"unknown instructions {name!r}; there are: {', '.join(SOURCES)}")


def conversations_of(source: str) -> Iterator[Conversation]:
    """The questions and answers that a Python source gives."""
    for kind, name, docstring in embedded.definitions_of(source):
        words = docstring.split("\n\n")[0].split()
        if len(words) >= MIN_WORDS:
            question, answer = QUESTIONS[kind].format(name), " ".join(words)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode_conversation(messages: Conversation, layout: Layout) -> tuple[list[int], list[int]] | None:
    """Tokens and targets of a conversation, each at most C + 1 long; None where no token of an answer is within C.

    The targets are the tokens of the answers and the EOS after each, IGNORED elsewhere; they stand in the tokens' own
    places, so that the target at i is predicted from the tokens before i.
    """
    ids, targets = list(layout.first), [IGNORED] * len(layout.first)
    for message in messages:
        role, content = message["role"], message["content"].strip()
        prompt = encode(layout.tokenizer, TEMPLATES[role].format(content))
        answer = [*encode(layout.tokenizer, f" {content}"), layout.eos_id] if role == "assistant" else []
        ids += prompt + answer
        targets += [IGNORED] * len(prompt) + answer
    end = layout.context_length + 1
    if set(targets[:end]) == {IGNORED}:
        return None
    return ids[:end], targets[:end]


def make_pairs(
    source: Iterator[Conversation], layout: Layout, counts: Sequence[int], name: str, progress: bool = True
) -> list[Pairs]:
    """The first conversations that fit, each answer once, as one `Pairs` for each of `counts`, in order.

    Raises ValueError, naming the source, where there are fewer than all of `counts`.
    """
    needed = sum(counts)
    rows = np.empty((needed, 2, layout.context_length + 1), dtype=np.int32)
    rows[:, 0], rows[:, 1] = layout.eos_id, IGNORED
    lengths: dict[str, int] = {}  # of each row, by its answers
    with tqdm(total=needed, desc=f"instructions from {name}", unit="pair", disable=not progress, leave=False) as bar:
        for messages in source:
            answers = " ".join(message["content"] for message in messages if message["role"] == "assistant")
            encoded = None if answers in lengths else encode_conversation(messages, layout)
            if encoded is not None:
                length = len(encoded[0])
                rows[len(lengths), :, :length] = encoded
                lengths[answers] = length
                bar.update()
            if len(lengths) == needed:
                break
    within = f"with different answers that begin within C = {layout.context_length} tokens"
    few = f"instructions {name!r} have {len(lengths)} conversations {within}, and {needed} are needed"
    require(len(lengths) == needed, f"{few}: give more, or ask for fewer pairs")
    edges, sizes = np.cumsum([0, *counts]), np.array([*lengths.values()])
    return [Pairs(rows[a:b], sizes[a:b]) for a, b in itertools.pairwise(edges)]
