"""`su.sinkcheck`: the reference cases, and the faults that it has to name."""

import importlib
import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers import refuses
from safetensors.torch import load_file
from torch import Tensor

import sinkutils as su
from sinkutils.measuring import faults
from sinkutils.measuring.faults import FAULTS, SINK_GRADIENTS, Call, oracle
from sinkutils.paths import ROOT

LEFT_OUT = "the sink is left out of the normaliser"


def as_kernel(attention=oracle):
    """An attention function of `faults` as a kernel with every argument."""

    def kernel(
        q,
        k,
        v,
        scale,
        causal=True,
        window=None,
        first_keys=0,
        sinks=None,
        sink_keys=None,
        sink_values=None,
        documents=None,
        return_lse=False,
    ):
        given = scale, causal, window, first_keys, sinks, sink_keys, sink_values, documents
        out, lse = attention(Call(q, k, v, *given))
        return (out, lse) if return_lse else out

    return kernel


def found(kernel, **options) -> list[str]:
    return su.sinkcheck.run(kernel, **options).faults


# ---- the reference


def test_the_file_is_what_the_script_makes_and_small(tmp_path):
    script = ROOT / "studies" / "sinkcheck_cases.py"
    spec = importlib.util.spec_from_file_location("sinkcheck_cases", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "again.safetensors"
    module.main(path)
    kept, made = load_file(su.sinkcheck.FILE), load_file(path)
    assert kept.keys() == made.keys()
    for name, x in kept.items():
        torch.testing.assert_close(made[name], x, rtol=1e-12, atol=1e-12)
    assert su.sinkcheck.FILE.stat().st_size < 5e6
    assert set(su.sinkcheck.reference()) == set(module.CASES)


def test_inputs_are_exact_in_half_precision():
    for case in su.sinkcheck.reference().values():
        for name in faults.DIFFERENTIABLE:
            x = getattr(case.call, name)
            if x is not None and not case.fine:
                for dtype in (torch.bfloat16, torch.float16):
                    assert torch.equal(x.to(dtype).double(), x)


def softmax_by_hand(case) -> Tensor:
    """The output of a case, written down once more: every query alone, without `su.attend`."""
    call = case.call
    B, H, T, _ = call.q.shape
    S = call.k.shape[2]
    out = torch.zeros_like(case.out)
    for b in range(B):
        for h in range(H):
            g = h * call.k.shape[1] // H
            for i in range(T):
                at = S - T + i
                keys = []
                for j in range(S):
                    seen = not call.causal or j <= at
                    if call.window is not None and at - j >= call.window and j >= call.first_keys:
                        seen = False
                    if call.documents is not None and call.documents[b, j] != call.documents[b, at]:
                        seen = False
                    if seen:
                        keys.append(j)
                logits = call.k[b, g, keys] @ call.q[b, h, i] * call.scale
                values = call.v[b, g, keys]
                if call.sinks is not None:
                    logits = torch.cat([logits, call.sinks[h][None]])
                    values = torch.cat([values, 0 * values[:1]])
                if call.sink_keys is not None:
                    one = (call.sink_keys[h] @ call.q[b, h, i] * call.scale)[None]
                    logits = torch.cat([logits, one])
                    values = torch.cat([values, call.sink_values[h][None]])
                out[b, h, i] = logits.softmax(0) @ values
    return out


@pytest.mark.parametrize("name", su.sinkcheck.reference())
def test_a_reference_is_the_softmax_over_what_a_query_sees(name):
    case = su.sinkcheck.reference()[name]
    torch.testing.assert_close(case.out, softmax_by_hand(case), rtol=0, atol=1e-12)


# ---- a right kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_kernel_is_right_in_every_part(dtype):
    checked = su.sinkcheck.run(as_kernel(), dtype=dtype)
    assert checked.right and checked.faults == []
    assert {outcome.verdict for outcome in checked.outcomes} == {"right"}
    assert len(checked.outcomes) > 150 and len(checked.table) == len(checked.outcomes)


def test_what_a_kernel_does_not_offer_is_not_supported_and_not_wrong():
    def plain(q, k, v, scale):  # causal attention and no more
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("grouped queries are not here yet")
        return su.attend(q, k, v, logit_scale=scale)[0]

    checked = su.sinkcheck.run(plain)
    assert checked.right
    reasons = {outcome.says for outcome in checked.of("not supported")}
    assert "it takes no sinks" in reasons and "it takes no return_lse" in reasons
    assert any("grouped queries are not here yet" in reason for reason in reasons)
    assert "not supported: it takes no window (in window, window_of_one" in str(checked)
    nothing = su.sinkcheck.run(plain, cases=["window"])
    assert not nothing.right and nothing.faults == []


# ---- each fault alone, and two at once


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_known_fault_is_caught_by_its_name(fault):
    kernel = as_kernel(partial(FAULTS[fault], oracle))
    names = found(kernel, gradients=False)
    assert names[0] == fault
    assert all("nan or infinite" in name for name in names[1:])


def test_two_faults_at_once_are_both_named():
    one, two = "the sink is counted twice when merging", "window off by one: one key too few"
    kernel = as_kernel(partial(FAULTS[one], partial(FAULTS[two], oracle)))
    names = found(kernel, gradients=False)
    assert one in names and two in names  # each alone, in the cases that have no window or no sink
    both = found(kernel, gradients=False, cases=["learned_sink_window"])
    assert len(both) == 1 and one in both[0] and two in both[0]


def test_a_fault_that_is_not_known_is_said_to_be_unknown():
    def odd(call: Call):
        out, lse = oracle(call)
        return out.flip(-1) * 1.1, lse

    checked = su.sinkcheck.run(as_kernel(odd), cases=["causal", "learned_sink"], gradients=False)
    assert checked.faults == ["no known fault explains what is wrong in the output"]


# ---- gradients


class WithGradient(torch.autograd.Function):
    """The right output, with the gradients that are given."""

    @staticmethod
    def forward(ctx, out, backward, *inputs):
        ctx.backward_of = backward
        return out

    @staticmethod
    def backward(ctx, cotangent):
        return None, None, *ctx.backward_of(cotangent)


def with_gradients(change):
    """A kernel whose backward pass is change(gradients, call, cotangent)."""

    def kernel(q, k, v, scale, causal=True, window=None, sinks=None):
        call = Call(q.detach(), k.detach(), v.detach(), scale, causal, window)
        if sinks is not None:
            call = call._replace(sinks=sinks.detach())
        out, _ = oracle(call)

        def backward(cotangent):
            right = faults.gradients(oracle, call, cotangent)
            return change(right, call, cotangent).values()

        inputs = [q, k, v] + ([] if sinks is None else [sinks])
        return WithGradient.apply(out, backward, *inputs)

    return kernel


CHECKED = ["learned_sink_scale", "learned_sink_grouped", "learned_sink_window_grouped"]


@pytest.mark.parametrize("fault", SINK_GRADIENTS)
def test_a_wrong_gradient_of_the_sink_is_named(fault):
    def change(right, call, cotangent):
        terms = faults.of_each_query(call, cotangent)
        return right | {"sinks": SINK_GRADIENTS[fault](terms, call)}

    assert found(with_gradients(change), cases=CHECKED) == [f"the gradient of the sink {fault}"]


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_key_gradient_of_one_query_head_of_a_group_is_named(which):
    heads = {"first": slice(1), "last": slice(-1, None)}[which]

    def change(right, call, cotangent):
        wrong = faults.by_recomputed_weights(oracle, call, cotangent, heads)
        return right | {"k": wrong["k"], "v": wrong["v"]}

    for fault in found(with_gradients(change), cases=CHECKED):
        assert f"is that of the {which} query head of a group alone" in fault


@pytest.mark.parametrize("fault", [LEFT_OUT, "window off by one: one key too many"])
def test_a_backward_pass_that_recomputes_other_weights_is_named(fault):
    def change(right, call, cotangent):
        attention = partial(FAULTS[fault], oracle)
        return right | faults.by_recomputed_weights(attention, call, cotangent)

    assert found(with_gradients(change), cases=CHECKED) == [f"in the backward pass {fault}"]


def test_a_gradient_may_be_missing_for_good_and_a_backward_pass_may_raise():
    def detached(q, k, v, scale, sinks=None):
        return as_kernel()(q.detach(), k.detach(), v.detach(), scale, sinks=sinks)

    names = found(detached, cases=["learned_sink"])
    assert {f"the gradient of {x} is missing" for x in "qkv"} == set(names)

    def none(q, k, v, scale):
        return as_kernel()(q.detach(), k.detach(), v.detach(), scale)

    checked = su.sinkcheck.run(none, cases=["causal"])
    assert checked.right and "its output has no gradient" in str(checked)

    def raising(right, call, cotangent):
        raise RuntimeError("no kernel image")

    names = found(with_gradients(raising), cases=["causal"])
    assert names == ["the backward pass raises RuntimeError: no kernel image"]


# ---- the public faults, re-created as they were


def by_hand(q, k, v, scale, causal=True, window=None, sinks=None, return_lse=False):
    """Attention with a sink as gpt-oss writes it: one more column, which has no value."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = q @ k.mT * scale
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    columns = torch.arange(k.shape[2])
    if causal:
        logits = logits.masked_fill(columns > rows, -torch.inf)
    if window is not None:
        logits = logits.masked_fill(rows - columns >= window, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    out = weights @ v
    return (out, logits.logsumexp(-1)) if return_lse else out


def test_the_kernel_by_hand_is_right():
    checked = su.sinkcheck.run(by_hand)
    assert checked.right and len(checked.of("right")) > 100


def test_sinks_swallowed_by_kwargs_under_context_parallelism():  # prime-rl PR3397
    def wrapper(q, k, v, scale, causal=True, window=None, **kwargs):
        return by_hand(q, k, v, scale, causal, window)

    cases = ["causal", "window", "learned_sink", "learned_sink_window", "learned_sink_grouped"]
    assert found(wrapper, cases=cases, gradients=False) == [LEFT_OUT]


def test_sink_code_that_never_ran_and_two_of_three_paths_wrong():  # vllm-metal#212, PR550
    def paths(q, k, v, scale, causal=True, window=None, sinks=None, return_lse=False):
        if window is not None:  # the window's path has no sink
            return by_hand(q, k, v, scale, causal, window, None, return_lse)
        if sinks is not None and q.shape[2] < k.shape[2]:  # two partitions, each with the sink
            sinks = sinks + math.log(2)
        return by_hand(q, k, v, scale, causal, window, sinks, return_lse)

    names = found(paths, gradients=False)
    assert set(names) == {LEFT_OUT, "the sink is counted twice when merging"}


def test_a_low_precision_preset_that_runs_without_its_sink():  # cudnn-frontend PR636
    def preset(q, k, v, scale, causal=True, window=None, sinks=None, return_lse=False):
        low = q.dtype == torch.bfloat16
        wide = (x.float() for x in (q, k, v))
        out, lse = by_hand(*wide, scale, causal, window, None if low else sinks, True)
        return (out.to(q), lse) if return_lse else out.to(q)

    assert found(preset, gradients=False) == []
    assert found(preset, dtype=torch.bfloat16, gradients=False) == [LEFT_OUT]


def test_a_backward_pass_whose_window_and_sink_differ_from_the_forward_pass():
    # tilelang#831, nki-samples PR106, aiter PR1576: a sink's gradient is a sum over all queries and
    # texts; Primus-Turbo PR262: the backward pass has another window than the forward pass.
    def change(right, call, cotangent):
        wrong = partial(FAULTS["the window is ignored"], oracle)
        of_texts = faults.of_each_query(call, cotangent)[0].sum(-1)
        return faults.by_recomputed_weights(wrong, call, cotangent) | {"sinks": of_texts}

    assert set(found(with_gradients(change), cases=["learned_sink_window"])) == {
        "in the backward pass the window is ignored",
        "the gradient of the sink is not summed over the batch: the first text's",
    }


def test_a_log_sum_exp_in_base_2_and_halves_merged_by_it():  # FlashMLA PR198, sglang#33064
    def base_2(q, k, v, scale, causal=True, window=None, sinks=None, return_lse=False):
        out, lse = by_hand(q, k, v, scale, causal, window, sinks, return_lse=True)
        return (out, lse / math.log(2)) if return_lse else out

    checked = su.sinkcheck.run(base_2, gradients=False)
    assert checked.faults == ["the log-sum-exp is in base 2"]
    assert any(outcome.part == "merged halves" for outcome in checked.of("wrong"))


def test_a_monitor_that_leaves_the_sink_out_of_its_distribution():  # llm-internal-medicine PR28
    def monitor(q, k, v, scale, causal=True, window=None, sinks=None, return_lse=False):
        out, lse = by_hand(q, k, v, scale, causal, window, sinks, return_lse=True)
        lse = by_hand(q, k, v, scale, causal, window, None, return_lse=True)[1]
        return (out, lse) if return_lse else out

    assert found(monitor, gradients=False) == ["the log-sum-exp leaves the sink out"]


# ---- what is no result


@pytest.mark.parametrize(
    ("returns", "says"),
    {
        lambda out: out.transpose(1, 2): "heads and positions are swapped",
        lambda out: out[..., :3]: "has the shape (2, 4, 12, 3) where (2, 4, 12, 16) is due",
        lambda out: out.double(): "is of torch.float64 where torch.float32 is due",
        lambda out: out / 0: "has nan or infinite numbers",
        lambda out: (out, out): "the output is a tuple where one tensor is due",
        lambda out: None: "must be an array of numbers that PyTorch has, got NoneType",
        lambda out: "out": "must be an array of numbers that PyTorch has, got str",
        lambda out: out.to("meta"): "the output is a meta tensor of the layout torch.strided",
        lambda out: out.to_sparse(): "the output is a cpu tensor of the layout torch.sparse_coo",
    }.items(),
)
def test_what_cannot_be_compared_is_said_in_one_line(returns, says):
    def kernel(q, k, v, scale):
        return returns(by_hand(q, k, v, scale))

    names = found(kernel, cases=["causal"])
    assert len(names) == 1 and says in names[0] and "\n" not in names[0]


def test_a_kernel_that_raises_is_broken_in_one_line():
    def kernel(q, k, v, scale):
        raise RuntimeError("head_dim must be 64\nor 128")

    assert found(kernel, cases=["causal"]) == ["it raises RuntimeError: head_dim must be 64"]

    def no_pair(q, k, v, scale, return_lse=False):
        return by_hand(q, k, v, scale)

    assert found(no_pair, cases=["causal"]) == [
        "with return_lse it returns no pair of output and log-sum-exp"
    ]


def test_a_coarse_log_sum_exp_is_named():
    def kernel(q, k, v, scale, return_lse=False):
        out, lse = by_hand(q, k, v, scale, return_lse=True)
        return (out, lse.half()) if return_lse else out

    assert found(kernel, cases=["causal"]) == [
        "the log-sum-exp is of torch.float16 where torch.float32 is due"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_kernel_that_overwrites_its_arguments_is_named_and_the_reference_kept(dtype):
    def scaled(q, k, v, scale):
        return by_hand(q.mul_(scale), k, v, 1.0)

    def emptied(q, k, v, scale, sinks=None):
        out = by_hand(q, k, v, scale, sinks=sinks)
        if sinks is not None:
            sinks.zero_()
        return out

    def renumbered(q, k, v, scale, documents):
        documents += 1
        return q

    cases = ["scale", "learned_sink", "documents"]
    for kernel, argument, case in zip(
        (scaled, emptied, renumbered), ("q", "sinks", "documents"), cases, strict=True
    ):
        names = found(kernel, dtype=dtype, cases=[case])
        assert names == [f"it overwrites its argument {argument}"]
    assert su.sinkcheck.run(as_kernel(), dtype=dtype, cases=cases).right


def test_a_module_offers_what_its_forward_takes():
    class Kernel(torch.nn.Module):
        def forward(self, q, k, v, scale):
            return by_hand(q, k, v, scale)

    checked = su.sinkcheck.run(Kernel(), cases=["causal", "learned_sink"])
    assert checked.right and "it takes no sinks (in learned_sink)" in str(checked)


def test_a_kernel_without_a_backward_pass_that_says_so_by_an_error():
    def kernel(q, k, v, scale):
        if q.requires_grad:
            raise RuntimeError("for inference")
        return by_hand(q, k, v, scale)

    assert found(kernel, cases=["causal"]) == [
        "where gradients are needed it raises RuntimeError: for inference"
    ]


def test_the_page_counts_the_faults():
    words = {49: "Forty-nine", 12: "twelve"}
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"{words[len(FAULTS)]} faults of the output" in page
    assert f"{words[len(SINK_GRADIENTS)]} of the sink's gradient" in page


def test_arrays_of_numpy_are_taken():
    def kernel(q, k, v, scale):
        return by_hand(q.detach(), k.detach(), v.detach(), scale).numpy()

    checked = su.sinkcheck.run(kernel, cases=["causal"])
    assert checked.right and "its output has no gradient" in str(checked)
    assert isinstance(kernel(*[torch.ones(1, 1, 2, 4)] * 3, 1.0), np.ndarray)


def test_bad_arguments_are_refused():
    refuses("function must be callable, got 3", su.sinkcheck.run, 3)
    refuses(
        "each of cases must be one of causal, .* got 'nope'",
        su.sinkcheck.run,
        by_hand,
        cases=["nope"],
    )
    for wrong in ("causal", 3):
        refuses("cases must be several names", su.sinkcheck.run, by_hand, cases=wrong)
    refuses("device junk is not there: RuntimeError", su.sinkcheck.run, by_hand, device="junk")
    refuses("device None is not there: TypeError", su.sinkcheck.run, by_hand, device=None)
    one = su.sinkcheck.run(by_hand, cases=(name for name in ["causal"]))
    assert {outcome.case for outcome in one.outcomes} == {"causal"}
    assert su.sinkcheck.run(by_hand, cases=[]).outcomes == []
    refuses("dtype must be one of", su.sinkcheck.run, by_hand, dtype=torch.int64)
    refuses("tolerance must be positive", su.sinkcheck.run, by_hand, tolerance=0.0)


def test_the_module_is_public_and_light():
    assert "sinkcheck" in dir(su) and "transformers" not in vars(sys.modules["sinkutils"])
