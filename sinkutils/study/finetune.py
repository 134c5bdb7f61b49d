"""Supervised fine-tuning of pre-trained models (Appendix D, Figure 30), as a task of a run.

A conversation is a list of messages {"role": system, user or assistant, "content": text}, as in
UltraChat. In the embedded conversations, the question is what a class, function or method of an
installed package does, and the answer is the first paragraph of its docstring.

It differs from the recipe that the paper names: only the answers carry loss, and each conversation
is cut or padded to C tokens. If the model was trained with a fixed first token, that token comes
before the conversation.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from sinkutils.checks import Refused
from sinkutils.measuring.texts import docstring_matches, encode, special_ids
from sinkutils.model.decoder import TransformerLM
from sinkutils.study import sources
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.corpus import Corpus
from sinkutils.study.record import WEIGHTS, Record
from sinkutils.study.task import Batches, CrossEntropy, Task

Conversation = list[dict[str, str]]
# The paper's data set, and the split for fine-tuning.
ULTRACHAT = ("HuggingFaceH4/ultrachat_200k", "train_sft")
IGNORED = -100  # the target at positions that carry no loss
TEMPLATES = {"system": "{}\n", "user": "Q: {}\n", "assistant": "A:"}  # an answer and EOS follow
MIN_WORDS = 3  # the shortest answer
# The start of a class or function, with its indentation.
HEADER = re.compile(r"^([ \t]*)(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.MULTILINE)


def finetuning(config: FinetuneConfig, corpus: Corpus, start: Record) -> Task:
    """The task of a fine-tuning, which starts with the weights and the tokenizer of a record.

    corpus: the text for the sink metric.
    """
    model = TransformerLM(config.model)
    model.load_state_dict(start.load_weights())
    tokenizer = start.tokenizer  # it may differ from that of the corpus
    special = special_ids(tokenizer, start.folder.name)
    first = [special["fix_id"]] if config.data.fixed_position else []
    layout = Layout(tokenizer, first, special["eos_id"], config.model.context_length)
    # The conversations for validation come first, so that more pairs leave them as they are.
    counts = (config.train.valid_chunks, config.pairs)
    source = config.instructions
    held_out, pairs = make_pairs(conversations(source), layout, counts, source)
    weights = start.digests[WEIGHTS]
    # A checkpoint belongs to this run only if it has the same text, conversations and start.
    digests = corpus.fingerprint + pairs.fingerprint + held_out.fingerprint + weights
    return Task(
        model,
        tokenizer,
        pairs,
        held_out,
        fingerprint=hashlib.sha256(digests.encode()).hexdigest(),
        loss=answer_loss,
        weight=answer_tokens,
        each_step=True,
        fixed_shapes=False,  # the number of logits depends on the lengths of the answers
        more={"pairs_sha256": pairs.fingerprint, "start_weights_sha256": weights},
    )


def answer_loss(model: Any, chunks: Tensor, unscored: tuple[int, ...] = ()) -> Tensor:
    """The mean cross-entropy over the tokens of the answers, in nats.

    chunks: (B, 2, C + 1), tokens and targets. unscored: not used, but `Run` passes it to every
    loss. If a step has several micro batches, their means have equal weights.
    """
    inputs = chunks[:, 0, :-1]  # (B, C)
    targets = chunks[:, 1, 1:]
    answers = targets != IGNORED
    logits = model(inputs, kept=answers)  # (N, V), for the N tokens of the answers
    loss: Tensor = CrossEntropy.apply(logits, targets[answers])
    return loss


def answer_tokens(part: Tensor) -> int:
    """The number of tokens in the answers of rows (n, 2, C + 1)."""
    answers = part[:, 1, 1:] != IGNORED
    return int(answers.sum())


class Pairs(Batches):
    """Conversations as rows (n, 2, C + 1), which hold the tokens and the targets.

    The targets are the tokens again, but IGNORED wherever the token is not part of an answer.
    """

    def __init__(self, rows: np.ndarray, eos_id: int) -> None:
        self.rows = rows
        self.length = len(rows)
        ids = rows[:, 0]
        targets = rows[:, 1]
        padding = (ids == eos_id) & (targets == IGNORED)
        self.tokens = ids[~padding]

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by index, (n, 2, C + 1) int64."""
        return torch.from_numpy(self.rows[indices].astype(np.int64))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows."""
        return hashlib.sha256(self.rows.tobytes()).hexdigest()


@dataclass(frozen=True)
class Layout:
    """How a conversation is written as a row of tokens."""

    tokenizer: Tokenizer
    first: list[int]  # the ids before the conversation: x_fix if the model was trained with it
    eos_id: int  # ends each answer, and pads the row
    context_length: int  # C


def conversations(name: str) -> Iterator[Conversation]:
    """The conversations of a source: "docstrings", "ultrachat", or "path:<file.jsonl>".

    Raises ValueError for an unknown name, and for rows that do not have UltraChat's form. Raises
    ConnectionError if the file or the hub cannot be read.
    """
    kind, _, file = name.partition(":")
    if name == "docstrings":
        for source in sources.python():
            yield from conversations_of(source)
        return
    if name == "ultrachat":
        rows = sources.hub_rows(*ULTRACHAT)
    elif kind == "path" and file:
        rows = sources.hub_rows("json", data_files=os.path.expanduser(file))
    else:
        raise Refused(
            f"unknown instructions {name!r}; there are: docstrings, ultrachat, path:<file.jsonl>"
        )
    for row in rows:
        messages: Any = row.get("messages")
        if not _is_conversation(messages):
            raise Refused(
                f'instructions {name!r}: expected "messages", a list of {{"role": one of '
                f'{", ".join(TEMPLATES)}, "content": text}}, got {row!r:.100}'
            )
        yield messages


def _is_conversation(messages: Any) -> bool:
    try:
        texts = [message["content"] for message in messages if message["role"] in TEMPLATES]
    except (KeyError, TypeError):
        return False
    return 0 < len(texts) == len(messages) and all(isinstance(text, str) for text in texts)


def conversations_of(source: str) -> Iterator[Conversation]:
    """A question and an answer for each docstring of a class, function or method, in order.

    The question puts the class before a method's name. The docstrings are found by the same scan as
    in `docstrings_of`. A docstring is used only if it stands right after a header of which no line
    but the last ends with a colon.
    """
    headers = list(HEADER.finditer(source))
    for match in docstring_matches(source):
        place = bisect(headers, match.start(), key=re.Match.start)
        before = headers[:place]
        text = inspect.cleandoc(match.group()[3:-3])
        words = text.split("\n\n")[0].split()
        if not before or len(words) < MIN_WORDS:
            continue
        # From the header's first line to the docstring, only the header's own colon may end a line.
        header = before[-1]
        between = source[header.start() : match.start()]
        lines = between.rstrip(" \t\nrRuU").splitlines()
        with_colon = [line for line in lines if line.rstrip().endswith(":")]
        if len(with_colon) != 1 or not lines[-1].endswith(":"):
            continue
        yield [
            {"role": "user", "content": _question(before)},
            {"role": "assistant", "content": " ".join(words)},
        ]


def _question(headers: list[re.Match[str]]) -> str:
    """The question about the class or function that the last of these headers begins."""
    indent, kind, name = headers[-1].groups()
    if kind == "class":
        return f"What is the class {name}?"
    if indent:  # a method, or a function inside another
        for header in reversed(headers):
            if not header[1]:  # the class or function, without indentation, that contains it
                if header[2] == "class":
                    name = f"{header[3]}.{name}"
                break
    return f"What does {name} do?"


def encode_conversation(
    messages: Conversation, layout: Layout
) -> tuple[list[int], list[int]] | None:
    """The tokens and the targets of a conversation, each a list of at most C + 1 ids.

    The targets are the tokens of the answers, with the EOS after each, and IGNORED elsewhere. A
    target has the index of its token, so that target i is predicted from the tokens before i.
    Returns None if the conversation has to be cut before its first answer.
    """
    ids = [*layout.first]
    targets = [IGNORED] * len(layout.first)
    for message in messages:
        role = message["role"]
        content = message["content"].strip()
        prompt = encode(layout.tokenizer, TEMPLATES[role].format(content))
        answer = []
        if role == "assistant":
            answer = encode(layout.tokenizer, f" {content}")
            answer.append(layout.eos_id)
        ids += prompt + answer
        targets += [IGNORED] * len(prompt) + answer  # the prompt carries no loss
    # A conversation that is too long is cut.
    end = layout.context_length + 1
    if set(targets[:end]) == {IGNORED}:
        return None
    return ids[:end], targets[:end]


def make_pairs(
    source: Iterator[Conversation], layout: Layout, counts: Sequence[int], name: str
) -> list[Pairs]:
    """The first conversations that fit, divided in order into one `Pairs` for each of `counts`.

    A conversation whose answer has occurred before is skipped. Raises ValueError, which names the
    source, if there are fewer conversations than the counts add up to.
    """
    shape = (sum(counts), 2, layout.context_length + 1)
    rows = np.full(shape, IGNORED, dtype=np.int32)
    rows[:, 0] = layout.eos_id
    answers: set[str] = set()  # the answers so far, one for each row that is filled
    for messages in tqdm(
        source, desc=f"instructions from {name}", unit="conversation", leave=False
    ):
        filled = len(answers)
        if filled == len(rows):
            break
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        answer = " ".join(contents)
        if answer in answers:
            continue
        encoded = encode_conversation(messages, layout)
        if encoded is not None:
            ids, targets = encoded
            rows[filled, :, : len(ids)] = [ids, targets]  # EOS and IGNORED pad the row
            answers.add(answer)
    if len(answers) < len(rows):
        raise Refused(
            f"instructions {name!r} have {len(answers)} conversations with different answers that "
            f"begin within C = {layout.context_length} tokens, and {len(rows)} are needed: give "
            "more, or ask for fewer pairs"
        )
    parts = np.split(rows, np.cumsum(counts)[:-1])
    return [Pairs(part, layout.eos_id) for part in parts]
