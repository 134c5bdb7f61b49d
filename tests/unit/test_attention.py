"""The dense reference against the formulas of the paper and of what came after it, one number at a time."""

import math
from itertools import product

import pytest
import torch
from helpers import draw, refused, refuses
from torch import Tensor

from sinkutils.model.attention import AttentionSpec, attend, divide, normalise, visible

LENGTH, DIM = 5, 3
# f of one number. A new similarity is written down here once more: the grids below and in the other tests take it up.
BY_HAND = {
    "exp": math.exp,
    "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
    "elu": lambda s: s + 1 if s > 0 else math.exp(s),
    "linear": float,
    "relu": lambda s: max(s, 0.0),
    "softpick": lambda s: max(math.expm1(s), 0.0),
}
# Z of the row of logits and of its similarities
Z_BY_HAND = {
    "sum": lambda s, row: sum(row),
    "none": lambda s, row: 1.0,
    "max_abs_sum": lambda s, row: max(abs(sum(row)), 1.0),
    "length": lambda s, row: len(row),
}


def inputs(length: int = LENGTH, **fields) -> tuple[list[Tensor], dict]:
    leaves, extras = draw(AttentionSpec(**fields), length, shape=(2, 2, DIM))
    tensors = {k: x.detach() for k, x in extras.items() if isinstance(x, Tensor)}
    return [x.detach() for x in leaves[:3]], tensors


def logits_of(q: Tensor, k: Tensor) -> list[float]:
    """<q, k_j> / sqrt(d_h) for every key, as numbers."""
    return [float((q * key).sum()) / math.sqrt(len(q)) for key in k]


def by_hand(q, k, v, weights_of, sees=lambda i, j: j <= i) -> Tensor:
    """sum_j A_ij v_j, head by head and query by query; weights_of maps a row of logits to weights."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, h, i in product(*map(range, q.shape[:3])):
        keys = [j for j in range(k.shape[2]) if sees(i, j)]
        for j, weight in zip(keys, weights_of(logits_of(q[b, h, i], k[b, h, keys])), strict=True):
            out[b, h, i] += weight * v[b, h, j]
    return out


def over(f, z):
    """A row of logits to f(s) / Z, zeros where Z is."""
    return lambda s: [f(x) / (z(s, [f(y) for y in s]) or 1.0) for x in s]


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


OPERATIONS = {
    **{
        (("similarity", f), ("normalizer", z)): over(BY_HAND[f], Z_BY_HAND[z])
        for f, z in product(BY_HAND, Z_BY_HAND)
        if f != "softpick" and (f != "linear" or z in ("none", "max_abs_sum"))
    },
    **{
        (("similarity", "softpick"), ("scale", a)): over(
            BY_HAND["softpick"], lambda s, row, a=a: sum(abs(math.expm1(x)) for x in s) / a
        )
        for a in (1.0, 0.05)
    },
    (("similarity", "sigmoid"), ("normalizer", "none"), ("logit_bias", -math.log(5))): over(
        lambda s: BY_HAND["sigmoid"](s - math.log(5)), Z_BY_HAND["none"]
    ),
    (("sink_logit", "zero"),): over(math.exp, lambda s, row: 1 + sum(row)),
    **{(("scale", a),): over(math.exp, lambda s, row, a=a: sum(row) / a) for a in (0.05, 2.0)},
    **{
        (("similarity", f), ("normalizer", "p_norm"), ("p", p)): over(
            BY_HAND[f], lambda s, row, p=p: sum(x**p for x in row) ** (1 / p)
        )
        for f, p in product(("exp", "sigmoid"), (0.25, 0.5, 1.0, 3.0))
    },  # Eqs. 43 and 44
}


@pytest.mark.parametrize("fields", OPERATIONS, ids=str)
def test_an_operation_is_its_formula(fields):
    (q, k, v), _ = inputs()
    out, weights = attend(q, k, v, AttentionSpec(**dict(fields)))
    same(out, by_hand(q, k, v, OPERATIONS[fields]))
    assert (weights[..., weights.shape[-1] - LENGTH :].triu(1) == 0).all()


def test_kernels_act_on_queries_and_keys_before_the_dot_product():
    (q, k, v), _ = inputs()
    phi_q, phi_k = (x.clone().apply_(BY_HAND["elu"]) for x in (q, k))
    out, _ = attend(q, k, v, AttentionSpec(similarity="linear", kernel="elu"))
    same(out, by_hand(phi_q, phi_k, v, over(float, Z_BY_HAND["sum"])))
    spec = AttentionSpec(similarity="linear", kernel="mlp", normalizer="none")
    out, _ = attend(q, k, v, spec, mlp=torch.square)
    same(out, by_hand(q.square(), k.square(), v, over(float, Z_BY_HAND["none"])))


def test_biases_and_sink_logits_are_one_more_key():
    def with_star(star: Tensor, x: Tensor) -> Tensor:
        return torch.cat([star[None, :, None].expand(2, -1, -1, -1), x], dim=2)

    def sees(i: int, j: int) -> bool:
        return j <= i + 1  # k* is column 0, so the sequence's own keys stand one later

    softmax = over(math.exp, Z_BY_HAND["sum"])
    (q, k, v), extras = inputs(bias="kv")
    key, value = extras["key_bias"], extras["value_bias"]
    out, weights = attend(q, k, v, AttentionSpec(bias="kv"), **extras)
    same(out, by_hand(q, with_star(key, k), with_star(value, v), softmax, sees))
    assert weights.shape == (2, 2, LENGTH, LENGTH + 1)
    out, _ = attend(q, k, v, AttentionSpec(bias="k"), key_bias=key)
    same(out, by_hand(q, with_star(key, k), with_star(0 * value, v), softmax, sees))
    out, _ = attend(q, k, v, AttentionSpec(bias="v"), value_bias=value)
    same(out, by_hand(q, k, v, softmax) + value[:, None])
    sink = torch.tensor([0.7, -1.3], dtype=torch.float64)
    out, weights = attend(q, k, v, AttentionSpec(sink_logit="learned"), sink_logit=sink)
    for h, z in enumerate(sink.exp().tolist()):
        part = slice(h, h + 1)
        plus = over(math.exp, lambda s, row, z=z: z + sum(row))
        same(out[:, part], by_hand(q[:, part], k[:, part], v[:, part], plus))
    same(weights.sum(-1), torch.ones(2, 2, LENGTH, dtype=torch.float64))


def test_a_position_term_is_added_to_the_logits_but_not_to_the_one_of_the_key_bias():
    (q, k, v), extras = inputs(bias="k")
    g = torch.tensor([[0.0, -1, -2, -3, -4], [0.5, 0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    _, weights = attend(q, k, v, AttentionSpec(bias="k"), distance_bias=g, **extras)
    for h, i in product(range(2), range(LENGTH)):
        star, *row = logits_of(q[0, h, i], [extras["key_bias"][h], *k[0, h, : i + 1]])
        row = [math.exp(star), *(math.exp(s + float(g[h, i - j])) for j, s in enumerate(row))]
        same(weights[0, h, i, : i + 2], torch.tensor(row, dtype=torch.float64) / sum(row))
    hidden = torch.tensor([[0.0, 0.0, *[-math.inf] * 3]], dtype=torch.float64)
    same(attend(q, k, v, distance_bias=hidden)[0], attend(q, k, v, AttentionSpec(window=2))[0])
    hidden = torch.full((1, LENGTH), -math.inf, dtype=torch.float64)
    out, weights = attend(q, k, v, distance_bias=hidden)
    assert (weights == 0).all() and (out == 0).all()


def test_window_and_prefix_show_the_keys_of_section_6():
    softmax, positions = over(math.exp, Z_BY_HAND["sum"]), torch.arange(6)
    (q, k, v), _ = inputs(6)
    for fields, sees in (
        ({"window": 3}, lambda i, j: i - 3 < j <= i),
        ({"window": 1}, lambda i, j: j == i),
        ({"prefix": 4}, lambda i, j: j <= i or j < 4),
    ):
        mask = visible(positions[:, None], positions, AttentionSpec(**fields))
        assert all(bool(mask[i, j]) == sees(i, j) for i, j in product(range(6), range(6)))
        same(attend(q, k, v, AttentionSpec(**fields))[0], by_hand(q, k, v, softmax, sees))


@pytest.mark.parametrize("normalizer", ["sum", "none", "p_norm"])
def test_a_row_that_sees_nothing_or_sums_to_zero_has_zero_weights_and_a_finite_gradient(normalizer):
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    for similarity in ("exp", "sigmoid", "elu"):
        spec = AttentionSpec(similarity=similarity, normalizer=normalizer)
        weights = normalise(logits, seen, spec)
        assert (weights[~seen] == 0).all() and weights.isfinite().all()
        (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
        assert gradient.isfinite().all() and (gradient[1] == 0).all()
    zeros = torch.zeros(2, 3, requires_grad=True)
    weights = divide(zeros, zeros.sum(-1, keepdim=True))
    assert (weights == 0).all() and torch.autograd.grad(weights.sum(), zeros)[0].isfinite().all()


def test_a_spec_without_a_meaning_is_refused_with_the_reason():
    refuses("similarity must be one of exp, sigmoid, elu", AttentionSpec, similarity="tanh")
    refuses("bias_shared must be of type bool", AttentionSpec, bias_shared=1, bias="k")
    refuses("p=2.0 needs normalizer to be 'p_norm'", AttentionSpec, p=2.0)
    refuses("scale must be positive and finite, got nan", AttentionSpec, scale=math.nan)
    refuses("window must be an integer, got 2.5", AttentionSpec, window=2.5)
    refuses("window=4 needs prefix to be 1", AttentionSpec, window=4, prefix=2)
    refuses("kernel='elu' needs similarity to be 'linear'", AttentionSpec, kernel="elu")
    refuses("normalizer must be 'none' or 'max_abs_sum'", AttentionSpec, similarity="linear")
    with refused("can be negative with this kernel"):
        AttentionSpec(similarity="linear", kernel="mlp", normalizer="p_norm")
    with refused("bias='v' needs rows of weights"):
        AttentionSpec(similarity="linear", kernel="elu", bias="v")
    refuses("bias_shared=True needs bias to be 'kv' or 'k' or 'v'", AttentionSpec, bias_shared=True)
    refuses("bias_dims=2 needs bias to be 'kv' or 'k'", AttentionSpec, bias="v", bias_dims=2)
    with refused("fixed_value='first' needs bias to be 'k'"):
        AttentionSpec(bias="kv", fixed_value="first")
    with refused("fixed_value_norm must be finite and not negative"):
        AttentionSpec(bias="k", fixed_value_norm=-1.0)
    refuses("logit_bias=1.0 needs similarity to be 'sigmoid'", AttentionSpec, logit_bias=1.0)
    with refused("similarity='softpick' needs normalizer='sum'"):
        AttentionSpec(similarity="softpick", normalizer="none")
    with refused("sink_logit and differential cannot be combined"):
        AttentionSpec(sink_logit="zero", differential=True)
    for fields in ({"sink_logit": "zero", "bias": "k"}, {"differential": True, "p": 2.0}):
        with refused("sink_logit and differential each need a plain softmax"):
            AttentionSpec(**{"normalizer": "p_norm" if "p" in fields else "sum", **fields})


def test_inputs_that_do_not_fit_are_refused_by_name():
    (q, k, v), extras = inputs(bias="kv")
    key = extras["key_bias"]
    mlp = {"similarity": "linear", "kernel": "mlp", "normalizer": "none"}
    g = torch.zeros(4, LENGTH)
    for message, (x, fields, given) in {
        "q, k and v must have the shapes": ((q[0], k[0], v[0]), {}, {}),
        r"got \[\(2, 2, 5, 3\), \(2, 2, 4, 3\)": ((q, k[:, :, 1:], v), {}, {}),
        "T and D at least 1; got": ([x[:, :, :0] for x in (q, k, v)], {}, {}),
        r"takes key_bias of shape \(2, 3\) .* got None": ((q, k, v), {"bias": "k"}, {}),
        r"takes key_bias of shape None \(None: leave it out\)": ((q, k, v), {}, {"key_bias": key}),
        r"takes key_bias .* got \(1, 3\)": ((q, k, v), {"bias": "k"}, {"key_bias": key[:1]}),
        r"distance_bias must have shape .* got \(3, 5\)": ((q, k, v), {}, {"distance_bias": g[:3]}),
        r"distance_bias must .* got \(1, 2\)": ((q, k, v), {}, {"distance_bias": g[:1, :2]}),
        "mlp is the callable of kernel='mlp'": ((q, k, v), mlp, {}),
    }.items():
        refuses(message, attend, *x, AttentionSpec(**fields), **given)
