"""Capture for models of transformers, which let a model choose its attention function by name.

The one registered here computes the module's own output and, with it, what a report needs, by one of three paths:

- fused: the kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of the chosen keys; in every module it is compared
  with the exact path, on rows that see those keys, before it is trusted under a kind of mask
- exact: the family's own eager function on chunks of queries, whose weights are reduced and dropped
- registered: an attention function that somebody else registered, as it is, where it returns its weights

Families outside that interface are measured by hooks on the weights that their eager attention returns.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinkutils.checks import require
from sinkutils.measuring.tally import Tally, mean_over_queries, refuse_heads
from sinkutils.model import flash
from sinkutils.model.flash import PositionMask

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from sinkutils.measuring import families, masks
    from sinkutils.measuring.families import Call
    from sinkutils.measuring.fused import can_serve, fused, proves_right
except ImportError as error:
    raise ImportError(
        "measuring models of others needs transformers 5.4 or later: pip install -U transformers"
    ) from error

NAME = "sinkutils"  # of the attention function and of its mask
EXACT_ELEMENTS = 2**25  # attention weights that the exact path holds at a time: 128 MiB in float32
CHECK_TOKENS = 16  # the longest text of `Capture.check`
LATER = "sees later tokens: it is no causal LM (encoder-only?)"
INTERFACE = (
    "what is read are attention functions of transformers' AttentionInterface, or weights (B, H, T, T) that modules "
    "named Attention return"
)
SILENT = f"did not show their weights: was their forward replaced? Measure the model as it was loaded; {INTERFACE}"
TWICE = "ran more than once in a pass: of a module in several places, give each place a copy (copy.deepcopy)"

_current: ContextVar[Capture | None] = ContextVar("sinkutils_capture", default=None)
_own: dict[int, str] = {}  # what configurations of models under measurement name otherwise, by their id


@contextmanager
def capturing(model: nn.Module, tally: Tally, exact: bool = False) -> Iterator[Capture]:
    """While this is open, forward passes of `model` (in eval mode) add to the tally; their logits do not change.

    Those of other threads, and of other models that share a configuration, are what they always are.
    """
    capture = Capture(model, tally, exact)
    hooks = {module: set(module._forward_hooks) for module in model.modules()}
    token = _current.set(capture)
    try:
        with ExitStack() as stack:
            stack.enter_context(capture.choosing("eager" if capture.legacy else NAME))
            for handle in capture.hook():
                stack.enter_context(handle)
            yield capture
    finally:
        for module, own in hooks.items():
            if left := set(module._forward_hooks) - own:  # some families never take off those that record their weights
                for hook in left:
                    del module._forward_hooks[hook]
                for part in model.modules():
                    part.__dict__.pop("_output_capturing_hooks_installed", None)
        _current.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    capture = _current.get()
    if capture is not None and module in capture.modules:
        return capture.attention(module, query, key, value, attention_mask, kwargs), None
    if capture is not None:  # of another model, whose mask was made for ours
        mask = masks.by_position(attention_mask, type(module).__name__)
        rows = torch.arange(query.shape[2], device=query.device)
        return families.chunk(Call(module, query, key, value, mask, kwargs), rows)
    name = _name_of(getattr(module, "config", None))
    mask = families.chosen_keys(module, attention_mask, query, kwargs)
    if mask is not attention_mask and isinstance(mask, Tensor):  # eager functions add what they are given
        mask = families.added(mask, query.dtype)
    return families.attention_function(module, name)(module, query, key, value, mask, **kwargs)


def _mask(**asked: Any) -> Tensor | None:
    capture = _current.get()
    if capture is None or capture.registered:
        name = _name_of(asked.get("config"))
        return ALL_MASK_ATTENTION_FUNCTIONS[name](**asked) if name in ALL_MASK_ATTENTION_FUNCTIONS else None
    if capture.needs_mask:  # a decoder whose modules do not call themselves causal
        asked["allow_is_causal_skip"] = False
    return masks.mask(**asked)


def _name_of(config: Any) -> str:
    """The attention function that a configuration names, also while its model is measured in another thread."""
    name: Any = _own.get(id(config)) or getattr(config, "_attn_implementation", NAME)
    if name == NAME:
        raise RuntimeError(f"attention {NAME!r} works within sinkutils.measure only: choose another implementation")
    return name


# A name without a mask of its own would get none at all, and the model would see later tokens.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class Capture:
    """What is known of one model, and what its attention modules report while it runs."""

    def __init__(self, model: nn.Module, tally: Tally, exact: bool) -> None:
        self.kind = kind = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            inner = next((name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)), "")
            wanted = f"take it out of its wrapper, model.{inner}" if inner else INTERFACE
            raise ValueError(f"model must be a TransformerLM or of transformers, got {kind}: {wanted}")
        why = families.REFUSED.get(model.config.model_type)
        require(why is None, f"{kind} cannot be measured: {why}")
        require(not model.config.is_encoder_decoder, f"{kind} is an encoder-decoder model, not a causal LM")
        if model.config.model_type in families.PREFIX:
            warnings.warn(
                f"{kind} is measured as a causal LM, although its own prompts see themselves whole", stacklevel=5
            )
        self.model, self.config, self.base = model, model.config, model.base_model
        self.tally, self.exact = tally, exact
        # FSDP gathers weights only for passes through its root.
        sharded = any(one.__name__ == "FSDPModule" for one in type(model).__mro__)
        self.forward = model if sharded else self.base
        self.table = self._embedding(model)
        self.vocabulary = len(self.table)
        self.calls: Counter[nn.Module] = Counter()
        self.proved: dict[nn.Module, dict[str, bool]] = {}  # whether the fused path proved right, by kind of mask
        self.windows: dict[int, int] = {}  # by layer, where one was shorter than the sequence
        self.chunked = False  # windows do not slide
        self.shape: tuple[int, ...] = ()  # of the ids in the forward pass that runs
        self.checking = False  # whether weights on later tokens are looked for
        self.hidden: Tensor | None = None  # (T, T), of surgery: the keys j that queries i do not see
        self.front = 0  # of surgery: keys of a cache in front of the text
        self.blocks, self.layers = families.attention_layers(self.base)
        self.modules = set(self.base.modules())
        eager = [families.chooses_attention(module) for module in self.layers]
        require(any(eager) == all(eager), f"{kind} mixes attention modules of two kinds, which is not supported")
        self.legacy = not any(eager)
        self.needs_mask = not all(getattr(module, "is_causal", True) for module in self.layers)
        for module in [] if self.legacy else self.layers:
            missing = f"{type(module).__name__} has no eager_attention_forward in its file, from which weights are read"
            require(families.eager_function(module) is not None, missing)
        self.configs = families.configurations(model)
        self.own = {id(config): config._attn_implementation for config in self.configs}
        self.registered = {} if self.legacy else self._registered()
        wrong = [pair for pair in tally.heads if pair[0] not in self.layers.values()]
        refuse_heads(wrong, f"its attention layers are {sorted(self.layers.values())}")

    def _embedding(self, model: Any) -> Tensor:
        """The table of token embeddings (vocabulary, d)."""
        try:
            module = model.get_input_embeddings()
        except NotImplementedError:
            tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
            size = getattr(self.config, "vocab_size", None)
            module = next((table for table in tables if table.num_embeddings == size), None)
        table = getattr(module, "weight", None)
        if table is None:
            raise ValueError(f"{self.kind} embeds no tokens: sinks are measured on causal LMs")
        return table

    def _registered(self) -> dict[nn.Module, tuple[Any, str]]:
        """The attention functions that are none of transformers', with their names, by the module that calls them."""
        found = {}
        for module in self.layers:
            name = self.own.get(id(module.config), "eager")
            function = families.attention_function(module, name)
            if name != "eager" and not families.is_of_transformers(function):
                found[module] = (function, name)
        require(
            len(found) in (0, len(self.layers)), f"{self.kind} has a registered attention function in some layers only"
        )
        return found

    @contextmanager
    def choosing(self, name: str | None) -> Iterator[None]:
        """While this is open, the model's configurations name this attention function; None: their own."""
        configs = self.configs
        before = [config._attn_implementation for config in configs]
        _own.update(self.own)
        try:
            for config in configs:
                config._attn_implementation = name or self.own[id(config)]
            yield
        finally:
            for config, value in zip(configs, before, strict=True):
                config._attn_implementation = value
            if NAME not in before:
                for key in self.own:
                    _own.pop(key, None)

    @property
    def path(self) -> str:
        """How alpha was computed."""
        if self.legacy:
            return "eager weights"
        if self.registered:
            return "registered: " + ", ".join(sorted({name for _, name in self.registered.values()}))
        trusted = sum(all(kinds.values()) for kinds in self.proved.values())
        return {0: "exact", len(self.layers): "fused"}.get(trusted, f"fused in {trusted} of {len(self.layers)} layers")

    def here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that leaves the forward passes of other threads alone."""

        def hook(*args: Any) -> Any:
            return function(*args) if _current.get() is self else None

        return hook

    def hook(self) -> list[RemovableHandle]:
        """Hooks for the blocks' inputs and outputs and, outside the interface, for attention weights."""
        handles = [self.blocks[0].register_forward_pre_hook(self.here(self._see_embedding), with_kwargs=True)]
        for layer, block in enumerate(self.blocks):
            handles.append(block.register_forward_hook(self.here(partial(self._see_block, layer))))
        for module in self.layers if self.legacy else ():
            handles.append(module.register_forward_hook(self.here(self._see_weights)))
        return handles

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T), without the unembedding. Raises ValueError if a layer did not report."""
        self.start(ids)
        self._pass(ids)
        self.finish()

    def _pass(self, ids: Tensor) -> None:
        options: dict[str, Any] = {"use_cache": False}
        if self.legacy:
            options["output_attentions"] = True
        taken = inspect.signature(self.forward.forward).parameters
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values()):
            options = {name: value for name, value in options.items() if name in taken}
        # A model whose embedding is offloaded (accelerate) moves the ids itself.
        device = "cpu" if self.table.is_meta else self.table.device
        try:
            self.forward(input_ids=ids.to(device), **options)
        except IndexError as error:
            raise ValueError(f"ids have {ids.shape[1]} positions, more than the model has embeddings for") from error

    def start(self, ids: Tensor) -> None:
        """Be ready for a forward pass of ids (B, T)."""
        self.calls.clear()
        self.shape = tuple(ids.shape)

    def finish(self) -> None:
        """Raise ValueError if a layer did not report in the forward pass that ran."""
        calls = {name: self.calls[module] for name, module in self.base.named_modules() if module in self.layers}
        for count, why in ((0, SILENT), (2, TWICE)):
            wrong = [name for name, seen in calls.items() if min(seen, 2) == count]
            if wrong:
                which = f"{len(wrong)} of {len(calls)} attention modules ({wrong[0]}, ..)"
                raise ValueError(f"{self.kind} cannot be measured: {which} {why}")

    def check_positions(self, length: int) -> None:
        """Raise ValueError for more positions than are learned: a look-up beyond them would end a GPU's use."""
        limit = getattr(self.config, "max_position_embeddings", None)
        tables = [m for m in self.base.modules() if isinstance(m, nn.Embedding) and m.weight is not self.table]
        if isinstance(limit, int) and any(limit <= table.num_embeddings <= limit + 2 for table in tables):
            require(length <= limit, f"ids have {length} positions, and the model has learned {limit}: give fewer")

    def check(self, rows: Sequence[Tensor]) -> None:
        """Raise ValueError if a token has weight on later ones, or if attention modules compute something else by the
        functions that the model names than by those whose weights are read.

        Looked at on one text of different tokens of the rows, as many as the longest has, but at most CHECK_TOKENS.
        """
        longest = max(len(row) for row in rows)
        text = torch.cat(list(rows)).unique()[: min(longest, CHECK_TOKENS)]
        if longest == 1:
            return
        if len(text) == 1:
            text = torch.cat([text, (text + 1) % self.vocabulary])
        asked = self.tally, self.exact
        self.tally, self.exact = Tally((1,), len(text), norms=False), True  # nothing of these passes is kept
        self.checking = True
        read = self._outputs(text)
        self.finish()
        self.checking = False
        own = read
        if not self.legacy and set(self.own.values()) != {"eager"}:
            with self.choosing(None):
                own = self._outputs(text)
        self.tally, self.exact = asked
        for module, output in read.items():
            gap = (own[module] - output).float().norm(dim=-1) / output.float().norm(dim=-1).clamp(min=1e-30)
            usual = gap.flatten().sort().values[gap.numel() // 2]  # half precision sends some tokens to other experts
            if usual > (1e-3 if output.dtype in (torch.float32, torch.float64) else 5e-2):
                names = " and ".join(sorted(map(repr, set(self.own.values()))))
                why = f"computes something else by its attention {names} than by the family's eager one, which is read"
                if self.needs_mask:
                    why += ": with is_causal off it sees later tokens"
                raise ValueError(f"{self.kind} {why}; measure it after model.set_attn_implementation('eager')")

    def _outputs(self, text: Tensor) -> dict[nn.Module, Tensor]:
        """What the attention modules return for one text (T,)."""
        outputs: dict[nn.Module, Tensor] = {}

        def see(module: nn.Module, _: Any, output: Any) -> None:
            outputs[module] = output if isinstance(output, Tensor) else output[0]

        with ExitStack() as stack:
            for module in self.layers:
                stack.enter_context(module.register_forward_hook(self.here(see)))
            self.start(text[None])
            self._pass(text[None])
        return outputs

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """The module's own output, (B, T, H, D); q (B, H, T, D), k and v (B, H or fewer, T, D), mask (B, 1, T, T)."""
        if module not in self.layers:
            raise ValueError(f"{type(module).__name__} computes attention but is not among the layers' attention")
        if k.shape[2] != q.shape[2] + self.front:
            raise ValueError(f"{self.kind} attends to {k.shape[2]} keys for {q.shape[2]} tokens: alpha_k is of tokens")
        self.calls[module] += 1
        layer = self.layers[module]
        self._check_heads(layer, q.shape[1])
        if module in self.registered:
            out, weights = families.by_registered(Call(module, q, k, v, mask, kwargs), *self.registered[module])
            self._look_for_later(weights)
            self.tally.add_qkv(layer, q, k, v)
            self.tally.add_weights(layer, [weights])
            return out
        causal = kwargs.get("is_causal")
        if mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise ValueError(f"{type(module).__name__} {LATER}")
        seen = families.chosen_keys(module, self._look_at_mask(layer, mask, q.shape[2], kwargs), q, kwargs)
        call = Call(module, q, k, v, seen, kwargs)
        if self.hidden is not None:
            call = call.hiding(self.hidden)
        self.tally.add_qkv(layer, q, k, v)
        fused = self._fused(call, layer)
        return self._exact(call, layer) if fused is None else fused

    def _look_for_later(self, weights: Tensor) -> None:
        """Raise ValueError where the weights (B, H, T, T) of a check are on later tokens."""
        if self.checking and weights.triu(1).abs().max() > 1e-6:
            raise ValueError(f"{self.kind} {LATER}")

    def _check_heads(self, layer: int, count: int) -> None:
        wrong = [(layer, head) for head in self.tally.heads_of(layer) if head >= count]
        refuse_heads(wrong, f"its layer {layer} has heads 0..{count - 1}")

    def _look_at_mask(
        self, layer: int, mask: Tensor | None, length: int, kwargs: dict[str, Any]
    ) -> Tensor | PositionMask | None:
        """The mask, as positions where it is a window's, and a note of that window."""
        seen = masks.by_position(mask, self.kind)
        window = seen.window if isinstance(seen, masks.WindowMask) else kwargs.get("sliding_window")
        if window is None and isinstance(seen, Tensor) and not self.front:
            window = masks.window_of(seen)
        if mask is not None and isinstance(window, int) and window < length:
            self.windows[layer] = window
            self.chunked |= isinstance(seen, masks.WindowMask) and seen.chunked
        return seen

    def _fused(self, call: Call, layer: int) -> Tensor | None:
        """Output by a fused kernel, alpha by its log-sum-exp; None where that cannot be done or proves wrong."""
        module, q = call.module, call.q
        known = self.proved.get(module, {})
        maps = self.tally.mass or self.tally.heads_of(layer)
        if self.exact or self.front or maps or not known.get(call.kind, True) or not can_serve(call):
            return None
        if not flash.trusted("fused", call.kind, q.device, q.dtype, q.shape[-1]):
            self.proved[module] = known | {call.kind: False}
            return None
        columns = self.tally.columns(q.device)
        found = fused(call, columns)
        if found is None:
            return None
        if call.kind not in known:
            self.proved[module] = known | {call.kind: proves_right(call, found, columns)}
            if not self.proved[module][call.kind]:
                return None
        self.tally.add("alpha", layer, mean_over_queries(found.alpha, columns))
        if found.star is not None:
            self.tally.add("renormalised", layer, mean_over_queries(found.shares, columns))
            self.tally.add("star", layer, found.star.mean(-1))
        return found.out

    def _exact(self, call: Call, layer: int) -> Tensor:
        """Output and weights by the family's eager function, chunk by chunk of queries."""
        batch, heads, length, _ = call.q.shape
        step = max(1, EXACT_ELEMENTS // (batch * heads * length))
        if any(isinstance(value, Tensor) and value.ndim >= 3 for value in call.kwargs.values()):
            step = length  # an argument by position (a bias of T x T) that only the family knows how to cut
        outs, stars = [], []

        def weights() -> Iterator[Tensor]:
            for rows in torch.arange(length, device=call.q.device).split(step):
                out, part = families.chunk(call, rows)
                outs.append(out)
                if self.checking:  # of a text of one chunk
                    self._look_for_later(part)
                if self.front:
                    stars.append(part[..., : self.front].sum(dim=-1).float())  # (B, H, R)
                yield part[..., self.front :]

        sink = families.learned_sink(call.kwargs) is not None and not self.front
        self.tally.add_weights(layer, weights(), sink=sink)
        if stars:
            self.tally.add("star", layer, torch.cat(stars, dim=-1).mean(dim=-1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _see_weights(self, module: nn.Module, _: Any, output: tuple | list) -> tuple | list:
        """Legacy families: reduce the weights that a module returns, and drop them."""
        square = self.shape[-1:] * 2
        places = [i for i, x in enumerate(output) if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == square]
        if len(places) != 1:
            return output
        self.calls[module] += 1
        layer, (_, heads, length, _) = self.layers[module], output[places[0]].shape
        self._check_heads(layer, heads)
        local = getattr(module, "attention_type", "") == "local"  # of GPT-Neo
        if local and int(module.config.window_size) < length:  # type: ignore[arg-type, union-attr]
            self.windows[layer] = int(module.config.window_size)  # type: ignore[arg-type, union-attr]
        self._look_for_later(output[places[0]])
        self.tally.add_weights(layer, [output[places[0]]])
        return type(output)(None if i == places[0] else part for i, part in enumerate(output))

    def _see_embedding(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tally.add_norms("embedding", 0, self._streams(args[0] if args else kwargs["hidden_states"]))

    def _see_block(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        self.tally.add_hidden(layer, self._streams(output if isinstance(output, Tensor) else output[0]))

    def _streams(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, S, T, C) of a block; most families have one stream, (B, T, C), some several."""
        if hidden.ndim == 3:
            return hidden[:, None]
        return hidden.transpose(1, 2) if hidden.shape[:2] == self.shape else hidden.transpose(0, 1)
