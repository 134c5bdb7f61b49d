"""bf16 products on a CPU without instructions for them: the rounded exact product, wherever one is asked for."""

import dataclasses
import runpy
import sys

import digits
import pytest
import torch
from helpers import CPU

from sinkutils.data.cache import pack_corpus
from sinkutils.paths import ROOT
from sinkutils.study import grid
from sinkutils.study.grid import config
from sinkutils.training import products
from sinkutils.training.products import bf16_products
from sinkutils.training.trainer import train

HALF = torch.bfloat16
SHAPES = {
    "mm": [((7, 33), (33, 5)), ((1, 64), (64, 129)), ((300, 1), (1, 17))],
    "bmm": [((3, 7, 33), (3, 33, 5)), ((1, 65, 16), (1, 16, 65))],
    "addmm": [((5,), (7, 33), (33, 5)), ((64, 129), (64, 64), (64, 129))],
    "baddbmm": [((3, 1, 5), (3, 7, 33), (3, 33, 5)), ((1, 65, 65), (1, 65, 16), (1, 16, 65))],
}


@pytest.fixture
def slow_in_bf16(monkeypatch):
    """As on a CPU that is, and what was computed in fp32 there."""
    made, kernels = [], products._in_fp32

    def counted(name):
        def count(kernel):
            def call(keys, *factors, **others):
                made.append((name, *{x.dtype for x in factors}))
                return kernel(keys, *factors, **others)

            return call

        return tuple(count(kernel) for kernel in kernels(name))

    monkeypatch.setattr(products, "lacks_bf16", lambda: True)
    monkeypatch.setattr(products, "_in_fp32", counted)
    return made


@pytest.mark.parametrize(("name", "shapes"), [(name, shapes) for name in SHAPES for shapes in SHAPES[name]])
@pytest.mark.parametrize("dtype", [HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("at_once", [products.AT_ONCE, 64])  # and some rows at a time, the last fewer
def test_products_are_the_exact_ones_rounded_and_other_types_are_left_alone(
    name, shapes, dtype, at_once, slow_in_bf16, monkeypatch
):
    monkeypatch.setattr(products, "AT_ONCE", at_once)
    torch.manual_seed(0)
    product = getattr(torch, name)
    factors = [torch.randn(shape).to(dtype) for shape in shapes]
    factors[-1] = factors[-1].mT.contiguous().mT  # as weights are stored
    scales = {"alpha": 0.3, "beta": 0.7} if name.endswith("addmm") or name == "baddbmm" else {}
    without, exact = product(*factors, **scales), product(*(x.double() for x in factors), **scales)
    with bf16_products(CPU):
        plain = product(*factors, **scales)
        into = product(*factors, **scales, out=torch.empty_like(plain))
    assert slow_in_bf16 == 2 * [(name, dtype)]
    assert plain.dtype == into.dtype == dtype and torch.equal(plain, into)
    if dtype != HALF:
        assert torch.equal(plain, without)
        return
    # Sums in fp32 may fall on the other side of a rounding: a unit in the last of bf16's eight digits.
    torch.testing.assert_close(plain.double(), exact, rtol=2**-8, atol=1e-5)
    assert (plain == exact.to(HALF)).float().mean() > 0.99


def test_gradients_under_autocast_are_those_of_the_rounded_factors(slow_in_bf16):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 21, 33), (17, 33), (17,)))
    with bf16_products(CPU):
        with torch.autocast("cpu", HALF):
            out = torch.nn.functional.linear(x, weight, bias)
        out.backward(torch.ones_like(out))
    assert len(slow_in_bf16) == 3
    rounded = [y.detach().to(HALF).double().requires_grad_() for y in (x, weight, bias)]
    torch.nn.functional.linear(*rounded).sum().backward()
    for mine, exact in zip((x, weight, bias), rounded, strict=True):
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=2**-8, atol=1e-5)


def test_factors_of_two_types_are_refused_as_ever(slow_in_bf16):
    with bf16_products(CPU), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 2, dtype=HALF), torch.ones(2, 2))


def test_afterwards_and_on_other_devices_nothing_is_replaced(slow_in_bf16):
    square = torch.ones(2, 2, dtype=HALF)
    with pytest.raises(KeyError), bf16_products(CPU):
        raise KeyError
    torch.mm(square, square)
    with bf16_products(torch.device("cuda")):
        torch.mm(square, square)
    assert slow_in_bf16 == []


@pytest.mark.parametrize(
    ("has", "lacks"),
    [({"avx2": True, "avx512_f": False}, True), ({"avx2": True, "avx512_f": True}, False), ({"neon": True}, False)],
)
def test_only_an_x86_cpu_without_avx_512_lacks_them(has, lacks, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert products.lacks_bf16() == lacks


def test_training_takes_them_and_ends_where_torchs_own_end(tiny, corpus, tmp_path, monkeypatch, slow_in_bf16):
    run = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, precision="bf16"))
    ours = train(run, tmp_path / "ours", corpus=corpus, progress=False)
    count = len(slow_in_bf16)
    assert {dtype for _, *dtypes in slow_in_bf16 for dtype in dtypes} >= {HALF} and count > run.train.steps
    monkeypatch.setattr(products, "lacks_bf16", lambda: False)
    theirs = train(run, tmp_path / "theirs", corpus=corpus, progress=False)
    assert len(slow_in_bf16) == count
    ends = [record.metrics["final"]["valid_loss"] for record in (ours, theirs)]
    assert ends[0] == pytest.approx(ends[1], abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu", "training"])
def test_the_benchmarks_of_a_training_step_take_them_as_the_trainer_does(
    script, corpus, tmp_path, monkeypatch, slow_in_bf16
):
    smoke, packed = config("default", "smoke"), tmp_path / "corpus.tar.xz"
    half = dataclasses.replace(smoke, train=dataclasses.replace(smoke.train, precision="bf16"))
    monkeypatch.setattr(grid, "config", lambda name, preset: half)
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    pack_corpus(corpus, packed)
    of_gpu = ["--preset", "smoke", "--corpus", f"packed:{packed}", "--device", "cpu", "--compile", "off"]
    options = {"gpu": of_gpu, "training": ["--sizes", "64"]}[script]
    monkeypatch.setattr(sys, "argv", [script, *options, "--steps", "1", "--rounds", "1"])
    runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
    assert slow_in_bf16.count(("mm", HALF)) > 50  # more than the peak's


def test_a_record_trained_again_takes_the_place_of_its_own_row_only():
    rows = [{"record": n, "again_on": on, "n": 1} for n in ("fixed_1/0", "fixed_1/1") for on in (["avx2"], ["amx"])]
    again = {"record": "fixed_1/0", "again_on": ["amx"], "n": 2}
    assert digits.without(rows, [again]) == [rows[0], *rows[2:]]
