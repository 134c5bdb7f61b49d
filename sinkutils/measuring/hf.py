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

import sys
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sinkutils.checks import Refused, first_line, require
from sinkutils.measuring import families, older, refusals, taught
from sinkutils.measuring.families import Call, Function
from sinkutils.measuring.passes import Checking, Comparing, Looking, Measuring, Pass
from sinkutils.measuring.refusals import Arguments, handed_over, parameters_of
from sinkutils.measuring.tally import LeftAsFound, Source

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
    if "torch._dynamo" in sys.modules:  # something may be compiled
        # Code compiled by torch.compile does not call our hooks: run the original code instead.
        stance = torch.compiler.set_stance("force_eager")
        state.steps.append(partial(stance.__exit__, None, None, None))
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
    # A function that somebody registered gets the mask that belongs to it.
    own = AttentionInterface._global_mapping.get(key)
    foreign = own is not None and not families.is_of_transformers(own)
    if watched is None or watched.doing.as_named or watched.legacy or foreign:
        function: Function = _get_mask(self, key)
        return function
    # "sdpa" leaves out a mask that is merely causal. Modules with is_causal = False need it.
    options = {"allow_is_causal_skip": False} if watched.needs_mask else {}
    return lambda **kwargs: sdpa_mask(**kwargs | options)


class Capture(Source):
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
        self.taught = families.TAUGHT.get(self.config.model_type)  # by the user
        if self.taught is None:
            self.blocks, self.places = families.attention_layers(self.base)
        else:
            self.blocks, self.places = taught.attention_layers(self.model, self.taught)
        self.layers = self.places
        if len({*self.places.values()}) < len(self.places):  # as in LongCat-Flash
            self.layers = {module: index for index, module in enumerate(self.places)}
        self.modules = set(self.base.modules())
        # Modules that attend to images, to sound or to an encoder's states
        parts = self.base.named_modules()
        self.aside = {module for name, module in parts if families.NOT_TEXT.search(name)}
        self.aside -= self.layers.keys()
        # True: the module asks the interface for its attention function. False: it does not.
        chooses = {families.chooses_attention(module) for module in self.layers}
        if self.taught is not None and self.taught.returns_weights is not None:
            chooses = {not self.taught.returns_weights}
        mixed = f"{self.kind} mixes attention modules of two kinds: not supported"
        require(len(chooses) == 1, mixed)
        self.legacy = False in chooses
        self.needs_mask = not all(getattr(module, "is_causal", True) for module in self.layers)
        # Weights are asked for only where it is needed, because that leaves hooks of transformers
        # on the model. Some modules have no such argument, because they always return theirs.
        asked = self.legacy and all("output_attentions" in parameters_of(m) for m in self.layers)
        # What the forward that runs takes beside the ids
        self.arguments = Arguments(self.outer, self.model, self.base, asked)
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
        # The last mask and its window: `_note_mask` need not look at the same mask again.
        self.mask: Tensor | None = None
        self.window: int | None = None
        # Of texts that are packed in a row: layer -> whether a text saw one before it
        self.mixed: dict[int, bool] = {}

    @property
    def path(self) -> str:  # type: ignore[override]
        if self.legacy:
            return "eager weights"
        assert isinstance(self.doing, Measuring)
        # A module may have run both with and without a mask. It counts as fused if the kernel
        # proved right in every case.
        proved = self.doing.proved
        wrong = {module for (module, _), right in proved.items() if not right}
        fused = len({module for module, _ in proved} - wrong)
        layers = len(self.calls)
        if fused == layers:
            return "fused"
        return f"fused in {fused} of {layers} layers" if fused else "exact"

    def takes(self, name: str) -> bool | None:
        return self.arguments.takes(name)

    @property
    def packed(self) -> str:  # type: ignore[override]
        if not self.mixed:
            return ""
        mixed = sum(self.mixed.values())
        if mixed:
            return f"see the texts before them in {mixed} of {len(self.mixed)} layers"
        if len(self.blocks) > len({*self.places.values()}):
            return "kept apart in attention; layers without it may carry one into the next"
        return "kept apart"

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
        state.hook(self.blocks[0], self.here(self._see_embedding), before=True)
        for layer, block in enumerate(self.blocks):
            state.hook(block, self.here(partial(self._see_block, layer)))
        for module in self.layers if self.legacy else ():
            state.hook(module, self.here(self._see_weights))

    def _see_embedding(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.doing.looks:
            hidden = self.hidden_states(kwargs.get("hidden_states"), *args, args, kwargs)
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
        if self.taught is not None and self.taught.hidden is not None:
            known = taught.hidden_of(self, values)
            if known:
                return known[0][:, None]
        config = self.config.get_text_config()
        width = getattr(config, "hidden_size", None) or self.table.shape[1]
        texts, length = self.shape
        tensors = [
            x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()
        ]
        several = [families.streams_of(config.model_type, x, width) for x in tensors]
        streams = [x for x in several if x is not None and len(x) == texts]
        wide = [x for x in streams if x.shape[3] == width]
        # The configuration may not state the width: then any tensor of the right length will do.
        found = [x for x in (*wide, *streams) if x.shape[2] == length]
        if not found:
            refusals.check_length(self.kind, wide[-1].shape[2] if wide else length, length)
            shows = "has a block that shows no hidden states (B, T, d)"
            raise Refused(f"{self.kind} {shows}: give norms=False")
        return found[0]

    def _see_weights(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Read the weights that a legacy module returns, and take them out of its output."""
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        maps = [x for x in tensors if x.ndim == 4 and x.shape[-1] == x.shape[-2]]
        if len(maps) != 1:
            return output  # the module is not counted, and `finish` will report it
        (weights,) = maps  # (B, H, T, T)
        refusals.check_length(self.kind, weights.shape[-1], self.shape[1])
        layer = self.layers[module]
        self.calls[module] += 1
        self._note_mask(layer, weights > 0)
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
        if module in self.aside:  # an encoder of images, for instance
            if attention_mask is not None and function is eager:
                attention_mask = families.additive(attention_mask, query.dtype)
            return function(module, query, key, value, attention_mask, **kwargs)[0], None
        length = query.shape[2]
        if self.taught is not None and module not in self.layers:
            raise refusals.Unreadable(f"{type(module).__name__} {taught.UNNAMED}")
        # More keys than tokens would be keys of a cache or an encoder, which are not in the text.
        require(
            module in self.layers and key.shape[2] == length + self.doing.front,
            f"{type(module).__name__} attends to {key.shape[2]} keys for {length} tokens: alpha_k "
            "is of tokens, in layers that stand in one list of blocks",
        )
        refusals.check_length(self.kind, length, self.shape[1])
        refusals.check_heads(self.model, query.shape[1])
        self.calls[module] += 1
        layer = self.layers[module]
        # The functions of transformers compute the same as the eager one, and `check` verifies it.
        # One that somebody else registered may compute anything: it shows its own weights.
        if function is not eager and not families.is_of_transformers(function):
            out, weights = self.doing.registered(call, layer, function, name)
            self._note_mask(layer, weights > 0)
            return out, None
        self.named.add(name)
        refusals.check_call(call, name, self.kind)
        self._note_mask(layer, attention_mask)
        return self.doing.attention(call, layer), None

    def _note_mask(self, layer: int, mask: Tensor | None) -> None:
        """Remember what the mask (.., T, T) of a layer shows: its window, texts that are mixed.

        mask: True, or no large negative number, where a key is seen; None: causal.
        """
        if self.doing.front:
            return
        texts = self.doing.texts
        mixed = any(text.start > 0 for text in texts)
        if mask is not None:
            if mask is not self.mask:  # several layers often share one mask
                self.mask = mask
                self.window = families.window_of(mask, texts)
            if self.window:
                self.windows[layer] = self.window
            mixed = bool(texts) and families.sees_others(mask, texts)
        if len(texts) > 1:
            self.mixed[layer] = mixed or self.mixed.get(layer, False)

    # --- passes

    def is_changed_by(self, name: str, ids: Tensor, entries: Mapping[str, Any]) -> bool:
        measuring = self.doing
        without = {other: x for other, x in entries.items() if other != name}
        seen = []
        try:
            for given in (without, entries):
                self.doing = looking = Looking()
                self.start(ids)
                self._pass(ids, given)
                seen.append(looking.hidden)
        except Refused as error:
            if isinstance(error.__cause__, TypeError):  # something inside does not take it
                return False
            raise
        finally:
            self.doing = measuring
        before, after = seen
        # None: no block showed its hidden states
        return before is None or after is None or not torch.equal(before, after)

    def run(self, ids: Tensor, entries: Mapping[str, Any]) -> Any:
        """The output of one pass on ids (B, T). Raises ValueError if a layer showed no attention."""
        self.start(ids)
        output = self._pass(ids, entries)
        self.finish()
        return output

    def unobserved(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """What a function returns. Nothing is read, or edited, in the passes that it runs."""
        token = _current.set(None)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    def _pass(self, ids: Tensor, entries: Mapping[str, Any]) -> Any:
        """The output of a pass. Raises ValueError if the model itself does not run on the batch."""
        given = {**self.arguments.options, **entries}
        self.arguments.check(given)
        given["input_ids"] = ids
        given |= {name: x.to(self.device) for name, x in given.items() if isinstance(x, Tensor)}
        try:
            return self.outer(**given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if refusals.is_of_libraries(error):
                try:  # also where nothing is read?
                    self.unobserved(self.outer, **given)
                except type(error) as same:
                    says = f"{self.kind} does not run on this batch: {first_line(same)}"
                    raise Refused(says) from error
            raise

    @property
    def tokens_a_batch(self) -> int:  # type: ignore[override]
        """At most 2**27 logits are computed in a pass."""
        # No logits are computed if we call `base`, and next to none with `logits_to_keep`.
        if self.outer is self.base or "logits_to_keep" in self.arguments.options:
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
            times = {self.calls[other] for other in self.layers}
            reason = ""
            if self.ran and block not in self.ran:
                reason = f"it skips block {block + 1}"
            elif self.calls[module] == 0:
                reason = f"{names[module]} {taught.SILENT if self.taught else refusals.SILENT}"
            elif self.calls[module] > 1 and len(times) == 1 and len(self.layers) > 1:
                reason = f"its layers run {max(times)} times a token: none has one attention"
            elif self.calls[module] > 1:
                reason = f"{names[module]} {refusals.TWICE}"
            require(not reason, f"{self.kind} cannot be measured: {reason}")

    def check_positions(self, positions: int) -> None:
        refusals.check_positions(self.model, self.table, positions)

    def check(self, text: Tensor, ids: Tensor, entries: Mapping[str, Any]) -> None:
        """Raise ValueError if the attention of the model cannot be read.

        There are two such cases: a token attends to later tokens, or the function that the model
        names disagrees with the eager function, whose weights we read.
        """
        measuring = self.doing
        try:
            try:
                self._check(text, {})
            except refusals.Unreadable:
                raise
            except Exception:  # hooks, for instance, may be made for the ids' own shape
                self._check(ids, entries)
        finally:
            self.doing = measuring

    def _check(self, ids: Tensor, entries: Mapping[str, Any]) -> None:
        """`check`, by the pass on ids (B, T)."""
        if self.taught is not None:
            taught.prove(self, ids, entries)
        self.doing = checking = Checking(self.kind)
        self.run(ids, entries)  # by the eager function, with our masks
        self.doing = comparing = Comparing(checking.calls)
        if not self.named <= {"eager"}:  # by the named function, with its own masks
            self._pass(ids, entries)
        named = comparing.differs
        if named and self.needs_mask:
            later = f"sees later tokens by its attention {named!r}, with is_causal off"
            raise refusals.Unreadable(f"{self.kind} {later}")
        if named:
            raise refusals.Unreadable(
                f"{self.kind} computes something else by its attention {named!r} than by the "
                "family's eager one, whose weights are read. A function of your own that returns "
                "its weights is read itself; 'eager' would be another model"
            )


def _embedding(model: Any) -> Tensor:
    """The table of token embeddings, (vocabulary, d). Raises ValueError if there is none."""
    try:
        module = model.get_input_embeddings()
    except NotImplementedError:
        module = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    table: Any = getattr(module, "weight", None)
    kind = type(model).__name__
    require(table is not None, f"{kind} embeds no tokens: sinks are measured on causal LMs")
    return table  # type: ignore[no-any-return]
