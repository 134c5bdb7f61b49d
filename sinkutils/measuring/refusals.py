"""What a user hands over, and the reasons why it cannot be measured.

`handed_over` finds the transformers model inside its wrappers (torch.compile, PEFT), and what to
call. Each check raises a ValueError whose message takes one line.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.utils import find_labels

from sinkutils.checks import Refused, first_line, require
from sinkutils.measuring.batches import check_entry, dense
from sinkutils.measuring.families import INTERFACE, PREFIX, REFUSED, Call, home_of
from sinkutils.measuring.tally import ONE_AT_A_TIME, LeftAsFound

LATER = "sees later tokens: it is no causal LM (encoder-only?)"
SILENT = (
    "did not show its weights: was its forward replaced? Measure the model as it was loaded. If it "
    "computes 'eager' by itself, as GPT-2 with reorder_and_upcast_attn, set_attn_implementation("
    "'sdpa'); "
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
LIBRARIES = ("torch.", "transformers.", "peft.", "accelerate.")
TENSOR_PARALLEL = "tensor parallelism: a process has only a part of each layer; load it whole"


class Unreadable(ValueError):
    """The attention of a model was looked at, and cannot be read."""


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
    kind = type(inner).__name__
    if not isinstance(inner, PreTrainedModel):
        advice = ": give its .module" if hasattr(inner, "module") else ""
        raise Refused(
            f"model must be a TransformerLM or of transformers, out of any wrapper; got {kind}"
            f"{advice}: {INTERFACE}"
        )
    check_kind(inner)
    cut = cut_by(inner)
    require(cut is None, f"{kind} is cut over processes by {cut}")
    check_compiled(model)
    called = next((module for module in around if _does_more(module)), inner.base_model)
    return called, inner


def _inside(model: Any) -> Any:
    """The model inside a wrapper of torch.compile or PEFT; None if `model` is no wrapper.

    Raises ValueError for PEFT's learned prompts, which stand in front of the ids.
    """
    if hasattr(model, "_orig_mod"):
        return model._orig_mod
    if type(model).__name__ == "PeftMixedModel":
        return model.base_model.model
    if not hasattr(model, "get_base_model"):
        return None
    config = getattr(model, "active_peft_config", None)
    prompts = "model puts learned prompts before the ids, so that position 1 is none of them (PEFT)"
    off = "forward" in vars(model)  # set by `disable_adapter`
    require(off or not getattr(config, "is_prompt_learning", False), prompts)
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
        # PEFT switches some methods on in its own forward (activated LoRA).
        if not home_of(forward).startswith(("transformers.", "torch.")):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


class HandedOver(Exception):
    """Ends a forward pass, once it is known what the decoder is handed."""


def decoder_of(model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The decoder of an encoder-decoder model, and the batch that the model hands to it.

    batch: what the model's forward takes. The encoder runs, unless the batch holds its output, and
    the pass ends before the decoder. Any other model is returned as it is, with its batch.
    """
    two_parts = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    decoder = model.get_decoder() if two_parts else model
    if decoder is None or decoder is model:
        return model, batch
    kind = type(model).__name__
    part = f"{kind} has a decoder that is no model of transformers by itself"
    require(isinstance(decoder, PreTrainedModel), f"{part}: it cannot be measured")
    for name, x in batch.items():
        if x is None:
            continue
        if name in ("input_ids", "attention_mask", "decoder_input_ids", "labels"):
            dense(name, x)  # no list, as where return_tensors was left out
        elif name != "inputs_embeds":  # which the encoder may read
            check_entry(name)
    handed: dict[str, Any] = {}

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        handed.update(inspect.signature(decoder.forward).bind(*args, **kwargs).arguments)
        raise HandedOver

    def moved(x: Any) -> Any:
        return x.to(model.device) if isinstance(x, Tensor) else x

    state = LeftAsFound()
    with ONE_AT_A_TIME, state, state, suppress(HandedOver):
        state.evaluate(model)
        state.hook(decoder, note, before=True)
        try:
            getattr(model, "_orig_mod", model)(**tree_map(moved, dict(batch)))
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"{kind} does not run on this batch: {first_line(error)}") from error
    entries = {name: x for name, x in handed.items() if isinstance(x, Tensor)}
    entries.pop("cache_position", None)
    require("input_ids" in entries, f"{kind} hands its decoder no input_ids")
    return decoder, entries


class Arguments:
    """What the forward that runs takes beside the ids.

    outer: the module that is called. model: the causal LM inside it. base: the part of it without
    the unembedding. weights: whether to ask for attention weights.
    """

    def __init__(self, outer: nn.Module, model: Any, base: nn.Module, weights: bool) -> None:
        self.kind = type(model).__name__
        self.labels = find_labels(type(model))
        self.parameters = parameters_of(outer)
        kinds = {parameter.kind for parameter in self.parameters.values()}
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds  # keyword arguments of any name
        self.names = set(self.parameters)
        if self.takes_any:
            self.names |= _named_keywords(outer)
            if outer is not base:  # a wrapper passes them on
                self.names |= set(parameters_of(model)) | _named_keywords(model)
        # What every pass gets
        self.options: dict[str, Any] = {}
        if self.takes_any or "use_cache" in self.names:
            self.options["use_cache"] = False
        if weights and (self.takes_any or "output_attentions" in self.names):
            self.options["output_attentions"] = True
        if "logits_to_keep" in self.names:
            self.options["logits_to_keep"] = 1  # all logits would cost more than the blocks do

    def takes(self, name: str) -> bool | None:
        """Whether the forward takes an entry of this name.

        None: it would disappear in the forward's **kwargs, so one has to see what it does there.
        """
        # Labels change the loss alone, and the others what is returned beside the hidden states.
        beside = name == "logits_to_keep" or name.startswith(("output_", "return_"))
        if name in self.labels or beside:
            return False
        return name in self.names or (None if self.takes_any else False)

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse a forward that does not run on the ids and on what is given beside them."""
        if "input_ids" not in self.parameters and not self.takes_any:
            raise Refused(f"{self.kind} takes no input_ids, but {', '.join(self.parameters)}")
        try:
            inspect.Signature([*self.parameters.values()]).bind(input_ids=None, **given)
        except TypeError as error:
            raise Refused(
                f"{self.kind} does not run on ids alone, {error} of its forward: give that with "
                "input_ids in a mapping, or give the text decoder"
            ) from error


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward method, by name."""
    return inspect.signature(module.forward).parameters


def _named_keywords(module: nn.Module) -> set[str]:
    """The names that the annotation of a forward's **kwargs lists, as transformers' do."""
    names: set[str] = set()
    for parameter in parameters_of(module).values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            continue
        try:
            (keywords,) = get_args(get_type_hints(module.forward)[parameter.name])
        except (KeyError, NameError, TypeError, ValueError, AttributeError):
            continue  # it has no annotation, or one that lists no names
        names |= set(getattr(keywords, "__annotations__", {}))
    return names


def check_compiled(model: nn.Module) -> None:
    """Refuse hooks inside compiled code: whether they act there depends on which came first."""
    for path, module in model.named_modules():
        inside = getattr(module, "_orig_mod", None) or (module._compiled_call_impl and module)
        if not inside:
            continue
        for name, part in inside.named_modules():
            hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
            own = [hook for hook in hooks if not is_of_a_library(hook)]
            require(
                not own,
                f"{name or path or 'the model'} has a hook and is compiled: code that was compiled "
                "before a hook was added ignores it, and later code does not; remove the hook, or "
                "give the model before torch.compile (_orig_mod)",
            )


def is_of_a_library(hook: Any) -> bool:
    """Whether a hook is written in torch, transformers, PEFT or accelerate."""
    return home_of(inspect.unwrap(getattr(hook, "func", hook))).startswith(LIBRARIES)


def is_of_libraries(error: BaseException) -> bool:
    """Whether an error was raised by libraries' code, with no other below the first frame."""
    _, *below = traceback.walk_tb(error.__traceback__)
    homes = [str(frame.f_globals.get("__name__")) for frame, _ in below]
    known = [home.partition(".")[0] in sys.stdlib_module_names for home in homes]
    return all(x or home.startswith(LIBRARIES) for x, home in zip(known, homes, strict=True))


def check_length(kind: str, positions: int, length: int) -> None:
    """Refuse a pass over another number of positions than there are ids.

    kind: the class name of the model.
    """
    require(
        positions == length,
        f"{kind} computes {positions} positions for {length} ids, as where it puts memory tokens or "
        "embeddings in front of them or behind: which of the positions are the ids is not known",
    )


def check_kind(model: Any) -> None:
    """Refuse a model that is no causal LM, or whose family has no attention that alpha measures."""
    kind = type(model).__name__
    config = model.config
    reason = REFUSED.get(config.model_type)
    require(reason is None, f"{kind} cannot be measured: {reason}")
    if config.is_encoder_decoder and _has_encoder(model):
        raise Refused(
            f"{kind} is, or is the encoder of, an encoder-decoder model, and no causal LM: give "
            "su.measure a batch with decoder_input_ids or labels beside what the encoder reads; its "
            "decoder alone can be measured, too, model.get_decoder()"
        )
    if getattr(model.base_model, "attention_type", None) == "block_sparse":  # BigBird
        raise Refused(f"{kind} {BLOCK_SPARSE}")
    if config.model_type in PREFIX:
        warnings.warn(
            f"{kind} is measured as a causal LM, although its own prompts see themselves whole",
            stacklevel=5,
        )


def _has_encoder(model: Any) -> bool:
    """Whether a part of an encoder-decoder model is more than its decoder."""
    is_encoder = type(model).__name__.endswith("Encoder")
    has_one = any(name.endswith("encoder") for name, _ in model.named_modules())
    return is_encoder or has_one or getattr(model, "is_decoder", True) is False


def cut_by(model: nn.Module) -> str | None:
    """How a model is split over processes, if it is split so that it cannot be measured; else None.

    FSDP2 is no obstacle: it gathers the weights of a block when the block runs, provided that all
    processes run it.
    """
    if (getattr(model, "tp_size", None) or 1) > 1:  # by transformers' own tensor-parallel plan
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
    kinds = {type(module) for module in model.modules()}
    return any(cls.__name__ == name for kind in kinds for cls in kind.__mro__)


def check_heads(model: Any, heads: int) -> None:
    """Refuse an attention module that computes only some of its heads in this process.

    heads: the number of heads in the queries that it computes.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    # Tensor parallelism leaves a process some of the heads, and no attribute of the module says so.
    config = model.config.get_text_config()
    whole = getattr(config, "num_attention_heads", heads)
    part = isinstance(whole, int) and heads < whole and whole % heads == 0
    some = f"{type(model).__name__} computes {heads} of its {whole} heads in this process"
    require(not part, f"{some}, by {TENSOR_PARALLEL}")


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
        table_of_positions = looked_up and limit <= module.num_embeddings <= limit + 2
        learned = f"ids have {length} positions, and the model has learned {limit}: give fewer"
        require(not table_of_positions, learned)
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
        raise Refused(f"{type(module).__name__} {LATER}")
    # Sparse attention chooses the keys of each query. For "eager" and "sdpa" it writes its choice
    # into the mask, which we read. The kernels of other functions get it as an argument.
    chosen = [call.kwargs.get(argument) for argument in ("indices", "block_indices")]
    require(
        all(x is None for x in chosen) or name in ("eager", "sdpa"),
        f"{kind} chooses keys: measure it after model.set_attn_implementation('eager')",
    )
