"""Observing a `TransformerLM` while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinkutils.measuring.tally import Edit, Source, Tally, changed
from sinkutils.model.attention import attend, divide
from sinkutils.model.config import AttentionSpec
from sinkutils.model.decoder import TransformerLM

# Shares that are computed at once: 128 MB of them.
MOST_SHARES = 2**24


class OwnModel(Source):
    """The `Source` that is a `TransformerLM`. It adds to a tally what the model shows.

    The model calls `embedding`, then `attention` and `block` in each block.
    """

    kind = "TransformerLM"
    edit: Edit | None = None
    hidden: Tensor | None = None  # (T, T): True where query i of a text may not see key j
    aside = False

    def __init__(self, model: TransformerLM, tally: Tally) -> None:
        self.model = model
        self.tally = tally
        self.blocks = model.blocks
        self.layers = {block.attention: layer for layer, block in enumerate(model.blocks)}
        self.device = model.embed.weight.device
        cfg = model.config
        self.first = int(cfg.sink_token)  # 1 where x* stands at position 0
        self.vocabulary = cfg.vocab_size
        self.windows = dict.fromkeys(range(cfg.num_layers), cfg.attention.window)

    def here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a hook that does nothing while `unobserved` runs."""
        return lambda *args: None if self.aside else function(*args)

    def unobserved(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns. Nothing is edited in the passes that it runs."""
        self.aside = True
        try:
            return function(*args)
        finally:
            self.aside = False

    def run(self, ids: Tensor, entries: Mapping[str, Any]) -> None:
        """Run one forward pass on ids (B, T)."""
        self.model.hidden(ids.to(self.device), self)

    def _text(self, hidden: Tensor) -> Tensor:
        """The hidden states of the text, without x*, as one residual stream: (B, 1, T, d)."""
        return hidden[:, None, self.first :]

    def embedding(self, hidden: Tensor) -> None:
        self.tally.add_norms("embedding", 0, self._text(hidden))

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        extras: Mapping[str, Any],
    ) -> Tensor | None:
        """Add a layer's attention to the tally. Where keys are hidden, return the output."""
        if self.edit is not None and layer in self.edit.layers:
            part = {"q": q, "k": k, "v": v}[self.edit.part]
            # An edit does more than observe. It is written into the tensors that the model has
            # handed us, and the model computes its output from them.
            part.copy_(changed(self.edit.change, part))
        tally = self.tally
        first = self.first
        of_text = [x[:, :, first:] for x in (q, k, v)]
        tally.add_qkv(layer, *of_text)
        if "sink_logit" in extras:
            tally.sink_logits[layer] = float(extras["sink_logit"].mean())
        B, H, T, _ = q.shape
        length = T - first  # of the text
        hidden = self.hidden
        if hidden is not None:
            hidden = F.pad(hidden, (first, 0, first, 0))[:T, :T]  # every query sees x*
        # A long text is measured some queries at a time, so that memory grows with its length only.
        size = max(1, MOST_SHARES // (B * H * T))
        parts = []
        # The row of x*, which sees only itself, is left out.
        for start in range(first, T, size):
            rows = q[:, :, start : start + size]
            of_rows = None if hidden is None else hidden[start : start + size]
            shares = attention_shares(rows, k, v, spec, extras, start, of_rows)  # (B, H, rows, S)
            # The columns are k* or x*, if there is one, followed by the keys of the text.
            reduced = tally.reduced(layer, shares[..., -length:])
            if first or spec.has_star:
                reduced = reduced._replace(star=shares[..., -length - 1])
            if tally.entropy:  # with the star's share
                reduced = reduced._replace(entropy=torch.special.entr(shares).sum(dim=-1))
            parts.append(reduced)
        tally.add(layer, parts)
        if hidden is None:
            return None
        # One text at a time, since the whole attention matrix is in memory.
        outs = []
        for text in range(B):
            one = slice(text, text + 1)
            out, _ = attend(q[one], k[one], v[one], spec, hidden=hidden, **extras)
            outs.append(out)
        return torch.cat(outs)

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.tally.add_hidden(layer, self._text(hidden))
        if before_norm is not hidden:  # a post-norm block: the sum before its last norm (Eq. 3)
            self.tally.add_norms("before_norm", layer, self._text(before_norm))


def attention_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    extras: Mapping[str, Any],
    start: int | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """The shares of attention from which alpha is computed, (B, H, T, S), in float64.

    A share is |A_ij| divided by its row's sum. For softmax it is A_ij itself, and for weights that
    do not sum to one it is the proxy score of Section 7.4. Softpick is an exception: its rows sum
    to at most one, and are used as they are. The arguments are those of `attend`.
    """
    # In float64, exp(s) does not overflow for logits s up to 709. Apple GPUs have no float64.
    device = torch.device("cpu") if q.device.type == "mps" else q.device

    def widened(x: Tensor) -> Tensor:
        return x.to(device).double()

    def learned_kernel(x: Tensor) -> Tensor:
        return widened(extras["mlp"](x.to(q)))  # the MLP runs in the model's own precision

    wide: Any = {name: widened(x) for name, x in extras.items() if name != "mlp"}
    if "mlp" in extras:
        wide["mlp"] = learned_kernel
    wide |= {"start": start, "hidden": hidden}
    _, weights = attend(widened(q), widened(k), widened(v), spec, **wide)
    weights = weights.abs()
    # A row of softpick may sum to less than `scale`. The rest is attention to no key, and must not
    # be distributed over the keys.
    if spec.similarity == "softpick":
        return weights / spec.scale
    return divide(weights, weights.sum(dim=-1, keepdim=True))
