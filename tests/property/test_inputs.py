"""Any config, probe, operation or input: a right answer, or a ValueError that names what is wrong. Nothing else.

SINKUTILS_CASES says how many cases (benchmarks/reliability.py --cases 10000); the cases are the same on every run.
"""

import dataclasses
import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from helpers import SHAPE, DenseMaps, by_the_reference, draw, own_model, word_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import build, eager_alpha
from torch.testing import assert_close

from sinkutils import LMConfig, TransformerLM, checks, measure
from sinkutils.measuring.probes import PROBES, probe
from sinkutils.model import fast
from sinkutils.model.attention import attend
from sinkutils.model.config import SIMILARITY_NAMES, AttentionSpec
from sinkutils.study import corpus as corpora
from sinkutils.study import sources
from sinkutils.study.config import (
    PRECISIONS,
    DataConfig,
    RunConfig,
    TrainConfig,
    config_hash,
    from_dict,
    learning_rate,
)

CASES = int(os.environ.get("SINKUTILS_CASES", "400"))
COUNTS: dict[str, Counter] = {}
NUMBERS = (True, -1, 0, 3, 1.5, math.nan, math.inf, -math.inf, np.int64(2), np.float32(0.5))
NOTHING = st.sampled_from([None, *NUMBERS, "x", "", b"x", (), (0,), [1], {}])


def cases(share: float):
    """So many of the cases, always the same ones, however long they take."""
    options = {"deadline": None, "derandomize": True, "database": None}
    options["suppress_health_check"] = list(HealthCheck)
    return settings(max_examples=max(10, round(share * CASES)), **options)


@pytest.fixture(scope="module", autouse=True)
def counted():
    yield
    if path := os.environ.get("SINKUTILS_COUNTS"):
        Path(path).write_text(json.dumps(COUNTS))
    for what, count in COUNTS.items():  # of those that ran: a refusal of everything is no answer
        assert count["answered"] > count.total() / 8, (what, count)


def answered(what: str) -> None:
    COUNTS.setdefault(what, Counter())["answered"] += 1


def refused(what: str, error: ValueError, names) -> None:
    """Count a refusal, which has to name an argument."""
    assert any(re.search(rf"\b{n}\b", str(error)) for n in names), f"names no argument: {error}"
    COUNTS.setdefault(what, Counter())["refused"] += 1


@st.composite
def changes(draw, fields: dict, most: int):
    """Values for up to `most` of the fields, one in eight of them from `NOTHING`."""
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True))
    return {
        name: draw(NOTHING if draw(st.integers(0, 7)) == 7 else fields[name]) for name in chosen
    }


def mostly(good: st.SearchStrategy, *bad: st.SearchStrategy) -> st.SearchStrategy:
    """Four of five from the first strategy."""
    return st.integers(0, 4).flatmap(lambda n: good if n else st.one_of(*bad))


def names_of(*kinds: type) -> list[str]:
    return [field.name for kind in kinds for field in dataclasses.fields(kind)]


def choices_of(cls: type) -> dict:
    """The fields that are one of several words, which their annotation lists."""
    words = {name: kinds for name, kinds in checks.types(cls).items() if isinstance(kinds[0], str)}
    return {name: st.sampled_from(allowed) for name, allowed in words.items()}


SPEC = {
    "similarity": st.sampled_from(SIMILARITY_NAMES),
    **choices_of(AttentionSpec),
    "logit_bias": st.floats(-5, 5),
    "differential": st.booleans(),
    "p": st.sampled_from([0.25, 0.5, 2.0, 4.0]),
    "scale": st.floats(0.05, 4),
    "bias_shared": st.booleans(),
    "bias_dims": st.none() | st.integers(1, 9),
    "fixed_value_norm": st.floats(0, 20),
    "window": st.none() | st.integers(1, 14),
    "prefix": st.integers(1, 14),
}
MODEL = {
    "vocab_size": st.integers(1, 30),
    "context_length": st.integers(1, 12),
    "num_layers": st.integers(1, 2),
    "num_heads": st.integers(1, 4),
    "hidden_size": st.integers(1, 16),
    "intermediate_size": st.integers(1, 8),
    **choices_of(LMConfig),
    **{name: st.booleans() for name in ("sink_token", "qk_norm", "value_scale")},
}
SMALL = dict(zip(SHAPE, (30, 12, 2, 2, 8, 8), strict=True))
DATA = {
    "corpus": st.just("sources"),
    "share": st.floats(0.01, 1),
    "random_positions": st.lists(st.integers(1, 12), max_size=3).map(tuple),
    "fixed_position": st.none() | st.integers(0, 12),
}
TRAIN = {
    **dict.fromkeys(
        ("steps", "batch_size", "eval_every", "eval_sequences", "valid_chunks"), st.integers(0, 50)
    ),
    "eval_length": st.integers(1, 14),
    "learning_rate": st.floats(-1e-3, 1),
    "warmup_steps": st.integers(-1, 60),
    "lr_floor": st.floats(-0.1, 1.1),
    "weight_decay": st.floats(-0.1, 5),
    "beta1": st.floats(0, 1),
    "beta2": st.floats(0, 1),
    "adam_eps": st.floats(0, 1e-3),
    "clip_norm": st.floats(0, 10),
    "precision": st.sampled_from(PRECISIONS),
    "micro_batch": st.none() | st.integers(0, 50),
}
RUN = {"experiment": st.just("x"), "preset": st.just("y"), "seed": st.integers(-1, 2**65)}


@cases(0.4)
@given(
    changes(SPEC, 4),
    changes(MODEL, 3),
    changes(DATA, 2),
    changes(TRAIN, 3),
    changes(RUN, 1),
    st.integers(0, 9),
)
def test_a_config_is_a_model_equal_to_the_reference_or_is_refused(
    spec, model, data, train, run, seed
):
    try:
        config = RunConfig(**{
            "experiment": "x", "preset": "y", "model": LMConfig(**{**SMALL, **model}, attention=AttentionSpec(**spec)),
            "data": DataConfig(**data), "train": TrainConfig(**{"eval_length": 1, **train}), **run,
        })  # fmt: skip
    except ValueError as error:
        kinds = (AttentionSpec, LMConfig, DataConfig, TrainConfig, RunConfig)
        return refused("configs", error, names_of(*kinds))
    assert from_dict(RunConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert re.fullmatch("[0-9a-f]{64}", config_hash(config))
    rates = [learning_rate(config.train, step) for step in range(config.train.steps)]
    assert all(0 <= rate <= (1 + 1e-9) * config.train.learning_rate for rate in rates)
    net = TransformerLM(config.model, seed)
    length = 1 + seed % config.model.context_length
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.model.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        logits, reference = net(ids), by_the_reference(net, ids)
    assert logits.shape == (2, length, config.model.vocab_size) and logits.isfinite().all()
    assert_close(logits, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()) + 1e-6)
    report = measure(net, ids, targets=range(1, length + 1))
    alpha = DenseMaps(net, ids).alpha(report.targets).float()
    assert_close(report.alpha, alpha, rtol=1e-3, atol=1e-4)
    assert all(0 <= report.sink(k) <= 100 for k in report.targets)
    answered("configs")


TOKENIZERS = {
    "plain": word_tokenizer(20),
    "one word": word_tokenizer(1),
    "without BOS": word_tokenizer(20, ("<eos>",)),
    "of transformers": tf.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(20), bos_token="<bos>", eos_token="<eos>", pad_token="<fix>"
    ),
}
WORDS = st.lists(st.integers(0, 25), max_size=20).map(lambda ns: " ".join(f"w{n}" for n in ns))
TEXTS = st.lists(WORDS, min_size=2, max_size=8)
PROBE = {
    "n": mostly(st.integers(1, 4), st.integers(-1, 9)),
    "length": mostly(st.integers(1, 8), st.integers(-1, 12)),
    "seed": mostly(st.integers(0, 2**70), st.just(-1)),
    "bos": st.booleans(),
}


@cases(0.2)
@given(
    mostly(st.sampled_from(PROBES), NOTHING),
    st.sampled_from(sorted(TOKENIZERS)),
    changes(PROBE, 4),
    mostly(TEXTS, st.sampled_from(["w1 w2", [1, 2], [None], 3])),
)
def test_a_probe_has_the_tokens_asked_for_or_is_refused(kind, name, asked, texts):
    made, options = TOKENIZERS[name], {"n": 2, "length": 3, **asked}
    try:
        ids = probe(kind, made, texts=texts, **options)
    except ValueError as error:
        arguments = ("kind", "n", "length", "seed", "bos", "texts", "tokenizer")
        return refused("probes", error, arguments)
    bos = options.get("bos", False)
    # None: a hundred, or all that the texts hold
    count = len(ids) if options["n"] is None else options["n"]
    assert ids.shape == (count, options["length"]) and count > 0 and ids.dtype == torch.int64
    assert torch.equal(ids, probe(kind, made, texts=texts, **options))
    assert not bos or (ids[:, 0] == 1).all()
    text = ids[:, int(bos) :]
    words = TOKENIZERS["one word" if name == "one word" else "plain"].get_vocab_size() - 3
    first = 1 if name == "without BOS" else 3
    assert ((text >= first) & (text < first + words)).all()
    if kind == "repeat":
        assert (text == text[:, :1]).all()
    if kind == "natural":
        numbers = [[int(word[1:]) for word in text.split()] for text in texts]
        known = [[first + (n if n < words else 0) for n in row] for row in numbers]
        assert all(row in [ids[: len(row)] for ids in known] for row in text.tolist())
    answered("probes")


MODELS = {
    "softmax": own_model(**SMALL),
    "window": own_model(**SMALL, attention=AttentionSpec(window=3)),
    "k bias": own_model(**SMALL, attention=AttentionSpec(bias="k")),
    "sink token": own_model(**SMALL, sink_token=True),
    "sigmoid": own_model(**SMALL, attention=AttentionSpec(similarity="sigmoid", normalizer="none")),
    "mlp kernel": own_model(
        **SMALL, attention=AttentionSpec(similarity="linear", kernel="mlp", normalizer="none")
    ),
    "softpick": own_model(**SMALL, attention=AttentionSpec(similarity="softpick")),
    "sink logit": own_model(**SMALL, attention=AttentionSpec(sink_logit="learned")),
    "differential": own_model(
        **{**SMALL, "position": "nope"}, attention=AttentionSpec(differential=True)
    ),
    "gpt2": build("gpt2", vocab_size=30, n_positions=12),
    "llama": build("llama", vocab_size=30, max_position_embeddings=12),
}
STRANGE = st.sampled_from([(), (3,), (0, 4), (2, 0), (2, 13), (1, 2, 3)])
SHAPES = mostly(st.tuples(st.integers(1, 3), st.integers(1, 12)), STRANGE)
MASKS = (*["none", "ones", "left", "right"] * 4, "hole", "empty row", "wrong shape", "list")
ASKED = {
    "targets": mostly(
        st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.integers(-1, 14), max_size=2),
        st.sampled_from([torch.tensor([1, 2]), np.array([1.0, 2.0]), (math.nan,), (1.5,), "12", ("a",), [[1]], [[1], 2],
                         None])),
    "epsilons": mostly(
        st.lists(st.floats(0.01, 0.99), min_size=1, max_size=2), st.lists(st.floats(), max_size=2),
        st.sampled_from([np.array([0.1, 0.2]), torch.tensor([0.5]), "0.3", ("a",), (None,), None])),
    "batch_size": mostly(st.none() | st.integers(1, 4), NOTHING),
    "heads": mostly(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=2),
        st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2)), max_size=2),
        st.sampled_from([[(0,)], [0], 1, None])),
    "norms": st.booleans(),
    "exact": st.booleans(),
}  # fmt: skip


def mask_of(kind: str, ids: torch.Tensor):
    """A mask for ids (n, T), with padding of a third of each row where it says so."""
    if kind in ("none", "list") or ids.ndim != 2:
        return {"none": None, "list": [[1]]}.get(kind)
    mask, third = torch.ones(ids.shape, dtype=torch.int64), ids.shape[1] // 3
    if kind == "wrong shape":
        return torch.ones(len(ids), ids.shape[1] + 1)
    if kind == "empty row":
        mask[:1] = 0
    rows = {"left": slice(0, third), "hole": slice(third, 2 * third)}
    rows["right"] = slice(ids.shape[1] - third, None)
    if kind in rows:
        mask[:, rows[kind]] = 0
    return mask


@torch.no_grad()
def alpha_of(model: torch.nn.Module, row: torch.Tensor, targets) -> torch.Tensor:
    """alpha of one sequence without padding, (K, L, H), from whole attention maps."""
    if isinstance(model, TransformerLM):
        return DenseMaps(model, row[None]).alpha(targets)[0]
    return eager_alpha(model, row[None], targets)[0]


@cases(0.3)
@given(
    st.sampled_from(sorted(MODELS)),
    SHAPES,
    st.sampled_from([torch.int64] * 20 + [torch.int32, torch.float32, torch.bool]),
    st.sampled_from([30] * 20 + [31, 10**6]),
    st.sampled_from(MASKS),
    changes(ASKED, 3),
    st.integers(0, 99),
)
def test_measure_gives_numbers_of_whole_maps_or_refuses(
    name, shape, dtype, vocabulary, masked, asked, seed
):
    model = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(dtype)
    mask = mask_of(masked, ids)
    broken = seed == 99
    weight = next(iter(model.parameters())).data
    saved = weight.clone()
    if broken:
        weight.fill_(math.nan)
    try:
        report = measure(model, ids, attention_mask=mask, **asked)
    except ValueError as error:
        shaped = len(shape) == 2 and 0 < shape[0] and 0 < shape[1] <= 12
        plain = vocabulary == 30 and dtype == torch.int64 and shaped
        padded = masked in ("none", "ones", "left", "right")
        assert asked or broken or not plain or not padded, error
        arguments = ("ids", "attention_mask", "weights", "target", "eps", *ASKED)
        return refused("measure", error, arguments)
    finally:
        weight.copy_(saved)
    assert not broken and vocabulary >= 30
    kept = torch.ones_like(ids) if mask is None else mask
    rows = [row[seen.bool()].long() for row, seen in zip(ids, kept, strict=True)]
    rows = [row for row in rows if len(row) >= max(report.targets)]
    expected = torch.stack([alpha_of(model, row, report.targets).float() for row in rows])
    assert_close(report.alpha, expected, rtol=1e-3, atol=1e-4)
    assert all(0 <= report.sink(k, eps) <= 100 for k in report.targets for eps in report.epsilons)
    assert str(report) and json.dumps(report.to_dict(), allow_nan=False)
    answered("measure")


@cases(0.1)
@given(
    changes(SPEC, 4),
    st.integers(0, 4),
    st.integers(1, 12),
    st.sampled_from([0.1, 1, 30, 1000]),
    st.integers(0, 9),
)
def test_weights_are_finite_and_causal_however_large_the_scores(fields, wrong, length, size, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, length, 4, generator=generator) for _ in range(3))
    try:
        spec = AttentionSpec(**fields)
        extras = {}
        if spec.has_key_bias:
            extras["key_bias"] = torch.randn(2, 4 + (wrong == 1), generator=generator)
        if spec.bias in ("kv", "v") or spec.fixed_value != "zero":
            extras["value_bias"] = torch.randn(2, 4, generator=generator)
        if spec.kernel == "mlp":
            extras["mlp"] = torch.relu
        if spec.sink_logit == "learned":
            extras["sink_logit"] = torch.randn(2, generator=generator)
        if spec.differential:
            extras["mix"] = torch.rand((), generator=generator)
        out, weights = attend(size * q, k[:, :, : length - (wrong == 2)], v, spec, **extras)
        quick = fast.attention_output(size * q, k[:, :, : length - (wrong == 2)], v, spec, **extras)
    except ValueError as error:
        names = ("q", "k", "key_bias", "value_bias", "mlp", *names_of(AttentionSpec))
        return refused("attend", error, names)
    own_weights = weights[..., int(spec.has_star) :]
    seen = torch.ones(length, length).tril().bool() | (torch.arange(length) < spec.prefix)
    assert (own_weights.masked_fill(seen, 0) == 0).all()
    if spec.similarity == "exp" and spec.normalizer not in ("sum", "p_norm") and size > 1:
        # exp of such scores overflows where no row maximum cancels, as Section 7.4 reports
        return answered("attend")
    assert weights.isfinite().all() and out.isfinite().all()
    assert_close(quick, out, rtol=2e-3, atol=1e-3 * float(out.abs().max()) + 1e-6)
    if spec.is_softmax and not spec.differential:
        assert_close(weights.sum(-1), torch.full_like(weights.sum(-1), spec.scale))
    answered("attend")


@cases(0.1)
@given(
    changes({k: v for k, v in SPEC.items() if "bias" not in k and "value" not in k}, 4),
    st.integers(1, 40),
    st.sampled_from(["none", "kv"]),
    st.sampled_from(["none", "shared", "heads"]),
)
def test_the_fast_forms_equal_the_reference(fields, length, bias, position):
    try:
        spec = AttentionSpec(**{**fields, "bias": bias})
    except ValueError as error:
        return refused("forms", error, names_of(AttentionSpec))
    inputs, extras = draw(spec, length, position)
    quick = fast.attention_output(*inputs[:3], spec, **extras)
    dense = attend(*inputs[:3], spec, **extras)[0]
    gradients = (torch.autograd.grad(x.sum(), inputs) for x in (quick, dense))
    pairs = [(quick, dense), *zip(*gradients, strict=True)]
    for got, expected in pairs:
        assert_close(got, expected, rtol=1e-9, atol=1e-9)
    answered("forms")


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=200, unique=True))
def test_a_small_corpus_has_at_least_one_document_in_every_split(fractions):
    probe_below, valid_below = corpora._thresholds(sorted(fractions), complete=True)
    probes = [f for f in fractions if f < probe_below]
    valid = [f for f in fractions if probe_below <= f < valid_below]
    assert len(probes) == len(valid) == max(1, len(fractions) // 5)
    assert len(probes) + len(valid) < len(fractions)


@given(st.lists(st.sampled_from(["x" * 50, "y" * 900, "z" * 5000, "\n", "\n\n"]), max_size=40))
def test_a_text_without_paragraphs_is_cut_where_it_can_be(words):
    text = " ".join(words)
    pieces = sources.PIECE.findall(text)
    assert "".join(pieces) == text
    assert all(len(piece) <= sources.PIECE_CHARACTERS for piece in pieces)
    assert all(len(piece) >= sources.PIECE_CHARACTERS / 2 for piece in pieces[:-1])
