"""Pictures that answer to hands: emergence as a film, thresholds, logits to drag, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinkutils.model.attention import AttentionSpec
from sinkutils.showing import svg
from sinkutils.showing.diagrams import HIDDEN, regions
from sinkutils.showing.svg import BASE, COLORS, GREEN, GREY, INK, PALETTE, SINK, Picture
from sinkutils.study.record import Record

LINES = [BASE, *COLORS[2:]]
NOTHING, MATCHING = (2.0, -3.0, -2.5, -3.5, -2.0, -3.0), 5.0  # logits of k* and five keys: none matches; one does


def film(runs: Mapping[str, Record | None], k: int | str = 1, thumbnails: int = 7) -> Picture | None:
    """Emergence played back: every head's mean attention to token k along training, a row of pictures a run.

    runs: by the name to show; those that are None, failed, or have no k* are named in the caption. k: 1 to 4, or
    "*" for k*, x* or a sink logit. None where nothing can be shown. The runs' steps must be the same: raises ValueError
    if not.
    """
    left_out: dict[str, list[str]] = {}
    shown = {}
    for name, run in runs.items():
        if run is None or run.status == "failed":
            left_out.setdefault("Not recorded yet" if run is None else "Failed in training", []).append(name)
        elif _alphas(run, k) is None:
            left_out.setdefault("Without k∗", []).append(name)
        else:
            shown[name] = run
    if not shown:
        return None
    first, *others = (_steps(run) for run in shown.values())
    if any(steps != first for steps in others):
        raise ValueError("the runs of a film must have been measured at the same steps")
    steps, column = first, "sink_star" if k == "*" else f"sink_{k}"
    left, right, height = 46, 486, 116
    bottom = height * len(shown) + 118
    root = svg.canvas(bottom + 44)
    data: dict[str, Any] = {"steps": steps, "left": left, "right": right, "palette": PALETTE, "runs": []}
    picks = [round(i * (len(steps) - 1) / (thumbnails - 1)) for i in range(thumbnails)]
    for row, (name, run) in enumerate(shown.items()):
        alphas = _alphas(run, k)
        assert alphas is not None
        frames, (layers, heads), top = svg.shade(alphas), alphas.shape[1:], row * height
        sinks = [float(point[column]) for point in run.metrics["curve"]]
        svg.text(root, name, left - 26, top + 18, font_weight="bold", fill=LINES[row % len(LINES)])
        for pick in picks:
            size = min(52 / heads, 80 / layers)
            x = left + (right - left) * steps[pick] / steps[-1] - size * heads / 2
            svg.grid(root, frames[pick], x, top + 30, size)
        size = min(110 / heads, 84 / layers)
        svg.grid(root, frames[-1], 526, top + 30, size, part=f"now{row}")
        svg.text(root, f"{sinks[-1]:.0f} %", 526 + size * heads / 2, top + 20, part=f"sink{row}", text_anchor="middle")
        y = [bottom - 90 * sink / 100 for sink in sinks]
        x_of = [left + (right - left) * step / steps[-1] for step in steps]
        svg.add(
            root,
            "polyline",
            points=" ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x_of, y, strict=True)),
            fill="none",
            stroke=LINES[row % len(LINES)],
            stroke_width=2.5,
        )
        data["runs"].append({"frames": [frame.ravel().tolist() for frame in frames], "heads": heads, "sinks": sinks})
    for share in (0, 50, 100):
        y_of = bottom - 90 * share / 100
        svg.line(root, left, y_of, right, y_of, stroke=GREY, stroke_width=0.5)
        svg.text(root, f"{share} %", left - 6, y_of + 4, text_anchor="end", fill=GREY)
    for pick in picks:
        svg.text(
            root,
            f"{steps[pick]:,}",
            left + (right - left) * steps[pick] / steps[-1],
            bottom + 18,
            text_anchor="middle",
            fill=GREY,
        )
    symbol = f"Sink{'∗' if k == '*' else '₁₂₃₄'[int(k) - 1]}"
    svg.text(root, f"{symbol}, share of heads (ε = 0.3), by optimisation step", left, bottom + 38)
    svg.line(root, right, bottom - 96, right, bottom + 4, part="playhead", stroke=INK, stroke_width=1.5)
    svg.text(root, f"step {steps[-1]:,}", 526, bottom - 40, part="step", font_weight="bold")
    ends = "; ".join(
        f"{name}, {run['sinks'][0]:.0f} % before the first step and {run['sinks'][-1]:.0f} % at the end"
        for name, run in zip(shown, data["runs"], strict=True)
    )
    target = "the bias k∗" if k == "*" else f"token {k}"
    caption = (
        f"How a sink emerges. A square is a head (rows: blocks, columns: heads), darker the more attention "
        f"it gives to {target}; the line is the share of heads that give it more than 0.3: {ends}. One seed a run."
        + "".join(f" {why}: {', '.join(names)}." for why, names in left_out.items())
    )
    alt = f"Grids of heads at {thumbnails} steps of training and the line of {symbol}, which ends at " + " and ".join(
        f"{run['sinks'][-1]:.0f} % ({name})" for name, run in zip(shown, data["runs"], strict=True)
    )
    return Picture(root, alt, caption, "film", data)


def threshold(lengths: Mapping[Any, Mapping[str, Any]], model: str, length: int = 64, eps: float = 0.3) -> Picture:
    """Every head's alpha_1 against a threshold: what eps and T do to Sink_1 (Fig. 3).

    lengths: by T, a report's `to_dict` or a part of it with "alpha" (targets, layers, heads), "sink" by k and eps,
    "T", "floor" and "samples", such as the section "lengths" of data/open_lms. Raises ValueError for a
    length or eps it does not have.
    """
    rows = [row for _, row in sorted(lengths.items(), key=lambda item: int(item[0]))]
    epsilons = sorted(float(eps) for eps in rows[0]["sink"]["1"])
    if length not in [row["T"] for row in rows] or eps not in epsilons:
        raise ValueError(f"length must be one of {[row['T'] for row in rows]} and eps one of {epsilons}")
    left, right, top, bottom = 46, 620, 36, 270
    root, start = svg.canvas(bottom + 46), [row["T"] for row in rows].index(length)
    data: dict[str, Any] = {
        "start": start,
        "epsilon": epsilons.index(eps),
        "epsilons": epsilons,
        "top": top,
        "bottom": bottom,
        "on": SINK,
        "off": BASE,
        "lengths": [],
    }
    for row in rows:
        alpha = np.asarray(row["alpha"][0], dtype=float)
        sinks = [row["sink"]["1"][f"{e:g}"] for e in epsilons]
        data["lengths"].append(
            {"T": row["T"], "alpha": alpha.ravel().round(3).tolist(), "floor": row["floor"], "sinks": sinks}
        )
    layers, heads = np.asarray(rows[0]["alpha"][0]).shape
    for share in (0, 0.5, 1):
        y = bottom - (bottom - top) * share
        svg.line(root, left, y, right, y, stroke=GREY, stroke_width=0.5)
        svg.text(root, f"{share:g}", left - 8, y + 4, text_anchor="end", fill=GREY)
    step, now = (right - left) / layers, data["lengths"][start]
    for i, value in enumerate(now["alpha"]):
        layer, head = divmod(i, heads)
        svg.add(
            root,
            "circle",
            cx=left + step * (layer + 0.15 + 0.7 * (head + 0.5) / heads),
            cy=bottom - (bottom - top) * value,
            r=3,
            fill=SINK if value > eps else BASE,
            fill_opacity=0.75,
            data_part=f"dot{i}",
        )
    for layer in sorted({0, layers // 2, layers - 1}):
        svg.text(root, f"{layer + 1}", left + step * (layer + 0.5), bottom + 18, text_anchor="middle", fill=GREY)
    svg.text(root, "block, a dot a head; upright: its mean α₁ over the texts", left, bottom + 38)
    y, floor = bottom - (bottom - top) * eps, bottom - (bottom - top) * now["floor"]
    svg.line(root, left, floor, right, floor, part="uniform", stroke=GREY, stroke_dasharray="3 3")
    svg.line(root, left, y, right, y, part="epsilon", stroke=INK, stroke_width=1.5)
    read = f"T = {length}, ε = {eps:g}: Sink₁ = {now['sinks'][data['epsilon']]:.1f} %"
    svg.text(root, read, left, 20, part="read", font_weight="bold")
    texts = rows[start]["samples"]
    told = sorted({epsilons[len(epsilons) // 5], eps, epsilons[len(epsilons) // 2]})
    counts = ", ".join(f"{now['sinks'][epsilons.index(e)]:.1f} % at ε = {e:g}" for e in told)
    ends = [(row["T"], row["sinks"][data["epsilon"]]) for row in (data["lengths"][0], data["lengths"][-1])]
    caption = (
        f"What a threshold does, in {model}. Above the solid line ε a head counts as a sink, text by text; the "
        f"dotted line is uniform attention. At T = {length} ({texts} texts), Sink₁ is {counts}; at ε = {eps:g} it goes "
        f"from {ends[0][1]:.1f} % at T = {ends[0][0]} to {ends[1][1]:.1f} % at T = {ends[1][0]}."
    )
    alt = f"Mean attention to the first token of the {layers} times {heads} heads of {model}, by block. {read}"
    return Picture(root, alt, caption, "threshold", data)


def logits(names: Sequence[str] = ("k∗", "the", "cat", "sat", "on", "it")) -> Picture:
    """One query's logits to drag, and what softmax, sigmoid, and softmax with k* make of them (Section 7).

    names: of k* and of five keys.
    """
    s = np.array(NOTHING)
    powers, top, bottom, unit = np.exp(s), 44, 190, 56
    weights = [
        np.append(0, powers[1:] / powers[1:].sum()),
        np.append(0, 1 / (1 + np.exp(-s[1:]))),
        powers / powers.sum(),
    ]
    titles, rows = ("softmax", "sigmoid", "softmax with k∗"), [300, 392, 484]
    x, root = [176 + 74 * i for i in range(len(s))], svg.canvas(512)
    data = {
        "logits": NOTHING,
        "names": list(names),
        "low": -6,
        "high": 6,
        "top": top,
        "bottom": bottom,
        "rows": rows,
        "unit": unit,
        "match": 2,
        "matching": MATCHING,
    }
    level = [bottom - (bottom - top) * (value + 6) / 12 for value in s]
    svg.text(root, "logits s", 8, 30, font_weight="bold")
    zero = (top + bottom) / 2
    svg.line(root, 140, zero, 590, zero, stroke=GREY, stroke_width=0.5)
    svg.text(root, "0", 132, zero + 4, text_anchor="end", fill=GREY)
    for i, name in enumerate(names):
        color = SINK if i == 0 else BASE
        svg.line(root, x[i], level[i], x[i], zero, part=f"stem{i}", stroke=color, stroke_width=2)
        svg.add(root, "circle", cx=x[i], cy=level[i], r=9, fill=color, data_part=f"handle{i}")
        svg.text(
            root, f"{s[i]:.1f}", x[i], level[i] + (-14 if s[i] > 0 else 24), part=f"logit{i}", text_anchor="middle"
        )
        svg.text(root, name, x[i], bottom + 40, text_anchor="middle", font_weight="bold")
    for row, (title, shares) in enumerate(zip(titles, weights, strict=True)):
        svg.text(root, title, 8, rows[row] - 18, font_weight="bold")
        svg.line(root, 140, rows[row], 590, rows[row], stroke=GREY)
        for i, share in enumerate(shares):
            if i or row == 2:
                y = rows[row] - share * unit
                svg.add(
                    root,
                    "rect",
                    x=x[i] - 20,
                    y=y,
                    width=40,
                    height=share * unit,
                    fill=SINK if i == 0 else BASE,
                    data_part=f"bar{row}-{i}",
                )
                svg.text(root, f"{share:.2f}", x[i], y - 4, part=f"share{row}-{i}", text_anchor="middle")
        svg.text(root, "on text", 8, rows[row] + 2, fill=GREY)
        svg.text(root, f"{shares[1:].sum():.2f}", 76, rows[row] + 2, part=f"sum{row}", font_weight="bold", fill=GREY)
    best = int(weights[0].argmax())
    caption = (
        f"Softmax has to spend. No key matches this query: all logits are below 0. Softmax still hands out "
        f"1.00, {weights[0][best]:.2f} of it to “{names[best]}”; sigmoid gives {weights[1][1:].sum():.2f} in all; with "
        f"a key k∗ whose value is zero, {weights[2][0]:.2f} goes there and {weights[2][1:].sum():.2f} to the "
        "text. Drag a logit, or choose it with Tab and move it with the arrow keys."
    )
    alt = "Logits of six keys, and the weights that softmax, sigmoid, and softmax with a key bias give them"
    return Picture(root, alt, caption, "logits", data)


def masks(window: int | None = 6, prefix: int = 1, length: int = 14) -> Picture:
    """Which keys each query sees under a window of w keys or a prefix of p, with a slider each (Figs. 5, 6 left)."""
    every = {
        "prefix": [AttentionSpec(prefix=p) for p in range(1, length + 1)],
        "window": [AttentionSpec(window=w) for w in range(1, length + 1)],
    }
    kind, value = ("prefix", prefix - 1) if window is None or prefix > 1 else ("window", window - 1)
    titles = {
        "prefix": [f"prefix p = {p}, no window" for p in range(1, length + 1)],
        "window": [f"window w = {w}, no prefix" for w in range(1, length + 1)],
    }
    palette = ["#cfe0ee", COLORS[3], GREEN]  # seen, first of all, first of a window
    drawn = regions(length, every[kind][value]).numpy() - 1
    size = 20.0
    root = svg.canvas(int(60 + size * length))
    svg.text(root, titles[kind][value], 60, 22, part="read", font_weight="bold")
    svg.grid(root, drawn, 60, 32, size, palette, part="mask")
    svg.text(root, "query i ↓, key j →", 60, 50 + size * length)
    for i in sorted({0, length // 2, length - 1}):
        svg.text(root, f"{i + 1}", 52, 32 + size * (i + 0.72), text_anchor="end", fill=GREY)
    for i, (color, label) in enumerate(
        zip(palette, ("seen", "first tokens of all", "first key of a window of w"), strict=True)
    ):
        svg.add(root, "rect", x=360, y=50 + 30 * i, width=16, height=16, fill=color)
        svg.text(root, label, 384, 63 + 30 * i)
    data = {
        "T": length,
        "kind": kind,
        "value": value,
        "titles": titles,
        "palette": palette,
        "masks": {
            name: ["".join(map(str, regions(length, spec).ravel().tolist())) for spec in specs]
            for name, specs in every.items()
        },
    }
    seen = int((regions(length, every[kind][value]) != HIDDEN).sum())
    caption = (
        f"Which keys a query may see, under a prefix of p tokens or a window of w. Here, with "
        f"{titles[kind][value]}, {seen} pairs of a query and a key are seen (white: hidden); plain causal attention "
        f"has {length * (length + 1) // 2}."
    )
    return Picture(root, f"An attention mask of {length} tokens: {titles[kind][value]}", caption, "masks", data)


def _alphas(run: Record, k: int | str) -> np.ndarray | None:
    """Mean alpha_k along the curve, (evaluations, L, H); None of a run that never measured it."""
    curve = run.arrays.get("curve")
    starred = curve is not None and "sink_star" in run.metrics["curve"][0]
    if curve is None or (k == "*" and not starred):
        return None
    return curve[:, -1 if k == "*" else int(k) - 1].float().numpy()


def _steps(run: Record) -> list[int]:
    return [point["step"] for point in run.metrics["curve"]]
