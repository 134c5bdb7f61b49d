"""What a measurement is made of.

A `Source` is a model that is observed while it runs, a `Tally` collects the numbers of a report
from it, layer by layer and batch by batch, and `LeftAsFound` undoes all changes to the model.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinkutils.checks import instance, require
from sinkutils.measuring.report import FORMATS, Kept, NotFinite, Report

# Measuring changes the state of a model, and different models may share a configuration. So only
# one thread measures at a time.
ONE_AT_A_TIME = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A process that is forked beside a thread that measures has nobody who opens this lock.
    os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]


class Source:
    """A model that is observed: our own (`own.OwnModel`) or one of transformers (`hf.Capture`).

    What stands here is true of our own models.
    """

    model: Any  # the causal LM
    kind: str  # its class
    vocabulary: int  # the number of its token embeddings
    windows: Mapping[int, int | None]  # layer -> how many keys a query sees; None: all
    path = "dense"  # how alpha is computed, in words for the report
    packed = ""  # whether texts packed in a row saw each other, in words; "" if none were
    tokens_a_batch = 2**27  # the most tokens in one forward pass

    def takes(self, name: str) -> bool | None:
        """Whether the forward takes an entry of this name beside the ids; None: see what it does."""
        return False

    def is_changed_by(self, name: str, ids: Tensor, entries: Mapping[str, Any]) -> bool:
        """Whether an entry changes the pass on ids (B, T)."""
        return False

    def check(self, text: Tensor, ids: Tensor, entries: Mapping[str, Any]) -> None:
        """Raise ValueError if the attention of the model cannot be read.

        text: (1, T), a short one without a token twice. ids, entries: a pass to come, which is
            looked at instead if the model does not run on the text alone.
        """

    def check_positions(self, positions: int) -> None:
        """Raise ValueError if a row has more positions than the model knows."""

    def run(self, ids: Tensor, entries: Mapping[str, Any]) -> Any:
        """Run one forward pass on ids (B, T), which adds to the tally."""
        raise NotImplementedError


class Reduced(NamedTuple):
    """What is kept of the attention of R queries."""

    shares: Tensor  # A_ik of the keys at `Tally.columns`, (B, H, R, K)
    star: Tensor | None = None  # the attention to k*, x* or a learned sink logit, (B, H, R)
    entropy: Tensor | None = None  # of each row, in nats, the star's share included, (B, H, R)
    maps: Tensor | None = None  # of the chosen heads, (B, chosen, R, T)


# Numbers of each sample: name -> layer -> a list with one tensor (B, ..) per batch. For a kept map,
# queries or keys, a pair (layer, head) stands in place of the layer.
Values: TypeAlias = defaultdict[str, defaultdict[Any, list[Tensor]]]
# Sums over samples: name -> layer -> (positions,) or (d,).
Sums: TypeAlias = defaultdict[str, dict[int, Tensor]]


def mean_over_queries(shares: Tensor, columns: Tensor) -> Tensor:
    """alpha_k, the mean over i = k..T of A_ik, with the shape (B, K, H).

    shares: A_ik of the K keys, (B, H, T, K). columns: their 0-based positions, (K,).
    """
    rows = torch.arange(shares.shape[2], device=shares.device)
    # Only the rows i >= k count for key k. Earlier queries see it only in a prefix LM.
    counted = (rows[:, None] >= columns).to(shares.dtype)  # (T, K)
    alpha = (shares * counted).sum(dim=2) / counted.sum(dim=0)  # (B, H, K)
    return alpha.transpose(1, 2)


def lower_median(x: Tensor) -> Tensor:
    """torch.median of each row of x, (rows, n). On a CPU, NumPy computes it eight times faster."""
    if x.device.type != "cpu":
        return x.median(dim=1).values
    middle = (x.shape[1] - 1) // 2
    # `partition` sorts each row only so far that its middle element is in the right place.
    rows = np.partition(x.numpy(), middle, axis=1)
    return torch.from_numpy(rows[:, middle])


@dataclass
class Tally:
    """The numbers of a report so far. They are added one layer and one batch at a time."""

    targets: tuple[int, ...]  # the keys k, from 1
    length: int  # of the longest sequence
    norms: bool = True  # whether norms are measured
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head) whose map, queries and keys are kept
    entropy: bool = False  # whether the entropy of attention is measured

    def __post_init__(self) -> None:
        # (part, layer) -> the largest |element| of each head, at the first token and at the others
        self.peaks: dict[tuple[str, int], Tensor] = {}
        self.sink_logits: dict[int, float] = {}  # layer -> the mean learned sink logit
        self.values: Values = defaultdict(lambda: defaultdict(list))
        self.sums: Sums = defaultdict(dict)
        # Where the texts of the current pass stand in its only row; None: each row is one text.
        self.texts: Sequence[slice] | None = None
        self.order: list[int] = []  # the indices of the texts, in the order in which they ran

    def heads_of(self, layer: int, count: int) -> list[int]:
        """The heads of this layer that are kept. count: how many heads the layer has."""
        return [head for place, head in self.heads if place == layer and head < count]

    def columns(self, device: torch.device) -> Tensor:
        """The 0-based positions of the targets, (K,); of several texts in a row, of each text."""
        targets = torch.tensor(self.targets, device=device) - 1
        if self.texts is None:
            return targets
        starts = torch.tensor([text.start for text in self.texts], device=device)
        return (starts[:, None] + targets).flatten()

    def of_texts(self, x: Tensor, axis: int) -> list[Tensor]:
        """Cut x into the texts that stand in a row. axis: that of the tokens, T."""
        if self.texts is None:
            return [x]
        return [x.narrow(axis, text.start, text.stop - text.start) for text in self.texts]

    def add_norms(self, name: str, layer: int, x: Tensor) -> None:
        """Add the l2-norms of the vectors in x, (B, H, T, D), as a mean over heads.

        name: "key", for instance, for the sums called "key_norms".
        """
        if not self.norms:
            return
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=wide).mean(dim=1)  # (B, T)
        for of_text in self.of_texts(norms, 1):
            self._sum(f"{name}_norms", layer, self._padded(of_text))

    def add_hidden(self, layer: int, hidden: Tensor) -> None:
        """Add the norms and the largest elements of a block's output.

        hidden: (B, S, T, d), with S residual streams. The largest |element| at each position is
        divided by the median |element| of the sequence (Sun et al. 2024).
        """
        if not self.norms:
            return
        self.add_norms("hidden", layer, hidden)
        for of_text in self.of_texts(hidden, 2):
            sizes = of_text.abs().float()  # (B, S, T, d)
            # (B, 1), and no zero, by which it would be divided
            median = lower_median(sizes.flatten(1))[:, None].clamp(min=1e-30)
            largest = sizes.amax(dim=3)  # (B, S, T)
            self._add_peaks("h", layer, largest.amax(dim=1, keepdim=True))
            self._sum("hidden_peaks", layer, self._padded(largest.amax(dim=1) / median))  # (B, T)
            self._sum("first_elements", layer, sizes[:, :, 0].amax(dim=1) / median)  # (B, d)

    def _add_peaks(self, part: str, layer: int, sizes: Tensor) -> None:
        """Add the largest elements of a part, (B, H, T): those of the first token and all others'."""
        first = sizes[:, :, 0].amax(dim=0)  # (H,)
        others = sizes[:, :, 1:].flatten(2).transpose(0, 1).flatten(1)  # (H, B (T - 1))
        others = others.amax(dim=1) if others.shape[1] > 0 else torch.zeros_like(first)
        peaks = torch.stack([first, others]).float()
        before = self.peaks.get((part, layer), peaks)
        self.peaks[part, layer] = torch.maximum(before, peaks)

    def _add_cache(self, part: str, layer: int, x: Tensor) -> None:
        """Add what a cache in few bits would do to keys or values x, (B, H, T, D)."""
        for of_text in self.of_texts(x, 2):
            sizes = of_text.abs().float()
            self._add_peaks(part, layer, sizes.amax(dim=-1))
            peak = sizes.amax(dim=(1, 2, 3))[:, None, None, None]  # of each text
            relative = sizes[:, :, 1:] / peak.clamp(min=1e-30)  # nan below if there are no others
            lost = []
            for largest, spacing in FORMATS.values():
                below = relative < spacing / largest / 2  # half of the smallest number above zero
                lost.append(below.float().mean(dim=(1, 2, 3)))
            self.values[f"lost_{part}"][layer].append(torch.stack(lost, dim=1))

    def _sum(self, name: str, layer: int, rows: Tensor) -> None:
        """Add the rows (B, n) of a batch to a layer's sum over samples."""
        sums = self.sums[name]
        sums[layer] = sums.get(layer, 0) + rows.sum(dim=0).float()

    def _padded(self, values: Tensor, axes: int = 1) -> Tensor:
        """Pad the last axis, or the last two, with zeros up to the longest sequence's length."""
        behind = self.length - values.shape[-1]
        return F.pad(values, (0, behind) * axes)

    def add_qkv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add the norms of k and v, and keep q and k of the chosen heads.

        q: (B, H, T, D). k, v: (B, H or fewer, T, D).
        """
        for name, x in (("key", k), ("value", v)):
            self.add_norms(name, layer, x)
            if self.norms:
                self._add_cache(name[0], layer, x)
        # In grouped-query attention, `group` query heads share one key head.
        group = q.shape[1] // k.shape[1]
        for head in self.heads_of(layer, q.shape[1]):
            for name, x in (("queries", q[:, head]), ("keys", k[:, head // group])):
                for of_text in self.of_texts(x.float(), 1):  # (B, T, D)
                    padded = self._padded(of_text.mT).mT  # (B, longest, D)
                    self.values[name][layer, head].append(padded.cpu())

    def reduced(self, layer: int, weights: Tensor, star: bool = False) -> Reduced:
        """Reduce attention weights to the parts that are kept, for `add`.

        weights: (B, H, R, T), of R queries of a layer.
        star: whether what a row lacks to sum to one is attention, to a learned sink logit or to
            keys in front of the text.
        """
        wide = torch.promote_types(weights.dtype, torch.float32)
        shares = weights[..., self.columns(weights.device)].to(wide)
        chosen = self.heads_of(layer, weights.shape[1])
        lacking = 1 - weights.sum(dim=-1, dtype=wide) if star else None
        entropy = None
        if self.entropy:
            entropy = torch.special.entr(weights.to(wide)).sum(dim=-1)
            if lacking is not None:
                entropy = entropy + torch.special.entr(lacking.clamp(min=0))
        return Reduced(shares, lacking, entropy, weights[:, chosen].float() if chosen else None)

    def add(self, layer: int, parts: Sequence[Reduced]) -> None:
        """Add the attention of a layer. parts: one for each chunk of queries."""
        joined = []
        for pieces in zip(*parts, strict=True):  # of each field of `Reduced`
            joined.append(None if pieces[0] is None else torch.cat(pieces, dim=2))
        shares, star, entropy, maps = joined
        assert shares is not None
        targets = torch.tensor(self.targets, device=shares.device) - 1
        for index, of_text in enumerate(self.of_texts(shares, 2)):
            of_targets = of_text[..., index * len(targets) :][..., : len(targets)]
            alpha = mean_over_queries(of_targets, targets)
            self.values["alpha"][layer].append(alpha.float())
        for name, x in (("star", star), ("entropy", entropy)):
            for of_text in [] if x is None else self.of_texts(x, 2):
                self.values[name][layer].append(of_text.mean(dim=-1).float())  # (B, H)
        if maps is None:
            return
        for index, head in enumerate(self.heads_of(layer, shares.shape[1])):
            for text in self.texts or [slice(None)]:
                of_text = self._padded(maps[:, index, text, text], axes=2)  # (B, longest, longest)
                self.values["map"][layer, head].append(of_text.cpu())

    def refuse_heads(self) -> None:
        """Raise ValueError for chosen (layer, head) pairs that the model does not have.

        This is known once the first batch has run.
        """
        alphas = self.values["alpha"]
        missing = [pair for pair in self.heads if pair not in self.values["map"]]
        first, *_ = alphas.values()
        count = first[0].shape[-1]  # of the first batch, (B, targets, heads)
        lacking = f"heads names (layer, head) pairs that the model does not have: {missing}"
        there = f"its attention layers are {sorted(alphas)}, with heads 0..{count - 1}"
        require(not missing, f"{lacking}; {there}")

    def begin(self, texts: Sequence[slice] | None, places: Sequence[int]) -> None:
        """Begin another pass. texts: as above. places: the index of each of its texts."""
        self.texts = texts
        self.order += places

    def in_order(self, batches: Sequence[Tensor]) -> Tensor:
        """Join what each pass, or each text, has shown, and put it into the order of the ids."""
        places = torch.tensor(self.order, device="cpu").argsort()
        return torch.cat(list(batches)).cpu()[places]

    def report(self, source: Source, lengths: Tensor, epsilons: tuple[float, ...]) -> Report:
        """Make the report from all numbers that were added.

        source: what ran the model.
        lengths: (samples,), the length of each sample.
        Raises NotFinite for nan and infinite numbers, and ValueError if layers have different
        numbers of heads.
        """
        values: Any = defaultdict(dict)
        for name, by_layer in self.values.items():
            for layer, batches in sorted(by_layer.items()):
                values[name][layer] = self.in_order(batches)
        alphas = values["alpha"]  # layer -> (samples, targets, heads)
        counts = sorted({alpha.shape[-1] for alpha in alphas.values()})
        several = f"layers have different numbers of heads ({counts}), which a report cannot hold"
        require(len(counts) == 1, several)
        alpha = torch.stack(list(alphas.values()), dim=-2)  # (samples, targets, layers, heads)
        fields = self._means(lengths)
        fields["path"] = source.path
        if "star" in values:
            # Some models have sink logits only in some layers. In the others alpha_* is 0.
            nothing = torch.zeros_like(alpha[:, 0, 0])  # (samples, heads)
            stars = values["star"]
            fields["star"] = torch.stack([stars.get(layer, nothing) for layer in alphas], dim=1)
        if len(values["entropy"]) == len(alphas):  # every layer showed whole rows, or a kernel's
            fields["entropy"] = torch.stack(list(values["entropy"].values()), dim=1)
        fields["sink_logits"] = self.sink_logits
        fields["maxima"] = {place: peaks.cpu() for place, peaks in self.peaks.items()}
        fields["lost"] = {}
        for part in ("k", "v"):
            for layer, lost in values[f"lost_{part}"].items():
                fields["lost"][part, layer] = lost.nanmean(dim=0)
        if any(source.windows.values()):
            fields["windows"] = tuple(source.windows.get(layer) for layer in alphas)
        # These two are empty if the modules show only their weights.
        queries, keys = values["queries"], values["keys"]
        maps = values["map"].items()
        kept = {pair: Kept(x, queries.get(pair), keys.get(pair)) for pair, x in maps}
        layers = tuple(alphas)
        report = Report(alpha, self.targets, epsilons, lengths, layers, kept=kept, **fields)
        measured = [x for x in (report.alpha, report.hidden_norms) if x is not None]
        if not all(x.isfinite().all() for x in measured):
            reason = why_not_finite(source.model)
            raise NotFinite(f"attention or hidden states are not finite: {reason}")
        return report

    def _means(self, lengths: Tensor) -> dict[str, Any]:
        """The means over samples of norms and elements, under the names of the report's fields."""
        # If lengths differ, the mean at a position is over the sequences that are long enough.
        positions = torch.arange(self.length, device="cpu")
        samples = (lengths[:, None] > positions).sum(dim=0)  # how many these are, (positions,)
        means: dict[str, Any] = {}
        for name, sums in self.sums.items():
            # `first_elements` is about the first position, which every sequence has.
            count = samples[:1] if name == "first_elements" else samples
            totals = [sums[layer].cpu() for layer in sorted(sums)]
            means[name] = torch.stack(totals) / count
        if self.norms:  # the embedding was added under layer 0
            means["embedding_norms"] = means["embedding_norms"][0]
        return means


def why_not_finite(model: nn.Module) -> str:
    """Why a model's attention is nan or infinite, for the message of NotFinite."""
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point():
            continue
        if not weight.isfinite().all():
            return f"the weights hold nan or infinite values ({name})"
    if torch.float16 in {parameter.dtype for parameter in model.parameters()}:
        return "every weight is finite and activations overflow float16: use bfloat16 or float32"
    return "every weight is finite, and activations are not: a layer overflows or divides by zero"


@dataclass
class Edit:
    """An operation of surgery: replace x, the q, k or v of some layers, by change(x)."""

    part: str  # "q", "k" or "v"
    layers: Collection[int]
    change: Callable[[Tensor], Tensor]


def changed(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """change(x), computed on a copy. Raises ValueError if the result cannot replace x."""
    result = change(x.clone())
    instance("what change returns", result, Tensor)
    wanted = f"change must return the shape {tuple(x.shape)}"
    require(result.shape == x.shape, f"{wanted}, got {tuple(result.shape)}")
    return result.to(x)


class LeftAsFound:
    """A context that undoes all changes to a model when it ends. Enter it twice, in one line:

        with ONE_AT_A_TIME, state, state:

    An interrupt (^C) can come at any line, even while the inner context undoes the changes. The
    outer context then undoes them again. This works because every undo step is noted before its
    change is made, and can be repeated. Entering the context changes nothing.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []  # undo steps, run in reverse order

    def __enter__(self) -> LeftAsFound:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.steps):
            undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object or a class until the context ends."""
        if isinstance(owner, type) and name not in vars(owner):  # the class inherits it
            undo = partial(_forget, owner, name)
        else:
            undo = partial(setattr, owner, name, getattr(owner, name))
        self.steps.append(undo)
        setattr(owner, name, value)

    def evaluate(self, model: nn.Module) -> None:
        """Put every module in eval mode, and switch gradients off."""
        self.steps.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(False)
        # Modules may be in different modes (a frozen part, for instance), so we note each one's.
        # We do not call `model.eval()`: a class may do more there, such as merging its adapters.
        modes = [(module, module.training) for module in model.modules()]
        self.steps.append(partial(_set_modes, modes))
        _set_modes([(module, False) for module, _ in modes])
        hooks = [x for m in model.modules() for x in (m._forward_hooks, m._forward_pre_hooks)]
        self.steps.append(partial(_remove_new_of_peft, [(table, {*table}) for table in hooks]))

    def hook(
        self,
        module: nn.Module,
        hook: Callable[..., Any],
        *,
        before: bool = False,
        first: bool = False,
    ) -> None:
        """Add a hook that is called as hook(module, args, output) once the module has run.

        It does the same as `register_forward_hook`, but notes how to remove the hook before it adds
        it: no interrupt can come in between.
        before: call hook(module, args, kwargs) before the module runs instead.
        first: whether it runs before the module's other hooks.
        """
        hooks: Any = module._forward_pre_hooks if before else module._forward_hooks
        with_kwargs: Any = module._forward_pre_hooks_with_kwargs
        handle = RemovableHandle(hooks, extra_dict=with_kwargs)
        self.steps.append(handle.remove)
        if before:
            with_kwargs[handle.id] = True
        hooks[handle.id] = hook
        if first:
            hooks.move_to_end(handle.id, last=False)


def _forget(owner: type, name: str) -> None:
    """Delete an attribute that we set on a class, so that it inherits the attribute again."""
    if name in vars(owner):
        delattr(owner, name)


def _remove_new_of_peft(tables: list[tuple[Any, set[int]]]) -> None:
    """Remove hooks that PEFT has added. It leaves its own where a pass ends by an error."""
    for hooks, before in tables:
        for key in {*hooks} - before:
            hook = getattr(hooks[key], "func", hooks[key])
            if str(getattr(hook, "__module__", "")).startswith("peft."):
                del hooks[key]


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Set each module's mode: True for training, False for eval."""
    for module, training in modes:
        vars(module)["training"] = training
