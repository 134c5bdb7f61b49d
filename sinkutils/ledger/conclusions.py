"""Every conclusion of the paper as data: its source, its words, its checks.

`rules` says when a check holds, `frozen` since when all this stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from sinkutils.ledger.rules import Check


@dataclass(frozen=True)
class Claim:
    """One conclusion of the paper, in our words."""

    id: str
    source: str  # where the paper states it
    text: str
    checks: tuple[Check, ...] = ()  # none: judged without records, by proofs.PROOFS or open_models.JUDGES
    paper: str = ""  # the paper's figures; empty: those of the runs that the checks name
    gate: str = "trained"  # of rules.GATES: the presets whose records cannot show it
    given: tuple[Check, ...] = ()  # its premises: without them there is nothing to test, with them nothing is shown


def each(kind: str, *names: str, key: str = "excess_1") -> tuple[Check, ...]:
    """Each judged on its own."""
    return tuple(Check(kind, (name,), key) for name in names)


present = partial(each, "present")
absent = partial(each, "absent")


def falling(*names: str, key: str = "excess_1") -> tuple[Check, ...]:
    """Each has more than the next."""
    return tuple(Check("more", pair, key) for pair in pairwise(names))


def beside(kind: str, *names: str, other: str = "base", key: str = "excess_1") -> tuple[Check, ...]:
    """Each compared with one other run."""
    return tuple(Check(kind, (name, other), key) for name in names)


def over(name: str, *others: str, key: str = "excess_1") -> tuple[Check, ...]:
    """One run has more than each of the others."""
    return tuple(Check("more", (name, other), key) for other in others)


loss = partial(beside, key="valid_loss")

POSITIONS = ("nope", "absolute", "learnable", "relative", "alibi")
FFNS = ("ffn_relu", "ffn_gelu", "ffn_swish", "ffn_reglu", "ffn_geglu")
HEADS = ("heads_8", "heads_4", "heads_2", "heads_1", "heads_add")
BATCHES = ("batch_quarter", "batch_half", "batch_x2")
DECAYS = ("weight_decay_0", "weight_decay_0.001", "weight_decay_0.01")
SHARES = tuple(f"data_share_{share}" for share in ("0.01", "0.02", "0.04", "0.1", "0.5", "1"))
NO_NORMALISER = ("sigmoid", "elu", "linear", "mlp_normalised", "mlp")  # Table 15: negative weights, or no sum of one
SIGMOID_SETTINGS = ("weight_decay_0", "weight_decay_0.5", "weight_decay_1", "lr_x2.5", "lr_quarter")
SIGMOIDS = ("sigmoid", *(f"sigmoid_{setting}" for setting in SIGMOID_SETTINGS))
SUMS = ("sigmoid_normalised", "elu_kernel_normalised")  # not negative, sum to one
BEYOND = ("elu_kernel", "linear_normalised", "exp_unnormalised")  # relaxed too; the paper could not train them
SCALES = ("scale_0.2", "scale_0.1", "scale_0.05")
DIMS = tuple(f"k_bias_dims_{d}" for d in (64, 32, 16, 8, 4, 2, 1))
WINDOWS = tuple(f"window_1_{share}" for share in (2, 4, 8, 16, 32, 64))
ROOTS = ("softmax_p1_2", "softmax_p1_3", "softmax_p1_4")
POWERS = ("softmax_p2", "softmax_p3", "softmax_p4")
SIGMOID_POWERS = ("sigmoid_p2", "sigmoid_p3", "sigmoid_p4")

CLAIMS = (
    # Section 3 and Appendix B: models that others trained, and propositions
    Claim("universal", "Abstract; Sections 1, 3.3 and 3.4; Table 1",
          "Auto-regressive language models in general put a sink on the first token.",
          paper="GPT2-XL 77.00, Mistral-7B 97.49, LLaMA3-8B 99.02"),
    Claim("small_models", "Abstract; Section 3.4, Figure 4 left", "Small language models have a sink too.",
          paper="seen down to Pythia-14M"),
    Claim("first_token_norms", "Section 3.1, Figure 2 top",
          "From some block on the first token's hidden state has a far larger norm than others', its key and value a "
          "smaller one.", present("base", key="hidden") + absent("base", key="key") + absent("base", key="value"),
          "a figure"),
    Claim("norms_everywhere", "Appendix B.3, Figures 11-14",
          "A large first hidden state with a small key and value is found in all open models looked at.",
          paper="figures"),
    Claim("qk_angles", "Section 3.1, Figure 2 bottom; Figures 15-18",
          "The angle between queries and the first key makes the sink, not the product of their norms.",
          paper="a figure"),
    Claim("length_and_threshold", "Section 3.2, Figure 3", "Sink_1 tends to fall with T, more so for a larger eps.",
          paper="a figure"),
    Claim("random_input", "Section 3.3, Table 1 left", "The sink is there on random tokens.",
          paper="natural to random: GPT2-XL 77.00 to 70.29, Mistral-7B 97.49 to 75.21"),
    Claim("repeated_input", "Section 3.3, Table 1 left",
          "Without absolute positions, the sink is gone on one token repeated.",
          paper="Mistral-7B 0.00, LLaMA2-7B 0.00, LLaMA3-8B 0.00"),
    Claim("repeated_massive", "Section 3.3; Appendix B.1",
          "Without absolute positions, all of the repeated tokens have massive activations.", paper="said in the text"),
    Claim("repeated_input_learned", "Section 3.3, Table 1 left; Appendix B.1",
          "With learned positions, the sink stays on repeated tokens.", present("learnable_default", key="repeat"),
          "GPT2-XL 62.28", "any token"),
    Claim("domains", "Section 3.3; Appendix B.2, Figure 9", "The domain of the text hardly matters to Sink_1.",
          paper="a figure; small fluctuations at eps = 0.4"),
    Claim("base_and_chat", "Section 3.4, Table 1 right; Figures 19-24", "Instruction tuning hardly changes the sink.",
          paper="Mistral-7B 97.49 to 88.34, LLaMA2-7B 92.47 to 92.88"),
    Claim("larger_pythia", "Section 3.4, Figure 4 left", "In the Pythia family larger models have more of a sink.",
          paper="a figure"),
    Claim("hellaswag", "Appendix B.3, Figure 10",
          "Within a family sink and HellaSwag accuracy rise with size; across families they do not go together.",
          paper="a figure"),
    Claim("later_blocks", "Appendix B.3, Figures 19-24", "Earlier blocks have less of a sink than later ones.",
          paper="figures"),
    Claim("jamba", "Appendix B.3, Figures 25-27", "Jamba, mostly a state-space model, has a strong sink.",
          paper="Jamba-v0.1 88.48, Jamba-1.5 Mini 87.88"),
    Claim("jamba_third", "Appendix B.3, Figure 27",
          "Of Jamba's four attention layers only the third has heads without a sink.", paper="a figure"),
    Claim("equal_states", "Appendix B.1, Equations 10-17",
          "Without absolute positions, repeated tokens have the same hidden state at every position.", paper="a proof"),
    Claim("proposition_1", "Appendix B.1, Proposition 1", "NoPE: attention over t repeated tokens is uniform, 1/t.",
          paper="a proof"),
    Claim("proposition_2", "Appendix B.1, Proposition 2", "Relative positions: no sink on repeated tokens.",
          paper="a proof"),
    Claim("proposition_3", "Appendix B.1, Proposition 3", "ALiBi: no sink on repeated tokens.", paper="a proof"),
    Claim("proposition_4", "Appendix B.1, Proposition 4",
          "Rotary: attention on repeated tokens is bounded and goes to zero with t.", paper="a proof"),
    Claim("replaced_position", "Appendix B.1, Table 7",
          "With learned positions, replacing p_1 takes most of the sink on repeated tokens away.",
          absent("learnable_default", key="replaced"), "62.28 to 0.20 (t = 5), 10.21 (last column)", "any token"),
    Claim("swapped_position", "Appendix B.1, Table 7",
          "With learned positions, swapping p_1 and p_t makes the t-th token the sink.",
          present("learnable_default", key="swapped"), "Sink_1 1.44, Sink_t 57.63 (t = 5) to 9.73, 50.22 (last column)",
          "any token"),
    # Section 4
    Claim("emerges", "Section 4, takeaway 1; Figure 4 middle",
          "The sink emerges in the course of training, after some steps of effective optimisation.",
          present("base", key="learned_1") + present("base", key="late_1"),
          "emerges between 1k and 2k of 20k steps; 18.18 at the end (fixed first token: 74.11)"),
    Claim("emerges_any_token", "Section 4, Figure 4 middle",
          "It emerges with the default data, where any token can stand first.",
          present("default", key="learned_1") + present("default", key="late_1"), gate="any token"),
    Claim("small_rate", "Section 4, takeaway 2; Table 9", "A smaller learning rate leaves less of a sink.",
          falling("lr_x2", "base", "lr_half", "lr_quarter")),
    Claim("small_rate_delays", "Section 4, Figure 4 right", "A smaller learning rate delays the sink.",
          falling("lr_quarter", "lr_half", "base", "lr_x2", key="onset"), "a figure"),
    Claim("tiny_rate", "Section 4; Figure 4 right",
          "A far too small learning rate spoils optimisation and with it the sink.",
          absent("lr_x0.025") + loss("worse", "lr_x0.025"), "no number"),
    Claim("compensated_rate", "Appendix C.1, Table 9",
          "A smaller learning rate leaves less of a sink even with as many more steps.",
          falling("lr_x2_steps_half", "base", "lr_half_steps_x2", "lr_quarter_steps_x4")),
    Claim("batch_size", "Section 4; Appendix C.1, Table 10 left", "The batch size has no effect on the sink.",
          present(*BATCHES) + beside("same", *BATCHES)),
    # Section 5
    Claim("data_amount", "Section 5, takeaway 1; Figure 5 right",
          "The sink needs enough training data and disappears with less.",
          present("data_share_1") + absent("data_share_0.02", "data_share_0.01")
          + beside("more", "data_share_1", other="data_share_0.1"), "18.18 with 5B tokens, below 1 with 100M and 50M"),
    Claim("overfitting", "Section 5; Figure 5 right", "With less data the model overfits.",
          falling(*SHARES, key="gap"), "a figure"),
    Claim("early_overfitting", "Appendix C.2, Figure 28",
          "With 50M and 100M tokens the validation loss turns at a very early stage.",
          over("data_share_1", "data_share_0.02", "data_share_0.01", key="turn"), "between 1k and 2k of 20k steps"),
    Claim("small_data_never", "Appendix C.2, Figure 28", "With little data no sink is there at any step.",
          absent("data_share_0.02", "data_share_0.01", key="peak_1"), "below 1"),
    Claim("random_first", "Section 5", "Redrawing x_1 at random leaves a sink on it, a larger one even.",
          present("random_1") + falling("random_1", "default"), gate="any token"),
    Claim("random_first_two", "Section 5", "Redrawing x_1 and x_2 moves the sink to x_2.",
          present("random_1_2", key="excess_2") + present("random_1_2", key="second_over_first"), gate="any token"),
    Claim("random_second", "Section 5", "Redrawing only x_2 leaves the sink on x_1.",
          present("random_2") + absent("random_2", key="second_over_first"), gate="any token"),
    Claim("more_random", "Section 5", "With more random tokens the sink tends to disappear.",
          falling("random_1", "random_1_2", "random_1_to_5", key="largest") + absent("random_1_to_10", key="largest"),
          "27.03 on x_1, 14.08 on x_2 with two; no number for more", "any token"),
    Claim("fixed_token", "Section 5, takeaway 2; Table 10 right",
          "Data can move the sink: a fixed token attracts it, on whatever position it stands.",
          present("fixed_1") + absent("fixed_1", key="excess_2") + absent("fixed_1", key="excess_3")
          + absent("fixed_2") + present("fixed_2", key="excess_2") + absent("fixed_2", key="excess_3")
          + absent("fixed_3") + absent("fixed_3", key="excess_2") + present("fixed_3", key="excess_3")),
    # Section 6
    Claim("weight_decay", "Section 6, takeaway 1; Table 2", "Weight decay encourages the sink.",
          beside("more", "weight_decay_0.5", "weight_decay_1") + over("base", *DECAYS)),
    Claim("no_weight_decay", "Section 6, Table 2", "The sink emerges without weight decay too.",
          present(*DECAYS, key="learned_1")),
    Claim("much_weight_decay", "Section 6, Table 2", "Too much weight decay harms the model and its sink disappears.",
          falling("weight_decay_0.5", "weight_decay_1", "weight_decay_2", "weight_decay_5")
          + absent("weight_decay_5") + loss("worse", "weight_decay_2", "weight_decay_5")),
    Claim("prefix", "Section 6, takeaway 2; Figure 5 middle",
          "With a prefix of p tokens, the sink is on one of them rather than on the first only.",
          present("prefix_5_default", key="inside") + absent("prefix_5_default", key="beyond"), "a figure",
          "any token"),
    Claim("prefix_activations", "Section 6", "The prefix's sink token has massive activations.",
          present("prefix_5_default", key="hidden_prefix"), "said in the text", "any token"),
    Claim("window_absolute", "Section 6, takeaway 3; Figure 6 middle",
          "With window attention, the sink is on the first token of all.",
          present("window_1_2", "window_1_4", "window_1_8", key="visible_1"), "a figure"),
    Claim("window_relative", "Section 6, takeaway 3; Figure 6 middle",
          "With window attention, the first token of each window has no sink.",
          absent("window_1_4", key="window_first"), "a figure"),
    Claim("window_small", "Section 6, takeaway 3; Figure 6 right", "Small windows prevent the sink.",
          absent(*WINDOWS[3:], key="visible_1") + over("window_none", *WINDOWS[2:], key="visible_1"), "a figure",
          given=present("window_none", key="visible_1")),
    # Section 7.1 and 7.2, and Appendix C.3 and C.4 on the same takeaway
    Claim("positions", "Section 7, takeaway 1; Table 3", "The sink emerges whatever the position embedding.",
          present(*POSITIONS, key="learned_1") + beside("kept", *POSITIONS)),
    Claim("relative_loss", "Section 7.1, Table 3",
          "Of the position embeddings, only relative ones (T5's bucket numbers) are hard to train.",
          loss("worse", "relative") + loss("comparable", "nope", "absolute", "learnable", "alibi")),
    Claim("ffn", "Section 7, takeaway 1; Appendix C.3, Table 11", "The sink emerges whatever the FFN's activation.",
          present(*FFNS, key="learned_1") + beside("kept", *FFNS)),
    Claim("post_norm", "Section 7, takeaway 1; Section 7.2", "The sink emerges with post-norm blocks too.",
          present("post_norm", key="learned_1") + beside("kept", "post_norm")),
    Claim("post_norm_activations", "Section 7.2, Figure 7 left",
          "In post-norm blocks massive activations are found before the last LN, not in the hidden states.",
          present("post_norm", key="before_norm") + absent("post_norm", key="hidden"), "a figure"),
    Claim("heads", "Section 7, takeaway 1; Appendix C.4, Table 12 left",
          "The sink emerges whatever the number of heads, concatenated or added.",
          present(*HEADS, key="learned_1") + beside("kept", *HEADS)),
    # Section 7.3: biases
    Claim("sink_token", "Section 7.3, Table 4", "A learnable sink token takes the sink, and x_1 has none.",
          present("sink_token_default", key="learned_star") + absent("sink_token_default")
          + loss("comparable", "sink_token_default", other="default")),
    Claim("key_biases", "Section 7, takeaway 2; Table 4",
          "The sink acts as a key bias: given KV or K biases, it is on them and gone from the first token.",
          present("kv_bias", "k_bias", key="learned_star") + absent("kv_bias", "k_bias")
          + loss("comparable", "kv_bias", "k_bias")),
    Claim("no_value_needed", "Section 7.3, Table 4",
          "A bias without a value (v* = 0) serves as well: what it stores need not reach the output.",
          present("k_bias", key="learned_star") + loss("comparable", "k_bias", other="kv_bias")),
    Claim("value_biases", "Section 7.3, Table 4", "Value biases leave the sink where it is.",
          present("v_bias", key="learned_1") + beside("same", "v_bias") + loss("comparable", "v_bias")),
    Claim("biases_removed", "Section 7.3",
          "Without their trained K biases the models have no sink on x_1 and a larger loss.",
          absent("k_bias", key="without_bias") + present("k_bias", key="loss_without_bias"),
          "no number, said of the sink token, KV and V biases"),
    Claim("bias_activations", "Section 7.3, Figure 7 middle", "With KV or K biases massive activations are gone.",
          absent("kv_bias", "k_bias", key="hidden"), "a figure", given=present("base", key="hidden")),
    Claim("value_bias_activations", "Section 7.3, Figure 7 middle", "With V biases massive activations stay.",
          present("v_bias", key="hidden"), "a figure", given=present("base", key="hidden")),
    Claim("sink_token_activations", "Section 7.3, Figure 7 middle", "A sink token has massive activations itself.",
          present("sink_token_default", key="star_hidden"), "a figure"),
    Claim("value_norm", "Section 7.3, Table 5",
          "The larger the norm of a fixed v*, the more of the sink goes back to the first token.",
          falling("k_bias_first_20", "k_bias_first_5", "k_bias_first_1")
          + falling("k_bias_uniform_20", "k_bias_uniform_5", "k_bias_uniform_1")
          + falling("k_bias_first_1", "k_bias_first_20", key="excess_star")
          + falling("k_bias_uniform_1", "k_bias_uniform_20", key="excess_star")),
    Claim("value_norm_activations", "Section 7.3, Figure 7 right", "Massive activations come back with that norm.",
          falling("k_bias_first_20", "k_bias", key="hidden") + falling("k_bias_uniform_20", "k_bias", key="hidden"),
          "a figure"),
    Claim("shared_biases", "Section 7.3; Appendix C.4, Table 12 right",
          "Shared by the heads, KV biases lose part of the sink to the first token.",
          falling("kv_bias_shared", "kv_bias") + falling("kv_bias", "kv_bias_shared", key="excess_star")),
    Claim("shared_key_biases", "Section 7.3; Appendix C.4, Table 12 right",
          "Shared by the heads, K biases keep the sink, and better than KV biases do.",
          present("k_bias_shared", key="learned_star") + absent("k_bias_shared")
          + falling("kv_bias_shared", "k_bias_shared")),
    Claim("bias_dims", "Appendix C.4, Table 13",
          "One learnable dimension of k* suffices for a sink on it, and more of them strengthen it.",
          present(*DIMS, key="learned_star") + falling(*DIMS, key="excess_star")
          + falling("k_bias_dims_1", "k_bias_dims_64")),
    # Section 7.4: attention operations
    Claim("no_normalisation", "Abstract; Section 7, takeaway 3; Table 6",
          "Without normalisation (sigmoid, elu plus one) no sink emerges, at a comparable loss.",
          absent("sigmoid", "elu") + loss("comparable", "sigmoid", "elu")),
    Claim("normalised_sigmoid", "Section 7.4, Table 6", "With normalisation the sink emerges with sigmoid as well.",
          present("sigmoid_normalised", key="learned_1") + falling("sigmoid_normalised", "sigmoid")),
    Claim("mlp_kernel", "Section 7.4, Table 6", "An MLP kernel gives no sink, normalised or not.",
          absent("mlp", "mlp_normalised")),
    Claim("inner_dependence", "Section 7.4, takeaway 3; Table 15",
          "There is a sink where weights are non-negative and sum to one, and none where either is given up.",
          present(*SUMS, key="learned_1") + absent(*NO_NORMALISER)),
    Claim("inner_dependence_beyond", "Section 7.4, takeaway 3; Table 15; Appendix C.4",
          "The same holds for operations that the paper could not train.",
          present("elu_normalised", key="learned_1") + absent(*BEYOND, *POWERS), "no number"),
    Claim("dependent_activations", "Section 7.4, Figure 8 left",
          "Massive activations are there where weights are non-negative and sum to one.",
          present("base", *SUMS, key="hidden"), "a figure"),
    Claim("independent_activations", "Section 7.4, Figure 8 middle",
          "Massive activations are absent where weights are independent.", absent(*NO_NORMALISER, key="hidden"),
          "a figure"),
    Claim("failures", "Appendix C.4, Table 15",
          "elu plus one normalised, its kernel without and the identity with normalisation fail to train.",
          each("fails", "elu_normalised", "elu_kernel", "linear_normalised"), "3 training failures"),
    Claim("one_billion", "Abstract; Section 7.4, Figure 8 right",
          "At 1B parameters, sigmoid without normalisation has next to no sink, at a comparable loss.",
          present("softmax_1b") + absent("sigmoid_1b") + loss("comparable", "sigmoid_1b", other="softmax_1b")
          + absent("sigmoid_1b", key="hidden"), gate=""),
    # Appendix C.4 and D
    Claim("scale", "Section 7.4; Appendix C.4, Table 14 left",
          "Scaling normalised weights by alpha < 1 weakens the sink and does not stop it; alpha > 1 strengthens it.",
          present(*SCALES, key="learned_1") + over("base", *SCALES) + falling("scale_2", "base")),
    Claim("scale_is_rescaling", "Appendix C.4, Equations 30-42",
          "Scaling by alpha equals rescaling learning rate, initialisation, eps and weight decay of W_O.",
          paper="a derivation"),
    Claim("sigmoid_settings", "Appendix C.4, Table 14 right",
          "Sigmoid without normalisation has no sink at other learning rates and weight decays.", absent(*SIGMOIDS)),
    Claim("p_softmax_diverges", "Appendix C.4", "p-normalised softmax diverges for p = 2, 3, 4.",
          each("fails", *POWERS), "3 training failures"),
    Claim("p_softmax", "Appendix C.4, Figure 29 left",
          "p-normalised softmax trains for p < 1, with massive activations weaker than softmax's and stronger than "
          "un-normalised sigmoid's.",
          each("trains", *ROOTS) + over("base", *ROOTS, key="hidden")
          + beside("more", *ROOTS, other="sigmoid", key="hidden"), "a figure"),
    Claim("p_sigmoid", "Appendix C.4, Figure 29 right",
          "p-normalised sigmoid trains for p > 1 and keeps strong massive activations.",
          each("trains", *SIGMOID_POWERS) + present(*SIGMOID_POWERS, key="hidden"), "a figure"),
    Claim("normalisers", "Appendix C.4, Figure 29", "Other normalisers change the sink's size but do not stop it.",
          present(*ROOTS, *SIGMOID_POWERS), "a figure of norm ratios"),
    Claim("fine_tuning", "Appendix D, Figure 30",
          "Fine-tuned, softmax and un-normalised sigmoid models behave alike, both stably.",
          each("trains", "sft_softmax", "sft_sigmoid") + present("sft_softmax", "sft_sigmoid", key="fall")
          + absent("sft_softmax", "sft_sigmoid", key="spike")
          + beside("alike", "sft_sigmoid", other="sft_softmax", key="gradient")
          + beside("alike", "sft_sigmoid", other="sft_softmax", key="end"), "a figure"),
)  # fmt: skip
