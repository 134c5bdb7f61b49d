"""The ledger: its statistics against numbers by hand, its rules on made-up readings, its claims on the records."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import made_up, refuses
from real_models import answers
from scipy import special, stats

import sinkutils as su
from sinkutils.ledger import judge as rules
from sinkutils.ledger.claims_file import Check, Claim, read_claims
from sinkutils.ledger.judge import judge, judge_claims, verdict_of
from sinkutils.ledger.quantities import as_judged, of_run
from sinkutils.ledger.readings import Bar, Readings, label, readings, real_models
from sinkutils.ledger.statistics import Estimate, agreement, fit_prior, inverse_trigamma, moderated
from sinkutils.measuring.report import excess, norm_ratio, uniform_alpha
from sinkutils.study.frames import live_heads
from sinkutils.study.grid import by_name


def made(excesses, quantity="excess", least=3, preset="laptop", **more):
    """Readings with one quantity by experiment and seed; a base with a sink unless it is given."""
    runs = {"fixed_1": {seed: {"excess": 0.3 + 0.002 * (seed - 1)} for seed in range(3)}}
    for name, values in excesses.items():
        seeds = runs.setdefault(name, {})
        for seed, value in enumerate(values):
            if value is None:
                seeds[seed] = None
            else:
                seeds[seed] = {**(seeds.get(seed) or {}), quantity: value, **more}
    return Readings(preset, runs, least)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_without_a_prior_a_level_is_that_of_a_t_test():
    values = [0.21, 0.25, 0.17, 0.2]
    found = made({"elu": values}).estimate(["elu"], "excess")
    known = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    expected = (np.mean(values), known.low, known.high)
    assert (found.mean, found.low, found.high) == pytest.approx(expected)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert found.reach(0.95) == pytest.approx(np.ptp(ends) / 2)


def test_a_moderated_variance_is_the_weighted_mean_of_the_common_and_the_own_one():
    # Own variance of 1, 2, 3: 1 with 2 degrees of freedom; common 0.25 with 6: (6 * 0.25 + 2 * 1) / 8 = 0.4375.
    assert moderated([1.0, 2.0, 3.0], (6.0, 0.25, 100.0)) == pytest.approx((0.4375, 8))
    # no more than all settings have together
    assert moderated([1.0, 2.0, 3.0], (6.0, 0.25, 5.0))[1] == 5


def samples(variances, seeds):
    """Made-up values of as many settings, each with its variance."""
    unit = np.linspace(-1, 1, seeds)
    return np.sqrt(np.asarray(variances))[:, None] * unit / np.std(unit, ddof=1)


def test_the_prior_is_smyths_moment_estimate():
    # By hand: log variances 0, 1, 2, 3, 4 (variance 2.5), each with 4 degrees of freedom. trigamma(2) = pi^2/6 - 1,
    # digamma(2) = 1 - gamma; trigamma(d0 / 2) = 2.5 - 0.644934 = 1.855066.
    d0, s0_squared, most = fit_prior(samples(np.exp([0.0, 1, 2, 3, 4]), 5))
    assert special.polygamma(1, d0 / 2) == pytest.approx(2.5 - (math.pi**2 / 6 - 1))
    centre = 2 - (1 - np.euler_gamma) + math.log(2)
    expected = centre + special.digamma(d0 / 2) - math.log(d0 / 2)
    assert math.log(s0_squared) == pytest.approx(expected)
    assert most == 20


def test_the_prior_is_found_again_in_variances_that_were_drawn_from_it():
    draw = np.random.default_rng(0)
    true = 6 * 0.01 / draw.chisquare(6, 4000)  # d0 = 6, s0^2 = 0.01
    d0, s0_squared, _ = fit_prior(samples(true * draw.chisquare(2, 4000) / 2, 3))
    assert d0 == pytest.approx(6, rel=0.2) and s0_squared == pytest.approx(0.01, rel=0.1)
    alike = fit_prior(samples(0.01 * draw.chisquare(2, 4000) / 2, 3))
    assert alike[0] > 50 and alike[1] == pytest.approx(0.01, rel=0.1)


def test_few_settings_have_no_common_variance_and_none_is_no_error():
    assert fit_prior(samples([1.0, 2.0], 3))[0] == 0
    assert fit_prior(samples(np.zeros(9), 3))[0] == 0
    assert fit_prior(samples(np.exp([0.0, 1, 2, 3, 4]), 2))[2] == 5  # two seeds are some
    same = Estimate(0.25, 0.0, 2.0, 3)  # in all seeds
    assert (same.p, same.low, same.high, replace(same, mean=0.0).p) == (0, 0.25, 0.25, 1)
    for x in (1e-3, 0.6, 50.0):
        assert special.polygamma(1, inverse_trigamma(x)) == pytest.approx(x)


def test_a_difference_is_paired_and_has_the_variance_of_both_settings():
    ours = made({"k_bias": [0.1, 0.13, 0.1], "v_bias": [0.2, 0.2, 0.26, 9.0]})
    found = ours.estimate(["v_bias", "k_bias"], "excess")
    assert found.mean == pytest.approx((0.1 + 0.07 + 0.16) / 3) and found.seeds == 3
    a, b = np.var([0.2, 0.2, 0.26, 9.0], ddof=1), np.var([0.1, 0.13, 0.1], ddof=1)
    assert found.error == pytest.approx(math.sqrt((a + b) / 3))
    assert found.freedom == pytest.approx((a + b) ** 2 / (a**2 / 3 + b**2 / 2))  # Welch


def test_results_that_differ_share_no_prior():
    names = ("k_bias", "v_bias", "kv_bias", "sigmoid", "elu")
    ours = made({name: [0.1, 0.2, 0.15] for name in names})
    before = ours.estimate(["k_bias"], "excess")
    quiet = {name: {seed: {"excess": 0.1} for seed in range(3)} for name in ours.runs}
    other = replace(ours, runs=quiet)
    assert other.estimate(["k_bias"], "excess").error != before.error
    assert ours.estimate(["k_bias"], "excess") == before


def test_a_bar_that_is_a_share_of_the_bases_mean_has_the_bases_error():
    base, elu = [0.2, 0.3, 0.4, 0.1, 0.5, 0.3], [0.05, 0.06, 0.07]
    bar = Bar(0.2, ("fixed_1", "excess"))
    found = made({"fixed_1": base, "elu": elu}).estimate(["elu"], "excess", bar)
    # mean 0.06 - 0.2 * 0.3; variances 0.0001 / 3 and 0.2^2 * 0.02 / 6, with 2 and 5 degrees of freedom
    a, b = 0.0001 / 3, 0.04 * 0.02 / 6
    assert (found.mean, found.error) == pytest.approx((0.0, math.sqrt(a + b)))
    assert found.freedom == pytest.approx((a + b) ** 2 / (a**2 / 2 + b**2 / 5))


def test_a_margin_around_the_base_knows_that_it_is_the_same_base():
    base, elu = [0.2, 0.3, 0.4, 0.1, 0.5, 0.3], [0.2, 0.35, 0.35]
    ours, bar = made({"fixed_1": base, "elu": elu}), Bar(-0.6, ("fixed_1", "excess"))
    found = ours.estimate(["elu", "fixed_1"], "excess", bar)
    # (0.3 - 0.3) + 0.6 * 0.3; each of the base's seeds 0 to 2 weighs -1/3 + 0.1, seeds 3 to 5 weigh 0.1
    squares = 3 * (0.1 - 1 / 3) ** 2 + 3 * 0.1**2
    error = math.sqrt(0.0075 / 3 + 0.02 * squares)
    assert (found.mean, found.error) == pytest.approx((0.18, error))


def test_fresh_seeds_are_compared_with_the_spread_of_all():
    values = [0.1, 0.2, 0.3, 0.5, 0.6, 0.7]
    found = made({"elu": values}).since(3).estimate(["elu"], "excess")
    assert (found.mean, found.seeds) == (pytest.approx(0.6), 3)  # seeds 3 to 5
    assert (found.error, found.freedom) == pytest.approx((math.sqrt(np.var(values, ddof=1) / 3), 5))


def test_a_sink_near_a_bar_is_open_where_the_base_scatters():
    for base, state in (([0.29, 0.3, 0.31], "holds"), ([0.2, 0.3, 0.4], "open")):
        ours = made({"fixed_1": base, "sigmoid": around(SINK + 0.01)})
        outcome = judge(Check("present", ("sigmoid",), "excess"), ours)
        assert outcome.state == state and outcome.bar == pytest.approx(SINK)
        assert outcome.estimate.low > SINK  # so it would hold if the bar were taken as exact


def test_agreement_is_compared_with_that_of_chance():
    # By hand: 4 of 6 alike; by chance 3/6 * 2/6 + 2/6 * 2/6 + 1/6 * 2/6 = 1/3; kappa (2/3 - 1/3) / (1 - 1/3).
    first = ["holds", "holds", "holds", "fails", "fails", "open"]
    second = ["holds", "holds", "fails", "fails", "open", "open"]
    assert agreement(first, second) == pytest.approx((2 / 3, 1 / 3, 1 / 2))
    assert agreement(first, first)[2] == 1
    assert agreement(["holds", "fails"], ["fails", "holds"]) == pytest.approx((0, 1 / 2, -1))
    # chance alone would agree as well
    assert math.isnan(agreement(["holds"] * 3, ["holds"] * 3)[2])


# --- rules -----------------------------------------------------------------------------------------------------------

SINK, MARGIN, LOSS = 0.3 * rules.SINK, 0.3 * rules.MARGIN, 2.8 * rules.LOSS


def around(centre, spread=0.001):
    return [centre - spread, centre, centre + spread]


@pytest.mark.parametrize("kind, value, state", [
    ("present", SINK + 0.02, "holds"), ("absent", SINK + 0.02, "fails"),
    ("present", SINK - 0.02, "fails"), ("absent", SINK - 0.02, "holds"),
    ("present", SINK, "open"), ("absent", SINK, "open"),
])  # fmt: skip
def test_a_sink_is_there_where_its_interval_lies_above_its_share_of_the_bases(kind, value, state):
    outcome = judge(Check(kind, ("sigmoid",), "excess"), made({"sigmoid": around(value)}))
    assert outcome.state == state


@pytest.mark.parametrize("kind, quantity, value, state", [
    ("same", "excess", 0.31, "holds"), ("same", "excess", 0.3 - MARGIN, "open"), ("same", "excess", 0.6, "fails"),
    ("kept", "excess", 0.6, "holds"), ("kept", "excess", 0.1, "fails"), ("kept", "excess", 0.3 - MARGIN, "open"),
    ("more", "excess", 0.3 + SINK / 2, "holds"), ("more", "excess", 0.3, "fails"), ("more", "excess", 0.2, "fails"),
    ("loss", "valid_loss", 2.8 + LOSS / 2, "holds"), ("loss", "valid_loss", 2.0, "holds"),
    ("loss", "valid_loss", 2.8 + LOSS, "open"), ("loss", "valid_loss", 2.8 + 2 * LOSS, "fails"),
    ("worse", "valid_loss", 2.8 + 2 * LOSS, "holds"), ("worse", "valid_loss", 2.8, "fails"),
])  # fmt: skip
def test_a_comparison_is_held_against_its_margin(kind, quantity, value, state):
    ours = made({"sigmoid": around(value)}, quantity)
    for seed in range(3):
        ours.runs["fixed_1"][seed]["valid_loss"] = 2.8 + 0.001 * (1 - seed)
    assert judge(Check(kind, ("sigmoid", "base"), quantity), ours).state == state


def test_no_effect_says_the_largest_effect_that_would_still_pass():
    ours = made({"sigmoid": [0.29, 0.31, 0.3]})
    outcome = judge(Check("same", ("sigmoid", "base"), "excess"), ours)
    assert outcome.bar == pytest.approx(0.3 * rules.MARGIN)
    reaches = []
    # x - share * b; variances 0.01^2 and the base's 0.002^2
    for share in (1 - rules.MARGIN, 1 + rules.MARGIN):
        a, b = 0.01**2 / 3, share**2 * 0.002**2 / 3
        t = stats.t.ppf(0.95, (a + b) ** 2 / (a**2 / 2 + b**2 / 2))
        reaches.append(t * math.sqrt(a + b))
    assert outcome.passes == pytest.approx(outcome.bar - max(reaches))


def test_without_a_base_with_a_sink_nothing_is_measured_by_it():
    ours = made({"fixed_1": around(0.01), "sigmoid": around(0.3)})
    for runs in (("sigmoid", "base"), ("base", "sigmoid")):  # whichever comes first
        outcome = judge(Check("more", runs, "excess"), ours)
        assert outcome.state == "open" and outcome.words == "the base has no sink to measure by"
    assert judge(Check("absent", ("sigmoid",), "excess"), ours).state == "open"
    assert judge(Check("present", ("base",), "excess"), ours).state == "fails"
    near = made({"fixed_1": [0.03, 0.04, 0.05]})
    assert judge(Check("present", ("base",), "excess"), near).state == "open"


@pytest.mark.parametrize("kind, quantity, dead, state", [
    ("absent", "excess", "live_later", "open"), ("absent", "excess", "live_1", "holds"),
    ("absent", "block_1", "live_1", "open"), ("absent", "block_1", "live_later", "holds"),
    ("together", "excess", "live_later", "open"), ("loss", "valid_loss", "live_later", "holds"),
])  # fmt: skip
def test_what_rests_on_a_dead_block_is_open(kind, quantity, dead, state):
    ours = made({"sigmoid": around(0.0)})
    for name in ("fixed_1", "sigmoid"):
        for seed, run in ours.runs[name].items():
            run |= {"block_1": run["excess"], "valid_loss": 2.8 + 0.001 * seed}
            run["element_1"] = 1.0 + 0.1 * seed
    runs = ("sigmoid", "base") if kind == "loss" else ("sigmoid",)
    assert judge(Check(kind, runs, quantity), ours).state == "holds"
    ours.runs["sigmoid"][1][dead] = 0.0
    outcome = judge(Check(kind, runs, quantity), ours)
    assert outcome.state == state
    assert outcome.words == "dead block in sigmoid, seed 1" or state == "holds"


def test_too_few_seeds_are_not_run_and_failed_training_is_open():
    for kind, values, state in (
        ("absent", [0.0] * 2, "not run"),
        ("absent", [0.0, None, None], "open"),
        ("fails", [None] * 3, "holds"),
        ("trains", [None] * 3, "fails"),
        ("fails", [None, 0.1, 0.1], "open"),
        ("trains", [0.1] * 2, "not run"),
    ):
        assert judge(Check(kind, ("sigmoid",), "excess"), made({"sigmoid": values})).state == state


def test_many_onsets_are_compared_by_the_normal_distribution_of_their_ranks():
    draw = np.random.default_rng(0)
    first, second = draw.normal(0.55, 0.1, 60).round(2), draw.normal(0.5, 0.1, 45).round(2)
    ours = made({"lr_half": first, "lr_quarter": second}, "onset", excess=0.2)
    later = judge(Check("more", ("lr_half", "lr_quarter"), "onset"), ours)
    known = stats.mannwhitneyu(first, second, method="asymptotic", use_continuity=False)
    assert (later.state, later.p) == ("holds", pytest.approx(known.pvalue))


def test_an_onset_that_never_comes_is_later_than_all_that_do():
    early, late = [0.5, 0.6, 0.55, 0.58], [0.9, None, 0.8, None]
    ours = made({"lr_half": early, "lr_quarter": early}, "onset", excess=0.2)
    for seed, value in enumerate(late):
        ours.runs["lr_quarter"][seed] = {"excess": 0.2} | ({"onset": value} if value else {})
    later = judge(Check("more", ("lr_quarter", "lr_half"), "onset"), ours)
    assert later.words == "seeds without an onset: 2 of lr_quarter, 0 of lr_half"
    # by hand: all four are later, which is one of the 70 divisions of eight runs, two-sided
    assert (later.state, later.p) == ("holds", pytest.approx(2 / 70))
    earlier = judge(Check("more", ("lr_half", "lr_quarter"), "onset"), ours)
    assert (earlier.state, earlier.p) == ("fails", pytest.approx(2 / 70))
    del ours.runs["lr_quarter"][3]  # three seeds that are all later, against four: 2 of 35
    few = judge(Check("more", ("lr_quarter", "lr_half"), "onset"), ours)
    assert (few.state, few.leans, few.p) == ("open", "holds", pytest.approx(2 / 35))
    for seed in range(3):
        ours.runs["lr_quarter"][seed] = ours.runs["lr_half"][seed] = {"excess": 0.0}
    del ours.runs["lr_half"][3]
    assert judge(Check("more", ("lr_quarter", "lr_half"), "onset"), ours).p == 1


@pytest.mark.parametrize("element, state", [(40.0, "holds"), (5.0, "fails"), (12.3, "open")])
def test_sink_and_element_go_together_or_apart(element, state):
    ours = made({"dyt": around(0.3)}, element_1=math.log(element))
    for seed in range(3):
        ours.runs["dyt"][seed]["element_1"] += 0.01 * seed - 0.01
    assert judge(Check("together", ("dyt",), "excess"), ours).state == state


def test_p_values_are_corrected_for_the_number_of_different_tests():
    rows = {"k_bias": [0.31, 0.33, 0.32], "v_bias": [0.4, 0.41, 0.42], "elu": [0.29, 0.32, 0.3]}
    ours = made(rows)
    outcomes = [judge(Check("more", (name, "base"), "excess"), ours) for name in rows]
    first, second, third = sorted(outcome.p for outcome in outcomes)
    second = max(3 * first, 2 * second)
    by_hand = [min(1, p) for p in (3 * first, second, max(second, third))]
    assert sorted(rules.holm(outcomes).values()) == pytest.approx(by_hand)
    # a check of two claims is one test
    assert rules.holm([*outcomes, *outcomes]) == rules.holm(outcomes)


@pytest.mark.parametrize("kind, quantity, value, decided", [
    ("present", "excess", SINK + 0.006, "holds"), ("absent", "excess", SINK + 0.006, "fails"),
    ("absent", "excess", SINK - 0.006, "holds"), ("present", "excess", SINK - 0.006, "fails"),
    ("present", "key", 0.004, "holds"), ("kept", "excess", 0.3 - MARGIN + 0.005, "holds"),
    ("kept", "excess", 0.3 - MARGIN - 0.005, "fails"),
])  # fmt: skip
def test_one_correction_for_and_against(kind, quantity, value, decided):
    """What a check must survive to hold it must survive to fail, in each kind of check."""
    ours = made({"sigmoid": around(value)}, quantity)
    noise = made({"elu": [0.2, 0.4, 0.3], "k_bias": [0.2, 0.5, 0.3], "v_bias": [0.2, 0.6, 0.3]})
    ours.runs.update({name: noise.runs[name] for name in ("elu", "k_bias", "v_bias")})
    runs = ("sigmoid", "base") if kind == "kept" else ("sigmoid",)
    check = Check(kind, runs, quantity)
    alone = judge(check, ours)
    assert (alone.state, alone.leans) == (decided, decided) and 0.0125 < alone.p < 0.05
    others = tuple(Check("more", (name, "base"), "excess") for name in ("elu", "k_bias", "v_bias"))
    claim = Claim("a", "s", "c.", (check,), (), gate="none")
    crowded = replace(claim, id="b", checks=(check, *others))
    # In a claim of its own the check keeps its p-value; beside three others it is corrected.
    own, beside = judge_claims([claim, crowded], ours)
    assert (own.outcomes[0].state, own.outcomes[0].p) == (decided, alone.p)
    assert beside.outcomes[0].state == "open" and beside.outcomes[0].p == pytest.approx(4 * alone.p)
    assert rules.why_open(beside.outcomes[0]) == "correction"
    # Other claims matter only if the whole ledger is one family.
    more = replace(claim, id="c", checks=others)
    assert judge_claims([claim, more], ours)[0].outcomes[0].state == decided
    strict = judge_claims([claim, more], ours, "ledger")[0].outcomes[0]
    assert strict.state == "open" and strict.p == pytest.approx(4 * alone.p)
    assert judge_claims([crowded], ours, "none")[0].outcomes[0].state == decided
    with pytest.raises(ValueError, match="correction must be one of claim, ledger, none"):
        judge_claims([claim], ours, "all")


def test_an_open_check_says_why():
    def why(values, kind="present"):
        return rules.why_open(judge(Check(kind, ("sigmoid",), "excess"), made({"sigmoid": values})))

    assert why(around(0.3)) == ""
    # mean 0.1 and standard deviation 0.05, against a bar of 0.048 that is all but exact
    assert why([0.05, 0.1, 0.15]) == "too few seeds: 10 would do"
    assert why([0.0, 0.05, 0.1]) == "near the bar"
    nothing = rules.CheckOutcome(Check("fails", ("elu",), "excess"))
    assert rules.seeds_needed(nothing) == math.inf
    ours = made({"sigmoid": around(0.0)})
    ours.runs["sigmoid"][1]["live_later"] = 0.0
    assert rules.why_open(judge(Check("absent", ("sigmoid",), "excess"), ours)) == (
        "dead block in sigmoid, seed 1"
    )


def test_a_check_on_fresh_seeds_leaves_the_others_out_at_the_preset_where_they_were_seen():
    values = [0.3, 0.3, 0.31, 0.0, 0.001, 0.002]
    check = Check("absent", ("sigmoid",), "excess", fresh=3)
    estimate = judge(check, made({"sigmoid": values})).estimate
    assert (estimate.mean, estimate.seeds) == (pytest.approx(0.001), 3)
    assert judge(replace(check, fresh=0), made({"sigmoid": values})).estimate.seeds == 6
    assert judge(replace(check, fresh=6), made({"sigmoid": values})).state == "not run"


def test_a_quantity_of_few_settings_borrows_the_prior_of_the_one_it_is_measured_like():
    spread = {f"lr_x{n}": [0.1, 0.1 + n / 100, 0.1 - n / 100] for n in (2, 2.5)}
    names = ("elu", "linear", "mlp", "sigmoid", "k_bias")
    rows = {name: [0.2, 0.2 + n / 100, 0.2 - n / 50] for n, name in enumerate(names, 1)}
    ours = made(rows | spread)
    for seed in range(3):
        ours.runs["k_bias"][seed] |= {"without_bias": 0.01 * seed, "loss_without_bias": 1 + seed}
    assert ours.prior("without_bias") == ours.prior("excess") != ours.prior("loss_without_bias")
    assert ours.prior("loss_without_bias")[0] == 0  # there is none to borrow


@pytest.mark.parametrize("states, premises, expected", [
    (["holds", "holds"], [], "reproduced"), (["holds", "fails"], [], "partly"),
    (["fails", "open"], [], "not reproduced"),
    (["holds", "open"], [], "inconclusive"), (["holds", "not run"], [], "not run"), ([], [], "not run"),
    (["holds"], ["fails"], "inconclusive"), (["holds"], ["holds"], "reproduced"), (["holds"], ["not run"], "not run"),
])  # fmt: skip
def test_a_verdict_follows_from_the_states(states, premises, expected):
    assert verdict_of(states, premises) == expected


def test_margins_are_the_papers_own():
    paper = {e.name: e.paper for e in by_name().values()}
    assert rules.SINK == pytest.approx(paper["lr_quarter"]["sink_1"] / paper["default"]["sink_1"])
    between = (paper["heads_4"]["sink_1"] + paper["scale_0.2"]["sink_1"]) / 2
    assert rules.MARGIN == pytest.approx(1 - between / paper["default"]["sink_1"])
    losses = (paper["nope"]["valid_loss"] + paper["weight_decay_1"]["valid_loss"]) / 2
    assert rules.LOSS == pytest.approx(losses / paper["default"]["valid_loss"] - 1)
    even = sum(1 / i for i in range(1, 65)) / 64  # alpha_1 of a head that looks at all keys alike
    base = 0.1818 * (0.3 - even) / (1 - even)
    assert pytest.approx(base, abs=5e-4) == rules.BASE
    assert rules.SHARES["alike"] == 1.0  # within a factor of two


# --- quantities ------------------------------------------------------------------------------------------------------


def test_uniform_attention_has_no_excess_whatever_the_mask():
    for window in (None, 3):
        band = np.triu(np.ones((64, 64)), 1 - (window or 64))
        weights = np.tril(np.ones((64, 64))) * band
        weights /= weights.sum(axis=1, keepdims=True)
        for target in (1, 2, 3, 40):
            alpha = weights[target - 1 :, target - 1].mean()
            assert excess(alpha, uniform_alpha(64, target, window)) == pytest.approx(0)
    # one key more
    assert uniform_alpha(4, "star") == pytest.approx(np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 5]))


def even(own_keys=0):
    """alpha_k, k = 1..4, of even attention on a text of four tokens: the mean over t = k..4 of 1/t."""
    return [np.mean([1 / (t + own_keys) for t in range(k, 5)]) for k in range(1, 5)]


def one_head(alphas, **more):
    return {"T": 4, "targets": [1, 2, 3, 4], "alpha": [[[alpha]] for alpha in alphas], **more}


def test_a_head_is_dead_where_its_attention_is_even_to_two_percent():
    assert even() == pytest.approx([25 / 48, 13 / 36, 7 / 24, 1 / 4])
    for factor, live in ((1, 0), (1.019, 0), (0.981, 0), (1.021, 1), (0.979, 1)):
        for at in range(4):  # at one key alone
            alphas = even()
            alphas[at] *= factor
            assert live_heads(one_head(alphas), None).tolist() == [[live]]


def test_even_is_another_thing_under_a_window_and_beside_a_key_of_the_models_own():
    # A window of 2: queries 1 to 4 see 1, 2, 2, 2 keys; x_1 is seen by two of four queries.
    window = one_head([(1 + 1 / 2) / 4, (1 / 2 + 1 / 2) / 3, 1 / 2, 1 / 2])
    assert live_heads(window, 2) == 0 and live_heads(window, None) == 1
    assert live_heads(one_head(even()), 4) == 0  # a window as long as the text is none
    own = one_head(even(own_keys=1), alpha_star=[[(1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4]])
    assert live_heads(own, None) == 0 and live_heads(own | {"alpha_star": None}, None) == 1
    alone = one_head([1 / 4, 1 / 3, 1 / 2, 1.0])  # a window of 1: nothing else to look at
    assert np.isnan(live_heads(alone, 1)).all()


def test_a_run_is_read_by_block():
    alpha = np.full((10, 3, 2), 0.1)  # targets, blocks, heads
    alpha[0] = [[0.9, 0.7], [0.4, 0.2], [0.2, 0.4]]
    norms = [[6.0, 2.0, 2.0, 2.0], [8.0, 2.0, 2.0, 2.0], [99.0, 1.0, 1.0, 1.0]]
    report = {"T": 64, "targets": [*range(1, 11)], "alpha": alpha.tolist(), "hidden_norms": norms}
    report |= {"hidden_peaks": [[20.0, 1.0], [30.0, 1.0], [90.0, 1.0]]}
    report |= {"key_norms": norms, "value_norms": norms}
    curve = np.stack([np.full((10, 3, 2), 0.1), alpha])
    points = [{"step": 0, "sink_1": 0.0, "valid_loss": 7.0}]
    points.append({"step": 100, "sink_1": 20.0, "valid_loss": 3.0})
    config = {"model": {"attention": {"window": None}, "vocab_size": 2000}}
    metrics = {"status": "done", "final": {"report": report, **points[1]}, "curve": points}
    numbers = of_run(config, metrics, curve)
    u = uniform_alpha(64)
    assert numbers["block_1"] == pytest.approx((0.8 - u) / (1 - u))
    assert numbers["excess"] == pytest.approx((0.3 - u) / (1 - u))
    assert numbers["learned"] == pytest.approx(0.2 / (1 - u))
    assert numbers["live_1"] == numbers["live_later"] == 1
    logarithms = [numbers["element_1"], numbers["element"], numbers["hidden"]]
    assert np.exp(logarithms) == pytest.approx([20, 30, 4])
    assert numbers["onset"] == 1.0 and "learned_star" not in numbers
    points[1]["sink_1"] = 1.0
    # it never came
    metrics = {"status": "done", "final": points[1], "curve": points}
    assert "onset" not in of_run(config, metrics, None)


def test_a_ratio_of_nothing_is_not_held():
    assert as_judged({"value": 0.0, "excess": math.nan, "key": 2.0}) == {"key": math.log(2)}
    assert np.isnan(norm_ratio([[1.0, 0.0, 0.0]])).all()


def test_records_are_read_once_and_again_when_one_is_added(tmp_path):
    made_up(tmp_path, "fixed_1", 0, "laptop")
    first = su.claims("laptop", tmp_path)
    # One run judges nothing; what real models or mathematics decide needs no runs.
    checked = [claim for claim in read_claims() if claim.checks]
    trained = [claim.id for claim in checked if claim.checks[0].kind not in rules.REAL]
    assert set(first["verdict"][first["id"].isin(trained)]) == {
        "not run",
        "not visible",
        "not tested",
    }
    made_up(tmp_path, "fixed_1", 1, "laptop")
    assert readings("laptop", tmp_path) is readings("laptop", tmp_path)
    assert len(readings("laptop", tmp_path).runs["fixed_1"]) == 2


# --- the claims ------------------------------------------------------------------------------------------------------


def test_every_claim_names_experiments_that_exist_and_says_where_it_is_from():
    assert len({claim.id for claim in read_claims()}) == len(read_claims())
    for claim in read_claims():
        assert claim.source and claim.claim.endswith("."), claim.id
        for check in (*claim.checks, *claim.given):
            assert check.kind in rules.REAL or set(check.runs) <= {"base", *by_name()}, claim.id


@pytest.mark.parametrize("entry, says", [
    ("{id: a, source: s, claim: c., checks: [{presnt: base}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{present: base, of: nothing}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{real: nothing, above: 0}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{real: sink_natural, above: 1, below: 2}]}", "claim a: .*one thing"),
    ("{id: a, source: s, claim: c., checks: [{present: base, absent: elu}]}", "claim a: .*one thing"),
    ("{id: a, source: s, claim: c., checks: [{of: excess}]}", "claim a: .*one thing"),
    ("{id: a, source: s, claim: c., checks: [{real: sink_natural, present: 1}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{real: sink_natural, above: 1, than: 2}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{real: sink_natural, above: x}]}", "claim a: the bar is no number"),
    ("{id: a, source: s, claim: c., checks: [{above: 1}]}", "claim a: no such check"),
    ("{id: a, source: s, claim: c., checks: [{present: elu, than: base}]}", "claim a: present compares with nothing"),
    ("{id: a, source: s, claim: c., checks: [{more: elu}]}", "claim a: more than what"),
    ("{id: a, source: s, claim: c., verdit: x}", "claim a: .*verdit"),
    ("{source: s, claim: c.}", "claim without id"),
])  # fmt: skip
def test_a_wrong_entry_is_named_in_one_line(entry, says, tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(f"- {entry}\n")
    refuses(says, read_claims, path)


def test_experiments_that_coincide_at_a_preset_are_not_asked():
    claim = next(claim for claim in read_claims() if claim.id == "heads")
    assert label("heads_4", "laptop") == "fixed_1"
    others = [check for check in claim.checks if "heads_4" not in check.runs]
    judged = judge_claims([claim], made({"heads_8": around(0.3), "heads_2": around(0.3)}))[0]
    assert len(judged.outcomes) == len(others) < len(claim.checks)


def test_a_claim_is_judged_with_what_it_takes_for_granted_on_real_models_and_by_mathematics():
    (model, question), (low, _) = next(iter(real_models().items()))
    real = Check("above", (model,), question, bar=low - 1)
    present = Check("present", ("sigmoid",), "excess")
    for value, verdict in ((0.3, "reproduced"), (0.0, "inconclusive")):
        claim = Claim("a", "s", "c.", (real,), (present,), gate="none")
        judged = judge_claims([claim], made({"sigmoid": around(value)}), "none")[0]
        assert [outcome.check.kind for outcome in judged.premises] == ["present"]
        assert [outcome.state for outcome in judged.outcomes] == ["holds"]
        assert judged.verdict == verdict
    proved = Claim("a", "s", "c.", (), (), trivial="mathematics")
    assert judge_claims([proved], made({}))[0].verdict == "by mathematics"


def test_public_calls_say_what_is_wrong():
    for table in (su.claims, su.runs):
        refuses("preset must be one of", table, "desktop")


@pytest.mark.slow
def test_the_ledger_on_the_records():
    ledger = su.claims("laptop").set_index("id")
    assert ledger.loc["key_biases", "verdict"] == "reproduced"
    assert su.verdict("key_biases") == "reproduced (6 hold)"
    assert su.verdict("universal") == "partly (2 hold, 1 fails, in 2 real models)"
    assert su.verdict("activations_make_sinks") == "partly (1 holds, 2 fail, 6 open)"
    assert su.verdict("bias_activations") == "partly (2 hold, 2 fail)"
    assert su.verdict("proposition_1") == "by mathematics"
    refuses("no claim 'nothing'", su.verdict, "nothing")
    assert ledger.loc["proposition_1", "verdict"] == "by mathematics"
    assert ledger.loc["random_first", "verdict"] == "not visible"
    assert ledger.loc["jamba", "verdict"] == "not run"
    assert ledger.loc["weight_decay", "verdict"] == "inconclusive"
    dead = "dead block in weight_decay_1, seed 0, 1, 2, 3, 4, 5"
    assert ledger.loc["weight_decay", "reason"] == dead
    assert set(su.claims("minute")["id"]) == set(ledger.index)
    checks = su.claim_checks("laptop")
    assert {"holds", "fails", "open"} <= set(checks["state"])
    assert checks.loc[checks["kind"] == "same", "passes"].notna().all()
    assert checks.query("kind in ['present', 'absent', 'more'] and seeds > 0").p.notna().all()
    excess = checks.query("quantity == 'excess' and seeds > 0").prior
    assert excess.nunique() == 1 and excess.iloc[0] == readings("laptop").prior("excess")[0]


@pytest.mark.slow
def test_live_is_a_column_of_the_records():
    runs = su.runs("laptop").set_index("experiment").live
    assert (runs["fixed_1"] > 0.5).all()
    assert (runs["weight_decay_10"] == 0).all()
    assert runs["window_1_64"].isna().all()
    blocks = su.blocks("laptop").query("experiment == 'weight_decay_1' and seed == 0").live
    assert blocks.iloc[1] == 0 and blocks.iloc[3] > 0


def test_what_the_ledger_says_of_real_models_is_what_their_measurements_say():
    written = real_models()
    said = {
        (model, question): ends
        for model, of_model in answers().items()
        for question, ends in of_model.items()
    }
    assert written.keys() == said.keys()
    assert all(written[which] == pytest.approx(ends, rel=1e-12) for which, ends in said.items())


@pytest.mark.parametrize("table", [su.runs, su.blocks, su.heads, su.curves])
def test_a_table_without_records_has_its_columns_and_a_warning_names_the_folder(table, tmp_path):
    with pytest.warns(UserWarning, match="there are no records in .*nowhere: give"):
        nothing = table("laptop", tmp_path / "nowhere")
    assert len(nothing) == 0
    made_up(tmp_path, "fixed_1", 0, "laptop")
    assert {"experiment", "seed"} <= set(nothing) and set(nothing) - set(su.runs("laptop")) <= {
        *("block", "head", "alpha_1", "excess_1", "tokens", "step", "valid_loss")
    }
