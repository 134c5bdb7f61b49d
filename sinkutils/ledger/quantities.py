"""The quantities that the ledger judges: one number per quantity and run.

They are computed from the run's metrics and from its attention along the curve. The excess is
(alpha - u) / (1 - u), where u is the alpha of uniform causal attention. Unless a block is named, it
is the mean over blocks 2 to L. Block 1 can recognise a fixed first token by its embedding alone,
which is another kind of sink (`block_1`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from sinkutils.measuring.report import excess, norm_ratio, uniform_alpha
from sinkutils.study.config import Json
from sinkutils.study.frames import by_block
from sinkutils.study.record import Record

Numbers = dict[str, float]

# In percent: the smallest Sink_1 that the paper still calls a sink, "less obvious" (Table 9, 1e-4).
ONSET = 2.9
# A run has learned nothing, and counts as failed, if its final loss is at least this share of ln V,
# the loss of a uniform guess.
STUCK = 0.99
GRADIENTS = 32  # the number of first positions, where attention reads, over which gradients compare

# The blocks whose attention a quantity reads, by the share of their heads that are live: in block 1,
# and the smallest share in a later block. A loss, a norm or an element of a state needs no live head.
FIRST, LATER = "live_1", "live_later"


@dataclass(frozen=True)
class Quantity:
    """How a quantity is judged.

    excess: whether it is an excess, whose bar is a share of the base's excess.
    bar: otherwise, the number above which a value counts. None: it is only compared between runs.
    ratio: whether it is a ratio, which is averaged and compared by its logarithm.
    reads: which of FIRST and LATER it needs to be live.
    like: if it has few settings, the quantity of the same kind from which its prior variance is
        taken.
    """

    excess: bool = False
    bar: float | None = None
    ratio: bool = False
    reads: tuple[str, ...] = ()
    like: str = ""


EXCESS = Quantity(excess=True, reads=(LATER,))
QUANTITIES = {
    "excess": EXCESS,  # of alpha_1
    "excess_2": EXCESS,  # of alpha_2, the attention to the second token
    "excess_3": EXCESS,
    "excess_star": EXCESS,  # of the attention to a key of the model's own: bias, token or logit
    "learned": EXCESS,  # the excess minus that of the untrained model
    "learned_star": EXCESS,
    "late": EXCESS,  # the excess that is gained after the first tenth of the steps
    "highest": EXCESS,  # the largest excess during the training
    "visible": EXCESS,  # the excess over those queries that see x_1 in spite of a window
    "block_1": Quantity(excess=True, reads=(FIRST,)),  # of alpha_1 in block 1
    # of the first key in a window; this and the next from data/trials.csv
    "window_first": replace(EXCESS, like="excess"),
    # of alpha_1 after the trained K biases have been removed
    "without_bias": replace(EXCESS, like="excess"),
    # The norm of h_1 divided by the mean norm of the other tokens, and the largest element of h_1
    # divided by the median of all elements of the hidden states, as maxima over all blocks but the
    # last. The bars are the base's values before its first step, when h_1 is large because x_1 sees
    # only itself. All operations have the same bars.
    "hidden": Quantity(bar=3.44, ratio=True),
    "element": Quantity(bar=12.3, ratio=True),
    "element_1": Quantity(bar=12.3, ratio=True),  # `element` after block 1
    # `hidden` before the norm of a post-norm block; 1 in the untrained model
    "before_norm": Quantity(bar=2.0, ratio=True),
    # the norm ratio of a sink token, divided by that of the untrained model (data/trials.csv)
    "star_hidden": Quantity(bar=2.0, ratio=True, like="hidden"),
    # the norm of k_1 (v_1) divided by the mean norm of the other tokens, in that block after the
    # first which has the largest alpha_1
    "key": Quantity(bar=1.0, ratio=True, reads=(LATER,)),
    "value": Quantity(bar=1.0, ratio=True, reads=(LATER,)),
    # the rise of the loss without the trained K biases (data/trials.csv)
    "loss_without_bias": Quantity(bar=0.0),
    "fall": Quantity(bar=0.0),  # the fall of the training loss in a fine-tuning
    # the largest gradient norm divided by the median, in a fine-tuning
    "spike": Quantity(bar=10.0, ratio=True),
    # the share of the steps after which Sink_1 stays at ONSET or above, if it ever does
    "onset": Quantity(reads=(FIRST, LATER)),
    "turn": Quantity(),  # the share of the steps after which the validation loss is smallest
    "valid_loss": Quantity(),
    "gap": Quantity(),  # the validation loss minus the training loss
    # the gradient at x_1 divided by that at x_2 to x_32, as a median over the blocks
    "gathered": Quantity(ratio=True, reads=(FIRST, LATER)),
    "end": Quantity(ratio=True),  # the training loss at the end of a fine-tuning
    "gradient": Quantity(ratio=True),  # the median gradient norm of a fine-tuning
    "sink_1": Quantity(),  # the paper's metric over all blocks, in percent
}


def quantities(record: Record) -> Numbers | None:
    """All quantities of a record (`of_run`)."""
    return of_run(record.config, record.metrics, record.alphas.get("curve"))


def of_run(config: Json, metrics: Json, alpha: np.ndarray | None) -> Numbers | None:
    """All quantities of a run, with ratios as their logarithms, or None if the training failed.

    alpha: (evaluations, targets, blocks, heads), or None. The training failed if it diverged, or if
    both losses, on training and on validation text, are still those of a uniform guess. A model
    that overfits may be worse than a guess on validation text, and has not failed.
    """
    if metrics["status"] == "failed":
        return None
    final = metrics["final"]
    model = config["model"]
    numbers = {"valid_loss": final["valid_loss"], "sink_1": final.get("sink_1", math.nan)}
    least_loss = final["valid_loss"]
    if "train_loss" in final:
        numbers["gap"] = final["valid_loss"] - final["train_loss"]
        least_loss = min(least_loss, final["train_loss"])
    loss_of_a_guess = math.log(model["vocab_size"])
    if least_loss >= STUCK * loss_of_a_guess:
        return None
    curve = metrics["curve"] or [final]
    # The times of the evaluations, as shares of the steps.
    steps = np.array([point["step"] for point in curve])
    steps = steps / max(1, steps[-1])
    valid_losses = [point["valid_loss"] for point in curve]
    numbers["turn"] = steps[np.argmin(valid_losses)]
    onset = 0  # the index of the point after the last one below ONSET
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
    reached = []  # the norms of those blocks in which more positions than x_1 have a gradient
    for norms in gradients:
        if any(norms[1:GRADIENTS]):
            reached.append(norms[:GRADIENTS])
    if reached:
        numbers["gathered"] = np.median(norm_ratio(reached))
    return as_judged(numbers)


def as_judged(numbers: Numbers) -> Numbers:
    """The numbers with ratios as logarithms, and without those that are not finite."""
    kept = {}
    for name, value in numbers.items():
        if name in QUANTITIES and QUANTITIES[name].ratio:
            value = math.log(value) if value > 0 else math.nan
        if math.isfinite(value):
            kept[name] = float(value)
    return kept


def _of_report(report: Json, window: int | None) -> Numbers:
    """The quantities of the last report: excesses, and norms and elements of x_1.

    Those of h_1 are taken before the last block, whose output is the prediction.
    """
    found = by_block(report, window)
    length = report["T"]
    numbers = {}
    for name, values in found.items():
        if name.startswith("excess"):
            numbers[name] = _later(values)
    numbers["excess"] = numbers.pop("excess_1")
    numbers["block_1"] = found["excess_1"][0]
    numbers[FIRST] = found["live"][0]
    numbers[LATER] = found["live"][1:].min(initial=1)
    seen = min(window or length, length)  # the number of queries that see x_1
    if seen > 1:
        alpha = np.mean(report["alpha"][0], axis=1)  # (L,), alpha_1
        shown = _later(alpha) * length / seen
        numbers["visible"] = excess(shown, uniform_alpha(seen))
    # Large states, in all blocks but the last. `initial` is for a model with a single block.
    if "element" in found:
        numbers["element_1"] = found["element"][0]
        numbers["element"] = found["element"][:-1].max(initial=0)
    for name in ("hidden", "before_norm"):
        ratios = found.get(f"{name}_ratio")
        if ratios is not None:
            numbers[name] = ratios[:-1].max(initial=0)
    # Small keys and values, in the later block with the strongest sink.
    later = found["excess_1"][1:]
    if len(later) > 0 and "key_ratio" in found:
        strongest = 1 + later.argmax()
        numbers["key"] = found["key_ratio"][strongest]
        numbers["value"] = found["value_ratio"][strongest]
    return numbers


def _of_course(alpha: np.ndarray, steps: np.ndarray, report: Json, window: int | None) -> Numbers:
    """The quantities of the course of training, from alpha along the curve.

    If the model has a key of its own, that key is the last target of alpha.
    """
    blocks = alpha.mean(axis=3).astype(float)  # (evaluations, targets, blocks)
    later = blocks[:, :, 1:].mean(axis=2)  # (evaluations, targets)
    even = uniform_alpha(report["T"], 1, window)
    course = excess(later[:, 0], even)  # the excess of x_1 at each evaluation
    early = np.searchsorted(steps, 0.1, side="right") - 1  # the last evaluation in the first tenth
    numbers = {"highest": course.max()}
    numbers["learned"] = course[-1] - course[0]
    numbers["late"] = course[-1] - course[early]
    if report.get("alpha_star"):
        even = uniform_alpha(report["T"], "star", window)
        star = excess(later[:, -1], even)
        numbers["learned_star"] = star[-1] - star[0]
    return numbers


def _of_tuning(curve: list[Json]) -> Numbers:
    """The quantities of a fine-tuning, whose points have the loss and gradient norm of every step.

    The losses at the start and at the end are means over the first and the last tenth of the steps.
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
    """The mean over blocks 2 to L, or NaN for a model with a single block."""
    return blocks[1:].mean() if len(blocks) > 1 else math.nan
