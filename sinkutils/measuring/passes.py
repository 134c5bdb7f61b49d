"""The purposes of a forward pass. Each class here does something else with the attention it sees.

`Measuring` adds it to a tally, also under surgery. `Checking` and `Comparing` run before, on a
short text, and find out whether the attention can be read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.measuring import families
from sinkutils.measuring.families import Call, Function, widened
from sinkutils.measuring.fused import can_serve, fused_call, proves_right
from sinkutils.measuring.refusals import LATER
from sinkutils.measuring.tally import Edit, Tally, changed

EXACT_ELEMENTS = 2**25  # attention weights in memory at a time: 128 MiB in float32
CHECK_TOKENS = 16  # the most tokens in the text of a check


class Pass:
    """The purpose of a forward pass. This base class computes the outputs and reads nothing."""

    as_named = False  # whether the functions that the model names run, with their own masks
    looks = False  # whether hidden states are read
    front = 0  # number of keys that a cache puts in front of the text

    def attention(self, call: Call, layer: int) -> Tensor:
        """Compute the output (B, T, H, D) of an attention module by its family's eager function."""
        return families.chunk(call, call.rows)[0]

    def weights(self, layer: int, weights: Tensor) -> None:
        """Read the weights (B, H, T, T) that a legacy attention module returns."""

    def embedding(self, hidden: Tensor) -> None:
        """Read the input of the first block, (B, S, T, d), with S residual streams."""

    def block(self, layer: int, hidden: Tensor) -> None:
        """Read the output of a block, (B, S, T, d)."""


class Measuring(Pass):
    """Add the attention of every layer to a tally.

    A fused kernel computes it where one can and has proved right. Otherwise whole rows are
    computed. exact: always compute whole rows.
    The last three arguments are for surgery: an edit of q, k or v; keys that are hidden; and the
    number of keys that a cache puts in front of the text.
    """

    def __init__(
        self,
        tally: Tally,
        exact: bool = False,
        edit: Edit | None = None,
        hidden: Tensor | None = None,
        front: int = 0,
    ) -> None:
        self.tally = tally
        self.exact = exact
        self.edit = edit
        self.hidden = hidden  # (T, T): True where query i may not see key j
        self.front = front
        self.looks = tally.norms
        # (module, whether there is a mask) -> whether the kernel proved right
        self.proved: dict[tuple[nn.Module, bool], bool] = {}

    def attention(self, call: Call, layer: int) -> Tensor:
        call = call._replace(hidden=self.hidden)
        edit = self.edit
        if edit is not None and layer in edit.layers:
            x = getattr(call, edit.part)  # q, k or v
            parts: Any = {edit.part: changed(edit.change, x)}
            call = call._replace(**parts)
        self.tally.add_qkv(layer, call.q, call.k, call.v)
        out = self._fused(call, layer)
        return self._exact(call, layer) if out is None else out

    def weights(self, layer: int, weights: Tensor) -> None:
        self.tally.add_weights(layer, [self.tally.reduced(layer, weights)])

    def embedding(self, hidden: Tensor) -> None:
        self.tally.add_norms("embedding", 0, hidden)

    def block(self, layer: int, hidden: Tensor) -> None:
        self.tally.add_hidden(layer, hidden)

    def _fused(self, call: Call, layer: int) -> Tensor | None:
        """Compute the output by a fused kernel, and add alpha from its log-sum-exp to the tally.

        Returns None, and adds nothing, where whole rows have to be computed instead.
        """
        columns = self.tally.columns(call.q.device)
        keeps_maps = self.tally.heads_of(layer, call.q.shape[1])
        if self.exact or keeps_maps or not can_serve(call, columns):
            return None
        # A kernel has to prove right once in each module, both with and without a mask. It may be
        # broken in this version of PyTorch, and a family may change its logits in a way that the
        # kernel does not know.
        case = (call.module, call.mask is not None)
        if self.proved.get(case) is False:
            return None
        try:
            result = fused_call(call, columns)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError):  # no kernel in this build, or for device and dtype
            self.proved[case] = False
            return None
        if case not in self.proved:
            self.proved[case] = proves_right(call, result, columns)
        if not self.proved[case]:
            return None
        self.tally.add_shares(layer, result.shares)
        if result.star is not None:
            self.tally.add_star(layer, result.star)
        return result.out

    def _exact(self, call: Call, layer: int) -> Tensor:
        """Compute output and weights by the family's eager function, a chunk of queries at a time.

        Adds the weights to the tally, and returns the output (B, T, H, D).
        """
        batch, heads, length, _ = call.q.shape
        # The number of queries in a chunk: a whole map, B x H x T x T, might not fit in memory.
        step = max(1, EXACT_ELEMENTS // (batch * heads * length))
        for value in call.kwargs.values():
            if isinstance(value, Tensor) and value.ndim >= 3:
                # An argument with values for each position, which we do not know how to cut.
                step = length
        star = call.sink is not None or self.front > 0
        outs = []
        parts = []
        for rows in call.rows.split(step):
            out, weights = families.chunk(call, rows)
            outs.append(out)
            parts.append(self.tally.reduced(layer, weights[..., self.front :], star))
        self.tally.add_weights(layer, parts)
        return torch.cat(outs, dim=1)


class Checking(Pass):
    """Check that no token attends to a later one, and keep each module's call for `Comparing`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # the class name of the model
        self.calls: dict[nn.Module, Call] = {}  # with the masks that we make

    def attention(self, call: Call, layer: int) -> Tensor:
        out, weights = families.chunk(call, call.rows)
        # A query that sees no key has even weights over all keys. Those on later keys are no look
        # ahead, and are not counted.
        blind = call.blind()[:, None]  # (T, 1)
        self.weights(layer, weights.masked_fill(blind, 0))
        self.calls[call.module] = call
        return out

    def weights(self, layer: int, weights: Tensor) -> None:
        of_later_keys = weights.triu(1)
        if of_later_keys.abs().max() > 1e-6:
            raise ValueError(f"{self.kind} {LATER}")


class Comparing(Pass):
    """Check that the functions that the model names compute the same as eager attention.

    The named functions run on the text of a `Checking`, and their outputs are compared with those
    of eager attention on the same calls.
    """

    as_named = True

    def __init__(self, calls: dict[nn.Module, Call]) -> None:
        self.calls = calls  # module -> its call, from `Checking`
        self.differs = ""  # the name of a function that computes something else, if one does

    def compare(
        self,
        name: str,
        function: Function,
        module: nn.Module,
        *inputs: Any,
        **kwargs: Any,
    ) -> Any:
        """Run `function`, which the model names `name`, compare its output, and return it.

        inputs: q, k, v and the mask, as the module passes them.
        """
        if module in self.calls:
            q, k, v, *_ = inputs  # this pass's own: they differ by rounding from the first pass's
            expected = self.calls[module]._replace(q=q, k=k, v=v)
            if not computes_the_same(function, module, inputs, kwargs, expected):
                self.differs = name
        return function(module, *inputs, **kwargs)


def computes_the_same(
    function: Function,
    module: nn.Module,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    expected: Call,
) -> bool:
    """Whether an attention function computes the same output as eager attention on `expected`.

    Both are computed in float64, so that they do not differ by rounding. This matters where float32
    products run in lower precision (torch.set_float32_matmul_precision) or activations are in half
    precision.
    """
    seeing = ~expected.blind()
    try:
        out, *_ = function(module, *map(widened, inputs), **widened(kwargs))
        right, _ = families.chunk(expected.wide(), expected.rows)
        gaps = _gaps(out, right)[:, seeing]
        return not gaps.max() > 1e-3  # a nan passes here: the report refuses it (NotFinite)
    except (RuntimeError, TypeError, ValueError):  # the kernel or the device lacks float64
        # In lower precision, the median gap is compared, as single rows may differ more.
        out, *_ = function(module, *inputs, **kwargs)
        right, _ = families.chunk(expected, expected.rows)
        gaps = _gaps(out, right)[:, seeing]
        return not gaps.median() > 5e-2


def _gaps(out: Tensor, right: Tensor) -> Tensor:
    """The relative error of each output vector, (B, T, H).

    out, right: outputs (B, T, H, D). The error is the norm of the difference over that of `right`.
    """
    size: Tensor = torch.linalg.vector_norm(right.float(), dim=-1)
    difference = (out - right).float()
    gaps: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    least = 1e-6 * float(size.max()) + 1e-30  # avoids a division by zero
    return gaps / size.clamp(min=least)
