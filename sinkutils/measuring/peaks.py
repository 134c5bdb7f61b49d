"""How large states, keys and values are, and what a cache in few bits would leave of them.

One scale for a whole tensor has to fit its largest number. If that is a sink's, the other tokens
share few levels, and their smallest numbers become zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sinkutils.checks import choice

if TYPE_CHECKING:
    import pandas as pd

FLOAT16 = 65504.0  # the largest number of float16
# The sizes that 4-bit floating point has.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cpu")


class Format(NamedTuple):
    """A number format, with one scale for a tensor: its largest |number| becomes the largest one."""

    name: str
    largest: float
    spacing: float  # of the numbers next to zero

    @property
    def smallest(self) -> float:
        """The smallest number above zero, as a share of the largest."""
        return self.spacing / self.largest

    def nearest(self, x: Tensor) -> Tensor:
        """The format's number that is nearest to each x, for |x| up to `largest`."""
        if self.name == "fp8":
            return x.to(torch.float8_e4m3fn).to(x)
        if self.name == "fp4":
            sizes = E2M1.to(x)
            between = (sizes[1:] + sizes[:-1]) / 2
            return sizes[torch.bucketize(x.abs().contiguous(), between)] * x.sign()
        return x.round()


FORMATS = (
    Format("int8", 127, 1),
    Format("fp8", 448, 2**-9),  # e4m3
    Format("int4", 7, 1),
    Format("fp4", 6, 0.5),  # e2m1, the elements of NVFP4 without its scales by blocks of 16
)


def rounded(name: str, leave_out_first: bool = False) -> Callable[[Tensor], Tensor]:
    """A function that rounds keys or values (B, H, T, D) to a format, for `su.surgery.edit`.

    Each text has one scale, from its largest |element|: what a cache with one scale for a layer's
    keys does to them. name: int8, fp8 (e4m3), int4 or fp4 (e2m1).
    leave_out_first: keep the first token as it is, and leave it out of the scale.
    """
    formats = {format.name: format for format in FORMATS}
    choice("name", name, formats)
    chosen = formats[name]

    def change(x: Tensor) -> Tensor:
        start = int(leave_out_first)
        wide = x[:, :, start:].float()
        scale = wide.abs().amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-30) / chosen.largest
        x[:, :, start:] = (chosen.nearest(wide / scale) * scale).to(x)
        return x

    return change


def peaks_table(maxima: Mapping[tuple[str, int], Tensor]) -> pd.DataFrame:
    """`Report.peaks`, from (part, layer) -> (2, heads)."""
    import pandas as pd

    rows = []
    for (part, layer), values in sorted(maxima.items()):
        for head, (first, others) in enumerate(values.T.tolist()):
            # A state belongs to a block and not to a head.
            rows.append((part, layer + 1, 0 if part == "h" else head + 1, first, others))
    return pd.DataFrame(rows, columns=["part", "block", "head", "first", "others"])


def forecast_table(
    maxima: Mapping[tuple[str, int], Tensor], lost: Mapping[tuple[str, int], Tensor]
) -> pd.DataFrame:
    """`Report.forecast`, from the peaks and (part, layer) -> (formats,)."""
    import pandas as pd

    rows = []
    for (part, layer), shares in sorted(lost.items()):
        first, others = maxima[part, layer].amax(dim=1).tolist()
        lost_bits = max(0.0, math.log2(max(first, 1e-30) / max(others, 1e-30)))
        for format, share in zip(FORMATS, shares.tolist(), strict=True):
            rows.append((part, layer + 1, format.name, 100 * share, lost_bits))
    return pd.DataFrame(rows, columns=["part", "block", "format", "zero", "lost_bits"])


def forecast_line(maxima: Mapping[tuple[str, int], Tensor], forecast: pd.DataFrame) -> str:
    """The forecast in one line."""
    largest = {part: 0.0 for part in "hkv"}
    for (part, _), values in maxima.items():
        largest[part] = max(largest[part], float(values.max()))
    over = [part for part, value in largest.items() if value > FLOAT16]
    line = f"float16: {', '.join(over)} overflow" if over else "float16: fits"
    line += f" (largest: h {largest['h']:.3g}, k {largest['k']:.3g}, v {largest['v']:.3g})"
    if len(forecast) > 0:
        share = forecast[forecast.format == "int4"].groupby("part").zero.mean()
        line += (
            f"; one 4-bit scale a layer would round {share['k']:.0f} % of the other tokens' keys "
            f"to zero and {share['v']:.0f} % of their values"
        )
    return line


def by_kind(
    layers: Mapping[int, tuple[int | None, float]], elements: Tensor | None
) -> dict[str, float]:
    """Excess and element by kind of layer, if a model has several kinds, for `Report.summary`.

    layers: for each block with softmax attention, its window (None: none) and its excess.
    elements: `Report.first_elements`, (blocks, d); None: not measured.
    """
    kinds = {block: "full" if window is None else "window" for block, (window, _) in layers.items()}
    for block in range(0 if elements is None else len(elements)):
        kinds.setdefault(block, "linear")
    names = sorted({*kinds.values()})
    numbers: dict[str, float] = {}
    for kind in names if len(names) > 1 else []:
        blocks = [block for block, name in kinds.items() if name == kind]
        if kind != "linear":
            excess = [layers[block][1] for block in blocks]
            numbers[f"excess_{kind}"] = sum(excess) / len(excess)
        if elements is not None:
            numbers[f"element_{kind}"] = float(elements[blocks].max())
    return numbers
