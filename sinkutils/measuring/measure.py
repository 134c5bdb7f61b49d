"""`measure`: the sink numbers of any causal language model, for about the cost of its forward pass."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.checks import instance, integer, require
from sinkutils.measuring.report import Report, check_epsilons, check_targets
from sinkutils.measuring.tally import OwnModel, Tally
from sinkutils.model.decoder import TransformerLM

if TYPE_CHECKING:
    from sinkutils.measuring.hf import Capture

TOKENS_A_BATCH = 8192  # the default batch_size keeps a forward pass at about this many tokens
ONE_AT_A_TIME = threading.RLock()  # a model is put in another state while it is measured, and models share configs


@torch.no_grad()
def measure(
    model: nn.Module,
    ids: Tensor,
    targets: Sequence[int] = (1,),
    epsilons: Sequence[float] = (0.3,),
    *,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    norms: bool = True,
    heads: Sequence[tuple[int, int]] = (),
    exact: bool = False,
    check: bool = True,
    name: str = "",
    bos: bool | None = None,
) -> Report:
    """Measure the attention sinks of a causal LM on token ids (samples, T) (Section 3.2).

    model: a `TransformerLM`, or a causal LM of transformers; it is left as it was found, also after an exception.
    targets: the keys k of alpha_k, counted from 1. epsilons: the thresholds that the printed table shows.
    attention_mask: (samples, T), 0 at padding. Padding is cut off and sequences of one length run together, so that
        a padded sequence has the numbers that it has alone; positions count from its first token. Sequences shorter
        than the largest target are skipped and counted. Packed texts (masks of 1 and 2) are refused.
    batch_size: sequences per forward pass. norms: whether l2-norms are taken.
    heads: 0-based (layer, head) pairs whose maps A_ij, queries and keys are kept (`Kept`).
    exact: never use the fused kernel (transformers models only).
    check: before the ids, run a text of at most 16 of their tokens once or twice, to see that attention is causal and
        that what is read is what the model computes (transformers models only). Your own hooks see these passes, too;
        False leaves them out.
    name, bos: printed with the results; whether BOS stands first is read off the ids where the model names its BOS.
    Threads may call this at once: they are measured one after the other, and a forward pass of another thread
    computes what it always does. Ids that hold the model's padding token, without a mask, give a warning.

    Raises ValueError for inputs that have no meaning and for models that are no causal LM with softmax attention or
    that cannot be measured; NotFinite (a ValueError) where weights are nan.
    """
    require(
        isinstance(model, nn.Module),
        f"model must be a TransformerLM or a transformers model, got {type(model).__name__}",
    )
    rows, skipped = sequences(ids, attention_mask, targets)
    targets, epsilons = check_targets(targets, ids.shape[1]), check_epsilons(epsilons)
    if batch_size is not None:
        integer("batch_size", batch_size, least=1)
    require(
        isinstance(heads, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in heads),
        f"heads must be a sequence of (layer, head) pairs, got {heads!r}",
    )
    require(bos in (True, False, None), f"bos must be True, False or None (read it off the ids), got {bos!r}")
    model = unwrapped(model)
    check_weights(model)
    firsts = special_ids(model, "bos_token_id")
    if attention_mask is None:
        warn_of_padding(ids, model, firsts)
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    tally = Tally(targets, int(lengths.max()), norms, tuple(dict.fromkeys((layer, head) for layer, head in heads)))
    order = []
    with evaluating(model), ExitStack() as stack:
        if isinstance(model, TransformerLM):
            capture: OwnModel | Capture = OwnModel(model, tally)
        else:
            from sinkutils.measuring.hf import capturing  # transformers is imported for its own models only

            capture = stack.enter_context(capturing(model, tally, exact))
        check_range(rows, capture.vocabulary)
        if not isinstance(capture, OwnModel):
            capture.check(rows, check)
        for length in lengths.unique().tolist():
            same = (lengths == length).nonzero()[:, 0]
            for indices in same.split(batch_size or max(1, TOKENS_A_BATCH // length)):
                capture.run(torch.stack([rows[i] for i in indices]))
                tally.refuse_heads()
                order += indices.tolist()
    report = tally.report(capture, torch.tensor(order, device="cpu").argsort(), lengths, epsilons)
    report.name = name or getattr(model, "name_or_path", "") or type(model).__name__
    report.skipped = skipped
    report.bos = all(int(row[0]) in firsts for row in rows) if bos is None and firsts else bos
    return report


def sequences(ids: Tensor, mask: Tensor | None, targets: Sequence[int]) -> tuple[list[Tensor], int]:
    """The rows of ids without their padding, and how many were skipped as shorter than the largest target."""
    instance("ids", ids, Tensor)
    require(
        ids.ndim == 2 and ids.numel() > 0 and ids.dtype in (torch.int64, torch.int32),
        "ids must be int64 or int32 of the shape (samples, T), with at least one of each; "
        f"got {ids.dtype} of the shape {tuple(ids.shape)}",
    )
    longest = max(check_targets(targets, ids.shape[1]))
    if mask is None:
        return list(ids), 0
    instance("attention_mask", mask, Tensor)
    require(
        mask.shape == ids.shape,
        f"attention_mask must have the shape of ids, {tuple(ids.shape)}; got {tuple(mask.shape)}",
    )
    real = mask.bool().to(ids.device)
    require(
        bool((mask.to(ids.device) == real).all()),
        "attention_mask must be 1 at tokens and 0 at padding, and holds something else (packed texts, marked 1, 2, .., "
        "are not supported: give each text a row of its own)",
    )
    starts = (F.pad(real.int(), (1, 0)).diff(dim=1) == 1).sum(dim=1)
    require(
        bool((starts == 1).all()),
        "attention_mask has padding between the tokens of a row, or a row of padding: put it at either end",
    )
    rows = [row[seen] for row, seen in zip(ids, real, strict=True)]
    long = [row for row in rows if len(row) >= longest]
    require(len(long) > 0, f"no row of ids has the {longest} tokens that target {longest} needs, without its padding")
    return long, len(rows) - len(long)


def check_range(rows: Sequence[Tensor], vocabulary: int) -> None:
    """Raise ValueError for a token without an embedding: on a GPU its look-up would end the process's use of that."""
    low, high = torch.cat(list(rows)).aminmax()  # of all rows at once, as it waits for their device
    require(
        bool(0 <= low <= high < vocabulary),
        f"ids must be in 0..{vocabulary - 1}, which the model has embeddings for; got {low}..{high}",
    )


def warn_of_padding(ids: Tensor, model: nn.Module, firsts: set[int]) -> None:
    """Warn where ids hold the padding token or, if that is also BOS or EOS, a row begins or ends with two of them."""
    last = special_ids(model, "eos_token_id")
    used = firsts | last
    for token in special_ids(model, "pad_token_id") or last:  # tokenizers without padding pad with EOS
        same = ids == token
        if token in used:
            same = torch.stack([same[:, :2].all(dim=1), same[:, -2:].all(dim=1)]) & (ids.shape[1] > 2)
        if same.any():
            warnings.warn(
                f"ids hold the model's padding token ({token}), which is measured as text: give attention_mask",
                stacklevel=4,
            )


def check_weights(model: nn.Module) -> None:
    """Raise ValueError for weights that are nowhere (meta) or of a type that nothing is computed in (float8)."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(path, recurse=False):
            if weight.is_meta and not hasattr(module, "_hf_hook"):  # accelerate's, which fetches offloaded weights
                raise ValueError(f"model has weights on the meta device ({name}), without numbers: load it first")
            coarse = weight.is_floating_point() and weight.dtype.itemsize == 1
            if coarse and not getattr(model, "is_quantized", False):
                raise ValueError(
                    f"model has {weight.dtype} weights ({name}), too coarse to compute in: model.to(torch.bfloat16)"
                )


def special_ids(model: nn.Module, name: str) -> set[int]:
    """The ids of a special token by the model's configuration or its text part's; they name none, one or a list."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None  # type: ignore[union-attr, operator]
    found = (getattr(part, name, None) for part in (config, text))
    ids: Any = next((ids for ids in found if ids not in (None, -1)), [])
    return {*torch.tensor(ids, device="cpu").flatten().tolist()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and PEFT's adapters. Raises ValueError for learned prompts."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("model puts learned prompts before the ids, so that position 1 is none of them (PEFT)")
        model = model.get_base_model()  # type: ignore[operator]
    return getattr(model, "_orig_mod", model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards as it was; one thread at a time."""
    with ONE_AT_A_TIME:
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
