"""Packing: chunks are consecutive pieces of the joined documents, and each intervention changes what it says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkutils.data.packing import Chunks, DataConfig, fix_position

C = 32


def test_chunks_are_the_joined_documents_cut_at_every_context_length(corpus):
    chunks = Chunks(corpus, "train", C, DataConfig())
    ids = chunks.take(np.arange(len(chunks)))
    tokens = torch.from_numpy(corpus.tokens("train").astype(np.int64))
    assert ids.dtype == torch.int64 and ids.shape == (len(chunks), C + 1)
    assert torch.equal(ids[:, :-1].flatten(), tokens[: len(chunks) * C])  # inputs
    assert torch.equal(ids[:, 1:].flatten(), tokens[1 : len(chunks) * C + 1])  # targets: all but the first, once


def test_documents_in_a_chunk_are_divided_by_eos_and_headed_by_bos_on_request(corpus):
    plain, with_bos = corpus.tokens("train"), corpus.tokens("train", bos=True)
    documents = (plain == corpus.eos_id).sum()
    assert (plain == corpus.bos_id).sum() == 0 and (with_bos == corpus.bos_id).sum() == documents
    chunks = Chunks(corpus, "train", C, DataConfig(bos=True))
    ids = chunks.take(np.arange(len(chunks)))
    assert ids[0, 0] == corpus.bos_id
    before, after = ids[:, :-1].flatten(), ids[:, 1:].flatten()
    assert torch.equal(before == corpus.eos_id, after == corpus.bos_id)


def test_a_share_keeps_the_first_part_of_the_training_tokens_and_all_of_validation(corpus):
    whole, part = (Chunks(corpus, "train", C, DataConfig(share=share)) for share in (1.0, 0.25))
    assert len(part.tokens) == int(0.25 * len(whole.tokens))
    assert torch.equal(part.take(np.arange(len(part))), whole.take(np.arange(len(part))))
    assert len(Chunks(corpus, "valid", C, DataConfig(share=0.01)).tokens) == len(corpus.tokens("valid"))


def test_a_fixed_token_stands_at_its_position_and_nowhere_else(corpus):
    ids = Chunks(corpus, "train", C, DataConfig(fixed_position=2)).take(np.arange(20))
    plain = Chunks(corpus, "train", C, DataConfig()).take(np.arange(20))
    assert (ids[:, 1] == corpus.fix_id).all() and (ids == corpus.fix_id).sum() == 20
    ids[:, 1] = plain[:, 1]
    assert torch.equal(ids, plain)


def test_random_positions_are_redrawn_once_for_each_chunk_from_all_text_tokens(corpus):
    data = DataConfig(random_positions=(1, 3))
    chunks = Chunks(corpus, "train", C, data)
    every = np.arange(len(chunks))
    ids = chunks.take(every)
    plain = Chunks(corpus, "train", C, DataConfig()).take(every)
    assert torch.equal(chunks.take(every), ids)  # the same when seen again
    assert torch.equal(Chunks(corpus, "train", C, data).take(every[::-1]).flip(0), ids)  # and whenever
    assert not torch.equal(Chunks(corpus, "train", C, data, seed=1).take(every), ids)
    kept = [i for i in range(C + 1) if i not in (0, 2)]
    assert torch.equal(ids[:, kept], plain[:, kept])
    redrawn = ids[:, [0, 2]]
    assert redrawn.min() >= corpus.first_text_id and redrawn.max() < corpus.vocab_size
    expected = (corpus.first_text_id + corpus.vocab_size - 1) / 2
    spread = (corpus.vocab_size - corpus.first_text_id) / 12**0.5 / redrawn.numel() ** 0.5
    assert abs(redrawn.double().mean() - expected) < 4 * spread


def test_every_epoch_shows_each_chunk_once_in_an_order_of_its_own(corpus):
    chunks = Chunks(corpus, "train", C, DataConfig())
    size = 7
    steps = 2 * len(chunks) // size
    shown = torch.cat([chunks.batch(step, size, seed=0) for step in range(steps + 1)])
    first, second = shown[: len(chunks)], shown[len(chunks) : 2 * len(chunks)]
    everything = sorted(map(tuple, chunks.take(np.arange(len(chunks))).tolist()))
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist())) == everything
    assert not torch.equal(first, second)


@given(step=st.integers(0, 2000), size=st.integers(1, 64), seed=st.integers(0, 3))
def test_a_batch_depends_on_seed_and_step_only_not_on_what_was_asked_before(corpus, step, size, seed):
    fresh = Chunks(corpus, "valid", C, DataConfig(random_positions=(1,)))
    used = Chunks(corpus, "valid", C, DataConfig(random_positions=(1,)))
    used.batch(step + 1, size, seed), used.batch(0, size, seed + 1)
    assert torch.equal(fresh.batch(step, size, seed), used.batch(step, size, seed))


def test_seeds_give_different_orders(corpus):
    chunks = Chunks(corpus, "train", C, DataConfig())
    assert not torch.equal(chunks.batch(0, 16, seed=0), chunks.batch(0, 16, seed=1))


def test_fixing_a_position_leaves_its_input_alone_and_needs_the_position_to_exist():
    ids = torch.arange(6).reshape(2, 3)
    assert fix_position(ids, 3, 9).tolist() == [[0, 1, 9], [3, 4, 9]]
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(fix_position(ids, None, 9), ids) and torch.equal(fix_position(ids, 4, 9), ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0.0}, "share must be in"),
        ({"share": 1.5}, "share must be in"),
        ({"random_positions": (0,)}, "random_positions count from 1"),
        ({"fixed_position": 0}, "fixed_position counts from 1"),
    ],
)
def test_impossible_interventions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**arguments)


def test_positions_beyond_the_context_and_too_little_text_are_refused(corpus):
    with pytest.raises(ValueError, match="position 33 is beyond context_length=32"):
        Chunks(corpus, "train", C, DataConfig(random_positions=(33,)))
    with pytest.raises(ValueError, match="less than one chunk"):
        Chunks(corpus, "valid", 10**6, DataConfig())
    with pytest.raises(ValueError, match="split must be one of train, valid, probe"):
        Chunks(corpus, "test", C, DataConfig())
