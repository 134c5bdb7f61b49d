"""Pick a text, a block and a head and see its attention map, every head's alpha_1, and the norms behind them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib import colors, ticker
from matplotlib.figure import Figure
from torch import Tensor, nn

from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Report

# Set for kernels that JupyterLab and VS Code start, and by neither papermill nor nbconvert.
FRONT_ENDS = ("JPY_SESSION_NAME", "VSCODE_PID")


def explore(model: nn.Module, ids: Tensor, name: str = "", widgets: bool | None = None) -> Any:
    """A view of a model on the sequences ids (samples, T); starts at the head with the largest alpha_1.

    widgets: True gives an ipywidgets box, False a static figure of the first view; None the box where a notebook
    server has started this kernel and ipywidgets is installed, the figure elsewhere.
    """
    if widgets is None:
        widgets = any(variable in os.environ for variable in FRONT_ENDS) and find_spec("ipywidgets") is not None
    first = look(model, ids, 0)
    block, head = divmod(int(first.alpha[0, 0].argmax()), first.alpha.shape[-1])
    if not widgets:
        figure = draw(first, block, head, f"{name}: sequence 1")
        plt.close(figure)  # or a notebook would show it twice
        return figure
    return _box(lambda sample: look(model, ids, sample), len(ids), block, head, first.alpha.shape[-2:], name)


def look(model: nn.Module, ids: Tensor, sample: int) -> Report:
    """One sequence measured, with the maps of all heads."""
    layers = measure(model, ids[:1], norms=False)
    heads = [(layer, head) for layer in layers.layers for head in range(layers.alpha.shape[-1])]
    return measure(model, ids[sample : sample + 1], heads=heads, keep=("map",))


def draw(report: Report, block: int, head: int, title: str = "") -> Figure:
    """The picture of one view. block: 0-based among the attention layers; head: 0-based. Labels count from 1."""
    figure, (of_head, of_model, of_norms) = plt.subplots(1, 3, figsize=(11.5, 3.5))
    layer = report.layers[block]
    edges = (0.5, report.length + 0.5, report.length + 0.5, 0.5)
    weights = np.asarray(report.kept[layer, head].map)[0]
    rocket = sns.color_palette("rocket", as_cmap=True)
    image = of_head.imshow(weights, cmap=rocket, interpolation="nearest",
                           norm=colors.PowerNorm(0.5, vmin=0, vmax=1), extent=edges)  # fmt: skip
    figure.colorbar(image, ax=of_head, label=r"$A_{i,k}$", shrink=0.9)
    alpha = report.alpha[0, 0].numpy()
    of_head.set(xlabel="key $k$", ylabel="query $i$",
                title=rf"block {layer + 1}, head {head + 1}: $\alpha_1 = {alpha[block, head]:.2f}$")  # fmt: skip
    of_head.grid(False)
    image = of_model.imshow(alpha, cmap=rocket, vmin=0, vmax=1, aspect="auto", interpolation="nearest",
                            extent=(0.5, alpha.shape[1] + 0.5, len(alpha) + 0.5, 0.5))  # fmt: skip
    figure.colorbar(image, ax=of_model, label=r"$\alpha_1^{l,h}$", shrink=0.9)
    of_model.add_patch(plt.Rectangle((head + 0.5, block + 0.5), 1, 1, fill=False, edgecolor="cyan", linewidth=2))
    of_model.set(xlabel="head $h$", ylabel="attention layer", title="every head")
    of_model.grid(False)
    for name, symbol in (("hidden_norms", "h"), ("key_norms", "k"), ("value_norms", "v")):
        if getattr(report, name) is None:  # of keys and values, where attention was not captured
            continue
        ratios = report.norm_ratio(name)
        where = np.arange(1, len(ratios) + 1) if name == "hidden_norms" else np.asarray(report.layers) + 1
        of_norms.plot(where, ratios, marker="o", label=rf"$\|{symbol}_1\|$")
    of_norms.axhline(1, color="grey", linewidth=1, linestyle=":")
    of_norms.set(xlabel="block $l$", title="first token over mean of the others", ylim=(0, None))
    for axis in (of_model.xaxis, of_model.yaxis, of_norms.xaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    of_norms.legend(title="norm ratio", fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def _box(look_at: Callable[[int], Report], samples: int, block: int, head: int, shape: Any, name: str) -> Any:
    """Three sliders over a picture that is drawn anew when one moves; a sequence is measured when it is chosen."""
    import ipywidgets

    def slider(label: str, count: int, value: int) -> ipywidgets.IntSlider:
        return ipywidgets.IntSlider(value=value + 1, min=1, max=count, description=label, continuous_update=False)

    chosen = {"text": slider("sequence", samples, 0), "block": slider("layer", shape[0], block),
              "head": slider("head", shape[1], head)}  # fmt: skip
    picture = ipywidgets.Image(format="png")
    seen: dict[int, Report] = {}

    def redraw(_: Any = None) -> None:
        sample = chosen["text"].value - 1
        if sample not in seen:
            seen.clear()  # the maps of one sequence are kept
            seen[sample] = look_at(sample)
        title = f"{name}: sequence {sample + 1}"
        figure = draw(seen[sample], chosen["block"].value - 1, chosen["head"].value - 1, title)
        png = io.BytesIO()
        figure.savefig(png, format="png")
        picture.value = png.getvalue()
        plt.close(figure)

    for control in chosen.values():
        control.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([*chosen.values(), picture])
