"""Reasons of claims on what a model computes (Section 7): in which block, at which token, at which p it has a sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import pairwise, takewhile

import numpy as np

from sinkutils.ledger.effects import paired
from sinkutils.ledger.results import Results
from sinkutils.ledger.rules import OPEN, SINK, Check, judge
from sinkutils.measuring.report import uniform_alpha
from sinkutils.showing import names
from sinkutils.study.grid import config


def scattered(kind: str, *runs: str) -> Callable[[Results], str]:
    """Section 7.4; Table 10 left: runs of which no seed ("absent") or each ("present") has a sink, though seeds scatter
    too widely to tell so of their mean.
    """
    how, leaves = {"absent": ("No", "leave one out"), "present": ("Each", "show one")}[kind]

    def say(ours: Results) -> str:
        counts, told = SINK * ours.values("base", "excess_1").mean(), []
        for run in runs:
            seeds = ours.values(run, "excess_1")
            if len(seeds) < 2 or judge(Check(kind, (run,)), ours, {}).state != OPEN:
                return ""
            if not (seeds.max() < counts if kind == "absent" else seeds.min() > counts):
                return ""
            told.append(f"{names.of(run, ours.preset)} (excess {', '.join(f'{value:.3f}' for value in seeds)})")
        return (
            f"{how} seed of {' and '.join(told)} has a sink, where {counts:.3f} counts. But they scatter so widely "
            f"that the interval of their mean does not {leaves}."
        )

    return say


def wanes_with_the_power(first: str, *others: str) -> Callable[[Results], str]:
    """Appendix C.4: what a run, p-normalised with p = 1, and those with other p have of the sink, and which steps away
    from 1 take some.
    """

    def say(ours: Results) -> str:
        runs = (first, *others)
        if any(len(ours.values(run, "excess_1")) < ours.least for run in runs):
            return ""
        steps = [step for step in (paired(ours, *pair, "excess_1") for pair in pairwise(runs)) if step is not None]
        lost = list(takewhile(lambda step: step.low > 0, steps))
        if not lost:
            return ""
        ps = [Fraction(config(run, ours.preset).model.attention.p).limit_denominator(9) for run in others]
        powers = ["1", *map(str, ps)]
        ends = ", ".join(f"{ours.values(run, 'excess_1').mean():.3f}" for run in runs)
        ways = (f"from {p} to {q}" for p, q in pairwise(powers))
        told = (f"{x.mean:.3f} ({x.low:.3f} to {x.high:.3f}) {way}" for x, way in zip(lost, ways, strict=False))
        close = judge(Check("absent", others[:1]), ours, {}).state == OPEN
        what, way = "sigmoid" if "sigmoid" in first else "softmax", "falls" if ps[-1] < 1 else "grows"
        return (
            f"In p-normalised {what} the sink wanes as p {way}: the excess of α₁ is {ends} with p = {', '.join(powers)}"
            f"; less by {' and by '.join(told)}."
            + f" What is left with p = {ps[0]} is too close to what counts as a sink to tell."
            * close
        )

    return say


def in_the_first_blocks(*runs: str, count: int = 1) -> Callable[[Results], str]:
    """Section 7.4, softmax plus one, gates: where what is left of the sink in these runs stands."""

    def say(ours: Results) -> str:
        seeds = [run for name in runs for run in ours.seeds(name).values() if "alpha" in run.report]
        if not seeds:
            return ""
        blocks = np.array([np.mean(run.report["alpha"][0], axis=1) for run in seeds])  # (runs, blocks)
        even, first, others = uniform_alpha(seeds[0].report["T"]), blocks[:, :count], blocks[:, count:]
        if first.min() < 2 * even or (others.max(axis=1) - even > (first.min(axis=1) - even) / 2).any():
            return ""
        place = "block 1" if count == 1 else f"blocks 1 to {count}"
        alone = "alone" if others.max() <= even else "above all"
        left = " and ".join(names.of(run, ours.preset) for run in runs if ours.seeds(run))
        return (
            f"What is left of the sink on x₁ with {left} stands in {place} {alone}: heads there give x₁ "
            f"{first.min():.2f} to {first.max():.2f} in the mean, those of the others {others.min():.2f} to "
            f"{others.max():.2f} (even attention: {even:.3f})."
        )

    return say


def first_block_looks(at: str, *runs: str) -> Callable[[Results], str]:
    """Section 7.1, Table 3; Table 12 left; Table 14 left: whether block 1 of these runs gives the token before
    ("previous") or each token itself ("self") what the base's gives x_1.
    """
    where = {"previous": "the token before", "self": "the token itself"}[at]

    def say(ours: Results) -> str:
        first, last, there = {}, {}, {}
        for name in ("base", *runs):
            kept = [run for run in ours.seeds(name).values() if "alpha" in run.report and "destinations" in run.final]
            if not kept:
                return ""
            blocks = np.array([np.mean(run.report["alpha"][0], axis=1) for run in kept])  # (seeds, blocks)
            first[name], last[name] = blocks[:, 0], blocks[:, -1]
            there[name] = np.array([np.mean(run.final["destinations"][at][0]) for run in kept])
        if any(first[name].max() >= first["base"].min() for name in runs):
            return ""
        if any(there[name].min() <= there["base"].max() for name in runs):
            return ""

        def each(kept: Mapping[str, np.ndarray]) -> str:
            ends = ([f"{end:.2f}" for end in (kept[name].min(), kept[name].max())] for name in (*runs, "base"))
            *others, base = (" to ".join(dict.fromkeys(pair)) for pair in ends)
            with_each = (f"{said} with {names.of(name, ours.preset)}" for said, name in zip(others, runs, strict=True))
            return f"{', '.join(with_each)} and {base} in the base"

        return (
            f"Block 1 looks elsewhere than the base's: its heads' mean attention to x₁ is {each(first)}, to {where} "
            f"{each(there)}. In the last block x₁ gets {each(last)}."
        )

    return say


def by_blocks(*runs: str) -> Callable[[Results], str]:
    """Table 3; Table 14 left: how much of its sink a run has in each block, where block 1 has less than the base's."""

    def say(ours: Results) -> str:
        found = {}
        for name in ("base", *runs):
            kept = [run.report["alpha"][0] for run in ours.seeds(name).values() if "alpha" in run.report]
            if not kept:
                return ""
            found[name] = np.array([np.mean(alpha, axis=1) for alpha in kept])  # (seeds, blocks)
        if any(found[name][:, 0].max() >= found["base"][:, 0].min() for name in runs):
            return ""
        said = "; ".join(
            f"{names.of(name, ours.preset)} {', '.join(f'{mean:.2f}' for mean in blocks.mean(axis=0))}"
            for name, blocks in found.items()
        )
        return f"From block to block x₁ gets in the mean: {said}. In every seed block 1 gives it less than the base's."

    return say


def there_before_training(run: str) -> Callable[[Results], str]:
    """Section 7.1, Table 3: a run that looks at x_1 by its formula, which training weakens."""

    def say(ours: Results) -> str:
        end, learned = ours.values(run, "excess_1"), ours.values(run, "learned_1")
        counts = SINK * ours.values("base", "excess_1").mean()
        if end.empty or (end - learned).min() < counts or learned.max() >= 0:
            return ""
        return (
            f"With {names.of(run, ours.preset)}, heads look at x₁ by formula: the excess is "
            f"{(end - learned).mean():.3f} before the first step, and training takes it down to {end.mean():.3f}."
        )

    return say
