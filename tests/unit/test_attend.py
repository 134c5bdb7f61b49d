"""What engines need of the dense reference: grouped heads, documents, first keys, split contexts, log-sum-exp."""

import math
from itertools import product

import pytest
import torch
from helpers import refuses
from torch import Tensor

from sinkutils.model.attention import AttentionSpec, attend

SINK = AttentionSpec(sink_logit="learned")
DOCUMENTS = torch.tensor([[0, 0, 0, 4, 4, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 7, 7]])


def draw(B: int = 2, H: int = 4, G: int = 2, T: int = 9, S: int = 9, D: int = 6, E: int = 3):
    generator = torch.Generator().manual_seed(B + H + G + T + S + D + E)
    sizes = (B, H, T, D), (B, G, S, D), (B, G, S, E)
    return [
        torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in sizes
    ]


def by_hand(q, k, v, sees, sinks=None, scale=None):
    """Output and log-sum-exp, number by number: head h reads the key head h // (H / G)."""
    B, H, T, D = q.shape
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    lse = torch.full((B, H, T), -math.inf, dtype=torch.float64)
    for b, h, i in product(range(B), range(H), range(T)):
        g = h // (H // k.shape[1])
        keys = [j for j in range(k.shape[2]) if sees(b, i, j)]
        factor = D**-0.5 if scale is None else scale
        terms = [math.exp(float((q[b, h, i] @ k[b, g, j]).detach()) * factor) for j in keys]
        total = sum(terms) + (0 if sinks is None else math.exp(sinks[h]))
        if total == 0:
            continue
        lse[b, h, i] = math.log(total)
        for j, term in zip(keys, terms, strict=True):
            out[b, h, i] += term / total * v[b, g, j].detach()
    return out, lse


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


SHAPES = {
    "grouped": {},
    "one key head": {"G": 1},
    "MLA": {"G": 1, "H": 2, "T": 3, "S": 4, "D": 576, "E": 512},
    "queries at the end": {"T": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sink", [False, True])
def test_heads_share_keys_and_values_may_have_another_width(shape, sink):
    q, k, v = draw(**SHAPES[shape])
    start = k.shape[2] - q.shape[2]
    sinks = torch.linspace(-1, 2, q.shape[1], dtype=torch.float64)
    given = {"sink_logit": sinks} if sink else {}
    spec = SINK if sink else AttentionSpec()
    out, weights, lse = attend(q, k, v, spec, return_lse=True, **given)
    expected, of_rows = by_hand(
        q, k, v, lambda b, i, j: j <= start + i, sinks.tolist() if sink else None
    )
    same(out, expected)
    same(lse, of_rows)
    assert weights.shape == (*q.shape[:3], k.shape[2] + sink)
    same(weights.sum(-1), torch.ones(q.shape[:3], dtype=torch.float64))
    base2 = attend(q, k, v, spec, return_lse=True, lse_base="2", **given)[2]
    same(base2, of_rows / math.log(2))


def test_documents_do_not_see_each_other_and_keep_their_first_keys():
    q, k, v = draw()
    spec = AttentionSpec(window=2)

    def begin(b: int, j: int) -> int:
        return DOCUMENTS[b].tolist().index(int(DOCUMENTS[b, j]))

    for first in (0, 1):
        expected, _ = by_hand(
            q,
            k,
            v,
            lambda b, i, j, first=first: (
                j <= i
                and DOCUMENTS[b, i] == DOCUMENTS[b, j]
                and (i - j < 2 or j < begin(b, j) + first)
            ),
        )
        same(attend(q, k, v, spec, documents=DOCUMENTS, first_keys=first)[0], expected)
    # Of each document alone, the numbers are the same; and one row serves all texts.
    out, _ = attend(q, k, v, documents=DOCUMENTS[0])
    for part in (slice(0, 3), slice(3, 5), slice(5, 9)):
        alone, _ = attend(q[:, :, part], k[:, :, part], v[:, :, part])
        same(out[:, :, part], alone)
    last = attend(q[:, :, 7:], k, v, documents=DOCUMENTS)[0]  # two queries at the end
    same(last, attend(q, k, v, documents=DOCUMENTS)[0][:, :, 7:])


def test_a_window_keeps_its_first_keys_also_for_queries_at_the_end():
    q, k, v = draw(T=4)
    for first in (0, 2):
        expected, _ = by_hand(
            q, k, v, lambda b, i, j, first=first: j <= i + 5 and (i + 5 - j < 3 or j < first)
        )
        same(attend(q, k, v, AttentionSpec(window=3), first_keys=first)[0], expected)


def test_hidden_keys_are_not_seen_and_a_mask_of_another_shape_is_refused():
    q, k, v = draw(T=4)
    hidden = torch.arange(36).view(4, 9) % 3 == 0
    for window in (None, 3):
        expected, _ = by_hand(
            q, k, v,
            lambda b, i, j, w=window or 9: j <= i + 5 and i + 5 - j < w and not hidden[i, j],
        )  # fmt: skip
        same(attend(q, k, v, AttentionSpec(window=window), hidden=hidden)[0], expected)
    says = r"hidden must be booleans of the shape \(4, 9\)"
    for wrong in (hidden.T, hidden.long(), hidden[None]):
        refuses(says, attend, q, k, v, hidden=wrong)
    refuses("hidden must be of type Tensor", attend, q, k, v, hidden=[[True]])


@pytest.mark.parametrize("cut", [2, 5])
def test_two_halves_merge_to_the_whole_by_their_log_sum_exp(cut):
    q, k, v = draw(T=4)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    spec = AttentionSpec(window=5)
    whole, _ = attend(q, k, v, AttentionSpec(window=5, sink_logit="learned"), sink_logit=sinks)
    first, _, lse_1 = attend(q, k[:, :, :cut], v[:, :, :cut], spec, start=5, return_lse=True)
    second, _, lse_2 = attend(
        q,
        k[:, :, cut:],
        v[:, :, cut:],
        AttentionSpec(window=5, sink_logit="learned"),
        start=5 - cut,
        sink_logit=sinks,
        return_lse=True,
    )
    total = torch.logaddexp(lse_1, lse_2)
    merged = sum((lse - total).exp()[..., None] * x for lse, x in ((lse_1, first), (lse_2, second)))
    same(merged, whole)
    assert (lse_1[:, :, -1] == -math.inf).all() == (cut == 2)  # the window hides that half


def test_every_input_has_a_gradient_that_finite_differences_confirm():
    q, k, v = draw(B=1, H=2, G=1, T=2, S=4, D=3, E=2)
    sinks = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([0, 0, 1, 1])

    def function(q, k, v, sinks):
        spec = AttentionSpec(window=2, sink_logit="learned")
        given = {"documents": documents, "first_keys": 1, "logit_scale": 0.7}
        out, _, lse = attend(q, k, v, spec, sink_logit=sinks, return_lse=True, **given)
        return out, lse

    assert torch.autograd.gradcheck(function, (q, k, v, sinks))
    # A half that the window hides has a log-sum-exp of -inf, and no gradient: not nan.
    hidden = attend(q, k, v, AttentionSpec(window=1), start=9, return_lse=True)
    assert (hidden[0] == 0).all() and (hidden[2] == -math.inf).all()
    gradients = torch.autograd.grad(hidden[0].sum() + hidden[2].clamp(min=0).sum(), (q, k, v))
    assert all((x == 0).all() for x in gradients)


def test_a_position_term_and_a_key_bias_follow_the_queries_to_the_end():
    q, k, v = draw(H=2, G=1)
    g = torch.randn(2, 9, dtype=torch.float64)
    spec = AttentionSpec(bias="kv")
    biases = {"key_bias": torch.ones(2, 6).double(), "value_bias": torch.ones(2, 3).double()}
    whole, weights = attend(q, k, v, spec, distance_bias=g, **biases)
    last, of_last = attend(q[:, :, 6:], k, v, spec, distance_bias=g, **biases)
    same(last, whole[:, :, 6:])
    same(of_last, weights[:, :, 6:])


def test_a_sink_in_float32_is_not_rounded_beside_queries_in_bfloat16():
    q, k, v = (x.detach().bfloat16() for x in draw())
    sinks = torch.tensor([3.01, 3.02, 3.03, 3.04])
    _, weights = attend(q, k, v.float(), SINK, sink_logit=sinks)
    exact = attend(q.double(), k.double(), v.double(), SINK, sink_logit=sinks.double())[1]
    assert (weights[..., 0] - exact[..., 0]).abs().max() < 1e-6


def test_what_does_not_fit_is_refused():
    q, k, v = (x.detach() for x in draw())
    refuses(r"H a multiple of G", attend, q[:, :3], k, v)
    numbers = "k must hold floating-point numbers of 16 bits or more, got torch."
    refuses(numbers + "int64", attend, q, k.long(), v)
    refuses(numbers + "float8_e4m3fn", attend, q, k.to(torch.float8_e4m3fn), v)
    refuses("T and D at least 1", attend, q[..., :0], k[..., :0], v)
    refuses(
        r"sink_logit of shape \(4,\) .* got \('\[0, 0", attend, q, k, v, SINK, sink_logit=[0] * 4
    )
    refuses("v must be of type Tensor, got ndarray", attend, q, k, v.numpy())
    refuses("spec must be of type AttentionSpec, got str", attend, q, k, v, "softmax")
    refuses(r"must have the shapes \(B, H, T, D\)", attend, q, k[..., :5], v)
    refuses(r"must have the shapes \(B, H, T, D\)", attend, q, k, v[:, :, 1:])
    refuses("9 queries and 4 keys: say by `start`", attend, q, k[:, :, :4], v[:, :, :4])
    refuses("start must be at least 0", attend, q, k, v, start=-1)
    refuses("documents must be integers of the shape", attend, q, k, v, documents=DOCUMENTS[:, 1:])
    refuses("documents must be integers", attend, q, k, v, documents=DOCUMENTS.float())
    refuses(
        "documents must be contiguous",
        attend,
        q,
        k,
        v,
        documents=torch.arange(9) % 2,
    )
    refuses("documents need each query", attend, q, k, v, documents=DOCUMENTS, start=9)
    refuses("first_keys needs a window", attend, q, k, v, first_keys=1)
    refuses("logit_scale must be positive and finite", attend, q, k, v, logit_scale=0.0)
    refuses("lse_base must be one of e, 2", attend, q, k, v, return_lse=True, lse_base="10")
    sigmoid = AttentionSpec(similarity="sigmoid")
    refuses("return_lse needs a softmax", attend, q, k, v, sigmoid, return_lse=True)
    g = torch.zeros(1, 9)
    refuses("distance_bias must have shape", attend, q, k, v, distance_bias=g, start=4)


OPERATIONS = {
    "softmax": {},
    "KV biases": {"bias": "kv"},
    "K biases": {"bias": "k"},
    "V biases": {"bias": "v"},
    "prefix": {"prefix": 3},
    "prefix and KV biases": {"prefix": 2, "bias": "kv"},
    "window": {"window": 2},
    "a sink logit": {"sink_logit": "learned"},
    "differential": {"differential": True},
    "softpick": {"similarity": "softpick"},
    "sigmoid": {"similarity": "sigmoid", "normalizer": "none"},
    "relu over the length": {"similarity": "relu", "normalizer": "length"},
    "p-norm": {"normalizer": "p_norm", "p": 2.0},
    "identity kernel": {"similarity": "linear", "normalizer": "max_abs_sum"},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_packed_documents_of_odd_lengths_are_as_each_alone(operation):
    """Values, gradients and log-sum-exps, with grouped queries: each document alone, a key head for each head."""
    spec = AttentionSpec(**OPERATIONS[operation])
    q, k, v = draw(E=6, H=6, G=3)
    generator = torch.Generator().manual_seed(0)
    learned = {}
    if spec.has_key_bias:
        learned["key_bias"] = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    if spec.bias in ("kv", "v"):
        learned["value_bias"] = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    if spec.sink_logit == "learned":
        learned["sink_logit"] = torch.randn(6, generator=generator, dtype=torch.float64)
    if spec.differential:
        learned["mix"] = torch.tensor(0.3, dtype=torch.float64)
    with_lse = spec.is_softmax and not spec.differential
    documents = torch.tensor([0] * 1 + [5] * 5 + [2] * 3)
    leaves = [q, k, v, *(x.requires_grad_() for x in learned.values())]
    packed = attend(q, k, v, spec, documents=documents, return_lse=with_lse, **learned)
    parts = []
    for part in (slice(0, 1), slice(1, 6), slice(6, 9)):
        keys, values = (x[:, :, part].repeat_interleave(2, dim=1) for x in (k, v))
        parts.append(attend(q[:, :, part], keys, values, spec, return_lse=with_lse, **learned))
    same(packed[0], torch.cat([part[0] for part in parts], dim=2))
    if with_lse:
        same(packed[2], torch.cat([part[2] for part in parts], dim=2))
    direction = torch.randn(packed[0].shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(packed[0], leaves, direction)
    expected = torch.autograd.grad(torch.cat([part[0] for part in parts], dim=2), leaves, direction)
    for each, other in zip(got, expected, strict=True):
        same(each, other)
