"""What transformers 4.56 and 4.57 do otherwise than 5.

There a module that is set to eager calls the function `eager_attention_forward` of its own file and
asks nobody, and others ask for `ALL_ATTENTION_FUNCTIONS[name]` and do not hand over their eager one.
`let_ask` makes both ask as in transformers 5, by `AttentionInterface.get_interface`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils

from sinkutils.measuring.families import Function
from sinkutils.measuring.state import LeftAsFound

NEEDED = not hasattr(AttentionInterface, "get_interface")
_getitem = AttentionInterface.__getitem__


def get_interface(
    self: AttentionInterface, attn_implementation: str, default: Function
) -> Function:
    """As the method of this name in transformers 5. default: the module's eager attention."""
    function: Function = default
    if attn_implementation != "eager":
        function = _getitem(self, attn_implementation)
    return function


def let_ask(
    layers: Collection[nn.Module], is_watched: Callable[[], bool], state: LeftAsFound
) -> None:
    """From here until `state` ends, these attention modules ask by `get_interface`.

    is_watched: whether the forward pass that runs is one of the model that is measured.
    """
    for home in {_home(module)["__name__"] for module in layers}:
        file = sys.modules[home]
        eager: Function | None = getattr(file, "eager_attention_forward", None)
        if eager is None:
            raise ValueError(
                f"{home} has no eager attention that could be read: use transformers 5"
            )
        asks = _asks(AttentionInterface(), "eager")
        state.set(file, "eager_attention_forward", functools.wraps(eager)(asks))
    state.set(AttentionInterface, "__getitem__", _asks)

    # GPT-2's eager function hides later keys a second time, by the number of queries that it gets:
    # wrong for a chunk of them. The mask that it is handed is whole.
    for module in layers:
        causal = getattr(module, "bias", None)
        if isinstance(causal, Tensor) and causal.dtype == torch.bool:
            state.set(module, "bias", causal.new_ones(()).expand_as(causal))

    # Without a cache, 4.x looks for texts that are packed into one row, and then makes a mask of
    # T x T also where there are none. A text that is measured has a row of its own.
    packed = masking_utils.find_packed_sequence_indices

    def find_packed(position_ids: Any) -> Any:
        return None if is_watched() else packed(position_ids)

    state.set(masking_utils, "find_packed_sequence_indices", find_packed)


def _asks(interface: AttentionInterface, name: str) -> Function:
    """An attention function that asks for the one of this name when a module calls it."""

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        eager: Any = _home(module).get("eager_attention_forward")
        function = interface.get_interface(name, inspect.unwrap(eager))
        return function(module, *args, **kwargs)

    return attention


def _home(module: nn.Module) -> dict[str, Any]:
    """The names that a module's forward sees: those of its file."""
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names


def set_tqdm_hook(hook: Callable[..., Any] | None) -> None:
    """4.x has no such hook: its progress bars of loading are what they are."""
