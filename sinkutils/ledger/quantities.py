"""What the ledger reads off a run: one number per quantity, from its record and its attention along
the curve.

Excess is (alpha - u) / (1 - u), u the alpha of uniform causal attention, and, where no block is
named, its mean over blocks 2 to L: block 1 can recognise a fixed first token by its embedding
alone, a sink of another kind (`block_1`).
"""

from __future__ import annotations

import math

import numpy as np

from sinkutils.ledger.frames import by_block
from sinkutils.measuring.report import excess, norm_ratio, uniform_alpha
from sinkutils.study.config import Json

Numbers = dict[str, float]

# Percent: the least Sink_1 that the paper still calls a sink, "less obvious" (Table 9, 1e-4).
ONSET = 2.9
# Of ln V, the loss of a uniform guess: a run that ends there has learned nothing: it failed.
STUCK = 0.99
GRADIENTS = 32  # gradients are compared over the first positions, where attention reads

# An excess, judged by a share of the base's.
EXCESSES = (
    "excess",  # of alpha_1
    "excess_2",  # of alpha_2, the second token's
    "excess_3",
    "excess_star",  # of the attention to a key of its own: a bias, a sink token, a sink logit
    "learned",  # excess, less that of the untrained model
    "learned_star",
    "late",  # excess gained after a tenth of the steps
    "highest",  # largest excess on the way
    "visible",  # over the queries that a window lets see x_1
    "block_1",  # of alpha_1 in block 1
    "window_first",  # of a window's first key; this and `without_bias` from data/trials.csv
    "without_bias",  # of alpha_1 once the trained K biases are taken away
)
# Judged by a bar of its own: what is above it counts. Norm ratios and elements of h_1 stand out
# where they are above what the base has before its first step, when x_1 is large because it sees
# only itself; one bar for every operation.
BARS = {
    # The norm of h_1 over the others' mean, and its largest element over the median of all hidden
    # states: the maxima over the blocks before the last.
    "hidden": 3.44,
    "element": 12.3,
    "element_1": 12.3,  # that element after block 1
    "before_norm": 2.0,  # the norm ratio before a post-norm block's norm; 1 in the untrained model
    # The norm ratio of a sink token over that of the untrained model (data/trials.csv).
    "star_hidden": 2.0,
    # The norm of k_1 over the others' mean, in the later block with the largest alpha_1.
    "key": 1.0,
    "value": 1.0,
    "loss_without_bias": 0.0,  # the rise without the trained K biases (data/trials.csv)
    "fall": 0.0,  # of the training loss, in a fine-tuning
    "spike": 10.0,  # largest over median gradient norm, in a fine-tuning
}
# Only compared between runs.
COMPARED = (
    # The share of the steps after which Sink_1 stays at ONSET or more, if it ever does.
    "onset",
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
    "hidden",
    "element",
    "element_1",
    "before_norm",
    "star_hidden",
    "key",
    "value",
    "gathered",
    "end",
    "gradient",
    "spike",
)
QUANTITIES = (*EXCESSES, *BARS, *COMPARED)

# Whose attention a quantity reads: that of block 1, of the later blocks, or of all. A loss, or the
# norm or element of a state, needs no live head. live_1 is the share of live heads in block 1,
# live_later the least such share of a later block.
READS: dict[str, tuple[str, ...]] = dict.fromkeys(EXCESSES, ("live_later",))
READS |= dict.fromkeys(("key", "value"), ("live_later",))
READS |= dict.fromkeys(("onset", "gathered"), ("live_1", "live_later"))
READS["block_1"] = ("live_1",)


def of_run(config: Json, metrics: Json, alpha: np.ndarray | None) -> Numbers | None:
    """Every quantity that a run holds, ratios as their logarithms. alpha: (evaluations, targets,
    blocks, heads).

    None where training failed: it diverged, or its loss is still that of a uniform guess on
    training text too. A model that overfits may end worse than a uniform guess on other text, and
    has not failed.
    """
    if metrics["status"] == "failed":
        return None
    final = metrics["final"]
    model = config["model"]
    numbers = {"valid_loss": final["valid_loss"]}
    least_loss = final["valid_loss"]
    if "train_loss" in final:
        numbers["gap"] = final["valid_loss"] - final["train_loss"]
        least_loss = min(least_loss, final["train_loss"])
    loss_of_a_guess = math.log(model["vocab_size"])
    if least_loss >= STUCK * loss_of_a_guess:
        return None
    curve = metrics["curve"] or [final]
    # Where on the way, as a share of the steps, the validation loss was least.
    steps = np.array([point["step"] for point in curve])
    steps = steps / max(1, steps[-1])
    valid_losses = [point["valid_loss"] for point in curve]
    numbers["turn"] = steps[np.argmin(valid_losses)]
    onset = 0  # the point after the last one below the threshold
    for i, point in enumerate(curve):
        if point["sink_1"] < ONSET:
            onset = i + 1
    if onset < len(curve):
        numbers["onset"] = steps[onset]
    if "report" in final:
        report = final["report"]
        window = model["attention"]["window"]
        numbers |= _of_report(report, window)
        if alpha is not None and alpha.shape[2] > 1:
            numbers |= _of_course(alpha, steps, report, window)
    if "gradient_norms" in curve[-1]:
        numbers |= _of_tuning(curve)
    gradients = final.get("gradients", {}).get("input", ())  # (L, T - 1)
    reached = []  # the blocks of which a gradient reaches more than x_1
    for norms in gradients:
        if any(norms[1:GRADIENTS]):
            reached.append(norms[:GRADIENTS])
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


def _of_report(report: Json, window: int | None) -> Numbers:
    """Attention by excess; norms and elements of h_1 in blocks before the last.

    The last block's output is the prediction.
    """
    found = by_block(report, window)
    length = report["T"]
    numbers = {}
    for name, values in found.items():
        if name.startswith("excess"):
            numbers[name] = _later(values)
    numbers["excess"] = numbers.pop("excess_1")
    numbers["block_1"] = found["excess_1"][0]
    numbers["live_1"] = found["live"][0]
    numbers["live_later"] = found["live"][1:].min(initial=1)
    seen = min(window or length, length)  # queries that see x_1
    if seen > 1:
        alpha = np.mean(report["alpha"][0], axis=1)  # (L,), of the first token
        shown = _later(alpha) * length / seen
        numbers["visible"] = excess(shown, uniform_alpha(seen))
    # Large states: of blocks before the last. `initial` is for a model of one block.
    if "element" in found:
        numbers["element_1"] = found["element"][0]
        numbers["element"] = found["element"][:-1].max(initial=0)
    for name in ("hidden", "before_norm"):
        ratios = found.get(f"{name}_ratio")
        if ratios is not None:
            numbers[name] = ratios[:-1].max(initial=0)
    # Small keys and values: in the later block whose sink is the strongest.
    later = found["excess_1"][1:]
    if len(later) > 0 and "key_ratio" in found:
        strongest = 1 + later.argmax()
        numbers["key"] = found["key_ratio"][strongest]
        numbers["value"] = found["value_ratio"][strongest]
    return numbers


def _of_course(alpha: np.ndarray, steps: np.ndarray, report: Json, window: int | None) -> Numbers:
    """What training added. The last target of a model with a key of its own is that key."""
    blocks = alpha.mean(axis=3).astype(float)  # (evaluations, targets, blocks)
    later = blocks[:, :, 1:].mean(axis=2)  # (evaluations, targets)
    even = uniform_alpha(report["T"], 1, window)
    course = excess(later[:, 0], even)  # of the first token
    early = np.searchsorted(steps, 0.1, side="right") - 1  # the last point of the first tenth
    numbers = {"highest": course.max()}
    numbers["learned"] = course[-1] - course[0]
    numbers["late"] = course[-1] - course[early]
    if report.get("alpha_star"):
        even = uniform_alpha(report["T"], "star", window)
        star = excess(later[:, -1], even)
        numbers["learned_star"] = star[-1] - star[0]
    return numbers


def _of_tuning(curve: list[Json]) -> Numbers:
    """Of a fine-tuning, whose points hold every step: losses as means of the first and the last
    tenth.
    """
    points = [point for point in curve if "gradient_norms" in point]
    losses = np.concatenate([point["losses"] for point in points])
    norms = np.concatenate([point["gradient_norms"] for point in points])
    tenth = max(1, len(losses) // 10)
    start = losses[:tenth].mean()
    end = losses[-tenth:].mean()
    median = np.median(norms)
    numbers = {"fall": start - end, "end": end}
    numbers |= {"gradient": median, "spike": norms.max() / median}
    return numbers


def _later(blocks: np.ndarray) -> float:
    """The mean over blocks 2 to L; NaN for a model of one block."""
    return blocks[1:].mean() if len(blocks) > 1 else math.nan
