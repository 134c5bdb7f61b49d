"""Why a claim of the ledger does not hold here, or cannot be told: a sentence from a test that was run, never a guess,
said only while the test says so: a check of the ledger's rules that holds on the records, or a measurement.
"""

from __future__ import annotations

from collections.abc import Callable

from sinkutils.ledger.results import Results
from sinkutils.showing import reasons_of_models as models
from sinkutils.showing import reasons_of_parts as parts
from sinkutils.showing import reasons_of_training as training


def why(id: str, ours: Results) -> str:
    """The sentence of a claim that does not hold, or nothing."""
    return REASONS[id](ours) if id in REASONS else ""


def note(id: str, ours: Results) -> str:
    """What a claim that holds leaves open, or nothing."""
    return NOTES[id](ours) if id in NOTES else ""


def _all(*reasons: Callable[[Results], str]) -> Callable[[Results], str]:
    """What several tests say, one after the other."""
    return lambda ours: " ".join(filter(None, (reason(ours) for reason in reasons)))


NOTES: dict[str, Callable[[Results], str]] = {
    "sink_token": models.shared_with_the_first,
    "small_models": models.sizes_asked,
    "norms_everywhere": models.hardly_shorter,
    "biases_removed": models.only_key_biases,
}
REASONS: dict[str, Callable[[Results], str]] = {
    "first_token_norms": models.single_elements(),
    "bias_activations": models.single_elements("kv_bias", "k_bias"),
    "value_bias_activations": models.single_elements("v_bias"),
    "dependent_activations": models.single_elements("sigmoid_normalised", "elu_kernel_normalised"),
    "independent_activations": models.without_a_sink("linear", "mlp_normalised"),
    "softpick_activations": models.without_a_sink("softpick"),
    "gates_activations": _all(
        models.without_a_sink("gate_head"), models.beside_the_median("gate_head", "gate_element")
    ),
    "differential": models.beside_the_median("differential"),
    "activations_make_sinks": models.come_apart,
    "v_scale": _all(models.element_without_gradient, models.beside_the_median("v_scale")),
    "relu": models.in_some_seeds("relu_length"),
    "random_input": models.gemma_with_bos,
    "repeated_massive": models.gemma_repeats,
    "proposition_2": models.bucket_numbers,
    "fixed_token": training.further_from_the_end,
    "positions": _all(
        parts.there_before_training("relative"),
        parts.first_block_looks("previous", "learnable", "absolute"),
        parts.by_blocks("nope", "alibi"),
    ),
    "relative_loss": training.behind_from_the_start(
        "nope", "Without a position embedding it learns worse than the base"
    ),
    "heads": _all(
        parts.first_block_looks("self", "heads_add"),
        training.behind_from_the_start("heads_add", "Added, heads learn worse than concatenated ones"),
        parts.first_block_looks("previous", "heads_1"),
    ),
    "overfitting": training.known_by_heart,
    "weight_decay": training.other_doses,
    "much_weight_decay": training.gone_before,
    "window_absolute": training.twice_as_wide,
    "window_small": training.token_before,
    "batch_size": _all(parts.scattered("present", "batch_quarter", "batch_half"), training.too_fast_for_few),
    "compensated_rate": training.longer_learns_more,
    "value_norm": training.nothing_left_to_give,
    "value_norm_activations": _all(
        training.large_before_training("k_bias", "k_bias_first_20", "k_bias_uniform_20"),
        models.single_elements("k_bias", "k_bias_first_20", "k_bias_uniform_20"),
    ),
    **dict.fromkeys(("shared_biases", "shared_key_biases"), models.as_good_shared),
    "gates_remove": parts.in_the_first_blocks("gate_element", count=2),
    "no_normalisation": parts.in_the_first_blocks("sigmoid", "elu"),
    "mlp_kernel": parts.scattered("absent", "mlp"),
    "inner_dependence": _all(parts.in_the_first_blocks("sigmoid"), parts.scattered("absent", "mlp")),
    "inner_dependence_beyond": parts.wanes_with_the_power("base", "softmax_p2", "softmax_p3", "softmax_p4"),
    "sigmoid_settings": _all(
        parts.in_the_first_blocks("sigmoid", "sigmoid_weight_decay_0"),
        parts.scattered("absent", "sigmoid_weight_decay_0", "sigmoid_lr_quarter"),
    ),
    "p_softmax": models.single_elements("softmax_p1_2", "softmax_p1_3", "softmax_p1_4"),
    "normalisers": _all(
        parts.wanes_with_the_power("base", "softmax_p1_2", "softmax_p1_3", "softmax_p1_4"),
        training.behind_from_the_start("softmax_p1_4", "With p = 1/4, softmax learns worse than the base"),
        parts.wanes_with_the_power("sigmoid_normalised", "sigmoid_p2", "sigmoid_p3", "sigmoid_p4"),
    ),
    "dyt": training.behind_from_the_start("dyt", "It learns worse than RMSNorm"),
    "failures": training.train_all_the_same("elu_normalised", "elu_kernel", "linear_normalised"),
    "p_softmax_diverges": training.train_all_the_same("softmax_p2", "softmax_p3", "softmax_p4"),
    "scale": _all(parts.by_blocks("scale_0.2", "scale_0.1", "scale_0.05"), parts.first_block_looks("self", "scale_2")),
    "p_sigmoid": models.single_elements("sigmoid_p2", "sigmoid_p3", "sigmoid_p4"),
    "bias_dims": _all(
        training.seeds_agree("k_bias_dims_64", "k_bias_dims_1", "excess_star"),
        parts.in_the_first_blocks("k_bias_dims_16", "k_bias_dims_1"),
    ),
    **dict.fromkeys(("pre_norm_couples", "norms_keep_sinks"), training.still_growing("sandwich_norm")),
    "softmax_plus_one": parts.in_the_first_blocks("softmax_plus_one"),
    "depth": training.deeper_is_slower,
    "context": training.most_at_its_own,
    **dict.fromkeys(("sgd", "adam_activations"), training.without_decay),
    "small_rate": training.past_the_best_rate,
    "small_rate_delays": _all(training.seeds_agree("lr_half", "base", "onset"), training.past_the_best_rate),
    "gated_norm": training.seeds_agree("base", "gated_norm", "peak"),
    **dict.fromkeys(("emerges", "emerges_any_token"), models.few_heads),
}
