"""Capture for models of transformers, which let a model choose its attention function by name.

The one registered here computes the module's own output and, beside it, what a report needs, by one of two paths:

- fused: the kernel's log-sum-exp gives A_ik = exp(s_ik - lse_i) of the chosen keys; in every module it is compared
  with the exact path, on rows that see those keys, before it is trusted under a kind of mask
- exact: the family's own eager function on chunks of queries, whose weights are reduced and dropped

Families outside that interface are measured by hooks on the weights that their eager attention returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.checks import require
from sinkutils.measuring.report import NotFinite
from sinkutils.measuring.tally import Tally, mean_over_queries, refuse_heads
from sinkutils.model import flash
from sinkutils.model.flash import PositionMask

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from sinkutils.measuring import families, masks
    from sinkutils.measuring.families import Call, repeat_heads
except ImportError as error:
    raise ImportError("measuring models of others needs transformers: pip install transformers") from error

NAME = "sinkutils"  # of the attention function and of its mask
EXACT_ELEMENTS = 2**25  # attention weights that the exact path holds at a time: 128 MiB in float32
CHECK_ROWS = 64  # queries on which the fused path is compared with the exact one, or all
# Keyword arguments that do not change what attention computes, or that the fused path takes into account.
KNOWN = set(
    "dropout scaling is_causal s_aux sliding_window position_ids cache_position use_cache output_attentions "
    "output_hidden_states output_router_logits position_embeddings".split()
)

_current: ContextVar[Capture | None] = ContextVar("sinkutils_capture", default=None)


@contextmanager
def capturing(model: nn.Module, tally: Tally, exact: bool = False) -> Iterator[Capture]:
    """While this is open, forward passes of `model` (in eval mode) add to the tally; their logits do not change."""
    capture = Capture(model, tally, exact)
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    hooks = {module: set(module._forward_hooks) for module in model.modules()}
    token = _current.set(capture)
    try:
        for config in configs.values():
            config._attn_implementation = "eager" if capture.legacy else NAME
        with ExitStack() as stack:
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
        for key, config in configs.items():
            config._attn_implementation = before[key]
        _current.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    capture = _current.get()
    if capture is None:
        raise RuntimeError(f"attention {NAME!r} works within sinkutils.measure only: choose another implementation")
    return capture.attention(module, query, key, value, attention_mask, kwargs), None


def _mask(**asked: Any) -> Tensor | None:
    capture = _current.get()
    if capture is not None and capture.needs_mask:  # a decoder whose modules do not call themselves causal
        asked["allow_is_causal_skip"] = False
    return masks.mask(**asked)


# A name without a mask of its own would get none at all, and the model would see later tokens.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class Capture:
    """What is known of one model, and what its attention modules report while it runs."""

    def __init__(self, model: nn.Module, tally: Tally, exact: bool) -> None:
        self.kind = kind = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"model must be a TransformerLM or of transformers: take {kind} out of its wrapper")
        why = families.REFUSED.get(model.config.model_type)
        require(why is None, f"{kind} cannot be measured: {why}")
        require(not model.config.is_encoder_decoder, f"{kind} is an encoder-decoder model, not a causal LM")
        self.config, self.base, self.tally, self.exact = model.config, model.base_model, tally, exact
        self.table: Tensor = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[assignment]
        if self.table is None:
            raise ValueError(f"{kind} embeds no tokens: sinks are measured on causal LMs")
        self.vocabulary = len(self.table)
        self.calls: Counter[nn.Module] = Counter()
        self.fused: dict[tuple[nn.Module, str], bool] = {}  # whether the fused path proved right, by kind of mask
        self.windows: dict[int, int] = {}  # by layer, where one was shorter than the sequence
        self.chunked = False  # windows do not slide
        self.shape: tuple[int, ...] = ()  # of the ids in the forward pass that runs
        self.last_hidden: Tensor | None = None
        self.blocks, self.layers = families.attention_layers(self.base)
        eager = [families.chooses_attention(module) for module in self.layers]
        require(any(eager) == all(eager), f"{kind} mixes attention modules of two kinds, which is not supported")
        self.legacy = not any(eager)
        self.needs_mask = not all(getattr(module, "is_causal", True) for module in self.layers)
        wrong = [pair for pair in tally.heads if pair[0] not in self.layers.values()]
        refuse_heads(wrong, f"its attention layers are {sorted(self.layers.values())}")

    @property
    def path(self) -> str:
        """How alpha was computed."""
        if self.legacy:
            return "eager weights"
        kinds_of = {module: [right for (of, _), right in self.fused.items() if of is module] for module in self.layers}
        trusted = sum(bool(kinds) and all(kinds) for kinds in kinds_of.values())
        return {0: "exact", len(self.layers): "fused"}.get(trusted, f"fused in {trusted} of {len(self.layers)} layers")

    def hook(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks for the blocks' inputs and outputs and, outside the interface, for attention weights."""
        handles = [self.blocks[0].register_forward_pre_hook(self._see_embedding, with_kwargs=True)]
        handles += [
            block.register_forward_hook(lambda _, __, output, layer=layer: self._see_block(layer, output))
            for layer, block in enumerate(self.blocks)
        ]
        if self.legacy:
            handles += [module.register_forward_hook(self._see_weights) for module in self.layers]
        return handles

    def run(self, ids: Tensor) -> None:
        """One forward pass of ids (B, T), without the unembedding. Raises ValueError if a layer did not report."""
        self.calls.clear()
        self.shape = tuple(ids.shape)
        legacy = {"output_attentions": True} if self.legacy else {}
        # A model whose embedding is offloaded (accelerate) moves the ids itself.
        device = "cpu" if self.table.is_meta else self.table.device
        try:
            self.base(input_ids=ids.to(device), use_cache=False, **legacy)
        except IndexError as error:
            raise ValueError(f"ids have {ids.shape[1]} positions, more than the model has embeddings for") from error
        wrong = [
            name for name, module in self.base.named_modules() if module in self.layers and self.calls[module] != 1
        ]
        if wrong:
            which = f"{len(wrong)} of {len(self.layers)} attention modules ({wrong[0]}, ..)"
            raise ValueError(f"{self.kind} cannot be measured: {which} did not show their weights exactly once")

    def check(self, ids: Tensor, length: int) -> None:
        """Raise ValueError for more positions than are learned, a look-up beyond which would end a GPU's use, and if
        another last token changes what earlier positions compute; ids (T,).
        """
        limit = getattr(self.config, "max_position_embeddings", None)
        tables = [m for m in self.base.modules() if isinstance(m, nn.Embedding) and m.weight is not self.table]
        if isinstance(limit, int) and any(limit <= table.num_embeddings <= limit + 2 for table in tables):
            require(length <= limit, f"ids have {length} positions, and the model has learned {limit}: give fewer")
        pair = ids[:8].repeat(2, 1)
        pair[1, -1] = (pair[1, -1] + 1) % self.vocabulary
        asked = self.tally, self.exact
        self.tally, self.exact = Tally((1,), pair.shape[1], norms=False), True  # nothing of this pass is kept
        self.run(pair)
        self.tally, self.exact = asked
        assert self.last_hidden is not None
        first, second = self.last_hidden[..., :-1, :].float()
        if not (first.isfinite().all() and second.isfinite().all()):
            raise NotFinite("hidden states are not finite: the model's weights hold nan or infinite values")
        tolerance = 1e-3 if self.last_hidden.dtype == torch.float32 else 5e-2
        if first.numel() and (first - second).abs().max() > tolerance * first.abs().max():
            raise ValueError(f"{self.kind} sees later tokens: it is no causal LM (encoder-only?)")

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """The module's own output, (B, T, H, D); q (B, H, T, D), k and v (B, H or fewer, T, D), mask (B, 1, T, T)."""
        if module not in self.layers:
            raise ValueError(f"{type(module).__name__} computes attention but is not among the layers' attention")
        if k.shape[2] != q.shape[2]:
            raise ValueError(f"{self.kind} attends to {k.shape[2]} keys for {q.shape[2]} tokens: alpha_k is of tokens")
        causal = kwargs.get("is_causal")
        if mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise ValueError(f"{type(module).__name__} sees later tokens: it is no causal LM (encoder-only?)")
        self.calls[module] += 1
        layer = self.layers[module]
        self._check_heads(layer, q.shape[1])
        seen = families.chosen_keys(module, self._look_at_mask(layer, mask, q.shape[2], kwargs), q, kwargs)
        self.tally.add_qkv(layer, q, k, v)
        call = Call(module, q, k, v, seen, kwargs)
        out = self._fused(call, layer)
        return self._exact(call, layer) if out is None else out

    def _check_heads(self, layer: int, count: int) -> None:
        wrong = [(layer, head) for head in self.tally.heads_of(layer) if head >= count]
        refuse_heads(wrong, f"its layer {layer} has heads 0..{count - 1}")

    def _look_at_mask(
        self, layer: int, mask: Tensor | None, length: int, kwargs: dict[str, Any]
    ) -> Tensor | PositionMask | None:
        """The mask, as positions where it is a window's, and a note of that window."""
        seen = masks.by_position(mask, self.kind)
        window = seen.window if isinstance(seen, masks.WindowMask) else kwargs.get("sliding_window")
        if window is None and isinstance(seen, Tensor):
            window = masks.window_of(seen)
        if mask is not None and isinstance(window, int) and window < length:
            self.windows[layer] = window
            self.chunked |= isinstance(seen, masks.WindowMask) and seen.chunked
        return seen

    def _fused(self, call: Call, layer: int) -> Tensor | None:
        """Output by a fused kernel, alpha by its log-sum-exp; None where that cannot be done or proves wrong."""
        module, q, k, v, mask, kwargs = call
        unknown = any(value is not None and name not in KNOWN for name, value in kwargs.items())
        unlike = q.shape[-1] != v.shape[-1] or not q.dtype == k.dtype == v.dtype
        maps = self.tally.mass or self.tally.heads_of(layer)
        if self.exact or unknown or unlike or maps or not self.fused.get((module, call.kind), True):
            return None
        if not flash.trusted("fused", call.kind, q.device, q.dtype, q.shape[-1]):
            self.fused[module, call.kind] = False
            return None
        keys, values = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        of = (q, keys, values)
        result = flash.fused(*of, scale=call.scale) if mask is None else flash.fused_rows(*of, mask, call.scale)
        if result is None:
            return None
        out, lse = result
        columns = self.tally.columns(q.device)
        logits = q.float() @ keys[:, :, columns].float().mT * call.scale  # (B, H, T, K)
        seen = call.mask_of(torch.arange(q.shape[2], device=q.device), columns)
        if seen.dtype != torch.bool:
            logits, seen = logits + seen, seen > torch.finfo(seen.dtype).min / 2
        shares = torch.exp(logits - lse[..., None]).masked_fill(~seen, 0)
        parts = {"alpha": shares}
        if kwargs.get("s_aux") is not None:
            # A learned sink logit joins the softmax through its log-sum-exp.
            sink = kwargs["s_aux"].float().reshape(1, -1, 1)
            total = torch.logaddexp(lse, sink)
            rest = torch.exp(lse - total)[..., None]
            parts = {"alpha": shares * rest, "renormalised": shares, "star": torch.exp(sink - total)}
            out = out * rest.to(out.dtype)
        out = out.transpose(1, 2).contiguous()
        if (module, call.kind) not in self.fused:
            looked_at = masks.rows_to_compare(seen, CHECK_ROWS)
            expected, weights = families.chunk(call._replace(q=q[:1], k=k[:1], v=v[:1]), looked_at)
            tolerance = 2e-5 if q.dtype in (torch.float32, torch.float64) else 3e-2
            close = (parts["alpha"][:1, :, looked_at] - weights[..., columns]).abs().max() <= tolerance
            tolerance *= max(1.0, float(v.abs().max()))
            self.fused[module, call.kind] = bool(close and (out[:1, looked_at] - expected).abs().max() <= tolerance)
            if not self.fused[module, call.kind]:
                return None
        for name, value in parts.items():
            self.tally.add(name, layer, value.mean(-1) if name == "star" else mean_over_queries(value, columns))
        return out

    def _exact(self, call: Call, layer: int) -> Tensor:
        """Output and weights by the family's eager function, chunk by chunk of queries."""
        batch, heads, length, _ = call.q.shape
        step = max(1, EXACT_ELEMENTS // (batch * heads * length))
        if any(isinstance(value, Tensor) and value.ndim >= 3 for value in call.kwargs.values()):
            step = length  # an argument by position (a bias of T x T) that only the family knows how to cut
        outs = []

        def weights() -> Iterator[Tensor]:
            for rows in torch.arange(length, device=call.q.device).split(step):
                out, part = families.chunk(call, rows)
                outs.append(out)
                yield part

        self.tally.add_weights(layer, weights(), sink=families.learned_sink(call.kwargs) is not None)
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
        self.tally.add_weights(layer, [output[places[0]]])
        return type(output)(None if i == places[0] else part for i, part in enumerate(output))

    def _see_embedding(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tally.add_norms("embedding", 0, self._streams(args[0] if args else kwargs["hidden_states"]))

    def _see_block(self, layer: int, output: Any) -> None:
        self.last_hidden = self._streams(output if isinstance(output, Tensor) else output[0])
        self.tally.add_hidden(layer, self.last_hidden)

    def _streams(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, S, T, C) of a block; most families have one stream, (B, T, C), some several."""
        if hidden.ndim == 3:
            return hidden[:, None]
        return hidden.transpose(1, 2) if hidden.shape[:2] == self.shape else hidden.transpose(0, 1)
