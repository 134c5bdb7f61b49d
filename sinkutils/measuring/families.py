"""What differs among the families of decoder models in transformers, and what `hf` needs to know of it.

`benchmarks/families.py` builds every family in small, holds it against dense attention and writes docs/families.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkutils.checks import require
from sinkutils.model.flash import PositionMask
from sinkutils.paths import LEDGER, read_yaml

NO_SOFTMAX = re.compile("Linear|Lightning|Delta|Mamba|Rwkv|Rotary|Norm|Residual")  # in a class's name
# In a module's path: what attends to an encoder's states, to images or to sound. Text alone never calls it.
NOT_TEXT = re.compile("encoder_attn|cross_?attn|cross_?attention|vision|visual|image|audio")
PREFIX = {"paligemma"}  # by model_type: in their own use every token of a prompt sees the whole prompt
REFUSED = read_yaml(LEDGER / "unmeasured.yaml")  # why a family cannot be measured, by its model_type


def attention_layers(base: nn.Module) -> tuple[nn.ModuleList, dict[nn.Module, int]]:
    """The blocks of a model, and its softmax attention modules with the index of their block."""
    modules = {name: module for name, module in base.named_modules() if _is_attention(name, module)}
    # GPT-Neo and others wrap one attention module in another: the innermost one computes.
    leaves = [name for name in modules if not any(other.startswith(name + ".") for other in modules)]
    places = [re.match(r"(.*?)\.?(\d+)\.", name) for name in leaves]
    kind = type(base).__name__
    require(len(leaves) > 0, f"{kind} has no softmax attention layers, so it has no attention sink")
    lists = {place[1] if place else "" for place in places}
    require(
        len(lists) == 1 and all(places),
        f"{kind} has attention outside one list of blocks ({sorted(lists)}): give its text decoder",
    )
    indices = [int(place[2]) for place in places if place]
    if len(set(indices)) < len(indices):  # LongCat-Flash has two in a block
        indices = list(range(len(indices)))
    layers = {modules[name]: index for name, index in zip(leaves, indices, strict=True)}
    return base.get_submodule(lists.pop()), layers  # type: ignore[return-value]


def _is_attention(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    named = "Attention" in kind and not NO_SOFTMAX.search(kind)
    return not NOT_TEXT.search(name) and (named or chooses_attention(module))


def chooses_attention(module: nn.Module) -> bool:
    """Whether the module computes its attention by the function that its configuration names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration in a model that names an attention function, each once."""
    of_modules = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in of_modules if hasattr(c, "_attn_implementation")}.values())


def is_of_transformers(function: Any) -> bool:
    """Whether transformers' own code defines a function, and not somebody who registered it there."""
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers.")


class Call(NamedTuple):
    """What a module hands to its attention function."""

    module: nn.Module
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, H or fewer, T, D), as v; T and more with a cache in front
    v: Tensor
    mask: Tensor | PositionMask | None  # a tensor: (B, 1 or H, T, T), booleans or added to the logits; None: causal
    kwargs: dict
    eager: Callable  # the family's reference attention, of the module's own file
    hidden: Tensor | None = None  # (T, T), of surgery: the keys j that queries i do not see

    @property
    def kind(self) -> str:
        """The kind of mask, for `flash.trusted`."""
        return "causal" if self.mask is None else "mask" if isinstance(self.mask, Tensor) else "window"

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        scale = self.kwargs.get("scaling")
        return self.q.shape[-1] ** -0.5 if scale is None else float(scale)

    @property
    def sink(self) -> Tensor | None:
        """The learned sink logit, if the module has one: (H,) or (B, H, T, 1)."""
        return self.kwargs.get("s_aux", self.kwargs.get("sinks"))

    def mask_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask of the queries `rows` (R,) and the keys `columns` (S,), ending in (R, S)."""
        if isinstance(self.mask, Tensor):
            mask = self.mask[: len(self.q), :, rows][..., columns]
        elif self.mask is None:
            mask = rows[:, None] + (self.k.shape[2] - self.q.shape[2]) >= columns
        else:
            mask = self.mask.seen(rows, columns)
        if self.hidden is None:
            return mask
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask.masked_fill(self.hidden.to(mask.device)[rows][:, columns], lowest)


def chunk(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The family's eager attention for some queries, rows (R,): out (B, R, H, D) and weights (B, H, R, keys)."""
    seen = call.mask_of(rows, torch.arange(call.k.shape[2], device=rows.device))
    if seen.dtype == torch.bool:  # eager functions add what they are given
        seen = torch.zeros_like(seen, dtype=call.q.dtype).masked_fill(~seen, torch.finfo(call.q.dtype).min)
    part = call._replace(q=call.q[:, :, rows], mask=seen if seen.ndim == 4 else seen[None, None])
    out, weights = call.eager(*part[:5], **call.kwargs)
    sink = call.sink
    if sink is not None and sink.ndim == 1 and (weights.float().sum(dim=-1) - 1).abs().max() < 1e-3:
        weights = _scaled_by_sink(part, sink, out, weights)
    return out, weights


def by_registered(call: Call, function: Any, name: str) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, D) and weights (B, H, T, T) of an attention function that somebody registered.

    Raises ValueError where it returns no weights, or other ones than its output is made of.
    """
    out, weights = function(*call[:5], **call.kwargs)
    wanted = f"attention {name!r} is none of transformers': it must return its weights (B, H, T, T) beside the output"
    shape = (*call.q.shape[:3], call.k.shape[2])
    require(isinstance(weights, Tensor) and weights.shape == shape, f"{wanted}, or choose eager or sdpa")
    require(_is_product(out, weights, call.v), f"{wanted}, and its output is not these weights times the values")
    return out, weights


def _is_product(out: Tensor, weights: Tensor, v: Tensor) -> bool:
    """Whether an output (B, R, H, D) is these weights (B, H, R, T) times the values (B, H or fewer, T, D)."""
    expected = (weights @ repeat_heads(v, weights.shape[1]).to(weights.dtype)).transpose(1, 2)
    tolerance = 1e-4 if out.dtype.itemsize >= 4 else 3e-2
    return bool((out - expected).abs().max() <= tolerance * max(1.0, float(v.abs().max())))


def _scaled_by_sink(call: Call, sink: Tensor, out: Tensor, weights: Tensor) -> Tensor:
    """Weights (B, H, R, T) of rows that sum to one, less what a learned sink logit takes of each.

    Granite's eager function scales the output by sigmoid(lse - sink) and returns the weights as they were before.
    """
    logits = call.q.float() @ repeat_heads(call.k, call.q.shape[1]).float().mT * call.scale
    lse = (logits + call.mask.float()).logsumexp(dim=-1, keepdim=True)  # type: ignore[union-attr]
    scaled = weights * torch.sigmoid(lse - sink.float().reshape(1, -1, 1, 1)).to(weights.dtype)
    require(
        _is_product(out, scaled, call.v),
        f"{type(call.module).__name__} has a learned sink whose share is unknown: its weights sum to one, its output "
        "differs",
    )
    return scaled


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped-query keys or values (B, H_kv, T, D) for every query head, (B, H, T, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
