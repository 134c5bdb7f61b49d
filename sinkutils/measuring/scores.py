"""HellaSwag beside the sink (Appendix B.3, Fig. 10), scored by lm-eval: pip install -e '.[downstream]'."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from sinkutils.data.probes import bos_id, encode
from sinkutils.measuring.families import context_length
from sinkutils.model.decoder import TransformerLM

TASK = "hellaswag"
METRICS = ("acc", "acc_norm")


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    task: str = TASK,
    *,
    limit: int | None = None,
    include_path: str | Path | None = None,
    bos: bool = False,
) -> dict[str, Any]:
    """Zero-shot accuracy and length-normalised accuracy in percent, with standard errors, of a causal LM.

    model: of transformers, or our own `TransformerLM`. limit: only so many questions (the paper: all).
    bos: whether the tokenizer's BOS stands before each question, as Gemma's training has it.
    include_path: a folder with tasks of one's own in lm-eval's format, which are then the only ones known.

    Raises ImportError where lm-eval is not installed, ValueError for a task that it does not know or one that
    reports neither metric.
    """
    try:
        from lm_eval import __version__ as version
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError("downstream scores need lm-eval: pip install -e '.[downstream]'") from error
    own = {} if include_path is None else {"include_path": str(include_path), "include_defaults": False}
    tasks = TaskManager(**own)
    if task not in tasks.all_tasks:
        raise ValueError(f"task must be one that lm-eval knows, such as {TASK!r}; got {task!r}")
    scorer = _scorer_class()(model, tokenizer, [bos_id(tokenizer)] if bos else [])
    output = simple_evaluate(scorer, tasks=[task], num_fewshot=0, limit=limit, task_manager=tasks)
    results = output["results"][task]
    scores: dict[str, Any] = {"task": task, "lm_eval": version, "questions": output["n-samples"][task]["effective"]}
    for metric in METRICS:
        if f"{metric},none" in results:
            scores[metric] = round(100 * results[f"{metric},none"], 3)
            scores[f"{metric}_stderr"] = round(100 * float(results[f"{metric}_stderr,none"]), 3)
    if not set(METRICS) & set(scores):
        raise ValueError(f"task {task!r} reports neither of {', '.join(METRICS)}: give a multiple-choice task")
    return scores


@lru_cache
def _scorer_class() -> type:
    """lm-eval's interface to a causal LM, made on first use, because its base is in the optional package."""
    from lm_eval.api.model import TemplateLM

    class Scorer(TemplateLM):
        def __init__(self, model: nn.Module, tokenizer: Any, first: list[int]) -> None:
            super().__init__()
            self.model, self.tokenizer, self.first = model.eval(), tokenizer, first
            self.own, self.context_length = isinstance(model, TransformerLM), context_length(model)

        @property
        def eot_token_id(self) -> int:
            own = isinstance(self.tokenizer, Tokenizer)
            return int(self.tokenizer.token_to_id("<eos>") if own else self.tokenizer.eos_token_id)

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return self.first + encode(self.tokenizer, string)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            answers = []
            for _, choices in groupby(requests, key=lambda request: request[1]):
                answers += self._score([choice[1:] for choice in choices])
            return answers

        def _score(self, choices: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
            """The choices of one question in one batch, padded behind their end, which a causal LM does not see."""
            device, most = next(self.model.parameters()).device, self.context_length + 1
            rows = [torch.tensor([*context, *choice], device=device)[-most:] for context, choice in choices]
            inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
            # A long continuation loses its beginning.
            starts = [max(0, len(row) - 1 - len(choice[1])) for row, choice in zip(rows, choices, strict=True)]
            output = self.model(inputs, **({} if self.own else {"logits_to_keep": inputs.shape[1] - min(starts)}))
            logits: torch.Tensor = getattr(output, "logits", output)
            skipped = inputs.shape[1] - logits.shape[1]  # positions whose logits were not computed
            answers = []
            for row, start, predicted in zip(rows, starts, logits, strict=True):
                log_p = predicted[start - skipped : len(row) - 1 - skipped].float().log_softmax(dim=-1)
                wanted = row[start + 1 :].to(log_p.device)
                greedy = bool((log_p.argmax(dim=-1) == wanted).all())
                answers.append((float(log_p.gather(1, wanted[:, None]).sum()), greedy))
            return answers

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            raise NotImplementedError("only multiple-choice tasks are scored here")

        generate_until = loglikelihood_rolling

    return Scorer
