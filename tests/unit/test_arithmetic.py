"""The attention algebra where logits are far from 0: against formulas in 60 digits, in each precision.

One query of 1 in one dimension, so that its logits are its keys: bfloat16 then has the same logits as
the formulas, and what is compared is what is made of them.
"""

import math
from itertools import product

import mpmath
import pytest
import torch

from sinkutils.model import fast
from sinkutils.model.attention import AttentionSpec, attend

KEYS = 4
mpmath.mp.dps = 60

F = {
    "exp": mpmath.exp,
    "sigmoid": lambda s: 1 / (1 + mpmath.exp(-s)),
    "elu": lambda s: s + 1 if s > 0 else mpmath.exp(s),
    "relu": lambda s: max(s, mpmath.mpf(0)),
    "softpick": lambda s: max(mpmath.expm1(s), mpmath.mpf(0)),
}


def weights_by_formula(logits, spec):
    """A_ij of a row, from Section 7.4 and Eq. 43 as they are printed; a row whose Z is 0 has none."""
    sims = [F[spec.similarity](s) for s in logits]
    z = {
        "sum": lambda: mpmath.fsum(sims),
        "max_abs_sum": lambda: max(mpmath.fsum(sims), mpmath.mpf(1)),
        "p_norm": lambda: mpmath.fsum(s**spec.p for s in sims) ** (1 / mpmath.mpf(spec.p)),
        "none": lambda: mpmath.mpf(1),
        "length": lambda: mpmath.mpf(len(sims)),
    }[spec.normalizer]()
    if spec.similarity == "softpick":
        z = mpmath.fsum(abs(mpmath.expm1(s)) for s in logits)
    return [s / z if z else mpmath.mpf(0) for s in sims]


def loss_and_gradient(logits, spec, values):
    """The last query's output, one number, and its derivative by each logit."""
    logits = [mpmath.mpf(float(s)) for s in logits]

    def out(*row):
        weights = weights_by_formula(row, spec)
        return mpmath.fsum(a * v for a, v in zip(weights, values, strict=True))

    def slope(j):
        moved = lambda x: out(*logits[:j], x, *logits[j + 1 :])  # noqa: E731
        return mpmath.diff(moved, logits[j])

    return float(out(*logits)), [float(slope(j)) for j in range(len(logits))]


def attended(form, logits, spec, values, dtype):
    """The same by the package: k are the logits, every q is 1."""
    k = logits.to(dtype)[None, None, :, None].requires_grad_()
    v = torch.tensor(values, dtype=dtype)[None, None, :, None]
    out = form(torch.ones_like(k), k, v, spec)
    out = out[0] if isinstance(out, tuple) else out
    (gradient,) = torch.autograd.grad(out[0, 0, -1, 0], k)
    return out[0, 0, -1, 0].item(), gradient.flatten().tolist()


# Without a sum, e^100 is more than float32 has: not among these.
SPECS = [
    *(
        AttentionSpec(similarity=f, normalizer=z)
        for f, z in product(("exp", "sigmoid", "elu"), ("sum", "max_abs_sum"))
    ),
    *(
        AttentionSpec(similarity=f, normalizer="p_norm", p=p)
        for f, p in product(("exp", "sigmoid", "elu", "relu"), (0.25, 3.0, 12.0, 32.0))
    ),
    *(
        AttentionSpec(similarity=f, normalizer=z)
        for f, z in product(("sigmoid", "elu", "relu"), ("none", "length"))
    ),
    AttentionSpec(similarity="relu"),
    AttentionSpec(similarity="softpick"),
]
# of a row's logits: where they lie, and how far apart
PLACES = [(0, 1), (0, 100), (-100, 1), (100, 1), (-17, 3), (-10, 0.1), (30, 20)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.06}


def name_of(spec):
    return f"{spec.similarity}-{spec.normalizer}-{spec.p:g}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_logits_of_any_size_give_the_weights_and_gradients_of_the_formulas(spec, dtype):
    generator = torch.Generator().manual_seed(0)
    values = [1.0, -2.0, 0.5, 3.0]
    for (middle, spread), form in product(PLACES, (attend, fast.attention_output)):
        logits = (middle + spread * torch.randn(KEYS, generator=generator)).clamp(-100, 100)
        logits = logits.bfloat16().double()  # exact in each precision
        out, gradient = loss_and_gradient(logits, spec, values)
        got, got_gradient = attended(form, logits, spec, values, dtype)
        limit = TOLERANCE[dtype]
        assert got == pytest.approx(out, rel=limit, abs=limit * 3), (form, logits)
        largest = max(map(abs, gradient))
        close = pytest.approx(gradient, rel=limit, abs=limit * max(largest, 3))
        assert got_gradient == close, logits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("logit", [-100.0, -16.0, -10.0, 100.0])
def test_a_single_key_has_the_weight_1_wherever_its_logit_lies(logit, dtype):
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    for f in ("exp", "sigmoid", "elu"):
        for fields in ({}, {"normalizer": "p_norm", "p": 32.0}):
            spec = AttentionSpec(similarity=f, **fields)
            assert attend(one, logit * one, one, spec)[1].item() == 1
            assert fast.attention_output(one, logit * one, one, spec).item() == 1
    large = AttentionSpec(normalizer="max_abs_sum")  # e^s / max(e^s, 1)
    weight = min(math.exp(logit), 1)
    assert attend(one, logit * one, one, large)[1].item() == pytest.approx(weight, rel=0.01)


@pytest.mark.parametrize("p", [3.0, 32.0])
def test_the_p_norm_of_a_row_beside_much_larger_ones_is_not_lost(p):
    ones = torch.ones(1, 1, 4, 1)
    small = torch.tensor([1e-20, 1, 1, 1])[None, None, :, None]
    weights = attend(small, ones, ones, AttentionSpec(similarity="relu", normalizer="p_norm", p=p))
    assert weights[1][0, 0, 0, 0] == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "fields", [{}, {"normalizer": "p_norm", "p": 32.0}, {"normalizer": "max_abs_sum"}], ids=str
)
def test_the_elu_kernel_is_its_formula_where_queries_and_keys_are_far_below_0(fields, dtype):
    """phi(q) phi(k) is e^(q + k) there: two keys, in dimensions in which the query is small and large."""
    spec = AttentionSpec(similarity="linear", kernel="elu", **fields)
    for q, keys in (
        ([-10.0, -12.0], [[-9.0, -11.0], [-12.0, -8.0]]),
        ([-60.0, -60.0], [[-60.0, -61.0], [-62.0, -60.0]]),
        ([-100.0, 2.0], [[2.0, -100.0], [1.0, -100.0]]),
        ([50.0, -100.0], [[-100.0, 3.0], [-98.0, 4.0]]),
    ):
        products = []
        for key in keys:
            phi_q, phi_k = ([F["elu"](mpmath.mpf(x)) for x in vector] for vector in (q, key))
            products.append(mpmath.fdot(phi_q, phi_k) / mpmath.sqrt(2))
        row = weights_by_formula(products, AttentionSpec(similarity="relu", **fields))
        queries = torch.tensor([q, q], dtype=dtype)[None, None]
        k = torch.tensor(keys, dtype=dtype)[None, None]
        v = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)[None, None]
        rel = 0.01 if dtype == torch.bfloat16 else 1e-5
        expected = pytest.approx([float(a) for a in row], rel=rel)
        out, weights = attend(queries, k, v, spec)
        quick = fast.attention_output(queries, k, v, spec)
        for got in (out[0, 0, 1], weights[0, 0, 1], quick[0, 0, 1]):
            assert got.dtype == dtype and got.tolist() == expected


def test_operations_without_a_sum_say_what_overflows():
    """e^s itself is the weight of exp without a normaliser, and is infinite where the format ends."""
    one = torch.ones(1, 1, 1, 1)
    spec = AttentionSpec(normalizer="none")
    assert attend(one, 80 * one, one, spec)[1].isfinite().all()
    assert attend(one, 100 * one, one, spec)[1].isinf().all()
