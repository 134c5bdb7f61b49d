"""Reading the attention of models of transformers while they run.

Most attention modules of transformers look up their attention function by name, in
`AttentionInterface`. While a model is measured, we replace this look-up. The module then gets a
function of ours, which returns the module's own output and hands the attention to the current
`Pass` (module `passes`). To measure, a pass computes the attention in one of two ways:

- fused: a kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) for the chosen keys. A
  kernel is trusted in a module once its numbers match those of the exact way, on rows that see
  these keys.
- exact: the family's own eager function computes a chunk of queries at a time. Each chunk's weights
  are reduced to what the report needs, and then dropped.

Families that do not use the interface ("legacy" below) are measured by hooks, which read the
weights that their eager attention returns.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sinkutils.checks import require
from sinkutils.measuring import families, older, refusals
from sinkutils.measuring.families import Call, Function
from sinkutils.measuring.passes import CHECK_TOKENS, Checking, Comparing, Measuring, Pass
from sinkutils.measuring.refusals import handed_over
from sinkutils.measuring.tally import LeftAsFound

# The model that is being measured. Other threads may run the same patched classes in the meantime.
# A context variable is None in those threads, which a global variable would not be.
_current: ContextVar[Capture | None] = ContextVar("sinkutils_capture", default=None)
if older.NEEDED:
    AttentionInterface.get_interface = older.get_interface
_get_interface = AttentionInterface.get_interface
_get_mask = AttentionMaskInterface.__getitem__


def observe(model: nn.Module, doing: Pass, state: LeftAsFound) -> Capture:
    """Hand the attention of the model's forward passes to `doing`, until `state` ends.

    model: as the user gave it, possibly inside wrappers, and in eval mode. Its logits do not
    change. Forward passes of other threads, and of other models, are not affected.
    """
    watched = Capture(model, doing)
    # An interrupt (^C) can come between any two lines. So each step first notes how to undo the
    # change, and then makes it.
    state.steps.append(partial(_current.set, _current.get()))
    _current.set(watched)
    state.set(AttentionInterface, "get_interface", _function)
    state.set(AttentionMaskInterface, "__getitem__", _mask)
    if watched.legacy:
        # The outermost configuration comes last, because setting it also sets those inside it.
        for config in reversed(families.configurations(watched.model)):
            state.set(config, "_attn_implementation_internal", "eager")
    elif older.NEEDED:
        older.let_ask(watched.layers, lambda: _current.get() is watched, state)
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl:
            # Code compiled by torch.compile does not call our hooks: run the original code instead.
            stance = torch.compiler.set_stance("force_eager")
            state.steps.append(partial(stance.__exit__, None, None, None))
            break
    watched.hook(state)
    return watched


def _function(self: AttentionInterface, attn_implementation: str, default: Function) -> Function:
    """Replaces `AttentionInterface.get_interface`. default: the module's own eager attention."""
    function: Function = _get_interface(self, attn_implementation, default)
    watched = _current.get()
    if watched is None:
        return function
    name = attn_implementation or "eager"
    # The module calls what we return as function(module, q, k, v, mask, **kwargs).
    if isinstance(watched.doing, Comparing):
        return partial(watched.doing.compare, name, function)
    return partial(watched.attention, name, function, default)


def _mask(self: AttentionMaskInterface, key: str) -> Function:
    """Replaces `AttentionMaskInterface[..]`, which returns the function that makes masks.

    Our attention functions read the masks of "sdpa", whatever function the model names.
    """
    watched = _current.get()
    if watched is None or watched.doing.as_named or watched.legacy:
        function: Function = _get_mask(self, key)
        return function
    # "sdpa" leaves out a mask that is merely causal. Modules with is_causal = False need it.
    options = {"allow_is_causal_skip": False} if watched.needs_mask else {}
    return lambda **kwargs: sdpa_mask(**kwargs | options)


class Capture:
    """One model whose attention is read, and the state of its current forward pass."""

    def __init__(self, model: nn.Module, doing: Pass) -> None:
        # outer: the module that we call. model: the causal LM inside it. base: the part of model
        # without the unembedding.
        self.outer, self.model = handed_over(model)
        self.kind = type(self.model).__name__
        self.config = self.model.config
        self.base = self.model.base_model
        self.table = _embedding(self.model)  # (vocabulary, d)
        # If accelerate has offloaded the embedding, the model moves the ids itself.
        self.device = torch.device("cpu") if self.table.is_meta else self.table.device
        self.vocabulary = len(self.table)
        # layers: attention module -> layer index. places: attention module -> index of its block.
        # Both are the same unless a block has several attention modules. In a hybrid model, the
        # indices of blocks without attention are left out.
        self.blocks, self.layers, self.places = families.attention_layers(self.base)
        self.modules = set(self.base.modules())
        # True: the module asks the interface for its attention function. False: it does not.
        chooses = {families.chooses_attention(module) for module in self.layers}
        if len(chooses) > 1:
            raise ValueError(f"{self.kind} mixes attention modules of two kinds: not supported")
        self.legacy = False in chooses
        causal = [getattr(module, "is_causal", True) for module in self.layers]
        self.needs_mask = not all(causal)
        self.doing = doing
        # The current pass: how often each module was called, which blocks ran, and the shape (B, T)
        # of the ids.
        self.calls: Counter[nn.Module] = Counter()
        self.ran: set[int] = set()
        self.shape: tuple[int, ...] = ()
        # All passes: the names of the attention functions that the model asks for, and the window
        # of each layer that has one shorter than the text.
        self.named: set[str] = set()
        self.windows: dict[int, int] = {}  # layer -> number of keys that a query sees
        # The last mask and its window: `_note_window` need not look at the same mask again.
        self.mask: Tensor | None = None
        self.window: int | None = None

    @property
    def path(self) -> str:
        """How alpha was computed, in words for the report."""
        if self.legacy:
            return "eager weights"
        assert isinstance(self.doing, Measuring)
        # A module may have run both with and without a mask. It counts as fused if the kernel
        # proved right in every case.
        trusted: dict[nn.Module, bool] = {}
        for (module, _), right in self.doing.proved.items():
            trusted[module] = right and trusted.get(module, True)
        fused = sum(trusted.values())
        layers = len(self.calls)
        if fused == layers:
            return "fused"
        return f"fused in {fused} of {layers} layers" if fused else "exact"

    # --- hooks

    def here(self, function: Function) -> Function:
        """The function as a hook that does nothing in the forward passes of other threads."""

        def hook(*args: Any) -> Any:
            return function(*args) if _current.get() is self else None

        return hook

    def hook(self, state: LeftAsFound) -> None:
        """Add hooks that read what the blocks take and return.

        In a legacy model, hooks on the attention modules read the weights as well.
        """
        first = self.blocks[0]
        see = self.here(self._see_embedding)
        kwargs_too = first._forward_pre_hooks_with_kwargs
        state.hook(first._forward_pre_hooks, see, with_kwargs=kwargs_too)
        for layer, block in enumerate(self.blocks):
            see = self.here(partial(self._see_block, layer))
            state.hook(block._forward_hooks, see)
        if self.legacy:
            see = self.here(self._see_weights)
            for module in self.layers:
                state.hook(module._forward_hooks, see)

    def _see_embedding(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.doing.looks:
            hidden = self.hidden_states(kwargs.get("hidden_states"), args, kwargs)
            self.doing.embedding(hidden)

    def _see_block(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        self.ran.add(layer)
        if self.doing.looks:
            self.doing.block(layer, self.hidden_states(output))

    def hidden_states(self, *values: Any) -> Tensor:
        """Find the hidden states among what a block takes or returns; shape (B, S, T, d).

        S is the number of residual streams: one, or as many as `families.STREAMS` says.
        values: the block's arguments or outputs, in any nesting of tuples and dicts.
        """
        config = self.config.get_text_config()
        width = getattr(config, "hidden_size", None) or self.table.shape[1]
        found = None
        for x in tree_leaves(values):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            streams = families.streams_of(config.model_type, x, width)
            if streams is None or (len(streams), streams.shape[2]) != self.shape:
                continue
            if streams.shape[3] == width:
                return streams
            # The last axis does not fit the width, which the configuration may not state. Keep this
            # tensor for the case that no other one fits.
            found = streams if found is None else found
        if found is None:
            raise ValueError(
                f"{self.kind} has a block that shows no hidden states (B, T, d): give norms=False"
            )
        return found

    def _see_weights(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Read the weights that a legacy module returns, and take them out of its output."""
        length = self.shape[-1]
        maps = []
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == (length, length):
                maps.append(x)
        if len(maps) != 1:
            return output  # the module is not counted, and `finish` will report it
        (weights,) = maps  # (B, H, T, T)
        layer = self.layers[module]
        self.calls[module] += 1
        self._note_window(layer, weights > 0)
        self.doing.weights(layer, weights)
        if not isinstance(output, tuple | list):
            return output
        # No later module reads the weights. Without them, memory holds one layer's map at a time.
        return type(output)(None if x is weights else x for x in output)

    # --- attention functions

    def attention(
        self,
        name: str,
        function: Function,
        eager: Function,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute the module's own output, (B, T, H, D), and hand the attention to the pass.

        The module calls this in place of `function`, which the model names `name`.
        eager: the family's eager attention. query: (B, H, T, D). key, value: (B, H or fewer, S, D).
        attention_mask: (B, 1, T, S).
        """
        call = Call(module, query, key, value, attention_mask, kwargs, eager)
        if module not in self.modules:  # of another model in this thread, such as a draft
            return families.chunk(call, call.rows)[0], None
        length = query.shape[2]
        # More keys than tokens would be keys of a cache or an encoder, which are not in the text.
        if module not in self.layers or key.shape[2] != length + self.doing.front:
            raise ValueError(
                f"{type(module).__name__} attends to {key.shape[2]} keys for {length} tokens: "
                "alpha_k is of tokens, in layers that stand in one list of blocks"
            )
        refusals.check_heads(self.model, query.shape[1])
        self.calls[module] += 1
        self.named.add(name)
        layer = self.layers[module]
        # The functions of transformers compute the same as the eager one, and `check` verifies it.
        # A function that somebody else registered may compute anything.
        if function is not eager and not families.is_of_transformers(function):
            raise ValueError(
                f"{self.kind} has an attention {name!r} that is none of transformers': measure it "
                "after model.set_attn_implementation('eager')"
            )
        refusals.check_call(call, name, self.kind)
        self._note_window(layer, attention_mask)
        return self.doing.attention(call, layer), None

    def _note_window(self, layer: int, mask: Tensor | None) -> None:
        """Remember the layer's sliding window, if its mask (.., T, T) shows one."""
        if mask is None or self.doing.front:
            return
        if mask is not self.mask:  # several layers often share one mask
            self.mask = mask
            self.window = families.window_of(mask)
        if self.window:
            self.windows[layer] = self.window

    # --- passes

    def run(self, ids: Tensor) -> None:
        """Run one forward pass on ids (B, T). Raises ValueError if a layer showed no attention."""
        self.start(ids)
        self._pass(ids)
        self.finish()

    def _pass(self, ids: Tensor) -> None:
        self.outer(input_ids=ids.to(self.device), **self.options)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the forward pass beside the ids, of those that the model accepts."""
        options: dict[str, Any] = {"use_cache": False}
        # Some modules have no such argument, because they always return their weights. We ask only
        # where it is needed: the request would leave transformers' own hooks on the model.
        if self.legacy and all("output_attentions" in _parameters(m) for m in self.layers):
            options["output_attentions"] = True
        parameters = _parameters(self.outer)
        if "logits_to_keep" in parameters:
            options["logits_to_keep"] = 1  # all logits would cost more than the blocks do
        kinds = {parameter.kind for parameter in parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:  # the model's forward accepts **kwargs
            return options
        return {name: value for name, value in options.items() if name in parameters}

    @property
    def tokens_a_batch(self) -> int:
        """The most tokens in one forward pass, so that it computes at most 2**27 logits."""
        # No logits are computed if we call `base`, and next to none with `logits_to_keep`.
        if self.outer is self.base or "logits_to_keep" in self.options:
            return 2**27
        return 2**27 // self.vocabulary

    def start(self, ids: Tensor) -> None:
        """Reset the state of the current pass, before a forward pass on ids (B, T)."""
        self.calls.clear()
        self.ran.clear()
        self.shape = tuple(ids.shape)

    def finish(self) -> None:
        """Raise ValueError unless every layer showed its attention once in the pass that ran."""
        names = {module: name for name, module in self.base.named_modules()}
        still_there = names.keys() >= self.layers.keys()
        require(still_there, f"{self.kind} {refusals.REPLACED}")
        # A model with an early exit has further blocks behind the last one that runs.
        last = max(self.ran, default=len(self.blocks))
        for module, block in self.places.items():
            if block > last:
                continue
            reason = ""
            if self.ran and block not in self.ran:
                reason = f"it skips block {block + 1}"
            elif self.calls[module] == 0:
                reason = f"{names[module]} {refusals.SILENT}"
            elif self.calls[module] > 1:
                reason = f"{names[module]} {refusals.TWICE}"
            require(not reason, f"{self.kind} cannot be measured: {reason}")

    def check(self, rows: Sequence[Tensor], run: bool = True) -> None:
        """Raise ValueError if rows are too long for the model, or its attention cannot be read.

        Attention cannot be read in two cases: a token attends to later tokens, or the function that
        the model names disagrees with the eager function, whose weights we read.
        run: whether to test for these two cases, by running a short text made of the rows' tokens.
        """
        longest = max(len(row) for row in rows)
        refusals.check_positions(self.model, self.table, longest)
        if not run or longest == 1:
            return
        # The text has no token twice: equal tokens would get even weights, and hide any error.
        tokens = torch.cat(list(rows)).unique()
        text = tokens[: min(longest, CHECK_TOKENS)]
        if len(text) == 1:
            another = (text + 1) % self.vocabulary
            text = torch.cat([text, another])
        batch = text[None]  # (1, T)
        measuring = self.doing
        self.doing = checking = Checking(self.kind)
        self.run(batch)  # by the eager function, with our masks
        self.doing = comparing = Comparing(checking.calls)
        if not self.named <= {"eager"}:  # by the named function, with its own masks
            self._pass(batch)
        self.doing = measuring
        if comparing.differs:
            reason = ": with is_causal off it sees later tokens" if self.needs_mask else ""
            raise ValueError(
                f"{self.kind} computes something else by its attention {comparing.differs!r} than "
                f"by the family's eager one, which is read{reason}; measure it after "
                "model.set_attn_implementation('eager')"
            )


def _embedding(model: Any) -> Tensor:
    """The table of token embeddings, (vocabulary, d). Raises ValueError if there is none."""
    try:
        module = model.get_input_embeddings()
    except NotImplementedError:
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
        module = next(embeddings, None)
    table: Tensor | None = getattr(module, "weight", None)
    if table is None:
        kind = type(model).__name__
        raise ValueError(f"{kind} embeds no tokens: sinks are measured on causal LMs")
    return table


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward method, by name."""
    return inspect.signature(module.forward).parameters
