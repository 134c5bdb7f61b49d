"""Reasons of claims on training (Sections 4 to 6), on how runs went over their steps, and on how much is enough."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from scipy.stats import gmean

from sinkutils.ledger.effects import each_seed, paired
from sinkutils.ledger.results import QUANTITIES, Results
from sinkutils.ledger.rules import FAILS, HOLDS, OPEN, Check, judge
from sinkutils.measuring.report import norm_ratio, uniform_alpha
from sinkutils.showing import names
from sinkutils.study.config import TrainConfig, learning_rate
from sinkutils.study.grid import config, experiment


def without_decay(ours: Results) -> str:
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


def deeper_is_slower(ours: Results) -> str:
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


def most_at_its_own(ours: Results) -> str:
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


def seeds_agree(more: str, less: str, key: str) -> Callable[[Results], str]:
    """Whether an open comparison of two runs goes the claim's way in every seed, and how far."""

    def say(ours: Results) -> str:
        gaps = each_seed(ours, more, less, key)
        estimate = paired(ours, more, less, key)
        if estimate is None or estimate.low <= 0 or gaps.min() <= 0:
            return ""
        how = f"by {gaps.min():.3f} to {gaps.max():.3f}"
        if QUANTITIES[key].log:
            how = f"{np.exp(gaps.min()):.2f} to {np.exp(gaps.max()):.2f} times"
        first, second = (names.of(name, ours.preset) for name in (more, less))
        what = names.human(QUANTITIES[key].heading)
        return f"All {len(gaps)} seeds agree in direction: {what}, {first} above {second} {how}."

    return say


def past_the_best_rate(ours: Results) -> str:
    """Section 4, Table 9: whether twice the rate trains the better model in each seed, as in the paper's one."""
    losses = each_seed(ours, "lr_x2", "base", "valid_loss")
    if len(losses) < ours.least or losses.min() <= 0:
        return ""
    twice, once = (experiment(name).paper["valid_loss"] for name in ("lr_x2", "default"))
    return (
        f"At twice the rate our model also learns worse in every seed, by {losses.min():.3f} to {losses.max():.3f} "
        f"nats, where the paper's learns better ({twice:.2f} against {once:.2f}): a larger rate still helps the "
        "paper's base, and ours no longer."
    )


def longer_learns_more(ours: Results) -> str:
    """Appendix C.1, Table 9: whether the longer runs are the better trained ones in each seed, and come to their sink
    as soon.
    """
    runs = ("base", "lr_half_steps_x2", "lr_quarter_steps_x4")
    gains = [-each_seed(ours, name, "base", "valid_loss") for name in runs[1:]]
    if any(len(gain) < 2 or gain.min() <= 0 for gain in gains):
        return ""
    losses = [experiment("default" if name == "base" else name).paper["valid_loss"] for name in runs]
    onsets = " and ".join(f"{100 * ours.values(name, 'onset').mean():.0f}" for name in runs[1:])
    first = f"{100 * ours.values('base', 'onset').mean():.0f}"
    said = " and ".join(f"{gain.mean():.3f} ({gain.min():.3f} to {gain.max():.3f} by seed)" for gain in gains)
    return (
        "The sum of the rates is the same, and in the longer runs the sink sets in after as large a share of the steps "
        f"({onsets} %, in the base {first} %); but they learn better, by {said} nats: the base still learns at its "
        f"end. The paper's learn better too ({losses[1]:.2f} and {losses[2]:.2f} against {losses[0]:.2f}) and "
        "have less of a sink all the same: why, our records do not tell."
    )


def too_fast_for_few(ours: Results) -> str:
    """Appendix C.1, Table 10 left: whether the smallest batch gains by half the rate, by which the base loses, and
    whether it has the base's sink after as many tokens.
    """
    slower = [
        paired(ours, *runs, "excess_1") for runs in (("batch_quarter_lr_half", "batch_quarter"), ("lr_half", "base"))
    ]
    small, large = slower
    if small is None or large is None or small.low <= 0 or large.high >= 0:
        return ""
    longer = paired(ours, "batch_quarter_steps_x4", "base", "excess_1")
    tokens = ""
    if longer is not None and longer.seeds >= ours.least:
        told = f"{longer.mean:+.3f} ({longer.low:+.3f} to {longer.high:+.3f})"
        tokens = f" With four times the steps, so as many tokens as the base's, it stands {told} from the base."
    return (
        "Our rate was chosen for our batch, and a quarter of it does not stand that rate: at half of it the excess is "
        f"larger by {small.mean:.3f} ({small.low:.3f} to {small.high:.3f}), where the base's is smaller by "
        f"{-large.mean:.3f} ({-large.high:.3f} to {-large.low:.3f}).{tokens}"
    )


def twice_as_wide(ours: Results) -> str:
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


def token_before(ours: Results) -> str:
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


def further_from_the_end(ours: Results) -> str:
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


def still_growing(run: str) -> Callable[[Results], str]:
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


def known_by_heart(ours: Results) -> str:
    """Section 5, Figure 5 right: whether the least validation loss orders the shares of the text, where the gap at the
    end does not as the smallest ones are learned by heart.
    """
    names_of = [f"data_share_{share}" for share in ("0.01", "0.02", "0.04", "0.1", "0.5", "1")]
    runs = [[run for run in ours.seeds(name).values() if not run.failed] for name in names_of]
    if not all(runs):
        return ""
    even = float(np.log(config(names_of[0], ours.preset).model.vocab_size))
    ends = [[np.mean([run.final[key] for run in runs[at]]) for at in (0, 1)] for key in ("train_loss", "valid_loss")]
    least = [[min(point["valid_loss"] for point in run.curve) for run in seeds] for seeds in runs]
    if min(ends[1]) < even or any(min(less) <= max(more) for less, more in pairwise(least)):
        return ""
    train, valid = (" and ".join(f"{value:.1f}" for value in values) for values in ends)
    return (
        f"The two smallest shares are learned by heart: the training loss ends at {train} nats, the validation loss at "
        f"{valid}, where even guessing costs {even:.1f}. The gap then says how sure the model is of what is wrong. The "
        "least validation loss on the way does tell: with every larger share it is lower, in all seeds; in the mean "
        f"{', '.join(f'{np.mean(values):.2f}' for values in least)} nats."
    )


def train_all_the_same(*broken: str) -> Callable[[Results], str]:
    """Appendix C.4: how smoothly what fails in the paper trains here, and how well; only while each of them does."""

    def say(ours: Results) -> str:
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
            f"{worst:.2f} nats at most (the base's by {rises['base']:.2f}). How well is another matter: they end "
            f"{ends} nats from the base. Whether it takes a larger model to break them, no run of ours has tried."
        )

    return say


def behind_from_the_start(name: str, words: str) -> Callable[[Results], str]:
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


def other_doses(ours: Results) -> str:
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


def gone_before(ours: Results) -> str:
    """Section 6, Table 2: whether a smaller decay than the paper's largest has taken the whole sink already."""
    left = judge(Check("absent", ("weight_decay_2",), "excess_1"), ours, {})
    harm = paired(ours, "weight_decay_5", "weight_decay_2", "valid_loss")
    if left.state != HOLDS or left.effect is None or harm is None or harm.low <= 0:
        return ""
    times = _sum_of_rates(config("base", ours.preset).train) / _sum_of_rates(config("default", "paper").train)
    return (
        f"At a decay of 2 the sink is gone: an excess of {left.effect.mean:.3f} ({left.effect.low:.3f} to "
        f"{left.effect.high:.3f}). Nothing is left for 5 to take; it harms the model further all the same, by "
        f"{harm.mean:.2f} nats. By rates times decay our 1, 2 and 5 are {times:.0f}, {2 * times:.0f} and "
        f"{5 * times:.0f} in the paper, whose largest is 5: its whole range ends near our {5 / times:.1g}."
    )


def nothing_left_to_give(ours: Results) -> str:
    """Section 7.3, Table 5: whether fixed values of five times the norm have given x_1 its whole sink back already."""
    courses = []
    for kind, symbol in (("first", "v'"), ("uniform", "v''")):
        runs = ("k_bias", *(f"k_bias_{kind}_{norm}" for norm in (1, 5, 20)))
        gone = judge(Check("absent", (runs[2],), "excess_star"), ours, {})
        back = judge(Check("kept", (runs[2], "base")), ours, {})
        seeds = [ours.values(run, "excess_1") for run in runs]
        if {gone.state, back.state} != {HOLDS} or min(map(len, seeds)) < ours.least:
            return ""
        means = ", ".join(f"{values.mean():.3f}" for values in seeds)
        courses.append(f"{means} with v* = 0, {symbol}, 5 {symbol}, 20 {symbol}")
    fifth, twentieth = (experiment(f"k_bias_first_{norm}").paper["sink_1"] for norm in (5, 20))
    return (
        f"The excess of α₁ is {' and '.join(courses)}, in the base {ours.values('base', 'excess_1').mean():.3f}. At "
        "five times the norm k* has none left to give and x₁ as much as in the base, within the ledger's margin; the "
        f"paper's Sink₁ still goes from {fifth:.2f} to {twentieth:.2f} % from 5 v' to 20 v'."
    )


def large_before_training(plain: str, *runs: str) -> Callable[[Results], str]:
    """Section 7.3, Figure 7 right: whether runs whose h_1 ends longer than the plain one's have it before training."""

    def say(ours: Results) -> str:
        ends, starts = {}, {}
        for name in (plain, *runs):
            gained = ours.values(name, "hidden")
            if len(gained) < ours.least:
                return ""
            norms = [max(norm_ratio(ours.seeds(name)[seed].report["hidden_norms"][:-1])) for seed in gained.index]
            ends[name], starts[name] = float(gmean(norms)), float(gmean(norms / gained))
        if min(ends[name] / ends[plain] for name in runs) < 2 or min(starts[name] for name in runs) < 2 * starts[plain]:
            return ""
        told = (f"{names.of(name, ours.preset)} {ends[name]:.1f} and {starts[name]:.1f}" for name in (plain, *runs))
        return (
            "As it is, the norm of h₁ over the others' grows with the norm of v*, as in the paper; but so it does "
            f"before the first step, by which the ledger divides. At the end and before it: {'; '.join(told)}."
        )

    return say


def _sum_of_rates(train: TrainConfig) -> float:
    return sum(learning_rate(train, step) for step in range(train.steps))
