"""Claims of later papers as data, beside the paper's own: on variants that grid section 8 trains on the same base.

What each source says was read where data/paper/after_paper.csv says so: mostly its abstract. They were written down
when no record of section 8 existed, by the same rules; records that an earlier ledger was made under do not count
(`frozen.ledgers`). Their checks are corrected for their number among themselves, apart from the paper's own.

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
          over("base", *GATES), "no number in the abstract"),
    Claim("gates_remove", "arXiv 2505.06708, title", "With such a gate attention is free of sinks.", absent(*GATES),
          "the title's word"),
    Claim("gates_loss", "arXiv 2505.06708, abstract", "The gate costs nothing in loss.", loss("comparable", *GATES),
          "no number in the abstract"),
    Claim("softmax_plus_one", "arXiv 2410.17174, abstract and Table 2",
          "With one added to its denominator, softmax has no sink on the first token, at a similar loss.",
          absent("softmax_plus_one") + loss("comparable", "softmax_plus_one"),
          "first token's share 65 % to 3.3 %, with another optimiser as well"),
    Claim("sink_logit", "Section 7.3, Table 4, for arXiv 2508.10925",
          "A learned logit beside the others, without a value, takes the sink from x_1 as a K bias does.",
          present("sink_logit", key="learned_star") + absent("sink_logit") + loss("comparable", "sink_logit"),
          "stated nowhere: what follows from Table 4"),
    Claim("softpick", "arXiv 2504.20966, abstract", "Softpick has no sink, at a similar loss.",
          absent("softpick") + loss("comparable", "softpick"), "sink rate 0 %"),
    Claim("softpick_activations", "arXiv 2504.20966, title and abstract", "Softpick has no massive activations.",
          present("base", key="peak") + absent("softpick", key="peak"), "kurtosis 33,510 to 340"),
    Claim("relu", "arXiv 2410.13835, abstract; arXiv 2603.11487, abstract",
          "ReLU without softmax's normalisation weakens the sink, its small value and the massive activations.",
          over("base", "relu_length") + over("base", "relu_length", key="peak")
          + beside("more", "relu_length", key="value"), "on a toy task; no number in the abstracts"),
    Claim("sgd", "arXiv 2410.13835, abstract",
          "SGD in place of Adam weakens the sink, its small value and the activations.",
          over("base", "sgd") + over("base", "sgd", key="peak") + beside("more", "sgd", key="value"),
          "on a toy task; no number in the abstract"),
    Claim("adam_activations", "arXiv 2410.17174, abstract",
          "Massive activations come from Adam, not from attention: softmax plus one keeps them, SGD does not.",
          present("base", "softmax_plus_one", key="peak") + over("base", "sgd", key="peak"),
          "kurtosis 1657 to 3.1 with another optimiser as well"),
    # What makes it easier for the model
    Claim("sigmoid_bias", "arXiv 2409.04431, abstract",
          "Sigmoid attention with a bias of -log n is as good as softmax.", loss("comparable", "sigmoid_log_bias"),
          "no number in the abstract"),
    Claim("differential", "arXiv 2410.05258, abstract", "The difference of two softmax maps has smaller outliers.",
          over("base", "differential", key="peak"), "no number in the abstract"),
    Claim("dyt", "arXiv 2503.10622, abstract", "tanh(alpha h) serves as well as a norm.", loss("comparable", "dyt"),
          "no number in the abstract"),
    Claim("gated_norm", "arXiv 2601.22966, abstract",
          "A gate behind each norm makes outliers smaller, at no worse a loss.",
          over("base", "gated_norm", key="peak") + loss("comparable", "gated_norm"), "no number in the abstract"),
    # Disputed: what sinks and massive activations are to each other
    Claim("activations_make_sinks", "arXiv 2510.06477, abstract",
          "Sinks come from massive activations: a model has both or neither.", each("together", "base", *APART),
          "in models of 410M to 120B"),
    Claim("pre_norm_couples", "arXiv 2603.05498, abstract",
          "They go together because of pre-norm: without it one is there and the other is not.",
          present("base") + present("base", key="peak") + each("apart", "post_norm", "sandwich_norm"),
          "no number in the abstract"),
    Claim("gradient_sinks", "arXiv 2603.17771, Section 3", "Where attention gathers, the gradient gathers too.",
          over("base", "k_bias", "sigmoid", "softpick", key="gathered"), "10 to 100 times the others' gradient"),
    Claim("v_scale", "arXiv 2603.17771, Section 5",
          "V-scale keeps the sink and makes the gradient on it and the massive activations smaller.",
          beside("kept", "v_scale") + over("base", "v_scale", key="gathered") + over("base", "v_scale", key="peak")
          + loss("comparable", "v_scale"), "gradient ratio 14.8 to 7.3 (0.1B), 9.0 to 6.3 (0.3B)"),
    Claim("two_blocks", "arXiv 2603.06591, abstract",
          "Two blocks suffice to recognise the first position and to make it a sink, whatever its token.",
          present("default", key="third_block"), "in large models", "any token"),
    Claim("depth", "arXiv 2504.02732", "Deeper models have more of a sink.",
          over("depth_6", "depth_3", "depth_2", "depth_1"), "by size of trained models; read in a summary"),
    Claim("context", "arXiv 2504.02732", "Training on longer contexts makes more of a sink.",
          falling("context_512", "context_128", "context_32"), "a figure; read in a summary"),
)  # fmt: skip
