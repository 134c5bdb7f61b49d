"""Where text comes from: embedded, hub or local text as token files on disk, split by document."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm

from sinkutils import embedded, external

SPLITS = ("train", "valid", "probe")
SPECIAL_TOKENS = ["<eos>", "<bos>", "<fix>"]  # ids 0, 1, 2 of the tokenizers trained here
PROBE_SHARE, VALID_SHARE = 0.02, 0.02  # of the documents, by the hash of the text
SMALL_SHARE = 0.05  # of each where there are fewer than SMALL documents
SMALL = 1000
SAMPLE_CHARACTERS = 20_000_000  # the tokenizer is trained on the first documents, up to this size
BATCH_CHARACTERS = 2_000_000
HUB_TOKENS = 50_000_000  # default cap of a corpus that is streamed
ABANDONED_SECONDS = 86_400
FORMAT = 1  # raised when the files or the way they are made change


class Corpus:
    """Token files of one corpus: documents in three splits that never overlap, each document followed by EOS.

    Attributes: name, vocab_size, tokenizer, eos_id, bos_id, fix_id (x_fix of Section 5, a token that occurs in no
    text), first_text_id (the first id that is not special), fingerprint (SHA-256 of text and tokenizer).
    """

    def __init__(self, folder: Path) -> None:
        """Open a cache folder. Raises ValueError where it is not complete and intact."""
        meta = _verified(folder)
        self.name: str = meta["name"]
        self.fingerprint: str = meta["fingerprint"]
        self.vocab_size: int = meta["vocab_size"]
        self.eos_id: int = meta["eos_id"]
        self.bos_id: int = meta["bos_id"]
        self.fix_id: int = meta["fix_id"]
        self.first_text_id: int = meta["first_text_id"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True  # "<eos>" written in a text is text
        self._tokens: dict[tuple[str, bool], np.ndarray] = {
            (split, False): np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r") for split in SPLITS
        }

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(self.tokens(split)):,}" for split in SPLITS)
        return f"Corpus({self.name!r}, vocab_size={self.vocab_size}, tokens: {sizes})"

    def tokens(self, split: str, bos: bool = False) -> np.ndarray:
        """The documents of a split, each followed by EOS and, with `bos`, preceded by BOS: (N,) unsigned."""
        _check_split(split)
        if (split, bos) not in self._tokens:
            tokens = self._tokens[split, False]
            starts = np.concatenate([[0], self._ends(split)[:-1] + 1])
            self._tokens[split, bos] = np.insert(tokens, starts, self.bos_id)
        return self._tokens[split, bos]

    def documents(self, split: str, limit: int | None = None) -> Iterator[np.ndarray]:
        """The documents of a split (the first `limit`), each (N,), without EOS."""
        tokens, start = self.tokens(split), 0
        for end in self._ends(split)[:limit]:
            yield np.asarray(tokens[start:end])
            start = end + 1

    def texts(self, split: str, limit: int | None = None) -> Iterator[str]:
        """The documents of a split as text."""
        return (self.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in self.documents(split, limit))

    def _ends(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.tokens(split) == self.eos_id)


@dataclass(frozen=True)
class Source:
    """What a corpus is made of: its documents, what they depend on, and a default cap on the tokens."""

    documents: Callable[[bool], Iterator[str]]
    version: Callable[[], object]
    max_tokens: int | None = None


EMBEDDED = {
    "docstrings": embedded.docstrings,
    "sources": embedded.sources,
    "embedded": embedded.everything,
    **{f"domain:{name}": partial(embedded.domain, name) for name in embedded.DOMAINS},
}


def corpus_names() -> list[str]:
    """What load_corpus takes: names, and forms with what to fill in between < and >."""
    return [
        "docstrings",
        "sources",
        "embedded",
        *(f"domain:{name}" for name in embedded.DOMAINS),
        "wikitext",
        "pile",
        "pile:<domain>",
        "hub:<dataset id>[/<config>]",
        "path:<folder or file>",
        "packed:<file of pack_corpus>",
    ]


def load_corpus(
    name: str = "docstrings",
    vocab_size: int = 1024,
    *,
    tokenizer: str | None = None,
    cache_dir: str | Path | None = None,
    max_tokens: int | None = None,
    progress: bool = True,
) -> Corpus:
    """Open a corpus from the cache, or build it there.

    name: one of corpus_names(). "docstrings" (English technical prose), "sources" (Python) and "embedded" (both, C
    headers and documentation files) are the text of the installed packages and need no network.
    vocab_size: of the byte-level BPE that is trained on the train split, its three special tokens included; with
    `tokenizer`, the most that it may have.
    tokenizer: a tokenizer.json or a hub id ("EleutherAI/gpt-neox-20b", the paper's) to use instead.
    cache_dir: default $SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache.
    max_tokens: stop before the document that would exceed it (default: no cap; 50M for hub data sets).

    Raises ValueError for an unknown name or a vocabulary that does not fit, FileNotFoundError for a path without
    text, ConnectionError where the hub cannot be reached, OSError where the cache cannot be written.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if tokenizer is None and vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (256 bytes and the special tokens), got {vocab_size}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be positive or None, got {max_tokens}")
    build: Callable[[Path], None]
    if name.startswith("packed:"):
        file = Path(name.removeprefix("packed:"))
        if not file.is_file():
            raise FileNotFoundError(f"corpus {name}: there is no such file; pack_corpus writes one")
        version: object = [file.stat().st_size, file.stat().st_mtime_ns]
        build = partial(_unpack, file)
    else:
        source = _source(name)
        version = source.version()
        max_tokens = max_tokens or source.max_tokens
        build = partial(_build, name, source.documents(progress), vocab_size, tokenizer, max_tokens, progress)
    key = json.dumps([FORMAT, name, vocab_size, tokenizer, max_tokens, version])
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:]
    root = Path(cache_dir) if cache_dir else _cache_root()
    folder = root / f"{slug}-{vocab_size}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if folder.exists():
        try:
            return Corpus(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"token cache of corpus {name!r} is damaged and is built again: {error}", stacklevel=2)
            shutil.rmtree(folder, ignore_errors=True)
    _write_whole(folder, name, build)
    return Corpus(folder)


def domain_documents(name: str, tokenizer: Tokenizer, n: int = 100, min_tokens: int = 64) -> list[np.ndarray]:
    """n documents of one of embedded.DOMAINS with at least min_tokens tokens, each (N,), for Fig. 9.

    The documents whose hash is lowest come first, and it is by the same hash that a corpus keeps its probe and
    valid splits apart: as long as 2 % of the domain are n documents, none is in a train split.
    Raises ValueError where the machine has fewer than n.
    """
    texts = sorted(embedded.domain(name, progress=False), key=lambda text: _fraction(_digest(text)))
    found = []
    for text in texts:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
        if len(ids) >= min_tokens:
            found.append(ids)
        if len(found) == n:
            return found
    raise ValueError(f"domain {name!r} has {len(found)} documents of {min_tokens} tokens here, {n} were asked for")


def pack_corpus(corpus: Corpus, file: str | Path) -> None:
    """Write a corpus as one compressed file for a machine that lacks its text: load_corpus("packed:<file>")."""
    raise NotImplementedError


def _unpack(file: Path, folder: Path) -> None:
    raise NotImplementedError


def _source(name: str) -> Source:
    kind, _, rest = name.partition(":")
    if name in EMBEDDED:
        return Source(EMBEDDED[name], embedded.installed_versions)
    if name == "wikitext":
        return _hub_source(lambda: external.hub("Salesforce/wikitext", "wikitext-103-raw-v1"))
    if name == "pile":
        return _hub_source(external.pile)
    if kind == "pile" and rest in external.PILE_WEIGHTS:
        return _hub_source(lambda: external.pile_domain(rest))
    if kind == "hub" and rest:
        owner, *more = rest.split("/", 2)
        dataset, config = "/".join([owner, *more[:1]]), more[1] if len(more) > 1 else None
        return _hub_source(lambda: external.hub(dataset, config))
    if kind == "path" and rest:
        path = Path(rest).expanduser()
        return Source(
            lambda progress: external.local(path),
            lambda: [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in external.local_files(path)],
        )
    hint = f" (domains of the Pile: {', '.join(external.PILE_WEIGHTS)})" if kind == "pile" else ""
    raise ValueError(f"unknown corpus {name!r}; there are: {', '.join(corpus_names())}{hint}")


def _hub_source(documents: Callable[[], Iterator[str]]) -> Source:
    return Source(lambda progress: documents(), lambda: "hub", HUB_TOKENS)


def _build(
    name: str,
    documents: Iterator[str],
    vocab_size: int,
    tokenizer_name: str | None,
    max_tokens: int | None,
    progress: bool,
    folder: Path,
) -> None:
    """Split, tokenise and write the documents into `folder`. The first ones, read ahead, train the tokenizer."""
    unique = _unique(documents)
    sample, size = [], 0
    for digest, text in unique:
        sample.append((digest, text))
        size += len(text)
        if size >= SAMPLE_CHARACTERS:
            break
    if len(sample) < len(SPLITS):
        raise ValueError(
            f"corpus {name!r} has {len(sample)} different documents and needs at least {len(SPLITS)}, one for each "
            f"of {', '.join(SPLITS)}: give more text, or cut it into more files or lines"
        )
    complete = size < SAMPLE_CHARACTERS
    probe_below, valid_below = _thresholds([_fraction(digest) for digest, _ in sample], complete)

    def split_of(digest: bytes) -> str:
        fraction = _fraction(digest)
        return "probe" if fraction < probe_below else "valid" if fraction < valid_below else "train"

    if tokenizer_name:
        tokenizer = _load_tokenizer(tokenizer_name)
    else:
        tokenizer = _train_tokenizer((text for digest, text in sample if split_of(digest) == "train"), vocab_size)
    tokenizer.encode_special_tokens = True
    meta = _special_ids(tokenizer, tokenizer_name)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found > vocab_size:
        raise ValueError(f"tokenizer {tokenizer_name!r} has {found} tokens: vocab_size must be at least that")
    dtype = "uint16" if found <= 2**16 else "uint32"
    serialised = tokenizer.to_str().encode()
    (folder / "tokenizer.json").write_bytes(serialised)

    fingerprint = hashlib.sha256(serialised)
    written = 0
    files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    bar = tqdm(desc=f"tokenising {name}", unit="tokens", unit_scale=True, disable=not progress, leave=False)
    with ExitStack() as stack:
        for opened in (*files.values(), bar):
            stack.enter_context(opened)
        for batch in _batches(chain(sample, unique)):
            encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            for (digest, _), encoding in zip(batch, encodings, strict=True):
                ids = np.array([*encoding.ids, meta["eos_id"]], dtype=dtype)
                if max_tokens and written + len(ids) > max_tokens:
                    break
                files[split_of(digest)].write(ids.tobytes())
                fingerprint.update(digest)
                written += len(ids)
                bar.update(len(ids))
            else:
                continue
            break
    empty = [split for split in SPLITS if (folder / f"{split}.bin").stat().st_size == 0]
    if empty:
        raise ValueError(
            f"corpus {name!r} has no document for {', '.join(empty)} in {written} tokens: give more text or more max_tokens"
        )
    meta |= {"name": name, "vocab_size": found, "dtype": dtype, "fingerprint": fingerprint.hexdigest()}
    _write_meta(folder, meta)


def _unique(documents: Iterable[str]) -> Iterator[tuple[bytes, str]]:
    """Each different document once, with its hash; empty ones left out."""
    seen = set()
    for text in documents:
        digest = _digest(text)
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield digest, text


def _batches(documents: Iterable[tuple[bytes, str]]) -> Iterator[list[tuple[bytes, str]]]:
    batch, size = [], 0
    for digest, text in documents:
        batch.append((digest, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _fraction(digest: bytes) -> float:
    """A number in [0, 1) that decides on the split: a function of the text alone, so the same in every corpus."""
    return int.from_bytes(digest[-8:], "big") / 2**64


def _thresholds(fractions: list[float], complete: bool) -> tuple[float, float]:
    """Below which fraction a document is for probing, and below which for validation.

    Fixed shares, except where these are all the documents and so few that a share of them might be none.
    """
    if not complete or len(fractions) >= SMALL:
        return PROBE_SHARE, PROBE_SHARE + VALID_SHARE
    ranked = sorted(fractions)
    count = max(1, int(SMALL_SHARE * len(ranked)))
    return ranked[count], ranked[2 * count]


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the special tokens at ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer.json on disk, or the tokenizer of a hub model."""
    if Path(name).is_file():
        return Tokenizer.from_file(name)
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # the Rust client raises plain Exception
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ConnectionError(
            f"tokenizer {name!r} could not be read from the Hugging Face hub ({reason}). Check the id and the network, "
            "give the path of a tokenizer.json, or leave `tokenizer` out to train one"
        ) from error


def _special_ids(tokenizer: Tokenizer, name: str | None) -> dict[str, Any]:
    """The ids of EOS, BOS and x_fix. GPT-NeoX has no BOS of its own; x_fix is its padding token, as the authors' is."""
    known = {
        "eos_id": ("<eos>", "<|endoftext|>", "</s>", "<|end_of_text|>"),
        "bos_id": ("<bos>", "<|begin_of_text|>", "<s>", "<|endoftext|>"),
        "fix_id": ("<fix>", "<|padding|>", "<pad>", "<unk>"),
    }
    ids: dict[str, Any] = {}
    for key, tokens in known.items():
        found = [i for i in map(tokenizer.token_to_id, tokens) if i is not None]
        if not found:
            raise ValueError(f"tokenizer {name!r} has none of {', '.join(tokens)} to serve as {key}")
        ids[key] = found[0]
    special = {*ids.values(), *(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)}
    ids["first_text_id"] = next(i for i in count() if i not in special)
    return ids


def _cache_root() -> Path:
    if chosen := os.environ.get("SINKUTILS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkutils"


def _write_whole(folder: Path, name: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder and give it its name when it is complete and on disk.

    A process that builds the same corpus at the same time does so in its own folder; the first to finish wins.
    Raises OSError where the files cannot be written; nothing half-written is left then.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(".build-*"):  # left by processes that were killed
            if time.time() - old.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write the token cache below {folder.parent}: set SINKUTILS_CACHE"
        ) from error
    try:
        build(new)
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        try:
            new.rename(folder)
        except OSError:
            Corpus(folder)  # another process has built it meanwhile; raises where that is not so
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(
                error.errno,
                f"no room for the token cache of corpus {name!r} below {folder.parent}: free some or set SINKUTILS_CACHE",
            ) from error
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    files = sorted(folder.iterdir())
    meta["files"] = {f.name: {"bytes": f.stat().st_size, "sha256": _file_digest(f)} for f in files}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _verified(folder: Path) -> dict[str, Any]:
    """meta.json of a cache folder. Raises ValueError (or OSError, KeyError) where a file is not as it was written."""
    meta = json.loads((folder / "meta.json").read_text())
    for name, expected in meta["files"].items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {expected['bytes']}")
        if _file_digest(folder / name) != expected["sha256"]:
            raise ValueError(f"{name} does not match its checksum")
    return meta


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
