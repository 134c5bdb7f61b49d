"""`measure`: the sink numbers of any causal language model. It costs about a forward pass."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.checks import Refused, integer, require, short
from sinkutils.measuring.batches import Batch, Ids, Inputs
from sinkutils.measuring.report import Report, check_bos, check_epsilons, check_targets
from sinkutils.measuring.tally import ONE_AT_A_TIME, LeftAsFound, Source, Tally

CHECK_TOKENS = 16  # the most tokens in the text of the check
# Entries of a batch from which an encoder-decoder model has what its decoder reads
DECODED = {"decoder_input_ids", "labels"}
TOKENS_A_BATCH = 8192  # the default batch_size gives about this many tokens per forward pass


def measure(
    model: nn.Module,
    ids: Ids,
    targets: Sequence[int] = (1,),
    epsilons: Sequence[float] = (0.3,),
    *,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
    norms: bool = True,
    entropy: bool = False,
    heads: Sequence[tuple[int, int]] = (),
    exact: bool = False,
    check: bool = True,
    name: str = "",
    bos: bool | None = None,
) -> Report:
    """Measure the attention sinks of a causal LM on token ids (Section 3.2).

    model: a `TransformerLM`, or a causal LM of transformers. If you have changed it, for instance
        by hooks or a forward of your own, the changed model is measured. Afterwards it is in the
        same state as before, also after an exception or an interrupt. If FSDP2 shards the model,
        every process has to call this function.
    ids: (samples, T), or what a tokenizer or a trainer's collator returns, with all its entries:
        those that the model's forward takes and that change its pass are handed to it.
        Of an encoder-decoder model it is a batch with decoder_input_ids or labels, beside what the
        encoder reads (input_ids, input_features, ..) or has returned (encoder_outputs). Measured is
        the decoder's self-attention.
    targets: the positions k for which alpha_k is computed, counted from 1.
    epsilons: the thresholds of Sink_k^eps in the printed table.
    attention_mask: (samples, T), 1 at tokens and 0 at padding. Padding is cut off, and sequences of
        equal length run together. So a padded sequence has the same numbers as without padding,
        and its positions count from its first token. Sequences shorter than the largest target are
        skipped and counted.
        Several texts may be packed in a row: masks of 1, 2, .., position_ids that restart,
        cu_seq_lens and seq_idx tell of them. Such a row runs as it is, and each of its texts is a
        sample. Whether the model keeps them apart is said in `Report.packed`.
    batch_size: sequences per forward pass; None: about 8192 tokens.
    norms: whether l2-norms and the largest elements are measured.
    entropy: whether the entropy of attention is measured, which costs the attention once more.
    heads: 0-based (layer, head) pairs whose maps A_ij, queries and keys are kept (`Kept`).
    exact: never use the fused kernel (transformers models only).
    check: first run a text of at most 16 of the ids' tokens, once or twice, to verify that
        attention is causal and that the attention we read is the one that the model computes
        (transformers models only). Your own hooks see these passes too.
    name: a title for the printed results.
    bos: whether a BOS stands first; None: read it off the ids, if the model names its BOS.

    Several threads may call this function: it measures one model after the other, and the forward
    passes of other threads are not affected.
    It warns of ids that hold the model's padding token without a mask, of two BOS in a row, and of
    texts so short that even uniform attention exceeds a threshold.

    Raises ValueError for invalid inputs, and for a model that is no causal LM with softmax
    attention or cannot be measured. Raises NotFinite (a ValueError) if the attention is nan.
    """
    by_name = ": su.load_lm loads one by its name" if isinstance(model, str | os.PathLike) else ""
    wanted = "model must be a TransformerLM or a transformers model"
    require(isinstance(model, nn.Module), f"{wanted}, got {type(model).__name__}{by_name}")
    # --- the arguments, checked before anything runs
    whole = model
    model, ids = decoded(model, ids)
    require(
        attention_mask is None or model is whole,
        "attention_mask does not say whether it is the encoder's or the decoder's: put them into "
        "the batch, as attention_mask and decoder_attention_mask",
    )
    inputs = Inputs(ids, attention_mask, targets)
    targets = check_targets(targets, inputs.ids.shape[1])
    epsilons = check_epsilons(epsilons)
    if batch_size is not None:
        batch_size = integer("batch_size", batch_size, least=1)
    pairs = distinct_pairs(heads)
    check_bos(bos)
    every_bos = token_ids(model, "bos_token_id")  # the ids of BOS, if the model names any
    # A decoder's texts may begin with a token of their own, and BOS then follows it.
    firsts = every_bos | token_ids(model, "decoder_start_token_id")
    if "attention_mask" not in inputs.entries:
        warn_of_padding(inputs.ids, model, firsts)
    warn_of_two_bos(inputs.texts, every_bos)
    # --- the forward passes
    tally = Tally(targets, int(inputs.lengths.max()), norms, pairs, entropy)
    passes = watched(model, inputs, tally, batch_size, exact=exact, check=check)
    with passes as (source, batches, _):
        for batch in batches:
            tally.begin(batch.texts, batch.places)
            source.run(batch.ids, batch.entries)
            tally.refuse_heads()
    report = tally.report(source, inputs.lengths, epsilons)
    report.name = name or getattr(model, "name_or_path", "") or type(model).__name__
    report.skipped = inputs.skipped
    report.digest = digest(inputs.texts)
    report.packed = source.packed
    if bos is None and firsts:
        bos = all(int(text[0]) in firsts for text in inputs.texts)
    report.bos = bos
    warn_of_texts(report)
    return report


@contextmanager
def watched(
    model: nn.Module,
    inputs: Inputs,
    tally: Tally,
    batch_size: int | None = None,
    tokens: int = TOKENS_A_BATCH,
    *,
    exact: bool = False,
    check: bool = True,
) -> Iterator[tuple[Any, list[Batch], LeftAsFound]]:
    """A context in which the model is in eval mode, without gradients, and its attention is read.

    When it ends, the model is in its original state. Yields the `Source` that observes the model,
    the passes, and the state to which changes are added.
    batch_size, tokens: texts, or else tokens, in a pass. The others: as in `measure`.
    """
    check_weights(model)
    state = LeftAsFound()
    # Entered twice: if an interrupt stops the inner context while it restores the model, the outer
    # one restores it.
    with ONE_AT_A_TIME, state, state:
        state.evaluate(model)
        source: Source
        # Imported here, so that our own models do not need transformers, nor others ours.
        if is_ours(model):
            from sinkutils.measuring.own import OwnModel

            source = OwnModel(model, tally)  # type: ignore[arg-type]
        else:
            from sinkutils.measuring.hf import observe
            from sinkutils.measuring.passes import Measuring

            source = observe(model, Measuring(tally, exact), state)
        known = check_range(inputs.texts, source.vocabulary)
        inputs.keep(source)
        source.check_positions(inputs.positions)
        batches = list(inputs.batches(min(tokens, source.tokens_a_batch), batch_size))
        if check and inputs.positions > 1:
            longest = batches[-1]
            source.check(short_text(known, inputs.positions), longest.ids, longest.entries)
        yield source, batches, state


def is_ours(model: Any) -> bool:
    """Whether a model is a `TransformerLM`, without importing the module that defines it."""
    decoder = sys.modules.get("sinkutils.model.decoder")
    return decoder is not None and isinstance(model, decoder.TransformerLM)


def decoded(model: Any, ids: Ids) -> tuple[Any, Ids]:
    """The decoder of an encoder-decoder model and the batch that it is handed; else both as given."""
    if not isinstance(ids, Mapping) or DECODED.isdisjoint(ids):
        return model, ids
    from sinkutils.measuring.refusals import decoder_of  # our own models do not need transformers

    return decoder_of(model, ids)


def check_weights(model: nn.Module) -> None:
    """Refuse weights without values (on the meta device) and plain float8 weights.

    PyTorch does not compute in float8. A quantised model of transformers converts such weights.
    """
    for path, module in model.named_modules():
        offloaded = hasattr(module, "_hf_hook")  # a hook of accelerate fetches these weights
        for name, x in module.named_buffers(path, recurse=False):
            meta = f"model has a buffer on the meta device ({name}), without numbers"
            left = "load_state_dict(assign=True) leaves those there that no file holds; compute it"
            require(offloaded or not x.is_meta, f"{meta}: {left}")
        for name, weight in module.named_parameters(path, recurse=False):
            meta = f"model has weights on the meta device ({name}), without numbers: load it first"
            require(offloaded or not weight.is_meta, meta)
            coarse = weight.is_floating_point() and weight.dtype.itemsize == 1
            require(
                not coarse or getattr(model, "is_quantized", False),
                f"model has {weight.dtype} weights ({name}), too coarse to compute in: "
                "model.to(torch.bfloat16)",
            )


def check_range(rows: Sequence[Tensor], vocabulary: int) -> Tensor:
    """Refuse token ids outside the vocabulary. Returns all ids, one after the other.

    Their look-up on a GPU fails in such a way that the process cannot use the GPU any more.
    """
    # All rows at once, because each comparison waits for the device.
    tokens = torch.cat(list(rows))
    low, high = (int(x) for x in tokens.aminmax())
    known = f"0..{vocabulary - 1}, which the model has embeddings for"
    require(low >= 0 and high < vocabulary, f"ids must be in {known}; got {low}..{high}")
    return tokens


def short_text(tokens: Tensor, length: int) -> Tensor:
    """A text for the check, (1, T), of at most 16 of the tokens.

    It has no token twice: equal tokens would get even weights, and hide any error.
    """
    text: Tensor = tokens.unique()[: min(length, CHECK_TOKENS)]
    if len(text) == 1:
        text = torch.cat([text, (text - 1).abs()])
    return text[None]


def distinct_pairs(heads: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Check (layer, head) pairs of integers, and return them without duplicates."""
    wanted = "heads must be a sequence of (layer, head) pairs"
    try:
        pairs = [(layer, head) for layer, head in heads]
    except (TypeError, ValueError) as error:
        raise Refused(f"{wanted}, got {short(heads)}") from error
    checked = [(integer("layer", layer, 0), integer("head", head, 0)) for layer, head in pairs]
    return tuple(dict.fromkeys(checked))


def digest(rows: Sequence[Tensor]) -> str:
    """The first 16 hex digits of the ids' SHA-256. They tell whether two reports use equal ids."""
    total = hashlib.sha256()
    for row in rows:
        total.update(row.to("cpu", torch.int64).numpy().tobytes())
        total.update(b"|")  # so that two short rows differ from one long row
    return total.hexdigest()[:16]


def warn_of_padding(ids: Tensor, model: nn.Module, firsts: set[int]) -> None:
    """Warn if ids hold the padding token.

    Where the padding token is also BOS or EOS, a single one is normal text. Then the warning is
    given only for rows that begin or end with two of them, or that end with one that is no EOS.
    firsts: the ids of BOS.
    """
    lasts = token_ids(model, "eos_token_id")
    # A model without a padding token is usually padded with EOS.
    for token in token_ids(model, "pad_token_id") or lasts:
        padding = ids == token
        if token in firsts | lasts:
            begins = padding[:, :2].all(dim=1)
            ends = padding[:, -2 if token in lasts else -1 :].all(dim=1)
            padding = (begins | ends) & (ids.shape[1] > 2)
        if padding.any():
            warnings.warn(
                f"ids hold the model's padding token ({token}), which is measured as text: "
                "give attention_mask, or for an encoder-decoder decoder_attention_mask",
                stacklevel=3,
            )


def warn_of_two_bos(rows: Sequence[Tensor], firsts: set[int]) -> None:
    """Warn if every text begins with two BOS.

    This happens if a chat template, which writes a BOS itself, is tokenised as plain text.
    """
    if all(len(row) > 1 and firsts.issuperset(row[:2].tolist()) for row in rows):
        warnings.warn(
            "each text begins with two BOS, as where a chat template that has one is tokenised as "
            "text: use apply_chat_template(tokenize=True), or add_special_tokens=False",
            stacklevel=3,
        )


def warn_of_texts(report: Report) -> None:
    """Warn if the texts are so short that even uniform attention exceeds a threshold.

    Then Sink_1 would be 100 % for uniform attention, which is no sink.
    Warn also if texts that are packed in a row attend to those in front of them.
    """
    eps = min(report.epsilons)
    if 1 in report.targets and report.floor > eps:
        warnings.warn(
            f"texts of {report.length} tokens are too short for eps = {eps:g}: even attention to "
            f"all keys has alpha_1 = {report.floor:.2f}. Look at the excess, or give longer texts",
            stacklevel=3,
        )
    if report.packed.startswith("see"):
        warnings.warn(
            f"the texts packed in a row {report.packed}, in the model's own pass: their first tokens "
            "compete with those, and the numbers are not those of the texts alone",
            stacklevel=3,
        )


def token_ids(model: nn.Module, name: str) -> set[int]:
    """The ids of a special token, from the configuration of the model or of its text part.

    name: an attribute such as bos_token_id, which may hold one id, a list of ids or none.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for part in (config, text):
        ids = getattr(part, name, None)
        if ids is not None and ids != -1:
            return {*ids} if isinstance(ids, list | tuple) else {int(ids)}
    return set()
