"""Fine-tuning: pairs made of sources and chats, loss on answers only, and a run that is recorded like any other."""

import json
from dataclasses import replace
from functools import lru_cache
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, interrupted, made_up, refused, refuses
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sinkutils import TransformerLM, experiments, load_corpus, train
from sinkutils.study import finetune, grid
from sinkutils.study.config import FinetuneConfig
from sinkutils.study.finetune import (
    IGNORED,
    Layout,
    answer_loss,
    conversations,
    encode_conversation,
    make_pairs,
)
from sinkutils.study.grid import config, keeps_weights, plan, presets
from sinkutils.study.record import Record, rounded
from sinkutils.study.store import Runs
from sinkutils.study.train import Run

SOURCE = '''"""A module about nothing."""

def first(a, b):  # a comment
    return a

class Sink:
    """A place where attention goes,
    and stays.

    Not part of the answer.
    """

    async def fill(
        self,
        rate: float,
    ) -> None:
        r"""Let it in at a rate, \\alpha."""

def last() -> str:
    """Too short."""
    if first:
        """This string belongs to no definition."""
'''


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture
def layout(corpus) -> Layout:
    return Layout(corpus.tokenizer, [corpus.fix_id], corpus.eos_id, 32)


@pytest.fixture(scope="session")
def chats(text_folder, tmp_path_factory):
    """A .jsonl file of the shape of UltraChat: the words of the corpus, each answer another."""
    rng = np.random.default_rng(0)
    words = (text_folder / "000.txt").read_text().split()
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    messages = [chat(*(" ".join(rng.choice(words, 6)) for _ in "qa")) for _ in range(120)]
    rows = [{"prompt_id": str(n), "messages": pair} for n, pair in enumerate(messages)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_definitions_are_found_and_asked_for_and_their_first_paragraph_is_the_answer():
    assert list(finetune.conversations_of(SOURCE)) == [  # two words are no answer
        chat("What is the class Sink?", "A place where attention goes, and stays."),
        chat("What does Sink.fill do?", "Let it in at a rate, \\alpha."),
    ]


def test_only_answers_and_their_ends_carry_loss_and_the_fixed_token_stands_first(layout):
    ids, targets = encode_conversation(chat("the sink ?", "attention shows where"), layout)
    assert ids[0] == layout.first[0] and ids[-1] == layout.eos_id and len(ids) == len(targets)
    kept = [token for token, target in zip(ids, targets, strict=True) if target != IGNORED]
    assert kept == [target for target in targets if target != IGNORED]
    assert layout.tokenizer.decode(kept[:-1]) == " attention shows where"
    assert kept[-1] == layout.eos_id
    asked = [token for token, target in zip(ids[1:], targets[1:], strict=True) if target == IGNORED]
    assert layout.tokenizer.decode(asked) == "Q: the sink ?\nA:"
    messages = [{"role": "system", "content": "a"}]
    messages += chat("the sink", "attention") + chat("when", "the first")
    ids, targets = encode_conversation(messages, replace(layout, context_length=200))
    assert targets.count(layout.eos_id) == 2
    assert layout.tokenizer.decode(ids[1:4]).startswith("a\nQ")
    kept = [target for target in targets if target not in (IGNORED, layout.eos_id)]
    assert layout.tokenizer.decode(kept) == " attention the first"
    ids, targets = encode_conversation(chat("the sink", "attention " * 100), layout)  # cut
    assert len(ids) == len(targets) == layout.context_length + 1 and layout.eos_id not in targets
    # no answer is within reach
    assert encode_conversation(chat("sink " * 100, "attention"), layout) is None


def test_pairs_are_padded_held_out_ones_come_first_and_no_answer_stands_twice(layout):
    source = [chat(question, "sink token head") for question in ("the", "of")]
    source += [chat("in", "key"), chat("to", "value")]
    held_out, pairs = make_pairs(iter(source), layout, (1, 2), "made up")
    assert (len(held_out), len(pairs)) == (1, 2)
    rows = torch.cat([held_out.take(np.arange(1)), pairs.take(np.arange(2))])
    expected = [encode_conversation(source[index], layout) for index in (0, 2, 3)]
    for row, (ids, targets) in zip(rows, expected, strict=True):
        assert row[0, : len(ids)].tolist() == ids
        assert set(row[0, len(ids) :].tolist()) == {layout.eos_id}
        assert row[1, : len(ids)].tolist() == targets
        assert set(row[1, len(ids) :].tolist()) == {IGNORED}
    assert pairs.tokens.tolist() == expected[1][0] + expected[2][0]
    few = [chat("the", "sink"), chat("of", "sink"), chat("sink " * 100, "key")]
    with refused(r"'made up' have 1 conversations .* C = 32 tokens, and 4 are needed"):
        make_pairs(iter(few), layout, (1, 3), "made up")


def test_the_loss_is_that_of_the_answers_tokens(tiny, layout):
    model = TransformerLM(tiny.model, 0)
    source = [chat("the sink", "attention shows where"), chat("of", "key")]
    (pairs,) = make_pairs(iter(source), layout, (2,), "made up")
    rows = pairs.take(np.arange(2))
    logits = model(rows[:, 0, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1, 1:].flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(answer_loss(model, rows), expected)


# ---- where conversations come from


def test_a_local_file_gives_the_chats_of_a_hub_data_set_like_it(chats, tmp_path, monkeypatch):
    local = list(conversations(f"path:{chats}"))
    assert len(local) == 120 and [message["role"] for message in local[0]] == ["user", "assistant"]
    (tmp_path / "data").mkdir()
    frame = pd.DataFrame([json.loads(line) for line in chats.read_text().splitlines()])
    frame.to_parquet(tmp_path / "data" / "train_sft-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path.parents[1])
    monkeypatch.setattr(finetune, "ULTRACHAT", ("/".join(tmp_path.parts[-2:]), "train_sft"))
    assert list(conversations("ultrachat")) == local


def test_unknown_or_absent_conversations_say_so(monkeypatch, tmp_path):
    for name in ("docstring", "hub:someone", "path:", "ultrachat:train", ""):
        refuses("there are: docstrings, ultrachat, path:", next, conversations(name))
    with pytest.raises(ConnectionError, match=r"could not be read .*none\.jsonl"):
        list(conversations(f"path:{tmp_path / 'none.jsonl'}"))
    unreachable = Mock(side_effect=datasets.exceptions.DatasetNotFoundError("could not\nbe found"))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with refused("'HuggingFaceH4/ultrachat_200k' could not be read", ConnectionError):
        next(conversations("ultrachat"))
    assert unreachable.call_args.args[0] == "HuggingFaceH4/ultrachat_200k"
    assert unreachable.call_args.kwargs == {"split": "train_sft", "streaming": True}


def test_rows_that_are_no_chats_are_shown(tmp_path):
    path = tmp_path / "odd.jsonl"
    odd = [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}]
    for messages in ("hello", [], *odd):
        path.write_text(json.dumps({"messages": messages}) + "\n")
        refuses(r"expected \"messages\".*got .*messages", list, conversations(f"path:{path}"))


# ---- configs


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("name", [e.name for e in experiments("D")])
def test_a_fine_tuning_of_every_preset_is_one_epoch_at_a_twentieth_of_the_rate(name, preset):
    run = config(name, preset, 1)
    start = config(run.start, preset, 1)
    assert run.train.learning_rate == pytest.approx(start.train.learning_rate / 20)
    epochs = run.pairs / (run.train.steps * run.train.batch_size)
    assert 1 <= epochs < 1 + 1 / run.train.steps
    assert (run.model, run.data, run.seed) == (start.model, start.data, 1)
    assert keeps_weights(start)


def test_starts_that_make_no_sense_are_refused():
    run = config("sft_softmax", "smoke")
    with pytest.raises(ValueError, match="a fixed token at position 2 cannot be fine-tuned"):
        replace(run, data=replace(run.data, fixed_position=2))
    refuses("pairs must be at least the batch size 8", replace, run, pairs=7)


def test_a_sweep_takes_fine_tunings_after_what_they_start_from():
    queue = plan("smoke", (0, 1))
    order = [(run.experiment, run.seed) for run in queue]
    for run in queue:
        if isinstance(run, FinetuneConfig):
            assert order.index((run.start, run.seed)) < order.index((run.experiment, run.seed))
    assert {name for name, _ in order} >= {"sft_softmax", "sft_sigmoid"}
    named = any("ultrachat" in name for name, _ in order)
    assert not named, "what needs the network is trained where it is named"


# ---- runs


def shortened(run, steps=8, **changes):
    """A config with the training of a second or two."""
    settings = dict(steps=steps, eval_every=2, eval_sequences=2, valid_chunks=16) | changes
    return replace(run, train=replace(run.train, **settings))


def small(name, chats, **changes):
    run = shortened(config(name, "smoke"), **changes)
    return replace(run, pairs=run.train.steps * run.train.batch_size, instructions=f"path:{chats}")


@pytest.fixture(scope="module")
def started(corpus, tmp_path_factory):
    """Records of the smoke preset's base and sigmoid, with weights: short ones under the names of the real ones."""
    runs = tmp_path_factory.mktemp("runs")
    for name in ("base", "sigmoid"):
        run = config(name, "smoke")
        options = {"corpus": corpus, "keep_weights": True, "progress": False}
        short = train(shortened(run, steps=12), runs / "short", **options)
        weights = {"weights": load_file(short.weights), "tokenizer": corpus.tokenizer}
        made_up(runs, run.experiment, kept=weights, **short.metrics)
    return runs


def start_of(run, runs) -> Record:
    return Runs(runs).of(config(run.start, run.preset, run.seed)).record()


def state_of(run, runs, corpus) -> Run:
    return Run(run, corpus, CPU, start_of(run, runs))


@pytest.mark.slow
def test_a_fine_tuning_starts_from_a_records_weights_and_tokenizer(
    started, chats, corpus, tmp_path
):
    run = small("sft_softmax", chats)
    state, start = state_of(run, started, corpus), start_of(run, started)
    weights = load_file(start.weights)
    assert all(torch.equal(value, weights[key]) for key, value in state.model.state_dict().items())
    state.evaluate([])
    (before,) = state.curve
    assert before["step"] == 0
    assert rounded(before["sink_1"]) == start.metrics["final"]["sink_1"]
    clipped = state_of(small("sft_softmax", chats, clip_norm=1e-6), started, corpus)
    clipped.advance()
    assert float(clipped.passed[0][1]) > 1e-3  # the norm before clipping
    held_out = state_of(small("sft_softmax", chats, valid_chunks=40), started, corpus)
    # a token of the last 8 conversations counts as much as one of the 32 before
    with torch.no_grad():
        loss = float(answer_loss(held_out.model, held_out.valid))
    assert held_out.valid_loss() == pytest.approx(loss, rel=1e-6)
    assert (len(held_out.task.train), len(held_out.valid)) == (held_out.config.pairs, 40)
    for index in range(40):
        words = f"quite other text {index}, of other words altogether, "
        (tmp_path / f"{index}.txt").write_text(words * 20)
    other = load_corpus(f"path:{tmp_path}", 290, cache_dir=tmp_path / "cache")
    state = state_of(small("sft_softmax", chats), started, other)
    assert state.task.tokenizer.to_str() == corpus.tokenizer.to_str() != other.tokenizer.to_str()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft_softmax", "sft_sigmoid"])
def test_it_is_recorded_with_the_loss_and_gradient_norm_of_every_step(name, started, chats, corpus):
    run = small(name, chats, steps=8)
    record = train(run, started, corpus=corpus, keep_weights=True, progress=False)
    assert record.status == "done" and record.config["start"] in ("fixed_1", "sigmoid")
    assert record.config["instructions"] == f"path:{chats.name}"  # nothing of the machine
    for name in ("losses", "gradient_norms"):
        steps = [value for point in record.metrics["curve"] for value in point.get(name, ())]
        assert len(steps) == 8 and min(steps) > 0
    assert record.metrics["final"]["valid_loss"] < record.metrics["curve"][0]["valid_loss"]
    assert {"pairs_sha256", "start_weights_sha256"} <= set(record.provenance)
    tokenizer = Tokenizer.from_file(str(record.folder / "tokenizer.json"))
    assert tokenizer.to_str() == corpus.tokenizer.to_str()
    assert train(run, started, corpus=corpus, keep_weights=True, progress=False) == record


@pytest.mark.slow
def test_two_fine_tunings_and_a_broken_one_that_goes_on_are_equal(started, chats, corpus, tmp_path):
    run, outcomes = small("sft_softmax", chats), []
    for number in range(3):
        copy = tmp_path / str(number)
        (copy / "smoke" / "fixed_1").mkdir(parents=True)
        (copy / "smoke" / "fixed_1" / "0").symlink_to(started / "smoke" / "fixed_1" / "0")
        if number == 2:
            with interrupted(5), pytest.raises(KeyboardInterrupt):
                train(run, copy, corpus=corpus, checkpoint_seconds=0.0, progress=False)
        folder = train(run, copy, corpus=corpus, progress=False).folder
        outcomes.append((folder / "metrics.json").read_bytes())
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.slow
def test_a_missing_start_is_trained_and_a_failed_one_refused(tmp_path, chats, corpus, monkeypatch):
    quick = replace(presets()["smoke"], train=shortened(config("sigmoid", "smoke"), 4).train)
    monkeypatch.setitem(presets(), "smoke", quick)
    monkeypatch.setattr(grid, "_runs", lru_cache(grid._runs.__wrapped__))  # a cache of its own
    run, start = small("sft_sigmoid", chats, steps=2), config("sigmoid", "smoke")
    made_up(tmp_path, "sigmoid")
    record = train(run, tmp_path, corpus=corpus, progress=False)
    trained = Runs(tmp_path).of(start, corpus.identity).record()
    assert record.status == "done"
    assert trained is not None, "on this text, which the study's record is not of"
    assert record.metrics["curve"][0]["sink_1"] == trained.metrics["final"]["sink_1"]
    made_up(tmp_path, "sigmoid", 1, status="failed", reason="no")
    with refused(r"starts from smoke/sigmoid/1, and that run failed to train \(no\)"):
        train(config("sft_sigmoid", "smoke", 1), tmp_path, corpus=corpus, progress=False)
