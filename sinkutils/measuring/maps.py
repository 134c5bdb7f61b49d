"""`report`: the numbers of a model that is not run here, from its maps or its queries and keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkutils.checks import Refused, integer, real, require, short
from sinkutils.measuring.batches import dense
from sinkutils.measuring.measure import distinct_pairs
from sinkutils.measuring.report import NotFinite, Report, check_bos, check_epsilons, check_targets
from sinkutils.measuring.tally import Tally
from sinkutils.model.attention import attend, divide
from sinkutils.model.config import AttentionSpec

ELEMENTS = 2**24  # attention weights in memory at a time, from queries and keys
SHAPES = {"maps": "(B, H, T, T)", "q": "(B, H, T, D)", "k": "(B, G, T, D)", "sinks": "(H,)"}
ROUNDED = {2: 2e-2, 4: 1e-3, 8: 1e-3}  # bytes of a number -> how far a row's sum may be from 1


def report(
    maps: Iterable[Any] | None = None,
    *,
    q: Iterable[Any] | None = None,
    k: Iterable[Any] | None = None,
    sinks: Iterable[Any] | None = None,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    normalised: bool = True,
    star: bool = False,
    targets: Sequence[int] = (1,),
    epsilons: Sequence[float] = (0.3,),
    heads: Sequence[tuple[int, int]] = (),
    bos: bool | None = None,
    name: str = "",
) -> Report:
    """The `Report` of attention that was computed elsewhere, in one of two ways.

    From maps, one a layer: arrays (B, H, T, T) of PyTorch, NumPy, JAX or another framework, where
    row i holds the attention of query i. From queries and keys, one each a layer, after all
    rotations: q (B, H, T, D) and k (B, G, T, D), where H / G query heads in a row share a key head.
    Then no map is made, and memory grows with T alone. One layer is read at a time, so generators
    will do. A layer that is None, as one without attention, is passed over.

    sinks: with q and k, the learned sink logits, an (H,) a layer; a layer without one has None.
    scale: with q and k, the factor of their products; None: 1 / sqrt(D).
    window: how many keys a query sees, for all layers or for each; None: all. With q and k it hides
        the others. With maps it only tells the report what alpha_k can be.
    normalised: False for maps whose rows do not sum to one, as of sigmoid attention. Then the
        numbers are the proxies of Section 7.4: each |A_ij| is divided by its row's sum.
    star: whether what a row of a map lacks to sum to one is attention to a learned sink. It is
        reported as Sink_*.
    targets, epsilons, heads, bos, name: as in `measure`.

    The report has no norms. Two such reports are compared as if they were of different texts.
    Raises ValueError, with the layer, for maps that are not causal, whose rows do not sum to one,
    or whose shapes do not fit together, and for nan.
    """
    from_maps = maps is not None
    require(from_maps == (q is None), "give either maps, or q and k")
    require((q is None) == (k is None), "queries need keys: give both q and k")
    alone = "sinks and scale belong to q and k: in maps they are accounted for already"
    require(not from_maps or (sinks is None and scale is None), alone)
    whole = "normalised and star belong to maps: q and k are those of a softmax"
    require(from_maps or (normalised and not star), whole)
    require(normalised or not star, "star needs rows that sum to one with the sink's share")
    check_bos(bos)
    if scale is not None:
        real("scale", scale, "positive and finite", more=True)
    windows: dict[int, int | None] = {}
    tally: Tally | None = None
    for layer, arrays in enumerate(layers_of(maps=maps, q=q, k=k, sinks=sinks)):
        first, *_ = arrays.values()
        if first is None:
            continue
        windows[layer] = window_of(window, layer)
        tensors = {part: array_of(part, layer, x) for part, x in arrays.items() if x is not None}
        first, *_ = tensors.values()
        B, T = first.shape[0], first.shape[2]
        if tally is None:
            shape = B, T
            checked = check_targets(targets, T)
            tally = Tally(checked, T, norms=False, heads=distinct_pairs(heads))
            tally.begin(None, range(B))
        of_first = f"the first layer {shape[0]} of {shape[1]}"
        require((B, T) == shape, f"layer {layer + 1} has {B} texts of {T} tokens, and {of_first}")
        if from_maps:
            weights = shares_of(tensors["maps"], layer, normalised, star)
            tally.add(layer, [tally.reduced(layer, weights, star)])
        else:
            add_softmax(tally, layer, scale=scale, window=windows[layer], **tensors)
    require(tally is not None, "there is no layer: maps, or q and k, are empty")
    assert tally is not None
    tally.refuse_heads()
    path = "given maps" if from_maps else "given queries and keys"
    source: Any = SimpleNamespace(path=path, windows=windows, model=torch.nn.Module())
    lengths = torch.full((shape[0],), shape[1])
    try:
        result = tally.report(source, lengths, check_epsilons(epsilons))
    except NotFinite as error:
        raise NotFinite("attention is not finite: products of q and k overflow") from error
    result.name = name
    result.bos = bos
    return result


def layers_of(**parts: Iterable[Any] | None) -> Iterable[dict[str, Any]]:
    """For each layer its arrays by name. Raises ValueError if there are not equally many of each."""
    given = {name: values for name, values in parts.items() if values is not None}
    for name, values in given.items():
        wanted = f"{name} must be arrays, one a layer"
        require(isinstance(values, Iterable), f"{wanted}; got {short(values)}")
    end = object()
    for layer, row in enumerate(zip_longest(*given.values(), fillvalue=end)):
        ended = [name for name, x in zip(given, row, strict=True) if x is end]
        others = [name for name in given if name not in ended]
        require(not ended, f"there are {layer} layers of {ended}, and more of {others}")
        yield dict(zip(given, row, strict=True))


def window_of(window: int | Sequence[int | None] | None, layer: int) -> int | None:
    """The window of a layer."""
    if isinstance(window, Sequence | np.ndarray):
        require(layer < len(window), f"window has {len(window)} layers, and there are more")
        window = window[layer]
    return None if window is None else integer("window", window, least=1)


def array_of(part: str, layer: int, x: Any) -> Tensor:
    """A layer's array as a tensor, checked for its dimensions and for nan."""
    name = f"{part} of layer {layer + 1}"
    tensor = as_tensor(name, x).detach()
    dense(name, tensor)
    fits = tensor.ndim == (1 if part == "sinks" else 4) and tensor.numel() > 0
    require(
        fits and tensor.is_floating_point() and tensor.dtype.itemsize > 1,
        f"{name} must be floating-point numbers of the shape {SHAPES[part]}, got {tensor.dtype} "
        f"of the shape {tuple(tensor.shape)}",
    )
    return tensor


def as_tensor(name: str, x: Any) -> Tensor:
    """An array of NumPy, JAX or another framework as a tensor; a tensor as it is.

    Raises ValueError, with the name, for what is no array of numbers.
    """
    if isinstance(x, Tensor):
        return x
    require(not np.ma.is_masked(x), f"{name} hides numbers by a mask, which is not read: fill them")
    try:
        if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
            return torch.from_dlpack(x)
        # A copy, because PyTorch cannot share memory that NumPy may only read.
        copy = np.array(x)
        return torch.from_numpy(copy.astype(copy.dtype.newbyteorder("="), copy=False))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        got = f"{type(x).__name__}: {getattr(x, 'dtype', None) or short(x)}"
        wanted = f"{name} must be an array of numbers that PyTorch has"
        raise Refused(f"{wanted}, got {got}") from error


def shares_of(weights: Tensor, layer: int, normalised: bool, star: bool) -> Tensor:
    """The shares of attention of a map. Raises ValueError if it is not what is said of it."""
    name = f"maps of layer {layer + 1}"
    T = weights.shape[2]
    wanted = f"{name} must be as many keys as queries"
    require(weights.shape[3] == T, f"{wanted}, got the shape {tuple(weights.shape)}")
    later = float(weights.triu(1).abs().amax())
    require(later <= 1e-6, f"{name} are not causal: a query gives {later:.2g} to a later key")
    wide = torch.promote_types(weights.dtype, torch.float32)
    if not normalised:
        sizes = weights.abs().to(wide)
        return divide(sizes, sizes.sum(dim=-1, keepdim=True))
    sums = weights.sum(dim=-1, dtype=wide)
    low, high = (float(x) for x in sums.aminmax())
    off = ROUNDED[weights.dtype.itemsize]
    require(bool(weights.amin() >= -off), f"{name} hold negative weights: say normalised=False")
    wrong = f"{name} have rows that sum to {high:.3g}, more than 1: star is wrong"
    require(not star or high <= 1 + off, wrong)
    require(
        star or (1 - off <= low and high <= 1 + off),
        f"{name} have rows that sum to {low:.3g} to {high:.3g}, not to 1: say star=True if a "
        "learned sink takes the rest, or normalised=False for weights without a fixed sum; of a "
        "padded text give the map without its padding",
    )
    return weights


def add_softmax(
    tally: Tally,
    layer: int,
    *,
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None = None,
    scale: float | None,
    window: int | None,
) -> None:
    """Add the causal softmax attention of queries and keys, a chunk of queries at a time."""
    B, H, T, D = q.shape
    fits = k.shape[0] == B and k.shape[2:] == (T, D) and H % k.shape[1] == 0
    wanted = "must have the shapes (B, H, T, D) and (B, G, T, D), with H a multiple of G"
    got = f"{tuple(q.shape)} and {tuple(k.shape)}"
    require(fits, f"q and k of layer {layer + 1} {wanted}; got {got}")
    one_each = f"sinks of layer {layer + 1} must have the shape ({H},), one logit per query head"
    require(sinks is None or sinks.shape == (H,), one_each)
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide)
    spec = AttentionSpec(window=window, sink_logit="none" if sinks is None else "learned")
    logit = None if sinks is None else sinks.to(wide)
    size = max(1, ELEMENTS // (B * H * T))
    parts = []
    for start in range(0, T, size):
        rows = q[:, :, start : start + size].to(wide)
        # The values do not matter here. The weights have a first column for the sink, if there is one.
        _, weights = attend(
            rows, keys, keys, spec, start=start, logit_scale=scale, sink_logit=logit
        )
        star = None if sinks is None else weights[..., 0]
        parts.append(tally.reduced(layer, weights[..., -T:])._replace(star=star))
    tally.add(layer, parts)
