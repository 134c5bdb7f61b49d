"""What a user hands over, and the reasons why it cannot be measured.

`handed_over` finds the transformers model inside its wrappers (torch.compile, PEFT), and what to
call. Each check raises a ValueError whose message takes one line.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from sinkutils.checks import require
from sinkutils.measuring.families import INTERFACE, PREFIX, REFUSED, Call, home_of

LATER = "sees later tokens: it is no causal LM (encoder-only?)"
SILENT = (
    "did not show its weights: was its forward replaced? Measure the model as it was loaded; "
    f"{INTERFACE}"
)
TWICE = (
    "ran more than once in a pass: of a module in several places, give each place a copy "
    "(copy.deepcopy)"
)
REPLACED = (
    "replaces its attention modules while it runs: call it once on ids of this length, and measure "
    "it then"
)
BLOCK_SPARSE = (
    "attends to random blocks of keys, without weights over all of them, and to all keys only once "
    "model.base_model.set_attention_type('original_full') was called"
)
TENSOR_PARALLEL = "tensor parallelism: a process has only a part of each layer; load it whole"


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
    check_kind(inner)
    cut = cut_by(inner)
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
    if is_sharded(module) or module._forward_hooks or module._forward_pre_hooks:
        return True
    # A forward that is set on the instance overrides the class's. A decorated function keeps the
    # original one in `__wrapped__`.
    forward = vars(module).get("forward", type(module).forward)
    while forward is not None:
        if not home_of(forward).startswith(("transformers.", "peft.", "torch.")):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def check_kind(model: Any) -> None:
    """Refuse a model that is no causal LM, or whose family has no attention that alpha measures."""
    kind = type(model).__name__
    config = model.config
    reason = REFUSED.get(config.model_type)
    require(reason is None, f"{kind} cannot be measured: {reason}")
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is, or is a part of, an encoder-decoder model, and no causal LM")
    if getattr(model.base_model, "attention_type", None) == "block_sparse":  # BigBird
        raise ValueError(f"{kind} {BLOCK_SPARSE}")
    if config.model_type in PREFIX:
        warnings.warn(
            f"{kind} is measured as a causal LM, although its own prompts see themselves whole",
            stacklevel=5,
        )


def cut_by(model: nn.Module) -> str | None:
    """How a model is split over processes, if it is split so that it cannot be measured; else None.

    FSDP2 is no obstacle: it gathers the weights of a block when the block runs, provided that all
    processes run it.
    """
    processes = getattr(model, "tp_size", None) or 1
    if processes > 1:  # split by transformers' own tensor-parallel plan
        return TENSOR_PARALLEL
    if has_class(model, "FullyShardedDataParallel"):
        return "FullyShardedDataParallel, whose weights lie in one piece: use fully_shard (FSDP2)"
    sharded = is_sharded(model)
    for parameter in model.parameters():
        # ZeRO-3 marks each parameter, and empties it between passes.
        if hasattr(parameter, "ds_id") or parameter.numel() == 0:
            return "DeepSpeed's ZeRO-3: parameters are elsewhere between passes; load it whole"
        if hasattr(parameter, "placements") and not sharded:  # a DTensor
            if any(placement.is_shard() for placement in parameter.placements):
                return TENSOR_PARALLEL
    return None


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards a model. If so, every process has to take part in its forward passes."""
    return has_class(model, "FSDPModule")


def has_class(model: nn.Module, name: str) -> bool:
    """Whether one of a model's modules is an instance of a class with this name."""
    for module in model.modules():
        if name in [cls.__name__ for cls in type(module).__mro__]:
            return True
    return False


def check_heads(model: Any, heads: int) -> None:
    """Refuse an attention module that computes only some of its heads in this process.

    heads: the number of heads in the queries that it computes.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    # Tensor parallelism leaves a process some of the heads, and no attribute of the module says so.
    config = model.config.get_text_config()
    whole = getattr(config, "num_attention_heads", heads)
    if isinstance(whole, int) and heads < whole and whole % heads == 0:
        raise ValueError(
            f"{type(model).__name__} computes {heads} of its {whole} heads in this process, by "
            f"{TENSOR_PARALLEL}"
        )


def check_positions(model: Any, table: Tensor, length: int) -> None:
    """Refuse ids that are longer than a learned table of positions.

    A look-up beyond the table on a GPU would leave the process unable to use the GPU. If positions
    are computed (rotary, for instance), longer ids than in training are only a warning.
    table: the token embeddings. length: of the longest row of ids.
    """
    config = model.config.get_text_config()
    chunk = getattr(config, "attention_chunk_size", None) or length
    require(
        length <= chunk,
        f"{type(model).__name__} attends within chunks of {chunk} tokens: ids have {length}",
    )
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or length <= limit:
        return
    # A table of positions is an embedding other than that of tokens, with as many rows as the
    # limit. OPT's has two more.
    for module in model.base_model.modules():
        looked_up = isinstance(module, nn.Embedding) and module.weight is not table
        if looked_up and limit <= module.num_embeddings <= limit + 2:
            raise ValueError(
                f"ids have {length} positions, and the model has learned {limit}: give fewer"
            )
    warnings.warn(
        f"ids have {length} positions, and the model was made for {limit} "
        "(max_position_embeddings): beyond them it was not trained, and its numbers say so",
        stacklevel=5,
    )


def check_call(call: Call, name: str, kind: str) -> None:
    """Refuse a call whose attention is not causal, or whose keys are chosen outside the mask.

    name: of the attention function that the model asks for. kind: the class name of the model.
    """
    module = call.module
    causal = call.kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # A single query has no later keys, so that causality does not matter.
    if call.mask is None and not causal and call.q.shape[2] > 1:
        raise ValueError(f"{type(module).__name__} {LATER}")
    # Sparse attention chooses the keys of each query. For "eager" and "sdpa" it writes its choice
    # into the mask, which we read. The kernels of other functions get it as an argument.
    keys = call.kwargs.get("indices")
    blocks = call.kwargs.get("block_indices")
    chosen = keys is not None or blocks is not None
    if chosen and name not in ("eager", "sdpa"):
        raise ValueError(
            f"{kind} chooses keys: measure it after model.set_attn_implementation('eager')"
        )
