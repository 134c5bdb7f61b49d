"""What a cache in few bits does to keys and values: `rounded`, for `su.surgery.edit`.

One scale for a whole tensor has to fit its largest number. If that is a sink's, the other tokens
share few levels, and their smallest numbers become zero. `Report.forecast` says how many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sinkutils.checks import choice
from sinkutils.measuring.report import FLOAT16, FORMATS

__all__ = ["FLOAT16", "FORMATS", "rounded"]
# The sizes that 4-bit floating point has.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cpu")


def rounded(name: str, leave_out_first: bool = False) -> Callable[[Tensor], Tensor]:
    """A function that rounds keys or values (B, H, T, D) to a format, for `su.surgery.edit`.

    Each text has one scale, from its largest |element|: what a cache with one scale for a layer's
    keys does to them. name: int8, fp8 (e4m3), int4 or fp4 (e2m1).
    leave_out_first: keep the first token as it is, and leave it out of the scale.
    """
    choice("name", name, FORMATS)
    largest, _ = FORMATS[name]

    def change(x: Tensor) -> Tensor:
        start = int(leave_out_first)
        wide = x[:, :, start:].float()
        scale = wide.abs().amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-30) / largest
        x[:, :, start:] = (nearest(name, wide / scale) * scale).to(x)
        return x

    return change


def nearest(name: str, x: Tensor) -> Tensor:
    """The number of a format that is nearest to each x, for |x| up to the format's largest."""
    if name == "fp8":
        return x.to(torch.float8_e4m3fn).to(x)
    if name == "fp4":
        sizes = E2M1.to(x)
        between = (sizes[1:] + sizes[:-1]) / 2
        return sizes[torch.bucketize(x.abs().contiguous(), between)] * x.sign()
    return x.round()
