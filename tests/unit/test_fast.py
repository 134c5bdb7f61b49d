"""The fast forms against the dense reference: values, gradients, and which form serves where."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import draw, name_of, own_model, refuses
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinkutils import measure
from sinkutils.measuring import own, passes
from sinkutils.model import attention, fast, pieces, windows
from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend, register

OPERATIONS = [
    {},
    {"scale": 0.2},
    {"normalizer": "none"},
    {"normalizer": "p_norm", "p": 0.25},
    # Every similarity that cannot be negative, so that a new one is tested by being there.
    *({"similarity": f, "normalizer": z} for f in SIMILARITIES if f not in ("exp", "linear") for z in ("sum", "none")
      if (f, z) != ("softpick", "none")),
    *({"similarity": f, "normalizer": "max_abs_sum"} for f in ("exp", "sigmoid")),
    {"similarity": "sigmoid", "normalizer": "p_norm", "p": 3.0},
    {"similarity": "sigmoid", "normalizer": "none", "logit_bias": -3.0},
    {"similarity": "relu", "normalizer": "length"},
    {"similarity": "linear", "normalizer": "max_abs_sum"},
    *({"similarity": "linear", "kernel": "elu", "normalizer": z} for z in ("sum", "none", "max_abs_sum")),
    {"similarity": "linear", "kernel": "elu", "normalizer": "p_norm", "p": 2.0},
    {"similarity": "linear", "kernel": "mlp", "normalizer": "none"},
]  # fmt: skip
NORMALIZERS = ("sum", "none", "max_abs_sum", "p_norm", "length")
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


@pytest.fixture
def long_forms(monkeypatch):
    """The forms of long sequences on short ones too, with pieces of some rows and chunks of some tokens."""

    def short(rows: int = 128, logits: int = 2**18, chunk: int = 64) -> None:
        monkeypatch.setattr(fast, "DENSE_LENGTH", 0)
        monkeypatch.setattr(fast, "CHUNK", chunk)
        monkeypatch.setattr(fast, "LEAST_WINDOW", 1)
        monkeypatch.setattr(pieces, "ROWS", rows)
        monkeypatch.setattr(pieces, "LOGITS", {"cpu": logits})

    return short


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_forms_of_long_sequences_equal_the_reference(spec, long_forms):
    long_forms(rows=8, logits=100, chunk=4)  # one head at a time
    for length, position in ((1, "none"), (17, "none"), (17, "heads"), (12, "shared")):
        assert_same_as_dense(spec, *draw(spec, length, position), 1e-10)
    long_forms(rows=5, chunk=7)  # all heads together
    assert_same_as_dense(spec, *draw(spec, 12), 1e-10)


@pytest.mark.parametrize("fields", OPERATIONS, ids=str)
@pytest.mark.parametrize("length", [2, 127, 129, 300])
def test_long_forms_at_odd_lengths(fields, length, long_forms):
    long_forms()
    for mask in ({}, {"window": 130}, {"prefix": 131 if length > 131 else 2}, {"bias": "kv"}):
        spec = AttentionSpec(**fields, **mask)
        inputs, extras = draw(spec, length, shape=(1, 2, 4))
        assert_same_as_dense(spec, inputs, extras, 1e-9)


@pytest.mark.parametrize("spec", SPECS[::3], ids=name_of)
def test_long_forms_in_lower_precision(spec, long_forms):
    long_forms()
    test_lower_precision_stays_near_the_reference(spec)


def test_no_operation_makes_a_matrix_of_logits_for_a_long_text():
    length = 1100  # of which a matrix of two heads would be 2.4M logits
    others = ({"window": 10}, {"window": 64}, {"window": 700}, {"differential": True})
    for fields in (*OPERATIONS, *others, {"sink_logit": "zero"}):
        spec = AttentionSpec(**fields)
        inputs, extras = draw(spec, length, dtype=torch.float32, shape=(1, 2, 4))
        with LargestTensor() as made:
            fast.attention_output(*inputs[:3], spec, **extras).sum().backward()
        # The room of a piece is the largest: its logits three times.
        assert made.largest <= 3 * pieces.LOGITS["cpu"], (fields, made.largest)


def test_measuring_a_long_text_makes_no_matrix_of_its_shares(monkeypatch):
    monkeypatch.setattr(own, "MOST_SHARES", 2**17)
    for fields in ({}, {"similarity": "sigmoid", "normalizer": "none"}, {"similarity": "softpick"},
                   {"similarity": "linear", "kernel": "mlp", "normalizer": "none"}):  # fmt: skip
        model = own_model(attention=AttentionSpec(**fields), context_length=1100)
        with LargestTensor() as made:
            measure(model, torch.arange(1100)[None] % 60)
        most = 3 * pieces.LOGITS["cpu"]  # the room of the model's own pieces
        assert made.largest <= most, (fields, made.largest)  # all shares would be 2.4M


def attended_in_loops(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """A softmax with a window, or differential attention, key by key in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    outs = []
    for text, head, i in itertools.product(*map(range, q.shape[:3])):
        seen = range(max(0, i + 1 - (spec.window or q.shape[2])), i + 1)
        keys = torch.stack([k[text, head, j] for j in seen])
        values = torch.stack([v[text, head, j] for j in seen])
        row = q[text, head, i]
        if spec.differential:
            first, second = (
                (keys[:, half::2] @ row[half::2] / (q.shape[3] / 2) ** 0.5).softmax(0)
                for half in (0, 1)
            )
            weights = first - mix.double() * second
        else:
            weights = (keys @ row / q.shape[3] ** 0.5).softmax(0)
        outs.append(weights @ values)
    return torch.stack(outs).unflatten(0, q.shape[:3])


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize(
    "fields", [*({"window": w} for w in (1, 2, 7, 12, 22)), {"differential": True}], ids=str
)
def test_windows_and_two_maps_are_their_loops(fields, dtype, near, long_forms, monkeypatch):
    long_forms(rows=8, logits=100)
    monkeypatch.setattr(windows, "SIZE", 14)
    spec = AttentionSpec(**fields)
    for length in (1, 12, 23):
        inputs, extras = draw(spec, length, dtype=dtype, shape=(2, 3, 4))
        mix = extras.get("mix", torch.tensor(0.0))
        out = fast.attention_output(*inputs, spec, **extras)
        expected = attended_in_loops(spec, *inputs, mix)
        assert out.dtype == dtype
        leaves = [*inputs, *extras.values()]
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        slopes = torch.autograd.grad(out, leaves, direction)
        wanted = torch.autograd.grad(expected, leaves, direction.double())
        for got, want in zip((out, *slopes), (expected, *wanted), strict=True):
            size = max(1.0, float(want.detach().abs().max()))
            assert_close(got.double(), want.double(), rtol=near, atol=near * size)


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that operations make."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_a_similarity_of_ones_own_in_pieces(long_forms, monkeypatch):
    long_forms(rows=8)
    monkeypatch.setattr(attention, "SIMILARITIES", dict(attention.SIMILARITIES))
    names = len(attention.SIMILARITY_NAMES)
    try:
        register("squared", lambda s: s.square().clamp(max=1e6))
        register("softened", torch.nn.functional.softplus, softplus_log)
        for f, z in itertools.product(("squared", "softened"), NORMALIZERS):
            spec = AttentionSpec(similarity=f, normalizer=z)
            assert_same_as_dense(spec, *draw(spec, 19), 1e-9)
        spec = AttentionSpec(similarity="softened")
        inputs, _ = draw(spec, 19, dtype=torch.float32)  # rows in which f itself is 0
        g = torch.full((1, 19), -300.0, requires_grad=True)
        assert_same_as_dense(spec, inputs, {"distance_bias": g}, 1e-5)
    finally:
        del attention.SIMILARITY_NAMES[names:]
        attention.LOGARITHMS.pop("softened", None)


def softplus_log(s: Tensor) -> Tensor:
    return torch.where(s < -20, s, torch.nn.functional.softplus(s.clamp(min=-20)).log())


def test_logits_far_below_0_are_no_slow_numbers_and_no_empty_rows(long_forms):
    """ALiBi's far keys, and rows whose similarities would all be 0 in float32."""
    long_forms(rows=8)
    g = (-100.0 * torch.arange(20)[None]).requires_grad_()
    for fields in ({}, {"similarity": "sigmoid"}, {"similarity": "elu"}):
        spec = AttentionSpec(**fields)
        inputs, _ = draw(spec, 20, dtype=torch.float32)
        for bias in (g, g - 500):
            assert_same_as_dense(spec, inputs, {"distance_bias": bias}, 1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["dense", "long", "compiled"])
def test_softpick_is_its_formula_for_logits_of_any_size(form, dtype, long_forms):
    """Against a loop in float64: e^s - 1 must not round to 0, nor to steps of a half-precision e^s."""
    if form == "long":
        long_forms()
    quick = fast.attention_output
    if form == "compiled":
        torch.compiler.reset()
        quick = torch.compile(quick, backend="aot_eager")
    spec = AttentionSpec(similarity="softpick")
    factors = torch.tensor([1 / 3, 1.0, -0.5, 0.7])[None, None, :, None].to(dtype)
    values = torch.tensor([1.0, -2.0, 0.5, 3.0])[None, None, :, None].to(dtype)
    for size in (1e-9, 1e-6, 1e-3, 0.03, 0.1, 2.0, 8.0):
        q = torch.full((1, 1, 4, 1), size, dtype=dtype)
        keys = factors.clone().requires_grad_()
        wide = factors.double().requires_grad_()
        s = q[0, 0, 3].double() * wide[0, 0]  # the last query's logits, (4, 1)
        f = torch.expm1(s)
        expected = (f.relu() / f.abs().sum() * values[0, 0].double()).sum()
        (slope,) = torch.autograd.grad(expected, wide)
        for operation in (quick, lambda *x: attend(*x)[0]):
            out = operation(q, keys, values, spec)[0, 0, 3, 0]
            (got,) = torch.autograd.grad(out, keys)
            rel = 1e-5 if dtype == torch.float32 else 0.01
            assert out.item() == pytest.approx(expected.item(), rel=rel), size
            assert_close(got.double(), slope, rtol=rel, atol=rel * float(slope.abs().max()))


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
        ("parts", {"window": 128}, "cpu", torch.float32, 513, False),
        ("parts", {"window": 512, "bias": "v"}, "cpu", torch.bfloat16, 4096, False),
        ("pieces", {"window": 127}, "cpu", torch.float32, 513, False),
        ("pieces", {"window": 128, "bias": "kv"}, "cpu", torch.float32, 513, False),
        ("pieces", {"window": 128}, "cpu", torch.float32, 513, True),
        ("pieces", {"window": 128}, "cuda", torch.float32, 513, False),
        ("dense", {}, "cpu", torch.bfloat16, 64, False),  # where the kernel is slow
        ("sdpa", {}, "cpu", torch.bfloat16, 4096, False),
        ("dense", {}, "cuda", torch.bfloat16, 64, True),
        ("pieces", {"normalizer": "none"}, "cuda", torch.float32, 4096, False),
        ("pieces", {"similarity": "sigmoid"}, "cuda", torch.bfloat16, 4096, False),
        ("pieces", {}, "cpu", torch.float32, 4096, True),
        ("linear", {"similarity": "linear", "kernel": "elu"}, "cpu", torch.float32, 4096, False),
        ("dense", {"similarity": "linear", "kernel": "elu"}, "cpu", torch.float32, 512, False),
        (
            "pieces",
            {"similarity": "linear", "kernel": "elu", "window": 9},
            "cpu",
            torch.float32,
            4096,
            False,
        ),
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
