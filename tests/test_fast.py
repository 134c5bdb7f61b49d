"""The fast forms against the dense reference: values, gradients, memory, and which form is trusted when."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sinkutils.model import fast, flash
from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend, features, visible

HEADS, DIM = 2, 6

OPERATIONS = [
    {},
    {"scale": 0.2},
    {"normalizer": "none"},
    {"normalizer": "max_abs_sum"},
    {"normalizer": "p_norm", "p": 2.0},
    {"normalizer": "p_norm", "p": 0.25},
    # Every similarity that cannot be negative, so that a new one is tested by being there.
    *(
        {"similarity": f, "normalizer": z}
        for f in SIMILARITIES
        if f not in ("exp", "linear")
        for z in ("sum", "none")
        if (f, z) != ("softpick", "none")
    ),
    {"similarity": "sigmoid", "normalizer": "max_abs_sum"},
    {"similarity": "sigmoid", "normalizer": "p_norm", "p": 3.0},
    {"similarity": "elu", "normalizer": "p_norm", "p": 0.5},
    {"similarity": "relu", "normalizer": "length"},
    {"similarity": "sigmoid", "normalizer": "none", "logit_bias": -3.0},
    {"similarity": "linear", "normalizer": "none"},
    {"similarity": "linear", "normalizer": "max_abs_sum"},
    {"similarity": "linear", "kernel": "elu"},
    {"similarity": "linear", "kernel": "elu", "normalizer": "none"},
    {"similarity": "linear", "kernel": "elu", "normalizer": "max_abs_sum"},
    {"similarity": "linear", "kernel": "elu", "normalizer": "p_norm", "p": 2.0},
    {"similarity": "linear", "kernel": "mlp", "normalizer": "none"},
    {"similarity": "linear", "kernel": "mlp", "normalizer": "max_abs_sum"},
]
MASKS = [{}, {"window": 5}, {"prefix": 4}]
BIASES = ["none", "k", "kv", "v"]
# Every operation under every mask; the biases take turns, so that each meets every mask and most operations.
SPECS = [
    AttentionSpec(**operation, **mask, bias=biases[(turn + other) % len(biases)])
    for turn, operation in enumerate(OPERATIONS)
    for biases in [BIASES[:3] if operation.get("similarity") == "linear" else BIASES]
    for other, mask in enumerate(MASKS)
]


@pytest.fixture
def long_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the forms of long sequences at any length, with blocks and chunks that short ones fill."""
    monkeypatch.setattr(fast, "DENSE_LENGTH", {"cpu": 0})
    monkeypatch.setattr(fast, "BLOCK", 8)
    monkeypatch.setattr(fast, "ROWS", 8)
    monkeypatch.setattr(fast, "CHUNK", 4)


@pytest.fixture
def flex_forms(long_forms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take FlexAttention on the CPU: traced but not compiled it is dense, with the same identities and gradients."""

    @functools.cache
    def traced(function: Callable[..., Any], spec: AttentionSpec, device: torch.device) -> Callable[..., Any]:
        return torch.compile(function, **flash.FLEX_COMPILE, backend="eager")

    monkeypatch.setattr(flash, "_flex_kernel", traced)
    monkeypatch.setattr(fast, "FORM", "flex")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # which refuses gradients there


def draw(
    spec: AttentionSpec,
    length: int,
    position: str = "none",
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    dim: int = DIM,
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the keyword arguments that the spec needs, every tensor of them with a gradient."""
    generator = torch.Generator().manual_seed(length)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    inputs = [leaf(batch, HEADS, length, dim) for _ in range(3)]
    extras: dict[str, Any] = {}
    if spec.has_key_bias:
        extras["key_bias"] = leaf(HEADS, dim)
    if spec.bias in ("kv", "v"):
        extras["value_bias"] = leaf(HEADS, dim)
    if position != "none":
        extras["distance_bias"] = leaf(1 if position == "shared" else HEADS, length + 2)
    if spec.kernel == "mlp":
        first, second = leaf(dim, dim), leaf(dim, dim)
        inputs += [first, second]
        extras["mlp"] = lambda x: torch.tanh(x @ first) @ second / dim
    return inputs, extras


def assert_same_as_dense(spec: AttentionSpec, inputs: list[Tensor], extras: dict[str, Any], atol: float) -> None:
    """Values and the gradient of every input, for one random direction of the output."""
    leaves = inputs + [x for x in extras.values() if isinstance(x, Tensor)]
    out = {"fast": fast.attend(*inputs[:3], spec, **extras), "dense": attend(*inputs[:3], spec, **extras)[0]}
    direction = torch.randn(out["dense"].shape, generator=torch.Generator().manual_seed(1)).to(out["dense"])
    gradients = {name: torch.autograd.grad(x, leaves, direction, allow_unused=True) for name, x in out.items()}
    torch.testing.assert_close(out["fast"], out["dense"], rtol=atol, atol=atol)
    for got, expected in zip(gradients["fast"], gradients["dense"], strict=True):
        zero = torch.zeros(())  # an input that one form does not touch has no gradient, or zeros
        torch.testing.assert_close(
            zero.to(direction) if got is None else got.sum() if expected is None else got,
            zero.to(direction) if expected is None else expected,
            rtol=atol,
            atol=atol,
        )


def name(spec: AttentionSpec) -> str:
    default = AttentionSpec()
    changed = [f"{k}={v}" for k, v in vars(spec).items() if v != getattr(default, k)]
    return " ".join(changed) or "softmax"


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_one_dense_block_equals_the_reference(spec):
    for length, position in ((17, "none"), (17, "heads")):
        inputs, extras = draw(spec, length, position)
        assert_same_as_dense(spec, inputs, extras, 1e-10)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_blocks_and_chunks_equal_the_reference(spec, long_forms):
    for length, position in ((1, "none"), (29, "none"), (21, "heads")):
        inputs, extras = draw(spec, length, position)
        assert_same_as_dense(spec, inputs, extras, 1e-10)


FLEX = [
    (operation, position, changes)
    for operation, (position, changes) in zip(
        [o for o in OPERATIONS if o.get("similarity") != "linear"],
        itertools.cycle(
            [("heads", {"bias": "kv", "window": 5}), ("none", {"bias": "k", "prefix": 4}), ("shared", {"bias": "v"})]
        ),
        strict=False,
    )
]


@pytest.mark.parametrize(("operation", "position", "changes"), FLEX, ids=str)
def test_flex_attention_over_the_logarithm_equals_the_reference(operation, position, changes, flex_forms):
    spec = AttentionSpec(**operation, **changes)
    inputs, extras = draw(spec, 13, position)
    assert_same_as_dense(spec, inputs, extras, 1e-10)


@given(
    operation=st.sampled_from(OPERATIONS),
    length=st.integers(1, 40),
    window=st.none() | st.integers(1, 50),
    prefix=st.integers(1, 50),
    bias=st.sampled_from(["none", "kv"]),
    position=st.sampled_from(["none", "shared", "heads"]),
    block=st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_any_length_window_prefix_and_block_equals_the_reference(
    operation, length, window, prefix, bias, position, block
):
    spec = AttentionSpec(**operation, bias=bias, window=window, prefix=1 if window else prefix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "DENSE_LENGTH", {})
        patch.setattr(fast, "BLOCK", block)
        patch.setattr(fast, "ROWS", block)
        patch.setattr(fast, "CHUNK", block)
        inputs, extras = draw(spec, length, position)
        assert_same_as_dense(spec, inputs, extras, 1e-9)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_float32_agrees_to_its_precision(operation, long_forms):
    spec = AttentionSpec(**operation, bias="kv")
    inputs, extras = draw(spec, 33, dtype=torch.float32)
    assert_same_as_dense(spec, inputs, extras, 2e-4 if spec.p > 1 else 5e-5)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.parametrize("form", ["short", "long"])
def test_bfloat16_stays_near_float32(operation, form, request):
    if form == "long":
        request.getfixturevalue("long_forms")
    spec = AttentionSpec(**operation)
    (q, k, v, *_), extras = draw(spec, 33, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = [x.bfloat16() for x in (q, k, v)]
        out = fast.attend(*half, spec, **extras)
    expected = attend(*(x.float() for x in half), spec, **extras)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_minus_infinity_in_the_position_term_gives_zero_rows_in_every_form(long_forms):
    g = torch.full((1, 20), -math.inf, dtype=torch.float64)
    for spec in (AttentionSpec(), AttentionSpec(normalizer="p_norm", p=0.5), AttentionSpec(similarity="sigmoid")):
        (q, k, v), _ = draw(spec, 20)
        out = fast.attend(q, k, v, spec, distance_bias=g)
        assert (out == 0).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_softmax_of_large_logits_neither_overflows_nor_differs(long_forms):
    for spec in (AttentionSpec(), AttentionSpec(window=7), AttentionSpec(normalizer="p_norm", p=2.0)):
        (q, k, v), _ = draw(spec, 20)
        with torch.no_grad():
            q *= 300
        assert fast.attend(q, k, v, spec).isfinite().all()
        torch.testing.assert_close(fast.attend(q, k, v, spec), attend(q, k, v, spec)[0], rtol=0, atol=1e-10)


def test_refusals_are_those_of_the_reference():
    (q, k, v), _ = draw(AttentionSpec(), 5)
    with pytest.raises(ValueError, match="needs the argument key_bias"):
        fast.attend(q, k, v, AttentionSpec(bias="k"))
    with pytest.raises(ValueError, match="k and v must have the shape of q"):
        fast.log_mass(q, k[:, :, 1:], AttentionSpec())
    with pytest.raises(ValueError, match="needs the argument key_bias"):
        fast.log_mass(q, k, AttentionSpec(bias="kv"))


def dense_mass(q: Tensor, k: Tensor, spec: AttentionSpec, **extras: Any) -> Tensor:
    """The sum of |f(s_ij)| over what row i sees, from f itself, and its logarithm."""
    logits = features(q, spec, extras.get("mlp")) @ features(k, spec, extras.get("mlp")).mT * q.shape[-1] ** -0.5
    positions = torch.arange(q.shape[2])
    if "distance_bias" in extras:
        logits = logits + extras["distance_bias"][:, (positions[:, None] - positions).clamp(min=0)]
    f = torch.expm1 if spec.similarity == "softpick" else spec.f.value
    mass = f(logits).abs().masked_fill(~visible(positions, positions, spec), 0).sum(-1)
    if "key_bias" in extras:
        star = features(extras["key_bias"], spec, extras.get("mlp"))
        mass = mass + f((features(q, spec, extras.get("mlp")) * star[:, None]).sum(-1) * q.shape[-1] ** -0.5).abs()
    return mass.log()


MASSES = {
    (spec.similarity, spec.kernel, spec.window, spec.prefix, bias): dataclasses.replace(spec, bias=bias)
    for spec, bias in itertools.product(SPECS, ("none", "k"))
    if spec.normalizer in ("sum", "none")
}


@pytest.mark.parametrize("spec", MASSES.values(), ids=name)
def test_log_mass_is_the_logarithm_of_the_row_sum_of_absolute_similarities(spec):
    for length, position in ((1, "none"), (70, "none"), (70, "heads")):
        (q, k, *_), extras = draw(spec, length, position)
        got = fast.log_mass(q, k, spec, **extras)
        assert not got.requires_grad
        torch.testing.assert_close(got, dense_mass(q, k, spec, **extras), rtol=0, atol=1e-10)


@pytest.mark.parametrize("k", [0, 3])
def test_the_chosen_column_of_softmax_follows_from_log_mass(k):
    spec = AttentionSpec(bias="kv")
    (q, keys, v), extras = draw(spec, 40)
    _, weights = attend(q, keys, v, spec, **extras)
    logits = (q * keys[:, :, k : k + 1]).sum(-1) * DIM**-0.5
    mass = fast.log_mass(q, keys, spec, key_bias=extras["key_bias"])
    torch.testing.assert_close(torch.exp(logits - mass)[..., k:], weights[:, :, k:, 1 + k], rtol=0, atol=1e-12)


def test_log_mass_is_float32_or_better_and_knows_no_mass():
    (q, k, _), _ = draw(AttentionSpec(), 9, dtype=torch.bfloat16)
    mass = fast.log_mass(q, k, AttentionSpec())
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, dense_mass(q.float(), k.float(), AttentionSpec()), rtol=0, atol=1e-5)
    spec = AttentionSpec(similarity="linear", normalizer="none")
    assert (fast.log_mass(0 * q, k, spec) == -math.inf).all()


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel was compared yet, and what is found here stays here."""
    monkeypatch.setattr(flash, "TRUST", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", flash.KINDS["fused"])
def test_a_wrong_log_sum_exp_is_caught_under_every_kind_of_mask(kind, dtype, untried, monkeypatch):
    device = torch.device("cpu")
    assert flash.trusted("fused", kind, device, dtype, 16)
    kernel, asked = flash.fused, []

    def wrong(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
        asked.append((kw.get("mask") is not None, kw.get("causal", True), q.shape[2] == k.shape[2]))
        out, lse = kernel(q, k, v, **kw)
        return out, lse + torch.nn.functional.one_hot(torch.tensor(3), q.shape[2]) / 4  # in one row that sees key 1

    monkeypatch.setattr(flash, "fused", wrong)
    flash.TRUST.clear()
    with pytest.warns(UserWarning, match=f"{kind} attention.* other row sums"):
        assert not flash.trusted("fused", kind, device, dtype, 16)
    shapes = {"causal": (False, True, True), "full": (False, False, True), "mask": (True, True, True)}
    assert asked[-1] == shapes.get(kind, (True, True, False))  # a window calls the kernel on a block and its keys


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", flash.KINDS["flex"])
def test_flex_attention_with_a_wrong_log_sum_exp_is_caught_under_every_kind_of_mask(kind, untried, monkeypatch):
    device = torch.device("cpu")
    assert flash.trusted("flex", kind, device, torch.float32, 16)
    run = flash.flex_attention

    def base_2(*inputs: Any, **kw: Any) -> tuple[Tensor, flex_attention.AuxOutput]:
        out, aux = run(*inputs, **kw)
        return out, aux._replace(lse=aux.lse / math.log(2))

    monkeypatch.setattr(flash, "flex_attention", base_2)
    flash.TRUST.clear()
    with pytest.warns(UserWarning, match=f"flex kernel .*{kind} attention.* other row sums"):
        assert not flash.trusted("flex", kind, device, torch.float32, 16)


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(prefix=5), AttentionSpec(bias="k")], ids=name)
def test_row_sums_do_not_come_from_a_kernel_in_base_2(spec, untried, monkeypatch):
    (q, k, _), extras = draw(spec, 30)
    kernel = flash.fused

    def base_2(*inputs: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel(*inputs, **kw)
        return out, lse / math.log(2)

    monkeypatch.setattr(flash, "fused", base_2)
    with pytest.warns(UserWarning, match="using blocks of queries instead"):
        mass = fast.log_mass(q, k, spec, **extras)
    torch.testing.assert_close(mass, dense_mass(q, k, spec, **extras), rtol=0, atol=1e-10)


def test_a_missing_kernel_falls_back_to_blocks_without_noise(untried, monkeypatch):
    def missing(*inputs: Any, **kw: Any) -> Tensor:
        raise RuntimeError("not on this device")

    (q, k, _), _ = draw(AttentionSpec(), 30)
    monkeypatch.setattr(flash, "fused", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mass = fast.log_mass(q, k, AttentionSpec())
    torch.testing.assert_close(mass, dense_mass(q, k, AttentionSpec()), rtol=0, atol=1e-10)


def test_a_graph_under_compilation_trusts_only_what_was_compared_before(untried):
    def asks(x: Tensor, spec: AttentionSpec) -> Tensor:
        return x + 1 if flash.trusted("flex", flash.flex_kind(spec), x.device, x.dtype, x.shape[-1]) else x - 1

    x, spec = torch.zeros(3, 16), AttentionSpec(window=4)
    compiled = torch.compile(asks, fullgraph=True, backend="eager")
    assert (compiled(x, spec) == -1).all() and not flash.TRUST
    flash.TRUST["flex", "causal", x.device, x.dtype, 16] = True  # another kind of mask
    torch.compiler.reset()
    assert (torch.compile(asks, fullgraph=True, backend="eager")(x, spec) == -1).all()
    flash.TRUST["flex", "window", x.device, x.dtype, 16] = True
    torch.compiler.reset()
    assert (torch.compile(asks, fullgraph=True, backend="eager")(x, spec) == 1).all()


def test_which_kernel_serves_where():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    plain, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    for asked, expected in (
        (("cuda", half, 64, False), plain),
        (("cuda", half, 64, True), efficient),  # a mask is no reason for the slow path
        (("cuda", half, 512, False), efficient),
        (("cuda", single, 64, False), efficient),
        (("cuda", single, 64, True), efficient),
        (("cuda", double, 64, False), None),
        (("cpu", double, 64, True), "_scaled_dot_product_flash_attention_for_cpu"),
        (("mps", single, 64, False), None),
    ):
        assert flash.kernel_for(*asked) == expected
        assert expected is None or hasattr(torch.ops.aten, expected)


@pytest.mark.parametrize(
    ("form", "spec", "device", "dtype", "length", "term"),
    [
        ("fused", {}, "cpu", torch.float32, 64, False),
        ("fused", {"prefix": 5, "bias": "kv"}, "cuda", torch.bfloat16, 4096, False),
        ("fused", {"window": 64}, "cpu", torch.float32, 64, False),  # which sees everything
        ("dense", {"window": 63}, "cpu", torch.float32, 64, False),
        ("dense", {}, "cpu", torch.bfloat16, 64, False),  # where the kernel is slow
        ("fused", {}, "cpu", torch.bfloat16, 4096, False),
        ("dense", {}, "cuda", torch.bfloat16, 64, True),
        ("linear", {"similarity": "linear", "normalizer": "none"}, "cuda", torch.float32, 4096, False),
        ("blocks", {"similarity": "linear", "normalizer": "none", "window": 5}, "cuda", torch.float32, 4096, False),
        ("blocks", {"similarity": "sigmoid"}, "cpu", torch.float32, 4096, False),
        ("flex", {"similarity": "sigmoid"}, "cuda", torch.bfloat16, 4096, False),
        ("flex", {"window": 512}, "cuda", torch.bfloat16, 4096, False),
        ("flex", {}, "cuda", torch.float32, 4096, True),
        ("blocks", {"window": 512}, "cuda", torch.float64, 4096, False),
    ],
)
def test_which_form_serves_where(form, spec, device, dtype, length, term, monkeypatch):
    monkeypatch.setattr(flash, "HAS_TRITON", True)
    assert fast.choose_form(AttentionSpec(**spec), device, dtype, length, 64, term) == form
    monkeypatch.setattr(flash, "HAS_TRITON", False)
    assert fast.choose_form(AttentionSpec(**spec), device, dtype, length, 64, term) == form.replace("flex", "blocks")


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation, forward or backward, makes (views of its inputs aside)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


LONG = [
    ("softmax", {}, "none"),
    ("key and value bias", {"bias": "kv"}, "none"),
    ("prefix", {"prefix": 1000}, "none"),
    ("window", {"window": 100}, "none"),
    ("position term", {}, "heads"),
    ("sigmoid", {"similarity": "sigmoid", "normalizer": "none"}, "none"),
    ("identity", {"similarity": "linear", "normalizer": "none"}, "none"),
    ("elu kernel", {"similarity": "linear", "kernel": "elu"}, "none"),
]


@pytest.mark.parametrize(("spec", "position"), [(AttentionSpec(**s), p) for _, s, p in LONG], ids=[n for n, *_ in LONG])
def test_no_tensor_of_a_training_step_grows_with_the_square_of_the_length(spec, position):
    length, dim = 4096, 16
    inputs, extras = draw(spec, length, position, torch.float32, batch=1, dim=dim)
    with Largest() as largest:
        fast.attend(*inputs, spec, **extras).sum().backward()
    assert largest.elements <= HEADS * (length + 1) * max(fast.BLOCK, 2 * dim)
    with Largest() as largest:
        fast.log_mass(*inputs[:2], spec, **{k: x for k, x in extras.items() if k != "value_bias"})
    assert largest.elements <= HEADS * (length + 1) * max(fast.BLOCK, 2 * dim)


def test_what_the_backward_pass_keeps_grows_linearly_with_the_length():
    spec = AttentionSpec(similarity="sigmoid", normalizer="none")

    def kept(length: int) -> int:
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        inputs, _ = draw(spec, length, dtype=torch.float32, batch=1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = fast.attend(*inputs, spec)
        assert out.requires_grad
        return sum(storages.values())

    assert kept(2048) <= 2.2 * kept(1024)


@pytest.mark.parametrize(
    ("form", "operation"),
    [
        ("short", {"bias": "kv"}),
        ("short", {"similarity": "sigmoid", "normalizer": "none"}),
        ("long", {"window": 9}),
        ("long", {"similarity": "linear", "kernel": "elu"}),
    ],
    ids=str,
)
def test_it_compiles_as_one_graph(form, operation, request):
    if form == "long":
        request.getfixturevalue("long_forms")
    spec = AttentionSpec(**operation)
    inputs, extras = draw(spec, 17)
    torch.compiler.reset()
    compiled = torch.compile(fast.attend, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*inputs, spec, **extras), attend(*inputs, spec, **extras)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_cuda_equals_the_reference(operation):
    settings = itertools.product((torch.float32, torch.bfloat16), ({}, {"bias": "kv"}, {"window": 50}, {"prefix": 40}))
    for (dtype, changes), position in itertools.product(settings, ("none", "heads")):
        spec = AttentionSpec(**operation, **changes)
        inputs, extras = draw(spec, 333, position, dtype, dim=64)
        inputs, extras = to_cuda(inputs, extras)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        widened = {k: x.detach().float() if isinstance(x, Tensor) else x for k, x in extras.items()}
        out = fast.attend(*inputs, spec, **extras)
        expected = attend(*wide, spec, **widened)[0]
        gradients = (torch.autograd.grad(x.float().sum(), i) for x, i in ((out, inputs), (expected, wide)))
        widened.pop("value_bias", None)
        cpu = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in widened.items()}
        masses = (
            fast.log_mass(*inputs[:2], spec, **{k: extras[k] for k in widened}).cpu(),
            fast.log_mass(*(x.cpu() for x in wide[:2]), spec, **cpu),
        )
        pairs = [(out, expected), masses, *zip(*gradients, strict=True)]
        if spec.signed and dtype == torch.bfloat16:
            pairs = pairs[1:2]  # signed sums cancel: 8 bits of each logit leave none of a small sum
        for got, want in pairs:
            error = (got.float() - want).norm() / want.norm()
            assert error < (5e-3 if dtype == torch.float32 else 0.1), (spec, position, float(error))


def to_cuda(inputs: list[Tensor], extras: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the extras there; a kernel without weights of its own in place of the MLP."""
    moved = [x.detach().cuda().requires_grad_() for x in inputs[:3]]
    return moved, {k: x.detach().cuda() if isinstance(x, Tensor) else torch.tanh for k, x in extras.items()}
