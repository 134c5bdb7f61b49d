"""Folders of token files: written whole or not at all, checked when they are opened, packed to be carried elsewhere."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkutils.data.corpus import Corpus

SPLITS = ("train", "valid", "probe")
WEEK = 7 * 86_400  # seconds: no corpus takes that long to build


def cache_root() -> Path:
    """$SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SINKUTILS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkutils"


def write_whole(folder: Path, name: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder beside `folder`, which gets that name when it is complete.

    Processes that build the same corpus at the same time do so in a folder each; the first to finish wins. Raises
    OSError, with what to do about it, where there is no room or no permission.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".build-*"):  # by processes that were killed
            if left.is_dir() and time.time() - left.stat().st_mtime > WEEK:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=root, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "corpus")
            new.mkdir()
            build(new)
            _put_in_place(new, folder)
    except OSError as error:
        if error.errno is None:  # of our own, with its reason
            raise
        reason = f"cannot write the token cache of {name!r} below {root} ({error.strerror})"
        raise OSError(error.errno, f"{reason}: make room there or set SINKUTILS_CACHE") from error


def _put_in_place(new: Path, folder: Path) -> None:
    """Rename; a folder that is there already stays if it is intact: another process was faster."""
    try:
        new.rename(folder)
    except OSError:
        try:
            verified(folder)
        except ValueError:
            folder.rename(new.with_name("damaged"))
            new.rename(folder)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with the SHA-256 of every other file in the folder and of itself."""
    meta = meta | {"files": {file.name: _file_digest(file) for file in sorted(folder.iterdir())}}
    whole = meta | {"sha256": _meta_digest(meta)}
    (folder / "meta.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")


def verified(folder: Path) -> dict[str, Any]:
    """meta.json of a cache folder.

    Raises ValueError where a file is missing or not as it was written, PermissionError where it may not be read.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta.pop("sha256") != _meta_digest(meta):
            raise ValueError("meta.json does not match its checksum")
        for name, digest in meta["files"].items():
            if _file_digest(folder / name) != digest:
                raise ValueError(f"{name} does not match its checksum")
    except PermissionError:  # nothing is damaged, and it could not be replaced
        raise
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return meta


def pack_corpus(corpus: Corpus, file: str | Path) -> None:
    """Write a corpus as one .tar.xz file, to be carried to another machine.

    load_corpus("packed:<file>", vocab_size) opens it there: the same tokens, tokenizer and fingerprint.
    """
    with tarfile.open(file, "w:xz") as tar:
        tar.add(corpus.folder, arcname=".")


def unpack(file: Path, folder: Path) -> None:
    """The reverse of `pack_corpus`. Raises ValueError for a file that is not whole."""
    try:
        with tarfile.open(file) as tar:
            tar.extractall(folder, filter="data")
        verified(folder)
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is not a complete file of pack_corpus: {error}") from error


def file_state(file: Path) -> list[int]:
    """Size and time of change, which tell a file from what stood there before."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _meta_digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    return _digest_of(file, *file_state(file))


@lru_cache(maxsize=64)  # a process opens a corpus several times: it reads the files once, unless they have changed
def _digest_of(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
