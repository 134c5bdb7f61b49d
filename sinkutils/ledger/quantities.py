"""What the ledger reads off a run: one number per quantity, from its record's JSON and its attention along the curve.

Excess is (alpha - u) / (1 - u), u the alpha of uniform causal attention. Ratios compare x_1 with the others' mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST_BLOCK = 0  # the index of the first block that an excess is the mean of
ONSET = 2.9  # percent: the least Sink_1 that the paper still calls a sink, "less obvious" (Table 9, 1e-4)
STUCK = 0.99  # of ln V, the loss of a uniform guess: a run that ends there has learned nothing and counts as failed
GRADIENTS = 32  # gradients are compared over the first positions, where attention reads

Numbers = dict[str, float]


@dataclass(frozen=True)
class Quantity:
    """How a quantity is judged.

    by_base: its bar is a share of the base's excess; else `bar` is the value above which there is something.
    log: whether it is a ratio, averaged and compared by its logarithm.
    """

    heading: str
    by_base: bool = False
    bar: float = math.nan
    log: bool = False


QUANTITIES = {
    "excess": Quantity("excess of alpha_1", by_base=True),
    "excess_2": Quantity("excess of alpha_2", by_base=True),
    "excess_3": Quantity("excess of alpha_3", by_base=True),
    "excess_star": Quantity("excess of alpha_*", by_base=True),
    "learned": Quantity("excess of alpha_1, less the untrained model's", by_base=True),
    "learned_star": Quantity("excess of alpha_*, less the untrained model's", by_base=True),
    "late": Quantity("excess of alpha_1 gained after a tenth of the steps", by_base=True),
    "highest": Quantity("largest excess of alpha_1 on the way", by_base=True),
    "visible": Quantity("excess of alpha_1 over the queries that see x_1", by_base=True),
    "third_block": Quantity("excess of alpha_1 in the third block", by_base=True),
    "largest": Quantity("largest excess of alpha_k, k = 1 to 10", by_base=True),
    "inside": Quantity("largest excess of alpha_k, k = 2 to 5", by_base=True),
    "beyond": Quantity("largest excess of alpha_k, k = 6 to 10", by_base=True),
    "second_over_first": Quantity("excess of alpha_2 less that of alpha_1", bar=0.0),
    "onset": Quantity("onset, share of the steps"),
    "turn": Quantity("least validation loss at, share of the steps"),
    "valid_loss": Quantity("validation loss"),
    "gap": Quantity("validation less training loss"),
    "hidden": Quantity("norm ratio of h_1, times the untrained", bar=2.0, log=True),
    "before_norm": Quantity("norm ratio of h_1 before the norm, times the untrained", bar=2.0, log=True),
    "hidden_prefix": Quantity("largest norm ratio of h_2 to h_5, times the untrained", bar=2.0, log=True),
    "element": Quantity("largest element of h, times the untrained", bar=2.0, log=True),
    "key": Quantity("norm ratio of k_1 where the sink is", bar=1.0, log=True),
    "value": Quantity("norm ratio of v_1 where the sink is", bar=1.0, log=True),
    "gathered": Quantity("gradient at x_1 over that at x_2 to x_32", log=True),
    "fall": Quantity("fall of the training loss", bar=0.0),
    "end": Quantity("training loss at the end", log=True),
    "gradient": Quantity("median gradient norm", log=True),
    "spike": Quantity("largest over median gradient norm", bar=10.0, log=True),
    # Measured on kept weights (data/trials.csv)
    "window_first": Quantity("excess of the window's first key", by_base=True),
    "without_bias": Quantity("excess of alpha_1 without the trained biases", by_base=True),
    "loss_without_bias": Quantity("loss added by removing the biases", bar=0.0),
    "star_hidden": Quantity("norm ratio of h at x*, times the untrained", bar=2.0, log=True),
    "repeat": Quantity("excess of alpha_1 on one token repeated", by_base=True),
    "replaced": Quantity("excess left on one token repeated, p_1 replaced", bar=0.5),
    "swapped": Quantity("excess of alpha_t less alpha_1, p_1 and p_t swapped", bar=0.0),
}


def failed(config: dict[str, Any], metrics: dict[str, Any]) -> bool:
    """Whether training failed: it diverged, or its loss is still that of a uniform guess on training text too.

    A model that overfits may end worse than a uniform guess on other text, and has not failed.
    """
    losses = [metrics.get("final", {}).get("valid_loss", math.inf)]
    for point in metrics["curve"][-1:]:
        losses.append(point.get("train_loss", math.inf))
    return metrics["status"] == "failed" or min(losses) >= STUCK * math.log(config["model"]["vocab_size"])


def of_run(config: dict[str, Any], metrics: dict[str, Any], curve: np.ndarray | None) -> Numbers:
    """Every quantity of a run that its record holds. curve: alpha (evaluations, targets, blocks, heads)."""
    final, report = metrics["final"], metrics["final"].get("report")
    numbers = _of_losses(final, metrics["curve"])
    numbers |= _of_tuning(metrics["curve"])
    if report is None:
        return numbers
    window = config["model"]["attention"]["window"]
    numbers |= _of_attention(report, window)
    if curve is not None:
        numbers |= _of_course(curve, [point["step"] for point in metrics["curve"]], report, window)
    numbers |= _of_states(report)
    rows = [row[:GRADIENTS] for row in final.get("gradients", {}).get("input", ())]
    reached = [row for row in rows if any(row[1:])]
    if reached:
        numbers["gathered"] = float(np.median(norm_ratio(reached)))
    return numbers


def uniform_alpha(length: int, target: int | None = 1, window: int | None = None) -> float:
    """alpha of a target under uniform causal attention; in a window w, query i spreads over min(i, w) keys.

    target: its position, counted from 1; None: a key of the model's own, which every query sees beside the others.
    """
    queries = np.arange(target or 1, length + 1)
    keys = np.minimum(queries, window or length)
    if target is None:
        return float(np.mean(1 / (keys + 1)))
    sees = queries - target < (window or length)
    return float(np.mean(sees / keys))


def excess(alpha: Any, uniform: Any) -> Any:
    """(alpha - u) / (1 - u): 0 where attention is uniform, 1 where all of it is on the target."""
    return (alpha - uniform) / (1 - uniform)


def norm_ratio(norms: Sequence[Sequence[float]], position: int = 1) -> np.ndarray:
    """The norm at a position over the mean of the others', for each row of norms by position."""
    rows = np.asarray(norms, dtype=float)
    others = np.delete(rows, position - 1, axis=1).mean(axis=1)
    return np.divide(rows[:, position - 1], others, out=np.full(len(rows), np.nan), where=others > 0)


def _of_losses(final: dict[str, Any], curve: list[dict[str, Any]]) -> Numbers:
    numbers = {"valid_loss": final["valid_loss"]}
    if "train_loss" in final:
        numbers["gap"] = final["valid_loss"] - final["train_loss"]
    if curve and curve[-1]["step"]:
        steps = np.array([point["step"] for point in curve]) / curve[-1]["step"]
        numbers["turn"] = steps[np.argmin([point["valid_loss"] for point in curve])]
        below = [i for i, point in enumerate(curve) if point["sink_1"] < ONSET]
        start = below[-1] + 1 if below else 0
        numbers["onset"] = steps[start] if start < len(curve) else 1.0
    return numbers


def _of_tuning(curve: list[dict[str, Any]]) -> Numbers:
    """Of a fine-tuning, whose points hold every step: losses as means of the first and the last tenth."""
    points = [point for point in curve if "gradient_norms" in point]
    if not points:
        return {}
    losses = np.concatenate([point["losses"] for point in points])
    norms = np.concatenate([point["gradient_norms"] for point in points])
    tenth = max(1, len(losses) // 10)
    first, last = losses[:tenth].mean(), losses[-tenth:].mean()
    median = float(np.median(norms))
    return {"fall": first - last, "end": last, "gradient": median, "spike": norms.max() / median}


def _of_attention(report: dict[str, Any], window: int | None) -> Numbers:
    length = report["T"]
    alpha = np.array(report["alpha"])  # (targets, blocks, heads)
    uniform = np.array([uniform_alpha(length, target, window) for target in report["targets"]])
    by_block = excess(alpha, uniform[:, None, None]).mean(axis=2)
    mean = _mean(by_block[:, FIRST_BLOCK:], axis=1)  # one per target
    numbers = {"excess": mean[0], "third_block": by_block[0, min(3, by_block.shape[1]) - 1]}
    numbers |= {f"excess_{target}": mean[target - 1] for target in (2, 3) if target <= len(mean)}
    if len(mean) >= 10:
        numbers |= {"largest": mean[:10].max(), "inside": mean[1:5].max(), "beyond": mean[5:10].max()}
        numbers["second_over_first"] = mean[1] - mean[0]
    if report.get("alpha_star"):
        star = excess(np.array(report["alpha_star"]), uniform_alpha(length, None, window))
        numbers["excess_star"] = _mean(star[FIRST_BLOCK:])
    seen = min(window or length, length)  # queries that see x_1
    if seen > 1:
        numbers["visible"] = excess(_mean(alpha[0, FIRST_BLOCK:]) * length / seen, uniform_alpha(seen))
    return numbers


def _of_course(alpha: np.ndarray, steps: list[int], report: dict[str, Any], window: int | None) -> Numbers:
    """From alpha along the curve: what training added. A target beyond the report's is the model's own key."""
    targets = [*report["targets"], None][: alpha.shape[1]]
    uniform = np.array([uniform_alpha(report["T"], target, window) for target in targets])
    by_step = excess(_mean(alpha[:, :, FIRST_BLOCK:].astype(float), axis=(2, 3)), uniform)  # (evaluations, targets)
    numbers = {"highest": by_step[:, 0].max()}
    if steps[0] == 0:
        numbers["learned"] = by_step[-1, 0] - by_step[0, 0]
        if targets[-1] is None:
            numbers["learned_star"] = by_step[-1, -1] - by_step[0, -1]
    early = np.searchsorted(steps, steps[-1] / 10, side="right")
    if early > 0:
        numbers["late"] = by_step[-1, 0] - by_step[early - 1, 0]
    return numbers


def _of_states(report: dict[str, Any]) -> Numbers:
    """Norms and elements, in blocks before the last, whose output is the prediction."""
    numbers: Numbers = {}
    hidden = report.get("hidden_norms")
    if hidden:
        numbers["hidden"] = norm_ratio(hidden[:-1] or hidden).max()
        numbers["hidden_prefix"] = max(norm_ratio(hidden[:-1] or hidden, k).max() for k in (2, 3, 4, 5))
    if report.get("before_norm_norms"):
        rows = report["before_norm_norms"]
        numbers["before_norm"] = norm_ratio(rows[:-1] or rows).max()
    if report.get("hidden_peaks"):
        rows = report["hidden_peaks"]
        numbers["element"] = np.max(rows[:-1] or rows)
    layer = int(np.argmax(np.mean(report["alpha"][0], axis=1)))
    for name in ("key", "value"):
        if report.get(f"{name}_norms"):
            numbers[name] = norm_ratio([report[f"{name}_norms"][layer]])[0]
    return numbers


def _mean(values: np.ndarray, axis: Any = None) -> Any:
    """The mean, NaN over nothing: a model of one block has no later ones."""
    return values.mean(axis=axis) if values.size else np.full_like(values.sum(axis=axis), np.nan)
