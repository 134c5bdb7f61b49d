"""The dense reference against the paper's formulas, written out as loops over numbers."""

import math

import pytest
import torch
from torch import Tensor

from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend, divide, normalise, visible

BATCH, HEADS, LENGTH, DIM = 2, 2, 5, 3


def draw(length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of (B, H, T, D) in float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(BATCH, HEADS, length, DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def draw_bias(seed: int = 9) -> tuple[Tensor, Tensor]:
    """k* and v*, (H, D) each."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return key, value


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def by_hand(q: Tensor, k: Tensor, v: Tensor, similarity, normaliser, sees=lambda i, j: j <= i) -> Tensor:
    """v_i = sum_j sim(q_i, k_j) v_j / Z_i of Eq. 29, one number at a time; `normaliser` maps a row to Z_i."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if sees(i, j)]
                row = [similarity(dot(q[b, h, i], k[b, h, j]) / math.sqrt(q.shape[3])) for j in keys]
                for j, sim in zip(keys, row, strict=True):
                    out[b, h, i] += sim / normaliser(row) * v[b, h, j]
    return out


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def elu_plus_one(s: float) -> float:
    return s + 1 if s > 0 else math.exp(s)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_default_is_the_causal_softmax_of_equation_4():
    q, k, v = draw()
    out, weights = attend(q, k, v)
    same(out, by_hand(q, k, v, math.exp, sum))
    same(weights.sum(-1), torch.ones(BATCH, HEADS, LENGTH, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()


BY_HAND = {"exp": math.exp, "sigmoid": sigmoid, "elu": elu_plus_one, "linear": float}
NORMALIZERS = {"sum": sum, "none": lambda row: 1.0, "max_abs_sum": lambda row: max(abs(sum(row)), 1.0)}


@pytest.mark.parametrize(
    ("similarity", "normalizer"),
    [(f, z) for f in BY_HAND for z in NORMALIZERS if (f, z) != ("linear", "sum")],  # that one is refused
)
def test_similarities_and_normalisers_are_those_of_section_7_4(similarity, normalizer):
    q, k, v = draw()
    out, _ = attend(q, k, v, AttentionSpec(similarity=similarity, normalizer=normalizer))
    same(out, by_hand(q, k, v, BY_HAND[similarity], NORMALIZERS[normalizer]))


@pytest.mark.parametrize("alpha", [0.05, 2.0])
def test_scale_makes_the_weights_sum_to_alpha_as_after_equation_29(alpha):
    q, k, v = draw()
    out, weights = attend(q, k, v, AttentionSpec(scale=alpha))
    same(out, by_hand(q, k, v, math.exp, lambda row: sum(row) / alpha))
    same(weights.sum(-1), torch.full((BATCH, HEADS, LENGTH), alpha, dtype=torch.float64))


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(("similarity", "function"), [("exp", math.exp), ("sigmoid", sigmoid)])
def test_p_norm_is_equation_43(p, similarity, function):
    q, k, v = draw()
    out, _ = attend(q, k, v, AttentionSpec(similarity=similarity, normalizer="p_norm", p=p))
    same(out, by_hand(q, k, v, function, lambda row: sum(sim**p for sim in row) ** (1 / p)))


@pytest.mark.parametrize("p", [0.25, 0.5, 2.0])
def test_p_normalised_softmax_is_the_p_root_of_a_softmax_at_temperature_1_over_p_as_in_equation_44(p):
    q, k, v = draw()
    _, weights = attend(q, k, v, AttentionSpec(normalizer="p_norm", p=p))
    _, at_temperature = attend(p * q, k, v)
    same(weights, at_temperature ** (1 / p))


def test_kernels_act_on_queries_and_keys_before_the_dot_product():
    q, k, v = draw()
    spec = AttentionSpec(similarity="linear", kernel="elu", normalizer="sum")
    feature = torch.tensor([[[[elu_plus_one(float(x)) for x in row] for row in head] for head in sample]
                            for sample in torch.stack([q, k]).flatten(0, 1)], dtype=torch.float64)  # fmt: skip
    phi_q, phi_k = feature.unflatten(0, (2, BATCH))
    same(attend(q, k, v, spec)[0], by_hand(phi_q, phi_k, v, float, sum))

    spec = AttentionSpec(similarity="linear", kernel="mlp", normalizer="none")
    out, _ = attend(q, k, v, spec, mlp=lambda x: x.square())
    same(out, by_hand(q.square(), k.square(), v, float, lambda row: 1.0))


def with_star(key: Tensor, x: Tensor) -> Tensor:
    return torch.cat([key[None, :, None].expand(BATCH, -1, -1, -1), x], dim=2)


def test_biases_are_the_rows_of_table_4():
    q, k, v = draw()
    key, value = draw_bias()

    def sees(i: int, j: int) -> bool:
        return j <= i + 1  # k* is column 0, so the sequence's own keys stand one later

    out, weights = attend(q, k, v, AttentionSpec(bias="kv"), key_bias=key, value_bias=value)
    same(out, by_hand(q, with_star(key, k), with_star(value, v), math.exp, sum, sees))
    assert weights.shape == (BATCH, HEADS, LENGTH, LENGTH + 1)

    out, _ = attend(q, k, v, AttentionSpec(bias="k"), key_bias=key)
    same(out, by_hand(q, with_star(key, k), with_star(0 * value, v), math.exp, sum, sees))

    out, _ = attend(q, k, v, AttentionSpec(bias="v"), value_bias=value)
    same(out, by_hand(q, k, v, math.exp, sum) + value[:, None])


def test_a_position_term_is_added_to_the_logits_but_not_to_the_one_of_the_key_bias():
    q, k, v = draw()
    key, _ = draw_bias()
    g = torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0], [0.5, 0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    _, weights = attend(q, k, v, AttentionSpec(bias="k"), key_bias=key, distance_bias=g)
    for h in range(HEADS):
        for i in range(LENGTH):
            row = [math.exp(dot(q[0, h, i], key[h]) / math.sqrt(DIM))]
            row += [math.exp(dot(q[0, h, i], k[0, h, j]) / math.sqrt(DIM) + float(g[h, i - j])) for j in range(i + 1)]
            expected = torch.tensor([sim / sum(row) for sim in row], dtype=torch.float64)
            same(weights[0, h, i, : i + 2], expected)


def test_window_and_prefix_show_the_keys_of_section_6():
    positions = torch.arange(6)
    window = visible(positions, positions, AttentionSpec(window=3))
    prefix = visible(positions, positions, AttentionSpec(prefix=4))
    for i in range(6):
        for j in range(6):
            assert window[i, j] == (i - 3 < j <= i)
            assert prefix[i, j] == (j <= i or j < 4)
    q, k, v = draw(6)
    same(attend(q, k, v, AttentionSpec(window=3))[0], by_hand(q, k, v, math.exp, sum, lambda i, j: i - 3 < j <= i))
    same(attend(q, k, v, AttentionSpec(prefix=4))[0], by_hand(q, k, v, math.exp, sum, lambda i, j: j <= max(i, 3)))


def test_a_window_of_one_returns_the_values():
    q, k, v = draw()
    same(attend(q, k, v, AttentionSpec(window=1))[0], v)


def test_repeated_tokens_give_uniform_attention_without_position():
    q, k, v = (x[:, :, :1].expand(-1, -1, LENGTH, -1) for x in draw())
    _, weights = attend(q, k, v)
    uniform = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril() / torch.arange(1, LENGTH + 1)[:, None]
    same(weights, uniform.expand_as(weights))


def test_a_key_far_ahead_of_the_others_takes_everything_without_overflow():
    q, k, v = draw()
    k[:, :, 0], q = 1e3, q.abs() + 1
    out, weights = attend(q, k, v)
    assert out.isfinite().all()
    same(weights[..., 0], torch.ones_like(weights[..., 0]))
    out, _ = attend(q, k, v, AttentionSpec(normalizer="p_norm", p=0.5))
    assert out.isfinite().all()


@pytest.mark.parametrize("normalizer", ["sum", "none", "p_norm"])
def test_a_row_that_sees_nothing_has_zero_weights_and_a_zero_gradient(normalizer):
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    for similarity in ("exp", "sigmoid", "elu"):
        weights = normalise(logits, seen, AttentionSpec(similarity=similarity, normalizer=normalizer))
        assert (weights[~seen] == 0).all() and weights.isfinite().all()
        (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
        assert gradient.isfinite().all() and (gradient[1] == 0).all()


def test_a_sum_of_zero_gives_zero_weights():
    zeros = torch.zeros(2, 3, requires_grad=True)
    weights = divide(zeros, zeros.sum(-1, keepdim=True))
    assert (weights == 0).all()
    (gradient,) = torch.autograd.grad(weights.sum(), zeros)
    assert gradient.isfinite().all()


def test_minus_infinity_in_the_position_term_hides_a_distance():
    q, k, v = draw()
    g = torch.tensor([[0.0, 0.0, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)
    same(attend(q, k, v, distance_bias=g)[0], attend(q, k, v, AttentionSpec(window=2))[0])
    hidden = torch.full((1, LENGTH), -math.inf, dtype=torch.float64)
    out, weights = attend(q, k, v, distance_bias=hidden)
    assert (weights == 0).all() and (out == 0).all()


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(),
        AttentionSpec(similarity="sigmoid", normalizer="none", window=2),
        AttentionSpec(similarity="elu", prefix=3),
        AttentionSpec(normalizer="p_norm", p=0.5, bias="kv"),
        AttentionSpec(similarity="sigmoid", normalizer="p_norm", p=2.0),
        AttentionSpec(similarity="linear", kernel="elu", bias="kv"),
        AttentionSpec(similarity="linear", normalizer="max_abs_sum"),
    ],
    ids=repr,
)
def test_gradients_are_those_of_finite_differences(spec):
    q, k, v = (x[:1].requires_grad_() for x in draw(4))
    key, value = (x.requires_grad_() for x in draw_bias())
    g = torch.randn(HEADS, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)

    def out(q, k, v, key, value, g):
        biases = {"key_bias": key, "value_bias": value} if spec.bias == "kv" else {}
        return attend(q, k, v, spec, distance_bias=g, **biases)[0]

    assert torch.autograd.gradcheck(out, (q, k, v, key, value, g))


REFUSED = {
    "similarity must be one of exp, sigmoid, elu": {"similarity": "tanh"},
    "kernel must be one of identity, elu, mlp": {"kernel": "cosine"},
    "normalizer must be one of sum, none, max_abs_sum, p_norm": {"normalizer": "softmax"},
    "bias must be one of none, kv, k, v": {"bias": "q"},
    "fixed_value must be one of zero, first, uniform": {"fixed_value": "one"},
    "p must be positive and finite": {"normalizer": "p_norm", "p": 0.0},
    "p must be positive and finite, got inf": {"normalizer": "p_norm", "p": math.inf},
    "p other than 1 needs normalizer='p_norm'": {"p": 2.0},
    "scale must be positive": {"scale": 0.0},
    "scale must be positive and finite, got nan": {"scale": math.nan},
    "window must be None or an integer >= 1, got 0": {"window": 0},
    "window must be None or an integer >= 1, got 2.5": {"window": 2.5},
    "prefix must be an integer >= 1": {"prefix": 0},
    "window and prefix cannot be combined": {"window": 4, "prefix": 2},
    "kernel='elu' needs similarity='linear'": {"kernel": "elu"},
    "normalizer must be 'none' or 'max_abs_sum'": {"similarity": "linear"},
    "kernel='mlp' can be negative": {"similarity": "linear", "kernel": "mlp", "normalizer": "p_norm"},
    "bias='v' needs rows of weights": {"similarity": "linear", "kernel": "elu", "bias": "v"},
    "bias_shared needs a bias": {"bias_shared": True},
    "bias_dims describes a key bias": {"bias": "v", "bias_dims": 2},
    "bias_dims must be None or an integer >= 1": {"bias": "k", "bias_dims": 0},
    "fixed_value='first' needs bias='k'": {"bias": "kv", "fixed_value": "first"},
    "fixed_value_norm must be finite and not negative": {"bias": "k", "fixed_value_norm": -1.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_spec_without_a_meaning_is_refused_with_the_reason(message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        AttentionSpec(**REFUSED[message])


def test_inputs_that_do_not_fit_are_refused_by_name():
    q, k, v = draw()
    key, value = draw_bias()
    for message, call in {
        "q must have shape": lambda: attend(q[0], k[0], v[0]),
        "k and v must have the shape of q": lambda: attend(q, k[:, :, 1:], v),
        "at least one position": lambda: attend(*(x[:, :, :0] for x in (q, k, v))),
        "needs the argument key_bias": lambda: attend(q, k, v, AttentionSpec(bias="k")),
        "needs the argument value_bias": lambda: attend(q, k, v, AttentionSpec(bias="kv"), key_bias=key),
        "bias='k' needs the argument value_bias": lambda: attend(
            q, k, v, AttentionSpec(bias="k", fixed_value="first"), key_bias=key
        ),
        "no place for the argument key_bias": lambda: attend(q, k, v, key_bias=key),
        "no place for the argument value_bias": lambda: attend(q, k, v, value_bias=value),
        "key_bias must have shape": lambda: attend(q, k, v, AttentionSpec(bias="k"), key_bias=key[:1]),
        "distance_bias must have shape": lambda: attend(q, k, v, distance_bias=torch.zeros(3, LENGTH)),
        "distance_bias covers 2 distances": lambda: attend(q, k, v, distance_bias=torch.zeros(1, 2)),
        "kernel='mlp' needs the argument mlp": lambda: attend(
            q, k, v, AttentionSpec(similarity="linear", kernel="mlp", normalizer="none")
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_logarithm_of_a_similarity_is_that_of_its_value(similarity):
    logits = torch.linspace(-4, 4, 40, dtype=torch.float64)
    function = SIMILARITIES[similarity]
    torch.testing.assert_close(function.log(logits), function.value(logits).abs().log(), rtol=0, atol=1e-12)
    assert similarity in {*BY_HAND, "relu", "softpick"}  # the last two: tests/test_after_paper.py
