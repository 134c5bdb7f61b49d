"""Arrays of other frameworks as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils.checks import Refused, require, short


def as_tensor(name: str, x: Any) -> Tensor:
    """An array of NumPy, JAX or another framework as a tensor; a tensor as it is.

    Raises ValueError, with the name, for what is no array of numbers.
    """
    if isinstance(x, Tensor):
        return x
    require(not np.ma.is_masked(x), f"{name} hides numbers by a mask, which is not read: fill them")
    try:
        if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
            return torch.from_dlpack(x)
        # A copy, because PyTorch cannot share memory that NumPy may only read.
        copy = np.array(x)
        return torch.from_numpy(copy.astype(copy.dtype.newbyteorder("="), copy=False))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        what = getattr(x, "dtype", None) or short(x)
        raise Refused(
            f"{name} must be an array of numbers that PyTorch has, got {type(x).__name__}: {what}"
        ) from error
