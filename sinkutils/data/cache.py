"""Folders of token files: written whole or not at all, checked when they are opened, packed to be
carried elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkutils.checks import first_line, require

if TYPE_CHECKING:
    from sinkutils.data.corpus import Corpus

Meta = dict[str, Any]  # what meta.json says
SPLITS = ("train", "valid", "probe")


def cache_root() -> Path:
    """$SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sinkutils")
    return Path(os.environ.get("SINKUTILS_CACHE") or usual)


@contextlib.contextmanager
def written_whole(folder: Path, what: str = "token files") -> Iterator[Path]:
    """A temporary folder to fill, beside `folder`, which gets that name when this is left without
    an error.

    Processes that build the same thing at the same time do so in a folder each; the first to finish
    wins. A folder of that name that is damaged gives way. Raises OSError, with what to do about it,
    where there is no room or no permission.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".build-", dir=root, ignore_cleanup_errors=True
        ) as scratch:
            new = Path(scratch, "whole")
            new.mkdir()
            yield new
            if os.path.lexists(folder) and not _is_whole(folder):
                folder.rename(Path(scratch, "damaged"))
            if not folder.exists():
                new.rename(folder)
    except OSError as error:
        # One of our own has its reason, and one about a file elsewhere, such as a text, is not
        # about the cache.
        if error.errno is None or not _below(error.filename, root):
            raise
        raise OSError(
            error.errno,
            f"cannot write {what} below {root} ({error.strerror}): make room there or set "
            "SINKUTILS_CACHE",
        ) from error


def _is_whole(folder: Path) -> bool:
    try:
        verified(folder)
    except ValueError:
        return False
    return True


def _below(file: object, root: Path) -> bool:
    """Whether an error is about `root`, a file below it or a folder above, or does not say about
    which.
    """
    if not isinstance(file, str | Path):
        return True
    path, root = Path(file).absolute(), root.absolute()
    return path.is_relative_to(root) or root.is_relative_to(path)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json, with one SHA-256 of what it says and of the other files in the folder."""
    whole = meta | {"sha256": _digest_of_all(folder, meta)}
    (folder / "meta.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")


def verified(folder: Path) -> Meta:
    """meta.json of a cache folder.

    Raises ValueError where a file is missing or not as it was written.
    """
    try:
        meta: Meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        whole = meta.pop("sha256") == _digest_of_all(folder, meta)
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError, AttributeError):
        whole = False
    require(whole, f"the files of {folder.name} are not as they were written")
    return meta


def _digest_of_all(folder: Path, meta: Meta) -> str:
    whole = hashlib.sha256(json.dumps(meta).encode())
    for path in sorted(folder.iterdir()):
        if path.name != "meta.json":
            with path.open("rb") as file:
                whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def pack_corpus(corpus: Corpus, file: str | Path) -> None:
    """Write a corpus as one .tar.xz file, to be carried to another machine.

    load_corpus("packed:<file>", vocab_size) opens it there: the same tokens, tokenizer and
    fingerprint.
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
        raise ValueError(
            f"{file} is not a complete file of pack_corpus: {first_line(error)}"
        ) from error
