"""Corpora: splits by document, the text kept as it is, caches whole or rebuilt, clear words when text is missing."""

import ast
import errno
import hashlib
import importlib
import io
import itertools
import json
import platform
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from helpers import refused, refuses

from sinkutils.measuring import texts
from sinkutils.measuring.probes import probe
from sinkutils.measuring.texts import train_tokenizer
from sinkutils.study import corpus as corpora
from sinkutils.study import sources
from sinkutils.study.corpus import (
    CORPORA,
    SPLITS,
    load_corpus,
    pack_corpus,
    write_meta,
    written_whole,
)

STRANGE = [
    "<eos> <bos> and <fix> are written here, as text " * 5,
    "naïve façade, λόγος, 漢字, 🎲 and\ttabs\n\n\n  and   spaces  \n" * 4,
    "\x00 \x07 \u2028 control characters",
]


def load(name, cache, vocab_size=300, **options):
    return load_corpus(name, vocab_size, cache_dir=cache, **options)


def folder_of(folder, files):
    """A folder with these files, a text each."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return folder


def all_texts(corpus):
    return [corpus.decode(document) for split in SPLITS for document in corpus.documents(split)]


def test_every_document_is_in_exactly_one_split_once_and_decodes_to_itself(text_folder, tmp_path):
    """Of the text, Markdown and JSONL files of a folder and those below it, also with lone surrogates in them."""
    texts = [file.read_text() for file in sorted(text_folder.iterdir())] + STRANGE
    some = [*texts[:50], "text with \ud800 in it"]
    lines = "\n".join(json.dumps({"text": text}) for text in some)
    below = enumerate(texts[50:])
    files = {name.format(i): t for i, t in below for name in ("{}.TXT", "below/{}.md")}
    files |= {"lines.jsonl": lines, "code.py": "ignored = True"}
    folder = folder_of(tmp_path / "mixed", files)
    read = all_texts(load(f"path:{folder}", tmp_path / "cache"))
    assert sorted(read) == sorted([*texts, "text with ? in it"])


def test_documents_are_what_stands_before_each_eos(corpus):
    for split in SPLITS:
        documents = list(corpus.documents(split))
        joined = np.concatenate([[*document, corpus.eos_id] for document in documents])
        assert np.array_equal(joined, corpus.tokens(split))
        assert isinstance(corpus.tokens(split), np.memmap)
        assert all(document.min() >= corpus.first_text_id for document in documents)
    assert (corpus.eos_id, corpus.bos_id, corpus.fix_id, corpus.first_text_id) == (0, 1, 2, 3)
    trained_on = map(corpus.decode, corpus.documents("train"))
    assert train_tokenizer(trained_on, 300).to_str() == corpus.tokenizer.to_str()


def test_the_splits_of_a_large_corpus_have_their_shares_and_a_text_keeps_its_split(tmp_path):
    rng = random.Random(1)
    lines = [" ".join(rng.choices("abcdefghij", k=30)) for _ in range(12_000)]
    for name, kept in (("all", lines), ("half", lines[::2])):
        rows = [json.dumps({"text": line}) for line in kept]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    cache = tmp_path / "cache"
    whole, half = (load(f"path:{tmp_path}/{name}.jsonl", cache) for name in ("all", "half"))
    documents = {split: len(list(whole.documents(split))) for split in SPLITS}
    # of 12,000, 4 sigma
    assert all(240 - 62 <= documents[split] <= 240 + 62 for split in ("probe", "valid"))
    for split in SPLITS:
        texts = [{*map(c.decode, c.documents(split))} for c in (half, whole)]
        assert texts[0] < texts[1]


def test_the_same_text_has_the_same_tokens_and_fingerprint_elsewhere(text_folder, corpus, tmp_path):
    elsewhere = shutil.copytree(text_folder, tmp_path / "elsewhere")
    there = load(f"path:{elsewhere}", tmp_path / "cache")
    assert there.fingerprint == corpus.fingerprint
    assert all(np.array_equal(there.tokens(split), corpus.tokens(split)) for split in SPLITS)
    (elsewhere / "000.txt").write_text("one document is another one now")
    assert load(f"path:{elsewhere}", tmp_path / "cache").fingerprint != corpus.fingerprint


def test_vocabulary_and_size_are_those_asked_for(text_folder, corpus, tmp_path):
    found = load(f"path:{text_folder}", tmp_path, 320)
    assert found.vocab_size == found.tokenizer.get_vocab_size() == 320
    assert found.tokens("train").max() < 320 and found.tokens("train").dtype == np.uint16
    capped = load(f"path:{text_folder}", tmp_path, max_tokens=20_000)
    total = sum(len(capped.tokens(split)) for split in SPLITS)
    assert 19_000 < total <= 20_000 < sum(len(corpus.tokens(split)) for split in SPLITS)
    with refused("vocab_size must be at least 259"):
        load(f"path:{text_folder}", tmp_path, vocab_size=258)
    with refused(r"no document for .* larger max_tokens"):
        load(f"path:{text_folder}", tmp_path, max_tokens=10)
    refuses("max_tokens must be at least 1", load, f"path:{text_folder}", tmp_path, max_tokens=0)
    sizes = {"vocab_size": np.int64(320), "max_tokens": np.int64(20_000)}
    whole = load(f"path:{text_folder}", tmp_path, 320, max_tokens=20_000)
    assert load(f"path:{text_folder}", tmp_path, **sizes).folder == whole.folder


@pytest.mark.parametrize("file", ["train.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_cache_is_noticed_and_built_again(text_folder, corpus, tmp_path, file, damage):
    load(f"path:{text_folder}", tmp_path)
    (target,) = tmp_path.glob(f"*/{file}")
    content = bytearray(target.read_bytes())
    half = len(content) // 2
    if damage == "changed":
        content[half] ^= 1
    target.write_bytes(content[:half] if damage == "truncated" else content)
    if damage == "missing":
        target.unlink()
    with pytest.warns(UserWarning, match="is damaged and is built again"):
        rebuilt = load(f"path:{text_folder}", tmp_path)
    assert rebuilt.fingerprint == corpus.fingerprint
    assert np.array_equal(rebuilt.tokens("train"), corpus.tokens("train"))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unwritable_cache_is_named_and_leaves_nothing(
    text_folder, corpus, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"no token files were written below .*file.*SINKUTILS_CACHE"):
        load(f"path:{text_folder}", tmp_path / "file" / "cache")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the tokenizer fits, the tokens do not
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with refused(
            r"no token files were written below .*File too large.*SINKUTILS_CACHE", OSError
        ):
            load(f"path:{text_folder}", tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("SINKUTILS_CACHE", str(tmp_path / "cache"))
    assert load(f"path:{text_folder}", None).folder.parent == tmp_path / "cache"


def test_a_text_that_cannot_be_used_is_told_what_to_do(text_folder, tmp_path, monkeypatch):
    two = '{"text": "one"}\n{"text": "two"}\n{"text": "two"}\n'
    latin = "façade".encode("latin-1")
    folder_of(tmp_path, {"empty/picture.png": b"no text", "two.jsonl": two, "latin.txt": latin})
    bad = dict(enumerate(["{not json", '{"txt": "x"}', '{"text": 5}', '["text"]']))
    files = {f"bad{i}.jsonl": '{"text": "fine"}\n\n' + line + "\n" for i, line in bad.items()}
    folder_of(tmp_path, files)
    fake_hub(monkeypatch, [{"image": "x", "label": 1}])
    for name in ("docstring", "", "path:", "hub:", "pile:Books3"):
        with pytest.raises(ValueError, match="unknown corpus") as error:
            load(name, tmp_path)
        assert all(known in str(error.value) for known in CORPORA)
    line_3 = r"\.jsonl, line 3: expected a JSON object with a string under"
    for name, message in {
        str(text_folder): f"say 'path:{text_folder}'$",
        str(text_folder / "000.txt"): f"say 'path:{text_folder / '000.txt'}'$",
        f"path:{tmp_path}/nowhere": r"nowhere: no such folder or file",
        f"path:{tmp_path}/empty": r"empty: no such folder or file of text, .* \.txt, \.md, \.jsonl",
        f"path:{tmp_path}/two.jsonl": "has no document for train",
        f"path:{tmp_path}/latin.txt": r"latin\.txt is not UTF-8 text",
        "hub:owner/pictures": r"has the fields \['image', 'label'\], none of",
        **{f"path:{tmp_path}/bad{i}.jsonl": f"bad{i}{line_3}" for i in bad},
    }.items():
        refuses(message, load, name, tmp_path / "cache", kind=(ValueError, FileNotFoundError))


def test_three_novels_are_cut_at_ends_of_paragraphs_and_have_enough_to_probe(tmp_path):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma"]
    paragraphs = [" ".join(rng.choices(words, k=60)) for _ in range(3300)]
    novels = ["\n\n".join(paragraphs[start : start + 1100]) for start in (0, 1100, 2200)]
    files = dict(zip(("a.txt", "b.txt", "c.txt"), novels, strict=True))
    folder = folder_of(tmp_path / "novels", files)
    corpus = load(f"path:{folder}", tmp_path / "cache")
    texts = all_texts(corpus)
    assert all(any(piece in novel for novel in novels) for piece in texts)
    # nothing lost but what divides them
    assert sum(map(len, texts)) == sum(map(len, novels)) - 2 * (len(texts) - 3)
    assert probe("natural", corpus.tokenizer, 100, 64, corpus=corpus).shape == (100, 64)


def fake_hub(monkeypatch, rows):
    """Let load_dataset give a real streaming data set of `rows`; returns a list of what it is asked for."""
    asked = []

    def load_dataset(name, config=None, *, split, streaming):
        assert split == "train" and streaming
        asked.append((name, config))
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


ON_THE_HUB = {"hub:single": ("single", None), "hub:owner/name": ("owner/name", None)}
ON_THE_HUB["hub:owner/name/a/b"] = ("owner/name", "a/b")


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_hub_data_set_is_read_by_name_and_its_text_field_found(
    monkeypatch, corpus, tmp_path, name
):
    texts, field = all_texts(corpus)[:60], "content" if name == "hub:single" else "text"
    rows = [{"id": i, field: text} for i, text in enumerate(texts)]
    empty = {"id": None, field: None}  # a document without text, the first as any other
    asked = fake_hub(monkeypatch, [empty, *rows[:30], empty, *rows[30:]])
    assert sorted(all_texts(load(name, tmp_path))) == sorted(texts)
    assert asked == [ON_THE_HUB[name]]


def test_a_stream_is_read_no_further_than_max_tokens_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora, "SAMPLE_CHARACTERS", 50_000)
    monkeypatch.setattr(corpora, "BATCH_DOCUMENTS", 100)
    monkeypatch.setattr(corpora, "HUB_TOKENS", 30_000)
    read = itertools.count()
    letters = " ".join("abc" * 17)
    endless = ({"text": f"{number} {letters}"} for number in read)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: endless)
    corpus = load("hub:endless", tmp_path)
    total = sum(len(corpus.tokens(split)) for split in SPLITS)
    assert 29_000 < total <= 30_000
    assert next(read) < 3_000


def test_the_pile_is_mixed_by_the_authors_weights_or_read_by_one_domain(monkeypatch):
    monkeypatch.setattr(sources, "PILE_SLACK", 1_000)
    rng = random.Random(0)
    names = [*sources.PILE_WEIGHTS, "Books3"]

    def rows(dataset):
        for _ in range(40_000):
            name = rng.choice(names)
            yield {"text": f"{name}|" + "x" * rng.randint(50, 150), "meta": {"pile_set_name": name}}

    monkeypatch.setattr(sources, "hub_rows", rows)
    characters = dict.fromkeys(names, 0)
    for text in sources.pile():
        characters[text.partition("|")[0]] += len(text)
    total = sum(characters.values())
    assert characters["Books3"] == 0 and total > 1e6
    for name, weight in sources.PILE_WEIGHTS.items():
        share = weight / sum(sources.PILE_WEIGHTS.values())
        assert characters[name] / total == pytest.approx(share, abs=0.004)
    assert {text.partition("|")[0] for text in sources.pile("ArXiv")} == {"ArXiv"}


def test_the_papers_vocabulary_is_5b_tokens_of_gpt_neox(monkeypatch, tmp_path):
    def build(folder, name, documents, vocab_size, tokenizer, max_tokens):
        raise ConnectionError(f"asked for {tokenizer}, {max_tokens}")

    monkeypatch.setattr(corpora, "_tokenise", build)
    papers, ours = (50_432, "EleutherAI/gpt-neox-20b", 5 * 10**9), (1024, None, 5 * 10**7)
    for vocabulary, tokenizer, tokens in (papers, ours):
        with pytest.raises(ConnectionError, match=f"asked for {tokenizer}, {tokens}$"):
            load_corpus("pile", vocabulary, cache_dir=tmp_path)


def unreachable():
    raise datasets.exceptions.DatasetNotFoundError("could not\nbe found")


def lost():
    yield {"text": "the first document", "meta": {"pile_set_name": "ArXiv"}}
    raise OSError("could not\nbe read on")


@pytest.mark.parametrize("stream", [unreachable, lost])
def test_without_network_one_line_says_what_to_do_and_none_is_cached(monkeypatch, tmp_path, stream):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream())
    with refused(r"could not be read \(.*could not.*\).* 'docstrings'", ConnectionError):
        load("pile", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_has_its_own_eos_and_x_fix(text_folder, corpus, tmp_path, monkeypatch):
    def read_with(vocab_size, *specials):
        """The texts by a tokenizer like GPT-NeoX's, which has these special tokens and no BOS."""
        said = corpus.tokenizer.to_str()
        for own, special in zip(("<eos>", "<bos>", "<fix>"), specials, strict=True):
            said = said.replace(own, special)
        (tmp_path / "other.json").write_text(said)
        cache, other = tmp_path / "cache", str(tmp_path / "other.json")
        return load(f"path:{text_folder}", cache, vocab_size, tokenizer=other)

    found = read_with(50_432, "<|endoftext|>", "<|padding|>", "<|mask|>")
    assert (found.eos_id, found.bos_id, found.fix_id, found.first_text_id) == (0, 0, 1, 3)
    assert found.vocab_size < 50_432 and sorted(all_texts(found)) == sorted(all_texts(corpus))
    with refused("vocab_size must be at least that"):
        read_with(260, "<|endoftext|>", "<|padding|>", "<|mask|>")
    with pytest.raises(ValueError, match=r"has none of <fix>, .* to serve as fix_id"):
        read_with(1000, "<|endoftext|>", "<|mask|>", "<|other|>")

    def without_network(name):
        raise Exception(f"{name}: no route")

    from_hub = "sinkutils.measuring.texts.Tokenizer.from_pretrained"
    monkeypatch.setattr(from_hub, without_network, raising=False)
    with refused(r"'EleutherAI/gpt-neox-20b' could not be read .*no route", ConnectionError):
        load(f"path:{text_folder}", tmp_path / "cache", 50_432, tokenizer="EleutherAI/gpt-neox-20b")


def install(site, package, files, version="1.0", unlisted=()):
    """What pip leaves of a package: its files, by their path in `site`, and a RECORD of those that it brought."""
    info = f"{package}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    files = files | {f"{info}/METADATA": about}
    for name, text in {**files, **dict(unlisted)}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(text.encode() if isinstance(text, str) else text)
    rows = [f"{name},,\n" for name in [*files, f"{info}/RECORD"]]
    (site / info / "RECORD").write_text("".join(rows))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A made-up installation: site/ with two packages of the list in it, and what must be left out."""
    monkeypatch.setattr(sources, "DISTRIBUTIONS", ("alpha", "beta"))
    monkeypatch.setattr(sources, "_standard_library", lambda: iter(()))

    def make(folder, more=False):
        site, unread = folder / "site", f'"""{"must not be read " * 30}"""'
        for package in ("alpha", "beta"):
            files: dict[str, str | bytes] = {}
            for i in range(20):
                words = f"{package} {i} " * 40
                code = f'def f():\n    r"""Does {words}"""\n    return \'no\'\n' + f"x = {i}\n" * 60
                files[f"{package}/m{i}.py"] = f'# a comment\n"""Module {words}"""\n\n{code}'
            files[f"{package}/broken.py"] = b'"""caf\xe9"""' * 50
            files[f"{package}-1.0.dist-info/c.py"] = files["../bin/script.py"] = unread
            unlisted = {f"{package}/here.py": unread, "sinkutils/a.py": unread}
            install(site, package, files, unlisted=unlisted)
        shutil.copy(site / "alpha" / "m0.py", site / "beta" / "m0.py")
        if more:
            install(site, "gamma", {"gamma/m.py": unread})
        monkeypatch.syspath_prepend(str(site))
        return folder

    return make


def test_embedded_text_is_the_same_wherever_and_beside_whatever_it_stands(installed, tmp_path):
    found = []
    for place, more in (("one", False), ("two/deep", True)):
        installed(tmp_path / place, more)
        kinds = (sources.docstrings, sources.python, sources.everything)
        found.append([list(kind()) for kind in kinds])
    assert found[0] == found[1]
    assert len(found[0][0]) == len(found[0][1]) == 39  # every module once
    assert not any("must not be read" in text for texts in found[0] for text in texts)


def test_the_docstring_corpus_holds_no_code_and_names_a_missing_package(installed, tmp_path):
    folder = installed(tmp_path / "one")
    texts = all_texts(load("docstrings", tmp_path / "cache"))
    assert len(texts) == 39
    assert all(
        "Module" in text and "Does" in text and "return" not in text and "#" not in text
        for text in texts
    )
    shutil.rmtree(folder / "site" / "beta-1.0.dist-info")
    importlib.invalidate_caches()
    says = r"the embedded text lacks beta, .* install what constraints.txt pins"
    with pytest.warns(UserWarning, match=says):
        assert set(sources.docstrings()) < set(texts)


def test_the_fast_scan_finds_what_the_parser_finds():
    scanned, parsed = set(), set()
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        scanned |= set(texts.docstrings_of(source))
        found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, nodes))
        parsed |= {text for text in found if text and text.strip()}
    # in characters: escapes differ, one-quote docstrings are left out
    common = sum(map(len, scanned & parsed))
    assert len(parsed) > 3000
    assert common > 0.95 * sum(map(len, parsed)) and common > 0.95 * sum(map(len, scanned))


def test_the_scan_is_not_misled_by_quotes_nor_slow_where_one_stays_open():
    source = '''#!/usr/bin/env python
"""Module 'docstring' with "quotes"."""
x = """no:
"""
class A:  # a remark
    \'\'\'Class """docstring""".\'\'\'
    def f(self, a="#:"):
        r"""Function \\d."""
        y = ["""neither""",
        """this"""]
    def g(self): """on one line"""
'''
    assert texts.docstrings_of(source) == [
        "Module 'docstring' with \"quotes\".",
        'Class """docstring""".',
        "Function \\d.",
    ]
    code = "import sys; from sinkutils.measuring import texts; assert texts.docstrings_of(sys.stdin.read()) == []"
    source = '"""' + 'a "b" \\ c' * 20_000
    # Exponential backtracking would not end.
    subprocess.run([sys.executable, "-c", code], input=source, text=True, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.python_version() != "3.11.7", reason="the text of another Python is another one"
)
def test_the_embedded_text_has_the_hash_that_records_name():
    recorded = "59fb5378366255c9c4788a8479f6b51f0e5731a00128742a13b5c426ad53b361"  # another is another study
    corpus = load_corpus("docstrings", 1024)
    assert corpus.fingerprint == recorded
    held_out = [corpus.decode(document) for document in corpus.documents("probe")]
    assert list(texts.held_out_documents()) == held_out
    ids = probe("natural", corpus.tokenizer, 100, 64, seed=5)
    assert torch.equal(ids, probe("natural", corpus.tokenizer, 100, 64, seed=5, corpus=corpus))


def test_a_packed_corpus_opens_anywhere_and_a_damaged_one_is_refused(corpus, tmp_path, monkeypatch):
    file = tmp_path / "corpus.tar.xz"
    pack_corpus(corpus, file)
    opened = load(f"packed:{file}", tmp_path / "cache")
    assert (opened.name, opened.fingerprint) == (corpus.name, corpus.fingerprint)
    assert opened.vocab_size == 300
    assert all(np.array_equal(opened.tokens(split), corpus.tokens(split)) for split in SPLITS)
    assert opened.tokenizer.to_str() == corpus.tokenizer.to_str()
    monkeypatch.chdir(tmp_path)
    assert load(f"packed:{file.name}", tmp_path / "cache").folder == opened.folder
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for content in (whole[: len(whole) // 2], bytes(changed), b"not xz at all"):
        file.write_bytes(content)
        refuses("is not a complete file of pack_corpus", load, f"packed:{file}", tmp_path / "none")
    with refused(r"nowhere\.tar\.xz", FileNotFoundError):
        load("packed:nowhere.tar.xz", tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []


def test_a_damaged_cache_that_cannot_be_written_says_what_to_do(text_folder, tmp_path, monkeypatch):
    folder = load(f"path:{text_folder}", tmp_path).folder
    (folder / "valid.bin").write_bytes(b"")
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".build-x"))
    monkeypatch.setattr("tempfile.mkdtemp", Mock(side_effect=refused))
    with pytest.warns(UserWarning, match="is damaged and is built again"):
        refuses(f"no token files were written below {tmp_path} .*set SINKUTILS_CACHE", load, f"path:{text_folder}",
                tmp_path, kind=OSError)  # fmt: skip
    assert folder.is_dir(), "what is damaged stays until there is another"


def test_a_damaged_cache_that_another_process_has_built_meanwhile_is_left_as_it_is(tmp_path):
    folder = tmp_path / "text"
    for content in (b"first", b"second"):
        with written_whole(folder, "token files", corpora._is_whole) as new:
            (new / "train.bin").write_bytes(content)
            write_meta(new, {"name": "text"})
    assert (folder / "train.bin").read_bytes() == b"first"
    (folder / "train.bin").write_bytes(b"damage")
    with written_whole(folder, "token files", corpora._is_whole) as new:
        (new / "train.bin").write_bytes(b"third")
        write_meta(new, {"name": "text"})
    assert (folder / "train.bin").read_bytes() == b"third"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_text_that_cannot_be_read_is_named_and_not_the_cache(text_folder, tmp_path, monkeypatch):
    bad, really = sorted(text_folder.iterdir())[20], Path.read_bytes

    def read(path):
        if path == bad:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        with pytest.raises(PermissionError) as error:
            load(f"path:{text_folder}", tmp_path / "cache")
        assert f"Permission denied: {bad}" in str(error.value)
        denied = PermissionError(errno.EACCES, "Permission denied")
        patch.setattr(Path, "read_text", Mock(side_effect=denied))
        with pytest.raises(PermissionError):  # rather than another text
            texts.text_of(bad)
    assert texts.text_of(tmp_path / "nowhere.py") == ""


def test_a_text_saved_on_windows_is_the_same_text_and_another_encoding_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert texts.read_texts(tmp_path / "a.txt") == ["one\ntwo\n"]
    (tmp_path / "b.jsonl").write_bytes('{"text": "caf\u00e9"}'.encode("latin-1"))
    refuses("b.jsonl, line 1, is not UTF-8 text", texts.read_texts, tmp_path / "b.jsonl")
    (tmp_path / "c.py").write_text("x = 1")
    refuses(r"c\.py: no such .* file of text, whose name ends", texts.read_texts, tmp_path / "c.py",
            kind=FileNotFoundError)  # fmt: skip


def archive(file, members):
    """A .tar.xz of these members: (name, contents), or (name, None, a type of tarfile)."""
    with tarfile.open(file, "w:xz") as tar:
        for name, content, *kind in members:
            member = tarfile.TarInfo(name)
            if kind:
                (member.type,) = kind
                member.linkname = "meta.json"
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


UNPACKED = {
    "link": ([("valid.bin", None, tarfile.SYMTYPE)], "valid.bin is no plain file"),
    "hard link": (
        [("meta.json", b"{}"), ("train.bin", None, tarfile.LNKTYPE)],
        "train.bin is no plain file",
    ),
    "device": ([("probe.bin", None, tarfile.CHRTYPE)], "probe.bin is no plain file"),
    "pipe": ([("./probe.bin", None, tarfile.FIFOTYPE)], "probe.bin is no plain file"),
    "folder": ([("train.bin", None, tarfile.DIRTYPE)], "train.bin is no plain file"),
    "name": ([("notes.txt", b"x")], "'notes.txt' is none of meta.json, tokenizer.json"),
    "folder in it": ([("a/train.bin", b"x")], "'a/train.bin' is none of"),
    "twice": ([("train.bin", b"x"), ("./train.bin", b"y")], "train.bin is there twice"),
    "size": ([("meta.json", b"x" * 1_000_001)], "meta.json has 1,000,001 bytes, and at most"),
}


@pytest.mark.parametrize("kind", UNPACKED)
def test_of_a_packed_corpus_only_its_five_plain_files_are_taken(kind, tmp_path):
    members, message = UNPACKED[kind]
    archive(tmp_path / "text.tar.xz", members)
    name = f"packed:{tmp_path}/text.tar.xz"
    refuses(f"is not a complete file of pack_corpus: .*{message}", load, name, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cache", "text.tar.xz"]


def test_the_files_of_a_text_are_read_once_and_again_after_a_change(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "text"
    shutil.copytree(corpus.folder, folder)
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: read.append(1) or digest(*a))
    first, second = corpora.Corpus(folder), corpora.Corpus(folder)
    assert len(read) == 4 and first.identity == second.identity
    (folder / "train.bin").write_bytes(bytes(2))
    refuses("are not as they were written", corpora.Corpus, folder)
