"""The three kinds of probes of Section 3.3, for both kinds of tokenizer."""

import pytest
import torch
import transformers as tf
from helpers import word_tokenizer
from tokenizers import Tokenizer

from sinkutils.data.probes import KINDS, probe
from sinkutils.data.tokenizer import bos_id, special_ids

RAW = word_tokenizer(40)
TEXTS = [" ".join(f"w{(i * 7 + j) % 40}" for j in range(10 + i)) for i in range(30)]


@pytest.mark.parametrize("kind", KINDS)
def test_probes_differ_between_seeds_and_between_rows(kind):
    """Their shape, BOS and tokens: tests/property/test_inputs.py."""
    ids = probe(kind, RAW, 8, 20, texts=TEXTS)
    assert not torch.equal(ids, probe(kind, RAW, 8, 20, seed=1, texts=TEXTS))
    least = {"natural": 8, "random": 8, "repeat": 5}[kind]  # no document twice, but now and then a token
    assert len(ids.unique(dim=0)) >= least


def test_random_probes_draw_from_the_whole_vocabulary_and_natural_ones_cut_long_documents_before_tokenising():
    assert probe("random", RAW, 100, 64).unique().tolist() == list(range(3, 43))
    long = " ".join(f"w{i % 40}" for i in range(5000))
    assert probe("natural", RAW, 1, 8, texts=[long]).tolist() == [list(range(3, 11))]


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
        (("words", RAW), "natural, random, repeat"),
        (("natural", None), r"a tokenizers\.Tokenizer or a transformers tokenizer, got None"),
        (("random", word_tokenizer(40, ("<eos>", "<fix>")), 5, 5, 0, True), "this one has none"),
        (("random", RAW, 5, 1, 0, True), "length must be at least 2"),
        (("random", RAW, 0), "n must be at least 1"),
        (("natural", RAW, 12, 29), r"has 11 documents of at least 29 tokens \(of 30\), n=12"),
    ],
)
def test_bad_requests_are_clear(arguments, message):
    *rest, bos = arguments if len(arguments) == 6 else (*arguments, False)
    with pytest.raises(ValueError, match=message):
        probe(*rest, bos=bos, texts=TEXTS)


@pytest.mark.parametrize("bos", ["<|endoftext|>", "<s>", "[BOS]", "<|bos|>"])
def test_the_bos_of_a_probe_is_the_one_that_training_puts_before_documents(bos):
    tokenizer = word_tokenizer(1, ("</s>", bos, "<pad>"))
    assert (probe("random", tokenizer, 2, 4, bos=True)[:, 0] == special_ids(tokenizer, None)["bos_id"]).all()
    assert bos_id(tokenizer) == 1
    assert bos_id(tf.PreTrainedTokenizerFast(tokenizer_object=RAW, bos_token="w5")) == 8
