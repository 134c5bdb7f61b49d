"""Surgery on a trained model's first token: is the sink a bias, what hangs on it, what does without it (no training).

Attention is read as `measure` reads it, so that reports have its definition; caches and hooks do the rest. The model is
left as it was found, and other threads may use it meanwhile. Before each operation a text of at most 16 tokens runs
twice (`measure`'s check), and where a cache is needed one token. Layers, blocks and hidden dimensions count from 0 (as
in `measure`), positions from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sinkutils.checks import integer, require
from sinkutils.measuring.hf import Capture, capturing
from sinkutils.measuring.measure import check_range, evaluating, measure, unwrapped
from sinkutils.measuring.report import Report
from sinkutils.measuring.tally import Tally

TARGETS = (1, 2)
ELEMENTS = 2**27  # logits that a batch holds
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # what a layer keeps: keys and values, nothing else


@dataclass(frozen=True)
class Outcome:
    """What a model computes under surgery."""

    losses: Tensor  # (samples, T - 1): nats of tokens 2..T
    report: Report  # Sink_1, Sink_2, and Sink_*: of a transplanted k* and of a learned sink logit

    @property
    def loss(self) -> float:
        """Nats a token, mean over tokens 2..T of all texts."""
        return float(self.losses.mean())


def untouched(model: nn.Module, ids: Tensor) -> Outcome:
    """The model as it is on ids (samples, T), what surgery is compared with.

    Raises ValueError, as all functions here do, for what is no causal LM of transformers whose attention `measure`
    can read through its interface and, where keys and values are changed or hidden, for a model that keeps anything
    else between tokens: linear layers, a second state, an index of keys.
    """
    with operating(model, ids) as capture:
        return run(capture, ids)


def transplant(model: nn.Module, ids: Tensor, donors: Tensor, zero_values_from: int | None = None) -> Outcome:
    """Put a key and value k*, v* into the cache in front of each text, at every layer: KV biases (Table 4) without
    training.

    ids: (samples, T). donors: (n, any T), other texts: k* and v* are the means of their k_1 and v_1. They stand where
    a token in front of the text would: the text has positions 2..T+1, and rotary turns k_1 by no angle.
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
                pair = (x.mean(dim=0).expand(samples, -1, -1, -1) for x in (layer.keys, layer.values))
                filled.update(*pair, index)  # (B, H_kv, 1, D) each
            return filled

        return run(capture, ids, cache)


def hide(model: nn.Module, ids: Tensor) -> Outcome:
    """Mask x_1 from all other queries: does another token become the sink?"""
    rows = torch.arange(ids.shape[1])
    return _hiding(model, ids, (rows[:, None] > 0) & (rows == 0))


def stream(model: nn.Module, ids: Tensor, window: int, sinks: int = 0) -> Outcome:
    """Let each query see the last `window` keys, itself among them, and the first `sinks`: a streaming cache of
    window + sinks keys, with the positions that the tokens have in the text.

    Compare windows at one cache size: (128, 0), (127, 1), (124, 4).
    """
    integer("window", window, least=1)
    integer("sinks", sinks, least=0)
    rows = torch.arange(ids.shape[1])
    return _hiding(model, ids, (rows[:, None] - rows >= window) & (rows >= sinks))


def _hiding(model: nn.Module, ids: Tensor, hidden: Tensor) -> Outcome:
    """With the keys j hidden from the queries i where hidden[i, j], (T, T)."""
    with operating(model, ids, cache=True) as capture:
        capture.hidden = hidden
        return run(capture, ids)


def set_back(model: nn.Module, ids: Tensor, block: int, dimensions: Sequence[int] | int = 3) -> Outcome:
    """After a block, set a few dimensions of h_1 to their mean over the text's other positions.

    dimensions: which, or how many of the largest there (`Report.first_elements`): massive activations are the few
    dimensions above 1,000 times the median.
    """

    def edit(_, __, output):
        hidden = output if isinstance(output, Tensor) else output[0]
        require(hidden.ndim == 3, f"blocks pass on hidden states of {hidden.ndim} axes, several streams: no one h_1")
        changed = hidden.clone()
        changed[:, 0, chosen] = changed[:, 1:, chosen].mean(dim=1)
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    with operating(model, ids) as capture:
        integer("block", block, 0, len(capture.blocks) - 1)
        chosen = dimensions
        if isinstance(chosen, int):
            elements: Any = measure(model, ids).first_elements  # (blocks, d)
            chosen = elements[block].topk(chosen).indices.tolist()
        for dimension in chosen:
            integer("dimension", dimension, 0, capture.config.get_text_config().hidden_size - 1)
        with capture.blocks[block].register_forward_hook(capture.here(edit)):
            return run(capture, ids)


@contextmanager
def operating(model: nn.Module, ids: Tensor, *, cache: bool = False) -> Iterator[Capture]:
    """A model in eval mode, without gradients, whose attention is read as by `measure`; after it, as it was.

    cache: whether the operation needs that layers keep keys and values between tokens, and nothing else.
    """
    model = unwrapped(model)
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder or not model.get_output_embeddings():
        raise ValueError(f"surgery needs a causal LM of transformers with a KV cache, got {kind}")
    length = ids.shape[-1]
    with evaluating(model), torch.no_grad(), capturing(model, Tally(TARGETS, length, norms=False)) as capture:
        check_range(list(ids), capture.vocabulary)
        capture.check_positions(length + 1)
        capture.check(list(ids))
        plain = not capture.legacy and not capture.registered
        require(plain, f"{kind} has attention outside transformers' interface: surgery works on eager and sdpa only")
        if cache:
            kept = cached(capture, ids[:1, :1])
            layers = kept.layers if type(kept) is DynamicCache else []
            plain = len(layers) == len(capture.layers) and all(type(layer) in PLAIN for layer in layers)
            require(plain, f"{kind} keeps something else than keys and values of each layer between tokens")
        yield capture


def cached(capture: Capture, ids: Tensor) -> Any:
    """What the model keeps of ids (n, T)."""
    capture.tally = Tally((1,), ids.shape[1], norms=False)  # not looked at
    capture.start(ids)
    return getattr(capture.forward(ids.to(capture.table.device), use_cache=True), "past_key_values", None)


def run(capture: Capture, ids: Tensor, cache: Callable[[int], DynamicCache] | None = None) -> Outcome:
    """Losses and shares of attention of ids (samples, T); cache(B) is what a batch of B texts finds in front."""
    integer("T", ids.shape[1], least=2)
    tally = capture.tally = Tally(TARGETS, ids.shape[1], norms=False)
    losses = []
    for batch in ids.to(capture.table.device).split(max(1, ELEMENTS // (ids.shape[1] * capture.vocabulary))):
        past = cache(len(batch)) if cache else None
        capture.front = past.get_seq_length() if past else 0
        capture.start(batch)
        out = capture.model(batch, past_key_values=past, use_cache=past is not None)
        capture.finish()
        losses.append(F.cross_entropy(out.logits[:, :-1].float().mT, batch[:, 1:], reduction="none").cpu())
    samples = torch.arange(len(ids))
    return Outcome(torch.cat(losses), tally.report(capture, samples, torch.full_like(samples, ids.shape[1]), (0.3,)))
