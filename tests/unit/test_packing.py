"""Packing: chunks are consecutive pieces of the joined documents, and each intervention changes what it says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CPU, refuses

from sinkutils.study.config import DataConfig
from sinkutils.study.task import Chunks, fix_position

C = 32


def all_of(corpus, split="train", seed=0, **data):
    """All chunks of a split in their order, (n, C + 1)."""
    chunks = Chunks(corpus, split, C, DataConfig(**data), seed)
    return chunks.take(np.arange(len(chunks)))


def test_chunks_are_the_joined_documents_cut_at_every_context_length(corpus):
    ids, tokens = all_of(corpus), torch.from_numpy(corpus.tokens("train").astype(np.int64))
    assert ids.dtype == torch.int64 and ids.shape[1] == C + 1
    assert torch.equal(ids[:, :-1].flatten(), tokens[: len(ids) * C])  # inputs
    # targets: all but the first, once
    assert torch.equal(ids[:, 1:].flatten(), tokens[1 : len(ids) * C + 1])


def chunks_of(count, context_length=C, device=CPU, **data):
    """Chunks of the numbers 0, 1, .., with seed 3."""
    text = SimpleNamespace(name="made up", fix_id=2, first_text_id=3, vocab_size=300)
    text.tokens = lambda split: np.arange(count, dtype=np.uint16)
    return Chunks(text, "train", context_length, DataConfig(**data), 3, device)


def test_a_chunk_takes_one_token_more_than_its_inputs():
    assert [len(chunks_of(n)) for n in (C + 1, 2 * C, 2 * C + 1)] == [1, 1, 2]
    assert len(chunks_of(9, context_length=1)) == 8
    refuses("less than one chunk", chunks_of, C)


def test_what_a_seed_draws_stays_as_records_name_the_seed_alone():
    chunks = chunks_of(5 * C + 1, random_positions=(1,))
    assert chunks.redrawn[:, 0].tolist() == [10, 43, 19, 265, 246]
    assert chunks.places.tolist() == [13, 14, 31, 26, 5]
    assert (chunks.batch(0, 5, seed=3)[:, 1] // C).tolist() == [1, 4, 0, 2, 3]


def test_elsewhere_all_tokens_go_to_the_device_as_signed_integers():
    tokens = chunks_of(5 * C + 1, device=torch.device("meta")).tokens
    assert (tokens.device.type, tokens.dtype, len(tokens)) == ("meta", torch.int32, 5 * C + 1)


def test_a_share_keeps_the_first_part_of_the_training_tokens_and_all_of_validation(corpus):
    whole, part = all_of(corpus), all_of(corpus, share=0.25)
    assert len(part) == (int(0.25 * len(corpus.tokens("train"))) - 1) // C
    assert torch.equal(part, whole[: len(part)])
    assert torch.equal(all_of(corpus, "valid", share=0.01), all_of(corpus, "valid"))


def test_a_fixed_token_stands_at_its_position_and_nowhere_else(corpus):
    ids, plain = all_of(corpus, fixed_position=2), all_of(corpus)
    assert (ids[:, 1] == corpus.fix_id).all() and (ids == corpus.fix_id).sum() == len(ids)
    ids[:, 1] = plain[:, 1]
    assert torch.equal(ids, plain)
    ids = torch.arange(6).reshape(2, 3)
    assert fix_position(ids, 3, 9).tolist() == [[0, 1, 9], [3, 4, 9]]
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(fix_position(ids, None, 9), ids)
    assert torch.equal(fix_position(ids, 4, 9), ids)


def test_random_positions_are_redrawn_once_for_each_chunk_from_all_text_tokens(corpus):
    data = {"random_positions": (1, 3)}
    ids, plain = all_of(corpus, **data), all_of(corpus)
    backwards = Chunks(corpus, "train", C, DataConfig(**data)).take(np.arange(len(ids))[::-1])
    assert torch.equal(backwards.flip(0), ids)  # the same whenever a chunk is seen
    assert not torch.equal(all_of(corpus, seed=1, **data), ids)
    kept = [i for i in range(C + 1) if i not in (0, 2)]
    assert torch.equal(ids[:, kept], plain[:, kept])
    redrawn = ids[:, [0, 2]]
    assert redrawn.min() >= corpus.first_text_id and redrawn.max() < corpus.vocab_size
    expected = (corpus.first_text_id + corpus.vocab_size - 1) / 2
    spread = (corpus.vocab_size - corpus.first_text_id) / 12**0.5 / redrawn.numel() ** 0.5
    assert abs(redrawn.double().mean() - expected) < 4 * spread


def test_a_fixed_token_at_a_random_place_stands_once_in_each_chunk(corpus):
    placed = all_of(corpus, fixed_position=4, random_place=True)
    fixed = placed == corpus.fix_id
    assert fixed.sum(dim=1).eq(1).all()
    assert torch.equal(placed.masked_fill(fixed, 0), all_of(corpus).masked_fill(fixed, 0))
    places = fixed.int().argmax(dim=1)
    assert set(places.tolist()) == set(range(C))
    assert torch.equal(placed, all_of(corpus, fixed_position=4, random_place=True))


def test_every_epoch_shows_each_chunk_once_in_an_order_of_its_own(corpus):
    chunks = Chunks(corpus, "train", C, DataConfig())
    shown = torch.cat([chunks.batch(step, 7, seed=0) for step in range(2 * len(chunks) // 7 + 1)])
    first, second = shown[: len(chunks)], shown[len(chunks) : 2 * len(chunks)]
    everything = sorted(map(tuple, all_of(corpus).tolist()))
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist())) == everything
    assert not torch.equal(first, second)
    assert not torch.equal(chunks.batch(0, 16, seed=0), chunks.batch(0, 16, seed=1))


SOME = {"random_positions": (1, 3)}, {"fixed_position": 2, "share": 0.5}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("data", [{}, *SOME, {"fixed_position": 4, "random_place": True}])
def test_batches_cut_on_the_device_are_those_of_the_host_in_the_same_order(corpus, data):
    here = Chunks(corpus, "train", C, DataConfig(**data), 3)
    there = Chunks(corpus, "train", C, DataConfig(**data), 3, torch.device("cuda"))
    size = len(here) // 15  # so that the steps go on into a second epoch
    for step in range(20):
        expected, batch = here.batch(step, size, seed=3), there.batch(step, size, seed=3)
        assert batch.dtype == torch.int64 and torch.equal(batch.cpu(), expected)


def test_impossible_interventions_are_refused(corpus):
    refuses("share must be in", all_of, corpus, share=0.0)
    refuses("random_positions must be at least 1", all_of, corpus, random_positions=(0,))
    refuses("random_positions must be of type tuple", all_of, corpus, random_positions=3)
    refuses("fixed_position must be at least 1", all_of, corpus, fixed_position=0)
    refuses("random_place is of a fixed token", all_of, corpus, random_place=True)
    refuses("less than one chunk", all_of, corpus, share=1e-4)
    refuses("split must be one of train, valid, probe", all_of, corpus, "test")
