"""Surgery on a trained model: cut into one forward pass, and see what becomes of sink and loss.

    untouched   what the others are compared with
    edit        change h, q, k, v or an FFN's neurons on their way, by a function of yours
    set_back    h_1's largest elements set to what other positions have there
    hide        no query sees the first key
    stream      a cache of the last keys, with or without the first
    transplant  a key and a value from other texts in front of the text

Nothing is trained, and the model is left as it was found. Attention is read as `measure` reads it,
so that reports have its definition. `untouched`, `edit` and `set_back` take a `TransformerLM` or a
causal LM of transformers; the other three need a KV cache and take the latter only.

Before each operation a text of at most 16 tokens runs twice (`measure`'s check), and where a cache
is needed one token. Layers, blocks and hidden dimensions count from 0 (as in `measure`), positions
from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sinkutils.checks import choice, integer, require
from sinkutils.measuring.families import Call
from sinkutils.measuring.hf import Capture, observe
from sinkutils.measuring.measure import measure, sequences
from sinkutils.measuring.passes import Operating, Pass
from sinkutils.measuring.refusals import check_positions, check_range
from sinkutils.measuring.report import Report
from sinkutils.measuring.state import ONE_AT_A_TIME, LeftAsFound
from sinkutils.measuring.tally import OwnModel, Tally
from sinkutils.measuring.wrappers import handed_over
from sinkutils.model.decoder import TransformerLM

TARGETS = (1, 2)
ELEMENTS = 2**27  # logits that a batch holds
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # they keep keys and values, nothing else
PLACES = ("block", "query", "key", "value", "neurons")


@dataclass(frozen=True)
class Outcome:
    """What a model computes under surgery."""

    losses: Tensor  # (samples, T - 1): nats of tokens 2..T, or of the `last` of them
    predicted: Tensor  # (samples, T - 1): the most likely token in the place of each
    report: (
        Report  # Sink_1, Sink_2; Sink_* of a transplanted or trained k*, of a learned sink logit
    )

    @property
    def loss(self) -> float:
        """Nats a token, mean over what `losses` holds."""
        return float(self.losses.mean())


def untouched(model: nn.Module, ids: Tensor, last: int | None = None) -> Outcome:
    """The model as it is on ids (samples, T), what surgery is compared with.

    last: how many tokens at the end are predicted (transformers models only); None: all but the
        first. The logits of a long text cost as much as all blocks where a vocabulary is large.

    Raises ValueError, as all functions here do, for a model whose attention `measure` cannot read
    through transformers' interface and, where keys and values are changed or hidden, for a model
    that keeps anything else between tokens: linear layers, a second state, an index of keys.
    """
    with operating(model, ids) as capture:
        return run(capture, ids, last=last)


def edit(
    model: nn.Module,
    ids: Tensor,
    place: str,
    change: Callable[[Tensor], Tensor],
    layers: Sequence[int] | None = None,
) -> Outcome:
    """Put change(x) in place of x, in some layers or in all, and let the model continue.

    place: what x is, for a batch of B texts (all of `ids`, unless their logits need half a GiB):
        "block"                  the hidden states that a block passes on, (B, T, d)
        "query", "key", "value"  after rotary, (B, H, T, D); keys and values may have fewer heads
        "neurons"                what the FFN's second projection reads, (B, T, n)
    change: gets a copy, which it may write into. Our own models with a sink token have x* at the
        first position.

    Set the first token's hidden state after block 1 to half its size, or take the mean query off in
    every block:

        def halve(h):
            h[:, 0] *= 0.5
            return h

        edit(model, ids, "block", halve, layers=[0])
        edit(model, ids, "query", lambda q: q - q.mean(dim=(0, 2), keepdim=True))
    """
    choice("place", place, PLACES)
    with operating(model, ids) as capture:
        blocks = capture.model.blocks if isinstance(capture, OwnModel) else capture.blocks
        chosen = range(len(blocks)) if layers is None else layers
        for layer in chosen:
            integer("layer", layer, 0, len(blocks) - 1)
        if place in ("query", "key", "value"):
            changed = changed_call(capture, place, change, set(chosen))
            return run(capture, ids, changed=changed)
        handles = []
        try:
            for layer in chosen:
                handles.append(hook(capture, blocks[layer], place, change))
            return run(capture, ids)
        finally:
            for handle in handles:
                handle.remove()


def hook(
    capture: OwnModel | Capture, block: nn.Module, place: str, change: Callable[[Tensor], Tensor]
) -> RemovableHandle:
    """Change what a block passes on, or what its FFN's second projection reads."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(capture, OwnModel):
            streams = capture.hidden_states("returns", hidden).shape[1]
            require(
                streams == 1,
                f"blocks pass on {streams} residual streams beside one another: no one h_1",
            )
        changed = change(hidden.clone())
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    def before(_: nn.Module, args: tuple) -> tuple:
        return (change(args[0].clone()),)

    if place == "block":
        function = after if isinstance(capture, OwnModel) else capture.here(after)
        # First of all hooks, so that the report has the norms of what was changed.
        return block.register_forward_hook(function, prepend=True)
    if isinstance(capture, OwnModel):
        return block.ffn.down.register_forward_pre_hook(before)  # type: ignore[union-attr]
    config = capture.config.get_text_config()
    shape = getattr(config, "hidden_size", None), getattr(config, "intermediate_size", None)
    down = [
        m
        for m in block.modules()
        if isinstance(m, nn.Linear) and (m.out_features, m.in_features) == shape
    ]
    require(
        len(down) == 1,
        f"{capture.kind} has no one linear layer that reads its FFN's {shape[1]} neurons",
    )
    return down[0].register_forward_pre_hook(capture.here(before))


def changed_call(
    capture: Any, place: str, change: Callable[[Tensor], Tensor], layers: set[int]
) -> Callable:
    """What is computed in place of a layer's call: the same with change(x) for q, k or v.

    capture: an `OwnModel` or a `Capture`. Our own model goes on with the tensors that it shows, so
    that they are written into.
    """
    index = ("query", "key", "value").index(place)

    def write(layer: int, *qkv: Tensor) -> None:
        if layer in layers:
            qkv[index].copy_(change(qkv[index].clone()))

    def changed(call: Call, layer: int) -> Call:
        if layer not in layers:
            return call
        name = "qkv"[index]
        new: dict = {name: change(getattr(call, name).clone())}
        return call._replace(**new)

    return write if isinstance(capture, OwnModel) else changed


def set_back(
    model: nn.Module, ids: Tensor, block: int, dimensions: Sequence[int] | int = 3
) -> Outcome:
    """After a block, set a few dimensions of h_1 to their mean over the text's other positions.

    dimensions: which, or how many of the largest there (`Report.first_elements`): massive
    activations are the few dimensions above 1,000 times the median.
    """
    elements: Any = measure(model, ids).first_elements  # (blocks, d)
    integer("block", block, 0, len(elements) - 1)
    chosen = dimensions
    if isinstance(chosen, int):
        chosen = elements[block].topk(chosen).indices.tolist()
    for dimension in chosen:
        integer("dimension", dimension, 0, elements.shape[1] - 1)

    def to_the_mean(hidden: Tensor) -> Tensor:
        hidden[:, 0, chosen] = hidden[:, 1:, chosen].mean(dim=1)
        return hidden

    return edit(model, ids, "block", to_the_mean, [block])


def hide(model: nn.Module, ids: Tensor, since: int = 2, last: int | None = None) -> Outcome:
    """Mask x_1 from the queries at positions `since`..T: does another token become the sink?

    since: with 2 no other token sees x_1. Later: a cache that has held k_1 until then drops it.
    last: as in `untouched`.
    """
    integer("since", since, least=2)
    rows = torch.arange(ids.shape[1])
    return _hiding(model, ids, (rows[:, None] >= since - 1) & (rows == 0), last)


def stream(model: nn.Module, ids: Tensor, window: int, sinks: int = 0) -> Outcome:
    """Let each query see the last `window` keys, itself among them, and the first `sinks`: a
    streaming cache of window + sinks keys, with the positions that the tokens have in the text.

    Compare windows at one cache size: (128, 0), (127, 1), (124, 4).
    """
    integer("window", window, least=1)
    integer("sinks", sinks, least=0)
    rows = torch.arange(ids.shape[1])
    return _hiding(model, ids, (rows[:, None] - rows >= window) & (rows >= sinks))


def _hiding(model: nn.Module, ids: Tensor, hidden: Tensor, last: int | None = None) -> Outcome:
    """With the keys j hidden from the queries i where hidden[i, j], (T, T)."""
    with operating(model, ids, cache=True) as capture:
        return run(capture, ids, last=last, hidden=hidden)


def transplant(
    model: nn.Module, ids: Tensor, donors: Tensor, zero_values_from: int | None = None
) -> Outcome:
    """Put a key and value k*, v* into the cache in front of each text, at every layer: KV biases
    (Table 4) without training.

    ids: (samples, T). donors: (n, any T), other texts: k* and v* are the means of their k_1 and
    v_1. They stand where a token in front of the text would: the text has positions 2..T+1, and
    rotary turns k_1 by no angle.
    zero_values_from: v* = 0 from this layer up (0: everywhere, K biases).
    """
    with operating(model, ids, cache=True) as capture:
        layers = cached(capture, donors[:, :1]).layers
        if zero_values_from is not None:
            integer("zero_values_from", zero_values_from, 0, len(layers))
            for layer in layers[zero_values_from:]:
                layer.values.zero_()

        def cache(samples: int) -> DynamicCache:
            filled = DynamicCache(config=capture.config)
            for index, layer in enumerate(layers):
                pair = (
                    x.mean(dim=0).expand(samples, -1, -1, -1) for x in (layer.keys, layer.values)
                )
                filled.update(*pair, index)  # (B, H_kv, 1, D) each
            return filled

        return run(capture, ids, cache)


@contextmanager
def operating(model: nn.Module, ids: Tensor, *, cache: bool = False) -> Iterator[Any]:
    """A model in eval mode, without gradients, whose attention is read as by `measure`; after it,
    as it was.

    cache: whether the operation needs that layers keep keys and values between tokens, and nothing
    else.
    Yields an `OwnModel` or a `Capture`.
    """
    rows, _ = sequences(ids, None, TARGETS)
    length = ids.shape[1]
    state = LeftAsFound()
    if isinstance(model, TransformerLM):
        require(
            not cache,
            "hide, stream and transplant need a KV cache, and TransformerLM has none: use edit",
        )
        with ONE_AT_A_TIME, state, state:
            state.evaluate(model)
            own = OwnModel(model, Tally(TARGETS, length))
            check_range(rows, own.vocabulary)
            yield own
        return
    _, inner = handed_over(model)
    kind = type(inner).__name__
    require(
        inner.get_output_embeddings() is not None,
        f"surgery needs a TransformerLM or a causal LM of transformers, got {kind}",
    )
    with ONE_AT_A_TIME, state, state:
        state.evaluate(model)
        capture = observe(model, Pass(), state)
        check_range(rows, capture.vocabulary)
        check_positions(inner, capture.table, length + 1)
        capture.check(rows)
        plain = not capture.legacy and not capture.registered
        require(
            plain,
            f"{kind} has attention outside transformers' interface: surgery works on eager and sdpa only",
        )
        if cache:
            kept = cached(capture, ids[:1, :1])
            layers = kept.layers if type(kept) is DynamicCache else []
            plain = len(layers) == len(capture.layers) and all(
                type(layer) in PLAIN for layer in layers
            )
            require(
                plain,
                f"{kind} keeps something else than keys and values of each layer between tokens",
            )
        yield capture


def cached(capture: Capture, ids: Tensor) -> Any:
    """What the model keeps of ids (n, T)."""
    capture.start(ids)
    output = capture.base(ids.to(capture.table.device), use_cache=True)
    return getattr(output, "past_key_values", None)


def run(
    capture: Any,
    ids: Tensor,
    cache: Callable[[int], DynamicCache] | None = None,
    last: int | None = None,
    hidden: Tensor | None = None,
    changed: Callable | None = None,
) -> Outcome:
    """Losses and shares of attention of ids (samples, T); cache(B) is what a batch of B texts finds
    in front.

    hidden: (T, T), the keys that queries do not see. changed: of `changed_call`.
    capture: an `OwnModel` or a `Capture`. Norms are of the text's own positions; with a cache there
    are none.
    """
    length = ids.shape[1]
    scored = length - 1 if last is None else last
    integer("last", scored, 1, length - 1)
    own = isinstance(capture, OwnModel)
    device = capture.model.embed.weight.device if own else capture.table.device
    tally = Tally(TARGETS, length, norms=cache is None)
    if own:
        capture = OwnModel(capture.model, tally, changed)
    losses, predicted = [], []
    for batch in ids.to(device).split(max(1, ELEMENTS // (scored * capture.vocabulary))):
        if own:
            logits = capture.model(batch, capture)
        else:
            past = cache(len(batch)) if cache else None
            front = past.get_seq_length() if past else 0
            capture.doing = Operating(tally, hidden, front, changed)
            capture.start(batch)
            kept = {} if last is None else {"logits_to_keep": scored + 1}
            logits = capture.model(
                batch, past_key_values=past, use_cache=past is not None, **kept
            ).logits
            capture.finish()
        logits = logits[:, -scored - 1 : -1].float()  # each predicts the token behind its own
        losses.append(F.cross_entropy(logits.mT, batch[:, -scored:], reduction="none").cpu())
        predicted.append(logits.argmax(dim=-1).cpu())
    samples = torch.arange(len(ids))
    report = tally.report(capture, samples, torch.full_like(samples, length), (0.3,))
    return Outcome(torch.cat(losses), torch.cat(predicted), report)
