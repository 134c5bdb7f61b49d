"""What is done with the attention that a model shows in a forward pass: measure, check, operate."""

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

EXACT_ELEMENTS = 2**25  # attention weights held at a time: 128 MiB in float32
CHECK_TOKENS = 16  # the longest text of a check


class Pass:
    """What a forward pass is for. This one looks at nothing."""

    as_named = False  # whether the functions that the model names compute, with their own masks
    looks = False  # whether hidden states are looked at
    front = 0  # keys of a cache in front of the text

    def attention(self, call: Call, layer: int) -> Tensor:
        """The output (B, T, H, D) of an attention module, by its family's eager function."""
        return families.chunk(call, call.rows)[0]

    def weights(self, layer: int, weights: Tensor) -> None:
        """Take in the weights (B, H, T, T) that an attention module returns."""

    def embedding(self, hidden: Tensor) -> None:
        """Take in what the first block reads, (B, S, T, d), of S streams."""

    def block(self, layer: int, hidden: Tensor) -> None:
        """Take in what a block returns, (B, S, T, d)."""


class Measuring(Pass):
    """Adds to a tally: by a fused kernel where one serves and proves right, else by whole rows.

    Under surgery there is an edit, or keys are hidden, or stand in front of the text.
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
        self.hidden = hidden  # (T, T): the keys j that queries i do not see
        self.front = front
        self.looks = tally.norms
        self.proved: dict[tuple[nn.Module, bool], bool] = {}  # by module, with a mask or without

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
        """Output by a fused kernel, and alpha by its log-sum-exp; None: whole rows are needed."""
        columns = self.tally.columns(call.q.device)
        keeps_maps = self.tally.heads_of(layer, call.q.shape[1])
        if self.exact or keeps_maps or not can_serve(call, columns):
            return None
        # A kernel is tried once in each module, with a mask and without: its numbers may be others
        # than they were, and something may be done to logits that no kernel knows of.
        case = (call.module, call.mask is not None)
        if self.proved.get(case) is False:
            return None
        try:
            result = fused_call(call, columns)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError):  # none in this build, or for this device or dtype
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
        """Output and weights by the family's eager function, chunk by chunk of queries."""
        batch, heads, length, _ = call.q.shape
        # Queries that are computed together: a map of B x H x T x T would not fit in memory.
        step = max(1, EXACT_ELEMENTS // (batch * heads * length))
        for value in call.kwargs.values():
            if isinstance(value, Tensor) and value.ndim >= 3:
                step = length  # an argument by position that only the family knows how to cut
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
    """Looks for weights on later tokens, and keeps what the modules hand over."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # of the model
        self.calls: dict[nn.Module, Call] = {}  # with our masks

    def attention(self, call: Call, layer: int) -> Tensor:
        out, weights = families.chunk(call, call.rows)
        # A query without a key has even weights over all, later ones too: that is no look ahead.
        blind = call.blind()[:, None]  # (T, 1)
        self.weights(layer, weights.masked_fill(blind, 0))
        self.calls[call.module] = call
        return out

    def weights(self, layer: int, weights: Tensor) -> None:
        of_later_keys = weights.triu(1)
        if of_later_keys.abs().max() > 1e-6:
            raise ValueError(f"{self.kind} {LATER}")


class Comparing(Pass):
    """Looks for functions that compute something else than what is read.

    It lets the functions run that the model names, on the text that a `Checking` has seen.
    """

    as_named = True

    def __init__(self, calls: dict[nn.Module, Call]) -> None:
        self.calls = calls  # of `Checking`
        self.differs = ""  # the name of a function that computes something else

    def compare(
        self,
        name: str,
        function: Function,
        module: nn.Module,
        *inputs: Any,
        **kwargs: Any,
    ) -> Any:
        """In place of the function of that name: what it returns."""
        if module in self.calls:
            q, k, v, *_ = inputs  # this pass's own, as rounding differs from the first's
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
    """Whether an attention function computes the output that is expected of a call.

    In float64, so that rounding is no reason to differ: neither that of float32 products in lower
    precision (torch.set_float32_matmul_precision) nor that of activations before them.
    """
    seeing = ~expected.blind()
    try:
        out, *_ = function(module, *map(widened, inputs), **widened(kwargs))
        right, _ = families.chunk(expected.wide(), expected.rows)
        gaps = _gaps(out, right)[:, seeing]
        return not gaps.max() > 1e-3  # nan is for another to refuse
    except (RuntimeError, TypeError, ValueError):  # a kernel, or a device, without float64
        out, *_ = function(module, *inputs, **kwargs)
        right, _ = families.chunk(expected, expected.rows)
        gaps = _gaps(out, right)[:, seeing]
        return not gaps.median() > 5e-2


def _gaps(out: Tensor, right: Tensor) -> Tensor:
    """How far outputs (B, T, H, D) are from the right ones, in shares of their size, (B, T, H)."""
    size: Tensor = torch.linalg.vector_norm(right.float(), dim=-1)
    difference = (out - right).float()
    gaps: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    least = 1e-6 * float(size.max()) + 1e-30  # an output of zero divides nothing
    return gaps / size.clamp(min=least)
