"""HellaSwag beside the sink (Appendix B.3, Fig. 10), scored by lm-eval: pip install -e '.[downstream]'."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from sinkutils.data.probes import encode
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
) -> dict[str, Any]:
    """Zero-shot accuracy and length-normalised accuracy in percent, with standard errors, of a causal LM.

    model: of transformers, or our own `TransformerLM`. limit: only so many questions (the paper: all).
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
    scorer = _scorer_class()(model, tokenizer)
    output = simple_evaluate(scorer, tasks=[task], num_fewshot=0, limit=limit, task_manager=tasks)
    found = output["results"][task]
    scores: dict[str, Any] = {"task": task, "lm_eval": version, "questions": output["n-samples"][task]["effective"]}
    for metric in METRICS:
        if f"{metric},none" in found:
            scores[metric] = round(100 * found[f"{metric},none"], 3)
            scores[f"{metric}_stderr"] = round(100 * float(found[f"{metric}_stderr,none"]), 3)
    if not set(METRICS) & set(scores):
        raise ValueError(f"task {task!r} reports neither of {', '.join(METRICS)}: give a multiple-choice task")
    return scores


@lru_cache
def _scorer_class() -> type:
    """lm-eval's interface to a causal LM: log-likelihoods of continuations, one at a time. It serves our models and
    those of transformers. A class made on first use, because its base is in the optional package.
    """
    from lm_eval.api.model import TemplateLM

    class Scorer(TemplateLM):
        def __init__(self, model: nn.Module, tokenizer: Any) -> None:
            super().__init__()
            self.model, self.tokenizer = model.eval(), tokenizer
            shape: Any = model.config
            own = isinstance(model, TransformerLM)
            self.context_length: int = shape.context_length if own else shape.max_position_embeddings

        @property
        def eot_token_id(self) -> int:
            own = isinstance(self.tokenizer, Tokenizer)
            return int(self.tokenizer.token_to_id("<eos>") if own else self.tokenizer.eos_token_id)

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return encode(self.tokenizer, string)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            device, answers = next(self.model.parameters()).device, []
            for _texts, context, continuation in requests:
                ids = torch.tensor([*context, *continuation], device=device)[-(self.context_length + 1) :]
                scored = min(len(continuation), len(ids) - 1)  # a long continuation loses its beginning
                output = self.model(ids[None, :-1])
                logits: torch.Tensor = getattr(output, "logits", output)
                log_p, wanted = logits[0, -scored:].float().log_softmax(dim=-1), ids[-scored:].to(logits.device)
                greedy = bool((log_p.argmax(dim=-1) == wanted).all())
                answers.append((float(log_p.gather(1, wanted[:, None]).sum()), greedy))
            return answers

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            raise NotImplementedError("only multiple-choice tasks are scored here")

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            raise NotImplementedError("only multiple-choice tasks are scored here")

    return Scorer
