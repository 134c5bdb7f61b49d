"""Cache folders of tokenised corpora: written whole or not at all, verified when read, packed to be carried."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkutils.checks import require

if TYPE_CHECKING:
    from sinkutils.data.corpus import Corpus

SPLITS = ("train", "valid", "probe")
CACHE_FILES = ("meta.json", "tokenizer.json", *(f"{split}.bin" for split in SPLITS))
HASHED = "hashed.json"  # of each file that was hashed: its digest, and its size and time of change then
ABANDONED_SECONDS = 86_400


def cache_root() -> Path:
    """$SINKUTILS_CACHE, else sinkutils below $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SINKUTILS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinkutils"


def write_whole(folder: Path, name: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder and give it its name when it is complete and on disk.

    A process that builds the same corpus at the same time does so in its own folder; the first to finish wins.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(".build-*"):  # left by processes that were killed
            if _is_abandoned(old):
                shutil.rmtree(old, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(prefix=".build-", dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the token cache below {root}: set SINKUTILS_CACHE") from error
    try:
        with scratch:
            new = Path(scratch.name)
            build(new)
            for file in new.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
            new.chmod(0o755)  # a temporary folder is its owner's alone
            _put_in_place(new, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason = f"no room for the token cache of {name!r} below {root}: free some or set SINKUTILS_CACHE"
        raise OSError(error.errno, reason) from error


def _is_abandoned(build: Path) -> bool:
    """Whether nothing in a build has changed for long: its folder's own time stands still while a file in it grows."""
    with contextlib.suppress(OSError):  # it has just got its name, or is of another user
        newest = max(path.stat().st_mtime for path in (build, *build.iterdir()))
        return time.time() - newest > ABANDONED_SECONDS
    return False


def _put_in_place(new: Path, folder: Path) -> None:
    try:
        new.rename(folder)
    except OSError:
        try:
            verified(folder)  # another process was faster
        except ValueError:
            damaged = folder.rename(new.with_name(f"{new.name}-damaged"))
            new.rename(folder)
            shutil.rmtree(damaged, ignore_errors=True)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with the SHA-256 of every other file in the folder and of itself."""
    files = [file for file in sorted(folder.iterdir()) if file.name != HASHED]
    states = {file.name: [_file_digest(file), *file_state(file)] for file in files}
    meta = meta | {"files": {name: digest for name, (digest, *_) in states.items()}}
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": _meta_digest(meta)}, indent=1), encoding="utf-8")
    _write_hashed(folder, states)


def file_state(file: Path) -> list[int]:
    """Size and time of change, which tell a file from what stood there before."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def verified(folder: Path) -> dict[str, Any]:
    """meta.json of a cache folder. Raises ValueError where a file is missing or not as it was written, PermissionError
    where it may not be read.

    A file is hashed once (the Pile's take 10 GB), and again when its size or time of change is another one.
    """
    try:
        hashed = json.loads((folder / HASHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        hashed = {}
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta.pop("sha256") != _meta_digest(meta):
            raise ValueError("meta.json does not match its checksum")
        states = {name: [digest, *file_state(folder / name)] for name, digest in meta["files"].items()}
        for name, state in states.items():
            if hashed.get(name) != state and _file_digest(folder / name) != state[0]:
                raise ValueError(f"{name} does not match its checksum")
    except PermissionError:  # nothing is damaged, and it could not be replaced
        raise
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if hashed != states:
        _write_hashed(folder, states)
    return meta


def pack_corpus(corpus: Corpus, file: str | Path) -> None:
    """Write a corpus as one compressed file (a tar, by xz), whole or not at all, to be carried to another machine.

    load_corpus("packed:<file>", vocab_size) opens it there: the same tokens, tokenizer and fingerprint.
    """
    folder, file = corpus.folder, Path(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    sizes = {name: (folder / name).stat().st_size for name in CACHE_FILES}
    # Tuned to 16-bit tokens (lp, pb: aligned to two bytes); documents are in random order, so the window is as large
    # as the files, up to 256 MiB (which is what reading takes; writing takes ten times as much).
    window = min(max(sum(sizes.values()), 2**16), 2**28)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": window, "lc": 3, "lp": 1, "pb": 1}]
    try:
        with lzma.open(temporary, "wb", filters=filters) as xz, tarfile.open(fileobj=xz, mode="w|") as tar:
            for name, size in sizes.items():
                member = tarfile.TarInfo(name)
                member.size = size
                with (folder / name).open("rb") as opened:
                    tar.addfile(member, opened)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def unpack(file: Path, vocab_size: int, folder: Path) -> None:
    """The reverse of `pack_corpus`."""
    try:
        with lzma.open(file) as xz, tarfile.open(fileobj=xz, mode="r|") as tar:
            for member in tar:
                if member.name in CACHE_FILES:
                    tar.extract(member, folder, filter="data")
        meta = verified(folder)
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is not a complete file of pack_corpus: {error}") from error
    size = meta["vocab_size"]
    require(size <= vocab_size, f"{file} has a vocabulary of {size}: vocab_size must be at least that")


def _meta_digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def _write_hashed(folder: Path, states: dict[str, list]) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed each time; half a file counts as none
        (folder / HASHED).write_text(json.dumps(states), encoding="utf-8")


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
