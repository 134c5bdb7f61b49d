"""Corpora: embedded text, hub data sets or local text, as token files on disk.

Each document belongs to one of three splits. The token files of a corpus are one folder of the
cache. The folder is written as a whole or not at all, and its digest is checked when it is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import tarfile
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from sinkutils.checks import Refused, choice, first_line, integer, require, short
from sinkutils.measuring.texts import (
    SMALLEST_VOCABULARY,
    load_tokenizer,
    local_files,
    open_tokenizer,
    special_ids,
    train_tokenizer,
)
from sinkutils.paths import cache_root, written_whole
from sinkutils.study import sources
from sinkutils.study.config import Identity, public_name
from sinkutils.study.sources import split_fraction, text_digest

# The share of the documents that the probe split gets, and again the valid split. The hash of its
# text decides where a document goes.
SHARE = 0.02
# The number of documents that each of the two gets if its share would be smaller. The sink metric
# needs 100.
HELD_OUT = 120
SAMPLE_CHARACTERS = 20_000_000  # the tokenizer is trained on the first documents, up to this size
BATCH_DOCUMENTS = 200  # how many documents are tokenised at once
HUB_TOKENS = 50_000_000  # the default cap of a streamed corpus
STREAMED = "hub"  # stands for the version of a streamed text, which is unknown
FORMAT = 5  # is raised when the files, or the way in which they are made, change
SPLITS = ("train", "valid", "probe")
# The files of a packed corpus, and the most bytes that each may have. The paper's text has 10 GB.
PACKED = {"meta.json": 10**6, "tokenizer.json": 10**8}
PACKED |= dict.fromkeys((f"{split}.bin" for split in SPLITS), 4 * 10**10)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)

Meta = dict[str, Any]  # the contents of a folder's meta.json


class Corpus:
    """The token files of one corpus. Its three splits share no document.

    EOS follows each document.
    """

    def __init__(self, folder: Path) -> None:
        """Open a cache folder. Raises ValueError if it is not complete and intact."""
        meta = verified(folder)
        self.folder = folder
        self.tokenizer = open_tokenizer(folder / "tokenizer.json")
        self.name: str = meta["name"]
        self.fingerprint: str = meta["fingerprint"]  # SHA-256 of the text and the tokenizer
        self.vocab_size: int = meta["vocab_size"]
        self.dtype: str = meta["dtype"]
        self.eos_id: int = meta["eos_id"]
        self.bos_id: int = meta["bos_id"]
        # x_fix of Section 5, a token that occurs in no text
        self.fix_id: int = meta["fix_id"]
        self.first_text_id: int = meta["first_text_id"]  # the first id that is not special

    @property
    def identity(self) -> Identity:
        return {"name": self.name, "sha256": self.fingerprint}

    def tokens(self, split: str) -> np.ndarray:
        """The documents of a split, each followed by EOS: (N,) unsigned, on disk."""
        choice("split", split, SPLITS)
        # Mode "c" is copy on write: PyTorch takes no read-only array, and the file stays unchanged.
        return np.memmap(self.folder / f"{split}.bin", dtype=self.dtype, mode="c")

    def documents(self, split: str) -> Iterator[np.ndarray]:
        """The documents of a split, each (N,), without EOS."""
        tokens = np.asarray(self.tokens(split))
        ends = np.flatnonzero(tokens == self.eos_id)
        start = 0
        for end in ends.tolist():
            yield tokens[start:end]
            start = end + 1  # past EOS

    def decode(self, ids: np.ndarray) -> str:
        """The text of these token ids."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


EMBEDDED = {
    "docstrings": sources.docstrings,
    "sources": sources.python,
    "embedded": sources.everything,
}
# The names that load_corpus accepts. A part in < > has to be filled in.
CORPORA = (
    *EMBEDDED,
    "pile",
    "pile:<domain>",
    "hub:<dataset id>[/<config>]",
    "path:<folder or file>",
    "packed:<file>",
)


def located(name: str) -> str:
    """The name of a corpus with an absolute path, so that it is valid in every folder."""
    kind, _, rest = name.partition(":")
    if kind not in ("path", "packed") or not rest:
        return name
    path = Path(os.path.expanduser(rest)).absolute()
    return f"{kind}:{path}"


def load_corpus(
    name: str = "docstrings",
    vocab_size: int = 1024,
    *,
    tokenizer: str | None = None,
    cache_dir: str | Path | None = None,
    max_tokens: int | None = None,
) -> Corpus:
    """Open a corpus from the cache, or build it there.

    name: one of CORPORA. "docstrings" (English technical prose), "sources" (Python) and "embedded"
    (both, with C headers and documentation files) are made of pinned packages and the standard
    library. They need no network.
    vocab_size: the size of the byte-level BPE that is trained on the train split, including its
    three special tokens. With `tokenizer` it is the largest size that this may have.
    tokenizer: a tokenizer.json or a hub id, to be used instead of a new BPE. The paper's is
    "EleutherAI/gpt-neox-20b". It is the default for "pile" with a vocab_size of 50,432, as in the
    presets paper and paper-1b, where the default of max_tokens is 5B.
    cache_dir: the default is $SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache.
    max_tokens: the corpus ends before the document that would exceed this number. By default there
    is no cap, except 50M for streamed data sets.

    Raises ValueError for an unknown name or a vocabulary that does not fit, FileNotFoundError for a
    path without text, ConnectionError if the hub cannot be reached, and OSError if the cache cannot
    be written.
    """
    vocab_size = integer("vocab_size", vocab_size, least=SMALLEST_VOCABULARY)
    if max_tokens is not None:
        max_tokens = integer("max_tokens", max_tokens, least=1)
    if name == "pile" and tokenizer is None and vocab_size == sources.NEOX_PADDED:
        tokenizer = sources.NEOX_TOKENIZER
        max_tokens = max_tokens or sources.PILE_TOKENS
    name = located(name)
    documents, version = _source(name)
    if version == STREAMED:
        max_tokens = max_tokens or HUB_TOKENS
    # The folder's name is a hash of everything that the token files depend on.
    key = json.dumps([FORMAT, name, vocab_size, tokenizer, max_tokens, version])
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:]
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = Path(cache_dir or cache_root()) / f"{slug}-{vocab_size}-{digest}"
    # A folder that is intact is opened. Otherwise it is built anew.
    if folder.exists():
        try:
            return Corpus(folder)
        except ValueError as error:
            warnings.warn(
                f"token cache of corpus {name!r} is damaged and is built again: {error}",
                stacklevel=2,
            )
    with written_whole(folder, "token files", _is_whole) as new:
        if name.startswith("packed:"):
            unpack(Path(name.removeprefix("packed:")), new)
        else:
            _tokenise(new, name, documents(), vocab_size, tokenizer, max_tokens)
    return Corpus(folder)


def _source(name: str) -> tuple[Callable[[], Iterator[str]], object]:
    """What reads the documents of a corpus, and their version (such as versions of packages).

    Raises ValueError for an unknown name, with the list of known ones.
    """
    kind, _, rest = name.partition(":")
    if name in EMBEDDED:
        return EMBEDDED[name], [platform.python_version(), text_versions()]
    if name == "pile" or (kind == "pile" and rest in sources.PILE_WEIGHTS):
        return partial(sources.pile, rest), STREAMED
    if kind == "hub" and rest:
        parts = rest.split("/")  # owner, name, and a config whose name may contain slashes
        dataset = "/".join(parts[:2])
        config = "/".join(parts[2:]) or None
        return partial(sources.hub, dataset, config), STREAMED
    if kind in ("path", "packed") and rest:
        files = [Path(rest)]
        if kind == "path":
            files = local_files(Path(rest))
        version = []
        for file in files:
            stat = file.stat()
            version.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
        return partial(sources.local, files), ["line ends are LF", version]
    message = f"unknown corpus {name!r}; there are: {', '.join(CORPORA)}"
    if name and os.path.exists(os.path.expanduser(name)):
        message += f"; for the text in that folder or file say 'path:{name}'"
    raise Refused(message)


def text_versions() -> dict[str, str | None]:
    """The version of each distribution whose text is embedded, or None if it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(sources.DISTRIBUTIONS)
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _tokenise(
    folder: Path,
    name: str,
    documents: Iterator[str],
    vocab_size: int,
    tokenizer_name: str | None,
    max_tokens: int | None,
) -> None:
    """Split, tokenise and write the documents of a corpus into `folder`.

    A sample of the first documents is read ahead. It trains the tokenizer, and it shows whether the
    corpus is small (`_thresholds`).
    """
    # The tokenizer is loaded before any document is read, so that a wrong name costs no time.
    tokenizer = load_tokenizer(tokenizer_name, vocab_size) if tokenizer_name else None
    # The sample consists of the documents on which a tokenizer is trained.
    texts = _unique(documents)
    sample = []
    characters = 0
    for text in texts:
        sample.append(text)
        characters += len(text)
        if characters >= SAMPLE_CHARACTERS:
            break
    fractions = sorted(map(split_fraction, sample))
    thresholds = _thresholds(fractions, complete=characters < SAMPLE_CHARACTERS)

    def split_of(text: str) -> str:
        passed = bisect(thresholds, split_fraction(text))
        return ("probe", "valid", "train")[passed]

    # The tokenizer is trained on the train split only.
    if tokenizer is None:
        training = (text for text in sample if split_of(text) == "train")
        tokenizer = train_tokenizer(training, vocab_size)
    # A text that contains the string "<eos>" gets no special token for it.
    tokenizer.encode_special_tokens = True
    special = special_ids(tokenizer, tokenizer_name)
    vocabulary = tokenizer.get_vocab_size()
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    serialised = tokenizer.to_str().encode()
    (folder / "tokenizer.json").write_bytes(serialised)

    # Two corpora have one fingerprint if they have the same tokenizer and the same documents.
    fingerprint = hashlib.sha256(serialised)
    written = dict.fromkeys(SPLITS, 0)
    with tqdm(
        desc=f"tokenising {name}", unit="tokens", unit_scale=True, leave=False, disable=None
    ) as bar:
        for text, ids in _encode(tokenizer, chain(sample, texts)):
            split = split_of(text)
            size = len(ids) + 1
            # The cap never cuts a document in two.
            if max_tokens and sum(written.values()) + size > max_tokens:
                break
            document = np.array([*ids, special["eos_id"]], dtype=dtype)
            with (folder / f"{split}.bin").open("ab") as file:
                file.write(document.tobytes())
            fingerprint.update(text_digest(text))
            written[split] += size
            bar.update(size)
    lacking = [split for split, size in written.items() if size == 0]
    if lacking:
        raise Refused(
            f"corpus {name!r} has no document for {', '.join(lacking)} in "
            f"{sum(written.values())} tokens: give more text, in more files or lines, or a larger "
            "max_tokens"
        )
    meta = {
        "name": public_name(name),
        "vocab_size": vocabulary,
        "dtype": dtype,
        "fingerprint": fingerprint.hexdigest(),
    }
    write_meta(folder, meta | special)


def _unique(documents: Iterable[str]) -> Iterator[str]:
    """Each different document once, without empty ones. Lone surrogates are replaced by "?"."""
    seen = set()
    for document in documents:
        text = document.encode("utf-8", "replace").decode()
        digest = text_digest(text)
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def _encode(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[tuple[str, list[int]]]:
    """Each text with its token ids, without special tokens.

    Many texts are encoded at once, because the tokenizer works on them in parallel.
    """
    while batch := list(islice(texts, BATCH_DOCUMENTS)):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            yield text, encoding.ids


def _thresholds(ranked: list[float], complete: bool) -> tuple[float, float]:
    """Two thresholds of `split_fraction`: documents below the first are for probing, those between
    the two for validation.

    ranked: the sorted fractions of the sample. complete: whether the sample is the whole corpus.
    The thresholds are SHARE and twice SHARE. If the corpus is so small that its share would be less
    than HELD_OUT documents, they are chosen so that each split gets HELD_OUT, or a fifth of all
    documents if that is less.
    """
    documents = len(ranked)
    if not complete or SHARE * documents >= HELD_OUT:
        return SHARE, 2 * SHARE
    count = max(1, min(HELD_OUT, documents // 5))
    # With one or two documents the indices below would be out of range. `_tokenise` then finds a
    # split without documents, and says so.
    ranked = [*ranked, 1.0, 1.0, 1.0]
    return ranked[count], ranked[2 * count]


def _is_whole(folder: Path) -> bool:
    try:
        verified(folder)
    except ValueError:
        return False
    return True


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json, with one SHA-256 over its contents and the other files of the folder."""
    whole = meta | {"sha256": _digest_of_all(folder, meta)}
    (folder / "meta.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")


def verified(folder: Path) -> Meta:
    """The contents of a cache folder's meta.json.

    A process reads the files once, and again if a size or a time has changed: the paper's text has
    10 GB. Raises ValueError if a file of the folder is missing or has changed.
    """
    state = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            status = entry.stat()
            state.append((entry.name, status.st_size, status.st_mtime_ns))
    return dict(_verified(folder, tuple(sorted(state))))


@lru_cache(maxsize=32)
def _verified(folder: Path, state: tuple[tuple[str, int, int], ...]) -> Meta:
    try:
        text = (folder / "meta.json").read_text(encoding="utf-8")
        meta: Meta = json.loads(text)
        whole = meta.pop("sha256") == _digest_of_all(folder, meta)
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError, AttributeError):
        whole = False
    require(whole, f"the files of {folder.name} are not as they were written")
    return meta


def _digest_of_all(folder: Path, meta: Meta) -> str:
    whole = hashlib.sha256(json.dumps(meta).encode())
    for path in sorted(folder.iterdir()):
        if path.name == "meta.json":
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        whole.update(path.name.encode() + digest.digest())
    return whole.hexdigest()


def pack_corpus(corpus: Corpus, file: str | Path) -> None:
    """Write a corpus as one .tar.xz file, to carry it to another machine.

    load_corpus("packed:<file>", vocab_size) opens it there. It has the same tokens, tokenizer and
    fingerprint.
    """
    with tarfile.open(file, "w:xz") as tar:
        tar.add(corpus.folder, arcname=".")


def unpack(file: Path, folder: Path) -> None:
    """Unpack a file of `pack_corpus` into a folder.

    Only the five files of a corpus are taken, by their names: nothing in the archive says where
    they are written. Raises ValueError if it has anything else, or is not complete.
    """
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name == "." and member.isdir():  # the folder itself
                    continue
                require(name in PACKED, f"{short(member.name)} is none of {', '.join(PACKED)}")
                source = tar.extractfile(member) if member.type in PLAIN else None
                if source is None:
                    raise Refused(f"{name} is no plain file")
                most = PACKED[name]
                size = f"{name} has {member.size:,} bytes, and at most {most:,} are unpacked"
                require(member.size <= most, size)
                require(not (folder / name).exists(), f"{name} is there twice")
                with (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        verified(folder)
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as error:
        raise Refused(
            f"{file} is not a complete file of pack_corpus: {first_line(error)}"
        ) from error
