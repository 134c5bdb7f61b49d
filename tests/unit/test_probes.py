"""Probes of Section 3.3 and of one's own texts, for every kind of tokenizer; special tokens are never drawn or read."""

import contextlib
import itertools
import json
from functools import partial

import pandas as pd
import pytest
import torch
import transformers as tf
from helpers import refused, refuses, word_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, IterableDataset
from transformers.models.ctrl.tokenization_ctrl import CTRLTokenizer

from sinkutils.measuring import probes, texts
from sinkutils.measuring.probes import PROBES, Subject
from sinkutils.measuring.texts import (
    adds_bos,
    bos_id,
    encode,
    marked_special,
    read_texts,
    special_ids,
    train_tokenizer,
)
from sinkutils.names import probe
from sinkutils.study import corpus

RAW = word_tokenizer(40)
TEXTS = [" ".join(f"w{(i * 7 + j) % 40}" for j in range(10 + i)) for i in range(30)]


@pytest.mark.parametrize("kind", PROBES)
def test_probes_differ_between_seeds_and_between_rows(kind):
    """Their shape, BOS and tokens: tests/property/test_inputs.py."""
    ids = probe(kind, RAW, 8, 20, texts=TEXTS)
    assert not torch.equal(ids, probe(kind, RAW, 8, 20, seed=1, texts=TEXTS))
    # no document twice, but now and then a token
    least = {"natural": 8, "random": 8, "repeat": 5}[kind]
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
    # tokenised again, the same
    assert torch.equal(probe("natural", again, 3, 16, corpus=corpus), ids)


def test_bad_requests_are_clear():
    ask, a_text = partial(probe, texts=TEXTS), "the text that I should like to measure, " * 9
    refuses("natural, random, repeat", ask, "words", RAW)
    refuses(r"a tokenizers\.Tokenizer or a transformers tokenizer, got None", ask, "natural", None)
    with refused("this one has none"):
        ask("random", word_tokenizer(40, ("<eos>", "<fix>")), 5, 5, bos=True)
    refuses("length must be at least 2", ask, "random", RAW, 5, 1, bos=True)
    refuses("n must be at least 1", ask, "random", RAW, 0)
    with refused(r"^kind must be one of .{,40}got .the text that.{,90} say probe.texts="):
        ask(a_text, RAW)
    refuses("leave out the kind", probe, "natural", RAW, 12, 29, texts=["one text"])
    refuses(r"11 of 30 documents have at least 29 tokens, n=12", ask, "natural", RAW, 12, 29)


def test_ones_own_texts_are_cut_into_windows_one_after_the_other():
    ids = [encode(RAW, text) for text in TEXTS]
    windows = [row[i : i + 8] for row in ids for i in (0, 8, 16, 24, 32) if len(row) >= i + 8]
    assert probe(texts=TEXTS, tokenizer=RAW, length=8).tolist() == windows
    with_bos = probe(texts=(text for text in TEXTS), tokenizer=RAW, length=9, bos=True)
    assert with_bos[:, 1:].tolist() == windows and (with_bos[:, 0] == bos_id(RAW)).all()
    few = probe(texts=TEXTS, tokenizer=RAW, length=8, n=5)
    assert few.shape == (5, 8) and all(row in windows for row in few.tolist())
    assert not torch.equal(few, probe(texts=TEXTS, tokenizer=RAW, length=8, n=5, seed=1))
    with pytest.raises(ValueError, match=r"texts have 0 windows of 64 tokens, n=1"):
        probe(texts=TEXTS, tokenizer=RAW)
    refuses("texts must be several strings", probe, texts="one text", tokenizer=RAW)
    frame = pd.DataFrame({"text": ["a", "b"], "id": [1, 2]})
    refuses(
        r"of a table give one of the columns; got  *text *id", probe, texts=frame, tokenizer=RAW
    )
    refuses(
        r"of a table give one of the columns; got .'text'",
        probe,
        texts={"text": ["a"]},
        tokenizer=RAW,
    )
    refuses(r"^texts\[1\] must be .* str, got NoneType", probe, texts=["a", None], tokenizer=RAW)
    refuses("and no set", probe, texts={"a", "b"}, tokenizer=RAW)  # its order is the process's
    refuses("corpus must be of type Corpus, got NoneType", probe, "natural", RAW, corpus=None)


def test_texts_are_read_from_files(tmp_path):
    (tmp_path / "a.md").write_text("long " * 1000)
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert read_texts(tmp_path / "b.jsonl") == ["one", "two"]
    (tmp_path / "none.jsonl").write_text("\n")
    refuses("none.jsonl has no text in it", read_texts, tmp_path / "none.jsonl")
    (tmp_path / "windows").mkdir()
    (tmp_path / "windows" / "c.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "windows" / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n')
    assert read_texts(tmp_path / "windows") == ["one\ntwo\n", "three"]
    (tmp_path / "latin.jsonl").write_bytes('{"text": "façade"}'.encode("latin-1"))
    refuses("latin.jsonl, line 1, is not UTF-8 text", read_texts, tmp_path / "latin.jsonl")
    (tmp_path / "latin.jsonl").unlink()
    assert read_texts(str(tmp_path)) == ["long " * 1000, "one", "two", "one\ntwo\n", "three"]


def test_half_a_character_is_a_question_mark_as_in_a_corpus():
    """A lone surrogate, which JSON can hold; no tokenizer of Rust takes it."""
    ids = probe(tokenizer=RAW, texts=["w1 \ud83d w2 " * 5], length=15)
    assert torch.equal(ids, probe(tokenizer=RAW, texts=["w1 ? w2 " * 5], length=15))


def test_a_file_that_is_not_there_or_nests_too_deep_is_refused_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        read_texts("~nobody-of-that-name/a.txt")
    (tmp_path / "long.jsonl").write_text('{"text": "one", "id": ' + "9" * 5000 + "}")
    assert read_texts(tmp_path / "long.jsonl") == ["one"]  # though Python reads no such integer
    (tmp_path / "long.jsonl").unlink()
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    refuses("deep.jsonl, line 1: expected a JSON object", read_texts, tmp_path / "deep.jsonl")
    refuses("unknown corpus", corpus.load_corpus, "~nobody-of-that-name")
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        corpus.load_corpus("path:~nobody-of-that-name/a")


def byte_level(tmp_path):
    """Llama 3 in small: reserved tokens without a role, one added token that is not special."""
    raw = train_tokenizer(["hello reserved world " * 9], 300)
    raw.add_special_tokens(["<|reserved_0|>", "<|reserved_1|>"])
    raw.add_tokens(["worldly"])
    return raw


def fast(tmp_path):
    ends = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=byte_level(tmp_path), **ends)


def unigram(tmp_path):
    """Holds </s> as a piece of its own, which no option of the library keeps from being found."""
    pieces = ["<unk>", "</s>", "▁", "▁hello", "<", "/", "s", ">", "worldly"]
    words = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    raw = Tokenizer(models.Unigram(words, unk_id=0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["</s>"])
    return raw


def put_around(tmp_path):
    """Marks its [CLS] as what it puts before a text, and nowhere else."""
    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "hello", "worldly"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    raw.post_processor = template
    return raw


def slow(tmp_path):
    """Written in Python, with a reserved token in the list of added tokens only."""
    words = ["<unk>", "worldly", *"<>|helopwrdy", *(f"{letter}@@" for letter in "<>|helopwrdy")]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    made = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    made.add_tokens([AddedToken("<|hop|>", special=True), AddedToken("worldly")])
    return made


RESERVED = ["<eos>", "<bos>", "<fix>", "<|reserved_0|>", "<|reserved_1|>"]
SPECIAL = {byte_level: RESERVED, fast: RESERVED, unigram: ["</s>"], put_around: ["[CLS]"]}
SPECIAL[slow] = ["<unk>", "<|hop|>"]


@pytest.mark.parametrize("make", SPECIAL)
def test_special_tokens_are_not_drawn_nor_read_and_the_tokenizer_stays_as_it_was(make, tmp_path):
    tokenizer = make(tmp_path)
    vocabulary = tokenizer.get_vocab()
    special = {vocabulary[name] for name in SPECIAL[make]}
    assert marked_special(tokenizer) == special
    drawn = probe("random", tokenizer, 50, 64).unique().tolist()
    assert drawn == sorted(set(vocabulary.values()) - special)
    written = f"hello {SPECIAL[make][-1]} worldly"
    plain = getattr(tokenizer, "backend_tokenizer", tokenizer)
    encoded = plain.encode(written)
    before = [getattr(encoded, "ids", encoded), getattr(plain, "truncation", None)]
    ids = encode(tokenizer, written)
    assert not (special - {vocabulary.get("<unk>")}) & {*ids}
    assert ids[0] == encode(tokenizer, "hello")[0]
    assert vocabulary["worldly"] in ids or make is slow or make is unigram
    assert vocabulary["worldly"] in encode(tokenizer, "hello worldly")
    assert probe("natural", tokenizer, 1, 2, texts=[written]).tolist() == [ids[:2]]
    assert before[0] == getattr(plain.encode(written), "ids", plain.encode(written))


def test_what_cuts_and_pads_a_text_does_not_do_so_to_a_probe(tmp_path):
    raw = byte_level(tmp_path)
    ids = encode(raw, "hello world")
    raw.enable_truncation(2)
    raw.enable_padding(length=40, pad_id=0)
    kept = raw.truncation, raw.padding
    assert encode(raw, "hello world") == ids and (raw.truncation, raw.padding) == kept


@pytest.mark.parametrize("bos", ["<|endoftext|>", "<s>", "[BOS]", "<|bos|>"])
def test_the_bos_of_a_probe_is_the_one_that_training_puts_before_documents(bos):
    tokenizer = word_tokenizer(1, ("</s>", bos, "<pad>"))
    bos = special_ids(tokenizer, None)["bos_id"]
    assert (probe("random", tokenizer, 2, 4, bos=True)[:, 0] == bos).all()
    assert bos_id(tokenizer) == 1
    assert bos_id(tf.PreTrainedTokenizerFast(tokenizer_object=RAW, bos_token="w5")) == 8


def test_a_bos_that_a_tokenizer_lacks_is_what_is_said_to_be_missing():
    without = Subject("a model", None, word_tokenizer(20, ("<eos>",)))
    refuses("this one has none", without.inputs, "random", first="BOS")
    refuses("first must be one of text; got 'x_fix'", without.inputs, "random", first="x_fix")


def test_what_is_no_list_of_texts_is_named_with_the_element_or_the_column(corpus):
    def ask(texts):
        return probe(None, corpus.tokenizer, length=4, texts=texts)

    refuses(r"^texts\[1\] must be of type str, got NoneType: None", ask, ["a text " * 20, None])
    refuses("of a table give one of the columns", ask, pd.DataFrame({"text": ["a text"] * 3}))
    refuses("texts must be several strings, a document each, .* got 'a text'", ask, "a text")
    refuses("texts must be several strings, a document each, .* got 3", ask, 3)


def test_a_natural_text_that_is_not_the_studys_is_said_with_its_packages(monkeypatch, tmp_path):
    places = texts.PLACES.read_text().splitlines()
    assert len(places) == 121
    (tmp_path / "m.py").write_text('"""One."""\n\ndef f():\n    """Two."""\n')
    rows = [f"python,m.py,1,{texts.digest('Two.')}", f"python,m.py,0,{texts.digest('Other.')}"]
    rows.append(f"a-package-that-is-not-there,m.py,0,{texts.digest('One.')}")
    (tmp_path / "places.csv").write_text("\n".join([places[0], *rows]))
    monkeypatch.setattr(texts, "PLACES", tmp_path / "places.csv")
    monkeypatch.setattr("sysconfig.get_path", lambda name: tmp_path)
    texts.held_out_documents.cache_clear()
    with pytest.warns(UserWarning, match="text is another .*: a-package-that-is-not-there, python"):
        assert texts.held_out_documents() == ("Two.", "One.\n\nTwo.", "")
    texts.held_out_documents.cache_clear()


class Counted:
    """A stream of texts that counts how many are read."""

    def __init__(self, texts=None):
        self.read = 0
        self.texts = texts or (f"w{i % 40} " * 30 for i in itertools.count())

    def __iter__(self):
        for text in self.texts:
            self.read += 1
            yield text


def streams():
    def rows():
        for i in itertools.count():
            read.append(i)
            yield {"text": f"w{i % 40} " * 30}

    read = []
    with contextlib.suppress(ModuleNotFoundError):  # `make oldest` has no datasets
        import datasets

        column = datasets.IterableDataset.from_generator(rows)["text"]
        yield column, read
    counted = Counted()
    yield counted, counted
    once = Counted()
    yield iter(once), once
    batches = Counted([f"w{i % 40} " * 30] * 8 for i in itertools.count())
    yield DataLoader(InOrder(batches), batch_size=None), batches
    items = [f"w{i % 40} " * 30 for i in range(10_000)]
    yield DataLoader(Logged(items, log := []), batch_size=4), log


class InOrder(IterableDataset):
    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return iter(self.texts)


class Logged:
    def __init__(self, texts, log):
        self.texts, self.log = texts, log

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        self.log.append(i)
        return self.texts[i]


@pytest.mark.parametrize("kind", ["natural", None])
def test_a_stream_is_read_only_as_far_as_it_is_needed(kind):
    for stream, log in streams():
        ids = probe(kind, RAW, 4, 8, texts=stream)
        assert ids.shape == (4, 8)
        read = log.read if isinstance(log, Counted) else len(log)
        assert 1 <= read <= 60


def test_a_stream_that_is_short_gives_what_its_list_gives_and_one_without_an_end_is_given_up():
    for kind, n in (("natural", 8), (None, 8), (None, None)):
        expected = probe(kind, RAW, n, 8, texts=TEXTS)
        assert torch.equal(probe(kind, RAW, n, 8, texts=iter(TEXTS)), expected)
    # Documents that are long enough may come late.
    late = itertools.chain(["w1"] * 500, TEXTS)
    assert probe("natural", RAW, 8, 8, texts=late).shape == (8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "LONGEST_STREAM", 1000)
        refuses("say how many", probe, texts=Counted(), tokenizer=RAW, length=8)
        refuses("0 windows", probe, texts=iter(["w1"] * 5000), tokenizer=RAW, length=8, n=2)
        refuses("0 of 1020 doc", probe, "natural", RAW, 2, 8, texts=itertools.repeat("w1"))


def test_large_files_are_read_in_pieces_and_only_those_that_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LARGE", 3000)
    monkeypatch.setattr(texts, "PIECE_BYTES", 1000)
    words = " ".join(f"w{i % 40} \u00e9\u6f22" for i in range(6000))
    (tmp_path / "book.txt").write_text(words, encoding="utf-8")
    pieces = read_texts(tmp_path / "book.txt")
    assert "".join(text for piece in pieces for text in piece) == words
    lines = [json.dumps({"text": f"w{i % 40} " * (i % 97)}) for i in range(500)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rows = read_texts(tmp_path / "rows.jsonl")
    found = [text for piece in rows for text in piece]
    assert found == [json.loads(line)["text"] for line in lines]

    read = []
    at = texts.Pieces.__getitem__
    monkeypatch.setattr(texts.Pieces, "__getitem__", lambda *a: read.append(a[1]) or at(*a))
    for source in (pieces, rows):
        read.clear()
        ids = probe(None, RAW, 4, 8, texts=source)
        assert ids.shape == (4, 8) and 4 <= len(read) <= 20
        assert torch.equal(ids, probe(None, RAW, 4, 8, texts=source))
        assert not torch.equal(ids, probe(None, RAW, 4, 8, seed=1, texts=source))
        many = probe(None, RAW, 3 * len(source), 8, texts=source)
        assert len(many) == 3 * len(source) and len(read) >= len(source)
        everything = probe(None, RAW, None, 8, texts=source)
        assert len(everything) > len(many)
        assert {*map(tuple, ids.tolist())} <= {*map(tuple, everything.tolist())}
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "no json"]))
    refuses(
        "expected a JSON object",
        probe,
        None,
        RAW,
        None,
        8,
        texts=read_texts(tmp_path / "rows.jsonl"),
    )
    monkeypatch.setattr(probes, "LONGEST_STREAM", 50)
    refuses("say how many", probe, None, RAW, None, 8, texts=pieces)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": words}))  # all in a single piece
    assert probe(None, RAW, 4, 8, texts=read_texts(tmp_path / "one.jsonl")).shape == (4, 8)


class PanicException(BaseException):
    """Stands in for the class of Rust, which cannot be imported."""


def test_a_tokenizer_that_panics_at_a_text_is_one_line(tmp_path):
    class Tokenizing:
        all_special_ids = ()

        def get_vocab(self):
            return {"a": 0}

        def encode(self, text, **_):
            raise PanicException("called `Result::unwrap()` on an `Err` value: StackOverflow")

    refuses("the tokenizer itself fails at a text of 60,000 characters, 'aaa.*StackOverflow",
            probe, None, Tokenizing(), texts=["a" * 60_000])  # fmt: skip


def test_whether_a_tokenizer_adds_a_bos_is_seen_by_its_ids_and_not_by_its_attributes(tmp_path):
    raw = word_tokenizer(40)
    template = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    raw.post_processor = template
    ends = {"bos_token": "<bos>", "eos_token": "<eos>"}
    tf.PreTrainedTokenizerFast(tokenizer_object=raw, **ends).save_pretrained(tmp_path)
    plain = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert adds_bos(plain) and plain("w1")["input_ids"][0] == 1
    with_eos = tf.AutoTokenizer.from_pretrained(tmp_path, add_eos_token=True)
    assert adds_bos(with_eos) == (with_eos("w1")["input_ids"][0] == 1)
