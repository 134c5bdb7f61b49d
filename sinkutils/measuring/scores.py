"""HellaSwag and the sink (Appendix B.3, Fig. 10), scored by lm-eval: pip install -e '.[downstream]'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sinkutils.checks import require
from sinkutils.measuring.load import hub_reachable
from sinkutils.measuring.real import REAL_MODELS

TASK = "hellaswag"
METRICS = ("acc", "acc_norm")


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    task: str = TASK,
    *,
    limit: int | None = None,
    include_path: str | Path | None = None,
    bos: bool | None = None,
) -> dict[str, Any]:
    """Zero-shot accuracy and length-normalised accuracy in percent, with standard errors, of a causal LM.

    model, tokenizer: of transformers. limit: only so many questions (the paper: all).
    bos: whether the tokenizer's BOS stands before each question; None: as a model of REAL_MODELS was trained, else no.
        An answer without a question is scored after a BOS, or EOS where there is none, in any case.
    include_path: a folder with tasks of one's own in lm-eval's format, which are then the only ones known.

    Raises ImportError where lm-eval is not installed, ConnectionError where a task's questions are neither here nor on
    a hub that can be reached, ValueError for a model of another kind, a task that lm-eval does not know or one that
    reports neither metric.
    """
    try:
        from lm_eval import __version__ as version
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ImportError("downstream scores need lm-eval: pip install -e '.[downstream]'") from error
    require(isinstance(model, PreTrainedModel), f"scores are of models of transformers, got {type(model).__name__}")
    own = {} if include_path is None else {"include_path": str(include_path), "include_defaults": False}
    tasks = TaskManager(**own)
    if task not in tasks.all_tasks:
        raise ValueError(f"task must be one that lm-eval knows, such as {TASK!r}; got {task!r}")
    if bos is None:
        known = REAL_MODELS.get(str(getattr(model, "name_or_path", "")))
        bos = known is not None and known.bos
    if bos:
        require(tokenizer.bos_token_id is not None, "bos=True needs a tokenizer with a BOS token, and this has none")

    class Scorer(HFLM):
        """HFLM with a BOS before contexts only: the library also puts one before answers, or none."""

        def tok_encode(self, string: str, *_: Any, add_special_tokens: bool | None = None, **__: Any) -> list[int]:
            ids = tokenizer.encode(string, add_special_tokens=False)
            return [tokenizer.bos_token_id, *ids] if bos and add_special_tokens is not False else ids

    scorer = Scorer(pretrained=model.eval(), tokenizer=tokenizer, batch_size=8)
    try:
        with _offline_if(include_path is None and not hub_reachable()):
            output = simple_evaluate(scorer, tasks=[task], num_fewshot=0, limit=limit, task_manager=tasks)
    except OSError as error:
        why = "is not on this disk and the hub cannot be reached: connect, or give include_path"
        raise ConnectionError(f"task {task!r} {why}") from error
    results = output["results"][task]
    scores: dict[str, Any] = {"task": task, "lm_eval": version, "questions": output["n-samples"][task]["effective"]}
    scores["bos"] = bos
    for metric in METRICS:
        if f"{metric},none" in results:
            scores[metric] = round(100 * results[f"{metric},none"], 3)
            stderr = results[f"{metric}_stderr,none"]  # "N/A" of one question
            scores[f"{metric}_stderr"] = None if stderr == "N/A" else round(100 * float(stderr), 3)
    if not set(METRICS) & set(scores):
        raise ValueError(f"task {task!r} reports neither of {', '.join(METRICS)}: give a multiple-choice task")
    return scores


@contextmanager
def _offline_if(offline: bool) -> Iterator[None]:
    """While this is open, the hub's libraries look at their caches only, instead of retrying for a minute."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if offline:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
