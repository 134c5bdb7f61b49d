"""Finding the transformers model inside its wrappers (torch.compile, PEFT), and what to call."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkutils.checks import require
from sinkutils.measuring import refusals
from sinkutils.measuring.families import INTERFACE, home_of


def handed_over(model: Any) -> tuple[nn.Module, Any]:
    """The module that we run, and the transformers model inside.

    We would like to run `base_model`, which computes no logits. But if a module around it does more
    than its library's code, such as a hook or a forward of the user, we have to run the outermost
    such module.
    Raises ValueError if there is no transformers model inside, or it cannot be measured.
    """
    around = [model]  # the wrappers, outermost first, and the model inside them
    while inner := _inside(around[-1]):
        around.append(inner)
    inner = around[-1]
    if not isinstance(inner, PreTrainedModel):
        kind = type(inner).__name__
        advice = ": give its .module" if hasattr(inner, "module") else ""
        raise ValueError(
            f"model must be a TransformerLM or of transformers, out of any wrapper; got {kind}"
            f"{advice}: {INTERFACE}"
        )
    refusals.check_kind(inner)
    cut = refusals.cut_by(inner)
    require(cut is None, f"{type(inner).__name__} is cut over processes by {cut}")
    for module in around:
        if _does_more(module):
            return module, inner
    return inner.base_model, inner


def _inside(model: Any) -> Any:
    """The model inside a wrapper of torch.compile or PEFT; None if `model` is no wrapper.

    Raises ValueError for PEFT's learned prompts, which stand in front of the ids.
    """
    if hasattr(model, "_orig_mod"):
        return model._orig_mod
    if not hasattr(model, "get_base_model"):
        return None
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            "model puts learned prompts before the ids, so that position 1 is none of them (PEFT)"
        )
    return model.get_base_model()


def _does_more(module: nn.Module) -> bool:
    """Whether calling a module does more than run its library's code on the model inside.

    A hook or a forward of the user does more. So does FSDP2: it gathers weights only if the pass
    goes through its root module.
    """
    if refusals.is_sharded(module) or module._forward_hooks or module._forward_pre_hooks:
        return True
    # A forward that is set on the instance overrides the class's. A decorated function keeps the
    # original one in `__wrapped__`.
    forward = vars(module).get("forward", type(module).forward)
    while forward is not None:
        if not home_of(forward).startswith(("transformers.", "peft.", "torch.")):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
