"""What the ledger reads off a run: one number per quantity, from its record and its attention along the curve.

Excess is (alpha - u) / (1 - u), u the alpha of uniform causal attention, and, where no block is named, its mean over
blocks 2 to L: block 1 can recognise a fixed first token by its embedding alone, a sink of another kind (`block_1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkutils.measuring.report import uniform_alpha

Numbers = dict[str, float]

ONSET = 2.9  # percent: the least Sink_1 that the paper still calls a sink, "less obvious" (Table 9, 1e-4)
STUCK = 0.99  # of ln V, the loss of a uniform guess: a run that ends there has learned nothing and counts as failed
GRADIENTS = 32  # gradients are compared over the first positions, where attention reads

# An excess, judged by a share of the base's.
EXCESSES = (
    "excess",  # of alpha_1
    "excess_2",  # of alpha_2, the second token's
    "excess_3",
    "excess_star",  # of the attention to a key of the model's own: a bias, a sink token, a sink logit
    "learned",  # excess, less that of the untrained model
    "learned_star",
    "late",  # excess gained after a tenth of the steps
    "highest",  # largest excess on the way
    "visible",  # over the queries that a window lets see x_1
    "block_1",  # of alpha_1 in block 1
    "window_first",  # of a window's first key; this and `without_bias` from data/trials.csv
    "without_bias",  # of alpha_1 once the trained K biases are taken away
)
# Judged by a bar of its own: what is above it counts. Norm ratios and elements of h_1 stand out where they are above
# what the base has before its first step, when x_1 is large because it sees only itself; one bar for every operation.
BARS = {
    "hidden": 3.44,  # the norm of h_1 over the others' mean, its maximum over the blocks before the last
    "element": 12.3,  # the largest element of h_1 over the median of all hidden states, its maximum likewise
    "element_1": 12.3,  # that element after block 1
    "before_norm": 2.0,  # the norm ratio before a post-norm block's norm; 1 in the untrained model
    "star_hidden": 2.0,  # the norm ratio of a sink token over that of the untrained model (data/trials.csv)
    "key": 1.0,  # the norm of k_1 over the others' mean, in the later block with the largest alpha_1
    "value": 1.0,
    "loss_without_bias": 0.0,  # what the loss rises by without the trained K biases (data/trials.csv)
    "fall": 0.0,  # of the training loss, in a fine-tuning
    "spike": 10.0,  # largest over median gradient norm, in a fine-tuning
}
# Only compared between runs.
COMPARED = (
    "onset",  # the share of the steps after which Sink_1 stays at ONSET or more; not held by a run where it never does
    "turn",  # the share of the steps at which the validation loss is least
    "valid_loss",
    "gap",  # validation less training loss
    "gathered",  # the gradient at x_1 over that at x_2 to x_32, median over the blocks
    "end",  # training loss at the end of a fine-tuning
    "gradient",  # median gradient norm of a fine-tuning
    "sink_1",  # the paper's metric over all blocks, in percent
)
# Averaged and compared by their logarithms.
RATIOS = (
    *("hidden", "element", "element_1", "before_norm", "star_hidden", "key", "value"),  # of states
    *("gathered", "end", "gradient", "spike"),
)
QUANTITIES = (*EXCESSES, *BARS, *COMPARED)


def failed(config: dict[str, Any], metrics: dict[str, Any]) -> bool:
    """Whether training failed: it diverged, or its loss is still that of a uniform guess on training text too.

    A model that overfits may end worse than a uniform guess on other text, and has not failed.
    """
    losses = [metrics.get("final", {}).get("valid_loss", math.inf)]
    losses += [point.get("train_loss", math.inf) for point in metrics.get("curve", [])[-1:]]
    return metrics["status"] == "failed" or min(losses) >= STUCK * math.log(config["model"]["vocab_size"])


def of_run(config: dict[str, Any], metrics: dict[str, Any], alpha: np.ndarray | None) -> Numbers:
    """Every quantity that a run holds, ratios as their logarithms. alpha: (evaluations, targets, blocks, heads)."""
    final = metrics["final"]
    curve = metrics["curve"] or [final]
    numbers = _of_losses(final, curve)
    if "report" in final:
        report, window = final["report"], config["model"]["attention"]["window"]
        numbers |= _of_attention(report, window) | _of_states(report)
        if alpha is not None:
            numbers |= _of_course(alpha, [point["step"] for point in curve], report, window)
    if "gradient_norms" in curve[-1]:
        numbers |= _of_tuning(curve)
    rows = [row[:GRADIENTS] for row in final.get("gradients", {}).get("input", ())]
    reached = [row for row in rows if any(row[1:])]
    if reached:
        numbers["gathered"] = np.median(norm_ratio(reached))
    return as_judged(numbers)


def as_judged(numbers: Numbers) -> Numbers:
    """Ratios as their logarithms; what is not finite is not held, such as a ratio of nothing."""
    kept = {}
    for name, value in numbers.items():
        if name in RATIOS:
            value = math.log(value) if value > 0 else math.nan
        if math.isfinite(value):
            kept[name] = float(value)
    return kept


def excess(alpha: Any, uniform: Any) -> Any:
    """(alpha - u) / (1 - u): 0 where attention is uniform, 1 where all of it is on the target."""
    return (alpha - uniform) / (1 - uniform)


def norm_ratio(norms: Sequence[Sequence[float]]) -> np.ndarray:
    """The first position's norm over the mean of the others', for each row of norms by position; NaN over zeros."""
    rows = np.asarray(norms, dtype=float)
    others = rows[:, 1:].mean(axis=1)
    return rows[:, 0] / np.where(others > 0, others, np.nan)


def _of_losses(final: dict[str, Any], curve: list[dict[str, Any]]) -> Numbers:
    steps = np.array([point["step"] for point in curve]) / max(1, curve[-1]["step"])
    least = np.argmin([point["valid_loss"] for point in curve])
    numbers = {"valid_loss": final["valid_loss"], "sink_1": final["sink_1"], "turn": steps[least]}
    if "train_loss" in final:
        numbers["gap"] = final["valid_loss"] - final["train_loss"]
    below = [i for i, point in enumerate(curve) if point["sink_1"] < ONSET]
    start = below[-1] + 1 if below else 0
    if start < len(curve):
        numbers["onset"] = steps[start]
    return numbers


def _of_attention(report: dict[str, Any], window: int | None) -> Numbers:
    length = report["T"]
    alpha = np.mean(report["alpha"], axis=2)  # (targets, blocks), the first token's first
    numbers = {"block_1": excess(alpha[0, 0], uniform_alpha(length, 1, window))}
    for target, blocks in zip(report["targets"], alpha, strict=True):
        name = "excess" if target == 1 else f"excess_{target}"
        numbers[name] = excess(_later(blocks), uniform_alpha(length, target, window))
    if report.get("alpha_star"):
        star = np.mean(report["alpha_star"], axis=1)
        numbers["excess_star"] = excess(_later(star), uniform_alpha(length, "star", window))
    seen = min(window or length, length)  # queries that see x_1
    if seen > 1:
        numbers["visible"] = excess(_later(alpha[0]) * length / seen, uniform_alpha(seen))
    return numbers


def _of_course(alpha: np.ndarray, steps: list[int], report: dict[str, Any], window: int | None) -> Numbers:
    """What training added. A target beyond the report's is the model's own key."""
    length = report["T"]
    course = np.array([_later(blocks) for blocks in alpha[:, 0].mean(axis=2)])  # one per evaluation
    excesses = excess(course, uniform_alpha(length, 1, window))
    early = int(np.searchsorted(steps, steps[-1] / 10, side="right")) - 1
    numbers = {"highest": excesses.max(), "learned": excesses[-1] - excesses[0], "late": excesses[-1] - excesses[early]}
    if alpha.shape[1] > len(report["targets"]):
        first, *_, last = (_later(blocks) for blocks in alpha[:, -1].mean(axis=2))
        numbers["learned_star"] = (last - first) / (1 - uniform_alpha(length, "star", window))
    return numbers


def _of_states(report: dict[str, Any]) -> Numbers:
    """Norms and elements of h_1 in blocks before the last, whose output is the prediction; of k_1 and v_1."""
    numbers = {"hidden": norm_ratio(report["hidden_norms"])[:-1].max(initial=0)}
    if "before_norm_norms" in report:
        numbers["before_norm"] = norm_ratio(report["before_norm_norms"])[:-1].max(initial=0)
    if "hidden_peaks" in report:
        elements = [block[0] for block in report["hidden_peaks"]]
        numbers |= {"element_1": elements[0], "element": max(elements[:-1], default=0)}
    sinks = np.mean(report["alpha"][0], axis=1)
    if len(sinks) > 1:
        block = 1 + int(np.argmax(sinks[1:]))
        numbers["key"] = norm_ratio([report["key_norms"][block]])[0]
        numbers["value"] = norm_ratio([report["value_norms"][block]])[0]
    return numbers


def _of_tuning(curve: list[dict[str, Any]]) -> Numbers:
    """Of a fine-tuning, whose points hold every step: losses as means of the first and the last tenth."""
    points = [point for point in curve if "gradient_norms" in point]
    losses = np.concatenate([point["losses"] for point in points])
    norms = np.concatenate([point["gradient_norms"] for point in points])
    tenth = max(1, len(losses) // 10)
    end, median = losses[-tenth:].mean(), np.median(norms)
    return {"fall": losses[:tenth].mean() - end, "end": end, "gradient": median, "spike": norms.max() / median}


def _later(blocks: np.ndarray) -> float:
    """The mean over blocks 2 to L; NaN for a model of one block."""
    return float(blocks[1:].astype(float).mean()) if len(blocks) > 1 else math.nan
