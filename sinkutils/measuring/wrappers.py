"""Models as they are handed over: what is around one of transformers, and whether it does more."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkutils.checks import require
from sinkutils.measuring import refusals
from sinkutils.measuring.families import INTERFACE, home_of


def handed_over(model: Any) -> tuple[nn.Module, Any]:
    """The module to run, and the model of transformers in it.

    The former is as far inside as nothing is passed by: `base_model` (which saves the logits),
    unless something was done to what is around it, such as another forward or a hook.
    """
    # torch.compile(model)._orig_mod and PeftModel.get_base_model(), as often as they are nested.
    around = [model]  # wrappers of torch.compile and PEFT, outermost first, and the model in them
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
    """What a wrapper of torch.compile or PEFT is around. Raises ValueError for learned prompts."""
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
    """Whether a call of a module does more than run its library's code on what is inside.

    FSDP2 gathers weights only for passes through its root.
    """
    if refusals.is_sharded(module) or module._forward_hooks or module._forward_pre_hooks:
        return True
    # A forward of the instance comes before the class's; decorators keep what they wrap.
    forward = vars(module).get("forward", type(module).forward)
    while forward is not None:
        if not home_of(forward).startswith(("transformers.", "peft.", "torch.")):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
