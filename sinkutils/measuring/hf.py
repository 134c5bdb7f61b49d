"""Capture for models of transformers, whose attention modules ask for a function by name.

While a model is measured, what they get computes the module's own output and, with it, what the
pass that runs is for (`passes`):

- fused: the kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of the chosen keys; in every module
  it is compared with the exact path, on rows that see those keys, before it is trusted
- exact: the family's own eager function on chunks of queries, whose weights are reduced and dropped

Families outside that interface are measured by hooks on the weights that their eager attention
returns.
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
from sinkutils.measuring.state import LeftAsFound
from sinkutils.measuring.wrappers import handed_over

# A context variable and no global: other threads run the same patched classes while we measure.
_current: ContextVar[Capture | None] = ContextVar("sinkutils_capture", default=None)
if older.NEEDED:
    AttentionInterface.get_interface = older.get_interface
_get_interface = AttentionInterface.get_interface
_get_mask = AttentionMaskInterface.__getitem__


def observe(model: nn.Module, doing: Pass, state: LeftAsFound) -> Capture:
    """From here until `state` ends, forward passes of `model` (in eval mode) are for `doing`.

    model: as it was handed over, in its wrappers. Its logits do not change. Passes of other
    threads, and of other models, are what they always are.
    """
    watched = Capture(model, doing)
    # Each undoing is noted before what it undoes: an interrupt can come between two lines.
    state.steps.append(partial(_current.set, _current.get()))
    _current.set(watched)
    state.set(AttentionInterface, "get_interface", _function)
    state.set(AttentionMaskInterface, "__getitem__", _mask)
    if watched.legacy:
        # The outermost configuration last, as setting it sets those within it, too.
        for config in reversed(families.configurations(watched.model)):
            state.set(config, "_attn_implementation_internal", "eager")
    elif older.NEEDED:
        older.let_ask(watched.layers, lambda: _current.get() is watched, state)
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl:
            # What torch.compile made is run as it was written: it knows nothing of our hooks.
            stance = torch.compiler.set_stance("force_eager")
            state.steps.append(partial(stance.__exit__, None, None, None))
            break
    watched.hook(state)
    return watched


def _function(self: AttentionInterface, attn_implementation: str, default: Function) -> Function:
    """In place of `AttentionInterface.get_interface`: `default` is the module's eager attention."""
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
    """In place of `AttentionMaskInterface[..]`: the masks of an attention function."""
    watched = _current.get()
    if watched is None or watched.doing.as_named or watched.legacy:
        function: Function = _get_mask(self, key)
        return function
    # A decoder whose modules do not call themselves causal needs to be told by a mask.
    options = {"allow_is_causal_skip": False} if watched.needs_mask else {}
    return lambda **kwargs: sdpa_mask(**kwargs | options)


class Capture:
    """What is known of one model, and of the forward pass of it that runs."""

    def __init__(self, model: nn.Module, doing: Pass) -> None:
        # outer: what is called. model: the causal LM in it. base: its blocks, without unembedding.
        self.outer, self.model = handed_over(model)
        self.kind = type(self.model).__name__
        self.config = self.model.config
        self.base = self.model.base_model
        self.table = _embedding(self.model)
        # A model whose embedding is offloaded (accelerate) moves the ids itself.
        self.device = torch.device("cpu") if self.table.is_meta else self.table.device
        self.vocabulary = len(self.table)
        # layers: attention modules, counted. places: the block in which each stands. Of a hybrid
        # model, whose other blocks have no attention, both are the block's index.
        self.blocks, self.layers, self.places = families.attention_layers(self.base)
        self.modules = set(self.base.modules())
        chooses = {families.chooses_attention(module) for module in self.layers}
        if len(chooses) > 1:
            raise ValueError(f"{self.kind} mixes attention modules of two kinds: not supported")
        self.legacy = False in chooses  # outside the interface
        causal = [getattr(module, "is_causal", True) for module in self.layers]
        self.needs_mask = not all(causal)
        self.doing = doing
        # Of the pass that runs: how often each module was called, which blocks ran, (B, T) of ids
        self.calls: Counter[nn.Module] = Counter()
        self.ran: set[int] = set()
        self.shape: tuple[int, ...] = ()
        # Of all passes
        self.named: set[str] = set()  # the attention functions that the model names
        self.windows: dict[int, int] = {}  # by layer, where one was shorter than the sequence
        self.mask: Tensor | None = None  # the last one, and its window
        self.window: int | None = None

    @property
    def path(self) -> str:
        """How alpha was computed."""
        if self.legacy:
            return "eager weights"
        assert isinstance(self.doing, Measuring)
        # A module may run with a mask and without: it is trusted if both proved right.
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
        """A hook that leaves the forward passes of other threads alone."""

        def hook(*args: Any) -> Any:
            return function(*args) if _current.get() is self else None

        return hook

    def hook(self, state: LeftAsFound) -> None:
        """Watch the blocks' inputs and outputs and, outside the interface, attention weights."""
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
        """The hidden states that a block reads or returns, as (B, S, T, d) of S streams.

        Most families have one stream, (B, T, d); some have several, along an axis of their own or
        side by side in the last one. values: what a block takes or returns, in any nesting.
        """
        config = self.config.get_text_config()
        width = getattr(config, "hidden_size", None) or self.table.shape[1]
        by_position = None
        for x in tree_leaves(values):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            leads = x.shape[:2] == self.shape  # (B, T) come first
            if x.ndim == 4 and leads:  # (B, T, S, d)
                return x.transpose(1, 2)
            if x.ndim == 4 and x.shape[1:3] == self.shape:  # (S, B, T, d)
                return x.transpose(0, 1)
            if x.ndim == 3 and leads:
                if x.shape[2] % width == 0:  # (B, T, S * d)
                    streams: Tensor = x.unflatten(2, (-1, width))
                    return streams.transpose(1, 2)
                if by_position is None:
                    by_position = x  # of a model whose configuration says nothing of its width
        if by_position is None:
            raise ValueError(
                f"{self.kind} has a block that shows no hidden states (B, T, d): give norms=False"
            )
        return by_position[:, None]

    def _see_weights(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Outside the interface: take in the weights that a module returns, and drop them."""
        length = self.shape[-1]
        maps = []
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == (length, length):
                maps.append(x)
        if len(maps) != 1:
            return output  # `finish` will miss this module
        (weights,) = maps  # (B, H, T, T)
        layer = self.layers[module]
        self.calls[module] += 1
        self._note_window(layer, weights > 0)
        self.doing.weights(layer, weights)
        if not isinstance(output, tuple | list):
            return output
        # Nothing behind reads the weights: without them one layer's map is held at a time.
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
        """The module's own output, (B, T, H, D), in place of the function that the model names.

        eager: its family's. query: (B, H, T, D), key and value: (B, H or fewer, T, D),
        attention_mask: (B, 1, T, T).
        """
        call = Call(module, query, key, value, attention_mask, kwargs, eager)
        if module not in self.modules:  # of another model, whose mask was made for ours
            return families.chunk(call, call.rows)[0], None
        length = query.shape[2]
        # Keys of a cache, or of an encoder, are not the text's.
        if module not in self.layers or key.shape[2] != length + self.doing.front:
            raise ValueError(
                f"{type(module).__name__} attends to {key.shape[2]} keys for {length} tokens: "
                "alpha_k is of tokens, in layers that stand in one list of blocks"
            )
        refusals.check_heads(self.model, query.shape[1])
        self.calls[module] += 1
        self.named.add(name)
        layer = self.layers[module]
        # transformers' own functions compute what the eager one does (`check` looks). Somebody
        # else's may compute anything.
        if function is not eager and not families.is_of_transformers(function):
            raise ValueError(
                f"{self.kind} has an attention {name!r} that is none of transformers': measure it "
                "after model.set_attn_implementation('eager')"
            )
        refusals.check_call(call, name, self.kind)
        self._note_window(layer, attention_mask)
        return self.doing.attention(call, layer), None

    def _note_window(self, layer: int, mask: Tensor | None) -> None:
        """Keep what a mask, (.., T, T), says of a window."""
        if mask is None or self.doing.front:
            return
        if mask is not self.mask:  # of several layers it is one
            self.mask = mask
            self.window = families.window_of(mask)
        if self.window:
            self.windows[layer] = self.window

    # --- passes

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T). Raises ValueError if a layer did not report."""
        self.start(ids)
        self._pass(ids)
        self.finish()

    def _pass(self, ids: Tensor) -> None:
        self.outer(input_ids=ids.to(self.device), **self.options)

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the forward pass is called with besides ids, as far as its forward takes it."""
        options: dict[str, Any] = {"use_cache": False}
        # Modules that do not ask whether to return weights always do; asking leaves hooks on them.
        if self.legacy and all("output_attentions" in _parameters(m) for m in self.layers):
            options["output_attentions"] = True
        parameters = _parameters(self.outer)
        if "logits_to_keep" in parameters:
            options["logits_to_keep"] = 1  # logits of all tokens would cost more than the blocks
        kinds = {parameter.kind for parameter in parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:  # it takes **kwargs
            return options
        return {name: value for name, value in options.items() if name in parameters}

    @property
    def tokens_a_batch(self) -> int:
        """The most tokens of a pass: where all logits are computed, 2**27 of them at a time."""
        # `base` has no unembedding.
        if self.outer is self.base or "logits_to_keep" in self.options:
            return 2**27
        return 2**27 // self.vocabulary

    def start(self, ids: Tensor) -> None:
        """Be ready for a forward pass of ids (B, T)."""
        self.calls.clear()
        self.ran.clear()
        self.shape = tuple(ids.shape)

    def finish(self) -> None:
        """Raise ValueError if a layer did not report in the forward pass that ran."""
        names = {module: name for name, module in self.base.named_modules()}
        still_there = names.keys() >= self.layers.keys()
        require(still_there, f"{self.kind} {refusals.REPLACED}")
        # Behind the last block that runs there may be others, of a model with an early exit.
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
        """Raise ValueError for rows that are too long, and for attention that cannot be read.

        That is where a token has weight on later ones, and where modules compute something else by
        the functions that the model names than by those whose weights are read. run: whether to
        look at these two, on one text of different tokens of the rows.
        """
        longest = max(len(row) for row in rows)
        refusals.check_positions(self.model, self.table, longest)
        if not run or longest == 1:
            return
        # Different tokens: of equal ones the weights are even, whatever is wrong with them.
        tokens = torch.cat(list(rows)).unique()
        text = tokens[: min(longest, CHECK_TOKENS)]
        if len(text) == 1:
            another = (text + 1) % self.vocabulary
            text = torch.cat([text, another])
        batch = text[None]  # (1, T)
        measuring = self.doing
        self.doing = checking = Checking(self.kind)
        self.run(batch)  # with our masks, by the eager function
        self.doing = comparing = Comparing(checking.calls)
        if not self.named <= {"eager"}:  # as the model would have run without us
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
    """The table of token embeddings (vocabulary, d)."""
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
    """The parameters of a module's forward, by name."""
    return inspect.signature(module.forward).parameters
