"""Known faults of attention kernels, each made out of the dense oracle.

A fault is what a faulty kernel makes of a call, by means of an attention function. That may have a
fault itself, so that two can be combined. `sinkcheck` compares a kernel that is wrong with each of
them, and so names what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sinkutils.model.attention import attend
from sinkutils.model.config import AttentionSpec


class Call(NamedTuple):
    """One call of an attention function. H query heads share G key heads."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, E)
    scale: float  # the factor of <q_i, k_j>
    causal: bool = True  # the last query stands at the last key
    window: int | None = None  # a query sees itself and the window - 1 keys before it
    first_keys: int = 0  # how many first keys a window never hides
    sinks: Tensor | None = None  # (H,): one more logit per head, which has no value
    sink_keys: Tensor | None = None  # (H, D): one more key per head, which every query sees
    sink_values: Tensor | None = None  # (H, E): and its value
    documents: Tensor | None = None  # (B, S): the document of each key
    start: int | None = None  # only faults set it: where the first query stands


# The inputs that have gradients
DIFFERENTIABLE = ("q", "k", "v", "sinks", "sink_keys", "sink_values")

Results: TypeAlias = tuple[Tensor, Tensor]  # output, log-sum-exp
Attention: TypeAlias = Callable[[Call], Results]
Fault: TypeAlias = Callable[[Attention, Call], Results]


def oracle(call: Call) -> Results:
    """Output (B, H, T, E) and natural log-sum-exp (B, H, T) by `su.attend`, in its inputs' dtype.

    The log-sum-exp is that of all logits by which the weights are divided, the sink among them.
    """
    spec = AttentionSpec(
        window=call.window,
        sink_logit="learned" if call.sinks is not None else "none",
        bias="kv" if call.sink_keys is not None else "none",
    )
    start = call.start if call.causal else call.k.shape[2]
    out, _, lse = attend(
        call.q,
        call.k,
        call.v,
        spec,
        documents=call.documents if call.causal else None,
        first_keys=call.first_keys,
        start=start,
        logit_scale=call.scale,
        return_lse=True,
        sink_logit=call.sinks,
        key_bias=call.sink_keys,
        value_bias=call.sink_values,
    )
    return out, lse


# ---- how faults are made


def of_call(change: Callable[[Call], Call]) -> Fault:
    """The fault of an attention function that is called with something else."""
    return lambda attention, call: attention(change(call))


def of_sinks(change: Callable[[Tensor, Call], Tensor]) -> Fault:
    """The fault of an attention function that reads other sinks."""

    def changed(call: Call) -> Call:
        return call if call.sinks is None else call._replace(sinks=change(call.sinks, call))

    return of_call(changed)


def of_lse(change: Callable[[Tensor, Call], Tensor]) -> Fault:
    """The fault of an attention function that returns another log-sum-exp."""

    def faulty(attention: Attention, call: Call) -> Results:
        out, lse = attention(call)
        return out, change(lse, call)

    return faulty


def without(call: Call) -> Call:
    """The call without its learned sink."""
    return call._replace(sinks=None)


def of_keys(call: Call, part: slice) -> Call:
    """The call on some of the keys, with the queries where they were. A window is left out."""
    S = call.k.shape[2]
    at = call.start if call.start is not None else S - call.q.shape[2]
    return call._replace(
        k=call.k[:, :, part],
        v=call.v[:, :, part],
        start=max(0, at - (part.start or 0)),
        documents=None,
        window=None,
        first_keys=0,
    )


# ---- faults that need more than other inputs


def without_exponential(attention: Attention, call: Call) -> Results:
    """The normaliser is sum exp(s_ij) + sink."""
    out, lse = attention(without(call))
    if call.sinks is None:
        return out, lse
    total = lse.exp() + call.sinks[:, None]
    return out * (lse.exp() / total)[..., None], total.abs().log()


def applied_twice(attention: Attention, call: Call) -> Results:
    """The output is multiplied by the keys' share of the normaliser once more."""
    out, lse = attention(call)
    share = torch.exp(attention(without(call))[1] - lse)
    return out * share[..., None], lse


def with_the_first_value(attention: Attention, call: Call) -> Results:
    """The sink brings along the value of the first key."""
    out, lse = attention(call)
    if call.sinks is None:
        return out, lse
    share = torch.exp(call.sinks[:, None] - lse)
    first = call.v[:, :, :1].repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1)
    return out + share[..., None] * first, lse


def in_a_half(first: bool) -> Fault:
    """The sink counts for the first half of the queries alone, or for the second."""

    def faulty(attention: Attention, call: Call) -> Results:
        out, lse = attention(call)
        plain, plain_lse = attention(without(call))
        T = call.q.shape[2]
        counts = (torch.arange(T, device=lse.device) < T // 2) == first  # (T,)
        return torch.where(counts[:, None], out, plain), torch.where(counts, lse, plain_lse)

    return faulty


def merged(how: str) -> Fault:
    """The context is cut in two, and the halves are merged in a wrong way."""

    def faulty(attention: Attention, call: Call) -> Results:
        half = call.k.shape[2] // 2
        parts = [of_keys(call, slice(0, half)), of_keys(call, slice(half, None))]
        others = (call.window, call.documents, call.sink_keys)
        plain = call.causal and all(x is None for x in others)
        if not plain or call.q.shape[2] > half:
            return attention(call)  # not every query sees both halves
        (out, lse), (out_2, lse_2) = attention(parts[0]), attention(without(parts[1]))
        if how == "without the sink":
            lse = attention(without(parts[0]))[1]
        if how == "evenly":
            lse = lse_2 = torch.full_like(lse, -math.log(2))
        if how == "base 2":
            lse, lse_2 = lse / math.log2(math.e), lse_2 / math.log2(math.e)
        total = torch.logaddexp(lse, lse_2)
        share = torch.exp(lse - total)[..., None]
        return share * out + (1 - share) * out_2, total

    return faulty


def interleaved(call: Call) -> Call:
    """Query head h reads the key head h mod G."""
    group = call.q.shape[1] // call.k.shape[1]
    return call._replace(k=call.k.repeat(1, group, 1, 1), v=call.v.repeat(1, group, 1, 1))


def first_query_at(call: Call, start: int) -> Call:
    """The call with its first query at another place. Documents stay as they are."""
    fits = call.documents is None or start + call.q.shape[2] <= call.k.shape[2]
    return call._replace(start=start) if call.causal and fits and start >= 0 else call


def later_keys(call: Call) -> Call:
    """Every query sees all keys. A call with a window or documents stays as it is."""
    plain = call.window is None and call.documents is None
    return call._replace(causal=False) if plain else call


def of_key_head(x: Tensor, call: Call) -> Tensor:
    """The sink of the key head: head h reads the sink h // (H / G)."""
    group = call.q.shape[1] // call.k.shape[1]
    return x[: call.k.shape[1]].repeat_interleave(group)


def in_turn(x: Tensor, call: Call) -> Tensor:
    """The sinks in the order in which interleaved heads have them."""
    by_key_head: Tensor = x.unflatten(0, (call.k.shape[1], -1))
    return by_key_head.T.flatten()


# c: the call
FAULTS: dict[str, Fault] = {
    "the sink is left out of the normaliser": of_call(without),
    "the sink's logit is multiplied by the scale": of_sinks(lambda x, c: x * c.scale),
    "the sink's logit is divided by the scale": of_sinks(lambda x, c: x / c.scale),
    "the sink's logit is read in base 2: exp2(sink)": of_sinks(lambda x, _: x * math.log(2)),
    "the sink's logit is multiplied by log2(e) and then read in base e": of_sinks(
        lambda x, _: x / math.log(2)
    ),
    "the sink's logit is taken as zero": of_sinks(lambda x, _: x * 0),
    "the sink's logit has the wrong sign": of_sinks(lambda x, _: -x),
    "the sink enters the normaliser without its exponential": without_exponential,
    "the sink's share is taken off twice": applied_twice,
    "the sink brings along the first key's value": with_the_first_value,
    "the sink in bf16 is too coarse": of_sinks(lambda x, _: x.bfloat16().to(x)),
    "the first head's sink serves all heads": of_sinks(lambda x, _: x[:1].expand_as(x)),
    "the sink is that of the key head": of_sinks(of_key_head),
    "the sinks are in the order of interleaved heads": of_sinks(in_turn),
    "the sink is dropped by the second half of the queries": in_a_half(first=True),
    "the sink is dropped by the first half of the queries": in_a_half(first=False),
    "the sink is counted twice when merging": of_sinks(lambda x, _: x + math.log(2)),
    "the sink is counted 3 times when merging": of_sinks(lambda x, _: x + math.log(3)),
    "the sink is counted 4 times when merging": of_sinks(lambda x, _: x + math.log(4)),
    "the sink is counted 8 times when merging": of_sinks(lambda x, _: x + math.log(8)),
    "halves are merged by a log-sum-exp that leaves the sink out": merged("without the sink"),
    "halves are merged evenly, not by their log-sum-exp": merged("evenly"),
    "halves are merged by a log-sum-exp in the wrong base": merged("base 2"),
    "the second half of the keys is left out": of_call(
        lambda c: of_keys(c, slice(0, c.k.shape[2] // 2))
    ),
    "the log-sum-exp is in base 2": of_lse(lambda lse, _: lse / math.log(2)),
    "the log-sum-exp leaves the sink out": of_lse(lambda _, c: oracle(without(c))[1]),
    "the log-sum-exp leaves the sink out and is in base 2": of_lse(
        lambda _, c: oracle(without(c))[1] / math.log(2)
    ),
    "the log-sum-exp has the wrong sign": of_lse(lambda lse, _: -lse),
    "the log-sum-exp is the sum, not its logarithm": of_lse(lambda lse, _: lse.exp()),
    "the log-sum-exp is of logits without the scale": of_lse(
        lambda _, c: oracle(c._replace(scale=1.0))[1]
    ),
    "window off by one: one key too few": of_call(
        lambda c: c._replace(window=c.window and max(1, c.window - 1))
    ),
    "window off by one: one key too many": of_call(
        lambda c: c._replace(window=c.window and c.window + 1)
    ),
    "the window is ignored": of_call(lambda c: c._replace(window=None, first_keys=0)),
    "first keys of a window are not kept": of_call(lambda c: c._replace(first_keys=0)),
    "first keys of a window off by one: one too few": of_call(
        lambda c: c._replace(first_keys=max(0, c.first_keys - 1))
    ),
    "first keys of a window off by one: one too many": of_call(
        lambda c: c._replace(first_keys=c.first_keys and c.first_keys + 1)
    ),
    "documents see each other": of_call(lambda c: c._replace(documents=None)),
    "queries see later keys": of_call(later_keys),
    "queries do not see later keys, without a causal mask": of_call(
        lambda c: c._replace(causal=True)
    ),
    "queries at the end are taken for the first ones": of_call(lambda c: first_query_at(c, 0)),
    "a query does not see its own key": of_call(
        lambda c: first_query_at(c, c.k.shape[2] - c.q.shape[2] - 1)
    ),
    "heads are grouped in the wrong order (interleaved)": of_call(interleaved),
    "the first key head serves all query heads": of_call(
        lambda c: c._replace(k=c.k[:, :1], v=c.v[:, :1])
    ),
    "the scale is left out": of_call(lambda c: c._replace(scale=1.0)),
    "the scale is 1 / sqrt(D), whatever is given": of_call(
        lambda c: c._replace(scale=c.q.shape[-1] ** -0.5)
    ),
    "the scale is that of the values' width": of_call(
        lambda c: c._replace(scale=c.v.shape[-1] ** -0.5)
    ),
    "the scale is applied twice": of_call(lambda c: c._replace(scale=c.scale**2)),
    "the sink key is left out": of_call(lambda c: c._replace(sink_keys=None, sink_values=None)),
    "the sink key's value is left out": of_call(
        lambda c: c if c.sink_values is None else c._replace(sink_values=c.sink_values * 0)
    ),
}


# ---- gradients


def gradients(attention: Attention, call: Call, cotangent: Tensor) -> dict[str, Tensor]:
    """The gradients of sum(out * cotangent), by the name of each input."""
    names = [name for name in DIFFERENTIABLE if getattr(call, name) is not None]
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
    with torch.enable_grad():
        out, _ = attention(call._replace(**leaves))
        total = (out * cotangent.to(out)).sum()
    got = torch.autograd.grad(total, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(names, got, strict=True))


def by_recomputed_weights(
    attention: Attention, call: Call, cotangent: Tensor, heads: slice = slice(None)
) -> dict[str, Tensor]:
    """The gradients of q, k and v as flash kernels compute them, with the weights of `attention`.

    The output is the right one, and only the backward pass recomputes the weights A in its own way:
    dS = A (dA - delta), where delta_i = sum(out_i * cotangent_i).
    heads: which query heads of a group count in the gradients of its key.
    """
    S, G = call.k.shape[2], call.k.shape[1]
    H = call.q.shape[1]
    ones = torch.eye(S).to(call.v).expand(len(call.v), G, S, S)
    of_star = None if call.sink_values is None else call.v.new_zeros(H, S)
    weights, _ = attention(call._replace(v=ones, sink_values=of_star))  # (B, H, T, S)
    k = call.k.repeat_interleave(H // G, dim=1)
    v = call.v.repeat_interleave(H // G, dim=1)
    delta = (oracle(call)[0] * cotangent).sum(dim=-1, keepdim=True)
    inner = weights * (cotangent @ v.mT - delta) * call.scale  # (B, H, T, S)
    of_k = (inner.mT @ call.q).unflatten(1, (G, -1))  # (B, G, H / G, S, D)
    of_v = (weights.mT @ cotangent).unflatten(1, (G, -1))
    return {"q": inner @ k, "k": of_k[:, :, heads].sum(2), "v": of_v[:, :, heads].sum(2)}


def of_each_query(call: Call, cotangent: Tensor) -> Tensor:
    """What each text, head and query adds to the gradient of the sink, (B, H, T).

    d out_i / d sink = -A_i* out_i, where A_i* is the sink's share of the row.
    """
    assert call.sinks is not None
    out, lse = oracle(call)
    share = torch.exp(call.sinks[:, None] - lse)
    return -share * (out * cotangent).sum(dim=-1)


# The gradient of the sink, made wrong out of what each text, head and query adds to it.
SINK_GRADIENTS: dict[str, Callable[[Tensor, Call], Tensor]] = {
    "is missing": lambda x, _: x.sum((0, 2)) * 0,
    "has the wrong sign": lambda x, _: -x.sum((0, 2)),
    "is not summed over the batch: the first text's": lambda x, _: x[0].sum(-1),
    "is not summed over the batch: the last text's": lambda x, _: x[-1].sum(-1),
    "is not summed over the queries: the first one's": lambda x, _: x[..., 0].sum(0),
    "is not summed over the queries: the last one's": lambda x, _: x[..., -1].sum(0),
    "is a mean over the batch": lambda x, _: x.sum(-1).mean(0),
    "is a mean over the queries": lambda x, _: x.mean(-1).sum(0),
    "is a mean over batch and queries": lambda x, _: x.mean((0, 2)),
    "is multiplied by the scale": lambda x, call: x.sum((0, 2)) * call.scale,
    "is multiplied by log2(e)": lambda x, _: x.sum((0, 2)) / math.log(2),
    "is multiplied by ln(2)": lambda x, _: x.sum((0, 2)) * math.log(2),
}
