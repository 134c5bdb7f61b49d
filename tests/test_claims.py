"""The ledger of claims, on records made up for the purpose and on the paper's own numbers."""

import json
import re

import pytest
import torch

from sinkutils.data.tokenizer import train_tokenizer
from sinkutils.ledger import open_models, trials
from sinkutils.ledger.claims import COLUMNS, claims, verdict
from sinkutils.ledger.conclusions import CLAIMS
from sinkutils.ledger.evidence import (
    NOT_REPRODUCED,
    NOT_RUN,
    NOT_VISIBLE,
    PARTLY,
    QUANTITIES,
    REPRODUCED,
    SEEDS,
    VERDICTS,
    Check,
    Results,
    after_massive,
    as_text,
    judge,
    ratio_by_block,
)
from sinkutils.ledger.trials import scaling_difference
from sinkutils.measuring import scores as downstream
from sinkutils.measuring.own import Subject
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.grid import EXPERIMENTS, config, paper_rows, resolve, unavailable
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import record_folder, write_record
from sinkutils.training.finetune import FINETUNINGS, finetune_config

# Claims that no record of numbers can settle: on open models, proofs, kept weights, what is not recorded.
WITHOUT_RECORDS = {claim.id for claim in CLAIMS if not claim.needs}
NEED_WEIGHTS = {"qk_angles", "length_and_threshold", "random_input", "repeated_input", "repeated_input_learned",
                "replaced_position", "swapped_position", "window_absolute", "sink_token_activations"}  # fmt: skip
# Massive activations where the paper's figures and text say that there are some (Figs. 7, 8 and 29).
MASSIVE = {"v_bias": 6.0, "k_bias_first_20": 5.0, "k_bias_uniform_20": 4.0, "sigmoid_normalised": 6.0,
           "elu_kernel_normalised": 6.0, "sigmoid_p2": 5.0, "sigmoid_p3": 5.0, "sigmoid_p4": 5.0, "softmax_p1_2": 4.0,
           "softmax_p1_3": 3.5, "softmax_p1_4": 3.2, "default": 6.0}  # fmt: skip
# What the paper says without a number, or in a cell that its text lost.
SAID = {"data_share_0.02": {"sink_1": 0.9}, "data_share_0.01": {"sink_1": 0.5}, "lr_x0.025": {"valid_loss": 6.0},
        "random_2": {"sink_2": 0.0}, "random_1_to_5": {"sink_1": 0.5}, "prefix_5": {"sink_1": 4.0, "sink_2": 5.0},
        "window_1_16": {"sink_1": 0.5}, "window_1_2": {"sink_1": 18.0}, "k_bias_first_1": {"sink_star": 70.0},
        "k_bias_first_20": {"sink_star": 0.0}, "k_bias_dims_1": {"sink_star": 30.0}}  # fmt: skip
FAIL = {"elu_normalised", "elu_kernel", "linear_normalised", "exp_unnormalised", "softmax_p2", "softmax_p3",
        "softmax_p4"}  # fmt: skip


class Ledger:
    """Records made up for one preset."""

    def __init__(self, runs, preset="smoke"):
        self.runs, self.preset = runs, preset

    def add(self, name, seed=0, *, ratio=1.0, before=None, early=0.0, onset=None, failed=False, weights=None,
            tokenizer=None, valid_loss=3.73, train_loss=3.7, **sinks):  # fmt: skip
        name = resolve(name, self.preset)
        sinks = {"sink_1": 0.0, **sinks}
        end = sinks["sink_1"]
        report = {
            "layers": [0, 1],
            "alpha": [[[0.1], [0.2]]],
            "hidden_norms": [[1.0, 1.0, 1.0], [ratio, 1.0, 1.0]],
            "key_norms": [[1.0, 1.0, 1.0], [0.8, 1.0, 1.0]],
            "value_norms": [[1.0, 1.0, 1.0], [0.2, 1.0, 1.0]],
            "sink": {str(k): {"0.3": sinks.get(f"sink_{k}", 0.0)} for k in range(1, 11)},
        }
        if ratio >= 3:
            report["layers"] = [0, 2]  # so that the block of the second layer follows a massive one
        if before is not None:
            report["before_norm_norms"] = [[before, 1.0, 1.0]]
        curve = [{"step": 10, "sink_1": early}]
        curve += [{"step": onset, "sink_1": end}] if onset else []
        curve += [{"step": 100, "sink_1": end}]
        final = {"step": 100, "valid_loss": valid_loss, "train_loss": train_loss, "report": report, **sinks}
        metrics = {"status": "failed" if failed else "done", "reason": "the loss was not finite" if failed else None,
                   "curve": [] if failed else curve, "final": {} if failed else final}  # fmt: skip
        write_record(record_folder(self.preset, name, seed, self.runs), config(name, self.preset, seed), metrics,
                     {"wall_seconds": 1.0}, weights, tokenizer)  # fmt: skip
        return self

    def finetuned(self, name, losses=(3.0, 2.0), norms=(1.0, 1.0), failed=False):
        """A fine-tuning whose loss and gradient norm go from one value to another over 100 steps, in two halves."""
        losses, norms = ([low + (high - low) * i / 99 for i in range(100)] for low, high in (losses, norms))
        curve = [{"step": end, "sink_1": 0.0, "losses": losses[end - 50 : end], "gradient_norms": norms[end - 50 : end]}
                 for end in (50, 100)]  # fmt: skip
        curve = [{"step": 0, "sink_1": 0.0, "losses": [], "gradient_norms": []}, *curve]
        metrics = {"status": "failed" if failed else "done", "reason": "the loss was not finite" if failed else None,
                   "curve": curve[:1] if failed else curve,
                   "final": {} if failed else {"step": 100, "sink_1": 0.0, "valid_loss": losses[-1]}}  # fmt: skip
        write_record(record_folder(self.preset, name, 0, self.runs), finetune_config(name, self.preset), metrics,
                     {"wall_seconds": 1.0})  # fmt: skip
        return self

    def base(self, *values, **more):
        for seed, value in enumerate(values):
            self.add("base", seed, sink_1=value, **more)
        return self

    def verdict(self, id):
        return verdict(id, self.preset, self.runs)

    def says(self, id):
        return self.verdict(id).partition(":")[0].lower()


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


@pytest.fixture(autouse=True)
def no_measurements(tmp_path, monkeypatch):
    """No open model has been measured, unless a test says so."""
    monkeypatch.setattr(open_models, "MEASUREMENTS", tmp_path / "measurements")


@pytest.fixture(scope="module")
def papers_ledger(tmp_path_factory):
    """Records of the paper's own numbers, the base at three seeds; on the preset whose base is the paper's."""
    ledger = Ledger(tmp_path_factory.mktemp("paper"), "gpu")
    for one in EXPERIMENTS:
        if one.name in unavailable("gpu") or resolve(one.name, "gpu") != one.name:
            continue
        values = {"valid_loss": 3.73, **one.paper, **SAID.get(one.name, {})}
        more = {"ratio": MASSIVE.get(one.name, 1.1), "failed": one.name in FAIL}
        more["onset"] = {"default": 20, "lr_half": 40, "lr_quarter": 80}.get(one.name)
        if one.name == "post_norm":
            more["before"] = 5.0
        if one.name.startswith("data_share_0.0"):
            more["train_loss"] = 2.0
        ledger.add(one.name, **values, **more)
    for seed in (1, 2):
        ledger.add("base", seed, sink_1=18.18, ratio=MASSIVE["default"], onset=20)
    return ledger.finetuned("sft_softmax", (1.5, 1.3)).finetuned("sft_sigmoid", (1.52, 1.33), (1.2, 0.9))


def test_the_papers_own_numbers_satisfy_every_predicate(papers_ledger):
    table = claims("gpu", papers_ledger.runs).set_index("id")
    on_records = [claim.id for claim in CLAIMS if claim.id not in WITHOUT_RECORDS | NEED_WEIGHTS | {"one_billion"}]
    assert len(on_records) > 45
    other = table.loc[on_records].query("verdict != 'reproduced'")
    assert other[["verdict", "why"]].to_dict("index") == {}


def test_the_papers_1b_numbers_satisfy_their_predicate(tmp_path):
    one_billion = Ledger(tmp_path, "paper-1b").add("softmax_1b", sink_1=45.11, valid_loss=3.07)
    assert one_billion.says("one_billion") == NOT_RUN
    assert one_billion.add("sigmoid_1b", sink_1=2.46, valid_loss=3.10).says("one_billion") == REPRODUCED


def test_there_are_enough_claims_with_different_ids_and_every_takeaway_is_among_them():
    ids = [claim.id for claim in CLAIMS]
    assert len(ids) == len(set(ids)) >= 30
    sources = " ".join(claim.source for claim in CLAIMS)
    takeaways = {4: 2, 5: 2, 6: 3, 7: 3}
    assert all(f"Section {s}, takeaway {n}" in sources for s, count in takeaways.items() for n in range(1, count + 1))


def test_sources_name_items_of_the_paper_and_needs_name_experiments():
    names = {one.name for one in EXPERIMENTS} | {"base"} | set(FINETUNINGS)
    for claim in CLAIMS:
        assert re.search(r"Abstract|Section [3-7]|Appendix [A-D]", claim.source), claim.id
        numbers = [int(n) for n in re.findall(r"Table (\d+)", claim.source)]
        figures = [int(n) for n in re.findall(r"Figures? (\d+)", claim.source)]
        assert all(n <= 15 for n in numbers) and all(n <= 30 for n in figures), claim.id
        assert set(claim.needs) <= names, claim.id
        assert set(claim.keys) <= set(QUANTITIES), claim.id
        assert claim.text.endswith(".") and claim.text.count(". ") == 0, claim.id


def test_predicates_read_no_run_that_their_claim_does_not_name(papers_ledger, monkeypatch):
    read = set()
    original = Results.all_records
    monkeypatch.setattr(
        Results, "all_records", lambda self, name: (read.add(self.label(name)), original(self, name))[1]
    )
    results = Results("gpu", papers_ledger.runs)
    for claim in CLAIMS:
        read.clear()
        claim.predicate(results)
        if claim.gate:
            claim.gate(results)
        assert read <= {results.label(name) for name in (*claim.needs, "base")}, claim.id


@pytest.mark.parametrize("preset", PRESETS)
def test_no_claim_is_without_a_verdict_and_a_reason_where_nothing_was_run(preset, tmp_path):
    table = claims(preset, tmp_path)
    assert list(table) == list(COLUMNS)
    assert set(table["verdict"]) <= set(VERDICTS)
    assert (table["why"] != "").all() and (table["paper"] != "").all()
    from_records = table[~table["id"].isin(WITHOUT_RECORDS)]
    assert set(from_records["verdict"]) <= {NOT_RUN, NOT_VISIBLE}
    assert table.equals(claims(preset, tmp_path))


def test_a_takeaway_is_reproduced_partly_or_not_by_what_the_records_say(ledger):
    ledger.base(20.0).add("kv_bias", sink_star=60.0, sink_1=0.1).add("k_bias", sink_star=50.0, sink_1=0.0)
    assert ledger.says("key_biases") == REPRODUCED
    assert "k_bias 50.0" in ledger.verdict("key_biases") and "kv_bias 72.76" in ledger.verdict("key_biases")
    ledger.add("k_bias", sink_star=50.0, sink_1=12.0)
    assert ledger.says("key_biases") == PARTLY
    assert "does not hold: k_bias: Sink_1 % at most 1.0" in ledger.verdict("key_biases")
    ledger.add("k_bias", sink_star=0.0, sink_1=12.0).add("kv_bias", sink_star=0.0, sink_1=12.0)
    assert ledger.says("key_biases") == NOT_REPRODUCED  # a comparable loss alone is no support


def test_a_change_of_the_sink_is_not_visible_where_the_base_has_none(ledger):
    ledger.base(2.0).add("sigmoid", sink_1=0.0).add("elu", sink_1=0.0)
    assert ledger.says("no_normalisation") == NOT_VISIBLE
    assert "fixed_1 has a Sink_1 of 2.0 %, under 5 %" in ledger.verdict("no_normalisation")


def test_what_is_not_recorded_is_not_run_and_named(ledger):
    assert ledger.says("weight_decay") == NOT_RUN
    ledger.base(20.0)
    assert ledger.says("weight_decay") == NOT_RUN
    assert "not run: weight_decay_0.5, weight_decay_0" in ledger.verdict("weight_decay")
    ledger.add("weight_decay_0.5", sink_1=40.0)
    assert ledger.says("weight_decay") == PARTLY


def test_a_difference_counts_only_beyond_the_range_over_seeds(ledger):
    ledger.base(20.0, 26.0, 23.0).add("weight_decay_0.5", sink_1=25.0).add("weight_decay_0", sink_1=10.0)
    assert ledger.says("weight_decay") == PARTLY
    assert "by more than the seeds' 6.0" in ledger.verdict("weight_decay")
    ledger.add("weight_decay_0.5", sink_1=40.0)
    assert ledger.says("weight_decay") == REPRODUCED
    assert "fixed_1 20.0 to 26.0" in ledger.verdict("weight_decay")


def test_seeds_that_disagree_about_a_threshold_make_it_partly(ledger):
    ledger.base(20.0, 21.0, 22.0)
    for seed, sink in enumerate((0.5, 54.0, 23.0)):  # on average the base's sink
        ledger.add("v_bias", seed, sink_1=sink)
    assert ledger.says("value_biases") == PARTLY
    assert "v_bias: Sink_1 % at least 2.9 (at 2 of 3 seeds)" in ledger.verdict("value_biases")
    assert ledger.add("v_bias", 0, sink_1=3.0).says("value_biases") == REPRODUCED
    for seed, sink in enumerate((4.0, 0.2, 0.1)):  # on average none
        ledger.add("weight_decay_0", seed, sink_1=sink)
    assert ledger.says("no_weight_decay") == PARTLY
    assert ledger.add("weight_decay_0", 0, sink_1=0.3).says("no_weight_decay") == NOT_REPRODUCED


def test_no_effect_needs_the_spread_over_three_seeds(ledger):
    for name in ("batch_quarter", "batch_half", "batch_x2"):
        ledger.add(name, sink_1=28.0)
    ledger.base(20.0, 22.0)
    assert ledger.says("batch_size") == NOT_RUN
    assert f"{SEEDS} seeds of fixed_1 (there are 2)" in ledger.verdict("batch_size")
    ledger.base(20.0, 22.0, 21.0)
    assert ledger.says("batch_size") == REPRODUCED  # within the paper's own nine points
    ledger.add("batch_x2", sink_1=40.0)
    assert ledger.says("batch_size") == PARTLY
    ledger.base(10.0, 31.0, 22.0)
    assert ledger.says("batch_size") == REPRODUCED  # within twice the range of 21
    ledger.add("batch_x2", sink_1=1.0)
    assert ledger.says("batch_size") == PARTLY  # so is 1.0, but a sink that is gone is an effect


def test_whatever_the_ffn_needs_the_sink_to_exist_and_the_spread_to_call_it_unaffected(ledger):
    for name in ("relu", "gelu", "swish", "reglu", "geglu"):
        ledger.add(f"ffn_{name}", sink_1=15.0)
    ledger.base(20.0)
    assert ledger.says("ffn") == PARTLY  # it exists; whether it is the same nobody knows with one seed
    ledger.base(20.0, 21.0, 22.0)
    assert ledger.says("ffn") == REPRODUCED
    for name in ("relu", "gelu", "swish", "reglu", "geglu"):
        ledger.add(f"ffn_{name}", sink_1=0.2)
    assert ledger.says("ffn") == NOT_REPRODUCED


def test_a_variant_that_is_the_base_itself_is_no_evidence(tmp_path):
    ledger = Ledger(tmp_path, "laptop").base(20.0, 21.0, 22.0)  # whose base has 4 heads
    assert resolve("heads_4", "laptop") == "fixed_1"
    assert ledger.says("heads") == NOT_RUN
    (check,) = Results("laptop", tmp_path).more("heads_4", "base")
    assert check.holds is None and "one run at this preset" in check.missing[0]


def test_emerging_needs_a_late_value_ten_times_the_early_one(ledger):
    assert ledger.base(20.0, early=1.0).says("emerges") == REPRODUCED
    assert ledger.base(20.0, early=10.0).says("emerges") == NOT_REPRODUCED
    assert ledger.base(3.0).says("emerges") == NOT_VISIBLE


def test_a_run_that_failed_to_train_fails_its_checks_and_is_a_result_where_the_paper_says_so(ledger):
    ledger.base(20.0).add("sigmoid_normalised", failed=True)
    assert ledger.says("normalised_sigmoid") == NOT_REPRODUCED
    assert "sigmoid_normalised failed" in ledger.verdict("normalised_sigmoid")
    ledger.add("exp_unnormalised", failed=True)
    assert ledger.says("exp_explodes") == REPRODUCED
    ledger.add("exp_unnormalised", sink_1=1.0)
    assert ledger.says("exp_explodes") == NOT_REPRODUCED


def test_massive_activations_are_judged_only_where_the_base_has_them(ledger):
    ledger.base(20.0, ratio=1.2).add("k_bias", ratio=1.0).add("kv_bias", ratio=1.0)
    assert ledger.says("bias_activations") == NOT_VISIBLE
    assert ledger.base(20.0, ratio=8.0).says("bias_activations") == REPRODUCED
    assert ledger.add("k_bias", ratio=2.5).says("bias_activations") == PARTLY
    assert ledger.says("first_token_norms") == REPRODUCED


def test_with_a_fixed_first_token_as_base_no_prefix_is_judged_and_short_windows_are_not_either(ledger):
    ledger.base(20.0).add("window_none", sink_1=20.0).add("window_1_2", sink_1=20.0).add("prefix_5", sink_1=1.0)
    assert ledger.says("prefix") == NOT_VISIBLE
    assert "tied to its fixed token" in ledger.verdict("prefix")
    assert ledger.says("window_small") == NOT_VISIBLE
    assert ledger.says("window_absolute") == PARTLY  # x_1 of all, yes; the windows' own first tokens need weights


def test_random_tokens_are_judged_on_the_default_and_not_where_nothing_sinks(ledger):
    ledger.add("default", sink_1=0.5).add("random_1", sink_1=1.0)
    assert ledger.says("random_first") == NOT_VISIBLE
    assert ledger.add("random_1", sink_1=9.0).says("random_first") == REPRODUCED
    assert ledger.add("default", sink_1=12.0).says("random_first") == PARTLY


def test_fine_tuning_is_judged_by_loss_and_gradient_norm_of_both_models(ledger):
    ledger.base(20.0)
    assert ledger.says("fine_tuning") == NOT_RUN
    assert "not run: sft_softmax, sft_sigmoid" in ledger.verdict("fine_tuning")
    ledger.finetuned("sft_softmax", (3.0, 2.0)).finetuned("sft_sigmoid", (3.1, 2.05), (1.5, 1.0))
    assert ledger.says("fine_tuning") == REPRODUCED
    assert "sft_sigmoid 2.10, sft_softmax 2.05" in ledger.verdict("fine_tuning")
    ledger.finetuned("sft_sigmoid", (3.1, 2.05), (0.1, 2.9))
    assert ledger.says("fine_tuning") == REPRODUCED  # a drift within a factor of two is none
    for changes, says in (
        ({"losses": (3.0, 2.6)}, "the falls of the loss within a factor of 2"),
        ({"losses": (3.0, 3.1)}, "sft_sigmoid: the training loss falls"),
        ({"norms": (3.0, 2.0)}, "the median gradient norms within a factor of 2"),
        ({"losses": (3.3, 2.3)}, "training loss at the end within 5%"),
        ({"failed": True}, "sft_sigmoid trains"),
    ):
        ledger.finetuned("sft_sigmoid", **changes)
        assert ledger.says("fine_tuning") == PARTLY
        assert says in ledger.verdict("fine_tuning")
    assert ledger.base(1.0).says("fine_tuning") == NOT_VISIBLE  # then neither of the two has a sink


def test_a_spike_of_the_gradient_is_told_from_a_drift():
    def ratio(norms):
        curve = [{"step": 0, "losses": [], "gradient_norms": []},
                 {"step": len(norms), "losses": [1.0] * len(norms), "gradient_norms": norms}]  # fmt: skip
        return QUANTITIES["spike"][2]({"curve": curve})

    assert ratio([1.0] * 50 + [25.0] + [1.0] * 49) == 25.0
    assert ratio([1.0, 2.0, 3.0]) == 1.5
    assert QUANTITIES["spike"][2]({"curve": [{"step": 1, "sink_1": 2.0}]}) is None  # pre-training


def test_experiments_of_another_preset_are_not_run_here(ledger):
    assert ledger.says("one_billion") == NOT_RUN
    assert "not of this preset" in ledger.verdict("one_billion")


def test_proposition_2_is_refuted_for_eq_6_and_the_others_hold(tmp_path):
    table = claims("smoke", tmp_path).set_index("id")["verdict"]
    assert table["proposition_2"] == NOT_REPRODUCED
    others = ["equal_states", "proposition_1", "proposition_3", "proposition_4", "scale_is_rescaling"]
    assert set(table[others]) == {REPRODUCED}


def test_scaling_is_checked_for_two_optimizers():
    assert max(scaling_difference("adamw"), scaling_difference("sgd")) < 1e-12
    with pytest.raises(ValueError, match="optimizer must be 'sgd' or 'adamw'"):
        scaling_difference("adam")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words to train on, again and again"], 512)


def kept(name, ledger, tokenizer, **more):
    model = TransformerLM(config(name, ledger.preset).model, 0)
    return ledger.add(name, weights=dict(model.state_dict()), tokenizer=tokenizer, **more)


def test_kept_weights_are_tried_on_random_and_repeated_tokens(ledger, tokenizer):
    kept("base", ledger, tokenizer, sink_1=20.0)
    assert ledger.says("repeated_input") == REPRODUCED  # rotary: attention on repeated tokens cannot reach eps
    assert "Sink_1 % on repeat tokens: fixed_1 0.0" in ledger.verdict("repeated_input")
    assert ledger.says("random_input") == NOT_REPRODUCED  # weights that are not trained have no sink
    assert ledger.says("qk_angles") == NOT_RUN
    assert "a head of fixed_1 with a sink" in ledger.verdict("qk_angles")
    assert ledger.says("length_and_threshold") in VERDICTS


def test_kept_weights_of_a_window_model_show_the_windows_first_tokens(ledger, tokenizer):
    ledger.add("window_none", sink_1=20.0).add("window_1_2", sink_1=20.0).base(20.0)
    kept("window_1_4", ledger, tokenizer, sink_1=20.0)
    assert ledger.says("window_absolute") == REPRODUCED
    assert "window_1_4 0.0" in ledger.verdict("window_absolute")


def sink_of_the_first_position(length=16):
    """A model whose queries look for p_1: one block, token embeddings along axis 1, p_1 along axis 0."""
    shape = LMConfig(vocab_size=512, context_length=length, num_layers=1, num_heads=1, hidden_size=8,
                     intermediate_size=8, position="learnable")  # fmt: skip
    model = TransformerLM(shape, 0)
    with torch.no_grad():
        model.embed.weight.zero_()[:, 1] = 1
        model.position_embedding.zero_()[0, 0] = 10
        weight = model.blocks[0].attention.qkv.weight.zero_()
        weight[0, 1] = weight[8, 0] = 4  # q reads axis 1, k reads axis 0
    return model


@pytest.mark.parametrize("edit", ["replace", "swap"])
def test_editing_positions_takes_away_or_moves_a_sink_tied_to_p_1(edit, ledger, tokenizer, monkeypatch):
    model = sink_of_the_first_position()
    monkeypatch.setattr(trials, "_own", lambda results, name: Subject("tiny", model, tokenizer, length=16))
    (check,) = trials.edited_positions(Results("smoke", ledger.runs), edit)
    assert check.holds, check.facts
    facts = dict(check.facts)
    assert facts["Sink_1 % on repeated tokens"] == "untouched 100.0"
    expected = "0.0 and 0.0" if edit == "replace" else "0.0 and 100.0"
    assert facts[f"{edit}, Sink_1 and Sink_t"].endswith(expected)
    torch.nn.init.zeros_(model.position_embedding)
    assert not trials.edited_positions(Results("smoke", ledger.runs), edit)[0].holds  # no sink to begin with


def test_angles_and_norms_are_compared_in_the_heads_with_a_sink(ledger, tokenizer, monkeypatch):
    model = sink_of_the_first_position()
    monkeypatch.setattr(trials, "_own", lambda results, name: Subject("tiny", model, tokenizer, length=16))
    angle, norm = trials.angles_not_norms(Results("smoke", ledger.runs))
    assert angle.holds and dict(angle.facts)["mean cosine"] == "x_1 1.00, others 0.00"
    assert not norm.holds  # here it is the norm as well: the other keys are zero


@pytest.mark.parametrize(("factor", "expected"), [(100, REPRODUCED), (1, NOT_REPRODUCED)])
def test_the_sink_token_itself_is_looked_at_for_massive_activations(factor, expected, ledger, tokenizer):
    ledger.base(20.0, ratio=8.0).add("sink_token", ratio=9.0)
    assert ledger.says("sink_token_activations") == NOT_RUN  # the record's norms are those of x_1 onwards
    assert "train sink_token --preset smoke --keep-weights" in ledger.verdict("sink_token_activations")
    model = TransformerLM(config("sink_token", "smoke").model, 0)
    model.sink.data = factor * model.embed.weight[5].detach()  # unscaled it is as long as any token's embedding
    ledger.add("sink_token", weights=dict(model.state_dict()), tokenizer=tokenizer)
    assert ledger.says("sink_token_activations") == expected, ledger.verdict("sink_token_activations")


def test_weights_that_were_not_kept_are_asked_for(tmp_path):
    ledger = Ledger(tmp_path, "gpu").base(20.0)
    assert ledger.says("replaced_position") == NOT_RUN
    assert "train learnable --preset gpu --keep-weights" in ledger.verdict("replaced_position")


def measured(folder, name, **sinks):
    folder.mkdir(exist_ok=True)
    reports = {kind: {"name": f"{name}, {kind} input", "sink": {"1": {"0.3": sink}}} for kind, sink in sinks.items()}
    (folder / f"{name.rsplit('/')[-1]}.json").write_text(json.dumps(reports))


def test_measured_open_models_are_judged_with_or_without_our_own(ledger, tmp_path):
    assert "measure gpt2 --probe natural random repeat --save" in ledger.verdict("universal")
    folder = tmp_path / "measurements"
    measured(folder, "gpt2", natural=70.0, random=60.0, repeat=50.0)
    measured(folder, "EleutherAI/pythia-14m", natural=10.0, random=8.0, repeat=0.0)
    for claim in ("universal", "small_models", "random_input", "repeated_input", "repeated_input_learned"):
        assert ledger.says(claim) == REPRODUCED, ledger.verdict(claim)
    assert "GPT2 70.0, Pythia-14M 10.0" in ledger.verdict("universal")
    measured(folder, "EleutherAI/pythia-14m", natural=10.0, random=8.0, repeat=30.0)
    assert ledger.says("repeated_input") == NOT_REPRODUCED
    measured(folder, "mistralai/Mistral-7B-v0.1", natural=97.49)
    measured(folder, "mistralai/Mistral-7B-Instruct-v0.1", natural=88.34)
    assert ledger.says("base_and_chat") == REPRODUCED


def scored(name, acc_norm):
    downstream.save_scores(name, {"task": "hellaswag", "acc": acc_norm - 5, "acc_norm": acc_norm})


def test_hellaswag_and_sink_are_compared_within_and_across_families(ledger, tmp_path):
    folder = tmp_path / "measurements"
    assert ledger.says("hellaswag") == NOT_RUN
    measured(folder, "EleutherAI/pythia-160m", natural=40.0)
    scored("EleutherAI/pythia-160m", 30.0)
    assert ledger.says("hellaswag") == NOT_RUN  # one model is no comparison
    measured(folder, "EleutherAI/pythia-1.4b", natural=60.0)
    scored("EleutherAI/pythia-1.4b", 52.0)
    measured(folder, "facebook/opt-1.3b", natural=80.0)
    scored("facebook/opt-1.3b", 53.0)
    assert ledger.says("hellaswag") == REPRODUCED, ledger.verdict("hellaswag")
    assert "acc_norm %: Pythia-160M 30.0, Pythia-1.4B 52.0, OPT-1.3B 53.0" in ledger.verdict("hellaswag")
    scored("facebook/opt-1.3b", 60.0)  # then the stronger sink would go with the better model
    assert ledger.says("hellaswag") == PARTLY
    scored("EleutherAI/pythia-1.4b", 29.0)
    assert "acc_norm %: Pythia-1.4B above Pythia-160M" in ledger.verdict("hellaswag")


def test_a_file_that_is_no_measurement_is_named(ledger, tmp_path):
    folder = tmp_path / "measurements"
    folder.mkdir()
    (folder / "odd.json").write_text('{"natural": {"name": "gpt2, natural input", "sink": {"1": {"0.2": 5}}}}')
    with pytest.raises(ValueError, match=r"odd\.json in data/measurements is not what"):
        ledger.verdict("universal")


def test_domains_are_compared_a_file_each(ledger, tmp_path):
    folder = tmp_path / "measurements"
    measured(folder, "gpt2", natural=70.0)
    for domain, sink in (("ArXiv", 70.0), ("Github", 72.0)):
        measured(folder, "gpt2", natural=sink)
        (folder / "gpt2.json").rename(folder / f"gpt2@{domain}.json")
    measured(folder, "gpt2", natural=70.0)
    assert ledger.says("domains") == REPRODUCED
    assert "ArXiv 70.0, Github 72.0" in ledger.verdict("domains")


def test_judging_weighs_core_checks():
    yes, no, aside, missing = Check("a", True), Check("b", False), Check("c", True, core=False), Check(
        "d", None, missing=("x", "x"))  # fmt: skip
    assert judge([yes, aside]) == (REPRODUCED, "holds in all of 2")
    assert judge([no, aside]) == (NOT_REPRODUCED, "does not hold: b")
    assert judge([yes, no]) == (PARTLY, "does not hold: b")
    assert judge([yes, missing]) == (PARTLY, "not run: x")
    assert judge([missing, aside]) == (NOT_RUN, "not run: x")


def test_norm_ratios_compare_the_first_token_with_the_mean_of_the_others():
    assert ratio_by_block([[6.0, 1.0, 3.0], [1.0, 1.0, 1.0]]) == [3.0, 1.0]
    assert ratio_by_block([[6.0, 1.0, 3.0]], 2) == [pytest.approx(1 / 4.5)]
    report = {"hidden_norms": [[9.0, 1.0], [9.0, 1.0], [1.0, 1.0]], "layers": [0, 1, 2],
              "value_norms": [[1.0, 1.0], [0.1, 1.0], [0.3, 1.0]]}  # fmt: skip
    assert after_massive(report, "value_norms") == pytest.approx(0.2)  # layer 0 reads the embeddings
    assert after_massive({**report, "hidden_norms": [[1.0, 1.0]] * 3}, "value_norms") is None


def test_facts_are_grouped_and_said_once():
    assert as_text([("Sink_1", "a 1"), ("Sink_*", "b 2"), ("Sink_1", "c 3"), ("Sink_1", "a 1")]) == (
        "Sink_1: a 1, c 3; Sink_*: b 2"
    )


def test_unknown_claims_and_presets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="id must be one of universal"):
        verdict("nothing", "smoke", tmp_path)
    with pytest.raises(ValueError, match="preset must be one of smoke"):
        claims("lap", tmp_path)


def test_the_papers_figures_in_the_ledger_are_those_of_its_tables(tmp_path):
    table = claims("gpu", tmp_path).set_index("id")["paper"]
    assert table["small_rate"] == "Sink_1 %: lr_x2 32.23, default 18.18, lr_half 11.21, lr_quarter 2.90"
    printed = {f"{value:.2f}" for row in paper_rows() for value in row.values.values()}
    for text in table[["compensated_rate", "batch_size", "ffn", "heads", "key_biases", "scale"]]:
        assert set(re.findall(r" (\d+\.\d\d)", text)) <= printed
