"""What the surgery of the benchmarks shares: passes with the logits of attention changed, and a file
of results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from open_lms import short
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sinkutils import paths
from sinkutils.measuring.probes import Subject
from sinkutils.model.decoder import TransformerLM
from sinkutils.model.masks import visible

# change(layer, q, k, logits) -> logits (B, H, T, T), -inf where a key is not seen. q: (B, H, T, D)
# and scaled, so that logits = q k^T; k: (B, H, T, D), repeated where heads share keys.
Change = Callable[[int, Tensor, Tensor, Tensor], Tensor]
BATCH = 4  # texts, whose logits over a large vocabulary fit in memory


def keep(file: str, name: str, values: Any) -> None:
    """Put a model's results into data/FILE.json, in place of what stood there."""
    path = paths.LEDGER / f"{file}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = short(values)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{path.name}: {name}", flush=True)


def blocks(model: Any) -> Sequence[Any]:
    """The blocks of our own model, or of one in LLaMA's form."""
    return model.blocks if isinstance(model, TransformerLM) else model.model.layers


class Changed:
    """Observes a pass of one of our own models, and puts the changed attention's output in place."""

    def __init__(self, change: Change, see: Callable[[int, Tensor], None]) -> None:
        self.change = change
        self.see = see
        self.out = Tensor()

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, _: Any) -> None:
        q = q / q.shape[-1] ** 0.5
        rows = torch.arange(q.shape[2])
        seen = visible(rows[:, None], rows, spec)
        logits = (q @ k.mT).masked_fill(~seen, -torch.inf)
        shares = self.change(layer, q, k, logits).softmax(dim=-1)
        self.see(layer, shares)
        self.out = (shares @ v).transpose(1, 2).flatten(2)

    def put(self, *_: Any) -> Tensor:
        """What the output projection reads."""
        return self.out

    def embedding(self, *_: Any) -> None: ...

    def block(self, *_: Any) -> None: ...


@contextmanager
def changing(model: Any, change: Change, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """A model of transformers whose attention has changed logits, and shows its weights."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        groups = q.shape[1] // k.shape[1]
        kind = q.dtype
        q = q.float() * scaling  # attention is computed in float32, whatever the weights are
        k = k.float().repeat_interleave(groups, dim=1)
        v = v.float().repeat_interleave(groups, dim=1)
        logits = (q @ k.mT).masked_fill(mask < -1, -torch.inf)  # masks hold 0 and a large negative
        shares = change(module.layer_idx, q, k, logits).softmax(dim=-1)
        see(module.layer_idx, shares)
        return (shares @ v).transpose(1, 2).contiguous().to(kind), None

    AttentionInterface.register("changed", attend)
    AttentionMaskInterface.register("changed", eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("changed")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def unchanged(_: int, __: Tensor, ___: Tensor, logits: Tensor) -> Tensor:
    return logits


@torch.no_grad()
def passed(measured: Subject, ids: Tensor, change: Change = unchanged) -> tuple[Tensor, Tensor]:
    """The loss of tokens 2..T, (n, T - 1), and alpha_k of every key, (n, L, H, T), under a change."""
    model: nn.Module = measured.model
    losses, alphas = [], []
    for batch in ids.split(BATCH):
        by_layer: dict[int, Tensor] = {}

        def see(layer: int, shares: Tensor, by_layer: dict[int, Tensor] = by_layer) -> None:
            length = shares.shape[-1]
            behind = torch.arange(length, 0, -1)  # how many queries i >= k there are
            by_layer[layer] = shares.tril().sum(dim=2) / behind

        if isinstance(model, TransformerLM):
            observer = Changed(change, see)
            with ExitStack() as hooks:
                for block in model.blocks:
                    handle = block.attention.out.register_forward_pre_hook(observer.put)
                    hooks.callback(handle.remove)
                logits = model(batch, observer)
        else:
            with changing(model, change, see):
                logits = model(batch, use_cache=False).logits
        nats = F.cross_entropy(logits[:, :-1].float().mT, batch[:, 1:], reduction="none")
        losses.append(nats)
        alphas.append(torch.stack([by_layer[layer] for layer in sorted(by_layer)], dim=1))
    return torch.cat(losses), torch.cat(alphas)


def excess(alpha: Tensor, length: int) -> Tensor:
    """Extra attention: alpha_1 beyond an even share of a text of that length."""
    even = float((1 / torch.arange(1, length + 1)).mean())
    return (alpha - even) / (1 - even)
