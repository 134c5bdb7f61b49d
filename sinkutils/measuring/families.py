"""How the families of decoder models in transformers differ, and what they have in common.

`su.families.register` teaches another one, and `su.families.check` tries it.

`benchmarks/families.py` builds a small model of every family, compares its numbers with dense
attention and writes docs/families.md.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sinkutils.checks import require, short
from sinkutils.paths import LEDGER, read_yaml

__all__ = ["check", "register"]
# An attention function: (module, q, k, v, mask, **kwargs) -> (out, weights or None)
Function: TypeAlias = Callable[..., Any]

# Words in a class's name: the class may be called Attention, but it computes no softmax attention.
NO_SOFTMAX = re.compile("Linear|Lightning|Delta|Mamba|Rwkv|Rotary|Norm|Residual")
# Words in a module's path: the module attends to an encoder's states, to images or to sound. It
# does not run when the input is text alone.
NOT_TEXT = re.compile(
    "EncDecAttention|encoder_attn|cross_?attn|cross_?attention|vision|visual|image|audio"
)
# The model_types of prefix LMs, in which every token of a prompt sees the whole prompt.
PREFIX = {"paligemma"}
# model_type -> the axis of the residual streams in the hidden states of the families that have
# several; -1: they stand side by side in the last axis, (B, T, S * d).
STREAMS = {"gemma3n_text": 0, "hy_v4": 2, "qwen4_exp_text": -1}
INTERFACE = (
    "what is read are attention functions of transformers' AttentionInterface, or weights "
    "(B, H, T, T) that modules named Attention return"
)
# model_type -> the reason why this family cannot be measured
REFUSED = read_yaml(LEDGER / "unmeasured.yaml")
# Names of modules, such as "layers.*.mixer", or a function from the model to its modules
Modules: TypeAlias = str | Callable[[Any], Iterable[nn.Module]]


class Family(NamedTuple):
    """Where the parts of a family's models are; the fields are the arguments of `register`."""

    attention: Modules
    blocks: Modules
    hidden: Callable[[Any], Any] | None
    returns_weights: bool | None


TAUGHT: dict[str, Family] = {}  # model_type -> what was registered


def __dir__() -> list[str]:
    return __all__


def register(
    model_type: str,
    *,
    attention: Modules,
    blocks: Modules,
    hidden: Callable[[Any], Tensor] | None = None,
    returns_weights: bool | None = None,
) -> None:
    """Teach the package a family of transformers models, until the process ends.

    model_type: as the configurations of its models name it.
    attention: the modules that compute attention. A name as `model.named_modules()` shows it, with
        * for one part of it, as in "layers.*.mixer"; or a function from the model to the modules.
    blocks: the blocks, from the first to the last, likewise: "layers.*".
    hidden: a function from what a block returns to its hidden state (B, T, d), which is also tried
        on what a block takes. None: the first tensor of that shape.
    returns_weights: True if the attention modules return their weights (B, H, T, T), False if they
        ask transformers' AttentionInterface for an attention function; None: read off their code.

    A second registration replaces the first. Nothing is looked at before a model is measured or
    given to `check`. Raises ValueError for arguments of another kind, and for a family without
    softmax attention.
    """
    require(isinstance(model_type, str), f"model_type must be a name, got {short(model_type)}")
    reason = REFUSED.get(model_type)
    require(reason is None, f"{model_type} cannot be measured: {reason}")
    for name, value in (("attention", attention), ("blocks", blocks)):
        right = isinstance(value, str) or callable(value)
        require(right, f"{name} must be a name of modules or a function, got {short(value)}")
    right = hidden is None or callable(hidden)
    require(right, f"hidden must be a function, got {short(hidden)}")
    right = returns_weights in (True, False, None)
    require(right, f"returns_weights must be True, False or None, got {short(returns_weights)}")
    TAUGHT[model_type] = Family(attention, blocks, hidden, returns_weights)


def check(model: nn.Module) -> None:
    """Check what was registered for a model's family on a text of 16 tokens.

    The attention that is read has to be that of dense attention, the logits have to stay, and each
    block has to take the hidden state of the one before it. `measure` and surgery check the same.

    Raises ValueError if the family was not registered, and if one of these does not hold.
    """
    from sinkutils.measuring.measure import CHECK_TOKENS, measure

    kind = getattr(getattr(model, "config", None), "model_type", None)
    require(kind in TAUGHT, f"no family {kind!r} was registered by su.families.register")
    ids = torch.arange(1, CHECK_TOKENS + 1)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of short texts and of padding
        measure(model, ids)


def attention_layers(base: nn.Module) -> tuple[list[nn.Module], dict[nn.Module, int]]:
    """The model's blocks, and the index of its block for each softmax attention module.

    Raises ValueError for a model without softmax attention, or with attention outside one list of
    blocks.
    """
    unused = idle(base)
    parts = [(name, part) for name, part in base.named_modules() if part not in unused]
    modules = {name: part for name, part in parts if _is_attention(name, part)}
    kind = type(base).__name__
    reason = "has no softmax attention layers, so it has no attention sink"
    if not type(base).__module__.startswith("transformers."):
        reason = (
            f"shows no attention module: {INTERFACE}; su.families.register teaches where others are"
        )
    require(len(modules) > 0, f"{kind} {reason}")
    # GPT-Neo and others wrap one attention module in another. The innermost one computes.
    outer = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)}
    inner = {name: part for name, part in modules.items() if name not in outer}
    # "layers.3.self_attn" -> "layers"
    found = [re.match(r"(.*?)\.?\d+\.", name) for name in inner]
    lists = {place and place[1] for place in found}
    blocks = []
    if len(lists) == 1 and None not in lists:
        blocks = _blocks(base.get_submodule(str(lists.pop())))
    places: dict[nn.Module, int] = {}  # attention module -> index of its block
    for module in inner.values():
        around = [place for place, block in enumerate(blocks) if module in block.modules()]
        outside = f"{kind} has attention outside one list of blocks: give its text decoder"
        require(len(around) > 0, outside)
        places[module] = around[0]
    return blocks, places


def idle(base: nn.Module) -> set[nn.Module]:
    """What does not run where PEFT keeps a module and its trained copies (`modules_to_save`)."""
    unused: set[nn.Module] = set()
    for part in base.modules():
        if type(part).__name__ == "ModulesToSaveWrapper":
            wrapper: Any = part
            copies = {} if wrapper.disable_adapters else wrapper.modules_to_save
            named = [copies[name] for name in wrapper.active_adapters if name in copies]
            runs = named[0] if named else wrapper.original_module
            unused |= {*wrapper.modules()} - {wrapper, *runs.modules()}
    return unused


def _blocks(stages: nn.Module) -> list[nn.Module]:
    """The blocks in a list, or in a list of lists (stages)."""
    blocks: list[nn.Module] = []
    for module in stages.children():
        blocks += _blocks(module) if isinstance(module, nn.ModuleList) else [module]
    return blocks


def _is_attention(name: str, module: nn.Module) -> bool:
    """Whether this module is softmax attention over text, by its path, class name or code."""
    kind = type(module).__name__
    if NOT_TEXT.search(name) or "CrossAttention" in kind:
        return False
    if "Attention" in kind and not NO_SOFTMAX.search(kind):
        return True
    return chooses_attention(module)


def chooses_attention(module: nn.Module) -> bool:
    """Whether the module calls the attention function that its configuration names.

    Such a module looks the function up in transformers' ALL_ATTENTION_FUNCTIONS.
    """
    # We read the names in the compiled code: before the module has run, nothing else shows it.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration in a model that names an attention function, without duplicates."""
    every = [getattr(module, "config", None) for module in model.modules()]
    # by identity: configurations are not hashable
    return [*{id(x): x for x in every if hasattr(x, "_attn_implementation")}.values()]


def streams_of(family: str, x: Tensor, width: int) -> Tensor | None:
    """The residual streams in what a block passes on, (B, S, T, d); None if x has none.

    family: the model_type. width: d.
    """
    axis = STREAMS.get(family)
    if axis is None:
        return x[:, None] if x.ndim == 3 else None
    if axis == -1 and x.ndim == 3 and x.shape[2] % width == 0:
        x = x.unflatten(2, (-1, width))  # (B, T, S, d)
    return x.movedim(axis if axis >= 0 else 2, 1) if x.ndim == 4 else None


def is_of_transformers(function: Any) -> bool:
    """Whether a function is written in transformers itself, and was not registered from outside."""
    if isinstance(function, partial):
        # So transformers registers a kernel. Other arguments are somebody's own.
        if function.args or set(function.keywords) - {"implementation"}:
            return False
        function = function.func
    return home_of(inspect.unwrap(function)).startswith("transformers.")


def home_of(function: Any) -> str:
    """The name of the module whose file defines a function; "" if it is not known.

    `__module__` would not do: a decorator may have copied it from the function that it wraps.
    """
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return str(names.get("__name__", ""))


def shown(mask: Tensor) -> Tensor:
    """The mask as booleans, True where a key is visible. The mask may be boolean or additive."""
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min  # what an additive mask holds, or -inf, at hidden keys
    return mask > lowest / 2


def shown_in_any(mask: Tensor) -> Tensor:
    """Whether a mask (.., T, S) shows query i key j in at least one text and head, (T, S)."""
    queries, keys = mask.shape[-2:]
    return shown(mask).reshape(-1, queries, keys).any(dim=0)


def sees_others(mask: Tensor, texts: Sequence[slice]) -> bool:
    """Whether a mask (.., T, T) shows one of the texts in a row a key in front of the text."""
    seen = shown_in_any(mask)
    return any(bool(seen[text, : text.start].any()) for text in texts)


def window_of(mask: Tensor, texts: Sequence[slice] = ()) -> int | None:
    """The width of the sliding window, if the mask (.., T, T) is one; None otherwise.

    The mask may be boolean or additive.
    texts: where texts stand in the row; the longest shows its window.
    """
    seen = shown_in_any(mask)  # (T, T)
    if texts:
        longest = max(texts, key=lambda text: text.stop - text.start)
        seen = seen[longest, longest]
    width = int(seen[-1].sum())  # keys that the last query sees
    # A sliding window shows each query itself and the `width - 1` keys before it.
    band = torch.ones_like(seen).tril().triu(1 - width)
    return width if width < len(seen) and torch.equal(seen, band) else None


def widened(value: Any) -> Any:
    """Convert float tensors to float64, also those in a dict. Other values are returned as is."""
    if isinstance(value, dict):
        return {name: widened(x) for name, x in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


class Call(NamedTuple):
    """The arguments that an attention module passes to its attention function."""

    module: nn.Module
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, H or fewer, S, D); S = T, or more if a cache stands in front of the text
    v: Tensor  # the same shape, or with another D
    mask: Tensor | None  # (B, 1 or H, T, S), boolean or additive; None: causal
    kwargs: dict[str, Any]
    eager: Function  # the family's reference attention, from the module's own file
    hidden: Tensor | None = None  # (T, S), set by surgery: True where query i may not see key j

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
        """The scale for errors of the output: the largest |element| of v, at least 1."""
        return max(1.0, float(self.v.abs().max()))

    @property
    def scale(self) -> float:
        """The factor of the logits, q k^T * scale; by default 1 / sqrt(D)."""
        scale = self.kwargs.get("scaling")
        return float(self.q.shape[-1] ** -0.5 if scale is None else scale)

    @property
    def sink(self) -> Tensor | None:
        """The learned sink logit, if the module has one: (H,) or (B, H, T, 1)."""
        return self.kwargs.get("s_aux", self.kwargs.get("sinks"))

    def blind(self) -> Tensor:
        """The queries that see no key up to their own position, (T,).

        All logits of such a row are equally low, so softmax spreads its weight evenly over all
        keys, including later ones.
        """
        mask = self.mask_of(self.rows, self.columns)  # (.., T, S)
        seen = shown_in_any(mask).tril()
        return ~seen.any(dim=-1)

    def mask_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask for the queries `rows` (R,) and the keys `columns` (K,), of shape (.., R, K)."""
        if self.mask is not None:
            of_texts = self.mask[: len(self.q)]  # `proves_right` passes the first text only
            mask = of_texts[:, :, rows][..., columns]
        else:  # causal; all queries see the keys in front of the text
            front = self.k.shape[2] - self.q.shape[2]
            mask = rows[:, None] + front >= columns
        if self.hidden is None:
            return mask
        hidden = self.hidden.to(mask.device)
        hidden = hidden[rows][:, columns]  # (R, S)
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask.masked_fill(hidden, lowest)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as eager functions add it to the logits."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def chunk(call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute some queries, `rows` (R,), of a call by the family's own eager attention.

    Returns the output (B, R, H, D) and the weights (B, H, R, S).
    """
    mask = additive(call.mask_of(rows, call.columns), call.q.dtype)
    if mask.ndim == 2:
        mask = mask[None, None]  # (1, 1, R, S)
    call = call._replace(q=call.q[:, :, rows])
    out, weights = call.eager(call.module, call.q, call.k, call.v, mask, **call.kwargs)
    # With a learned sink, a row's weights on the tokens sum to less than one. Granite is an
    # exception: it returns rows that sum to one, and scales the output afterwards.
    sink = call.sink
    if sink is not None and sink.ndim == 1:
        sums = weights.float().sum(dim=-1)
        if (sums - 1).abs().max() < 1e-3:
            weights = _scaled_by_sink(call, mask, sink, out, weights)
    return out, weights


def is_product(out: Tensor, weights: Tensor, call: Call) -> bool:
    """Whether an output (B, R, H, D) equals the weights (B, H, R, S) times the values."""
    values = repeat_heads(call.v, weights.shape[1]).to(weights.dtype)
    product = weights @ values  # (B, H, R, D)
    return close(out, product.transpose(1, 2), 1e-4, 3e-2, call.size)


def close(x: Tensor, right: Tensor, fine: float, coarse: float, size: float = 1.0) -> bool:
    """Whether x has the shape of what is right, and is as near to it as rounding explains.

    fine, coarse: how far they may be apart, as a share of `size`, in float32 and in half precision.
    If a gap is nan, the comparison is False.
    """
    if x.shape != right.shape:
        return False
    half = min(x.dtype.itemsize, right.dtype.itemsize) < 4
    gap = (x.float() - right.float()).abs().max()
    return bool(gap <= (coarse if half else fine) * size)


def _scaled_by_sink(call: Call, mask: Tensor, sink: Tensor, out: Tensor, weights: Tensor) -> Tensor:
    """Scale weights (B, H, R, S), whose rows sum to one, by what a learned sink leaves of each row.

    Granite's eager function scales its output by sigmoid(lse - sink), but returns the unscaled
    weights. Raises ValueError if the scaled weights do not reproduce the output.
    """
    # sigmoid(lse - sink) = sum of exp(logits) / (sum of exp(logits) + exp(sink))
    keys = repeat_heads(call.k, call.q.shape[1]).float()
    logits = call.q.float() @ keys.mT * call.scale + mask.float()  # (B, H, R, S)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    left = torch.sigmoid(lse - sink.float().reshape(1, -1, 1, 1))  # (B, H, R, 1)
    scaled = weights * left.to(weights.dtype)
    unknown = f"{type(call.module).__name__} has a learned sink whose share is unknown"
    is_share = is_product(out, scaled, call)
    require(is_share, f"{unknown}: its weights sum to one, and its output differs")
    return scaled


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat grouped-query keys or values, (B, H_kv, T, D), for every query head: (B, H, T, D)."""
    group = heads // x.shape[1]  # query heads that share a key
    return x if group == 1 else x.repeat_interleave(group, dim=1)
