"""Reasons of claims on models: open ones (Section 3), massive activations, shared biases, later papers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.stats import gmean

from sinkutils.ledger.effects import paired
from sinkutils.ledger.later import APART
from sinkutils.ledger.results import EPSILON, QUANTITIES, Results, Run
from sinkutils.ledger.rules import HOLDS, OPEN, SINK, Check, judge
from sinkutils.ledger.trials import untrained_peak
from sinkutils.measuring.open_lms import recorded
from sinkutils.measuring.own import BOS
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import norm_ratio
from sinkutils.model.positions import distance_table
from sinkutils.showing import names
from sinkutils.showing.tables import parameters
from sinkutils.study.grid import config


def single_elements(*runs: str) -> Callable[[Results], str]:
    """Sections 3.1 and 7.3: massive activations as single elements, where the norm says nothing, of the base and of
    `runs` that change it; only while the base has one, and while it stands at x_1.
    """

    def say(ours: Results) -> str:
        found = {run: judge(Check("present", (run,), "peak"), ours, {}) for run in ("base", *runs)}
        gained = ours.values("base", "hidden")
        by_norm = judge(Check("present", ("base",), "hidden"), ours, {})
        if found["base"].state != HOLDS or by_norm.state == HOLDS or gained.empty:  # or the norm tells
            return ""
        if not all(map(_at_first, map(ours.seeds, found))):
            return ""
        cells = []
        for run, outcome in found.items():
            if outcome.effect is None:
                return ""
            mean, low, high = (f"{x:.1f}" for x in (outcome.effect.mean, outcome.effect.low, outcome.effect.high))
            cells.append(f"{names.of(run, ours.preset)} {mean} ({low} to {high})")
        trained = [max(norm_ratio(ours.seeds("base")[seed].report["hidden_norms"][:-1])) for seed in gained.index]
        still = [names.of(run, ours.preset) for run in runs if found[run].state == HOLDS]
        listed = " and ".join(filter(None, (", ".join(still[:-1]), *still[-1:])))
        return (
            f"The norm of h₁ hardly tells: it is {np.mean(trained / gained):.1f} times the others' before the first "
            "step already, as x₁ sees only itself. Its largest element does, times the untrained model's: "
            f"{'; '.join(cells)}." + f" By that, x₁ stands out with {listed} as well." * bool(still)
        )

    return say


def in_some_seeds(run: str) -> Callable[[Results], str]:
    """2410.13835: in which seeds of a run x_1's largest element stands out among all tokens', before the last block."""

    def say(ours: Results) -> str:
        seeds = ours.seeds(run).values()
        kept = [np.max(run.report["hidden_peaks"][:-1], axis=0) for run in seeds if run.report.get("hidden_peaks")]
        peaks = [(tokens[0], tokens[1:].max()) for tokens in kept]
        out = sum(first > 2 * other for first, other in peaks)
        if out == len(peaks):
            return ""
        firsts, others = (", ".join(f"{pair[i]:.1f}" for pair in peaks) for i in (0, 1))
        return (
            f"x₁ stands out by more than twice in {out} of {len(peaks)} seeds: its largest element over the median is "
            f"{firsts}, that of all other tokens {others}."
        )

    return say


def without_a_sink(*runs: str) -> Callable[[Results], str]:
    """2504.20966, 2505.06708: whether runs without a sink on x_1 have a large element there all the same."""

    def say(ours: Results) -> str:
        cells = []
        for run in ("k_bias", "sink_logit", *runs):
            element = _large_element(ours, run)
            if element is None or judge(Check("absent", (run,)), ours, {}).state != HOLDS:
                return ""
            cells.append(f"{names.of(run, ours.preset)} {element}")
        fixed, listed = config("base", ours.preset).data.fixed_position == 1, ", ".join(cells)
        return (
            f"What is large is one element of h₁, and x₁{', the same token in every text here,' * fixed} gets one"
            f"{', in most seeds,' * ('seeds)' in listed)} whether heads look at it or not. The largest element over "
            f"the median, times the untrained model's: {listed}; none of them with a sink on x₁."
        )

    return say


def beside_the_median(*runs: str) -> Callable[[Results], str]:
    """2410.05258 and others: largest elements as they are, which the ledger takes as times the untrained model's."""

    def say(ours: Results) -> str:
        starts, ends = {}, []
        for run in ("base", *runs):
            times, seeds = ours.values(run, "peak"), [one for one in ours.seeds(run).values() if not one.failed]
            if times.empty:
                return ""
            starts[run] = untrained_peak(seeds[0].model, seeds[0].report["T"])  # as the quantity has it
            ended = starts[run] * times
            ends.append(f"{names.of(run, ours.preset)} {ended.min():.0f} to {ended.max():.0f}")
        if max(starts[run] for run in runs) > 0.9 * starts["base"]:
            return ""
        said = ", ".join(f"{names.of(run, ours.preset)} {start:.1f}" for run, start in starts.items())
        return (
            "The ledger takes largest elements as times the untrained model's, which differ too (over the median: "
            f"{said}). As they are, runs end at: {', '.join(ends)}."
        )

    return say


def come_apart(ours: Results) -> str:
    """2510.06477: which runs have a sink without massive activations, and which the other way round."""
    kinds: dict[str, list[str]] = {"sink there, massive": [], "sink not there, massive": []}
    for run in APART:
        outcome = judge(Check("apart", (run,)), ours, {})
        if outcome.state == HOLDS:
            kinds[outcome.why.split(" activations")[0]].append(names.of(run, ours.preset))
    sinks, elements = kinds.values()
    before = judge(Check("present", ("post_norm",), "before_norm"), ours, {})
    said = [f"A sink without massive activations: {', '.join(sinks)}."] * bool(sinks)
    said += [f"Massive activations without a sink: {', '.join(elements)}."] * bool(elements)
    if before.state == HOLDS and before.effect is not None and names.of("post_norm", ours.preset) in sinks:
        times = f"the norm of h₁ is {before.effect.mean:.1f} times the untrained model's"
        said.append(f"In post-norm blocks it is the state behind the norm that is counted: before it {times}.")
    return " ".join(said)


def element_without_gradient(ours: Results) -> str:
    """2603.17771: whether x_1 has a large element where no gradient gathers on it, as with K biases."""
    element = _large_element(ours, "k_bias")
    gathered = [ours.values(run, "gathered") for run in ("base", "k_bias")]
    if element is None or gathered[0].empty:
        return ""
    base, biases = map(gmean, gathered)
    if biases > base / 2:
        return ""
    return (
        f"Here x₁ does not need that gradient for its element: with K biases it gets {biases:.1f} times the other "
        f"tokens' gradient (in the base {base:.1f}), and its largest element, times the untrained model's, is "
        f"{element} all the same."
    )


def _large_element(ours: Results, run: str) -> str | None:
    """A run's largest element over the median, times the untrained model's, and in how many seeds it counts as massive
    where not in all; None unless it does in most seeds, and is one of x_1.
    """
    times = ours.values(run, "peak")
    massive = int((times >= QUANTITIES["peak"].level).sum())
    if 2 * massive <= len(times) or not _at_first(ours.seeds(run)):
        return None
    some = f" (2 or more in {massive} of {len(times)} seeds)" * (massive < len(times))
    return f"{gmean(times):.1f}{some}"


def _at_first(seeds: Mapping[int, Run]) -> bool:
    """Whether in every run the largest element before the last block is one of x_1."""
    kept = [run.report["hidden_peaks"] for run in seeds.values() if run.report.get("hidden_peaks")]
    return bool(kept) and all(np.argmax(np.max(rows[:-1] or rows, axis=0)) == 0 for rows in kept)


def gemma_with_bos(ours: Results) -> str:
    """Section 3.3: what Gemma has with the BOS that it always saw."""
    with_bos = recorded("gemma-3-270m")["probes"]["random"][BOS]["sink"]["1"]["0.3"]
    return f"Gemma always saw a BOS; with it in front of random tokens, Sink₁ = {with_bos:.1f} %."


def gemma_repeats(ours: Results) -> str:
    """Section 3.3: where no token is massive, none is when it is repeated."""
    plain = recorded("gemma-3-270m")["probes"]["natural"]["text"]
    ratio = max(norm_ratio(plain["hidden_norms"][:-1]))
    numbers = f"norm ratio {ratio:.1f}, Sink₁ = {plain['sink']['1']['0.3']:.1f} %"
    return f"Gemma always saw a BOS: without it, as here, natural text has no massive first token either ({numbers})."


def bucket_numbers(ours: Results) -> str:
    """Appendix B.1, Proposition 2: the premise, by the table that is added."""
    if (distance_table("relative", 160, 1)[0].diff() < 0).any():
        return ""
    return "Equation 6 and the published code add the number of T5's bucket itself, which grows with the distance."


def as_good_shared(ours: Results) -> str:
    """Section 7.3, Table 12 right: whether heads that share their biases lose anything to those with their own."""
    runs = ("kv_bias_shared", "kv_bias")
    asked = ("kept", "excess_star"), ("comparable", "valid_loss")
    kept, comparable = (judge(Check(kind, runs, key), ours, {}) for kind, key in asked)
    loss = comparable.effect
    if {kept.state, comparable.state} != {HOLDS} or loss is None or loss.low > 0:
        return ""
    shared, own = (np.mean([run.final["sink_star"] for run in ours.seeds(name).values()]) for name in runs)
    here, there = (config("kv_bias_shared", preset).model.num_heads for preset in (ours.preset, "paper"))
    control = paired(ours, "kv_bias_shared_heads_8", "kv_bias_heads_8", "excess_1")
    if control is None or control.seeds < ours.least:
        why = "whether that is why, no run of ours has tried"
    else:
        moved = f"{control.mean:+.3f} ({control.low:+.3f} to {control.high:+.3f})"
        why = f"with {there} here too, sharing moves the excess of α₁ by {moved}"
        if control.high < SINK * ours.values("base", "excess_1").mean():
            why += ", so their number is not why"
    return (
        f"Sharing KV biases costs little here: within the ledger's margin k* takes as much (Sink* {shared:.0f} %, with "
        f"one for each head {own:.0f} %), and the loss moves by {loss.mean:+.3f} nats ({loss.low:+.3f} to "
        f"{loss.high:+.3f}). {here} heads share a bias here, {there} in the paper; {why}."
    )


def few_heads(ours: Results) -> str:
    """Section 4: a default of which some heads have a sink in every seed, while the mean over all leaves it open."""
    heads = [np.array(run.report["alpha"][0]) for run in ours.seeds("default").values() if "alpha" in run.report]
    open_ = judge(Check("present", ("default",), "learned_1"), ours, {}).state == OPEN
    if not open_ or not heads or min(alpha.max() for alpha in heads) <= EPSILON:
        return ""
    above = " and ".join(f"{(alpha > EPSILON).sum()}" for alpha in heads)
    largest = " and ".join(f"{alpha.max():.2f}" for alpha in heads)
    return (
        f"It begins in few heads: of {heads[0].size}, {above} give x₁ more than {EPSILON} in the seeds there are, the "
        f"largest {largest}. The ledger asks for the mean over all heads."
    )


def shared_with_the_first(ours: Results) -> str:
    """Section 7.3, Table 4: the sink token's claim is asked of any first token; on the base the two constants share."""
    if judge(Check("absent", ("default",)), ours, {}).state != HOLDS:
        return ""
    shares = [[run.final[key] for run in ours.seeds("sink_token").values()] for key in ("sink_star", "sink_1")]
    if not all(shares):
        return ""
    star, first = map(np.mean, shares)
    return (
        "That x₁ has none tells nothing here, as it has none without the sink token either. On the base, whose x₁ has "
        f"one, the two share it: Sink* {star:.0f} %, Sink₁ {first:.0f} %."
    )


def sizes_asked(ours: Results) -> str:
    """Section 3.4: which sizes the claim on small models was asked of, and what smaller ones of ours have."""
    asked = " and ".join(f"{recorded(name)['about']['parameters'] / 1e6:.0f}M" for name in REAL_MODELS)
    own = [run.final["sink_1"] for run in ours.seeds("default").values() if not run.failed]
    size = parameters(config("default", ours.preset)) / 1e6
    beside = f" Ours of {size:.1f}M, on any first token, have {np.mean(own):.1f} %." if own else ""
    return f"Asked of models of {asked} parameters; the paper's smallest has 14M.{beside}"


def hardly_shorter(ours: Results) -> str:
    """Appendix B.3: models whose first key is hardly shorter than others, so that the value carries the claim."""
    lines = []
    for name, model in REAL_MODELS.items():
        kept = recorded(name)["probes"]["natural"][BOS if model.bos else "text"]
        keys, values = (norm_ratio(kept[f"{what}_norms"]) for what in ("key", "value"))
        if np.median(keys) > 0.75:
            lines.append(
                f"In {model.title} the first key is hardly shorter than others ({np.median(keys):.2f} in the median "
                f"block, {max(keys):.2f} at most), where its value is ({np.median(values):.2f}, {max(values):.2f})."
            )
    return " ".join(lines)


def only_key_biases(ours: Results) -> str:
    """Section 7.3: which of the biases that the paper names were removed."""
    return "Removed were K biases alone, not the sink token, KV and V biases that the paper names (V attract none)."
