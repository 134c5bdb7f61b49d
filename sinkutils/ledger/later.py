"""Claims of later papers as data, beside the paper's own: on variants that grid section 8 trains on the same base.

What each source says was read where data/paper/after_paper.csv says so. The claims were written down when no record of
section 8 existed, by the same rules; records that an earlier ledger was made under do not count (`frozen.ledgers`).
Two (on gates and massive activations, on norms that keep sinks) were added later, from texts read then and before any
record of their variants. The checks of all are corrected for their number among themselves, apart from the paper's own.

Massive activations are here an element of the hidden state that is large beside the median one ("peak"), which even
the models of a laptop have; the norms of the paper's figures (key "hidden") barely show it at that size. That was seen
on the base's weights at seed 0 before the claims were written; no variant had been trained. A gate or an optimiser that
a source tried at a billion parameters may do something else at ours: a verdict is about ours.
"""

from __future__ import annotations

from sinkutils.ledger.conclusions import Claim, absent, beside, each, falling, loss, over, present

GATES = ("gate_head", "gate_element")
# Runs in which sinks and massive activations could come apart.
APART = ("post_norm", "sandwich_norm", "v_scale", "dyt", "gated_norm", "gate_head", "softpick", "sink_logit", "sgd")

LATER = (
    # What takes the sink away
    Claim("gates_weaken", "arXiv 2505.06708, abstract", "A sigmoid gate on the output of attention weakens the sink.",
          over("base", *GATES),
          "first token's share 46.7 % to 7.3 % (a head) and 4.8 % (an element) in 15B models, Table 4"),
    Claim("gates_remove", "arXiv 2505.06708, title; Section 4.3",
          "With a gate on its output attention is free of sinks.", absent(*GATES), "the title's word; shares above"),
    Claim("gates_loss", "arXiv 2505.06708, abstract",
          "A gate on the output of attention costs nothing in loss.", loss("comparable", *GATES),
          "it gains: perplexity 6.026 to 5.792 and 5.761, Table 4"),
    Claim("gates_activations", "arXiv 2505.06708, Table 4",
          "A gate on the output of attention makes massive activations smaller.",
          over("base", *GATES, key="peak"), "largest activation 1053 to 98 and 94"),
    Claim("softmax_plus_one", "arXiv 2410.17174, abstract and caption of Table 2",
          "With one added to its denominator, softmax has no sink on the first token, at a similar loss.",
          absent("softmax_plus_one") + loss("comparable", "softmax_plus_one"),
          "first token 65 % to 3.3 %, with another optimiser as well; "
          "sink rate 34.9 % to 16.4 % in 2504.20966, Table 3"),
    Claim("sink_logit", "Section 7.3, Table 4, for arXiv 2508.10925",
          "A learned logit beside the others, without a value, takes the sink from x_1 as a K bias does.",
          present("sink_logit", key="learned_star") + absent("sink_logit") + loss("comparable", "sink_logit"),
          "stated nowhere: what follows from Table 4; sink rate 34.9 % to 8.8 % in 2504.20966, Table 3"),
    Claim("softpick", "arXiv 2504.20966, abstract; Section 5", "Softpick has no sink, at a similar loss.",
          absent("softpick") + loss("comparable", "softpick"),
          "sink rate 63.4 % to 0 % (340M), 15.0 % to 0 % (1.8B), Table 2; loss 0.004 and 0.12 higher, Section 5"),
    Claim("softpick_activations", "arXiv 2504.20966, title and abstract", "Softpick has no massive activations.",
          absent("softpick", key="peak"), "kurtosis 33,511 to 341 (340M), 74,457 to 2,193 (1.8B), Table 2",
          given=present("base", key="peak")),
    Claim("relu", "arXiv 2410.13835, abstract; of the sink also arXiv 2603.11487, abstract",
          "ReLU without softmax's normalisation weakens the sink, its small value and the massive activations.",
          over("base", "relu_length") + over("base", "relu_length", key="peak")
          + beside("more", "relu_length", key="value"),
          "on toy tasks: norm of the first token's state 24, not 141 (the authors' data)"),
    Claim("sgd", "arXiv 2410.13835, abstract",
          "SGD in place of Adam weakens the sink, its small value and the activations.",
          over("weight_decay_0", "sgd") + over("weight_decay_0", "sgd", key="peak")
          + beside("more", "sgd", other="weight_decay_0", key="value"),
          "on a toy task: norm of the first token's state 20, not 141, but the last block keeps "
          "its sink (the authors' data)"),
    Claim("adam_activations", "arXiv 2410.17174, abstract",
          "Massive activations come from Adam, not from attention: softmax plus one keeps them, SGD does not.",
          present("softmax_plus_one", key="peak") + over("weight_decay_0", "sgd", key="peak"),
          "kurtosis 1657 to 3.1 with another optimiser as well; "
          "6,453 to 574 by softmax plus one alone in 2504.20966, Table 3", given=present("base", key="peak")),
    # What makes it easier for the model
    Claim("sigmoid_bias", "arXiv 2409.04431, abstract and code",
          "Sigmoid attention with a bias of -log n is as good as softmax.", loss("comparable", "sigmoid_log_bias"),
          "no number in the abstract"),
    Claim("differential", "arXiv 2410.05258, Section 3.7, Table 5",
          "The difference of two softmax maps has smaller outliers.", over("base", "differential", key="peak"),
          "largest hidden value 3,609 to 1,688, the median 0.6 to 1.2 (3B)"),
    Claim("dyt", "arXiv 2503.10622, Table 4", "tanh(a h) in place of a norm serves as well.",
          loss("comparable", "dyt"),
          "loss 0.01 higher at 7B and 13B, the same at 34B and 70B; 0.26 higher in 2601.22966, Table 1"),
    Claim("gated_norm", "arXiv 2601.22966, Table 1",
          "A gate behind each norm makes outliers smaller, at no worse a loss.",
          over("base", "gated_norm", key="peak") + loss("comparable", "gated_norm"),
          "largest activation 2,800 to 430, loss 1.957 to 1.951, where attention is gated already"),
    # Disputed: what sinks and massive activations are to each other
    Claim("activations_make_sinks", "arXiv 2510.06477, abstract",
          "Sinks come from massive activations: a model has both or neither.", each("together", *APART),
          "seen in finished models of 410M to 120B, some of them ablated; both or neither is what follows",
          given=each("together", "base")),
    Claim("pre_norm_couples", "arXiv 2603.05498, abstract",
          "Sinks and massive activations go together because of pre-norm: without it one is there and the other is "
          "not.", each("apart", "post_norm", "sandwich_norm"),
          "no number in the abstract; no post-norm in what was read",
          given=present("base") + present("base", key="peak")),
    Claim("norms_keep_sinks", "arXiv 2603.05498, Table 5",
          "A norm behind each sublayer too, or tanh in place of norms, makes massive activations smaller and keeps the "
          "sink.", beside("kept", "sandwich_norm", "dyt") + over("base", "sandwich_norm", "dyt", key="peak"),
          "3,818 to 520 and 153; sink rate 46.0 % to 44.7 % and 61.0 %"),
    Claim("gradient_sinks", "arXiv 2603.17771, Section 3", "Where attention gathers, the gradient gathers too.",
          over("base", "k_bias", "sigmoid", "softpick", key="gathered"), "10 to 100 times the others' gradient"),
    Claim("v_scale", "arXiv 2603.17771, Section 5",
          "V-scale keeps the sink and makes the gradient on it and the massive activations smaller.",
          beside("kept", "v_scale") + over("base", "v_scale", key="gathered") + over("base", "v_scale", key="peak")
          + loss("comparable", "v_scale"), "gradient ratio 14.8 to 7.3 (0.1B), 9.0 to 6.3 (0.3B)"),
    Claim("two_blocks", "arXiv 2603.06591, abstract",
          "Two blocks suffice to recognise the first position and to make it a sink, whatever its token.",
          present("default", key="third_block"), "a model of 30B in training", "any token"),
    Claim("depth", "arXiv 2504.02732", "Deeper models have more of a sink.",
          over("depth_6", "depth_3", "depth_2", "depth_1"),
          "sink rate 46.0, 73.5, 78.3 % in finished models of 8B, 70B, 405B: size, not depth alone (others' notes)"),
    Claim("context", "arXiv 2504.02732", "Training on longer contexts makes more of a sink.",
          falling("context_512", "context_128", "context_32"),
          "a figure, 128 to 2,048 tokens (others' notes); no rise from 256 to 4,096 in 2603.05498, Table 8"),
)  # fmt: skip
