"""Support for transformers 4.56 and 4.57, which choose the attention function in another way.

In transformers 5, a module always calls `AttentionInterface.get_interface`, and passes it the eager
function of its family. In these older versions, a module that is set to "eager" directly calls the
function `eager_attention_forward` of its own file. Any other setting is looked up as
`ALL_ATTENTION_FUNCTIONS[name]`, without the eager function. `let_ask` makes both cases call
`get_interface`, as in transformers 5.
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

from sinkutils.checks import Refused
from sinkutils.measuring.families import Function
from sinkutils.measuring.tally import LeftAsFound

NEEDED = not hasattr(AttentionInterface, "get_interface")
_getitem = AttentionInterface.__getitem__


def get_interface(
    self: AttentionInterface, attn_implementation: str, default: Function
) -> Function:
    """The method of this name in transformers 5. default: the module's eager attention."""
    function: Function = default
    if attn_implementation != "eager":
        function = _getitem(self, attn_implementation)
    return function


def let_ask(
    layers: Collection[nn.Module], is_watched: Callable[[], bool], state: LeftAsFound
) -> None:
    """Make these attention modules call `get_interface`, until `state` ends.

    is_watched: tells whether the current forward pass is one of the measured model.
    """
    for home in {_home(module)["__name__"] for module in layers}:
        file = sys.modules[home]
        eager: Function | None = getattr(file, "eager_attention_forward", None)
        if eager is None:
            raise Refused(f"{home} has no eager attention that could be read: use transformers 5")
        asks = _asks(AttentionInterface(), "eager")
        state.set(file, "eager_attention_forward", functools.wraps(eager)(asks))
    state.set(AttentionInterface, "__getitem__", _asks)

    # GPT-2's eager function applies a causal mask of its own, the buffer `bias`, beside the mask
    # that it is given. Its position depends on the number of queries, which is wrong for a chunk of
    # them. So we replace it by ones: the given mask is complete.
    for module in layers:
        causal = getattr(module, "bias", None)
        if isinstance(causal, Tensor) and causal.dtype == torch.bool:
            state.set(module, "bias", causal.new_ones(()).expand_as(causal))

    # Without a cache, 4.x looks for several texts packed into one row, and makes a mask of T x T
    # even if there is only one. None says that there is one.
    packed = masking_utils.find_packed_sequence_indices

    def find_packed(position_ids: Any) -> Any:
        found = packed(position_ids)
        return None if is_watched() and not found.any() else found

    state.set(masking_utils, "find_packed_sequence_indices", find_packed)


def _asks(interface: AttentionInterface, name: str) -> Function:
    """An attention function that looks up the function `name` whenever a module calls it."""

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        eager: Any = _home(module).get("eager_attention_forward")
        function = interface.get_interface(name, inspect.unwrap(eager))
        return function(module, *args, **kwargs)

    return attention


def _home(module: nn.Module) -> dict[str, Any]:
    """The global names of the file in which a module's forward is written."""
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names
