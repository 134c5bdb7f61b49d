"""Every conclusion of the paper as a predicate over records, written from the paper's words before there were any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sinkutils.ledger import gates, open_models, trials
from sinkutils.ledger.evidence import ALIKE, COMPARABLE, EMERGED, GROWTH, SMALL_VALUE, SPIKE, Check, Results
from sinkutils.measuring import scores
from sinkutils.study.grid import config


@dataclass(frozen=True)
class Claim:
    """One conclusion of the paper, in our words."""

    id: str
    source: str  # where the paper states it
    text: str
    needs: tuple[str, ...]  # the experiments whose records it reads; "base" is the preset's
    predicate: Callable[[Results], list[Check]]
    gate: gates.Gate | None = None  # (verdict, why) where the preset cannot show it
    paper: str = ""  # the paper's figures; empty: those of `needs`
    keys: tuple[str, ...] = ("sink_1",)  # the quantities of the paper's figures and of the interval


BASE = partial(gates.sink_of, "base")
SMALL_WINDOWS = ("window_1_64", "window_1_32", "window_1_16")  # the paper's sink starts from C / 8 (Fig. 6 right)
LARGE_WINDOWS = ("window_1_4", "window_1_2")
RATES = ("lr_x2", "base", "lr_half", "lr_quarter")
POSITIONS = ("nope", "absolute", "learnable", "relative", "alibi")
FFNS = tuple(f"ffn_{name}" for name in ("relu", "gelu", "swish", "reglu", "geglu"))
HEADS = ("heads_4", "heads_2", "heads_1", "heads_add")
DEPENDENT = ("base", "sigmoid_normalised", "elu_kernel_normalised")  # weights not negative, sum to one
INDEPENDENT = ("sigmoid", "elu", "linear", "mlp_normalised", "mlp")
FINE_TUNED = ("sft_softmax", "sft_sigmoid")
SIGMOIDS = ("sigmoid", "sigmoid_weight_decay_0", "sigmoid_weight_decay_0.5", "sigmoid_weight_decay_1",
            "sigmoid_lr_x2.5", "sigmoid_lr_quarter")  # fmt: skip


def _emerges(name: str, r: Results) -> list[Check]:
    return [
        r.check(f"Sink_1 at the end at least {EMERGED:g} and {GROWTH:g} times that at a tenth of the steps",
                [(name, "sink_1"), (name, "early")], lambda end, early: end >= EMERGED and end >= GROWTH * early),
    ]  # fmt: skip


def _norms_of_first_token(r: Results) -> list[Check]:
    return [
        *r.massive("base"),
        r.check("||k_1|| below that of the others after that", [("base", "key")], lambda x: x < 1),
        r.check(f"||v_1|| below {SMALL_VALUE:g} of the others after that", [("base", "value")],
                lambda x: x < SMALL_VALUE),
    ]  # fmt: skip


def _small_rates(r: Results) -> list[Check]:
    """Delay in steps; that a run never shows a sink counts as later."""
    pairs = (("lr_half", "base"), ("lr_quarter", "lr_half"))
    return [
        r.check(f"{r.label(slow)} starts later than {r.label(fast)}", [(slow, "onset"), (fast, "onset")],
                lambda a, b: a > b) for slow, fast in pairs
    ]  # fmt: skip


def _fixed(r: Results) -> list[Check]:
    checks = []
    for k in (1, 2, 3):
        checks += r.present(f"fixed_{k}", key=f"sink_{k}")
        for other in {1, 2, 3} - {k}:
            checks += r.absent(f"fixed_{k}", key=f"sink_{other}", core=False)
    return checks


def _whatever(names: tuple[str, ...], r: Results) -> list[Check]:
    """The sink exists in every variant, and is about as large."""
    varied = r.varied(*names)
    return r.present(*varied) + r.unaffected(*varied)


def _loss_of_positions(r: Results) -> list[Check]:
    others = tuple(name for name in POSITIONS if name != "relative")
    return r.worse_loss("relative", core=True) + r.comparable_loss(*others)


def _window_first(r: Results) -> list[Check]:
    names = gates.windows(r, LARGE_WINDOWS)
    window = config(names[0], r.preset).model.attention.window or 0
    return r.present(*names) + trials.relative_first_token(r, names[0], window)


def _window_small(r: Results) -> list[Check]:
    names = gates.windows(r, SMALL_WINDOWS)
    return r.absent(*names[:1]) + r.more("window_1_2", *names[-1:])


def _prefix(r: Results) -> list[Check]:
    return r.present("prefix_5", key="inside") + r.absent("prefix_5", key="beyond", core=False)


def _on(name: str, key: str, other: str, r: Results) -> list[Check]:
    """The sink is on one position, not on another."""
    larger = r.check(f"{name}: {key} above {other}", [(name, key), (name, other)], lambda a, b: a > b, core=False)
    return [*r.present(name, key=key), larger]


def _sharing(r: Results) -> list[Check]:
    wanted = [(name, "sink_1") for name in ("kv_bias_shared", "kv_bias", "k_bias_shared", "k_bias")]
    return [
        *r.more("kv_bias_shared", "kv_bias"),
        *r.more("kv_bias", "kv_bias_shared", key="sink_star"),
        r.check("sharing moves less with K biases than with KV biases", wanted, lambda a, b, c, d: c - d < a - b),
    ]


def _value_norms(r: Results) -> list[Check]:
    checks = []
    for large, small in (("k_bias_first_20", "k_bias_first_1"), ("k_bias_uniform_20", "k_bias_uniform_1")):
        checks += r.more(large, small) + r.more(small, large, key="sink_star")
    return checks


def _fine_tuning(r: Results) -> list[Check]:
    """Both train to the end with a falling loss and without spikes of the gradient, and both are alike in the two."""
    softmax, sigmoid = FINE_TUNED
    checks = r.trains(*FINE_TUNED)
    for name in FINE_TUNED:
        checks.append(r.check(f"{name}: the training loss falls", [(name, "fall")], lambda x: x > 0))
        checks.append(r.check(f"{name}: no gradient norm over {SPIKE:g} times the median", [(name, "spike")],
                              lambda x: x <= SPIKE))  # fmt: skip
    for key, what in (("fall", "the falls of the loss"), ("gradient", "the median gradient norms")):
        checks.append(r.check(f"{what} within a factor of {ALIKE:g}", [(sigmoid, key), (softmax, key)],
                              lambda a, b: b / ALIKE <= a <= b * ALIKE))  # fmt: skip
    near = r.check(f"training loss at the end within {COMPARABLE:.0%} of each other's",
                   [(sigmoid, "end_loss"), (softmax, "end_loss")],
                   lambda a, b: abs(a - b) <= COMPARABLE * b, core=False)  # fmt: skip
    return [*checks, near]


CLAIMS = (
    # Section 3 and Appendix B
    Claim("universal", "Abstract; Section 3.2, Table 8",
          "Auto-regressive language models in general put a sink on the first token.", (),
          lambda r: open_models.universal(), paper="GPT2-XL 77.00, Mistral-7B 97.49, LLaMA3-8B 99.02"),
    Claim("small_models", "Abstract; Section 3.4, Figure 4 left", "Small language models have a sink too.", ("base",),
          open_models.small_models, gates.or_measured(BASE, "natural"), "seen down to Pythia-14M"),
    Claim("first_token_norms", "Section 3.1, Figure 2 top",
          "From some block on the first token's hidden state has a far larger norm than others', its key and value a "
          "smaller one.", ("base",), _norms_of_first_token, BASE, "a figure", ("hidden", "value")),
    Claim("qk_angles", "Section 3.1, Figure 2 bottom; Figures 15-18",
          "The angle between queries and the first key makes the sink, not the product of their norms.", ("base",),
          trials.angles_not_norms, BASE, "a figure"),
    Claim("length_and_threshold", "Section 3.2, Figure 3", "Sink_1 tends to fall with T, more so for a larger eps.",
          ("base",), trials.longer_and_stricter, BASE, "a figure"),
    Claim("random_input", "Section 3.3, Table 1 left", "The sink is there on random tokens.", ("base",),
          open_models.random_input, gates.or_measured(BASE, "random"),
          "natural to random: GPT2-XL 77.00 to 70.29, Mistral-7B 97.49 to 75.21"),
    Claim("repeated_input", "Section 3.3, Table 1 left",
          "Without absolute positions, the sink is gone on one token repeated.", ("base",), open_models.repeated_input,
          gates.or_measured(BASE, "repeat"), "Mistral-7B 0.00, LLaMA2-7B 0.00, LLaMA3-8B 0.00"),
    Claim("repeated_input_learned", "Section 3.3, Table 1 left; Appendix B.1",
          "With learned positions, the sink stays on repeated tokens.", ("base", "learnable"),
          open_models.repeated_input_with_positions, gates.or_measured(gates.movable, "repeat"), "GPT2-XL 62.28"),
    Claim("domains", "Section 3.3; Appendix B.2, Figure 9", "The domain of the text hardly matters to Sink_1.", (),
          lambda r: open_models.domains(), paper="a figure; small fluctuations at eps = 0.4"),
    Claim("base_and_chat", "Section 3.4, Table 1 right; Figures 19-24", "Instruction tuning hardly changes the sink.",
          (), lambda r: open_models.base_and_chat(), paper="Mistral-7B 97.49 to 88.34, LLaMA2-7B 92.47 to 92.88"),
    Claim("larger_pythia", "Section 3.4, Figure 4 left", "In the Pythia family larger models have more of a sink.", (),
          lambda r: open_models.larger_pythia(), paper="a figure"),
    Claim("hellaswag", "Appendix B.3, Figure 10",
          "Within a family sink and HellaSwag accuracy rise with size; across families they do not go together.", (),
          lambda r: scores.sink_and_scores(), paper="a figure"),
    Claim("norms_everywhere", "Appendix B.3, Figures 11-14",
          "A large first hidden state with a small key and value is found in all open models looked at.", (),
          lambda r: open_models.norms_everywhere(), paper="figures"),
    Claim("later_blocks", "Appendix B.3, Figures 19-24", "Earlier blocks have less of a sink than later ones.",
          ("base",), lambda r: [r.check("mean alpha_1 of the first quarter of the layers below the others'",
                                        [("base", "depths")], lambda x: x < 1)], BASE, "figures", ("depths",)),
    Claim("jamba", "Appendix B.3, Figures 25-27", "Jamba, half a state-space model, has a strong sink.", (),
          lambda r: open_models.jamba(), paper="Jamba-v0.1 88.48, Jamba-1.5 Mini 87.88"),
    Claim("equal_states", "Appendix B.1, Equations 10-17",
          "Without absolute positions, repeated tokens have the same hidden state at every position.", (),
          lambda r: trials.equal_states(), paper="a proof"),
    Claim("proposition_1", "Appendix B.1, Proposition 1", "NoPE: attention over t repeated tokens is uniform, 1/t.",
          (), lambda r: trials.uniform_without_positions(), paper="a proof"),
    Claim("proposition_2", "Appendix B.1, Proposition 2", "Relative positions: no sink on repeated tokens.", (),
          lambda r: trials.relative_has_no_sink(), paper="a proof"),
    Claim("proposition_3", "Appendix B.1, Proposition 3", "ALiBi: no sink on repeated tokens.", (),
          lambda r: trials.alibi_has_no_sink(), paper="a proof"),
    Claim("proposition_4", "Appendix B.1, Proposition 4",
          "Rotary: attention on repeated tokens is bounded and goes to zero with t.", (),
          lambda r: trials.rotary_is_bounded(), paper="a proof"),
    Claim("replaced_position", "Appendix B.1, Table 7",
          "With learned positions, replacing p_1 takes most of the sink on repeated tokens away.", ("learnable",),
          lambda r: trials.edited_positions(r, "replace"), gates.movable, "62.28 to 0.20 (t = 5), 2.36 (t = 10)"),
    Claim("swapped_position", "Appendix B.1, Table 7",
          "With learned positions, swapping p_1 and p_t makes the t-th token the sink.", ("learnable",),
          lambda r: trials.edited_positions(r, "swap"), gates.movable, "Sink_1 1.44, Sink_t 57.63 (t = 5)"),
    # Section 4
    Claim("emerges", "Section 4, takeaway 1; Figure 4 middle",
          "The sink emerges in the course of training, after some steps of effective optimisation.", ("base",),
          partial(_emerges, "base"), BASE, "emerges between 1k and 2k of 20k steps; 18.18 at the end",
          ("sink_1", "onset")),
    Claim("emerges_any_token", "Section 4, Figure 4 middle",
          "It emerges with the default data, where any token can stand first.", ("default",),
          partial(_emerges, "default"), partial(gates.sink_of, "default")),
    Claim("small_rate", "Section 4, takeaway 2; Table 9", "A smaller learning rate leaves less of a sink.", RATES,
          lambda r: r.more(*RATES), BASE),
    Claim("small_rate_delays", "Section 4, Figure 4 right", "A smaller learning rate delays the sink.",
          ("base", "lr_half", "lr_quarter"), _small_rates, BASE, "a figure", ("onset",)),
    Claim("tiny_rate", "Section 4", "A far too small learning rate spoils optimisation and with it the sink.",
          ("base", "lr_x0.025"), lambda r: r.more("base", "lr_x0.025") + r.worse_loss("lr_x0.025"), BASE, "no number"),
    Claim("compensated_rate", "Appendix C.1, Table 9",
          "A smaller learning rate leaves less of a sink even with as many more steps.",
          ("lr_x2_steps_half", "base", "lr_half_steps_x2", "lr_quarter_steps_x4"),
          lambda r: r.more("lr_x2_steps_half", "base", "lr_half_steps_x2", "lr_quarter_steps_x4"), BASE),
    Claim("batch_size", "Section 4; Appendix C.1, Table 10 left", "The batch size has no effect on the sink.",
          ("base", "batch_quarter", "batch_half", "batch_x2"),
          lambda r: r.present("batch_quarter", "batch_half", "batch_x2", core=False)
          + r.unaffected("batch_quarter", "batch_half", "batch_x2", core=True), BASE),
    # Section 5
    Claim("data_amount", "Section 5, takeaway 1; Figure 5 right",
          "The sink needs enough training data; with little the model overfits and has none.",
          ("data_share_1", "data_share_0.02", "data_share_0.01"),
          lambda r: r.absent("data_share_0.02", "data_share_0.01") + r.present("data_share_1", core=False)
          + r.more("data_share_0.01", "data_share_1", key="gap", core=False), BASE,
          "18.18 with 5B tokens, below 1 with 100M and 50M"),
    Claim("small_data_never", "Appendix C.2, Figure 28", "With little data no sink is there at any step.",
          ("data_share_0.02", "data_share_0.01"),
          lambda r: r.absent("data_share_0.02", "data_share_0.01", key="peak"), BASE, "below 1", ("peak",)),
    Claim("random_first", "Section 5", "Redrawing x_1 at random leaves a sink on it, a larger one even.",
          ("random_1", "default"), lambda r: r.present("random_1") + r.more("random_1", "default"),
          gates.any_sink("random_1", "default")),
    Claim("random_first_two", "Section 5", "Redrawing x_1 and x_2 moves the sink to x_2.", ("random_1_2", "default"),
          partial(_on, "random_1_2", "sink_2", "sink_1"), gates.any_sink("random_1_2", "default"),
          keys=("sink_1", "sink_2")),
    Claim("random_second", "Section 5", "Redrawing only x_2 leaves the sink on x_1.", ("random_2", "default"),
          partial(_on, "random_2", "sink_1", "sink_2"), gates.any_sink("random_2", "default"),
          keys=("sink_1", "sink_2")),
    Claim("more_random", "Section 5", "With more random tokens the sink tends to disappear.",
          ("random_1", "random_1_2", "random_1_to_5", "random_1_to_10"),
          lambda r: r.more("random_1", "random_1_2", "random_1_to_5", key="largest_sink")
          + r.absent("random_1_to_10", key="largest_sink"), gates.any_sink("random_1", "random_1_2"),
          "27.03 on x_1, 14.08 on x_2 with two; no number for more", ("largest_sink",)),
    Claim("fixed_token", "Section 5, takeaway 2; Table 10 right",
          "Data can move the sink: a fixed token attracts it, on whatever position it stands.",
          ("fixed_1", "fixed_2", "fixed_3"), _fixed, gates.any_sink("fixed_1", "fixed_2", "fixed_3"),
          keys=("sink_1", "sink_2", "sink_3")),
    # Section 6
    Claim("weight_decay", "Section 6, takeaway 1; Table 2", "Weight decay encourages the sink.",
          ("weight_decay_0.5", "base", "weight_decay_0"),
          lambda r: r.more("weight_decay_0.5", "base") + r.more("weight_decay_0.5", "weight_decay_0"), BASE),
    Claim("no_weight_decay", "Section 6, Table 2", "The sink emerges without weight decay too.", ("weight_decay_0",),
          lambda r: r.present("weight_decay_0"), BASE),
    Claim("much_weight_decay", "Section 6, Table 2", "Too much weight decay harms the model and its sink disappears.",
          ("weight_decay_0.5", "weight_decay_2", "weight_decay_5"),
          lambda r: r.absent("weight_decay_5") + r.more("weight_decay_0.5", "weight_decay_2")
          + r.worse_loss("weight_decay_5"), BASE, keys=("sink_1", "valid_loss")),
    Claim("prefix", "Section 6, takeaway 2; Figure 5 middle",
          "With a prefix of p tokens, the sink is on one of them rather than on the first only.", ("prefix_5",),
          _prefix, gates.movable, "a figure", ("inside", "beyond")),
    Claim("window_absolute", "Section 6, takeaway 3; Figure 6 middle",
          "With window attention, the sink is on the first token of all, not on the first of each window.",
          ("window_none", *LARGE_WINDOWS), _window_first, gates.any_window(LARGE_WINDOWS), "a figure"),
    Claim("window_small", "Section 6, takeaway 3; Figure 6 right", "Small windows prevent the sink.",
          ("window_none", "window_1_2", *SMALL_WINDOWS), _window_small, gates.any_window(SMALL_WINDOWS), "a figure"),
    # Section 7.1 and 7.2, and Appendix C.3 and C.4 on the same takeaway
    Claim("positions", "Section 7, takeaway 1; Table 3", "The sink emerges whatever the position embedding.",
          ("base", *POSITIONS), partial(_whatever, POSITIONS), BASE),
    Claim("relative_loss", "Section 7.1, Table 3",
          "Of the position embeddings, only relative ones as in Equation 6 are hard to train.", ("base", *POSITIONS),
          _loss_of_positions, keys=("valid_loss",)),
    Claim("ffn", "Section 7, takeaway 1; Appendix C.3, Table 11", "The sink emerges whatever the FFN's activation.",
          ("base", *FFNS), partial(_whatever, FFNS), BASE),
    Claim("post_norm", "Section 7, takeaway 1; Section 7.2", "The sink emerges with post-norm blocks too.",
          ("base", "post_norm"), lambda r: r.present("post_norm") + r.unaffected("post_norm"), BASE),
    Claim("post_norm_activations", "Section 7.2, Figure 7 left",
          "In post-norm blocks massive activations are found before the last LN, not in the hidden states.",
          ("base", "post_norm"),
          lambda r: r.massive("post_norm", key="before_norm") + r.not_massive("post_norm"), gates.massive, "a figure",
          ("hidden", "before_norm")),
    Claim("heads", "Section 7, takeaway 1; Appendix C.4, Table 12 left",
          "The sink emerges whatever the number of heads, concatenated or added.", ("base", *HEADS),
          partial(_whatever, HEADS), BASE),
    # Section 7.3: biases
    Claim("sink_token", "Section 7.3, Table 4", "A learnable sink token takes the sink from the first token.",
          ("base", "sink_token"),
          lambda r: r.present("sink_token", key="sink_star") + r.absent("sink_token")
          + r.comparable_loss("sink_token"), BASE, keys=("sink_star", "sink_1", "valid_loss")),
    Claim("key_biases", "Section 7, takeaway 2; Table 4",
          "The sink acts as a key bias: given KV or K biases, it is on them and gone from the first token.",
          ("base", "kv_bias", "k_bias"),
          lambda r: r.present("kv_bias", "k_bias", key="sink_star") + r.absent("kv_bias", "k_bias")
          + r.comparable_loss("kv_bias", "k_bias"), BASE, keys=("sink_star", "sink_1", "valid_loss")),
    Claim("no_value_needed", "Section 7.3, Table 4",
          "A bias without a value (v* = 0) serves: what it stores need not reach the output.",
          ("base", "k_bias"),
          lambda r: r.present("k_bias", key="sink_star") + r.comparable_loss("k_bias", core=True),
          keys=("sink_star", "valid_loss")),
    Claim("value_biases", "Section 7.3, Table 4", "Value biases leave the sink where it is.", ("base", "v_bias"),
          lambda r: r.present("v_bias") + r.unaffected("v_bias"), BASE),
    Claim("bias_activations", "Section 7.3, Figure 7 middle", "With KV or K biases massive activations are gone.",
          ("base", "kv_bias", "k_bias"), lambda r: r.not_massive("kv_bias", "k_bias"), gates.massive, "a figure",
          ("hidden",)),
    Claim("value_bias_activations", "Section 7.3, Figure 7 middle", "With V biases massive activations stay.",
          ("base", "v_bias"), lambda r: r.massive("v_bias"), gates.massive, "a figure", ("hidden",)),
    Claim("sink_token_activations", "Section 7.3, Figure 7 middle", "A sink token has massive activations itself.",
          ("base", "sink_token"), trials.massive_sink_token, gates.massive, "a figure", ()),
    Claim("value_norm", "Section 7.3, Table 5",
          "The larger the norm of a fixed v*, the more of the sink goes back to the first token.",
          ("k_bias_first_1", "k_bias_first_20", "k_bias_uniform_1", "k_bias_uniform_20"), _value_norms, BASE,
          keys=("sink_1", "sink_star")),
    Claim("value_norm_activations", "Section 7.3, Figure 7 right", "Massive activations come back with that norm.",
          ("base", "k_bias", "k_bias_first_20", "k_bias_uniform_20"),
          lambda r: r.more("k_bias_first_20", "k_bias", key="hidden")
          + r.more("k_bias_uniform_20", "k_bias", key="hidden"), gates.massive, "a figure", ("hidden",)),
    Claim("shared_biases", "Section 7.3; Appendix C.4, Table 12 right",
          "Shared by the heads, KV biases lose part of the sink to the first token, K biases less.",
          ("kv_bias", "kv_bias_shared", "k_bias", "k_bias_shared"), _sharing, BASE, keys=("sink_star", "sink_1")),
    Claim("bias_dims", "Appendix C.4, Table 13",
          "One learnable dimension of k* suffices for a sink on it, and more of them strengthen it.",
          ("k_bias_dims_1", "k_bias_dims_64"),
          lambda r: r.present("k_bias_dims_1", key="sink_star")
          + r.more("k_bias_dims_64", "k_bias_dims_1", key="sink_star")
          + r.more("k_bias_dims_1", "k_bias_dims_64", core=False), keys=("sink_star", "sink_1")),
    # Section 7.4: attention operations
    Claim("no_normalisation", "Abstract; Section 7, takeaway 3; Table 6",
          "Without normalisation (sigmoid, elu plus one) no sink emerges, at a comparable loss.",
          ("base", "sigmoid", "elu"),
          lambda r: r.absent("sigmoid", "elu") + r.comparable_loss("sigmoid", "elu"), BASE,
          keys=("sink_1", "valid_loss")),
    Claim("normalised_sigmoid", "Section 7.4, Table 6", "With normalisation the sink emerges with sigmoid as well.",
          ("sigmoid_normalised",), lambda r: r.present("sigmoid_normalised"), BASE),
    Claim("mlp_kernel", "Section 7.4, Table 6", "An MLP kernel gives no sink, normalised or not.",
          ("mlp", "mlp_normalised"), lambda r: r.absent("mlp", "mlp_normalised"), BASE),
    Claim("inner_dependence", "Section 7.4, Table 15",
          "There is a sink where weights are non-negative and sum to one, and none where either is given up.",
          DEPENDENT + INDEPENDENT, lambda r: r.present(*DEPENDENT[1:]) + r.absent(*INDEPENDENT), BASE),
    Claim("dependent_activations", "Section 7.4, Figure 8 left",
          "Massive activations are there where weights are non-negative and sum to one.", DEPENDENT,
          lambda r: r.massive(*DEPENDENT[1:]), gates.massive, "a figure", ("hidden",)),
    Claim("independent_activations", "Section 7.4, Figure 8 middle",
          "Massive activations are absent where weights are independent.", ("base", *INDEPENDENT),
          lambda r: r.not_massive(*INDEPENDENT), gates.massive, "a figure", ("hidden",)),
    Claim("failures", "Appendix C.4, Table 15",
          "elu plus one normalised, its kernel without and the identity with normalisation fail to train.",
          ("elu_normalised", "elu_kernel", "linear_normalised"),
          lambda r: r.fails("elu_normalised", "elu_kernel", "linear_normalised"), paper="3 training failures"),
    Claim("exp_explodes", "Section 7.4", "exp without normalisation tends to explode.", ("exp_unnormalised",),
          lambda r: r.fails("exp_unnormalised"), paper="no number"),
    Claim("one_billion", "Abstract; Section 7.4, Figure 8 right",
          "At 1B parameters, sigmoid without normalisation has next to no sink, at a comparable loss.",
          ("softmax_1b", "sigmoid_1b"),
          lambda r: [r.check("sigmoid_1b: less than a tenth of softmax_1b's Sink_1",
                             [("sigmoid_1b", "sink_1"), ("softmax_1b", "sink_1")], lambda a, b: a < b / 10)],
          keys=("sink_1", "valid_loss")),
    # Appendix C.4 and D
    Claim("scale", "Section 7.4; Appendix C.4, Table 14 left",
          "Scaling normalised weights by alpha < 1 weakens the sink but does not stop it.",
          ("base", "scale_0.2", "scale_0.1", "scale_0.05"),
          lambda r: r.present("scale_0.2", "scale_0.1", "scale_0.05")
          + [check for name in ("scale_0.2", "scale_0.1", "scale_0.05") for check in r.more("base", name)], BASE),
    Claim("scale_is_rescaling", "Appendix C.4, Equations 30-42",
          "Scaling by alpha equals rescaling learning rate, initialisation, eps and weight decay of W_O.", (),
          lambda r: trials.scaling_is_rescaling(), paper="a derivation"),
    Claim("sigmoid_settings", "Appendix C.4, Table 14 right",
          "Sigmoid without normalisation has no sink at other learning rates and weight decays.", SIGMOIDS,
          lambda r: r.absent(*SIGMOIDS), BASE),
    Claim("p_softmax_diverges", "Appendix C.4", "p-normalised softmax diverges for p = 2, 3, 4.",
          ("softmax_p2", "softmax_p3", "softmax_p4"), lambda r: r.fails("softmax_p2", "softmax_p3", "softmax_p4"),
          paper="3 training failures"),
    Claim("p_softmax", "Appendix C.4, Figure 29 left",
          "p-normalised softmax trains for p < 1, with massive activations weaker than softmax's, stronger than "
          "un-normalised sigmoid's.", ("base", "softmax_p1_2", "softmax_p1_3", "softmax_p1_4", "sigmoid"),
          lambda r: r.trains("softmax_p1_2", "softmax_p1_3", "softmax_p1_4")
          + r.more("base", "softmax_p1_4", "sigmoid", key="hidden"), gates.massive, "a figure", ("hidden",)),
    Claim("p_sigmoid", "Appendix C.4, Figure 29 right",
          "p-normalised sigmoid trains for p > 1 and keeps strong massive activations.",
          ("base", "sigmoid_p2", "sigmoid_p3", "sigmoid_p4"),
          lambda r: r.massive("sigmoid_p2", "sigmoid_p3", "sigmoid_p4"), gates.massive, "a figure", ("hidden",)),
    Claim("fine_tuning", "Appendix D, Figure 30",
          "Fine-tuned, softmax and un-normalised sigmoid models behave alike, both stably.", FINE_TUNED, _fine_tuning,
          BASE, "a figure", ("end_loss", "gradient")),
)  # fmt: skip
