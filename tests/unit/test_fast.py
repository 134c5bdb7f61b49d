"""The fast forms against the dense reference: values, gradients, and which form serves where."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import draw, name_of, refuses
from torch import Tensor
from torch.testing import assert_close

from sinkutils.measuring import passes
from sinkutils.model import fast
from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend

OPERATIONS = [
    {},
    {"scale": 0.2},
    {"normalizer": "none"},
    {"normalizer": "p_norm", "p": 0.25},
    # Every similarity that cannot be negative, so that a new one is tested by being there.
    *({"similarity": f, "normalizer": z} for f in SIMILARITIES if f not in ("exp", "linear") for z in ("sum", "none")
      if (f, z) != ("softpick", "none")),
    {"similarity": "sigmoid", "normalizer": "max_abs_sum"},
    {"similarity": "sigmoid", "normalizer": "p_norm", "p": 3.0},
    {"similarity": "sigmoid", "normalizer": "none", "logit_bias": -3.0},
    {"similarity": "relu", "normalizer": "length"},
    {"similarity": "linear", "normalizer": "max_abs_sum"},
    *({"similarity": "linear", "kernel": "elu", "normalizer": z} for z in ("sum", "none", "max_abs_sum")),
    {"similarity": "linear", "kernel": "elu", "normalizer": "p_norm", "p": 2.0},
    {"similarity": "linear", "kernel": "mlp", "normalizer": "none"},
]  # fmt: skip
MASKS = [{}, {"window": 5}, {"prefix": 4}]
BIASES = ["none", "k", "kv", "v"]
# Every operation under every mask; the biases take turns, so that each meets every mask and most operations.
SPECS = [
    *(AttentionSpec(**operation, **mask, bias=biases[(turn + other) % len(biases)])
      for turn, operation in enumerate(OPERATIONS)
      for biases in [BIASES[:3] if operation.get("similarity") == "linear" else BIASES]
      for other, mask in enumerate(MASKS)),
    *(AttentionSpec(**operation, **mask) for mask in MASKS
      for operation in ({"sink_logit": "learned"}, {"sink_logit": "zero"}, {"differential": True})),
]  # fmt: skip


def assert_same_as_dense(
    spec: AttentionSpec,
    inputs: list[Tensor],
    extras: dict[str, Any],
    atol: float,
    quick: Callable = fast.attention_output,
) -> None:
    """Values and the gradient of every input, for one random direction of the output."""
    leaves = inputs + [x for x in extras.values() if isinstance(x, Tensor)]
    out = {
        "fast": quick(*inputs[:3], spec, **extras),
        "dense": attend(*inputs[:3], spec, **extras)[0],
    }
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out["dense"].shape, generator=generator).to(out["dense"])
    gradients = [torch.autograd.grad(x, leaves, direction, allow_unused=True) for x in out.values()]
    assert_close(out["fast"], out["dense"], rtol=atol, atol=atol)
    for leaf, got, expected in zip(leaves, *gradients, strict=True):
        # an input that one form does not touch has no gradient, or zeros
        zero = torch.zeros_like(leaf)
        got, expected = (zero if x is None else x for x in (got, expected))
        assert_close(got, expected, rtol=atol, atol=atol)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_a_form_equals_the_reference(spec):
    for length, position in ((1, "none"), (17, "none"), (17, "heads")):
        assert_same_as_dense(spec, *draw(spec, length, position), 1e-10)


@pytest.mark.parametrize("spec", SPECS[::3], ids=name_of)
def test_lower_precision_stays_near_the_reference(spec):
    inputs, extras = draw(spec, 33, dtype=torch.float32)
    atol = 2e-4 if spec.p > 1 or spec.similarity == "linear" else 5e-5
    assert_same_as_dense(spec, inputs, extras, atol)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = [x.bfloat16() for x in inputs[:3]]
        given = {k: x.bfloat16() if isinstance(x, Tensor) else x for k, x in extras.items()}
        out = fast.attention_output(*half, spec, **given)
    expected = attend(*(x.float() for x in half), spec, **extras)[0]
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_minus_infinity_in_the_position_term_gives_zero_rows():
    g = torch.full((1, 20), -math.inf, dtype=torch.float64)
    specs = {}, {"normalizer": "p_norm", "p": 0.5}, {"similarity": "sigmoid"}
    for spec in [AttentionSpec(**fields) for fields in specs]:
        (q, k, v), _ = draw(spec, 20)
        out = fast.attention_output(q, k, v, spec, distance_bias=g)
        assert (out == 0).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_neighbouring_distances_differ_in_bfloat16():
    for fields, length in itertools.product(({}, {"normalizer": "p_norm", "p": 1.5}), (400, 600)):
        spec = AttentionSpec(**fields)
        q = torch.zeros(1, 2, length, 8, dtype=torch.bfloat16)
        v = torch.zeros_like(q)
        # the last query sees the difference of its two farthest keys
        v[:, :, :2, 0] = torch.tensor([1.0, -1.0])
        g = torch.arange(length).float()[None]
        total = torch.exp(-spec.p * g[0]).sum() ** (1 / spec.p)
        share = torch.exp(torch.tensor([0.0, -1.0])) / total
        with torch.autocast("cpu", torch.bfloat16):
            quick = fast.attention_output(q, q, v, spec, distance_bias=g)
            out = (quick, attend(q, q, v, spec, distance_bias=g)[0])
        for x in out:
            assert float(x[0, 0, -1, 0]) == pytest.approx(float(share[0] - share[1]), rel=1e-2)


def test_which_kernel_serves_where():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    plain = "_scaled_dot_product_flash_attention"
    efficient = "_scaled_dot_product_efficient_attention"
    for asked, expected in (
        (("cuda", half, 64, False), plain),
        (("cuda", half, 64, True), efficient),  # a mask is no reason for the slow path
        (("cuda", half, 512, False), efficient),
        (("cuda", single, 64, True), efficient),
        (("cpu", double, 64, True), "_scaled_dot_product_flash_attention_for_cpu"),
    ):
        assert passes.kernel_for(*asked) == expected
        assert hasattr(torch.ops.aten, expected)
    for asked in (("cuda", double, 64, False), ("mps", single, 64, False)):
        refuses("no fused kernel", passes.kernel_for, *asked, kind=RuntimeError)


@pytest.mark.parametrize(
    ("form", "fields", "device", "dtype", "length", "term"),
    [
        ("sdpa", {}, "cpu", torch.float32, 64, False),
        ("sdpa", {"prefix": 5, "bias": "kv"}, "cuda", torch.bfloat16, 4096, False),
        ("sdpa", {"window": 64}, "cpu", torch.float32, 64, False),  # which sees everything
        ("dense", {"window": 63}, "cpu", torch.float32, 64, False),
        ("dense", {}, "cpu", torch.bfloat16, 64, False),  # where the kernel is slow
        ("sdpa", {}, "cpu", torch.bfloat16, 4096, False),
        ("dense", {}, "cuda", torch.bfloat16, 64, True),
        ("dense", {"normalizer": "none"}, "cuda", torch.float32, 4096, False),
        ("dense", {"similarity": "sigmoid"}, "cuda", torch.bfloat16, 4096, False),
    ],
)
def test_which_form_serves_where(form, fields, device, dtype, length, term):
    spec = AttentionSpec(**fields)
    assert fast.choose_form(spec, torch.device(device), dtype, length, term) == form


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", [{"bias": "kv"}, {"similarity": "sigmoid", "normalizer": "none"}], ids=str
)
def test_it_compiles_as_one_graph(operation):
    spec = AttentionSpec(**operation)
    torch.compiler.reset()
    compiled = torch.compile(fast.attention_output, fullgraph=True, backend="aot_eager")
    assert_same_as_dense(spec, *draw(spec, 17), 1e-10, compiled)


def there(given: dict[str, Any], device: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The extras on a device; a kernel without weights of its own in place of the MLP."""
    return {
        k: x.detach().to(device, dtype) if isinstance(x, Tensor) else torch.tanh
        for k, x in given.items()
    }


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_cuda_equals_the_reference(operation, no_gpu):
    """The last of this file: none after it must see the GPU."""
    no_gpu.undo()
    masks = ({}, {"bias": "kv"}, {"window": 50}, {"prefix": 40})
    settings = itertools.product((torch.float32, torch.bfloat16), masks)
    for (dtype, changes), position in itertools.product(settings, ("none", "heads")):
        spec = AttentionSpec(**operation, **changes)
        leaves, given = draw(spec, 333, position, dtype, shape=(2, 2, 64))
        detached = [x.detach() for x in leaves[:3]]
        inputs = [x.to("cuda", dtype).requires_grad_() for x in detached]
        wide = [x.to("cuda", torch.float32).requires_grad_() for x in detached]
        out = fast.attention_output(*inputs, spec, **there(given, "cuda"))
        expected = attend(*wide, spec, **there(given, "cuda", torch.float32))[0]
        gradients = (
            torch.autograd.grad(x.float().sum(), i) for x, i in ((out, inputs), (expected, wide))
        )
        by_row = [(out.detach(), expected.detach())]
        # some rows of them are near zero
        whole = [(x.flatten(), y.flatten()) for x, y in zip(*gradients, strict=True)]
        if spec.signed and dtype == torch.bfloat16:
            continue  # signed sums cancel: 8 bits of each logit leave none of a small sum
        for got, want in by_row + whole:
            errors = (got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
            limit = 5e-3 if dtype == torch.float32 else 0.1
            assert errors.max() < limit, (spec, position, float(errors.max()))
