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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sinkutils.checks import choice, integer, integers, require
from sinkutils.measuring.hf import Capture, observe
from sinkutils.measuring.measure import check_range, measure, sequences
from sinkutils.measuring.passes import Measuring, Pass
from sinkutils.measuring.refusals import check_positions
from sinkutils.measuring.report import Report, check_targets
from sinkutils.measuring.state import ONE_AT_A_TIME, LeftAsFound
from sinkutils.measuring.tally import Edit, OwnModel, Tally, changed
from sinkutils.model.decoder import TransformerLM

__all__ = ["Outcome", "edit", "hide", "set_back", "stream", "transplant", "untouched"]

TARGETS = (1, 2)
ELEMENTS = 2**27  # logits that a batch holds
PLACES = ("block", "query", "key", "value", "neurons")


@dataclass(frozen=True)
class Outcome:
    """What a model computes under surgery."""

    losses: Tensor  # (samples, T - 1): nats of tokens 2..T, or of the `last` of them
    predicted: Tensor  # (samples, T - 1): the most likely token in the place of each
    report: Report  # Sink_1, Sink_2; Sink_* of a transplanted or trained k*, a learned sink logit

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
    change: gets a copy, which it may write into, and returns as much. Our own models with a sink
        token have x* at the first position.

    Set the first token's hidden state after block 1 to half its size, or take the mean query off in
    every block:

        def halve(h):
            h[:, 0] *= 0.5
            return h

        edit(model, ids, "block", halve, layers=[0])
        edit(model, ids, "query", lambda q: q - q.mean(dim=(0, 2), keepdim=True))
    """
    choice("place", place, PLACES)
    with operating(model, ids) as source, ExitStack() as hooks:
        every = [*range(len(source.blocks))]
        if place in ("query", "key", "value"):
            every = sorted(source.layers.values())  # of a hybrid model not all blocks
        chosen = integers("layers", every if layers is None else layers, 0, every[-1])
        chosen = list(dict.fromkeys(chosen))  # each once
        require({*chosen} <= {*every}, f"attention is in layers {every} alone, got {chosen}")
        if place in ("query", "key", "value"):
            part = {"query": "q", "key": "k", "value": "v"}[place]
            return run(source, ids, edit=Edit(part, chosen, change))
        hook = edit_block if place == "block" else edit_neurons
        for layer in chosen:
            handle = hook(source, source.blocks[layer], change)
            hooks.enter_context(handle)
        return run(source, ids)


def edit_block(
    source: OwnModel | Capture, block: nn.Module, change: Callable[[Tensor], Tensor]
) -> RemovableHandle:
    """Change the hidden states that a block passes on."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(source, OwnModel):
            streams = source.hidden_states(hidden).shape[1]
            if streams > 1:
                raise ValueError(f"blocks pass on {streams} residual streams: there is no one h_1")
        edited = changed(change, hidden)
        return edited if isinstance(output, Tensor) else (edited, *output[1:])

    # First of all hooks, so that the report has the norms of what was changed.
    return block.register_forward_hook(source.here(after), prepend=True)


def edit_neurons(
    source: OwnModel | Capture, block: nn.Module, change: Callable[[Tensor], Tensor]
) -> RemovableHandle:
    """Change what the second projection of a block's FFN reads."""

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (changed(change, args[0]),)

    if isinstance(source, OwnModel):
        down = block.get_submodule("ffn.down")
    else:
        config = source.config.get_text_config()
        width = getattr(config, "hidden_size", None)
        neurons = getattr(config, "intermediate_size", None)
        layers = []
        for module in block.modules():
            if not isinstance(module, nn.Linear):
                continue
            if module.in_features == neurons and module.out_features == width:
                layers.append(module)
        require(
            len(layers) == 1,
            f"{source.kind} has no one linear layer from its config's intermediate_size "
            f"({neurons}) to its hidden_size ({width})",
        )
        down = layers[0]
    return down.register_forward_pre_hook(source.here(before))


def set_back(
    model: nn.Module, ids: Tensor, block: int, dimensions: Sequence[int] | int = 3
) -> Outcome:
    """After a block, set a few dimensions of h_1 to their mean over the text's other positions.

    dimensions: which, or how many of the largest there (`Report.first_elements`): massive
    activations are the few dimensions above 1,000 times the median.
    """
    elements: Any = measure(model, ids).first_elements  # (blocks, d)
    blocks, width = elements.shape
    block = integer("block", block, 0, blocks - 1)
    if isinstance(dimensions, Integral):
        count = integer("dimensions", dimensions, 1, width)
        dimensions = elements[block].topk(count).indices.tolist()
    chosen = integers("dimensions", dimensions, 0, width - 1)

    def to_the_mean(hidden: Tensor) -> Tensor:  # (B, T, d)
        others = hidden[:, 1:, chosen]
        hidden[:, 0, chosen] = others.mean(dim=1)
        return hidden

    return edit(model, ids, "block", to_the_mean, [block])


def hide(
    model: nn.Module,
    ids: Tensor,
    since: int = 2,
    last: int | None = None,
    targets: Sequence[int] = TARGETS,
) -> Outcome:
    """Mask x_1 from the queries at positions `since`..T: does another token become the sink?

    since: with 2 no other token sees x_1. Later: a cache that has held k_1 until then drops it.
    last: as in `untouched`.
    targets: the positions k of the report's Sink_k.
    """
    with operating(model, ids, cache=True) as capture:
        length = ids.shape[1]
        since = integer("since", since, 2, length)
        keys = torch.arange(length)
        queries = keys[:, None]
        hidden = (queries >= since - 1) & (keys == 0)  # (T, T)
        return run(capture, ids, last=last, hidden=hidden, targets=targets)


def stream(model: nn.Module, ids: Tensor, window: int, sinks: int = 0) -> Outcome:
    """Let each query see the last `window` keys, itself among them, and the first `sinks`.

    It is a streaming cache of window + sinks keys, with the positions that tokens have in the text.
    Compare windows at one cache size: (128, 0), (127, 1), (124, 4).
    """
    window = integer("window", window, least=1)
    sinks = integer("sinks", sinks, least=0)
    with operating(model, ids, cache=True) as capture:
        keys = torch.arange(ids.shape[1])
        queries = keys[:, None]
        behind_window = queries - keys >= window
        hidden = behind_window & (keys >= sinks)  # (T, T)
        return run(capture, ids, hidden=hidden)


def transplant(
    model: nn.Module, ids: Tensor, donors: Tensor, zero_values_from: int | None = None
) -> Outcome:
    """Put a key and a value k*, v* into the cache in front of each text, at every layer.

    These are KV biases (Table 4) without training.
    ids: (samples, T). donors: (n, any T), other texts: k* and v* are the means of their k_1 and
    v_1. They stand where a token in front of the text would: the text has positions 2..T+1, and
    rotary turns k_1 by no angle.
    zero_values_from: v* = 0 from this layer up (0: everywhere, K biases).
    """
    with operating(model, ids, cache=True) as capture:
        check_positions(capture.model, capture.table, ids.shape[1] + 1)
        rows, _ = sequences(donors, None, (1,))
        check_range(rows, capture.vocabulary)
        # k_1 and v_1 depend on the first token alone, as attention is causal.
        layers = cached(capture, donors[:, :1]).layers
        if zero_values_from is not None:
            first = integer("zero_values_from", zero_values_from, 0, len(layers))
            for layer in layers[first:]:
                layer.values.zero_()

        def cache(samples: int) -> DynamicCache:
            filled = DynamicCache(config=capture.config)
            for index, layer in enumerate(layers):
                k = layer.keys.mean(dim=0)  # (H_kv, 1, D)
                v = layer.values.mean(dim=0)
                # The same k* and v* in front of each text, (B, H_kv, 1, D): values may be narrower.
                k = k.expand(samples, -1, -1, -1)
                v = v.expand(samples, -1, -1, -1)
                filled.update(k, v, index)
            return filled

        return run(capture, ids, cache)


@contextmanager
def operating(model: nn.Module, ids: Tensor, *, cache: bool = False) -> Iterator[Any]:
    """A model in eval mode, without gradients, whose attention is read; after it, as it was.

    cache: whether the operation needs that layers keep keys and values between tokens, and nothing
    else.
    Yields an `OwnModel` or a `Capture`.
    """
    rows, _ = sequences(ids, None, TARGETS)
    state = LeftAsFound()
    with ONE_AT_A_TIME, state, state:  # twice, as in `measure`
        state.evaluate(model)
        source: OwnModel | Capture
        if isinstance(model, TransformerLM):
            require(
                not cache,
                "hide, stream and transplant need a KV cache, and TransformerLM has none: use edit",
            )
            source = OwnModel(model, Tally(TARGETS, ids.shape[1]))
        else:
            source = observe(model, Pass(), state)
            state.set(source.config, "return_dict", True)  # outputs are read by name
            if source.model.get_output_embeddings() is None:
                raise ValueError(
                    "surgery needs a TransformerLM or a causal LM of transformers, got "
                    f"{source.kind}"
                )
        check_range(rows, source.vocabulary)
        source.check(rows)  # it also finds out which attention functions the model uses
        if isinstance(source, OwnModel):
            yield source
            return
        if source.legacy:
            raise ValueError(
                f"{source.kind} has attention outside transformers' interface, in which surgery "
                "can change nothing"
            )
        if cache and not keeps_keys_and_values(source, ids[:1, :1]):
            raise ValueError(
                f"{source.kind} keeps something else than keys and values of each layer between "
                "tokens"
            )
        yield source


def keeps_keys_and_values(capture: Capture, ids: Tensor) -> bool:
    """Whether the cache of a model holds keys and values of its attention layers, nothing else."""
    past = cached(capture, ids)
    if type(past) is not DynamicCache:  # a class of the family's own may keep more
        return False
    if len(past.layers) != len(capture.layers):  # it has layers of another kind
        return False
    kinds = {type(layer) for layer in past.layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def cached(capture: Capture, ids: Tensor) -> Any:
    """What the model keeps of ids (n, T)."""
    capture.start(ids)
    output = capture.base(ids.to(capture.device), use_cache=True)
    return getattr(output, "past_key_values", None)


def run(
    source: Any,
    ids: Tensor,
    cache: Callable[[int], DynamicCache] | None = None,
    last: int | None = None,
    hidden: Tensor | None = None,
    edit: Edit | None = None,
    targets: Sequence[int] = TARGETS,
) -> Outcome:
    """Losses and shares of attention of ids (samples, T).

    source: an `OwnModel` or a `Capture`. cache: cache(B) is what a batch of B texts finds in front;
    norms are then not taken. last: as in `untouched`. hidden: (T, T), the keys j that queries i do
    not see.
    """
    length = ids.shape[1]
    scored = length - 1 if last is None else integer("last", last, 1, length - 1)
    tally = Tally(check_targets(targets, length), length, norms=cache is None)
    losses = []
    predicted = []
    # As many texts a batch as leave room for their logits
    logits_a_text = scored * source.vocabulary
    texts = max(1, ELEMENTS // logits_a_text)
    for batch in ids.to(source.device).split(texts):
        if isinstance(source, OwnModel):
            source.tally = tally
            source.edit = edit
            logits = source.model(batch, source)
        else:
            # A cache grows as the text runs: each batch gets a new one.
            past = cache(len(batch)) if cache else None
            front = past.get_seq_length() if past else 0
            source.doing = Measuring(tally, True, edit, hidden, front)
            source.start(batch)
            options: dict[str, Any] = {"past_key_values": past, "use_cache": past is not None}
            if last is not None:
                options["logits_to_keep"] = scored + 1
            output = source.model(batch, **options)
            source.finish()
            logits = output.logits
        # Logits predict the token behind their own: those of the last one are left out.
        logits = logits[:, -scored - 1 : -1].float()  # (B, scored, V)
        predicted.append(logits.argmax(dim=-1).cpu())
        labels = batch[:, -scored:].long()  # of int32, too
        nats = F.cross_entropy(logits.mT, labels, reduction="none")  # (B, scored)
        losses.append(nats.cpu())
    samples = torch.arange(len(ids))
    lengths = torch.full_like(samples, length)
    report = tally.report(source, samples, lengths, (0.3,))
    return Outcome(torch.cat(losses), torch.cat(predicted), report)
