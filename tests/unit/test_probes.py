"""The three kinds of probes of Section 3.3, for both kinds of tokenizer."""

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sinkutils.data.probes import KINDS, probe
from sinkutils.data.tokenizer import bos_id, special_ids

WORDS = {"<eos>": 0, "<bos>": 1, "<fix>": 2} | {f"w{i}": 3 + i for i in range(40)}
TEXTS = [" ".join(f"w{(i * 7 + j) % 40}" for j in range(10 + i)) for i in range(30)]


def raw(bos: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"none" if w == "<bos>" and not bos else w: i for w, i in WORDS.items()}, "w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<eos>", "<bos>", "<fix>"] if bos else ["<eos>", "<fix>"])
    return tokenizer


def wrapped(bos: str = "<bos>") -> tf.PreTrainedTokenizerFast:
    names = {"eos_token": "<eos>", "pad_token": "<fix>", "bos_token": bos}
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw(), **names)


@pytest.mark.parametrize("make", [raw, wrapped])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_probes_have_the_shape_asked_for_and_bos_only_when_asked(make, kind, bos):
    ids = probe(kind, make(), 5, 12, bos=bos, texts=TEXTS)
    assert ids.shape == (5, 12) and ids.dtype == torch.int64
    assert ((ids[:, 0] == 1) == bos).all() and (ids[:, int(bos) :] >= 3).all()  # no other special token
    assert torch.equal(ids, probe(kind, make(), 5, 12, bos=bos, texts=TEXTS))
    assert not torch.equal(ids, probe(kind, make(), 5, 12, seed=1, bos=bos, texts=TEXTS))


def test_random_probes_draw_from_the_whole_vocabulary_and_repeated_ones_one_token_a_sequence():
    assert probe("random", wrapped(), 100, 64).unique().tolist() == list(range(3, 43))
    ids = probe("repeat", raw(), 50, 9)
    assert (ids == ids[:, :1]).all() and len(ids[:, 0].unique()) > 10


def test_natural_probes_are_the_first_tokens_of_documents():
    rows = probe("natural", raw(), 8, 20, texts=TEXTS).tolist()
    starts = [raw().encode(text).ids[:20] for text in TEXTS if len(text.split()) >= 20]
    assert all(row in starts for row in rows) and len({tuple(row) for row in rows}) == 8  # no document twice
    long = " ".join(f"w{i % 40}" for i in range(5000))  # cut before it is tokenised
    assert probe("natural", raw(), 1, 8, texts=[long]).tolist() == [list(range(3, 11))]


def test_natural_probes_of_a_corpus_come_from_its_probe_split(corpus):
    ids = probe("natural", corpus.tokenizer, 3, 16, corpus=corpus)
    starts = [document[:16].tolist() for document in corpus.documents("probe")]
    assert all(row in starts for row in ids.tolist())
    again = Tokenizer.from_str(corpus.tokenizer.to_str())
    again.encode_special_tokens = True
    assert torch.equal(probe("natural", again, 3, 16, corpus=corpus), ids)  # tokenised again, the same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("words", raw()), "natural, random, repeat"),
        (("natural", None), r"a tokenizers\.Tokenizer or a transformers tokenizer, got None"),
        (("random", raw(bos=False), 5, 5, 0, True), "this one has none"),
        (("random", raw(), 5, 1, 0, True), "length must be at least 2"),
        (("random", raw(), 0), "n must be at least 1"),
        (("natural", raw(), 12, 29), r"has 11 documents of at least 29 tokens \(of 30\), n=12"),
    ],
)
def test_bad_requests_are_clear(arguments, message):
    *rest, bos = arguments if len(arguments) == 6 else (*arguments, False)
    with pytest.raises(ValueError, match=message):
        probe(*rest, bos=bos, texts=TEXTS)


@pytest.mark.parametrize("bos", ["<|endoftext|>", "<s>", "[BOS]", "<|bos|>"])
def test_the_bos_of_a_probe_is_the_one_that_training_puts_before_documents(bos):
    tokenizer = Tokenizer(WordLevel({"</s>": 0, bos: 1, "<pad>": 2, "w0": 3}, unk_token="w0"))
    tokenizer.add_special_tokens(["</s>", bos, "<pad>"])
    assert (probe("random", tokenizer, 2, 4, bos=True)[:, 0] == special_ids(tokenizer, None)["bos_id"]).all()
    assert bos_id(tokenizer) == 1 and bos_id(wrapped("w5")) == 8
