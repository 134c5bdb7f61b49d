"""`measure`: the sink numbers of any causal language model, for about a forward pass of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkutils.checks import instance, integer, require, short
from sinkutils.measuring.report import Report, check_epsilons, check_targets
from sinkutils.measuring.state import ONE_AT_A_TIME, LeftAsFound
from sinkutils.measuring.tally import OwnModel, Tally
from sinkutils.model.decoder import TransformerLM

if TYPE_CHECKING:
    from sinkutils.measuring.hf import Capture

TOKENS_A_BATCH = 8192  # the default batch_size keeps a forward pass at about this many tokens


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

    model: a `TransformerLM`, or a causal LM of transformers. What is done to it, such as a forward
        or a hook of your own, is measured with it. It is left as it was found, also after an
        exception or an interrupt. Of one that FSDP2 shards, every process has to call this.
    ids: a tensor, or what a tokenizer returns (`return_tensors="pt"`), with its mask.
    targets: the keys k of alpha_k, counted from 1. epsilons: the thresholds that the printed table
        shows.
    attention_mask: (samples, T), 0 at padding. Padding is cut off and sequences of one length run
        together, so that a padded sequence has the numbers that it has alone; positions count from
        its first token. Sequences shorter than the largest target are skipped and counted. Packed
        texts (masks of 1 and 2) are refused.
    batch_size: sequences per forward pass. norms: whether l2-norms are taken.
    heads: 0-based (layer, head) pairs whose maps A_ij, queries and keys are kept (`Kept`).
    exact: never use the fused kernel (transformers models only).
    check: before the ids, run a text of at most 16 of their tokens once or twice, to see that
        attention is causal and that what is read is what the model computes (transformers models
        only). Your own hooks see these passes, too; False leaves them out.
    name, bos: printed with the results; whether BOS stands first is read off the ids where the
        model names its BOS.
    Threads may call this at once: they are measured one after the other, and a forward pass of
    another thread computes what it always does. A warning is given for ids that hold the model's
    padding token without a mask, for two BOS in a row, and for texts so short that even attention
    is over a threshold.

    Raises ValueError for inputs that have no meaning and for models that are no causal LM with
    softmax attention or that cannot be measured; NotFinite (a ValueError) where attention is nan.
    """
    require(
        isinstance(model, nn.Module),
        f"model must be a TransformerLM or a transformers model, got {type(model).__name__}",
    )
    # --- what is asked for, checked before anything runs
    if isinstance(ids, Mapping):  # a tokenizer's BatchEncoding
        if attention_mask is None:
            attention_mask = ids.get("attention_mask")
        names = ", ".join(map(str, ids))
        require("input_ids" in ids, f"ids has no input_ids, but {names}")
        ids = ids["input_ids"]
    rows, skipped = sequences(ids, attention_mask, targets)
    targets = check_targets(targets, ids.shape[1])
    epsilons = check_epsilons(epsilons)
    if batch_size is not None:
        batch_size = integer("batch_size", batch_size, least=1)
    pairs = distinct_pairs(heads)
    require(
        bos in (True, False, None),
        f"bos must be True, False or None (read it off the ids), got {bos!r}",
    )
    check_weights(model)
    firsts = token_ids(model, "bos_token_id")
    if attention_mask is None:
        warn_of_padding(ids, model, firsts)
    warn_of_two_bos(rows, firsts)
    # --- forward passes: of sequences of one length at a time, so that none needs padding
    # The device is named as torch.set_default_device may say another.
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    tally = Tally(targets, int(lengths.max()), norms, pairs)
    order: list[int] = []  # of the rows as they run: those of one length together
    state = LeftAsFound()
    # Entered twice: an interrupt while the inner one puts the model back leaves it to the outer.
    with ONE_AT_A_TIME, state, state:
        state.evaluate(model)
        source: OwnModel | Capture
        if isinstance(model, TransformerLM):
            source = OwnModel(model, tally)
        else:  # transformers is imported for its own models only
            from sinkutils.measuring.hf import observe
            from sinkutils.measuring.passes import Measuring

            source = observe(model, Measuring(tally, exact), state)
        check_range(rows, source.vocabulary)
        source.check(rows, check)
        tokens = min(TOKENS_A_BATCH, source.tokens_a_batch)
        for length in lengths.unique().tolist():
            same = (lengths == length).nonzero()[:, 0]
            samples = batch_size or max(1, tokens // length)
            for indices in same.split(samples):
                batch = torch.stack([rows[i] for i in indices])  # (B, T)
                source.run(batch)
                tally.refuse_heads()
                order += indices.tolist()
    # --- the report: `places` puts the samples back into the order of ids
    places = torch.tensor(order, device="cpu").argsort()
    report = tally.report(source, places, lengths, epsilons)
    report.name = name or getattr(model, "name_or_path", "") or type(model).__name__
    report.skipped = skipped
    report.digest = digest(rows)
    if bos is None and firsts:
        bos = all(int(row[0]) in firsts for row in rows)
    report.bos = bos
    warn_of_short_texts(report)
    return report


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are nowhere (meta) or of a type that nothing is computed in (float8)."""
    for path, module in model.named_modules():
        offloaded = hasattr(module, "_hf_hook")  # accelerate's, which fetches the weights
        for name, weight in module.named_parameters(path, recurse=False):
            if weight.is_meta and not offloaded:
                raise ValueError(
                    f"model has weights on the meta device ({name}), without numbers: load it first"
                )
            coarse = weight.is_floating_point() and weight.dtype.itemsize == 1
            if coarse and not getattr(model, "is_quantized", False):
                raise ValueError(
                    f"model has {weight.dtype} weights ({name}), too coarse to compute in: "
                    "model.to(torch.bfloat16)"
                )


def check_range(rows: Sequence[Tensor], vocabulary: int) -> None:
    """Refuse a token without an embedding: its look-up would end a process's use of a GPU."""
    low, high = torch.cat(list(rows)).aminmax()  # of all rows at once, as it waits for their device
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"ids must be in 0..{vocabulary - 1}, which the model has embeddings for; "
            f"got {low}..{high}"
        )


def distinct_pairs(heads: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(layer, head) pairs of integers, each once."""
    try:
        pairs = [(layer, head) for layer, head in heads]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"heads must be a sequence of (layer, head) pairs, got {short(heads)}"
        ) from error
    checked = [(integer("layer", layer, 0), integer("head", head, 0)) for layer, head in pairs]
    return tuple(dict.fromkeys(checked))


def digest(rows: Sequence[Tensor]) -> str:
    """SHA-256 of token ids, the first 16 digits: whether two reports are of the same texts."""
    total = hashlib.sha256()
    for row in rows:
        ids = row.to("cpu", torch.int64).numpy()
        total.update(ids.tobytes())
        total.update(b"|")  # so that two short rows are not one long one
    return total.hexdigest()[:16]


def dense(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a tensor that holds a number in each place."""
    instance(name, value, Tensor)
    require(
        value.layout == torch.strided and not (value.is_nested or value.is_meta),
        f"{name} must be a dense tensor, not a sparse or nested one, nor one on the meta device",
    )


def sequences(ids: Tensor, mask: Tensor | None, targets: Sequence[int]) -> tuple[list[Tensor], int]:
    """The rows of ids without padding, and how many were skipped: too short for a target."""
    dense("ids", ids)
    require(
        ids.ndim == 2 and ids.numel() > 0 and ids.dtype in (torch.int64, torch.int32),
        "ids must be int64 or int32 of the shape (samples, T), with at least one of each; "
        f"got {ids.dtype} of the shape {tuple(ids.shape)}",
    )
    longest = max(check_targets(targets, ids.shape[1]))
    if mask is None:
        return list(ids), 0
    dense("attention_mask", mask)
    require(
        mask.shape == ids.shape,
        f"attention_mask must have the shape of ids, {tuple(ids.shape)}; got {tuple(mask.shape)}",
    )
    mask = mask.to(ids.device)
    real = mask.bool()
    require(
        bool((mask == real).all()),
        "attention_mask must be 1 at tokens and 0 at padding, and holds something else (packed "
        "texts, marked 1, 2, .., are not supported: give each text a row of its own)",
    )
    steps = F.pad(real.int(), (1, 0)).diff(dim=1)  # 1 where a run of tokens starts
    starts = (steps == 1).sum(dim=1)
    require(
        bool((starts == 1).all()),
        "attention_mask has padding between the tokens of a row, or a row of padding: "
        "put it at either end",
    )
    long = []
    for row, is_token in zip(ids, real, strict=True):
        tokens = row[is_token]
        if len(tokens) >= longest:
            long.append(tokens)
    require(
        len(long) > 0,
        f"no row of ids has the {longest} tokens that target {longest} needs, without its padding",
    )
    return long, len(ids) - len(long)


def warn_of_padding(ids: Tensor, model: nn.Module, firsts: set[int]) -> None:
    """Warn where ids hold the padding token.

    If that is also BOS or EOS, one of them is text: then a row has to begin or end with two.
    """
    lasts = token_ids(model, "eos_token_id")
    # Tokenizers without padding pad with EOS
    for token in token_ids(model, "pad_token_id") or lasts:
        padding = ids == token
        if token in firsts | lasts:
            begins = padding[:, :2].all(dim=1)
            ends = padding[:, -2:].all(dim=1)
            padding = (begins | ends) & (ids.shape[1] > 2)
        if padding.any():
            warnings.warn(
                f"ids hold the model's padding token ({token}), which is measured as text: "
                "give attention_mask",
                stacklevel=3,
            )


def warn_of_two_bos(rows: Sequence[Tensor], firsts: set[int]) -> None:
    """Warn where each text begins with two BOS, as of a chat template tokenised as text."""
    for row in rows:
        start = row[:2].tolist()
        if len(start) < 2 or not firsts.issuperset(start):
            return
    warnings.warn(
        "each text begins with two BOS, as where a chat template that has one is tokenised as "
        "text: use apply_chat_template(tokenize=True), or add_special_tokens=False",
        stacklevel=3,
    )


def warn_of_short_texts(report: Report) -> None:
    """Warn where even attention is over a threshold, so that Sink_1 is 100 % of it."""
    eps = min(report.epsilons)
    if 1 in report.targets and report.floor > eps:
        warnings.warn(
            f"texts of {report.length} tokens are too short for eps = {eps:g}: even attention to "
            f"all keys has alpha_1 = {report.floor:.2f}. Look at the excess, or give longer texts",
            stacklevel=3,
        )


def token_ids(model: nn.Module, name: str) -> set[int]:
    """The ids of a special token by the model's configuration, or by that of its text part.

    They name none, one or a list. name: bos_token_id, for instance.
    """
    config: Any = getattr(model, "config", None)
    parts = [config]
    if hasattr(config, "get_text_config"):
        parts.append(config.get_text_config())
    for part in parts:
        ids = getattr(part, name, None)
        if ids is not None and ids != -1:
            one_or_more = torch.tensor(ids, device="cpu").flatten()
            return set(one_or_more.tolist())
    return set()
