"""Stub while the fast forms are written: the dense reference."""

from typing import Any

from torch import Tensor

from sinkutils.attention import AttentionSpec
from sinkutils.attention import attend as dense_attend


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    return dense_attend(q, k, v, spec, **extras)[0]
