"""Surgery on a trained model: change one forward pass, and see what happens to sink and loss.

    untouched   change nothing: the baseline of all others
    edit        change hidden states, q, k, v or an FFN's neurons by a function of your own
    set_back    set the largest elements of h_1 to what other positions have in their place
    hide        hide the first key from all queries
    stream      let queries see only the last keys, with or without the first ones
    transplant  put a key and a value that come from other texts in front of the text

Each takes ids as `measure` does: a tensor (samples, T) with or without `attention_mask`, or what a
tokenizer returns. Padding is cut off, and texts of one length run together.

Nothing is trained, and afterwards the model is in its original state. Attention is read as in
`measure`, so that the numbers of a report have the same definition. A model is a `TransformerLM` or
a causal LM of transformers; `transplant` needs a KV cache, and accepts only the latter.

On a model of transformers the check of `measure` runs first, on at most 16 tokens. The last three
operations also run one token, to see that its cache holds keys and values. Layers, blocks and
hidden dimensions count from 0, as in `measure`, and positions from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

from sinkutils.checks import choice, integer, integers, require, short
from sinkutils.measuring import families
from sinkutils.measuring.batches import Ids, Inputs
from sinkutils.measuring.hf import Capture
from sinkutils.measuring.measure import check_range, measure, watched
from sinkutils.measuring.own import OwnModel
from sinkutils.measuring.passes import Measuring, Pass
from sinkutils.measuring.refusals import Arguments
from sinkutils.measuring.report import Report, check_targets
from sinkutils.measuring.tally import Edit, LeftAsFound, Tally, changed
from sinkutils.model.decoder import TransformerLM

__all__ = ["Outcome", "edit", "hide", "set_back", "stream", "transplant", "untouched"]

TARGETS = (1, 2)  # the keys k of Sink_k
LIKELIEST = 3  # tokens that an outcome has of each position
ELEMENTS = 2**27  # the most logits in memory at a time
# How the name of an FFN's second projection ends in transformers
SECOND = re.compile(
    r"\b(down_proj|c_proj|fc2|dense_4h_to_h|fc_out|w2|wo|lin2|linear_2|output_linear|ffn\.2"
    r"|(?<!attention\.)output\.dense)$",
    re.IGNORECASE,
)
# What `edit` can change, and which of q, k and v it is
PLACES = {"block": "", "query": "q", "key": "k", "value": "v", "neurons": ""}


@dataclass(frozen=True)
class Outcome:
    """The result of a forward pass under surgery."""

    # The loss in nats of tokens 2..T, or of the `last` ones, (samples, T - 1). Shorter texts are
    # filled up with nan, and in `likeliest` with -1.
    losses: Tensor
    likeliest: Tensor  # (samples, T - 1, 3): the most likely tokens at each of these positions
    shares: Tensor  # (samples, T - 1, 3): their probabilities
    report: Report  # Sink_1 and Sink_2; Sink_* for k* (transplanted or trained) or a sink logit

    @property
    def loss(self) -> float:
        """The mean of `losses`, in nats per token."""
        return float(self.losses.nanmean())

    @property
    def predicted(self) -> Tensor:
        """The most likely token at each position, (samples, T - 1)."""
        return self.likeliest[..., 0]


def __dir__() -> list[str]:
    return __all__


def untouched(
    model: nn.Module, ids: Ids, last: int | None = None, *, attention_mask: Tensor | None = None
) -> Outcome:
    """Run the unchanged model on ids (samples, T), as the baseline of every operation.

    last: how many tokens at the end are predicted; None: all but the first. With a large
        vocabulary, the logits of a long text cost as much as all blocks.

    Like all functions here, it raises ValueError for a model whose attention is not read through
    transformers' interface. `hide`, `stream` and `transplant` also refuse a model that keeps anything
    but keys and values between tokens: linear layers, a second state, an index of keys.
    """
    with operating(model, ids, attention_mask) as (source, inputs, _):
        return run(source, inputs, last=last)


def edit(
    model: nn.Module,
    ids: Ids,
    place: str,
    change: Callable[[Tensor], Tensor],
    layers: Sequence[int] | None = None,
    *,
    attention_mask: Tensor | None = None,
) -> Outcome:
    """Replace x by change(x) in some layers or in all, and let the model continue.

    place: says what x is, for a batch of B texts:
        "block"                  the hidden states that a block passes on, (B, T, d)
        "query", "key", "value"  after rotary, (B, H, T, D); keys and values may have fewer heads
        "neurons"                the input of the FFN's second projection, (B, T, n)
        A batch has all texts of one length, unless their logits would need more than half a GiB.
    change: a function that gets a copy of x, which it may modify, and returns a tensor of the same
        shape. If it runs the model, that pass is not edited. In our own models with a sink token,
        x* is at the first position.
    layers: which layers, from 0; None: all.

    Two examples: halve the first token's hidden state after block 1, and subtract the mean query in
    every block.

        def halve(h):
            h[:, 0] *= 0.5
            return h

        edit(model, ids, "block", halve, layers=[0])
        edit(model, ids, "query", lambda q: q - q.mean(dim=(0, 2), keepdim=True))
    """
    choice("place", place, PLACES)
    require(callable(change), f"change must be a function, got {short(change)}")
    with operating(model, ids, attention_mask) as (source, inputs, state):
        part = PLACES[place]
        # A hybrid model has blocks without attention.
        every = sorted(source.layers.values()) if part else list(range(len(source.blocks)))
        chosen = integers("layers", every if layers is None else layers, 0, every[-1])
        require({*chosen} <= {*every}, f"attention is in layers {every} alone, got {chosen}")
        change = partial(source.unobserved, change)  # it may run the model itself
        if part:
            return run(source, inputs, edit=Edit(part, {*chosen}, change))
        for layer in dict.fromkeys(chosen):
            edit_block(source, source.blocks[layer], place, change, state)
        return run(source, inputs)


def edit_block(
    source: Any,
    block: nn.Module,
    place: str,
    change: Callable[[Tensor], Tensor],
    state: LeftAsFound,
) -> None:
    """Change the hidden states that a block passes on, or the neurons of its FFN, by a hook."""

    def before(_: nn.Module, args: tuple[Tensor], kwargs: Any) -> Any:
        (x,) = args
        # OPT, for instance, puts all tokens of a batch into one axis
        by_text = x.unflatten(0, source.shape) if x.ndim == 2 else x
        return (changed(change, by_text).view_as(x),), kwargs

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(source, OwnModel):
            told = source.taught is not None and source.taught.hidden is not None
            require(not told, "'block' cannot be edited where su.families.register names `hidden`")
            streams = source.hidden_states(hidden).shape[1]
            require(streams == 1, f"blocks pass on {streams} residual streams: there is no one h_1")
        edited = changed(change, hidden)
        return edited if isinstance(output, Tensor) else (edited, *output[1:])

    if place == "block":
        # This hook comes first, so that the hook that measures norms sees the changed states.
        state.hook(block, source.here(after), first=True)
    else:
        own = isinstance(source, OwnModel)
        down = block.get_submodule("ffn.down") if own else second_projection(source, block)
        state.hook(down, source.here(before), before=True)


def second_projection(source: Capture, block: nn.Module) -> nn.Module:
    """The layer of a block's FFN that reads its neurons, whatever its class: a `Linear`, `Conv1D`,
    an adapter around one.

    Its name tells, and its width where several layers have such a name, or none. Layers inside
    attention do not count, nor do experts: each token takes its own, so that there is no (B, T, n).
    """
    config = source.config.get_text_config()
    width = getattr(config, "hidden_size", None)
    neurons = getattr(config, "intermediate_size", None)
    parts: dict[str, nn.Module] = dict(block.named_modules())
    has_experts = any("experts" in name.split(".") for name in parts)
    require(not has_experts, f"{source.kind} has experts, and each token takes neurons of its own")
    aside = families.idle(block).union(*(layer.modules() for layer in source.layers))
    sizes = {name: sizes_of(part) for name, part in parts.items() if part not in aside}
    into = {name: n for name, (n, d) in sizes.items() if d == width}
    named = [name for name in into if SECOND.search(name)]
    found = named if len(named) == 1 else [n for n in named or into if into[n] == neurons]
    wanted = f"from neurons (intermediate_size: {neurons}) to its hidden_size ({width})"
    require(len(found) == 1, f"{source.kind} has no one linear layer {wanted}")
    return parts[found[0]]


def sizes_of(part: nn.Module) -> tuple[Any, Any]:
    """The sizes of what a linear layer takes and returns; (None, None) for other modules."""
    if isinstance(part, Conv1D):
        return part.nx, part.nf
    return getattr(part, "in_features", None), getattr(part, "out_features", None)


def set_back(
    model: nn.Module,
    ids: Ids,
    block: int,
    dimensions: Sequence[int] | int = 3,
    *,
    attention_mask: Tensor | None = None,
) -> Outcome:
    """After a block, set a few dimensions of h_1 to their mean over the text's other positions.

    dimensions: a list of dimensions, or a number: that many in which h_1 is largest
        (`Report.first_elements`). Massive activations are the few dimensions with more than 1,000
        times the median.
    """
    report = measure(model, ids, attention_mask=attention_mask)
    elements: Any = report.first_elements  # (blocks, d)
    blocks, width = elements.shape
    block = integer("block", block, 0, blocks - 1)
    if isinstance(dimensions, Integral):
        count = integer("dimensions", dimensions, 1, width)
        dimensions = elements[block].topk(count).indices.tolist()
    chosen = integers("dimensions", dimensions, 0, width - 1)

    # Our own models with a sink token have x* in front of x_1.
    first = int(isinstance(model, TransformerLM) and model.config.sink_token)

    def to_the_mean(hidden: Tensor) -> Tensor:  # (B, T, d)
        others = hidden[:, first + 1 :, chosen]
        hidden[:, first, chosen] = others.mean(dim=1)
        return hidden

    return edit(model, ids, "block", to_the_mean, [block], attention_mask=attention_mask)


def hide(
    model: nn.Module,
    ids: Ids,
    since: int = 2,
    last: int | None = None,
    targets: Sequence[int] = TARGETS,
    *,
    attention_mask: Tensor | None = None,
) -> Outcome:
    """Hide the first key from the queries at positions `since`..T. Does another key become a sink?

    since: with 2, no other token sees x_1. A later position simulates a cache that holds k_1 until
        then and drops it.
    last: as in `untouched`.
    targets: the positions k of the report's Sink_k.
    """
    with operating(model, ids, attention_mask, cache=True) as (source, inputs, _):
        length = int(inputs.lengths.max())
        since = integer("since", since, 2, length)
        keys = torch.arange(length)
        hidden = (keys[:, None] >= since - 1) & (keys == 0)  # (T, T)
        return run(source, inputs, last=last, hidden=hidden, targets=targets)


def stream(
    model: nn.Module, ids: Ids, window: int, sinks: int = 0, *, attention_mask: Tensor | None = None
) -> Outcome:
    """Let each query see only the last `window` keys, including its own, and the first `sinks`.

    This simulates a streaming cache of window + sinks keys. Tokens keep their positions in the
    text. Compare settings of equal cache size, such as (128, 0), (127, 1) and (124, 4).
    """
    window = integer("window", window, least=1)
    sinks = integer("sinks", sinks, least=0)
    with operating(model, ids, attention_mask, cache=True) as (source, inputs, _):
        keys = torch.arange(int(inputs.lengths.max()))
        hidden = (keys[:, None] - keys >= window) & (keys >= sinks)  # (T, T)
        return run(source, inputs, hidden=hidden)


def transplant(
    model: nn.Module,
    ids: Ids,
    donors: Ids,
    zero_values_from: int | None = None,
    *,
    attention_mask: Tensor | None = None,
) -> Outcome:
    """Put a key k* and a value v* into the cache in front of each text, in every layer.

    They act as KV biases (Table 4) without training.
    ids: (samples, T).
    donors: (n, any T), other texts. In each layer, k* and v* are the means of their k_1 and v_1.
    zero_values_from: v* = 0 from this layer on; 0 gives K biases everywhere.

    k* and v* take the place of a token in front of the text. So the text has the positions 2..T+1,
    and k* has the first, at which rotary does not turn a key.
    """
    own = isinstance(model, TransformerLM)
    require(not own, "transplant needs a KV cache, and TransformerLM has none: use edit")
    with operating(model, ids, attention_mask, cache=True) as (source, inputs, _):
        source.check_positions(inputs.positions + 1)
        texts = Inputs(donors, None, (1,)).texts
        check_range(texts, source.vocabulary)
        # k_1 and v_1 depend on the first token alone, as attention is causal.
        firsts = torch.stack([text[:1] for text in texts])
        layers = cached(source, firsts).layers
        if zero_values_from is not None:
            first = integer("zero_values_from", zero_values_from, 0, len(layers))
            for layer in layers[first:]:
                layer.values.zero_()

        def cache(samples: int) -> DynamicCache:
            filled = DynamicCache(config=source.config)
            for index, layer in enumerate(layers):
                # All texts get the same k* and v*, (B, H_kv, 1, D). Values may have a smaller D.
                means = (x.mean(dim=0) for x in (layer.keys, layer.values))  # (H_kv, 1, D)
                filled.update(*(x.expand(samples, -1, -1, -1) for x in means), index)
            return filled

        return run(source, inputs, cache)


@contextmanager
def operating(
    model: nn.Module, ids: Ids, attention_mask: Tensor | None = None, *, cache: bool = False
) -> Iterator[tuple[Any, Inputs, LeftAsFound]]:
    """A context in which the model is in eval mode, without gradients, and its attention is read.

    When it ends, the model is in its original state. Yields what observes the model, an `OwnModel`
    or a `Capture`, the texts, and the state to which changes are added.
    cache: whether the operation needs a model of transformers to keep keys and values, and nothing
        else, between tokens.
    """
    inputs = Inputs(ids, attention_mask, (1,))
    alone = "surgery takes one text a row, whose positions count from the first"
    require(not inputs.whole, f"{alone}: give each text a row of its own")
    shortest = int(inputs.lengths.min())
    require(shortest > 1, "a loss is of a token behind another, and a text of ids has one token")
    tally = Tally(TARGETS, int(inputs.lengths.max()))
    with watched(model, inputs, tally, tokens=ELEMENTS) as (source, batches, state):
        if isinstance(source, Capture):
            source.doing = Pass()
            state.set(source.config, "return_dict", True)  # we read output.logits
            if source.outer is source.base:  # which computes none
                source.outer = source.model
                source.arguments = Arguments(source.model, source.model, source.base, False)
            wanted = "a TransformerLM or a causal LM of transformers"
            has_logits = source.model.get_output_embeddings() is not None
            require(has_logits, f"surgery needs {wanted}, got {source.kind}")
            outside = "has attention outside transformers' interface, in which surgery can change"
            require(not source.legacy, f"{source.kind} {outside} nothing")
            other = "keeps something else than keys and values of each layer between tokens"
            keeps = not cache or keeps_keys_and_values(source, batches[-1].ids[:1, :1])
            require(keeps, f"{source.kind} {other}")
        yield source, inputs, state


def keeps_keys_and_values(capture: Capture, ids: Tensor) -> bool:
    """Whether the cache holds the keys and values of the attention layers, and nothing else."""
    past = cached(capture, ids)
    if type(past) is not DynamicCache:  # a cache class of the family's own may hold more
        return False
    kinds = {type(layer) for layer in past.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    return kinds and len(past.layers) == len(capture.layers)


def cached(capture: Capture, ids: Tensor) -> Any:
    """The model's cache after a forward pass on ids (n, T); None if it returns none."""
    capture.start(ids)
    output = capture.base(ids.to(capture.device), use_cache=True)
    return getattr(output, "past_key_values", None)


def run(
    source: Any,
    inputs: Inputs,
    cache: Callable[[int], DynamicCache] | None = None,
    last: int | None = None,
    hidden: Tensor | None = None,
    edit: Edit | None = None,
    targets: Sequence[int] = TARGETS,
) -> Outcome:
    """Run the operation on the texts, and return its losses and its report.

    source: an `OwnModel` or a `Capture`.
    cache: a function; cache(B) makes the cache that stands in front of a batch of B texts. With it,
        no norms are measured.
    last: as in `untouched`.
    hidden: (T, T), True where query i may not see key j.
    edit: a change of q, k or v.
    targets: the positions k of the report's Sink_k.
    """
    lengths = inputs.lengths
    shortest = int(lengths.min())
    if last is not None:
        last = integer("last", last, 1, shortest - 1)
    targets = check_targets(targets, shortest)
    tally = Tally(targets, int(lengths.max()), norms=cache is None)
    losses: list[Tensor] = []
    likeliest: list[Tensor] = []
    shares: list[Tensor] = []
    # The number of texts in a batch, so that their logits fit in memory
    logits_a_text = (last or int(lengths.max()) - 1) * source.vocabulary
    for batch in inputs.batches(0, max(1, ELEMENTS // logits_a_text)):
        tally.begin(None, batch.places)
        scored = last or batch.ids.shape[1] - 1
        if isinstance(source, OwnModel):
            source.tally = tally
            source.edit = edit
            source.hidden = hidden
            logits = source.model(batch.ids.to(source.device), source)
        else:
            # The forward pass appends to the cache, so each batch needs a new one.
            past = cache(len(batch.ids)) if cache else None
            front = past.get_seq_length() if past else 0
            source.doing = Measuring(tally, True, edit, hidden, front)
            entries = dict(batch.entries)
            if "logits_to_keep" in source.arguments.options:
                entries["logits_to_keep"] = last + 1 if last else 0  # 0: all
            if past is not None:
                entries |= {"past_key_values": past, "use_cache": True}
            logits = source.run(batch.ids, entries).logits
        # The logits at position i predict token i + 1, so those at the last position are left out.
        logits = logits[:, -scored - 1 : -1].float()  # (B, scored, V)
        highest, tokens = logits.topk(min(LIKELIEST, logits.shape[-1]))
        likeliest += tokens.cpu()
        shares += (highest - logits.logsumexp(dim=-1, keepdim=True)).exp().cpu()
        # ids may be int32, which cross_entropy refuses
        labels = batch.ids[:, -scored:].long().to(logits.device)
        losses += F.cross_entropy(logits.mT, labels, reduction="none").cpu()  # (B, scored)
    report = tally.report(source, lengths, (0.3,))

    def in_order(rows: list[Tensor], fill: float) -> Tensor:
        return tally.in_order([pad_sequence(rows, batch_first=True, padding_value=fill)])

    nan = torch.nan
    return Outcome(in_order(losses, nan), in_order(likeliest, -1), in_order(shares, nan), report)
