"""Capture for models of transformers, whose attention modules ask for a function by name.

While a model is measured, what they are given computes the module's own output and, with it, what a report needs:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sinkutils.checks import require
from sinkutils.measuring import families, masks
from sinkutils.measuring.families import Call
from sinkutils.measuring.fused import can_serve, fused, proves_right
from sinkutils.measuring.tally import Tally
from sinkutils.model import flash

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
_get_interface = AttentionInterface.get_interface
_get_mask = AttentionMaskInterface.__getitem__


@contextmanager
def capturing(model: nn.Module, tally: Tally, exact: bool = False) -> Iterator[Capture]:
    """While this is open, forward passes of `model` (in eval mode) add to the tally; their logits do not change.

    Those of other threads, and of other models, are what they always are.
    """
    capture = Capture(model, tally, exact)
    with ExitStack() as stack:
        stack.callback(_current.reset, _current.set(capture))
        stack.enter_context(patch.object(AttentionInterface, "get_interface", _function))
        stack.enter_context(patch.object(AttentionMaskInterface, "__getitem__", _mask))
        for config in families.configurations(model) if capture.legacy else ():
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = "eager"
        for handle in capture.hook():
            stack.enter_context(handle)
        yield capture


def _function(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
    """In place of `AttentionInterface.get_interface`: `default` is the eager attention of the module that asks."""
    function = _get_interface(self, attn_implementation, default)
    capture = _current.get()
    if capture is None or capture.as_named:
        return function
    return partial(capture.attention, attn_implementation or "eager", function, default)


def _mask(self: AttentionMaskInterface, key: str) -> Callable:
    """In place of `AttentionMaskInterface[..]`: the masks that go with an attention function of transformers."""
    capture = _current.get()
    function = _get_mask(self, key)
    attention = AttentionInterface._global_mapping.get(key)
    registered = attention is not None and not families.is_of_transformers(attention)
    if capture is None or capture.as_named or capture.legacy or registered:
        return function
    # A decoder whose modules do not call themselves causal needs to be told by a mask.
    told = {"allow_is_causal_skip": False} if capture.needs_mask else {}
    return lambda **asked: masks.mask(**asked | told)


def _taken(module: nn.Module) -> Mapping:
    return inspect.signature(module.forward).parameters


class Capture:
    """What is known of one model, and what its attention modules report while it runs."""

    def __init__(self, model: nn.Module, tally: Tally, exact: bool) -> None:
        self.kind = kind = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"model must be a TransformerLM or of transformers, out of any wrapper; got {kind}: {INTERFACE}"
            )
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
        self.named: set[str] = set()  # the attention functions that the model names
        self.registered: set[str] = set()  # those of them that are none of transformers'
        self.proved: dict[tuple, bool] = {}  # whether the fused path proved right, by module and kind of mask
        self.windows: dict[int, int] = {}  # by layer, where one was shorter than the sequence
        self.chunked = False  # windows do not slide
        self.shape: tuple[int, ...] = ()  # of the ids in the forward pass that runs
        self.checking = False  # whether weights on later tokens are looked for
        self.as_named = False  # whether the functions that the model names compute alone
        self.hidden: Tensor | None = None  # (T, T), of surgery: the keys j that queries i do not see
        self.front = 0  # of surgery: keys of a cache in front of the text
        self.blocks, self.layers = families.attention_layers(self.base)
        self.modules = set(self.base.modules())
        chooses = {families.chooses_attention(module) for module in self.layers}
        require(len(chooses) == 1, f"{kind} mixes attention modules of two kinds, which is not supported")
        self.legacy = chooses == {False}
        self.needs_mask = not all(getattr(module, "is_causal", True) for module in self.layers)

    def _embedding(self, model: Any) -> Tensor:
        """The table of token embeddings (vocabulary, d)."""
        try:
            module = model.get_input_embeddings()
        except NotImplementedError:
            module = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
        table = getattr(module, "weight", None)
        if table is None:
            raise ValueError(f"{self.kind} embeds no tokens: sinks are measured on causal LMs")
        return table

    @property
    def path(self) -> str:
        """How alpha was computed."""
        if self.legacy:
            return "eager weights"
        if self.registered:
            return "registered: " + ", ".join(sorted(self.registered))
        wrong = {module for (module, _), right in self.proved.items() if not right}
        trusted = len({module for module, _ in self.proved} - wrong)
        return {0: "exact", len(self.layers): "fused"}.get(trusted, f"fused in {trusted} of {len(self.layers)} layers")

    def here(self, function: Callable) -> Callable:
        """A hook that leaves the forward passes of other threads alone."""
        return lambda *args: function(*args) if _current.get() is self else None

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
        options = {"use_cache": False}
        # Where modules do not ask whether to return weights, they always do, and asking the model leaves hooks on it.
        if self.legacy and all("output_attentions" in _taken(module) for module in self.layers):
            options["output_attentions"] = True
        taken = _taken(self.forward)
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
            require(
                not wrong,
                f"{self.kind} cannot be measured: {len(wrong)} of {len(calls)} attention modules "
                f"({', '.join(wrong[:1])}, ..) {why}",
            )

    def check_positions(self, length: int) -> None:
        """Raise ValueError for more positions than are learned: a look-up beyond them would end a GPU's use."""
        limit = getattr(self.config, "max_position_embeddings", None)
        tables = [m for m in self.base.modules() if isinstance(m, nn.Embedding) and m.weight is not self.table]
        if isinstance(limit, int) and any(limit <= table.num_embeddings <= limit + 2 for table in tables):
            require(length <= limit, f"ids have {length} positions, and the model has learned {limit}: give fewer")

    def check(self, rows: Sequence[Tensor], run: bool = True) -> None:
        """Raise ValueError for rows that are too long, if a token has weight on later ones, or if attention modules
        compute something else by the functions that the model names than by those whose weights are read.

        run: look at the latter two, on one text of different tokens of the rows, at most CHECK_TOKENS.
        """
        longest = max(len(row) for row in rows)
        self.check_positions(longest)
        if not run or longest == 1:
            return
        text = torch.cat(list(rows)).unique()[: min(longest, CHECK_TOKENS)]
        if len(text) == 1:
            text = torch.cat([text, (text + 1) % self.vocabulary])
        asked = self.tally, self.exact
        self.tally, self.exact = Tally((1,), len(text), norms=False), True  # nothing of these passes is kept
        self.checking = True
        read = self._outputs(text)
        self.finish()
        self.checking, self.as_named = False, True
        own = read if self.named <= {"eager"} else self._outputs(text)
        self.as_named = False
        self.tally, self.exact = asked
        for module, output in read.items():
            gap = (own[module] - output).float().norm(dim=-1) / output.float().norm(dim=-1).clamp(min=1e-30)
            usual = gap.flatten().sort().values[gap.numel() // 2]  # half precision sends some tokens to other experts
            if usual > (1e-3 if output.dtype.itemsize >= 4 else 5e-2):
                named = " and ".join(sorted(map(repr, self.named)))
                why = ": with is_causal off it sees later tokens" if self.needs_mask else ""
                raise ValueError(
                    f"{self.kind} computes something else by its attention {named} than by the family's eager one, "
                    f"which is read{why}; measure it after model.set_attn_implementation('eager')"
                )

    def _outputs(self, text: Tensor) -> dict[nn.Module, Tensor]:
        """What the attention modules return for one text (T,)."""
        outputs = {}

        def see(module, _, output):
            outputs[module] = output if isinstance(output, Tensor) else output[0]

        with ExitStack() as stack:
            for module in self.layers:
                stack.enter_context(module.register_forward_hook(self.here(see)))
            self.start(text[None])
            self._pass(text[None])
        return outputs

    def attention(
        self,
        name: str,
        function: Callable,
        eager: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The module's own output, (B, T, H, D), by the family's `eager` function or in its place.

        name, function: what the model names. query: (B, H, T, D), key and value: (B, H or fewer, T, D),
        attention_mask: (B, 1, T, T).
        """
        mask = masks.by_position(attention_mask, self.kind)
        call = Call(module, query, key, value, mask, kwargs, eager)
        length = query.shape[2]
        if module not in self.modules:  # of another model, whose mask was made for ours
            return families.chunk(call, torch.arange(length, device=query.device))[0], None
        require(
            module in self.layers and key.shape[2] == length + self.front,
            f"{type(module).__name__} attends to {key.shape[2]} keys for {length} tokens: alpha_k is of tokens, in "
            "layers that stand in one list of blocks",
        )
        self.calls[module] += 1
        self.named.add(name)
        layer = self.layers[module]
        self.tally.add_qkv(layer, query, key, value)
        if function is not eager and not families.is_of_transformers(function):
            self.registered.add(name)
            out, weights = families.by_registered(call, function, name)
            self._look_for_later(weights)
            self.tally.add_weights(layer, [weights])
            return out, None
        causal = kwargs.get("is_causal")
        if mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise ValueError(f"{type(module).__name__} {LATER}")
        # Sparse attention writes its choice into the masks of these two; another function's kernel is told of it.
        chosen = any(kwargs.get(told) is not None for told in ("indices", "block_indices"))
        require(
            not chosen or name in ("eager", "sdpa"),
            f"{self.kind} chooses keys: measure it after model.set_attn_implementation('eager')",
        )
        self._note_window(layer, mask, length)
        call = call._replace(hidden=self.hidden)
        found = self._fused(call, layer)
        return self._exact(call, layer) if found is None else found, None

    def _look_for_later(self, weights: Tensor) -> None:
        """Raise ValueError where the weights (B, H, T, T) of a check are on later tokens."""
        if self.checking and weights.triu(1).abs().max() > 1e-6:
            raise ValueError(f"{self.kind} {LATER}")

    def _note_window(self, layer: int, mask: Any, length: int) -> None:
        """Keep what a mask, (.., T, T) or of positions, says of a window."""
        if isinstance(mask, masks.WindowMask) and mask.window < length:
            self.windows[layer] = mask.window
            self.chunked |= mask.chunked
        elif isinstance(mask, Tensor) and not self.front:
            window = masks.window_of(mask)
            self.windows |= {layer: window} if window else {}

    def _fused(self, call: Call, layer: int) -> Tensor | None:
        """Output by a fused kernel, alpha by its log-sum-exp; None where that cannot be done or proves wrong."""
        q, columns, place = call.q, self.tally.columns(call.q.device), (call.module, call.kind)
        operated = self.front or call.hidden is not None
        maps = self.tally.heads_of(layer, q.shape[1])
        if self.exact or operated or maps or not self.proved.get(place, True) or not can_serve(call, columns):
            return None
        if not flash.trusted("fused", call.kind, q.device, q.dtype, q.shape[-1]):
            self.proved[place] = False
            return None
        found = fused(call, columns)
        if place not in self.proved:
            self.proved[place] = proves_right(call, found, columns)
        if not self.proved[place]:
            return None
        self.tally.add_shares(layer, found.shares, found.rest)
        return found.out

    def _exact(self, call: Call, layer: int) -> Tensor:
        """Output and weights by the family's eager function, chunk by chunk of queries."""
        batch, heads, length, _ = call.q.shape
        step = max(1, EXACT_ELEMENTS // (batch * heads * length))
        if any(isinstance(value, Tensor) and value.ndim >= 3 for value in call.kwargs.values()):
            step = length  # an argument by position (a bias of T x T) that only the family knows how to cut
        outs = []

        def weights():
            for rows in torch.arange(length, device=call.q.device).split(step):
                out, part = families.chunk(call, rows)
                outs.append(out)
                self._look_for_later(part)  # the text of a check is one chunk
                yield part

        self.tally.add_weights(layer, weights(), call.sink is not None or self.front > 0, self.front)
        return torch.cat(outs, dim=1)

    def _see_weights(self, module: nn.Module, _: Any, output: tuple | list) -> tuple | list:
        """Legacy families: reduce the weights that a module returns, and drop them."""
        square = self.shape[-1:] * 2
        places = [i for i, x in enumerate(output) if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == square]
        if len(places) != 1:
            return output
        self.calls[module] += 1
        weights = output[places[0]]
        self._look_for_later(weights)
        self._note_window(self.layers[module], weights > 0, len(weights[0, 0]))
        self.tally.add_weights(self.layers[module], [weights])
        return type(output)(None if x is weights else x for x in output)

    def _see_embedding(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self.tally.add_norms("embedding", 0, self._streams(args[0] if args else kwargs["hidden_states"]))

    def _see_block(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        self.tally.add_hidden(layer, self._streams(output if isinstance(output, Tensor) else output[0]))

    def _streams(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, S, T, C) of a block; most families have one stream, (B, T, C), some several."""
        if hidden.ndim == 3:
            return hidden[:, None]
        return hidden.transpose(1, 2) if hidden.shape[:2] == self.shape else hidden.transpose(0, 1)
