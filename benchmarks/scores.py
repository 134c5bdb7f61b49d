"""HellaSwag and the sink (Appendix B.3, Fig. 10): a task of lm-eval on local files (pip install -e '.[downstream]')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

METRICS = ("acc", "acc_norm")


def evaluate(
    model: nn.Module, tokenizer: Any, task: str, folder: Path | str, bos: bool
) -> dict[str, Any]:
    """Zero-shot accuracy and length-normalised accuracy in percent, with standard errors, of a causal LM.

    model, tokenizer: of transformers. folder: with the task in lm-eval's format; no other is known then.
    bos: whether the tokenizer's BOS stands before each question. An answer without a question is scored after a BOS, or
        EOS where there is none, in any case.
    """
    from lm_eval import __version__ as version
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class Scorer(HFLM):
        """HFLM with a BOS before contexts only: the library also puts one before answers, or none."""

        def tok_encode(
            self, string: str, *_: Any, add_special_tokens: bool | None = None, **__: Any
        ) -> list[int]:
            ids = tokenizer.encode(string, add_special_tokens=False)
            return (
                [tokenizer.bos_token_id, *ids] if bos and add_special_tokens is not False else ids
            )

    scorer = Scorer(pretrained=model.eval(), tokenizer=tokenizer, batch_size=8)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    output = simple_evaluate(scorer, tasks=[task], num_fewshot=0, task_manager=tasks)
    results = output["results"][task]
    scores: dict[str, Any] = {
        "task": task,
        "lm_eval": version,
        "questions": output["n-samples"][task]["effective"],
    }
    for metric in METRICS:
        stderr = results[f"{metric}_stderr,none"]  # "N/A" of one question
        scores[metric] = round(100 * results[f"{metric},none"], 3)
        scores[f"{metric}_stderr"] = None if stderr == "N/A" else round(100 * float(stderr), 3)
    return scores
