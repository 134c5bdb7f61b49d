"""Families of models that the user taught by `families.register`: their parts, and the proof.

Whenever one of its models is measured, `prove`
compares what is read there with dense attention on a short text, and refuses what does not agree.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sinkutils.checks import Refused, first_line, require
from sinkutils.measuring import families
from sinkutils.measuring.families import Call, Family, Modules
from sinkutils.measuring.passes import Pass
from sinkutils.measuring.refusals import Unreadable
from sinkutils.measuring.tally import LeftAsFound

if TYPE_CHECKING:
    from sinkutils.measuring.hf import Capture

UNNAMED = (
    "computes attention, and is none of the attention modules that su.families.register was told of"
)
SILENT = (
    "is an attention module, as su.families.register was told, but neither returned weights "
    "(B, H, T, T) nor asked AttentionInterface for a function"
)


def attention_layers(model: Any, family: Family) -> tuple[list[nn.Module], dict[nn.Module, int]]:
    """As `families.attention_layers`: the blocks, and the index of its block for each module."""
    blocks = _modules(model, "blocks", family.blocks)
    places = {}  # attention module -> index of its block
    for module in _modules(model, "attention", family.attention):
        found = [place for place, block in enumerate(blocks) if module in block.modules()]
        around = f"{len(found)} blocks around one attention module ({type(module).__name__})"
        told = "by what su.families.register was told: it must be one"
        require(len(found) == 1, f"{type(model).__name__} has {around}, {told}")
        places[module] = found[0]
    return blocks, places


def _modules(model: Any, what: str, where: Modules) -> list[nn.Module]:
    """The modules of a model that are registered as `what`."""
    kind = type(model).__name__
    if not isinstance(where, str):
        try:
            modules = list(where(model))
        except Exception as error:  # of any kind, since the function is the user's
            raise Refused(f"{what}, a function, fails on {kind}: {first_line(error)}") from error
        right = bool(modules) and {*modules} <= {*model.modules()}
        require(right, f"{what}, a function, does not return modules of {kind}")
        return list(dict.fromkeys(modules))
    pattern = re.compile(re.escape(where).replace(r"\*", r"[^.]+"))
    for part in (model, model.base_model):  # names may begin at either
        found = [module for name, module in part.named_modules() if pattern.fullmatch(name)]
        if len(found) == 1 and isinstance(found[0], nn.ModuleList):
            found = list(found[0])
        if found:
            return found
    there = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()} - {""}
    near = ", ".join(difflib.get_close_matches(where, sorted(there), 3, 0.4) or sorted(there)[:3])
    raise Refused(f"{kind} has no modules {where!r} ({what}); it has, for instance, {near}")


def hidden_of(source: Capture, values: tuple[Any, ...]) -> list[Tensor]:
    """The hidden states (B, T, d) that the family's `hidden` finds, in each value by itself.

    values: what a block returned, alone, or what it takes, in which there may be none.
    """
    found: list[Tensor] = []
    if source.taught is None or source.taught.hidden is None:
        return found
    for value in values:
        try:
            x = source.taught.hidden(value)
            if x.ndim == 3 and x.is_floating_point() and x.shape[:2] == source.shape:
                found.append(x)
        except Exception:  # of any kind, since the function is the user's
            continue
    if not found and len(values) == 1:
        raise wrong(source, "`hidden` finds no hidden state (B, T, d) in what a block returns")
    return found


# --- the comparison


class Proving(Pass):
    """Keep the weights of every layer, and check that each block takes what the last one returned."""

    looks = True

    def __init__(self, source: Capture) -> None:
        self.source = source
        self.maps: dict[int, Tensor] = {}  # layer -> its weights (B, H, T, T)
        self.last = -1  # the block that ran last
        self.hidden: Tensor | None = None  # and what it returned, (B, 1, T, d)

    def attention(self, call: Call, layer: int) -> Tensor:
        out, weights = families.chunk(call, call.rows)
        if weights is None or not families.is_product(out, weights, call):
            raise wrong(self.source, "its eager attention returns weights that are not its own")
        self.maps[layer] = weights
        return out

    def weights(self, layer: int, weights: Tensor) -> None:
        self.maps[layer] = weights

    def block(self, layer: int, hidden: Tensor) -> None:
        self.last = layer
        self.hidden = hidden

    def takes(self, block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Check what a block takes, before it runs."""
        if block == 0:
            return
        if self.last != block - 1 or self.hidden is None:
            raise wrong(self.source, f"block {block + 1} does not run after block {block}")
        values = _floats((args, kwargs))
        values += hidden_of(self.source, (*args, args, *kwargs.values()))
        if not any(_close(x, self.hidden[:, 0]) for x in values):
            reason = f"block {block + 1} does not take the hidden state of block {block}"
            raise wrong(self.source, reason)


class Dense(TorchFunctionMode):
    """Record the dense attention maps of a pass: the softmaxes over at least T keys."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.maps: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = maps = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            # With the unit matrix as values, the output is the weights themselves.
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | kwargs
            v = given["value"]
            given["value"] = torch.eye(v.shape[-2]).to(v).expand(*v.shape[:-1], -1)
            maps = function(**given)
        elif name != "softmax":
            return out
        if maps.ndim >= 3 and maps.shape[-2] == self.length <= maps.shape[-1]:
            self.maps.append(maps)
        return out


def prove(source: Capture, ids: Tensor, entries: Mapping[str, Any]) -> None:
    """Compare what is read of a taught family with dense attention, by two passes on ids (B, T)."""
    source.start(ids)
    source.doing = Pass()
    with Dense(ids.shape[1]) as dense:
        plain = source.unobserved(source._pass, ids, entries)
    source.doing = proving = Proving(source)
    with LeftAsFound() as state:
        for number, block in enumerate(source.blocks):
            see = source.here(partial(proving.takes, number))
            state.hook(block, see, before=True)
        watched = source.run(ids, entries)
    for layer, weights in proving.maps.items():
        same = [i for i, x in enumerate(dense.maps) if _is_map(x, weights)]
        if same:
            del dense.maps[same[0]]
        elif source.legacy or dense.maps:
            of_layer = f"the weights of layer {layer} (from 0)"
            raise wrong(source, f"{of_layer} are not those of a softmax that it computes")
    others = sum(x.ndim == 4 for x in dense.maps)
    if others:
        raise wrong(source, f"it has {others} more attention maps than its attention modules show")
    if not all(map(_close, _floats(watched)[:1], _floats(plain)[:1])):
        raise wrong(source, "its logits change while it is measured")


def _floats(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def wrong(source: Capture, reason: str) -> Unreadable:
    kind = source.config.model_type
    return Unreadable(f"{source.kind} is not as su.families.register was told of {kind}: {reason}")


def _is_map(x: Tensor, weights: Tensor) -> bool:
    """Whether a recorded map is the weights (B, H, T, T), maybe with keys in front or behind."""
    batch, heads, length, _ = weights.shape
    if x.numel() != batch * heads * length * x.shape[-1]:
        return False
    x = x.reshape(batch, heads, length, -1)
    return _close(x[..., :length], weights) or _close(x[..., -length:], weights)


def _close(x: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree, up to rounding in the coarser of their precisions."""
    return families.close(x, right, 1e-3, 5e-2, max(1.0, float(right.abs().max())))
