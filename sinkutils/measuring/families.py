"""What differs among the families of decoder models in transformers.

`benchmarks/families.py` builds every family in small, holds it against dense attention and writes
docs/families.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sinkutils.checks import require
from sinkutils.paths import LEDGER, read_yaml

# An attention function: (module, q, k, v, mask, **kwargs) -> (out, weights or None)
Function: TypeAlias = Callable[..., Any]

# In a class's name
NO_SOFTMAX = re.compile("Linear|Lightning|Delta|Mamba|Rwkv|Rotary|Norm|Residual")
# In a module's path: what attends to an encoder's states, to images or to sound. Text alone never
# calls it.
NOT_TEXT = re.compile("encoder_attn|cross_?attn|cross_?attention|vision|visual|image|audio")
# By model_type: in their own use every token of a prompt sees the whole prompt
PREFIX = {"paligemma"}
INTERFACE = (
    "what is read are attention functions of transformers' AttentionInterface, or weights "
    "(B, H, T, T) that modules named Attention return"
)
# Why a family cannot be measured, by its model_type
REFUSED = read_yaml(LEDGER / "unmeasured.yaml")


def attention_layers(
    base: nn.Module,
) -> tuple[nn.ModuleList, dict[nn.Module, int], dict[nn.Module, int]]:
    """The blocks of a model; its softmax attention modules, counted; and the block of each."""
    # Modules are known by their class's name, or by asking the interface in their forward.
    modules = {}
    for name, module in base.named_modules():
        if _is_attention(name, module):
            modules[name] = module
    kind = type(base).__name__
    if not modules:
        reason = "has no softmax attention layers, so it has no attention sink"
        if not type(base).__module__.startswith("transformers."):
            reason = f"shows no attention module: {INTERFACE}"
        raise ValueError(f"{kind} {reason}")
    outside = f"{kind} has attention outside one list of blocks: give its text decoder"
    lists = set()  # the names of the lists in which attention stands
    places = {}
    for name, module in modules.items():
        # GPT-Neo and others wrap one attention module in another: the innermost one computes.
        if any(other.startswith(name + ".") for other in modules):
            continue
        place = re.match(r"(.*?)\.?(\d+)\.", name)  # "layers.3.self_attn": list and block
        if place is None:
            raise ValueError(outside)
        lists.add(place[1])
        places[module] = int(place[2])
    require(len(lists) == 1, outside)
    layers = places
    if len(set(places.values())) < len(places):  # LongCat-Flash has two in a block
        layers = {module: index for index, module in enumerate(places)}
    blocks: Any = base.get_submodule(lists.pop())
    return blocks, layers, places


def _is_attention(name: str, module: nn.Module) -> bool:
    if NOT_TEXT.search(name):
        return False
    kind = type(module).__name__
    if "Attention" in kind and not NO_SOFTMAX.search(kind):
        return True
    return chooses_attention(module)


def chooses_attention(module: nn.Module) -> bool:
    """Whether the module computes its attention by the function that its configuration names."""
    # Read off the compiled code, as nothing else tells before the module has run.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration in a model that names an attention function, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def is_of_transformers(function: Any) -> bool:
    """Whether transformers' own code defines a function, and not somebody who registered it."""
    function = getattr(function, "func", function)  # of a partial
    return home_of(function).startswith("transformers.")


def home_of(function: Any) -> str:
    """The module in whose file a function is written, "" if it is not known.

    Not `__module__`, which a decorator may have copied from what it wraps.
    """
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return str(names.get("__name__", ""))


def shown(mask: Tensor) -> Tensor:
    """A mask as booleans; of one that is added to the logits, where it does not hide a key."""
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min
    return mask > lowest / 2


def shown_in_any(mask: Tensor) -> Tensor:
    """Where a mask (.., T, S) shows a query a key in any text or head, (T, S)."""
    queries, keys = mask.shape[-2:]
    return shown(mask).reshape(-1, queries, keys).any(dim=0)


def window_of(mask: Tensor) -> int | None:
    """The window of a mask (.., T, T), booleans or added to the logits, if that is what it is."""
    seen = shown_in_any(mask)
    width = int(seen[-1].sum())  # keys that the last query sees
    if width == len(seen):
        return None
    # Through a window a query sees itself and the `width - 1` keys before it.
    band = torch.ones_like(seen).tril().triu(1 - width)
    return width if torch.equal(seen, band) else None


def widened(value: Any) -> Any:
    """A tensor of floats in float64, also in a dict; anything else as it is."""
    if isinstance(value, dict):
        return {name: widened(x) for name, x in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


class Call(NamedTuple):
    """What a module hands to its attention function."""

    module: nn.Module
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, H or fewer, T, D), as v; T and more with a cache in front
    v: Tensor
    # A tensor: (B, 1 or H, T, T), booleans or added to the logits; None: causal
    mask: Tensor | None
    kwargs: dict[str, Any]
    eager: Function  # the family's reference attention, of the module's own file
    hidden: Tensor | None = None  # (T, T), of surgery: the keys j that queries i do not see

    @property
    def rows(self) -> Tensor:
        """The positions of all queries, (T,)."""
        return torch.arange(self.q.shape[2], device=self.q.device)

    @property
    def columns(self) -> Tensor:
        """The positions of all keys, (S,)."""
        return torch.arange(self.k.shape[2], device=self.q.device)

    def wide(self) -> Call:
        """The same call in float64."""
        return Call(*map(widened, self))

    @property
    def size(self) -> float:
        """What the error of an output is measured by: the largest value, or 1."""
        largest = float(self.v.abs().max())
        return max(1.0, largest)

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        scale = self.kwargs.get("scaling")
        if scale is not None:
            return float(scale)
        return float(self.q.shape[-1] ** -0.5)

    @property
    def sink(self) -> Tensor | None:
        """The learned sink logit, if the module has one: (H,) or (B, H, T, 1)."""
        return self.kwargs.get("s_aux", self.kwargs.get("sinks"))

    def blind(self) -> Tensor:
        """The queries that no key up to their own is shown to, (T,).

        Softmax gives such a row even weights over all keys, later ones too.
        """
        mask = self.mask_of(self.rows, self.columns)  # (.., T, S)
        seen = shown_in_any(mask).tril()
        return ~seen.any(dim=-1)

    def mask_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask of the queries `rows` (R,) and the keys `columns` (S,), ending in (R, S)."""
        if self.mask is not None:
            of_texts = self.mask[: len(self.q)]  # `proves_right` takes the first text alone
            mask = of_texts[:, :, rows][..., columns]
        else:  # causal: keys in front of the text are seen by all
            front = self.k.shape[2] - self.q.shape[2]
            mask = rows[:, None] + front >= columns
        if self.hidden is None:
            return mask
        hidden = self.hidden.to(mask.device)
        hidden = hidden[rows][:, columns]  # (R, S)
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask.masked_fill(hidden, lowest)


def chunk(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The family's eager attention for some queries, rows (R,).

    Returns the output (B, R, H, D) and the weights (B, H, R, keys).
    """
    mask = call.mask_of(rows, call.columns)
    if mask.dtype == torch.bool:  # eager functions add what they get
        lowest = torch.finfo(call.q.dtype).min
        zeros = torch.zeros_like(mask, dtype=call.q.dtype)
        mask = zeros.masked_fill(~mask, lowest)
    if mask.ndim == 2:
        mask = mask[None, None]  # (1, 1, R, S)
    call = call._replace(q=call.q[:, :, rows])
    out, weights = call.eager(call.module, call.q, call.k, call.v, mask, **call.kwargs)
    # With a learned sink, the weights of the tokens sum to less than one. Granite's sum to
    # one, and its output is scaled afterwards.
    sink = call.sink
    if sink is not None and sink.ndim == 1:
        sums = weights.float().sum(dim=-1)
        if (sums - 1).abs().max() < 1e-3:
            weights = _scaled_by_sink(call, mask, sink, out, weights)
    return out, weights


def _is_product(out: Tensor, weights: Tensor, call: Call) -> bool:
    """Whether an output (B, R, H, D) is these weights (B, H, R, T) times the values."""
    values = repeat_heads(call.v, weights.shape[1]).to(weights.dtype)
    product = weights @ values  # (B, H, R, D)
    expected = product.transpose(1, 2)
    tolerance = 1e-4 if out.dtype.itemsize >= 4 else 3e-2
    gap = (out - expected).abs().max()
    return bool(gap <= tolerance * call.size)


def _scaled_by_sink(call: Call, mask: Tensor, sink: Tensor, out: Tensor, weights: Tensor) -> Tensor:
    """Weights (B, H, R, T) of rows that sum to one, less what a learned sink takes of each.

    Granite's eager function scales the output by sigmoid(lse - sink), and returns the weights as
    they were before.
    """
    # sigmoid(lse - sink) = sum of exp(logits) / (sum of exp(logits) + exp(sink))
    keys = repeat_heads(call.k, call.q.shape[1]).float()
    logits = call.q.float() @ keys.mT * call.scale  # (B, H, R, T)
    logits = logits + mask.float()
    lse = logits.logsumexp(dim=-1, keepdim=True)
    by_head = sink.float().reshape(1, -1, 1, 1)
    left = torch.sigmoid(lse - by_head)  # (B, H, R, 1)
    scaled = weights * left.to(weights.dtype)
    if not _is_product(out, scaled, call):
        raise ValueError(
            f"{type(call.module).__name__} has a learned sink whose share is unknown: its weights "
            "sum to one, and its output differs"
        )
    return scaled


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped-query keys or values (B, H_kv, T, D) for every query head, (B, H, T, D)."""
    group = heads // x.shape[1]  # query heads that share a key
    return x if group == 1 else x.repeat_interleave(group, dim=1)
