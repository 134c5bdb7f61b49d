"""Pictures that answer to hands: emergence as a film, thresholds, logits to drag, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from sinkutils.model.attention import AttentionSpec
from sinkutils.showing import svg
from sinkutils.showing.diagrams import HIDDEN, regions
from sinkutils.showing.figures import BASE_COLOR, FIRST_COLOR, OTHER_COLORS, STAR_COLOR
from sinkutils.showing.svg import GREY, INK, PALETTE, Picture
from sinkutils.study.record import Record

LINES = (BASE_COLOR, *OTHER_COLORS)
COLOR_OF_KEY = (FIRST_COLOR, BASE_COLOR)  # of k*, of a token
REGIONS = {"seen": "#cfe0ee", "first tokens of all": OTHER_COLORS[0], "first key of a window of w": STAR_COLOR}
NOTHING, MATCHING = (2.0, -3.0, -2.5, -3.5, -2.0, -3.0), 5.0  # logits of k* and five keys: none matches; one does


def film(runs: Mapping[str, Record | None], k: int | str = 1, thumbnails: int = 7) -> Picture | None:
    """Emergence played back: every head's mean attention to token k along training, a row of pictures a run.

    runs: by the name to show; those that are None, failed, or have no k* are named in the caption. k: 1 to 4, or
    "*" for k*, x* or a sink logit. None where nothing can be shown. The runs' steps must be the same: raises ValueError
    if not.
    """
    left_out: dict[str, list[str]] = {}
    shown: dict[str, tuple[Record, np.ndarray]] = {}
    for name, run in runs.items():
        if run is None or run.status == "failed":
            left_out.setdefault("Not recorded yet" if run is None else "Failed in training", []).append(name)
        elif (alphas := _alphas(run, k)) is None:
            left_out.setdefault("Without k∗", []).append(name)
        else:
            shown[name] = run, alphas
    if not shown:
        return None
    curves = [run.metrics["curve"] for run, _ in shown.values()]
    steps, *others = ([point["step"] for point in curve] for curve in curves)
    if any(other != steps for other in others):
        raise ValueError("the runs of a film must have been measured at the same steps")
    left, right, height = 46, 486, 116
    bottom = height * len(shown) + 118
    root = svg.canvas(bottom + 44)
    x = [left + (right - left) * step / steps[-1] for step in steps]
    picks = [round(i * (len(steps) - 1) / (thumbnails - 1)) for i in range(thumbnails)]
    films, changes, ends = [], [], {}
    for row, (name, (_, alphas)) in enumerate(shown.items()):
        color, top = LINES[row % len(LINES)], row * height
        frames, (layers, heads) = svg.shade(alphas), alphas.shape[1:]
        sinks = [float(point["sink_star" if k == "*" else f"sink_{k}"]) for point in curves[row]]
        svg.text(root, name, left - 26, top + 18, font_weight="bold", fill=color)
        size = min(52 / heads, 80 / layers)
        for pick in picks:
            svg.grid(root, frames[pick], x[pick] - size * heads / 2, top + 30, size)
        size = min(110 / heads, 84 / layers)
        svg.grid(root, frames[-1], 526, top + 30, size, part=f"now{row}")
        svg.text(root, f"{sinks[-1]:.0f} %", 526 + size * heads / 2, top + 20, part=f"sink{row}", text_anchor="middle")
        points = " ".join(f"{a:.1f},{bottom - 90 * sink / 100:.1f}" for a, sink in zip(x, sinks, strict=True))
        svg.add(root, "polyline", points=points, fill="none", stroke=color, stroke_width=2.5)
        films.append({"frames": [frame.ravel().tolist() for frame in frames], "heads": heads, "sinks": sinks})
        ends[name] = f"{sinks[-1]:.0f} %"
        changes.append(f"{name}, {sinks[0]:.0f} % before the first step and {ends[name]} at the end")
    svg.scale(root, left, right, {f"{share} %": bottom - 90 * share / 100 for share in (0, 50, 100)})
    for pick in picks:
        svg.text(root, f"{steps[pick]:,}", x[pick], bottom + 18, text_anchor="middle", fill=GREY)
    symbol = f"Sink{'∗' if k == '*' else '₁₂₃₄'[int(k) - 1]}"
    svg.text(root, f"{symbol}, share of heads and texts (ε = 0.3), by optimisation step", left, bottom + 38)
    svg.line(root, right, bottom - 96, right, bottom + 4, part="playhead", stroke=INK, stroke_width=1.5)
    svg.text(root, f"step {steps[-1]:,}", 526, bottom - 40, part="step", font_weight="bold")
    target = "the bias k∗" if k == "*" else f"token {k}"
    caption = (
        "How a sink emerges. A square is a head (rows: blocks, columns: heads), darker the more attention it gives to "
        f"{target}; the line is the share of heads, text by text, that give it more than 0.3: {'; '.join(changes)}. "
        "One seed a run." + "".join(f" {why}: {', '.join(names)}." for why, names in left_out.items())
    )
    alt = f"Grids of heads at {thumbnails} steps of training and the line of {symbol}, which ends at "
    alt += " and ".join(f"{end} ({name})" for name, end in ends.items())
    data = {"steps": steps, "left": left, "right": right, "palette": PALETTE, "runs": films}
    return Picture(root, alt, caption, "film", data)


def threshold(lengths: Mapping[Any, Mapping[str, Any]], model: str, length: int = 64, eps: float = 0.3) -> Picture:
    """Every head's alpha_1 against a threshold: what eps and T do to Sink_1 (Fig. 3).

    lengths: by T, a report's `to_dict` or a part of it with "alpha" (targets, layers, heads), "sink" by k and eps,
    "T", "floor" and "samples", such as the section "lengths" of data/open_lms. Raises ValueError for a
    length or eps it does not have.
    """
    rows = [row for _, row in sorted(lengths.items(), key=lambda item: int(item[0]))]
    known, epsilons = [row["T"] for row in rows], sorted(float(eps) for eps in rows[0]["sink"]["1"])
    if length not in known or eps not in epsilons:
        raise ValueError(f"length must be one of {known} and eps one of {epsilons}")
    start, at = known.index(length), epsilons.index(eps)
    left, right, top, bottom = 54, 620, 36, 270

    def y(share: float) -> float:
        return bottom - (bottom - top) * share

    measured = []
    for row in rows:
        alpha = np.asarray(row["alpha"][0], dtype=float)
        sinks = [row["sink"]["1"][f"{e:g}"] for e in epsilons]
        heads_of = alpha.ravel().round(3).tolist()
        measured.append({"T": row["T"], "alpha": heads_of, "floor": row["floor"], "sinks": sinks})
    layers, heads = alpha.shape
    root, now = svg.canvas(bottom + 46), measured[start]
    svg.scale(root, left, right, {f"{share:g}": y(share) for share in (0, 0.5, 1)})
    step = (right - left) / layers
    for i, value in enumerate(now["alpha"]):
        layer, head = divmod(i, heads)
        x, fill = left + step * (layer + 0.15 + 0.7 * (head + 0.5) / heads), FIRST_COLOR if value > eps else BASE_COLOR
        svg.add(root, "circle", f"dot{i}", cx=x, cy=y(value), r=3, fill=fill, fill_opacity=0.75)
    for layer in sorted({0, layers // 2, layers - 1}):
        svg.text(root, f"{layer + 1}", left + step * (layer + 0.5), bottom + 18, text_anchor="middle", fill=GREY)
    svg.text(root, "block, a dot a head; upright: its mean α₁ over the texts", left, bottom + 38)
    floor = y(now["floor"])
    svg.line(root, left, floor, right, floor, part="uniform", stroke=GREY, stroke_dasharray="3 3")
    svg.line(root, left, y(eps), right, y(eps), part="epsilon", stroke=INK, stroke_width=1.5)
    read = f"T = {length}, ε = {eps:g}: Sink₁ = {now['sinks'][at]:.1f} %"
    svg.text(root, read, left, 20, part="read", font_weight="bold")
    shown = sorted({epsilons[len(epsilons) // 5], eps, epsilons[len(epsilons) // 2]})
    counts = ", ".join(f"{now['sinks'][epsilons.index(e)]:.1f} % at ε = {e:g}" for e in shown)
    short, long = (f"{row['sinks'][at]:.1f} % at T = {row['T']}" for row in (measured[0], measured[-1]))
    caption = (
        f"What a threshold does, in {model}. Above the solid line ε a head counts as a sink, text by text; the dotted "
        f"line is uniform attention. At T = {length} ({rows[start]['samples']} texts), Sink₁ is {counts}; at ε = "
        f"{eps:g} it goes from {short} to {long}."
    )
    alt = f"Mean attention to the first token of the {layers} times {heads} heads of {model}, by block. {read}"
    data = {"start": start, "epsilon": at, "epsilons": epsilons}
    data |= {"top": top, "bottom": bottom, "on": FIRST_COLOR, "off": BASE_COLOR, "lengths": measured}
    return Picture(root, alt, caption, "threshold", data)


def logits(names: Sequence[str] = ("k∗", "the", "cat", "sat", "on", "it")) -> Picture:
    """One query's logits to drag, and what softmax, sigmoid, and softmax with k* make of them (Section 7).

    names: of k* and of five keys.
    """
    s, top, bottom, unit, low, high = np.array(NOTHING), 44, 190, 56, -6, 6
    shares_of = {
        "softmax": np.append(0, softmax(s[1:])),
        "sigmoid": np.append(0, expit(s[1:])),
        "softmax with k∗": softmax(s),
    }
    rows, x = [300, 392, 484], [176 + 74 * i for i in range(len(s))]
    root, zero = svg.canvas(512), (top + bottom) / 2
    svg.text(root, "logits s", 8, 30, font_weight="bold")
    svg.scale(root, 140, 590, {"0": zero})
    for i, name in enumerate(names):
        color, y = COLOR_OF_KEY[i > 0], bottom - (bottom - top) * (s[i] - low) / (high - low)
        svg.line(root, x[i], y, x[i], zero, part=f"stem{i}", stroke=color, stroke_width=2)
        svg.add(root, "circle", f"handle{i}", cx=x[i], cy=y, r=9, fill=color)
        svg.text(root, f"{s[i]:.1f}", x[i], y + (-14 if s[i] > 0 else 24), part=f"logit{i}", text_anchor="middle")
        svg.text(root, name, x[i], bottom + 40, text_anchor="middle", font_weight="bold")
    for row, (title, shares) in enumerate(shares_of.items()):
        svg.text(root, title, 8, rows[row] - 18, font_weight="bold")
        svg.line(root, 140, rows[row], 590, rows[row], stroke=GREY)
        for i in range(row < 2, len(s)):  # k* has a share in the last row alone
            bar = {"x": x[i] - 20, "y": rows[row] - shares[i] * unit, "width": 40, "height": shares[i] * unit}
            svg.add(root, "rect", f"bar{row}-{i}", fill=COLOR_OF_KEY[i > 0], **bar)
            svg.text(root, f"{shares[i]:.2f}", x[i], bar["y"] - 4, part=f"share{row}-{i}", text_anchor="middle")
        svg.text(root, "on text", 8, rows[row] + 2, fill=GREY)
        svg.text(root, f"{shares[1:].sum():.2f}", 76, rows[row] + 2, part=f"sum{row}", font_weight="bold", fill=GREY)
    soft, sigmoid, star = shares_of.values()
    best = int(soft.argmax())
    caption = (
        "Softmax has to spend. No key of the text matches this query: their logits are below 0. Softmax still hands "
        f"out 1.00, {soft[best]:.2f} of it to “{names[best]}”; sigmoid gives {sigmoid[1:].sum():.2f} in all; with a "
        f"key k∗ whose value is zero, here at the logit {NOTHING[0]:g} that training might give it, {star[0]:.2f} goes "
        f"there and {star[1:].sum():.2f} to the text. Drag a logit, or choose "
        "it with Tab and move it with the arrow keys."
    )
    alt = "Logits of six keys, and the weights that softmax, sigmoid, and softmax with a key bias give them"
    data = {"logits": NOTHING, "names": list(names), "low": low, "high": high, "top": top, "bottom": bottom}
    data |= {"rows": rows, "unit": unit, "match": 2, "matching": MATCHING}
    return Picture(root, alt, caption, "logits", data)


def masks(window: int | None = 6, prefix: int = 1, length: int = 14) -> Picture:
    """Which keys each query sees under a window of w keys or a prefix of p, with a slider each (Figs. 5, 6 left)."""
    kind, value = ("prefix", prefix - 1) if window is None or prefix > 1 else ("window", window - 1)
    counts, size = range(1, length + 1), 20.0
    titles = {
        "prefix": [f"prefix p = {p}, no window" for p in counts],
        "window": [f"window w = {w}, no prefix" for w in counts],
    }
    drawn = {
        "prefix": [regions(length, AttentionSpec(prefix=p)) for p in counts],
        "window": [regions(length, AttentionSpec(window=w)) for w in counts],
    }
    shown, title, palette = drawn[kind][value], titles[kind][value], [*REGIONS.values()]
    root = svg.canvas(int(60 + size * length))
    svg.text(root, title, 60, 22, part="read", font_weight="bold")
    svg.grid(root, shown.numpy() - 1, 60, 32, size, palette, part="mask")
    svg.text(root, "query i ↓, key j →", 60, 50 + size * length)
    for i in sorted({0, length // 2, length - 1}):
        svg.text(root, f"{i + 1}", 52, 32 + size * (i + 0.72), text_anchor="end", fill=GREY)
    for i, (label, color) in enumerate(REGIONS.items()):
        svg.add(root, "rect", x=360, y=50 + 30 * i, width=16, height=16, fill=color)
        svg.text(root, label, 384, 63 + 30 * i)
    digits = {name: ["".join(map(str, mask.ravel().tolist())) for mask in masks] for name, masks in drawn.items()}
    data = {"T": length, "kind": kind, "value": value, "titles": titles, "palette": palette, "masks": digits}
    caption = (
        f"Which keys a query may see, under a prefix of p tokens or a window of w. Here, with {title}, "
        f"{int((shown != HIDDEN).sum())} pairs of a query and a key are seen (white: hidden); plain causal attention "
        f"has {length * (length + 1) // 2}."
    )
    return Picture(root, f"An attention mask of {length} tokens: {title}", caption, "masks", data)


def _alphas(run: Record, k: int | str) -> np.ndarray | None:
    """Mean alpha_k along the curve, (evaluations, L, H); None of a run that never measured it."""
    curve = run.arrays.get("curve")
    starred = curve is not None and "sink_star" in run.metrics["curve"][0]
    if curve is None or (k == "*" and not starred):
        return None
    return curve[:, -1 if k == "*" else int(k) - 1].float().numpy()
