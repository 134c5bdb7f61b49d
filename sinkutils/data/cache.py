"""Folders of token files: written whole or not at all, checked when they are opened, packed to be carried elsewhere."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkutils.data.corpus import Corpus

SPLITS = ("train", "valid", "probe")


def cache_root() -> Path:
    """$SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SINKUTILS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkutils"


def write_whole(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder beside `folder`, which gets that name when it is complete.

    Processes that build the same corpus at the same time do so in a folder each; the first to finish wins. Raises
    OSError, with what to do about it, where there is no room or no permission.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=root, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch, "corpus")
            new.mkdir()
            build(new)
            if not folder.exists():
                new.rename(folder)
    except OSError as error:
        if error.errno is None:  # of our own, with its reason
            raise
        reason = f"cannot write token files below {root} ({error.strerror})"
        raise OSError(error.errno, f"{reason}: make room there or set SINKUTILS_CACHE") from error


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with the SHA-256 of every other file in the folder and of itself."""
    meta = meta | {"files": {file.name: _file_digest(file) for file in sorted(folder.iterdir())}}
    whole = meta | {"sha256": _digest(json.dumps(meta).encode())}
    (folder / "meta.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")


def verified(folder: Path) -> dict[str, Any]:
    """meta.json of a cache folder. Raises ValueError where a file is missing or not as it was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        whole = meta.pop("sha256") == _digest(json.dumps(meta).encode())
        whole = whole and all(_file_digest(folder / name) == sha for name, sha in meta["files"].items())
    except (FileNotFoundError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"the files of {folder.name} are not as they were written")
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


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
