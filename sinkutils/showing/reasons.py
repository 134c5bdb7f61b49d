"""Why a claim of the ledger does not hold here, or cannot be told: a sentence from a test that was run, never a guess.

Each is said only while the test says so: a check of the ledger's rules that holds on the records, or a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.stats import gmean

from sinkutils.ledger.effects import paired
from sinkutils.ledger.later import APART
from sinkutils.ledger.results import Results, Run
from sinkutils.ledger.rules import FAILS, HOLDS, OPEN, SINK, Check, judge
from sinkutils.ledger.trials import untrained_peak
from sinkutils.measuring.open_lms import recorded
from sinkutils.measuring.own import BOS
from sinkutils.measuring.real import REAL_MODELS
from sinkutils.measuring.report import norm_ratio, uniform_alpha
from sinkutils.model.positions import distance_table
from sinkutils.showing import names
from sinkutils.study.config import TrainConfig, learning_rate
from sinkutils.study.cost import cost
from sinkutils.study.grid import config, experiment


def why(id: str, ours: Results) -> str:
    """The sentence of a claim that does not hold, or nothing."""
    return REASONS[id](ours) if id in REASONS else ""


def note(id: str, ours: Results) -> str:
    """What a claim that holds leaves open, or nothing."""
    return NOTES[id](ours) if id in NOTES else ""


def _elements(*runs: str) -> Callable[[Results], str]:
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
        still = " and ".join(names.of(run, ours.preset) for run in runs if found[run].state == HOLDS)
        return (
            f"The norm of h₁ hardly tells: it is {np.mean(trained / gained):.1f} times the others' before the first "
            "step already, as x₁ sees only itself. Its largest element does, times the untrained model's: "
            f"{'; '.join(cells)}." + f" By that, x₁ stands out with {still} as well." * bool(still)
        )

    return say


def _in_some_seeds(run: str) -> Callable[[Results], str]:
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


def _scattered(run: str) -> Callable[[Results], str]:
    """Section 7.4: a run none of whose seeds has a sink, though they scatter too widely to leave one out."""

    def say(ours: Results) -> str:
        seeds, counts = ours.values(run, "excess_1"), SINK * ours.values("base", "excess_1").mean()
        if len(seeds) < 2 or seeds.max() >= counts or judge(Check("absent", (run,)), ours, {}).state != OPEN:
            return ""
        told = ", ".join(f"{value:.3f}" for value in seeds)
        return (
            f"No seed of {names.of(run, ours.preset)} has a sink: {told} of excess, where {counts:.3f} counts. But "
            "they scatter so widely that the interval of their mean does not leave one out."
        )

    return say


def _without_a_sink(*runs: str) -> Callable[[Results], str]:
    """2504.20966, 2505.06708: whether runs without a sink on x_1 have a large element there all the same."""

    def say(ours: Results) -> str:
        cells = []
        for run in ("k_bias", "sink_logit", *runs):
            gone, there = judge(Check("absent", (run,)), ours, {}), judge(Check("present", (run,), "peak"), ours, {})
            if gone.state != HOLDS or there.state != HOLDS or there.effect is None or not _at_first(ours.seeds(run)):
                return ""
            cells.append(f"{names.of(run, ours.preset)} {there.effect.mean:.1f}")
        fixed = config("base", ours.preset).data.fixed_position == 1
        return (
            f"What is large is one element of h₁, and x₁{', the same token in every text here,' * fixed} gets one "
            f"whether heads look at it or not. The largest element over the median: {', '.join(cells)} times the "
            "untrained model's, none of them with a sink on x₁."
        )

    return say


def _beside_the_median(*runs: str) -> Callable[[Results], str]:
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


def _come_apart(ours: Results) -> str:
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


def _without_decay(ours: Results) -> str:
    """2410.13835, 2410.17174: what Adam without weight decay, beside which SGD stands, has left of the base's own."""
    runs = ("base", "weight_decay_0", "sgd")
    excesses, elements = ([ours.values(name, key) for name in runs] for key in ("excess_1", "peak"))
    if any(len(values) < 2 for values in (*excesses, *elements)):
        return ""
    there = judge(Check("present", ("weight_decay_0",), "peak"), ours, {})
    if there.state == HOLDS or excesses[1].mean() > 0.75 * excesses[0].mean():
        return ""
    base, plain, sgd = (f"{values.mean():.3f}" for values in excesses)
    of_adam, of_sgd = (", ".join(f"{value:.1f}" for value in values) for values in elements[1:])
    return (
        f"SGD decays no weights, so it stands beside Adam without decay, which has lost much already: its excess of α₁ "
        f"is {plain}, SGD's {sgd}, the base's {base}; its largest elements, times the untrained model's, are {of_adam} "
        f"by seed, SGD's {of_sgd}."
    )


def _deeper_is_slower(ours: Results) -> str:
    """2504.02732: how far from their end the runs of each depth are."""
    said: dict[int, float] = {}
    for name in ("depth_1", "depth_2", "depth_3", "base", "depth_6"):
        courses = [np.array([point["excess_1"] for point in run.curve]) for run in ours.seeds(name).values()]
        if not courses or min(map(len, courses)) < 12 or min(course[-3:].min() for course in courses) <= 0:
            return ""
        depth = config(name, ours.preset).model.num_layers
        said[depth] = float(np.mean([_last_quarter(course) for course in courses]))
    first, *_, last = said.values()
    if last < 2 * max(first, 0.01):
        return ""
    gains = ", ".join(f"{100 * gain:.0f} % with {depth}" for depth, gain in said.items())
    return (
        "In as many steps a deeper model has settled less: in the last quarter of them the excess gained, of "
        f"what it ends with, {gains} blocks. Whether longer runs change the order was not tried."
    )


def _most_at_its_own(ours: Results) -> str:
    """2504.02732: whether the context of the base has more of a sink than shorter and longer ones, in every pair."""
    middle = config("base", ours.preset).model.context_length
    found = {length: ours.values(f"context_{length}", "excess_1") for length in (32, 64, 128, 256, 512)}
    means = {length: values.mean() for length, values in found.items() if len(values) > 2}
    sides = [length for length in means if length != middle]
    if middle not in means or not min(sides, default=middle) < middle < max(sides, default=middle):
        return ""
    for length in sides:
        less = paired(ours, f"context_{middle}", f"context_{length}", "excess_1")
        if less is None or less.low <= 0:
            return ""
    said = ", ".join(f"{mean:.3f} at {length}" for length, mean in means.items())
    return (
        f"The excess is largest at {middle} tokens, the length that the recipe was calibrated for, and smaller on both "
        f"sides ({said}), as many tokens a step in each."
    )


def _element_without_gradient(ours: Results) -> str:
    """2603.17771: whether x_1 has a large element where no gradient gathers on it, as with K biases."""
    there = judge(Check("present", ("k_bias",), "peak"), ours, {})
    gathered = [ours.values(run, "gathered") for run in ("base", "k_bias")]
    if there.state != HOLDS or there.effect is None or gathered[0].empty or not _at_first(ours.seeds("k_bias")):
        return ""
    base, biases = map(gmean, gathered)
    if biases > base / 2:
        return ""
    return (
        f"Here x₁ does not need that gradient for its element: with K biases it gets {biases:.1f} times the other "
        f"tokens' gradient (in the base {base:.1f}), and its largest element is {there.effect.mean:.1f} times the "
        "untrained model's all the same."
    )


def _at_first(seeds: Mapping[int, Run]) -> bool:
    """Whether in every run the largest element before the last block is one of x_1."""
    kept = [run.report["hidden_peaks"] for run in seeds.values() if run.report.get("hidden_peaks")]
    return bool(kept) and all(np.argmax(np.max(rows[:-1] or rows, axis=0)) == 0 for rows in kept)


def _gemma_with_bos(ours: Results) -> str:
    """Section 3.3: what Gemma has with the BOS that it always saw."""
    with_bos = recorded("gemma-3-270m")["probes"]["random"][BOS]["sink"]["1"]["0.3"]
    return f"Gemma always saw a BOS; with it in front of random tokens, Sink₁ = {with_bos:.1f} %."


def _gemma_repeats(ours: Results) -> str:
    """Section 3.3: where no token is massive, none is when it is repeated."""
    plain = recorded("gemma-3-270m")["probes"]["natural"]["text"]
    ratio = max(norm_ratio(plain["hidden_norms"][:-1]))
    numbers = f"norm ratio {ratio:.1f}, Sink₁ = {plain['sink']['1']['0.3']:.1f} %"
    return f"Gemma always saw a BOS: without it, as here, natural text has no massive first token either ({numbers})."


def _bucket_numbers(ours: Results) -> str:
    """Appendix B.1, Proposition 2: the premise, by the table that is added."""
    if (distance_table("relative", 160, 1)[0].diff() < 0).any():
        return ""
    return "Equation 6 and the published code add the number of T5's bucket itself, which grows with the distance."


def _past_the_best_rate(ours: Results) -> str:
    """Section 4, Table 9: whether twice the rate trains the better model, as in the paper."""
    loss = paired(ours, "lr_x2", "base", "valid_loss")
    if loss is None or loss.low <= 0:
        return ""
    twice, once = (experiment(name).paper["valid_loss"] for name in ("lr_x2", "default"))
    return (
        f"At twice the rate our model also learns worse, by {loss.mean:.3f} nats ({loss.low:.3f} to {loss.high:.3f}), "
        f"where the paper's learns better ({twice:.2f} against {once:.2f}): a larger rate still "
        "helps the paper's base, and ours no longer."
    )


def _longer_learns_more(ours: Results) -> str:
    """Appendix C.1, Table 9: whether the longer runs are the better trained ones, and come to their sink as soon."""
    runs = ("base", "lr_half_steps_x2", "lr_quarter_steps_x4")
    gains = [paired(ours, name, "base", "valid_loss") for name in runs[1:]]
    if any(gain is None or gain.high >= 0 for gain in gains):
        return ""
    losses = [experiment("default" if name == "base" else name).paper["valid_loss"] for name in runs]
    onsets = " and ".join(f"{100 * ours.values(name, 'onset').mean():.0f}" for name in runs[1:])
    first = f"{100 * ours.values('base', 'onset').mean():.0f}"
    said = " and ".join(f"{-gain.mean:.3f} ({-gain.high:.3f} to {-gain.low:.3f})" for gain in gains if gain)
    return (
        "The sum of the rates is the same, and in the longer runs the sink sets in after as large a share of the steps "
        f"({onsets} %, in the base {first} %); but they learn better, by {said} nats: the base still learns at its "
        f"end. The paper's learn better too ({losses[1]:.2f} and {losses[2]:.2f} against {losses[0]:.2f}) and "
        "have less of a sink all the same: why, our records do not tell."
    )


def _twice_as_wide(ours: Results) -> str:
    """Section 6, Figure 6 middle: whether a window of twice the width has the sink that one of C / 4 has not."""
    wide, narrow = (judge(Check("present", (name,), "visible_1"), ours, {}) for name in ("window_1_2", "window_1_4"))
    if wide.state != HOLDS or narrow.state != FAILS or wide.effect is None or narrow.effect is None:
        return ""
    level = "no more than even attention" if narrow.effect.mean <= 0 else "hardly more than even attention"
    tokens, printed = (config("window_1_4", preset).model.attention.window for preset in (ours.preset, "paper"))
    seeds = ours.seeds("window_1_4").values()
    share, even = np.mean([run.final["sink_1"] for run in seeds]), uniform_alpha(min(run.report["T"] for run in seeds))
    return (
        f"A window of C / 4 is {tokens} tokens here, {printed} in the paper. {share:.0f} % of its heads are above 0.3, "
        f"but all of them in the mean give x₁ {level} ({even:.2f}). At twice the width the sink is there: "
        f"{wide.effect.mean:.3f} ({wide.effect.low:.3f} to {wide.effect.high:.3f})."
    )


def _token_before(ours: Results) -> str:
    """Section 6, Figure 6 middle: whether x_1 gets more in a window of two tokens than the token before does."""
    name = "window_1_32"
    excess, runs = ours.values(name, "visible_1"), ours.seeds(name).values()
    window = config(name, ours.preset).model.attention.window
    kept = [np.mean(run.final["destinations"]["previous"]) for run in runs if "destinations" in run.final]
    if window != 2 or excess.empty or len(kept) < len(runs):
        return ""
    second, later = 0.5 * (1 + excess.mean()), float(np.mean(kept))  # of two keys, even attention gives each a half
    if abs(second - later) > 0.05:
        return ""
    printed = config(name, "paper").model.attention.window
    return (
        f"A window of C / 32 is {window} tokens here, {printed} in the paper. x₁ is then no more than the token "
        f"before: the one query that sees it beside itself gives it {100 * second:.0f} %, and later queries give "
        f"the token before them {100 * later:.0f} %."
    )


def _as_good_shared(ours: Results) -> str:
    """Section 7.3, Table 12 right: whether heads that share their biases lose anything to those with their own."""
    runs = ("kv_bias_shared", "kv_bias")
    asked = ("kept", "excess_star"), ("comparable", "valid_loss")
    kept, comparable = (judge(Check(kind, runs, key), ours, {}) for kind, key in asked)
    loss = comparable.effect
    if {kept.state, comparable.state} != {HOLDS} or loss is None or loss.low > 0:
        return ""
    shared, own = (np.mean([run.final["sink_star"] for run in ours.seeds(name).values()]) for name in runs)
    here, there = (config("kv_bias_shared", preset).model.num_heads for preset in (ours.preset, "paper"))
    return (
        f"Sharing KV biases costs little here: within the ledger's margin k* takes as much (Sink* {shared:.0f} %, with "
        f"one for each head {own:.0f} %), and the loss moves by {loss.mean:+.3f} nats ({loss.low:+.3f} to "
        f"{loss.high:+.3f}). {here} heads share a bias here, {there} in the paper; whether that is why, no run of ours "
        "has tried."
    )


def _in_the_first_blocks(*runs: str, count: int = 1) -> Callable[[Results], str]:
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
            f"What is left with {left} stands in {place} {alone}: heads there give x₁ {first.min():.2f} to "
            f"{first.max():.2f} in the mean, those of the others {others.min():.2f} to {others.max():.2f} (even "
            f"attention: {even:.3f})."
        )

    return say


def _first_block_looks_before(*runs: str) -> Callable[[Results], str]:
    """Section 7.1, Table 3: whether block 1 of these runs gives the token before what the base's gives x_1."""

    def say(ours: Results) -> str:
        first, last, before = {}, {}, {}
        for name in ("base", *runs):
            kept = [run for run in ours.seeds(name).values() if "alpha" in run.report and "destinations" in run.final]
            if not kept:
                return ""
            blocks = np.array([np.mean(run.report["alpha"][0], axis=1) for run in kept])  # (seeds, blocks)
            first[name], last[name] = blocks[:, 0], blocks[:, -1]
            before[name] = np.array([np.mean(run.final["destinations"]["previous"][0]) for run in kept])
        if any(first[name].max() >= first["base"].min() for name in runs):
            return ""
        if any(before[name].min() <= before["base"].max() for name in runs):
            return ""

        def each(kept: Mapping[str, np.ndarray]) -> str:
            *others, base = (f"{kept[name].min():.2f} to {kept[name].max():.2f}" for name in (*runs, "base"))
            with_each = (f"{said} with {names.of(name, ours.preset)}" for said, name in zip(others, runs, strict=True))
            return f"{', '.join(with_each)} and {base} in the base"

        return (
            f"Block 1 looks elsewhere: its heads' mean attention to x₁ is {each(first)}, to the token before "
            f"{each(before)}. In the last block x₁ gets {each(last)}."
        )

    return say


def _further_from_the_end(ours: Results) -> str:
    """Section 5, Table 10 right: whether runs with the fixed token elsewhere still gain more than the base."""
    gains: dict[str, list[float]] = {}
    for k, name in enumerate(("base", "fixed_2", "fixed_3")):
        for run in ours.seeds(name).values():
            kept, excesses = run.record.arrays.get("curve"), run.report.get("excess", {})
            if kept is None or len(kept) < 12 or max(excesses, key=excesses.__getitem__, default="") != f"{k + 1}":
                return ""
            gains.setdefault(name, []).append(_last_quarter(kept[:, k].float().mean(dim=(1, 2)).numpy()))
    base, others = gains.pop("base", []), [gain for seeds in gains.values() for gain in seeds]
    if not base or len(gains) < 2 or min(others) <= max(0.0, *base):
        return ""
    return (
        "Each of these runs has its largest excess on the fixed token's own position, which grows more than the base's "
        f"when the run ends: in the last quarter of the steps that token's α gained {100 * min(others):.0f} to "
        f"{100 * max(others):.0f} % of what it ends with, the base's {100 * min(base):.0f} to {100 * max(base):.0f} %."
    )


def _last_quarter(course: np.ndarray) -> float:
    """The share of its end, the mean of three evaluations, that a quantity gained in the last quarter of the steps."""
    before, end = (part.mean() for part in (course[-3 - len(course) // 4 :][:3], course[-3:]))
    return float(1 - before / end)


def _still_growing(run: str) -> Callable[[Results], str]:
    """2603.05498: whether a run's sink was further from its end than the base's in every seed, and how far apart."""

    def say(ours: Results) -> str:
        gains: dict[str, list[float]] = {"base": [], run: []}
        for name in gains:
            courses = [np.array([point["excess_1"] for point in one.curve]) for one in ours.seeds(name).values()]
            if not courses or min(map(len, courses)) < 12 or min(course[-3:].min() for course in courses) <= 0:
                return ""
            gains[name] = [_last_quarter(course) for course in courses]
        base, late = gains["base"], gains[run]
        if min(late) <= max(0.0, *base):
            return ""
        sinks = ", ".join(f"{one.final['sink_1']:.0f}" for one in ours.seeds(run).values())
        return (
            f"With {names.of(run, ours.preset)} the sink still grows when the run ends (Sink₁ {sinks} %): in the last "
            f"quarter of the steps it gained {100 * min(late):.0f} to {100 * max(late):.0f} % of what it ends with, "
            f"the base's {100 * min(base):.0f} to {100 * max(base):.0f} %."
        )

    return say


def _train_all_the_same(ours: Results) -> str:
    """Appendix C.4, Table 15: how smoothly what fails in the paper trains here, and how well; only while it does."""
    broken = ("elu_normalised", "elu_kernel", "linear_normalised")
    seeds = {name: ours.seeds(name).values() for name in ("base", *broken)}
    if not all(runs and not any(run.failed for run in runs) for runs in seeds.values()):
        return ""
    rises = {
        name: max(np.diff([point["valid_loss"] for point in run.curve]).max() for run in runs)
        for name, runs in seeds.items()
    }
    worst = max(rises[name] for name in broken)
    behind = [paired(ours, name, "base", "valid_loss") for name in broken]
    if worst > 2 * rises["base"] or None in behind:
        return ""
    ends = ", ".join(f"{loss.mean:+.3f}" for loss in behind if loss is not None)
    return (
        f"Here they train as smoothly as the base: from one evaluation to the next the validation loss rises by "
        f"{worst:.2f} nats at most (the base's by {rises['base']:.2f}). How well is another matter: they end {ends} "
        "nats from the base. Whether it takes a larger model to break them, no run of ours has tried."
    )


def _behind_from_the_start(name: str, words: str) -> Callable[[Results], str]:
    """2503.10622; Section 7.1, Table 3: since when a run learns worse than the base, seed by seed."""

    def say(ours: Results) -> str:
        behind = []
        for seed, run in ours.seeds(name).items():
            base = ours.seeds("base").get(seed)
            if base is None or run.failed or base.failed or len(run.curve) != len(base.curve):
                return ""
            losses = [[point["valid_loss"] for point in one.curve] for one in (run, base)]
            behind.append([losses[0][at] - losses[1][at] for at in (len(losses[0]) // 4, -1)])
        if not behind or np.min(behind) <= 0:
            return ""
        margin = judge(Check("comparable", (name, "base"), "valid_loss"), ours, {})
        unsure = " Whether it stays below the margin, so few seeds do not tell." * (margin.state == OPEN)
        (early, first), (late, last) = (
            (f"{min(gaps):.3f} to {max(gaps):.3f}", np.mean(gaps)) for gaps in zip(*behind, strict=True)
        )
        course = "narrows" if last < first else "does not close"
        return (
            f"{words} in every seed, by {early} nats at a quarter of the steps and by {late} at the end: the gap "
            f"{course} with time.{unsure}"
        )

    return say


def _there_before_training(run: str) -> Callable[[Results], str]:
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


def _other_doses(ours: Results) -> str:
    """Section 6, Table 2: which of the paper's decays ours are by what they take off a weight over the steps."""
    rise, decays = paired(ours, "base", "weight_decay_0.01", "excess_1"), (0.01, 0.1, 0.5, 1)
    if rise is None or rise.low <= 0:
        return ""
    here, there = (_sum_of_rates(config("base", ours.preset).train), _sum_of_rates(config("default", "paper").train))
    doses = [f"{decay * here / there:.2g}" for decay in decays]
    much = [run.final["sink_1"] for run in ours.seeds("weight_decay_0.5").values() if not run.failed]
    printed = experiment("weight_decay_5").paper["sink_1"]
    apart = bool(much) and float(np.mean(much)) > 10 * printed
    beyond = f" Beyond, the dose does not carry over: our {decays[2]}, its {doses[2]}, leaves a Sink₁ of "
    beyond += f"{np.mean(much or 0):.0f} %, the paper's 5 {printed:.2f} %."
    return (
        f"Rates times decay, summed over the steps, are {here / there:.0f} times the paper's here: our decays of "
        f"{', '.join(f'{decay:g}' for decay in decays)} are its {', '.join(doses)}. From {doses[0]} to {doses[1]} the "
        f"sink grows here as well, by {rise.mean:.3f} ({rise.low:.3f} to {rise.high:.3f}) of excess.{beyond * apart}"
    )


def _sum_of_rates(train: TrainConfig) -> float:
    return sum(learning_rate(train, step) for step in range(train.steps))


def _shared_with_the_first(ours: Results) -> str:
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


def _sizes_asked(ours: Results) -> str:
    """Section 3.4: which sizes the claim on small models was asked of, and what smaller ones of ours have."""
    asked = " and ".join(f"{recorded(name)['about']['parameters'] / 1e6:.0f}M" for name in REAL_MODELS)
    own = [run.final["sink_1"] for run in ours.seeds("default").values() if not run.failed]
    size = cost(config("default", ours.preset)).parameters / 1e6
    beside = f" Ours of {size:.1f}M, on any first token, have {np.mean(own):.1f} %." if own else ""
    return f"Asked of models of {asked} parameters; the paper's smallest has 14M.{beside}"


def _hardly_shorter(ours: Results) -> str:
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


def _only_key_biases(ours: Results) -> str:
    """Section 7.3: which of the biases that the paper names were removed."""
    return "Removed were K biases alone, not the sink token, KV and V biases that the paper names (V attract none)."


def _all(*reasons: Callable[[Results], str]) -> Callable[[Results], str]:
    """What several tests say, one after the other."""
    return lambda ours: " ".join(filter(None, (reason(ours) for reason in reasons)))


NOTES: dict[str, Callable[[Results], str]] = {
    "sink_token": _shared_with_the_first,
    "small_models": _sizes_asked,
    "norms_everywhere": _hardly_shorter,
    "biases_removed": _only_key_biases,
}
REASONS: dict[str, Callable[[Results], str]] = {
    "first_token_norms": _elements(),
    "bias_activations": _elements("kv_bias", "k_bias"),
    "value_bias_activations": _elements("v_bias"),
    "dependent_activations": _elements("sigmoid_normalised", "elu_kernel_normalised"),
    "independent_activations": _without_a_sink("linear", "mlp_normalised"),
    "softpick_activations": _without_a_sink("softpick"),
    "gates_activations": _all(_without_a_sink("gate_head"), _beside_the_median("gate_head", "gate_element")),
    "differential": _beside_the_median("differential"),
    "activations_make_sinks": _come_apart,
    "v_scale": _all(_element_without_gradient, _beside_the_median("v_scale")),
    "relu": _in_some_seeds("relu_length"),
    "random_input": _gemma_with_bos,
    "repeated_massive": _gemma_repeats,
    "proposition_2": _bucket_numbers,
    "fixed_token": _further_from_the_end,
    "positions": _all(_there_before_training("relative"), _first_block_looks_before("learnable", "absolute")),
    "relative_loss": _behind_from_the_start("nope", "Without a position embedding it learns worse than the base"),
    "weight_decay": _other_doses,
    "window_absolute": _twice_as_wide,
    "window_small": _token_before,
    "compensated_rate": _longer_learns_more,
    **dict.fromkeys(("shared_biases", "shared_key_biases"), _as_good_shared),
    "gates_remove": _in_the_first_blocks("gate_element", count=2),
    "no_normalisation": _in_the_first_blocks("sigmoid", "elu"),
    "mlp_kernel": _scattered("mlp"),
    "inner_dependence": _all(_in_the_first_blocks("sigmoid"), _scattered("mlp")),
    "dyt": _behind_from_the_start("dyt", "It learns worse than RMSNorm"),
    "failures": _train_all_the_same,
    **dict.fromkeys(("pre_norm_couples", "norms_keep_sinks"), _still_growing("sandwich_norm")),
    "softmax_plus_one": _in_the_first_blocks("softmax_plus_one"),
    "depth": _deeper_is_slower,
    "context": _most_at_its_own,
    **dict.fromkeys(("sgd", "adam_activations"), _without_decay),
    **dict.fromkeys(("small_rate", "small_rate_delays"), _past_the_best_rate),
}
